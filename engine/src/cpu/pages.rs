//! The KV pool: pages of K and V as the attention kernel reads them.
//!
//! `[layer][block][kv head][tile of 16 tokens][K, V]` in bfloat16, two to a 32-bit word:
//! K is `[dim / 2][token][dim % 2]`, V is `[token / 2][dim][token % 2]` within the tile.

use baton_types::{BlockId, KvLayout};

use crate::backend::{BackendError, KvRead, KvSpan};
use crate::kernels::attention::TILE_TOKENS;
use crate::kernels::numerics::bf16_round;
use crate::memory::{Buffer, Parts};

/// Where a token's K and V of one head lie.
#[derive(Clone, Copy)]
struct Slot {
    /// First element of the tile.
    tile: usize,
    /// Token within the tile.
    token: usize,
    dim: usize,
}

impl Slot {
    fn k(&self, d: usize) -> usize {
        self.tile + d / 2 * (2 * TILE_TOKENS) + self.token * 2 + d % 2
    }

    fn v(&self, d: usize) -> usize {
        let v = self.tile + self.dim * TILE_TOKENS;
        v + self.token / 2 * (2 * self.dim) + d * 2 + self.token % 2
    }
}

/// How pages lie in the pool.
#[derive(Clone, Copy)]
pub(super) struct PageMap {
    layout: KvLayout,
    blocks: usize,
}

impl PageMap {
    fn head_dim(&self) -> usize {
        self.layout.head_dim as usize
    }

    fn block_tokens(&self) -> usize {
        self.layout.block_tokens as usize
    }

    /// Elements of K and V of one head in one tile.
    fn tile_len(&self) -> usize {
        2 * TILE_TOKENS * self.head_dim()
    }

    /// Elements of one page in one layer.
    fn page_len(&self) -> usize {
        2 * self.block_tokens() * self.head_dim() * self.layout.kv_heads as usize
    }

    fn page(&self, layer: usize, block: BlockId) -> usize {
        assert!((block.0 as usize) < self.blocks, "block {block} is not in the pool");
        (layer * self.blocks + block.0 as usize) * self.page_len()
    }

    /// First element of the tile of position `position` and one head.
    fn tile(&self, layer: usize, blocks: &[BlockId], head: usize, position: usize) -> usize {
        let block = blocks[position / self.block_tokens()];
        let tiles = self.block_tokens() / TILE_TOKENS;
        let tile = head * tiles + position % self.block_tokens() / TILE_TOKENS;
        self.page(layer, block) + tile * self.tile_len()
    }

    fn slot(&self, layer: usize, blocks: &[BlockId], head: usize, position: usize) -> Slot {
        Slot {
            tile: self.tile(layer, blocks, head, position),
            token: position % TILE_TOKENS,
            dim: self.head_dim(),
        }
    }
}

/// The pool.
pub(super) struct Pages {
    map: PageMap,
    data: Buffer<u16>,
}

