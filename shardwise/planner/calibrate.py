"""Measures this machine and writes the result as a cluster file for the planner.

Every constant is measured on the kind of work it predicts: matmuls, fused attention, whole blocks of our model (a tiny
one for launch overhead, a large one for memory traffic), collectives; on a GPU compiled training steps by kernel
category, at the power limit of real training. Processes that share a machine measure at the same time."""

import gc
import statistics
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch._functorch.config as functorch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.optimize import least_squares
from torch import Tensor
from torch.utils.benchmark import Timer

from shardwise.bench.train_step import bench_step
from shardwise.cluster import CLUSTERS, Cluster, LinkSpec, cluster_by_driver_name, write_cluster
from shardwise.comm.collectives import Axis, all_gather, all_gather_json, ping_pong, reduce_scatter
from shardwise.comm.world import run_world
from shardwise.errors import JobError, suggest
from shardwise.files import require_parent_folder
from shardwise.job import DecoderConfig, Job, make_job
from shardwise.layout import Layout
from shardwise.models.chain import init_weights
from shardwise.models.gpt import DecoderBlock, build_gpt
from shardwise.parallel.parallelize import ACTIVATION_MEMORY_BUDGET
from shardwise.planner.costs.machine import BlockTimeModel, KernelProfile, Machine, ParallelDegrees, efficiency_of
from shardwise.planner.costs.model_shape import shape_of
from shardwise.planner.plan import make_estimator

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FRESH_PROCESSES = True  # measure in new processes, in which nothing has run yet
COLLECTIVE_CALLS = 30  # per measurement; a fixed count, since all ranks must make equally many
SMALL_MESSAGE, LARGE_MESSAGE = 1 << 14, 1 << 23  # bytes of the measured collectives
MIN_SECONDS = 0.3  # duration of any other measurement on a CPU
SINGLE_DEVICE = ParallelDegrees(tensor=1, context=1, expert=1, micro_batch=1)
IMAGES = 256
CONVOLUTIONS = ((64, 56), (128, 28), (256, 14), (512, 7))  # channels and image size of those that a ResNet has
STEP_SAMPLES = 4  # samples per measured training step on a GPU
WARMUP_STEPS = 100  # before measuring, since a cool GPU is faster
PRECISIONS = {"fp8": "fp8"}  # of a kind of model, if not bf16
KERNEL_CATEGORIES = {"matmul": "matmul", "attention": "attention", "memory": "elementwise"}
KERNELS_PER_BLOCK = {"cpu": 72, "cuda": 24}  # forward and backward, as `BlockTimeModel` counts them; compiled on GPUs
SETTINGS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
REFINE, REFINED = SETTINGS["refine"], SETTINGS["refined"]


def calibrate_to_file(out: Path, processes: int, device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise JobError(f"--device {device}: {suggest(device, ('auto', 'cpu', 'cuda'))}")
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise JobError("--device cuda: PyTorch finds no GPU on this machine; use --device cpu.")
    require_parent_folder(out)
    return write_calibrated(calibrate("cuda" if has_gpu and device != "cpu" else "cpu", processes), out)


def write_calibrated(cluster: Cluster, out: Path) -> str:
    """Writes a cluster file and returns what was measured."""
    write_cluster(cluster, out)
    peaks = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in cluster.device.peak_by_precision.items())
    shares = ", ".join(f"{key} {cluster.measured[key]:.2f}" for key in ("matmul", "attention", "memory"))
    return (
        f"{out}: {cluster.domain_size} x {cluster.device.name}, {peaks}, {cluster.device.bandwidth / 1e9:.3g} GB/s; "
        f"efficiency: {shares}; {cluster.measured['kernel_launch'] * 1e6:.1f} us per kernel launch; "
        f"link {cluster.inner.bandwidth / 1e9:.3g} GB/s, {cluster.inner.latency * 1e6:.0f} us"
        + (f"; between nodes {cluster.outer.bandwidth / 1e9:.3g} GB/s." if cluster.outer != cluster.inner else ".")
    )


