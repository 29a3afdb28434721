//! Keeps the order: each (choice, index) is accepted once. Pure.

use baton_types::{Error, FinishReason, TokenId, TokenOutput};

/// Tokens that have been accepted, by choice.
#[derive(Debug)]
pub struct Sequencer {
    choices: Vec<Choice>,
}

#[derive(Debug, Default)]
struct Choice {
    ids: Vec<TokenId>,
    finished: Option<FinishReason>,
}

impl Sequencer {
    pub fn new(choices: u16) -> Self {
        Self { choices: (0..choices).map(|_| Choice::default()).collect() }
    }

    /// Whether the token is new. One that came before is dropped, in silence.
    ///
    /// # Errors
    /// `Internal` for a gap, for a token behind the end, and for one that differs from what was
    /// accepted at its place: the nodes do not compute the same.
    pub fn accept(&mut self, token: &TokenOutput) -> Result<bool, Error> {
        let broken = |what: String| {
            Error::internal(format!("choice {}, token {}: {what}", token.choice, token.index))
        };
        let choice = self
            .choices
            .get_mut(usize::from(token.choice))
            .ok_or_else(|| broken("the request has no such choice".into()))?;
        let (index, next) = (token.index as usize, choice.ids.len());
        if index < next {
            let accepted = choice.ids[index];
            if accepted != token.id {
                return Err(broken(format!("{} came after {accepted}", token.id)));
            }
            return Ok(false);
        }
        if index > next {
            return Err(broken(format!("{next} tokens came before it")));
        }
        if choice.finished.is_some() {
            return Err(broken("the choice had ended".into()));
        }
        choice.ids.push(token.id);
        Ok(true)
    }

    /// Whether the end is new.
    ///
    /// # Errors
    /// `Internal` for a choice that the request has not.
    pub fn finish(&mut self, choice: u16, reason: FinishReason) -> Result<bool, Error> {
        let choice = self.choices.get_mut(usize::from(choice)).ok_or_else(|| {
            Error::internal(format!("choice {choice} ended, which the request has not"))
        })?;
        Ok(choice.finished.replace(reason).is_none())
    }

    pub fn all_finished(&self) -> bool {
        self.choices.iter().all(|choice| choice.finished.is_some())
    }

    pub fn has_tokens(&self) -> bool {
        self.choices.iter().any(|choice| !choice.ids.is_empty())
    }

    /// Accepted tokens, over all choices.
    pub fn tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.ids.len()).sum()
    }

    /// Ids and end of each choice: where recovery goes on.
    pub fn delivered(&self) -> impl Iterator<Item = (&[TokenId], bool)> {
        self.choices.iter().map(|choice| (&choice.ids[..], choice.finished.is_some()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn token(choice: u16, index: u32, id: TokenId) -> TokenOutput {
        TokenOutput { choice, index, id, logprobs: None }
    }

    #[test]
    fn gaps_changes_and_late_tokens_are_refused() {
        let mut sequencer = Sequencer::new(1);
        assert!(sequencer.accept(&token(0, 0, 5)).unwrap());
        assert!(!sequencer.accept(&token(0, 0, 5)).unwrap());
        assert!(sequencer.accept(&token(0, 0, 6)).is_err());
        assert!(sequencer.accept(&token(0, 2, 6)).is_err());
        assert!(sequencer.accept(&token(1, 0, 6)).is_err());
        assert!(sequencer.finish(0, FinishReason::Stop).unwrap());
        assert!(!sequencer.finish(0, FinishReason::Stop).unwrap());
        assert!(sequencer.accept(&token(0, 1, 6)).is_err());
        assert!(sequencer.all_finished());
    }

    proptest! {
        /// Two nodes send the same answers at their own pace, with losses behind what the other
        /// has sent: the client gets each token once, in order.
        #[test]
        fn interleaved_streams_give_each_token_once(
            picks in prop::collection::vec(any::<bool>(), 40),
        ) {
            let answer: Vec<TokenId> = (0..20).map(|at| at * 3).collect();
            let mut sequencer = Sequencer::new(1);
            let mut got = Vec::new();
            let mut at = [0_usize; 2];
            for pick in picks {
                let source = usize::from(pick);
                let index = at[source].min(got.len());
                if index < answer.len() {
                    let token = token(0, index as u32, answer[index]);
                    if sequencer.accept(&token).unwrap() {
                        got.push(token.id);
                    }
                    at[source] = index + 1;
                }
            }
            prop_assert_eq!(&got[..], &answer[..got.len()]);
        }
    }
}
