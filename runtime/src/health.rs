//! `/startupz`, `/livez`, `/readyz` and `/metrics`.
//!
//! Started: the model is loaded. Live: the process answers. Ready: new requests may come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::{Encoder, Registry, TextEncoder};

/// What the probes answer; set by the process as it goes.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    started: AtomicBool,
    ready: AtomicBool,
}

impl Health {
    pub fn set_started(&self) {
        self.0.started.store(true, Ordering::Release);
    }

    pub fn set_ready(&self, ready: bool) {
        self.0.ready.store(ready, Ordering::Release);
    }

    pub fn is_ready(&self) -> bool {
        self.0.ready.load(Ordering::Acquire)
    }
}

/// The routes, to be served alone or merged into others.
pub fn routes(health: Health, metrics: Registry) -> Router {
    let probe = |flag: fn(&Flags) -> bool, name: &'static str| {
        get(move |State(health): State<Health>| async move {
            match flag(&health.0) {
                true => (StatusCode::OK, format!("{name}\n")),
                false => (StatusCode::SERVICE_UNAVAILABLE, format!("not {name}\n")),
            }
        })
    };
    Router::new()
        .route("/startupz", probe(|flags| flags.started.load(Ordering::Acquire), "started"))
        .route("/livez", probe(|_| true, "live"))
        .route("/readyz", probe(|flags| flags.ready.load(Ordering::Acquire), "ready"))
        .with_state(health)
        .merge(Router::new().route("/metrics", get(render)).with_state(metrics))
}

async fn render(State(metrics): State<Registry>) -> Response {
    let encoder = TextEncoder::new();
    let mut text = Vec::new();
    match encoder.encode(&metrics.gather(), &mut text) {
        Ok(()) => {
            ([(header::CONTENT_TYPE, encoder.format_type().to_string())], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
