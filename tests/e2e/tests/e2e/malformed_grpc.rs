//! Acceptance 8, gRPC: malformed requests to the router's API and to the nodes' own get a clear
//! error; nothing panics, nothing hangs, nothing is held afterwards, and a good request works.

use std::time::Duration;

use baton_kv_transfer::message::{Body, Context, KvMessage};
use baton_proto::error::from_status;
use baton_proto::internal::decode_client::DecodeClient;
use baton_proto::internal::kv_source_client::KvSourceClient;
use baton_proto::internal::kv_staging_client::KvStagingClient;
use baton_proto::internal::kv_transfer_client::KvTransferClient;
use baton_proto::internal::node_client::NodeClient;
use baton_proto::internal::prefill_client::PrefillClient;
use baton_proto::internal::{
    AttachRequest, CancelRequest, DecodeRunRequest, GetModelArtifactsRequest, KvChunk,
    ModelArtifactsResponse, PrefillRunRequest, Request, ReserveRequest, SamplingParams,
    SendPrefixRequest, StopParams,
};
use baton_proto::v1::baton_client::BatonClient;
use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::{
    ChatRequest, DetokenizeRequest, GenerateRequest, Output, Sampling, Stop, TokenIds,
};
use baton_runtime::grpc::channel;
use baton_tests::cluster::{Cluster, Plan, Role, client};
use baton_tests::load::{self, Progress};
use baton_tests::{alone, wait};
use baton_types::{Epoch, ErrorCode, TransferId};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Status;
use tonic::transport::Channel;

const PLAN: Plan = Plan {
    etcd: 0,
    routers: 1,
    prefill: 1,
    decode: 1,
    router_config: "",
    node_config: "kv_pool_mib = 256\ngrant_expiry_ms = 1500",
};

const ANSWER_WITHIN: Duration = Duration::from_secs(10);
const VOCAB: u32 = 49_152;

/// Gathers what was not refused as it should be.
#[derive(Default)]
struct Refusals {
    count: usize,
    faults: Vec<String>,
}

impl Refusals {
    /// `says` is part of the message, or the name of the field.
    async fn expect<T>(
        &mut self,
        what: &str,
        code: ErrorCode,
        says: &str,
        call: impl Future<Output = Result<T, Status>>,
    ) {
        self.count += 1;
        let Err(status) = wait::in_time(ANSWER_WITHIN, what, call).await else {
            return self.faults.push(format!("{what}: was taken"));
        };
        let error = from_status(&status);
        let named = error.field.as_deref() == Some(says) || error.message.contains(says);
        if error.code != code || !named {
            self.faults.push(format!("{what}: {error:?}"));
        }
    }

    fn check(self) {
        let count = self.faults.len();
        assert!(count == 0, "{count} of {}:\n{}", self.count, self.faults.join("\n"));
    }
}

fn ids(ids: Vec<u32>) -> GenerateRequest {
    GenerateRequest { prompt: Some(Prompt::TokenIds(TokenIds { ids })), ..Default::default() }
}

