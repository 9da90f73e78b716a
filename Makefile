# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --editable
DEMO := .venv/.installed-demo
TEST := .venv/.installed-test
DOCS := .venv/.installed-docs

.PHONY: demo test test-all lint bench docs

$(DEMO): pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) '.[demo]'
	touch $@

# The same environment, and what the tests need besides.
$(TEST): $(DEMO)
	$(PIP) '.[test]'
	touch $@

$(DOCS): $(DEMO)
	$(PIP) '.[docs]'
	touch $@

# Handwritten digits, a FLatten-PVT that learns them in a few minutes, and its accuracy on held-out ones.
demo: $(DEMO)
	$(BIN)/python -m flatten_zoo.samples.digits data/digits
	rm -rf output/train/quickstart
	$(BIN)/python train.py --config configs/quickstart.yaml
	$(BIN)/python validate.py --checkpoint output/train/quickstart

PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal --durations 25

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ''

lint: $(TEST)
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy

# The zoo against a literal transcription of its equations; on an idle machine.
bench: $(DEMO)
	$(BIN)/python -m benchmarks --compile --seconds 2

# The site of the documentation, in site/.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
