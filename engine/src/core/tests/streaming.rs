//! Requests that see sinks and a window: what they hold, share, hand over and end with.

use baton_types::STREAMING_TOKENS_MAX;

use super::*;

const SEEN: StreamingAttention = StreamingAttention { sinks: 4, window: 28 };

fn streaming(id: u8, length: usize, max_tokens: u32, choices: u16) -> GenerateRequest {
    GenerateRequest {
        streaming_attention: Some(SEEN),
        ..request(id, prompt(length, 1), max_tokens, choices)
    }
}

/// Runs to the end; the most blocks that were in use after a step.
fn most_blocks(engine: &mut Engine) -> usize {
    let mut most = 0;
    while engine.has_work() {
        engine.step(Instant::now());
        most = most.max(engine.status().pool.used_blocks);
    }
    most
}

#[test]
fn a_long_answer_takes_no_more_blocks_than_its_window() {
    for (block_tokens, bound) in [(16, 4), (32, 3)] {
        let mut engine = engine(10, block_tokens);
        let request = streaming(1, 5, 900, 1);
        let inbox = submit(&mut engine, &request);
        // Sinks, a window anywhere, and the token at hand: 1 + 2 + 1 blocks of 16.
        assert!(most_blocks(&mut engine) <= bound);
        let outcome = inbox.outcome(1);
        assert_eq!(outcome.tokens[0], expected(&request, 0));
        assert_eq!(outcome.stats.unwrap().preemptions, 0);
        assert_eq!(engine.status().pool.used_blocks, 0);
    }
}

#[test]
fn a_long_prompt_takes_no_more_blocks_than_its_window_and_a_chunk() {
    // 4 + 28 tokens, and chunks of 64.
    let mut engine = engine(8, 16);
    let request = streaming(1, 1_500, 20, 1);
    let inbox = submit(&mut engine, &request);
    assert!(most_blocks(&mut engine) <= 8);
    let outcome = inbox.outcome(1);
    assert_eq!(outcome.tokens[0], expected(&request, 0));
    assert_eq!(outcome.stats.unwrap().preemptions, 0);
    // One that sees all of it cannot be here.
    let whole = request_error(&mut engine, super::request(2, request.prompt, 20, 1));
    assert_eq!(whole.code, ErrorCode::ResourceExhausted);
}

fn request_error(engine: &mut Engine, request: GenerateRequest) -> Error {
    let inbox = Box::new(Inbox::default());
    engine.submit(request, &[], Work::Generate, inbox, Instant::now()).unwrap_err()
}

#[test]
fn answers_go_past_the_context_of_the_model() {
    // The ledger's is 4,096.
    let mut engine = engine(16, 16);
    let mut request = streaming(1, 4_000, 500, 1);
    let inbox = submit(&mut engine, &request);
    run_dry(&mut engine);
    let outcome = inbox.outcome(1);
    assert_eq!(outcome.tokens[0], expected(&request, 0));
    assert_eq!(outcome.finished[0], Some(FinishReason::Length));
    request.prompt = prompt(STREAMING_TOKENS_MAX, 1);
    assert_eq!(request_error(&mut engine, request).field.as_deref(), Some("prompt"));
}

#[test]
fn the_prefix_cache_holds_what_is_the_same_and_nothing_else() {
    let mut engine = engine(64, 16);
    let first = streaming(1, 100, 8, 1);
    submit(&mut engine, &first);
    run_dry(&mut engine);
    // 4 + 28 tokens have the KV of full attention: two blocks.
    let stored = |engine: &mut Engine| {
        let events = engine.drain_block_events();
        events.iter().filter(|event| matches!(event, BlockEvent::Stored { .. })).count()
    };
    assert_eq!(stored(&mut engine), 2);
    let cached = |engine: &mut Engine, request: &GenerateRequest| {
        let inbox = submit(engine, request);
        run_dry(engine);
        let outcome = inbox.outcome(1);
        assert_eq!(outcome.tokens[0], expected(request, 0));
        outcome.stats.unwrap().cached_tokens
    };
    let whole = request(2, prompt(100, 1), 8, 1);
    assert_eq!(cached(&mut engine, &whole), 32);
    assert_eq!(stored(&mut engine), 4);
    let whole = GenerateRequest { id: RequestId([3; 16]), ..whole };
    assert_eq!(cached(&mut engine, &whole), 96);
    let again = GenerateRequest { id: RequestId([4; 16]), ..first };
    assert_eq!(cached(&mut engine, &again), 32);
    assert_eq!(stored(&mut engine), 0);
}

#[test]
fn a_handoff_carries_what_is_seen() {
    let (mut source, mut target) = (engine(64, 32), engine(64, 16));
    for (id, length, choices) in [(1, 20, 1), (2, 32, 2), (3, 33, 1), (4, 500, 3), (5, 501, 1)] {
        let request = streaming(id, length, 40, choices);
        let outcome = hand_over(&mut source, &mut target, &request);
        for choice in 0..choices {
            assert_eq!(outcome.tokens[usize::from(choice)], expected(&request, choice));
        }
        assert_eq!(source.status().pool.used_blocks, 0);
        assert_eq!(target.status().pool.used_blocks, 0);
    }
    // What has not come is nobody's prefix.
    let (mut source, mut target) = (engine(64, 32), engine(64, 16));
    hand_over(&mut source, &mut target, &streaming(5, 500, 8, 1));
    for (id, seen) in [(6, Some(StreamingAttention { sinks: 20, window: 200 })), (7, None)] {
        let whole = GenerateRequest { streaming_attention: seen, ..streaming(id, 500, 8, 1) };
        let inbox = submit(&mut target, &whole);
        run_dry(&mut target);
        assert_eq!(inbox.outcome(1).tokens[0], expected(&whole, 0));
    }
    let request = streaming(8, 500, 1, 1);
    let inbox = Box::new(Inbox::default());
    target.reserve(request.clone(), &[], inbox, Instant::now()).unwrap();
    // Of the 32 blocks of the prompt those of its 4 sinks and of its last 27 tokens.
    assert_eq!(target.status().pool.used_blocks, 4);
}

#[test]
fn a_reservation_for_a_transfer_can_be_computed_here() {
    let mut engine = engine(16, 16);
    let request = streaming(1, 500, 30, 2);
    let inbox = Inbox::default();
    engine.reserve(request.clone(), &[], Box::new(inbox.clone()), Instant::now()).unwrap();
    assert_eq!(engine.start(request.id).unwrap(), 0);
    run_dry(&mut engine);
    let outcome = inbox.outcome(2);
    for choice in 0..2 {
        assert_eq!(outcome.tokens[usize::from(choice)], expected(&request, choice));
    }
}

#[test]
fn recovery_computes_the_same_window() {
    let request = streaming(1, 50, 300, 1);
    let full = expected(&request, 0);
    for known in [1, 20, 77, 250] {
        let mut engine = engine(12, 16);
        let delivered = [Delivered { ids: full[..known].to_vec(), finished: false }];
        let inbox = Inbox::default();
        let outbox = Box::new(inbox.clone());
        engine.reserve(request.clone(), &delivered, outbox, Instant::now()).unwrap();
        engine.start(request.id).unwrap();
        run_dry(&mut engine);
        assert_eq!(inbox.outcome(1).tokens[0], full[known..]);
    }
}
