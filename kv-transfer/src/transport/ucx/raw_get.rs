//! One-sided gets of memory, without any protocol: what `baton bench transfer --way ucx-get`
//! measures. Transfers put, or are fetched by message; this is what a pull by address would reach.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_ucx_sys::Ucp;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::ucp::{EndpointId, Event, OpId, RegionId, UcpError, Worker};
use super::{Operation, UcxConfig, self_test};
use crate::memory::Mapping;

/// Between two looks at whether to stop.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// One get at most.
const STALLED: Duration = Duration::from_secs(10);

/// Memory that another process may get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    pub worker_address: Vec<u8>,
    pub key: Vec<u8>,
    pub base: u64,
    pub bytes: usize,
}

/// Offers so much memory to whoever `tell` tells, until `stop`.
///
/// # Errors
/// Where UCX or the system says no.
pub fn hold(
    config: &UcxConfig,
    bytes: usize,
    stop: &AtomicBool,
    tell: impl FnOnce(Offer),
) -> Result<(), String> {
    let (mut worker, mapping) = prepare(load(config)?, config, bytes)?;
    let region = worker.register(mapping.clone()).map_err(text)?;
    let (worker_address, key) =
        (worker.address().map_err(text)?, worker.key(region).map_err(text)?);
    tell(Offer { worker_address, key, base: mapping.address().as_ptr() as u64, bytes });
    let mut active = Instant::now();
    while !stop.load(Ordering::Acquire) {
        while worker.next_event().is_some() {}
        wait(&mut worker, config.spin, &mut active).map_err(text)?;
    }
    Ok(())
}

/// Memory that is got into, and the way to what another process offers.
pub struct Getter {
    worker: Worker,
    endpoint: EndpointId,
    region: RegionId,
    offer: Offer,
    spin: Duration,
    version: String,
}

impl std::fmt::Debug for Getter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Getter").field("bytes", &self.offer.bytes).finish_non_exhaustive()
    }
}

impl Getter {
    /// # Errors
    /// Where UCX or the system says no.
    pub fn connect(config: &UcxConfig, offer: Offer) -> Result<Self, String> {
        let ucp = load(config)?;
        let (mut worker, mapping) = prepare(ucp, config, offer.bytes)?;
        let region = worker.register(mapping).map_err(text)?;
        let endpoint = worker.connect(&offer.worker_address).map_err(text)?;
        worker.unlock(endpoint, &offer.key).map_err(text)?;
        let (spin, version) = (config.spin, ucp.version().to_string());
        Ok(Self { worker, endpoint, region, offer, spin, version })
    }

    /// UCX's.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Gets `total` bytes, over and over the same memory, in messages of which so many are under
    /// way; the time that it took.
    ///
    /// # Errors
    /// Where one fails, or does not end.
    pub fn get(
        &mut self,
        message_bytes: usize,
        in_flight: usize,
        total: u64,
    ) -> Result<Duration, String> {
        let places = (self.offer.bytes / message_bytes).max(1) as u64;
        let count = total.div_ceil(message_bytes as u64);
        let (start, mut active, mut moved) = (Instant::now(), Instant::now(), Instant::now());
        let mut running: BTreeSet<OpId> = BTreeSet::new();
        let mut started = 0;
        while started < count || !running.is_empty() {
            while started < count && running.len() < in_flight {
                let at = (started % places) as usize * message_bytes;
                let remote = self.offer.base + at as u64;
                let (endpoint, region) = (self.endpoint, self.region);
                let op = self.worker.get(endpoint, remote, message_bytes, region, at);
                running.insert(op.map_err(text)?);
                started += 1;
            }
            let mut came = false;
            while let Some(event) = self.worker.next_event() {
                match event {
                    Event::Done { op, result } => {
                        result?;
                        came |= running.remove(&op);
                    }
                    Event::PeerLost { reason, .. } => return Err(reason),
                    Event::Message { .. } => {}
                }
            }
            if came {
                moved = Instant::now();
            } else if moved.elapsed() > STALLED {
                return Err(format!("nothing came within {} s", STALLED.as_secs()));
            } else {
                wait(&mut self.worker, self.spin, &mut active).map_err(text)?;
            }
        }
        Ok(start.elapsed())
    }
}

fn load(config: &UcxConfig) -> Result<&'static Ucp, String> {
    Ucp::load(config.library.as_deref()).map_err(|error| error.to_string())
}

fn prepare(
    ucp: &'static Ucp,
    config: &UcxConfig,
    bytes: usize,
) -> Result<(Worker, Arc<Mapping>), String> {
    let mut mapping = Mapping::new(bytes).map_err(|error| error.to_string())?;
    mapping.fill(1);
    let settings = self_test::settings(config, Operation::Put, config.tls.clone());
    let worker = Worker::new(ucp, &settings, 0).map_err(text)?;
    Ok((worker, Arc::new(mapping)))
}

/// Gets on, and sleeps where nothing has happened for `spin`.
fn wait(worker: &mut Worker, spin: Duration, active: &mut Instant) -> Result<(), UcpError> {
    if worker.progress() {
        *active = Instant::now();
    } else if active.elapsed() >= spin && worker.arm()? {
        let events = worker.event_fd();
        match poll(&mut [PollFd::new(&events, PollFlags::IN)], Some(&TICK)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(UcpError { call: "poll", reason: error.to_string() }),
        }
        *active = Instant::now();
    }
    Ok(())
}

fn text(error: UcpError) -> String {
    error.to_string()
}
