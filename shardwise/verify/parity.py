"""Does a layout compute what one device computes? Runs both and compares number by number.

The error of a tensor is |a - b| / max(|b|, 1e-6 x RMS of all tensors' norms), with Frobenius norms, so that a gradient
which is mathematically zero does not cry wolf. Compared, in the order in which a step makes them: the output of each
watched module (as a fingerprint per sample and position; not with `compile`), the loss, every gradient, the norm, every
weight after the update. The first that differs is named; gradients are looked through in the order in which the
backward makes them, from the head down. An output that no rank has made differs too.

Every rank compares the piece that it holds with the same piece of the truth, so copies that drift apart are seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.cluster import CLUSTERS
from shardwise.comm.world import run_world
from shardwise.data.make import made_up
from shardwise.data.objectives import objective_of
from shardwise.data.source import Source
from shardwise.data.stream import Stream, share
from shardwise.errors import RunError
from shardwise.job import Job
from shardwise.kinds import DLRM, ResNet
from shardwise.layout import Layout, solve_batch
from shardwise.models.chain import IGNORED, Chain
from shardwise.optim import learning_rate, set_learning_rate
from shardwise.parallel.engine import Engine
from shardwise.parallel.holding import cuts_of
from shardwise.parallel.mesh import Axis
from shardwise.parallel.parallelize import check, parallelize
from shardwise.parallel.precision import Precision
from shardwise.parallel.recommender import Recommender, optimizer_of
from shardwise.planner.plan import order_of
from shardwise.random import key_of, normal_
from shardwise.step import Outcome, step
from shardwise.train.here import check_compiler
from shardwise.verify import clicks
from shardwise.verify.compressed import Sums
from shardwise.verify.replicas import replicas
from shardwise.verify.truth import truth

LIMIT = {"float64": 1e-10, "float32": 1e-3, "bf16": 1e-1, "fp16": 1e-2, "fp8": 3e-1}
# Of tensors' typical norm. In half precisions rounding decides which way Adam moves a weight with hardly a gradient.
FLOOR = {"float64": 1e-6, "float32": 1e-6, "bf16": 0.1, "fp16": 0.1, "fp8": 0.1}
KINDS = ("output", "loss", "gradient", "grad_norm", "weight")  # in the order in which a step makes them


@dataclass(frozen=True)
class Difference:
    """Where a layout first leaves the truth."""

    step: int
    kind: str
    """`output`, `loss`, `gradient`, `grad_norm` or `weight`."""
    name: str
    error: float


@dataclass(frozen=True)
class Record:
    """The verdict on one layout: the largest relative error of each kind, not a number where it came to none."""

    layout: str
    ok: bool
    loss: float = math.nan
    grad_norm: float = math.nan
    grad: float = math.nan
    weight: float = math.nan
    first_difference: Difference | None = None
    problem: str | None = None
    """Why the layout could not be run to the end."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values; an error that is no number is None, as JSON has no word for it."""
        values = asdict(self)
        for place in (values, values["first_difference"] or {}):
            place.update({k: None for k, v in place.items() if isinstance(v, float) and not math.isfinite(v)})
        return values

    def sentence(self) -> str:
        if self.problem is not None:
            return f"layout '{self.layout}' did not run to the end: {self.problem}"
        if self.first_difference is None:
            return f"layout '{self.layout}' computes what one process computes."
        first = self.first_difference
        what = f"{first.name} ({first.kind})" if first.kind != first.name else first.name
        return f"layout '{self.layout}' first differs in step {first.step}: {what}, relative error {first.error:.1e}."


def verify(
    job: Job, layouts: list[Layout], steps: int = 3, report: Callable[[Record], None] = lambda _: None
) -> list[Record]:
    """Proves each layout against one process. Layouts that cannot be had raise before anything starts."""
    for layout in layouts:
        check(job, layout)
    if job.compile is True:
        check_compiler()
    reference = run_world(_truth, 1, job, steps)[0]
    records = []
    for layout in layouts:
        if job.gradient.compress or job.sync.every > 1:
            reference = run_world(_truth, 1, job, steps, layout)[0]
        try:
            record = run_world(_compare, layout.world, job, layout, reference, steps)[0]
        except RunError as error:
            record = Record(str(layout), ok=False, problem=_sentence(error))
        records.append(record)
        report(record)
    return records


def _sentence(error: RunError) -> str:
    """A traceback ends with what matters; the rank stands before it."""
    first, *_, last = [line.strip() for line in f"{error}\n{error}".splitlines() if line.strip()]
    return last if first == last else f"{first.partition(':')[0]}: {last}"


# What is read


class Gaps:
    """A source in which some targets do not count, in each sample another number of them: ranks must not average."""

    def __init__(self, source: Source):
        self.source, self.length, self.vocab = source, source.length, source.vocab

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> np.ndarray:
        sample = self.source[index].copy()
        sample[1 : 1 + 3 * index % self.length] = IGNORED
        return sample


