//! `/v1/models`.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use baton_types::Error;
use serde_json::{Value, json};

use super::error::ApiError;
use crate::catalog::Model;
use crate::gateway::Gateway;

pub(super) async fn list(State(gateway): State<Gateway>) -> Json<Value> {
    let models: Vec<Value> = gateway.models().iter().map(|model| to_json(model)).collect();
    Json(json!({"object": "list", "data": models}))
}

pub(super) async fn retrieve(
    State(gateway): State<Gateway>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id.map_err(|problem| Error::invalid("model", problem.body_text()))?;
    Ok(Json(to_json(&*gateway.model(&id)?)))
}

fn to_json(model: &Model) -> Value {
    json!({
        "id": model.spec.name,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "max_model_len": model.spec.context_tokens,
        "fingerprint": model.fingerprint.to_string(),
    })
}
