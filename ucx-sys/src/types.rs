//! Types and constants, under UCX's own names.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// One byte: the C enum is packed.
pub type ucs_status_t = i8;
/// Null for success, a small negative number for an error, else a request.
pub type ucs_status_ptr_t = *mut c_void;

pub const UCS_OK: ucs_status_t = 0;
pub const UCS_INPROGRESS: ucs_status_t = 1;
pub const UCS_ERR_NO_ELEM: ucs_status_t = -12;
pub const UCS_ERR_BUSY: ucs_status_t = -15;
pub const UCS_ERR_CANCELED: ucs_status_t = -16;
pub const UCS_ERR_CONNECTION_RESET: ucs_status_t = -25;
pub const UCS_ERR_ENDPOINT_TIMEOUT: ucs_status_t = -80;
pub const UCS_ERR_LAST: ucs_status_t = -100;

macro_rules! opaque {
    ($($name:ident, $pointer:ident;)*) => {$(
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _private: [u8; 0],
        }
        pub type $pointer = *mut $name;
    )*};
}

opaque! {
    ucp_config, ucp_config_h;
    ucp_context, ucp_context_h;
    ucp_worker, ucp_worker_h;
    ucp_address, ucp_address_h;
    ucp_ep, ucp_ep_h;
    ucp_mem, ucp_mem_h;
    ucp_rkey, ucp_rkey_h;
    ucp_conn_request, ucp_conn_request_h;
}

pub const UCP_PARAM_FIELD_FEATURES: u64 = 1 << 0;
pub const UCP_PARAM_FIELD_NAME: u64 = 1 << 8;
pub const UCP_FEATURE_RMA: u64 = 1 << 1;
pub const UCP_FEATURE_WAKEUP: u64 = 1 << 4;
pub const UCP_FEATURE_AM: u64 = 1 << 6;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ucp_params_t {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: Option<unsafe extern "C" fn(*mut c_void)>,
    pub request_cleanup: Option<unsafe extern "C" fn(*mut c_void)>,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const c_char,
}

pub const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1 << 0;
pub const UCS_THREAD_MODE_SINGLE: c_uint = 0;
const UCS_CPU_SETSIZE: usize = 1024;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ucp_worker_params_t {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub cpu_mask: [u64; UCS_CPU_SETSIZE / 64],
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: *const c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}

pub type ucp_err_handler_cb_t = unsafe extern "C" fn(*mut c_void, ucp_ep_h, ucs_status_t);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ucp_err_handler_t {
    pub cb: Option<ucp_err_handler_cb_t>,
    pub arg: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ucs_sock_addr_t {
    pub addr: *const libc::sockaddr,
    pub addrlen: libc::socklen_t,
}

pub const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1 << 0;
pub const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
pub const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
pub const UCP_ERR_HANDLING_MODE_PEER: c_uint = 1;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ucp_ep_params_t {
    pub field_mask: u64,
    pub address: *const ucp_address,
    pub err_mode: c_uint,
    pub err_handler: ucp_err_handler_t,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub sockaddr: ucs_sock_addr_t,
    pub conn_request: ucp_conn_request_h,
    pub name: *const c_char,
    pub local_sockaddr: ucs_sock_addr_t,
}

pub const UCP_MEM_MAP_PARAM_FIELD_ADDRESS: u64 = 1 << 0;
pub const UCP_MEM_MAP_PARAM_FIELD_LENGTH: u64 = 1 << 1;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ucp_mem_map_params_t {
    pub field_mask: u64,
    pub address: *mut c_void,
    pub length: usize,
    pub flags: c_uint,
    pub prot: c_uint,
    pub memory_type: c_uint,
}

pub const UCP_AM_HANDLER_PARAM_FIELD_ID: u64 = 1 << 0;
pub const UCP_AM_HANDLER_PARAM_FIELD_CB: u64 = 1 << 2;
pub const UCP_AM_HANDLER_PARAM_FIELD_ARG: u64 = 1 << 3;

pub type ucp_am_recv_callback_t = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ucp_am_handler_param_t {
    pub field_mask: u64,
    pub id: c_uint,
    pub flags: u32,
    pub cb: Option<ucp_am_recv_callback_t>,
    pub arg: *mut c_void,
}

pub const UCP_AM_RECV_ATTR_FLAG_RNDV: u64 = 1 << 17;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ucp_am_recv_param_t {
    pub recv_attr: u64,
    pub reply_ep: ucp_ep_h,
}

pub const UCP_OP_ATTR_FIELD_CALLBACK: u32 = 1 << 1;
pub const UCP_OP_ATTR_FIELD_USER_DATA: u32 = 1 << 2;
pub const UCP_OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
pub const UCP_OP_ATTR_FIELD_MEMH: u32 = 1 << 8;

pub const UCP_AM_SEND_FLAG_EAGER: u32 = 1 << 1;
pub const UCP_AM_SEND_FLAG_RNDV: u32 = 1 << 2;
pub const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1 << 0;

pub type ucp_send_nbx_callback_t = unsafe extern "C" fn(*mut c_void, ucs_status_t, *mut c_void);
pub type ucp_am_recv_data_nbx_callback_t =
    unsafe extern "C" fn(*mut c_void, ucs_status_t, usize, *mut c_void);

#[repr(C)]
#[derive(Clone, Copy)]
pub union ucp_request_cb_t {
    pub send: Option<ucp_send_nbx_callback_t>,
    pub recv_am: Option<ucp_am_recv_data_nbx_callback_t>,
}

impl std::fmt::Debug for ucp_request_cb_t {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ucp_request_cb_t")
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ucp_request_param_t {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub cb: ucp_request_cb_t,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_uint,
    pub recv_info: *mut c_void,
    pub memh: ucp_mem_h,
}

impl std::fmt::Debug for ucp_request_param_t {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ucp_request_param_t")
            .field("op_attr_mask", &self.op_attr_mask)
            .field("flags", &self.flags)
            .finish_non_exhaustive()
    }
}
