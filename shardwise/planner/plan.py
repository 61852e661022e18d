"""A plan: the best layouts of a job on a cluster, their predicted cost, and why other layouts are not the best."""

import math
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.cluster import GIB, Cluster, find_cluster, with_settings
from shardwise.console import fill_in, format_number, format_seconds, format_step, pluralize
from shardwise.errors import LayoutError
from shardwise.job import BatchConfig, Job, load_job
from shardwise.layout import Layout, divisible_batch, micro_batch_error, solve_batch
from shardwise.models.config import CODE_BYTES
from shardwise.models.loss import loss_chunk_size
from shardwise.optim.adamw import BUFFERS, PART
from shardwise.parallel.prepare import forward_flops, meta_model, prepare
from shardwise.parallel.torch_pipelining import PipelineOrder
from shardwise.planner.costs.engine_memory import EngineModel
from shardwise.planner.costs.machine import KernelProfile, Machine, efficiency_of
from shardwise.planner.costs.memory_model import engine_profile
from shardwise.planner.costs.model_shape import ModelShape, OperatorListModel, shape_of
from shardwise.planner.estimate import Estimator, Prediction
from shardwise.planner.operator_list_estimate import OperatorListEstimator
from shardwise.planner.search import SearchResult, can_run, search

TIE_TOLERANCE = 0.01  # layouts whose predicted times differ by less count as equally fast
SHARED_CORES = "bubbles cost little: more processes than cores, and a rank that waits leaves its core to others"
CPU_PROCESS_BYTES = 0.4 * GIB  # of a process that has only imported PyTorch
MATMUL_WORKSPACES = 4 * 32 * 2**20  # of cuBLAS: for two threads (forward, backward) and two streams (CUDA graphs)
# The planner's error on the measured runs of `benchmarks/`, each predicted without its source.
_FIGURES = tomllib.loads((Path(__file__).parent / "accuracy.toml").read_text(encoding="utf-8"))

# Measured over predicted peak memory, ascending: what lies between the 10th and the 90th percentile is the range.
_RATIOS: list[float] = _FIGURES["memory_ratios"]
LOWEST, HIGHEST = (_RATIOS[round(share * (len(_RATIOS) - 1))] for share in (0.1, 0.9))


def out_of_memory_risk(peak: float, limit: float) -> float:
    """Returns the share of measured runs whose peak exceeded its prediction by more than is left here."""
    return sum(ratio * peak > limit for ratio in _RATIOS) / len(_RATIOS)


