# Targets: setup proto fmt lint test demo up down
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: proto
proto: ## regenerate stubs from proto/ into proto/gen
	rm -rf proto/gen && mkdir -p proto/gen
	$(BIN)/python -m grpc_tools.protoc -I proto \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=proto/gen --grpc_python_out=proto/gen --mypy_out=quiet:proto/gen --mypy_grpc_out=quiet:proto/gen \
	  $$(find proto/tetrarch -name '*.proto' | sort)
