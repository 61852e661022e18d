"""What `shardwise laws` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import DataError
from shardwise.files import write_text
from shardwise.laws.data import read_runs
from shardwise.laws.design import design, parse_budget, write_design
from shardwise.laws.estimates import estimates
from shardwise.laws.fit import Fit, fit, outliers
from shardwise.laws.plot import write_plot
from shardwise.laws.saved import as_dict, published, read_law
from shardwise.words import counted, short

if TYPE_CHECKING:  # both bring PyTorch, which a fit does not wait for
    from shardwise.laws.recommend import Recommendation
    from shardwise.planner.plan import Plan

COUNTED = {"all": "embeddings and head included", "blocks": "embeddings and head left out"}


def design_text(
    budget: str, budgets: int, sizes: int, spread: float, kind: str, out: Path, settings: Sequence[str], counts: str,
    as_json: bool,
) -> str:  # fmt: skip
    """Writes the grid, and says what it is."""
    low, high = parse_budget(budget)
    jobs = design(low, high, budgets, sizes, spread, kind, settings, counts, out)
    paths = write_design(jobs, out)
    rows = []
    for one, path in zip(jobs, paths, strict=True):
        model = one.job.decoder()
        rows.append({
            "file": str(path), "flops": one.flops, "parameters": one.parameters, "width": model.width,
            "layers": model.layers, "tokens": one.job.total_steps * one.job.samples * model.sequence,
            "batch": one.job.samples, "steps": one.job.total_steps, "lr": one.job.optimizer.lr,
        })  # fmt: skip
    if as_json:
        return json.dumps(rows)
    head = (
        f"{'file':<34} {'FLOPs':>8} {'parameters':>14} {'width':>6} {'layers':>6} {'tokens':>17} {'batch':>6} {'lr':>9}"
    )
    lines = [f"{row['file']:<34} {row['flops']:8.2g} {row['parameters']:14,} {row['width']:6} {row['layers']:6} "
             f"{row['tokens']:17,} {row['batch']:6} {row['lr']:9.3g}" for row in rows]  # fmt: skip
    after = f"train each with `shardwise train FILE`, then: shardwise laws fit {out / 'runs'}"
    return "\n".join([head, *lines, f"{counted(len(rows), 'job')}; {after}"])


def fit_text(
    paths: Sequence[Path], drop: int | None, draws: int, seed: int, counts: str, out: Path | None, plot: Path | None,
    as_json: bool,
) -> str:  # fmt: skip
    found = fit(read_runs(paths, counts), drop, draws, seed)
    text = json.dumps(as_dict(found))
    if out is not None:
        try:
            write_text(out, text + "\n")
        except OSError as error:
            raise DataError(f"{out} cannot be written: {error.strerror}.") from None
    if plot is not None:
        write_plot(found, plot, f"Scaling law of {', '.join(path.name for path in paths)}")
    return text if as_json else "\n".join(_fit_lines(found))


def _fit_lines(found: Fit) -> Iterator[str]:
    runs, law = found.runs, found.law
    yield f"L(N, D) = E + A / N^alpha + B / D^beta, {counted(len(runs), 'run')}; N: {COUNTED[runs.counts]}"
    if len(found.dropped):
        yield f"left out: {', '.join(found.dropped.names)}"
    for name, one in found.constants().items():
        yield (f"  {name:<6}{one['value']:12.5g}   95%: {one['low']:.5g} to {one['high']:.5g}   "
               f"standard error {one['standard_error']:.3g}")  # fmt: skip
    yield f"scatter of the runs around it: {100 * found.scatter:.2g}%"
    far = outliers(law, runs)
    worst = sorted(range(len(runs)), key=lambda place: -abs(found.residuals[place]))[:3]
    words = ", ".join(f"{runs.names[place]} {100 * found.residuals[place]:+.2g}%" for place in worst)
    yield f"farthest from it: {words}; {counted(len(far), 'outlier')}"
    power = law.beta / (law.alpha + law.beta)
    yield f"best size for a budget C: N = k C^{power:.3f} by the law"
    top = float(runs.flops.max())
    N, D = law.optimum(top)
    for other in estimates(runs):
        yield (f"  {other.way}: N = k C^{other.power:.3f} through {counted(len(other.points), 'point')}; "
               f"at {top:.2g} FLOPs {short(other.parameters(top))}, the law {short(N)}")  # fmt: skip
    yield f"tokens for each parameter at {top:.2g} FLOPs: {D / N:.3g}"


def recommend_text(
    law: Path | None, flops: float | None, days: float | None, devices: int | None, cluster: str | None,
    unique: float | None, settings: Sequence[str], as_json: bool,
) -> str:  # fmt: skip
    from shardwise.laws.recommend import planned

    known = published() if law is None else read_law(law)
    found = planned(known, flops, days, devices, cluster, unique, settings)
    return json.dumps(found.as_dict()) if as_json else "\n".join(_recommend_lines(found))


def _recommend_lines(found: Recommendation) -> Iterator[str]:
    from shardwise.laws.recommend import FLAT

    N, D, law = found.parameters, found.tokens, found.known.law
    yield from found.warnings
    yield f"law:      {found.known.source}; N: {COUNTED[found.known.counts]}"
    yield f"budget:   {found.flops:.3g} FLOPs, counted as 6 N D"
    low, high = found.parameters_interval
    sizes = f"{short(N)} parameters (95%: {short(low)} to {short(high)})"
    yield f"best:     {sizes}, {short(D)} tokens, {D / N:.3g} for each"
    low, high = found.loss_interval
    yield f"loss:     {found.loss:.4g} (of a run, 95%: {low:.4g} to {high:.4g}); {law.E:.4g} of it stays for ever"
    low, high = found.flat
    yield f"flat:     from {short(low)} to {short(high)} parameters the loss is within {100 * FLAT:g}%"
    for one in found.smaller:
        what = f"{short(one.parameters)} parameters reach the same loss with {short(one.tokens)} tokens"
        price = f"{one.flops / found.flops:.3g} times the training, repaid after {short(one.break_even)} tokens in use"
        yield f"smaller:  {what}: {price}"
    if (again := found.repeated) is not None:
        what = f"{short(again.unique)} different tokens, {D / again.unique:.3g} times each: loss {again.loss:.4g}"
        best = f"{short(again.parameters)} parameters and {short(again.tokens)} tokens: {again.best_loss:.4g}"
        yield f"repeated: {what}; the best then is {best}"
    if found.plan is not None:
        yield from _plan_lines(found.plan, found.as_dict()["plan"])


def _plan_lines(plan: Plan, facts: dict[str, Any]) -> Iterator[str]:
    model = plan.job.decoder()
    shape = f"width {model.width}, {model.layers} layers, {model.heads} heads, vocabulary {model.vocab}"
    yield f"model:    {shape}: {short(facts['parameters'])} parameters"
    yield f"batch:    {plan.job.samples} samples of {model.sequence} tokens, learning rate {facts['lr']:g}"
    fits = "" if facts["fits"] else ", which does not fit"
    share = f"{100 * facts['utilisation']:.3g}% of the peak"
    yield f"layout:   {facts['layout']} on {plan.devices} x {facts['cluster']}{fits}: {share}"
    flops = f"{facts['planner_flops']:.3g} FLOPs, attention and head included"
    yield f"time:     {facts['days']:.3g} days, {facts['device_hours']:,.0f} device-hours; the planner counts {flops}"


def noise_text(runs: Sequence[Path], batches: int, samples: int, as_json: bool) -> str:
    from shardwise.laws.noise import measure_noise

    found = [measure_noise(run, batches, samples) for run in runs]
    if as_json:
        return json.dumps([one.as_dict() for one in found])
    size = "{}: critical batch {:.3g} samples, {} tokens"
    return "\n".join(size.format(one.run, one.samples, short(one.samples * one.sequence)) for one in found)
