//! Rotation, the KV store, and attention over pages.

use baton_types::{KvDtype, ModelSpec};

use super::super::CpuBackend;
use super::super::batch::{Batch, QueryTile, Row, TILE_ROWS, UNITS_PER_THREAD, Unit, Work};
use super::super::buffers::AttentionScratch;
use super::super::pages::SharedPages;
use crate::kernels::attention::{CHUNK_TILES, Chunk, Partial, TILE_TOKENS};
use crate::kernels::dispatch::{Merge, NormHeads, Rotate};
use crate::kernels::hadamard;
use crate::memory::Parts;
use crate::pool::{Pieces, share};

/// Query and output rows of a step, and where they lie.
#[derive(Clone, Copy)]
struct Shapes {
    head_dim: usize,
    /// Query heads of one KV head.
    group: usize,
    query_stride: usize,
    out_stride: usize,
    /// Whether heads are stored rotated by `hadamard`.
    is_spread: bool,
}

/// The kernels that fit the pages.
#[derive(Clone, Copy)]
struct AttentionKernels {
    attend: unsafe fn(&mut Chunk<'_>),
    merge: unsafe fn(&mut Merge<'_>),
}

impl CpuBackend {
    /// Adds Q's, K's and V's bias, normalises the heads of Q and K, rotates them in place (Q scaled
    /// for a softmax in base 2), and stores K and V. Where a token sees sinks apart from its
    /// window, its queries of these are rotated to where it stands behind them, and wait in
    /// `attended`, whose place in a row they have, until attention is done with them.
    pub(super) fn rotate_and_store(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, ropes, kernels, pool, pages, buffers, .. } = self;
        let (spec, weights) = (model.spec(), &weights.layers[layer]);
        let (columns, head_dim) = (weights.columns, spec.head_dim);
        let (query_width, kv_width) = (spec.heads * head_dim, spec.kv_heads * head_dim);
        let scalar = spec.features.query_scalar.unwrap_or(head_dim as f32);
        let scale = std::f32::consts::LOG2_E / scalar.sqrt();
        let table = ropes.of(spec.window(layer).is_some());
        let parts = [
            (0, query_width, scale, weights.q_norm.as_deref()),
            (columns.k, kv_width, 1.0, weights.k_norm.as_deref()),
        ];
        let is_spread = is_spread(pages.layout().dtype);
        let (qkv, pages) = (buffers.qkv.parts(), pages.shared());
        let sink_queries = buffers.attended.parts();
        let threads = pool.threads();
        pool.run_rows(batch.rows.len(), &|thread| {
            for row in share(batch.rows.len(), threads, thread) {
                let &Row { position, span, streaming, .. } = &batch.rows[row];
                let start = row * columns.stride;
                // SAFETY: each row belongs to one thread.
                let qkv = unsafe { qkv.of_mut(start..start + columns.stride) };
                if let Some(bias) = &weights.qkv_bias {
                    qkv.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
                }
                for (first, width, scale, norm) in parts {
                    let heads = &mut qkv[first..first + width];
                    if let Some(weight) = norm {
                        let eps = spec.norm_eps;
                        // SAFETY: the kernels exist on this processor.
                        unsafe { (kernels.norm_heads)(&mut NormHeads { heads, weight, eps }) };
                    }
                    if let Some(streaming) = streaming.filter(|_| first == 0) {
                        let start = row * query_width;
                        // SAFETY: each row belongs to one thread.
                        let sinks = unsafe { sink_queries.of_mut(start..start + query_width) };
                        sinks.copy_from_slice(heads);
                        let angles = table.held_angles(streaming.cache_tokens() - 1);
                        let mut job = Rotate { angles, heads: sinks, head_dim, scale };
                        // SAFETY: the kernels exist on this processor.
                        unsafe { (kernels.rotate)(&mut job) };
                        if is_spread {
                            sinks.chunks_exact_mut(head_dim).for_each(hadamard::rotate);
                        }
                    }
                    let angles = table.angles(position, row);
                    let mut job = Rotate { angles, heads, head_dim, scale };
                    // SAFETY: the kernels exist on this processor.
                    unsafe { (kernels.rotate)(&mut job) };
                }
                if is_spread {
                    for (first, width) in
                        [(0, query_width), (columns.k, kv_width), (columns.v, kv_width)]
                    {
                        let heads = &mut qkv[first..first + width];
                        heads.chunks_exact_mut(head_dim).for_each(hadamard::rotate);
                    }
                }
                for head in 0..spec.kv_heads {
                    let k = &qkv[columns.k + head * head_dim..][..head_dim];
                    let v = &qkv[columns.v + head * head_dim..][..head_dim];
                    // SAFETY: spans write into pages of their own, and a row's token is its own.
                    unsafe { pages.store(layer, batch.blocks[span], head, position, k, v) };
                }
            }
        });
    }

    /// `attended[row] = softmax(q · Kᵀ) · V` for each head, over the pages of the row's span.
    pub(super) fn attend(&mut self, batch: &Batch<'_>, layer: usize) {
        let Self { model, weights, kernels, pool, pages, cost, buffers, .. } = self;
        let stride = weights.layers[layer].columns.stride;
        let shapes = shapes(model.spec(), stride, pages.layout().dtype);
        let work = batch.attention(model.spec().window(layer).is_some());
        // A product with K and one with V, of two operations each.
        let flops = (4 * work.keys_seen * shapes.out_stride) as u64;
        cost.flops += flops;
        if pages.layout().dtype != KvDtype::Bf16 {
            cost.dot_ops += flops / 2;
        }
        cost.kv_bytes += (work.keys_read * pages.layout().token_layer_bytes()) as u64;
        if work.is_split {
            let rows = TILE_ROWS.max(shapes.group);
            while buffers.partials.len() < work.units.len() {
                buffers.partials.push(Partial::new(rows, shapes.head_dim));
            }
        }
        let (queries, out) = (buffers.qkv.parts(), buffers.attended.parts());
        let partials = Parts::new(&mut buffers.partials);
        let scratches = Parts::new(&mut buffers.attention);
        let attend = match pages.layout().dtype {
            KvDtype::Int8 => kernels.attend_int8,
            KvDtype::Int4 => kernels.attend_int4,
            _ => kernels.attend_bf16,
        };
        let kernels = AttentionKernels { attend, merge: kernels.merge };
        let pages = pages.shared();
        let pieces = Pieces::new(work.units.len(), 1);
        // With units enough, each thread takes its next one early, so that memory can be asked for
        // its keys.
        let looks_ahead = work.units.len() >= UNITS_PER_THREAD * pool.threads();
        pool.run(&|thread| {
            // SAFETY: each thread has its own scratch.
            let scratch = unsafe { &mut scratches.of_mut(thread..thread + 1)[0] };
            let mut next = None;
            while let Some(piece) = next.take().or_else(|| pieces.take()) {
                if looks_ahead {
                    next = pieces.take();
                }
                let unit = &work.units[piece.start];
                let ahead = next.as_ref().map(|piece| &work.units[piece.start]);
                let tile = &batch.tiles[unit.tile];
                // SAFETY: queries are only read in this stage, those of sinks by the unit alone
                // that overwrites them; and no page is written.
                unsafe {
                    let all = (queries, shapes.query_stride);
                    load_queries(shapes, tile, unit.head, all, &mut scratch.queries);
                    if tile.streaming.is_some() {
                        let all = (out, shapes.out_stride);
                        load_queries(shapes, tile, unit.head, all, &mut scratch.sink_queries);
                    }
                    let keys = Keys { batch, layer, window: work.window, pages };
                    attend_unit(kernels, shapes, keys, unit, ahead, scratch);
                }
                if work.is_split {
                    // SAFETY: each unit has its own partial.
                    let partial = unsafe { &mut partials.of_mut(piece)[0] };
                    std::mem::swap(partial, &mut scratch.state);
                } else {
                    // SAFETY: a tile's rows of one head belong to one unit.
                    unsafe { finish(shapes, tile, unit.head, &scratch.state, out) };
                }
            }
        });
        if work.is_split {
            merge_units(batch, work, shapes, kernels, &mut buffers.partials, out);
        }
    }
}

/// Whether heads of Q, K and V are rotated before they are rounded, and outputs back.
fn is_spread(dtype: KvDtype) -> bool {
    dtype == KvDtype::Int4
}

fn shapes(spec: &ModelSpec, query_stride: usize, dtype: KvDtype) -> Shapes {
    Shapes {
        head_dim: spec.head_dim,
        group: spec.heads / spec.kv_heads,
        query_stride,
        out_stride: spec.heads * spec.head_dim,
        is_spread: is_spread(dtype),
    }
}

/// Gathers the tile's queries of one KV head, token by token, from rows with a stride.
///
/// # Safety
/// Nobody writes the queries.
unsafe fn load_queries(
    shapes: Shapes,
    tile: &QueryTile,
    head: usize,
    (queries, stride): (Parts<'_, f32>, usize),
    out: &mut [f32],
) {
    let width = shapes.group * shapes.head_dim;
    for (i, row) in tile.rows.clone().enumerate() {
        let start = row * stride + head * width;
        // SAFETY: the caller's promise.
        let from = unsafe { queries.of(start..start + width) };
        out[i * width..(i + 1) * width].copy_from_slice(from);
    }
}

/// Where the keys of a layer lie, for all units.
#[derive(Clone, Copy)]
struct Keys<'a> {
    batch: &'a Batch<'a>,
    layer: usize,
    window: Option<usize>,
    pages: SharedPages<'a>,
}

impl Keys<'_> {
    /// The tiles of chunk `at` of `unit`. Pages before the first key that is seen may be gone, and
    /// none is behind the last: the nearest tile stands for theirs.
    fn tiles(&self, unit: &Unit, at: usize) -> [*const u8; CHUNK_TILES] {
        let tile = &self.batch.tiles[unit.tile];
        let (chunk, blocks) = (tile.chunk(at, self.window), self.batch.blocks[tile.span]);
        let first = tile.keys(tile.position, chunk, self.window).start;
        let last = tile.keys(tile.last_position(), chunk, self.window).end - 1;
        let mut tiles = [std::ptr::null(); CHUNK_TILES];
        for (t, pointer) in tiles.iter_mut().enumerate() {
            let position = (chunk.first + t * TILE_TOKENS).clamp(first, last);
            *pointer = self.pages.tile(self.layer, blocks, unit.head, position);
        }
        tiles
    }
}

