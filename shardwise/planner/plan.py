"""A plan: the best layouts of a job on a cluster, what each costs, and why notable others lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.cluster import GIB, Cluster, find_cluster
from shardwise.console import pluralize
from shardwise.errors import LayoutError
from shardwise.job import Job, load_job
from shardwise.layout import Layout, kept_activation_fraction, solve_batch
from shardwise.models.registry import family_name
from shardwise.parallel.pipeline import PipelineOrder
from shardwise.parallel.prepare import prepare
from shardwise.planner.costs.block_time import KernelProfile, Machine
from shardwise.planner.costs.efficiency import efficiency_of
from shardwise.planner.costs.engine_memory import EngineModel
from shardwise.planner.costs.memory_model import engine_profile
from shardwise.planner.costs.model_shape import ModelShape
from shardwise.planner.costs.operator_list import OperatorListEstimator, OperatorListModel, planner_shape
from shardwise.planner.estimate import Estimator, Prediction, Workload
from shardwise.planner.expected_goodput import ExpectedGoodput, expected_goodput
from shardwise.planner.search import SearchResult, search

TIE_TOLERANCE = 0.01  # layouts whose predicted times differ by less are taken for equally fast
COMFORTABLE_MEMORY = 0.9  # of the memory: a plainer layout is not taken where it would be fuller than this
CPU_PROCESS_BYTES = 0.4 * GIB  # what a process with PyTorch takes before it holds anything


@dataclass(frozen=True)
class Plan:
    job: Job
    cluster: Cluster
    devices: int
    layouts: tuple[Prediction, ...]
    """Best first."""
    reasons: tuple[str, ...]
    """Beside each layout: why it is not first."""
    near_misses: tuple[str, ...]
    """A line for each notable alternative to the best."""
    evaluated: int
    seconds: float
    """That the search took."""
    shape: ModelShape
    phases: tuple[tuple[int, int, float], ...]
    """Of the whole training: steps, tokens or samples in each, seconds of each."""

    @property
    def best(self) -> Prediction:
        return self.layouts[0]

    def fits(self, prediction: Prediction) -> bool:
        return prediction.peak_memory <= self.cluster.device.memory

    def tokens_per_second(self, prediction: Prediction) -> float:
        """On one device."""
        return self.job.samples * self.job.model.sequence_length / prediction.seconds / self.devices

    def flops(self, prediction: Prediction) -> float:
        """Of the model, a second, on one device: nothing that is computed again counts."""
        return self.shape.flops(self.job.samples) / prediction.seconds / self.devices

    def hardware_flops(self, prediction: Prediction) -> float:
        """With the products that are computed again; our selective recomputation keeps all products."""
        recompute = prediction.layout.recompute
        kept = kept_activation_fraction(recompute)
        recompute_fraction = float(recompute == "full") if kept is None else 1.0 - kept
        recomputed = recompute_fraction * self.shape.block_flops(self.job.samples)
        return self.flops(prediction) + recomputed / prediction.seconds / self.devices

    def mfu(self, prediction: Prediction) -> float:
        return self.flops(prediction) / self.cluster.device.peak_flops(self.shape.precision(self.job.precision))

    @property
    def training_seconds(self) -> float:
        """Seconds of the whole training with the best layout."""
        return sum(steps * seconds for steps, _, seconds in self.phases)

    @property
    def goodput(self) -> ExpectedGoodput:
        """With the best layout: what failures leave of the time."""
        held = max(rank.weights + rank.optimizer for rank in self.best.memory)
        return expected_goodput(self.devices, self.best.seconds, self.job.checkpoint.every, held)

    def as_dict(self) -> dict[str, Any]:
        return {
            "search_seconds": self.seconds,
            "evaluated": self.evaluated,
            "layouts": [
                {
                    "layout": str(prediction.layout),
                    "fits": self.fits(prediction),
                    "step_seconds": prediction.seconds,
                    "tokens_per_second_per_device": self.tokens_per_second(prediction),
                    "model_flops_per_device": self.flops(prediction),
                    "hardware_flops_per_device": self.hardware_flops(prediction),
                    "peak_memory_gib": prediction.peak_memory / GIB,
                    "bubble": prediction.bubble,
                    "exposed": prediction.exposed,
                    "reason": reason,
                    "traffic": {
                        axis: max(rank.get(axis, 0) for rank in prediction.traffic)
                        for axis in dict.fromkeys(axis for rank in prediction.traffic for axis in rank)
                    },
                    "traffic_by_rank": prediction.traffic,
                }
                for prediction, reason in zip(self.layouts, self.reasons, strict=True)
            ],
            "near_misses": list(self.near_misses),
            "training": {
                "steps": sum(steps for steps, _, _ in self.phases),
                "hours": self.training_seconds / 3600,
                "device_hours": self.training_seconds / 3600 * self.devices,
            },
            "goodput": self.goodput.as_dict(),
        }


def plan_job(job_file: Path | None, settings: list[str], cluster: str, devices: int | None, layout: str | None) -> Plan:
    """Plans a job for a cluster, or judges one layout of it."""
    return make_plan(load_job(job_file, settings), find_cluster(cluster), devices, layout)


def make_plan(
    job: Job, cluster: Cluster, devices: int | None = None, layout: str | None = None, runnable: bool = False
) -> Plan:
    """`runnable`: for training here and now; only layouts that our engine can run, the plainest of equals first."""
    estimator = make_estimator(job, cluster)
    if layout is not None:
        resolved = resolve_layout(job, estimator.work.shape, Layout.parse(layout))
        if devices is not None and devices != resolved.world:
            raise LayoutError(
                f"layout '{resolved}' needs {resolved.world} devices, not {devices}; leave --devices out."
            )
        begin = time.perf_counter()
        is_undecided = estimator.is_auto_schedule(resolved) and resolved.schedule == "auto" and not resolved.virtual
        predictions = (
            _auto_schedule_variants(job, estimator, resolved) if is_undecided else [estimator.predict(resolved)]
        )
        found = SearchResult(tuple(predictions), len(predictions), time.perf_counter() - begin)
    else:
        found = (_search_runnable if runnable else _search_best)(job, estimator, devices or cluster.domain_size)
    best = found.best[0]
    near_missed = (
        tuple(near_misses(estimator, best)) if layout is None and best.peak_memory <= cluster.device.memory else ()
    )
    reasons = ("", *(explain_gap(estimator, best, other) for other in found.best[1:]))
    return Plan(
        job, cluster, best.layout.world, found.best, reasons, near_missed, found.evaluated, found.seconds,
        estimator.work.shape, tuple(_phases(job, cluster, best)),
    )  # fmt: skip


def _search_best(job: Job, estimator: Estimator, devices: int) -> SearchResult:
    return search(estimator, devices)


def _search_runnable(job: Job, estimator: Estimator, devices: int) -> SearchResult:
    keep, first = 10, None
    while first is None:
        found = search(estimator, devices, keep)
        known = {prediction.layout for prediction in found.best}
        predictions = [
            *found.best,
            *(
                prediction
                for prediction in _replicated_layouts(job, estimator, devices)
                if prediction.layout not in known
            ),
        ]
        fastest = min(prediction.seconds for prediction in predictions)

        def rank(prediction: Prediction, fastest: float = fastest) -> tuple[object, ...]:
            layout, spare = (
                prediction.layout,
                prediction.peak_memory <= COMFORTABLE_MEMORY * estimator.machine.device.memory,
            )
            if prediction.seconds > (1 + TIE_TOLERANCE) * fastest or not spare:
                return True, prediction.seconds
            sharding_level = layout.zero if layout.shard > 1 else 0
            return False, layout.pipeline, layout.tensor, layout.recompute != "none", sharding_level, prediction.seconds

        predictions.sort(key=rank)
        first = next((prediction for prediction in predictions if _is_runnable(job, prediction.layout)), None)
        if first is None and len(found.best) < keep:
            raise LayoutError(
                f"no layout of {pluralize(devices, 'device')} can run this job; change the batch or the model."
            )
        keep *= 10
    others = sorted(
        (prediction for prediction in predictions if prediction is not first), key=lambda prediction: prediction.seconds
    )
    return replace(found, best=(first, *others[:9]))


def _replicated_layouts(job: Job, estimator: Estimator, devices: int) -> Iterator[Prediction]:
    """Whole copies with the whole of their samples at once, which need not be a power of two; if that can be."""
    layout = Layout(replicate=devices)
    if job.samples % devices == 0:
        one = estimator.predict(replace(layout, micro_batch=solve_batch(layout, job.samples).micro_batch))
        if one.peak_memory <= estimator.machine.device.memory:
            yield one


def _is_runnable(job: Job, layout: Layout) -> bool:
    try:
        prepare(job, layout)
    except LayoutError:
        return False
    return True


def _phases(job: Job, cluster: Cluster, best: Prediction) -> Iterator[tuple[int, int, float]]:
    for steps, phase_job in job.phases():
        seconds = best.seconds if phase_job is job else make_estimator(phase_job, cluster).predict(best.layout).seconds
        yield steps, phase_job.samples * phase_job.model.sequence_length, seconds


def make_estimator(job: Job, cluster: Cluster) -> Estimator:
    machine = Machine(cluster, efficiency_of(cluster.device.family, cluster.measured))
    # Bytes moved for each logit, measured on an H200: our kernel's; and those of PyTorch's own operators, which widen,
    # normalise, gather, and all that back.
    kernel_profile = KernelProfile(job.precision, loss_bytes_per_logit=53.0 if cluster.device.family == "cpu" else 10.0)
    shape = planner_shape(job.model, kernel_profile.itemsize)
    estimator_class = OperatorListEstimator if isinstance(shape, OperatorListModel) else Estimator
    compiled = bool(cluster.measured.get("compiled")) and job.compile is not False
    engine = (
        EngineModel(job.require_decoder(), job.precision, compiled) if family_name(job.model.name) == "gpt" else None
    )
    framework_profile = engine_profile(job.precision, job.optimizer)
    if cluster.device.family == "cpu":
        framework_profile = replace(framework_profile, fixed_bytes=CPU_PROCESS_BYTES)
    return estimator_class(machine, Workload(shape, kernel_profile, job.samples, framework_profile, engine=engine))


def auto_schedule_order(job: Job, layout: Layout, cluster: Cluster) -> PipelineOrder | None:
    """What each pipeline rank executes, where the layout's schedule is one that is made; None where it has a name."""
    if not Estimator.is_auto_schedule(layout):
        return None
    estimator = make_estimator(job, cluster)
    return estimator.auto_schedule(resolve_layout(job, estimator.work.shape, layout)).order


