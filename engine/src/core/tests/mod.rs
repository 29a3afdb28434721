mod ledger;
mod prefix;
mod streaming;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_types::{
    FinishReason, SamplingParams, StopParams, StreamingAttention, TokenId, TokenLogprobs,
    TokenOutput,
};
use proptest::prelude::*;

use super::*;
use crate::backend::Heads;
use crate::sampler::SamplerState;
use ledger::{Ledger, VOCAB, logits_after};

#[derive(Clone, Default)]
struct Inbox(Arc<Mutex<Vec<EngineEvent>>>);

impl Outbox for Inbox {
    fn send(&self, event: EngineEvent) {
        self.0.lock().unwrap().push(event);
    }
}

#[derive(Debug, Default)]
struct Outcome {
    tokens: Vec<Vec<TokenId>>,
    finished: Vec<Option<FinishReason>>,
    failed: Option<Error>,
    stats: Option<RunStats>,
    prefilled: Option<Prefilled>,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
}

impl Inbox {
    fn outcome(&self, choices: usize) -> Outcome {
        let mut outcome = Outcome {
            tokens: vec![vec![]; choices],
            finished: vec![None; choices],
            ..Outcome::default()
        };
        for event in self.0.lock().unwrap().drain(..) {
            assert!(outcome.failed.is_none() && outcome.stats.is_none(), "after the terminal");
            match event {
                EngineEvent::Token(token) => {
                    let answer = &mut outcome.tokens[usize::from(token.choice)];
                    answer.push(token.id);
                }
                EngineEvent::PromptLogprobs(all) => outcome.prompt_logprobs = Some(all),
                EngineEvent::Prefilled(prefilled) => outcome.prefilled = Some(prefilled),
                EngineEvent::ChoiceFinished { choice, reason } => {
                    outcome.finished[usize::from(choice)] = Some(reason);
                }
                EngineEvent::Finished(stats) => outcome.stats = Some(stats),
                EngineEvent::Failed(error) => outcome.failed = Some(error),
            }
        }
        outcome
    }
}

struct Spans(Arc<Mutex<Vec<ExportedSpan>>>);

impl SpanExport for Spans {
    fn export(&mut self, span: ExportedSpan) {
        self.0.lock().unwrap().push(span);
    }
}

fn engine(blocks: usize, block_tokens: u16) -> Engine {
    let config = EngineConfig { mixed_prefill_tokens: 8, ..EngineConfig::default() };
    let backend = Box::new(Ledger::new(blocks, block_tokens));
    Engine::new(backend, ModelFingerprint([3; 32]), config)
}

fn request(id: u8, prompt: Vec<TokenId>, max_tokens: u32, choices: u16) -> GenerateRequest {
    GenerateRequest {
        id: RequestId([id; 16]),
        prompt,
        sampling: SamplingParams { seed: u64::from(id), ..SamplingParams::default() },
        stop: StopParams { max_tokens, min_tokens: 0, stop_token_ids: vec![], ignore_eos: false },
        choices,
        logprobs: None,
        prompt_logprobs: None,
        streaming_attention: None,
        tenant_salt: vec![],
        deadline_ms: 3_600_000,
    }
}

fn prompt(length: usize, salt: u32) -> Vec<TokenId> {
    (0..length as u32).map(|at| 1 + (at * 7 + salt * 13) % (VOCAB as u32 - 1)).collect()
}

/// The answer by the specification: no batch, no pages.
fn expected(request: &GenerateRequest, choice: u16) -> Vec<TokenId> {
    let mut answer = Vec::new();
    for _ in 0..request.stop.max_tokens {
        let tokens: Vec<TokenId> = request.prompt.iter().chain(&answer).copied().collect();
        let state = SamplerState::replay(request, choice, &answer);
        let streaming = request.streaming_attention;
        let unseen = streaming.map_or(0..0, |streaming| streaming.unseen(tokens.len() - 1));
        let seen = (0..tokens.len()).filter(|at| !unseen.contains(at));
        let logits = logits_after(seen.map(|at| tokens[at]));
        answer.push(state.draw(&logits, &request.sampling, &[], &mut Scratch::default()).unwrap());
    }
    answer
}

