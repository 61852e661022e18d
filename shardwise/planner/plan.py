"""A plan: the best layouts of a job on a cluster, what each costs, and why notable others lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.cluster import GIB, Cluster, find_cluster
from shardwise.errors import LayoutError
from shardwise.job import Job, load_job
from shardwise.kinds import kind_of
from shardwise.layout import Layout, keep_share, solve_batch
from shardwise.parallel.parallelize import check
from shardwise.parallel.pipeline import Order
from shardwise.planner.cost import Machine, Setting
from shardwise.planner.effective import Effective, effective
from shardwise.planner.efficiency import efficiency_of
from shardwise.planner.listed import Listed, ListedEstimator, form_of
from shardwise.planner.memory import ours
from shardwise.planner.own import Own
from shardwise.planner.predict import Estimator, Prediction, Work
from shardwise.planner.search import Found, search
from shardwise.planner.shape import Shape
from shardwise.words import counted

ALIKE = 0.01  # layouts whose predicted times differ by less are taken for equally fast
SPARE = 0.9  # of the memory: a plainer layout is not taken where it would be fuller than this
CPU_PROCESS = 0.4 * GIB  # what a process with PyTorch takes before it holds anything


@dataclass(frozen=True)
class Plan:
    job: Job
    cluster: Cluster
    devices: int
    layouts: tuple[Prediction, ...]
    """Best first."""
    reasons: tuple[str, ...]
    """Beside each layout: why it is not first."""
    lost: tuple[str, ...]
    """A line for each notable alternative to the best."""
    evaluated: int
    seconds: float
    """That the search took."""
    shape: Shape
    phases: tuple[tuple[int, int, float], ...]
    """Of the whole training: steps, tokens or samples in each, seconds of each."""

    @property
    def best(self) -> Prediction:
        return self.layouts[0]

    def fits(self, prediction: Prediction) -> bool:
        return prediction.peak <= self.cluster.device.memory

    def tokens_per_second(self, prediction: Prediction) -> float:
        """On one device."""
        return self.job.samples * self.job.model.sequence / prediction.seconds / self.devices

    def flops(self, prediction: Prediction) -> float:
        """Of the model, a second, on one device: nothing that is computed again counts."""
        return self.shape.flops(self.job.samples) / prediction.seconds / self.devices

    def hardware_flops(self, prediction: Prediction) -> float:
        """With the products that are computed again; our selective recomputation keeps all products."""
        word = prediction.layout.recompute
        kept = keep_share(word)
        again = float(word == "full") if kept is None else 1.0 - kept
        more = again * self.shape.block_flops(self.job.samples)
        return self.flops(prediction) + more / prediction.seconds / self.devices

    def utilisation(self, prediction: Prediction) -> float:
        return self.flops(prediction) / self.cluster.device.rate(self.shape.precision(self.job.precision))

    @property
    def training(self) -> float:
        """Seconds of the whole training with the best layout."""
        return sum(steps * seconds for steps, _, seconds in self.phases)

    @property
    def effective(self) -> Effective:
        """With the best layout: what failures leave of the time."""
        held = max(rank.weights + rank.optimizer for rank in self.best.memory)
        return effective(self.devices, self.best.seconds, self.job.checkpoint.every, held)

    def as_dict(self) -> dict[str, Any]:
        return {
            "search_seconds": self.seconds, "evaluated": self.evaluated,
            "layouts": [{
                "layout": str(prediction.layout), "fits": self.fits(prediction), "step_seconds": prediction.seconds,
                "tokens_per_second_per_device": self.tokens_per_second(prediction),
                "model_flops_per_device": self.flops(prediction),
                "hardware_flops_per_device": self.hardware_flops(prediction), "peak_memory_gib": prediction.peak / GIB,
                "bubble": prediction.bubble, "exposed": prediction.exposed, "reason": reason,
                "traffic": {axis: max(rank.get(axis, 0) for rank in prediction.traffic)
                            for axis in dict.fromkeys(axis for rank in prediction.traffic for axis in rank)},
                "traffic_by_rank": prediction.traffic,
            } for prediction, reason in zip(self.layouts, self.reasons, strict=True)],
            "lost": list(self.lost),
            "training": {
                "steps": sum(steps for steps, _, _ in self.phases), "hours": self.training / 3600,
                "device_hours": self.training / 3600 * self.devices,
            },
            "effective": self.effective.as_dict(),
        }  # fmt: skip


def plan_job(job_file: Path | None, settings: list[str], cluster: str, devices: int | None, layout: str | None) -> Plan:
    """Plans a job for a cluster, or judges one layout of it."""
    return make_plan(load_job(job_file, settings), find_cluster(cluster), devices, layout)


def make_plan(
    job: Job, cluster: Cluster, devices: int | None = None, layout: str | None = None, runnable: bool = False
) -> Plan:
    """`runnable`: for training here and now; only layouts that our engine can run, the plainest of equals first."""
    estimator = estimator_of(job, cluster)
    if layout is not None:
        only = judged(job, estimator.work.shape, Layout.parse(layout))
        if devices is not None and devices != only.world:
            raise LayoutError(f"layout '{only}' needs {only.world} devices, not {devices}; leave --devices out.")
        begin = time.perf_counter()
        undecided = estimator.is_made(only) and only.schedule == "auto" and not only.virtual
        every = _variants(job, estimator, only) if undecided else [estimator.predict(only)]
        found = Found(tuple(every), len(every), time.perf_counter() - begin)
    else:
        found = (_trainable if runnable else _best)(job, estimator, devices or cluster.domain)
    best = found.best[0]
    lost = tuple(notable(estimator, best)) if layout is None and best.peak <= cluster.device.memory else ()
    reasons = ("", *(explain(estimator, best, other) for other in found.best[1:]))
    return Plan(
        job, cluster, best.layout.world, found.best, reasons, lost, found.evaluated, found.seconds,
        estimator.work.shape, tuple(_phases(job, cluster, best)),
    )  # fmt: skip


def _best(job: Job, estimator: Estimator, devices: int) -> Found:
    return search(estimator, devices)


def _trainable(job: Job, estimator: Estimator, devices: int) -> Found:
    keep, first = 10, None
    while first is None:
        found = search(estimator, devices, keep)
        known = {one.layout for one in found.best}
        every = [*found.best, *(one for one in _copies(job, estimator, devices) if one.layout not in known)]
        least = min(one.seconds for one in every)

        def rank(one: Prediction, least: float = least) -> tuple[object, ...]:
            layout, spare = one.layout, one.peak <= SPARE * estimator.machine.device.memory
            if one.seconds > (1 + ALIKE) * least or not spare:
                return True, one.seconds
            cut = layout.zero if layout.shard > 1 else 0
            return False, layout.pipeline, layout.tensor, layout.recompute != "none", cut, one.seconds

        every.sort(key=rank)
        first = next((one for one in every if _runs(job, one.layout)), None)
        if first is None and len(found.best) < keep:
            raise LayoutError(
                f"no layout of {counted(devices, 'device')} can run this job; change the batch or the model."
            )
        keep *= 10
    others = sorted((one for one in every if one is not first), key=lambda one: one.seconds)
    return replace(found, best=(first, *others[:9]))


def _copies(job: Job, estimator: Estimator, devices: int) -> Iterator[Prediction]:
    """Whole copies with the whole of their samples at once, which need not be a power of two; if that can be."""
    layout = Layout(replicate=devices)
    if job.samples % devices == 0:
        one = estimator.predict(replace(layout, micro_batch=solve_batch(layout, job.samples).micro_batch))
        if one.peak <= estimator.machine.device.memory:
            yield one


def _runs(job: Job, layout: Layout) -> bool:
    try:
        check(job, layout)
    except LayoutError:
        return False
    return True


def _phases(job: Job, cluster: Cluster, best: Prediction) -> Iterator[tuple[int, int, float]]:
    for steps, part in job.phases():
        seconds = best.seconds if part is job else estimator_of(part, cluster).predict(best.layout).seconds
        yield steps, part.samples * part.model.sequence, seconds


def estimator_of(job: Job, cluster: Cluster) -> Estimator:
    machine = Machine(cluster, efficiency_of(cluster.device.family, cluster.measured))
    # Bytes moved for each logit, measured on an H200: our kernel's; and those of PyTorch's own operators, which widen,
    # normalise, gather, and all that back.
    setting = Setting(job.precision, loss=53.0 if cluster.device.family == "cpu" else 10.0)
    shape = form_of(job.model, setting.bytes)
    kind = ListedEstimator if isinstance(shape, Listed) else Estimator
    compiled = bool(cluster.measured.get("compiled")) and job.compile is not False
    own = Own(job.decoder(), job.precision, compiled) if kind_of(job.model) == "gpt" else None
    habit = ours(job.precision, job.optimizer)
    if cluster.device.family == "cpu":
        habit = replace(habit, fixed=CPU_PROCESS)
    return kind(machine, Work(shape, setting, job.samples, habit, own=own))


def order_of(job: Job, layout: Layout, cluster: Cluster) -> Order | None:
    """What each pipeline rank executes, where the layout's schedule is one that is made; None where it has a name."""
    if not Estimator.is_made(layout):
        return None
    estimator = estimator_of(job, cluster)
    return estimator.made(judged(job, estimator.work.shape, layout)).order


