//! A reader that never leaves its slice.

use crate::ModelFileError;

/// Reads little-endian values from `bytes`, from the front.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file: &'a str,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], file: &'a str) -> Self {
        Self { bytes, at: 0, file }
    }

    /// Offset of the next byte.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn remaining(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// The next `len` bytes; `what` names them in the error.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], ModelFileError> {
        if len > self.remaining() {
            return Err(ModelFileError::Truncated {
                file: self.file.to_owned(),
                what: what.to_owned(),
                need_bytes: len,
                have_bytes: self.remaining(),
            });
        }
        let taken = &self.bytes[self.at..][..len as usize];
        self.at += taken.len();
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ModelFileError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, ModelFileError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, ModelFileError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A `gguf_string_t`: a 64-bit length and so many bytes of UTF-8.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a str, ModelFileError> {
        let len = self.u64(what)?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes)
            .map_err(|_| ModelFileError::Text { file: self.file.to_owned(), what: what.to_owned() })
    }

    /// A count of things that take at least `least_bytes` each, checked against what is left.
    pub(super) fn count(&mut self, least_bytes: u64, what: &str) -> Result<u64, ModelFileError> {
        let count = self.u64(what)?;
        let most = self.remaining() / least_bytes;
        if count > most {
            let (file, what) = (self.file.to_owned(), what.to_owned());
            return Err(ModelFileError::Count { file, what, count, most });
        }
        Ok(count)
    }
}