fn submit(engine: &mut Engine, request: &GenerateRequest) -> Inbox {
    let inbox = Inbox::default();
    engine
        .submit(request.clone(), &[], Work::Generate, Box::new(inbox.clone()), Instant::now())
        .unwrap();
    inbox
}

fn run_dry(engine: &mut Engine) {
    for _ in 0..20_000 {
        if !engine.has_work() {
            return;
        }
        engine.step(Instant::now());
    }
    panic!("the engine does not come to an end: {:?}", engine.status());
}

#[test]
fn choices_share_the_prompt_and_answer_apart() {
    let mut engine = engine(64, 16);
    let request = request(1, prompt(40, 1), 30, 3);
    let inbox = submit(&mut engine, &request);
    run_dry(&mut engine);
    let outcome = inbox.outcome(3);
    for choice in 0..3 {
        assert_eq!(outcome.tokens[usize::from(choice)], expected(&request, choice));
    }
    assert_ne!(outcome.tokens[0], outcome.tokens[1]);
    assert_eq!(outcome.finished, [Some(FinishReason::Length); 3]);
    assert_eq!(outcome.stats.unwrap().computed_tokens, 40);
    assert_eq!(engine.status().pool.used_blocks, 0);
}

#[test]
fn a_cached_prefix_is_not_computed_again() {
    let mut engine = engine(64, 16);
    let first = submit(&mut engine, &request(1, prompt(50, 1), 4, 1));
    run_dry(&mut engine);
    let again = request(1, prompt(50, 1), 4, 1);
    let second = submit(&mut engine, &again);
    run_dry(&mut engine);
    let (first, second) = (first.outcome(1), second.outcome(1));
    assert_eq!(first.tokens, second.tokens);
    assert_eq!(first.stats.unwrap().cached_tokens, 0);
    let stats = second.stats.unwrap();
    assert_eq!((stats.cached_tokens, stats.computed_tokens), (48, 2));
    let other_tenant = GenerateRequest { tenant_salt: vec![1], ..again };
    let third = submit(&mut engine, &other_tenant);
    run_dry(&mut engine);
    assert_eq!(third.outcome(1).stats.unwrap().cached_tokens, 0);
}

#[test]
fn stop_ids_end_an_answer_and_min_tokens_hold_them_back() {
    let mut engine = engine(64, 16);
    let mut wanted = request(1, prompt(10, 1), 20, 1);
    let stop = expected(&wanted, 0)[5];
    wanted.stop.stop_token_ids = vec![stop];
    let inbox = submit(&mut engine, &wanted);
    wanted.id = RequestId([2; 16]);
    wanted.stop.min_tokens = 12;
    let held = submit(&mut engine, &wanted);
    run_dry(&mut engine);
    let outcome = inbox.outcome(1);
    assert_eq!(outcome.finished, [Some(FinishReason::Stop)]);
    assert_eq!(outcome.tokens[0].last(), Some(&stop));
    assert!(outcome.tokens[0].len() <= 6);
    let held = held.outcome(1);
    assert!(held.tokens[0].len() >= 12);
    assert!(!held.tokens[0][..12].contains(&stop));
}

#[test]
fn preempted_requests_give_the_same_answers() {
    // Room for about two of five requests.
    let mut engine = engine(14, 16);
    let requests: Vec<_> =
        (1..=5).map(|id| request(id, prompt(30 + usize::from(id), id.into()), 60, 1)).collect();
    let inboxes: Vec<_> = requests.iter().map(|request| submit(&mut engine, request)).collect();
    run_dry(&mut engine);
    for (request, inbox) in requests.iter().zip(inboxes) {
        assert_eq!(inbox.outcome(1).tokens[0], expected(request, 0));
    }
    assert!(engine.status().counters.preemptions > 0, "the test must preempt");
    assert_eq!(engine.status().pool.used_blocks, 0);
}

