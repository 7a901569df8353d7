# `make demo` and `make test` are all a newcomer needs; each sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV := $(shell command -v uv 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo test slow rest texts check format lint types selftest prove proofs endurance evidence gguf ray engines kube sky real lock newest attacks corruption bench docs picture wheel bundle release-check clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

# uv and its lock file where uv is there and the lock is current; else what Python brings along.
SYNC = UV_PROJECT_ENVIRONMENT=$(VENV) $(UV) sync --quiet --locked --inexact --python $(PYTHON)
# Tests start Python hundreds of times: without kept bytecode each start compiles what it imports again.
unexport PYTHONDONTWRITEBYTECODE
# They also wait much of their time for processes and servers: two processors have work for three.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
TESTS = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
CONSTRAINTS ?= constraints.txt
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))

$(READY): pyproject.toml $(wildcard uv.lock constraints.txt)
	@{ [ -n "$(UV)" ] && $(SYNC); } \
	|| { $(PYTHON) -m venv $(VENV) && $(PIP) --upgrade "pip>=25.1" && $(PIP) --editable . --group dev; }
	@touch $@

$(VENV)/.docs: $(READY)
	@{ [ -n "$(UV)" ] && $(SYNC) --group docs; } || $(PIP) --group docs
	@touch $@

$(VENV)/.release: $(READY)
	@{ [ -n "$(UV)" ] && $(SYNC) --group release; } || $(PIP) --group release
	@touch $@

real: $(READY)
	@$(PIP) torch && $(PIP) --group real

lock:  ## write uv.lock again, and constraints.txt, which says the same to pip
	$(UV) lock $(ARGS)
	$(UV) export --quiet --locked --all-groups --all-extras --no-emit-project --no-hashes --no-annotate --no-header > constraints.txt

newest: clean  ## run the tests with the newest releases that pyproject.toml allows, real libraries included
	$(MAKE) UV= CONSTRAINTS= real test slow

demo: $(READY)  ## walk one training job through its whole life, for real, at no cost
	@$(BIN)/gpuwarden demo $(ARGS)

test: $(READY)  ## run the quick tests
	$(TESTS) -m "not slow and not prove" $(ARGS)

slow: $(READY)
	$(TESTS) -m "slow and not prove" $(ARGS)

texts: $(READY)  ## write the golden files tests/texts again; review the difference
	$(TESTS) -m texts --texts $(ARGS)

format: $(READY)  ## rewrite the code in the house style
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/vulture

types: $(READY)
	$(BIN)/mypy

selftest: $(READY)
	$(BIN)/python -m evals selftest

check: lint types test slow selftest  ## everything a change must pass

RAY_TESTS = tests/backends/test_ray.py
# One server of each serves a process, so these run apart from the others, one file on each worker.
ENGINE_TESTS = $(RAY_TESTS) tests/backends/test_sky_real.py tests/backends/test_sky.py \
	tests/backends/test_sky_jobs.py tests/providers/test_sky.py tests/providers/test_sky_jobs.py \
	tests/lifecycle/test_sky_jobs.py
ENGINES = $(abspath .cache/engines)
RAY = $(or $(GPUWARDEN_RAY),$(ENGINES)/ray/bin/ray)
SKY = $(or $(GPUWARDEN_SKY_PYTHON),$(ENGINES)/sky/bin/python)

prove: $(READY)  ## the slow proofs
	$(TESTS) -m prove $(addprefix --ignore=,$(ENGINE_TESTS)) $(ARGS)

proofs: $(READY)  ## the slow proofs that protect money and data, which CI runs
	$(TESTS) -m "prove and protects" $(addprefix --ignore=,$(ENGINE_TESTS)) $(ARGS)

# What CI runs after the quick tests: one run, because each start reads all tests, and at its end workers are idle. These
# wait longer, so one more worker.
ifeq ($(origin WORKERS),file)
rest: WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
endif
rest: $(READY)
	$(TESTS) -m "(slow and not prove) or (prove and protects)" $(addprefix --ignore=,$(ENGINE_TESTS)) $(ARGS)

endurance: $(READY)  ## the proofs that repeat themselves, in full: hundreds of kills and cuts, a gigabyte, minutes away
	GPUWARDEN_ENDURANCE=1 GPUWARDEN_TEST_PATIENCE=10 $(TESTS) -m endurance $(ARGS)

evidence: $(READY)  ## play every trial behind the README's evidence and compare each
	GPUWARDEN_EVIDENCE=all $(TESTS) -m prove tests/evals/test_evidence.py $(ARGS)

gguf: $(READY)  ## build llama.cpp once (minutes), and write and prove real GGUF files with it
	@made="$$($(BIN)/python tools/llama_cpp.py)" && GPUWARDEN_LLAMA_CPP="$$made" \
	$(TESTS) -m prove -k "gguf or conversion" tests/trainers/test_runs.py tests/trainers/test_bad_input.py tests/trainers/test_lives.py $(ARGS)

$(ENGINES)/ray/bin/ray $(ENGINES)/sky/bin/python:
	tools/install_engines.sh $(ENGINES) $(word 1,$(subst /, ,$(subst $(ENGINES)/,,$@)))

ray: $(READY) $(RAY)
	GPUWARDEN_RAY=$(RAY) $(BIN)/python -m pytest $(RAY_TESTS) $(ARGS)

engines: $(READY) $(RAY) $(SKY)  ## run jobs on a real Ray and SkyPilot, as root (installs them once)
	GPUWARDEN_RAY=$(RAY) GPUWARDEN_SKY_PYTHON=$(SKY) \
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ENGINE_TESTS) $(ARGS)

kube: $(READY)  ## build a real kube-apiserver once (ten minutes, on Debian 12), and run jobs' whole lives on it
	@made="$$($(BIN)/python tools/kube_apiserver.py)" && GPUWARDEN_KUBE="$$made" \
	$(BIN)/python -m pytest -m prove tests/backends/test_kubernetes_real.py $(ARGS)

sky: $(READY) $(SKY)  ## launch a job's whole life on a real Slurm cluster through SkyPilot (minutes; needs Slurm, sshd and PyPI)
	GPUWARDEN_SKY_PYTHON=$(SKY) GPUWARDEN_SKY_SLURM=1 \
	$(BIN)/python -m pytest -m prove tests/backends/test_sky_slurm.py $(ARGS)

attacks: $(READY)  ## play every attack and print a table of what came of each
	$(BIN)/python tools/attacks.py $(ARGS)

corruption: $(READY)  ## damage a file of every format in every way and print what notices
	$(BIN)/python tools/corruption_matrix.py $(ARGS)

bench: $(READY)  ## measure, each figure as a ratio to a named peer in the same run, in under ten minutes
	$(BIN)/python -m bench $(ARGS)

docs: $(VENV)/.docs  ## build the documentation site into site/; a warning or a broken link fails it
	$(BIN)/python tools/build_site.py

picture: $(READY)  ## run the demo and draw docs/demo.svg from what it printed
	$(BIN)/python tools/picture.py docs/demo.svg

wheel: $(READY)  ## build the wheel into dist/
	$(BIN)/python -m hatchling build --target wheel

bundle: $(READY)  ## build the MCPB bundle into dist/
	$(BIN)/python tools/bundle.py dist

release-check: $(VENV)/.release  ## build a release twice, check it, and run the demo from its wheel in an empty environment
	tools/release_check.sh

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist build site .cache
