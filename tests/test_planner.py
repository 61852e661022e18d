"""The planner: shapes against real models, the search against brute force, the command's forms."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.cluster import CLUSTERS, DEVICES, Efficiency, find_cluster, read_cluster, write_cluster
from shardwise.console import format_count, format_seconds
from shardwise.errors import JobError, LayoutError
from shardwise.job import BatchConfig, Job, load_job, make_job
from shardwise.layout import Layout
from shardwise.models.gpt import build_gpt
from shardwise.parallel.prepare import prepare
from shardwise.planner.costs.machine import KernelProfile, Machine, efficiency_of
from shardwise.planner.costs.memory_model import FrameworkProfile
from shardwise.planner.costs.model_shape import shape_of
from shardwise.planner.estimate import Estimator, split_evenly
from shardwise.planner.plan import HIGHEST, count_parameters, make_estimator, make_plan, out_of_memory_risk, plan_job
from shardwise.planner.search import class_layouts, class_lower_bound, layout_classes, search
from shardwise.planner.show import layouts_table, title

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from planner_gpu import JOBS  # noqa: E402

MAY_BE_ZERO = {name for name in Efficiency.__annotations__ if name.startswith("overlap_")} - {"overlap_sharpness"} | {
    "kernel_launch", "matmul_half_rate_depth", "wave_quantization", "latency", "collective_start", "expert_kernels",
    "jitter", "fixed_seconds", "bulk_memory", "compiled", "low_precision_casts", "all_reduce", "weight_gather",
    "split_backward"}  # fmt: skip

SHAPES = [
    {"layers": 3, "width": 48, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 101, "sequence": 32, "tied": True},
    {"layers": 2, "width": 64, "heads": 8, "vocab": 61, "sequence": 16, "activation": "gelu", "positions": "learned",
     "tied": False},
]  # fmt: skip


def estimator(name: str = "llama3-8b", cluster: str = "h100", samples: int = 64) -> Estimator:
    found = CLUSTERS[cluster]
    machine = Machine(found, efficiency_of(found.device, found.measured))
    shape = shape_of(make_job({"model": {"name": name}}).model)
    return Estimator(machine, shape, KernelProfile("bf16"), samples, FrameworkProfile())


@pytest.mark.parametrize("values", SHAPES)
def test_weights_of_a_shape_are_those_of_the_model(values: dict[str, object]) -> None:
    """But for norms and biases, which no cost depends on."""
    job = make_job({"model": values})
    model = build_gpt(job.model, 0)
    matrices = sum(weight.numel() for weight in dict(model.named_unique_parameters()).values() if weight.dim() > 1)
    assert shape_of(job.model).parameters == matrices


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt2", 0.124), ("gpt3-175b", 174.6), ("llama3-8b", 8.03), ("llama3-405b", 405.8),
                           ("gpt-1t", 1008.0)],
)  # fmt: skip
def test_published_sizes(name: str, billions: float) -> None:
    parameters = shape_of(make_job({"model": {"name": name}}).model).parameters
    assert parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("layers", "pipeline"), [(8, 4), (7, 3), (126, 16), (5, 5), (10, 4)])
def test_blocks_are_spread_evenly(layers: int, pipeline: int) -> None:
    counts = split_evenly(layers, pipeline)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert counts[0] == min(counts)


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    ("cluster", "devices", "samples"), list(product(("h100", "a100-40g", "gb200"), (4, 8, 16), (32, 64)))
)
def test_the_search_is_exact(cluster: str, devices: int, samples: int) -> None:
    """It finds what looking at every layout finds."""
    judge = estimator(cluster=cluster, samples=samples)
    every = [judge.predict(layout) for base in layout_classes(judge, devices) for layout in class_layouts(judge, base)]
    fitting = sorted(p.seconds for p in every if p.peak_memory <= judge.machine.device.memory)
    found = search(judge, devices)
    assert found.evaluated <= len(every)
    if fitting:
        assert [p.seconds for p in found.best] == pytest.approx(fitting[:10])
    else:
        assert found.best[0].peak_memory == pytest.approx(min(p.peak_memory for p in every))


def test_no_layout_of_a_class_is_below_its_bound() -> None:
    judge = estimator("llama3-70b", samples=128)
    for base in layout_classes(judge, 16):
        least = class_lower_bound(judge, base)
        for layout in class_layouts(judge, base):
            assert judge.min_seconds(layout) >= least


def test_the_quick_peak_is_that_of_the_fullest_rank() -> None:
    judge = estimator("llama3-70b", samples=128)
    for base in layout_classes(judge, 32):
        for layout in list(class_layouts(judge, base))[::7]:
            peaks = [judge.memory(layout, rank).total for rank in range(layout.pipeline)]
            assert judge.peak_memory(layout) == pytest.approx(max(peaks))


def test_fixed_stages_add_up_by_rank() -> None:
    for schedule in ("interleaved", "zbv"):
        layout = Layout.parse(f"pipeline=2 schedule={schedule} micro_batch=1 stages=6,8,9,9")
        assert [rank.blocks for rank in estimator().stages(layout).ranks] == [15, 17]


def test_more_memory_for_less_time() -> None:
    """Recomputation takes time and saves memory; ZeRO stages save memory."""
    judge = estimator()
    layout = "shard=8 micro_batch=4"
    none, full = (judge.predict(Layout.parse(f"{layout} recompute={word}")) for word in ("none", "full"))
    assert full.seconds > none.seconds
    assert full.peak_memory < none.peak_memory
    peaks = [judge.predict(Layout.parse(f"{layout} zero={zero}")).peak_memory for zero in (1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True)


def test_context_ranks_share_the_weights_of_the_shard_ranks() -> None:
    """The same 64 ranks gather the weights, or reduce the gradients, however many of them split sequences."""
    judge = estimator("llama3-70b", samples=512)
    for words in ("zero=3 shard", "zero=1 shard", "replicate"):
        layouts = [Layout.parse(f"{words}={64 // n} context={n} micro_batch={n} recompute=full") for n in (1, 2, 4, 8)]
        exposed = [judge.predict(layout).exposed["data"] for layout in layouts]
        assert exposed == pytest.approx([exposed[0]] * 4)


def test_every_device_has_a_cluster() -> None:
    assert {cluster.device.name for cluster in CLUSTERS.values()} == set(DEVICES)


def test_an_unknown_cluster_is_told_with_the_nearest() -> None:
    with pytest.raises(JobError, match="a100-80g"):
        find_cluster("a100-80gb")


def test_a_plan_says_why_others_lost() -> None:
    job = make_job({"precision": "bf16", "model": {"name": "llama3-8b"}, "batch": {"samples": 64}})
    plan = make_plan(job, CLUSTERS["h100"], 16)
    assert plan.fits(plan.best)
    assert plan.near_misses
    assert all(": " in line for line in plan.near_misses)
    (plain,) = [line for line in plan.near_misses if line.startswith("replicate=16 and no other axis: ")]
    same = replace(Layout(replicate=16), micro_batch=plan.best.layout.micro_batch, recompute=plan.best.layout.recompute)
    assert f"{make_estimator(job, CLUSTERS['h100']).predict(same).peak_memory / 2**30:.0f} GiB" in plain


def test_no_pipeline_means_the_fastest_layout_without_one() -> None:
    settings = ["model.name=llama3-70b", "batch.samples=128", "precision=bf16"]
    plan = plan_job(None, settings, "h200", 16, None)
    fastest = search(make_estimator(plan.job, plan.cluster), 16, keep=100).best
    best = next(prediction for prediction in fastest if prediction.layout.pipeline == 1)
    slower = f"{100 * (best.seconds / plan.best.seconds - 1):.1f}% slower"
    assert plan.near_misses[0].startswith(f"no pipeline, {best.layout}: {slower}")


def test_a_batch_that_no_layout_can_run_is_told_with_the_nearest() -> None:
    """63 devices: no schedule runs 32 samples on 63 stages, and neither 3, 7, 9, 21 nor 63 data ranks divide them."""
    job = make_job({"precision": "bf16", "model": {"name": "llama3-70b"}, "batch": {"samples": 32}})
    with pytest.raises(LayoutError, match=r"32 samples; the nearest that work: batch.samples=33, or 62 devices\."):
        make_plan(job, CLUSTERS["h100"], 63)
    assert make_plan(job.model_copy(update={"batch": BatchConfig(samples=33)}), CLUSTERS["h100"], 63).best
    assert make_plan(job, CLUSTERS["h100"], 62).best


@pytest.mark.parametrize(("devices", "nearest"), [(99_999, r"33333, or 1,280"), (10**6, r"25000, or 1,280")])
def test_that_is_told_at_once_of_many_devices_too(devices: int, nearest: str) -> None:
    """They were tried one by one, for minutes."""
    with pytest.raises(LayoutError, match=rf"32 samples; the nearest that work: batch.samples={nearest} devices\."):
        make_plan(make_job({"model": {"name": "gpt"}, "batch": {"samples": 32}}), CLUSTERS["h100"], devices)


@pytest.mark.parametrize("cluster", [[], ["--cluster", "h100"]])
def test_a_layout_of_another_number_of_devices_is_told(cluster: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", "--layout", "shard=4", "--devices", "2", *cluster])
    assert isinstance(result.exception, LayoutError) and "4 devices, not 2; leave --devices out" in str(
        result.exception
    )


def test_no_other_choice_that_fits_is_faster_than_the_best() -> None:
    """16 tensor ranks and 8 key-value heads: the weights of attention are on every rank, and do not fit."""
    plan = plan_job(None, ["model.name=llama3-70b", "batch.samples=1", "precision=bf16"], "h100", 64, None)
    assert any(line.startswith("tensor=16 (crosses node boundaries): does not fit") for line in plan.near_misses)
    assert not any("faster" in line for line in plan.near_misses)


def test_the_command_for_machines(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('precision = "bf16"\n[model]\nname = "llama3-8b"\n[batch]\nsamples = 64\n')
    result = CliRunner().invoke(app, ["plan", str(job), "--cluster", "h100", "--devices", "8", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) >= {"search_seconds", "evaluated", "layouts"}
    assert set(found["layouts"][0]) == {
        "layout", "fits", "step_seconds", "tokens_per_second_per_device", "model_flops_per_device",
        "hardware_flops_per_device", "peak_memory_gib", "bubble", "exposed", "reason",
        "memory_range_gib", "out_of_memory_risk",
    }  # fmt: skip
    seconds = [layout["step_seconds"] for layout in found["layouts"]]
    assert seconds == sorted(seconds)
    only = CliRunner().invoke(app, ["plan", str(job), "--cluster", "h100", "--layout", "shard=8 zero=3", "--json"])
    assert len(json.loads(only.stdout)["layouts"]) == 1


def test_what_is_told_of_the_batch_the_nodes_and_long_steps() -> None:
    settings = ["model.name=llama3-70b", "precision=bf16"]
    few = plan_job(None, [*settings, "batch.samples=1"], "h100", None, "pipeline=5 tensor=2 micro_batch=1 schedule=zbv")
    assert "batch of 1 sample of 8192 tokens" in title(few) and "between nodes, not whole nodes of 8)" in title(few)
    long = plan_job(
        None, [*settings, "batch.samples=512"], "h100", None, "shard=64 zero=3 micro_batch=1 recompute=full"
    )
    assert list(layouts_table(long).columns[1].cells) == [f"{long.best.seconds:.1f} s"]
    assert 60 < long.best.seconds < 70 and "whole nodes" not in title(long)


def test_the_plan_names_a_batch_that_more_layouts_divide() -> None:
    settings = ["model.name=llama3-8b", "model.sequence=4096"]
    odd = plan_job(None, [*settings, "batch.samples=61"], "h100", 24, None)
    assert any(line.startswith("batch.samples=60: ") and "faster per sample" in line for line in odd.near_misses)
    large = plan_job(None, ["model.name=llama3-70b", "batch.samples=250", "precision=bf16"], "h100", 32, None)
    assert any(line.startswith("batch.samples=256: ") for line in large.near_misses)
    assert "450 GB/s per device, 50 GB/s between nodes" in title(large)
    even = plan_job(None, [*settings, "batch.tokens=256k"], "h100", 24, None)
    assert not any(line.startswith("batch") for line in even.near_misses) and "(batch.tokens = 256k" in title(even)


@pytest.mark.thin(3)
@pytest.mark.parametrize("samples", [480, 512])
def test_the_plan_names_the_most_blocks_that_need_not_be_recomputed(samples: int) -> None:
    settings = ["model.name=llama3-70b", f"batch.samples={samples}", "precision=bf16"]
    found = plan_job(None, settings, "h100", 64, None)
    (change,) = re.findall(r"(recompute=0\.\d+ micro_batch=\d): \d\.\d% faster, ", "\n".join(found.near_misses))
    rest = re.sub(r"(recompute|micro_batch)=\S+", "", str(found.best.layout))
    kept = plan_job(None, settings, "h100", 64, f"{rest} {change}")
    assert found.best.layout.recompute == "full" and kept.best.seconds < 0.99 * found.best.seconds
    judge, blocks = make_estimator(found.job, found.cluster), round(80 * kept.best.layout.kept_fraction)
    fits = [judge.fits(replace(kept.best.layout, recompute=f"{count / 80}")) for count in (blocks, blocks + 1)]
    assert int(80 * kept.best.layout.kept_fraction) == blocks and fits == [True, False]


def test_stages_keep_whole_blocks() -> None:
    """Of two blocks a stage, a quarter is none: as the engine does it, and not a quarter of the time."""
    settings = ["model.name=llama3-8b", "model.layers=16", "batch.samples=64", "precision=bf16"]

    def planned(recompute: str) -> tuple[float, float, float]:
        found = plan_job(None, settings, "h100", 8, f"pipeline=8 micro_batch=1 recompute={recompute}")
        return found.best.seconds, found.best.peak_memory, found.hardware_flops(found.best)

    full, quarter, half, none = map(planned, ("full", "0.25", "0.5", "none"))
    assert quarter == full and full[0] > half[0] > none[0] and full[1] < half[1] < none[1]
    model = plan_job(None, settings, "h100", 8, "pipeline=8 micro_batch=1")
    assert none[2] == pytest.approx(model.flops(model.best)) and full[2] > none[2] * none[0] / full[0]


def llama_job(tmp_path: Path, samples: int = 64) -> str:
    job = tmp_path / "job.toml"
    job.write_text(f'precision = "bf16"\n[model]\nname = "llama3-8b"\n[batch]\nsamples = {samples}\n')
    return str(job)


def test_the_jobs_own_layout_is_told_and_this_machine_is_the_default(tmp_path: Path) -> None:
    found = plan_job(Path(llama_job(tmp_path)), ["layout=tensor=8"], "h100", 8, None)
    assert any(line.startswith("the job's own layout, tensor=8") for line in found.near_misses)
    found = plan_job(Path(llama_job(tmp_path)), ["layout=tensor=8"], "h100", 16, None)
    assert any(re.search("own layout, tensor=8.*, on 8 devices$", line) for line in found.near_misses)
    settings = ["--set", "run.processes=3", "--set", "run.device=cpu", "--json"]
    here = json.loads(CliRunner().invoke(app, ["plan", *settings]).stdout)["layouts"][0]["layout"]
    assert Layout.parse(here).world == 3
    (only,) = json.loads(CliRunner().invoke(app, ["plan", "--layout", "tensor=2", *settings]).stdout)["layouts"]
    assert only["layout"].startswith("tensor=2")


def test_a_plan_fits_at_the_upper_end_and_says_how_risky_a_tight_layout_is(tmp_path: Path) -> None:
    found = plan_job(Path(llama_job(tmp_path)), [], "h100", 8, None)
    limit = found.cluster.device.memory
    assert all(p.peak_memory * HIGHEST <= limit for p in found.layouts)
    peak = found.best.peak_memory / 2**30
    tight = replace(found.cluster, device=replace(found.cluster.device, memory=1.02 * found.best.peak_memory))
    sentence = replace(found, cluster=tight).memory_verdict(found.best)
    assert f"{peak:.3g} of {1.02 * peak:.3g} GiB" in sentence and "tight, 1 in " in sentence
    assert out_of_memory_risk(1.0, 100.0) == 0.0 < out_of_memory_risk(1.0, 1.02) < out_of_memory_risk(1.0, 0.9) < 1.0
    given = plan_job(Path(llama_job(tmp_path)), [], "h100", None, "shard=8 micro_batch=2 zero=3 recompute=selective")
    assert "GiB" in given.memory_verdict(given.best)


def test_price_energy_and_what_would_make_it_faster(tmp_path: Path) -> None:
    command = ["plan", llama_job(tmp_path), "--cluster", "h100", "--devices", "16", "--layout", "shard=16 zero=3"]
    result = CliRunner().invoke(app, [*command, "--price", "2.5"])
    assert result.exit_code == 0, result.output
    hours = plan_job(Path(command[1]), [], "h100", 16, "shard=16 zero=3").training_seconds / 3600 * 16
    assert f"Cost at 2.5 for an hour of a device: {2.5 * hours:,.2f}, if it did fit." in result.output
    assert "Energy at the devices' rated 700 W" in result.output and "Bottleneck: matmul FLOP/s." in result.output
    for cluster in ("h100", "a100-80g", "b200"):  # also where the power limits the clock
        peak = CLUSTERS[cluster].device.peak_flops("bf16") / 1e12
        given = Path(command[1]), [f"cluster.flops={2 * peak:g}"], cluster, 16, "shard=16 zero=3"
        faster, usual = plan_job(*given).best, plan_job(given[0], [], *given[2:]).best
        assert 0.5 < faster.seconds / usual.seconds < 0.9


def test_a_batch_that_fits_is_named_where_nothing_does() -> None:
    given = ["model.name=llama3-8b", "precision=bf16"]
    plan = plan_job(None, [*given, "batch.samples=1024"], "h100", 7, None)
    assert not plan.fits(plan.best)
    assert any(line.startswith("batch.samples=1022: fits, in shard=7") for line in plan.near_misses)
    assert plan_job(None, [*given, "batch.samples=1022"], "h100", 7, None).best.peak_memory < 80 * 2**30


def test_frozen_weights_need_no_gradients() -> None:
    given = ["model.name=llama3-8b", "precision=bf16", "batch.samples=8"]
    full, lora = (plan_job(None, [*given, *more], "h200", 8, None) for more in ([], ["model.lora.rank=16"]))
    ratio = lora.flops(lora.best) * lora.best.seconds / (full.flops(full.best) * full.best.seconds)
    assert 2 / 3 < ratio < 0.69 and lora.mfu(lora.best) < 0.7


def test_what_is_told_of_the_accuracy_is_about_such_plans() -> None:
    assert plan_job(None, [], "cpu", 2, None).accuracy.startswith("On CPU processes")
    assert plan_job(None, ["model.name=gpt2"], "h100", 2, None).accuracy.startswith("Our engine was measured on one")
    assert plan_job(None, ["model.name=gpt2"], "tpu-v5p", 4, None).accuracy.startswith("Of 1,")
    t5 = plan_job(None, ["model.name=t5", "precision=bf16", "batch.samples=64"], "h200", 1, "replicate=1")
    assert t5.accuracy.startswith("Of models planned from their operators")
    # On an H200 it took 14.2 GiB (docs/explanation/train-on-a-gpu.md): compiled blocks save what matmuls return.
    assert (t5.best.peak_memory - t5.best.memory[0].reserve) / 2**30 == pytest.approx(14.2, rel=0.05)


def test_memory_does_not_depend_on_what_was_predicted_before() -> None:
    asked = estimator("gpt3-175b", "h200", 256)
    layout = Layout.parse("pipeline=4 shard=8 context=2 tensor=4 schedule=zbv micro_batch=1 zero=2")
    alone = estimator("gpt3-175b", "h200", 256).peak_memory(layout)
    asked.peak_memory(replace(layout, schedule="1f1b"))
    assert asked.peak_memory(layout) == alone


def test_power_limits_the_clock() -> None:
    shares = {name: efficiency_of(DEVICES[name], {}).matmul for name in ("B200", "GB200", "GB300", "H100-80GB", "H200")}
    assert shares["B200"] < shares["GB200"] < shares["GB300"] < 1 and shares["H100-80GB"] == shares["H200"]
    unknown = replace(DEVICES["GB200"], power=0.0)  # watts nobody stated limit nothing
    assert efficiency_of(unknown, {}).matmul == pytest.approx(shares["GB200"], rel=1e-3)
    assert efficiency_of(DEVICES["B200"], {"matmul": 0.5}).matmul == 0.5  # measured at its own clock


def test_a_plan_that_only_tight_layouts_fit_says_so(tmp_path: Path) -> None:
    job = Path(llama_job(tmp_path))
    least = plan_job(job, ["cluster.memory=1"], "h100", 8, None).best  # nothing fits: the least memory
    plan = plan_job(job, [f"cluster.memory={1.01 * least.peak_memory / 2**30:.6f}"], "h100", 8, None)
    assert plan.best.layout == least.layout and "tight" in plan.memory_verdict(plan.best)
    assert "no layout surely fits; this one needs the least memory" in plan.near_misses
    assert not any("less simple" in line for line in plan.near_misses)


def test_a_given_layout_is_checked_as_train_checks_it(tmp_path: Path) -> None:
    for layout, problem in (("replicate=2 zero=3", "shards over shard=N"), ("", "layout is empty")):
        result = CliRunner().invoke(app, ["plan", llama_job(tmp_path), "--cluster", "h100", "--layout", layout])
        assert problem in f"{result.output}{result.exception}"
    result = CliRunner().invoke(app, ["plan", llama_job(tmp_path), "--cluster", "h100", "--layout", "auto"])
    assert result.exit_code == 0 and "layouts evaluated" in result.output


def test_a_key_that_a_cluster_file_does_not_have_is_named(tmp_path: Path) -> None:
    write_cluster(CLUSTERS["h100"], file := tmp_path / "cluster.toml")
    assert read_cluster(file) == CLUSTERS["h100"]
    file.write_text("nodes = 5\n" + file.read_text())
    with pytest.raises(JobError, match="nodes: Unexpected"):
        read_cluster(file)


@pytest.mark.parametrize("name", Efficiency.__annotations__)
def test_a_measured_constant_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    bad = [-1.0, math.nan, math.inf, 1e30, "fast", True, {}, []]
    for value in bad if name in MAY_BE_ZERO else [0.0, 1e-300, *bad]:
        write_cluster(replace(CLUSTERS["h100"], measured={name: value}), file := tmp_path / "cluster.toml")
        with pytest.raises(JobError, match=rf"cluster.toml is not a cluster file \(measured.{name}: Input should "):
            read_cluster(file)


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("model", ["llama3-8b", "resnet-50"])
@pytest.mark.parametrize("value", [0.0, 1e-300, 0.01, 1e6], ids=["zero", "denormal", "small", "large"])
def test_what_is_not_refused_gives_a_plan(value: float, model: str, tmp_path: Path) -> None:
    """The least and the largest values at once."""
    most = {name: 1.0 if name.startswith(("overlap_", "wave_", "comp")) else 1e6 for name in Efficiency.__annotations__}
    measured = {name: min(value if name in MAY_BE_ZERO else max(0.01, value), most[name]) for name in most}
    measured["overlap_sharpness"] = max(0.01, min(value, 100.0))
    write_cluster(replace(CLUSTERS["h100"], measured=measured), file := tmp_path / "cluster.toml")
    settings = [f"model.name={model}", "precision=bf16", "batch.samples=64"]
    plan = plan_job(None, settings, str(file), 8, None)
    assert all(math.isfinite(layout["step_seconds"]) for layout in plan.as_dict()["layouts"])
    json.dumps(plan.as_dict(), allow_nan=False)


def test_what_if_the_link_between_nodes_were_slower(tmp_path: Path) -> None:
    job, layout = Path(llama_job(tmp_path)), "shard=16 zero=3"
    seconds = [plan_job(job, [f"cluster.node_link={rate}"], "h100", 16, layout).best.seconds for rate in (1, 10, 50)]
    assert seconds[0] > seconds[1] > seconds[2] == plan_job(job, [], "h100", 16, layout).best.seconds
    for setting in ("cluster.outre=3", "cluster.outer=-3", "cluster.outer=fast"):
        with pytest.raises(JobError, match=re.escape(setting)):
            plan_job(job, [setting], "h100", 16, layout)


def test_frozen_weights_in_few_bits_take_less_memory() -> None:
    sizes = {}
    for kind in ("", "int8", "nf4"):
        model = {"name": "llama3-8b", "layers": 4, "lora": {"rank": 16, "quantize": kind}}
        job = make_job({"precision": "bf16", "model": model, "batch": {"samples": 1}})
        estimator = make_estimator(job, find_cluster("h100"))
        sizes[kind] = estimator.predict(Layout.parse("micro_batch=1 recompute=full")).memory[0].weights / 2**30
    linear = 4 / 32 * (8.03e9 - 2 * 128256 * 4096) / 2**30  # of 4 of its 32 layers, without embedding and head
    assert sizes[""] - sizes["int8"] == pytest.approx(linear * (2 - 1.0625), rel=0.02)
    assert sizes[""] - sizes["nf4"] == pytest.approx(linear * (2 - 0.5625), rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "samples", "bf16", "fp8"),
    [({"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192}, 4, 49.9, 57.3),
     ({"layers": 28, "width": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192}, 2, 79.7, 88.0)],
)  # fmt: skip
def test_memory_of_fp8_is_as_measured(sizes: dict[str, int], samples: int, bf16: float, fp8: float) -> None:
    """On an H200, with compiled blocks; the allocator's reserve is no part of what was measured."""
    cluster = find_cluster("h200")
    model, layout = {**sizes, "vocab": 128256, "sequence": 8192, "tied": False}, f"micro_batch={samples}"
    peaks = {}
    for precision in ("bf16", "fp8"):
        job = make_job({"model": model, "batch": {"samples": samples}, "precision": precision})
        memory = make_plan(job, cluster, 1, layout).best.memory[0]
        peaks[precision] = (memory.total - memory.reserve) / 2**30
    assert peaks["bf16"] == pytest.approx(bf16, rel=0.02)
    assert peaks["fp8"] == pytest.approx(fp8, rel=0.02)


