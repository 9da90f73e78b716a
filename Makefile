# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.PHONY: demo test test-all lint

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

# Handwritten digits, a FLatten-PVT that learns them in a few minutes, and its accuracy on held-out ones.
demo: $(READY)
	$(BIN)/python -m flatten_zoo.training.digits data/digits
	rm -rf output/train/quickstart
	$(BIN)/python train.py --config configs/quickstart.yaml
	$(BIN)/python validate.py --checkpoint output/train/quickstart

test: lint
	$(BIN)/pytest

test-all: lint
	$(BIN)/pytest -m ''

lint: $(READY)
	$(BIN)/ruff check
