"""The text of `shardwise laws`, made from the values that `--json` prints."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.console import format_count, pluralize
from shardwise.laws.fit import CONSTANTS, PARAMETER_SCOPES, law_from_dict

# Key, alignment with width, and number format of the columns of a design.
DESIGN_COLUMNS = (
    ("file", "<34", ""), ("flops", ">8", ".2g"), ("parameters", ">14", ","), ("width", ">6", ""), ("layers", ">6", ""),
    ("tokens", ">17", ","), ("batch", ">6", ""), ("lr", ">9", ".3g"),
)  # fmt: skip


def design_lines(rows: Sequence[dict[str, Any]], folder: Path) -> Iterator[str]:
    yield " ".join(f"{key:{width}}" for key, width, _ in DESIGN_COLUMNS)
    for row in rows:
        yield " ".join(f"{format(row[key], number_format):{width}}" for key, width, number_format in DESIGN_COLUMNS)
    next_step = f"train each with `shardwise train FILE`, then run `shardwise laws fit {folder / 'runs'}`"
    yield f"{pluralize(len(rows), 'job')}; {next_step}"


def fit_lines(values: dict[str, Any]) -> Iterator[str]:
    label = PARAMETER_SCOPES[values["parameter_scope"]]
    yield f"L(N, D) = E + A / N^alpha + B / D^beta, {pluralize(values['runs'], 'run')}; N: parameters {label}"
    if values["dropped"]:
        yield f"dropped: {', '.join(values['dropped'])}"
    for name in CONSTANTS:
        numbers = "{value:12.5g}   95%: {low:.5g} to {high:.5g}   standard error {standard_error:.3g}"
        yield f"  {name:<6}" + numbers.format(**values[name])
    yield f"standard deviation of the residuals: {100 * values['residual_std']:.2g}%"
    worst = sorted(values["residuals"], key=lambda row: -abs(row["residual"]))[:3]
    residual_list = ", ".join(f"{row['run']} {100 * row['residual']:+.2g}%" for row in worst)
    outliers = pluralize(sum(row["outlier"] for row in values["residuals"]), "outlier")
    yield f"largest residuals: {residual_list}; {outliers}"
    exponent = values["compute_optimal"]["parameters_exponent"]
    yield f"compute-optimal size for a budget C: N = k C^{exponent:.3f}"
    flops = values["fitted_ranges"]["flops"][1]
    N, D = law_from_dict(values).compute_optimal(flops)
    yield f"at {flops:.2g} FLOPs: {format_count(N)} parameters, {D / N:.3g} tokens per parameter"


def recommend_lines(result: dict[str, Any], irreducible_loss: float) -> Iterator[str]:
    yield from result["warnings"]
    yield f"law:      {result['law']}; N: parameters {PARAMETER_SCOPES[result['parameter_scope']]}"
    yield f"budget:   {result['flops']:.3g} FLOPs, counted as 6 N D"
    low, high = map(format_count, result["parameters_interval"])
    size = f"{format_count(result['parameters'])} parameters (95%: {low} to {high})"
    tokens = f"{format_count(result['tokens'])} tokens, {result['tokens_per_parameter']:.3g} tokens per parameter"
    yield f"optimum:  {size}, {tokens}"
    losses = "{:.4g} (95% of runs: {:.4g} to {:.4g})".format(result["loss"], *result["loss_interval"])
    yield f"loss:     {losses}; {irreducible_loss:.4g} is irreducible"
    low, high = map(format_count, result["near_optimal_parameters"])
    tolerance = f"within {100 * result['near_optimal_tolerance']:g}% of that"
    yield f"flat:     the loss is {tolerance} from {low} to {high} parameters"
    for model in result["overtrained"]:
        size, tokens, break_even = (format_count(model[key]) for key in ("parameters", "tokens", "break_even"))
        price = f"{model['flops'] / result['flops']:.3g}x the training FLOPs"
        repaid = f"repaid after {break_even} tokens of inference"
        yield f"smaller:  {size} parameters reach the same loss with {tokens} tokens: {price}, {repaid}"
    if plan := result.get("plan"):
        shape = "width {width}, {layers} layers, {heads} heads, vocabulary {vocab}".format(**plan["model"])
        yield f"model:    {shape}: {format_count(plan['parameters'])} parameters"
        batch = f"{plan['batch_samples']} samples of {plan['model']['sequence']} tokens"
        yield f"batch:    {batch}, learning rate {plan['lr']:g}"
        fits = "" if plan["fits"] else ", which does not fit"
        devices = f"{plan['devices']} x {plan['cluster']}{fits}"
        yield f"layout:   {plan['layout']} on {devices}: {100 * plan['mfu']:.3g}% MFU"
        time = f"{plan['days']:.3g} days, {plan['device_hours']:,.0f} device-hours"
        yield f"time:     {time}; {plan['planner_flops']:.3g} FLOPs including attention and head"
