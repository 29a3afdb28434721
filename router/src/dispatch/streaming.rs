//! Reads the nodes' streams and puts their tokens in order.

use std::time::Duration;

use baton_proto::convert::finish_reason;
use baton_proto::error::{DECODE_ADDRESS_FIELD, from_status};
use baton_proto::internal::{DecodeEvent, HandedOff, PrefillEvent, PromptLogprobs, TokenOutput};
use baton_proto::internal::{decode_event, prefill_event};
use baton_types::{Error, ErrorCode};
use tonic::Status;

use super::placing::{Placement, PrefillStream};
use super::{Dispatch, Interrupted, RequestEvent};
use crate::cluster::NodeView;
use crate::plan::another_prefill;

/// After the last token, how long the prefill node's own account is waited for.
const ACCOUNT_WAIT: Duration = Duration::from_millis(500);

/// Prefill attempts of one placement at most; then the decode node computes the prompt.
const PREFILL_ATTEMPTS_MAX: u32 = 4;

impl Dispatch {
    /// Reads until the request is finished.
    pub(super) async fn stream(&mut self, mut placement: Placement) -> Result<(), Interrupted> {
        let deadline = tokio::time::sleep_until(self.deadline.into());
        tokio::pin!(deadline);
        let decode_node = placement.plan.decode.node.clone();
        let enough = self.enough.clone();
        loop {
            let prefill = placement.prefill.as_mut();
            tokio::select! {
                event = placement.decode.message() => {
                    let event = match event {
                        Ok(Some(event)) => event,
                        Ok(None) => return Err(lost("it ended the stream without a last word")),
                        Err(status) => return Err(self.decode_failed(&placement, &status)),
                    };
                    if self.decode_event(event).await? {
                        self.wait_for_account(&mut placement).await;
                        return Ok(());
                    }
                }
                event = next_prefill_event(prefill) => {
                    tokio::select! {
                        taken = self.prefill_event(&mut placement, event) => taken?,
                        // Replacing a prefill asks the decode node, which may be what is gone.
                        () = decode_node.lost() => {
                            decode_node.failed();
                            return Err(lost("it is not heard any more"));
                        }
                        () = &mut deadline => {
                            return Err(Interrupted::Fatal(self.deadline_error()));
                        }
                    }
                }
                () = decode_node.lost() => {
                    decode_node.failed();
                    return Err(lost("it is not heard any more"));
                }
                () = enough.cancelled() => return Ok(()),
                () = &mut deadline => return Err(Interrupted::Fatal(self.deadline_error())),
            }
        }
    }

    fn decode_failed(&self, placement: &Placement, status: &Status) -> Interrupted {
        let error = from_status(status);
        if error.code == ErrorCode::Unavailable {
            placement.plan.decode.node.failed();
            return Interrupted::NodeLost(error);
        }
        Interrupted::Fatal(error)
    }

    /// Whether it was the last.
    async fn decode_event(&mut self, event: DecodeEvent) -> Result<bool, Interrupted> {
        match event.event {
            Some(decode_event::Event::Token(token)) => self.token(token).await?,
            Some(decode_event::Event::PromptLogprobs(all)) => self.prompt_logprobs(all).await,
            Some(decode_event::Event::ChoiceFinished(end)) => {
                let reason = finish_reason(&end.reason).map_err(Interrupted::Fatal)?;
                let choice = end.choice as u16;
                if self.sequencer.finish(choice, reason).map_err(Interrupted::Fatal)? {
                    self.emit(RequestEvent::ChoiceFinished { choice, reason }).await;
                }
            }
            Some(decode_event::Event::Finished(finished)) => {
                self.trail.decoded(&finished);
                if !self.sequencer.all_finished() {
                    let error = Error::internal("the node finished before all choices had ended");
                    return Err(Interrupted::Fatal(error));
                }
                return Ok(true);
            }
            // A newer node's event, which changes nothing here.
            None => {}
        }
        Ok(false)
    }