def make_stream(job: Job) -> Stream:
    """Short enough that three steps see more than one epoch."""
    if isinstance(job.model, DLRM):
        return clicks.make_stream(job)
    source = made_up(job, max(1, 2 * job.samples - 1))
    whole = isinstance(job.model, ResNet)  # an image is one target
    return Stream(source if whole else Gaps(source), job.seed, objective=objective_of(job.model, job.seed))


def _rates(job: Job, steps: int) -> list[float]:
    return [learning_rate(job.optimizer, number, steps) for number in range(steps)]


def _truth(job: Job, steps: int, layout: Layout | None = None) -> list[dict[str, Any]]:
    """What one process computes; with a layout, how it sums in it."""
    given = job, make_stream(job), _rates(job, steps), watch, Precision(job.precision).master
    if isinstance(job.model, DLRM):
        records = clicks.truth(*given)
    elif layout is not None and job.sync.every > 1:
        records = _joined(replicas(job, layout.replicate, *given[1:]))
    elif layout is None or layout.data == 1:
        records = truth(*given)
    else:
        # ZeRO 2 and 3 sum after each micro-batch.
        parts = solve_batch(layout, job.samples).micro_batches if layout.shard > 1 and layout.zero > 1 else 1
        records = truth(*given, (layout.data, parts), lambda chain: Sums(job, layout, chain))
    for record in records:
        for one in record.get("replicas", [record]):
            one["seen"] = {name: fingerprint(outputs) for name, outputs in one["seen"].items()}
    return records


