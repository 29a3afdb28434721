use baton_kv_transfer::message::CommitInfo;
use baton_types::KvDtype;

use super::*;

const CONVERSION: (u16, u16) = (2, 16);

fn span(tokens: u32, bytes: usize) -> Outgoing {
    let payload = vec![0x3f; bytes].into();
    Outgoing::Span(KvSpan { layer: 1, token_first: 5, token_count: tokens, payload })
}

fn bf16_to_int8() -> KvConversion {
    let (heads, head_dim) = CONVERSION;
    KvConversion::new(KvDtype::Bf16, KvDtype::Int8, heads, head_dim).unwrap()
}

fn metrics() -> (PrefillMetrics, prometheus::Registry) {
    let registry = prometheus::Registry::new();
    (PrefillMetrics::new(&registry).unwrap(), registry)
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
    assert!(matches!(&error, TransferError::Span(why) if why.contains("384 bytes")), "{error}");
    let (spans_in, spans) = mpsc::channel(8);
    let (converted, ready) = mpsc::channel(READY_SPANS);
    drop(ready);
    spans_in.send(span(1, 128)).await.unwrap();
    run(bf16_to_int8(), spans, converted, metrics().0).await.unwrap();
}
