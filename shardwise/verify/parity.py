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
from shardwise.errors import JobError, LayoutError, RunError, WorkerError
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
from shardwise.verify.kept_state import finite_norm, kept_difference, persistent_buffers
from shardwise.verify.reference import GradientHook, run_local_sgd_reference, run_steps
from shardwise.verify.rounding import LARGEST_ALLOWANCE, RUNS, MovedStream, StepRounding, find_moved, move_weights

TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "bf16": 1e-1, "fp16": 1e-2, "fp8": 3e-1}
# Relative to the RMS norm. In half precision, rounding decides which way Adam moves a weight with a tiny gradient.
NORM_FLOOR = {"float64": 1e-6, "float32": 1e-6, "bf16": 0.1, "fp16": 0.1, "fp8": 0.1}
# A gradient that is zero in theory (a key's bias under softmax) is rounding noise, of which Adam makes a full step.
NOISE_NORM, NOISE_FLOOR = 1e-12, 1e-3  # relative to the RMS norm: what counts as noise, and the floor of its weights
# In the order in which a step computes them; last, what the forward may have changed beside them.
QUANTITIES = ("output", "loss", "gradient", "grad_norm", "weight", "frozen weight", "buffer")


@dataclass(frozen=True)
class Difference:
    """The first difference between a layout and the single-process reference."""

    step: int
    kind: str  # one of QUANTITIES
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
    weight: float = math.nan  # frozen weights and buffers included
    first_difference: Difference | None = None
    failure: str | None = None  # why the layout did not finish
    hint: str = ""  # what is likely to cause the difference
    is_beyond_rounding: bool = False  # whether the first difference is larger than rounding could ever excuse

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, with None for non-finite errors."""
        values = asdict(self)
        del values["is_beyond_rounding"]
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
           report: Callable[[VerifyResult], None] = lambda _: None,
           timeout: float = 240.0) -> list[VerifyResult]:  # fmt: skip
    """Compares each layout with the single-process reference. Raises first if the job cannot run in one of them.
    `timeout`: seconds after which the reference, or a layout, counts as hanging."""
    for layout in layouts:
        prepare(job, layout)
    if job.gradient.compress:
        compress = f"gradient.compress = {job.gradient.compress!r} is lossy, so no layout equals one process"
        raise JobError(f'{compress}; verify the layout without it: --set gradient.compress="".')
    if job.compile is True:
        check_compiler()
    require_memory(job, 16, max((layout.world for layout in layouts), default=1))
    reference = _reference_in_a_process(job, steps, None, timeout)
    may_measure_rounding = job.precision == "float64" and job.local_sgd.every == 1
    rounding: list[StepRounding] | None = None
    records = []
    for layout in layouts:
        if job.local_sgd.every > 1:
            reference = _reference_in_a_process(job, steps, layout, timeout)
        compare = partial(_compare_in_processes, job, layout, reference, steps, timeout)

        record = compare(rounding)
        is_doubtful = record.first_difference is not None and not record.is_beyond_rounding
        if is_doubtful and may_measure_rounding:
            rounding = run_world(_measure_rounding, 1, job, steps, reference, timeout=RUNS * timeout)[0]
            may_measure_rounding = False
            record = compare(rounding) if rounding is not None else record

        if record.first_difference is not None:
            hint = job.family.explain_difference(job.model, layout, record.first_difference.kind)
            record = replace(record, hint=hint)
        records.append(record)
        report(record)
    return records


def _compare_in_processes(
    job: Job,
    layout: Layout,
    reference: list[dict[str, Any]],
    steps: int,
    timeout: float,
    rounding: list[StepRounding] | None,
) -> VerifyResult:
    """Runs a layout in processes of its own; a layout that fails there has a result, too, which says why."""
    try:
        results = run_world(_compare_layout, layout.world, job, layout, reference, steps, rounding, timeout=timeout)
        return results[0]  # type: ignore[no-any-return]
    except WorkerError as error:
        failure = error.cause
    except (RunError, LayoutError) as error:
        failure = str(error).partition("\n")[0]  # the rest may be the stacks of all ranks
    return VerifyResult(str(layout), ok=False, failure=failure)


def _reference_in_a_process(job: Job, steps: int, layout: Layout | None, timeout: float) -> list[dict[str, Any]]:
    """Returns the records of the reference; raises JobError if the model itself fails, whatever the layout."""
    try:
        return run_world(_run_reference, 1, job, steps, layout, timeout=timeout)[0]  # type: ignore[no-any-return]
    except WorkerError as error:
        cause = error.cause.partition(": ")[2].rstrip(".")
        raise JobError(
            f"no layout can be compared, since the model itself fails in one process in {job.precision}: {cause}. "
            "Mend the model, or train without a comparison (--no-proof, proof=False)."
        ) from error


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
                   make_hook: Callable[[Any], GradientHook] | None = None,
                   stream: Any = None) -> list[dict[str, Any]]:  # fmt: skip
    """Runs the single-process reference; with a layout, it emulates that layout's local SGD. `make_hook`: called with
    the model before the first step, returns what is called with each step's gradients. `stream`: other samples."""
    record = partial(record_outputs, meta_model(job.model, job.seed).sharding_plan.compared_modules)
    learning_rates = [job_learning_rate(job, number, steps) for number in range(steps)]
    arguments = job, stream or make_stream(job), learning_rates, record, Precision(job.precision).master_dtype
    if layout is not None and job.local_sgd.every > 1:
        by_replica = run_local_sgd_reference(layout.replicate, arguments)
        records = [{"replicas": list(replicas)} for replicas in zip(*by_replica, strict=True)]
    else:
        records = [step_record for step_record, _ in run_steps(*arguments, make_gradient_hook=make_hook)]
    for result in (replica for step_record in records for replica in step_record.get("replicas", [step_record])):
        result["outputs"] = {name: output_fingerprint(outputs) for name, outputs in result["outputs"].items()}
    return records


