"""Measures what this machine reaches, and writes it as a cluster for the planner.

Every number comes from the kind of work that it will be used to predict: products over sizes, fused attention, whole
blocks of our own model (a tiny one for the host's part, a large one for the memory's), collectives over sizes; on a GPU
steps of training, by what its kernels are for: compiled, as hot and as short of power as training makes it. Where
several processes share the machine, all of them measure at the same time, as they will compute at the same time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._functorch.config as functorch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.bench.step import bench_step
from shardwise.cluster import CLUSTERS, Cluster, Device, Link, known_device, write_cluster
from shardwise.comm.collectives import all_gather, reduce_scatter
from shardwise.comm.world import run_world
from shardwise.errors import JobError, nearest
from shardwise.files import demand_folder
from shardwise.job import Model, make_job
from shardwise.models.chain import reset
from shardwise.models.gpt import Block, gpt
from shardwise.models.loss import logits_of
from shardwise.parallel.parallelize import KEPT
from shardwise.planner.cost import Cut, Machine, Setting, attention, block
from shardwise.planner.efficiency import efficiency_of
from shardwise.planner.shape import shape_of

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FRESH = True  # nothing was computed in this process
CALLS = 30  # of each collective: a count, as all ranks must make as many
LEAST = 0.3  # seconds of any other work on a CPU
CUT = Cut(tensor=1, context=1, expert=1, micro_batch=1)


@dataclass(frozen=True)
class Sizes:
    """How large the work is that is measured: enough to fill the device, little enough to be done soon."""

    products: tuple[int, ...]
    copied: int
    tiny: dict[str, int]
    large: dict[str, int]
    messages: tuple[int, ...]


ON_CPU = Sizes(
    products=(128, 256, 512), copied=1 << 24, messages=(1 << 14, 1 << 23),
    tiny={"width": 16, "heads": 2, "sequence": 8}, large={"width": 256, "heads": 8, "sequence": 128},
)  # fmt: skip
ON_GPU = Sizes(
    products=(1024, 2048, 4096, 8192), copied=1 << 30, messages=(1 << 16, 1 << 28),
    tiny={"width": 64, "heads": 2, "sequence": 16},
    large={"width": 2048, "heads": 16, "sequence": 4096, "layers": 4, "vocab": 32000},
)  # fmt: skip


def calibrate_machine(out: Path, processes: int, device: str) -> str:
    """Writes the cluster file; returns what is in it, in words."""
    if device not in ("auto", "cpu", "cuda"):
        raise JobError(f"--device {device}: {nearest(device, ('auto', 'cpu', 'cuda'))}")
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise JobError("--device cuda: PyTorch sees no GPU here.")
    demand_folder(out)
    cluster = calibrate("cuda" if there and device != "cpu" else "cpu", processes)
    write_cluster(cluster, out)
    peaks = ", ".join(f"{word} {rate / 1e12:.3g} TFLOP/s" for word, rate in cluster.device.peak.items())
    shares = ", ".join(f"{key} {cluster.measured[key]:.2f}" for key in ("product", "attention", "memory"))
    return (
        f"{out}: {cluster.domain} x {cluster.device.name}, {peaks}, {cluster.device.bandwidth / 1e9:.3g} GB/s; "
        f"reached: {shares}; {cluster.measured['launch'] * 1e6:.1f} us a kernel; "
        f"link {cluster.inner.bandwidth / 1e9:.3g} GB/s, {cluster.inner.latency * 1e6:.0f} us."
    )


def calibrate(kind: str, processes: int, tell: Callable[[str], None] = lambda _: None) -> Cluster:
    """The cluster that this machine is, for worlds of `processes` on it."""
    if kind == "cuda":
        tell("measuring one GPU")
        return _cluster(kind, torch.cuda.device_count(), _measure(kind), None)
    tell(f"measuring {processes} processes at once")
    found = run_world(_measure, processes, kind, fresh=FRESH)
    values = {key: statistics.mean(one[key] for one in found) for key in found[0]}
    if processes == 1:
        return _cluster(kind, processes, values, None)
    tell("measuring collectives")
    links = run_world(_links, processes, ON_CPU.messages, fresh=FRESH)
    values |= {key: statistics.mean(one[key] for one in links) for key in links[0]}
    return _cluster(kind, processes, values, Link(values["link"], values["hop"]))


def _cluster(kind: str, processes: int, values: dict[str, float], link: Link | None) -> Cluster:
    if kind == "cuda":
        name = torch.cuda.get_device_name()
        known = known_device(name)
        base = next((c for c in CLUSTERS.values() if known and c.device.name == known.name), CLUSTERS["h100"])
        memory = float(torch.cuda.mem_get_info()[1])
    else:
        name, known, base = "CPU", None, CLUSTERS["cpu"]
        memory = psutil.virtual_memory().total / processes
    peak = {word: values[word] for word in DTYPES if word in values}
    if known:
        peak = {**known.peak, "float32": values["float32"]}
    device = Device(
        name, known.family if known else ("cpu" if kind == "cpu" else base.device.family), memory,
        known.bandwidth if known else values["copied"], peak, known.units if known else 1,
    )  # fmt: skip
    cluster = replace(base, device=device, domain=max(processes, 1), inner=link or base.inner, outer=link or base.outer)
    return replace(cluster, measured=_shares(cluster, values))


def _shares(cluster: Cluster, values: dict[str, float]) -> dict[str, float]:
    """The efficiencies that make the prediction of a block what was measured."""
    device = cluster.device
    half = "bf16" if device.family != "cpu" else "float32"
    shares = {
        "product": min(1.0, values.get(half, 1.0) / device.rate(half)), "depth": 0.0, "wave": 0.0, "ragged": 1.0,
        "attention": values["attention"] / device.rate(half), "attention_backward": values["attention_backward"],
        "inner": 1.0, "outer": 1.0, "latency": values.get("latency", 1.0), "jitter": 0.0, "fixed": 0.0,
        "hidden_tensor": 0.0,
        "launch": values["host"] / HOST_KERNELS, "odd": min(1.0, values["odd"]), "compiled": values["compiled"],
        "bulk": min(1.0, values["copied"] / device.bandwidth), "apart": 1.0,
    }  # fmt: skip
    large = _model(ON_GPU.large if device.family != "cpu" else ON_CPU.large)
    if device.family == "cpu":
        # Nothing runs beside anything else: the host is the device, so their times add up.
        shares |= {
            "hidden_data": 0.0,
            "hidden_transfer": 0.0,
            "hidden_interleaved": 0.0,
            "contention": 0.0,
        }
        shares |= {
            "start": values.get("start", 0.0),
            "shared": max(1.0, values["large"] / values.get("alone", values["large"])),
        }
        # So that attention of the measured size takes as long as was measured.
        forward, _ = attention(Machine(cluster, efficiency_of("cpu", shares)), shape_of(large), Setting(half), CUT)
        shares["attention"] *= forward * values["attention"] / _attention_flops(large)
    if device.family == "cpu":
        # What a large block takes beyond its products and attention goes to memory.
        machine = Machine(cluster, replace(efficiency_of("cpu", shares), memory=1.0))
        best = _at_best(machine, large, Setting(half), CUT)
        spent = best["product"] + best["attention"]
        rest = max(values["large"] - values["host"] - spent, 0.2 * best["memory"])
        return shares | {"memory": min(4.0, best["memory"] / rest)}
    # What steps of training went to, over what they would at the peak.
    machine = Machine(cluster, replace(efficiency_of(device.family, shares), memory=1.0, product=1.0, attention=1.0))
    for key, part in PARTS.items():
        found = []
        for kind, more in KINDS.items():
            model = _model({**ON_GPU.large, **more})
            best = _at_best(machine, model, Setting(half), replace(CUT, micro_batch=TRAINED))
            found.append(model.layers * best[key] / values[f"{kind}: {part}"])
        shares[key] = min(1.0, statistics.mean(found))
    return shares


def _at_best(machine: Machine, model: Model, setting: Setting, cut: Cut) -> dict[str, float]:
    """Seconds of a block, forward and backward, by the share that they are to be divided by."""
    ideal = block(machine, shape_of(model), setting, cut, False)
    core = sum(attention(machine, shape_of(model), setting, cut))
    moved = 3 * machine.move(ideal.moved)
    return {"product": ideal.forward + ideal.backward - moved - core, "attention": core, "memory": moved}


TRAINED = 4  # samples of a step that is measured on a GPU
HOT = 100  # steps before it: a cool GPU is faster
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt-2": {"norm": "layer", "activation": "gelu", "bias": True, "positions": "learned"},
}
PARTS = {"product": "matrix products", "attention": "attention", "memory": "elementwise"}
HOST_KERNELS = 72  # of a forward and a backward of a block, as `cost.block` counts them


def _measure(kind: str) -> dict[str, float]:
    """Rates and seconds of one process."""
    device, sizes = torch.device(kind), ON_GPU if kind == "cuda" else ON_CPU
    words = ("float32", "bf16") if kind == "cuda" else ("float32",)
    values = {word: max(_product(n, DTYPES[word], device) for n in sizes.products) for word in words}
    numbers = torch.empty(sizes.copied // 4, device=device)
    widest = sizes.products[-1]
    dtype = DTYPES[words[-1]]
    values["odd"] = _odd(widest, dtype, device) / values[words[-1]]
    values["copied"] = 2 * sizes.copied / _seconds(lambda: numbers.clone(), device)
    forward, backward = _attention(_model(sizes.large), dtype, device)
    values["attention"], values["attention_backward"] = forward, backward / forward
    values["host"] = _block(_model(sizes.tiny), dtype, device)
    values["compiled"] = float(kind == "cuda")
    if kind == "cpu":
        values["large"] = _block(_model(sizes.large), dtype, device)
        return values
    for name, more in KINDS.items():
        job = make_job({"precision": "bf16", "model": {**sizes.large, **more}, "batch": {"samples": TRAINED}})
        values |= {f"{name}: {part}": seconds for part, seconds in bench_step(job, device, 3, HOT).parts.items()}
        gc.collect()
        torch.cuda.empty_cache()
    return values


def _model(sizes: dict[str, Any]) -> Model:
    return make_job({"model": {"layers": 1, "vocab": 64, **sizes}}).decoder()


def _product(n: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2.0 * n**3 / _seconds(lambda: F.linear(a, b), device)


def _odd(n: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a projection to an odd number of words, over its forward and both products of its backward."""
    x, weight = torch.randn(n, n, device=device).to(dtype), torch.randn(n + 1, n, device=device).to(dtype)
    gradient = logits_of(x, weight)
    products = (lambda: logits_of(x, weight), lambda: gradient @ weight, lambda: gradient.t() @ x)
    return 6.0 * n * n * (n + 1) / sum(_seconds(one, device) for one in products)


