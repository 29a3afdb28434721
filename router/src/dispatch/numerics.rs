//! Which numerics a request has, and how nodes look from there.

use std::collections::HashMap;
use std::sync::Arc;

use baton_kv_cache::{HashKey, prefix_hashes};
use baton_types::{BlockHash, GenerateRequest, ModelFingerprint, NumericsVersion};

use super::Dispatch;
use crate::cluster::{Node, NodeView};
use crate::plan;

/// The prompt's prefix hashes, as the nodes of each numerics version have them.
#[derive(Debug, Default)]
pub(super) struct PromptHashes(HashMap<NumericsVersion, Vec<BlockHash>>);

impl PromptHashes {
    fn of(
        &mut self,
        numerics: NumericsVersion,
        model: &ModelFingerprint,
        request: &GenerateRequest,
    ) -> &[BlockHash] {
        // The name says the precision of KV, as the nodes hash it.
        let dtype = numerics.kv_dtype().unwrap_or_default();
        let key = HashKey::new(model, &numerics, dtype, &request.tenant_salt);
        let cacheable = request.prompt.len().min(request.cacheable_tokens());
        let hashes = || prefix_hashes(&key, &request.prompt[..cacheable]);
        self.0.entry(numerics).or_insert_with(hashes)
    }
}

impl Dispatch {
    /// Takes the numerics of those nodes that can serve the request now; once something of its
    /// answer is known, it keeps them.
    pub(super) fn settle_numerics(&mut self) {
        if self.sequencer.has_tokens() || self.has_prompt_logprobs {
            return;
        }
        let nodes = self.router.cluster.nodes();
        let views: Vec<_> = nodes.iter().map(|node| node.view(&[])).collect();
        if let Some(numerics) = plan::numerics(self.model.fingerprint, &views) {
            self.numerics = numerics;
        }
    }

    /// All nodes, for the plan.
    pub(super) fn views(&mut self) -> Vec<NodeView> {
        let kv_conversion = self.router.config.kv_conversion;
        let nodes = self.router.cluster.nodes();
        let view = |node: &Arc<Node>| {
            let numerics = node.numerics();
            if !numerics.may_pair(&self.numerics, kv_conversion) {
                return node.view(&[]);
            }
            node.view(self.hashes.of(numerics, &self.model.fingerprint, &self.request))
        };
        nodes.iter().map(view).collect()
    }
}
