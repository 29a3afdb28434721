//! The safetensors files of a folder. Format and its checks: the `safetensors` crate.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use baton_types::ModelSpec;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::json::read_json;
use super::names::source;
use crate::ModelFileError;
use crate::map::FileBytes;
use crate::model_file::Placed;
use crate::roles::{Source, all_roles, role_shape};
use crate::tensor::{RowOrder, TensorDtype, TensorRole};

const INDEX_FILE: &str = "model.safetensors.index.json";
const SINGLE_FILE: &str = "model.safetensors";
const MAX_SHARDS: usize = 1024;

/// A tensor as a shard declares it.
pub(super) struct Found {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

#[derive(Deserialize)]
struct Index {
    /// Tensor name to file name.
    weight_map: HashMap<String, String>,
}

/// Maps all shards and lists their tensors.
///
/// # Errors
/// When a shard is missing, damaged, or declares a tensor that another one has.
pub(super) fn open(
    folder: &Path,
) -> Result<(Vec<FileBytes>, HashMap<String, Found>), ModelFileError> {
    let mut files = Vec::new();
    let mut found = HashMap::new();
    for path in shard_paths(folder)? {
        let file = path.display().to_string();
        let broken = |problem: String| ModelFileError::Safetensors { file: file.clone(), problem };
        let bytes = FileBytes::map(&path)?;
        let slice = bytes.as_slice();
        let parsed = SafeTensors::deserialize(slice).map_err(|e| {
            broken(format!("not a readable safetensors file ({e}); download it again"))
        })?;
        for (name, view) in parsed.iter() {
            // The crate's view is a part of `slice`: its place is what stays.
            let start = view.data().as_ptr() as usize - slice.as_ptr() as usize;
            let entry = Found {
                file: files.len(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: start..start + view.data().len(),
            };
            if found.insert(name.to_owned(), entry).is_some() {
                return Err(ModelFileError::DuplicateTensor { file, tensor: name.to_owned() });
            }
        }
        drop(parsed);
        files.push(bytes);
    }
    Ok((files, found))
}

/// Finds every tensor that `spec` calls for.
///
/// # Errors
/// For tensors that are missing, misshapen, unknown or of an unsupported type.
pub(super) fn find_tensors(
    folder: &Path,
    found: &HashMap<String, Found>,
    spec: &ModelSpec,
) -> Result<HashMap<TensorRole, Placed>, ModelFileError> {
    let file = || folder.display().to_string();
    let mut placed = HashMap::new();
    let mut known = HashSet::new();
    for role in all_roles(spec) {
        let source = source(role, spec);
        let Some(entry) = found.get(&source.tensor) else {
            let tensor = source.tensor;
            return Err(ModelFileError::MissingTensor { file: file(), tensor });
        };
        placed.insert(role, place(folder, &source, entry, role_shape(role, spec))?);
        known.insert(source.tensor);
    }
    for name in found.keys() {
        // Old checkpoints keep the rotation's frequencies; a tied one may repeat the embedding.
        let harmless = name.ends_with(".rotary_emb.inv_freq")
            || (spec.tied_embeddings && name == "lm_head.weight");
        if !known.contains(name) && !harmless {
            return Err(ModelFileError::UnknownTensor { file: file(), tensor: name.clone() });
        }
    }
    Ok(placed)
}

fn place(
    folder: &Path,
    source: &Source,
    entry: &Found,
    (rows, cols): (usize, usize),
) -> Result<Placed, ModelFileError> {
    let file = || folder.display().to_string();
    let dtype = match entry.dtype {
        Dtype::F32 => TensorDtype::F32,
        Dtype::F16 => TensorDtype::F16,
        Dtype::BF16 => TensorDtype::Bf16,
        other => {
            return Err(ModelFileError::TensorType {
                file: file(),
                tensor: source.tensor.clone(),
                found: format!("{other:?}"),
            });
        }
    };
    let stored = source.stored_rows;
    let want = if stored == 1 { vec![cols] } else { vec![stored, cols] };
    let fits = entry.shape == want || (stored == 1 && entry.shape == [1, cols]);
    if !fits || entry.bytes.len() != stored * dtype.row_bytes(cols) {
        return Err(ModelFileError::TensorShape {
            file: file(),
            tensor: source.tensor.clone(),
            want: want.iter().map(|n| *n as u64).collect(),
            got: entry.shape.iter().map(|n| *n as u64).collect(),
        });
    }
    let bytes = source.bytes(entry.bytes.start, dtype, (rows, cols));
    Ok(Placed { file: entry.file, dtype, rows, cols, row_order: RowOrder::Plain, bytes })
}

fn shard_paths(folder: &Path) -> Result<Vec<PathBuf>, ModelFileError> {
    let Some(index) = read_json::<Index>(folder, INDEX_FILE)? else {
        return Ok(vec![folder.join(SINGLE_FILE)]);
    };
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    let file = folder.join(INDEX_FILE).display().to_string();
    if names.is_empty() || names.len() > MAX_SHARDS {
        let (what, count) = ("the number of shards".to_owned(), names.len() as u64);
        return Err(ModelFileError::Count { file, what, count, most: MAX_SHARDS as u64 });
    }
    for name in &names {
        // A name with a folder in it could leave the model's own.
        let mut parts = Path::new(name.as_str()).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            let problem = format!("{name:?} is not the name of a file in this folder");
            return Err(ModelFileError::KeyValue { file, key: "weight_map".into(), problem });
        }
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}
