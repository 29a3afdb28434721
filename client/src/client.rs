//! The connection, and the calls.

use std::path::PathBuf;
use std::time::Duration;

use baton_proto::v1::baton_client::BatonClient;
use baton_proto::v1::{
    ClusterStatus, DetokenizeRequest, GetClusterStatusRequest, ListModelsRequest, Model,
    TokenizeRequest,
};
use baton_types::{ErrorCode, TokenId};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::{ChatRequest, ClientError, GenerateRequest, GenerateStream};

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    pub connect_timeout: Duration,
    /// For calls that answer at once; generation is bounded by its own deadline.
    pub call_timeout: Duration,
    /// A call that failed before its first event is tried so often again, where its `ErrorCode`
    /// says that this can help.
    pub retries: u32,
    /// For `https://` endpoints.
    pub tls: Tls,
}

/// Certificates, as PEM files.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// Authority that signs the server's certificate.
    pub ca: Option<PathBuf>,
    /// The client's own certificate and key, where the server asks for them.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(30),
            retries: 3,
            tls: Tls::default(),
        }
    }
}

/// Speaks to a router. Cheap to clone; clones share the connection.
#[derive(Clone, Debug)]
pub struct Client {
    endpoint: String,
    channel: Channel,
    options: ClientOptions,
}

/// Answers to `GetClusterStatus` and prompts can be long.
const MESSAGE_MAX_BYTES: usize = 64 << 20;

const BACKOFF_FIRST: Duration = Duration::from_millis(200);

impl Client {
    /// Makes a client; it connects with the first call, and again after a loss. Must be called
    /// on a tokio runtime.
    ///
    /// # Errors
    /// `Endpoint` and `Tls` where they cannot be used.
    pub fn connect(endpoint: &str, options: ClientOptions) -> Result<Self, ClientError> {
        let bad = || ClientError::Endpoint(endpoint.to_string());
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            return Err(bad());
        }
        let mut made = Endpoint::from_shared(endpoint.to_string())
            .map_err(|_| bad())?
            .connect_timeout(options.connect_timeout)
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10))
            .tcp_nodelay(true);
        if endpoint.starts_with("https://") {
            let tls = tls_config(&options.tls)?;
            made = made.tls_config(tls).map_err(|error| ClientError::Tls(error.to_string()))?;
        }
        Ok(Self { endpoint: endpoint.to_string(), channel: made.connect_lazy(), options })
    }

    /// Generates from a raw prompt; returns with the first event, so that what fails before it
    /// can be tried again. Dropping the stream, or this future, cancels.
    ///
    /// # Errors
    /// What the server says; before the first event it has been tried again already.
    pub async fn generate(&self, request: GenerateRequest) -> Result<GenerateStream, ClientError> {
        let wire = request.into_wire();
        let call = || {
            let (mut client, wire) = (self.client(), wire.clone());
            async move { GenerateStream::begin(client.generate(wire).await?.into_inner()).await }
        };
        self.retrying(call, None).await
    }

    /// Generates from messages. Dropping the stream, or this future, cancels.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub async fn chat(&self, request: ChatRequest) -> Result<GenerateStream, ClientError> {
        let wire = request.into_wire();
        let call = || {
            let (mut client, wire) = (self.client(), wire.clone());
            async move { GenerateStream::begin(client.chat(wire).await?.into_inner()).await }
        };
        self.retrying(call, None).await
    }

    /// Models that can be asked for.
    ///
    /// # Errors
    /// What the server says.
    pub async fn list_models(&self) -> Result<Vec<Model>, ClientError> {
        let call = || async {
            let answer = self.client().list_models(ListModelsRequest {}).await?;
            Ok(answer.into_inner().models)
        };
        self.retrying(call, Some(self.options.call_timeout)).await
    }

    /// Text to ids, as `generate` does it.
    ///
    /// # Errors
    /// What the server says.
    pub async fn tokenize(&self, model: &str, text: &str) -> Result<Vec<TokenId>, ClientError> {
        let call = || async {
            let request = TokenizeRequest { model: model.into(), text: text.into() };
            Ok(self.client().tokenize(request).await?.into_inner().ids)
        };
        self.retrying(call, Some(self.options.call_timeout)).await
    }

    /// Ids to text.
    ///
    /// # Errors
    /// What the server says.
    pub async fn detokenize(&self, model: &str, ids: &[TokenId]) -> Result<String, ClientError> {
        let call = || async {
            let request = DetokenizeRequest { model: model.into(), ids: ids.to_vec() };
            Ok(self.client().detokenize(request).await?.into_inner().text)
        };
        self.retrying(call, Some(self.options.call_timeout)).await
    }

    /// Nodes, load and KV use.
    ///
    /// # Errors
    /// What the server says.
    pub async fn status(&self) -> Result<ClusterStatus, ClientError> {
        let call = || async {
            let answer = self.client().get_cluster_status(GetClusterStatusRequest {}).await?;
            Ok(answer.into_inner())
        };
        self.retrying(call, Some(self.options.call_timeout)).await
    }

    fn client(&self) -> BatonClient<Channel> {
        BatonClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_MAX_BYTES)
    }

    /// Tries again with growing waits, or after the time that the server names.
    async fn retrying<T, F>(
        &self,
        call: impl Fn() -> F,
        within: Option<Duration>,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let mut backoff = BACKOFF_FIRST;
        let mut left = self.options.retries;
        loop {
            let error = match bounded(call(), within).await {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            let ClientError::Baton(mut baton) = error else { return Err(error) };
            if left == 0 || !baton.code.is_retryable() {
                if baton.code == ErrorCode::Unavailable {
                    baton.message = format!(
                        "{}: {}; is this the router's gRPC address, and does it run?",
                        self.endpoint, baton.message
                    );
                }
                return Err(ClientError::Baton(baton));
            }
            left -= 1;
            let wait = baton.retry_after_ms.map_or(backoff, Duration::from_millis);
            tokio::time::sleep(wait).await;
            backoff *= 2;
        }
    }
}

async fn bounded<T>(
    call: impl Future<Output = Result<T, ClientError>>,
    within: Option<Duration>,
) -> Result<T, ClientError> {
    let Some(within) = within else { return call.await };
    tokio::time::timeout(within, call).await.unwrap_or_else(|_| {
        Err(ClientError::Baton(baton_types::Error::new(
            ErrorCode::DeadlineExceeded,
            format!("no answer within {} s", within.as_secs()),
        )))
    })
}

fn tls_config(tls: &Tls) -> Result<ClientTlsConfig, ClientError> {
    let read = |path: &PathBuf| {
        std::fs::read(path)
            .map_err(|error| ClientError::Tls(format!("{}: {error}", path.display())))
    };
    let mut config = ClientTlsConfig::new();
    if let Some(ca) = &tls.ca {
        config = config.ca_certificate(Certificate::from_pem(read(ca)?));
    }
    if let Some((certificate, key)) = &tls.identity {
        config = config.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(config)
}