def _attention(model: Model, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """FLOP/s of forward and backward, half of the square counted."""
    shape = (1, model.heads, model.sequence, model.head_size)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    flops = _attention_flops(model)
    forward = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.ones_like(out)
    back = _seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), device)
    return flops / forward, 2.5 * flops / back


def _attention_flops(model: Model) -> float:
    return 2.0 * model.heads * model.sequence**2 * model.head_size


def _block(model: Model, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a block's forward and backward; on a GPU compiled and recorded, as training runs it."""
    chain = gpt(model, 0)
    reset(chain, 0)
    inner = next(module for module in chain.modules() if isinstance(module, Block)).to(device=device, dtype=dtype)
    x = torch.randn(1, model.sequence, model.width, device=device).to(dtype).requires_grad_()
    gradient = torch.ones_like(x)

    def both() -> Tensor:
        out = inner(x)
        torch.autograd.backward(out, gradient)
        return out

    if device.type == "cpu":
        return _seconds(both, device)
    functorch.activation_memory_budget = KEPT
    inner.compile()
    for _ in range(3):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    return _seconds(graph.replay, device)


def _seconds(work: Callable[[], Any], device: torch.device, turns: int = 7) -> float:
    """The median of some turns. On a GPU a turn is several calls: none waits to start."""
    if device.type == "cpu":
        return _mean(work)
    calls, times = 8, []
    for turn in range(turns + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
        if turn >= 2:
            times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def _mean(work: Callable[[], Any], calls: int = 0) -> float:
    """Seconds of a call on a CPU, in the mean over so many, or over `LEAST` seconds of them: where processes take turns
    on a processor, what counts is how many calls each gets done, not how long one of them is interrupted."""
    work()
    work()
    done, begin = 0, time.perf_counter()
    while done < (calls or 3) or (not calls and time.perf_counter() - begin < LEAST):
        work()
        done += 1
    return (time.perf_counter() - begin) / done


def _links(messages: tuple[int, ...]) -> dict[str, float]:
    """Of one process of a world: seconds of a block while all others wait, of collectives, of transfers.

    Half of the collectives that training uses gather and half sum, so both are measured, for the whole world and, where
    it has more, for pairs side by side. From both follow what a collective costs to start, and what for each hop; from
    the largest message the bandwidth.
    """
    size, rank, device = dist.get_world_size(), dist.get_rank(), torch.device("cpu")
    small, large = messages[0], messages[-1]
    values = {}
    for turn in range(size):
        if turn == rank:
            values["alone"] = _block(_model(ON_CPU.large), torch.float32, device)
        dist.barrier()
    pairs = [dist.new_group([n, n + 1]) for n in range(0, size - size % 2, 2)]
    mine = pairs[rank // 2] if rank // 2 < len(pairs) else None
    all_small, all_large = _collective(small, size, None), _collective(large, size, None)
    values["link"] = large * (size - 1) / size / max(all_large - all_small, 1e-6)
    dist.barrier()
    hop = pair = all_small / (size - 1)
    if mine is not None:
        hop, pair = _transfer(small, rank, mine), _collective(small, 2, mine)
    # A collective of n ranks takes start + latency x hop x (n - 1).
    each = max(0.0, (all_small - pair) / (size - 2)) if size > 2 else 0.0
    start = min(max(0.0, pair - each), all_small)
    dist.barrier()
    return {**values, "hop": hop, "start": start, "latency": each / hop}


def _collective(message: int, size: int, group: dist.ProcessGroup | None) -> float:
    """Seconds to gather, or sum and scatter, a message in all; the mean of both."""
    piece = torch.zeros(message // 4 // size)
    whole = torch.zeros(size * len(piece))
    gather = _mean(lambda: all_gather(whole, piece, group=group), CALLS)
    return (gather + _mean(lambda: reduce_scatter(piece, whole, group=group), CALLS)) / 2


def _transfer(message: int, rank: int, group: dist.ProcessGroup) -> float:
    """Seconds from one process to its neighbour: half of there and back."""
    tensor, other = torch.zeros(message // 4), rank ^ 1

    def there_and_back() -> None:
        if rank < other:
            dist.send(tensor, other, group)
            dist.recv(tensor, other, group)
        else:
            dist.recv(tensor, other, group)
            dist.send(tensor, other, group)

    return _mean(there_and_back, CALLS) / 2
