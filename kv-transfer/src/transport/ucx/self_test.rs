//! Which operation this version of UCX is fast at, measured once at start between two workers.
//!
//! Versions differ by five times and more: 1.13 copies puts over TCP in pieces and is fast where
//! the receiver fetches; 1.22 is fast at puts, and where the receiver fetches it can leave
//! operations undone after a peer's death. So putting is taken unless fetching is clearly faster.
//! Here one thread does the work of both ends, so the figures are lower and nearer to one another
//! than between processes: fetching is 1.7 to 1.9 times as fast with 1.13, 0.4 to 0.7 with 1.22.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_ucx_sys::{Ucp, Version};
use bytes::Bytes;

use super::notice;
use super::ucp::{Event, Payload, UcpError, Worker};
use super::{Choice, Operation, UcxConfig};
use crate::memory::Mapping;

const MESSAGE_BYTES: usize = 1 << 20;
const MESSAGES: usize = 4;
/// The best of them counts: others use the machine meanwhile.
const ROUNDS: usize = 5;
const WITHIN: Duration = Duration::from_secs(2);

/// Transports inside one machine. The test leaves them out where it can: between machines the
/// difference is large, inside one both operations are one copy by the kernel.
const LOCAL_ALIASES: &str = "self,sm";
const LOCAL: [&str; 9] = ["self", "sysv", "posix", "cma", "knem", "xpmem", "mm", "shm", "sm"];

/// Bytes a second by operation; an error is text, since it is for the log.
pub(super) struct Measured {
    pub choice: Choice,
    pub put: Result<f64, String>,
    pub fetch: Result<f64, String>,
}

/// # Errors
/// Where neither operation works.
pub(super) fn run(ucp: &'static Ucp, config: &UcxConfig) -> Result<Measured, String> {
    let prepare = |operation| {
        let settings = settings(config, operation, network_tls(config.tls.as_deref()));
        Test::new(ucp, &settings)
    };
    let mut tests = [Operation::Put, Operation::Fetch].map(|operation| {
        prepare(operation).and_then(|mut test| {
            // The first message connects.
            test.carry(operation, 1)?;
            Ok((operation, test, 0.0))
        })
    });
    for _ in 0..ROUNDS {
        for test in &mut tests {
            *test = std::mem::replace(test, Err(UcpError::default())).and_then(measure);
        }
    }
    let [put, fetch] = tests
        .map(|test| test.map(|(_, _, best)| best).map_err(|error: UcpError| error.to_string()));
    let operation = match (&put, &fetch) {
        (Ok(put), Ok(fetch)) if *fetch > fetch_factor(ucp.version()) * put => Operation::Fetch,
        (Ok(_), _) => Operation::Put,
        (Err(_), Ok(_)) => Operation::Fetch,
        (Err(put), Err(fetch)) => return Err(format!("put: {put}; fetch: {fetch}")),
    };
    let settings = settings(config, operation, config.tls.clone());
    Ok(Measured { choice: Choice { operation, settings }, put, fetch })
}

pub(super) fn settings(
    config: &UcxConfig,
    operation: Operation,
    tls: Option<String>,
) -> Vec<(&'static str, String)> {
    // All memory is registered by hand: UCX need not watch the process's own.
    let mut settings = vec![("RCACHE_ENABLE", "n".to_owned())];
    if operation == Operation::Put {
        // Else a put by address is done in software, in pieces.
        settings.push(("RNDV_THRESH", "inf".to_owned()));
    }
    settings.extend(tls.map(|tls| ("TLS", tls)));
    settings.extend(config.devices.clone().map(|devices| ("NET_DEVICES", devices)));
    settings
}

/// The configured transports without those inside one machine; as they are where none is left.
fn network_tls(tls: Option<&str>) -> Option<String> {
    let Some(tls) = tls.filter(|&tls| tls != "all") else {
        return Some(format!("^{LOCAL_ALIASES}"));
    };
    if let Some(excluded) = tls.strip_prefix('^') {
        return Some(format!("^{excluded},{LOCAL_ALIASES}"));
    }
    let between: Vec<_> = tls.split(',').filter(|name| !LOCAL.contains(name)).collect();
    Some(if between.is_empty() { tls.to_owned() } else { between.join(",") })
}

