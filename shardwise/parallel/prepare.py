"""Prepares a job for a layout, before any device is used.

`prepare` builds the model on the meta device, checks that it can run in the layout, splits it into pipeline stages and
splits the batch. The launcher and each worker call it once. In a worker, `parallelize` then shards the model in place.
Stages minimize the cost of the slowest one, then balance the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from shardwise.console import pluralize
from shardwise.errors import JobError, LayoutError, UserError
from shardwise.job import Job
from shardwise.layout import DEGREES, BatchSplit, Layout, solve_batch
from shardwise.models.chain import Chain
from shardwise.models.config import ModelConfig
from shardwise.models.family import TableSpec
from shardwise.models.registry import family_of
from shardwise.parallel import context, expert, gradient_reduction, local_sgd, tensor


@lru_cache(maxsize=4)
def meta_model(config: ModelConfig, seed: int = 0) -> Chain:
    """Returns the model on the meta device. Built once per process; only `parallelize` may change it."""
    return family_of(config).build_on_meta(config, seed)


@lru_cache(maxsize=64)
def forward_flops(config: ModelConfig) -> tuple[float, ...]:
    """Returns the forward FLOPs per sample of each module of the model."""
    return tuple(family_of(config).forward_flops(config))


@lru_cache(maxsize=64)
def split_shapes(config: ModelConfig, seed: int, degree: int) -> dict[str, torch.Size]:
    """Returns the shape of each parameter before it is split; raises LayoutError if this tensor degree cannot."""
    model = meta_model(config, seed)
    shapes = {name: weight.shape for name, weight in model.named_unique_parameters()}
    tensor.check(model.sharding_plan, shapes, config.length, degree)
    return shapes


@dataclass(frozen=True)
class Prepared:
    """A job, validated for a layout."""

    job: Job
    layout: Layout
    model: Chain  # the full model on the meta device
    stages: list[tuple[int, int]]  # module range of each pipeline stage: first, and last (exclusive)
    batch: BatchSplit
    tables: Sequence[TableSpec]  # embedding tables, beside the model
    shapes: dict[str, torch.Size]  # the unsharded shape of each parameter

    @cached_property
    def parameters(self) -> int:
        """Number of parameters, including embedding tables."""
        return sum(shape.numel() for shape in self.shapes.values()) + sum(table.size for table in self.tables)

    def take_model(self) -> Chain:
        """Returns the model for an engine to shard in place; a second engine gets a model of its own."""
        meta_model.cache_clear()
        split_shapes.cache_clear()
        if self.model.is_taken:
            return self.job.family.build_on_meta(self.job.model, self.job.seed)
        self.model.is_taken = True
        return self.model


def prepare(job: Job, layout: Layout) -> Prepared:
    """Checks a job in a layout; raises JobError or LayoutError before any process starts if it cannot run."""
    config = job.model
    check_refusals(job, layout)
    model, shapes = meta_model(config, job.seed), split_shapes(config, job.seed, layout.tensor)
    expert.check(config, layout)
    context.check(config, layout)
    gradient_reduction.check(job.gradient, layout)
    local_sgd.check(job, layout)
    stages = cut_stages(layout, forward_flops(config))
    causes = {"compile": "PyTorch cannot split a compiled backward", "offload_activations": "it is traversed twice"}
    for key in causes if layout.has_split_backward else ():
        if getattr(job, key) is True:
            problem = f"{key} = true with schedule {layout.schedule}: {causes[key]}"
            raise LayoutError(f"{problem}; use schedule=1f1b or interleaved, or {key} = false.")
    if job.offload_activations and not model.blocks():
        raise JobError(f"offload_activations: {config.description} has no repeated blocks to move the activations of.")
    if len(stages) > 1 and not all(weight.requires_grad for weight in model.parameters()):
        for number, stage in enumerate(stages):
            if not any(weight.requires_grad for weight in model.slice(*stage).parameters()):
                problem = f"stage {number} of {len(stages)} has no parameters to train: all of its blocks are frozen"
                raise LayoutError(f"pipeline={layout.pipeline}: {problem}; use fewer stages, or shard instead.")
    batch = solve_batch(layout, job.samples)
    if config.single_micro_batch and batch.micro_batches > 1:
        raise LayoutError(
            f"layout '{layout}' cuts the {job.samples // layout.data} samples of each rank into "
            f"{batch.micro_batches} micro-batches, but {config.description} must run them as one, because "
            f"{config.single_micro_batch}; leave micro_batch out of the layout, or use more ranks or a smaller batch."
        )
    return Prepared(job, layout, model, stages, batch, job.family.tables(config), shapes)


def check_refusals(job: Job, layout: Layout) -> None:
    """Raises JobError or LayoutError for a setting that the model family does not support."""
    refused = job.family.refusals(job.model)
    packing = "data.pack = true" if job.data.pack else f"loss.dpo_beta = {job.loss.dpo_beta:g}"
    settings: list[tuple[str, bool, str, type[UserError]]] = [
        *((axis, getattr(layout, axis) > 1, f"{axis}={getattr(layout, axis)}", LayoutError) for axis in DEGREES),
        ("split_backward", layout.has_split_backward, f"schedule={layout.schedule}", LayoutError),
        ("recompute", layout.recompute != "none", f"recompute={layout.recompute}", LayoutError),
        ("local_sgd", job.local_sgd.every > 1, f"local_sgd.every = {job.local_sgd.every}", LayoutError),
        ("pack", job.is_packed, packing, JobError),
        ("compile", job.compile is True, "compile = true", JobError),
        (job.precision, True, f"precision = {job.precision!r}", JobError),
    ]
    for name, is_used, setting, error in settings:
        if is_used and name in refused:
            raise error(f"{setting}: {refused[name]}")


def cut_stages(layout: Layout, costs: Sequence[float]) -> list[tuple[int, int]]:
    """Returns the [first, last) module range of each stage. `costs`: of embedding, layers and head, in this order."""
    count = layout.stage_count
    if count > len(costs):
        modules = f"{len(costs)} modules ({pluralize(len(costs) - 2, 'layer')}, embedding and head)"
        remedy = f"use at most {len(costs)} stages"
        raise LayoutError(f"layout '{layout}' has {count} stages, but the model has {modules}; {remedy}.")
    return _explicit_stages(layout, len(costs) - 2) if layout.stages else balance(tuple(costs), count)


def _explicit_stages(layout: Layout, layers: int) -> list[tuple[int, int]]:
    text = f"stages={','.join(map(str, layout.stages))}"
    if sum(layout.stages) != layers:
        raise LayoutError(f"{text} holds {pluralize(sum(layout.stages), 'layer')}, but the model has {layers}.")
    ends = [1 + sum(layout.stages[: i + 1]) for i in range(len(layout.stages))]
    ends[-1] += 1
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if any(first == last for first, last in spans):
        raise LayoutError(f"{text}: only the first stage (embedding) and the last (head) may hold no layer.")
    return spans


def balance(costs: tuple[float, ...], count: int) -> list[tuple[int, int]]:
    """Returns the split of `costs` into `count` contiguous segments with the smallest maximum sum; among those, the one
    with the smallest sum of squares, so that others are balanced if one module dominates."""
    cumulative = np.concatenate(([0.0], np.cumsum(costs)))
    segment_costs = cumulative - cumulative[:, None]  # [i, j]: the sum of costs[i:j]
    segment_costs[np.tri(len(cumulative), dtype=bool)] = np.inf  # no empty segment
    bottleneck = _best_partition(segment_costs, count, np.maximum)[0][0]
    _, choices = _best_partition(np.where(segment_costs <= bottleneck, segment_costs**2, np.inf), count, np.add)
    boundaries = [0]
    for choice in reversed(choices):
        boundaries.append(int(choice[boundaries[-1]]))
    return list(zip(boundaries[:-1], boundaries[1:]))


def _best_partition(segment_costs: np.ndarray, count: int, combine: np.ufunc) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the best value of `count` segments from each start, and the end of the first of 1 to `count` segments."""
    value = np.where(np.arange(len(segment_costs)) == len(segment_costs) - 1, 0.0, np.inf)  # no segment: only the end
    choices = []
    for _ in range(count):
        values = combine(segment_costs, value)
        choices.append(values.argmin(1))
        value = values.min(1)
    return value, choices
