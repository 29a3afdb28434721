//! A file's bytes, mapped read-only.

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};

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

    /// Bytes of it that are mapped as huge pages now; what was never read is not mapped. 0 where
    /// the system does not say.
    pub(crate) fn huge_bytes(&self) -> usize {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let own = self.map.as_ptr_range();
        let own = own.start as usize..own.end as usize;
        huge_bytes(&smaps, own)
    }

    /// Brings all pages into this process.
    pub(crate) fn populate(&self) {
        // Systems before Linux 5.14 do not know it; pages come when they are read.
        let _refused = self.map.advise(Advice::PopulateRead);
    }
}

/// Sums what `smaps` says of mappings that begin within `range`.
fn huge_bytes(smaps: &str, range: Range<usize>) -> usize {
    let (mut counts, mut sum) = (false, 0);
    for line in smaps.lines() {
        let Some((key, value)) = line.split_once(' ') else { continue };
        if let Some((first, _)) = key.split_once('-') {
            counts = usize::from_str_radix(first, 16).is_ok_and(|first| range.contains(&first));
        } else if counts && matches!(key, "FilePmdMapped:" | "ShmemPmdMapped:") {
            let kib = value.trim().strip_suffix(" kB").and_then(|kib| kib.parse::<usize>().ok());
            sum += kib.unwrap_or(0) << 10;
        }
    }
    sum
}

impl Deref for FileMap {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_of_one_mapping() {
        let smaps = "\
7f0000000000-7f0000400000 r--s 00000000 fe:00 9  /m.baton-packed
Rss:                4096 kB
ShmemPmdMapped:        0 kB
FilePmdMapped:      2048 kB
VmFlags: rd mr
7f0000400000-7f0000800000 r--s 00400000 fe:00 9  /m.baton-packed
FilePmdMapped:      4096 kB
7f0000800000-7f0000a00000 r--p 00000000 fe:00 3  /other
FilePmdMapped:      2048 kB
";
        assert_eq!(huge_bytes(smaps, 0x7f00_0000_0000..0x7f00_0080_0000), 6 << 20);
        assert_eq!(huge_bytes("", 0..1), 0);
    }
}
