//! What UCX calls back with, and what it is given for that. Callbacks run on the worker's thread,
//! inside calls of the worker's, and only leave an event.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use baton_ucx_sys as sys;
use bytes::Bytes;
use sys::{Ucp, ucs_status_t};

use super::{Endpoint, EndpointId, Event, OpId, Payload, Waiting};
use crate::memory::Mapping;

#[derive(Debug, Default)]
pub(super) struct Called {
    pub(super) queue: RefCell<VecDeque<Event>>,
}

/// What an endpoint's error handler is given.
pub(super) struct EndpointContext {
    pub(super) called: *const Called,
    pub(super) id: EndpointId,
    pub(super) ucp: &'static Ucp,
}

/// What a message's handler is given.
pub(super) struct Listener {
    pub(super) called: *const Called,
    pub(super) id: u32,
}

/// A value at one address until it is dropped, for UCX to hold.
pub(super) struct Pinned<T>(NonNull<T>);

impl<T> Pinned<T> {
    pub(super) fn new(value: T) -> Self {
        Self(NonNull::from(Box::leak(Box::new(value))))
    }

    pub(super) fn as_arg(&self) -> *mut c_void {
        self.0.as_ptr().cast()
    }
}

impl<T> std::ops::Deref for Pinned<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: alive until dropped; others only ever read it, on this thread.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: made from a box, dropped once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// What an operation's callback is given.
pub(super) struct Op {
    pub(super) called: *const Called,
    pub(super) id: OpId,
    pub(super) ucp: &'static Ucp,
    pub(super) endpoint: Option<EndpointId>,
    pub(super) started: Instant,
    /// What UCX reads or writes meanwhile.
    pub(super) _keep: Keep,
}

pub(super) enum Keep {
    Nothing,
    Bytes(#[expect(dead_code, reason = "kept alive")] [Bytes; 2]),
    Mapping(#[expect(dead_code, reason = "kept alive")] Arc<Mapping>),
    /// A closed endpoint's context, and its key.
    Closing(#[expect(dead_code, reason = "kept alive")] Endpoint),
}

/// # Safety
/// `user_data` is a [`Pinned`] [`Op`] that is alive; called on the worker's thread.
pub(super) unsafe extern "C" fn on_sent(
    request: *mut c_void,
    status: ucs_status_t,
    user_data: *mut c_void,
) {
    // SAFETY: as the caller says; ops are dropped after their event was taken.
    let op = unsafe { &*user_data.cast::<Op>() };
    // SAFETY: the request is over.
    unsafe { (op.ucp.ucp_request_free)(request) };
    let result = match status {
        sys::UCS_OK => Ok(()),
        status => Err(op.ucp.status_text(status)),
    };
    // SAFETY: it outlives the worker's calls; nobody holds a borrow across one.
    unsafe { &*op.called }.queue.borrow_mut().push_back(Event::Done { op: op.id, result });
}

/// # Safety
/// As [`on_sent`].
pub(super) unsafe extern "C" fn on_received(
    request: *mut c_void,
    status: ucs_status_t,
    _length: usize,
    user_data: *mut c_void,
) {
    // SAFETY: the same contract.
    unsafe { on_sent(request, status, user_data) };
}

/// # Safety
/// `arg` is a [`Pinned`] [`EndpointContext`] that is alive; called on the worker's thread.
pub(super) unsafe extern "C" fn on_error(
    arg: *mut c_void,
    _ep: sys::ucp_ep_h,
    status: ucs_status_t,
) {
    // SAFETY: as the caller says; contexts live until their endpoint is closed.
    let context = unsafe { &*arg.cast::<EndpointContext>() };
    let reason = context.ucp.status_text(status);
    let event = Event::PeerLost { endpoint: context.id, reason };
    // SAFETY: as in `on_sent`.
    unsafe { &*context.called }.queue.borrow_mut().push_back(event);
}

/// # Safety
/// `arg` is a [`Pinned`] [`Listener`] that is alive; header, data and param are UCX's for this
/// call; called on the worker's thread.
pub(super) unsafe extern "C" fn on_message(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: as the caller says.
    let listener = unsafe { &*arg.cast::<Listener>() };
    let copy = |at: *const c_void, len: usize| match len {
        0 => Vec::new(),
        // SAFETY: UCX says that so many bytes lie there.
        _ => unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }.to_vec(),
    };
    let header = copy(header, header_length);
    // SAFETY: UCX passes a valid param.
    let waits = unsafe { (*param).recv_attr } & sys::UCP_AM_RECV_ATTR_FLAG_RNDV != 0;
    let (payload, status) = match NonNull::new(data).filter(|_| waits) {
        Some(data) => (Payload::Waits(Waiting { data, len: length }), sys::UCS_INPROGRESS),
        None => (Payload::Here(copy(data, length).into()), sys::UCS_OK),
    };
    let event = Event::Message { id: listener.id, header, payload };
    // SAFETY: as in `on_sent`.
    unsafe { &*listener.called }.queue.borrow_mut().push_back(event);
    status
}
