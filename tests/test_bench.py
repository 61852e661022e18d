"""What `shardwise bench step` says of a small job."""

from __future__ import annotations

import pytest
import torch

from shardwise.bench.step import StepReport, bench_step, kind_of_work
from shardwise.comm.world import run_world
from shardwise.errors import JobError, LayoutError
from shardwise.job import make_job

MODEL = {"layers": 2, "width": 32, "heads": 2, "vocab": 64, "sequence": 32}


def measured() -> StepReport:
    return bench_step(make_job({"model": MODEL, "batch": {"samples": 2}}), torch.device("cpu"), steps=3)


def test_where_the_time_goes() -> None:
    report = run_world(measured, 1)[0]
    assert report.tokens == 64 and report.seconds > 0 and not report.compiled and not report.recorded
    assert {"matrix products", "attention", "head", "elementwise", "optimizer"} <= report.parts.keys()
    text = report.text()
    assert "tokens/s" in text and "matrix products" in text and "GiB" not in text
    assert report.as_dict()["tokens_per_second"] == pytest.approx(64 / report.seconds)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("void cudnn::fusion::fmha_reduce_head<true>(void const*)", "attention"),
        ("_adamw", "optimizer"),
        ("triton_poi_fused_mul_silu_8", "elementwise"),
    ],
)
def test_kernels_by_name(kernel: str, kind: str) -> None:
    assert kind_of_work(kernel) == kind


def test_what_cannot_be_measured() -> None:
    with pytest.raises(LayoutError, match="one device"):
        bench_step(make_job({"layout": "tensor=2"}), torch.device("cpu"))
    with pytest.raises(JobError, match="a kernel for GPUs"):
        bench_step(make_job({"attention": "cudnn", "model": MODEL}), torch.device("cpu"))
