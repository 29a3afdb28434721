//! The model, and the async handle to the engine's thread.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_engine::Isa;
use baton_engine::backend::Backend;
use baton_engine::core::{Engine, EngineConfig};
use baton_engine::cpu::{CpuBackend, CpuConfig, CpuError};
use baton_engine::load::LoadObserver;
use baton_engine::thread::{CommandError, EngineHandle, EngineThread};
use baton_model_files::{ModelFile, ModelFileError};
use baton_tokenizer::{Tokenizer, TokenizerError};
use baton_types::{
    Error, KvLayout, ModelFingerprint, ModelSpec, NumericsVersion, RequestId, TransferId,
};
use tokio::sync::oneshot;

use crate::{IsaChoice, NodeConfig};

/// Between two attempts to tell a busy engine of a cancellation.
const CANCEL_AGAIN: Duration = Duration::from_millis(20);

/// The node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error(transparent)]
    Model(#[from] ModelFileError),
    #[error(transparent)]
    Backend(#[from] CpuError),
    #[error("{}: routers could not read the tokenizer: {error}", model.display())]
    Tokenizer { model: PathBuf, error: TokenizerError },
    #[error("a KV pool of {pool_mib} MiB holds no block of {block_bytes} bytes; raise kv_pool_mib")]
    PoolTooSmall { pool_mib: usize, block_bytes: usize },
    #[error("a KV pool of {pool_mib} MiB has more blocks than can be numbered; lower kv_pool_mib")]
    PoolTooLarge { pool_mib: usize },
    #[error("the tokenizer's data cannot be written as JSON: {0}")]
    Artifacts(#[from] serde_json::Error),
    #[error("the engine's thread cannot start: {0}")]
    Thread(#[from] std::io::Error),
    #[error("loading the model was interrupted")]
    Interrupted,
}

/// What others ask about the model.
#[derive(Debug)]
pub struct ModelInfo {
    pub spec: ModelSpec,
    pub layout: KvLayout,
    pub fingerprint: ModelFingerprint,
    pub numerics: NumericsVersion,
    pub kv_blocks: usize,
    pub isa: String,
    /// `ModelArtifacts` as JSON.
    pub artifacts_json: Vec<u8>,
    /// `ModelSpec` as JSON.
    pub spec_json: Vec<u8>,
}

/// An engine on its own thread. Clones speak to the same.
#[derive(Clone, Debug)]
pub struct EngineHost {
    handle: EngineHandle,
    model: Arc<ModelInfo>,
    epoch: Instant,
}

impl EngineHost {
    /// Loads the model and starts the engine; takes as long as the weights take to pack, where
    /// they are not packed yet. `observer` hears how it gets on.
    ///
    /// # Errors
    /// Where the model cannot be read or does not fit.
    pub async fn load(
        config: &NodeConfig,
        observer: Arc<dyn LoadObserver + Send>,
    ) -> Result<(Self, JoinHandle<()>), HostError> {
        let config = config.clone();
        tokio::task::spawn_blocking(move || Self::load_blocking(&config, &*observer))
            .await
            .map_err(|_| HostError::Interrupted)?
    }

    fn load_blocking(
        config: &NodeConfig,
        observer: &dyn LoadObserver,
    ) -> Result<(Self, JoinHandle<()>), HostError> {
        let began = Instant::now();
        let file = ModelFile::open(&config.model)?;
        // Beside one another: each takes some tenths of a second where nothing is to be packed.
        let (tokenizer, backend) = std::thread::scope(|scope| {
            let checking = scope.spawn(|| check_tokenizer(&file, config));
            let backend = make_backend(&file, config, observer);
            (checking.join(), backend)
        });
        tokenizer.map_err(|_| HostError::Interrupted)??;
        let (backend, isa) = backend?;
        let model = ModelInfo {
            spec: file.spec().clone(),
            layout: *backend.kv_layout(),
            fingerprint: file.fingerprint(),
            numerics: backend.numerics().clone(),
            kv_blocks: backend.kv_blocks(),
            isa,
            artifacts_json: serde_json::to_vec(file.artifacts())?,
            spec_json: serde_json::to_vec(file.spec())?,
        };
        file.forget_pages();
        let (held, context) =
            (model.kv_blocks * config.block_tokens as usize, model.spec.context_tokens);
        if held < context {
            tracing::warn!(
                "the KV pool holds {held} tokens, the model's context is {context}: longer \
                 requests are refused; raise kv_pool_mib"
            );
        }
        let engine = Engine::new(
            Box::new(backend),
            model.fingerprint,
            EngineConfig {
                max_sequences: config.max_sequences,
                max_waiting: config.max_waiting,
                prefill_chunk_tokens: config.prefill_chunk_tokens,
                mixed_prefill_tokens: config.mixed_prefill_tokens,
            },
        );
        let (handle, thread) = EngineHandle::spawn(engine, "engine")?;
        tracing::info!(
            model = %model.spec.name,
            fingerprint = %model.fingerprint,
            numerics = %model.numerics,
            isa = %model.isa,
            threads = config.threads_or_cores(),
            kv_blocks = model.kv_blocks,
            block_tokens = config.block_tokens,
            elapsed_ms = began.elapsed().as_millis() as u64,
            "model loaded"
        );
        Ok((Self { handle, model: Arc::new(model), epoch: Instant::now() }, thread))
    }

    pub fn model(&self) -> &Arc<ModelInfo> {
        &self.model
    }

    /// Milliseconds of this process's monotonic clock.
    pub fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    /// Runs a closure on the engine's thread and waits for its result. Where the caller goes
    /// away, the closure runs all the same.
    ///
    /// # Errors
    /// `ResourceExhausted` where too many wait, `Unavailable` where the engine has stopped.
    pub async fn ask<R: Send + 'static>(
        &self,
        question: impl FnOnce(&mut EngineThread) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let (answer, waiting) = oneshot::channel();
        self.tell(move |thread| {
            // The one who asked may have gone.
            let _unheard = answer.send(question(thread));
        })?;
        waiting.await.map_err(|_| stopped())
    }

    /// Runs a closure on the engine's thread, between two steps, and does not wait.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn tell(
        &self,
        command: impl FnOnce(&mut EngineThread) + Send + 'static,
    ) -> Result<(), Error> {
        self.handle.command(command).map_err(|error| match error {
            CommandError::Full => Error::exhausted(error.to_string(), 100),
            CommandError::Stopped => stopped(),
        })
    }

    /// Cancels a request, whether or not the engine has it (still). Where too many commands wait
    /// for the engine, it is told as soon as there is room: what nobody reads must not run on.
    pub fn cancel(&self, id: RequestId) {
        self.tell_for_sure(move |engine| {
            engine.cancel(id);
        });
    }

    /// Lets go of a prefix that travels, as [`cancel`](Self::cancel) does of a request.
    pub fn drop_prefix(&self, id: TransferId) {
        self.tell_for_sure(move |engine| {
            engine.drop_prefix(id);
        });
    }

    fn tell_for_sure(&self, what: impl Fn(&mut Engine) + Send + Copy + 'static) {
        let command = move |thread: &mut EngineThread| what(&mut thread.engine);
        if self.handle.command(command) != Err(CommandError::Full) {
            return;
        }
        // Without a runtime the process is ending, and the engine with it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let handle = self.handle.clone();
        runtime.spawn(async move {
            while handle.command(command) == Err(CommandError::Full) {
                tokio::time::sleep(CANCEL_AGAIN).await;
            }
        });
    }

    /// Ends the engine's thread.
    pub fn stop(&self) {
        if let Err(error) = self.handle.stop() {
            tracing::debug!(%error, "the engine has stopped before");
        }
    }
}

fn stopped() -> Error {
    Error::unavailable("the node's engine has stopped")
}

/// Routers encode and decode, with what nodes send them: a tokenizer that they cannot read is
/// found here, where the file is.
fn check_tokenizer(file: &ModelFile, config: &NodeConfig) -> Result<(), HostError> {
    let tokenizer = Tokenizer::from_artifacts(file.artifacts())
        .map_err(|error| HostError::Tokenizer { model: config.model.clone(), error })?;
    if let Some(problem) = tokenizer.chat_template_problem() {
        let model = config.model.display();
        tracing::warn!(%model, problem, "the chat template cannot be used: chats are refused");
    }
    Ok(())
}

fn make_backend(
    file: &ModelFile,
    config: &NodeConfig,
    observer: &dyn LoadObserver,
) -> Result<(CpuBackend, String), HostError> {
    let spec = file.spec();
    let layout = KvLayout {
        layers: spec.layers as u16,
        kv_heads: spec.kv_heads as u16,
        head_dim: spec.head_dim as u16,
        block_tokens: config.block_tokens,
        dtype: config.kv_dtype,
    };
    let block_bytes = layout.block_bytes();
    let pool_bytes = config.kv_pool_mib.checked_mul(1 << 20);
    let kv_blocks = pool_bytes.map_or(usize::MAX, |bytes| bytes / block_bytes);
    if u32::try_from(kv_blocks).is_err() {
        return Err(HostError::PoolTooLarge { pool_mib: config.kv_pool_mib });
    }
    if kv_blocks == 0 {
        return Err(HostError::PoolTooSmall { pool_mib: config.kv_pool_mib, block_bytes });
    }
    let backend = CpuBackend::load(
        file,
        CpuConfig {
            threads: config.threads_or_cores(),
            isa: match config.isa {
                IsaChoice::Auto => None,
                IsaChoice::Scalar => Some(Isa::Scalar),
                IsaChoice::Avx2 => Some(Isa::Avx2),
                IsaChoice::Avx512 => Some(Isa::Avx512),
            },
            block_tokens: config.block_tokens as usize,
            kv_dtype: config.kv_dtype,
            kv_blocks,
            max_step_tokens: config.prefill_chunk_tokens.max(config.max_sequences),
            max_logit_rows: config.max_sequences,
            weights_cache: config.weights_cache.clone(),
            weights_memory: config.weights_memory,
            ..CpuConfig::default()
        },
        observer,
    )?;
    let isa = format!("{:?}", backend.isa()).to_lowercase();
    Ok((backend, isa))
}
