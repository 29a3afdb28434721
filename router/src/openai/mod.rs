//! The OpenAI-compatible HTTP API.

mod body;
mod chat;
mod completions;
mod error;
mod logprobs;
mod models;
mod reply;
mod strict;
mod wishes;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};

use crate::gateway::Gateway;

/// `/v1/*`.
pub fn routes(gateway: Gateway) -> Router {
    let limit = DefaultBodyLimit::max(gateway.config.max_request_bytes);
    Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::retrieve))
        .fallback(error::unknown_route)
        .method_not_allowed_fallback(error::wrong_method)
        .layer(limit)
        .with_state(gateway)
}
