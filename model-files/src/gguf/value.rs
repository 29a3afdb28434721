//! Metadata values. Arrays stay in the file and are read when they are asked for, so that a file
//! costs no more memory than its size.

use super::cursor::Cursor;
use crate::ModelFileError;

/// Arrays of arrays deeper than this are refused.
const MAX_ARRAY_DEPTH: usize = 4;

/// `gguf_metadata_value_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    fn from_code(code: u32) -> Option<Self> {
        const KINDS: [Kind; 13] = [
            Kind::U8,
            Kind::I8,
            Kind::U16,
            Kind::I16,
            Kind::U32,
            Kind::I32,
            Kind::F32,
            Kind::Bool,
            Kind::String,
            Kind::Array,
            Kind::U64,
            Kind::I64,
            Kind::F64,
        ];
        KINDS.get(code as usize).copied()
    }

    /// Fewest bytes that one value takes.
    fn least_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bool => "a boolean",
            Self::F32 | Self::F64 => "a float",
            Self::String => "a string",
            Self::Array => "an array",
            _ => "an integer",
        }
    }
}

/// One value of the metadata, borrowed from the file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    /// All integers; `i128` holds both `u64` and `i64`.
    Int(i128),
    Float(f64),
    Bool(bool),
    Str(&'a str),
    Array(ArrayRef<'a>),
}

/// Elements of one kind, checked to lie within the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrayRef<'a> {
    pub(super) kind: Kind,
    pub(super) count: usize,
    bytes: &'a [u8],
}

impl Value<'_> {
    pub(super) fn kind_name(&self) -> String {
        match self {
            Self::Int(_) => "an integer".into(),
            Self::Float(_) => "a float".into(),
            Self::Bool(_) => "a boolean".into(),
            Self::Str(_) => "a string".into(),
            Self::Array(array) => format!("an array whose elements are {}", array.kind.name()),
        }
    }
}

/// Reads the kind and the value of `key`.
pub(super) fn read_value<'a>(
    cursor: &mut Cursor<'a>,
    bytes: &'a [u8],
    file: &str,
    key: &str,
) -> Result<Value<'a>, ModelFileError> {
    let kind = read_kind(cursor, file, key)?;
    read_of_kind(cursor, bytes, file, key, kind, 0)
}

impl<'a> ArrayRef<'a> {
    /// The elements as strings; `None` when they are something else.
    pub(super) fn strings(&self, file: &'a str, key: &str) -> Option<Vec<&'a str>> {
        if self.kind != Kind::String {
            return None;
        }
        let mut cursor = Cursor::new(self.bytes, file);
        (0..self.count).map(|_| cursor.string(key).ok()).collect()
    }

    /// The elements as numbers; `None` when they are something else.
    pub(super) fn numbers(&self, file: &str, key: &str) -> Option<Vec<f64>> {
        let mut cursor = Cursor::new(self.bytes, file);
        let mut numbers = Vec::with_capacity(self.count);
        for _ in 0..self.count {
            match read_of_kind(&mut cursor, self.bytes, file, key, self.kind, 0).ok()? {
                Value::Int(value) => numbers.push(value as f64),
                Value::Float(value) => numbers.push(value),
                _ => return None,
            }
        }
        Some(numbers)
    }
}

fn read_kind(cursor: &mut Cursor<'_>, file: &str, key: &str) -> Result<Kind, ModelFileError> {
    let code = cursor.u32(key)?;
    Kind::from_code(code).ok_or_else(|| ModelFileError::KeyValue {
        file: file.to_owned(),
        key: key.to_owned(),
        problem: format!("value type {code} does not exist in GGUF; the file is damaged"),
    })
}

fn read_of_kind<'a>(
    cursor: &mut Cursor<'a>,
    bytes: &'a [u8],
    file: &str,
    key: &str,
    kind: Kind,
    depth: usize,
) -> Result<Value<'a>, ModelFileError> {
    Ok(match kind {
        Kind::U8 => Value::Int(u8::from_le_bytes(cursor.array(key)?).into()),
        Kind::I8 => Value::Int(i8::from_le_bytes(cursor.array(key)?).into()),
        Kind::U16 => Value::Int(u16::from_le_bytes(cursor.array(key)?).into()),
        Kind::I16 => Value::Int(i16::from_le_bytes(cursor.array(key)?).into()),
        Kind::U32 => Value::Int(u32::from_le_bytes(cursor.array(key)?).into()),
        Kind::I32 => Value::Int(i32::from_le_bytes(cursor.array(key)?).into()),
        Kind::U64 => Value::Int(u64::from_le_bytes(cursor.array(key)?).into()),
        Kind::I64 => Value::Int(i64::from_le_bytes(cursor.array(key)?).into()),
        Kind::F32 => Value::Float(f32::from_le_bytes(cursor.array(key)?).into()),
        Kind::F64 => Value::Float(f64::from_le_bytes(cursor.array(key)?)),
        Kind::Bool => Value::Bool(cursor.array::<1>(key)?[0] != 0),
        Kind::String => Value::Str(cursor.string(key)?),
        Kind::Array => Value::Array(read_array(cursor, bytes, file, key, depth + 1)?),
    })
}

fn read_array<'a>(
    cursor: &mut Cursor<'a>,
    bytes: &'a [u8],
    file: &str,
    key: &str,
    depth: usize,
) -> Result<ArrayRef<'a>, ModelFileError> {
    if depth > MAX_ARRAY_DEPTH {
        return Err(ModelFileError::KeyValue {
            file: file.to_owned(),
            key: key.to_owned(),
            problem: format!("arrays are nested deeper than {MAX_ARRAY_DEPTH}"),
        });
    }
    let kind = read_kind(cursor, file, key)?;
    let count = cursor.count(kind.least_bytes(), key)?;
    let start = cursor.position();
    match kind {
        Kind::String | Kind::Array => {
            for _ in 0..count {
                read_of_kind(cursor, bytes, file, key, kind, depth)?;
            }
        }
        _ => {
            cursor.take(count * kind.least_bytes(), key)?;
        }
    }
    Ok(ArrayRef { kind, count: count as usize, bytes: &bytes[start..cursor.position()] })
}
