//! A context with its settings.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use baton_ucx_sys as sys;
use sys::Ucp;

use super::{UcpError, check};

/// Settings that the version does not know are left out.
pub(super) fn new_context(
    ucp: &'static Ucp,
    settings: &[(&str, String)],
) -> Result<sys::ucp_context_h, UcpError> {
    let mut config = null_mut();
    // SAFETY: reads the environment; UCX allocates the configuration.
    let status = unsafe { (ucp.ucp_config_read)(null(), null(), &mut config) };
    check(ucp, "ucp_config_read", status)?;
    let applied = settings.iter().try_for_each(|(name, value)| {
        let wrong = |_| UcpError { call: "ucp_config_modify", reason: format!("{name}={value:?}") };
        let c_name = CString::new(*name).map_err(wrong)?;
        let c_value = CString::new(value.as_str()).map_err(wrong)?;
        // SAFETY: the configuration is alive; both strings end with a zero byte.
        match unsafe { (ucp.ucp_config_modify)(config, c_name.as_ptr(), c_value.as_ptr()) } {
            sys::UCS_OK | sys::UCS_ERR_NO_ELEM => Ok(()),
            status => Err(UcpError {
                call: "ucp_config_modify",
                reason: format!("{name}={value:?}: {}", ucp.status_text(status)),
            }),
        }
    });
    let mut context = null_mut();
    let made = applied.and_then(|()| {
        // SAFETY: all zero is a valid value of these parameters; the mask says which count.
        let mut params: sys::ucp_params_t = unsafe { MaybeUninit::zeroed().assume_init() };
        params.field_mask = sys::UCP_PARAM_FIELD_FEATURES;
        params.features = sys::UCP_FEATURE_AM | sys::UCP_FEATURE_RMA | sys::UCP_FEATURE_WAKEUP;
        // SAFETY: the configuration is alive and UCX copies it.
        let status = unsafe {
            (ucp.ucp_init_version)(sys::API_MAJOR, sys::API_MINOR, &params, config, &mut context)
        };
        check(ucp, "ucp_init_version", status)
    });
    // SAFETY: as it was read.
    unsafe { (ucp.ucp_config_release)(config) };
    made.map(|()| context)
}