def _auto_schedule_variants(job: Job, estimator: Estimator, layout: Layout) -> list[Prediction]:
    """`schedule=auto` with nothing said of stages: the best way to place them, then all else that was tried."""

    def rank(one: Prediction) -> tuple[bool, float]:
        fits = one.peak_memory <= estimator.machine.device.memory
        return not fits, one.seconds if fits else one.peak_memory

    def best_first(candidates: list[tuple[str, int]]) -> list[Prediction]:
        found = []
        for schedule, virtual in candidates:
            with suppress(LayoutError):  # not of this model or batch
                one = resolve_layout(job, estimator.work.shape, replace(layout, schedule=schedule, virtual=virtual))
                found.append(estimator.predict(one))
        return sorted(found, key=rank)

    named_variants = best_first([("1f1b", 0), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 0), ("zbv", 0),
                        ("dualpipev", 0)])  # fmt: skip
    deeper = [("auto", one.layout.virtual) for one in named_variants[:1] if one.layout.stages_per_rank > 2]
    auto_variants = best_first([("auto", 1), ("auto", 2), ("auto-v", 2), *deeper])
    return [auto_variants[0], *sorted([*named_variants, *auto_variants[1:]], key=rank)]


def resolve_layout(job: Job, shape: ModelShape, layout: Layout) -> Layout:
    """A layout with its micro-batch solved; raises where model or batch cannot have it."""
    if family_name(job.model.name) == "gpt":
        return replace(layout, micro_batch=prepare(job, layout).batch.micro_batch)
    if Estimator.is_auto_schedule(layout):
        raise LayoutError(f"schedule={layout.schedule}: orders are made for gpt only as yet; give a schedule's name.")
    limits = {
        "tensor": shape.heads,
        "pipeline": shape.stages,
        "context": shape.context_positions,
        "expert": shape.experts or 1,
    }
    for axis, most in limits.items():
        degree = getattr(layout, axis)
        if degree > most or (axis != "pipeline" and most % degree):
            raise LayoutError(
                f"{axis}={degree}: {job.model.name} is planned with {axis} degrees that {_degree_rule(axis, most)}."
            )
    return replace(layout, micro_batch=solve_batch(layout, job.samples).micro_batch)


