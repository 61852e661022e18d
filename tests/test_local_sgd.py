"""Replicas that train apart: against one process that trains them in turn, through checkpoints, with bugs planted."""

import pytest
from test_train import train

from shardwise.errors import JobError, LayoutError, RunError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.parallel import local_sgd
from shardwise.parallel.prepare import prepare
from shardwise.verify.parity import verify

MODEL = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61, "sequence": 16, "dropout": 0.1}
NESTEROV = {"every": 3, "outer_optimizer": "nesterov"}


def job(how: dict[str, object], **more: object) -> Job:
    return make_job({"precision": "float64", "model": MODEL, "batch": {"samples": 12}, "local_sgd": how, **more})


WAYS = {
    "average": {"every": 2},
    "nesterov": NESTEROV,
    "fragments": {"every": 4, "outer_optimizer": "nesterov", "fragments": 3, "outer_lr": 0.5},
}


@pytest.mark.thin(8)
@pytest.mark.parametrize(("layout", "way"), [
    ("replicate=3", "average"), ("replicate=2 shard=2 zero=3", "average"), ("replicate=2 shard=2 zero=1", "nesterov"),
    ("pipeline=2 replicate=2 tensor=2", "nesterov"), ("replicate=2", "fragments"),
    ("replicate=2 context=2", "fragments"),
])  # fmt: skip
def test_replicas_are_those_of_one_process(layout, way):
    (record,) = verify(job(WAYS[way]), [Layout.parse(layout)], steps=5)
    assert record.ok, record.describe()


def test_experts_and_images_apart():
    moe = MODEL | {"name": "moe", "experts": 4, "expert_ffn": 16, "layers": 1}
    resnet = {"name": "resnet", "depth": 18, "stem": "cifar", "width": 4, "image_size": 8, "num_classes": 3}
    for model, text in ((moe, "replicate=2 shard=2 expert=2"), (resnet, "replicate=2")):
        (record,) = verify(job({"every": 2}, model=model), [Layout.parse(text)], steps=2)
        assert record.ok, record.describe()


@pytest.mark.thin(2)
@pytest.mark.parametrize(("how", "layout"), [(NESTEROV, "replicate=2"), ({"every": 4}, "replicate=2 shard=2 zero=2")])
def test_a_run_goes_on_between_two_meetings(how, layout, tmp_path):
    model = MODEL | {"layers": 1}
    data = {"source": "synthetic", "samples": 96}
    more = {"model": model, "data": data, "steps": 8, "checkpoint": {"every": 2}}
    runs = [job(how, **more, run={"folder": str(tmp_path / name), "device": "cpu"}) for name in ("a", "b")]
    whole = [record["loss"] for record in train(runs[0], layout).metrics()]
    with pytest.raises(RunError):
        train(runs[1], layout, die_after=4)
    assert [record["loss"] for record in train(runs[1], layout, resume=True).metrics()] == whole


def late(patch):
    right = local_sgd.is_sync_due
    patch.setattr(local_sgd, "is_sync_due", lambda how, done, part, last: right(how, done - 1, part, last))


def without_momentum(patch):
    right = local_sgd.OuterOptimizer.after_step

    def after_step(self, done, last):
        for state in self.state:
            state["momentum"].zero_()
        right(self, done, last)

    patch.setattr(local_sgd.OuterOptimizer, "after_step", after_step)


@pytest.mark.thin(4)
@pytest.mark.parametrize("plant", [late, without_momentum], ids=lambda plant: plant.__name__)
def test_planted_bugs_are_caught(plant, monkeypatch):
    plant(monkeypatch)
    (record,) = verify(job(NESTEROV), [Layout.parse("replicate=2")], steps=6)
    assert record.failure is None and record.first_difference is not None
    assert record.first_difference.kind == "weight", record.describe()


def test_what_cannot_be_had():
    with pytest.raises(LayoutError, match="has one; use replicate=2"):
        prepare(job(NESTEROV), Layout.parse("shard=2"))
    with pytest.raises(LayoutError, match="remove one of them"):
        prepare(job(NESTEROV, gradient={"compress": "int8"}), Layout.parse("replicate=2"))
    with pytest.raises(LayoutError, match="a DLRM's tables are shared by all replicas"):
        prepare(job(NESTEROV, model={"name": "dlrm"}), Layout.parse("replicate=2"))
    with pytest.raises(JobError, match="a step sends at most one"):
        job({"every": 2, "fragments": 3})
