//! Files stay short, and so do functions and lines.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

const FILE_MAX_LINES: usize = 500;
const FUNCTION_MAX_LINES: usize = 75;
const MAIN_MAX_LINES: usize = 60;
const LINE_MAX_CHARS: usize = 100;

pub struct Source {
    pub path: PathBuf,
    pub text: String,
}

/// Every Rust file that git knows.
pub fn sources() -> anyhow::Result<Vec<Source>> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "*.rs"])
        .output()
        .context("git cannot run")?;
    ensure!(output.status.success(), "git ls-files failed");
    let paths = String::from_utf8(output.stdout)?;
    paths
        .lines()
        .filter(|path| Path::new(path).exists())
        .map(|path| {
            let text = std::fs::read_to_string(path).with_context(|| path.to_string())?;
            Ok(Source { path: path.into(), text })
        })
        .collect()
}

pub fn check(sources: &[Source]) -> Vec<String> {
    sources.iter().flat_map(check_one).collect()
}

fn check_one(source: &Source) -> Vec<String> {
    let path = source.path.display();
    let mut broken = Vec::new();
    let lines: Vec<&str> = source.text.lines().collect();
    let most = if source.path.ends_with("src/main.rs") { MAIN_MAX_LINES } else { FILE_MAX_LINES };
    if lines.len() > most {
        broken.push(format!("{path}: {} lines, at most {most}", lines.len()));
    }
    for (at, line) in lines.iter().enumerate() {
        if line.chars().count() > LINE_MAX_CHARS {
            broken.push(format!("{path}:{}: longer than {LINE_MAX_CHARS} characters", at + 1));
        }
    }
    broken.extend(long_functions(&lines).into_iter().map(|(at, length)| {
        format!("{path}:{}: a function of {length} lines, at most {FUNCTION_MAX_LINES}", at + 1)
    }));
    broken
}

/// rustfmt puts a function's closing brace under the beginning of its first line.
fn long_functions(lines: &[&str]) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        if !is_function(code) {
            continue;
        }
        let closing = format!("{}}}", " ".repeat(indent));
        let end = lines[at..].iter().position(|line| *line == closing || line.ends_with(";"));
        if let Some(length) = end.map(|end| end + 1)
            && length > FUNCTION_MAX_LINES
            && lines[at + length - 1] == closing
        {
            found.push((at, length));
        }
    }
    found
}

fn is_function(code: &str) -> bool {
    let mut words = code.split_whitespace();
    words.by_ref().take(5).any(|word| word == "fn") && !code.starts_with("//")
}