def _measure_rounding(job: Job, steps: int, reference: list[dict[str, Any]]) -> list[StepRounding] | None:
    """Runs the reference again, with the last bits of weights and inputs moved."""
    runs = []
    for seed in range(RUNS):
        generator = torch.Generator().manual_seed(seed)

        def move(model: nn.Module, generator: torch.Generator = generator) -> GradientHook:
            move_weights(model, generator)
            return lambda step, samples: None

        runs.append(_run_reference(job, steps, make_hook=move, stream=MovedStream(make_stream(job), generator)))
    return find_moved(reference, runs)


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


def output_error(found: Tensor, expected: Tensor, floor: float) -> float:
    """Returns the error of the fingerprints of a rank's samples.

    A rank may pad its samples to its own longest, so its rows may be shorter than those of one process. Then what both
    have is compared, wherever the padding is: at the end or at the start. If padding takes part in what is computed,
    loss and gradients differ."""
    if found.shape == expected.shape:
        return relative_error(found, expected, floor)
    if found.dim() != expected.dim() or len(found) != len(expected):
        return math.inf

    sizes = [min(pair) for pair in zip(found.shape, expected.shape, strict=True)]
    errors = []
    for is_at_end in (True, False):
        found_part, expected_part = found, expected
        for dim, size in enumerate(sizes):
            found_part = found_part.narrow(dim, 0 if is_at_end else found.shape[dim] - size, size)
            expected_part = expected_part.narrow(dim, 0 if is_at_end else expected.shape[dim] - size, size)
        errors.append(relative_error(found_part, expected_part, floor))
    return min(errors)


