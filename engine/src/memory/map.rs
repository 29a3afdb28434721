//! A file's bytes, mapped read-only.

use std::fs::File;
use std::io;
use std::ops::Deref;

use memmap2::{Advice, Mmap};

/// Bytes of a file that all processes which map it share.
///
/// Somebody who truncates the file ends every process that reads behind its new end (SIGBUS).
/// Nobody of ours does: packed files are written elsewhere, renamed into place, never opened for
/// writing again, and read-only; who may write them is checked before they are mapped.
pub(crate) struct FileMap {
    map: Mmap,
}

impl FileMap {
    /// Maps all of `file`, on huge pages where its file system keeps such: they take them from
    /// files that were written in pieces as large, at borders as large.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        // SAFETY: the mapping is read-only, its bytes are only read as plain integers, and what
        // somebody else's change of the file does is told above.
        let map = unsafe { Mmap::map(file) }?;
        // Advice: without it everything works the same.
        let _refused = map.advise(Advice::HugePage);
        Ok(Self { map })
    }
}

impl Deref for FileMap {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        &self.map
    }
}