impl Pages {
    /// # Errors
    /// When the system has no room.
    pub(super) fn new(layout: KvLayout, blocks: usize) -> std::io::Result<Self> {
        let map = PageMap { layout, blocks };
        let len = (layout.layers as usize * blocks)
            .checked_mul(map.page_len())
            .ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { map, data: Buffer::zeroed(len)? })
    }

    pub(super) fn layout(&self) -> &KvLayout {
        &self.map.layout
    }

    pub(super) fn blocks(&self) -> usize {
        self.map.blocks
    }

    /// For the threads of a step.
    pub(super) fn shared(&mut self) -> SharedPages<'_> {
        SharedPages { map: self.map, data: self.data.parts() }
    }

    /// Places K and V given in canonical order.
    ///
    /// # Errors
    /// `PayloadSize` and `SpanOutside`, with nothing written.
    pub(super) fn write(&mut self, span: &KvSpan<'_>, payload: &[u8]) -> Result<(), BackendError> {
        self.check_span(span)?;
        let want = self.map.layout.token_layer_bytes() * span.token_count;
        if payload.len() != want {
            return Err(BackendError::PayloadSize { got: payload.len(), want });
        }
        let mut elements = payload.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b));
        for is_value in [false, true] {
            for head in 0..self.map.layout.kv_heads as usize {
                for i in 0..span.token_count {
                    let position = span.token_first + i;
                    let slot = self.map.slot(span.layer, span.blocks, head, position);
                    for (d, bits) in (0..slot.dim).zip(&mut elements) {
                        self.data[if is_value { slot.v(d) } else { slot.k(d) }] = bits;
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies the first `tokens` tokens of a page over all layers and heads.
    ///
    /// # Panics
    /// When a block is not in the pool or `tokens` exceeds a block: the planner's bug.
    pub(super) fn copy_block(&mut self, from: BlockId, to: BlockId, tokens: usize) {
        assert!(tokens <= self.map.block_tokens());
        for layer in 0..self.map.layout.layers as usize {
            for head in 0..self.map.layout.kv_heads as usize {
                for token in 0..tokens {
                    let source = self.map.slot(layer, &[from], head, token);
                    let target = self.map.slot(layer, &[to], head, token);
                    for d in 0..source.dim {
                        self.data[target.k(d)] = self.data[source.k(d)];
                        self.data[target.v(d)] = self.data[source.v(d)];
                    }
                }
            }
        }
    }

    fn check_span(&self, span: &KvSpan<'_>) -> Result<(), BackendError> {
        let end = span.token_first.saturating_add(span.token_count);
        let fits = span.layer < self.map.layout.layers as usize
            && end <= span.blocks.len() * self.map.block_tokens()
            && span.blocks.iter().all(|block| (block.0 as usize) < self.map.blocks);
        if fits {
            return Ok(());
        }
        Err(BackendError::SpanOutside {
            layer: span.layer,
            first: span.token_first,
            end,
            blocks: span.blocks.len(),
        })
    }
}

impl KvRead for Pages {
    fn read_kv(&self, span: &KvSpan<'_>, out: &mut Vec<u8>) {
        out.reserve(self.map.layout.token_layer_bytes() * span.token_count);
        for is_value in [false, true] {
            for head in 0..self.map.layout.kv_heads as usize {
                for i in 0..span.token_count {
                    let position = span.token_first + i;
                    let slot = self.map.slot(span.layer, span.blocks, head, position);
                    for d in 0..slot.dim {
                        let at = if is_value { slot.v(d) } else { slot.k(d) };
                        out.extend_from_slice(&self.data[at].to_le_bytes());
                    }
                }
            }
        }
    }
}

/// The pool during a step, when several threads write tokens of their own and read others'.
#[derive(Clone, Copy)]
pub(super) struct SharedPages<'a> {
    map: PageMap,
    data: Parts<'a, u16>,
}

impl SharedPages<'_> {
    /// Rounds and stores `k[head_dim]` and `v[head_dim]` of one head at `position`.
    ///
    /// # Safety
    /// Until the next barrier nobody else reads or writes this token's K and V.
    pub(super) unsafe fn store(
        &self,
        layer: usize,
        blocks: &[BlockId],
        head: usize,
        position: usize,
        k: &[f32],
        v: &[f32],
    ) {
        let slot = self.map.slot(layer, blocks, head, position);
        assert!(slot.tile + self.map.tile_len() <= self.data.len());
        for (d, (k, v)) in k.iter().zip(v).enumerate().take(slot.dim) {
            // SAFETY: a slot's elements lie within its tile, which is in bounds; they are this
            // thread's by the caller's promise. Writes are of single elements, since neighbours
            // belong to other tokens.
            unsafe {
                *self.data.as_ptr().add(slot.k(d)) = bf16_round(*k);
                *self.data.as_ptr().add(slot.v(d)) = bf16_round(*v);
            }
        }
    }

    /// The tile of position `position`, readable for `16 head_dim` words.
    pub(super) fn tile(
        &self,
        layer: usize,
        blocks: &[BlockId],
        head: usize,
        position: usize,
    ) -> *const u32 {
        let tile = self.map.tile(layer, blocks, head, position);
        assert!(tile + self.map.tile_len() <= self.data.len());
        // Tiles are a multiple of 64 bytes long in a buffer aligned to a page.
        self.data.as_ptr().wrapping_add(tile).cast_const().cast()
    }
}
