//! The KV pool: pages of K and V as the attention kernel reads them.
//!
//! `[layer][block][kv head][tile of 16 tokens]`, tiles as `kernels::attention::format` says. With
//! `E` bytes for an element: K `[dim / (4 / E)][token][4 / E]`, V `[token / E][dim][E]`; halves of
//! bytes as `nibbles` says; then, where elements are bytes or halves of them, the scales of K
//! `[token]` and of V `[token]`, in half precision.

use baton_types::{BlockId, KvDtype, KvLayout};

use crate::backend::{BackendError, KvRead, KvSpan};
use crate::kernels::attention::TILE_TOKENS;
use crate::kernels::attention::format::{Bf16, Int4, Int8, K_OFFSET, StoredScale, TileFormat};
use crate::kernels::numerics::bf16_round;
use crate::memory::{Buffer, Parts};

mod nibbles;
#[cfg(test)]
mod tests;

/// Bytes of K of one token that lie together.
const LANE_BYTES: usize = 4;
/// Bytes of a scale.
const SCALE_BYTES: usize = 2;

/// Where a token's K and V of one head lie, in bytes.
#[derive(Clone, Copy)]
struct Slot {
    /// First byte of the tile.
    tile: usize,
    /// Token within the tile.
    token: usize,
    dim: usize,
    /// From the tile's first byte to its scales, where it has some.
    scales: usize,
}

impl Slot {
    /// Element `d` of K, of `E` bytes.
    #[inline(always)]
    fn k<const E: usize>(&self, d: usize) -> usize {
        let in_lane = LANE_BYTES / E;
        self.k_lane(d / in_lane) + d % in_lane * E
    }

    /// The four bytes of K that lie together, whatever an element takes.
    #[inline(always)]
    fn k_lane(&self, lane: usize) -> usize {
        self.tile + lane * (LANE_BYTES * TILE_TOKENS) + self.token * LANE_BYTES
    }

    /// Element `d` of V, of `E` bytes.
    #[inline(always)]
    fn v<const E: usize>(&self, d: usize) -> usize {
        let v = self.tile + E * self.dim * TILE_TOKENS;
        v + self.token / E * (E * E * self.dim) + d * (E * E) + self.token % E * E
    }

    #[inline(always)]
    fn element<const E: usize>(&self, is_value: bool, d: usize) -> usize {
        if is_value { self.v::<E>(d) } else { self.k::<E>(d) }
    }

    /// The scale of K or of V.
    fn scale(&self, is_value: bool) -> usize {
        let half = usize::from(is_value) * TILE_TOKENS;
        self.tile + self.scales + (half + self.token) * SCALE_BYTES
    }
}

/// How pages lie in the pool.
#[derive(Clone, Copy)]
pub(super) struct PageMap {
    layout: KvLayout,
    blocks: usize,
    /// Bytes of one tile.
    tile_bytes: usize,
    /// Those before its scales, where it has some.
    scales_at: usize,
}

impl PageMap {
    /// # Panics
    /// Where no kernel reads that precision: `CpuConfig::check` has refused it.
    fn new(layout: KvLayout, blocks: usize) -> Self {
        let dim = layout.head_dim as usize;
        let (tile_bytes, scales_at) = match layout.dtype {
            KvDtype::Bf16 => (Bf16::tile_bytes(dim), Bf16::tile_bytes(dim)),
            KvDtype::Int8 => (Int8::tile_bytes(dim), Int8::scales_at(dim)),
            KvDtype::Int4 => (Int4::tile_bytes(dim), Int4::scales_at(dim)),
            KvDtype::F32 | KvDtype::F16 => panic!("no pages of {}", layout.dtype),
        };
        let map = Self { layout, blocks, tile_bytes, scales_at };
        assert!(map.page_bytes() * layout.layers as usize == layout.block_bytes());
        map
    }

    fn has_scales(&self) -> bool {
        self.layout.dtype.scale_bytes() > 0
    }

    fn head_dim(&self) -> usize {
        self.layout.head_dim as usize
    }

    fn block_tokens(&self) -> usize {
        self.layout.block_tokens as usize
    }

    /// Bytes of one page in one layer.
    fn page_bytes(&self) -> usize {
        let tiles = self.block_tokens() / TILE_TOKENS * self.layout.kv_heads as usize;
        tiles * self.tile_bytes
    }

    fn page(&self, layer: usize, block: BlockId) -> usize {
        assert!((block.0 as usize) < self.blocks, "block {block} is not in the pool");
        (layer * self.blocks + block.0 as usize) * self.page_bytes()
    }

    /// First byte of the tile of position `position` and one head.
    fn tile(&self, layer: usize, blocks: &[BlockId], head: usize, position: usize) -> usize {
        let block = blocks[position / self.block_tokens()];
        let tiles = self.block_tokens() / TILE_TOKENS;
        let tile = head * tiles + position % self.block_tokens() / TILE_TOKENS;
        self.page(layer, block) + tile * self.tile_bytes
    }

