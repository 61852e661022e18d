"""The support table is whole, says something useful in every row, and everything in it can start."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from test_verify import tiny

import shardwise.models.gpt as gpt
from shardwise.comm.world import run_world
from shardwise.data.sample_stream import rank_positions
from shardwise.job import Job
from shardwise.layout import FULL_BACKWARD, SPLIT_BACKWARD, Layout
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import step
from shardwise.verify.parity import make_stream

sys.path.append(str(Path(__file__).parent.parent / "tools"))
from support_table import (  # noqa: E402
    EXACT,
    EXACT_AT_COST,
    SUPPORT_RULES,
    Combination,
    all_combinations,
    combination_of,
    lookup,
    support,
)

MODEL = {"heads": 4, "kv_heads": 2, "layers": 4}


def layout_of(words: Combination) -> Layout:
    pipeline = {} if words.schedule == "none" else {"pipeline": 2, "schedule": words.schedule}
    recompute = "0.5" if words.recompute == "fraction" else words.recompute
    return Layout(shard=2, zero=words.zero, recompute=recompute, micro_batch=1, **pipeline)


def test_every_combination_has_one_verdict_and_starts() -> None:
    job = tiny(8, **MODEL)
    rows = dict(all_combinations())
    assert len(rows) == 9 * 3 * 4 * 5
    for words, found in rows.items():
        layout = layout_of(words)
        assert combination_of(layout, words.precision) == words
        assert support(layout, words.precision) == found
        if words.precision != "float64":  # building the model takes its time; no row speaks of precision
            assert found == lookup(words._replace(precision="float64"))
        else:
            prepare(job, layout)


def test_what_was_promised() -> None:
    def verdicts(schedules: tuple[str, ...], zeros: tuple[int, ...], recompute: tuple[str, ...]) -> set[str]:
        words = product(schedules, zeros, recompute, ("float64", "float32", "bf16", "fp16", "fp8"))
        return {lookup(Combination(*each)).verdict for each in words}

    any_recompute = ("none", "selective", "full", "fraction")
    assert verdicts(("none", *FULL_BACKWARD), (1,), any_recompute) == {EXACT}
    assert verdicts(("none", *FULL_BACKWARD), (2, 3), any_recompute) == {EXACT_AT_COST}
    assert verdicts(SPLIT_BACKWARD, (1,), ("none",)) == {EXACT}
    assert verdicts(SPLIT_BACKWARD, (1,), ("selective", "full", "fraction")) == {EXACT_AT_COST}
    assert verdicts(SPLIT_BACKWARD, (2, 3), any_recompute) == {EXACT_AT_COST}


def test_rows_say_what_they_must() -> None:
    for row in SUPPORT_RULES:
        assert (row.verdict == EXACT) == (row.explanation == "")
        assert row.verdict == EXACT or row.explanation.endswith(".")
    assert all(row.matches(words) for row in SUPPORT_RULES[-1:] for words, _ in all_combinations())


def test_zero_means_nothing_without_a_shard_axis() -> None:
    layout = Layout(pipeline=2, schedule="zbv", zero=3, replicate=2)
    assert support(layout, "float64").verdict == EXACT


def count_forwards(job: Job, layout: Layout) -> dict[str, float]:
    """Forwards of each block of this rank, per micro-batch of one step."""
    calls: dict[str, int] = {}
    right = gpt.DecoderBlock.forward

    def forward(self: gpt.DecoderBlock, *args: object, **kwargs: object) -> torch.Tensor:
        name = self.dropout1.site.partition(".")[0]
        calls[name] = calls.get(name, 0) + 1
        return right(self, *args, **kwargs)

    prepared = prepare(job, layout)  # which traces the blocks
    gpt.DecoderBlock.forward = forward  # in this process alone
    engine = parallelize(prepared, torch.device("cpu"))
    samples = make_stream(job).read(rank_positions(0, job.samples, layout.data, engine.mesh["data"].index))
    step(engine, make_optimizer(job.optimizer, engine.param_shards), samples, 1.0)
    return {name: count / engine.batch.micro_batches for name, count in calls.items()}


@pytest.mark.thin(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "dualpipev"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_block_is_computed_again_once(schedule: str, recompute: str) -> None:
    """However many parts the backward has."""
    job = tiny(4, **MODEL)
    layout = Layout(pipeline=2, schedule=schedule, recompute=recompute, micro_batch=1)
    forwards = {name: count for rank in run_world(count_forwards, 2, job, layout) for name, count in rank.items()}
    assert forwards == {f"block{number}": 2 for number in range(4)}