LLAMA = {"vocab": 128256, "sequence": 8192, "tied": False, "kv_heads": 8, "ffn": 8192}
SMALL, LARGE = {"layers": 16, "width": 2048, "heads": 32}, {"layers": 32, "width": 4096, "heads": 32, "ffn": 14336}
HALF_STATES = {"optimizer": {"state_dtype": "bf16"}}


@pytest.mark.thin(7)
@pytest.mark.parametrize(
    ("model", "settings", "layout", "milliseconds", "gib"),
    [(LLAMA | SMALL, {}, "micro_batch=4", 570, 49.9),
     (LLAMA | SMALL, {"precision": "fp8"}, "micro_batch=4", 453, 57.3),
     (LLAMA | LARGE, HALF_STATES, "micro_batch=1", 740, 104.6),
     (LLAMA | LARGE, {"precision": "fp8", **HALF_STATES}, "micro_batch=1", 539, 111.1),
     (LLAMA | SMALL | {"sequence": 131072}, {}, "micro_batch=1 recompute=full", 13772, 44.1),
     (LLAMA | SMALL | {"name": "moe", "experts": 8, "experts_per_token": 2, "expert_ffn": 4096}, {}, "micro_batch=4",
      674, 110.1),
     ({"name": "gpt2", "dropout": 0.0}, {}, "micro_batch=64", 118, 14.5)],
)  # fmt: skip
def test_plans_for_an_h200_are_what_was_measured(
    model: dict[str, Any], settings: dict[str, Any], layout: str, milliseconds: float, gib: float
) -> None:
    """Without `calibrate`; the constants of `clusters.toml` come from other jobs."""
    samples = Layout.parse(layout).micro_batch
    job = make_job({"precision": "bf16", "model": model, "batch": {"samples": samples}, **settings})
    best = make_plan(job, find_cluster("h200"), 1, layout).best
    assert 1e3 * best.seconds == pytest.approx(milliseconds, rel=0.12)
    assert (best.memory[0].total - best.memory[0].reserve) / 2**30 == pytest.approx(gib, rel=0.08)


