//! The file that becomes a packed file: locked while it is filled, renamed when it is whole.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Between two looks at a file that another process fills.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// After so long without a byte more, who fills it is taken for stuck.
const STUCK_AFTER: Duration = Duration::from_secs(120);

/// `NAME.tmp` beside `NAME`: at most one for each packed file. The lock makes others that start at
/// the same time wait for the result. It ends with its process, so that the next one takes an
/// abandoned file over.
pub(super) struct Temporary {
    file: File,
    path: PathBuf,
    is_placed: bool,
}

impl Temporary {
    /// Creates the file for `target` and locks it, after whoever has it: `on_wait` hears of that.
    ///
    /// # Errors
    /// The system's; `TimedOut` when another one has it and does not get on.
    pub(super) fn lock(target: &Path, mut on_wait: impl FnMut()) -> io::Result<Self> {
        let mut name = OsString::from(target);
        name.push(".tmp");
        let path = PathBuf::from(name);
        let (mut seen_bytes, mut seen_at) = (0, Instant::now());
        loop {
            let file = open(&path)?;
            match file.try_lock() {
                // Who had it may have renamed or removed it: then this is no longer its name.
                Ok(()) if is_at(&file, &path)? => {
                    file.set_len(0)?;
                    return Ok(Self { file, path, is_placed: false });
                }
                Ok(()) => {}
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) => {
                    let bytes = file.metadata()?.len();
                    if bytes != seen_bytes {
                        (seen_bytes, seen_at) = (bytes, Instant::now());
                    }
                    if seen_at.elapsed() > STUCK_AFTER {
                        let problem = "another process holds it and does not get on";
                        return Err(io::Error::new(ErrorKind::TimedOut, problem));
                    }
                    on_wait();
                    std::thread::sleep(LOOK_EVERY);
                }
            }
        }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Gives it `target`'s name, once it is safe on the disk. Nobody may write to it from then on,
    /// and its owner alone may read it unless `is_public`.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn place(&mut self, target: &Path, is_public: bool) -> io::Result<()> {
        let mode = if is_public { 0o444 } else { 0o400 };
        self.file.sync_all()?;
        fs::rename(&self.path, target)?;
        self.is_placed = true;
        // Not before: those who wait for it open it for writing too, until it has its new name.
        self.file.set_permissions(Permissions::from_mode(mode))?;
        let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_placed {
            // Where it cannot be removed, the next one takes it over.
            let _left = fs::remove_file(&self.path);
        }
    }
}

/// A plain file of ours with this one name: what is written must not land elsewhere.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path).map_err(|error| {
        io::Error::new(error.kind(), format!("{} cannot be opened: {error}", path.display()))
    })?;
    let found = file.metadata()?;
    // Once it is renamed or removed it has no name, and `lock` looks again.
    let is_ours = found.is_file() && found.nlink() <= 1 && found.uid() == own_user();
    if !is_ours {
        let problem = format!("{} is another user's, or no plain file", path.display());
        return Err(io::Error::new(ErrorKind::PermissionDenied, problem));
    }
    Ok(file)
}

/// Whether `path` names `file`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (own.dev(), own.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// The user whose rights this process has.
pub(super) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}
