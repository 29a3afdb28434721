//! `baton bench transfer`, every way: what it reports can be.

use std::process::Command;

use serde_json::Value;

const TOTAL: u64 = 256 << 20;
const MESSAGE: u64 = 1 << 20;
/// 512 tokens of SmolLM2: 30 layers, 3 heads of 64, K and V, bfloat16.
const PROMPT: u64 = 512 * 30 * 3 * 64 * 2 * 2;
/// CPU time is counted in hundredths of a second at each end.
const GRAIN_S: f64 = 0.04;

fn report(way: &str, level: &str, streams: u64) -> Value {
    let (total, streams) = (TOTAL.to_string(), streams.to_string());
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["bench", "transfer", "--way", way, "--level", level, "--total", &total, "--json"])
        .args(["--streams", &streams])
        // The processors are busy all the time, and whatever is counted beside it shows.
        .args(["--ucx-spin-us", "1000000"])
        .output()
        .expect("baton runs");
    let (said, errors) = (output.stdout, String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(output.status.success(), "{way} {level}: {errors}");
    serde_json::from_slice(&said).unwrap_or_else(|error| panic!("{way} {level}: {error} {errors}"))
}

#[test]
fn what_is_reported_is_possible() {
    let processors = std::thread::available_parallelism().expect("there are some").get() as f64;
    for (way, level, streams, unit) in [
        ("tcp", "wire", 1, MESSAGE),
        ("tcp", "checked", 3, MESSAGE),
        ("grpc", "placed", 1, MESSAGE),
        ("grpc", "handoff", 1, PROMPT),
        ("grpc", "handoff", 8, PROMPT),
        ("ucx", "wire", 1, MESSAGE),
        ("ucx-get", "wire", 1, MESSAGE),
    ] {
        let report = report(way, level, streams);
        let figure = |key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key}: {report}"));
        // What each stream sent: whole messages, or whole prompts.
        let sent = streams * (TOTAL / streams).div_ceil(unit) * unit;
        assert_eq!(figure("bytes"), sent as f64, "{report}");
        let (gb, seconds) = (sent as f64 / 1e9, figure("seconds"));
        assert!((figure("gb_per_s") * seconds / gb - 1.0).abs() < 1e-6, "{report}");
        // Both ends run within the time that is reported, and on this machine.
        let cpu = (figure("cpu_sender_s_per_gb") + figure("cpu_receiver_s_per_gb")) * gb;
        assert!(cpu > 0.0 && cpu <= processors * seconds + GRAIN_S, "{cpu} s: {report}");
    }
}
