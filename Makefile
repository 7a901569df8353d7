# `make demo` and `make test` are all a newcomer needs; each sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV := $(shell command -v uv 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test tests check format lint types selftest prove gguf attacks corruption bench docs picture wheel clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

# uv and its lock file where uv is there and the lock is current; else what Python brings along.
SYNC = UV_PROJECT_ENVIRONMENT=$(VENV) $(UV) sync --quiet --locked --inexact --python $(PYTHON)
TESTS = $(BIN)/python -m pytest -n 2 --dist worksteal
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(READY): pyproject.toml $(wildcard uv.lock)
	@{ [ -n "$(UV)" ] && $(SYNC); } \
	|| { $(PYTHON) -m venv $(VENV) && $(PIP) --upgrade "pip>=25.1" && $(PIP) --editable . --group dev; }
	@touch $@

$(VENV)/.docs: $(READY)
	@{ [ -n "$(UV)" ] && $(SYNC) --group docs; } || $(PIP) --group docs
	@touch $@

demo: $(READY)  ## walk one training job through its whole life, for real, at no cost
	$(BIN)/gpuwarden demo $(ARGS)

test: $(READY)  ## run the quick tests
	$(TESTS) -m "not slow and not prove" $(ARGS)

tests: $(READY)
	$(TESTS) -m "not prove" $(ARGS)

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

check: lint types tests selftest  ## everything a change must pass

prove: $(READY)  ## the slow proofs
	$(TESTS) -m prove $(ARGS)

gguf: $(READY)  ## build llama.cpp once (minutes), and write and prove real GGUF files with it
	@made="$$($(BIN)/python tools/llama_cpp.py)" && GPUWARDEN_LLAMA_CPP="$$made" \
	$(TESTS) -m prove -k "gguf or conversion" tests/test_trainers_runs.py tests/test_trainers_lives.py $(ARGS)

attacks: $(READY)  ## play every attack and print a table of what came of each
	$(BIN)/python tools/attacks.py $(ARGS)

corruption: $(READY)  ## damage a file of every format in every way and print what notices
	$(BIN)/python tools/corruption_matrix.py $(ARGS)

bench: $(READY)  ## measure, each figure as a ratio to a named peer in the same run
	@for file in bench/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

docs: $(VENV)/.docs  ## build the documentation site into site/; a warning or a broken link fails it
	$(BIN)/python tools/build_site.py

picture: $(READY)  ## run the demo and draw docs/demo.svg from what it printed
	$(BIN)/python tools/picture.py docs/demo.svg

wheel: $(READY)  ## build the wheel into dist/
	$(BIN)/python -m hatchling build --target wheel

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist build site .cache
