//! What cargo knows of the workspace, and dependencies that nothing needs.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::sizes::Source;

/// Named by the code that `proto`'s build script makes, in no source of ours.
const IN_GENERATED_CODE: [(&str, &str); 2] =
    [("baton-proto", "prost"), ("baton-proto", "tonic-prost")];

/// Every package of the workspace, as `cargo metadata` shows it.
pub fn read() -> anyhow::Result<Vec<Value>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps"])
        .output()
        .context("cargo metadata cannot run")?;
    ensure!(output.status.success(), "cargo metadata failed");
    let mut metadata: Value = serde_json::from_slice(&output.stdout)?;
    let Value::Array(packages) = metadata["packages"].take() else {
        anyhow::bail!("cargo metadata shows no packages");
    };
    Ok(packages)
}

/// Dependencies that no source of their package names: each is built for nothing.
pub fn check_used(packages: &[Value], sources: &[Source]) -> anyhow::Result<Vec<String>> {
    let here = std::env::current_dir()?;
    let mut broken = Vec::new();
    for package in packages {
        let text = |key: &str| package[key].as_str().with_context(|| format!("no {key}"));
        let (name, manifest) = (text("name")?, Path::new(text("manifest_path")?));
        let folder = manifest.parent().context("a manifest lies in a folder")?;
        let own: Vec<&Source> =
            sources.iter().filter(|source| here.join(&source.path).starts_with(folder)).collect();
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let used = dependency["rename"].as_str().or(dependency["name"].as_str());
            let used = used.context("a dependency has a name")?;
            if IN_GENERATED_CODE.contains(&(name, used)) {
                continue;
            }
            let kind = dependency["kind"].as_str();
            let is_named = |source: &&Source| {
                let path = here.join(&source.path);
                is_built_with(path.strip_prefix(folder).unwrap_or(&path), kind)
                    && names(&source.text, &used.replace('-', "_"))
            };
            if !own.iter().any(is_named) {
                broken.push(format!("{name}: nothing that needs {used} is left; take it out"));
            }
        }
    }
    Ok(broken)
}

/// Whether the file at `path` in its package may name dependencies of `kind`.
fn is_built_with(path: &Path, kind: Option<&str>) -> bool {
    match kind {
        Some("build") => path == Path::new("build.rs"),
        Some(_) => path != Path::new("build.rs"),
        None => path.starts_with("src"),
    }
}

/// Whether `text` has `word`, with no letter of a name before or behind it.
fn names(text: &str, word: &str) -> bool {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part)
    })
}
