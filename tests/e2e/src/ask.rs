//! Prompts of so many tokens, and answers with their explanations.

use baton_client::{Client, GenerateRequest};
use baton_types::TokenId;
use serde_json::Value;

use crate::prompts::text;

/// The first `count` tokens of the text of this seed.
///
/// # Panics
/// Where nobody tokenises, or the text has fewer.
pub async fn prompt(client: &Client, seed: u64, count: usize) -> Vec<TokenId> {
    // A word is a token or more.
    let ids = client.tokenize("", &text(seed, count)).await.expect("the router tokenises");
    assert!(ids.len() >= count, "{} tokens of {count}", ids.len());
    ids[..count].to_vec()
}

/// The likeliest tokens, so many of them, with an explanation.
pub fn greedy(prompt: Vec<TokenId>, tokens: u32) -> GenerateRequest {
    let request = GenerateRequest::token_ids(prompt).max_tokens(tokens);
    request.temperature(0.0).ignore_eos(true).explain(true)
}

/// The tokens of the first choice, and the explanation.
///
/// # Panics
/// Where there is no answer.
pub async fn explained(client: &Client, request: GenerateRequest) -> (Vec<TokenId>, Value) {
    let answer = client.generate(request).await.expect("a place").collect().await;
    let answer = answer.expect("an answer");
    let explain = serde_json::from_str(&answer.done.explain_json);
    (answer.answers[0].token_ids.clone(), explain.expect("the explanation is JSON"))
}
