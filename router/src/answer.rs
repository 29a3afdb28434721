//! Turns tokens into text: incremental decoding, stop strings, and the end of each choice.
//!
//! Its state lives at the router, so a stop string or a character that is split over a failover
//! is found all the same.

use std::sync::Arc;
use std::time::Instant;

use baton_tokenizer::{StopMatcher, StopStep, TextDecoder};
use baton_types::{Error, FinishReason, GenerateRequest, TokenLogprobs, TokenOutput};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::admit::Permit;
use crate::catalog::Model;
use crate::dispatch::{Dispatcher, Explain, RequestEvent};
use crate::metrics::{Outcome, RouterMetrics};

/// What an API shows of a request; `Done` or `Failed` is the last, exactly once.
#[derive(Debug)]
pub enum AnswerEvent {
    /// A token, and the text that has become certain with it.
    Token {
        token: TokenOutput,
        text: String,
    },
    PromptLogprobs(Vec<TokenLogprobs>),
    /// The choice has ended; `text` was held back and belongs to it.
    Finished {
        choice: u16,
        reason: FinishReason,
        text: String,
    },
    Done(Box<Explain>),
    Failed(Error),
}

/// One request's answers. Dropping it cancels the request.
pub struct AnswerStream {
    events: mpsc::Receiver<RequestEvent>,
    choices: Vec<Choice>,
    /// Stop strings count in the text after so many tokens.
    min_tokens: u32,
    /// Made while one event was taken, and not yet given out.
    next: Option<AnswerEvent>,
    /// Ends the request early: stop strings, which the nodes do not know, have ended it.
    enough: CancellationToken,
    account: Account,
    _permit: Permit,
}

struct Choice {
    decoder: TextDecoder,
    stops: StopMatcher,
    tokens: u32,
    finished: bool,
}

/// What the metrics get to know, however the request ends.
struct Account {
    metrics: RouterMetrics,
    model: String,
    arrived: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    outcome: Option<Outcome>,
    prompt_tokens: usize,
    completion_tokens: u32,
    request_id: String,
}

impl std::fmt::Debug for AnswerStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnswerStream").field("request", &self.account.request_id).finish()
    }
}

impl AnswerStream {
    /// Dispatches a valid request that has its place.
    pub fn start(
        dispatcher: &Dispatcher,
        model: &Arc<Model>,
        request: GenerateRequest,
        stops: Vec<String>,
        arrived: Instant,
        permit: Permit,
    ) -> Self {
        let choices = (0..request.choices).map(|_| Choice {
            decoder: model.tokenizer.decoder(),
            stops: StopMatcher::new(stops.clone()),
            tokens: 0,
            finished: false,
        });
        let choices = choices.collect();
        let account = Account {
            metrics: dispatcher.metrics.clone(),
            model: model.spec.name.clone(),
            arrived,
            first_token: None,
            last_token: None,
            outcome: None,
            prompt_tokens: request.prompt.len(),
            completion_tokens: 0,
            request_id: request.id.to_string(),
        };
        let (enough, min_tokens) = (CancellationToken::new(), request.stop.min_tokens);
        let events = dispatcher.start(model.clone(), request, arrived, enough.clone());
        Self { events, choices, min_tokens, next: None, enough, account, _permit: permit }
    }

    /// The next event; `None` after the last. Cancel safe.
    pub async fn next(&mut self) -> Option<AnswerEvent> {
        if let Some(event) = self.next.take() {
            return Some(event);
        }
        loop {
            if self.account.outcome.is_some() {
                return None;
            }
            let event = self.events.recv().await.unwrap_or_else(|| {
                RequestEvent::Failed(Error::internal("the request's task ended without a word"))
            });
            if let Some(event) = self.take(event) {
                return Some(event);
            }
        }
    }

    fn take(&mut self, event: RequestEvent) -> Option<AnswerEvent> {
        match event {
            RequestEvent::Token(token) => self.token(token),
            RequestEvent::PromptLogprobs(all) => Some(AnswerEvent::PromptLogprobs(all)),
            RequestEvent::ChoiceFinished { choice, reason } => self.finish(choice, reason),
            RequestEvent::Done(explain) => Some(self.done(*explain)),
            RequestEvent::Failed(error) => {
                self.account.outcome = Some(Outcome::Failed(error.code));
                Some(AnswerEvent::Failed(error))
            }
        }
    }

    fn token(&mut self, token: TokenOutput) -> Option<AnswerEvent> {
        let choice = &mut self.choices[usize::from(token.choice)];
        // A stop string has ended the choice; the node does not know yet.
        if choice.finished {
            return None;
        }
        choice.tokens += 1;
        self.account.token();
        let text = choice.decoder.push(token.id);
        let step = match choice.tokens <= self.min_tokens {
            true => StopStep { text, matched: false },
            false => choice.stops.push(&text),
        };
        if step.matched {
            choice.finished = true;
            self.next = Some(AnswerEvent::Finished {
                choice: token.choice,
                reason: FinishReason::Stop,
                text: String::new(),
            });
            if self.choices.iter().all(|choice| choice.finished) {
                self.enough.cancel();
            }
        }
        Some(AnswerEvent::Token { token, text: step.text })
    }

    fn finish(&mut self, at: u16, reason: FinishReason) -> Option<AnswerEvent> {
        let choice = &mut self.choices[usize::from(at)];
        if std::mem::replace(&mut choice.finished, true) {
            return None;
        }
        let step = choice.stops.push(&choice.decoder.finish());
        // The last bytes may complete a stop string.
        let (text, reason) = match step.matched {
            true => (step.text, FinishReason::Stop),
            false => (step.text + &choice.stops.finish(), reason),
        };
        Some(AnswerEvent::Finished { choice: at, reason, text })
    }

    fn done(&mut self, mut explain: Explain) -> AnswerEvent {
        explain.completion_tokens = self.choices.iter().map(|choice| choice.tokens).sum();
        self.account.completion_tokens = explain.completion_tokens;
        self.account.outcome = Some(Outcome::Done(explain.phases_us));
        AnswerEvent::Done(Box::new(explain))
    }
}

impl Account {
    fn token(&mut self) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            None => {
                self.first_token = Some(now);
                self.metrics.first_token(&self.model, now - self.arrived);
            }
            Some(last) => self.metrics.next_token(&self.model, now - last),
        }
        self.completion_tokens += 1;
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let outcome = self.outcome.take().unwrap_or(Outcome::Cancelled);
        self.metrics.request(
            &self.model,
            &outcome,
            self.arrived.elapsed(),
            self.prompt_tokens,
            self.completion_tokens as usize,
        );
    }
}
