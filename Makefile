VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint bench setup

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(VENV)/bin/recast fit --config configs/signboard/demo.yaml

test: setup
	$(PYTHON) -m pytest -m "not slow"

test-all: setup
	$(PYTHON) -m pytest

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: setup
	$(PYTHON) benchmarks/rollout.py