MEASURED = {  # milliseconds and GiB, docs/explanation/planner.md
    "gpt2": (64.1, 6.33), "llama 1.3b": (414.5, 32.44), "fp8": (314.6, 36.31), "lora": (348.8, 22.38),
    "offload": (566.8, 25.47), "wide": (346.8, 71.04), "long": (657.3, 7.35), "gpt2-xl": (197.0, 33.34),
    "selective": (176.2, 33.80), "experts": (50.6, 19.61), "bert": (46.5, 8.42), "resnet": (37.5, 12.33),
}  # fmt: skip


@pytest.mark.thin(11)
@pytest.mark.parametrize("name", JOBS)
def test_plans_for_an_h200_are_what_the_jobs_of_the_page_took(name: str) -> None:
    """Without `calibrate`, with constants that were fitted to these times."""
    model, samples, layout, settings = JOBS[name]
    job = make_job({"precision": "bf16", "model": model, "batch": {"samples": samples}, **settings})
    best = make_plan(job, find_cluster("h200"), 1, layout).best
    milliseconds, gib = MEASURED[name]
    assert 1e3 * best.seconds == pytest.approx(milliseconds, rel=0.1)
    assert (best.memory[0].total - best.memory[0].reserve) / 2**30 == pytest.approx(gib, rel=0.03)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "bert-large"])
