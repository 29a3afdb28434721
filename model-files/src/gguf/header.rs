//! Header, metadata and tensor directory.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use super::cursor::Cursor;
use super::value::{Value, read_value};
use crate::{ModelFileError, TensorDtype};

const MAGIC: &[u8; 4] = b"GGUF";

/// Where tensor data is aligned to when `general.alignment` does not say.
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
const MAX_DIMS: u32 = 4;
/// The spec's limit of a key's length; tensor names are held to it as well.
const MAX_NAME_BYTES: usize = 65535;
/// Key: length, one byte, kind, value. Tensor: length, one byte, dims, type, offset.
const LEAST_KEY_BYTES: u64 = 14;
const LEAST_TENSOR_BYTES: u64 = 33;

/// One entry of the tensor directory, its range checked to lie within the file.
#[derive(Clone, Debug)]
pub(crate) struct GgufTensor {
    pub(crate) dtype: TensorDtype,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    /// Of the whole file.
    pub(crate) bytes: Range<usize>,
}

/// A parsed GGUF file, borrowed from its bytes.
pub(crate) struct Gguf<'a> {
    pub(super) file: &'a str,
    pub(super) bytes: &'a [u8],
    pub(super) metadata: BTreeMap<&'a str, Value<'a>>,
    pub(super) tensors: BTreeMap<&'a str, GgufTensor>,
}

impl<'a> Gguf<'a> {
    /// Parses all but the weights themselves; `file` names the file in errors.
    ///
    /// # Errors
    /// Whatever in the file breaks the format.
    pub(crate) fn parse(bytes: &'a [u8], file: &'a str) -> Result<Self, ModelFileError> {
        let mut cursor = Cursor::new(bytes, file);
        let magic: [u8; 4] = cursor.array("the header")?;
        if &magic != MAGIC {
            let found = String::from_utf8_lossy(&magic).into_owned();
            return Err(ModelFileError::UnknownFormat { path: file.into(), found });
        }
        let version = cursor.u32("the header")?;
        if !(2..=3).contains(&version) {
            return Err(ModelFileError::Version { file: file.to_owned(), version });
        }
        let tensor_count = cursor.count(LEAST_TENSOR_BYTES, "the tensor count")?;
        let key_count = cursor.count(LEAST_KEY_BYTES, "the metadata count")?;
        let metadata = read_metadata(&mut cursor, bytes, file, key_count)?;
        let alignment = alignment(&metadata, file)?;
        let entries = read_directory(&mut cursor, file, tensor_count)?;
        let data_start = (cursor.position() as u64).next_multiple_of(alignment);
        let tensors = place_tensors(entries, file, data_start, alignment, bytes.len() as u64)?;
        Ok(Self { file, bytes, metadata, tensors })
    }
}

/// A directory entry before its place in the file is known.
struct Entry<'a> {
    name: &'a str,
    dtype: TensorDtype,
    rows: u64,
    cols: u64,
    size_bytes: u64,
    offset: u64,
}

fn read_metadata<'a>(
    cursor: &mut Cursor<'a>,
    bytes: &'a [u8],
    file: &str,
    count: u64,
) -> Result<BTreeMap<&'a str, Value<'a>>, ModelFileError> {
    let mut metadata = BTreeMap::new();
    for index in 0..count {
        let key = read_name(cursor, file, &format!("metadata key {index}"))?;
        let value = read_value(cursor, bytes, file, key)?;
        if metadata.insert(key, value).is_some() {
            let (file, key) = (file.to_owned(), key.to_owned());
            return Err(ModelFileError::DuplicateKey { file, key });
        }
    }
    Ok(metadata)
}

fn read_name<'a>(
    cursor: &mut Cursor<'a>,
    file: &str,
    what: &str,
) -> Result<&'a str, ModelFileError> {
    let name = cursor.string(what)?;
    if name.is_empty() {
        let (file, what) = (file.to_owned(), what.to_owned());
        return Err(ModelFileError::EmptyName { file, what });
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(ModelFileError::Count {
            file: file.to_owned(),
            what: format!("the length of the name of {what}"),
            count: name.len() as u64,
            most: MAX_NAME_BYTES as u64,
        });
    }
    Ok(name)
}

fn alignment(metadata: &BTreeMap<&str, Value<'_>>, file: &str) -> Result<u64, ModelFileError> {
    let key = "general.alignment";
    match metadata.get(key) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&Value::Int(value)) => u64::try_from(value)
            .ok()
            .filter(|a| a.is_power_of_two() && *a <= MAX_ALIGNMENT)
            .ok_or_else(|| ModelFileError::KeyValue {
                file: file.to_owned(),
                key: key.to_owned(),
                problem: format!("{value} is no power of two of at most {MAX_ALIGNMENT}"),
            }),
        Some(other) => Err(ModelFileError::KeyType {
            file: file.to_owned(),
            key: key.to_owned(),
            want: "an integer",
            got: other.kind_name(),
        }),
    }
}

