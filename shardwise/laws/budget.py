"""Models and jobs for a compute budget: an iso-FLOP grid of small runs to fit a law to, and what a law recommends.

The grid has several model sizes at each of several budgets; docs/explanation/laws.md says how their shapes, batches,
learning rates and initial weights are chosen. The recommendation is model size and tokens for a budget, with the
expected loss and the cost of alternatives. Given devices and a cluster, the planner adds layout, days and device-hours;
given days, it finds the budget whose compute-optimal model trains in that time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from scipy.optimize import brentq

from shardwise.cluster import find_cluster
from shardwise.console import fill_in, format_count
from shardwise.errors import JobError
from shardwise.files import write_text
from shardwise.job import BatchConfig, Job, load_job, make_job
from shardwise.laws.fit import MAX_FLOPS, PARAMETER_SCOPES, FittedLaw, ScalingLaw, count_parameters, interval
from shardwise.models.gpt_family import DecoderConfig
from shardwise.planner.costs.model_shape import shape_of
from shardwise.planner.plan import make_plan

TOKENS_PER_PARAMETER = 20.0
MIN_STEPS = 1000  # a batch that leaves fewer steps is made smaller, down to one sample
MIN_LAYERS = 2  # one layer cannot compose attention and learns far worse
ASPECT_WEIGHT = 0.5  # weight of an aspect ratio error relative to a size error
VALIDATION_SAMPLES = 256  # their loss is the result of a run
NARROW_WIDTHS = (*range(16, 128, 8), *range(128, 512, 32), *range(512, 1024, 64), *range(1024, 4096, 256))
SIZE_FIELDS = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn")
LONG_SEQUENCE, SHORT_SEQUENCE = 2048, 256  # tokens per sample, from 1e17 FLOPs on and below
EXTRAPOLATION_FACTOR = 100.0  # warn beyond this factor outside the fitted range
NEAR_OPTIMAL_TOLERANCE = 0.005  # relative loss difference that counts as equally good
MAX_LOG_RATIO = 30.0  # log of the largest size ratio searched for near-optimal models
OVERTRAINING_FACTORS = (2, 4, 8)  # how many times smaller than optimal the overtrained models are
SECONDS_PER_DAY = 86_400.0
DAYS_TOLERANCE = 0.02  # accepted relative error of the planned days
MAX_ITERATIONS = 6  # of the search for a budget that takes the given days
INITIAL_MFU = 0.4  # from which that search starts
DEFAULT_SETTINGS = ("precision=bf16", "model.vocab=50304", "model.sequence=4096", "model.tied=false")


class GridJob(NamedTuple):
    path: Path
    job: Job
    flops: float
    parameters: int


def design_grid(low: float, high: float, budgets: int, sizes: int, spread: float, settings: Sequence[str],
                parameter_scope: str, folder: Path) -> list[GridJob]:  # fmt: skip
    """Returns jobs by ascending budget and size; sizes range from 1/spread to spread times the middle size."""
    if not 1 <= spread <= 1000:
        raise JobError(f"--spread {spread}: it must be from 1 to 1000.")
    template = make_template(settings, high)
    jobs = []
    for flops in map(float, np.geomspace(low, high, budgets) if budgets > 1 else [high]):
        middle = math.sqrt(flops / 6 / TOKENS_PER_PARAMETER)
        targets = middle * np.geomspace(1 / spread, spread, sizes) if sizes > 1 else [middle]
        models = {(model.width, model.layers): model
                  for model in (model_of_size(template, target, parameter_scope) for target in targets)}  # fmt: skip
        for model in models.values():
            parameters = count_parameters(model, parameter_scope)
            name = f"c{flops:.2g}-n{format_count(parameters).lower()}".replace("+", "")
            tokens = flops / (shape_of(model).flops(1) / model.sequence)
            job = job_for_budget(template, model, flops, tokens)
            batch_tokens, values = job.samples * model.sequence, job.model_dump(exclude_unset=True)
            values["tokens"] = max(1, round(tokens / batch_tokens)) * batch_tokens
            values["validation"] = {"samples": VALIDATION_SAMPLES, **values.get("validation", {})}
            values["run"] = {"folder": str(folder / "runs" / name), **values.get("run", {})}
            jobs.append(GridJob(folder / f"{name}.toml", make_job(values, name), flops, parameters))
    return jobs


def write_grid(jobs: Sequence[GridJob]) -> list[dict[str, Any]]:
    """Writes the job files, and returns a summary of each job as JSON values."""
    rows = []
    for path, job, flops, parameters in jobs:
        model = job.require_decoder()
        tokens = job.total_steps * job.samples * model.sequence
        size = f"{flops:.3g} FLOPs as the planner counts them, {parameters:,} parameters, {tokens:,} tokens"
        header = f"# A run of an iso-FLOP grid: {size}.\n#\n#   shardwise train {path}\n\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, header + tomli_w.dumps(job.model_dump(exclude_unset=True)))
        rows.append({"file": str(path), "flops": flops, "parameters": parameters, "width": model.width,
                     "layers": model.layers, "tokens": tokens, "batch": job.samples, "steps": job.total_steps,
                     "lr": job.optimizer.lr})  # fmt: skip
    return rows


def design_text(rows: Sequence[dict[str, Any]], folder: Path) -> str:
    """Returns the text of `shardwise laws design`."""
    return fill_in(Path(__file__).with_name("design.txt"), {"rows": rows, "folder": folder})


def make_template(settings: Sequence[str], flops: float) -> Job:
    """Returns the job with the settings that all jobs of the grid share."""
    template = load_job(None, settings)
    model = template.require_decoder()
    conflicting = sorted(set(SIZE_FIELDS) & model.model_fields_set)
    conflicting += sorted({"steps", "tokens", "batch"} & template.model_fields_set)
    if conflicting:
        raise JobError(f"--set {conflicting[0]}: the grid chooses size, batch and tokens; remove this setting.")
    if "sequence" not in model.model_fields_set:
        model = model.model_copy(update={"sequence": LONG_SEQUENCE if flops >= 1e17 else SHORT_SEQUENCE})
    return template.model_copy(update={"model": model})


def job_for_budget(template: Job, model: DecoderConfig, flops: float, tokens: float, devices: int = 1) -> Job:
    """Returns a job for the model and about these tokens; batch size and learning rate the template's, or by budget."""
    batch, optimizer = template.batch, template.optimizer
    if "batch" not in template.model_fields_set:
        batch = BatchConfig(samples=batch_size_for_budget(flops, tokens, model.sequence, devices))
    job = template.model_copy(update={"model": model, "batch": batch})
    if "lr" not in optimizer.model_fields_set:
        relative_batch = job.samples * model.sequence / _batch_tokens(flops)
        rate = 0.3118 * flops**-0.125 * min(1.0, math.sqrt(relative_batch))
        optimizer = optimizer.model_copy(update={"lr": float(f"{rate:.3g}")})
    return job.model_copy(update={"optimizer": optimizer, "tokens": round(tokens)})


