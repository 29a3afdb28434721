//! `baton bench transfer`, every way: what it reports can be.

use std::process::Command;

use serde_json::Value;

const TOTAL: u64 = 256 << 20;
/// CPU time is counted in hundredths of a second at each end.
const GRAIN_S: f64 = 0.04;

fn report(way: &str, level: &str) -> Value {
    let total = TOTAL.to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .args(["bench", "transfer", "--way", way, "--level", level, "--total", &total, "--json"])
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
    for (way, level) in [
        ("tcp", "wire"),
        ("tcp", "checked"),
        ("grpc", "placed"),
        ("grpc", "handoff"),
        ("ucx", "wire"),
        ("ucx-get", "wire"),
    ] {
        let report = report(way, level);
        let figure = |key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key}: {report}"));
        assert_eq!(figure("bytes"), TOTAL as f64, "{report}");
        let (gb, seconds) = (TOTAL as f64 / 1e9, figure("seconds"));
        assert!((figure("gb_per_s") * seconds / gb - 1.0).abs() < 1e-6, "{report}");
        // Both ends run within the time that is reported, and on this machine.
        let cpu = (figure("cpu_sender_s_per_gb") + figure("cpu_receiver_s_per_gb")) * gb;
        assert!(cpu > 0.0 && cpu <= processors * seconds + GRAIN_S, "{cpu} s: {report}");
    }
}
