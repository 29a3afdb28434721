//! A safe face for the few calls of UCX that the transport makes. A [`Worker`] lives on one thread
//! and owns everything that was made with it; what UCX calls back becomes an [`Event`].
//!
//! One of the two modules here with `unsafe`.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;
use std::time::Instant;

use baton_ucx_sys as sys;
use bytes::Bytes;
use sys::{Ucp, ucs_status_t};

use crate::memory::Mapping;

mod callbacks;
mod context;
mod one_sided;

use callbacks::{
    Called, EndpointContext, Keep, Listener, Op, Pinned, on_error, on_message, on_received, on_sent,
};
use context::new_context;

/// UCX said no.
#[derive(Clone, Debug, Default, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {reason}")]
pub(super) struct UcpError {
    pub call: &'static str,
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct EndpointId(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct OpId(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct RegionId(u64);

/// What UCX has called back about.
#[derive(Debug)]
pub(super) enum Event {
    /// The operation is over and its buffer free.
    Done { op: OpId, result: Result<(), String> },
    /// The endpoint's peer has gone.
    PeerLost { endpoint: EndpointId, reason: String },
    /// An active message; `payload` came along, or waits to be fetched.
    Message { id: u32, header: Vec<u8>, payload: Payload },
}

#[derive(Debug)]
pub(super) enum Payload {
    Here(Bytes),
    /// Fetch it with [`Worker::receive`]; else give it to [`Worker::refuse`].
    Waits(Waiting),
}

/// A payload at the peer.
#[derive(Debug)]
pub(super) struct Waiting {
    data: NonNull<c_void>,
    pub len: usize,
}

/// A worker and all that belongs to it. Not `Send`: UCX's objects stay on their thread.
pub(super) struct Worker {
    ucp: &'static Ucp,
    context: sys::ucp_context_h,
    worker: sys::ucp_worker_h,
    events: RawFd,
    /// Written by callbacks, which run inside `progress` and the calls below, on this thread.
    called: Pinned<Called>,
    listeners: Vec<Pinned<Listener>>,
    endpoints: HashMap<EndpointId, Endpoint>,
    regions: HashMap<RegionId, Region>,
    ops: HashMap<OpId, Pinned<Op>>,
    next: u64,
}

struct Endpoint {
    ep: sys::ucp_ep_h,
    rkey: sys::ucp_rkey_h,
    _context: Pinned<EndpointContext>,
}

struct Region {
    mapping: Arc<Mapping>,
    memh: sys::ucp_mem_h,
}

impl Worker {
    /// A context with these settings (names without `UCX_`) and one worker, whose messages have
    /// ids below `message_ids`. Settings that the version does not know are left out.
    pub(super) fn new(
        ucp: &'static Ucp,
        settings: &[(&str, String)],
        message_ids: u32,
    ) -> Result<Self, UcpError> {
        let context = new_context(ucp, settings)?;
        let mut worker = Self {
            ucp,
            context,
            worker: null_mut(),
            events: -1,
            called: Pinned::new(Called::default()),
            listeners: Vec::new(),
            endpoints: HashMap::new(),
            regions: HashMap::new(),
            ops: HashMap::new(),
            next: 0,
        };
        // SAFETY: all zero is a valid value of these parameters; the mask says which count.
        let mut params: sys::ucp_worker_params_t = unsafe { MaybeUninit::zeroed().assume_init() };
        params.field_mask = sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE;
        params.thread_mode = sys::UCS_THREAD_MODE_SINGLE;
        // SAFETY: the context is alive.
        let status = unsafe { (ucp.ucp_worker_create)(context, &params, &mut worker.worker) };
        worker.check("ucp_worker_create", status)?;
        // SAFETY: the worker is alive.
        let status = unsafe { (ucp.ucp_worker_get_efd)(worker.worker, &mut worker.events) };
        worker.check("ucp_worker_get_efd", status)?;
        for id in 0..message_ids {
            worker.listen(id)?;
        }
        Ok(worker)
    }

    fn listen(&mut self, id: u32) -> Result<(), UcpError> {
        let listener = Pinned::new(Listener { called: &raw const *self.called, id });
        let param = sys::ucp_am_handler_param_t {
            field_mask: sys::UCP_AM_HANDLER_PARAM_FIELD_ID
                | sys::UCP_AM_HANDLER_PARAM_FIELD_CB
                | sys::UCP_AM_HANDLER_PARAM_FIELD_ARG,
            id,
            flags: 0,
            cb: Some(on_message),
            arg: listener.as_arg(),
        };
        self.listeners.push(listener);
        // SAFETY: the listener lives as long as the worker.
        let status = unsafe { (self.ucp.ucp_worker_set_am_recv_handler)(self.worker, &param) };
        self.check("ucp_worker_set_am_recv_handler", status)
    }

    /// What peers need to reach this worker.
    pub(super) fn address(&self) -> Result<Vec<u8>, UcpError> {
        let (mut address, mut len) = (null_mut(), 0);
        // SAFETY: the worker is alive; UCX allocates the address.
        let status =
            unsafe { (self.ucp.ucp_worker_get_address)(self.worker, &mut address, &mut len) };
        self.check("ucp_worker_get_address", status)?;
        // SAFETY: UCX wrote `len` bytes there.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) }.to_vec();
        // SAFETY: as it was got.
        unsafe { (self.ucp.ucp_worker_release_address)(self.worker, address) };
        Ok(bytes)
    }

    /// Readable when there is something to progress, after [`arm`](Self::arm) said so.
    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: UCX keeps it open as long as the worker lives.
        unsafe { BorrowedFd::borrow_raw(self.events) }
    }

    /// Whether nothing is to be done before [`event_fd`](Self::event_fd) is readable.
    pub(super) fn arm(&self) -> Result<bool, UcpError> {
        // SAFETY: the worker is alive.
        match unsafe { (self.ucp.ucp_worker_arm)(self.worker) } {
            sys::UCS_ERR_BUSY => Ok(false),
            status => self.check("ucp_worker_arm", status).map(|()| true),
        }
    }

    /// Gets on; whether anything happened.
    pub(super) fn progress(&mut self) -> bool {
        // SAFETY: the worker is alive, and this is its thread.
        unsafe { (self.ucp.ucp_worker_progress)(self.worker) != 0 }
    }

    pub(super) fn next_event(&mut self) -> Option<Event> {
        let event = self.called.queue.borrow_mut().pop_front()?;
        if let Event::Done { op, .. } = &event {
            self.ops.remove(op);
        }
        Some(event)
    }

    /// Connects to the worker with that address.
    pub(super) fn connect(&mut self, address: &[u8]) -> Result<EndpointId, UcpError> {
        let id = EndpointId(self.next_id());
        let context =
            Pinned::new(EndpointContext { called: &raw const *self.called, id, ucp: self.ucp });
        // SAFETY: all zero is a valid value of these parameters; the mask says which count.
        let mut params: sys::ucp_ep_params_t = unsafe { MaybeUninit::zeroed().assume_init() };
        params.field_mask = sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
            | sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
            | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params.address = address.as_ptr().cast();
        params.err_mode = sys::UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler = sys::ucp_err_handler_t { cb: Some(on_error), arg: context.as_arg() };
        let mut ep = null_mut();
        // SAFETY: the worker is alive; the context lives until the endpoint is
        // closed; the address is read before the call returns.
        let status = unsafe { (self.ucp.ucp_ep_create)(self.worker, &params, &mut ep) };
        self.check("ucp_ep_create", status)?;
        self.endpoints.insert(id, Endpoint { ep, rkey: null_mut(), _context: context });
        Ok(id)
    }

    /// Sends an active message of header and payload. One with a payload is fetched by the peer.
    pub(super) fn send(
        &mut self,
        endpoint: EndpointId,
        id: u32,
        header: Bytes,
        payload: Bytes,
    ) -> Result<OpId, UcpError> {
        let Some(to) = self.endpoints.get(&endpoint) else { return Err(closed()) };
        let (ucp, ep) = (self.ucp, to.ep);
        let (head, head_len) = (header.as_ptr(), header.len());
        let (at, len) = (payload.as_ptr(), payload.len());
        let memh = self.memh_of(at, len);
        let keep = Keep::Bytes([header, payload]);
        self.start(Some(endpoint), keep, Some(on_sent), |mut param| {
            param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_FLAGS;
            param.flags = match len {
                0 => sys::UCP_AM_SEND_FLAG_EAGER,
                _ => sys::UCP_AM_SEND_FLAG_RNDV,
            };
            if let Some(memh) = memh.filter(|_| len > 0) {
                param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
                param.memh = memh;
            }
            let at = if len == 0 { null() } else { at.cast() };
            // SAFETY: the endpoint is alive; header and payload are kept until the callback.
            unsafe { (ucp.ucp_am_send_nbx)(ep, id, head.cast(), head_len, at, len, &param) }
        })
    }

    /// Fetches a payload into a region, at `offset`.
    ///
    /// # Panics
    /// Where it does not fit.
    pub(super) fn receive(
        &mut self,
        waiting: Waiting,
        region: RegionId,
        offset: usize,
    ) -> Result<OpId, UcpError> {
        let (ucp, worker) = (self.ucp, self.worker);
        let to = &self.regions[&region];
        assert!(offset + waiting.len <= to.mapping.len(), "a payload outgrows its region");
        let (mapping, memh) = (to.mapping.clone(), to.memh);
        // SAFETY: inside the mapping, as was just checked.
        let at = unsafe { mapping.address().as_ptr().add(offset) };
        self.start(None, Keep::Mapping(mapping), None, |mut param| {
            param.cb.recv_am = Some(on_received);
            param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
            param.memh = memh;
            let (data, len) = (waiting.data.as_ptr(), waiting.len);
            // SAFETY: the descriptor has not been used yet; the memory is kept until the callback.
            unsafe { (ucp.ucp_am_recv_data_nbx)(worker, data, at.cast(), len, &param) }
        })
    }

    /// Lets a payload go that nobody wants.
    pub(super) fn refuse(&mut self, waiting: Waiting) {
        // SAFETY: the descriptor has not been used yet.
        unsafe { (self.ucp.ucp_am_data_release)(self.worker, waiting.data.as_ptr()) };
    }

    /// Closes an endpoint at once; its operations end with an error. Nothing where it is closed.
    pub(super) fn close(&mut self, endpoint: EndpointId) {
        let Some(closing) = self.endpoints.remove(&endpoint) else { return };
        let (ucp, ep, rkey) = (self.ucp, closing.ep, closing.rkey);
        if !rkey.is_null() {
            // SAFETY: unpacked on this endpoint, and used no more.
            unsafe { (ucp.ucp_rkey_destroy)(rkey) };
        }
        let started =
            self.start(Some(endpoint), Keep::Closing(closing), Some(on_sent), |mut param| {
                param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_FLAGS;
                param.flags = sys::UCP_EP_CLOSE_FLAG_FORCE;
                // SAFETY: the endpoint is alive and used no more.
                unsafe { (ucp.ucp_ep_close_nbx)(ep, &param) }
            });
        if let Err(error) = started {
            tracing::debug!(%error, "a UCX endpoint did not close");
        }
    }

    /// Registers memory, so that it may be sent from and written to.
    pub(super) fn register(&mut self, mapping: Arc<Mapping>) -> Result<RegionId, UcpError> {
        // SAFETY: all zero is a valid value of these parameters; the mask says which count.
        let mut params: sys::ucp_mem_map_params_t = unsafe { MaybeUninit::zeroed().assume_init() };
        params.field_mask =
            sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS | sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH;
        params.address = mapping.address().as_ptr().cast();
        params.length = mapping.len();
        let mut memh = null_mut();
        // SAFETY: the mapping is kept until it is unregistered.
        let status = unsafe { (self.ucp.ucp_mem_map)(self.context, &params, &mut memh) };
        self.check("ucp_mem_map", status)?;
        let id = RegionId(self.next_id());
        self.regions.insert(id, Region { mapping, memh });
        Ok(id)
    }

    /// The key with which a peer may write to a region.
    pub(super) fn key(&self, region: RegionId) -> Result<Vec<u8>, UcpError> {
        let (mut key, mut len) = (null_mut(), 0);
        let memh = self.regions[&region].memh;
        // SAFETY: context and region are alive; UCX allocates the key.
        let status = unsafe { (self.ucp.ucp_rkey_pack)(self.context, memh, &mut key, &mut len) };
        self.check("ucp_rkey_pack", status)?;
        // SAFETY: UCX wrote `len` bytes there.
        let bytes = unsafe { std::slice::from_raw_parts(key.cast::<u8>(), len) }.to_vec();
        // SAFETY: as it was got.
        unsafe { (self.ucp.ucp_rkey_buffer_release)(key) };
        Ok(bytes)
    }

    pub(super) fn unregister(&mut self, region: RegionId) {
        let Some(region) = self.regions.remove(&region) else { return };
        // SAFETY: registered in this context, once.
        let status = unsafe { (self.ucp.ucp_mem_unmap)(self.context, region.memh) };
        if let Err(error) = self.check("ucp_mem_unmap", status) {
            tracing::warn!(%error, "memory stays registered");
        }
    }

    /// The oldest operation of an endpoint that has not ended.
    pub(super) fn oldest_op(&self, endpoint: EndpointId) -> Option<Instant> {
        let of = |op: &&Pinned<Op>| op.endpoint == Some(endpoint);
        self.ops.values().filter(of).map(|op| op.started).min()
    }

    /// The oldest operation of an endpoint that was closed already.
    pub(super) fn oldest_orphan(&self) -> Option<Instant> {
        let closed =
            |op: &&Pinned<Op>| op.endpoint.is_some_and(|id| !self.endpoints.contains_key(&id));
        self.ops.values().filter(closed).map(|op| op.started).min()
    }

    fn memh_of(&self, at: *const u8, len: usize) -> Option<sys::ucp_mem_h> {
        let at = at as usize;
        let holds = |region: &&Region| {
            let first = region.mapping.address().as_ptr() as usize;
            first <= at && at + len <= first + region.mapping.len()
        };
        self.regions.values().find(holds).map(|region| region.memh)
    }

    /// Starts an operation that calls back with its own `Op`, or is done at once.
    fn start(
        &mut self,
        endpoint: Option<EndpointId>,
        keep: Keep,
        sent: Option<sys::ucp_send_nbx_callback_t>,
        call: impl FnOnce(sys::ucp_request_param_t) -> sys::ucs_status_ptr_t,
    ) -> Result<OpId, UcpError> {
        let id = OpId(self.next_id());
        let called = &raw const *self.called;
        let (ucp, started) = (self.ucp, Instant::now());
        let op = Pinned::new(Op { called, id, ucp, endpoint, started, _keep: keep });
        // SAFETY: all zero is a valid value of these parameters; the mask says which count.
        let mut param: sys::ucp_request_param_t = unsafe { MaybeUninit::zeroed().assume_init() };
        param.op_attr_mask = sys::UCP_OP_ATTR_FIELD_CALLBACK | sys::UCP_OP_ATTR_FIELD_USER_DATA;
        param.cb.send = sent;
        param.user_data = op.as_arg();
        let answer = call(param);
        if sys::is_request(answer) {
            self.ops.insert(id, op);
            return Ok(id);
        }
        // It is over, and does not call back.
        let result = match sys::status_of(answer) {
            sys::UCS_OK => Ok(()),
            status => Err(self.ucp.status_text(status)),
        };
        self.called.queue.borrow_mut().push_back(Event::Done { op: id, result });
        Ok(id)
    }

    fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn check(&self, call: &'static str, status: ucs_status_t) -> Result<(), UcpError> {
        check(self.ucp, call, status)
    }
}

impl Drop for Worker {
    /// Closes what is open, then destroys the worker, after which UCX touches no buffer any more.
    fn drop(&mut self) {
        let open: Vec<_> = self.endpoints.keys().copied().collect();
        for endpoint in open {
            self.close(endpoint);
        }
        for _ in 0..1000 {
            while self.next_event().is_some() {}
            if self.ops.is_empty() {
                break;
            }
            self.progress();
        }
        let regions: Vec<_> = self.regions.keys().copied().collect();
        if !self.worker.is_null() {
            // SAFETY: made by us; nothing uses it after this.
            unsafe { (self.ucp.ucp_worker_destroy)(self.worker) };
        }
        for region in regions {
            self.unregister(region);
        }
        // SAFETY: as above; worker and regions are gone.
        unsafe { (self.ucp.ucp_cleanup)(self.context) };
        self.ops.clear();
    }
}

fn check(ucp: &Ucp, call: &'static str, status: ucs_status_t) -> Result<(), UcpError> {
    match status {
        sys::UCS_OK => Ok(()),
        status => Err(UcpError { call, reason: ucp.status_text(status) }),
    }
}

fn closed() -> UcpError {
    UcpError { call: "endpoint", reason: "it is closed".into() }
}
