//! Imports go down: a crate may only depend on crates of lower layers (ARCHITECTURE.md).

use std::collections::BTreeMap;

use anyhow::Context;
use serde_json::Value;

/// Lower layers first. Crates of one layer never import one another.
const LAYERS: [&[&str]; 8] = [
    &["types"],
    &["proto", "model-files", "tokenizer", "kv-cache", "ucx-sys"],
    &["engine", "kv-transfer", "registry"],
    &["runtime"],
    &["engine-host"],
    &["prefill-node", "decode-node", "router"],
    &["client"],
    &["cli"],
];

/// Edges that no layer allows, and pairs that a layer would allow but the design does not.
const NEVER: [(&str, &str); 2] = [("router", "engine"), ("kv-transfer", "engine")];

pub fn check(packages: &[Value]) -> anyhow::Result<Vec<String>> {
    let layer_of: BTreeMap<&str, usize> = LAYERS
        .iter()
        .enumerate()
        .flat_map(|(layer, crates)| crates.iter().map(move |name| (*name, layer)))
        .collect();
    let mut broken = Vec::new();
    for (from, to) in edges(packages)? {
        if from == "xtask" || from == "tests" {
            continue;
        }
        let (Some(&above), Some(&below)) = (layer_of.get(from.as_str()), layer_of.get(to.as_str()))
        else {
            broken.push(format!("{from} → {to}: one of them stands in no layer (xtask/layers.rs)"));
            continue;
        };
        if above <= below || NEVER.contains(&(from.as_str(), to.as_str())) {
            broken.push(format!("{from} imports {to}, which is not below it"));
        }
    }
    Ok(broken)
}

/// Normal dependencies between our crates, without the `baton-` prefix.
fn edges(packages: &[Value]) -> anyhow::Result<Vec<(String, String)>> {
    let short = |value: &Value| {
        value["name"].as_str().map(|name| name.strip_prefix("baton-").unwrap_or(name).to_string())
    };
    let mut edges = Vec::new();
    for package in packages {
        let from = short(package).context("a package has a name")?;
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let ours = dependency["name"].as_str().is_some_and(|name| name.starts_with("baton-"));
            if ours && dependency["kind"].is_null() {
                edges.push((from.clone(), short(dependency).context("it has a name")?));
            }
        }
    }
    Ok(edges)
}
