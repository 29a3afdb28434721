use baton_kv_transfer::message::CommitInfo;
use baton_types::{Epoch, Incarnation, KvDtype, ModelFingerprint, NodeId, RequestId, TransferId};

use super::*;

const HEADS: u16 = 2;
const HEAD_DIM: u16 = 16;

fn span(tokens: u32, bytes: usize) -> Outgoing {
    let payload = vec![0x3f; bytes].into();
    Outgoing::Span(KvSpan { layer: 1, token_first: 5, token_count: tokens, payload })
}

fn bf16_to_int8() -> KvConversion {
    KvConversion::new(KvDtype::Bf16, KvDtype::Int8, HEADS, HEAD_DIM).unwrap()
}

fn metrics() -> (PrefillMetrics, prometheus::Registry) {
    let registry = prometheus::Registry::new();
    (PrefillMetrics::new(&registry).unwrap(), registry)
}

fn grant(kv: KvDtype, numerics: NumericsVersion, kv_heads: u16) -> Grant {
    Grant {
        transfer_id: TransferId([1; 16]),
        request_id: RequestId([2; 16]),
        epoch: Epoch(1),
        receiver: NodeId::new("decode-0"),
        receiver_incarnation: Incarnation(3),
        sender_incarnation: Incarnation(4),
        tokens: 40,
        cached_tokens: 0,
        unseen: 0..0,
        layout: WireLayout { layers: 2, kv_heads, head_dim: HEAD_DIM, dtype: kv },
        fingerprint: ModelFingerprint([5; 32]),
        numerics,
        choices: 1,
        expiry_ms: 1_000,
    }
}

#[test]
fn a_grant_for_another_precision_and_nothing_else_is_converted_for() {
    let layout = KvLayout {
        layers: 2,
        kv_heads: HEADS,
        head_dim: HEAD_DIM,
        block_tokens: 16,
        dtype: KvDtype::Bf16,
    };
    let own = NumericsVersion::new("n", KvDtype::Bf16);
    let int8 = NumericsVersion::new("n", KvDtype::Int8);
    let conversion = |grant: &Grant| conversion_for(&layout, &own, grant);
    assert_eq!(conversion(&grant(KvDtype::Bf16, own.clone(), HEADS)), Ok(None));
    let wanted = conversion(&grant(KvDtype::Int8, int8.clone(), HEADS));
    assert_eq!(wanted, Ok(Some(bf16_to_int8())));
    for unfit in [grant(KvDtype::Int8, int8, HEADS + 1), grant(KvDtype::Int8, own.clone(), HEADS)] {
        let error = conversion(&unfit).unwrap_err();
        assert_eq!(error.code, ErrorCode::FailedPrecondition);
        assert!(error.message.contains("Int8") && error.message.contains("Bf16"), "{error}");
    }
}

#[tokio::test]
async fn spans_come_out_converted_and_in_order_and_are_counted() {
    let (spans_in, spans) = mpsc::channel(8);
    let (converted, mut ready) = mpsc::channel(READY_SPANS);
    let (metrics, registry) = metrics();
    for tokens in [3, 1] {
        spans_in.send(span(tokens, tokens as usize * 2 * 2 * 32)).await.unwrap();
    }
    let info = CommitInfo {
        first_tokens: vec![],
        sampler_digest: [0; 32],
        prompt_logprobs: vec![],
        cached_tokens: 0,
    };
    spans_in.send(Outgoing::Finish(Box::new(info))).await.unwrap();
    drop(spans_in);
    run(bf16_to_int8(), spans, converted, metrics).await.unwrap();
    for tokens in [3, 1] {
        let Some(Outgoing::Span(span)) = ready.recv().await else { panic!("a span is missing") };
        assert_eq!((span.layer, span.token_first, span.token_count), (1, 5, tokens));
        assert_eq!(span.payload.len(), tokens as usize * 2 * 2 * 18);
        // All elements are equal, so each is the farthest.
        assert!(span.payload[..tokens as usize * 64].iter().all(|byte| *byte == 127));
    }
    assert!(matches!(ready.recv().await, Some(Outgoing::Finish(_))));
    assert!(ready.recv().await.is_none());
    let family = &registry.gather()[0];
    assert_eq!(family.name(), "baton_kv_converted_bytes_total");
    assert_eq!(family.get_metric()[0].get_counter().get_value(), 4.0 * 2.0 * 2.0 * 18.0);
}

#[tokio::test]
async fn a_span_of_another_size_fails_and_an_ended_transfer_does_not() {
    let (spans_in, spans) = mpsc::channel(8);
    let (converted, _ready) = mpsc::channel(READY_SPANS);
    spans_in.send(span(3, 100)).await.unwrap();
    let error = run(bf16_to_int8(), spans, converted, metrics().0).await.unwrap_err();
    assert!(error.message.contains("384 bytes"), "{error}");
    let (spans_in, spans) = mpsc::channel(8);
    let (converted, ready) = mpsc::channel(READY_SPANS);
    drop(ready);
    spans_in.send(span(1, 128)).await.unwrap();
    run(bf16_to_int8(), spans, converted, metrics().0).await.unwrap();
}
