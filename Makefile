# make demo    sets up and trains a private model on the embedded digits
# make test    sets up, checks style and types, runs every test
# make docs    sets up and makes the site: docs/_build/index.html
# Another interpreter gets an environment of its own: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
SET_UP := $(VENV)/.set-up

.PHONY: demo test docs lint format clean

demo: $(SET_UP)
	$(BIN)/tanager train --out runs/demo

test: lint
	$(BIN)/pytest

docs: $(SET_UP)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build

lint: $(SET_UP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(SET_UP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(SET_UP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf docs/_build .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist
