"""Parameters without a dimension, such as CLIP's temperature: they cannot be split, so every rank keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_any_module import any_job, proven, training_job
from test_train import train

from shardwise.comm.world import run_world
from shardwise.integrity.checksums import StateChecksums
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import step
from shardwise.train.export import open_checkpoint
from shardwise.verify.parity import make_stream

SHARDED = ("shard=2 zero=1", "shard=2 zero=2 micro_batch=2", "shard=2 zero=3")


def scalar_job(own: str = "", **changes: Any) -> Job:
    """Of two blocks; `own`: an optimizer of PyTorch."""
    return any_job("temperatures", {"optimizer": own, "depth": 2}, **changes)


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("layout", SHARDED)
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "adamw"},
        {"state_dtype": "8bit", "name": "adamw"},
        {"name": "muon"},
        {"name": "sgd"},
        {"name": "lamb"},
        {"name": "adafactor"},
    ],
    ids=lambda settings: " ".join(settings.values()),
)
def test_every_optimizer_and_every_zero(optimizer: dict[str, Any], layout: str) -> None:
    """The clipping makes an error of the gradient norm an error of every weight. The second step uses the state."""
    proven(scalar_job(optimizer={**optimizer, "clip": 0.1}), layout, steps=2)


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", SHARDED)
def test_an_optimizer_of_ones_own(layout: str) -> None:
    proven(scalar_job("NAdam"), layout, steps=2)


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", [f"replicate=2 {layout}" for layout in SHARDED])
def test_replicas_of_shards(layout: str) -> None:
    proven(scalar_job(optimizer={"clip": 0.1}), layout, steps=2)


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", ["context=2", "context=2 shard=2 zero=1", "context=2 shard=2 zero=3"])
def test_split_sequences(layout: str) -> None:
    """Each context rank sees its own positions, so the gradient of a number is a sum over those, too."""
    job = any_job("long_lm", {"scaled": True, "depth": 2}, optimizer={"clip": 0.1})
    proven(job, layout, steps=2)


def _read_in_bf16(layout: str) -> None:
    job = scalar_job(precision="bf16")
    engine = parallelize(prepare(job, Layout.parse(layout)), torch.device("cpu"))
    optimizer = engine.make_optimizer(job)
    module: Any = engine.chains[0]
    seen = []
    module.root.blocks[0].register_forward_hook(lambda block, args, output: seen.append(output.dtype))

    step(engine, optimizer, make_stream(job).read(np.arange(4)), 0.0)

    (shard,) = [shard for shard in engine.param_shards if shard.name == "logit_scale"]
    assert module.root.logit_scale.dtype is torch.bfloat16 and shard.tensor.dtype is torch.float32
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("layout", SHARDED[::2])
def test_read_in_the_dtype_of_activations(layout: str) -> None:
    """FSDP casts what it shards; scalars are cast beside it. Their updates are in float32."""
    run_world(_read_in_bf16, 2, layout)


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", SHARDED[::2])
def test_beside_adapters(layout: str) -> None:
    model = {
        "name": "python:user_modules:temperatures",
        "args": {"depth": 2},
        "lora": {"rank": 2, "targets": ["*.attention.q"]},
    }
    proven(any_job("temperatures", model=model), layout, steps=2)


def test_what_is_trained_is_handed_over(tmp_path: Path) -> None:
    """Whatever layout it was trained in, each number is in the module once, as one process would have trained it."""
    model = {"name": "python:user_modules:temperatures", "args": {"depth": 2}}
    settings = {"model": model, "steps": 3, "checkpoint": {"every": 3}}
    weights = []
    for number, layout in enumerate(("pipeline=1", "shard=2 zero=3")):
        run = train(training_job(tmp_path / str(number), "temperatures", **settings), layout)
        weights.append(dict(open_checkpoint(run).load(torch.float64).named_parameters()))

    alone, sharded = weights
    scalars = [name for name, weight in alone.items() if weight.dim() == 0]
    assert len(scalars) == 9 and alone["fixed"] == 1.5 and alone["logit_scale"] != 2.6
    for name in scalars:
        assert sharded[name].shape == () and sharded[name].item() == pytest.approx(alone[name].item(), rel=1e-10)


def _find_copies(layout: str) -> None:
    job = scalar_job()
    engine = parallelize(prepare(job, Layout.parse(layout)), torch.device("cpu"))
    optimizer = engine.make_optimizer(job)
    samples = make_stream(job).read(np.arange(4))
    tracked = []

    def observe(_: Any) -> None:
        tracked.extend(StateChecksums(engine, optimizer).gradients())

    step(engine, optimizer, samples, 0.0, observe)
    checksums = StateChecksums(engine, optimizer)
    tracked.extend([*checksums.weights(), *checksums.states()])

    kinds = {one.label: one.copy_kinds for one in tracked}
    labels = ("weight", "gradient of", "optimizer state exp_avg of")
    assert all(kinds[f"{label} logit_scale"] == {"full_weights"} for label in labels), kinds


@pytest.mark.parametrize("layout", SHARDED)
def test_a_flipped_bit_is_found_by_the_other_ranks_copies(layout: str) -> None:
    run_world(_find_copies, 2, layout)
