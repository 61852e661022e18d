"""What a law says of a budget: the size, the tokens, the loss, and what other choices would cost.

With devices and a cluster the planner (`shardwise plan`) adds the layout, the days and the device-hours, and turns days
into a budget: the one whose best model it predicts to train in that time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from shardwise.cluster import find_cluster
from shardwise.errors import JobError
from shardwise.job import Job, load_job
from shardwise.laws.data import parameters_of
from shardwise.laws.design import CHOSEN, batch_of, rate_of, sized
from shardwise.laws.fit import interval
from shardwise.laws.law import Law
from shardwise.laws.saved import Known
from shardwise.planner.plan import Plan, make_plan

BEYOND = 100.0  # times the fitted range, from where on a prediction is flagged
FLAT = 0.005  # share of the loss within which sizes count as equally good
WIDE = 30.0  # logarithm of the factor up to which sizes are looked at
SMALLER = (2, 4, 8)  # how many times smaller the models are whose over-training is priced
DAY = 86_400.0
CLOSE = 0.02  # how near the planned days must come to those asked for
TRIES = 6
DEFAULTS = ("precision=bf16", "model.vocab=50304", "model.sequence=4096", "model.tied=false")


@dataclass(frozen=True)
class Smaller:
    """A smaller model trained for longer to the same loss."""

    parameters: float
    tokens: float
    flops: float
    break_even: float
    """Tokens that must be read or written in use until its cheaper use, 2 FLOPs for each parameter, has paid for it."""


@dataclass(frozen=True)
class Repeated:
    """The same budget where only some tokens differ."""

    unique: float
    loss: float
    """Of the best choice for endless data, its tokens repeated."""
    parameters: float
    tokens: float
    best_loss: float
    """Of the best choice when this is known: these parameters and tokens."""


@dataclass(frozen=True)
class Recommendation:
    known: Known
    flops: float
    parameters: float
    tokens: float
    loss: float
    loss_interval: tuple[float, float]
    parameters_interval: tuple[float, float]
    flat: tuple[float, float]
    """The sizes between which the loss at the same budget is at most 0.5% above the lowest."""
    smaller: tuple[Smaller, ...]
    repeated: Repeated | None
    warnings: tuple[str, ...]
    plan: Plan | None = None

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "law": self.known.source, "counts": self.known.counts, "flops": self.flops, "parameters": self.parameters,
            "parameters_interval": list(self.parameters_interval), "tokens": self.tokens,
            "tokens_per_parameter": self.tokens / self.parameters, "loss": self.loss,
            "loss_interval": list(self.loss_interval), "flat_within": FLAT, "flat_parameters": list(self.flat),
            "over_training": [vars(one) for one in self.smaller], "warnings": list(self.warnings),
        }  # fmt: skip
        if self.repeated is not None:
            values["repeated"] = vars(self.repeated)
        if self.plan is not None:
            plan, model = self.plan, self.plan.job.decoder()
            values["plan"] = {
                "cluster": plan.cluster.device.name, "devices": plan.devices, "layout": str(plan.best.layout),
                "fits": plan.fits(plan.best), "days": plan.training / DAY,
                "device_hours": plan.training / 3600 * plan.devices, "utilisation": plan.utilisation(plan.best),
                "planner_flops": plan.shape.flops(plan.job.samples) * plan.job.total_steps,
                "batch_samples": plan.job.samples, "lr": plan.job.optimizer.lr,
                "parameters": parameters_of(model, self.known.counts),
                "model": {key: getattr(model, key) for key in (*CHOSEN, "init_std", "vocab", "sequence")},
            }  # fmt: skip
        return values


def recommend(known: Known, flops: float, unique: float | None = None) -> Recommendation:
    law = known.law
    N, D = law.optimum(flops)
    loss = law.loss(N, D)
    smaller = tuple(_smaller(law, N, N / factor, loss) for factor in SMALLER)
    return Recommendation(
        known, flops, N, D, loss, prediction(known, N, D), interval(known.draws.optimum(flops)[0]),
        (_edge(law, flops, N, loss, -1), _edge(law, flops, N, loss, 1)),
        tuple(one for one in smaller if math.isfinite(one.tokens)),
        None if unique is None or unique >= D else _repeated(law, flops, N, D, unique), warnings(known, N, D),
    )  # fmt: skip


def prediction(known: Known, N: float, D: float) -> tuple[float, float]:
    """Where the loss of one run will lie: what the law does not know, and how far runs lie from it."""
    losses = np.asarray(known.draws.loss(N, D))
    off = np.random.default_rng(0).normal(0.0, known.scatter, (25, len(losses)))
    return interval(losses * np.exp(off))


def warnings(known: Known, N: float, D: float) -> tuple[str, ...]:
    """A sentence for each quantity that lies far outside of what the law was fitted to."""
    found = []
    for what, value in (("parameters", N), ("tokens", D), ("flops", 6 * N * D)):
        low, high = known.ranges[what]
        times = max(value / high, low / value)
        if times > BEYOND:
            found.append(f"extrapolation: {value:.3g} {'FLOPs' if what == 'flops' else what} is {times:,.0f} times "
                         f"beyond the fitted range ({low:.3g} to {high:.3g}); trust no digit of it.")  # fmt: skip
    return tuple(found)


def _smaller(law: Law, best: float, N: float, loss: float) -> Smaller:
    tokens = float(law.tokens_for(N, loss))
    flops = 6 * N * tokens
    more = flops - 6 * best * float(law.tokens_for(best, loss))
    return Smaller(N, tokens, flops, more / (2 * (best - N)))


def _edge(law: Law, flops: float, best: float, loss: float, side: int) -> float:
    """The size below or above the best at which the loss of the same budget is 0.5% higher."""

    def above(away: float) -> float:
        N = best * math.exp(side * away)
        return float(law.loss(N, flops / 6 / N) - (1 + FLAT) * loss)

    away = brentq(above, 0.0, WIDE) if above(WIDE) > 0 else WIDE
    return float(best * math.exp(side * away))


def _repeated(law: Law, flops: float, N: float, D: float, unique: float) -> Repeated:
    def loss(size: float) -> float:
        return float(law.repeated_loss(math.exp(size), flops / 6 / math.exp(size), unique))

    middle = math.log(N)
    found = minimize_scalar(loss, bounds=(middle - 7, middle + 7), method="bounded", options={"xatol": 1e-6})
    size = math.exp(found.x)
    return Repeated(unique, float(law.repeated_loss(N, D, unique)), size, flops / 6 / size, float(found.fun))


# Through the planner


def planned(
    known: Known, flops: float | None, days: float | None, devices: int | None, cluster: str | None,
    unique: float | None, settings: Sequence[str],
) -> Recommendation:  # fmt: skip
    """A recommendation for FLOPs, or for days on devices; planned where there are devices."""
    if (flops is None) == (days is None):
        raise JobError("give a budget as --flops, or as --days with --devices and --cluster.")
    if days is not None and (devices is None or cluster is None):
        raise JobError("--days needs --devices and --cluster: 30 days of what?")
    if (devices is None) != (cluster is None):
        raise JobError("--devices and --cluster go together.")
    for name, value in (("--flops", flops), ("--days", days), ("--unique-tokens", unique)):
        if value is not None and not 0 < value < math.inf:
            raise JobError(f"{name} {value:g}: it must be above 0.")
    if devices is None or cluster is None:
        assert flops is not None
        return recommend(known, flops, unique)
    machine = find_cluster(cluster)
    if flops is not None:
        found = recommend(known, flops, unique)
        return replace(found, plan=make_plan(job_for(found, devices, settings), machine, devices))
    assert days is not None
    flops = 0.4 * machine.device.rate("bf16") * devices * days * DAY
    for _ in range(TRIES):
        found = recommend(known, flops, unique)
        plan = make_plan(job_for(found, devices, settings), machine, devices)
        off = plan.training / (days * DAY)
        if abs(off - 1) < CLOSE:
            break
        flops /= off
    return replace(found, plan=plan)


def job_for(found: Recommendation, devices: int, settings: Sequence[str]) -> Job:
    """The recommended model as a job."""
    template = load_job(None, [*DEFAULTS, *settings])
    if taken := sorted(set(CHOSEN) & template.decoder().model_fields_set):
        raise JobError(f"--set model.{taken[0]}: the law chooses the size; set anything else.")
    model = sized(template, found.parameters, found.known.counts)
    samples = template.samples
    if "batch" not in template.model_fields_set:
        samples = batch_of(found.flops, found.tokens, model.sequence, devices)
    batch = template.batch.model_copy(update={"samples": samples, "tokens": None})
    values: dict[str, Any] = {"model": model, "batch": batch, "tokens": round(found.tokens), "steps": None}
    if "lr" not in template.optimizer.model_fields_set:
        rate = rate_of(found.flops, samples * model.sequence)
        values["optimizer"] = template.optimizer.model_copy(update={"lr": rate})
    return template.model_copy(update=values)
