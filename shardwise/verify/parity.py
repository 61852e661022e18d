"""Checks that a layout computes what a single process computes: runs both and compares all tensors.

docs/explanation/same-run-any-layout.md defines the error of a tensor. The first difference in the order of a step
(`QUANTITIES`) is reported: outputs of the compared modules are fingerprints per sample and position (none with
`compile`), and one that no rank computed is a difference too; gradients are in backward order, from the head down.
Every rank compares its own shards with the same shards of the reference, so replicas that diverge are found."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.cluster import CLUSTERS
from shardwise.comm.collectives import all_gather_json, all_reduce
from shardwise.comm.world import run_world
from shardwise.data.make_sources import synthetic_source
from shardwise.data.sample_stream import Samples, SampleStream, Subset, job_stream, rank_positions
from shardwise.errors import JobError, RunError
from shardwise.job import Job
from shardwise.layout import Layout
from shardwise.models.chain import IGNORE_INDEX
from shardwise.models.objectives import next_token
from shardwise.models.preference import mark_rejected
from shardwise.optim.lr_schedule import job_learning_rate, set_learning_rate
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.precision import Precision
from shardwise.parallel.prepare import meta_model, prepare
from shardwise.planner.plan import auto_schedule_order
from shardwise.random import hash_key, normal_
from shardwise.step import StepResult, step
from shardwise.train.local_machine import check_compiler, require_memory
from shardwise.verify.reference import GradientHook, run_local_sgd_reference, run_steps

TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "bf16": 1e-1, "fp16": 1e-2, "fp8": 3e-1}
# Relative to the RMS norm. In half precision, rounding decides which way Adam moves a weight with a tiny gradient.
NORM_FLOOR = {"float64": 1e-6, "float32": 1e-6, "bf16": 0.1, "fp16": 0.1, "fp8": 0.1}
# A gradient that is zero in theory (a key's bias under softmax) is rounding noise, of which Adam makes a full step.
NOISE_NORM, NOISE_FLOOR = 1e-12, 1e-3  # relative to the RMS norm: what counts as noise, and the floor of its weights
QUANTITIES = ("output", "loss", "gradient", "grad_norm", "weight")  # in the order in which a step computes them


@dataclass(frozen=True)
class Difference:
    """The first difference between a layout and the single-process reference."""

    step: int
    kind: str  # `output`, `loss`, `gradient`, `grad_norm` or `weight`
    name: str
    error: float


@dataclass(frozen=True)
class VerifyResult:
    """The result for one layout: the largest relative error of each kind, NaN if the layout did not run."""

    layout: str
    ok: bool
    loss: float = math.nan
    grad_norm: float = math.nan
    grad: float = math.nan
    weight: float = math.nan
    first_difference: Difference | None = None
    failure: str | None = None  # why the layout did not finish
    hint: str = ""  # what is likely to cause the difference

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, with None for non-finite errors."""
        values = asdict(self)
        for record in (values, values["first_difference"] or {}):
            record.update({k: None for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)})
        return values

    def describe(self) -> str:
        if self.failure is not None:
            return f"layout '{self.layout}' did not finish: {self.failure}"
        if self.first_difference is None:
            return f"layout '{self.layout}' matches the single-process reference."
        first = self.first_difference
        name = f"{first.name} ({first.kind})" if first.kind != first.name else first.name
        where = f"layout '{self.layout}' first differs in step {first.step}: {name}"
        return f"{where}, relative error {first.error:.1e}.{self.hint}"


def verify(job: Job, layouts: list[Layout], steps: int = 3,
           report: Callable[[VerifyResult], None] = lambda _: None) -> list[VerifyResult]:  # fmt: skip
    """Compares each layout with the single-process reference. Raises first if the job cannot run in one of them."""
    for layout in layouts:
        prepare(job, layout)
    if job.gradient.compress:
        compress = f"gradient.compress = {job.gradient.compress!r} is lossy, so no layout equals one process"
        raise JobError(f'{compress}; verify the layout without it: --set gradient.compress="".')
    if job.compile is True:
        check_compiler()
    require_memory(job, 16, max((layout.world for layout in layouts), default=1))
    reference = run_world(_run_reference, 1, job, steps)[0]
    records = []
    for layout in layouts:
        if job.local_sgd.every > 1:
            reference = run_world(_run_reference, 1, job, steps, layout)[0]
        try:
            record = run_world(_compare_layout, layout.world, job, layout, reference, steps)[0]
        except RunError as error:
            # The rank, which the first line names, and the last line of the traceback.
            first, *_, last = [line.strip() for line in f"{error}\n{error}".splitlines() if line.strip()]
            failure = last if first == last else f"{first.partition(':')[0]}: {last}"
            record = VerifyResult(str(layout), ok=False, failure=failure)
        if (difference := record.first_difference) is not None:
            record = replace(record, hint=job.family.explain_difference(job.model, layout, difference.kind))
        records.append(record)
        report(record)
    return records


