//! A prefix goes from one engine's cache to another's.

use super::*;

const TRANSFER: TransferId = TransferId([9; 16]);

fn prefix(tokens: &[TokenId]) -> Prefix {
    Prefix { tokens: tokens.to_vec(), tenant_salt: vec![] }
}

/// Runs one request to its end and returns its answer, and how much of its prompt was cached.
fn answer(engine: &mut Engine, request: &GenerateRequest) -> (Vec<TokenId>, u32) {
    let inbox = submit(engine, request);
    run_dry(engine);
    let outcome = inbox.outcome(1);
    (outcome.tokens[0].clone(), outcome.stats.unwrap().cached_tokens)
}

#[test]
fn a_pulled_prefix_serves_as_one_that_was_computed() {
    let (mut holder, mut puller) = (engine(64, 16), engine(64, 32));
    let asked = request(1, prompt(200, 1), 8, 1);
    answer(&mut holder, &asked);
    // 180 tokens are 5 blocks of 32 at the puller, 11 of 16 at the holder.
    let wanted = prefix(&asked.prompt[..180]);
    let (cached, tokens) = puller.await_prefix(TRANSFER, wanted.clone()).unwrap();
    assert_eq!((cached, tokens), (0, 160));
    assert_eq!(holder.hold_prefix(TRANSFER, wanted).unwrap(), 176);
    for tokens in [64..160, 0..64] {
        for layer in 0..puller.backend.spec().layers {
            let span = holder.read_prefix(TRANSFER, layer, tokens.clone()).unwrap();
            let heads = Heads::All;
            puller.place_prefix(TRANSFER, layer, tokens.clone(), heads, &span.payload).unwrap();
        }
    }
    assert!(holder.drop_prefix(TRANSFER));
    assert_eq!(puller.publish_prefix(TRANSFER).unwrap(), 160);
    assert_eq!((holder.pool.used(), puller.pool.used()), (0, 0));
    assert_eq!(answer(&mut puller, &asked), (expected(&asked, 0), 160));
}

#[test]
fn what_is_cached_is_neither_taken_twice_nor_written() {
    let mut engine = engine(8, 16);
    let asked = request(1, prompt(64, 1), 1, 1);
    answer(&mut engine, &asked);
    let longer: Vec<_> = asked.prompt.iter().copied().chain(prompt(40, 2)).collect();
    let (cached, tokens) = engine.await_prefix(TRANSFER, prefix(&longer)).unwrap();
    assert_eq!((cached, tokens), (64, 96));
    assert_eq!(engine.status().reserved, 1);
    let error = engine.place_prefix(TRANSFER, 0, 48..64, Heads::All, &[]).unwrap_err();
    assert_eq!(error.code, ErrorCode::FailedPrecondition, "{error}");
    let error = engine.await_prefix(TRANSFER, prefix(&longer)).unwrap_err();
    assert_eq!(error.code, ErrorCode::FailedPrecondition, "{error}");
    let error = engine.place_prefix(TRANSFER, 0, 64..96, Heads::All, &[1]).unwrap_err();
    assert_eq!(error.code, ErrorCode::DataLoss, "{error}");
    assert!(engine.drop_prefix(TRANSFER) && !engine.drop_prefix(TRANSFER));
    assert_eq!((engine.pool.used(), engine.status().reserved), (0, 0));
}

#[test]
fn errors_name_what_is_wrong() {
    let mut engine = engine(4, 16);
    let error = engine.await_prefix(TRANSFER, prefix(&prompt(80, 1))).unwrap_err();
    assert_eq!(error.code, ErrorCode::ResourceExhausted);
    assert!(error.message.contains("5 blocks"), "{error}");
    assert_eq!(engine.pool.used(), 0);
    assert_eq!(engine.hold_prefix(TRANSFER, prefix(&prompt(80, 1))).unwrap(), 0);
    let error = engine.read_prefix(TRANSFER, 0, 0..16).unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument, "{error}");
    for result in [
        engine.read_prefix(TransferId([1; 16]), 0, 0..16).map(|_| ()),
        engine.place_prefix(TransferId([1; 16]), 0, 0..16, Heads::All, &[]),
        engine.publish_prefix(TransferId([1; 16])).map(|_| ()),
    ] {
        assert_eq!(result.unwrap_err().code, ErrorCode::NotFound);
    }
}

/// Another tenant's prompt is another prefix, whatever its tokens.
#[test]
fn a_tenant_holds_only_its_own() {
    let mut engine = engine(64, 16);
    let asked = request(1, prompt(64, 1), 1, 1);
    answer(&mut engine, &asked);
    let others = Prefix { tenant_salt: b"other".to_vec(), ..prefix(&asked.prompt) };
    assert_eq!(engine.hold_prefix(TRANSFER, others).unwrap(), 0);
}
