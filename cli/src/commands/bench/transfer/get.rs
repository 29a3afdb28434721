//! `--way ucx-get`: this process gets the memory of the other one.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use baton_kv_transfer::bench::ARENA_BYTES;
use baton_kv_transfer::transport::ucx::raw_get::{Getter, Offer, hold};
use serde_json::{Value, json};

use super::{Flags, WARM_BYTES, cpu_of, own_cpu, report, start_other};
use crate::print;

/// Messages of each stream under way, as many as a staging region has slots.
const MESSAGES: usize = 16;

/// The figures; `Null` at the other end, which ends with its standard input.
pub async fn run(flags: &Flags) -> anyhow::Result<Value> {
    if flags.message > ARENA_BYTES as u64 {
        anyhow::bail!("--message {}: ucx-get moves at most {ARENA_BYTES} at once", flags.message);
    }
    if flags.serve {
        serve(flags).await?;
        return Ok(Value::Null);
    }
    let other = start_other().await?;
    let offer = read_offer(&other.said).context("what the other end said is no offer")?;
    let (config, in_flight) = (flags.ucx_config(), usize::from(flags.streams) * MESSAGES);
    let (message, total) = (flags.message as usize, flags.total);
    let pid = other.pid;
    let cpu = move || anyhow::Ok((own_cpu(), cpu_of(pid)?));
    let getting = move || {
        let failed = |reason: String| anyhow::anyhow!("UCX: {reason}");
        let mut getter = Getter::connect(&config, offer).map_err(failed)?;
        getter.get(message, in_flight, total.min(WARM_BYTES)).map_err(failed)?;
        let before = cpu()?;
        let took = getter.get(message, in_flight, total).map_err(failed)?.as_secs_f64();
        let after = cpu()?;
        // The holder sends, and this process receives.
        let spent = (after.1 - before.1, after.0 - before.0);
        anyhow::Ok((took, spent, getter.version().to_owned()))
    };
    let (took, spent, version) = tokio::task::spawn_blocking(getting).await??;
    let bytes = flags.total.div_ceil(flags.message) * flags.message;
    Ok(report(flags, bytes, took, spent, json!({"version": version, "operation": "get"})))
}

async fn serve(flags: &Flags) -> anyhow::Result<()> {
    let config = flags.ucx_config();
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let tell = |offer: Offer| {
        let line = write_offer(&offer);
        // Who does not hear it has ended, and with it this process's input.
        print::line(&line).unwrap_or_else(|error| tracing::warn!(%error, "nobody listens"));
    };
    let ended = stop.clone();
    // A thread of its own: a read that waits for ever keeps no process that has failed.
    std::thread::spawn(move || {
        // Whatever comes, the other end has gone or wants this one to.
        let _input_ended = std::io::stdin().read(&mut [0]);
        ended.store(true, Ordering::Release);
    });
    let holding = tokio::task::spawn_blocking(move || hold(&config, ARENA_BYTES, &stop, tell));
    holding.await?.map_err(|reason| anyhow::anyhow!("UCX cannot be used: {reason}"))
}

fn write_offer(offer: &Offer) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let (address, key) = (hex(&offer.worker_address), hex(&offer.key));
    format!("{address} {key} {} {}", offer.base, offer.bytes)
}

fn read_offer(line: &str) -> Option<Offer> {
    let hex = |text: &str| -> Option<Vec<u8>> {
        let digits = text.as_bytes().as_chunks::<2>().0;
        let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        digits.iter().map(byte).collect()
    };
    let mut words = line.split_whitespace();
    let (worker_address, key) = (hex(words.next()?)?, hex(words.next()?)?);
    let (base, bytes) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some(Offer { worker_address, key, base, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_leads_back() {
        let offer =
            Offer { worker_address: vec![0, 255, 7], key: vec![18], base: 1 << 40, bytes: 512 };
        assert_eq!(read_offer(&write_offer(&offer)), Some(offer));
        assert_eq!(read_offer("zz 00 1 2"), None);
        assert_eq!(read_offer("00 00 1"), None);
    }
}