def batch_size_for_budget(flops: float, tokens: float, sequence: int, devices: int = 1) -> int:
    """Returns the samples per batch for a budget: a power of two times the odd factor of `devices`."""
    odd_factor = devices // (devices & -devices)
    target_samples, max_samples = (size / sequence / odd_factor for size in (_batch_tokens(flops), tokens / MIN_STEPS))
    return odd_factor * 2 ** max(0, min(round(math.log2(target_samples)), math.floor(math.log2(max_samples))))


def _batch_tokens(flops: float) -> float:
    return float(0.2920 * flops**0.3271)  # as the learning rate, of DeepSeek-AI 2024, arXiv 2401.02954, section 3.1


def model_of_size(template: Job, parameters: float, parameter_scope: str) -> DecoderConfig:
    """Returns the decoder with about this many parameters and the usual ratio of width to depth."""
    if not 0 < parameters < 1e18:
        raise JobError(f"a model of {parameters:.3g} parameters: it must have fewer than 1e18; give a smaller budget.")
    base = template.require_decoder()
    if base.num_experts:
        raise JobError(f"--set model.name={base.name}: scaling laws support dense decoders only.")
    aspect = min(128.0, 32.0 * (parameters / 1e5) ** 0.1)  # width over depth: 32 at 0.1M, 64 at 100M, 128 at 100B
    candidates = []
    max_width = max(64.0, 2 * (128 * parameters / 12) ** (1 / 3))  # beyond any useful width
    for width in takewhile(lambda width: width <= max_width, chain(NARROW_WIDTHS, count(4096, 1024))):
        shallowest = [_make_model(base, width, layers) for layers in (MIN_LAYERS, MIN_LAYERS + 1)]
        smallest, next_larger = (count_parameters(model, parameter_scope) for model in shallowest)
        extra_layers = max(0, round((parameters - smallest) / (next_larger - smallest)))
        size_error = abs(math.log((smallest + extra_layers * (next_larger - smallest)) / parameters))
        layers = MIN_LAYERS + extra_layers
        score = size_error + ASPECT_WEIGHT * abs(math.log(width / layers / aspect))
        candidates.append((score, size_error, width, layers))
    _, size_error, width, layers = min(candidates)
    if size_error > 0.35:
        raise JobError(f"no decoder with a vocabulary of {base.vocab:,} has about {parameters:,.0f} parameters; "
                       "give a larger budget or a smaller model.vocab.")  # fmt: skip
    return _make_model(base, width, layers)


