# `make demo` and `make test` are all a newcomer needs; each sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV := $(shell command -v uv 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test check format lint types selftest prove bench clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

# uv where it is there and works; else what Python brings along.
$(READY): pyproject.toml
	@{ [ -n "$(UV)" ] \
	  && $(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV) \
	  && $(UV) pip install --quiet --python $(BIN)/python --editable . --group dev; } \
	|| { $(PYTHON) -m venv $(VENV) \
	  && $(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1" \
	  && $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . --group dev; }
	@touch $@

demo: $(READY)  ## walk one training job through its whole life, for real, at no cost
	$(BIN)/gpuwarden demo $(ARGS)

test: $(READY)  ## run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not prove" $(ARGS)

format: $(READY)  ## rewrite the code in the house style
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

types: $(READY)
	$(BIN)/mypy

selftest: $(READY)
	$(BIN)/python -m evals selftest

check: lint types test selftest  ## everything a change must pass

prove: $(READY)  ## the slow proofs
	$(BIN)/python -m pytest -n 2 --dist worksteal -m prove $(ARGS)

bench: $(READY)  ## measure, each figure as a ratio to a named peer in the same run
	@for file in bench/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist build