@dataclass(frozen=True)
class Plan:
    job: Job
    cluster: Cluster
    devices: int
    layouts: tuple[Prediction, ...]  # best first
    reasons: tuple[str, ...]  # for each layout, why it is not the first
    near_misses: tuple[str, ...]  # one line for each neighbour of the best layout
    evaluated: int
    seconds: float  # duration of the search
    shape: ModelShape
    trained: float  # fraction of the weights

    def __str__(self) -> str:
        best, device = self.best, self.cluster.device
        peak, limit = format_number(best.peak_memory / GIB), format_number(device.memory / GIB)
        memory = f"{peak} of {limit} GiB on {self.devices} x {device.name}"
        return f"{best.layout}: {format_seconds(best.seconds)} per step, {memory}"

    @property
    def best(self) -> Prediction:
        return self.layouts[0]

    @property
    def untraceable(self) -> str:
        """Why times and memory are a rough estimate from the parameters alone; empty if the model was traced."""
        return getattr(self.shape, "untraceable", "")

    def fits(self, prediction: Prediction) -> bool:
        return prediction.peak_memory <= self.cluster.device.memory

    def memory_verdict(self, prediction: Prediction) -> str:
        """Returns a sentence about a layout's peak, its range and the risk."""
        peak, limit = prediction.peak_memory / GIB, self.cluster.device.memory / GIB
        low, high = format_number(LOWEST * peak), format_number(HIGHEST * peak)
        verdict = f"{format_number(peak)} of {format_number(limit)} GiB, probably {low} to {high}"
        risk = out_of_memory_risk(peak, limit)
        if peak > limit or HIGHEST * peak <= limit or not risk:
            return f"{verdict}."
        return f"{verdict}: tight, 1 in {round(1 / risk)} such plans ran out of memory."

    def tokens_per_second(self, prediction: Prediction) -> float:
        """Returns tokens (or samples) per second and device."""
        return self.job.samples * self.job.model.sequence_length / prediction.seconds / self.devices

    @property
    def accuracy(self) -> str:
        """Returns sentences about how far off such plans were."""
        figures = {"figures": _FIGURES, "percent": lambda share: math.ceil(100 * share)}
        return fill_in(Path(__file__).with_name("accuracy.txt"), {"plan": self, **figures})

    def flops(self, prediction: Prediction) -> float:
        """Returns model FLOP/s per device, without recomputation; frozen weights need no gradients."""
        total = (2.0 + self.trained) / 3.0 * self.shape.flops(self.job.samples)
        return total / prediction.seconds / self.devices

    def hardware_flops(self, prediction: Prediction) -> float:
        """Returns hardware FLOP/s per device, with recomputed matmuls; selective recomputation repeats none."""
        recomputed = (1.0 - prediction.kept_fraction) * self.shape.block_flops(self.job.samples)
        return self.flops(prediction) + recomputed / prediction.seconds / self.devices

    def mfu(self, prediction: Prediction) -> float:
        return self.flops(prediction) / self.cluster.device.peak_flops(self.shape.precision(self.job.precision))

    @property
    def training_seconds(self) -> float:
        return self.job.total_steps * self.best.seconds

    def as_dict(self) -> dict[str, Any]:
        hours = self.training_seconds / 3600
        layouts = [
            {
                "layout": str(p.layout), "fits": self.fits(p), "step_seconds": p.seconds,
                "tokens_per_second_per_device": self.tokens_per_second(p), "model_flops_per_device": self.flops(p),
                "hardware_flops_per_device": self.hardware_flops(p), "peak_memory_gib": p.peak_memory / GIB,
                "memory_range_gib": [ratio * p.peak_memory / GIB for ratio in (LOWEST, HIGHEST)],
                "out_of_memory_risk": out_of_memory_risk(p.peak_memory, self.cluster.device.memory),
                "bubble": p.bubble, "exposed": p.exposed, "reason": reason,
            } for p, reason in zip(self.layouts, self.reasons, strict=True)]  # fmt: skip
        training = {"steps": self.job.total_steps, "hours": hours, "device_hours": hours * self.devices}
        return {"search_seconds": self.seconds, "evaluated": self.evaluated, "layouts": layouts,
                "near_misses": list(self.near_misses), "training": training}  # fmt: skip


def count_parameters(job: Job) -> int:
    """Returns how many parameters a model has, norms, biases and embedding tables among them."""
    weights = meta_model(job.model, job.seed).parameters()
    return sum(weight.numel() for weight in weights) + sum(table.size for table in job.family.tables(job.model))


def plan_job(job_file: Path | None, settings: list[str], cluster: str, devices: int | None, layout: str | None) -> Plan:
    own = [setting for setting in settings if setting.startswith("cluster.")]
    job = load_job(job_file, [setting for setting in settings if setting not in own])
    return make_plan(job, with_settings(find_cluster(cluster), own), devices, layout)


