//! The models that the cluster serves: tokenizer, template and shape of each, by fingerprint.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_proto::internal::ModelArtifactsResponse;
use baton_tokenizer::Tokenizer;
use baton_types::{
    Error, ErrorCode, Limits, ModelArtifacts, ModelFingerprint, ModelSpec, NumericsVersion,
};

/// One model, ready to turn text into ids.
#[derive(Debug)]
pub struct Model {
    pub fingerprint: ModelFingerprint,
    pub spec: ModelSpec,
    pub limits: Limits,
    pub tokenizer: Tokenizer,
    /// Unix seconds at which the router learnt of it.
    pub created: u64,
}

impl Model {
    /// Bytes of K and V of one token over all layers, as nodes of these numerics hold them.
    pub fn kv_token_bytes(&self, numerics: &NumericsVersion) -> usize {
        let dtype = numerics.kv_dtype().unwrap_or_default();
        2 * self.spec.layers * self.spec.kv_heads * dtype.vector_bytes(self.spec.head_dim)
    }
}

/// All models. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Catalog(Arc<Mutex<BTreeMap<ModelFingerprint, Arc<Model>>>>);

impl Catalog {
    /// Takes a node's artifacts over; those of a known model cost nothing.
    ///
    /// # Errors
    /// Where they cannot be read.
    pub async fn learn(&self, wire: &ModelArtifactsResponse) -> Result<(), Error> {
        let fingerprint = ModelFingerprint::try_from(&wire.fingerprint[..])
            .map_err(|_| Error::internal("a node's fingerprint has not 32 bytes"))?;
        if self.lock().contains_key(&fingerprint) {
            return Ok(());
        }
        let wire = wire.clone();
        let read = tokio::task::spawn_blocking(move || read(fingerprint, &wire)).await;
        let model = read.map_err(|_| Error::internal("reading a model was interrupted"))??;
        tracing::info!(model = %model.spec.name, %fingerprint, "model learnt");
        self.lock().entry(fingerprint).or_insert(Arc::new(model));
        Ok(())
    }

    /// The model of that name among those that `live` nodes serve; an empty name means the only
    /// one.
    ///
    /// # Errors
    /// `NotFound` with the names that there are, `Unavailable` where there is none now.
    pub fn find(&self, name: &str, live: &BTreeSet<ModelFingerprint>) -> Result<Arc<Model>, Error> {
        let mut models = self.lock().clone();
        models.retain(|fingerprint, _| live.contains(fingerprint));
        if models.is_empty() {
            return Err(Error {
                retry_after_ms: Some(1_000),
                ..Error::unavailable("no decode node serves a model now")
            });
        }
        let mut found = models.values().filter(|model| name.is_empty() || model.spec.name == name);
        match (found.next(), found.next()) {
            (Some(model), None) => Ok(model.clone()),
            (Some(model), Some(_)) if !name.is_empty() => Ok(model.clone()),
            _ => {
                let names: Vec<_> = models.values().map(|model| model.spec.name.as_str()).collect();
                Err(Error {
                    field: Some("model".into()),
                    ..Error::new(
                        ErrorCode::NotFound,
                        format!("model {name:?} is not served; served are: {}", names.join(", ")),
                    )
                })
            }
        }
    }

    /// The models that `live` nodes serve.
    pub fn all(&self, live: &BTreeSet<ModelFingerprint>) -> Vec<Arc<Model>> {
        self.lock().values().filter(|model| live.contains(&model.fingerprint)).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ModelFingerprint, Arc<Model>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(fingerprint: ModelFingerprint, wire: &ModelArtifactsResponse) -> Result<Model, Error> {
    let unreadable = |what: &str, error: &dyn std::fmt::Display| {
        Error::internal(format!("a node's {what} cannot be read: {error}"))
    };
    let spec: ModelSpec = serde_json::from_slice(&wire.spec_json)
        .map_err(|error| unreadable("model spec", &error))?;
    let artifacts: ModelArtifacts = serde_json::from_slice(&wire.artifacts_json)
        .map_err(|error| unreadable("tokenizer", &error))?;
    let tokenizer =
        Tokenizer::from_artifacts(&artifacts).map_err(|error| unreadable("tokenizer", &error))?;
    let created = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    Ok(Model { fingerprint, limits: Limits::for_model(&spec), spec, tokenizer, created })
}
