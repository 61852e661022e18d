"""Compressed gradients: against one process that compresses alike, through checkpoints, with bugs planted."""

import shutil

import pytest
import torch
from compression_reference import verify_compressed
from test_train import train

from shardwise.comm.world import run_world
from shardwise.errors import JobError, LayoutError, RunError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.parallel import gradient_reduction
from shardwise.parallel.gradient_reduction import CompressionSpec, decode, encode, encoded_bytes
from shardwise.parallel.prepare import prepare
from shardwise.verify.parity import verify

MODEL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61, "sequence": 16}
WAYS = ["fp16", "bf16", "int8", "onebit", "topk:0.1", "powersgd:rank=2"]


def job(way: str, samples: int = 12, after: float = 0.2, **more: object) -> Job:
    return make_job({"precision": "float64", "model": MODEL, "batch": {"samples": samples},
                     "gradient": {"compress": way, "compress_after": after}, **more})  # fmt: skip


SUMS = [
    (way, text) for way in WAYS for text in (
        "replicate=3", "shard=2 tensor=2 zero=1", "shard=2 zero=3 micro_batch=3",
        *(["pipeline=2 replicate=2 shard=2 zero=2"] if way in ("int8", "topk:0.1", "powersgd:rank=2") else []),
    )
]  # fmt: skip


@pytest.mark.thin(8)
@pytest.mark.parametrize(("way", "text"), SUMS)
def test_sums_are_those_of_one_process(way, text):
    prepare(job(way), Layout.parse(text))  # once, for all ranks
    record = verify_compressed(job(way), Layout.parse(text))
    assert record.ok, record.describe()


@pytest.mark.parametrize("way", WAYS[:-1])
@pytest.mark.parametrize("size", [1, 7, 1024, 2500])
def test_bytes_there_and_back(way, size):
    rows, how = torch.randn(3, size, dtype=torch.float64), CompressionSpec.parse(way)
    rows[1] = 0.0
    sent = encode(how, rows)
    assert sent.dtype == torch.uint8 and sent.shape == (3, encoded_bytes(how, size, rows.dtype))
    found = decode(how, sent, size, rows.dtype)
    worst = {"fp16": 1e-3, "bf16": 1e-2, "int8": 0.01, "onebit": 1.0, "topk:0.1": 1.0}[way]
    assert torch.all(found[1] == 0) and float((found - rows).norm() / rows.norm()) <= worst


def sent_by(way: str, text: str) -> int:
    from shardwise.data.sample_stream import rank_positions
    from shardwise.optim.optimizer_factory import make_optimizer
    from shardwise.parallel.parallelize import parallelize
    from shardwise.step import step
    from shardwise.verify.parity import make_stream

    asked = job(way)
    engine = parallelize(prepare(asked, Layout.parse(text)), torch.device("cpu"))
    engine.timer.bytes_sent.clear()
    data = engine.mesh["data"]
    samples = make_stream(asked).read(rank_positions(0, asked.samples, data.size, data.index))
    step(engine, make_optimizer(asked.optimizer, engine.param_shards), samples, 1.0)
    return engine.timer.bytes_sent["data"]


def test_bytes_are_what_the_formula_says():
    shapes = [weight for weight in shapes_of_it() if len(weight) > 1]
    prepare(job("onebit"), Layout.parse("replicate=2"))  # once, for all ranks
    whole = sum(rows * columns for rows, columns in shapes)
    (first, second) = run_world(sent_by, 2, "onebit", "replicate=2")
    blocks = sum(-(-rows * columns // 64) for rows, columns in shapes)
    assert first == second == blocks * (4 + 8)
    padded = sum(-(-rows // 2) * columns for rows, columns in shapes)
    assert run_world(sent_by, 2, "bf16", "shard=2") == [2 * padded] * 2
    thin = sum(2 * (rows + columns) for rows, columns in shapes)
    for rank in run_world(sent_by, 2, "powersgd:rank=2", "replicate=2"):
        assert rank == 8 * thin < 8 * whole / 4


def shapes_of_it() -> list[torch.Size]:
    chain = job("bf16").family.build_on_meta(job("bf16").model)
    return [weight.shape for _, weight in chain.named_unique_parameters()]


@pytest.mark.thin(4)
@pytest.mark.parametrize(("way", "after", "layout", "other"), [
    ("topk:0.05", 0, "replicate=2", "shard=3 zero=1"), ("powersgd:rank=2", 1, "shard=2 zero=2", "replicate=3"),
    ("onebit", 3, "shard=2 zero=1", "replicate=2"),
])  # fmt: skip
def test_debts_are_kept(way, after, layout, other, tmp_path):
    """A run that goes on in the same layout is the same run; in another it goes on owing as much. The first `after`
    steps are plain."""
    more = {"model": MODEL | {"layers": 1}, "data": {"source": "synthetic", "samples": 96}, "steps": 4,
            "checkpoint": {"every": 2}, "optimizer": {"schedule": "constant", "warmup": 0, "lr": 3e-3}}  # fmt: skip
    folders = [{"folder": str(tmp_path / name), "device": "cpu"} for name in ("a", "b", "c")]
    runs = [job(way, after=after, **more, run=folder) for folder in folders]
    records = list(train(runs[0], layout).metrics())
    assert [record["step"] for record in records if "gradient_bytes" in record] == list(range(after + 1, 5))
    whole = [record["loss"] for record in records]
    with pytest.raises(RunError):
        train(runs[1], layout, die_after=2)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    for one, text in zip(runs[1:], (layout, other), strict=True):
        found = [record["loss"] for record in train(one, text, resume=True).metrics()]
        assert found == (whole if text == layout else pytest.approx(whole, rel=0.02))


def test_debts_that_are_forgotten_are_caught(monkeypatch):
    right = gradient_reduction.Compressor._encode_with_feedback

    def careless(self, name, rows, numel):
        self.residual.clear()
        return right(self, name, rows, numel)

    monkeypatch.setattr(gradient_reduction.Compressor, "_encode_with_feedback", careless)
    prepare(job("topk:0.1"), Layout.parse("replicate=2"))  # once, for all ranks
    record = verify_compressed(job("topk:0.1"), Layout.parse("replicate=2"))
    assert record.failure is None and record.first_difference is not None
    assert (record.first_difference.step, record.first_difference.kind) == (2, "gradient")  # the first is plain


def test_what_cannot_be_had():
    with pytest.raises(JobError, match="is lossy, so no layout equals one process; verify the layout without it"):
        verify(job("int8"), [Layout.parse("replicate=2")])
    with pytest.raises(JobError, match="'topk' is not a compression method; use fp16"):
        job("topk")
    with pytest.raises(JobError, match="compress_after"):
        job("int8", after=-1)
    with pytest.raises(JobError, match="use bf16"):
        make_job({"precision": "fp16", "gradient": {"compress": "int8"}})
    with pytest.raises(LayoutError, match="with context=2"):
        prepare(job("int8"), Layout.parse("context=2"))
