# Triptych. `make` alone lists the targets; README.md has the tour.
#
# Set-up is a dependency of everything that needs it: .venv from pyproject.toml and requirements/, redone when
# one of them changes or when it was interrupted (tools/setup.py), and the embedded model, which lies in
# $TRIPTYCH_HOME (default ~/.cache/triptych) and outlives `make clean`.

SHELL := /bin/sh
.DEFAULT_GOAL := help

# What a caller may set. PROMPT and MODEL may hold any character: they reach the shell through the environment
# alone, unexpanded. ARGS is split into words and added to the command.
PROMPT ?= What is the capital of France?
MODEL ?= embedded
ARGS ?=
export TRIPTYCH_MAKE_PROMPT := $(value PROMPT)
export TRIPTYCH_MAKE_MODEL := $(value MODEL)
unexport PROMPT MODEL ARGS

BIN := .venv/bin
RUNTIME := .venv/.installed-runtime
DEV := .venv/.installed-dev

# The first Python that the project supports and that can make a virtual environment.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)

# For what runs on a GPU machine as it is found: .venv where there is one, else the system's Python and its packages.
GPU_PYTHON ?= $(if $(wildcard $(DEV)),$(BIN)/python,python3)

##@ Run

.PHONY: serve
serve: $(RUNTIME) native $(if $(filter embedded,$(value MODEL)),model) ## Serve MODEL (embedded, a path or a hub id) until Ctrl-C; ARGS="--frontend.port=50051 …"
	@exec $(BIN)/triptych serve "$$TRIPTYCH_MAKE_MODEL" $(ARGS)

.PHONY: demo
demo: $(RUNTIME) native model ## Start the stack, stream the answer to PROMPT, stop
	@exec $(BIN)/triptych demo --prompt "$$TRIPTYCH_MAKE_PROMPT" $(ARGS)

.PHONY: bench
bench: $(RUNTIME) native model ## Measure: ARGS="throughput --help"
	@exec $(BIN)/triptych bench $(or $(ARGS),throughput)