fn read_directory<'a>(
    cursor: &mut Cursor<'a>,
    file: &str,
    count: u64,
) -> Result<Vec<Entry<'a>>, ModelFileError> {
    let mut entries = Vec::new();
    let mut names = HashSet::new();
    for index in 0..count {
        let name = read_name(cursor, file, &format!("tensor {index}"))?;
        let entry = read_entry(cursor, file, name)?;
        if !names.insert(name) {
            let (file, tensor) = (file.to_owned(), name.to_owned());
            return Err(ModelFileError::DuplicateTensor { file, tensor });
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn read_entry<'a>(
    cursor: &mut Cursor<'a>,
    file: &str,
    name: &'a str,
) -> Result<Entry<'a>, ModelFileError> {
    let broken = |problem: String| ModelFileError::TensorRange {
        file: file.to_owned(),
        tensor: name.to_owned(),
        problem,
    };
    let dim_count = cursor.u32(name)?;
    if !(1..=MAX_DIMS).contains(&dim_count) {
        return Err(broken(format!("{dim_count} dimensions; 1 to {MAX_DIMS} are possible")));
    }
    let mut dims = [1u64; MAX_DIMS as usize];
    for dim in dims.iter_mut().take(dim_count as usize) {
        *dim = cursor.u64(name)?;
        if *dim == 0 {
            return Err(broken("a dimension is zero".into()));
        }
    }
    let code = cursor.u32(name)?;
    let dtype = dtype_of_code(code).ok_or_else(|| ModelFileError::TensorType {
        file: file.to_owned(),
        tensor: name.to_owned(),
        found: type_name(code),
    })?;
    let offset = cursor.u64(name)?;
    let (cols, block_len) = (dims[0], dtype.block_len() as u64);
    if cols % block_len != 0 {
        return Err(broken(format!("{cols} columns are no multiple of its blocks of {block_len}")));
    }
    let rows = dims[1].checked_mul(dims[2]).and_then(|n| n.checked_mul(dims[3]));
    let size_bytes = rows
        .and_then(|rows| rows.checked_mul(cols / block_len))
        .and_then(|blocks| blocks.checked_mul(dtype.block_bytes() as u64));
    match (rows, size_bytes) {
        (Some(rows), Some(size_bytes)) => Ok(Entry { name, dtype, rows, cols, size_bytes, offset }),
        _ => Err(broken(format!("dimensions {dims:?} overflow"))),
    }
}

fn place_tensors<'a>(
    entries: Vec<Entry<'a>>,
    file: &str,
    data_start: u64,
    alignment: u64,
    file_bytes: u64,
) -> Result<BTreeMap<&'a str, GgufTensor>, ModelFileError> {
    let mut tensors = BTreeMap::new();
    let mut ranges = Vec::with_capacity(entries.len());
    for entry in entries {
        let broken = |problem: String| ModelFileError::TensorRange {
            file: file.to_owned(),
            tensor: entry.name.to_owned(),
            problem,
        };
        if entry.offset % alignment != 0 {
            return Err(broken(format!("offset {} is not aligned to {alignment}", entry.offset)));
        }
        let start = data_start.checked_add(entry.offset);
        let end = start.and_then(|start| start.checked_add(entry.size_bytes));
        let (Some(start), Some(end)) = (start, end) else {
            return Err(broken("offset and size overflow".into()));
        };
        if end > file_bytes {
            return Err(broken(format!(
                "its bytes {start}..{end} lie outside the file of {file_bytes} bytes"
            )));
        }
        let bytes = start as usize..end as usize;
        ranges.push((bytes.start, bytes.end, entry.name));
        let (dtype, rows, cols) = (entry.dtype, entry.rows, entry.cols);
        tensors.insert(entry.name, GgufTensor { dtype, rows, cols, bytes });
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        if pair[1].0 < pair[0].1 {
            return Err(ModelFileError::TensorRange {
                file: file.to_owned(),
                tensor: pair[1].2.to_owned(),
                problem: format!("its bytes overlap those of {}", pair[0].2),
            });
        }
    }
    Ok(tensors)
}

fn dtype_of_code(code: u32) -> Option<TensorDtype> {
    Some(match code {
        0 => TensorDtype::F32,
        1 => TensorDtype::F16,
        2 => TensorDtype::Q4_0,
        3 => TensorDtype::Q4_1,
        6 => TensorDtype::Q5_0,
        7 => TensorDtype::Q5_1,
        8 => TensorDtype::Q8_0,
        10 => TensorDtype::Q2K,
        11 => TensorDtype::Q3K,
        12 => TensorDtype::Q4K,
        13 => TensorDtype::Q5K,
        14 => TensorDtype::Q6K,
        20 => TensorDtype::Iq4Nl,
        30 => TensorDtype::Bf16,
        _ => return None,
    })
}

/// The name of a `ggml_type` that is not supported.
fn type_name(code: u32) -> String {
    const NAMES: [(u32, &str); 14] = [
        (9, "Q8_1"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (28, "F64"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
    ];
    NAMES
        .iter()
        .find(|(known, _)| *known == code)
        .map_or_else(|| format!("number {code}"), |(_, name)| (*name).to_owned())
}