def _variants(job: Job, estimator: Estimator, layout: Layout) -> list[Prediction]:
    """`schedule=auto` with nothing said of stages: the best way to place them, then all else that was tried."""

    def rank(one: Prediction) -> tuple[bool, float]:
        fits = one.peak <= estimator.machine.device.memory
        return not fits, one.seconds if fits else one.peak

    def best_first(words: list[tuple[str, int]]) -> list[Prediction]:
        found = []
        for schedule, virtual in words:
            with suppress(LayoutError):  # not of this model or batch
                one = judged(job, estimator.work.shape, replace(layout, schedule=schedule, virtual=virtual))
                found.append(estimator.predict(one))
        return sorted(found, key=rank)

    named = best_first([("1f1b", 0), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 0), ("zbv", 0),
                        ("dualpipev", 0)])  # fmt: skip
    deeper = [("auto", one.layout.virtual) for one in named[:1] if one.layout.stages_per_rank > 2]
    made = best_first([("auto", 1), ("auto", 2), ("auto-v", 2), *deeper])
    return [made[0], *sorted([*named, *made[1:]], key=rank)]


def judged(job: Job, shape: Shape, layout: Layout) -> Layout:
    """A layout with its micro-batch solved; raises where model or batch cannot have it."""
    if kind_of(job.model) == "gpt":
        return replace(layout, micro_batch=check(job, layout).micro_batch)
    if Estimator.is_made(layout):
        raise LayoutError(f"schedule={layout.schedule}: orders are made for gpt only as yet; give a schedule's name.")
    limits = {"tensor": shape.heads, "pipeline": shape.stages, "context": shape.contexts, "expert": shape.experts or 1}
    for axis, most in limits.items():
        degree = getattr(layout, axis)
        if degree > most or (axis != "pipeline" and most % degree):
            raise LayoutError(
                f"{axis}={degree}: {job.model.name} is planned with {axis} degrees that {_rule(axis, most)}."
            )
    return replace(layout, micro_batch=solve_batch(layout, job.samples).micro_batch)


