//! Stop strings, found while text streams.

/// What one piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Safe to send: no part of it belongs to a stop string.
    pub text: String,
    /// A stop string is complete; nothing follows.
    pub matched: bool,
}

/// Watches text for stop strings and holds back what may still become one.
///
/// The match that is complete first wins, of those that end together the longest; so the result
/// does not depend on how the text was cut into pieces, and generation stops at the earliest
/// token. Text before the match is given out; the match and all that follows is dropped. Each
/// push costs O((held + new bytes) × stops).
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    matched: bool,
}

impl StopMatcher {
    /// Empty stop strings are ignored.
    pub fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self { stops, held: String::new(), matched: false }
    }

    pub fn push(&mut self, text: &str) -> StopStep {
        if self.matched {
            return StopStep { text: String::new(), matched: true };
        }
        self.held.push_str(text);
        let ends = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        if let Some((_, start)) = ends.min() {
            self.matched = true;
            self.held.truncate(start);
            return StopStep { text: std::mem::take(&mut self.held), matched: true };
        }
        let kept = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - kept);
        StopStep { text: std::mem::replace(&mut self.held, held), matched: false }
    }

    /// The text that was held back when no more follows.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes of the longest end of `text` that is a start of `stop`, but not all of it.
fn overlap(text: &str, stop: &str) -> usize {
    (1..stop.len().min(text.len() + 1))
        .rev()
        .find(|&len| text.as_bytes().ends_with(&stop.as_bytes()[..len]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests;
