//! Keeps what users write from becoming control tokens.
//!
//! Before a template is rendered, each place in a user's text where a control token starts is
//! broken apart by a mark: a noncharacter that occurs nowhere in the input. What the template
//! says about the text stays true (it still trims, splits and compares), and when the rendered
//! text is taken apart at control tokens, only the template's own are found. Then the marks go.
//!
//! A text may also end in the beginning of a control token, which the template's own text would
//! complete, or begin with the end of one: there a mark goes too. What no mark can guard is a
//! template that takes a text apart itself and joins other pieces of it, and a text that is the
//! middle of a control token of which the template writes both ends; for roles, where templates
//! do that (`<|` + role + `|>`), [`allows_role`] stands in.

use serde_json::{Map, Value};

use crate::control::ControlTokens;

/// Noncharacters: valid in UTF-8, never assigned, "for internal use".
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Roles that templates put into control tokens on purpose.
const ROLES: [&str; 13] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "ipython",
    "environment",
    "model",
    "observation",
    "context",
    "documents",
    "tool_response",
];

#[derive(Clone, Copy, Debug)]
pub(super) struct Shield<'c> {
    control: &'c ControlTokens,
    mark: char,
}

impl<'c> Shield<'c> {
    /// `None` if every mark occurs in `texts`.
    pub(super) fn new<'t>(
        control: &'c ControlTokens,
        texts: impl Iterator<Item = &'t str>,
    ) -> Option<Self> {
        let mut used = [false; 32];
        for c in texts.flat_map(str::chars).filter(|c| MARKS.contains(c)) {
            used[(u32::from(c) - u32::from(*MARKS.start())) as usize] = true;
        }
        let mark = MARKS.zip(used).find(|(_, used)| !used)?.0;
        Some(Self { control, mark })
    }

    pub(super) fn mark(&self) -> char {
        self.mark
    }

    /// `text` with marks.
    pub(super) fn cover(&self, text: &str) -> String {
        let mut marks: Vec<usize> = text
            .char_indices()
            .filter(|(at, _)| self.control.at(text, *at).is_some())
            .map(|(at, c)| at + c.len_utf8())
            .collect();
        let trimmed = text.trim_end().len();
        for end in [text.len(), trimmed] {
            if self.ends_in_a_start(&text[..end]) {
                marks.push(end);
            }
        }
        let trimmed = text.len() - text.trim_start().len();
        for start in [0, trimmed] {
            if self.starts_with_an_end(&text[start..]) {
                marks.push(start);
            }
        }
        marks.sort_unstable();
        marks.dedup();
        let mut covered = String::with_capacity(text.len() + marks.len() * self.mark.len_utf8());
        let mut done = 0;
        for at in marks {
            covered.push_str(&text[done..at]);
            covered.push(self.mark);
            done = at;
        }
        covered.push_str(&text[done..]);
        covered
    }

    /// All strings in `value`, keys included, with marks.
    pub(super) fn cover_value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.cover(text)),
            Value::Array(items) => items.iter().map(|item| self.cover_value(item)).collect(),
            Value::Object(map) => Value::Object(self.cover_map(map)),
            other => other.clone(),
        }
    }

    pub(super) fn cover_map(&self, map: &Map<String, Value>) -> Map<String, Value> {
        map.iter().map(|(key, value)| (self.cover(key), self.cover_value(value))).collect()
    }

    fn ends_in_a_start(&self, text: &str) -> bool {
        let text = text.as_bytes();
        self.control.iter().any(|token| {
            let token = token.text.as_bytes();
            (1..token.len()).any(|len| text.ends_with(&token[..len]))
        })
    }

    fn starts_with_an_end(&self, text: &str) -> bool {
        let text = text.as_bytes();
        self.control.iter().any(|token| {
            let token = token.text.as_bytes();
            (1..token.len()).any(|cut| text.starts_with(&token[cut..]))
        })
    }
}

/// Whether `role` may go to a template: it is a usual one, or no part of a control token.
pub(super) fn allows_role(control: &ControlTokens, role: &str) -> bool {
    ROLES.contains(&role) || control.iter().all(|token| !token.text.contains(role))
}
