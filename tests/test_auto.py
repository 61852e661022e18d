"""`layout = "auto"`: the planner's choice for this machine, and the plan that is kept beside a run."""

from __future__ import annotations

import multiprocessing
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cluster import CLUSTERS, GIB, Cluster, cluster_by_driver_name, find_cluster
from shardwise.errors import JobError, LayoutError
from shardwise.job import Job, load_job, make_job
from shardwise.launch.start import DEMO, start_training
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.planner import calibrate
from shardwise.planner.plan import make_estimator, make_plan, near_misses, resolve_layout
from shardwise.planner.search import class_layouts, layout_classes, search
from shardwise.train import local_machine
from shardwise.train.local_machine import check_memory, choose_plan, describe_plan, plan_record
from shardwise.verify.command import prove
from shardwise.verify.parity import verify

SMALL = {"layers": 2, "width": 32, "heads": 4, "vocab": 256, "sequence": 16}


def job_of(**more: object) -> Job:
    return make_job({"model": SMALL, "batch": {"samples": 8}, "run": {"device": "cpu"}, **more})


def choose_layout(job: Job, world_size: int | None = None) -> Layout:
    return choose_plan(job, world_size)[0].best.layout


def on(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    """Takes this machine for another."""
    monkeypatch.setattr(local_machine, "local_cluster", lambda job, processes: (cluster, "a test"))


def test_the_demo_runs_as_copies_on_two_cores() -> None:
    job = load_job(DEMO, ["run.device=cpu", "run.processes=2"])
    assert str(choose_layout(job)) == "replicate=2 micro_batch=4"


def test_fewer_processes_where_the_batch_cannot_use_all() -> None:
    layout = choose_layout(
        job_of(batch={"samples": 5}, run={"device": "cpu", "processes": 4}, model=SMALL | {"heads": 1})
    )
    assert layout.world in (1, 2)  # 4 ranks can share 5 samples in no way; 2 can as stages
    with pytest.raises(LayoutError, match="7"):
        choose_layout(job_of(batch={"samples": 5}), world_size=7)


@pytest.mark.thin(9)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("more", [{}, {"compile": True}, {"precision": "bf16"}, {"batch": {"samples": 48}}])
def test_what_is_chosen_can_run(devices: int, more: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu", "h100"):
        on(monkeypatch, CLUSTERS[name])
        job = job_of(**more)
        try:
            layout = choose_layout(job, world_size=devices)
        except LayoutError:
            assert job.samples % devices, "copies would do"
            continue
        assert layout.world == devices
        prepare(job, layout)


def test_a_large_model_is_cut_and_a_larger_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, CLUSTERS["h100"])
    job = make_job({"model": {"name": "llama3-8b"}, "precision": "bf16", "batch": {"samples": 64}})
    plan, _ = choose_plan(job, world_size=8)
    check_memory(job, plan)
    assert plan.best.layout.shard > 1 or plan.best.layout.tensor > 1 or plan.best.layout.pipeline > 1
    large = make_job({"model": {"name": "gpt3-175b"}, "precision": "bf16", "batch": {"samples": 64}})
    plan, _ = choose_plan(large, world_size=8)
    with pytest.raises(LayoutError, match=r"no layout of 8 x H100-80GB fits in memory: '.*' needs least, [\d.]+ of 79"):
        check_memory(large, plan)


def test_of_equals_the_plainest() -> None:
    """And a choice that is not within a percent of the fastest is never made."""
    job = job_of(batch={"samples": 32})
    for devices in (2, 4):
        plan = make_plan(job, CLUSTERS["cpu"], devices, runnable=True)
        assert plan.best.seconds <= 1.01 * min(one.seconds for one in plan.layouts)
        assert len({str(one.layout) for one in plan.layouts}) == len(plan.layouts)


@pytest.mark.parametrize("text", ["pipeline=2 schedule=interleaved virtual=2", "pipeline=4", "shard=4", "tensor=4"])
def test_alternatives_that_do_not_exist_are_passed_over(text: str) -> None:
    """A pipeline of two becomes none; stages beyond the model's pieces; heads that do not divide."""
    job = job_of(batch={"samples": 16})
    judge = make_estimator(job, CLUSTERS["cpu"])
    lines = list(near_misses(judge, judge.predict(resolve_layout(job, judge.shape, Layout.parse(text)))))
    assert lines and len({line.partition(":")[0] for line in lines}) == len(lines)


def test_what_this_machine_is_taken_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster, source = local_machine.local_cluster(job_of(), 4)
    assert (cluster.device.family, cluster.domain_size, source) == ("cpu", 4, "the CPU preset")
    assert local_machine.local_cluster(job_of(run={"cluster": "h200"}), 4) == (CLUSTERS["h200"], "h200")
    with pytest.raises(JobError, match="h20O"):
        local_machine.local_cluster(job_of(run={"cluster": "h20O"}), 4)
    monkeypatch.setattr(local_machine, "pick_device", lambda job: "cuda")
    for name, gib, expected in (
        ("NVIDIA A100-SXM4-40GB", 39.5, "A100-40GB"), ("NVIDIA H100 80GB HBM3", 79.6, "H100-80GB"),
        ("NVIDIA H200", 140.0, "H200"), ("Tesla V100-SXM2-16GB", 16.0, "V100-16GB"),
        ("A future GPU", 300.0, "A future GPU"),
    ):  # fmt: skip
        monkeypatch.setattr(local_machine, "first_gpu", lambda name=name, gib=gib: (name, gib * GIB))
        cluster, source = local_machine.local_cluster(job_of(), 2)
        assert (cluster.device.name, cluster.domain_size) == (expected, 2)
        assert ("unknown GPU" in source) == (expected == name)
    assert cluster_by_driver_name("NVIDIA GB200") == CLUSTERS["gb200"]


@pytest.mark.parametrize("text", ["auto", "pipeline=2 schedule=gpipe stages=1,1", "shard=2 zero=3 recompute=0.5"])
def test_the_plan_of_a_run(text: str) -> None:
    job = job_of(layout=text)
    plan, source = choose_plan(job, world_size=2)
    record = plan_record(job, plan, source)
    ranks = record["predicted"]["memory_gib"]
    assert len(ranks) == plan.best.layout.pipeline
    sums = [sum(rank.values()) - rank["pipeline_rank"] for rank in ranks]
    assert max(sums) == pytest.approx(record["predicted"]["peak_memory_gib"])
    assert record["predicted"]["step_seconds"] > 0
    assert bool(record["rejected"]) == (text == "auto") == describe_plan(plan, source).startswith("best of")


def test_a_calibrated_machine_is_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "MIN_SECONDS", 0.01)
    monkeypatch.setattr(calibrate, "COLLECTIVE_CALLS", 4)
    monkeypatch.setattr(calibrate, "FRESH_PROCESSES", False)
    said = calibrate.calibrate_to_file(tmp_path / "here.toml", processes=3, device="cpu")
    assert "3 x CPU" in said
    cluster = find_cluster(str(tmp_path / "here.toml"))
    assert cluster.measured["uncontended_speedup"] >= 1 and cluster.inner.bandwidth > 0 and cluster.inner.latency > 0
    plan, source = choose_plan(job_of(run={"device": "cpu", "cluster": str(tmp_path / "here.toml")}), world_size=2)
    assert plan.cluster == cluster and source.endswith("here.toml") and plan.best.seconds > 0


