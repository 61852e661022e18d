"""Reads rows of measured runs (the columns of `planner_accuracy.py --help`) into what the planner takes.

Where a source does not say something, the assumption stands here and nowhere else:

- `precision` fp16, or a tensor axis with `sp` 0, marks software of before fused attention and overlapped gradient sums
  (Megatron-LM of 2020 to 2022, DeepSpeed): the square of scores is written. All else: fused, overlapped.
- A stated `zero_stage` marks PyTorch's own operators, one by one unless `compile` says otherwise, and FlashAttention 2;
  not in 8 bits without a word on compiling (Transformer Engine). There "selective" recomputes half of it all, ZeRO 3
  keeps weights gathered in a pipeline, and with a word on compiling (torchtitan) the loss is PyTorch's own. GPT-OSS,
  whose attention has sinks, has no newer attention either.
- `recompute` not given: full where FLOP/s count it, else the least that fits into the memory. `micro_batch` not given:
  1 in a pipeline (with ZeRO 3: as many micro-batches as ranks of it), else the largest of 16, 8, 4, 2, 1 that fits; on
  TPUs, where nobody accumulates, all of it.
- `zero_stage` not given: 3 on TPUs and where no layout is given at all, 0 in software of the fp16 time, else 1.
  `sp` not given: on, where the tensor axis cuts and the run is not fp16. A note "zero1=8" says that optimizer states
  are sharded over 8 ranks. `virtual_pp` not given: 1, but a stage per layer where fewer than four micro-batches per
  stage would leave a large bubble. `ep` not given: experts over 8 ranks.
- `global_batch` not given: one micro-batch per data rank. `vocab` not given: 51,200; padded to a multiple of 128.
  `head_size`: width / heads, or that of the public model.
- Step time: as given, else from tokens a second, else from FLOP/s by the source's way of counting (`tflops_kind`).
- V100 nodes of four have two NVLinks between any two devices. "H100-94GB-HBM2e" is Meta's Grand Teton (torchtitan).
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.cluster import CLUSTERS, GB, Cluster, LinkSpec
from shardwise.layout import Layout
from shardwise.planner.costs.block_time import FUSED_LOSS_BYTES, KernelProfile, Machine
from shardwise.planner.costs.efficiency import Efficiency, efficiency_of
from shardwise.planner.costs.memory_model import FrameworkProfile
from shardwise.planner.costs.model_shape import ModelShape
from shardwise.planner.estimate import Estimator, Prediction, Workload

GPUS = {
    "H100-SXM-80GB": "h100", "A100-80GB": "a100-80g", "A800-80GB": "a100-80g", "A100": "a100-80g",
    "A100-40GB": "a100-40g", "V100-32GB": "v100-32g", "V100-16GB": "v100-16g", "H200-SXM-141GB": "h200",
    "B200-SXM": "b200", "B300-SXM": "b300", "GB200-NVL72": "gb200", "GB300-NVL72": "gb300", "MI250X-GCD": "mi250x",
    "TPU-v4": "tpu-v4", "TPU-v5e": "tpu-v5e", "TPU-v5p": "tpu-v5p", "TPU-v7x-Ironwood": "tpu-v7x",
    "H100-NVL-94GB": "h100-94g", "H100-94GB-HBM2e": "h100-hbm2e", "H100-96GB-HBM2e": "h100-hbm2e",
    "GH200-96GB": "h100-96g",
}  # fmt: skip


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run."""

    source: str
    quality: str
    cluster: Cluster
    shape: ModelShape
    kernel_profile: KernelProfile
    layout: Layout
    samples: int
    sequence_parallel: bool
    framework_profile: FrameworkProfile
    recompute_known: bool
    seconds: float | None
    memory: float | None
    values: dict[str, str]


# What kinds of software keep: DeepSpeed and Megatron-LM of the fp16 time; PyTorch's own operators, where the ZeRO stage
# is stated, and FSDP with a fused loss for stage 3; XLA on TPUs; Megatron-Core with Transformer Engine, where the stage
# is not stated (gradients stay in 16 bits there).
LEGACY_MEGATRON = FrameworkProfile(
    gradient_bytes=2.0,
    optimizer_bytes=16.0,
    cast_bytes=None,
    keeps_dropout_masks=True,
    logits=10.0,
    fragmentation=0.2,
    fixed_bytes=5.2 * 2**30,
)
PYTORCH_EAGER = FrameworkProfile(
    gradient_bytes=4.0,
    keeps_gathered_inputs=True,
    has_unfused_activation=True,
    logits=8.0,
    fragmentation=0.25,
    fixed_bytes=3.2 * 2**30,
)
PYTORCH_FSDP = FrameworkProfile(gradient_bytes=4.0, logits=6.0, fragmentation=0.03, fixed_bytes=1.5 * 2**30)
XLA_TPU = FrameworkProfile(gradient_bytes=2.0, logits=4.0, fragmentation=0.0, fixed_bytes=0.5 * 2**30)
MEGATRON_CORE = FrameworkProfile(gradient_bytes=2.0, fragmentation=0.04, fixed_bytes=2 * 2**30)


