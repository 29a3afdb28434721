//! Acceptance 8, HTTP: each malformed request gets a clear error that names what is wrong;
//! nothing panics, nothing hangs, nothing is held afterwards, and a good request still works.

use std::net::SocketAddr;
use std::time::Duration;

use baton_tests::cluster::{Cluster, Plan, Role};
use baton_tests::http::{self, Reply};
use baton_tests::{alone, wait};
use serde_json::{Value, json};

const PLAN: Plan = Plan {
    etcd: 0,
    routers: 1,
    prefill: 1,
    decode: 1,
    router_config: "max_request_bytes = 1048576",
    node_config: "kv_pool_mib = 256",
};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const JSON: &str = "application/json";

/// A request, and what its refusal must say.
struct Bad {
    what: &'static str,
    bytes: Vec<u8>,
    status: u16,
    /// `error.param`; empty: none is asked for.
    field: &'static str,
    /// Part of the message.
    says: &'static str,
}

fn raw(
    what: &'static str,
    bytes: Vec<u8>,
    status: u16,
    field: &'static str,
    says: &'static str,
) -> Bad {
    Bad { what, bytes, status, field, says }
}

/// A chat request with these fields over good ones.
fn chat(what: &'static str, over: Value, field: &'static str, says: &'static str) -> Bad {
    let mut body = json!({
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
    });
    merge(&mut body, over);
    let bytes = http::request("POST", CHAT, JSON, body.to_string().as_bytes());
    raw(what, bytes, 400, field, says)
}

/// A completion request with these fields over good ones.
fn completion(what: &'static str, over: Value, field: &'static str, says: &'static str) -> Bad {
    let mut body = json!({"model": "SmolLM2-135M-Instruct", "prompt": "Hi", "max_tokens": 4});
    merge(&mut body, over);
    let bytes = http::request("POST", COMPLETIONS, JSON, body.to_string().as_bytes());
    raw(what, bytes, 400, field, says)
}

fn merge(body: &mut Value, over: Value) {
    let Value::Object(over) = over else { panic!("tests give objects") };
    for (key, value) in over {
        body[key] = value;
    }
}

fn post(body: &[u8]) -> Vec<u8> {
    http::request("POST", CHAT, JSON, body)
}

/// Bodies and requests that are wrong before any field is.
fn broken_requests() -> Vec<Bad> {
    let deep = [b"[".repeat(100_000), b"]".repeat(100_000)].concat();
    let huge = format!("{{\"model\": \"{}\"}}", "x".repeat(2 << 20));
    let half = post(b"{\"model\": \"SmolLM2-135M-Instruct\", \"messages\": [{\"role\": \"us");
    vec![
        raw("an empty body", post(b""), 400, "body", "JSON"),
        raw("a body cut off", half, 400, "body", "JSON"),
        raw("a list as body", post(b"[1, 2]"), 400, "body", "object"),
        raw("100,000 brackets", post(&deep), 400, "body", "recursion"),
        raw("no UTF-8", post(b"{\"model\": \"\xff\xfe\"}"), 400, "body", "JSON"),
        raw("a number beyond all", post(b"{\"temperature\": 1e999}"), 400, "body", "out of range"),
        raw("NaN", post(b"{\"temperature\": NaN}"), 400, "body", "JSON"),
        raw("a field twice", post(b"{\"model\": \"a\", \"model\": \"b\"}"), 400, "body", "twice"),
        raw(
            "a field twice within",
            post(b"{\"logit_bias\": {\"5\": 1, \"5\": 2}}"),
            400,
            "body",
            "twice",
        ),
        raw("a lone surrogate", post(b"{\"model\": \"\\ud800\"}"), 400, "body", "JSON"),
        raw("a body over the limit", post(huge.as_bytes()), 413, "", "max_request_bytes, 1048576"),
        raw(
            "plain text",
            http::request("POST", CHAT, "text/plain", b"{}"),
            400,
            "content-type",
            "application/json",
        ),
        raw(
            "a form",
            http::request("POST", CHAT, "application/x-www-form-urlencoded", b"a=b"),
            400,
            "content-type",
            "application/json",
        ),
        raw("GET", http::request("GET", CHAT, JSON, b""), 405, "", "GET"),
        raw(
            "an unknown route",
            http::request("POST", "/v1/embeddings", JSON, b"{}"),
            404,
            "",
            "/v1/embeddings",
        ),
        raw(
            "an unknown model's page",
            http::request("GET", "/v1/models/gpt-9", JSON, b""),
            404,
            "model",
            "SmolLM2-135M-Instruct",
        ),
        raw(
            "a model's name that is no text",
            http::request("GET", "/v1/models/%ff", JSON, b""),
            400,
            "model",
            "UTF-8",
        ),
    ]
}