async fn the_public_api(refusals: &mut Refusals, router: Channel) {
    use ErrorCode::{InvalidArgument, NotFound};
    let stop = |stop: Stop| GenerateRequest { stop: Some(stop), ..ids(vec![5]) };
    let sampling = |sampling| GenerateRequest { sampling: Some(sampling), ..ids(vec![5]) };
    let biased = std::collections::HashMap::from([(VOCAB, 1.0)]);
    let requests = [
        ("no prompt", "prompt", GenerateRequest::default()),
        ("an empty prompt", "prompt", ids(vec![])),
        ("an id out of the vocabulary", "prompt", ids(vec![1, VOCAB])),
        ("a prompt beyond the context", "prompt", ids(vec![5; 200_000])),
        (
            "temperature NaN",
            "temperature",
            sampling(Sampling { temperature: Some(f32::NAN), ..Default::default() }),
        ),
        (
            "temperature infinite",
            "temperature",
            sampling(Sampling { temperature: Some(f32::INFINITY), ..Default::default() }),
        ),
        ("top_p NaN", "top_p", sampling(Sampling { top_p: Some(f32::NAN), ..Default::default() })),
        (
            "a bias out of the vocabulary",
            "logit_bias",
            sampling(Sampling { logit_bias: biased, ..Default::default() }),
        ),
        ("no tokens", "max_tokens", stop(Stop { max_tokens: Some(0), ..Default::default() })),
        (
            "65 stop ids",
            "stop_token_ids",
            stop(Stop { stop_token_ids: vec![1; 65], ..Default::default() }),
        ),
        ("an empty stop", "stop", stop(Stop { stop: vec![String::new()], ..Default::default() })),
        (
            "n 4 billion",
            "n",
            GenerateRequest {
                output: Some(Output { n: Some(u32::MAX), ..Default::default() }),
                ..ids(vec![5])
            },
        ),
        (
            "a deadline of 0",
            "deadline_ms",
            GenerateRequest { deadline_ms: Some(0), ..ids(vec![5]) },
        ),
        (
            "a deadline beyond all",
            "deadline_ms",
            GenerateRequest { deadline_ms: Some(u64::MAX), ..ids(vec![5]) },
        ),
    ];
    let mut api = BatonClient::new(router);
    for (what, field, request) in requests {
        refusals.expect(what, InvalidArgument, field, api.generate(request)).await;
    }
    let other = GenerateRequest { model: "gpt-9".into(), ..ids(vec![5]) };
    refusals.expect("another model", NotFound, "model", api.generate(other)).await;
    let chat = api.chat(ChatRequest::default());
    refusals.expect("no messages", InvalidArgument, "messages", chat).await;
    let text = api.detokenize(DetokenizeRequest { model: String::new(), ids: vec![VOCAB] });
    refusals.expect("ids of no token", InvalidArgument, "ids", text).await;
}

/// What a router that behaves would send a node.
fn good(model: &ModelArtifactsResponse, id: u8) -> ReserveRequest {
    let request = Request {
        id: vec![id; 16].into(),
        prompt: (100..200).collect(),
        sampling: Some(SamplingParams {
            temperature: 1.0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            ..Default::default()
        }),
        stop: Some(StopParams { max_tokens: 8, ignore_eos: true, ..Default::default() }),
        choices: 1,
        deadline_ms: 60_000,
        ..Default::default()
    };
    ReserveRequest {
        request: Some(request),
        attempt: 1,
        fingerprint: model.fingerprint.clone(),
        numerics: model.numerics.clone(),
        ..Default::default()
    }
}

