#!/usr/bin/env bash
# Fuzzes each target, or those that are named, for FUZZ_SECONDS (300) each. Needs nightly and
# cargo-fuzz. The corpora in fuzz/corpus are replayed by `make test` on stable and stay small: what
# is found goes to fuzz/artifacts/found, and the line printed at the end merges what is new of it.
#   scripts/fuzz.sh [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
cargo +nightly --version >/dev/null 2>&1 || {
    echo "the nightly toolchain is missing: rustup toolchain install nightly" >&2
    exit 1
}
cargo +nightly fuzz --version >/dev/null 2>&1 || {
    echo "cargo-fuzz is missing: cargo install cargo-fuzz" >&2
    exit 1
}
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(cargo +nightly fuzz list)
for target in "${targets[@]}"; do
    echo "== $target"
    found=artifacts/found/$target
    mkdir -p "$found" "corpus/$target"
    # Threads that render templates are still there when leaks are looked for.
    leaks=1
    [ "$target" != chat_template ] || leaks=0
    cargo +nightly fuzz run "$target" "$found" "corpus/$target" -- \
        -max_total_time="${FUZZ_SECONDS:-300}" -rss_limit_mb=4096 -detect_leaks=$leaks
done
echo "clean; to keep what is new: cd fuzz && cargo +nightly fuzz run TARGET corpus/TARGET \
artifacts/found/TARGET -- -merge=1"
