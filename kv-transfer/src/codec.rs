//! Bounded reading and writing of little-endian fields. No length that a peer sent is trusted.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// What is wrong with bytes that should be a message or a grant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the bytes end before field `{0}`")]
    Short(&'static str),
    #[error("field `{field}` has length {len}; at most {max} is allowed")]
    TooLong { field: &'static str, len: usize, max: usize },
    #[error("field `{field}` cannot be {value}")]
    Value { field: &'static str, value: u64 },
    #[error("field `{0}` is not UTF-8")]
    Utf8(&'static str),
    #[error("{0} bytes follow the last field")]
    Trailing(usize),
}

/// Reads fields in order; each names itself for the error.
pub(crate) struct Reader(Bytes);

macro_rules! read_integer {
    ($name:ident, $get:ident, $int:ty) => {
        pub(crate) fn $name(&mut self, field: &'static str) -> Result<$int, DecodeError> {
            self.need(size_of::<$int>(), field)?;
            Ok(self.0.$get())
        }
    };
}

impl Reader {
    pub(crate) fn new(bytes: Bytes) -> Self {
        Self(bytes)
    }

    read_integer!(u8, get_u8, u8);
    read_integer!(u16, get_u16_le, u16);
    read_integer!(u32, get_u32_le, u32);
    read_integer!(u64, get_u64_le, u64);
    read_integer!(f32, get_f32_le, f32);

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], DecodeError> {
        self.need(N, field)?;
        let mut array = [0; N];
        self.0.copy_to_slice(&mut array);
        Ok(array)
    }

    /// Bytes behind their length, without a copy.
    pub(crate) fn bytes(&mut self, field: &'static str, max: usize) -> Result<Bytes, DecodeError> {
        let len = self.u32(field)? as usize;
        if len > max {
            return Err(DecodeError::TooLong { field, len, max });
        }
        self.need(len, field)?;
        Ok(self.0.split_to(len))
    }

    pub(crate) fn string(
        &mut self,
        field: &'static str,
        max: usize,
    ) -> Result<String, DecodeError> {
        let bytes = self.bytes(field, max)?;
        String::from_utf8(bytes.into()).map_err(|_| DecodeError::Utf8(field))
    }

    /// The length of a list whose entries take at least `entry_bytes` each, so that memory is
    /// never reserved for entries that cannot be there.
    pub(crate) fn count(
        &mut self,
        field: &'static str,
        entry_bytes: usize,
    ) -> Result<usize, DecodeError> {
        let len = self.u32(field)? as usize;
        let max = self.0.len() / entry_bytes;
        if len > max { Err(DecodeError::TooLong { field, len, max }) } else { Ok(len) }
    }

    pub(crate) fn finish(self) -> Result<(), DecodeError> {
        if self.0.is_empty() { Ok(()) } else { Err(DecodeError::Trailing(self.0.len())) }
    }

    fn need(&self, bytes: usize, field: &'static str) -> Result<(), DecodeError> {
        if self.0.len() < bytes { Err(DecodeError::Short(field)) } else { Ok(()) }
    }
}

/// Writes bytes behind their length, as `Reader::bytes` reads them.
pub(crate) fn put_bytes(out: &mut BytesMut, bytes: &[u8]) {
    out.put_u32_le(u32::try_from(bytes.len()).expect("fields are far below 4 GiB"));
    out.put_slice(bytes);
}