#[test]
fn a_request_that_outgrows_the_pool_fails_and_says_so() {
    let mut engine = engine(4, 16);
    let too_long = request(1, prompt(80, 1), 4, 1);
    let error = engine
        .submit(too_long, &[], Work::Generate, Box::new(Inbox::default()), Instant::now())
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::ResourceExhausted);
    let grows = submit(&mut engine, &request(2, prompt(40, 1), 100, 1));
    run_dry(&mut engine);
    let outcome = grows.outcome(1);
    assert_eq!(outcome.failed.unwrap().code, ErrorCode::ResourceExhausted);
    assert_eq!(engine.status().pool.used_blocks, 0);
}

#[test]
fn deadline_and_cancellation_free_everything() {
    let mut engine = engine(64, 16);
    let mut late = request(1, prompt(40, 1), 1_000, 2);
    late.deadline_ms = 50;
    let late_inbox = submit(&mut engine, &late);
    let gone = submit(&mut engine, &request(2, prompt(40, 2), 1_000, 1));
    let began = Instant::now();
    engine.step(began);
    engine.step(began);
    assert!(engine.cancel(RequestId([2; 16])));
    assert!(!engine.cancel(RequestId([2; 16])));
    engine.step(began + Duration::from_millis(60));
    assert!(!engine.has_work());
    let outcome = late_inbox.outcome(2);
    assert_eq!(outcome.failed.unwrap().code, ErrorCode::DeadlineExceeded);
    assert_eq!(gone.outcome(1).failed.unwrap().code, ErrorCode::Cancelled);
    assert_eq!(engine.status().pool.used_blocks, 0);
}

#[test]
fn a_panic_in_a_step_fails_that_step_only() {
    let mut ledger = Ledger::new(64, 16);
    ledger.poison = Some(96);
    let mut engine =
        Engine::new(Box::new(ledger), ModelFingerprint([3; 32]), EngineConfig::default());
    let bad = submit(&mut engine, &request(1, vec![5, 96], 4, 1));
    run_dry(&mut engine);
    assert_eq!(bad.outcome(1).failed.unwrap().code, ErrorCode::Internal);
    let mut good = request(2, prompt(5, 1), 4, 1);
    good.sampling.logit_bias = vec![(96, -100.0)];
    let inbox = submit(&mut engine, &good);
    run_dry(&mut engine);
    assert_eq!(inbox.outcome(1).tokens[0], expected(&good, 0));
    assert_eq!(engine.status().pool.used_blocks, 0);
}

/// Prefill on one engine, decode on another, with other block sizes and cached parts on both.
fn hand_over(source: &mut Engine, target: &mut Engine, request: &GenerateRequest) -> Outcome {
    hand_over_as(false, source, target, request)
}

fn hand_over_as(
    is_converted: bool,
    source: &mut Engine,
    target: &mut Engine,
    request: &GenerateRequest,
) -> Outcome {
    let inbox = Inbox::default();
    let now = Instant::now();
    let skip_tokens = target.reserve(request.clone(), &[], Box::new(inbox.clone()), now).unwrap();
    let spans = Arc::new(Mutex::new(Vec::new()));
    let export = Box::new(Spans(spans.clone()));
    let work = Work::Prefill { skip_tokens, export };
    let first = Inbox::default();
    source.submit(request.clone(), &[], work, Box::new(first.clone()), now).unwrap();
    run_dry(source);
    let first = first.outcome(usize::from(request.choices));
    for span in spans.lock().unwrap().iter() {
        let (first, count) = (span.token_first as usize, span.token_count as usize);
        target
            .place(
                request.id,
                usize::from(span.layer),
                first..first + count,
                Heads::All,
                &span.payload,
            )
            .unwrap();
    }
    let prefilled = first.prefilled.unwrap();
    let (first_tokens, digest) = (&prefilled.first_tokens, prefilled.sampler_digest);
    target.activate(request.id, first_tokens, digest, is_converted, now).unwrap();
    run_dry(target);
    let outcome = inbox.outcome(usize::from(request.choices));
    for (own, other) in first.tokens.iter().zip(&outcome.tokens) {
        assert_eq!(own[0], other[0]);
    }
    outcome
}

