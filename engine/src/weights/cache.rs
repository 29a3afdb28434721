//! Weights from the packed file, which is written if there is none.
//!
//! Whatever is wrong with files and folders, the weights come: packed in memory at last. What was
//! wrong is told to the observer.

mod file;
mod places;
mod temporary;

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;

use baton_model_files::ModelFile;

use super::matrix::Bytes;
use super::{PackedMatrix, Weights};
use crate::cpu::CpuError;
use crate::load::{LoadEvent, LoadObserver, LoadProgress, LoadStage, WeightsCache, WeightsMemory};
use crate::memory::{Buffer, FileMap, has_huge_pages};
use crate::packed_file::PackedPlan;
use file::Found;

/// Files below it are never copied: caches and TLBs hold most of them whatever their pages.
const COPIED_FROM_BYTES: usize = 16 << 20;

/// What loads weights.
#[derive(Clone, Copy)]
pub(crate) struct Loader<'a> {
    pub(crate) model: &'a ModelFile,
    pub(crate) threads: usize,
    pub(crate) memory: WeightsMemory,
    pub(crate) observer: &'a dyn LoadObserver,
}

impl Loader<'_> {
    /// # Errors
    /// When there is no memory, or the model's files were changed meanwhile: part of the weights
    /// would be of one model, part of another, under a fingerprint of either.
    pub(crate) fn load(&self, cache: &WeightsCache) -> Result<Weights, CpuError> {
        let weights = self.find_or_pack(cache)?;
        self.hash();
        if self.model.is_unchanged() { Ok(weights) } else { Err(CpuError::ModelChanged) }
    }

    fn find_or_pack(&self, cache: &WeightsCache) -> Result<Weights, CpuError> {
        let plan = PackedPlan::of(self.model);
        let places = places::of(cache, self.model);
        for path in &places {
            if let Some(map) = self.open(path, &plan) {
                return Ok(self.mapped(path, map, &plan, true));
            }
        }
        for path in &places {
            match self.write(path, &plan) {
                Ok((map, was_there)) => return Ok(self.mapped(path, map, &plan, was_there)),
                Err(error) => self.not_written(path, &error),
            }
        }
        if !places.is_empty() {
            self.observer.event(&LoadEvent::InMemory);
        }
        self.pack(&plan)
    }

    fn open(&self, path: &Path, plan: &PackedPlan) -> Option<FileMap> {
        match self.find(path, plan) {
            Ok(Found::Nothing) => None,
            Ok(Found::Fits { map, is_stamped }) => {
                // Without a stamp every start reads the whole model: worth a copy.
                if !is_stamped && let Err(error) = self.write_stamp(path, &map, plan) {
                    self.not_written(path, &error);
                }
                Some(map)
            }
            Err(error) => {
                let reason = error.to_string();
                self.observer.event(&LoadEvent::Refused { path: path.to_owned(), reason });
                None
            }
        }
    }

    fn not_written(&self, path: &Path, error: &io::Error) {
        let (path, reason) = (path.to_owned(), error.to_string());
        self.observer.event(&LoadEvent::NotWritten { path, reason });
    }

    fn mapped(&self, path: &Path, map: FileMap, plan: &PackedPlan, was_there: bool) -> Weights {
        let bytes = map.len() as u64;
        self.observer.event(&LoadEvent::Mapped { path: path.to_owned(), bytes, was_there });
        match self.copy(path, &map) {
            Some(copy) => self.within(Bytes::Owned(copy), plan),
            None => self.within(Bytes::Mapped(map), plan),
        }
    }

    /// A copy in huge pages, if the file's are small.
    fn copy(&self, path: &Path, map: &FileMap) -> Option<Buffer<u8>> {
        if self.memory == WeightsMemory::Shared || map.len() < COPIED_FROM_BYTES {
            return None;
        }
        map.populate();
        let huge_bytes = map.huge_bytes();
        if huge_bytes >= map.len() / 8 * 7 || !has_huge_pages() {
            return None;
        }
        // Without the memory for it, the file does.
        let mut copy = Buffer::zeroed(map.len()).ok()?;
        let part_bytes = map.len().div_ceil(self.threads);
        std::thread::scope(|scope| {
            for (to, from) in copy.chunks_mut(part_bytes).zip(map.chunks(part_bytes)) {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
        let (path, huge_bytes) = (path.to_owned(), huge_bytes as u64);
        self.observer.event(&LoadEvent::Copied { path, huge_bytes });
        Some(copy)
    }

    /// Packs into this process's own memory, laid out as a file would be: in one piece, so that
    /// huge pages hold many small matrices.
    fn pack(&self, plan: &PackedPlan) -> Result<Weights, CpuError> {
        let size = plan.file_bytes();
        let what = format!("{} MiB of weights", size >> 20);
        let mut bytes = Buffer::zeroed(size).map_err(CpuError::no_memory(what))?;
        let mut places = plan.matrices();
        let Ok(_) = Weights::load(self.model, &mut |recipe| {
            let (shape, start) = places.next().expect("the plan lists every matrix");
            let end = start + shape.bytes();
            recipe.pack(&mut bytes[start..end], self.threads);
            self.progress(LoadStage::Packing, end, plan);
            Ok::<_, Infallible>(PackedMatrix::absent(shape))
        });
        Ok(self.within(Bytes::Owned(bytes), plan))
    }

    /// The matrices that lie in `bytes` as `plan` says.
    fn within(&self, bytes: Bytes, plan: &PackedPlan) -> Weights {
        let bytes = Arc::new(bytes);
        let mut places = plan.matrices();
        let Ok(weights) = Weights::load(self.model, &mut |recipe| {
            let (shape, start) = places.next().expect("the plan lists every matrix");
            assert_eq!(shape, recipe.shape(), "the plan was made from this model");
            Ok::<_, Infallible>(PackedMatrix::within(Arc::clone(&bytes), start, shape))
        });
        weights
    }

    fn progress(&self, stage: LoadStage, done_bytes: usize, plan: &PackedPlan) {
        let (done_bytes, total_bytes) = (done_bytes as u64, plan.file_bytes() as u64);
        self.observer.progress(LoadProgress { stage, done_bytes, total_bytes });
    }
}
