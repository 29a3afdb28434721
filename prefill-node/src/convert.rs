//! Brings spans into the precision that their decode node holds, between engine and transfer.

use baton_engine::convert::KvConversion;
use baton_kv_transfer::frame::WireLayout;
use baton_kv_transfer::grant::Grant;
use baton_kv_transfer::send::Outgoing;
use baton_kv_transfer::{KvSpan, TransferError};
use baton_types::{Error, ErrorCode, KvLayout, NumericsVersion};
use tokio::sync::mpsc;

use crate::metrics::PrefillMetrics;

#[cfg(test)]
mod tests;

/// Converted spans that wait to be sent; what more there is waits as the engine left it.
pub(crate) const READY_SPANS: usize = 4;

/// What the grant asks of this node's KV; `None` where it travels as it is. Whether it may be
/// converted at all, the sender has checked.
///
/// # Errors
/// `FailedPrecondition` where more than the precision differs.
pub(crate) fn conversion_for(
    layout: &KvLayout,
    numerics: &NumericsVersion,
    grant: &Grant,
) -> Result<Option<KvConversion>, Error> {
    let own = WireLayout::from(layout);
    if grant.layout == own {
        return Ok(None);
    }
    let refused = |why: String| {
        let granted = grant.layout;
        let message = format!("the grant is for {granted:?}, this node's KV is {own:?}: {why}");
        Error::new(ErrorCode::FailedPrecondition, message)
    };
    let is_same_shape = WireLayout { dtype: own.dtype, ..grant.layout } == own;
    // Equal numerics say that the receiver takes KV as it is.
    if !is_same_shape || grant.numerics == *numerics {
        return Err(refused("they do not fit".into()));
    }
    KvConversion::new(own.dtype, grant.layout.dtype, own.kv_heads, own.head_dim)
        .map(Some)
        .map_err(|error| refused(error.to_string()))
}

/// Converts what comes, span by span, on a thread where that holds nobody up, and passes it on.
/// Returns behind the last, or when nobody takes spans any more. Dropped, it loses what it has in
/// hand.
///
/// # Errors
/// `Span` where one has not the size that it says.
pub(crate) async fn run(
    conversion: KvConversion,
    mut spans: mpsc::Receiver<Outgoing>,
    converted: mpsc::Sender<Outgoing>,
    metrics: PrefillMetrics,
) -> Result<(), Error> {
    while let Some(outgoing) = spans.recv().await {
        let (outgoing, is_last) = match outgoing {
            Outgoing::Span(span) => {
                let convert = tokio::task::spawn_blocking(move || convert(&conversion, &span));
                let ended = |error| TransferError::Span(format!("converting it failed: {error}"));
                let span = convert.await.map_err(ended).and_then(|converted| converted);
                let span = span.map_err(|error| Error::new(error.code(), error.to_string()))?;
                metrics.converted(&conversion, span.payload.len());
                (Outgoing::Span(span), false)
            }
            finish @ Outgoing::Finish(_) => (finish, true),
        };
        // A transfer that has ended says itself why.
        let has_ended = converted.send(outgoing).await.is_err();
        if is_last || has_ended {
            break;
        }
    }
    Ok(())
}

fn convert(conversion: &KvConversion, span: &KvSpan) -> Result<KvSpan, TransferError> {
    let mut payload = Vec::new();
    conversion
        .convert(&span.payload, span.token_count as usize, &mut payload)
        .map_err(|error| TransferError::Span(error.to_string()))?;
    let KvSpan { layer, token_first, token_count, .. } = *span;
    Ok(KvSpan { layer, token_first, token_count, payload: payload.into() })
}