#[test]
fn a_handoff_changes_nothing() {
    let (mut source, mut target) = (engine(64, 32), engine(64, 16));
    for (id, length, choices) in [(1, 1, 1), (2, 15, 1), (3, 16, 2), (4, 100, 3), (5, 130, 1)] {
        // All prompts share their beginning, so later ones find some of it on both sides.
        let request = request(id, prompt(length, 1), 20, choices);
        let outcome = hand_over(&mut source, &mut target, &request);
        for choice in 0..choices {
            assert_eq!(outcome.tokens[usize::from(choice)], expected(&request, choice));
        }
        assert_eq!(source.status().pool.used_blocks, 0);
        assert_eq!(target.status().pool.used_blocks, 0);
    }
}

#[test]
fn converted_kv_and_what_follows_it_is_never_found() {
    let (mut source, mut target) = (engine(64, 32), engine(64, 16));
    // Exact blocks that lie here already are of use all the same.
    let short = request(1, prompt(40, 1), 4, 1);
    submit(&mut target, &short);
    run_dry(&mut target);
    let stored = |engine: &mut Engine| -> usize {
        let events = engine.drain_block_events();
        events.iter().filter(|event| matches!(event, BlockEvent::Stored { .. })).count()
    };
    assert_eq!(stored(&mut target), 2);
    let long = request(2, prompt(100, 1), 70, 2);
    let outcome = hand_over_as(true, &mut source, &mut target, &long);
    assert_eq!(outcome.tokens[0].len(), 70);
    assert_eq!(outcome.stats.unwrap().cached_tokens, 32);
    assert_eq!(stored(&mut target), 0, "neither prompt nor answer is in the index");
    assert_eq!(target.status().pool.used_blocks, 0);
    // Whoever asks for it exactly computes all behind the exact part, and publishes it.
    let again = GenerateRequest { id: RequestId([3; 16]), ..long.clone() };
    let inbox = submit(&mut target, &again);
    run_dry(&mut target);
    let outcome = inbox.outcome(2);
    assert_eq!(outcome.stats.unwrap().cached_tokens, 32);
    assert_eq!(outcome.tokens[0], expected(&long, 0));
    assert!(stored(&mut target) > 0);
}

#[test]
fn what_is_computed_again_after_converted_kv_is_published() {
    // Two answers outgrow the pool, so the younger request is computed again here.
    let (mut source, mut target) = (engine(64, 16), engine(12, 16));
    let elder = request(1, prompt(30, 1), 100, 1);
    let inbox = submit(&mut target, &elder);
    target.step(Instant::now());
    let younger = request(2, prompt(40, 2), 60, 1);
    let outcome = hand_over_as(true, &mut source, &mut target, &younger);
    assert_eq!(inbox.outcome(1).tokens[0], expected(&elder, 0));
    assert_eq!(outcome.tokens[0], expected(&younger, 0));
    assert!(outcome.stats.unwrap().preemptions > 0, "the test must preempt");
    let again = GenerateRequest { id: RequestId([3; 16]), ..younger };
    let inbox = submit(&mut target, &again);
    run_dry(&mut target);
    assert!(inbox.outcome(1).stats.unwrap().cached_tokens >= 32);
}

#[test]
fn a_commit_that_does_not_fit_is_refused() {
    let mut target = engine(64, 16);
    let request = request(1, prompt(20, 1), 8, 1);
    let now = Instant::now();
    target.reserve(request.clone(), &[], Box::new(Inbox::default()), now).unwrap();
    let token = TokenOutput { choice: 0, index: 0, id: 5, logprobs: None };
    let mut state = SamplerState::replay(&request, 0, &[]);
    state.push(6);
    let digest = sampler_digest([&state].into_iter());
    let error = target.activate(request.id, &[token], digest, false, now).unwrap_err();
    assert_eq!(error.code, ErrorCode::DataLoss);
    let error = target.place(request.id, 0, 0..4, Heads::All, &[0; 3]).unwrap_err();
    assert_eq!(error.code, ErrorCode::DataLoss);
    assert!(target.cancel(request.id));
    assert_eq!(
        target.place(request.id, 0, 0..4, Heads::All, &[]).unwrap_err().code,
        ErrorCode::NotFound
    );
    assert_eq!(target.status().pool.used_blocks, 0);
}