def make_plan(
    job: Job, cluster: Cluster, devices: int | None = None, layout: str | None = None, runnable: bool = False
) -> Plan:
    """Returns the plan of a job. `runnable`: only layouts that our engine runs; of equally fast ones the simplest."""
    estimator = make_estimator(job, cluster)
    if layout is not None:
        resolved = resolve_layout(job, estimator.shape, Layout.parse(layout))
        if devices is not None and devices != resolved.world:
            raise LayoutError(f"layout '{resolved}' has {resolved.world} devices, not {devices}; leave --devices out.")
        begin = time.perf_counter()
        is_undecided = estimator.is_auto_schedule(resolved) and resolved.schedule == "auto" and not resolved.virtual
        variants = _auto_schedule_variants(job, estimator, resolved) if is_undecided else None
        predictions = variants or [estimator.predict(resolved)]
        result = SearchResult(tuple(predictions), len(predictions), time.perf_counter() - begin)
    elif runnable:
        result = _search_runnable(job, estimator, devices or cluster.domain_size)
    else:
        result = search(estimator, devices or cluster.domain_size)
    best = result.best[0]
    shows_neighbours = layout is None and best.peak_memory <= cluster.device.memory
    neighbours = tuple(near_misses(estimator, best)) if shows_neighbours else ()
    if shows_neighbours and not runnable:
        neighbours = (*_less_recomputation(estimator, best), *neighbours)
    if layout is None and not runnable:
        neighbours = (*_better_batch(job, cluster, best), *neighbours)
    if layout is None and job.layout != "auto":
        own, told = Layout.parse(job.layout), "it cannot run this job"
        with suppress(LayoutError):  # it does not divide this batch, for example
            mine = estimator.predict(own := resolve_layout(job, estimator.shape, own))
            told = f"{format_step(mine.seconds)} per step, {mine.peak_memory / GIB:.1f} GiB"
        told += "" if own.world == best.layout.world else f", on {pluralize(own.world, 'device')}"
        neighbours = (f"the job's own layout, {own}: {told}", *neighbours)
    if shows_neighbours and best.peak_memory > estimator.memory_limit:
        neighbours = ("no layout surely fits; this one needs the least memory", *neighbours)
    if layout is None and estimator.efficiency.uncontended_speedup > 1.0 and best.layout.pipeline > 1:
        neighbours = (SHARED_CORES, *neighbours)
    reasons = ("", *(explain_gap(estimator, best, other) for other in result.best[1:]))
    searched = result.evaluated, result.seconds
    trained = estimator.machine.trained
    return Plan(job, cluster, best.layout.world, result.best, reasons, neighbours, *searched, estimator.shape, trained)


def _better_batch(job: Job, cluster: Cluster, best: Prediction) -> Iterator[str]:
    """Yields a line if a batch of about this size would be faster for a sample, or fit, as more layouts divide it."""
    unit, world = 2 ** round(math.log2(max(8, job.samples) / 8)), best.layout.world
    found, fits = list[tuple[float, int, str]](), best.peak_memory <= cluster.device.memory
    nearby = {divisible_batch(job.samples + 0.5, 0.03), unit * round(job.samples / unit)}
    for samples in (nearby if fits else {world * round(job.samples / world)}) - {0, job.samples}:
        estimator = make_estimator(job.model_copy(update={"batch": BatchConfig(samples=samples)}), cluster)
        below = best.seconds * samples / job.samples / (1 + TIE_TOLERANCE) if fits else math.inf
        with suppress(LayoutError):
            for other in search(estimator, world, keep=1, below=below).best:
                if other.peak_memory <= cluster.device.memory:
                    gain = samples / other.seconds * best.seconds / job.samples - 1.0
                    found.append((gain, samples, str(other.layout)))
    gain, samples, told = max(found, default=(0.0, 0, ""))
    if samples and (not fits or gain > TIE_TOLERANCE):
        yield f"batch.samples={samples}: {f'{gain:.0%} faster per sample' if fits else 'fits'}, in {told}"


def _search_runnable(job: Job, estimator: Estimator, devices: int) -> SearchResult:
    replicated = []  # plain data parallelism with a single micro-batch: the search only tries powers of two
    if job.samples % devices == 0:
        layout = Layout(replicate=devices)
        prediction = estimator.predict(replace(layout, micro_batch=solve_batch(layout, job.samples).micro_batch))
        fits = prediction.peak_memory <= estimator.memory_limit
        replicated = [prediction] if fits and can_run(estimator, prediction.layout) else []
    result = search(estimator, devices)
    predictions = list({prediction.layout: prediction for prediction in (*result.best, *replicated)}.values())
    fastest = min(prediction.seconds for prediction in predictions)

    def rank(prediction: Prediction) -> tuple[object, ...]:
        layout = prediction.layout
        if prediction.seconds > (1 + TIE_TOLERANCE) * fastest:
            return True, prediction.seconds
        sharding_level = layout.zero if layout.shard > 1 else 0
        return False, layout.pipeline, layout.tensor, layout.recompute != "none", sharding_level, prediction.seconds

    first = min(predictions, key=rank)
    others = sorted((p for p in predictions if p is not first), key=lambda p: p.seconds)
    return replace(result, best=(first, *others[:9]))