def calibrate(kind: str, processes: int) -> Cluster:
    if kind == "cuda":
        return _make_cluster(kind, torch.cuda.device_count(), _measure_process(kind))
    measurements = [run_world(_measure_process, processes, kind, is_fresh_process=FRESH_PROCESSES)]
    if processes > 1:
        measurements.append(run_world(_measure_links, processes, is_fresh_process=FRESH_PROCESSES))
    values = {key: statistics.mean(rank[key] for rank in ranks) for ranks in measurements for key in ranks[0]}
    return _make_cluster(kind, processes, values)


def calibrate_world(device: torch.device, local_size: int) -> Cluster:
    """Measures every device of an initialized world at once, and its links by level: among the `local_size` ranks of a
    node, and between ranks of the same number on all nodes, as the planner's collectives use them."""
    size, rank, kind = dist.get_world_size(), dist.get_rank(), device.type
    if size % local_size:
        raise JobError(f"calibrate needs as many ranks on every node, not {size} in all and {local_size} on this one.")
    levels = {"inner": [range(first, first + local_size) for first in range(0, size, local_size)],
              "outer": [range(first, size, local_size) for first in range(local_size)]}  # fmt: skip
    values = _measure_process(kind)
    small, large = SMALL_MESSAGE, SETTINGS[kind]["large_message"]
    for level, groups in levels.items():
        made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
        ranks, group = next((ranks, group) for ranks, group in made if rank in ranks)
        count = len(ranks)
        if count > 1:
            brief, long = (_collective_seconds(message, count, group, device) for message in (small, large))
            values[f"{level}_bandwidth"] = large * (count - 1) / count / max(long - brief, 1e-6)
            values[f"{level}_latency"] = brief / (count - 1)
        dist.barrier()
    gathered = all_gather_json(values)
    return _make_cluster(kind, local_size, {key: statistics.mean(one[key] for one in gathered) for key in values})


def refine(cluster: Cluster, job: Job, measured: dict[Layout, float]) -> Cluster:
    """Returns the cluster with the constants for which the planner predicts these step times best: a regression of
    logarithms in which each constant has a prior at its value so far. What no step time depends on stays as it was."""
    start = asdict(efficiency_of(cluster.device, cluster.measured))
    least = {name: low for name, low in REFINED.items() if name != "uncontended_speedup" or start[name] > low}
    low = np.log(list(least.values()))
    prior = np.maximum(low + 1e-3, np.log([max(start[name], 1e-9) for name in least]))
    times = np.log(list(measured.values()))

    def refined(values: np.ndarray) -> Cluster:
        found = dict(zip(least, np.exp(values).tolist(), strict=True))
        return replace(cluster, measured={**cluster.measured, **found})

    def errors(values: np.ndarray) -> np.ndarray:
        estimator = make_estimator(job, refined(values))
        predicted = np.log([estimator.predict_seconds(layout) for layout in measured])
        return np.concatenate([(predicted - times) / REFINE["step_error"], (values - prior) / REFINE["prior_error"]])

    # The schedules' simulation makes small jumps: slopes are taken over 1%.
    fit = least_squares(errors, prior, bounds=(low, prior + 3.0), diff_step=0.01, max_nfev=REFINE["max_evaluations"])
    return refined(fit.x)


def _make_cluster(kind: str, processes: int, values: dict[str, float]) -> Cluster:
    """Returns the cluster with its data-sheet peaks, if the device is known, and measured efficiencies."""
    if kind == "cuda":
        name, memory = torch.cuda.get_device_name(), float(torch.cuda.mem_get_info()[1])
        known = cluster_by_driver_name(name)
        base = known or CLUSTERS["h100"]
    else:
        name, memory, known, base = "CPU", psutil.virtual_memory().total / processes, None, CLUSTERS["cpu"]
    peaks: dict[str, Any] = {"peak_by_precision": {**base.device.peak_by_precision, "float32": values["float32"]}}
    if known is None:
        measured = {dtype_name: values[dtype_name] for dtype_name in DTYPES if dtype_name in values}
        peaks = {"peak_by_precision": measured, "bandwidth": values["copy_bandwidth"], "compute_units": 1}
    device = replace(base.device, name=name, memory=memory, **peaks)
    cluster = replace(base, device=device, domain_size=max(processes, 1))
    if "link_bandwidth" in values:
        link = LinkSpec(values["link_bandwidth"], values["p2p_latency"])
        cluster = replace(cluster, inner=link, outer=link)
    links: dict[str, Any] = {
        level: LinkSpec(values[f"{level}_bandwidth"], values[f"{level}_latency"])
        for level in ("inner", "outer") if f"{level}_bandwidth" in values}  # fmt: skip
    cluster = replace(cluster, **links)
    return replace(cluster, measured=_fit_efficiencies(cluster, values))


