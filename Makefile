# One task runner, for people and CI alike. `make help` lists the tasks.
# Every task sets up what it needs from nothing; a stamp remembers that it has been done.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
ARGS ?=

# `$(call timed,name,command)` runs a command and says how long it took.
define timed
@begin=$$(date +%s); echo "== $(1)"; ( $(2) ); echo "== $(1): $$(( $$(date +%s) - begin )) s"
endef

.PHONY: help setup demo test test-fast lint format bench bench-exchange bench-peers soak clean

help: ## List the tasks
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "everstep needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call timed,torch,$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)')
	$(call timed,everstep and its tools,$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]')
	@touch $@

setup: $(READY) ## Make the virtual environment and install everstep and its tools into it

demo: $(READY) ## Kill a rank in mid-backward, raise in another, and prove the run equal to a clean one
	@$(BIN)/everstep prove --nproc-per-node 4 \
		--fault kill:rank=1,step=5,at=backward \
		--fault raise:rank=2,step=9,at=forward \
		$(ARGS) examples/gpt.py

# The tests come last and in one pytest: its count line is the last line printed.
test: lint ## Everything: lint, then all tests, two at once; the last line is pytest's count
	@echo "== tests"
	@$(BIN)/python -m pytest --durations=10 -n 2 --dist loadfile $(ARGS)

test-fast: $(READY) ## Tests for the inner loop, under 3 minutes: all that is not marked slow
	@$(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile $(ARGS)

lint: $(READY) ## Style, types, and who may import whom
	$(call timed,ruff,$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .)
	$(call timed,mypy,$(BIN)/mypy)
	$(call timed,imports,$(BIN)/lint-imports --no-logo)

format: $(READY) ## Bring the sources into ruff's form
	@$(BIN)/ruff check --quiet --fix-only . && $(BIN)/ruff format .

bench: $(READY) ## Measure the bars: recovery, cost of a collective, cost of a step
	@shopt -s nullglob; found=(benchmarks/bench_*.py); \
	if (( $${#found[@]} == 0 )); then echo "there is no benchmarks/bench_*.py" >&2; exit 1; fi; \
	for bench in "$${found[@]}"; do echo "== $$bench"; $(BIN)/python "$$bench" $(ARGS); done

soak: $(READY) ## 100,000 simulated schedules of the core; ARGS='--seed N' tells one of them
	@$(BIN)/python -m tests.simulation.soak $(ARGS)

bench-exchange: $(READY) ## Measure the exchange of addresses beside torch's TCPStore; ARGS=ROUNDS
	@$(BIN)/python benchmarks/bench_exchange.py $(ARGS)

bench-peers: $(READY) ## Measure everstep beside torchrun, NVRx and torchft; writes docs/reference/peers.md
	@$(BIN)/python benchmarks/peers/bench.py --publish $(ARGS)

clean: ## Remove what the tasks made: environment, caches, runs
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis everstep-runs dist build/peers
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
