# Every target makes its own environment; nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Scripts beside the house: that what they call is there, and takes what it is given.
LOOSELY := $(addprefix --disable-error-code ,union-attr arg-type operator misc assignment call-overload no-untyped-def)

.PHONY: demo test test-all test-clusters test-gpu lint docs clean

demo: $(STAMP)
	$(BIN)/shardwise train

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-all: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --all

# Slurm's and Ray's own daemons, sshd, network namespaces, object stores, long tests; what is not installed is skipped with a sentence.
test-clusters: $(STAMP)
	$(BIN)/python -m pytest tests/test_slurm.py tests/test_ray.py tests/test_submit.py tests/test_nodes.py \
		tests/test_run_store.py tests/test_preflight.py tests/test_tutorial_tune.py \
		tests/test_trainer.py::test_every_way_to_start_gives_the_same_losses \
		tests/test_embedding.py::test_the_example_trains_learns_and_goes_on_elsewhere \
		tests/test_train.py::test_under_torchrun_it_joins_that_world_and_sample_writes_text

# Where nothing can be installed but all packages are there: make test-gpu STAMP= BIN=/usr/bin
test-gpu: $(STAMP)
	$(BIN)/python3 -m pytest tests/test_gpu.py -n 6

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=benchmarks $(BIN)/mypy --explicit-package-bases $(LOOSELY) benchmarks/*.py tools/*.py
	$(BIN)/python tools/house.py

docs: $(STAMP)
	$(BIN)/python tools/docs.py
	$(BIN)/python tools/plots.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs build *.egg-info