#[test]
fn recovery_goes_on_behind_what_was_delivered() {
    let mut engine = engine(64, 16);
    let request = request(1, prompt(37, 1), 50, 3);
    let full: Vec<_> = (0..3).map(|choice| expected(&request, choice)).collect();
    let delivered = [
        Delivered { ids: full[0][..30].to_vec(), finished: false },
        Delivered { ids: full[1].clone(), finished: true },
        Delivered::default(),
    ];
    let inbox = Inbox::default();
    engine.reserve(request.clone(), &delivered, Box::new(inbox.clone()), Instant::now()).unwrap();
    engine.start(request.id).unwrap();
    run_dry(&mut engine);
    let outcome = inbox.outcome(3);
    assert_eq!(outcome.tokens[0], full[0][30..]);
    assert!(outcome.tokens[1].is_empty());
    assert_eq!(outcome.tokens[2], full[2]);
    assert_eq!(engine.status().pool.used_blocks, 0);
}

#[test]
fn an_answer_that_was_delivered_whole_ends_at_once() {
    let mut engine = engine(64, 16);
    let mut request = request(1, prompt(37, 1), 5, 2);
    request.stop.stop_token_ids = vec![90];
    let delivered = [
        // By its length, and by a stop id; the node died before it could say so.
        Delivered { ids: vec![1, 2, 3, 4, 5], finished: false },
        Delivered { ids: vec![1, 90], finished: false },
    ];
    let inbox = Inbox::default();
    let reserved =
        engine.reserve(request.clone(), &delivered, Box::new(inbox.clone()), Instant::now());
    assert_eq!(reserved.unwrap(), 0);
    assert!(!engine.contains(request.id));
    let outcome = inbox.outcome(2);
    assert_eq!(outcome.finished, [Some(FinishReason::Length), Some(FinishReason::Stop)]);
    assert!(outcome.stats.is_some() && outcome.tokens.iter().all(Vec::is_empty));
}

#[test]
fn prompt_logprobs_cover_the_prompt_once() {
    let mut engine = engine(64, 16);
    let mut wanted = request(1, prompt(50, 1), 3, 1);
    submit(&mut engine, &wanted);
    run_dry(&mut engine);
    wanted.id = RequestId([2; 16]);
    wanted.prompt_logprobs = Some(2);
    wanted.logprobs = Some(1);
    let inbox = submit(&mut engine, &wanted);
    run_dry(&mut engine);
    let all = inbox.outcome(1).prompt_logprobs.unwrap();
    assert_eq!(all.len(), 49);
    let row = logits_after(wanted.prompt[..10].iter().copied());
    assert_eq!(all[9], crate::sampler::token_logprobs(&row, wanted.prompt[10], 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_mix_of_requests_answers_by_the_specification(
        shapes in prop::collection::vec(
            (1_usize..90, 1_u32..40, 1_u16..4, 0_u32..3, prop::option::of((0_u32..20, 1_u32..50))),
            1..8
        ),
        blocks in 24_usize..60,
        wide in any::<bool>(),
        cancel in prop::collection::vec(0_usize..8, 0..3),
    ) {
        let mut engine = engine(blocks, if wide { 32 } else { 16 });
        let requests: Vec<_> = shapes
            .iter()
            .enumerate()
            .map(|(at, &(length, max_tokens, choices, salt, streaming))| GenerateRequest {
                streaming_attention: streaming
                    .map(|(sinks, window)| StreamingAttention { sinks, window }),
                ..request(at as u8, prompt(length, salt), max_tokens, choices)
            })
            .collect();
        let inboxes: Vec<_> = requests.iter().map(|r| submit(&mut engine, r)).collect();
        for _ in 0..5 {
            engine.step(Instant::now());
        }
        for at in cancel {
            engine.cancel(RequestId([at as u8; 16]));
        }
        run_dry(&mut engine);
        for (request, inbox) in requests.iter().zip(inboxes) {
            let outcome = inbox.outcome(usize::from(request.choices));
            for (choice, answer) in outcome.tokens.iter().enumerate() {
                let whole = expected(request, choice as u16);
                prop_assert_eq!(&answer[..], &whole[..answer.len()]);
                prop_assert!(outcome.failed.is_some() || answer.len() == whole.len());
            }
        }
        prop_assert_eq!(engine.status().pool.used_blocks, 0);
    }
}
