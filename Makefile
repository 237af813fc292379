# `make demo` and `make test` need only Python 3.11 or newer and make; the rest is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help setup demo test check clean

help:
	@echo "make demo    train five methods on CartPole and the exact language, and write demo/report.html"
	@echo "make test    run the tests"
	@echo "make check   lint, format, types, architecture"
	@echo "make setup   only install (into .venv)"
	@echo "make clean   remove .venv and what was generated"

setup: .venv/installed-dev

demo: .venv/installed
	@$(BIN)/apportion demo

# Two processes that each use all cores would wait for one another in every matrix product.
test: .venv/installed-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: .venv/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/architecture

# Each stamp is newer than what it was made from: installation runs once, and again when a requirement changes.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv ..."
	@$(PIP) -e .
	@touch $@

# torch by its own line: it is pinned without a build label, so that a CPU build satisfies it too.
.venv/installed-dev: .venv/installed
	@echo "installing what the tests need ..."
	@$(PIP) torch==2.13.0
	@$(PIP) -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv build demo figures runs .mypy_cache .ruff_cache .hypothesis src/*.egg-info