/// Attends over the unit's chunks in ascending order; the result is `scratch.state`. `ahead` is
/// what this thread turns to next.
///
/// # Safety
/// Nobody writes a page of the tile's span.
unsafe fn attend_unit(
    kernels: AttentionKernels,
    shapes: Shapes,
    keys: Keys<'_>,
    unit: &Unit,
    ahead: Option<&Unit>,
    scratch: &mut AttentionScratch,
) {
    let tile = &keys.batch.tiles[unit.tile];
    let rows = tile.rows.len() * shapes.group;
    let mut tiles = keys.tiles(unit, unit.chunks.start);
    for at in unit.chunks.clone() {
        let chunk = tile.chunk(at, keys.window);
        scratch.from.clear();
        scratch.visible.clear();
        for position in tile.position..=tile.last_position() {
            let seen = tile.keys(position, chunk, keys.window);
            let (from, visible) = (seen.start - chunk.first, seen.end - chunk.first);
            scratch.from.extend(std::iter::repeat_n(from as u32, shapes.group));
            scratch.visible.extend(std::iter::repeat_n(visible as u32, shapes.group));
        }
        let next = if at + 1 < unit.chunks.end {
            keys.tiles(unit, at + 1)
        } else {
            ahead.map_or(tiles, |ahead| keys.tiles(ahead, ahead.chunks.start))
        };
        let is_first = at == unit.chunks.start;
        let queries = if chunk.is_sinks { &scratch.sink_queries } else { &scratch.queries };
        let mut job = Chunk {
            dim: shapes.head_dim,
            queries,
            from: &scratch.from,
            visible: &scratch.visible,
            tiles,
            next,
            quants: &mut scratch.quants,
            scores: &mut scratch.scores,
            out: if is_first { &mut scratch.state } else { &mut scratch.chunk },
        };
        // SAFETY: tiles up to the last visible position are pages of the span.
        unsafe { (kernels.attend)(&mut job) };
        if !is_first {
            let (state, later) = (&mut scratch.state, &scratch.chunk);
            // SAFETY: the kernels exist on this processor.
            unsafe { (kernels.merge)(&mut Merge { state, later, rows, dim: shapes.head_dim }) };
        }
        tiles = next;
    }
}

/// Divides by the sums and writes the tile's outputs of one KV head.
///
/// # Safety
/// Nobody else reads or writes these outputs.
unsafe fn finish(
    shapes: Shapes,
    tile: &QueryTile,
    head: usize,
    state: &Partial,
    out: Parts<'_, f32>,
) {
    let (group, dim) = (shapes.group, shapes.head_dim);
    for (i, row) in tile.rows.clone().enumerate() {
        let start = row * shapes.out_stride + head * group * dim;
        // SAFETY: the caller's promise.
        let out = unsafe { out.of_mut(start..start + group * dim) };
        for (g, out) in out.chunks_exact_mut(dim).enumerate() {
            let query = i * group + g;
            let values = &state.values[query * dim..][..dim];
            for (out, value) in out.iter_mut().zip(values) {
                *out = value / state.sum[query];
            }
            if shapes.is_spread {
                hadamard::rotate(out);
            }
        }
    }
}

/// Merges single chunks, ascending, as a unit of all chunks would have.
fn merge_units(
    batch: &Batch<'_>,
    work: &Work,
    shapes: Shapes,
    kernels: AttentionKernels,
    partials: &mut [Partial],
    out: Parts<'_, f32>,
) {
    let mut first = 0;
    while first < work.units.len() {
        let unit = &work.units[first];
        let tile = &batch.tiles[unit.tile];
        let rows = tile.rows.len() * shapes.group;
        let chunks = tile.chunks(work.window);
        let (state, later) = partials[first..first + chunks].split_at_mut(1);
        for later in later {
            let state = &mut state[0];
            // SAFETY: the kernels exist on this processor.
            unsafe { (kernels.merge)(&mut Merge { state, later, rows, dim: shapes.head_dim }) };
        }
        // SAFETY: the stage is over and this is the only thread.
        unsafe { finish(shapes, tile, unit.head, &state[0], out) };
        first += chunks;
    }
}