def _fit_efficiencies(cluster: Cluster, values: dict[str, float]) -> dict[str, float]:
    """Returns the efficiencies for which the planner's predictions equal the measured times."""
    device = cluster.device
    kind, dtype_name = ("cpu", "float32") if device.family == "cpu" else ("cuda", "bf16")
    efficiencies: dict[str, float] = SETTINGS["efficiencies"] | {
        "matmul": min(1.0, values.get(dtype_name, 1.0) / device.peak_flops(dtype_name)),
        "attention": values["attention"] / device.peak_flops(dtype_name),
        "attention_backward": values["attention_backward"], "latency": values.get("latency", 1.0),
        "kernel_launch": values["launch_seconds"] / KERNELS_PER_BLOCK[kind],
        "compiled": values["compiled"], "bulk_memory": min(1.0, values["copy_bandwidth"] / device.bandwidth),
    }  # fmt: skip
    large_model = SETTINGS[kind]["large_model"]
    if kind == "cpu":
        large, uncontended = _decoder_config(large_model), values.get("uncontended", values["large_block"])
        efficiencies |= SETTINGS["cpu_efficiencies"] | {
            "collective_start": values.get("collective_start", 0.0),
            "uncontended_speedup": max(1.0, values["large_block"] / uncontended),
        }
        # Makes the prediction for the measured attention equal to its measurement.
        machine = Machine(cluster, efficiency_of(cluster.device, efficiencies))
        forward, _ = BlockTimeModel(machine, shape_of(large), KernelProfile(dtype_name)).attention(SINGLE_DEVICE)
        efficiencies["attention"] *= forward * values["attention"] / _attention_flops(large)
        # The time of a large block beyond its matmuls and attention is memory traffic.
        machine = Machine(cluster, replace(efficiency_of(cluster.device, efficiencies), memory=1.0))
        best = _ideal_times(machine, large, dtype_name, SINGLE_DEVICE)
        compute = best["matmul"] + best["attention"]
        rest = max(values["large_block"] - values["launch_seconds"] - compute, 0.2 * best["memory"])
        return efficiencies | {"memory": min(4.0, best["memory"] / rest)}
    # Ideal seconds at the peak over measured seconds, per kernel category.
    perfect = dict.fromkeys(("memory", "matmul", "low_precision_matmul", "attention"), 1.0)
    ideal = replace(efficiency_of(device, efficiencies), **perfect)
    machine, degrees = Machine(cluster, ideal), SINGLE_DEVICE._replace(micro_batch=STEP_SAMPLES)
    ratios: dict[str, dict[str, float]] = {}
    for name, overrides in SETTINGS["model_kinds"].items():
        if f"{name}: matmul" not in values:
            continue
        model = _decoder_config({**large_model, **overrides})
        best = _ideal_times(machine, model, PRECISIONS.get(name, dtype_name), degrees)
        ratios[name] = {k: model.layers * best[k] / values[f"{name}: {part}"] for k, part in KERNEL_CATEGORIES.items()}
    for key in KERNEL_CATEGORIES:
        efficiencies[key] = min(1.0, statistics.mean(ratios[name][key] for name in ratios if name not in PRECISIONS))
    if "fp8" in ratios:  # its casts take what elementwise operators need beyond those in bf16
        narrow, wide = (
            _ideal_times(machine, _decoder_config(large_model), name, degrees)["memory"] for name in ("fp8", dtype_name)
        )
        seconds = values["fp8: elementwise"] / large_model["layers"] * efficiencies["memory"]
        efficiencies["low_precision_casts"] = max(1.0, (seconds - wide) / (narrow - wide))
        efficiencies["low_precision_matmul"] = min(1.0, ratios["fp8"]["matmul"])
    efficiencies["convolution"] = values["convolution"] / (efficiencies["matmul"] * device.peak_flops(dtype_name))
    return efficiencies


