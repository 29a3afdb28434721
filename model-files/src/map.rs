//! A file's bytes, mapped or owned.

use std::fs::File;
use std::path::Path;

use memmap2::{Mmap, UncheckedAdvice};

use crate::ModelFileError;

/// Bytes that live as long as the model is open.
pub(crate) enum FileBytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl FileBytes {
    /// Maps `path` read-only.
    ///
    /// # Errors
    /// `Open` when the file cannot be opened or mapped.
    #[allow(unsafe_code)]
    pub(crate) fn map(path: &Path) -> Result<Self, ModelFileError> {
        let open = |source| ModelFileError::Open { path: path.to_owned(), source };
        let file = File::open(path).map_err(open)?;
        if file.metadata().map_err(open)?.len() == 0 {
            return Ok(Self::Owned(Vec::new()));
        }
        // SAFETY: the mapping is read-only and private to this process. Somebody who truncates a
        // model file while it is served ends the process (SIGBUS), as with any mapped file; the
        // bytes are only ever read as plain integers, so a change of them breaks no invariant.
        let map = unsafe { Mmap::map(&file) }.map_err(open)?;
        Ok(Self::Mapped(map))
    }

    /// Lets the system take mapped pages out of this process; a later read brings them back.
    #[allow(unsafe_code)]
    pub(crate) fn forget_pages(&self) {
        let Self::Mapped(map) = self else { return };
        // SAFETY: the mapping is read-only and of a file, so that what is read after it is what
        // was read before. It is advice: failure changes nothing.
        let _refused = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}
