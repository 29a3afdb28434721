//! What loading a model tells the one who waits for it, and where packed weights are kept.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where packed weights are kept from one start to the next. As text: `off`, `beside`, or a path
/// (`./off` is one).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum WeightsCache {
    /// Nowhere: each process packs them into its own memory.
    #[default]
    Off,
    /// Beside the model, or in the user's cache folder where that cannot be written.
    Beside,
    /// In this folder.
    Folder(PathBuf),
}

/// Where packed weights that come from a file are read from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightsMemory {
    /// From the file's pages, if the system maps them as huge pages; else from a copy in huge
    /// pages of this process's own, since with small pages a decode takes up to twice as long.
    #[default]
    Auto,
    /// From the file's pages, which all processes share.
    Shared,
}

/// No folder's path: without a slash it may be a keyword that was meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no place for packed weights; give beside, off, or a folder with a slash, as ./{0}"
)]
pub struct NoPlace(String);

impl FromStr for WeightsCache {
    type Err = NoPlace;

    fn from_str(text: &str) -> Result<Self, NoPlace> {
        match text {
            "off" => Ok(Self::Off),
            "beside" => Ok(Self::Beside),
            path if path.contains('/') => Ok(Self::Folder(path.into())),
            other => Err(NoPlace(other.to_owned())),
        }
    }
}

impl TryFrom<String> for WeightsCache {
    type Error = NoPlace;

    fn try_from(text: String) -> Result<Self, NoPlace> {
        text.parse()
    }
}

impl From<WeightsCache> for String {
    fn from(cache: WeightsCache) -> Self {
        cache.to_string()
    }
}

impl fmt::Display for WeightsCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Beside => f.write_str("beside"),
            Self::Folder(path) => path.display().fmt(f),
        }
    }
}

/// What a load is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadStage {
    /// Reads the model file for its fingerprint.
    Hashing,
    /// Brings the weights into the form that the kernels read.
    Packing,
    /// Holds packed weights against their checksums.
    Checking,
    /// Another process packs the same model.
    Waiting,
}

impl LoadStage {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hashing => "hashing the model",
            Self::Packing => "packing the weights",
            Self::Checking => "checking the packed weights",
            Self::Waiting => "waiting for another process that packs the weights",
        }
    }
}

/// How far a stage has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub stage: LoadStage,
    pub done_bytes: u64,
    pub total_bytes: u64,
}

impl LoadProgress {
    /// 0 to 100.
    pub fn percent(&self) -> u64 {
        let done = u128::from(self.done_bytes) * 100;
        (done / u128::from(self.total_bytes.max(1))).min(100) as u64
    }
}

/// What has become of packed weights.
#[derive(Debug)]
pub enum LoadEvent {
    /// Taken from a file, which was there or has just been written.
    Mapped { path: PathBuf, bytes: u64, was_there: bool },
    /// The file's pages are small (but for `huge_bytes`): the weights are copied into huge pages.
    Copied { path: PathBuf, huge_bytes: u64 },
    /// A file that is not taken. It is replaced where it can be.
    Refused { path: PathBuf, reason: String },
    /// A file that could not be written; another place is tried, if there is one.
    NotWritten { path: PathBuf, reason: String },
    /// No place was left: the weights are in this process's own memory, and every start packs.
    InMemory,
}

/// Hears how a load gets on; called by the thread that loads, often.
pub trait LoadObserver: Sync {
    fn progress(&self, progress: LoadProgress);

    fn event(&self, event: &LoadEvent);
}

/// Hears nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl LoadObserver for NoObserver {
    fn progress(&self, _progress: LoadProgress) {}

    fn event(&self, _event: &LoadEvent) {}
}