def make_estimator(job: Job, cluster: Cluster) -> Estimator:
    trained = 1.0  # fraction of the weights; others are frozen beside adapters, or by the user
    quantized = 0.0  # fraction of the weights; of these, all are frozen
    total = 0
    if job.model.lora is not None or job.model.passes_batch:
        model = meta_model(job.model, job.seed)
        sizes = {name: (weight.numel(), weight.requires_grad) for name, weight in model.named_parameters()}
        total = sum(size for size, _ in sizes.values())
        trained = sum(size for size, is_trained in sizes.values() if is_trained) / total
        quantized = sum(sizes[name][0] for name in model.sharding_plan.quantized) / total
    machine = Machine(cluster, efficiency_of(cluster.device, cluster.measured), trained)
    compiled = bool(cluster.measured.get("compiled")) and job.compile is not False
    # On a CPU no loss is fused: separate operators for upcast, log-softmax and gather.
    loss_bytes = 53.0 if cluster.device.family == "cpu" else KernelProfile.loss_bytes_per_logit
    kernel_profile = KernelProfile(job.precision, loss_bytes, compiled)
    shape = shape_of(job.model, kernel_profile.itemsize)
    estimator_class = OperatorListEstimator if isinstance(shape, OperatorListModel) else Estimator
    is_exact = shape.has_exact_cost_model and job.model.lora is None
    engine = EngineModel(job.require_decoder(), job.precision, compiled) if is_exact else None
    framework_profile = engine_profile(job.precision, job.optimizer, trained)
    if job.model.lora is not None:
        features = trained * total / job.model.lora.rank / shape.layers
        kernel_profile = replace(kernel_profile, adapter_features=features)
        saved = quantized * (kernel_profile.itemsize - CODE_BYTES.get(job.model.lora.quantize, 0.0))
        framework_profile = replace(framework_profile, weight_bytes=framework_profile.weight_bytes - saved)
    if cluster.device.family == "cpu":
        framework_profile = replace(framework_profile, fixed_bytes=CPU_PROCESS_BYTES)
    else:
        offloaded = framework_profile.optimizer_bytes if job.optimizer.offload else 0.0
        framework_profile = replace(
            framework_profile, optimizer_bytes=framework_profile.optimizer_bytes - offloaded, offloaded_bytes=offloaded,
            buffer_bytes=MATMUL_WORKSPACES + BUFFERS * PART * offloaded / trained,
            offloads_activations=job.offload_activations)  # fmt: skip
    estimator = estimator_class(machine, shape, kernel_profile, job.samples, framework_profile, engine)
    estimator.check = partial(prepare, job)
    estimator.layer_costs = () if isinstance(shape, OperatorListModel) else forward_flops(job.model)
    estimator.loss_chunk = loss_chunk_size(shape.vocab) if shape.vocab else 0
    estimator.memory_limit /= HIGHEST  # recommend only what fits at the upper end
    return estimator


def auto_schedule_order(job: Job, layout: Layout, cluster: Cluster) -> PipelineOrder | None:
    """Returns the actions of each pipeline rank for a synthesized schedule; None for a named one."""
    if not Estimator.is_auto_schedule(layout):
        return None
    estimator = make_estimator(job, cluster)
    return estimator.auto_schedule(resolve_layout(job, estimator.shape, layout)).program.order


