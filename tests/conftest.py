"""What all tests share.

Worlds of processes are forked per case by `shardwise.comm.world.run_world`. A pool of workers that lives for the whole
run was measured and not built: starting a world costs 0.05 s (2 processes) to 0.25 s (8) of the 0.6 to 4 s that a case
takes, the rest is the work itself on the cores that there are; a second case in the same world ran 4 to 7% faster.
"""

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from shardwise.workers.fork_server import ForkServer

gc.disable()  # until all is imported
# A process that forks must not have threads that hold locks: no torch operation here may start any.
torch.set_num_threads(1)

# The same examples in every run, and no verdict by time.
settings.register_profile("shardwise", derandomize=True, deadline=None)
settings.load_profile("shardwise")

# Tests with many cases of one kind run every Nth case; `make test-all` runs them all.
THINNED = {
    # parity on real processes
    "test_pairwise": 24, "test_named": 5, "test_any_layout_gives_the_same_run": 4, "test_odd_shapes": 4,
    "test_every_cut_computes_what_one_process_computes": 4, "test_rows_that_every_device_keeps": 8,
    "test_tables_of_many_sizes": 4, "test_between_the_halves_of_a_split_backward": 4,
    "test_experts_on_other_ranks_compute_what_one_process_computes": 4, "test_pairs_with_cut_experts": 6,
    "test_fewer_experts_than_ranks": 5,
    "test_documents_do_not_see_one_another": 4,
    "test_a_cut_sequence_computes_what_one_process_does": 4, "test_experts_beside_a_cut_sequence": 4,
    "test_t5_in_any_layout": 4, "test_bert_in_any_layout": 4, "test_resnet_in_any_layout": 4,
    "test_replicas_are_those_of_one_process": 4, "test_layouts_compute_what_one_process_computes": 4,
    "test_training_is_that_of_one_process": 4, "test_sums_are_those_of_one_process": 8, "test_exact": 4,
    "test_every_example_takes_steps": 4, "test_the_job_trains_when_it_is_tiny": 4, "test_compiled_blocks": 4,
    "test_tier_by_tier": 13, "test_killed_and_resumed_elsewhere": 4, "test_killed_and_resumed_in_place_is_bitwise": 4,
    "test_bf16": 4, "test_a_damaged_file_ends_in_a_sentence": 80,
    "test_zero_1_holds_whole_weights_and_gradients": 4, "test_zero_2_holds_whole_weights_and_pieces_of_gradients": 4,
    "test_zero_3_holds_pieces_of_weights_and_gradients": 4, "test_validation_does_not_depend_on_the_layout": 2,
    "test_layouts_compute_what_the_module_computes": 4, "test_transformers_loads_what_a_run_exports": 2,
    "test_training_starts_from_the_weights_of_a_folder": 2, "test_latent_attention": 2,
    "test_experts_balanced_by_a_bias": 2, "test_packed_chats_in_any_layout": 3,
    "test_a_module_with_our_attention_splits_its_sequences": 2,
    "test_learned_positions_and_dropout_lie_where_they_should": 2, "test_what_travels_through_the_host_arrives": 2,
    "test_weights_rounded_once_are_those_rounded_in_every_use": 3, "test_a_block_is_computed_again_once": 2,
    # collectives
    "test_sums_are_exact_and_traffic_is_the_formula": 3, "test_who_does_not_answer_is_named": 2,
    "test_asynchronous_server_bounds_staleness": 2,
    # checkpoints and resume
    "test_kill_and_resume_elsewhere": 5, "test_kill_and_resume_in_place_is_bitwise": 4,
    "test_a_checkpoint_is_cut_anew": 8, "test_goes_on_in_another_layout": 8, "test_any_layout_loads_from_any_other": 10,
    "test_a_checkpoint_of_one_cut_loads_into_another": 8,
    "test_what_data_is_made_of_goes_on_elsewhere": 4, "test_a_run_goes_on_between_two_meetings": 4,
    # faults and time
    "test_flipped_bits_are_named_and_leave_no_trace": 8, "test_a_signal_saves_and_ends_cleanly": 4,
    "test_a_micro_batch_that_another_rank_computes_otherwise": 4, "test_infinity_is_traced_to_its_module_and_rank": 4,
    "test_parts_add_up_to_the_step": 8, "test_a_straggler_shows_by_its_own_time_and_the_others_by_waiting": 4,
    # planner
    "test_the_plan_is_what_the_engine_does": 8, "test_arithmetic_stands_in_for_micro_batches": 10,
    "test_a_fake_world_is_like_a_real_one": 8, "test_the_ledger_agrees_with_the_garbage_collector": 2,
    "test_examples_can_be_planned": 4, "test_examples_can_be_trained": 4,
    "test_packing_equals_not_packing": 3, "test_every_model_can_start_from_a_run": 3, "test_debts_are_kept": 3,
    "test_layouts_of_a_folder": 3, "test_planted_bugs_are_caught": 4, "test_a_number_beyond_its_bound_is_a_sentence": 4,
    "test_the_search_finds_what_simulating_everything_finds": 5, "test_the_search_is_exact": 8,
    "test_what_is_chosen_can_run": 9, "test_order_is_executed_multi": 5, "test_order_is_executed_single": 5,
    "test_a_model_that_transformers_does_not_know_becomes_a_program": 3,
    "test_no_line_is_wider_than_the_terminal": 3,
    "test_memory_in_closed_form_is_what_the_engine_needs": 3,
    "test_every_layout_equals_one_process": 2, "test_layouts_of_our_models": 2,
}  # fmt: skip
# These run one case of each kind, which is the first word of the case's id: each planted bug once, in one layout.
ONE_OF_EACH = ("test_caught", "test_the_culprit_is_named")