class IgnoredTargetsSource(Subset):
    """Ignores a different number of targets in each sample, so that averaging the ranks' losses would be wrong."""

    def read_sample(self, index: int) -> np.ndarray:
        sample = super().read_sample(index).copy()
        sample[1 : 1 + 3 * index % self.length] = IGNORE_INDEX
        return sample


class PackedSource(IgnoredTargetsSource):
    """Rows of several documents, of different lengths in each row, as with `data.pack`; pairs, with a beta of DPO."""

    dpo_beta = 0.0

    def samples(self, indices: np.ndarray, positions: np.ndarray) -> Samples:
        tokens, targets = next_token(np.stack([self.read_sample(index) for index in indices.tolist()]), positions)
        places = (np.arange(self.length) + 5 * indices[:, None]) % (3 + indices[:, None] % (self.length // 2 + 1))
        is_first = (places == 0) | (np.arange(self.length) == 0)
        targets[:, :-1][is_first[:, 1:]] = IGNORE_INDEX
        parts = [np.where(is_first, ~tokens, tokens), targets, positions.astype(np.int64)]
        if self.dpo_beta:  # the first document of a row, and the others
            parts[1] = np.where(np.cumsum(is_first, 1) > 1, mark_rejected(targets), targets)
            parts.append(np.stack((indices / 3 - 1, np.full(len(indices), self.dpo_beta)), 1))
        return Samples.from_tensors(torch.from_numpy(part) for part in parts)


def make_stream(job: Job) -> SampleStream:
    """Returns a stream so short that three steps read more than one epoch."""
    source = synthetic_source(job, max(1, 2 * job.samples - 1))
    if job.is_packed:
        packed = PackedSource(source, 0, len(source))
        packed.dpo_beta = job.loss.dpo_beta
        return job_stream(job, packed)
    has_one_target = job.model.sample_kind != "tokens" or job.model.counts_samples
    return job_stream(job, source if has_one_target else IgnoredTargetsSource(source, 0, len(source)))


def _run_reference(job: Job, steps: int, layout: Layout | None = None,
                   make_hook: Callable[[Any], GradientHook] | None = None) -> list[dict[str, Any]]:  # fmt: skip
    """Runs the single-process reference; with a layout, it emulates that layout's local SGD. `make_hook`: for tests."""
    record = partial(record_outputs, meta_model(job.model, job.seed).sharding_plan.compared_modules)
    learning_rates = [job_learning_rate(job, number, steps) for number in range(steps)]
    arguments = job, make_stream(job), learning_rates, record, Precision(job.precision).master_dtype
    if layout is not None and job.local_sgd.every > 1:
        by_replica = run_local_sgd_reference(layout.replicate, arguments)
        records = [{"replicas": list(replicas)} for replicas in zip(*by_replica, strict=True)]
    else:
        records = [step_record for step_record, _ in run_steps(*arguments, make_gradient_hook=make_hook)]
    for result in (replica for step_record in records for replica in step_record.get("replicas", [step_record])):
        result["outputs"] = {name: output_fingerprint(outputs) for name, outputs in result["outputs"].items()}
    return records


def record_outputs(patterns: Sequence[str], model: nn.Module, outputs: dict[str, list[Tensor]]) -> list[Any]:
    """Hooks the compared modules so that `outputs` collects their outputs by micro-batch. Returns the handles."""

    def record(name: str, module: nn.Module, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple | list) else output
        if isinstance(output, Tensor) and torch._C._current_graph_task_id() == -1:  # not recomputed in the backward
            outputs.setdefault(name, []).append(output.detach())

    own = [pair for pair in model.named_modules() if not getattr(pair[1], "is_passed_over", False)]  # by other stages
    return [module.register_forward_hook(partial(record, name)) for name, module in own
            if any(fnmatchcase(name, one) and name.count(".") == one.count(".") for one in patterns)]  # fmt: skip


def output_fingerprint(batches: list[Tensor]) -> Tensor:
    """Returns one number per sample and position: the dot product of the output with a fixed random vector."""
    combined = torch.cat(batches).to(torch.float64)
    direction = torch.empty(combined.shape[-1], dtype=torch.float64)
    normal_(direction, hash_key("fingerprint"), direction.shape, (0,), 1.0)
    return combined @ direction


class Comparison:
    """Collects the errors of one rank, step by step; `result` combines those of all ranks."""

    def __init__(self, job: Job, engine: Engine):
        self.engine, self.step = engine, 0
        self.tolerance, self.floor = TOLERANCE[job.precision], NORM_FLOOR[job.precision]
        self.tables = [table.name for table in job.family.tables(job.model)]  # of which a rank may have no shard
        self.max_errors = dict.fromkeys(QUANTITIES, 0.0)
        self.noise: set[str] = set()  # parameters whose gradient was rounding noise in some step
        self.differences: list[tuple[int, int, int, str, float]] = []  # step, quantity, order in it, name, error

    def add(self, kind: str, order: int, name: str, error: float) -> None:
        error = math.inf if math.isnan(error) else error
        self.max_errors[kind] = max(self.max_errors[kind], error)
        if error > self.tolerance:
            self.differences.append((self.step, QUANTITIES.index(kind), order, name, error))

    def result(self, layout: Layout) -> VerifyResult:
        gathered = all_gather_json((self.max_errors, min(self.differences, default=None)))
        max_errors = {kind: max(errors[kind] for errors, _ in gathered) for kind in QUANTITIES}
        first = min((item for _, item in gathered if item is not None), default=None)
        loss, grad_norm, grad, weight = (max_errors[kind] for kind in ("loss", "grad_norm", "gradient", "weight"))
        difference = first and Difference(first[0], QUANTITIES[first[1]], *first[3:])
        return VerifyResult(str(layout), first is None, loss, grad_norm, grad, weight, difference)

    def add_outputs(self, outputs: dict[str, list[Tensor]], expected: dict[str, Tensor]) -> None:
        mesh, positions = self.engine.mesh, self.engine.positions
        recorded = set().union(*all_gather_json(sorted(outputs)))
        for order, (name, full) in enumerate(expected.items()):
            if name not in recorded:
                self.add("output", order, name, math.inf)
            elif name in outputs and (positions is None or full.dim() > 1):  # flattened samples have no positions
                chunk = full.narrow(0, *mesh["data"].span(full.shape[0]))
                chunk = chunk if positions is None else chunk[:, positions]
                if self.engine.chains[0].sharding_plan.splits_sequence and mesh["tensor"].size > 1:
                    chunk = chunk.narrow(1, *mesh["tensor"].span(chunk.shape[1]))
                found, floor = output_fingerprint(outputs[name]), self.floor * float(full.norm())
                error = relative_error(found, chunk, floor) if found.shape == chunk.shape else math.inf
                self.add("output", order, name, error)

    def add_shards(self, kind: str, values: list[Tensor], expected: dict[str, Tensor]) -> None:
        """Compares one value per parameter shard. The errors and sizes of all shards of a tensor add up."""
        mesh, shards = self.engine.mesh, self.engine.param_shards
        rms_norm, order = _rms_norm_and_order(expected)
        squared_errors, sizes = torch.zeros(2, len(expected), dtype=torch.float64)
        infinite = torch.tensor(math.inf, dtype=torch.float64)
        for shard, value in zip(shards, values, strict=True):
            start, size = shard.offset_and_shape
            expected_shard = expected[shard.name][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
            place = order[shard.name]
            has_shape = value.shape == expected_shard.shape
            squared_error = (value - expected_shard).square().sum().double() if has_shape else infinite
            # A rank may have both copies of a tied weight; `maximum` keeps a NaN.
            squared_errors[place], sizes[place] = torch.maximum(squared_errors[place], squared_error), value.numel()
        tensor_sharded = {p.name for p in shards if p.tensor_dim is not None}
        fsdp_sharded = {p.name for p in shards if any(axis is not mesh["tensor"] for _, axis in p.sharded_dims)}
        for axis, names in (("tensor", tensor_sharded), ("fsdp_context", fsdp_sharded), ("data", set(self.tables))):
            sums = torch.stack((squared_errors, sizes))
            all_reduce(sums, axis=mesh[axis])
            is_sharded = torch.tensor([name in names for name in order])
            squared_errors, sizes = torch.where(is_sharded, sums, torch.stack((squared_errors, sizes)))
        for name in dict.fromkeys([*(shard.name for shard in shards), *self.tables]):
            norm = float(expected[name].norm())
            floor = NOISE_FLOOR if kind == "weight" and name in self.noise else self.floor
            error = math.sqrt(squared_errors[order[name]]) / max(norm, floor * rms_norm)
            is_complete = sizes[order[name]] == expected[name].numel()
            self.add(kind, order[name], name, error if is_complete else math.inf)
            if kind == "gradient" and norm < NOISE_NORM * rms_norm:
                self.noise.add(name)

    def add_full_weights(self, expected: dict[str, Tensor]) -> None:
        """Compares the full weights that ranks keep beside their shards (ZeRO 1): the update must reach them too."""
        if self.engine.mesh["fsdp_context"].size == 1:
            return  # the shards are the weights
        rms_norm, order = _rms_norm_and_order(expected)
        shards = {shard.name: shard for shard in self.engine.param_shards}
        for name, weight in (pair for chain in self.engine.chains for pair in chain.named_unique_parameters()):
            if not isinstance(weight, DTensor) and weight.requires_grad:
                chunk = expected[name]
                fsdp = self.engine.mesh["expert_replicas" if shards[name].is_expert else "fsdp"]
                for dim, axis in shards[name].sharded_dims:
                    chunk = chunk if axis is fsdp else chunk.narrow(dim, *axis.span(chunk.shape[dim]))
                floor = NOISE_FLOOR if name in self.noise else self.floor
                self.add("weight", order[name], name, relative_error(weight.detach(), chunk, floor * rms_norm))


def relative_error(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    return float((value - expected).norm() / expected.norm().clamp(min=floor))


def _rms_norm_and_order(expected: dict[str, Tensor]) -> tuple[float, dict[str, int]]:
    """Returns the RMS norm of the tensors, and the index of each in backward order."""
    norms = torch.stack([tensor.norm() for tensor in expected.values()])
    return float(norms.square().mean().sqrt()), {name: index for index, name in enumerate(reversed(expected))}


def _compare_layout(job: Job, layout: Layout, reference: list[dict[str, Any]], steps: int) -> VerifyResult:
    order = auto_schedule_order(job, layout, CLUSTERS["cpu"])
    engine = parallelize(prepare(job, layout), torch.device("cpu"), order=order)
    optimizer = engine.make_optimizer(job)
    stream = make_stream(job)
    engine.begin_stream(job, stream)
    comparison = Comparison(job, engine)
    record = partial(record_outputs, engine.chains[0].sharding_plan.compared_modules)
    for number, expected in enumerate(reference):
        comparison.step = number
        if engine.outer_optimizer is not None:
            expected = expected["replicas"][engine.mesh["local_sgd"].index]
        samples = stream.read(rank_positions(number, job.samples, layout.data, engine.mesh["loader"].index))
        set_learning_rate(optimizer, job_learning_rate(job, number, steps))
        engine.data.compression_paused = number < job.gradient.uncompressed_steps(steps)
        outputs: dict[str, list[Tensor]] = {}
        # torch.compile would trace the hooks: blocks would recompile in each step and differ from those in training.
        handles = [] if job.compile is True else [hook for chain in engine.chains for hook in record(chain, outputs)]

        def observe(outcome: StepResult) -> None:
            if job.compile is not True:
                comparison.add_outputs(outputs, expected["outputs"])
            comparison.add("loss", 0, "loss", relative_error(outcome.loss, expected["loss"]))
            comparison.add("grad_norm", 0, "grad_norm", relative_error(outcome.grad_norm, expected["norm"]))
            gradients = [p.full_grad.to(engine.scale.value.dtype) / engine.scale.value for p in engine.param_shards]
            comparison.add_shards("gradient", gradients, expected["gradients"])

        step(engine, optimizer, samples, job.optimizer.clip, observe)
        if engine.outer_optimizer is not None:
            engine.outer_optimizer.after_step(number + 1, steps)
        for handle in handles:
            handle.remove()
        comparison.add_shards("weight", [shard.tensor.detach() for shard in engine.param_shards], expected["weights"])
        comparison.add_full_weights(expected["weights"])
    return comparison.result(layout)
