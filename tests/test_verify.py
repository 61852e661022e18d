"""Every axis, schedule, ZeRO stage and kind of model against one process, in float64: a pairwise cover of the matrix.

The whole matrix is `benchmarks/verify_matrix.py`.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from pairwise import Case, cover, pairs
from torch._dynamo.testing import CompileCounter

from shardwise.data.make_sources import synthetic_source
from shardwise.data.sample_stream import job_stream, rank_positions
from shardwise.errors import JobError, LayoutError
from shardwise.job import DataConfig, Job, make_job
from shardwise.launch.start import check_layout_fits
from shardwise.layout import SCHEDULES, Layout, micro_batch_error
from shardwise.models.config import ModelConfig
from shardwise.parallel import context
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.verify.parity import VerifyResult, verify

LIMIT = 1e-10
LAYOUT = {
    "pipeline": (1, 2, 4),
    "tensor": (1, 2, 4),
    "shard": (1, 2, 3),
    "replicate": (1, 2),
    "context": ("1", "2 ring", "2 ulysses"),
    # Schedule and stages per rank.
    "schedule": (
        "none", "gpipe", "1f1b", "interleaved", "interleaved 3", "zero-bubble", "zero-bubble 2", "zbv", "dualpipev",
        "auto", "auto 2", "auto-v",
    ),
    "zero": (1, 2, 3),
    "recompute": ("none", "selective", "full", "0.5"),
    "micro_batch": (1, 2),
    # Micro-batches: the fewest that the schedule can run, or the next number that it can.
    "count": ("few", "more"),
}  # fmt: skip
MODEL = {
    "tied": (True, False),
    "positions": ("learned", "rotary"),
    "norm": ("layer", "rms"),
    "activation": ("gelu", "swiglu"),
    "bias": (True, False),
    # Heads and heads of keys and values: plain, grouped, uneven over tensor=2 and 4, fewer than tensor ranks.
    "heads": ((4, 4), (4, 2), (6, 3), (4, 1)),
    # Vocabulary and hidden features: even, odd.
    "sizes": ((64, 48), (61, 50)),
    "layers": (4, 6),
    # Several conversations in a sample (data.pack).
    "pack": (True, False),
    # Activations in host memory.
    "offload": (True, False),
}


def layout_of(case: Case) -> Layout | None:
    """The layout of a case; None where its words do not go together or one of them would mean nothing."""
    return _layout_of(*(case[key] for key in LAYOUT if key != "count"))


@cache
def _layout_of(pipeline: int, tensor: int, shard: int, replicate: int, context_: str, schedule_: str, zero: int,
               recompute: str, micro_batch: int) -> Layout | None:  # fmt: skip
    (schedule, _, virtual), (degree, _, way) = schedule_.partition(" "), context_.partition(" ")
    world = pipeline * tensor * shard * replicate * int(degree)
    if not 1 < world <= 8 or (schedule == "none") != (pipeline == 1) or (zero > 1 and shard == 1):
        return None
    order: dict[str, Any] = {"schedule": schedule, "virtual": int(virtual or 0)} if schedule != "none" else {}
    return Layout(
        pipeline=pipeline, tensor=tensor, shard=shard, replicate=replicate, context=int(degree), zero=zero,
        context_method=way or "ring", recompute=recompute, micro_batch=micro_batch, **order,
    )  # fmt: skip


def micro_batches(case: Case, layout: Layout) -> int:
    return _micro_batch_counts(layout)[("few", "more").index(case["count"])]


@cache
def _micro_batch_counts(layout: Layout) -> list[int]:
    return [n for n in range(1 if layout.pipeline == 1 else 2, 40) if not micro_batch_error(layout, n)]


def job_of(case: Case, layout: Layout) -> Job:
    model = {key: case[key] for key in MODEL if key not in ("heads", "sizes", "pack", "offload")}
    model["heads"], model["kv_heads"] = case["heads"]
    model["vocab"], model["ffn"] = case["sizes"]
    job = tiny(layout.data * layout.micro_batch * micro_batches(case, layout), **model)
    data = DataConfig(source="chat", path="none", pack=case["pack"])
    return job.model_copy(update={"data": data, "offload_activations": case["offload"]})


def tiny(samples: int, **model: Any) -> Job:
    shape = {"width": 24, "head_dim": 4, "sequence": 8, "dropout": 0.1}
    return make_job({"precision": "float64", "seed": 1, "model": shape | model, "batch": {"samples": samples}})


def every(factors: dict[str, tuple]) -> list[Case]:
    return [dict(zip(factors, values)) for values in product(*factors.values())]


def fits(case: Case) -> bool:
    layout = layout_of(case)
    if layout is None or layout.stage_count > case["layers"] + 2 or (case["offload"] and layout.has_split_backward):
        return False
    return _takes_context(layout, *case["heads"])


@cache
def _takes_context(layout: Layout, heads: int, kv_heads: int) -> bool:
    try:
        context.check(_model_of_heads(heads, kv_heads), layout)
    except LayoutError:
        return False
    return True


@cache
def _model_of_heads(heads: int, kv_heads: int) -> ModelConfig:
    return tiny(1, heads=heads, kv_heads=kv_heads).model


def cost(case: Case) -> float:
    layout = layout_of(case)
    assert layout is not None
    return (layout.world * case["layers"] * (4 + micro_batches(case, layout))) ** 0.5


CASES = cover([[case for case in every(LAYOUT) if layout_of(case)], every(MODEL)], fits, cost)

# Every trace of a model looks through the results that cached functions hold, and these hold those of all candidates.
for cached in (_layout_of, _micro_batch_counts, _takes_context, _model_of_heads):
    cached.cache_clear()


def name_of(case: Case) -> str:
    heads, sizes = ("/".join(map(str, case[key])) for key in ("heads", "sizes"))
    words = [case["positions"], case["norm"], case["activation"], "bias" * case["bias"], "tied" * case["tied"],
             "packed" * case["pack"], "offload" * case["offload"]]  # fmt: skip
    return f"{layout_of(case)} count={case['count']} {' '.join(filter(None, words))} {heads} {sizes} x{case['layers']}"


def assert_exact(record: VerifyResult) -> None:
    assert record.ok, record.describe()
    assert max(record.loss, record.grad_norm, record.grad, record.weight) <= LIMIT


@pytest.mark.thin(24)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_pairwise(case: Case) -> None:
    """Every third, among them those of `make test`, takes a second step: what the first leaves behind."""
    layout = layout_of(case)
    assert layout is not None
    assert_exact(*verify(job_of(case, layout), [layout], steps=1 if CASES.index(case) % 3 else 2))


def test_every_pair_is_there() -> None:
    """What two words can go together is worked out here apart from the generator."""
    there = set().union(*(pairs(case) for case in CASES))
    for schedule, zero in product(LAYOUT["schedule"], LAYOUT["zero"]):
        assert (("schedule", schedule), ("zero", zero)) in there
    for schedule, recompute in product(LAYOUT["schedule"], LAYOUT["recompute"]):
        assert (("recompute", recompute), ("schedule", schedule)) in there
    for one, other in product(MODEL, MODEL):
        if one < other:
            assert all(((one, a), (other, b)) in there for a, b in product(MODEL[one], MODEL[other]))
    for pipeline, tensor in product((1, 2, 4), (1, 2, 4)):
        assert ((("pipeline", pipeline), ("tensor", tensor)) in there) == (pipeline * tensor <= 8)


# What the cover has no word for.
SHAPES = {
    "GPT-2": {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True, "heads": 4},
    "Llama": {"heads": 4, "kv_heads": 2, "tied": False, "vocab": 61, "ffn": 50},
}
NAMED = {
    "one process, one micro-batch": ("pipeline=1", 3, "GPT-2"),
    "one process, accumulation": ("micro_batch=1 recompute=selective", 3, "Llama"),
    "DDP with accumulation": ("replicate=2 micro_batch=1", 4, "GPT-2"),
    "DDP over 4": ("replicate=4", 4, "Llama"),
    "shards of unequal size": ("shard=3 zero=3", 3, "Llama"),
    "shard=4, ZeRO 1": ("shard=4 zero=1 micro_batch=1", 8, "GPT-2"),
    "shard=4, ZeRO 2": ("shard=4 zero=2 micro_batch=1", 8, "Llama"),
    "hybrid, ZeRO 3": ("replicate=2 shard=2 zero=3 micro_batch=1", 8, "GPT-2"),
    "3 stages, fixed by hand": ("pipeline=3 stages=0,3,1 micro_batch=1", 4, "GPT-2"),
    "3 ranks of 2 stages in a V": ("pipeline=3 schedule=zbv micro_batch=1", 4, "Llama"),
    "one more stage than layers": ("pipeline=3 schedule=interleaved micro_batch=1", 3, "GPT-2"),
    "tensor=3": ("tensor=3", 2, "Llama"),
    "everything kept, by share": ("shard=2 zero=3 recompute=1.0", 2, "Llama"),
    "nothing kept, by share": ("pipeline=2 recompute=0.0 micro_batch=1", 2, "Llama"),
}


@pytest.mark.thin(7)
@pytest.mark.parametrize("name", NAMED)
def test_named(name: str) -> None:
    text, samples, shape = NAMED[name]
    sequence = 9 if "tensor=3" in text else 8
    assert_exact(*verify(tiny(samples, layers=4, sequence=sequence, **SHAPES[shape]), [Layout.parse(text)], steps=2))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule(schedule: str) -> None:
    """On two ranks with as few micro-batches as it can run: each schedule is among what `make test` verifies."""
    layout = Layout(pipeline=2, schedule=schedule, micro_batch=1)
    job = tiny(_micro_batch_counts(layout)[0], layers=4, **SHAPES["Llama"])
    assert_exact(*verify(job, [layout], steps=1))


ROUNDED = ["shard=2 zero=2 micro_batch=1", "pipeline=2 tensor=2 micro_batch=1"]


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("layout", ROUNDED)
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_other_precisions_within_their_rounding(precision: str, layout: str) -> None:
    job = tiny(4, layers=4, **SHAPES["GPT-2"]).model_copy(update={"precision": precision})
    (record,) = verify(job, [Layout.parse(layout)], steps=2)
    assert record.ok, record.describe()


@pytest.mark.thin(2)
@pytest.mark.parametrize("layout", ROUNDED)
def test_products_in_8_bits_within_their_rounding(layout: str) -> None:
    """Of sides that are multiples of 16: others would be computed in bf16."""
    sizes = {"layers": 4, "width": 32, "heads": 2, "head_dim": 16, "ffn": 64, "vocab": 64, "sequence": 32}
    job = make_job({"precision": "fp8", "model": {**sizes, "tied": False}, "batch": {"samples": 4}})
    (record,) = verify(job, [Layout.parse(layout)], steps=2)
    assert record.ok and record.grad > 0.01, record.describe()


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("layout", ["pipeline=2 tensor=2 micro_batch=1", "shard=2 zero=3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_mup(shape: str, layout: str) -> None:
    """The truth knows nothing of it: it is a property of the model alone."""
    job = tiny(4, layers=4, **SHAPES[shape] | {"mup_base_width": 8})
    assert_exact(*verify(job, [Layout.parse(layout)], steps=2))


def test_without_clipping_and_without_dropout() -> None:
    job = tiny(4, layers=4, **SHAPES["Llama"] | {"dropout": 0.0})
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"clip": 0.0})})
    for record in verify(
        job, [Layout.parse("pipeline=2 micro_batch=1"), Layout.parse("tensor=2 replicate=2")], steps=2
    ):
        assert_exact(record)


def compile_by(backend: str, patch: pytest.MonkeyPatch) -> None:
    """Compiles blocks by this backend of torch.compile. `aot_eager` traces forward and backward as the default does,
    and runs the traced operators; inductor, the default, has a C++ compiler make kernels of them, for a minute."""
    compile_module = torch.nn.Module.compile
    patch.setattr(torch.nn.Module, "compile", lambda self, **options: compile_module(self, backend=backend, **options))
    # Inductor's pool of compile workers would import PyTorch once per core and rank, for a handful of kernels.
    patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


BACKENDS = ("aot_eager", "inductor")
COMPILED = list(product(BACKENDS, ("replicate=2", "micro_batch=1 recompute=full", "recompute=selective")))


@pytest.mark.thin(4)
@pytest.mark.timeout(600)  # a C++ compiler is at work
@pytest.mark.parametrize(("backend", "layout"), COMPILED, ids=map(" ".join, COMPILED))
def test_compiled_blocks(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by(backend, monkeypatch)
    job = tiny(2, layers=1, heads=2, positions="learned").model_copy(update={"compile": True})
    try:
        (record,) = verify(job, [Layout.parse(layout)], steps=2)
    except JobError as told:
        assert "needs a C++ compiler" in str(told)
        return
    assert_exact(record)


@pytest.mark.thin(3)
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "0.5"])
def test_each_block_is_one_graph_whatever_is_recomputed(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, compile_module = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compile_module(self, backend=counter))
    torch._dynamo.reset()
    job = tiny(2, layers=2, heads=2).model_copy(update={"compile": True})
    engine = parallelize(prepare(job, Layout.parse(f"recompute={recompute}")), torch.device("cpu"))
    samples = job_stream(job, synthetic_source(job, 8)).read(rank_positions(0, 2, 1, 0))
    engine.run(samples, torch.ones(()))
    assert counter.frame_count == 2  # their dropout differs


def test_without_a_compiler_compiled_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    job = tiny(2, layers=1, heads=2).model_copy(update={"compile": True})
    job = job.model_copy(update={"run": job.run.model_copy(update={"device": "cpu"})})
    for start in (lambda: verify(job, [Layout()]), lambda: check_layout_fits(Layout(), job)):
        with pytest.raises(JobError, match="compile = true needs a C.. compiler, but 'no-such-compiler' was not found"):
            start()
    assert JobError.exit_code == 2


def test_record_as_json() -> None:
    job = tiny(2, layers=1, **SHAPES["Llama"])
    seen: list[VerifyResult] = []
    records = verify(job, [Layout.parse("replicate=2")], report=seen.append)
    assert seen == records
    values = json.loads(json.dumps(records[0].as_dict()))
    keys = ["layout", "ok", "loss", "grad_norm", "grad", "weight", "first_difference", "failure", "hint"]
    assert list(values) == keys
    assert values["layout"] == "replicate=2" and values["ok"] is True and values["first_difference"] is None
    failed = VerifyResult("pipeline=2", ok=False, failure="a rank died").as_dict()
    assert json.loads(json.dumps(failed, allow_nan=False))["loss"] is None


def test_an_impossible_layout_raises_before_any_process_starts() -> None:
    job = tiny(4, layers=4, **SHAPES["Llama"])
    with pytest.raises(LayoutError, match="at most 6 stages"):
        verify(job, [Layout.parse("replicate=2"), Layout.parse("pipeline=7")])
    with pytest.raises(LayoutError, match="the nearest valid length"):
        prepare(job, Layout.parse("tensor=3"))