def _rule(axis: str, most: int) -> str:
    return f"are at most {most}" if axis == "pipeline" or most == 1 else f"divide {most}"


# Why others lost


def explain(estimator: Estimator, best: Prediction, other: Prediction) -> str:
    """What makes another layout slower, or too large."""
    limit = estimator.machine.device.memory
    if other.peak > limit:
        return f"does not fit: {other.peak / GIB:.0f} GiB of {limit / GIB:.0f}"
    slower = other.seconds / best.seconds - 1
    if slower < 0:
        return f"{100 * slower:+.1f}%, within the error of the prediction; not as plain"
    here, there = parts(best), parts(other)
    growth = {name: there.get(name, 0.0) - here.get(name, 0.0) for name in {*here, *there}}
    name = max(growth, key=lambda part: growth[part])
    if slower < 0.001 or growth[name] <= 0:
        return f"{100 * slower:+.1f}%"
    return f"{100 * slower:+.1f}%: {name} takes {growth[name]:.3g} s more"


def parts(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step by what they go to."""
    words = {"shard": "data traffic", "pipeline": "passing between stages"}
    found = {words.get(axis, f"{axis} traffic"): seconds for axis, seconds in prediction.exposed.items()}
    found["the bubble"] = prediction.bubble * prediction.seconds
    found["the update"] = prediction.timing.update
    found["computing"] = prediction.seconds - sum(found.values())
    return found


def notable(estimator: Estimator, best: Prediction) -> Iterator[str]:
    """One line for each neighbour of the best layout in which one choice is made otherwise."""
    seen = {str(best.layout)}
    for what, changes in _neighbours(best.layout):
        try:
            layout = replace(best.layout, **changes)
            solve_batch(layout, estimator.work.samples)
            if str(layout) in seen or estimator.work.shape.heads % layout.tensor:
                continue
            why = explain(estimator, best, estimator.predict(layout))
        except LayoutError:  # no such layout, or not of this model
            continue
        seen.add(str(layout))
        leaves = layout.tensor > estimator.machine.cluster.domain >= best.layout.tensor
        yield f"{what}{' (it leaves the fast domain)' if leaves else ''}: {why}"


def _neighbours(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """What could be otherwise, in words and as changes."""
    tensor, pipeline, data = layout.tensor, layout.pipeline, layout.data
    alone: dict[str, Any] = {"schedule": "1f1b", "virtual": 0}  # of a pipeline of one rank
    for axis in ("shard", "replicate", "pipeline"):
        degree = getattr(layout, axis)
        if degree % 2 == 0:
            more = alone if axis == "pipeline" and degree == 2 else {}
            yield f"tensor={2 * tensor}", {axis: degree // 2, "tensor": 2 * tensor, **more}
            break
    if tensor % 2 == 0:
        wider = "shard" if layout.shard > 1 else "replicate"
        yield f"tensor={tensor // 2}", {"tensor": tensor // 2, wider: 2 * getattr(layout, wider)}
    if pipeline > 1:
        yield "no pipeline", {"pipeline": 1, "shard": data * pipeline, "replicate": 1, **alone}
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