def _auto_schedule_variants(job: Job, estimator: Estimator, layout: Layout) -> list[Prediction]:
    """Predicts `schedule=auto` with no given stage placement: returns the best synthesized schedule, then all other
    synthesized and named schedules, best first."""

    def rank(prediction: Prediction) -> tuple[bool, float]:
        fits = prediction.peak_memory <= estimator.memory_limit
        return not fits, prediction.seconds if fits else prediction.peak_memory

    def best_first(candidates: list[tuple[str, int]]) -> list[Prediction]:
        predictions = []
        for schedule, virtual in candidates:
            with suppress(LayoutError):  # the model or batch does not allow it
                variant = replace(layout, schedule=schedule, virtual=virtual)
                predictions.append(estimator.predict(resolve_layout(job, estimator.shape, variant)))
        return sorted(predictions, key=rank)

    names = [("1f1b", 0), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 0), ("zbv", 0), ("dualpipev", 0)]
    named_variants = best_first(names)
    deeper = [("auto", p.layout.virtual) for p in named_variants[:1] if p.layout.stages_per_rank > 2]
    auto_variants = best_first([("auto", 1), ("auto", 2), ("auto-v", 2), *deeper])
    return [auto_variants[0], *sorted([*named_variants, *auto_variants[1:]], key=rank)]


def resolve_layout(job: Job, shape: ModelShape, layout: Layout) -> Layout:
    """Returns the layout with its micro-batch filled in; raises LayoutError if model or batch do not allow it."""
    resolved = replace(layout, micro_batch=prepare(job, layout).batch.micro_batch)
    if shape.has_exact_cost_model:
        return resolved
    if Estimator.is_auto_schedule(layout):
        problem = f"schedule={layout.schedule} is only available for dense decoders, not {job.model.name}"
        raise LayoutError(f"{problem}; use 1f1b.")
    limits = {"tensor": shape.heads, "pipeline": shape.stages, "context": shape.context_positions,
              "expert": shape.experts or 1}  # fmt: skip
    for axis, limit in limits.items():
        degree = getattr(layout, axis)
        if degree > limit or (axis != "pipeline" and limit % degree):
            rule = f"be at most {limit}" if axis == "pipeline" or limit == 1 else f"divide {limit}"
            raise LayoutError(f"{axis}={degree}: for {job.model.name} the {axis} degree must {rule}.")
    return resolved


