"""`gradient.all_reduce`: every way of summing trains what one process trains, or is refused in a sentence."""

from __future__ import annotations

import pytest
from test_verify import tiny

from shardwise.errors import LayoutError
from shardwise.job import GradientConfig, Job, make_job
from shardwise.layout import Layout
from shardwise.parallel.gradient_reduction import check
from shardwise.planner.dryrun.dry_run import dry_run
from shardwise.verify.parity import verify


def job_with(all_reduce: str, nproc_per_node: int = 0, samples: int = 12) -> Job:
    job = tiny(samples, layers=2, vocab=61, ffn=50, heads=4)
    return job.model_copy(update={"gradient": GradientConfig(all_reduce=all_reduce, nproc_per_node=nproc_per_node)})


@pytest.mark.parametrize(
    ("all_reduce", "nproc_per_node", "layouts"),
    [
        ("ring", 0, ["replicate=3 micro_batch=2", "replicate=2 tensor=2", "shard=2 zero=1"]),
        ("halving", 0, ["replicate=6", "shard=3 zero=1"]),
        ("tree", 0, ["replicate=4", "replicate=2 pipeline=2", "replicate=2 shard=2 zero=1"]),
        ("two-level", 2, ["replicate=4", "replicate=2 shard=2 zero=1", "replicate=2 context=2"]),
        ("two-level", 0, ["replicate=2"]),
    ],
)
def test_training_is_that_of_one_process(all_reduce: str, nproc_per_node: int, layouts: list[str]) -> None:
    records = verify(job_with(all_reduce, nproc_per_node), [Layout.parse(text) for text in layouts], steps=2)
    assert [record.describe() for record in records if not record.ok] == []


def test_recommenders_too() -> None:
    model = {"name": "dlrm", "tables": 3, "rows": 50, "width": 4, "lookups": 2, "bottom": [8], "top": [8]}
    job = make_job({
        "precision": "float64", "model": model, "batch": {"samples": 6}, "data": {"source": "synthetic"},
        "gradient": {"all_reduce": "halving"},
    })  # fmt: skip
    assert all(record.ok for record in verify(job, [Layout.parse("replicate=3")], steps=2))


@pytest.mark.parametrize(
    ("all_reduce", "nproc_per_node", "layout", "said"),
    [
        ("ring", 0, "shard=2 zero=3", "use zero=1 or gradient.all_reduce"),
        ("tree", 0, "replicate=2 shard=2 zero=2", "with zero=2 FSDP"),
        ("two-level", 2, "replicate=3", "split ranks 0, 1, 2 unevenly"),
        ("two-level", 3, "replicate=3 tensor=2", "split ranks 0, 2, 4 unevenly"),
        ("two-level", 4, "shard=3 context=2 zero=1", "nodes of 4 processes"),
    ],
)
def test_refused_before_the_run(all_reduce: str, nproc_per_node: int, layout: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        check(GradientConfig(all_reduce=all_reduce, nproc_per_node=nproc_per_node), Layout.parse(layout))


def test_nodes_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check(GradientConfig(all_reduce="two-level"), Layout.parse("replicate=8"))
    with pytest.raises(LayoutError, match="nodes of 4 processes"):
        check(GradientConfig(all_reduce="two-level"), Layout.parse("replicate=6"))


def test_a_dry_run_counts_the_messages() -> None:
    layout = Layout.parse("replicate=2 tensor=2")
    library, ring = ({(t.axis, t.kind): t.bytes for t in dry_run(job_with(all_reduce), layout, [0])[0].traffic}
                     for all_reduce in ("library", "ring"))  # fmt: skip
    assert ring["replicate", "send"] == library["replicate", "all-reduce"]