def _degree_rule(axis: str, most: int) -> str:
    return f"are at most {most}" if axis == "pipeline" or most == 1 else f"divide {most}"


# Why others lost


def explain_gap(estimator: Estimator, best: Prediction, other: Prediction) -> str:
    """What makes another layout slower, or too large."""
    limit = estimator.machine.device.memory
    if other.peak_memory > limit:
        return f"does not fit: {other.peak_memory / GIB:.0f} GiB of {limit / GIB:.0f}"
    slower = other.seconds / best.seconds - 1
    if slower < 0:
        return f"{100 * slower:+.1f}%, within the error of the prediction; not as plain"
    here, there = time_breakdown(best), time_breakdown(other)
    growth = {name: there.get(name, 0.0) - here.get(name, 0.0) for name in {*here, *there}}
    name = max(growth, key=lambda part: growth[part])
    if slower < 0.001 or growth[name] <= 0:
        return f"{100 * slower:+.1f}%"
    return f"{100 * slower:+.1f}%: {name} takes {growth[name]:.3g} s more"


def time_breakdown(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step by what they go to."""
    labels = {"shard": "data traffic", "pipeline": "passing between stages"}
    breakdown = {labels.get(axis, f"{axis} traffic"): seconds for axis, seconds in prediction.exposed.items()}
    breakdown["the bubble"] = prediction.bubble * prediction.seconds
    breakdown["the update"] = prediction.timing.update
    breakdown["computing"] = prediction.seconds - sum(breakdown.values())
    return breakdown


def near_misses(estimator: Estimator, best: Prediction) -> Iterator[str]:
    """One line for each neighbour of the best layout in which one choice is made otherwise."""
    seen = {str(best.layout)}
    for choice, changes in _neighbor_layouts(best.layout):
        try:
            layout = replace(best.layout, **changes)
            solve_batch(layout, estimator.work.samples)
            if str(layout) in seen or estimator.work.shape.heads % layout.tensor:
                continue
            why = explain_gap(estimator, best, estimator.predict(layout))
        except LayoutError:  # no such layout, or not of this model
            continue
        seen.add(str(layout))
        leaves = layout.tensor > estimator.machine.cluster.domain_size >= best.layout.tensor
        yield f"{choice}{' (it leaves the fast domain)' if leaves else ''}: {why}"


def _neighbor_layouts(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """What could be otherwise, in words and as changes."""
    tensor, pipeline, data = layout.tensor, layout.pipeline, layout.data
    no_pipeline: dict[str, Any] = {"schedule": "1f1b", "virtual": 0}  # of a pipeline of one rank
    for axis in ("shard", "replicate", "pipeline"):
        degree = getattr(layout, axis)
        if degree % 2 == 0:
            more = no_pipeline if axis == "pipeline" and degree == 2 else {}
            yield f"tensor={2 * tensor}", {axis: degree // 2, "tensor": 2 * tensor, **more}
            break
    if tensor % 2 == 0:
        wider_axis = "shard" if layout.shard > 1 else "replicate"
        yield f"tensor={tensor // 2}", {"tensor": tensor // 2, wider_axis: 2 * getattr(layout, wider_axis)}
    if pipeline > 1:
        yield "no pipeline", {"pipeline": 1, "shard": data * pipeline, "replicate": 1, **no_pipeline}
    for zero in (1, 2, 3):
        if layout.shard > 1 and zero != layout.zero:
            yield f"zero={zero}", {"zero": zero}
    for recompute in ("none", "selective", "full"):
        if recompute != layout.recompute:
            yield f"recompute={recompute}", {"recompute": recompute}
    for schedule in ("1f1b", "interleaved", "zbv"):
        if pipeline > 1 and schedule != layout.schedule:
            yield f"schedule={schedule}", {"schedule": schedule, "virtual": 0}
    yield f"micro_batch={2 * layout.micro_batch}", {"micro_batch": 2 * layout.micro_batch}
