//! One request inside the engine: its phase, its choices, its times.

use std::sync::Arc;
use std::time::Instant;

use baton_kv_cache::{BlockTable, HashKey, prefix_hashes};
use baton_types::{
    BlockHash, Error, FinishReason, GenerateRequest, ModelSpec, TokenId, TokenLogprobs, TokenOutput,
};

use crate::sampler::SamplerState;

/// Where a request's events go. Called on the engine's thread, so it must not block.
pub trait Outbox: Send {
    fn send(&self, event: EngineEvent);
}

/// Where the KV of a handoff goes: computed spans, layer by layer. Called on the engine's thread.
pub trait SpanExport: Send {
    fn export(&mut self, span: ExportedSpan);
}

/// K and V of consecutive prompt tokens in one layer, as `KvRead::read_kv` yields them.
#[derive(Debug)]
pub struct ExportedSpan {
    pub layer: u16,
    pub token_first: u32,
    pub token_count: u32,
    pub payload: Vec<u8>,
}

/// What becomes of a request, in order; `Finished` or `Failed` is the last, exactly once.
#[derive(Debug)]
pub enum EngineEvent {
    Token(TokenOutput),
    /// For prompt tokens 1.. in order.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// A handoff's prompt is computed and exported, and each choice's first token is drawn.
    Prefilled(Prefilled),
    ChoiceFinished {
        choice: u16,
        reason: FinishReason,
    },
    Finished(RunStats),
    Failed(Error),
}

/// All that a decode node needs to go on, besides the KV.
#[derive(Clone, Debug)]
pub struct Prefilled {
    pub first_tokens: Vec<TokenOutput>,
    /// Over the sampler states of all choices, see [`sampler_digest`].
    pub sampler_digest: [u8; 32],
}

/// What a request took here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunStats {
    /// Prompt tokens that the prefix cache held.
    pub cached_tokens: u32,
    /// Tokens whose KV was computed here for the prompt, recomputation included.
    pub computed_tokens: u32,
    /// From submission to the first step.
    pub queued_us: u64,
    /// From submission to the first token drawn or taken over.
    pub first_token_us: u64,
    pub finished_us: u64,
    pub preemptions: u32,
}

/// What an answer has delivered already, before this node took it over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    pub ids: Vec<TokenId>,
    pub finished: bool,
}

/// What the engine is asked to do with a request.
pub enum Work {
    /// Prefill and decode.
    Generate,
    /// Prefill, hand the KV of prompt tokens from `skip_tokens` on to `export`, draw each
    /// choice's first token, and end.
    Prefill { skip_tokens: usize, export: Box<dyn SpanExport> },
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Work::Generate => f.write_str("Generate"),
            Work::Prefill { skip_tokens, .. } => write!(f, "Prefill from {skip_tokens}"),
        }
    }
}

pub(super) enum Phase {
    /// Waits for a place in the batch.
    Waiting,
    /// Holds blocks for the whole prompt; its KV comes from another node, or it is told to
    /// compute it here.
    Reserved(BlockTable),
    /// Computes the prompt.
    Prompt(BlockTable),
    /// One table for each choice; `None` for those that have finished.
    Answering(Vec<Option<BlockTable>>),
}

pub(super) struct Choice {
    pub generated: Vec<TokenId>,
    pub sampler: SamplerState,
    pub finished: bool,
}

pub(super) struct Run {
    pub request: Arc<GenerateRequest>,
    pub outbox: Box<dyn Outbox>,
    pub work: Work,
    pub phase: Phase,
    pub choices: Vec<Choice>,
    pub key: HashKey,
    pub prompt_hashes: Vec<BlockHash>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// All KV that it holds is what this node computes for these tokens; other KV, and what was
    /// computed from it, has no hash.
    pub is_exact: bool,
    /// Of a handoff: what the commit carries.
    pub first_tokens: Vec<TokenOutput>,
    pub deadline: Instant,
    pub submitted: Instant,
    pub started: bool,
    pub stats: RunStats,
}

impl Run {
    pub fn new(
        request: GenerateRequest,
        delivered: &[Delivered],
        work: Work,
        outbox: Box<dyn Outbox>,
        key: HashKey,
        now: Instant,
    ) -> Self {
        let choices = (0..request.choices)
            .map(|choice| {
                let before = delivered.get(choice as usize).cloned().unwrap_or_default();
                Choice {
                    sampler: SamplerState::replay(&request, choice, &before.ids),
                    generated: before.ids,
                    finished: before.finished,
                }
            })
            .collect();
        Self {
            deadline: now + std::time::Duration::from_millis(request.deadline_ms),
            prompt_hashes: hashes(&key, &request, &request.prompt),
            request: Arc::new(request),
            outbox,
            work,
            phase: Phase::Waiting,
            choices,
            key,
            prompt_logprobs: Vec::new(),
            is_exact: true,
            first_tokens: Vec::new(),
            submitted: now,
            started: false,
            stats: RunStats::default(),
        }
    }

    pub fn emit(&self, event: EngineEvent) {
        self.outbox.send(event);
    }

    pub fn since_submission_us(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.submitted).as_micros() as u64
    }

    /// Prompt and answer of one choice.
    pub fn tokens_of(&self, choice: usize) -> Vec<TokenId> {
        let generated = &self.choices[choice].generated;
        self.request.prompt.iter().chain(generated).copied().collect()
    }

    /// The hashes of `tokens`, as far as they may be cached under them.
    pub fn hashes_of(&self, tokens: &[TokenId]) -> Vec<BlockHash> {
        hashes(&self.key, &self.request, tokens)
    }

    /// Ids that may not be drawn next: those that end an answer, before `min_tokens`.
    pub fn banned(&self, choice: usize, spec: &ModelSpec) -> Vec<TokenId> {
        let stop = &self.request.stop;
        if self.choices[choice].generated.len() >= stop.min_tokens as usize {
            return Vec::new();
        }
        stop.stop_token_ids.iter().chain(&spec.eos_ids).copied().collect()
    }

    /// Whether a choice's answer ends with the last token that it has.
    pub fn finish_reason(&self, choice: usize, spec: &ModelSpec) -> Option<FinishReason> {
        let generated = &self.choices[choice].generated;
        let stop = &self.request.stop;
        let last = generated.last()?;
        let eos = !stop.ignore_eos && spec.eos_ids.contains(last);
        if eos || stop.stop_token_ids.contains(last) {
            return Some(FinishReason::Stop);
        }
        let most = self.request.context_tokens(spec.context_tokens);
        let full = self.request.prompt.len() + generated.len() >= most;
        (full || generated.len() >= stop.max_tokens as usize).then_some(FinishReason::Length)
    }

    pub fn wants_prompt_logprobs(&self) -> bool {
        let missing = self.prompt_logprobs.len() + 1 < self.request.prompt.len();
        self.request.prompt_logprobs.is_some() && missing
    }
}

/// What is behind the cacheable tokens depends on what the request sees, and has no hash.
fn hashes(key: &HashKey, request: &GenerateRequest, tokens: &[TokenId]) -> Vec<BlockHash> {
    prefix_hashes(key, &tokens[..tokens.len().min(request.cacheable_tokens())])
}

/// The digest over all choices' sampler states that a handoff's commit carries.
pub fn sampler_digest<'a>(states: impl Iterator<Item = &'a SamplerState>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    states.for_each(|state| {
        hasher.update(&state.digest());
    });
    *hasher.finalize().as_bytes()
}
