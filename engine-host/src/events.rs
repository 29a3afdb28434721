//! From the engine's thread to the async task that follows one request.

use baton_engine::core::{EngineEvent, Outbox};
use tokio::sync::mpsc;

/// Events of one request. Unbounded in type, bounded in fact: a request has at most `choices` ×
/// `max_tokens` tokens, which its context bounds.
pub type Events = mpsc::UnboundedReceiver<EngineEvent>;

/// What the engine is given with a request, and where its events arrive.
pub fn events() -> (Box<dyn Outbox>, Events) {
    let (sender, events) = mpsc::unbounded_channel();
    (Box::new(EventSender(sender)), events)
}

struct EventSender(mpsc::UnboundedSender<EngineEvent>);

impl Outbox for EventSender {
    fn send(&self, event: EngineEvent) {
        // Nobody may follow any more; the request's cancellation is on the way to the engine.
        let _unheard = self.0.send(event);
    }
}