def test_fp8_counts_where_memory_is_in_closed_form(name: str) -> None:
    jobs = [make_job({"model": {"name": name}, "batch": {"samples": 8}, "precision": p}) for p in ("bf16", "fp8")]
    bf16, fp8 = (make_plan(job, find_cluster("h200"), 1, "micro_batch=1").best.memory[0] for job in jobs)
    assert fp8.activations > bf16.activations and fp8[:3] == bf16[:3]


def test_weights_that_zero3_gathers_are_buffers() -> None:
    """In both memory models, whose sums stay what they were."""
    for name in ("llama3-8b", "mixtral-8x7b"):
        job = make_job({"model": {"name": name}, "batch": {"samples": 64}, "precision": "bf16"})
        kept, gathered = (
            make_plan(job, find_cluster("h200"), 64, f"shard=64 micro_batch=1 zero={zero}").best.memory[0]
            for zero in (1, 3)
        )
        block = 2 * shape_of(job.model).parameters / shape_of(job.model).layers  # bytes in bf16
        assert gathered.buffers - kept.buffers > 1.5 * block
        assert gathered.activations > 0


@pytest.mark.parametrize("example", ["gpt", "bert", "moe", "t5", "dlrm", "resnet-cifar10"])
def test_plan_and_train_name_the_same_number_of_parameters(example: str) -> None:
    job = load_job(Path(f"examples/{example}.toml"), [])
    count = prepare(job, Layout()).parameters
    assert count_parameters(job) == count
    assert f" {format_count(count)} parameters" in title(make_plan(job, find_cluster("h100"), 1))


