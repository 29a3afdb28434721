//! A backend whose KV is the tokens themselves and whose logits are a hash over what it reads
//! back from the pages: a wrong page, a missing copy or a stale slot changes the next token.

use baton_types::{
    BlockId, KvDtype, KvLayout, ModelFamily, ModelFeatures, ModelSpec, NumericsVersion,
    RopeScaling, RopeSpec,
};

use crate::backend::{Backend, BackendError, KvRead, KvSpan, LayerSink, LogitRows, Span, StepCost};

pub const VOCAB: usize = 97;
const LAYERS: usize = 2;

pub struct Ledger {
    spec: ModelSpec,
    layout: KvLayout,
    numerics: NumericsVersion,
    pages: Pages,
    logits: Vec<f32>,
    pub poison: Option<u32>,
}

struct Pages {
    block_tokens: usize,
    /// `[layer][block][slot]`.
    slots: Vec<Vec<Vec<u32>>>,
}

impl Ledger {
    pub fn new(blocks: usize, block_tokens: u16) -> Self {
        let spec = ModelSpec {
            name: "ledger".into(),
            family: ModelFamily::Llama,
            layers: LAYERS,
            hidden: 32,
            heads: 1,
            kv_heads: 1,
            head_dim: 2,
            ffn: 32,
            vocab: VOCAB,
            context_tokens: 4_096,
            norm_eps: 1e-5,
            rope: RopeSpec { dim: 2, theta: 1e4, scaling: RopeScaling::None },
            tied_embeddings: true,
            features: ModelFeatures::default(),
            bos_id: None,
            eos_ids: vec![0],
        };
        let layout = KvLayout {
            layers: LAYERS as u16,
            kv_heads: 1,
            head_dim: 2,
            block_tokens,
            dtype: KvDtype::F16,
        };
        let block_tokens = usize::from(block_tokens);
        Self {
            spec,
            layout,
            numerics: NumericsVersion("ledger".into()),
            pages: Pages {
                block_tokens,
                slots: vec![vec![vec![u32::MAX; block_tokens]; blocks]; LAYERS],
            },
            logits: Vec::new(),
            poison: None,
        }
    }
}

impl Pages {
    fn get(&self, layer: usize, blocks: &[BlockId], position: usize) -> u32 {
        let block = blocks[position / self.block_tokens].0 as usize;
        self.slots[layer][block][position % self.block_tokens]
    }

    fn set(&mut self, layer: usize, blocks: &[BlockId], position: usize, value: u32) {
        let block = blocks[position / self.block_tokens].0 as usize;
        self.slots[layer][block][position % self.block_tokens] = value;
    }
}

impl KvRead for Pages {
    fn read_kv(&self, span: &KvSpan<'_>, out: &mut Vec<u8>) {
        for half in 0..2_u32 {
            for at in span.token_first..span.token_first + span.token_count {
                let token = self.get(span.layer, span.blocks, at);
                out.extend(token.wrapping_add(half).to_le_bytes());
            }
        }
    }
}

/// What follows `tokens`, as the ledger computes it.
pub fn logits_after(tokens: impl Iterator<Item = u32>) -> Vec<f32> {
    let mut hash = 0x1234_5678_9abc_def0_u64;
    for token in tokens {
        hash = (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    }
    let logit = |id: u64| {
        let mixed = (hash ^ id).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
        mixed as f32 / (1 << 24) as f32 * 4.0
    };
    // Id 0 ends an answer; tests that want that say so with a bias.
    (0..VOCAB as u64).map(|id| if id == 0 { -10.0 } else { logit(id) }).collect()
}

impl Backend for Ledger {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn kv_layout(&self) -> &KvLayout {
        &self.layout
    }

    fn kv_blocks(&self) -> usize {
        self.pages.slots[0].len()
    }

    fn numerics(&self) -> &NumericsVersion {
        &self.numerics
    }

    fn max_step_tokens(&self) -> usize {
        64
    }

    fn max_logit_rows(&self) -> usize {
        16
    }

    fn last_cost(&self) -> StepCost {
        StepCost::default()
    }

    fn step(
        &mut self,
        spans: &[Span<'_>],
        sink: &mut dyn LayerSink,
    ) -> Result<&[f32], BackendError> {
        self.logits.clear();
        for layer in 0..LAYERS {
            for span in spans {
                for (at, &token) in span.tokens.iter().enumerate() {
                    assert_ne!(Some(token), self.poison, "a poisoned token reached the backend");
                    let position = span.first_position + at;
                    self.pages.set(layer, span.blocks, position, token + layer as u32);
                }
            }
            sink.layer_done(layer, &self.pages);
        }
        for span in spans {
            let rows = match span.logits {
                LogitRows::None => 0,
                LogitRows::Last => 1,
                LogitRows::All => span.tokens.len(),
            };
            let end = span.first_position + span.tokens.len();
            for last in end - rows..end {
                let read = |at| self.pages.get(at % LAYERS, span.blocks, at) - (at % LAYERS) as u32;
                let unseen = span.streaming.map_or(0..0, |streaming| streaming.unseen(last));
                let seen = (0..=last).filter(|at| !unseen.contains(at));
                self.logits.extend(logits_after(seen.map(read)));
            }
        }
        Ok(&self.logits)
    }

    fn write_kv(&mut self, span: &KvSpan<'_>, payload: &[u8]) -> Result<(), BackendError> {
        let want = span.token_count * 8;
        if payload.len() != want {
            return Err(BackendError::PayloadSize { got: payload.len(), want });
        }
        for (at, bytes) in payload[..want / 2].chunks_exact(4).enumerate() {
            let token = u32::from_le_bytes(bytes.try_into().unwrap());
            self.pages.set(span.layer, span.blocks, span.token_first + at, token);
        }
        Ok(())
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId, tokens: usize) {
        for layer in &mut self.pages.slots {
            let content = layer[from.0 as usize][..tokens].to_vec();
            layer[to.0 as usize][..tokens].copy_from_slice(&content);
        }
    }

    fn kv(&self) -> &dyn KvRead {
        &self.pages
    }
}