/// How much faster than putting fetching must be measured to be. Where the answer is known the
/// measurement has to contradict it loudly: others use the machine meanwhile.
fn fetch_factor(version: Version) -> f64 {
    match (version.major, version.minor) {
        (1, ..=13) => 0.5,
        (1, 22..) => 4.0,
        _ => 1.25,
    }
}

/// One more round of a test, whose best rate so far is the last.
fn measure(
    (operation, mut test, best): (Operation, Test, f64),
) -> Result<(Operation, Test, f64), UcpError> {
    let start = Instant::now();
    test.carry(operation, MESSAGES)?;
    let rate = (MESSAGES * MESSAGE_BYTES) as f64 / start.elapsed().as_secs_f64();
    Ok((operation, test, best.max(rate)))
}

struct Test {
    from: Worker,
    to: Worker,
    endpoint: super::ucp::EndpointId,
    region: super::ucp::RegionId,
    base: u64,
    message: Bytes,
}

impl Test {
    fn new(ucp: &'static Ucp, settings: &[(&str, String)]) -> Result<Self, UcpError> {
        let mapping = Mapping::new(MESSAGES * MESSAGE_BYTES)
            .map_err(|error| UcpError { call: "mmap", reason: error.to_string() })?;
        let mapping = Arc::new(mapping);
        let mut to = Worker::new(ucp, settings, notice::MESSAGE_IDS)?;
        let base = mapping.address().as_ptr() as u64;
        let region = to.register(mapping)?;
        let mut from = Worker::new(ucp, settings, notice::MESSAGE_IDS)?;
        let endpoint = from.connect(&to.address()?)?;
        from.unlock(endpoint, &to.key(region)?)?;
        let message = vec![1; MESSAGE_BYTES].into();
        Ok(Self { from, to, endpoint, region, base, message })
    }

    fn carry(&mut self, operation: Operation, count: usize) -> Result<(), UcpError> {
        let mut awaited = 0;
        for at in 0..count {
            let message = self.message.clone();
            match operation {
                Operation::Put => {
                    let remote = self.base + (at * MESSAGE_BYTES) as u64;
                    self.from.put(self.endpoint, message, remote)?;
                    awaited += 1;
                }
                Operation::Fetch => {
                    let header = notice::encode(0, &[]);
                    self.from.send(self.endpoint, notice::FETCH, header, message)?;
                    // Sent here, received there.
                    awaited += 2;
                }
            }
        }
        if operation == Operation::Put {
            self.from.flush(self.endpoint)?;
            awaited += 1;
        }
        let (start, mut offset) = (Instant::now(), 0);
        while awaited > 0 {
            if start.elapsed() > WITHIN {
                let reason = format!("nothing came within {} ms", WITHIN.as_millis());
                return Err(UcpError { call: "self-test", reason });
            }
            self.from.progress();
            self.to.progress();
            while let Some(event) = self.from.next_event() {
                awaited -= done(event)?;
            }
            while let Some(event) = self.to.next_event() {
                match event {
                    Event::Message { payload: Payload::Waits(waiting), .. } => {
                        self.to.receive(waiting, self.region, offset)?;
                        offset += MESSAGE_BYTES;
                    }
                    Event::Message { payload: Payload::Here(_), .. } => awaited -= 1,
                    other => awaited -= done(other)?,
                }
            }
        }
        Ok(())
    }
}

fn done(event: Event) -> Result<usize, UcpError> {
    match event {
        Event::Done { result, .. } => {
            result.map(|()| 1).map_err(|reason| UcpError { call: "self-test", reason })
        }
        Event::PeerLost { reason, .. } => Err(UcpError { call: "self-test", reason }),
        Event::Message { .. } => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_runs_over_what_reaches_other_machines() {
        let all = "^self,sm";
        assert_eq!(network_tls(None).as_deref(), Some(all));
        assert_eq!(network_tls(Some("all")).as_deref(), Some(all));
        assert_eq!(network_tls(Some("tcp,cma,rc")).as_deref(), Some("tcp,rc"));
        assert_eq!(network_tls(Some("sysv,cma")).as_deref(), Some("sysv,cma"));
        assert_eq!(network_tls(Some("^ud")).as_deref(), Some("^ud,self,sm"));
    }
}
