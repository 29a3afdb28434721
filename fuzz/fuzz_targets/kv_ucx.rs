//! Whatever a peer says over UCX: see `baton_kv_transfer::fuzzing`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| baton_kv_transfer::fuzzing::ucx(bytes));
