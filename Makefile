# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.PHONY: demo test test-all lint

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

test: lint
	$(BIN)/pytest

test-all: lint
	$(BIN)/pytest -m ''

lint: $(READY)
	$(BIN)/ruff check
