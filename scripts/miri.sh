#!/usr/bin/env bash
# Runs the block pool and the readers of files under Miri, which sees undefined behaviour. Needs
# nightly with the components miri and rust-src. The block pool takes two minutes. Of the readers
# the unit tests are run: their other tests hash whole files, which takes an interpreter hours.
# Isolation is off since tests read and write files; files are read instead of mapped there
# (model-files/src/map.rs).
set -euo pipefail
cd "$(dirname "$0")/.."
cargo +nightly miri --version >/dev/null 2>&1 || {
    echo "Miri is missing: rustup component add --toolchain nightly miri rust-src" >&2
    exit 1
}
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-strict-provenance ${MIRIFLAGS:-}"
# An interpreter is hundreds of times slower than the machine.
export PROPTEST_CASES="${PROPTEST_CASES:-4}"
cargo +nightly miri test --package baton-kv-cache
cargo +nightly miri test --package baton-model-files --lib
cargo +nightly miri test --package baton-engine --lib packed_file::
