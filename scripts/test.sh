#!/usr/bin/env bash
# Runs every test: installs what they need, builds once, lints, Rust tests, Python client tests.
set -euo pipefail
cd "$(dirname "$0")/.."

have() { command -v "$1" >/dev/null 2>&1; }
step() { printf '\n== %s (%ds)\n' "$1" "$SECONDS"; }

step "tools"
if ! have etcd; then
    export DEBIAN_FRONTEND=noninteractive
    sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq etcd-server
fi
scripts/fetch-model.sh
if [ ! -x .venv/bin/python ]; then
    "${PYTHON:-python3}" -m venv .venv
fi
.venv/bin/pip install --quiet --disable-pip-version-check --requirement tests/python/requirements.txt

step "build"
cargo build --release --locked --workspace --all-targets

step "lint"
scripts/lint.sh

step "Rust tests"
cargo test --release --locked --workspace --no-fail-fast

step "OpenAI client"
.venv/bin/python -m pytest -q tests/python
step "done"
