//! One packed file: found and checked, or written.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use baton_model_files::{ContentHash, ModelFile};

use super::Loader;
use super::temporary::{Temporary, own_user};
use crate::load::{LoadProgress, LoadStage};
use crate::memory::{Buffer, FileMap};
use crate::packed_file::{PackedFileError, PackedHead, PackedPlan, PackedWriter};
use crate::weights::{PackedMatrix, Weights};

/// What lies at a place.
pub(super) enum Found {
    Nothing,
    /// The model's packed weights, whole. `is_stamped`: the next start knows so without reading
    /// the model.
    Fits {
        map: FileMap,
        is_stamped: bool,
    },
}

/// Why what lies there is not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error(transparent)]
    Content(#[from] PackedFileError),
    #[error("it is no plain file")]
    Kind,
    #[error("user {0} owns it, who is neither this process's, nor the model's, nor root")]
    Owner(u32),
    #[error("others than its owner may write to it (mode {0:o})")]
    Mode(u32),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Loader<'_> {
    /// Looks at every byte, so that what is taken is whole.
    pub(super) fn find(&self, path: &Path, plan: &PackedPlan) -> Result<Found, OpenError> {
        // Of what is no plain file, not even the opening may wait.
        let file = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
            Ok(file) => file,
            Err(error) if is_absent(&error) => return Ok(Found::Nothing),
            Err(error) => return Err(error.into()),
        };
        check_rights(&file, self.model)?;
        let map = FileMap::new(&file)?;
        let head = PackedHead::read(&map, plan)?;
        let stamp = self.model.stamp();
        let is_stamped = stamp.is_some() && head.stamp == stamp;
        if is_stamped {
            self.model.trust_content(head.content);
        } else if self.hash() != head.content {
            return Err(PackedFileError::OtherModel.into());
        }
        head.check_data(&map, plan, self.threads, &mut |done| {
            self.progress(LoadStage::Checking, done as usize, plan);
        })?;
        Ok(Found::Fits { map, is_stamped })
    }

    /// Packs into a new file, unless another process does: then waits for it and takes its. The
    /// flag says which.
    ///
    /// # Errors
    /// The system's, such as that there is no room.
    pub(super) fn write(&self, path: &Path, plan: &PackedPlan) -> io::Result<(FileMap, bool)> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            // Caches are their users' own.
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let mut target = Temporary::lock(path, || self.progress(LoadStage::Waiting, 0, plan))?;
        // The one that was waited for has made it, or it has come since the last look.
        if let Ok(Found::Fits { map, .. }) = self.find(path, plan) {
            return Ok((map, true));
        }
        let mut writer = PackedWriter::new(target.file(), plan);
        let largest = plan.matrices().map(|(matrix, _)| matrix.bytes()).max();
        let mut bytes = Buffer::zeroed(largest.unwrap_or(0))?;
        let mut done = 0;
        Weights::load(self.model, &mut |recipe| {
            let bytes = &mut bytes[..recipe.shape().bytes()];
            bytes.fill(0);
            recipe.pack(bytes, self.threads);
            writer.add(bytes)?;
            done += bytes.len();
            self.progress(LoadStage::Packing, done, plan);
            Ok::<_, io::Error>(PackedMatrix::absent(recipe.shape()))
        })?;
        let content = self.hash();
        if !self.model.is_unchanged() {
            return Err(io::Error::other("the model was changed while it was read"));
        }
        writer.finish(content, self.model.stamp())?;
        let map = FileMap::new(target.file())?;
        target.place(path, self.model.is_public())?;
        Ok((map, false))
    }

    /// Replaces a file that fits by a copy with the stamp that the model's files have now.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn write_stamp(
        &self,
        path: &Path,
        map: &FileMap,
        plan: &PackedPlan,
    ) -> io::Result<()> {
        let Some(stamp) = self.model.stamp() else { return Ok(()) };
        let mut target = Temporary::lock(path, || self.progress(LoadStage::Waiting, 0, plan))?;
        if let Ok(Found::Fits { is_stamped: true, .. }) = self.find(path, plan) {
            return Ok(());
        }
        let mut writer = PackedWriter::new(target.file(), plan);
        for (matrix, start) in plan.matrices() {
            writer.add(&map[start..start + matrix.bytes()])?;
        }
        writer.finish(self.model.content(), Some(stamp))?;
        target.place(path, self.model.is_public())
    }

    pub(super) fn hash(&self) -> ContentHash {
        let total_bytes = self.model.file_bytes();
        self.model.content_with(&mut |done_bytes| {
            let stage = LoadStage::Hashing;
            self.observer.progress(LoadProgress { stage, done_bytes, total_bytes });
        })
    }
}

/// Whether there is no such file, and perhaps no such folder.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Who may write to a mapped file can change answers and end the process that maps it.
fn check_rights(file: &File, model: &ModelFile) -> Result<(), OpenError> {
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(OpenError::Kind);
    }
    let owner = found.uid();
    if owner != 0 && owner != own_user() && !model.is_owned_by(owner) {
        return Err(OpenError::Owner(owner));
    }
    match found.mode() & 0o7777 {
        mode if mode & 0o022 != 0 => Err(OpenError::Mode(mode)),
        _ => Ok(()),
    }
}