async fn reservations(refusals: &mut Refusals, decode: Channel, model: &ModelArtifactsResponse) {
    use ErrorCode::{FailedPrecondition, InvalidArgument, NotFound};
    let mut api = DecodeClient::new(decode);
    let reserve = |change: &dyn Fn(&mut Request)| {
        let mut wanted = good(model, 1);
        change(wanted.request.as_mut().expect("it has one"));
        wanted
    };
    for (what, says, wanted) in [
        ("no request", "request", ReserveRequest { request: None, ..good(model, 1) }),
        ("a short id", "request_id", reserve(&|request| request.id = vec![1; 15].into())),
        ("no sampling", "sampling", reserve(&|request| request.sampling = None)),
        ("no stop", "stop", reserve(&|request| request.stop = None)),
        ("no choices", "n", reserve(&|request| request.choices = 0)),
        ("70,000 choices", "request.choices", reserve(&|request| request.choices = 70_000)),
        ("no tokens", "prompt", reserve(&|request| request.prompt.clear())),
        ("an id out of the vocabulary", "prompt", reserve(&|request| request.prompt[5] = VOCAB)),
        (
            "a deadline beyond all",
            "deadline_ms",
            reserve(&|request| request.deadline_ms = u64::MAX),
        ),
    ] {
        refusals.expect(what, InvalidArgument, says, api.reserve(wanted)).await;
    }
    let delivered = baton_proto::internal::Delivered { ids: vec![1; 3], finished: false };
    let wanted = ReserveRequest { delivered: vec![delivered; 5], ..good(model, 8) };
    refusals
        .expect("more answers than choices", InvalidArgument, "delivered", api.reserve(wanted))
        .await;
    let wanted = ReserveRequest { fingerprint: vec![7; 32].into(), ..good(model, 1) };
    refusals.expect("another model", FailedPrecondition, "0707", api.reserve(wanted)).await;
    let wanted = ReserveRequest { numerics: "abacus/1".into(), ..good(model, 1) };
    refusals.expect("other arithmetic", FailedPrecondition, "abacus", api.reserve(wanted)).await;
    let run = DecodeRunRequest { request_id: vec![9; 16].into(), attempt: 1 };
    refusals.expect("an unknown request", NotFound, "0909", api.run(run)).await;
    let run = DecodeRunRequest { request_id: vec![9; 3].into(), attempt: 1 };
    refusals.expect("an id of 3 bytes", InvalidArgument, "request_id", api.run(run)).await;
    // A reservation that nobody runs, and what does not fit to it.
    let wanted = ReserveRequest { prefill_incarnation: 5, attempt: 3, ..good(model, 2) };
    api.reserve(wanted.clone()).await.expect("a good reservation");
    refusals.expect("an attempt twice", FailedPrecondition, "attempt 3", api.reserve(wanted)).await;
    let old = ReserveRequest { attempt: 1, ..good(model, 2) };
    refusals.expect("an old attempt", FailedPrecondition, "attempt 1", api.reserve(old)).await;
}

async fn prefills(
    refusals: &mut Refusals,
    prefill: Channel,
    decode: Channel,
    model: &ModelArtifactsResponse,
) {
    use ErrorCode::{FailedPrecondition, InvalidArgument};
    let mut nodes = PrefillClient::new(prefill);
    let wanted = ReserveRequest { prefill_incarnation: 77, ..good(model, 3) };
    let request = wanted.request.clone();
    let granted = DecodeClient::new(decode).reserve(wanted).await.expect("a good reservation");
    let grant = granted.into_inner().grant;
    let run = PrefillRunRequest {
        request,
        grant: grant.clone(),
        decode_address: "127.0.0.1:1".into(),
        fingerprint: model.fingerprint.clone(),
        numerics: model.numerics.clone(),
        prefix: None,
    };
    let other = |change: &dyn Fn(&mut Request)| {
        let mut other = run.clone();
        change(other.request.as_mut().expect("it has one"));
        other
    };
    for (what, code, says, run) in [
        (
            "no grant",
            InvalidArgument,
            "grant",
            PrefillRunRequest { grant: Bytes::new(), ..run.clone() },
        ),
        (
            "a grant of noise",
            InvalidArgument,
            "grant",
            PrefillRunRequest { grant: vec![0xa5; 300].into(), ..run.clone() },
        ),
        (
            "a grant cut off",
            InvalidArgument,
            "grant",
            PrefillRunRequest { grant: grant.slice(..grant.len() / 2), ..run.clone() },
        ),
        (
            "no request",
            InvalidArgument,
            "request",
            PrefillRunRequest { request: None, ..run.clone() },
        ),
        (
            "another model",
            FailedPrecondition,
            "0707",
            PrefillRunRequest { fingerprint: vec![7; 32].into(), ..run.clone() },
        ),
        (
            "a grant for another request",
            FailedPrecondition,
            "request",
            other(&|request| request.id = vec![4; 16].into()),
        ),
        (
            "a grant for another length",
            FailedPrecondition,
            "prompt tokens",
            other(&|request| request.prompt.truncate(50)),
        ),
        (
            "a grant for other choices",
            FailedPrecondition,
            " n ",
            other(&|request| request.choices = 2),
        ),
        ("a grant for another node", FailedPrecondition, "incarnation", run.clone()),
    ] {
        let call = async {
            let mut events = nodes.run(run).await?.into_inner();
            while events.message().await?.is_some() {}
            Ok::<_, Status>(())
        };
        refusals.expect(what, code, says, call).await;
    }
}

