//! A running generation.

use baton_proto::v1::generate_event::Event;
use baton_proto::v1::{Done, GenerateEvent};
use baton_types::{Error, TokenId};
use tonic::Streaming;

use crate::ClientError;

/// Events as they come. Dropping it cancels the request.
#[derive(Debug)]
pub struct GenerateStream {
    events: Streaming<GenerateEvent>,
    /// Read ahead, so that what fails before it can be tried again.
    first: Option<Event>,
    done: bool,
}

/// One choice, complete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    pub token_ids: Vec<TokenId>,
    /// "stop" or "length".
    pub finish_reason: String,
}

/// All choices, complete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    pub answers: Vec<Answer>,
    pub done: Done,
}

impl GenerateStream {
    /// Waits for the first event.
    pub(crate) async fn begin(events: Streaming<GenerateEvent>) -> Result<Self, ClientError> {
        let mut stream = Self { events, first: None, done: false };
        stream.first = stream.next().await.transpose()?;
        Ok(stream)
    }

    /// The next event; `None` after `Done` or an error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Event, ClientError>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        if self.done {
            return None;
        }
        let event = match self.events.message().await {
            Ok(Some(GenerateEvent { event: Some(event) })) => {
                self.done = matches!(event, Event::Done(_));
                return Some(Ok(event));
            }
            Ok(_) => Error::unavailable("the stream ended before the answer was complete").into(),
            Err(status) => ClientError::from(status),
        };
        self.done = true;
        Some(Err(event))
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// The error that ended the stream.
    pub async fn collect(mut self) -> Result<Completion, ClientError> {
        let mut completion = Completion::default();
        while let Some(event) = self.next().await {
            match event? {
                Event::Token(token) => {
                    let answer = answer_mut(&mut completion.answers, token.choice);
                    answer.text.push_str(&token.text);
                    answer.token_ids.push(token.id);
                }
                Event::Finished(finished) => {
                    let answer = answer_mut(&mut completion.answers, finished.choice);
                    answer.text.push_str(&finished.text);
                    answer.finish_reason = finished.reason;
                }
                Event::PromptLogprobs(_) => {}
                Event::Done(done) => completion.done = done,
            }
        }
        Ok(completion)
    }
}

fn answer_mut(answers: &mut Vec<Answer>, choice: u32) -> &mut Answer {
    let at = choice as usize;
    if answers.len() <= at {
        answers.resize(at + 1, Answer::default());
    }
    &mut answers[at]
}

impl From<Error> for ClientError {
    fn from(error: Error) -> Self {
        ClientError::Baton(error)
    }
}