def test_the_search_is_exact_where_processes_share_processors() -> None:
    shared = replace(CLUSTERS["cpu"], measured={**CLUSTERS["cpu"].measured, "uncontended_speedup": 2.5})
    judge = make_estimator(job_of(batch={"samples": 16}, model=SMALL | {"layers": 6}), shared)
    every = [judge.predict(layout) for base in layout_classes(judge, 4) for layout in class_layouts(judge, base)]
    fitting = sorted(one.seconds for one in every if one.peak_memory <= shared.device.memory)
    assert [one.seconds for one in search(judge, 4).best] == pytest.approx(fitting[:10])
    alone = make_estimator(judge_job := job_of(batch={"samples": 16}, model=SMALL | {"layers": 6}), CLUSTERS["cpu"])
    pipeline = resolve_layout(judge_job, alone.shape, Layout.parse("pipeline=4"))
    assert judge.predict(pipeline).seconds < alone.predict(pipeline).seconds


def test_a_cpu_without_16_bit_matmuls_is_planned_as_slow_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {}
    for slowdown in (1.0, 300.0):
        monkeypatch.setattr(local_machine, "low_precision_slowdown", lambda job, times=slowdown: times)
        seconds[slowdown] = choose_plan(job_of(model=SMALL, precision="bf16"), world_size=1)[0].best.seconds
    assert seconds[300.0] > 5 * seconds[1.0]


