"""A grid of small jobs to fit a law to: at each of some budgets, models of several sizes, each trained on what is left.

Budgets are counted as the planner counts (`ModelShape.flops`: every product of forward and backward, half of the causal
square, the head). Sizes lie around 20 tokens for each parameter (Hoffmann et al. 2022), so that each budget has runs on
both sides of its optimum. Batch and learning rate follow the budget C as DeepSeek-AI 2024 found (arXiv 2401.02954,
section 3.1, fitted there from 1e17 to 2e19 FLOPs): 0.2920 C^0.3271 tokens, and 0.3118 / C^0.125. Where that batch would
leave fewer than a thousand steps it is smaller, and the rate falls with the root of it, as is usual for Adam.

One size must look like the next, or the law sees more than size: depth by width, heads of one size, the same share of
the feed-forward part. Weights start with the root of 2 / (5 width) (Nguyen and Salazar 2019, arXiv 1910.05895), the
usual 0.02 at width 1000: with 0.02 at width 32 hidden products all but vanish, and when a run gets going is chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from shardwise.console import format_count
from shardwise.errors import JobError
from shardwise.files import write_text
from shardwise.job import Job, load_job, make_job
from shardwise.laws.runs import check_parameter_count, count_parameters
from shardwise.models.gpt_family import DecoderConfig
from shardwise.planner.costs.model_shape import shape_of

TOKENS_PER_PARAMETER = 20.0
MIN_STEPS = 1000  # at least, if a batch has a sample: one that leaves fewer is made smaller
MIN_LAYERS = 2  # layers at least: attention in one layer cannot build on another's, and learns far worse
ASPECT_WEIGHT = (
    0.5  # what a wrong aspect weighs beside a wrong size: sizes need not be met, but one must look like the next
)
VALIDATION_SAMPLES = 256  # samples whose loss is a run's result
SIZE_FIELDS = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn")
LONG_SEQUENCE, SHORT_SEQUENCE = 2048, 256  # tokens in a sample, from 1e17 FLOPs on and below


@dataclass(frozen=True)
class GridJob:
    """A job of the grid, and what it is to show."""

    name: str
    values: dict[str, Any]
    job: Job
    flops: float
    parameters: int


def design_grid(
    low: float,
    high: float,
    budgets: int,
    sizes: int,
    spread: float,
    family: str,
    settings: Sequence[str],
    parameter_count: str,
    folder: Path,
) -> list[GridJob]:
    """Jobs from the lowest budget to the highest, smallest model first; sizes go from 1/spread to spread."""
    check_parameter_count(parameter_count)
    template = make_template(family, settings, high)
    found = []
    for flops in np.geomspace(low, high, budgets) if budgets > 1 else [high]:
        middle = math.sqrt(flops / 6 / TOKENS_PER_PARAMETER)
        seen: set[tuple[int, int]] = set()
        for factor in np.geomspace(1 / spread, spread, sizes) if sizes > 1 else [1.0]:
            model = model_of_size(template, middle * factor, parameter_count)
            if (model.width, model.layers) not in seen:
                found.append(_make_grid_job(template, model, float(flops), parameter_count, folder))
            seen.add((model.width, model.layers))
    return found


def write_grid(jobs: Sequence[GridJob], folder: Path) -> list[Path]:
    """A job file for each, checked as `shardwise train` will check it."""
    paths = []
    for grid_job in jobs:
        path = folder / f"{grid_job.name}.toml"
        tokens = grid_job.job.total_steps * grid_job.job.samples * grid_job.job.model.sequence_length
        header = (
            f"# A run of an iso-FLOP grid: {grid_job.flops:.3g} FLOPs as the planner counts, {grid_job.parameters:,} parameters, "
            f"{tokens:,} tokens.\n#\n#   shardwise train {path}\n\n"
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, header + tomli_w.dumps(grid_job.values))
        except OSError as error:
            raise JobError(f"{path} cannot be written: {error.strerror}.") from None
        load_job(path)
        paths.append(path)
    return paths


def make_template(family: str, settings: Sequence[str], flops: float) -> Job:
    """The job that all of the grid have in common."""
    template = load_job(None, [f"model.name={family}", *settings])
    model = template.require_decoder()
    conflicting = sorted(set(SIZE_FIELDS) & model.model_fields_set) + sorted(
        {"steps", "tokens", "batch"} & template.model_fields_set
    )
    if family != "gpt" or conflicting:
        option = f"--set {conflicting[0]}" if conflicting else f"--model {family}"
        raise JobError(f"{option}: sizes, batch and tokens are chosen here, for 'gpt'; set anything else.")
    if "sequence" not in model.model_fields_set:
        model = model.model_copy(update={"sequence": LONG_SEQUENCE if flops >= 1e17 else SHORT_SEQUENCE})
    return template.model_copy(update={"model": model})


def _make_grid_job(template: Job, model: DecoderConfig, flops: float, parameter_count: str, folder: Path) -> GridJob:
    shape, parameters = shape_of(model), count_parameters(model, parameter_count)
    tokens = flops / (shape.flops(1) / model.sequence_length)
    samples = batch_size_for_budget(flops, tokens, model.sequence_length)
    name = f"c{flops:.2g}-n{format_count(parameters).lower()}".replace("+", "")
    values = template.model_dump(exclude_unset=True)
    values["tokens"] = max(1, round(tokens / (samples * model.sequence_length))) * samples * model.sequence_length
    keys = {key: getattr(model, key) for key in (*SIZE_FIELDS, "init_std", "sequence")}
    values["model"] = {**values.get("model", {}), **keys, "name": "gpt"}
    values["batch"] = {"samples": samples}
    values["optimizer"] = {
        "lr": learning_rate_for_budget(flops, samples * model.sequence_length),
        **values.get("optimizer", {}),
    }
    values["validation"] = {"samples": VALIDATION_SAMPLES, **values.get("validation", {})}
    values["run"] = {"folder": str(folder / "runs" / name), **values.get("run", {})}
    return GridJob(name, values, make_job(values, name), flops, parameters)


def learning_rate_for_budget(flops: float, batch: float) -> float:
    """The highest learning rate for a budget and the tokens of a batch."""
    rate = 0.3118 * flops**-0.125 * min(1.0, math.sqrt(batch / _batch_tokens(flops)))
    return float(f"{rate:.3g}")


def batch_size_for_budget(flops: float, tokens: float, sequence: int, devices: int = 1) -> int:
    """Samples in a batch for a budget: a power of two, times the odd part of the devices that share it."""
    odd_factor = devices // (devices & -devices)
    target_samples, max_samples = (size / sequence / odd_factor for size in (_batch_tokens(flops), tokens / MIN_STEPS))
    return odd_factor * 2 ** max(0, min(round(math.log2(target_samples)), math.floor(math.log2(max_samples))))


def _batch_tokens(flops: float) -> float:
    return float(0.2920 * flops**0.3271)


def model_of_size(template: Job, parameters: float, parameter_count: str) -> DecoderConfig:
    """The decoder of about so many parameters whose depth suits its width."""
    base = template.model.model_dump(exclude={*SIZE_FIELDS, "init_std"} - template.model.model_fields_set)
    aspect = min(128.0, 32.0 * (parameters / 1e5) ** 0.1)  # of width over depth: 32 at 0.1M, 64 at 100M, 128 at 100B
    best, model = math.inf, None
    for width in _candidate_widths(parameters):
        base_count = count_parameters(_make_model(base, width, MIN_LAYERS), parameter_count)
        per_layer = count_parameters(_make_model(base, width, MIN_LAYERS + 1), parameter_count) - base_count
        layers = MIN_LAYERS + max(0, round((parameters - base_count) / per_layer))
        size_error = abs(math.log((base_count + (layers - MIN_LAYERS) * per_layer) / parameters))
        score = size_error + ASPECT_WEIGHT * abs(math.log(width / layers / aspect))
        if score < best:
            best, model, error = score, (width, layers), size_error
    if model is None or error > 0.35:
        raise JobError(
            f"no decoder with a vocabulary of {template.require_decoder().vocab:,} has about {parameters:,.0f} parameters; "
            "give a larger budget or a smaller model.vocab."
        )
    return _make_model(base, *model)


def _candidate_widths(parameters: float) -> Iterator[int]:
    """Multiples of a head, from 1024 on of 256 and from 4096 on of 1024, up to far more than the aspect asks for."""
    max_width = max(64.0, 2 * (128 * parameters / 12) ** (1 / 3))
    width = 16
    while width <= max_width:
        yield width
        width += _head_size(width) if width < 1024 else 256 if width < 4096 else 1024


def _head_size(width: int) -> int:
    return 8 if width < 128 else 32 if width < 512 else 64 if width < 2048 else 128


def _make_model(base: dict[str, Any], width: int, layers: int) -> DecoderConfig:
    """Of all widths alike: 8/3 of it in the feed-forward part, which 64s would round by half where it is narrow."""
    fields = {"width": width, "layers": layers, "heads": width // _head_size(width)}
    if width < 512 and base["activation"] != "gelu":
        fields["ffn"] = 8 * round(width / 3)
    init_std = float(f"{math.sqrt(0.4 / (base['mup_base_width'] or width)):.3g}")
    return DecoderConfig.model_validate({"init_std": init_std, **base, **fields})


def parse_budget(text: str) -> tuple[float, float]:
    """`1e18:1e20`, or one budget alone."""
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high or low)
    except ValueError:
        raise JobError(f"--budget {text!r}: write two numbers of FLOPs, as in 1e18:1e20.") from None
    if not 0 < found[0] <= found[1] < math.inf:
        raise JobError(f"--budget {text!r}: the lowest must be above 0 and not above the highest.")
    return found
