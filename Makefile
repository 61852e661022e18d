# Every target makes its own environment; nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

# Scripts beside the house: that what they call is there, and takes what it is given.
LOOSELY := $(addprefix --disable-error-code ,union-attr arg-type operator misc assignment call-overload no-untyped-def)

# Each of the suite's many processes would compile the package anew, where the environment says so.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-clusters test-share test-gpu reach mutants lint docs clean

demo: $(STAMP)
	$(BIN)/shardwise train

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-all: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --all

# Slurm's and Ray's own daemons, sshd, network namespaces, object stores, the wheel, the site, long tests: what is marked
# `cluster`. What is not installed is skipped with a sentence.
test-clusters: $(DOCS_STAMP)
	$(BIN)/python -m pytest -m cluster

# A part of the cases that `make test` and `make test-clusters` leave out, by the hash of the commit: landing after
# landing, everything runs.
PARTS := 10
PART = $(shell echo $$((0x$$(git rev-parse --short=7 HEAD) % $(PARTS))))
test-share: $(DOCS_STAMP)
	$(BIN)/python -m pytest --share $(PART)/$(PARTS) -m "not cluster" -n auto --maxprocesses 4 --dist worksteal
	$(BIN)/python -m pytest --share $(PART)/$(PARTS) -m cluster || test $$? -eq 5  # a part may have none of them

# How many small changes of the code the suite notices; CONTRIBUTING.md says more. With SUITE=--all, that of test-all.
SUITE :=
reach: $(STAMP)
	mkdir -p build && rm -f build/reach.jsonl
	$(BIN)/python -m pytest $(SUITE) -n auto --maxprocesses 4 --dist worksteal --reach build/reach.jsonl

mutants: $(STAMP)
	$(BIN)/python -m pytest $(SUITE) --mutants 300 --reach-file build/reach.jsonl --report build/mutants.jsonl

# Where nothing can be installed but all packages are there: make test-gpu STAMP= BIN=/usr/bin
test-gpu: $(STAMP)
	$(BIN)/python3 -m pytest tests/test_gpu.py -n 6

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=benchmarks $(BIN)/mypy --explicit-package-bases $(LOOSELY) benchmarks/*.py tools/*.py
	$(BIN)/python tools/house.py

# The generated parts of the pages, then the site from them: `python3 -m http.server -d build/site` shows it.
docs: $(DOCS_STAMP)
	$(BIN)/python tools/docs.py
	$(BIN)/python tools/plots.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	$(BIN)/python tools/check_site.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $(DOCS_STAMP)

clean:
	rm -rf $(VENV) runs build *.egg-info
