//! A prefill node has the part of a prompt that another node holds from there: the answer is the
//! same, the explanation and the metrics say it; and where the pull fails, the prompt is computed.

use std::time::{Duration, Instant};

use baton_client::{Client, GenerateRequest};
use baton_engine_host::{KvTransport, NodeConfig};
use baton_proto::internal::decode_client::DecodeClient;
use baton_proto::internal::node_client::NodeClient;
use baton_proto::internal::prefill_client::PrefillClient;
use baton_proto::internal::prefill_event::Event;
use baton_proto::internal::{
    GetModelArtifactsRequest, HandedOff, PrefillRunRequest, PrefixSource, Request, ReserveRequest,
    SamplingParams, StopParams, WatchStatusRequest,
};
use baton_router::RouterConfig;
use baton_runtime::grpc::channel;
use baton_tests::ask::{explained, prompt};
use baton_tests::local::{Local, node_config, router_config};
use baton_tests::{alone, http};
use baton_types::TokenId;
use serde_json::Value;

const PROMPT_TOKENS: usize = 400;
const ANSWER_TOKENS: u32 = 300;
/// What the second turn of a conversation adds.
const TURN_TOKENS: usize = 150;

async fn ask(client: &Client, prompt: &[TokenId], tokens: u32) -> (Vec<TokenId>, Value) {
    let request = GenerateRequest::token_ids(prompt.to_vec()).max_tokens(tokens);
    let request = request.temperature(0.7).seed(11).ignore_eos(true).explain(true);
    explained(client, request).await
}