def _joined(each: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of replicas that train apart: step by step the records of all."""
    return [{"replicas": list(records)} for records in zip(*each, strict=True)]


# Outputs as fingerprints


def watch(chain: Chain, seen: dict[str, list[Tensor]]) -> list[Any]:
    """Keeps each watched output, micro-batch by micro-batch."""
    return [
        module.register_forward_hook(_keep(name, seen))
        for name, module in chain.named_modules()
        if any(fnmatchcase(name, pattern) and name.count(".") == pattern.count(".") for pattern in chain.rules.watched)
    ]


def _keep(name: str, seen: dict[str, list[Tensor]]) -> Any:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # not when a block is computed again in the backward
            seen.setdefault(name, []).append(output.detach())

    return hook


def fingerprint(outputs: list[Tensor]) -> Tensor:
    """One number per sample and position: the product of an output with a fixed random vector."""
    whole = torch.cat(outputs).to(torch.float64)
    direction = torch.empty(whole.shape[-1], dtype=torch.float64)
    normal_(direction, key_of("fingerprint"), direction.shape, (0,), 1.0)
    return whole @ direction


# Comparison, in the layout's own world


class Comparison:
    """Collects errors on one rank in the order in which a step makes them, and agrees on them over the world."""

    def __init__(self, precision: str):
        self.limit, self.floor = LIMIT[precision], FLOOR[precision]
        self.worst = dict.fromkeys(KINDS, 0.0)
        self.found: list[tuple[tuple[int, int, int], Difference]] = []

    def add(self, number: int, kind: str, place: int, name: str, error: float) -> None:
        error = math.inf if math.isnan(error) else error
        self.worst[kind] = max(self.worst[kind], error)
        if error > self.limit:
            self.found.append(((number, KINDS.index(kind), place), Difference(number, kind, name, error)))

    def record(self, layout: Layout) -> Record:
        mine = (self.worst, min(self.found, key=lambda item: item[0], default=None))
        everyone: list[Any] = [mine] * layout.world
        if layout.world > 1:
            dist.all_gather_object(everyone, mine)
        worst = {kind: max(other[kind] for other, _ in everyone) for kind in KINDS}
        first = min((found for _, found in everyone if found is not None), key=lambda item: item[0], default=None)
        return Record(
            layout=str(layout), ok=first is None, loss=worst["loss"], grad_norm=worst["grad_norm"],
            grad=worst["gradient"], weight=worst["weight"], first_difference=first[1] if first else None,
        )  # fmt: skip


def error_of(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    return float((value - expected).norm() / expected.norm().clamp(min=floor))


def _compare(job: Job, layout: Layout, reference: list[dict[str, Any]], steps: int) -> Record:
    order = None if isinstance(job.model, DLRM) else order_of(job, layout, CLUSTERS["cpu"])
    engine = parallelize(job, layout, torch.device("cpu"), order=order)
    optimizer = optimizer_of(job, engine)
    dense = clicks.without_tables(engine)
    stream = make_stream(job)
    if isinstance(engine, Recommender):
        engine.keep(stream, job.embedding.cache)
    comparison = Comparison(job.precision)
    for number, rate in enumerate(_rates(job, steps)):
        expected = reference[number]
        if engine.meeting is not None:
            expected = expected["replicas"][engine.mesh["apart"].index]
        samples = stream.read(share(number, job.samples, layout.data, engine.mesh["reads"].index))
        set_learning_rate(optimizer, rate)
        engine.data.plain = number < job.gradient.plain_steps(steps)
        seen: dict[str, list[Tensor]] = {}
        # A hook would be compiled into its block: blocks would be compiled anew in each step, and differ from training.
        handles = [] if job.compile is True else [handle for chain in engine.chains for handle in watch(chain, seen)]

        def observe(outcome: Outcome) -> None:
            if job.compile is not True:
                _compare_outputs(comparison, number, engine, seen, expected["seen"])
            comparison.add(number, "loss", 0, "loss", error_of(outcome.loss, expected["loss"]))
            comparison.add(number, "grad_norm", 0, "grad_norm", error_of(outcome.grad_norm, expected["norm"]))
            gradients = [h.grad.to(engine.scale.value.dtype) / engine.scale.value for h in dense.holdings]
            _compare_pieces(comparison, number, "gradient", dense, gradients, expected["gradients"])
            if isinstance(engine, Recommender):
                clicks.compare_tables(comparison, number, "gradient", engine, expected["gradients"])

        step(engine, optimizer, samples, job.optimizer.clip, observe)
        if engine.meeting is not None:
            engine.meeting.after(number + 1, steps)
        for handle in handles:
            handle.remove()
        weights = [holding.tensor.detach() for holding in dense.holdings]
        _compare_pieces(comparison, number, "weight", dense, weights, expected["weights"])
        _compare_whole(comparison, number, dense, expected["weights"])
        if isinstance(engine, Recommender):
            clicks.compare_tables(comparison, number, "weight", engine, expected["weights"])
    return comparison.record(layout)


def _compare_outputs(
    comparison: Comparison, number: int, engine: Engine, seen: dict[str, list[Tensor]], expected: dict[str, Tensor]
) -> None:
    everyone: list[Any] = [set(seen)] * engine.mesh.layout.world
    if len(everyone) > 1:
        dist.all_gather_object(everyone, set(seen))
    anywhere = set().union(*everyone)
    for place, (name, whole) in enumerate(expected.items()):
        if name not in anywhere:
            comparison.add(number, "output", place, name, math.inf)
        elif name in seen:
            part = _part(whole, engine.mesh["data"], 0)
            part = part if engine.positions is None else part[:, engine.positions]
            part = _part(part, engine.mesh["tensor"], 1)
            floor = comparison.floor * float(whole.norm())
            comparison.add(number, "output", place, name, error_of(fingerprint(seen[name]), part, floor))


def _compare_pieces(
    comparison: Comparison, number: int, kind: str, engine: Engine, values: list[Tensor], expected: dict[str, Tensor]
) -> None:
    """Compares what lies as the holdings do. Pieces of one tensor add up to one error."""
    mesh = engine.mesh
    squares = torch.zeros(len(values), dtype=torch.float64)
    for i, (holding, value) in enumerate(zip(engine.holdings, values, strict=True)):
        piece = expected[holding.name]
        for dim, axis in cuts_of(holding, mesh):
            piece = _part(piece, axis, dim)
        squares[i] = (value - piece).square().sum() if value.shape == piece.shape else math.inf
    for axis, cut in ((mesh["tensor"], [h.tensor_dim is not None for h in engine.holdings]),
                      (mesh["joint"], [h.sharded or h.expert for h in engine.holdings])):  # fmt: skip
        if axis.size > 1:
            sums = squares.clone()
            dist.all_reduce(sums, group=axis.group)
            squares = torch.where(torch.tensor(cut), sums, squares)
    typical, places = _yardstick(expected)
    for holding, square in zip(engine.holdings, squares.tolist(), strict=True):
        error = math.sqrt(square) / max(float(expected[holding.name].norm()), comparison.floor * typical)
        comparison.add(number, kind, places[holding.name], holding.name, error)


def _compare_whole(comparison: Comparison, number: int, engine: Engine, expected: dict[str, Tensor]) -> None:
    """Where ranks keep whole weights beside their pieces, those must be the updated ones too."""
    if engine.mesh["joint"].size == 1:
        return  # the pieces are the weights
    typical, places = _yardstick(expected)
    cuts = {h.name: cuts_of(replace(h, sharded=False), engine.mesh) for h in engine.holdings}
    for chain in engine.chains:
        for name, weight in chain.named_weights():
            if not isinstance(weight, DTensor):
                part = expected[name]
                for dim, axis in cuts[name]:
                    part = _part(part, axis, dim)
                error = error_of(weight.detach(), part, comparison.floor * typical)
                comparison.add(number, "weight", places[name], name, error)


def _part(whole: Tensor, axis: Axis, dim: int | None) -> Tensor:
    """This rank's chunk; the last ones may be empty."""
    if dim is None or axis.size == 1:
        return whole
    chunks = whole.chunk(axis.size, dim)
    return chunks[axis.index] if axis.index < len(chunks) else whole.narrow(dim, 0, 0)


def _yardstick(expected: dict[str, Tensor]) -> tuple[float, dict[str, int]]:
    """The typical norm of the tensors, and the place of each, from the head down."""
    norms = torch.stack([tensor.norm() for tensor in expected.values()])
    return float(norms.square().mean().sqrt()), {name: place for place, name in enumerate(reversed(expected))}
