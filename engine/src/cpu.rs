//! The CPU backend: packed weights, paged KV, and one step through all layers.

mod batch;
mod buffers;
mod config;
mod forward;
mod pages;

use baton_model_files::ModelFile;
use baton_types::{BlockId, KvLayout, ModelSpec, NumericsVersion};

pub use config::{CpuConfig, CpuError, THREADS_MAX};

use crate::backend::{Backend, BackendError, KvRead, KvSpan, LayerSink, Span, StepCost};
use crate::kernels::dispatch::Kernels;
use crate::kernels::rope::RopeTables;
use crate::load::{LoadObserver, NoObserver};
use crate::pool::Pool;
use crate::simd::Isa;
use crate::weights::{Loader, Weights};
use batch::Batch;
use buffers::Buffers;
use pages::Pages;

/// Names the arithmetic of this module, to which the precision of KV is added; every instruction
/// set yields the same bits. Change it with any change of the order of operations.
const NUMERICS: &str = "x86-int8.1";

/// One model on this machine's processor.
pub struct CpuBackend {
    model: ModelFile,
    weights: Weights,
    ropes: RopeTables,
    kernels: Kernels,
    pool: Pool,
    pages: Pages,
    buffers: Buffers,
    cost: StepCost,
    numerics: NumericsVersion,
    max_step_tokens: usize,
    max_logit_rows: usize,
}

impl CpuBackend {
    /// As [`load`](Self::load), unobserved.
    ///
    /// # Errors
    /// As `load`.
    pub fn new(model: &ModelFile, config: CpuConfig) -> Result<Self, CpuError> {
        Self::load(model, config, &NoObserver)
    }

    /// Finds or packs `model`'s weights and reserves the KV pool. `observer` hears how it gets on.
    ///
    /// # Errors
    /// When the configuration makes no sense, the processor lacks the instruction set, or there is
    /// no memory.
    pub fn load(
        model: &ModelFile,
        config: CpuConfig,
        observer: &dyn LoadObserver,
    ) -> Result<Self, CpuError> {
        config.check()?;
        let spec = model.spec();
        let layout = KvLayout {
            layers: spec.layers as u16,
            kv_heads: spec.kv_heads as u16,
            head_dim: spec.head_dim as u16,
            block_tokens: config.block_tokens as u16,
            dtype: config.kv_dtype,
        };
        let (threads, memory) = (config.threads, config.weights_memory);
        let loader = Loader { model, threads, memory, observer };
        let weights = loader.load(&config.weights_cache)?;
        let positions = spec.context_tokens.min(config.kv_blocks * config.block_tokens);
        Ok(Self {
            ropes: RopeTables::new(spec, positions),
            kernels: Kernels::new(config.isa.unwrap_or_else(Isa::detect)),
            pool: Pool::new(config.threads, config.spin).map_err(CpuError::Threads)?,
            pages: Pages::new(layout, config.kv_blocks)
                .map_err(CpuError::no_memory(config.pool_text()))?,
            buffers: Buffers::new(spec, &weights, &config)
                .map_err(CpuError::no_memory(config.step_text()))?,
            cost: StepCost::default(),
            numerics: NumericsVersion::new(NUMERICS, config.kv_dtype),
            max_step_tokens: config.max_step_tokens,
            max_logit_rows: config.max_logit_rows,
            model: model.clone(),
            weights,
        })
    }

    /// The instruction set that the kernels use.
    pub fn isa(&self) -> Isa {
        self.kernels.isa
    }

    /// Threads of the pool, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
}

impl std::fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuBackend")
            .field("model", &self.model.spec().name)
            .field("isa", &self.kernels.isa)
            .field("threads", &self.pool.threads())
            .field("layout", self.pages.layout())
            .finish_non_exhaustive()
    }
}

impl Backend for CpuBackend {
    fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    fn kv_layout(&self) -> &KvLayout {
        self.pages.layout()
    }

    fn kv_blocks(&self) -> usize {
        self.pages.blocks()
    }

    fn numerics(&self) -> &NumericsVersion {
        &self.numerics
    }

    fn max_step_tokens(&self) -> usize {
        self.max_step_tokens
    }

    fn max_logit_rows(&self) -> usize {
        self.max_logit_rows
    }

    fn step(
        &mut self,
        spans: &[Span<'_>],
        sink: &mut dyn LayerSink,
    ) -> Result<&[f32], BackendError> {
        let batch = Batch::plan(spans, self.model.spec(), &self.pages, self.pool.threads());
        assert!(batch.rows.len() <= self.max_step_tokens, "step exceeds max_step_tokens");
        assert!(batch.logit_rows.len() <= self.max_logit_rows, "step exceeds max_logit_rows");
        self.cost = StepCost::default();
        Ok(self.forward(&batch, sink))
    }

    fn last_cost(&self) -> StepCost {
        self.cost
    }

    fn write_kv(&mut self, span: &KvSpan<'_>, payload: &[u8]) -> Result<(), BackendError> {
        self.pages.write(span, payload)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId, tokens: usize) {
        self.pages.copy_block(from, to, tokens);
    }

    fn kv(&self) -> &dyn KvRead {
        &self.pages
    }
}