/// Two turns of a conversation; the second one's prompt holds the first one's answer, which the
/// decode node has and the prefill node has not.
async fn converse(client: &Client) -> (Vec<TokenId>, Value) {
    let ids = prompt(client, 41, PROMPT_TOKENS + TURN_TOKENS).await;
    let (first, rest) = ids.split_at(PROMPT_TOKENS);
    let (answer, _) = ask(client, first, ANSWER_TOKENS).await;
    let mut prompt = first.to_vec();
    prompt.extend(&answer);
    prompt.extend(rest);
    ask(client, &prompt, 40).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_turn_pulls_the_first_ones_answer() {
    let _alone = alone().await;
    let everything = RouterConfig { local_prefill_max_tokens: usize::MAX >> 1, ..router_config() };
    let plain = Local::start(everything, node_config(), node_config()).await;
    let (expected, explain) = converse(&plain.client()).await;
    assert_eq!((&explain["pulled_tokens"], &explain["pulled_from"]), (&0.into(), &Value::Null));
    plain.end().await;
    for (kv_transport, prefill_block, decode_block) in
        [(KvTransport::Grpc, 32, 16), (KvTransport::Ucx, 16, 32)]
    {
        let node = |block_tokens| NodeConfig { kv_transport, block_tokens, ..node_config() };
        let local = Local::start(router_config(), node(prefill_block), node(decode_block)).await;
        let (got, explain) = converse(&local.client()).await;
        assert_eq!(got, expected, "{kv_transport:?}: {explain}");
        // All of prompt and answer but the last token, whose KV nobody has, in whole blocks of
        // both.
        let own = PROMPT_TOKENS / usize::from(prefill_block) * usize::from(prefill_block);
        assert_eq!(explain["pulled_tokens"], 672 - own, "{explain}");
        eprintln!("{kv_transport:?}: {}", explain["phases_us"]);
        assert_eq!(explain["pulled_from"], format!("decode-{}", local.decode_grpc), "{explain}");
        assert_eq!(explain["cached_tokens"], 672, "{explain}");
        assert!(explain["phases_us"]["prefix_pull"].as_u64() > Some(0), "{explain}");
        let metrics = http::metrics(local.prefill_http).await.expect("the node answers");
        assert_eq!(metrics.sum_where("baton_prefix_pulls_total", "pulled"), 1.0);
        assert_eq!(metrics.sum_where("baton_kv_transfers_total", "committed"), 1.0);
        let way = format!("transport=\"{}\"", kv_transport.as_str());
        let came = metrics.sum_where("baton_kv_transfer_received_bytes_total", &way);
        assert!(came >= ((672 - own) * 23_040) as f64, "{came} bytes came over {kv_transport:?}");
        local.idle(Duration::from_secs(2)).await;
        local.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_is_told_not_to_pulls_nothing() {
    let _alone = alone().await;
    let router = RouterConfig { prefix_pull_min_tokens: 0, ..router_config() };
    let local = Local::start(router, node_config(), node_config()).await;
    let (_, explain) = converse(&local.client()).await;
    assert_eq!(
        (&explain["pulled_tokens"], &explain["reason"]),
        (&0.into(), &"remote_prefill".into())
    );
    local.end().await;
}

/// Nodes as a router sees them, which names a source of its own.
struct Nodes {
    decode: DecodeClient<tonic::transport::Channel>,
    prefill: PrefillClient<tonic::transport::Channel>,
    prefill_incarnation: u64,
    decode_incarnation: u64,
    fingerprint: bytes::Bytes,
    numerics: String,
    requests: u8,
}

impl Nodes {
    async fn of(local: &Local) -> Self {
        let connect = |address: std::net::SocketAddr| channel(&address.to_string()).expect("one");
        let (decode, prefill) = (connect(local.decode_grpc), connect(local.prefill_grpc));
        let mut node = NodeClient::new(decode.clone());
        let model = node.get_model_artifacts(GetModelArtifactsRequest {}).await;
        let model = model.expect("the node answers").into_inner();
        Self {
            prefill_incarnation: incarnation(prefill.clone()).await,
            decode_incarnation: incarnation(decode.clone()).await,
            decode: DecodeClient::new(decode),
            prefill: PrefillClient::new(prefill),
            fingerprint: model.fingerprint,
            numerics: model.numerics,
            requests: 0,
        }
    }

    /// Has a prompt computed by the prefill node, which may pull from `prefix`.
    async fn prefill(&mut self, prompt: &[TokenId], prefix: PrefixSource) -> (u32, HandedOff) {
        self.requests += 1;
        let request = Request {
            id: vec![self.requests; 16].into(),
            prompt: prompt.to_vec(),
            sampling: Some(SamplingParams {
                top_p: 1.0,
                repetition_penalty: 1.0,
                ..Default::default()
            }),
            stop: Some(StopParams { max_tokens: 4, ignore_eos: true, ..Default::default() }),
            choices: 1,
            deadline_ms: 60_000,
            ..Default::default()
        };
        let (fingerprint, numerics) = (self.fingerprint.clone(), self.numerics.clone());
        let reserve = ReserveRequest {
            request: Some(request.clone()),
            attempt: 1,
            fingerprint: fingerprint.clone(),
            numerics: numerics.clone(),
            prefill_incarnation: self.prefill_incarnation,
            ..Default::default()
        };
        let reserved = self.decode.reserve(reserve).await.expect("a reservation").into_inner();
        let run = PrefillRunRequest {
            request: Some(request),
            grant: reserved.grant,
            decode_address: reserved.kv_address,
            fingerprint,
            numerics,
            prefix: Some(prefix),
        };
        let mut events = self.prefill.run(run).await.expect("it is taken").into_inner();
        let mut token = None;
        while let Some(event) = events.message().await.expect("the job goes on") {
            match event.event {
                Some(Event::Token(drawn)) => token = Some(drawn.id),
                Some(Event::HandedOff(done)) => return (token.expect("a first token"), done),
                _ => {}
            }
        }
        panic!("the stream ended without its account");
    }
}

async fn incarnation(node: tonic::transport::Channel) -> u64 {
    let mut statuses = NodeClient::new(node);
    let statuses = statuses.watch_status(WatchStatusRequest {}).await;
    let status = statuses.expect("the node answers").into_inner().message().await;
    status.expect("a status").expect("a first one").incarnation
}

/// Whatever the source does, the prompt is computed, the same token comes, and nothing is held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_that_fails_costs_nothing_but_its_time() {
    let _alone = alone().await;
    let local = Local::start(router_config(), node_config(), node_config()).await;
    let ids = prompt(&local.client(), 43, 9_000).await;
    let prompt = |at: usize| &ids[at * 300..][..280];
    let mut nodes = Nodes::of(&local).await;
    let good = PrefixSource {
        node_id: "decode".into(),
        address: local.decode_grpc.to_string(),
        incarnation: nodes.decode_incarnation,
        tokens: 256,
        within_ms: 5_000,
    };
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = silent.local_addr().expect("it has one").to_string();
    let other = |change: &dyn Fn(&mut PrefixSource)| {
        let mut other = good.clone();
        change(&mut other);
        other
    };
    for (at, (what, says, source)) in [
        ("nobody is there", "connect", other(&|source| source.address = "127.0.0.1:1".into())),
        ("no address", "is no address", other(&|source| source.address = "[".into())),
        ("it does not answer", "within 300 ms", {
            other(&|source| (source.address, source.within_ms) = (silent.clone(), 300))
        }),
        ("no time", "within 0 ms", other(&|source| source.within_ms = 0)),
        ("it was started anew", "incarnation", other(&|source| source.incarnation ^= 1)),
        ("it holds nothing of it", "holds 0 of these 256 tokens", good.clone()),
        ("more than there is", "holds 0 of these", other(&|source| source.tokens = u32::MAX)),
        ("itself", "holds 0 of these", {
            let (address, incarnation) = (local.prefill_grpc, nodes.prefill_incarnation);
            other(&|source| {
                (source.address, source.incarnation) = (address.to_string(), incarnation);
            })
        }),
    ]
    .into_iter()
    .enumerate()
    {
        let began = Instant::now();
        let (token, done) = nodes.prefill(prompt(at), source).await;
        let plain = PrefixSource { tokens: 0, ..good.clone() };
        let (expected, again) = nodes.prefill(prompt(at), plain).await;
        assert_eq!(token, expected, "{what}");
        assert!(done.pull_error.contains(says), "{what}: {:?}", done.pull_error);
        assert_eq!((done.pulled_tokens, done.cached_tokens), (0, 0), "{what}");
        assert_eq!((again.pull_error.as_str(), again.cached_tokens), ("", 272), "{what}");
        assert!(began.elapsed() < Duration::from_secs(20), "{what}");
    }
    let metrics = http::metrics(local.prefill_http).await.expect("the node answers");
    assert_eq!(metrics.sum_where("baton_prefix_pulls_total", "failed"), 8.0);
    // Nobody runs these reservations: they end when their grants would have.
    local.idle(Duration::from_secs(15)).await;
    local.end().await;
}