@pytest.fixture(scope="module")
def printed_plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    job = llama_job(tmp_path_factory.mktemp("job"))
    return CliRunner().invoke(app, ["plan", job, "--cluster", "h100", "--devices", "16"]).output


def test_one_key_of_an_alternative_is_said_to_be_the_only_change(printed_plan: str) -> None:
    first, *others = printed_plan.partition("Other choices")[2].splitlines()
    assert first.startswith(" (a key alone: layout 1 with only that and the data-parallel degree")
    assert any(line.startswith("  ") for line in others)
    layout = [line for line in printed_plan.splitlines() if line.startswith("  1  ")][0]
    changes = [line.split(":")[0].strip() for line in others if line.startswith("  ") and "=" in line.split(":")[0]]
    assert changes and not any(change in layout.split() for change in changes)


def test_times_have_units(printed_plan: str) -> None:
    told = [format_seconds(s) for s in (0.0123, 4.56, 428, 3723, 2 * 86400, 1e8)]
    assert told == ["12.3 ms", "4.56 s", "7:08 min", "1:02:03 h", "2.0 days", "1,157.4 days"]
    assert re.search(r"│ +1 │ *\d[\d.:]* (s|min) │", printed_plan)
    assert re.search(r"slower, \d[\d.:]* (ms|s|min)\s+more ", printed_plan)
    assert re.search(r"tokens\s+in\s+[\d.,:]+\s+(s|min|h|days)\s+without", printed_plan)


