# Targets: setup demo test faults soak lint fmt proto up down — nothing else.
# Variables: PYTHON (interpreter), VENV (environment to make), SEED (demo, soak), ENGINES (demo), MINUTES (soak), PIP_FLAGS
# (for a mirror).
PYTHON ?= python3.11
VENV ?= .venv
SEED ?= 1
ENGINES ?= 1
MINUTES ?= 30
PIP_FLAGS ?=
BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(PIP_FLAGS)
READY := $(VENV)/.ready
TORCH := torch==2.13.0
# Tests of processes that wait for each other: one at a time. What is not listed runs on two cores at once.
TIMED := tests/contract/engine tests/contract/rollout_v1 tests/integration

.PHONY: setup demo test faults soak lint fmt proto up down
.DEFAULT_GOAL := demo

setup: $(READY) ## everything the embedded mode and the tests need, in $(VENV)

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "==> making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> installing torch (the largest download)"
	@$(PIP) --upgrade pip
	@$(PIP) $(TORCH)
	@echo "==> installing the services' packages"
	@$(PIP) $(TORCH) -e '.[buffer,reward,rollout,trainer,console,embedded,sglang-cpu,dev]'
	@echo "==> installing SGLang without its CUDA packages"
	@$(PIP) --no-deps sglang==0.5.23 xgrammar==0.2.7
	@$(PIP) --no-deps verl==0.9.1 tensordict==0.15.3
	@touch $(READY)

demo: $(READY) ## a small model learns arithmetic: SFT, then GRPO (SEED=1, ENGINES=1)
	@$(BIN)/python -m examples.first_run --seed $(SEED) --engines $(ENGINES)

test: $(READY) ## the default suite: no GPU, no network
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile $(TIMED:%=--ignore %) --ignore tests/faults
	@$(BIN)/python -m pytest -q $(TIMED)

faults: $(READY) ## processes killed, links cut and disks filled at every named moment
	@$(BIN)/python -m pytest -q tests/faults

soak: $(READY) ## kills of every tier while the demo learns; the ledger at the end (MINUTES=30, SEED=1)
	@$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --seed $(SEED)

lint: $(READY) ## style, types, imports, contract
	@$(BIN)/ruff format --check . && $(BIN)/ruff check .
	@$(BIN)/lint-imports --config .importlinter
	@$(BIN)/basedpyright --level error
	@cd proto && $(BIN)/buf lint && $(BIN)/buf format -d --exit-code

fmt: $(READY)
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .
	@cd proto && $(BIN)/buf format -w

proto: ## regenerate stubs from proto/ into proto/gen
	rm -rf proto/gen && mkdir -p proto/gen
	$(BIN)/python -m grpc_tools.protoc -I proto \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=proto/gen --grpc_python_out=proto/gen --mypy_out=quiet:proto/gen --mypy_grpc_out=quiet:proto/gen \
	  $$(find proto/tetrarch -name '*.proto' | sort)

up: $(READY) ## every tier on this machine, in the foreground
	@$(BIN)/tetrarch up

down: ## stop what `make up` started
	@$(BIN)/tetrarch down
