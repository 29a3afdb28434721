//! Writes a packed file from its first matrix to its last, and its head at the end.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use baton_model_files::{ContentHash, ModelStamp};
use crc32c::crc32c;

use super::{CHUNK_BYTES, PAGE_BYTES, PackedHead, PackedPlan};

/// Takes bytes at any place.
pub(crate) trait Storage {
    /// # Errors
    /// Such as that there is no room.
    fn write_at(&mut self, bytes: &[u8], start: usize) -> io::Result<()>;
}

impl Storage for &File {
    fn write_at(&mut self, bytes: &[u8], start: usize) -> io::Result<()> {
        self.write_all_at(bytes, start as u64)
    }
}

/// Gathers chunks. Each is written at once and as a whole, so that the system may keep it in one
/// huge page; the first comes last, with the head: what is left of a crash has none and is not
/// taken.
pub(crate) struct PackedWriter<'a, S> {
    storage: S,
    plan: &'a PackedPlan,
    chunk: Vec<u8>,
    /// What follows the head in its last chunk.
    first: Option<Vec<u8>>,
    checksums: Vec<u32>,
    /// Bytes of the file that are written or gathered.
    end: usize,
}

impl<'a, S: Storage> PackedWriter<'a, S> {
    pub(crate) fn new(storage: S, plan: &'a PackedPlan) -> Self {
        let chunk = Vec::with_capacity(CHUNK_BYTES);
        let mut writer = Self { storage, plan, chunk, first: None, checksums: Vec::new(), end: 0 };
        writer.end = plan.data_start();
        // A head may take whole chunks, of which nothing is checked.
        writer.checksums = vec![crc32c(&[]); writer.end / CHUNK_BYTES];
        writer
    }

    /// Adds the next matrix's bytes.
    ///
    /// # Errors
    /// The storage's.
    pub(crate) fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        let gap = self.end.next_multiple_of(PAGE_BYTES) - self.end;
        self.append(&[0; PAGE_BYTES][..gap])?;
        self.append(bytes)
    }

    /// Writes what is left, and the head.
    ///
    /// # Errors
    /// The storage's.
    ///
    /// # Panics
    /// When bytes are missing or too many.
    pub(crate) fn finish(
        mut self,
        content: ContentHash,
        stamp: Option<ModelStamp>,
    ) -> io::Result<()> {
        let rest = self.plan.file_bytes().checked_sub(self.end);
        let rest = rest.filter(|rest| *rest < CHUNK_BYTES).expect("the plan's matrices were added");
        self.append(&vec![0; rest])?;
        self.flush()?;
        let head = PackedHead { content, stamp, checksums: self.checksums };
        let mut start = head.encode(self.plan);
        start.extend(self.first.unwrap_or_default());
        self.storage.write_at(&start, 0)
    }

    fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let room = CHUNK_BYTES - self.end % CHUNK_BYTES;
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.chunk.extend_from_slice(now);
            self.end += now.len();
            if self.end.is_multiple_of(CHUNK_BYTES) {
                self.flush()?;
            }
            bytes = later;
        }
        Ok(())
    }

    /// Writes the bytes that are gathered, all of one chunk.
    fn flush(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        self.checksums.push(crc32c(&self.chunk));
        if self.first.is_none() {
            self.first = Some(std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK_BYTES)));
            return Ok(());
        }
        self.storage.write_at(&self.chunk, self.end - self.chunk.len())?;
        self.chunk.clear();
        Ok(())
    }
}