fn bad_chats() -> Vec<Bad> {
    let messages = |messages: Value| json!({"messages": messages});
    vec![
        chat("no model", json!({"model": null}), "model", "missing"),
        chat("a number as model", json!({"model": 5}), "model", "string"),
        chat("no messages", messages(json!([])), "messages", "1 to"),
        chat("messages as text", messages(json!("hello")), "messages", "sequence"),
        chat(
            "a message without role",
            messages(json!([{"content": "x"}])),
            "messages[0].role",
            "missing",
        ),
        chat(
            "a role as number",
            messages(json!([{"role": 1, "content": "x"}])),
            "messages[0].role",
            "string",
        ),
        chat(
            "a chat longer than the context",
            messages(json!([{"role": "user", "content": "word ".repeat(9_000)}])),
            "messages",
            "shorten",
        ),
        chat("no content", messages(json!([{"role": "user"}])), "messages[0].content", "missing"),
        chat(
            "an image",
            messages(json!([{"role": "user", "content":
            [{"type": "image_url", "image_url": {"url": "http://x"}}]}])),
            "messages[0].content[0].type",
            "image_url",
        ),
        chat(
            "a tool call",
            messages(json!([{"role": "assistant", "content": "x",
            "tool_calls": [{"id": "1"}]}])),
            "messages[0].tool_calls",
            "not supported",
        ),
        chat("tools", json!({"tools": [{"type": "function"}]}), "tools", "not supported"),
        chat(
            "a schema",
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
            "not supported",
        ),
        chat("a field misspelt", json!({"temprature": 1}), "temprature", "no field"),
        chat("top_logprobs alone", json!({"top_logprobs": 3}), "top_logprobs", "logprobs"),
        chat(
            "21 top_logprobs",
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
            "20",
        ),
        chat("two lengths", json!({"max_completion_tokens": 9}), "max_completion_tokens", "differ"),
        chat(
            "stream_options alone",
            json!({"stream_options": {"include_usage": true}}),
            "stream_options",
            "stream",
        ),
        chat("stream as text", json!({"stream": "yes"}), "stream", "boolean"),
    ]
}

fn bad_completions() -> Vec<Bad> {
    let bias = |bias: Value| json!({"logit_bias": bias});
    let long = "word ".repeat(20_000);
    vec![
        completion("an unknown model", json!({"model": "gpt-9"}), "model", "not served"),
        completion("no prompt", json!({"prompt": null}), "prompt", "missing"),
        completion("an empty prompt", json!({"prompt": ""}), "prompt", "no tokens"),
        completion("an empty list", json!({"prompt": []}), "prompt", "empty"),
        completion("an object as prompt", json!({"prompt": {"a": 1}}), "prompt", "string"),
        completion("ids beyond the vocabulary", json!({"prompt": [1, 49_152]}), "prompt", "49152"),
        completion("negative ids", json!({"prompt": [-1]}), "prompt", "token ids"),
        completion("33 prompts", json!({"prompt": vec!["x"; 33]}), "prompt", "32"),
        completion("a prompt beyond the context", json!({"prompt": long}), "prompt", "context"),
        completion("an empty prompt among others", json!({"prompt": [[1], []]}), "prompt", "[1]"),
        completion("a number as stop", json!({"stop": 5}), "stop", "a list of strings"),
        completion("numbers as stops", json!({"stop": [5]}), "stop", "a list of strings"),
        completion("a seed of 65 bits", json!({"seed": 1.8446744073709552e19}), "seed", "64 bits"),
        completion("half a seed", json!({"seed": 1.5}), "seed", "whole number"),
        completion("no answer", json!({"max_tokens": 0}), "max_tokens", "out of bounds"),
        completion("max_tokens -1", json!({"max_tokens": -1}), "max_tokens", "-1"),
        completion("max_tokens 1.5", json!({"max_tokens": 1.5}), "max_tokens", "1.5"),
        completion("min above max", json!({"min_tokens": 9}), "min_tokens", "max_tokens"),
        completion("n 0", json!({"n": 0}), "n", "out of bounds"),
        completion("n 100,000", json!({"n": 100_000}), "n", "out of bounds"),
        completion("temperature -1", json!({"temperature": -1}), "temperature", "out of bounds"),
        completion("temperature 1e300", json!({"temperature": 1e300}), "temperature", "out of"),
        completion("temperature as text", json!({"temperature": "hot"}), "temperature", "hot"),
        completion("top_p 0", json!({"top_p": 0}), "top_p", "out of bounds"),
        completion("top_p 1.1", json!({"top_p": 1.1}), "top_p", "out of bounds"),
        completion("top_k -2", json!({"top_k": -2}), "top_k", "-2"),
        completion("min_p 2", json!({"min_p": 2}), "min_p", "out of bounds"),
        completion(
            "repetition_penalty 0",
            json!({"repetition_penalty": 0}),
            "repetition_penalty",
            "out of bounds",
        ),
        completion(
            "presence_penalty 3",
            json!({"presence_penalty": 3}),
            "presence_penalty",
            "out of bounds",
        ),
        completion("logprobs 21", json!({"logprobs": 21}), "logprobs", "20"),
        completion("a bias by name", bias(json!({"the": 1})), "logit_bias", "the"),
        completion("a bias beyond ids", bias(json!({"49152": 1})), "logit_bias", "49152"),
        completion("a bias of 1,000", bias(json!({"5": 1000})), "logit_bias", "out of bounds"),
        completion("17 stops", json!({"stop": vec!["x"; 17]}), "stop", "16"),
        completion("an empty stop", json!({"stop": ""}), "stop", "1 to"),
        completion("a long stop", json!({"stop": "x".repeat(1_025)}), "stop", "1024"),
        completion(
            "a stop id beyond ids",
            json!({"stop_token_ids": [49_152]}),
            "stop_token_ids",
            "49152",
        ),
        completion("a seed as text", json!({"seed": "x"}), "seed", "x"),
        completion("a deadline of 0", json!({"deadline_ms": 0}), "deadline_ms", "out of bounds"),
        completion("a suffix", json!({"suffix": "end"}), "suffix", "not supported"),
    ]
}