LONG = {"layers": 4, "width": 1024, "heads": 16, "vocab": 8192, "sequence": 2**16}
EXPERTS = {"experts": 8, "expert_ffn": 512}
LATENT = {"name": "deepseek-v3", "kv_heads": 16, "dense_layers": 1} | LONG | EXPERTS
WIDE = {"layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 1024, "vocab": 2**19, "sequence": 512}
# Jobs for which a search that asks nobody recommends layouts that training refuses, and the number of samples.
PARTLY_REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "latent attention": ({"model": LATENT}, 4),
    "expert capacity": ({"model": LONG | EXPERTS | {"name": "moe", "capacity_factor": 1.5}}, 4),
    "compressed gradients": ({"model": LONG, "gradient": {"compress": "int8"}}, 4),
    "batch norm": ({"model": {"name": "resnet-50", "image_size": 32}, "precision": "float32"}, 384),
    "tables": ({"model": {"name": "dlrm"}}, 1024),
    "frozen stages": ({"model": {"name": "llama3-8b", "lora": {"rank": 8, "targets": ["qkv"]}} | WIDE}, 4),
    "replicas": ({"model": {"name": "gpt2", "layers": 4}, "local_sgd": {"every": 4}}, 64),
    "compiled": ({"model": {"name": "gpt3-175b", "layers": 20}, "compile": True}, 64),
    "no batch of 2^n": ({"model": {"name": "resnet-50", "image_size": 32}, "precision": "float32"}, 336),
}


