"""Activations in host memory: the same numbers to the last bit, two blocks on the device at most, and nothing leaks.

`tests/test_verify.py` compares layouts with one process, `tests/test_gpu.py` does it on a GPU.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from test_verify import compile_by, tiny
from torch import Tensor

from shardwise.data.make_sources import synthetic_source
from shardwise.data.sample_stream import job_stream, rank_positions
from shardwise.errors import JobError, LayoutError
from shardwise.job import Job, load_job, make_job
from shardwise.layout import Layout
from shardwise.parallel import activation_offload
from shardwise.parallel.activation_offload import SavedStorages
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.planner.dryrun.dry_run import dryrun_job
from shardwise.planner.plan import plan_job
from shardwise.step import step
from shardwise.verify.parity import verify

GIB = 2**30
SHAPE = {"layers": 4, "width": 64, "heads": 4, "sequence": 32, "vocab": 256}


def losses(job: Job, layout: str, steps: int = 2) -> list[tuple[float, float]]:
    engine = parallelize(prepare(job, Layout.parse(layout)), torch.device("cpu"))
    optimizer, stream = engine.make_optimizer(job), job_stream(job, synthetic_source(job, 64))
    taken = (
        step(engine, optimizer, stream.read(rank_positions(n, job.samples, 1, 0)), job.optimizer.clip)
        for n in range(steps)
    )
    return [(taken.loss.item(), taken.grad_norm.item()) for taken in taken]


@pytest.mark.parametrize("words", ["recompute=none", "recompute=selective", "recompute=full", "micro_batch=2"])
def test_the_same_to_the_last_bit(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: weakref.WeakSet[Tensor] = weakref.WeakSet()
    sizes = []
    make = activation_offload.host_buffer

    def made(tensor: Tensor) -> Tensor:
        buffers.add(buffer := make(tensor))
        sizes.append(buffer.nbytes)
        return buffer

    monkeypatch.setattr(activation_offload, "host_buffer", made)
    told = []
    for offload in (False, True):
        settings = {"precision": "float64", "offload_activations": offload}
        told.append(losses(make_job({**settings, "model": SHAPE, "batch": {"samples": 4}}), words, steps=2))
    assert told[0] == told[1] and not buffers  # nothing is held after several steps and micro-batches
    blocks, hidden = SHAPE["layers"], 4 * SHAPE["sequence"] * SHAPE["width"] * 8
    assert sum(sizes) >= 2 * blocks * hidden  # at least the input of each block
    if words == "recompute=full":
        assert sizes == [hidden] * 2 * blocks  # and nothing else


def test_two_blocks_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[SavedStorages] = weakref.WeakSet()
    most = []
    fetch, init = SavedStorages.fetch, SavedStorages.__init__

    def created(self: SavedStorages, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        alive.add(self)
        most.append(sum(saved.on_device is not None for saved in alive))

    def fetched(self: SavedStorages) -> None:
        fetch(self)
        most.append(sum(saved.on_device is not None for saved in alive))

    monkeypatch.setattr(SavedStorages, "__init__", created)
    monkeypatch.setattr(SavedStorages, "fetch", fetched)
    gc.disable()  # nothing may wait for it
    try:
        losses(tiny(2, layers=6).model_copy(update={"offload_activations": True}), "replicate=1")
        assert max(most) == 2 and not alive
    finally:
        gc.enable()


@pytest.mark.thin(7)
@pytest.mark.timeout(600)  # a C++ compiler is at work
@pytest.mark.parametrize("backend", ["not compiled", "aot_eager", "inductor"])
def test_a_buffer_given_back_too_early_is_seen(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: a compiler in this one would leave threads to those that are forked later."""
    compiled = backend != "not compiled"
    if compiled:
        compile_by(backend, monkeypatch)
    job = tiny(2, layers=2).model_copy(update={"offload_activations": True, "compile": compiled})
    try:
        (record,) = verify(job, [Layout.parse("recompute=0.5")], steps=1)
    except JobError as told:
        assert compiled and "needs a C++ compiler" in str(told)
        return
    assert record.ok, record.describe()
    buffers: dict[torch.Size, Tensor] = {}
    shared = lambda tensor: buffers.setdefault(tensor.shape, torch.empty_like(tensor))  # noqa: E731
    monkeypatch.setattr(activation_offload, "host_buffer", shared)
    (record,) = verify(job, [Layout.parse("recompute=0.5")], steps=1)
    assert not record.ok and record.first_difference is not None and record.first_difference.kind == "gradient"


JOB = """
precision = "bf16"
offload_activations = true
compile = false
[model]
layers = 6
width = 1024
heads = 16
sequence = 1024
vocab = 32000
[batch]
samples = 16
"""


@pytest.mark.parametrize("layout", ["replicate=1", "replicate=1 recompute=full", "shard=2 zero=3"])
def test_plan_and_dry_run_know_it(layout: str, tmp_path: Path) -> None:
    (file := tmp_path / "job.toml").write_text(JOB)
    peaks = []
    for offload in ("false", "true"):
        given = [f"offload_activations={offload}"]
        measured = max(sum(report.memory.values()) for report in dryrun_job(file, given, layout, [0], False))
        plan = plan_job(file, given, "h200", None, layout).best
        planned = max(rank.total - rank.reserve for rank in plan.memory) - 0.125 * GIB  # of matmul workspaces
        assert planned == pytest.approx(measured, rel=0.1)
        peaks.append((measured, plan.seconds))
    assert peaks[1][0] < peaks[0][0] * (0.95 if "full" in layout else 0.6)
    # Copies of full recomputation hide behind it; those of all activations do not.
    assert peaks[1][1] == peaks[0][1] if "full" in layout else peaks[1][1] > 2 * peaks[0][1]


def test_what_it_does_not_go_with() -> None:
    job = load_job(None, ["offload_activations=true"])
    with pytest.raises(LayoutError, match="zero-bubble: it is traversed twice; use schedule=1f1b"):
        prepare(job, Layout.parse("pipeline=2 schedule=zero-bubble"))
    dlrm = make_job({"offload_activations": True, "model": {"name": "dlrm"}, "data": {"source": "synthetic"}})
    with pytest.raises(JobError, match="no repeated blocks"):
        prepare(dlrm, Layout())
