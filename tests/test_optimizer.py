"""Our AdamW against PyTorch's: in float64 as the truth, with narrow gradients and states; on a GPU its kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shardwise.comm.world import run_world
from shardwise.data.sample_stream import rank_positions
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.data_parallel import SingleProcess
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import step
from shardwise.verify.parity import make_stream

SIZES = (5000, 3, 2049)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@dataclass
class Part:
    """A holding, as far as an optimizer sees it."""

    tensor: torch.Tensor
    compute_copy: torch.Tensor | None
    decays: bool
    grad: torch.Tensor
    is_compute_copy_current: bool = False
    is_matrix: bool = False
    name: str = ""


def parts(device: str, narrow: bool) -> list[Part]:
    make = torch.Generator().manual_seed(0)
    found = []
    for size in SIZES:
        tensor = torch.randn(size, generator=make).to(device)
        found.append(Part(tensor, tensor.bfloat16() if narrow else None, size != 3, torch.zeros_like(tensor)))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("narrow", "state_dtype", "limit"), [(True, "float32", 1e-4), (False, "bf16", 2e-2)])
def test_ours_takes_the_steps_of_pytorchs(device: str, narrow: bool, state_dtype: str, limit: float) -> None:
    pieces = parts(device, narrow)
    settings = make_job({"optimizer": {"lr": 0.01, "state_dtype": state_dtype}}).optimizer
    ours = make_optimizer(settings, pieces)
    truth = [piece.tensor.double().cpu() for piece in pieces]
    starts = [weight.clone() for weight in truth]
    groups = [{"params": [truth[0], truth[2]], "weight_decay": 0.1}, {"params": [truth[1]], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=settings.betas, eps=settings.eps)
    make = torch.Generator().manual_seed(1)
    for number in range(12):
        skipped = number == 5
        ours.grad_scale = torch.tensor(8.0, device=device)  # type: ignore[attr-defined]
        ours.found_inf = torch.tensor(float(skipped), device=device)  # type: ignore[attr-defined]
        for piece, weight in zip(pieces, truth, strict=True):
            grad = torch.randn(weight.shape, generator=make).bfloat16()
            piece.grad, weight.grad = (8 * grad).to(device), grad.double()
            if not narrow:
                piece.grad = piece.grad.float()
        ours.step()
        if not skipped:
            theirs.step()
    for piece, weight, start in zip(pieces, truth, starts, strict=True):
        moved = (weight - start).norm()
        assert float((piece.tensor.double().cpu() - weight).norm() / moved) < limit
        if piece.compute_copy is not None:
            assert piece.is_compute_copy_current and torch.equal(piece.compute_copy, piece.tensor.bfloat16())
        state = ours.state[piece.tensor]
        assert state["step"].item() == 11
        assert state["exp_avg"].dtype == (torch.bfloat16 if state_dtype == "bf16" else torch.float32)


def small(samples: int, **keys: Any) -> Job:
    shape = {"layers": 2, "width": 32, "heads": 4, "vocab": 61, "sequence": 16, "tied": keys.pop("tied", True)}
    return make_job({"precision": "bf16", "model": shape, "batch": {"samples": samples}, **keys})


def weights_after(job: Job, text: str, wide: bool) -> list[torch.Tensor]:
    """Of three steps, by the engine for one process, or by the one that every layout has."""
    layout, device = Layout.parse(text), torch.device("cpu")
    engine = parallelize(prepare(job, layout), device)
    assert isinstance(engine.data, SingleProcess) != wide
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    for number in range(3):
        shares = rank_positions(number, job.samples, engine.mesh["data"].size, engine.mesh["data"].index)
        step(engine, optimizer, make_stream(job).read(shares), 1.0)
    return [param_shard.tensor.detach().clone() for param_shard in engine.param_shards]


@pytest.mark.thin(3)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_weights_rounded_once_are_those_rounded_in_every_use(tied: bool, micro_batch: int) -> None:
    """Against two copies of the model: their gradients are wide, and so are the sums of them."""
    job = small(4, tied=tied)
    alone = run_world(weights_after, 1, job, f"micro_batch={micro_batch}", False)[0]
    pair = run_world(weights_after, 2, job, "replicate=2 micro_batch=2", True)[0]
    for one, other in zip(alone, pair, strict=True):
        assert float((one - other).norm() / other.norm()) < 3e-3
