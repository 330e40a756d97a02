# make run: the first run.   make test: the whole fast suite.   Everything lives in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
TESTS ?=
MUTANTS ?=
BIN := $(VENV)/bin

.PHONY: help setup run federation test test-all mutants lint format clean

help:
	@echo "make run       train on an embedded data set and print table and report"
	@echo "make federation  four made-up hospitals as processes of their own, over TLS on this host"
	@echo "make test      the test suite          make test-all  with the slow tests"
	@echo "make mutants   change one statement at a time: does a test notice?  (an hour)"
	@echo "make lint      ruff, mypy, advisories  make format    format and fix"
	@echo "make setup     build .venv for developers if it is missing or stale; make run installs less"

setup: $(VENV)/.ready

# Without bytecode: of large packages a run imports a part, which is compiled then.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# What running needs. Stale when what must be installed has changed, or when the interpreter behind .venv is gone.
$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fedveil needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python && $(BIN)/python -c '' 2>/dev/null \
	  || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); } \
	  || { rm -rf $(VENV); echo "cannot make .venv: on Debian or Ubuntu, apt-get install python3-venv"; exit 2; }
	$(PIP) torch
	$(PIP) -e .
	@touch $@

# What developing needs besides.
$(VENV)/.ready: $(VENV)/.run
	$(PIP) -e '.[dev]'
	@touch $@

run: $(VENV)/.run
	@$(BIN)/fedveil run digits

federation: setup
	@$(BIN)/fedveil federation demo "$$(mktemp -d)/demo"

# With bytecode kept, or every worker compiles all tests anew.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: setup
	@$(BIN)/python -m pytest -q -n 2 -m "not slow" $(TESTS)

test-all: setup
	@$(BIN)/python -m pytest -q -n 2 $(TESTS)

mutants: setup
	@$(BIN)/python -m tests.mutants $(MUTANTS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@! git grep -I -n -e '-----BEGIN [A-Z ]*PRIVATE KEY''-----' -e 'AKIA[0-9A-Z]\{16\}'
	@$(BIN)/python .ci/advisories $(BIN)/pip-audit
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir $(VENV)/site

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