class SkipRow(Exception):
    """Why a row cannot be used."""


def parse_number(values: dict[str, str], key: str, default: float | None = None) -> float:
    text = values.get(key) or ""
    if not text.strip():
        if default is None:
            raise SkipRow(f"{key} is not given")
        return default
    return float(text)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def model_shape_of_row(v: dict[str, str]) -> ModelShape:
    layers, width = int(parse_number(v, "layers")), int(parse_number(v, "hidden"))
    model = v["model"].lower()
    heads = int(parse_number(v, "heads", max(1, width // 128)))
    kv = int(parse_number(v, "kv_heads", heads))
    ffn = int(parse_number(v, "ffn_hidden", 4 * width))
    size = width // heads
    sequence = int(parse_number(v, "seq_len"))
    total = parse_number(v, "params_b", 0.0) * 1e9
    vocab = -(-int(parse_number(v, "vocab", 51200)) // 128) * 128  # everybody pads the vocabulary
    experts, chosen = int(parse_number(v, "experts", 0)), int(parse_number(v, "experts_per_token", 0))
    more: dict[str, int] = {}
    if "qwen3" in model or "maxtext" in model:
        size = 128
    if "gpt-oss" in model or "gpt oss" in model:
        size = 64
    if "deepseek" in model or "kimi" in model:
        size = 128
        more = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    # Whether the feed-forward part is gated shows in the number of parameters, or in a hidden size off 4 x width.
    gated = ffn != 4 * width
    if total and not experts:
        attention = 2 * width * size * (heads + kv) + 0
        per_layer = (total - vocab * width * 1.5) / layers - attention
        gated = per_layer / (width * ffn) > 2.5
    shape = ModelShape(layers=layers, width=width, heads=heads, kv_heads=kv, head_dim=size, ffn=ffn, vocab=vocab,
                  sequence=sequence, gated=gated or bool(experts), **more)  # fmt: skip
    if total and not experts:
        tied = abs(shape.parameters - vocab * width - total) < abs(shape.parameters - total)
        return replace(shape, tied=tied)
    if not experts:
        return replace(shape, tied=True)
    # Experts: their width and the part that all tokens use follow from the total and the active parameters.
    sparse = layers
    if "deepseek" in model:
        sparse = layers - 3
    elif "kimi" in model:
        sparse = layers - 1
    elif "maverick" in model:
        sparse = layers // 2
    rest = total - shape.parameters + layers * shape.dense_ffn_weights - (layers - sparse) * shape.dense_ffn_weights
    if not total:
        expert_ffn = ffn
    else:
        expert_ffn = max(64, round(rest / (sparse * 3 * width * experts) / 64) * 64)
    known = {"deepseek": (2048, 2048), "kimi": (2048, 2048), "maverick": (8192, 8192)}
    shared = 0
    for key, (own, common) in known.items():
        if key in model:
            expert_ffn, shared = own, common
    dense_ffn = 16384 if "maverick" in model else ffn
    return replace(
        shape,
        ffn=dense_ffn,
        experts=experts,
        experts_per_token=chosen,
        expert_ffn=expert_ffn,
        shared_expert_ffn=shared,
        sparse_layers=sparse,
    )


def parse_row(v: dict[str, str]) -> MeasuredRun:
    if v["gpu"] not in GPUS:
        raise SkipRow(f"no data sheet for {v['gpu']}")
    if "lora" in v["model"].lower():
        raise SkipRow("trains adapters only")
    cluster = CLUSTERS[GPUS[v["gpu"]]]
    per_node = int(parse_number(v, "gpus_per_node", cluster.domain_size))
    if cluster.topology == "switch" and cluster.domain_size <= 8:
        cluster = replace(cluster, domain_size=min(per_node, 8))
    note = v.get("note", "")
    found = re.search(r"(\d+) ?x ?(\d+) ?Gb", note)
    if found:
        cluster = replace(cluster, outer=LinkSpec(int(found[1]) * int(found[2]) / 8 * GB / per_node, 8e-6))
    if "Jean Zay A100" in note:  # four Omni-Path ports of 100 Gbit/s for eight devices
        cluster = replace(cluster, outer=LinkSpec(4 * 12.5 * GB / 8, 8e-6))
    if cluster.device.family == "volta" and per_node == 4:  # no switch: two links of 25 GB/s between any two devices
        cluster = replace(cluster, inner=LinkSpec(50 * GB, cluster.inner.latency))
    shape = model_shape_of_row(v)
    gpus = int(parse_number(v, "gpus"))
    tp, pp, cp = int(parse_number(v, "tp", 1)), int(parse_number(v, "pp", 1)), int(parse_number(v, "cp", 1))
    ep = int(parse_number(v, "ep", min(shape.experts, 8, gpus // (tp * pp)) or 1))
    dp = gpus // (tp * pp * cp)
    if dp < 1 or dp * tp * pp * cp != gpus:
        raise SkipRow("tensor x pipeline x context does not divide the devices")
    if v.get("flag"):
        raise SkipRow(f"flagged: {v['flag']}")
    precision_text = v["precision"].lower()
    precision = (
        "fp16"
        if precision_text == "fp16"
        else "fp4"
        if "fp4" in precision_text
        else "fp8"
        if "fp8" in precision_text
        else "bf16"
    )
    is_legacy = precision == "fp16" or (v["sp"] == "0" and tp > 1)
    has_no_layout = not (v["tp"] or v["pp"] or v["dp"])
    zero = int(
        parse_number(v, "zero_stage", 3 if has_no_layout or cluster.device.family == "tpu" else 0 if is_legacy else 1)
    )
    shard = int(parse_number(v, "fsdp", dp))
    if sharded := re.search(r"zero1=(\d+)", note):
        shard = int(sharded[1])
    if zero == 0 or dp == 1:
        shard = 1
    shard = min(shard, dp)
    micro = int(parse_number(v, "micro_batch", 0))
    samples = int(parse_number(v, "global_batch", dp * max(1, micro)))
    if not micro and zero == 3 and pp > 1:  # PyTorch's own pipelines: as many micro-batches as stages
        micro = max(1, samples // dp // pp)
    virtual = int(parse_number(v, "virtual_pp", 0)) if pp > 1 else 1
    if not virtual:
        waits = not is_legacy and samples // dp // max(1, micro) < 4 * pp
        virtual = shape.layers // pp if waits else 1
    schedule = "interleaved" if virtual > 1 else "1f1b"
    recompute = v["recompute"] or ("full" if v["tflops_kind"] == "hardware" else "")
    compiled = v.get("compile", "")
    if zero == 3 and not is_legacy and cluster.device.family != "tpu":
        if recompute == "selective":  # PyTorch's own keeps every second layer, or every second product
            recompute = "0.5"
        if pp > 1:  # weights stay gathered from micro-batch to micro-batch
            zero = 1
    layout = Layout(
        pipeline=pp, tensor=tp, context=cp, expert=ep, shard=shard, replicate=dp // shard, zero=max(1, zero),
        schedule=schedule, virtual=virtual if virtual > 1 else 0, micro_batch=micro, recompute=recompute or "none",
    )  # fmt: skip
    sp = v["sp"] == "1" if v["sp"] else (not is_legacy and tp > 1)
    if is_legacy:
        framework_profile = LEGACY_MEGATRON
        if precision == "bf16":  # a second set of gradients, of 32 bits, to which each micro-batch's are added
            framework_profile = replace(framework_profile, gradient_bytes=6.0, cast_bytes=16.0)
        elif v["sp"] == "1":  # Megatron-LM since 2022 adds gradients in the kernels that make them
            framework_profile = replace(framework_profile, cast_bytes=0.0)
    elif cluster.device.family == "tpu":
        framework_profile = XLA_TPU
    elif v["zero_stage"]:
        zero_3 = v["zero_stage"] == "3"
        framework_profile = PYTORCH_FSDP if zero_3 else PYTORCH_EAGER
        if zero_3 and dp == 1:  # FSDP shards over the ranks of the context too
            framework_profile = replace(framework_profile, optimizer_bytes=framework_profile.optimizer_bytes / cp)
        if compiled:  # torchtitan: PyTorch's own loss, and memory as the allocator reserves it
            framework_profile = replace(framework_profile, logits=12.0, fragmentation=0.13)
    else:
        framework_profile = replace(MEGATRON_CORE, selective_keeps_matmuls=not recompute)
    model = v["model"].lower().replace(" ", "-")  # whose attention has sinks, which the newest kernels had not
    # Transformer Engine, if nobody speaks of compiling, or PyTorch's own operators.
    is_pytorch_native = (
        bool(v["zero_stage"]) and cluster.device.family != "tpu" and (precision == "bf16" or bool(compiled))
    )
    eager = is_legacy or (is_pytorch_native and compiled in ("", "0"))
    kernel_profile = KernelProfile(
        precision,
        fused_attention=not is_legacy,
        flash_attention_2=not is_legacy and (is_pytorch_native or "gpt-oss" in model),
        overlap_comm=not is_legacy,
        eager=eager,
        loss_bytes_per_logit=None if is_legacy else FUSED_LOSS_BYTES,
    )
    return MeasuredRun(
        v["source"],
        v.get("quality", ""),
        cluster,
        shape,
        kernel_profile,
        layout,
        samples,
        sp,
        framework_profile,
        bool(recompute),
        measured_seconds(v, shape, gpus, samples, bool(recompute == "full")),
        parse_number(v, "peak_mem_gib", 0.0) or None,
        v,
    )


def measured_seconds(
    v: dict[str, str], shape: ModelShape, gpus: int, samples: int, is_full_recompute: bool
) -> float | None:
    if v["iter_time_s"]:
        return float(v["iter_time_s"])
    if v["tokens_per_s_per_gpu"]:
        return samples * shape.sequence / (float(v["tokens_per_s_per_gpu"]) * gpus)
    if not v["tflops_per_gpu"]:
        return None
    tokens = samples * shape.sequence
    square = 12 * tokens * shape.layers * shape.sequence * shape.attention_width
    flops = 6 * shape.active_parameters * tokens + square
    if v["tflops_kind"] == "hardware":
        head = 6 * shape.vocab * shape.width * tokens
        flops = (flops - head) * (4 / 3 if is_full_recompute else 1) + head
    return flops / (float(v["tflops_per_gpu"]) * 1e12 * gpus)


def evaluate_run(
    row: MeasuredRun, efficiency: Efficiency | None = None, may_recompute: bool = True
) -> tuple[Prediction, Layout]:
    """The prediction, and the layout with its micro-batch and recomputation filled in."""
    e = efficiency or efficiency_of(row.cluster.device.family, row.cluster.measured)
    e = replace(e, unaligned_8=e.unaligned_64)  # everybody rounds sides up to multiples of 8
    machine, limit = Machine(row.cluster, e), row.cluster.device.memory
    layout = row.layout
    if not layout.micro_batch:
        samples_per_rank = max(1, row.samples // layout.data)
        sizes = [n for n in (16, 8, 4, 2) if samples_per_rank % n == 0] if layout.pipeline == 1 else []
        min_micro_batch = samples_per_rank if row.cluster.device.family == "tpu" else 1
        layout = next(
            (
                tried
                for n in sizes
                if (tried := replace(layout, micro_batch=n)) and _predict(row, machine, tried).peak_memory <= limit
            ),
            replace(layout, micro_batch=min_micro_batch),
        )
    prediction = _predict(row, machine, layout)
    if row.recompute_known or prediction.peak_memory <= limit or not may_recompute:
        return prediction, layout
    # The least recomputation that fits: the share of blocks that keeps everything follows from the memory.
    for recompute in ("selective", *(f"{share / 10:.1f}" for share in range(9, 0, -1)), "full"):
        layout = replace(layout, recompute=recompute)
        prediction = _predict(row, machine, layout)
        if prediction.peak_memory <= limit:
            break
    return prediction, layout


def predicted_seconds(row: MeasuredRun, layout: Layout, efficiency: Efficiency) -> float:
    """Step time alone, of a layout that is filled in."""
    estimator = Estimator(
        Machine(row.cluster, replace(efficiency, unaligned_8=efficiency.unaligned_64)), _workload(row)
    )
    return estimator.step_timing(layout).seconds


def _workload(row: MeasuredRun) -> Workload:
    return Workload(row.shape, row.kernel_profile, row.samples, row.framework_profile, row.sequence_parallel)


def _predict(row: MeasuredRun, machine: Machine, layout: Layout) -> Prediction:
    return Estimator(machine, _workload(row)).predict(layout)