def is_refused(job: Job, layout: Layout) -> bool:
    with suppress(LayoutError):
        return prepare(job, layout).batch.micro_batch != layout.micro_batch
    return True


@pytest.mark.parametrize("name", PARTLY_REFUSED)
def test_what_is_recommended_is_what_training_accepts(name: str) -> None:
    values, samples = PARTLY_REFUSED[name]
    job = make_job({"precision": "bf16", "batch": {"samples": samples}} | values)
    devices = {"frozen stages": 16, "compiled": 16}.get(name, 8)
    found = make_plan(job, CLUSTERS["h100"], devices)
    assert not any(is_refused(job, prediction.layout) for prediction in found.layouts)
    judge = make_estimator(job, CLUSTERS["h100"])
    judge.check = lambda layout: None
    assert any(is_refused(job, prediction.layout) for prediction in search(judge, devices).best)


@pytest.mark.parametrize("model", ["t5", "bert-base", "mixtral-8x7b"])
def test_the_search_asks_whether_training_accepts_a_layout(model: str) -> None:
    job = make_job({"precision": "bf16", "model": {"name": model, "layers": 4}, "batch": {"samples": 64}})
    judge, asked = make_estimator(job, CLUSTERS["h100"]), list[Layout]()
    judge.check = lambda layout: asked.append(layout) or prepare(job, layout)  # type: ignore[func-returns-value]
    assert {prediction.layout for prediction in search(judge, 8).best} <= set(asked)
    judge.memory_limit = 1.0  # nothing fits: the one that needs the least
    assert not is_refused(job, search(judge, 8).best[0].layout)


def test_what_no_layout_can_run_ends_in_the_refusal() -> None:
    with pytest.raises(JobError, match="precision = 'fp8': a DLRM trains in bf16"):
        make_plan(make_job({"model": {"name": "dlrm"}, "precision": "fp8"}), CLUSTERS["h100"], 8)
    values = {"model": {"name": "gpt2"}, "local_sgd": {"every": 4}, "gradient": {"compress": "int8"}}
    with pytest.raises(LayoutError, match="cannot be combined with gradient.compress"):
        make_plan(make_job(values | {"batch": {"samples": 64}}), CLUSTERS["h100"], 8)


def test_a_batch_too_large_for_batch_norm_is_told() -> None:
    """No micro-batch of 1 is possible: the layout that needs the least memory is among those that can run."""
    job = make_job({"model": {"name": "resnet-50"}, "precision": "float32", "batch": {"samples": 2**14}})
    found = make_plan(job, CLUSTERS["h100"], 2)
    assert not found.fits(found.best) and not is_refused(job, found.best.layout)
