# Every target makes its own environment; nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

# Scripts beside the house: that what they call is there, and takes what it is given.
LOOSELY := $(addprefix --disable-error-code ,union-attr arg-type operator misc assignment call-overload no-untyped-def)

.PHONY: demo test test-all test-clusters test-gpu lint docs clean

demo: $(STAMP)
	$(BIN)/shardwise train

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-all: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --all

# Slurm's and Ray's own daemons, sshd, network namespaces, object stores, the wheel, the site, long tests; what is not
# installed is skipped with a sentence.
test-clusters: $(DOCS_STAMP)
	$(BIN)/python -m pytest tests/test_slurm.py tests/test_ray.py tests/test_submit.py tests/test_nodes.py \
		tests/test_run_store.py tests/test_preflight.py tests/test_tutorial_tune.py \
		tests/test_packaging.py tests/test_site.py \
		tests/test_page_views.py::test_every_page_fits_every_screen \
		tests/test_cluster_environment.py::test_where_says_what_it_read_that_from \
		tests/test_trainer.py::test_every_way_to_start_gives_the_same_losses \
		tests/test_embedding.py::test_the_example_trains_learns_and_goes_on_elsewhere \
		tests/test_train.py::test_under_torchrun_it_joins_that_world_and_sample_writes_text \
		tests/test_doctor.py::test_a_rank_that_aborts_or_crashes_is_to_blame_in_young_attempts_too \
		tests/test_doc_commands.py::test_a_run_and_what_is_done_with_it \
		tests/test_lora.py::test_a_trained_adapter_loads_in_peft_and_is_merged \
		tests/test_lora.py::test_adapters_beside_the_weights_of_a_run \
		tests/test_cli.py::test_what_is_asked_for_as_json_is_nothing_else \
		tests/test_sweep.py::test_the_worse_half_is_stopped_and_the_rest_goes_on \
		tests/test_guard.py::test_chaos_in_short \
		tests/test_transformers_models.py::test_folders_nobody_has_seen \
		tests/test_handover.py::test_quantiles_of_a_run_without_held_out_samples_are_of_training \
		tests/test_watch.py::test_an_uneven_stage_computes_and_the_other_has_the_bubble \
		tests/test_tune.py::test_machines_read_it_too \
		tests/test_example_family.py::test_it_is_proven

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
