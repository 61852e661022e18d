"""Reads rows of measured runs (the columns of `planner_accuracy.py --help`) and predicts them.

Assumptions about what a source does not state:

- fp16, or tensor parallelism with `sp` 0, means Megatron-LM or DeepSpeed of 2020 to 2022: unfused attention and no
  overlapped gradient reduction. Everything else fuses and overlaps.
- A stated `zero_stage` means PyTorch's own operators, eager unless `compile` is set, with FlashAttention 2. 8-bit runs
  without a `compile` value are the exception: they use Transformer Engine. On PyTorch "selective" recomputes half of
  the blocks, ZeRO 3 in a pipeline keeps weights gathered, and a `compile` value means torchtitan, whose loss is
  PyTorch's own. With FSDP (ZeRO 3), an eager dense model's RMSNorm and rotary positions are too; other stages, and
  experts, come with fused ones. GPT-OSS (attention sinks) uses older attention kernels everywhere;
  MPT the first FlashAttention, written in Triton for its biases.
- `recompute`: full if the stated FLOP/s count it, else the least that fits into memory. `micro_batch`: 1 in a pipeline
  (with ZeRO 3: as many micro-batches as pipeline ranks), else the largest of 16, 8, 4, 2, 1 that fits; on TPUs, which
  do not accumulate gradients, the rank's whole batch.
- `zero_stage`: 3 on TPUs and where no layout is given, 0 for fp16-era software, else 1. `sp`: on with tensor
  parallelism, except in fp16. A note "zero1=8" means that optimizer state is sharded over 8 ranks. `virtual_pp`: 1, or
  one stage per layer where fewer than four micro-batches per stage would leave a large bubble. `ep`: 8.
- `global_batch`: one micro-batch per data rank. `vocab`: 51,200, padded to a multiple of 128; vTrain's is 50,257 and
  not padded (the default of its published configurations). `head_size`: width /
  heads, or that of the public model.
- Memory: Megatron-Core logs what PyTorch has allocated at most; others show what it, driver and buffers reserve.
- Step time: as stated, else from tokens per second, else from FLOP/s by the source's way of counting (`tflops_kind`).
- V100 nodes of four connect each pair of devices by two NVLinks. "H100-94GB-HBM2e" is Meta's Grand Teton (torchtitan).
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from frameworks import (
    FRAGMENTATION,
    LEGACY_MEGATRON,
    MEGATRON_CORE,
    PYTORCH_EAGER,
    PYTORCH_FSDP,
    XLA_TPU,
    FrameworkEfficiency,
    FrameworkEstimator,
    FrameworkKernels,
    FrameworkMemory,
    framework_efficiency,
)

from shardwise.cluster import CLUSTERS, GB, Cluster, LinkSpec
from shardwise.errors import LayoutError, UserError, shorten
from shardwise.layout import Layout
from shardwise.planner.costs.machine import Machine
from shardwise.planner.costs.model_shape import ModelShape
from shardwise.planner.estimate import Prediction

GPUS = {
    "H100-SXM-80GB": "h100", "A100-80GB": "a100-80g", "A800-80GB": "a100-80g", "A100": "a100-80g",
    "A100-40GB": "a100-40g", "V100-32GB": "v100-32g", "V100-16GB": "v100-16g", "H200-SXM-141GB": "h200",
    "B200-SXM": "b200", "B300-SXM": "b300", "GB200-NVL72": "gb200", "GB300-NVL72": "gb300", "MI250X-GCD": "mi250x",
    "TPU-v4": "tpu-v4", "TPU-v5e": "tpu-v5e", "TPU-v5p": "tpu-v5p", "TPU-v7x-Ironwood": "tpu-v7x",
    "H100-NVL-94GB": "h100-94g", "H100-94GB-HBM2e": "h100-hbm2e", "H100-96GB-HBM2e": "h100-hbm2e",
    "GH200-96GB": "h100-96g",
}  # fmt: skip

# Columns that a file must have: words, and numbers from the least to the largest that is taken for one.
WORDS = ("source", "model", "gpu", "precision", "recompute", "tflops_kind")
COUNTS = (
    "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "gpus", "gpus_per_node", "dp", "fsdp",
    "tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "global_batch",
)  # fmt: skip
MEASURED = ("iter_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_mem_gib", "params_b")
NUMBERS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(COUNTS, (1, 10**7)),
    **dict.fromkeys(("sp", "zero_stage", "experts", "experts_per_token"), (0, 10**7)),
    **dict.fromkeys(MEASURED, (1e-6, 1e12)),
}


@dataclass(frozen=True)
class MeasuredRun:
    source: str
    quality: str
    cluster: Cluster
    shape: ModelShape
    kernels: FrameworkKernels
    memory_profile: FrameworkMemory
    layout: Layout
    samples: int
    recompute_known: bool
    seconds: float | None
    """Measured step time."""
    memory: float | None
    """Measured peak memory, in GiB."""
    is_allocated: bool
    """Whether that is what PyTorch allocated, without the reserve of allocator, driver and communication."""
    values: dict[str, str]


class SkipRow(Exception):
    """Raised with the reason why a row cannot be predicted."""


def parse_number(values: dict[str, str], key: str, default: float | None = None) -> float:
    text = values.get(key) or ""
    if not text.strip():
        if default is None:
            raise SkipRow(f"{key} is not given")
        return default
    return float(text)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a file; raises UserError with the line and column of what no run can have."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if missing := [name for name in (*WORDS, *NUMBERS) if name not in (reader.fieldnames or ())]:
                raise UserError(f"{path}, line 1: no column {', '.join(missing)}; `--help` lists all.")
            rows = []
            for values in reader:
                if problem := row_problem(values):
                    raise UserError(f"{path}, line {reader.line_num}: {problem}.")
                rows.append(values)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file in UTF-8: {error}.") from None
    if not rows:
        raise UserError(f"{path} has no rows.")
    return rows


def row_problem(values: dict[str, str]) -> str | None:
    """Returns what is wrong with a row, and in which column; an empty cell is not stated, and not wrong."""
    if None in values or None in values.values():  # as `csv` reads rows that are longer or shorter
        return "it has more or fewer cells than line 1 has columns"
    for key, (least, largest) in NUMBERS.items():
        text, is_count = values[key].strip(), isinstance(least, int)
        try:
            number = float(text or largest)
        except ValueError:
            number = math.nan
        if not least <= number <= largest or is_count and number % 1:
            return f"{key} is {shorten(text)}, not a {'whole ' * is_count}number from {least:g} to {largest:g}"
    try:
        parse_row(values)
    except SkipRow:
        return None
    except LayoutError as error:
        return f"the layout is impossible: {str(error).rstrip('.')}"
    return None


def model_shape_of_row(v: dict[str, str]) -> ModelShape:
    layers, width = int(parse_number(v, "layers")), int(parse_number(v, "hidden"))
    model = v["model"].lower()
    heads = int(parse_number(v, "heads", max(1, width // 128)))
    kv = int(parse_number(v, "kv_heads", heads))
    ffn = int(parse_number(v, "ffn_hidden", 4 * width))
    size = width // heads
    sequence = int(parse_number(v, "seq_len"))
    total = parse_number(v, "params_b", 0.0) * 1e9
    vocab = -(-int(parse_number(v, "vocab", 51200)) // 128) * 128  # all frameworks pad the vocabulary, but one
    if "vtrain" in v["source"] and not v["vocab"]:
        vocab = 50257
    experts, experts_per_token = (int(parse_number(v, key, 0)) for key in ("experts", "experts_per_token"))
    latent: dict[str, int] = {}
    if "qwen3" in model or "maxtext" in model:
        size = 128
    if "gpt-oss" in model or "gpt oss" in model:
        size = 64
    if "deepseek" in model or "kimi" in model:
        size = 128
        latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    # A gated feed-forward layer shows in the number of parameters, or in a hidden size other than 4 x width.
    gated = ffn != 4 * width
    if total and not experts:
        attention = 2 * width * size * (heads + kv)
        per_layer = (total - vocab * width * 1.5) / layers - attention
        gated = per_layer / (width * ffn) > 2.5
    shape = ModelShape(layers=layers, width=width, heads=heads, kv_heads=kv, head_dim=size, ffn=ffn, vocab=vocab,
                  sequence=sequence, gated=gated or bool(experts), **latent)  # fmt: skip
    if total and not experts:
        tied = abs(shape.parameters - vocab * width - total) < abs(shape.parameters - total)
        return replace(shape, tied=tied)
    if not experts:
        return replace(shape, tied=True)
    # The experts' hidden size follows from the total parameters, unless the public model states it.
    sparse = layers
    if "deepseek" in model:
        sparse = layers - 3
    elif "kimi" in model:
        sparse = layers - 1
    elif "maverick" in model:
        sparse = layers // 2
    rest = total - shape.parameters + layers * shape.dense_ffn_weights - (layers - sparse) * shape.dense_ffn_weights
    expert_ffn = max(64, round(rest / (sparse * 3 * width * experts) / 64) * 64) if total else ffn
    shared_ffn = 0
    for name, hidden in {"deepseek": 2048, "kimi": 2048, "maverick": 8192}.items():
        if name in model:
            expert_ffn = shared_ffn = hidden
    return replace(
        shape, ffn=16384 if "maverick" in model else ffn, experts=experts, experts_per_token=experts_per_token,
        expert_ffn=expert_ffn, shared_expert_ffn=shared_ffn, sparse_layers=sparse,
    )  # fmt: skip


def parse_cluster(v: dict[str, str]) -> Cluster:
    if v["gpu"] not in GPUS:
        raise SkipRow(f"no data sheet for {v['gpu']}")
    cluster = replace(CLUSTERS[GPUS[v["gpu"]]], measured={})  # which is of our engine
    per_node = int(parse_number(v, "gpus_per_node", cluster.domain_size))
    if cluster.topology == "switch" and cluster.domain_size <= 8:
        cluster = replace(cluster, domain_size=min(per_node, 8))
    note = v.get("note", "")
    if ports := re.search(r"([1-9]\d*) ?x ?([1-9]\d*) ?Gb", note):
        cluster = replace(cluster, outer=LinkSpec(int(ports[1]) * int(ports[2]) / 8 * GB / per_node, 8e-6))
    if "Jean Zay A100" in note:  # four Omni-Path ports of 100 Gbit/s for eight devices
        cluster = replace(cluster, outer=LinkSpec(4 * 12.5 * GB / 8, 8e-6))
    if cluster.device.family == "volta" and per_node == 4:  # no switch: two 25 GB/s links between any two devices
        cluster = replace(cluster, inner=LinkSpec(50 * GB, cluster.inner.latency))
    return cluster


def parse_row(v: dict[str, str]) -> MeasuredRun:
    """Returns the run that a row describes; raises SkipRow if it cannot be predicted."""
    cluster, gpus = parse_cluster(v), int(parse_number(v, "gpus", 0))
    if "lora" in v["model"].lower():
        raise SkipRow("trains adapters only")
    shape = model_shape_of_row(v)
    if not gpus:
        raise SkipRow("gpus is not given")
    if v.get("flag"):
        raise SkipRow(f"flagged: {v['flag']}")
    text = v["precision"].lower()
    precision = "fp16" if text == "fp16" else next((name for name in ("fp4", "fp8") if name in text), "bf16")
    tp = int(parse_number(v, "tp", 1))
    is_legacy = precision == "fp16" or (v["sp"] == "0" and tp > 1)
    recompute = v["recompute"] or ("full" if v["tflops_kind"] == "hardware" else "")
    is_core = not (is_legacy or v["zero_stage"] or cluster.device.family == "tpu")  # which logs what is allocated
    layout, samples = parse_layout(v, cluster, shape, gpus, is_legacy, recompute)
    return MeasuredRun(
        v["source"], v.get("quality", ""), cluster, shape, kernels_of_row(v, cluster, precision, is_legacy),
        memory_of_row(v, cluster, layout, precision, is_legacy, recompute), layout, samples, bool(recompute),
        measured_seconds(v, shape, gpus, samples, layout.recompute == "full"),
        parse_number(v, "peak_mem_gib", 0.0) or None, is_core or "allocated" in v.get("mem_kind", ""), v,
    )  # fmt: skip


def parse_layout(
    v: dict[str, str], cluster: Cluster, shape: ModelShape, gpus: int, is_legacy: bool, recompute: str
) -> tuple[Layout, int]:
    """Returns the layout (micro-batch 0: not stated) and the global batch in samples."""
    tp, pp, cp = int(parse_number(v, "tp", 1)), int(parse_number(v, "pp", 1)), int(parse_number(v, "cp", 1))
    ep = int(parse_number(v, "ep", min(shape.experts, 8, gpus // (tp * pp)) or 1))
    dp = gpus // (tp * pp * cp)
    if dp < 1 or dp * tp * pp * cp != gpus:
        raise SkipRow("tensor x pipeline x context does not divide the devices")
    is_tpu, has_no_layout = cluster.device.family == "tpu", not (v["tp"] or v["pp"] or v["dp"])
    zero = int(parse_number(v, "zero_stage", 3 if has_no_layout or is_tpu else 0 if is_legacy else 1))
    shard = int(parse_number(v, "fsdp", dp))
    if zero1_ranks := re.search(r"zero1=([1-9]\d*)", v.get("note", "")):
        shard = int(zero1_ranks[1])
    shard = 1 if zero == 0 or dp == 1 else min(shard, dp)
    micro_batch = int(parse_number(v, "micro_batch", 0))
    samples = int(parse_number(v, "global_batch", dp * max(1, micro_batch)))
    if not micro_batch and zero == 3 and pp > 1:  # PyTorch's pipelines: as many micro-batches as stages
        micro_batch = max(1, samples // dp // pp)
    virtual = int(parse_number(v, "virtual_pp", 0)) if pp > 1 else 1
    if not virtual:
        has_large_bubble = not is_legacy and samples // dp // max(1, micro_batch) < 4 * pp
        virtual = shape.layers // pp if has_large_bubble else 1
    if zero == 3 and not is_legacy and not is_tpu:
        if recompute == "selective":  # PyTorch's keeps every second layer, or every second matmul
            recompute = "0.5"
        if pp > 1:  # weights stay gathered between micro-batches
            zero = 1
    layout = Layout(
        pipeline=pp, tensor=tp, context=cp, expert=ep, shard=shard, replicate=dp // shard, zero=max(1, zero),
        schedule="interleaved" if virtual > 1 else "1f1b", virtual=virtual if virtual > 1 else 0,
        micro_batch=micro_batch, recompute=recompute or "none",
    )  # fmt: skip
    return layout, samples


def kernels_of_row(v: dict[str, str], cluster: Cluster, precision: str, is_legacy: bool) -> FrameworkKernels:
    compiled, tp = v.get("compile", ""), int(parse_number(v, "tp", 1))
    # 8 bits without a word on compiling: Transformer Engine, otherwise PyTorch's own operators.
    is_pytorch = bool(v["zero_stage"]) and cluster.device.family != "tpu" and (precision == "bf16" or bool(compiled))
    is_eager = is_pytorch and compiled in ("", "0")
    has_sinks = "gpt-oss" in v["model"].lower().replace(" ", "-")  # which the newest kernels did not support
    has_first = "mpt" in v["model"].lower() and cluster.device.family == "ampere"
    return FrameworkKernels(
        precision,
        has_eager_loss=is_legacy,
        fused_attention=not is_legacy,
        flash_attention=1 if has_first else 2 if is_pytorch or has_sinks else 3,
        eager=is_legacy or is_eager,
        has_eager_norms=not is_legacy and is_eager and v["zero_stage"] == "3" and not parse_number(v, "experts", 0),
        overlap_comm=not is_legacy,
        sequence_parallel=v["sp"] == "1" if v["sp"] else (not is_legacy and tp > 1),
    )


def memory_of_row(
    v: dict[str, str], cluster: Cluster, layout: Layout, precision: str, is_legacy: bool, recompute: str
) -> FrameworkMemory:
    if is_legacy:
        if precision == "bf16":  # each micro-batch's gradients are added to a second, 32-bit set
            return replace(LEGACY_MEGATRON, gradient_bytes=6.0, cast_bytes=16.0)
        # Megatron-LM since 2022 accumulates gradients in the kernels that compute them.
        return replace(LEGACY_MEGATRON, cast_bytes=0.0) if v["sp"] == "1" else LEGACY_MEGATRON
    if cluster.device.family == "tpu":
        return XLA_TPU
    if not v["zero_stage"]:
        return replace(MEGATRON_CORE, selective_keeps_matmuls=not recompute)
    is_zero3 = v["zero_stage"] == "3"
    memory = PYTORCH_FSDP if is_zero3 else PYTORCH_EAGER
    if "nanotron" in v.get("note", ""):  # accumulates gradients in 32 bits
        memory = replace(memory, gradient_bytes=4.0)
    if is_zero3 and layout.data == 1:  # FSDP also shards over the context ranks
        memory = replace(memory, optimizer_bytes=memory.optimizer_bytes / layout.context)
    if v.get("compile"):  # torchtitan: PyTorch's own loss, and memory as the allocator reserves it
        memory = replace(memory, logits=12.0, fragmentation=FRAGMENTATION, fixed_bytes=PYTORCH_EAGER.fixed_bytes)
    return memory


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
    attention = 12 * tokens * shape.layers * shape.sequence * shape.attention_width
    flops = 6 * shape.active_parameters * tokens + attention
    if v["tflops_kind"] == "hardware":
        head = 6 * shape.vocab * shape.width * tokens
        flops = (flops - head) * (4 / 3 if is_full_recompute else 1) + head
    return flops / (float(v["tflops_per_gpu"]) * 1e12 * gpus)


def evaluate_run(
    row: MeasuredRun, may_recompute: bool = True, efficiency: FrameworkEfficiency | None = None
) -> tuple[Prediction, Layout]:
    """Returns the prediction, and the layout with micro-batch and recomputation filled in."""
    estimator, limit = estimator_of(row, efficiency), row.cluster.device.memory
    layout = row.layout
    if not layout.micro_batch:
        samples_per_rank = max(1, row.samples // layout.data)
        sizes = [n for n in (16, 8, 4, 2) if samples_per_rank % n == 0] if layout.pipeline == 1 else []
        smallest = samples_per_rank if row.cluster.device.family == "tpu" else 1
        candidates = (replace(layout, micro_batch=n) for n in sizes)
        fitting = (tried for tried in candidates if estimator.predict(tried).peak_memory <= limit)
        layout = next(fitting, replace(layout, micro_batch=smallest))
    prediction = estimator.predict(layout)
    if row.recompute_known or prediction.peak_memory <= limit or not may_recompute:
        return prediction, layout
    # The least recomputation that fits.
    for recompute in ("selective", *(f"{share / 10:.1f}" for share in range(9, 0, -1)), "full"):
        layout = replace(layout, recompute=recompute)
        prediction = estimator.predict(layout)
        if prediction.peak_memory <= limit:
            break
    return prediction, layout


def predicted_seconds(row: MeasuredRun, layout: Layout, efficiency: FrameworkEfficiency) -> float:
    """Returns the step time of a layout whose micro-batch and recomputation are filled in."""
    return estimator_of(row, efficiency).predict_seconds(layout)


def estimator_of(row: MeasuredRun, efficiency: FrameworkEfficiency | None = None) -> FrameworkEstimator:
    e = framework_efficiency(row.cluster.device, efficiency)
    return FrameworkEstimator(Machine(row.cluster, e), row.shape, row.kernels, row.memory_profile, row.samples, e)
