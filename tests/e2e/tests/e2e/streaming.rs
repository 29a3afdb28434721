//! StreamingLLM as a request's option: the same tokens along every way and after a death, bounded
//! memory, clear refusals, and what it costs: what has left the window is not known any more.

use std::time::Duration;

use baton_client::{Client, Completion, GenerateRequest};
use baton_engine_host::NodeConfig;
use baton_router::RouterConfig;
use baton_tests::ask::prompt;
use baton_tests::cluster::{Cluster, Plan, Role};
use baton_tests::local::{Local, node_config, router_config};
use baton_tests::prompts::text;
use baton_tests::{alone, http, load, wait};
use baton_types::TokenId;
use serde_json::{Value, json};

const SINKS: u32 = 4;
const WINDOW: u32 = 60;

const IDLE_WITHIN: Duration = Duration::from_secs(3);

/// A request whose answer is to be compared.
#[derive(Clone)]
struct Asked {
    prompt: Vec<TokenId>,
    streaming: Option<(u32, u32)>,
    max_tokens: u32,
    choices: u32,
}

impl Asked {
    fn request(&self) -> GenerateRequest {
        let request = GenerateRequest::token_ids(self.prompt.clone())
            .max_tokens(self.max_tokens)
            .temperature(if self.choices > 1 { 0.8 } else { 0.0 })
            .seed(7)
            .choices(self.choices)
            .ignore_eos(true)
            .explain(true);
        match self.streaming {
            None => request,
            Some((sinks, window)) => request.streaming_attention(sinks, window),
        }
    }
}

async fn ask(client: &Client, request: GenerateRequest) -> Completion {
    let answer = async { client.generate(request).await?.collect().await };
    let answer = wait::in_time(load::ANSWER_WITHIN, "an answer", answer).await;
    answer.unwrap_or_else(|error| panic!("{error}"))
}

fn ids(completion: &Completion) -> Vec<Vec<TokenId>> {
    completion.answers.iter().map(|answer| answer.token_ids.clone()).collect()
}

fn local_prefill() -> RouterConfig {
    RouterConfig { local_prefill_max_tokens: usize::MAX >> 1, ..router_config() }
}

fn remote_prefill() -> RouterConfig {
    RouterConfig { local_prefill_max_tokens: 0, ..router_config() }
}

