//! Puts and gets: what needs nothing of the peer's program but the key to its memory.

use baton_ucx_sys as sys;
use bytes::Bytes;

use super::callbacks::{Keep, on_sent};
use super::{EndpointId, OpId, RegionId, UcpError, Worker, check, closed};

impl Worker {
    /// Takes the key to the peer's memory, for [`put`](Self::put).
    pub(in super::super) fn unlock(
        &mut self,
        endpoint: EndpointId,
        rkey: &[u8],
    ) -> Result<(), UcpError> {
        let ucp = self.ucp;
        let Some(endpoint) = self.endpoints.get_mut(&endpoint) else { return Err(closed()) };
        // SAFETY: the endpoint is alive; UCX checks what it reads of the key.
        let status = unsafe {
            (ucp.ucp_ep_rkey_unpack)(endpoint.ep, rkey.as_ptr().cast(), &mut endpoint.rkey)
        };
        check(ucp, "ucp_ep_rkey_unpack", status)
    }

    /// Writes `bytes` to `remote`, an address in the memory of the unlocked key.
    pub(in super::super) fn put(
        &mut self,
        endpoint: EndpointId,
        bytes: Bytes,
        remote: u64,
    ) -> Result<OpId, UcpError> {
        let Some(to) = self.endpoints.get(&endpoint) else { return Err(closed()) };
        let (ucp, ep, rkey, at, len) = (self.ucp, to.ep, to.rkey, bytes.as_ptr(), bytes.len());
        if rkey.is_null() {
            return Err(UcpError { call: "ucp_put_nbx", reason: "no key".into() });
        }
        let memh = self.memh_of(at, len);
        self.start(
            Some(endpoint),
            Keep::Bytes([bytes, Bytes::new()]),
            Some(on_sent),
            |mut param| {
                if let Some(memh) = memh {
                    param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
                    param.memh = memh;
                }
                // SAFETY: endpoint and key are alive; the bytes are kept until the callback.
                unsafe { (ucp.ucp_put_nbx)(ep, at.cast(), len, remote, rkey, &param) }
            },
        )
    }

    /// Reads `len` bytes from `remote`, an address in the memory of the unlocked key, into a
    /// region, at `offset`.
    ///
    /// # Panics
    /// Where they do not fit.
    pub(in super::super) fn get(
        &mut self,
        endpoint: EndpointId,
        remote: u64,
        len: usize,
        region: RegionId,
        offset: usize,
    ) -> Result<OpId, UcpError> {
        let Some(from) = self.endpoints.get(&endpoint) else { return Err(closed()) };
        let (ucp, ep, rkey) = (self.ucp, from.ep, from.rkey);
        if rkey.is_null() {
            return Err(UcpError { call: "ucp_get_nbx", reason: "no key".into() });
        }
        let to = &self.regions[&region];
        assert!(offset + len <= to.mapping.len(), "a message outgrows its region");
        let (mapping, memh) = (to.mapping.clone(), to.memh);
        // SAFETY: inside the mapping, as was just checked.
        let at = unsafe { mapping.address().as_ptr().add(offset) };
        self.start(Some(endpoint), Keep::Mapping(mapping), Some(on_sent), |mut param| {
            param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
            param.memh = memh;
            // SAFETY: endpoint and key are alive; the memory is kept until the callback.
            unsafe { (ucp.ucp_get_nbx)(ep, at.cast(), len, remote, rkey, &param) }
        })
    }

    /// Done when everything that was put before has arrived.
    pub(in super::super) fn flush(&mut self, endpoint: EndpointId) -> Result<OpId, UcpError> {
        let Some(to) = self.endpoints.get(&endpoint) else { return Err(closed()) };
        let (ucp, ep) = (self.ucp, to.ep);
        // SAFETY: the endpoint is alive.
        self.start(Some(endpoint), Keep::Nothing, Some(on_sent), |param| unsafe {
            (ucp.ucp_ep_flush_nbx)(ep, &param)
        })
    }
}