# Real schedulers, networks, nodes, stores, a whole tutorial, the wheel, the site: up to a minute each.
# `make test-clusters` runs these files and tests, one after the other; so does naming their file.
ON_CLUSTERS = (
    "test_slurm.py", "test_ray.py", "test_submit.py", "test_nodes.py", "test_run_store.py", "test_preflight.py",
    "test_tutorial_tune.py", "test_packaging.py", "test_the_site_is_built_whole", "test_pages_in_a_browser",
    "test_every_page_fits_every_screen", "test_where_says_what_it_read_that_from",
    "test_every_way_to_start_gives_the_same_losses",
    "test_the_example_trains_learns_and_goes_on_elsewhere",
    "test_under_torchrun_it_joins_that_world_and_sample_writes_text",
    "test_a_rank_that_aborts_or_crashes_is_to_blame_in_young_attempts_too", "test_a_run_and_what_is_done_with_it",
    "test_a_trained_adapter_loads_in_peft_and_is_merged", "test_adapters_beside_the_weights_of_a_run",
    "test_what_is_asked_for_as_json_is_nothing_else", "test_the_worse_half_is_stopped_and_the_rest_goes_on",
    "test_chaos_in_short", "test_folders_nobody_has_seen",
    "test_quantiles_of_a_run_without_held_out_samples_are_of_training",
    "test_an_uneven_stage_computes_and_the_other_has_the_bubble", "test_machines_read_it_too", "test_it_is_proven",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of every test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    seen: Counter[str] = Counter()
    kept, left = [], []
    files = {Path(argument.partition("::")[0]).name for argument in config.args}
    for item in items:
        name = getattr(item, "originalname", item.name)
        if not {item.path.name, name}.isdisjoint(ON_CLUSTERS) and item.path.name not in files:
            left.append(item)
            continue
        is_each = name in ONE_OF_EACH
        kind = re.split(r"[ -]", item.name.removeprefix(f"{name}["))[0] if is_each else ""
        (left if seen[name + kind] % (99 if is_each else THINNED.get(name, 1)) else kept).append(item)
        seen[name + kind] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_collection_finish() -> None:
    """What was imported stays: no collection looks at it again, here or in a process that is forked."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks workers with planted faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        server = ForkServer("planted_faults")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def fresh_models() -> None:
    """A test may patch a model: none is handed on from the test before."""
    from shardwise.parallel.prepare import forward_flops, meta_model, split_shapes

    meta_model.cache_clear()
    forward_flops.cache_clear()
    split_shapes.cache_clear()