    async fn prefill_event(
        &mut self,
        placement: &mut Placement,
        event: Result<Option<PrefillEvent>, Error>,
    ) -> Result<(), Interrupted> {
        let event = match event {
            Ok(Some(event)) => event,
            Ok(None) => {
                placement.prefill = None;
                return Ok(());
            }
            Err(error) => {
                let failed = placement.prefill.take().expect("it has just failed");
                let replaced = self.replace_prefill(placement, &failed.view, error).await;
                return replaced.map_err(|error| match may_end_elsewhere(&error) {
                    true => Interrupted::NodeLost(error),
                    false => Interrupted::Fatal(error),
                });
            }
        };
        match event.event {
            // Where KV is converted the first tokens are the decode node's to say, with the commit:
            // another prefill, if this one fails, need not draw the same.
            Some(prefill_event::Event::Token(_)) if self.is_converting(placement) => {}
            Some(prefill_event::Event::Token(token)) => self.token(token).await?,
            Some(prefill_event::Event::PromptLogprobs(all)) => self.prompt_logprobs(all).await,
            Some(prefill_event::Event::HandedOff(handed_off)) => {
                if let Some(prefill) = placement.prefill.take() {
                    self.handed_off(&placement.plan.decode, &prefill.view, &handed_off);
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Whether a node of another precision prefills.
    fn is_converting(&self, placement: &Placement) -> bool {
        placement.prefill.as_ref().is_some_and(|prefill| prefill.view.numerics != self.numerics)
    }

    async fn token(&mut self, token: TokenOutput) -> Result<(), Interrupted> {
        let token = token.try_into().map_err(Interrupted::Fatal)?;
        if self.sequencer.accept(&token).map_err(Interrupted::Fatal)? {
            self.trail.token();
            self.emit(RequestEvent::Token(token)).await;
        }
        Ok(())
    }

    async fn prompt_logprobs(&mut self, all: PromptLogprobs) {
        if !std::mem::replace(&mut self.has_prompt_logprobs, true) {
            let all = all.tokens.into_iter().map(Into::into).collect();
            self.emit(RequestEvent::PromptLogprobs(all)).await;
        }
    }

    /// Has the prompt computed elsewhere, into the blocks that are reserved already: by another
    /// prefill node, or by the decode node itself.
    ///
    /// # Errors
    /// Where the decode node does not play along, or the request would fail at any node.
    pub(super) async fn replace_prefill(
        &mut self,
        placement: &mut Placement,
        failed: &NodeView,
        mut error: Error,
    ) -> Result<(), Error> {
        let mut failed = failed.node.clone();
        loop {
            if !is_worth_another_try(&error, &self.router.budget) {
                return Err(error);
            }
            tracing::warn!(node = %failed.member().id, %error, "prefill failed; trying elsewhere");
            self.router.metrics.prefill_replaced();
            let decode = placement.plan.decode.clone();
            if error.field.as_deref() == Some(DECODE_ADDRESS_FIELD) {
                // The two are left apart; others may reach either.
                failed.handed_over(&decode, true);
            } else {
                if error.code == ErrorCode::Unavailable {
                    failed.failed();
                }
                self.excluded.push(failed.member().id.clone());
            }
            placement.attempt += 1;
            let next = if placement.attempt > PREFILL_ATTEMPTS_MAX {
                None
            } else {
                let nodes = self.views();
                another_prefill(&self.plan_request(), &decode, &nodes)
            };
            let name = next.as_ref().map(|view| view.node.member().id.to_string());
            self.trail.prefill_failed(name.as_deref(), &error);
            let attempt = placement.attempt;
            let reserved = self.reserve(&decode, next.as_ref(), &placement.request, attempt).await;
            let reserved = match reserved {
                Ok(reserved) => reserved,
                // Its KV arrived all the same: the tokens come.
                Err(error) if error.code == ErrorCode::FailedPrecondition => return Ok(()),
                Err(error) => return Err(error),
            };
            self.trail.prefills_at(name);
            let Some(view) = next else { return Ok(()) };
            match self.start_prefill(placement, view.clone(), &reserved).await {
                Ok(stream) => {
                    placement.prefill = Some(stream);
                    return Ok(());
                }
                Err(next_error) => (failed, error) = (view.node, next_error),
            }
        }
    }

    /// The prefill node's account may come a little after the last token of a short answer.
    async fn wait_for_account(&mut self, placement: &mut Placement) {
        let Some(prefill) = placement.prefill.as_mut() else { return };
        let account = async {
            while let Ok(Some(event)) = prefill.events.message().await {
                if let Some(prefill_event::Event::HandedOff(handed_off)) = event.event {
                    return Some(handed_off);
                }
            }
            None
        };
        if let Ok(Some(handed_off)) = tokio::time::timeout(ACCOUNT_WAIT, account).await {
            let view = prefill.view.clone();
            self.handed_off(&placement.plan.decode, &view, &handed_off);
        }
    }

    fn handed_off(&mut self, decode: &NodeView, prefill: &NodeView, handed_off: &HandedOff) {
        prefill.node.handed_over(decode, false);
        if let Some(from) = self.trail.pulls_from() {
            prefill.node.pulled(&from, !handed_off.pull_error.is_empty());
        }
        self.trail.handed_off(handed_off);
    }
}

/// Pending where no prefill runs. Cancel safe.
async fn next_prefill_event(
    prefill: Option<&mut PrefillStream>,
) -> Result<Option<PrefillEvent>, Error> {
    let Some(prefill) = prefill else { return std::future::pending().await };
    tokio::select! {
        event = prefill.events.message() => event.map_err(|status| from_status(&status)),
        () = prefill.view.node.lost() => Err(Error::unavailable("it is not heard any more")),
    }
}

fn lost(why: &str) -> Interrupted {
    Interrupted::NodeLost(Error::unavailable(why))
}

/// A node's death always; what a node refuses or corrupts, within the budget; what is wrong with
/// the request itself, never.
fn is_worth_another_try(error: &Error, budget: &crate::retry::RetryBudget) -> bool {
    match error.code {
        ErrorCode::Unavailable | ErrorCode::ResourceExhausted => true,
        _ => may_end_elsewhere(error) && budget.withdraw(),
    }
}

/// Whether it is a node that fails and not the request, which would fail at each.
fn may_end_elsewhere(error: &Error) -> bool {
    matches!(
        error.code,
        ErrorCode::Unavailable
            | ErrorCode::ResourceExhausted
            | ErrorCode::DataLoss
            | ErrorCode::FailedPrecondition
            | ErrorCode::Cancelled
    )
}
