# The commands of this project. Each does its own set-up, also on a machine that has only Python and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-long test-cluster test-federation lint docs docs-only bench bench-gpu clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

demo: $(READY)
	$(BIN)/equipoise demo

# One torch thread per process: two test processes on two cores, never more threads than cores.
test: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not (long or federation or cluster or docs)"

# Federations of real processes, and audits by fresh noise.
test-long: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -m long tests

# Ray clusters on this machine: killed workers and nodes, and every part of the catalogue.
test-cluster: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster tests

# A federation as it is operated: five machines in network namespaces. Needs Linux, root, nginx and curl, else it is skipped.
test-federation: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -s -m federation tests

# The documentation site, into docs/_build/html: any static host serves that folder. Warnings are errors. Notebooks and examples
# are executed again only if they or the library changed. The second command opens pages in a browser without a network.
docs: docs-only
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m docs tests/docs tests/test_docs.py

docs-only: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -a -W --keep-going -q docs docs/_build/html

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/speed.py

# Needs torch and numpy alone and sets nothing up, so that it runs on a bare GPU machine.
bench-gpu:
	PYTHONPATH=src $(PYTHON) benchmarks/speed.py --device cuda

clean:
	rm -rf $(VENV) docs/_build docs/_cache docs/gallery docs/reference/generated demo bench .mypy_cache .ruff_cache .hypothesis
