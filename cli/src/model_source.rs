//! Where a model comes from: a path, or a reference to the Hugging Face hub.

use std::path::PathBuf;

use anyhow::{Context, bail};
use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo};

/// GGUF files of a repository are tried in this order, by what their names hold.
const QUANT_ORDER: [&str; 16] = [
    "q4_1", "q4_0", "q4_k_m", "q4_k_s", "iq4_nl", "q5_k_m", "q5_k_s", "q5_0", "q5_1", "q6_k",
    "q8_0", "bf16", "f16", "f32", "q3_k", "q2_k",
];

/// Finds a model: a path as it is, `hf:org/name` or `hf:org/name/file.gguf` from the hub's cache
/// or, with progress, from the hub.
///
/// # Errors
/// Where the path is not there, or the hub cannot be reached and its cache has no copy.
pub async fn find(source: &str) -> anyhow::Result<PathBuf> {
    let Some(reference) = source.strip_prefix("hf:") else {
        let path = PathBuf::from(source);
        if !path.exists() {
            bail!(
                "there is no model at {source}; give a GGUF file, a model folder, or hf:org/name \
                 (`make model` fetches SmolLM2 into models/)"
            );
        }
        return Ok(path);
    };
    let reference = reference.to_string();
    tokio::task::spawn_blocking(move || from_hub(&reference)).await?
}

fn from_hub(reference: &str) -> anyhow::Result<PathBuf> {
    let (id, file) = split(reference).with_context(|| {
        format!("hf:{reference} is no reference; write hf:org/name or hf:org/name/file.gguf")
    })?;
    let api: Api = ApiBuilder::from_env().with_progress(true).build()?;
    let repo = api.model(id.clone());
    let unreachable = || {
        format!(
            "{id} cannot be fetched from the Hugging Face hub; offline, give the path of a model \
             file instead"
        )
    };
    if let Some(file) = file {
        return repo.get(file).with_context(unreachable);
    }
    let info = repo.info().with_context(unreachable)?;
    let files: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
    match best_gguf(&files) {
        Some(file) => repo.get(file).with_context(unreachable),
        None => folder(&repo, &files).with_context(unreachable),
    }
}

/// `org/name`, and the file in it that is named behind.
fn split(reference: &str) -> Option<(String, Option<&str>)> {
    let mut parts = reference.splitn(3, '/');
    let (org, name, file) = (parts.next()?, parts.next()?, parts.next());
    let is_no_path = |file: &str| file.split('/').any(|part| matches!(part, "" | "." | ".."));
    let is_one = is_name(org) && is_name(name) && !file.is_some_and(is_no_path);
    is_one.then(|| (format!("{org}/{name}"), file))
}

/// Of an organisation or a repository, as the hub has them.
fn is_name(part: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    part.chars().any(|c| c.is_ascii_alphanumeric()) && part.chars().all(known)
}

fn best_gguf(files: &[String]) -> Option<&str> {
    let of = |quant: &str| {
        files
            .iter()
            .find(|file| {
                let name = file.to_ascii_lowercase();
                name.ends_with(".gguf") && name.contains(quant)
            })
            .map(String::as_str)
    };
    QUANT_ORDER.into_iter().find_map(of)
}

/// All that a model folder needs; returns the folder.
fn folder(repo: &ApiRepo, files: &[String]) -> anyhow::Result<PathBuf> {
    let config = repo.get("config.json")?;
    for file in files {
        let plain = !file.contains('/');
        let wanted = file.ends_with(".safetensors")
            || file.ends_with(".json")
            || file.ends_with("chat_template.jinja");
        if plain && wanted {
            repo.get(file)?;
        }
    }
    Ok(config.parent().context("a cached file lies in a folder")?.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_supported_file_is_taken() {
        let files = [
            "m-IQ3_XXS.gguf",
            "m-Q6_K.gguf",
            "m-Q4_K_M.gguf",
            "m-f16.gguf",
            "m-Q8_0.gguf",
            "m-Q4_0.gguf",
            "README.md",
        ];
        let files: Vec<String> = files.iter().map(ToString::to_string).collect();
        assert_eq!(best_gguf(&files), Some("m-Q4_0.gguf"));
        assert_eq!(best_gguf(&files[..4]), Some("m-Q4_K_M.gguf"));
        assert_eq!(best_gguf(&files[..1]), None);
    }

    #[test]
    fn a_file_of_the_hub_may_have_any_name() {
        let of = |file| ("org/na-me_1.5".to_owned(), file);
        assert_eq!(split("org/na-me_1.5"), Some(of(None)));
        assert_eq!(split("org/na-me_1.5/a b/é+(1).gguf"), Some(of(Some("a b/é+(1).gguf"))));
    }

    #[tokio::test]
    async fn a_missing_path_says_what_to_give() {
        let error = find("no/such.gguf").await.unwrap_err().to_string();
        assert!(error.contains("no/such.gguf") && error.contains("hf:org/name"), "{error}");
        for wrong in ["hf:justaname", "hf:../x", "hf:org/", "hf:org/name/../x", "hf:a b/c"] {
            let error = find(wrong).await.unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("is no reference"), "{error}");
        }
    }
}