def _make_model(base: DecoderConfig, width: int, layers: int) -> DecoderConfig:
    """Returns a decoder whose FFN is 8/3 times its width; multiples of 64 are too coarse for narrow models."""
    head_size = 8 if width < 128 else 32 if width < 512 else 64 if width < 2048 else 128
    fields = {"width": width, "layers": layers, "heads": width // head_size}
    if width < 512 and base.activation != "gelu":
        fields["ffn"] = 8 * round(width / 3)
    init_std = float(f"{math.sqrt(0.4 / (base.mup_base_width or width)):.3g}")
    given = base.model_dump(exclude_unset=True)
    return DecoderConfig.model_validate({"name": "gpt", "init_std": init_std, **given, **fields})


def parse_budget(text: str) -> tuple[float, float]:
    """Parses `1e18:1e20`, or a single budget."""
    low, _, high = text.partition(":")
    try:
        budgets = float(low), float(high or low)
    except ValueError:
        raise JobError(f"--budget {text!r}: give the lowest and highest FLOPs, for example 1e18:1e20.") from None
    if not 0 < budgets[0] <= budgets[1] <= MAX_FLOPS:
        rule = f"the lowest budget must be positive and at most the highest, which must be at most {MAX_FLOPS:g} FLOPs"
        raise JobError(f"--budget {text!r}: {rule}.")
    return budgets


def recommend(fitted_law: FittedLaw, flops: float, stretch: float = 1.0) -> dict[str, Any]:
    """Returns the compute-optimal size and tokens for a budget as JSON values, without a plan; `stretch` multiplies the
    tokens, and so the budget, at this size."""
    law = fitted_law.law
    N, D = law.compute_optimal(flops)
    flops, D = stretch * flops, stretch * D
    loss = law.loss(N, D)
    return {"law": fitted_law.source, "parameter_scope": fitted_law.parameter_scope, "flops": flops, "parameters": N,
            "tokens": D, "tokens_per_parameter": D / N, "loss": loss,
            "loss_interval": prediction_interval(fitted_law, N, D),
            "parameters_interval": interval(fitted_law.bootstrap_samples.compute_optimal(flops)[0]),
            "near_optimal_parameters": [_near_optimal_bound(law, flops, N, sign) for sign in (-1, 1)],
            "near_optimal_tolerance": NEAR_OPTIMAL_TOLERANCE,
            "overtrained": list(_overtrained_models(law, flops, N, loss)),
            "warnings": list(extrapolation_warnings(fitted_law, N, D))}  # fmt: skip


def prediction_interval(fitted_law: FittedLaw, N: float, D: float) -> tuple[float, float]:
    """Returns the 95% interval of a run's loss: uncertainty of the law plus residuals of runs."""
    losses = np.asarray(fitted_law.bootstrap_samples.loss(N, D))
    residuals = np.random.default_rng(0).normal(0.0, fitted_law.residual_std, (25, len(losses)))  # 25 per sample
    return interval(losses * np.exp(residuals))


def extrapolation_warnings(fitted_law: FittedLaw, N: float, D: float) -> Iterator[str]:
    for unit, value in (("parameters", N), ("tokens", D), ("FLOPs", 6 * N * D)):
        low, high = fitted_law.fitted_ranges[unit.lower()]
        if (ratio := max(value / high, low / value)) > EXTRAPOLATION_FACTOR:
            yield (f"extrapolation: {value:.3g} {unit} is {ratio:,.0f} times outside the fitted range "
                   f"({low:.3g} to {high:.3g}); the recommendation is unreliable.")  # fmt: skip


def _overtrained_models(law: ScalingLaw, flops: float, optimal_N: float, loss: float) -> Iterator[dict[str, float]]:
    """Yields smaller models trained on more tokens to the same loss. After `break_even` tokens of inference, at 2 FLOPs
    per parameter, a smaller model has saved its extra training."""
    for N in (optimal_N / factor for factor in OVERTRAINING_FACTORS):
        tokens = law.tokens_to_reach(N, loss)
        if math.isfinite(tokens):
            break_even = (6 * N * tokens - flops) / (2 * (optimal_N - N))
            yield {"parameters": N, "tokens": tokens, "flops": 6 * N * tokens, "break_even": break_even}


def _near_optimal_bound(law: ScalingLaw, flops: float, optimal_N: float, direction: int) -> float:
    """Returns the size below (-1) or above (1) the optimum at which the loss at the same budget is 0.5% higher."""

    def excess_loss(log_ratio: float) -> float:
        N = optimal_N * math.exp(direction * log_ratio)
        return float(law.loss(N, flops / 6 / N) - (1 + NEAR_OPTIMAL_TOLERANCE) * optimal_loss)

    optimal_loss = law.loss(optimal_N, flops / 6 / optimal_N)
    log_ratio = brentq(excess_loss, 0.0, MAX_LOG_RATIO) if excess_loss(MAX_LOG_RATIO) > 0 else MAX_LOG_RATIO
    return float(optimal_N * math.exp(direction * log_ratio))


def recommend_with_plan(fitted_law: FittedLaw, flops: float | None, days: float | None, devices: int | None,
                        cluster: str | None, settings: Sequence[str]) -> dict[str, Any]:  # fmt: skip
    """Recommends for a budget of FLOPs, or of days on devices; adds a plan if devices are given."""
    if (flops is None) == (days is None):
        raise JobError("give the budget either as --flops, or as --days with --devices and --cluster.")
    if (devices is None) != (cluster is None) or (flops is None and devices is None):
        raise JobError("--devices and --cluster need each other, and --days needs both; add what is missing.")
    for name, value, limit in (("--flops", flops, MAX_FLOPS), ("--days", days, 1e6)):
        if value is not None and not 0 < value <= limit:
            raise JobError(f"{name} {value:g}: the value must be positive and at most {limit:g}.")
    if devices is None or cluster is None:
        return recommend(fitted_law, flops)  # type: ignore[arg-type]  # without devices, flops is given
    resolved_cluster = find_cluster(cluster)
    seconds = (days or 0.0) * SECONDS_PER_DAY
    flops = flops or INITIAL_MFU * resolved_cluster.device.peak_flops("bf16") * devices * seconds
    for _ in range(MAX_ITERATIONS if seconds else 1):
        result = recommend(fitted_law, flops)
        plan = make_plan(recommended_job(result, devices, settings), resolved_cluster, devices)
        if not seconds or abs(plan.training_seconds / seconds - 1) < DAYS_TOLERANCE:
            break
        flops /= plan.training_seconds / seconds
    if seconds:  # sizes come in whole layers and heads: the tokens make up for the rest
        result = recommend(fitted_law, result["flops"], seconds / plan.training_seconds)
        plan = replace(plan, job=plan.job.model_copy(update={"tokens": int(result["tokens"])}))
    job, model = plan.job, plan.job.require_decoder()
    result["plan"] = {
        "cluster": plan.cluster.device.name, "precision": job.precision, "devices": plan.devices,
        "layout": str(plan.best.layout), "fits": plan.fits(plan.best), "days": plan.training_seconds / SECONDS_PER_DAY,
        "device_hours": plan.training_seconds / 3600 * plan.devices, "mfu": plan.mfu(plan.best),
        "planner_flops": plan.shape.flops(job.samples) * job.total_steps, "batch_samples": job.samples,
        "lr": job.optimizer.lr, "parameters": count_parameters(model, fitted_law.parameter_scope),
        "model": {key: getattr(model, key) for key in (*SIZE_FIELDS, "init_std", "vocab", "tied", "sequence")},
    }  # fmt: skip
    return result


def recommended_job(result: dict[str, Any], devices: int, settings: Sequence[str]) -> Job:
    template = load_job(None, [*DEFAULT_SETTINGS, *settings])
    if conflicting := sorted(set(SIZE_FIELDS) & template.require_decoder().model_fields_set):
        conflicting = ["name"] if any(setting.startswith("model.name=") for setting in settings) else conflicting
        raise JobError(f"--set model.{conflicting[0]}: the law chooses the model size; remove this setting.")
    model = model_of_size(template, result["parameters"], result["parameter_scope"])
    return job_for_budget(template, model, result["flops"], result["tokens"], devices)


def recommend_text(result: dict[str, Any], irreducible_loss: float) -> str:
    """Returns the text of `shardwise laws recommend`."""
    scope = PARAMETER_SCOPES[result["parameter_scope"]]
    values = {"plan": None, **result, "scope": scope, "irreducible_loss": irreducible_loss}
    return fill_in(Path(__file__).with_name("recommend.txt"), values)