def _train(settings: list[str], transcript: Path) -> None:
    said: list[str] = []
    start_training(None, settings, None, said.append)
    transcript.write_text("\n".join(said))


def test_training_follows_the_plan(tmp_path: Path) -> None:
    settings = [
        "steps=1",
        f"run.folder={tmp_path / 'run'}",
        "run.device=cpu",
        "run.processes=1",
        "data.source=synthetic",
    ]
    settings += [f"model.{key}={value}" for key, value in SMALL.items()]
    # Not here: processes that are forked later would find the locks of threads that they do not have.
    transcript = tmp_path / "transcript.txt"
    process = multiprocessing.get_context("fork").Process(target=_train, args=(settings, transcript))
    process.start()
    process.join()
    assert process.exitcode == 0
    said = transcript.read_text().splitlines()
    plan = tomllib.loads((tmp_path / "run" / "plan.toml").read_text())
    assert Layout.parse(plan["layout"]).world == plan["world"] == 1
    assert any(line.strip() == plan["reason"] for line in said)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert f"layout '{plan['layout']}'" in events


def test_a_pipeline_where_processes_share_cores_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores, four processes in `pipeline=2 replicate=2` took 6 to 12% less than in `replicate=4`."""
    monkeypatch.setattr(local_machine, "core_count", lambda: 2)
    job = job_of(model=SMALL | {"layers": 4, "width": 128, "sequence": 128}, batch={"samples": 16})
    plan, source = choose_plan(job, world_size=4)
    assert plan.best.layout.pipeline > 1 and "more processes than cores" in describe_plan(plan, source)
    monkeypatch.setattr(local_machine, "core_count", lambda: 4)
    assert "cores" not in describe_plan(*choose_plan(job, world_size=4))


# Modules whose batch may not be cut


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize(
    ("norm", "processes"),
    [
        ("batch 1d", 2),
        ("batch 2d", 2),
        ("batch without statistics", 2),
        ("sync", 2),
        ("group", 2),
        ("instance", 2),
        ("tracked instance", 1),
        ("running", 1),
        ("replacing", 1),
    ],
)
def test_what_is_chosen_for_a_normalised_module_is_proven(
    norm: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has set a micro-batch, so nobody may be told of one. A module that updates buffers runs in one process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = {"device": "cpu", "processes": 2}
    model = {"name": "python:user_modules:normalised", "args": {"norm": norm}}
    job = make_job({"model": model, "batch": {"samples": 32}, "run": run})

    layout = choose_layout(job)
    assert layout.world == processes

    said: list[str] = []
    prove(prepare(job, layout), said.append)
    assert len(said) == processes - 1  # with one process there is nothing to prove
    (result,) = verify(job.model_copy(update={"precision": "float64"}), [layout], steps=2)
    assert result.ok, result.describe()


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        ("batch 2d", "its batch norms take means over all samples that run together"),
        ("running", "its forward updates the buffer 1.mean from the samples that run together"),
    ],
)
def test_a_batch_that_may_not_be_cut_is_refused_by_what_was_set(norm: str, reason: str) -> None:
    job = make_job(
        {"model": {"name": "python:user_modules:normalised", "args": {"norm": norm}}, "batch": {"samples": 32}}
    )
    sentence = (
        r"layout 'micro_batch=4' cuts the 32 samples of each rank into 8 micro-batches, but this module "
        rf"must run them as one, because {reason}; leave micro_batch out of the layout"
    )
    with pytest.raises(LayoutError, match=sentence):
        prepare(job, Layout.parse("micro_batch=4"))
