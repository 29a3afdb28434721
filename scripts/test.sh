#!/usr/bin/env bash
# Runs every test: installs what they need, builds once, lints, Rust tests, Python client tests.
set -euo pipefail
cd "$(dirname "$0")/.."

have() { command -v "$1" >/dev/null 2>&1; }
step() { printf '\n== %s (%ds)\n' "$1" "$SECONDS"; }

step "tools"
missing=()
have etcd || missing+=(etcd-server)
PATH="$PATH:/sbin:/usr/sbin" have ip || missing+=(iproute2)
PATH="$PATH:/sbin:/usr/sbin" ldconfig -p | grep 'libucp\.so\.0' >/dev/null || missing+=(libucx0)
if [ "${#missing[@]}" -gt 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get update -qq
    $sudo apt-get install -y -qq "${missing[@]}"
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

step "UCX of another version"
BATON_TEST_UCX_LIBRARY=$(echo "$PWD"/.venv/lib/python*/site-packages/libucx/lib/libucp.so.0)
export BATON_TEST_UCX_LIBRARY
# Of the whole workspace, so that nothing is built again with other features.
cargo test --release --locked --workspace --test handoff
cargo test --release --locked --workspace --test e2e deadlines::

step "OpenAI client"
.venv/bin/python -m pytest -q tests/python
step "done"