/// What is asked of a node's prefix cache, with a grant that a decode node made for a prompt.
async fn prefixes(refusals: &mut Refusals, decode: &Channel, model: &ModelArtifactsResponse) {
    use ErrorCode::{FailedPrecondition, InvalidArgument};
    let mut node = KvSourceClient::new(decode.clone());
    let wanted = ReserveRequest { prefill_incarnation: 77, ..good(model, 5) };
    let granted = DecodeClient::new(decode.clone()).reserve(wanted).await;
    let grant = granted.expect("a good reservation").into_inner().grant;
    let asked = SendPrefixRequest {
        tokens: (100..200).collect(),
        grant,
        kv_address: "127.0.0.1:1".into(),
        fingerprint: model.fingerprint.clone(),
        numerics: model.numerics.clone(),
        deadline_ms: 1_000,
        ..Default::default()
    };
    for (what, code, says, asked) in [
        (
            "no grant",
            InvalidArgument,
            "grant",
            SendPrefixRequest { grant: Bytes::new(), ..asked.clone() },
        ),
        (
            "a grant of noise",
            InvalidArgument,
            "grant",
            SendPrefixRequest { grant: vec![0xa5; 300].into(), ..asked.clone() },
        ),
        (
            "more tokens than the context has",
            InvalidArgument,
            "tokens",
            SendPrefixRequest { tokens: vec![1; 300_000], ..asked.clone() },
        ),
        (
            "another model",
            FailedPrecondition,
            "0707",
            SendPrefixRequest { fingerprint: vec![7; 32].into(), ..asked.clone() },
        ),
        (
            "other arithmetic",
            FailedPrecondition,
            "abacus",
            SendPrefixRequest { numerics: "abacus/1".into(), ..asked.clone() },
        ),
        ("a grant for a prompt", FailedPrecondition, "prefix", asked.clone()),
        (
            "a grant for another length",
            FailedPrecondition,
            "prefix",
            SendPrefixRequest { tokens: vec![1; 5], ..asked.clone() },
        ),
    ] {
        refusals.expect(what, code, says, node.send_prefix(asked)).await;
    }
}

/// The last message of a stream to which these were sent.
async fn push(decode: &Channel, chunks: Vec<Bytes>) -> Option<KvMessage> {
    let chunks = chunks.into_iter().map(|data| KvChunk { data });
    // The sender's side stays open: it is the receiver that ends a stream that is wrong.
    let chunks = futures::StreamExt::chain(
        tokio_stream::iter(chunks.collect::<Vec<_>>()),
        futures::stream::pending(),
    );
    let mut client = KvTransferClient::new(decode.clone());
    let mut answers = client.push(chunks).await.expect("streams are taken").into_inner();
    let mut last = None;
    while let Ok(Some(chunk)) = answers.message().await {
        last = Some(KvMessage::decode(chunk.data).expect("the node writes messages"));
    }
    last
}

async fn transfers(decode: &Channel) {
    let foreign = Context { transfer_id: TransferId([9; 16]), epoch: Epoch(1) };
    let message = |body| KvMessage { context: foreign, body }.encode();
    let heartbeat = message(Body::Heartbeat { sequence: 1 });
    let mut flipped = heartbeat.to_vec();
    flipped[5] ^= 1;
    for (what, chunks) in [
        ("noise", vec![Bytes::from(vec![0xa5; 1_000])]),
        ("an empty chunk", vec![Bytes::new()]),
        ("a flipped bit", vec![flipped.into()]),
        ("a heartbeat first", vec![heartbeat]),
        ("a commit first", vec![message(Body::Committed)]),
        ("nothing at all", vec![]),
    ] {
        let last = wait::in_time(ANSWER_WITHIN, what, push(decode, chunks)).await;
        let told = last.map(|last| last.body);
        assert!(
            matches!(&told, Some(Body::Abort { message, .. }) if !message.is_empty()),
            "{what}: {told:?}"
        );
    }
}

