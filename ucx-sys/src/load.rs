//! Finds the library and its functions.

use libloading::Library;
use libloading::os::unix;

use crate::{Ucp, Version};

/// The name under which distributions install it.
pub const LIBRARY: &str = "libucp.so.0";

/// Versions older than that lack calls or options that are used here.
const VERSION_MIN: Version = Version { major: 1, minor: 13, release: 0 };

/// Why UCX cannot be used on this machine.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{library} cannot be loaded: {reason}")]
    Missing { library: String, reason: String },
    #[error("the library lacks {0}; it is no UCX of version 1.13 or later")]
    Symbol(String),
    #[error("UCX {found} is too old; {} or later is needed", VERSION_MIN)]
    Old { found: Version },
}

/// Keeps UCX from watching this process's memory: for that it would rewrite the code of `mmap` and
/// its kin while other threads run it, and they can hang or crash. All memory is registered by
/// hand, so nothing needs it. Only the environment can say so, and only before UCX is loaded; it
/// is set before `main`, since afterwards other threads may read it. A value of the user's stays.
extern "C" fn keep_memory_hooks_away() {
    // SAFETY: two strings that end with zero; no other thread runs yet.
    unsafe { libc::setenv(c"UCX_MEM_MMAP_HOOK_MODE".as_ptr(), c"none".as_ptr(), 0) };
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = keep_memory_hooks_away;

/// Signals whose handlers UCX replaces when it is loaded.
const SIGNALS: [libc::c_int; 4] = [libc::SIGILL, libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE];

impl Ucp {
    /// Loads UCX: from `path`, or where the system has it. It stays loaded to the end of the
    /// process.
    ///
    /// # Errors
    /// Where it is not there, or is another.
    pub fn load(path: Option<&str>) -> Result<&'static Self, LoadError> {
        load(path.unwrap_or(LIBRARY))
    }
}

pub(crate) fn load(name: &str) -> Result<&'static Ucp, LoadError> {
    let missing = |error: libloading::Error| LoadError::Missing {
        library: name.to_owned(),
        reason: error.to_string(),
    };
    let kept = Handlers::save();
    // SAFETY: UCX's constructors read the environment and set signal handlers, which are put back.
    // The library is the system's or one that the operator has named.
    let library = unsafe { unix::Library::open(Some(name), libc::RTLD_NOW | libc::RTLD_LOCAL) }
        .map_err(missing);
    kept.restore();
    // Its threads and exit handlers outlive any use: it is never unloaded.
    let library: &'static Library = Box::leak(Box::new(library?.into()));
    // SAFETY: a library under the name of libucp that has all its functions, never unloaded.
    let ucp = unsafe { Ucp::bind(library) }?;
    let found = ucp.version();
    if found < VERSION_MIN {
        return Err(LoadError::Old { found });
    }
    Ok(Box::leak(Box::new(ucp)))
}

/// # Safety
/// `T` is the function's type in the library.
pub(crate) unsafe fn symbol<'a, T>(
    library: &'a Library,
    name: &str,
) -> Result<libloading::Symbol<'a, T>, LoadError> {
    // SAFETY: the caller knows the type.
    unsafe { library.get(name.as_bytes()) }.map_err(|_| LoadError::Symbol(name.to_owned()))
}

/// Signal handlers of this process: a crash of Baton's shall read as one, not as UCX's.
struct Handlers([libc::sigaction; SIGNALS.len()]);

impl Handlers {
    fn save() -> Self {
        Self(SIGNALS.map(|signal| {
            // SAFETY: all zero is a valid sigaction; the call only writes to it.
            unsafe {
                let mut action = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &mut action);
                action
            }
        }))
    }

    fn restore(self) {
        for (signal, action) in SIGNALS.into_iter().zip(&self.0) {
            // SAFETY: the handler was installed before.
            unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
        }
    }
}