def _ideal_times(machine: Machine, model: DecoderConfig, precision: str, degrees: ParallelDegrees) -> dict[str, float]:
    """Returns the seconds of a block's forward and backward at 100% efficiency, by efficiency constant."""
    time_model = BlockTimeModel(machine, shape_of(model), KernelProfile(precision))
    ideal, core = time_model.block(degrees, False), sum(time_model.attention(degrees))
    moved = 3 * machine.memory_time(ideal.moved_bytes)
    return {"matmul": ideal.forward + ideal.backward - moved - core, "attention": core, "memory": moved}


def _measure_process(kind: str) -> dict[str, float]:
    device, sizes = torch.device(kind), SETTINGS[kind]
    dtype_names = ("float32", "bf16") if kind == "cuda" else ("float32",)
    values = {name: max(_matmul_rate(n, DTYPES[name], device) for n in sizes["matmul_sizes"]) for name in dtype_names}
    numbers = torch.empty(sizes["copy_bytes"] // 4, device=device)
    dtype = DTYPES[dtype_names[-1]]
    values["copy_bandwidth"] = 2 * sizes["copy_bytes"] / _seconds(lambda: numbers.clone(), device)
    forward, backward = _attention_rates(_decoder_config(sizes["large_model"]), dtype, device)
    values["attention"], values["attention_backward"] = forward, backward / forward
    values["launch_seconds"] = _block_seconds(sizes["tiny_model"], dtype, device)
    values["compiled"] = float(kind == "cuda")
    if kind == "cuda":
        values["convolution"] = statistics.mean(_convolution_rate(*sizes, dtype, device) for sizes in CONVOLUTIONS)
    if kind == "cpu":
        values["large_block"] = _block_seconds(sizes["large_model"], dtype, device)
        return values
    for name, overrides in SETTINGS["model_kinds"].items():
        if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
            continue
        model = {**sizes["large_model"], **overrides}
        job = make_job({"precision": PRECISIONS.get(name, "bf16"), "model": model, "batch": {"samples": STEP_SAMPLES}})
        report = bench_step(job, device, 10, WARMUP_STEPS)
        kernels = {part: seconds for part, seconds in report.time_breakdown.items() if part != "gaps"}
        # The profiled step is followed by faster or slower ones, which count, and whose kernels have gaps between them.
        scale = report.seconds / sum(kernels.values())
        values |= {f"{name}: {part}": scale * seconds for part, seconds in kernels.items()}
        gc.collect()
        torch.cuda.empty_cache()
    return values


def _decoder_config(sizes: dict[str, Any]) -> DecoderConfig:
    return make_job({"model": {"layers": 1, "vocab": 64, **sizes}}).require_decoder()


def _matmul_rate(n: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2.0 * n**3 / _seconds(lambda: F.linear(a, b), device)


def _convolution_rate(channels: int, size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Returns the FLOP/s of a 3 x 3 convolution's forward and backward, in the memory format in which it is fastest."""
    x = torch.randn(IMAGES, channels, size, size, device=device).to(dtype, memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype, memory_format=torch.channels_last)
    gradient, inputs = torch.ones_like(x), (x.requires_grad_(), weight.requires_grad_())
    seconds = _seconds(lambda: torch.autograd.grad(F.conv2d(x, weight, padding=1), inputs, gradient), device)
    return 6.0 * IMAGES * (3 * size * channels) ** 2 / seconds


def _attention_rates(model: DecoderConfig, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Returns the FLOP/s of causal attention's forward and backward; masked scores do not count."""
    shape = (1, model.heads, model.sequence, model.head_dim)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    flops = _attention_flops(model)
    forward = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.ones_like(out)
    back = _seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), device)
    return flops / forward, 2.5 * flops / back


def _attention_flops(model: DecoderConfig) -> float:
    return 2.0 * model.heads * model.sequence**2 * model.head_dim


def _block_seconds(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> float:
    """Returns the seconds of a block's forward and backward; on a GPU compiled and as a CUDA graph, as in training."""
    model = _decoder_config(sizes)
    chain = build_gpt(model, 0)
    init_weights(chain, 0)
    block = next(module for module in chain.modules() if isinstance(module, DecoderBlock)).to(device, dtype)
    x = torch.randn(1, model.sequence, model.width, device=device).to(dtype).requires_grad_()
    gradient = torch.ones_like(x)

    def forward_backward() -> Tensor:
        out = block(x)
        torch.autograd.backward(out, gradient)
        return out

    if device.type == "cpu":
        return _seconds(forward_backward, device)
    functorch.activation_memory_budget = ACTIVATION_MEMORY_BUDGET
    block.compile()
    for _ in range(3):
        forward_backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward_backward()
    return _seconds(graph.replay, device)


def _seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of a call. On a GPU the median of repeats that each queue several calls, which hides launch
    latency. On a CPU the mean: processes that share cores interrupt each other."""
    timer = _timer(fn)
    if device.type == "cpu":
        return timer.blocked_autorange(min_run_time=MIN_SECONDS).mean
    return statistics.median(timer.timeit(8).mean for _ in range(7))


def _timer(fn: Callable[[], Any]) -> Timer:
    return Timer("fn()", globals={"fn": fn}, num_threads=torch.get_num_threads())


def _measure_links() -> dict[str, float]:
    """Measures collectives, point-to-point transfers, and a block's time on this rank while all other ranks wait.
    The world and pairs of ranks give a collective's start cost and latency per hop, the largest message bandwidth."""
    size, rank, device = dist.get_world_size(), dist.get_rank(), torch.device("cpu")
    small, large = SMALL_MESSAGE, LARGE_MESSAGE
    values = {}
    for active_rank in range(size):
        if active_rank == rank:
            values["uncontended"] = _block_seconds(SETTINGS["cpu"]["large_model"], torch.float32, device)
        dist.barrier()
    pairs = [dist.new_group([n, n + 1]) for n in range(0, size - size % 2, 2)]
    pair_group = pairs[rank // 2] if rank // 2 < len(pairs) else None
    all_small, all_large = _collective_seconds(small, size, None), _collective_seconds(large, size, None)
    values["link_bandwidth"] = large * (size - 1) / size / max(all_large - all_small, 1e-6)
    dist.barrier()
    hop = pair = all_small / (size - 1)
    if pair_group is not None:
        first, pair = rank // 2 * 2, _collective_seconds(small, 2, pair_group)
        round_trip = partial(ping_pong, torch.zeros(small // 4), first, first + 1, pair_group)
        hop = _timer(round_trip).timeit(COLLECTIVE_CALLS).mean / 2
    # A collective of n ranks takes start + latency x hop x (n - 1).
    per_rank = max(0.0, (all_small - pair) / (size - 2)) if size > 2 else 0.0
    start = min(max(0.0, pair - per_rank), all_small)
    dist.barrier()
    return {**values, "p2p_latency": hop, "collective_start": start, "latency": per_rank / hop}


def _collective_seconds(
    message: int, size: int, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> float:
    """Returns the mean seconds of an all-gather and a reduce-scatter of `message` bytes in total."""
    shard = torch.zeros(message // 4 // size, device=device)
    full = torch.zeros(size * len(shard), device=device)
    axis = Axis(size, dist.get_rank(group), dist.group.WORLD if group is None else group)
    timers = _timer(lambda: all_gather(full, shard, axis=axis)), _timer(lambda: reduce_scatter(shard, full, axis=axis))
    return statistics.mean(timer.timeit(COLLECTIVE_CALLS).mean for timer in timers)
