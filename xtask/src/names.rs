//! Modules are nouns that say what they own.

use crate::sizes::Source;

const BANNED: [&str; 8] =
    ["common", "utils", "util", "helpers", "helper", "manager", "handler", "misc"];

pub fn check(sources: &[Source]) -> Vec<String> {
    sources
        .iter()
        .filter(|source| {
            source.path.iter().any(|part| {
                let part = part.to_string_lossy();
                BANNED.contains(&part.trim_end_matches(".rs"))
            })
        })
        .map(|source| {
            format!("{}: this name says nothing about what is in it", source.path.display())
        })
        .collect()
}