    fn slot(&self, layer: usize, blocks: &[BlockId], head: usize, position: usize) -> Slot {
        Slot {
            tile: self.tile(layer, blocks, head, position),
            token: position % TILE_TOKENS,
            dim: self.head_dim(),
            scales: self.scales_at,
        }
    }

    /// Bytes of the span's K and V.
    fn span_bytes(&self, span: &KvSpan<'_>) -> usize {
        let all = self.layout.kv_heads as usize;
        let heads = span.heads.range(all).len();
        self.layout.token_layer_bytes() / all * heads * span.token_count
    }

    /// The blocks that the span's tokens lie in; they are among those given.
    fn of_span<'a>(&self, span: &KvSpan<'a>) -> &'a [BlockId] {
        let (first, end) = (span.token_first, span.token_first + span.token_count);
        &span.blocks[first / self.block_tokens()..end.div_ceil(self.block_tokens())]
    }

    /// The span's K and V in canonical order: whether it is V, and where it lies.
    fn vectors(&self, span: &KvSpan<'_>) -> impl Iterator<Item = (bool, Slot)> {
        let &KvSpan { layer, blocks, token_first, token_count, heads } = span;
        let heads = heads.range(self.layout.kv_heads as usize);
        let of_half = move |is_value| {
            heads.clone().flat_map(move |head| {
                (token_first..token_first + token_count)
                    .map(move |position| (is_value, self.slot(layer, blocks, head, position)))
            })
        };
        [false, true].into_iter().flat_map(of_half)
    }
}

/// What turns K's bytes of the wire, which are signed, into those of a tile, and back.
fn k_flip<const E: usize>() -> u8 {
    if E == 1 { K_OFFSET } else { 0 }
}

/// The pool.
pub(super) struct Pages {
    map: PageMap,
    data: Buffer<u8>,
}

impl Pages {
    /// # Errors
    /// When the system has no room.
    pub(super) fn new(layout: KvLayout, blocks: usize) -> std::io::Result<Self> {
        let map = PageMap::new(layout, blocks);
        let bytes = (layout.layers as usize * blocks)
            .checked_mul(map.page_bytes())
            .ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self { map, data: Buffer::zeroed(bytes)? })
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
        let want = self.map.span_bytes(span);
        if payload.len() != want {
            return Err(BackendError::PayloadSize { got: payload.len(), want });
        }
        let scales = match self.map.layout.dtype {
            KvDtype::Int4 => self.write_nibbles(span, payload),
            KvDtype::Int8 => self.write_elements::<1>(span, payload),
            _ => self.write_elements::<2>(span, payload),
        };
        // Without scales nothing is left.
        let scales = scales.as_chunks::<SCALE_BYTES>().0;
        for ((is_value, slot), scale) in self.map.vectors(span).zip(scales) {
            self.data[slot.scale(is_value)..][..SCALE_BYTES].copy_from_slice(scale);
        }
        Ok(())
    }

    /// Places all elements, of `E` bytes each; returns what follows them.
    fn write_elements<'a, const E: usize>(
        &mut self,
        span: &KvSpan<'_>,
        payload: &'a [u8],
    ) -> &'a [u8] {
        let mut rest = payload;
        for (is_value, slot) in self.map.vectors(span) {
            let (vector, after) = rest.split_at(slot.dim * E);
            if is_value {
                for (d, element) in vector.as_chunks::<E>().0.iter().enumerate() {
                    self.data[slot.v::<E>(d)..][..E].copy_from_slice(element);
                }
            } else {
                for (lane, elements) in vector.as_chunks::<LANE_BYTES>().0.iter().enumerate() {
                    let elements = elements.map(|byte| byte ^ k_flip::<E>());
                    self.data[slot.k_lane(lane)..][..LANE_BYTES].copy_from_slice(&elements);
                }
            }
            rest = after;
        }
        rest
    }

    /// Appends all elements, of `E` bytes each.
    fn read_elements<const E: usize>(&self, span: &KvSpan<'_>, out: &mut Vec<u8>) {
        let (first, vector_bytes) = (out.len(), self.map.head_dim() * E);
        let vectors = 2 * span.heads.range(self.map.layout.kv_heads as usize).len();
        out.resize(first + vectors * span.token_count * vector_bytes, 0);
        let vectors = out[first..].chunks_exact_mut(vector_bytes);
        for ((is_value, slot), vector) in self.map.vectors(span).zip(vectors) {
            if is_value {
                for (d, element) in vector.as_chunks_mut::<E>().0.iter_mut().enumerate() {
                    element.copy_from_slice(&self.data[slot.v::<E>(d)..][..E]);
                }
            } else {
                for (lane, elements) in
                    vector.as_chunks_mut::<LANE_BYTES>().0.iter_mut().enumerate()
                {
                    elements.copy_from_slice(&self.data[slot.k_lane(lane)..][..LANE_BYTES]);
                    *elements = elements.map(|byte| byte ^ k_flip::<E>());
                }
            }
        }
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
                    for is_value in [false, true] {
                        self.copy_vector(source, target, is_value);
                    }
                }
            }
        }
    }

    fn copy_vector(&mut self, source: Slot, target: Slot, is_value: bool) {
        match self.map.layout.dtype {
            KvDtype::Int4 => self.copy_nibbles(source, target, is_value),
            KvDtype::Int8 => self.copy_elements::<1>(source, target, is_value),
            _ => self.copy_elements::<2>(source, target, is_value),
        }
        if self.map.has_scales() {
            let scale = source.scale(is_value);
            self.data.copy_within(scale..scale + SCALE_BYTES, target.scale(is_value));
        }
    }

    fn copy_elements<const E: usize>(&mut self, source: Slot, target: Slot, is_value: bool) {
        for d in 0..source.dim {
            let at = source.element::<E>(is_value, d);
            self.data.copy_within(at..at + E, target.element::<E>(is_value, d));
        }
    }

    fn check_span(&self, span: &KvSpan<'_>) -> Result<(), BackendError> {
        let end = span.token_first.saturating_add(span.token_count);
        let heads = self.map.layout.kv_heads as usize;
        let fits = span.layer < self.map.layout.layers as usize
            && span.heads.range(heads).end <= heads
            && end <= span.blocks.len() * self.map.block_tokens()
            && self.map.of_span(span).iter().all(|block| (block.0 as usize) < self.map.blocks);
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
        out.reserve(self.map.span_bytes(span));
        match self.map.layout.dtype {
            KvDtype::Int4 => self.read_nibbles(span, out),
            KvDtype::Int8 => self.read_elements::<1>(span, out),
            _ => self.read_elements::<2>(span, out),
        }
        if self.map.has_scales() {
            for (is_value, slot) in self.map.vectors(span) {
                out.extend_from_slice(&self.data[slot.scale(is_value)..][..SCALE_BYTES]);
            }
        }
    }
}

