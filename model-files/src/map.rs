//! A file's bytes, mapped or owned.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use memmap2::{Mmap, UncheckedAdvice};

use crate::ModelFileError;

/// A file that was changed so shortly before it was opened may be changed again without another
/// time: clocks of file systems are coarse.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// Bytes that live as long as the model is open.
pub(crate) enum FileBytes {
    Mapped(Mmap, Facts),
    Owned(Vec<u8>),
}

/// What the system knew of a file when it was opened.
pub(crate) struct Facts {
    /// Size, inode, times of the last change of content and inode: tells the file from another,
    /// and from itself after a change. `None` for a file that has not settled yet.
    pub(crate) stamp: Option<[u64; 6]>,
    /// The same, settled or not, and where the file lies.
    seen: [u64; 6],
    path: PathBuf,
    pub(crate) owner: u32,
    /// Whether every user may read it.
    pub(crate) is_public: bool,
}

impl FileBytes {
    /// Maps `path` read-only; under Miri, which maps no files, reads it.
    ///
    /// # Errors
    /// `Open` when the file cannot be opened or mapped.
    #[allow(unsafe_code)]
    pub(crate) fn map(path: &Path) -> Result<Self, ModelFileError> {
        let open = |source| ModelFileError::Open { path: path.to_owned(), source };
        if cfg!(miri) {
            return std::fs::read(path).map(Self::Owned).map_err(open);
        }
        // A pipe would be waited for, for ever.
        if !std::fs::metadata(path).map_err(open)?.is_file() {
            let problem = "it is no plain file";
            return Err(open(Error::new(ErrorKind::InvalidInput, problem)));
        }
        let file = File::open(path).map_err(open)?;
        let metadata = file.metadata().map_err(open)?;
        if metadata.len() == 0 {
            return Ok(Self::Owned(Vec::new()));
        }
        // SAFETY: the mapping is read-only and private to this process. Somebody who truncates a
        // model file while it is served ends the process (SIGBUS), as with any mapped file; the
        // bytes are only ever read as plain integers, so a change of them breaks no invariant.
        let map = unsafe { Mmap::map(&file) }.map_err(open)?;
        Ok(Self::Mapped(map, Facts::of(path, &metadata)))
    }

    /// `None` where the bytes are no file's.
    pub(crate) fn facts(&self) -> Option<&Facts> {
        match self {
            Self::Mapped(_, facts) => Some(facts),
            Self::Owned(_) => None,
        }
    }

    /// Lets the system take mapped pages out of this process; a later read brings them back.
    #[allow(unsafe_code)]
    pub(crate) fn forget_pages(&self) {
        let Self::Mapped(map, _) = self else { return };
        // SAFETY: the mapping is read-only and of a file, so that what is read after it is what
        // was read before. It is advice: failure changes nothing.
        let _refused = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map, _) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

impl Facts {
    fn of(path: &Path, file: &Metadata) -> Self {
        let (changed_s, changed_ns) = (file.ctime() as u64, file.ctime_nsec() as u64);
        let changed = UNIX_EPOCH + Duration::new(changed_s, changed_ns as u32);
        let age = SystemTime::now().duration_since(changed).unwrap_or_default();
        let seen = stamp_of(file);
        Self {
            stamp: (age >= SETTLED_AFTER).then_some(seen),
            seen,
            path: path.to_owned(),
            owner: file.uid(),
            is_public: file.mode() & 0o004 != 0,
        }
    }

    /// Whether the file is still what it was when it was opened.
    pub(crate) fn still_hold(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|file| stamp_of(&file) == self.seen)
    }
}

fn stamp_of(file: &Metadata) -> [u64; 6] {
    let (written_s, written_ns) = (file.mtime() as u64, file.mtime_nsec() as u64);
    let (changed_s, changed_ns) = (file.ctime() as u64, file.ctime_nsec() as u64);
    [file.size(), file.ino(), written_s, written_ns, changed_s, changed_ns]
}