/// Prompts below, at and far beyond what is seen; beside them one that sees everything.
async fn cases(client: &Client) -> Vec<Asked> {
    let ids = prompt(client, 77, 2_000).await;
    let seen = Some((SINKS, WINDOW));
    let shapes = [
        (20, seen, 150, 1),
        (64, seen, 90, 1),
        (65, seen, 40, 1),
        (700, seen, 100, 3),
        (700, None, 40, 1),
        (700, Some((0, 100)), 40, 1),
        (1_900, Some((20, 300)), 60, 1),
        (1_900, seen, 60, 1),
    ];
    let cases = shapes.map(|(length, streaming, max_tokens, choices)| {
        let prompt = ids[..length].to_vec();
        Asked { prompt, streaming, max_tokens, choices }
    });
    cases.to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_the_same_along_every_way() {
    let _alone = alone().await;
    let local = Local::start(local_prefill(), node_config(), node_config()).await;
    let cases = cases(&local.client()).await;
    let mut expected = Vec::new();
    for asked in &cases {
        let answer = ask(&local.client(), asked.request()).await;
        assert!(answer.answers.iter().all(|one| one.token_ids.len() == asked.max_tokens as usize));
        let usage = &answer.done;
        assert_eq!(usage.prompt_tokens as usize, asked.prompt.len());
        assert_eq!(usage.completion_tokens, asked.max_tokens * asked.choices);
        // Nothing but what full attention would have computed comes from the cache.
        let cacheable = asked.streaming.map_or(u32::MAX, |(sinks, window)| sinks + window);
        assert!(usage.cached_tokens <= cacheable, "{} are cached", usage.cached_tokens);
        expected.push(ids(&answer));
    }
    assert_ne!(expected[4], expected[5], "the window changes the answer");
    local.idle(IDLE_WITHIN).await;
    local.end().await;
    for (block_tokens, chunk) in [(16, 512), (32, 48)] {
        let decode = NodeConfig { block_tokens, threads: 2, ..node_config() };
        let prefill = NodeConfig { prefill_chunk_tokens: chunk, ..node_config() };
        let local = Local::start(remote_prefill(), prefill, decode).await;
        // The other way round, and twice: caches hold what others left there.
        for (asked, expected) in
            cases.iter().zip(&expected).rev().chain(cases.iter().zip(&expected))
        {
            let answer = ask(&local.client(), asked.request()).await;
            let (length, streaming) = (asked.prompt.len(), asked.streaming);
            assert!(ids(&answer) == *expected, "{length} {streaming:?} {block_tokens} {chunk}");
            let explain: Value = serde_json::from_str(&answer.done.explain_json).expect("JSON");
            assert!(explain.to_string().contains("remote_prefill") || length < 100, "{explain}");
        }
        local.idle(IDLE_WITHIN).await;
        local.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_node_changes_nothing() {
    let _alone = alone().await;
    let plan = Plan {
        etcd: 0,
        routers: 1,
        prefill: 1,
        decode: 2,
        router_config: "local_prefill_max_tokens = 0",
        node_config: "kv_pool_mib = 128",
    };
    let mut cluster = Cluster::start(&plan).await;
    let client = cluster.clients().remove(0);
    let all = cases(&client).await;
    let asked: Vec<Asked> =
        [0, 3, 6, 7].map(|at| Asked { max_tokens: 300, ..all[at].clone() }).to_vec();
    let mut expected = Vec::new();
    for one in &asked {
        expected.push(ids(&ask(&client, one.request()).await));
    }
    let streams: Vec<_> = asked
        .iter()
        .map(|one| {
            let (client, request) = (client.clone(), one.request());
            tokio::spawn(async move { ask(&client, request).await })
        })
        .collect();
    let busiest = busiest_decode_node(&cluster).await;
    assert!(streams.iter().any(|stream| !stream.is_finished()), "all ended before the kill");
    cluster.part(Role::Decode, busiest).process.kill();
    for (stream, expected) in streams.into_iter().zip(&expected) {
        assert!(ids(&stream.await.expect("no panic")) == *expected);
    }
    assert!(cluster.routers_sum("baton_recoveries_total").await >= 1.0);
    cluster.idle(IDLE_WITHIN).await;
    cluster.assert_no_panics();
}

/// The decode node that runs most, once it is amid its answers.
async fn busiest_decode_node(cluster: &Cluster) -> usize {
    let figures = async || {
        let mut nodes = Vec::new();
        for part in cluster.of(Role::Decode) {
            let metrics = http::metrics(part.http).await.expect("the node answers");
            let tokens = metrics.sum("baton_engine_decode_tokens_total");
            nodes.push((metrics.sum("baton_engine_requests_running"), tokens));
        }
        nodes
    };
    let before = figures().await;
    wait::until(load::ANSWER_WITHIN, "a node amid its answers", || async {
        let now = figures().await;
        let busiest = (0..now.len()).max_by(|&a, &b| now[a].0.total_cmp(&now[b].0));
        let busiest = busiest.expect("the plan has decode nodes");
        let decoded = now[busiest].1 - before[busiest].1;
        let is_amid = now[busiest].0 >= 1.0 && decoded >= 20.0;
        if is_amid { Ok(busiest) } else { Err(format!("{now:?}")) }
    })
    .await
}

/// Blocks of both nodes stay within what is seen and a chunk, for a prompt and an answer that are
/// many times longer; and the pool of the decode node could not hold them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_bounded() {
    let _alone = alone().await;
    let small = NodeConfig { prefill_chunk_tokens: 64, kv_pool_mib: 8, ..node_config() };
    let local = Local::start(remote_prefill(), small.clone(), small).await;
    let client = local.client();
    let prompt = prompt(&client, 5, 2_000).await;
    let asked = Asked { prompt, streaming: Some((SINKS, WINDOW)), max_tokens: 600, choices: 1 };
    let whole = Asked { streaming: None, ..asked.clone() };
    let refused = async { client.generate(whole.request()).await?.collect().await };
    assert!(refused.await.is_err(), "8 MiB hold no whole prompt of {}", asked.prompt.len());
    let answer = tokio::spawn({
        let (client, request) = (client.clone(), asked.request());
        async move { ask(&client, request).await }
    });
    let mut most = [0.0, 0.0];
    while !answer.is_finished() {
        for (most, node) in most.iter_mut().zip([local.prefill_http, local.decode_http]) {
            let metrics = http::metrics(node).await.expect("the node answers");
            *most = f64::max(*most, metrics.sum_where("baton_kv_blocks", "state=\"used\""));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(answer.await.expect("no panic").answers[0].token_ids.len(), 600);
    eprintln!("most blocks used: prefill {}, decode {}", most[0], most[1]);
    // Sinks, and a window of 60 anywhere, with a chunk of 64 or one token more.
    assert!(most[0] > 0.0 && most[0] <= 10.0);
    assert!(most[1] > 0.0 && most[1] <= 6.0);
    local.idle(IDLE_WITHIN).await;
    local.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_http_field_is_taken_and_checked() {
    let _alone = alone().await;
    let local = Local::start(router_config(), node_config(), node_config()).await;
    let prompt = "Once upon a time";
    let body = |streaming: Value, chat: bool| {
        let mut body = json!({
            "model": "", "max_tokens": 60, "temperature": 0, "ignore_eos": true,
            "return_token_ids": true, "streaming_attention": streaming,
        });
        match chat {
            true => body["messages"] = json!([{"role": "user", "content": prompt}]),
            false => body["prompt"] = json!(prompt),
        }
        body
    };
    for (chat, path) in [(true, "/v1/chat/completions"), (false, "/v1/completions")] {
        let answer = async |streaming| {
            let reply = http::post_json(local.http, path, &body(streaming, chat)).await;
            let reply = reply.expect("the router answers").json();
            assert_eq!(reply["usage"]["completion_tokens"], 60, "{reply}");
            reply["choices"][0]["token_ids"].clone()
        };
        let whole = answer(Value::Null).await;
        assert_eq!(answer(json!({"sinks": 4, "window": 1020})).await, whole);
        assert_ne!(answer(json!({"sinks": 4, "window": 10})).await, whole);
        for (streaming, field, says) in [
            (json!({"sinks": 4, "window": 0}), "streaming_attention.window", "out of bounds"),
            (json!({"sinks": 4, "window": 8_189}), "streaming_attention", "8192"),
            (json!({"sinks": 4}), "streaming_attention", "window"),
            (json!({"window": 4}), "streaming_attention", "sinks"),
            (json!({"sinks": -1, "window": 9}), "streaming_attention", "-1"),
            (json!({"sinks": 4, "window": 9, "stride": 1}), "streaming_attention", "stride"),
            (json!("on"), "streaming_attention", "on"),
        ] {
            let reply = http::post_json(local.http, path, &body(streaming.clone(), chat)).await;
            let reply = reply.expect("the router answers");
            let error = &reply.json()["error"];
            let says_so = error["message"].as_str().is_some_and(|message| message.contains(says));
            assert!(reply.status == 400 && error["param"] == field && says_so, "{}", reply.text());
        }
    }
    local.end().await;
}

/// The limit of the method, on a real model: a fact is known while it is in the window, and not
/// afterwards, though the very same model finds it when it sees everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_left_the_window_is_forgotten() {
    let _alone = alone().await;
    let local = Local::start(local_prefill(), node_config(), node_config()).await;
    let client = local.client();
    let facts = [
        ("The secret password of the vault is", "Zanzibar"),
        ("My dog is called", "Biscuit"),
        ("The capital of the island of Morvane is", "Port Ellery"),
        ("Doctor Halloway lives in the city of", "Lisbon"),
        ("The password is", "7342"),
    ];
    let filler = text(3, 400);
    for (question, fact) in facts {
        let prompt = format!("Notes. {question} {fact}. {filler} {question}");
        let recalls = async |streaming: Option<(u32, u32)>| {
            let request = GenerateRequest::text(&prompt).max_tokens(6).temperature(0.0);
            let request = match streaming {
                None => request,
                Some((sinks, window)) => request.streaming_attention(sinks, window),
            };
            let answer = ask(&client, request).await;
            assert!((400..800).contains(&answer.done.prompt_tokens));
            eprintln!("{streaming:?} {question}{}", answer.answers[0].text);
            answer.answers[0].text.contains(fact)
        };
        assert!(recalls(None).await, "{fact}: all is seen");
        assert!(recalls(Some((4, 800))).await, "{fact}: the window holds it still");
        assert!(!recalls(Some((4, 252))).await, "{fact}: it has left the window");
    }
    local.end().await;
}
