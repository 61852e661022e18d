"""Does a layout compute what one device computes? Runs both and compares number by number.

The error of a tensor is |a - b| / max(|b|, 1e-6 x RMS of all tensors' norms), with Frobenius norms, so that a gradient
which is mathematically zero does not cry wolf. Compared, in the order in which a step makes them: the output of each
watched module (as a fingerprint per sample and position), the loss, every gradient, the norm, every weight after the
update. The first that differs is named; gradients are looked through in the order in which the backward makes them,
from the head down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data.source import Synthetic
from shardwise.data.stream import Stream, share
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.models.chain import Chain
from shardwise.optim import learning_rate, make_optimizer, set_learning_rate
from shardwise.parallel.holding import distributed
from shardwise.parallel.parallelize import Engine, check, parallelize
from shardwise.parallel.precision import COMPUTE
from shardwise.random import key_of, normal_
from shardwise.step import Outcome, step
from shardwise.train.world import run_world
from shardwise.verify.truth import truth

# It is told once per process that gathering over two axes takes two collectives; here that is just what is wanted.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

LIMIT = {"float64": 1e-10, "float32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
FLOOR = 1e-6


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
    """The verdict on one layout: the largest relative error of each kind."""

    layout: str
    ok: bool
    loss: float
    grad_norm: float
    grad: float
    weight: float
    first_difference: Difference | None = None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(job: Job, layouts: list[Layout], steps: int = 3, report: Callable[[Record], None] = lambda _: None) -> list[Record]:
    """Proves each layout against one process. Layouts that cannot be had raise before anything starts."""
    for layout in layouts:
        check(job, layout)
    reference = run_world(_truth, 1, job, steps)[0]
    records = []
    for layout in layouts:
        records.append(run_world(_compare, layout.world, job, layout, reference, steps)[0])
        report(records[-1])
    return records


def make_stream(job: Job) -> Stream:
    return Stream(Synthetic(max(1, 2 * job.samples - 1), job.model.sequence, job.model.vocab, job.seed), job.seed)


def _rates(job: Job, steps: int) -> list[float]:
    return [learning_rate(job.optimizer, number, steps) for number in range(steps)]


def _truth(job: Job, steps: int) -> list[dict[str, Any]]:
    records = truth(job, make_stream(job), _rates(job, steps), watch, COMPUTE[job.precision])
    for record in records:
        record["seen"] = {name: fingerprint(outputs) for name, outputs in record["seen"].items()}
    return records


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

    def __init__(self, limit: float):
        self.limit = limit
        self.worst = {"output": 0.0, "loss": 0.0, "grad_norm": 0.0, "gradient": 0.0, "weight": 0.0}
        self.found: list[tuple[tuple[int, int, int], Difference]] = []

    def add(self, number: int, kind: str, place: int, name: str, error: float) -> None:
        error = error if error == error else float("inf")
        self.worst[kind] = max(self.worst[kind], error)
        if error > self.limit:
            order = (number, ("output", "loss", "gradient", "grad_norm", "weight").index(kind), place)
            self.found.append((order, Difference(number, kind, name, error)))

    def record(self, layout: Layout) -> Record:
        everyone: list[Any] = [None] * layout.world
        mine = (self.worst, min(self.found, key=lambda item: item[0], default=None))
        if layout.world > 1:
            dist.all_gather_object(everyone, mine)
        else:
            everyone = [mine]
        worst = {kind: max(other[kind] for other, _ in everyone) for kind in self.worst}
        first = min((found for _, found in everyone if found is not None), key=lambda item: item[0], default=None)
        return Record(
            layout=str(layout), ok=first is None, loss=worst["loss"], grad_norm=worst["grad_norm"],
            grad=worst["gradient"], weight=worst["weight"], first_difference=first[1] if first else None,
        )  # fmt: skip


def error_of(value: Tensor, truth: Tensor, floor: float) -> float:
    return float((value - truth).norm() / truth.norm().clamp(min=floor))


def _compare(job: Job, layout: Layout, reference: list[dict[str, Any]], steps: int) -> Record:
    engine = parallelize(job, layout, torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.holdings)
    stream = make_stream(job)
    comparison = Comparison(LIMIT[job.precision])
    for number, rate in enumerate(_rates(job, steps)):
        expected = reference[number]
        samples = stream.read(share(number, job.samples, layout.data, engine.mesh["data"].index))
        set_learning_rate(optimizer, rate)
        seen: dict[str, list[Tensor]] = {}
        handles = [handle for chain in engine.chains for handle in watch(chain, seen)]

        def observe(outcome: Outcome) -> None:
            _compare_outputs(comparison, number, engine, seen, expected["seen"])
            comparison.add(number, "loss", 0, "loss", error_of(outcome.loss, expected["loss"], 0.0))
            comparison.add(number, "grad_norm", 0, "grad_norm", error_of(outcome.grad_norm, expected["norm"], 0.0))
            gradients = {holding.name: holding.tensor.grad for holding in engine.holdings}
            _compare_all(comparison, number, "gradient", engine, gradients, expected["gradients"])

        step(engine, optimizer, samples, job.optimizer.clip, observe)
        for handle in handles:
            handle.remove()
        weights = {holding.name: holding.tensor.detach() for holding in engine.holdings}
        _compare_all(comparison, number, "weight", engine, weights, expected["weights"])
        _compare_whole(comparison, number, engine, expected["weights"])
    return comparison.record(layout)


def _compare_outputs(
    comparison: Comparison, number: int, engine: Engine, seen: dict[str, list[Tensor]], expected: dict[str, Tensor]
) -> None:
    data, tensor = engine.mesh["data"], engine.mesh["tensor"]
    for place, (name, truth) in enumerate(expected.items()):
        if name not in seen:
            continue
        rows = truth.chunk(data.size, 0)[data.index]
        part = rows.chunk(tensor.size, 1)[tensor.index]
        floor = float(truth.norm()) * FLOOR
        comparison.add(number, "output", place, name, error_of(fingerprint(seen[name]), part, floor))


def _compare_all(
    comparison: Comparison, number: int, kind: str, engine: Engine,
    values: dict[str, Tensor | None], expected: dict[str, Tensor],
) -> None:  # fmt: skip
    floor = FLOOR * float(torch.stack([truth.norm() for truth in expected.values()]).square().mean().sqrt())
    order = {name: place for place, name in enumerate(reversed(expected))}
    for holding in engine.holdings:
        value = values[holding.name]
        assert value is not None
        whole = distributed(holding, value, engine.mesh)
        if engine.mesh.home is not None:
            whole = whole.full_tensor()  # type: ignore[attr-defined]
        comparison.add(number, kind, order[holding.name], holding.name, error_of(whole, expected[holding.name], floor))


def _compare_whole(comparison: Comparison, number: int, engine: Engine, expected: dict[str, Tensor]) -> None:
    """Where ranks keep whole weights beside their pieces, those must be the updated ones too."""
    for chain in engine.chains:
        for name, weight in chain.named_weights():
            if weight.shape == expected[name].shape and not hasattr(weight, "to_local"):
                comparison.add(number, "weight", 0, name, error_of(weight.detach(), expected[name], 1e-30))