.PHONY: bench-gpu
bench-gpu: ## Measure the GPU worker, with GPU_PYTHON alone: ARGS="--help"
	@PYTHONPATH=libs:kernels $(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

.PHONY: tune-gpu
tune-gpu: ## Measure tiles of the Triton kernels on this GPU and store the fastest, with GPU_PYTHON alone: ARGS="--help"
	@PYTHONPATH=libs:kernels $(GPU_PYTHON) -m tools.tune $(ARGS)

.PHONY: bench-peers
bench-peers: $(RUNTIME) native model ## Measure Triptych beside other engines, installed at first use (GBs): ARGS="--help"
	@exec $(BIN)/python -m benchmarks.peers $(ARGS)

##@ Set up

.PHONY: setup
setup: $(RUNTIME) native model ## What serving needs: .venv and the embedded model (serve and demo do it by themselves)

.PHONY: setup-dev
setup-dev: $(DEV) native model ## What testing and checking need on top

.PHONY: native
native: $(RUNTIME) ## Compile the native kernels, unless they are up to date (needs g++; without it plain torch serves)
	@$(BIN)/python -m triptych_kernels.cpu.build

.PHONY: model
model: $(RUNTIME) ## Fetch and convert the embedded model, unless it is there
	@$(BIN)/python -m triptych.hub embedded > /dev/null

$(RUNTIME) $(DEV): .venv/.installed-%: pyproject.toml setup.py $(wildcard requirements/*.txt) tools/setup.py
	@test -n "$(PYTHON)" || { \
	  echo "set-up: found no Python 3.11 to 3.13 with venv; on Debian: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) tools/setup.py $*

# The generator of the documentation's site.
DOCS := build/docs-venv

##@ Test and check

# Two processes, each of which takes whole files, so that what a file's tests share is set up once. Tests start hundreds of
# processes: without bytecode on disk each would compile the sources anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Three sets: the quick one proves every part, the thorough one what is left of each; the slow one says little more.
.PHONY: test
test: $(DEV) native model ## Run the quick tests, which prove every part; ARGS="tests/rpc -k signal", ARGS="-n0 --pdb"
	$(PYTEST) -m "not gpu and not slow and not thorough" $(ARGS)

.PHONY: test-thorough
test-thorough: $(DEV) native model ## Run the tests that `make test` leaves out, but the slow ones; ARGS as there
	$(PYTEST) -m "thorough and not gpu and not slow" $(ARGS)

BUSY_LOOPS ?= 4
.PHONY: test-loaded
test-loaded: $(DEV) native model ## Run all tests but the slow ones beside busy loops: BUSY_LOOPS=4; a test that fails only here is a defect
	tools/beside_busy_loops.sh $(BUSY_LOOPS) $(PYTEST) -m "not gpu and not slow" $(ARGS)

# Clients of others and what they need: their versions do not agree with those of .venv. PyTorch is the CPU build, of pip's
# configured index or else of PyTorch's own.
CLIENTS := build/clients-venv
CLIENTS_PIP := $(CLIENTS)/bin/pip install --quiet --no-deps --require-hashes
$(CLIENTS)/.installed: tests/clients/requirements.txt requirements/torch-cpu.txt
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS_PIP) -r requirements/torch-cpu.txt || \
	  $(CLIENTS_PIP) -r requirements/torch-cpu.txt --index-url https://download.pytorch.org/whl/cpu
	$(CLIENTS_PIP) -r tests/clients/requirements.txt
	touch $@

.PHONY: test-clients
test-clients: $(DEV) native model $(CLIENTS)/.installed ## Run clients of others, Python and JavaScript, against the stack (GBs)
	$(BIN)/python -m pytest tests/clients $(ARGS)

.PHONY: test-install
test-install: wheels ## Install the wheel in a scratch folder without a compiler, serve and ask, timed (1 GB, a minute)
	$(PYTHON) tools/test_install.py $(ARGS) dist/triptych-*.whl

SCENARIOS ?= 60
CLUSTER_SCENARIOS ?= 6
.PHONY: test-chaos
test-chaos: $(DEV) native model ## Break things under load: SCENARIOS=2000 in fake time, CLUSTER_SCENARIOS=6 with processes (docs/robustness.md)
	SCENARIOS=$(SCENARIOS) CLUSTER_SCENARIOS=$(CLUSTER_SCENARIOS) $(BIN)/python -m pytest -n 2 tests/chaos $(ARGS)

.PHONY: test-all
test-all: $(DEV) native model ## Run all tests that need no GPU, of every instruction set of this CPU, and some under sanitizers
	$(BIN)/python -m triptych_kernels.cpu.build --all
	$(PYTEST) -m "not gpu" --hypothesis-profile=random $(ARGS)
	$(MAKE) --no-print-directory sanitize-cpu ARGS=

.PHONY: test-models
test-models: $(DEV) native ## Examine every decoder and encoder of transformers, and compare with what is known; 20 minutes
	PYTHONPATH=libs:kernels:. $(BIN)/python -m tests.worker.models.census --verify $(ARGS)
	PYTHONPATH=libs:kernels:. $(BIN)/python -m tests.worker.models.encoder_census --verify $(ARGS)

.PHONY: test-gpu
test-gpu: ## Run the tests that need a CUDA device, with GPU_PYTHON alone: no set-up, no network
	$(GPU_PYTHON) tools/test_gpu.py $(ARGS)

# The tests whose calls go through `launch`; those of recorded programs need the addresses of this process.
TESTS_FOR_ARM := tests/kernels/ops $(addprefix tests/kernels/cpu/test_,attention.py quantized_kv.py quantized_linear.py sample.py widened_linear.py)

.PHONY: test-arm
test-arm: $(DEV) ## Run the tests of native kernels with those for ARM, cross-compiled, under QEMU; ARGS="-k neon_bf16"
	$(BIN)/python -m pytest -p tests.kernels.arm.plugin $(TESTS_FOR_ARM) $(ARGS)

.PHONY: sanitize-cpu
sanitize-cpu: $(DEV) ## Run tests of the native kernels under GCC's address and thread sanitizers; ARGS="address tests/kernels/cpu"
	$(BIN)/python tools/sanitize_cpu.py $(ARGS)

.PHONY: sanitize-gpu
sanitize-gpu: ## Launch every Triton kernel at a small size under compute-sanitizer; ARGS="racecheck"
	PYTHON=$(GPU_PYTHON) tools/sanitize_gpu.sh $(ARGS)

.PHONY: ci
ci: ## Everything that must hold before a merge
	@$(MAKE) --no-print-directory -j2 --output-sync=target verify
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-thorough

.PHONY: verify
verify: verify-lint verify-commits verify-docstrings verify-sizes verify-modules verify-callers verify-imports verify-config verify-types verify-protos verify-native verify-calls verify-docs ## All checks but the tests

.PHONY: verify-lint
verify-lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.PHONY: verify-docstrings
verify-docstrings: $(DEV) ## Docstrings begin with a sentence, not with a fragment ("Of …"); few idioms in sources and docs
	$(BIN)/python tools/verify_docstrings.py

.PHONY: verify-commits
verify-commits: $(DEV) ## Subjects of commits: `area: imperative`, one idea, at most 72 characters; ARGS="--base main"
	$(BIN)/python tools/verify_commits.py $(ARGS)

.PHONY: verify-types
verify-types: $(DEV) ## mypy, strict
	$(BIN)/mypy libs kernels tools benchmarks

.PHONY: verify-imports
verify-imports: $(DEV) ## import-linter: who may import whom
	$(BIN)/lint-imports --no-logo --cache-dir build/import-linter

.PHONY: verify-sizes
verify-sizes: $(DEV) ## Files stay within 600 lines (above 400: named), functions 60, classes 20 methods, constructors 10 arguments
	$(BIN)/python tools/verify_sizes.py

.PHONY: verify-modules
verify-modules: $(DEV) ## No import circles; few modules below 150 lines with one importer
	$(BIN)/python tools/verify_modules.py

.PHONY: verify-callers
verify-callers: $(DEV) ## Nothing lands without a caller
	$(BIN)/python tools/verify_callers.py

.PHONY: verify-protos
verify-protos: $(DEV) ## buf: lint and breaking changes; stubs: fresh, and importable with protobuf 6 and 7
	$(BIN)/python tools/protos.py verify

.PHONY: verify-config
verify-config: $(DEV) ## config/example.yaml says what the code says
	$(BIN)/python tools/example_config.py --check

.PHONY: verify-native
verify-native: $(DEV) ## The native kernels compile for every instruction set of this architecture
	$(BIN)/python -m triptych_kernels.cpu.build --check

.PHONY: verify-calls
verify-calls: $(DEV) ## Python calls per engine step, streamed token and request stay below the marks in tests/calls/marks.toml
	$(BIN)/python -m tests.calls.count

.PHONY: verify-docs
verify-docs: $(DEV) $(DOCS)/.installed ## Links, anchors and widths of pages, heads of decisions, tables from the code; the site builds
	$(BIN)/python -m tools.docs verify
	@$(BIN)/python -m tools.docs site

##@ Fix

.PHONY: fix
fix: fix-lint fix-protos fix-config fix-docs ## Everything that a verify target can mend

.PHONY: fix-lint
fix-lint: $(DEV) ## ruff: mend and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: fix-protos protos
fix-protos: protos
protos: $(DEV) ## Regenerate the stubs from protos/
	$(BIN)/python tools/protos.py generate

.PHONY: protos-release
protos-release: $(DEV) ## Take the public protos of now as those that later ones must not break
	$(BIN)/python tools/protos.py release

.PHONY: fix-config
fix-config: $(DEV) ## Rewrite config/example.yaml
	$(BIN)/python tools/example_config.py

.PHONY: fix-docs
fix-docs: $(DEV) ## Rewrite the pages and tables of docs/ that are made from the code
	$(BIN)/python -m tools.docs fix

.PHONY: oracle
oracle: $(DEV) model ## Record anew the answers that the tests compare with (minutes)
	$(BIN)/python tests/oracle/record.py $(ARGS)

.PHONY: lock
lock: ## Write requirements/ and the other locked requirements anew: after a change of constraints.txt or pyproject.toml
	@$(PYTHON) tools/lock.py

.PHONY: wheels
wheels: $(DEV) native ## Build dist/: the source distribution, and the wheel with the native kernels of this architecture
	$(BIN)/python tools/wheels.py build

.PHONY: release
release: $(DEV) ## Check and tag VERSION, with notes out of CHANGELOG.md; ARGS=--check changes nothing
	@$(BIN)/python -m tools.release "$(VERSION)" $(ARGS)

##@ Document

# The generator of the site has an environment of its own: nothing that serves or tests needs its packages.
$(DOCS)/.installed: tools/docs/requirements.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip install --quiet --no-deps --require-hashes --only-binary :all: -r $<
	touch $@

.PHONY: docs
docs: $(DEV) $(DOCS)/.installed ## Build the documentation, with reference pages made from the code, into build/site
	@$(BIN)/python -m tools.docs site
	@echo "build/site/index.html"

##@ Clean

.PHONY: clean
clean: ## Remove what was built; .venv and the model cache stay
	rm -rf build dist triptych.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -print | xargs rm -rf

.PHONY: distclean
distclean: clean ## The same, and .venv
	rm -rf .venv

.PHONY: help
help:
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+( [a-z-]+)*:.*## / { split($$1, names, " "); printf "  %-16s %s\n", names[1], $$2 }' $(MAKEFILE_LIST)