/// The pool during a step, when several threads write tokens of their own and read others'.
#[derive(Clone, Copy)]
pub(super) struct SharedPages<'a> {
    map: PageMap,
    data: Parts<'a, u8>,
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
        assert!(slot.tile + self.map.tile_bytes <= self.data.len());
        assert!(k.len() == slot.dim && v.len() == slot.dim);
        // SAFETY: the tile is in bounds, and its slot is this thread's by the caller's promise.
        unsafe {
            match self.map.layout.dtype {
                KvDtype::Int4 => self.store_nibbles(slot, k, v),
                KvDtype::Int8 => self.store_bytes(slot, k, v),
                _ => self.store_bf16(slot, k, v),
            }
        }
    }

    /// # Safety
    /// As [`store`](Self::store); the slot's tile is in bounds.
    unsafe fn store_bf16(&self, slot: Slot, k: &[f32], v: &[f32]) {
        let data = self.data.as_ptr();
        for (d, (k, v)) in k.iter().zip(v).enumerate() {
            // SAFETY: a slot's elements lie within its tile, at even bytes. Writes are of single
            // elements, since neighbours belong to other tokens.
            unsafe {
                *data.add(slot.k::<2>(d)).cast::<u16>() = bf16_round(*k);
                *data.add(slot.v::<2>(d)).cast::<u16>() = bf16_round(*v);
            }
        }
    }

    /// # Safety
    /// As [`store`](Self::store); the slot's tile is in bounds.
    unsafe fn store_bytes(&self, slot: Slot, k: &[f32], v: &[f32]) {
        let data = self.data.as_ptr();
        let scales = [StoredScale::of_bytes(k), StoredScale::of_bytes(v)];
        for (d, (k, v)) in k.iter().zip(v).enumerate() {
            // SAFETY: as in `store_bf16`.
            unsafe {
                *data.add(slot.k::<1>(d)) = scales[0].byte(*k) as u8 ^ K_OFFSET;
                *data.add(slot.v::<1>(d)) = scales[1].byte(*v) as u8;
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.store_scales(slot, scales) };
    }

    /// # Safety
    /// As [`store`](Self::store); the slot's tile is in bounds.
    unsafe fn store_scales(&self, slot: Slot, [k, v]: [StoredScale; 2]) {
        let data = self.data.as_ptr();
        for (is_value, scale) in [(false, k), (true, v)] {
            // SAFETY: as in `store_bf16`; scales lie at even bytes.
            unsafe { *data.add(slot.scale(is_value)).cast::<u16>() = scale.bits };
        }
    }

    /// The tile of position `position`, readable for a tile's bytes.
    pub(super) fn tile(
        &self,
        layer: usize,
        blocks: &[BlockId],
        head: usize,
        position: usize,
    ) -> *const u8 {
        let tile = self.map.tile(layer, blocks, head, position);
        assert!(tile + self.map.tile_bytes <= self.data.len());
        // Tiles are a multiple of 64 bytes long in a buffer aligned to a page.
        self.data.as_ptr().wrapping_add(tile).cast_const()
    }
}