class Comparison:
    """Collects the errors of one rank, step by step; `result` combines those of all ranks."""

    def __init__(self, job: Job, engine: Engine, rounding: list[StepRounding] | None = None):
        """`rounding`: by step, what rounding alone moves in the reference. None: not measured."""
        self.engine, self.step = engine, 0
        self.rounding = rounding
        self.tolerance, self.floor = TOLERANCE[job.precision], NORM_FLOOR[job.precision]
        self.tables = [table.name for table in job.family.tables(job.model)]  # of which a rank may have no shard
        self.max_errors = dict.fromkeys(QUANTITIES, 0.0)
        self.noise: set[str] = set()  # parameters whose gradient was rounding noise in some step
        # Step, quantity, order in it, name, error, and whether it is more than rounding.
        self.differences: list[tuple[int, int, int, str, float, bool]] = []

    def add(self, kind: str, order: int, name: str, error: float, is_beyond_rounding: bool = False) -> None:
        error = math.inf if math.isnan(error) else error
        self.max_errors[kind] = max(self.max_errors[kind], error)
        if error > self.tolerance:
            self.differences.append((self.step, QUANTITIES.index(kind), order, name, error, is_beyond_rounding))

    def least_scale(self, kind: str, name: str) -> float:
        """Returns the least norm that a difference is relative to, so that rounding alone is within the tolerance."""
        if self.rounding is None:
            return 0.0
        return self.rounding[self.step].allowance(kind, name) / self.tolerance

    def add_number(self, kind: str, value: Tensor, expected: Tensor) -> None:
        self.add(kind, 0, kind, relative_error(value, expected, self.least_scale(kind, kind)))

    def result(self, layout: Layout) -> VerifyResult:
        gathered = all_gather_json((self.max_errors, min(self.differences, default=None)))
        max_errors = {kind: max(errors[kind] for errors, _ in gathered) for kind in QUANTITIES}
        first = min((item for _, item in gathered if item is not None), default=None)
        loss, grad_norm, grad = (max_errors[kind] for kind in ("loss", "grad_norm", "gradient"))
        weight = max(max_errors[kind] for kind in ("weight", "frozen weight", "buffer"))
        if first is None:
            return VerifyResult(str(layout), True, loss, grad_norm, grad, weight)

        step, quantity, _, name, error, is_beyond_rounding = first
        difference = Difference(step, QUANTITIES[quantity], name, error)
        return VerifyResult(
            str(layout), False, loss, grad_norm, grad, weight, difference, is_beyond_rounding=is_beyond_rounding
        )

    def add_outputs(self, outputs: dict[str, list[Tensor]], expected: dict[str, Tensor]) -> None:
        mesh, positions = self.engine.mesh, self.engine.positions
        recorded = set().union(*all_gather_json(sorted(outputs)))
        rms_norm = _rms_norm(expected)
        for order, (name, full) in enumerate(expected.items()):
            if name not in recorded:
                self.add("output", order, name, math.inf)
            elif name in outputs and (positions is None or full.dim() > 1):  # flattened samples have no positions
                chunk = full.narrow(0, *mesh["data"].span(full.shape[0]))
                chunk = chunk if positions is None else chunk[:, positions]
                if self.engine.chains[0].sharding_plan.splits_sequence and mesh["tensor"].size > 1:
                    chunk = chunk.narrow(1, *mesh["tensor"].span(chunk.shape[1]))
                floor = max(self.floor * float(full.norm()), self.least_scale("output", name))
                found = output_fingerprint(outputs[name])
                # Later outputs come from weights to which an optimizer has added rounding that it made large.
                is_comparable = self.step == 0 and found.shape == chunk.shape
                is_beyond_rounding = is_comparable and float((found - chunk).norm()) > LARGEST_ALLOWANCE * rms_norm
                self.add("output", order, name, output_error(found, chunk, floor), is_beyond_rounding)

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
            scale = max(norm, floor * rms_norm, self.least_scale(kind, name))
            distance = math.sqrt(squared_errors[order[name]])
            error = error_ratio(distance, scale)
            is_complete = sizes[order[name]] == expected[name].numel()
            # A step of an optimizer makes rounding large, so weights may differ by more.
            is_beyond_rounding = kind == "gradient" and distance > LARGEST_ALLOWANCE * rms_norm
            self.add(kind, order[name], name, error if is_complete else math.inf, is_beyond_rounding)
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
                least = max(floor * rms_norm, self.least_scale("weight", name))
                self.add("weight", order[name], name, relative_error(weight.detach(), chunk, least))

    def add_kept_state(self, expected: dict[str, Any]) -> None:
        """Compares this rank's frozen weights and buffers with the reference's, which its forward may have changed."""
        rms_norm, _ = _rms_norm_and_order(expected["weights"])

        frozen = expected["frozen"]
        order = {name: index for index, name in enumerate(frozen)}
        for shard in self.engine.data.frozen_shards:
            if shard.name in frozen:  # not a weight that the layout trains no longer, since nothing uses it
                start, size = shard.offset_and_shape
                part = frozen[shard.name][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
                least = max(NOISE_FLOOR * rms_norm, self.least_scale("frozen weight", shard.name))
                scale = max(finite_norm(frozen[shard.name]), least)
                error = error_ratio(kept_difference(shard.tensor, part), scale)
                self.add("frozen weight", order[shard.name], shard.name, error)

        if self.engine.outer_optimizer is not None:
            return  # it averages the buffers of the replicas, each of which has a reference of its own
        buffers = expected["buffers"]
        order = {name: index for index, name in enumerate(buffers)}
        for chain in self.engine.chains:
            for name, buffer in persistent_buffers(chain).items():
                if name in buffers:
                    # A running mean may be zero in theory, so that only its rounding differs.
                    scale = max(finite_norm(buffers[name]), rms_norm, self.least_scale("buffer", name))
                    error = error_ratio(kept_difference(buffer, buffers[name]), scale)
                    self.add("buffer", order[name], name, error)


def relative_error(value: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Returns the norm of the difference relative to the expected norm, which counts as at least `floor`."""
    return error_ratio(float((value - expected).norm()), max(float(expected.norm()), floor))


def error_ratio(difference: float, scale: float) -> float:
    """Returns a relative error. What does not differ has none, even if all of it is zero."""
    if difference == 0.0:
        return 0.0
    if scale == 0.0:
        return math.inf
    return difference / scale


def _rms_norm(tensors: dict[str, Tensor]) -> float:
    norms = [float(tensor.norm()) for tensor in tensors.values()]
    return math.sqrt(sum(norm**2 for norm in norms) / max(1, len(norms)))


def _rms_norm_and_order(expected: dict[str, Tensor]) -> tuple[float, dict[str, int]]:
    """Returns the RMS norm of the tensors, and the index of each in backward order."""
    return _rms_norm(expected), {name: index for index, name in enumerate(reversed(expected))}


def _compare_layout(
    job: Job, layout: Layout, reference: list[dict[str, Any]], steps: int, rounding: list[StepRounding] | None = None
) -> VerifyResult:
    order = auto_schedule_order(job, layout, CLUSTERS["cpu"])
    engine = parallelize(prepare(job, layout), torch.device("cpu"), order=order)
    optimizer = engine.make_optimizer(job)
    stream = make_stream(job)
    engine.begin_stream(job, stream)
    comparison = Comparison(job, engine, rounding)
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
            comparison.add_number("loss", outcome.loss, expected["loss"])
            comparison.add_number("grad_norm", outcome.grad_norm, expected["norm"])
            gradients = [p.full_grad.to(engine.scale.value.dtype) / engine.scale.value for p in engine.param_shards]
            comparison.add_shards("gradient", gradients, expected["gradients"])

        step(engine, optimizer, samples, job.optimizer.clip, observe)
        if engine.outer_optimizer is not None:
            engine.outer_optimizer.after_step(number + 1, steps)
        for handle in handles:
            handle.remove()
        comparison.add_shards("weight", [shard.tensor.detach() for shard in engine.param_shards], expected["weights"])
        comparison.add_full_weights(expected["weights"])
        comparison.add_kept_state(expected)
    return comparison.result(layout)