/// Senders that want staging memory and say no address, or one that is none.
async fn attachments(refusals: &mut Refusals, kv: Channel) {
    let mut client = KvStagingClient::new(kv);
    let request = |node_id: &str, worker_address: Vec<u8>| AttachRequest {
        node_id: node_id.into(),
        incarnation: 1,
        worker_address: worker_address.into(),
        ucx_version: String::new(),
    };
    let long = "n".repeat(1_000);
    for (what, request, says) in [
        ("an empty address", request("p", vec![]), "worker_address"),
        ("a long address", request("p", vec![1; 20_000]), "worker_address"),
        ("a long name", request(&long, vec![1; 100]), "node_id"),
        ("zeros", request("p", vec![0; 300]), "worker_address"),
        ("ones", request("p", vec![0xff; 300]), "worker_address"),
        (
            "noise",
            request("p", (0..300u32).map(|at| (at * at * 7) as u8).collect()),
            "worker_address",
        ),
    ] {
        refusals.expect(what, ErrorCode::InvalidArgument, says, client.attach(request)).await;
    }
}

async fn noise_to_the_port(address: std::net::SocketAddr) {
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("the node listens");
    // It may close before all is written.
    let _refused = stream.write_all(&[0x5a; 4_096]).await;
    let mut answer = Vec::new();
    let ended = wait::in_time(ANSWER_WITHIN, "noise", stream.read_to_end(&mut answer)).await;
    // A reset is an answer, too.
    drop(ended);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_malformed_call_is_refused_by_name() {
    let _alone = alone().await;
    let mut cluster = Cluster::start(&PLAN).await;
    let [router, prefill, decode] =
        [Role::Router, Role::Prefill, Role::Decode].map(|role| cluster.part(role, 0).grpc);
    let open = |address: std::net::SocketAddr| {
        channel(&address.to_string()).expect("a socket's address is one")
    };
    let mut node = NodeClient::new(open(decode)).max_decoding_message_size(64 << 20);
    let model = node.get_model_artifacts(GetModelArtifactsRequest {}).await;
    let model = model.expect("the node says its model").into_inner();
    let mut refusals = Refusals::default();
    the_public_api(&mut refusals, open(router)).await;
    reservations(&mut refusals, open(decode), &model).await;
    prefills(&mut refusals, open(prefill), open(decode), &model).await;
    prefixes(&mut refusals, &open(decode), &model).await;
    let mut decoder = DecodeClient::new(open(decode));
    let cancel = decoder.cancel(CancelRequest { request_id: vec![1].into() });
    refusals.expect("an id of a byte", ErrorCode::InvalidArgument, "request_id", cancel).await;
    let cancel = decoder.cancel(CancelRequest { request_id: vec![6; 16].into() }).await;
    assert!(!cancel.expect("unknown requests are no error").into_inner().found);
    let kv = cluster.part(Role::Decode, 0).kv;
    attachments(&mut refusals, open(kv)).await;
    refusals.check();
    transfers(&open(kv)).await;
    for address in [router, prefill, decode, kv] {
        noise_to_the_port(address).await;
    }
    let case = load::mixed(3, 5).pop().expect("three were made");
    let answer = load::record(&client(router), &case, &Progress::default()).await;
    assert_eq!(answer.expect("a good request works").ids[0].len(), case.max_tokens as usize);
    // The reservations above were never run: their expiry frees them.
    cluster.idle(Duration::from_secs(4)).await;
    cluster.assert_no_panics();
}
