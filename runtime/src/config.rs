//! One typed struct for each process: defaults < file < environment < flags.

use std::path::{Path, PathBuf};

use figment::providers::{Env, Format, Serialized, Toml};
use figment::{Figment, Source};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

/// Prefix of environment variables: `BATON_GRPC` sets `grpc`.
pub const ENVIRONMENT_PREFIX: &str = "BATON_";

/// The configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("the configuration file {0} cannot be read; give an existing file to --config")]
    Unreadable(PathBuf),
    #[error("the configuration has {} error(s):\n  {}", .0.len(), .0.join("\n  "))]
    Invalid(Vec<String>),
}

/// Loads a configuration. `flags` are the values given on the command line, as a map of the
/// fields that were given.
///
/// # Errors
/// Every error that was found, with key and source.
pub fn load<C>(
    defaults: &C,
    file: Option<&Path>,
    flags: serde_json::Map<String, serde_json::Value>,
) -> Result<C, ConfigError>
where
    C: Serialize + DeserializeOwned,
{
    let mut figment = Figment::from(Serialized::defaults(defaults));
    if let Some(file) = file {
        if !file.is_file() {
            return Err(ConfigError::Unreadable(file.to_path_buf()));
        }
        figment = figment.merge(Toml::file_exact(file));
    }
    // Others put variables with our prefix into the environment too (Kubernetes does for each
    // service), so only those that name a key are taken.
    let known = serde_json::to_value(defaults).unwrap_or_default();
    let environment = Env::prefixed(ENVIRONMENT_PREFIX)
        .filter(move |key| known.get(key.as_str().to_ascii_lowercase()).is_some());
    figment.merge(environment).merge(Serialized::defaults(flags)).extract().map_err(|errors| {
        ConfigError::Invalid(errors.into_iter().map(|error| describe(&error)).collect())
    })
}

/// Reads a list, or one string with commas between: what fits into an environment variable.
///
/// # Errors
/// For anything else.
pub fn list<'de, D: Deserializer<'de>>(source: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum ListOrText {
        List(Vec<String>),
        Text(String),
    }
    Ok(match ListOrText::deserialize(source)? {
        ListOrText::List(list) => list,
        ListOrText::Text(text) => {
            text.split(',').map(str::trim).filter(|one| !one.is_empty()).map(Into::into).collect()
        }
    })
}

/// The key, what is wrong, and where it was set.
fn describe(error: &figment::Error) -> String {
    let key = error.path.join(".");
    let metadata = error.metadata.as_ref();
    let source = match metadata.and_then(|metadata| metadata.source.as_ref()) {
        Some(Source::File(path)) => path.display().to_string(),
        _ if metadata.is_some_and(|metadata| metadata.name.contains("environment")) => {
            format!("environment variable {ENVIRONMENT_PREFIX}{}", key.to_ascii_uppercase())
        }
        _ => "command line".into(),
    };
    // Types are named as Rust names them.
    let mut problem = error.kind.to_string();
    for (rust, plain) in
        [("usize", "a whole number"), ("u64", "a whole number"), ("u16", "a whole number")]
    {
        problem = problem.replace(rust, plain);
    }
    if key.is_empty() {
        format!("{problem} (from {source})")
    } else {
        format!("{key}: {problem} (from {source})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Config {
        grpc: String,
        threads: usize,
        #[serde(deserialize_with = "list")]
        etcd: Vec<String>,
    }

    fn defaults() -> Config {
        Config { grpc: "127.0.0.1:1".into(), threads: 1, etcd: vec![] }
    }

    fn load_with(file: &str, flags: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let path = tempfile::NamedTempFile::new().expect("a temporary file").into_temp_path();
        std::fs::write(&path, file).expect("it is writable");
        let flags = flags.iter().map(|(key, value)| (key.to_string(), (*value).into())).collect();
        load(&defaults(), Some(&path), flags)
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_defaults() {
        let got = load_with("threads = 4\ngrpc = \"a\"", &[("grpc", "b")]).unwrap();
        assert_eq!(got, Config { grpc: "b".into(), threads: 4, etcd: vec![] });
        let lists = ["etcd = \"a, b\"", "etcd = [\"a\", \"b\"]"];
        assert!(lists.iter().all(|file| load_with(file, &[]).unwrap().etcd == ["a", "b"]));
    }

    #[test]
    fn errors_name_the_key_and_the_source() {
        let path = tempfile::NamedTempFile::new().expect("a temporary file").into_temp_path();
        std::fs::write(&path, "thraeds = 4").expect("it is writable");
        let unknown = load(&defaults(), Some(&path), Default::default()).unwrap_err().to_string();
        let source = format!("(from {})", path.display());
        assert!(unknown.contains("thraeds") && unknown.contains(&source), "{unknown}");
        let wrong = load_with("threads = \"x\"", &[]).unwrap_err().to_string();
        assert!(wrong.contains("threads") && wrong.contains("a whole number"), "{wrong}");
        assert!(!wrong.contains("usize") && wrong.contains("/"), "{wrong}");
        let missing = load(&defaults(), Some(Path::new("/no/such")), Default::default());
        assert!(missing.unwrap_err().to_string().contains("/no/such"));
    }
}
