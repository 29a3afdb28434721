#!/usr/bin/env bash
# Fuzzes each target for FUZZ_SECONDS (120). Needs nightly and cargo-fuzz; the corpora that it
# finds are replayed by `make test` on stable.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
cargo +nightly fuzz --version >/dev/null 2>&1 || {
    echo "cargo-fuzz is missing: cargo install cargo-fuzz, and rustup toolchain install nightly" >&2
    exit 1
}
for target in $(cargo +nightly fuzz list); do
    echo "== $target"
    cargo +nightly fuzz run "$target" -- -max_total_time="${FUZZ_SECONDS:-120}"
done
