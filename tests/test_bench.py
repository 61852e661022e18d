"""What `shardwise bench` says of a small job, and of sums over processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from shardwise.bench.train_step import StepReport, bench_step, classify_kernel
from shardwise.cluster import CLUSTERS, find_cluster
from shardwise.comm.world import run_world
from shardwise.errors import JobError, LayoutError
from shardwise.job import make_job
from shardwise.planner.calibrate import KERNEL_CATEGORIES

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import links as comm  # noqa: E402
from data_loading import DataReport, StageTimer, bench_data  # noqa: E402

MODEL = {"layers": 2, "width": 32, "heads": 2, "vocab": 64, "sequence": 32}


def measured() -> StepReport:
    return bench_step(make_job({"model": MODEL, "batch": {"samples": 2}}), torch.device("cpu"), steps=3)


def test_where_the_time_goes() -> None:
    report = run_world(measured, 1)[0]
    assert report.tokens == 64 and report.seconds > 0 and not report.compiled and not report.uses_cuda_graph
    assert {"matmul", "attention", "head", "elementwise", "optimizer"} <= report.time_breakdown.keys()
    assert report.time_breakdown.keys() >= set(KERNEL_CATEGORIES.values())  # what `calibrate` reads on a GPU
    text = report.text()
    assert "tokens/s" in text and "matmul" in text and "GiB" not in text
    assert report.as_dict()["tokens_per_second"] == pytest.approx(64 / report.seconds)


def fed(kind: str) -> DataReport:
    images = {"name": "resnet", "depth": 18, "stem": "cifar", "width": 2, "image_size": 8, "num_classes": 3}
    data = {"source": "synthetic", "augment": ["flip", "cutout"] if kind == "images" else []}
    job = make_job({"model": images if kind == "images" else MODEL, "batch": {"samples": 2}, "data": data})
    return bench_data(job, torch.device("cpu"), steps=3)


@pytest.mark.parametrize(("kind", "stages"), [
    ("tokens", ["order", "read", "objective", "collate", "transfer"]),
    ("images", ["order", "read", "decode", "augment", "collate", "transfer"]),
])  # fmt: skip
def test_what_a_step_waits_for(kind: str, stages: list[str]) -> None:
    report = run_world(fed, 1, kind)[0]
    assert list(report.stage_seconds) == stages and all(report.stage_seconds.values())
    assert 0 <= report.wait_fraction < 1 and report.loader_samples_per_s > 0 and report.slowest_stage in stages
    assert (
        f"the slowest stage is {report.slowest_stage}" in report.text()
        and report.as_dict()["wait_fraction"] == report.wait_fraction
    )


def test_a_stage_does_not_count_what_it_calls() -> None:
    timer = StageTimer()
    inner = timer.wrap("inner", lambda: time.sleep(0.02))
    timer.wrap("outer", lambda: (inner(), inner()))()
    assert timer.seconds["inner"] >= 0.04 > 0.02 > timer.seconds["outer"]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("void cudnn::fusion::fmha_reduce_head<true>(void const*)", "attention"),
        ("_adamw", "optimizer"),
        ("triton_poi_fused_mul_silu_8", "elementwise"),
    ],
)
def test_kernels_by_name(kernel: str, kind: str) -> None:
    assert classify_kernel(kernel) == kind


def test_what_cannot_be_measured() -> None:
    with pytest.raises(LayoutError, match="one device"):
        bench_step(make_job({"layout": "tensor=2"}), torch.device("cpu"))
    with pytest.raises(JobError, match="a kernel for GPUs"):
        bench_step(make_job({"sdpa_backend": "cudnn", "model": MODEL}), torch.device("cpu"))


def made_up() -> comm.CommReport:
    """A network of 0.1 ms and 1 GB/s."""
    sizes = [1 << 10, 1 << 16, 1 << 24]
    links = {"inner": comm.AlphaBetaFit(1e-4, 1e9, 0.0), "outer": comm.AlphaBetaFit(1e-3, 1e8, 0.0)}
    return comm.CommReport(4, 2, sizes, [1e-4 * 6 + 1.5 * size / 1e9 for size in sizes], links)


def test_a_network_is_found_and_told_in_words() -> None:
    report = made_up()
    assert report.fit.latency == pytest.approx(1e-4) and report.fit.median_error < 1e-9
    assert report.fit.bandwidth == pytest.approx(1e9)
    assert "inner link     0.1 ms per step, 1000 MB/s" in report.text()


def test_links_go_into_a_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    comm.write_links(made_up(), file)
    found = find_cluster(str(file))
    assert (found.domain_size, found.inner.bandwidth, found.outer.latency) == (2, 1e9, 1e-3)
    assert found.device == CLUSTERS["cpu"].device
    with pytest.raises(JobError, match="does not exist"):
        comm.write_links(made_up(), tmp_path / "nowhere" / "cluster.toml")


def test_sums_are_measured() -> None:
    report = comm.bench_comm(3, None, 1 << 12, repeats=1)
    assert report is not None and report.sizes == [1 << 10, 1 << 12] and report.processes_per_node == 1
    assert all(time > 0 for time in report.seconds) and report.steps == 4
    assert set(report.links) == {"outer"} and report.as_dict()["fit"]
    with pytest.raises(JobError, match="do not divide into nodes of 2"):
        comm.bench_comm(3, 2, 1 << 12, repeats=1)
