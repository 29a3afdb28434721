#!/usr/bin/env bash
# Whole transfers under AddressSanitizer, which sees use of memory that was freed or is another's.
# Needs nightly and UCX. Leaks are not looked for: UCX keeps what it has allocated to the end.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo +nightly --version >/dev/null 2>&1 || {
    echo "the nightly toolchain is missing: rustup toolchain install nightly" >&2
    exit 1
}
export RUSTFLAGS="-Zsanitizer=address ${RUSTFLAGS:-}"
export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}"
# Without optimisation the tests take so long to make their bytes that peers seem silent.
export CARGO_PROFILE_DEV_OPT_LEVEL=1
# A target of its own: build scripts and macros stay without it.
cargo +nightly test --target x86_64-unknown-linux-gnu --target-dir target/asan \
    --package baton-kv-transfer --package baton-ucx-sys