fn fault(bad: &Bad, reply: &Reply) -> Option<String> {
    let error = &reply.json()["error"];
    let message = error["message"].as_str().unwrap_or_default();
    let right = reply.status == bad.status
        && message.to_lowercase().contains(&bad.says.to_lowercase())
        && (bad.field.is_empty() || error["param"] == bad.field)
        && error["type"].is_string()
        && error["code"].is_string();
    (!right).then(|| format!("{}: {} {}", bad.what, reply.status, reply.text()))
}

async fn a_good_request_works(http: SocketAddr) {
    let body = json!({
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "temperature": 0,
    });
    let reply = http::post_json(http, CHAT, &body).await.expect("the router answers");
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(reply.json()["usage"]["completion_tokens"].as_u64() >= Some(1), "{}", reply.text());
}

/// What is allowed but hardly a number: the likeliest tokens come, and no node falls over it.
async fn extremes_work(http: SocketAddr) {
    let ask = |temperature: f64| {
        json!({"model": "SmolLM2-135M-Instruct", "prompt": "Hi", "max_tokens": 4, "seed": 1,
            "temperature": temperature})
    };
    let mut texts = Vec::new();
    for temperature in [0.0, 1e-45, 2.8e-39, 1e-38, 1e-30] {
        let reply = http::post_json(http, COMPLETIONS, &ask(temperature)).await;
        let reply = reply.expect("the router answers");
        assert_eq!(reply.status, 200, "temperature {temperature:e}: {}", reply.text());
        texts.push(reply.json()["choices"][0]["text"].clone());
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_malformed_request_is_refused_by_name() {
    let _alone = alone().await;
    let mut cluster = Cluster::start(&PLAN).await;
    let http = cluster.part(Role::Router, 0).http;
    let mut all = broken_requests();
    all.extend(bad_chats());
    all.extend(bad_completions());
    let mut faults = Vec::new();
    for bad in &mut all {
        if bad.what == "an unknown model" {
            bad.status = 404;
        }
        let sent = http::send(http, &bad.bytes);
        match wait::in_time(Duration::from_secs(10), bad.what, sent).await {
            Ok(reply) => faults.extend(fault(bad, &reply)),
            Err(error) => faults.push(format!("{}: {error:#}", bad.what)),
        }
    }
    assert!(faults.is_empty(), "{} of {}:\n{}", faults.len(), all.len(), faults.join("\n"));
    // What is no HTTP at all ends the connection, and nothing else.
    let garbage = wait::in_time(Duration::from_secs(10), "garbage", http::send(http, &[0xff; 512]));
    assert!(garbage.await.is_ok_and(|reply| reply.status == 400));
    a_good_request_works(http).await;
    extremes_work(http).await;
    cluster.idle(Duration::from_secs(1)).await;
    cluster.assert_no_panics();
}
