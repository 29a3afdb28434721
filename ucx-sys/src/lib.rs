//! Declarations of the part of UCX's UCP API that Baton uses, written by hand and loaded from
//! `libucp.so.0` at run time: nothing of UCX is needed to build, and a machine without it starts
//! all the same.
//!
//! Layouts and values are those of API 1.13 (Debian's libucx), which later versions of 1.x read
//! unchanged; what each call does stands in UCX's own `ucp.h`. Statuses are plain `i8`, never a
//! Rust enum: a newer library may return values that are not known here.

#![allow(non_camel_case_types)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

mod load;
mod types;

pub use load::{LIBRARY, LoadError};
pub use types::*;

/// The API version that the declarations follow; `ucp_init_version` checks it.
pub const API_MAJOR: c_uint = 1;
/// See [`API_MAJOR`].
pub const API_MINOR: c_uint = 13;

macro_rules! functions {
    ($($name:ident: fn($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// UCP's functions, by their C names.
        #[derive(Clone, Copy)]
        pub struct Ucp {
            $(pub $name: unsafe extern "C" fn($($arg: $ty),*) $(-> $ret)?,)*
        }

        impl Ucp {
            /// Finds every function in a loaded library.
            ///
            /// # Safety
            /// The library is UCX's libucp, and is never unloaded.
            unsafe fn bind(library: &libloading::Library) -> Result<Self, LoadError> {
                Ok(Self {
                    // SAFETY: the signatures are ucp.h's; the caller vouches for the library.
                    $($name: *unsafe { load::symbol(library, stringify!($name))? },)*
                })
            }
        }
    };
}

functions! {
    ucp_get_version: fn(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint);
    ucp_config_read: fn(
        env_prefix: *const c_char,
        filename: *const c_char,
        config: *mut *mut ucp_config,
    ) -> ucs_status_t;
    ucp_config_modify: fn(
        config: *mut ucp_config,
        name: *const c_char,
        value: *const c_char,
    ) -> ucs_status_t;
    ucp_config_release: fn(config: *mut ucp_config);
    ucp_init_version: fn(
        major: c_uint,
        minor: c_uint,
        params: *const ucp_params_t,
        config: *const ucp_config,
        context: *mut ucp_context_h,
    ) -> ucs_status_t;
    ucp_cleanup: fn(context: ucp_context_h);
    ucp_worker_create: fn(
        context: ucp_context_h,
        params: *const ucp_worker_params_t,
        worker: *mut ucp_worker_h,
    ) -> ucs_status_t;
    ucp_worker_destroy: fn(worker: ucp_worker_h);
    ucp_worker_get_address: fn(
        worker: ucp_worker_h,
        address: *mut *mut ucp_address,
        length: *mut usize,
    ) -> ucs_status_t;
    ucp_worker_release_address: fn(worker: ucp_worker_h, address: *mut ucp_address);
    ucp_worker_get_efd: fn(worker: ucp_worker_h, fd: *mut c_int) -> ucs_status_t;
    ucp_worker_arm: fn(worker: ucp_worker_h) -> ucs_status_t;
    ucp_worker_progress: fn(worker: ucp_worker_h) -> c_uint;
    ucp_worker_set_am_recv_handler: fn(
        worker: ucp_worker_h,
        param: *const ucp_am_handler_param_t,
    ) -> ucs_status_t;
    ucp_ep_create: fn(
        worker: ucp_worker_h,
        params: *const ucp_ep_params_t,
        ep: *mut ucp_ep_h,
    ) -> ucs_status_t;
    ucp_ep_close_nbx: fn(ep: ucp_ep_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_ep_flush_nbx: fn(ep: ucp_ep_h, param: *const ucp_request_param_t) -> ucs_status_ptr_t;
    ucp_mem_map: fn(
        context: ucp_context_h,
        params: *const ucp_mem_map_params_t,
        memh: *mut ucp_mem_h,
    ) -> ucs_status_t;
    ucp_mem_unmap: fn(context: ucp_context_h, memh: ucp_mem_h) -> ucs_status_t;
    ucp_rkey_pack: fn(
        context: ucp_context_h,
        memh: ucp_mem_h,
        buffer: *mut *mut c_void,
        size: *mut usize,
    ) -> ucs_status_t;
    ucp_rkey_buffer_release: fn(buffer: *mut c_void);
    ucp_ep_rkey_unpack: fn(
        ep: ucp_ep_h,
        buffer: *const c_void,
        rkey: *mut ucp_rkey_h,
    ) -> ucs_status_t;
    ucp_rkey_destroy: fn(rkey: ucp_rkey_h);
    ucp_put_nbx: fn(
        ep: ucp_ep_h,
        buffer: *const c_void,
        count: usize,
        remote: u64,
        rkey: ucp_rkey_h,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t;
    ucp_get_nbx: fn(
        ep: ucp_ep_h,
        buffer: *mut c_void,
        count: usize,
        remote: u64,
        rkey: ucp_rkey_h,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t;
    ucp_am_send_nbx: fn(
        ep: ucp_ep_h,
        id: c_uint,
        header: *const c_void,
        header_length: usize,
        buffer: *const c_void,
        count: usize,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t;
    ucp_am_recv_data_nbx: fn(
        worker: ucp_worker_h,
        data: *mut c_void,
        buffer: *mut c_void,
        count: usize,
        param: *const ucp_request_param_t,
    ) -> ucs_status_ptr_t;
    ucp_am_data_release: fn(worker: ucp_worker_h, data: *mut c_void);
    ucp_request_free: fn(request: *mut c_void);
    ucs_status_string: fn(status: ucs_status_t) -> *const c_char;
}

impl std::fmt::Debug for Ucp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ucp({})", self.version())
    }
}

/// The library's own version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub release: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

impl Ucp {
    pub fn version(&self) -> Version {
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: three places to write to.
        unsafe { (self.ucp_get_version)(&mut major, &mut minor, &mut release) };
        Version { major, minor, release }
    }

    /// UCX's words for a status.
    pub fn status_text(&self, status: ucs_status_t) -> String {
        // SAFETY: the answer is a string that lives as long as the library.
        let text = unsafe { (self.ucs_status_string)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: as above; it ends with a zero byte.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// Whether a call answered with a request that runs on.
pub fn is_request(answer: ucs_status_ptr_t) -> bool {
    !answer.is_null() && !is_error(answer)
}

/// Whether a call answered with an error.
pub fn is_error(answer: ucs_status_ptr_t) -> bool {
    (UCS_ERR_LAST as isize..0).contains(&(answer as isize))
}

/// The status in an answer that is no request.
pub fn status_of(answer: ucs_status_ptr_t) -> ucs_status_t {
    answer as isize as ucs_status_t
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_a_status_or_a_request() {
        let answer = |value: isize| value as ucs_status_ptr_t;
        assert!(!is_request(answer(0)) && !is_error(answer(0)));
        assert!(is_error(answer(-3)) && !is_request(answer(-3)));
        assert_eq!(status_of(answer(-25)), UCS_ERR_CONNECTION_RESET);
        assert!(is_request(answer(0x7f00_0000_1000)) && !is_error(answer(0x7f00_0000_1000)));
    }

    /// The sizes that a C compiler gives on a 64-bit machine.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn layouts_are_those_of_the_header() {
        assert_eq!(size_of::<ucp_params_t>(), 80);
        assert_eq!(size_of::<ucp_worker_params_t>(), 200);
        assert_eq!(size_of::<ucp_ep_params_t>(), 104);
        assert_eq!(size_of::<ucp_mem_map_params_t>(), 40);
        assert_eq!(size_of::<ucp_am_handler_param_t>(), 32);
        assert_eq!(size_of::<ucp_am_recv_param_t>(), 16);
        assert_eq!(size_of::<ucp_request_param_t>(), 72);
    }

    #[test]
    fn memory_hooks_are_off_before_main() {
        assert!(std::env::var("UCX_MEM_MMAP_HOOK_MODE").is_ok());
    }

    #[test]
    fn a_library_that_is_missing_or_another_is_named() {
        let missing = load::load("libbaton-has-no-such.so.0").unwrap_err().to_string();
        assert!(missing.contains("libbaton-has-no-such.so.0"), "{missing}");
        let other = load::load("libc.so.6").unwrap_err().to_string();
        assert!(other.contains("ucp_get_version"), "{other}");
    }
}
