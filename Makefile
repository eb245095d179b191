# make demo    sets up and trains a private model on the embedded digits
# make test    sets up, checks style and types, runs the tests
# make test-full  runs every case, compiled as users compile: 40 minutes
# make docs    sets up and makes the site: docs/_build/index.html
# make dist    sets up and builds archive and wheel: dist/
# make bench-peers  sets up the peers too and times them next to tanager: hours
# make bench-gpu DATA=DIR  sets up for a GPU and measures it: runs/on_gpu, 25 minutes
# Another interpreter gets an environment of its own: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
SET_UP := $(VENV)/.set-up

# Each of the processes of a test run would compile the same modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest test-full docs dist bench-peers bench-gpu lint format clean

demo: $(SET_UP)
	$(BIN)/tanager train --out runs/demo

test: lint pytest

# First all strategies against the oracle, compiled as users compile (tests/conftest.py).
pytest: $(SET_UP)
	TANAGER_TESTS=full $(BIN)/pytest tests/clipping/test_clipped_grad.py
	$(BIN)/pytest --ignore=tests/clipping/test_clipped_grad.py

test-full: lint
	TANAGER_TESTS=full $(BIN)/pytest

docs: $(SET_UP)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs docs/_build

dist: $(SET_UP)
	$(BIN)/hatchling build -d dist

PEERS := benchmarks/peers
PEERS_OUT ?= runs/peers.json

bench-peers: $(SET_UP) .venv-opacus/.set-up .venv-jax-privacy/.set-up
	$(BIN)/python $(PEERS)/run.py --out $(PEERS_OUT)
	$(BIN)/python $(PEERS)/tables.py $(PEERS_OUT)

bench-gpu: $(SET_UP) .venv-opacus/.set-up
	$(BIN)/python -m pip install --quiet --editable ".[cuda]"
	$(BIN)/python benchmarks/on_gpu.py --out runs/on_gpu $(if $(DATA),--data $(DATA))

.venv-opacus/.set-up: $(PEERS)/environments/opacus.txt
	$(PYTHON) -m venv .venv-opacus
	.venv-opacus/bin/python -m pip install --quiet --requirement $<
	touch $@

# With tanager's models: all that runs on JAX is given the same.
.venv-jax-privacy/.set-up: $(PEERS)/environments/jax-privacy.txt pyproject.toml
	$(PYTHON) -m venv .venv-jax-privacy
	.venv-jax-privacy/bin/python -m pip install --quiet --requirement $< --editable .
	touch $@

lint: $(SET_UP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/python tools/plain_words.py

format: $(SET_UP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(SET_UP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
		--editable ".[dev]"
	touch $@

clean:
	rm -rf docs/_build .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist
