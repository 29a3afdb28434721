//! What a CPU backend is made of.

use baton_types::KvDtype;

use crate::load::{WeightsCache, WeightsMemory};
use crate::pool::SpinPolicy;
use crate::simd::Isa;

/// Blocks are made of tiles of so many tokens.
const TILE_TOKENS: usize = 16;
const MAX_BLOCK_TOKENS: usize = 4096;
pub const THREADS_MAX: usize = 1024;

/// Sizes of a backend.
#[derive(Clone, Debug)]
pub struct CpuConfig {
    /// Threads that compute, the caller's included.
    pub threads: usize,
    /// `None`: the best that the processor has.
    pub isa: Option<Isa>,
    pub spin: SpinPolicy,
    /// Tokens of a KV block, a multiple of 16.
    pub block_tokens: usize,
    /// Precision of the KV pool: bfloat16, bytes or halves of bytes.
    pub kv_dtype: KvDtype,
    /// Blocks of the KV pool.
    pub kv_blocks: usize,
    pub max_step_tokens: usize,
    pub max_logit_rows: usize,
    /// Where packed weights are kept from one start to the next.
    pub weights_cache: WeightsCache,
    pub weights_memory: WeightsMemory,
}

impl Default for CpuConfig {
    /// All cores, room for 16,384 tokens in blocks of 16, and nothing kept on a disk.
    fn default() -> Self {
        Self {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            isa: None,
            spin: SpinPolicy::Auto,
            block_tokens: 16,
            kv_dtype: KvDtype::Bf16,
            kv_blocks: 1024,
            max_step_tokens: 512,
            max_logit_rows: 64,
            weights_cache: WeightsCache::Off,
            weights_memory: WeightsMemory::Auto,
        }
    }
}

/// Why a backend could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    #[error("{name} = {value} is not supported: {want}")]
    Config { name: &'static str, value: usize, want: &'static str },
    #[error("a KV pool of {0} is not supported: bf16, int8 or int4")]
    KvDtype(KvDtype),
    #[error("this processor has no {}; choose another instruction set or none", .0.as_str())]
    Isa(Isa),
    #[error("no memory for {what} ({error})")]
    Memory { what: String, error: std::io::Error },
    #[error("the model's files were changed while they were read; start again when they are whole")]
    ModelChanged,
    #[error("cannot start the engine's threads: {0}")]
    Threads(#[source] std::io::Error),
}

impl CpuError {
    pub(crate) fn no_memory(what: String) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::Memory { what, error }
    }
}

impl CpuConfig {
    pub(super) fn pool_text(&self) -> String {
        let Self { kv_blocks, block_tokens, .. } = self;
        format!("a KV pool of {kv_blocks} blocks of {block_tokens} tokens; make it smaller")
    }

    pub(super) fn step_text(&self) -> String {
        let Self { max_step_tokens, max_logit_rows, .. } = self;
        format!("steps of {max_step_tokens} tokens and {max_logit_rows} sequences; allow fewer")
    }

    pub(super) fn check(&self) -> Result<(), CpuError> {
        let fail = |name, value, want| Err(CpuError::Config { name, value, want });
        if !(1..=THREADS_MAX).contains(&self.threads) {
            return fail("threads", self.threads, "1 to 1024");
        }
        let block = self.block_tokens;
        if block == 0 || !block.is_multiple_of(TILE_TOKENS) || block > MAX_BLOCK_TOKENS {
            return fail("block_tokens", block, "a multiple of 16 up to 4096");
        }
        if self.kv_blocks == 0 || u32::try_from(self.kv_blocks).is_err() {
            return fail("kv_blocks", self.kv_blocks, "1 to 2^32 - 1");
        }
        if self.max_step_tokens == 0 {
            return fail("max_step_tokens", 0, "at least 1");
        }
        if self.max_logit_rows == 0 {
            return fail("max_logit_rows", 0, "at least 1");
        }
        if !self.kv_dtype.is_stored() {
            return Err(CpuError::KvDtype(self.kv_dtype));
        }
        match self.isa {
            Some(isa) if !isa.is_available() => Err(CpuError::Isa(isa)),
            _ => Ok(()),
        }
    }
}