def _less_recomputation(estimator: Estimator, best: Prediction) -> Iterator[str]:
    """Yields the line of the fastest layout that recomputes all but some whole blocks; the search tries none."""
    full, limit, fitting = best.layout, estimator.machine.device.memory, [best]
    blocks = max(stage.blocks for stage in estimator.stages(full).stages)
    fractions = [f"{math.ceil(1000 * kept / blocks) / 1000:g}" for kept in range(blocks - 1, 0, -1)]
    for size in {full.micro_batch, max(1, full.micro_batch // 2)} if full.recompute == "full" else ():
        variants = (replace(full, micro_batch=size, recompute=fraction) for fraction in fractions)
        layouts = (layout for layout in variants if can_run(estimator, layout))
        if micro_batch_error(full, estimator.micro_batches(replace(full, micro_batch=size))) is None:
            fitting += [estimator.predict(next(filter(estimator.fits, layouts), full))]
    fastest = min(fitting, key=lambda prediction: prediction.seconds)
    if (gain := 1 - fastest.seconds / best.seconds) > 0.01:
        change = f"recompute={fastest.layout.recompute} micro_batch={fastest.layout.micro_batch}"
        yield f"{change}: {100 * gain:.1f}% faster, {fastest.peak_memory / GIB:,.0f} GiB of {limit / GIB:,.0f}"


def explain_gap(estimator: Estimator, best: Prediction, other: Prediction) -> str:
    """Returns why another layout is slower than the best, or does not fit."""
    limit = estimator.machine.device.memory
    if other.peak_memory > limit:
        return f"does not fit: {other.peak_memory / GIB:,.0f} GiB of {limit / GIB:,.0f}"
    if other.peak_memory > max(estimator.memory_limit, best.peak_memory):
        return f"tight: {other.peak_memory / GIB:,.0f} GiB of {limit / GIB:,.0f}"
    slower = other.seconds / best.seconds - 1
    if slower < 0:
        return f"{-100 * slower:.1f}% faster, within the prediction error, but less simple"
    best_parts, other_parts = time_breakdown(best), time_breakdown(other)
    growth = {name: other_parts.get(name, 0.0) - best_parts.get(name, 0.0) for name in {*best_parts, *other_parts}}
    name = max(growth, key=lambda part: growth[part])
    cause = "" if slower < 0.001 or growth[name] <= 0 else f", {format_seconds(growth[name])} more {name}"
    less = min(growth, key=lambda part: growth[part])
    if cause and growth[name] > 1.5 * (other.seconds - best.seconds) and growth[less] < 0:
        cause += f" but {format_seconds(-growth[less])} less {less}"
    more = (other.peak_memory - best.peak_memory) / GIB
    return f"{100 * slower:.1f}% slower{cause}" + (f", {more:.1f} GiB more" if more > 1 else "")


def time_breakdown(prediction: Prediction) -> dict[str, float]:
    labels = {"data": "data-parallel communication", "pipeline": "stage-to-stage transfer"}
    breakdown = {labels.get(axis, f"{axis} communication"): seconds for axis, seconds in prediction.exposed.items()}
    breakdown["pipeline bubble"] = prediction.bubble * prediction.seconds
    breakdown["optimizer update"] = prediction.update
    breakdown["compute"] = prediction.seconds - sum(breakdown.values())
    return breakdown


def near_misses(estimator: Estimator, best: Prediction) -> Iterator[str]:
    """Yields one line for each layout that differs from the best in one choice."""
    seen = {str(best.layout)}
    with suppress(LayoutError):  # the batch has too few samples
        if best.layout.pipeline > 1:
            other = search(estimator, best.layout.world, keep=1, max_pipeline=1).best[0]
            yield f"no pipeline, {other.layout}: {explain_gap(estimator, best, other)}"
    for choice, changes in _neighbor_layouts(best.layout):
        try:
            layout = replace(best.layout, **changes)
            layout = replace(layout, micro_batch=solve_batch(layout, estimator.samples).micro_batch)
            if str(layout) in seen or estimator.shape.heads % layout.tensor:
                continue
            estimator.check(layout)
            reason = explain_gap(estimator, best, estimator.predict(layout))
        except LayoutError:  # invalid, or not possible for this model
            continue
        seen.add(str(layout))
        crosses_domains = layout.tensor > estimator.machine.cluster.domain_size >= best.layout.tensor
        yield f"{choice}{' (crosses node boundaries)' if crosses_domains else ''}: {reason}"


def _neighbor_layouts(layout: Layout) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a label and the changed fields of each neighbour of the layout."""
    tensor, pipeline = layout.tensor, layout.pipeline
    no_pipeline: dict[str, Any] = {"schedule": "1f1b", "virtual": 0}
    if layout.replicate < layout.world:
        plain = dict.fromkeys(("pipeline", "shard", "context", "tensor", "expert", "zero"), 1)
        yield f"replicate={layout.world} and no other axis", {**plain, **no_pipeline, "replicate": layout.world}
    for axis in ("shard", "replicate", "pipeline"):
        degree = getattr(layout, axis)
        if degree % 2 == 0:
            schedule_change = no_pipeline if axis == "pipeline" and degree == 2 else {}
            yield f"tensor={2 * tensor}", {axis: degree // 2, "tensor": 2 * tensor, **schedule_change}
            break
    if tensor % 2 == 0:
        wider_axis = "shard" if layout.shard > 1 else "replicate"
        yield f"tensor={tensor // 2}", {"tensor": tensor // 2, wider_axis: 2 * getattr(layout, wider_axis)}
    choices: dict[str, tuple[Any, ...]] = {
        "zero": (1, 2, 3) if layout.shard > 1 else (), "recompute": ("none", "selective", "full"),
        "schedule": ("1f1b", "interleaved", "zbv") if pipeline > 1 else (), "micro_batch": (2 * layout.micro_batch,),
    }  # fmt: skip
    for key, value in ((key, value) for key, values in choices.items() for value in values):
        if value != getattr(layout, key):
            yield f"{key}={value}", {key: value, "virtual": 0 if key == "schedule" else layout.virtual}
