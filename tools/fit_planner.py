"""Fits the planner's efficiency constants to measured runs, and cross-validates them.

    python tools/fit_planner.py            fits to the runs in benchmarks/ and writes the constants
    python tools/fit_planner.py --check    leaves out one source at a time and predicts it from the rest: the errors
                                           to trust, which it writes to `shardwise/planner/accuracy.toml`

Writes `shardwise/planner/constants.toml`, which the planner reads, and `benchmarks/frameworks.toml` with the constants
that only other people's software needs. Given files of runs, it prints the errors and writes nothing.

The fit is robust (soft L1) least squares of log(predicted / measured) with two kinds of terms: each run's error, and,
within groups of runs that differ only in their layout, each run's error relative to the group's mean, since the
planner's job is to rank layouts. Runs of a source with many runs weigh less. A prior pulls every constant towards a
known value, so that device families with few runs stay near it. There is never a constant per run, model or source.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tomllib
from collections import Counter, defaultdict
from dataclasses import fields, replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from frameworks import FRAGMENTATION, FrameworkEfficiency  # noqa: E402
from planner_accuracy import (  # noqa: E402
    error_summary,
    memory_errors,
    out_of_memory,
    predict_row,
    print_report,
    summary,
    time_errors,
)  # fmt: skip
from published import MeasuredRun, SkipRow, evaluate_run, parse_row, predicted_seconds, read_rows  # noqa: E402

from shardwise.cluster import Efficiency  # noqa: E402
from shardwise.errors import UserError  # noqa: E402
from shardwise.layout import Layout  # noqa: E402

# Known rates of kernels and links. Chosen by hand: not computed from the runs, but after looking at some of them.
PRIOR = {
    "matmul": 0.75,
    "low_precision_matmul": 0.6,
    "attention": 0.5,
    "memory": 0.6,
    "inner": 0.7,
    "outer": 0.7,
    "kernel_launch": 1.6e-5,
    "attention_backward": 0.8,
    "matmul_half_rate_depth": 100.0,
    "wave_quantization": 0.8,
    "unaligned_64": 0.8,
    "overlap_tensor": 0.2,
    "overlap_data": 0.8,
    "overlap_expert": 0.4,
    "overlap_p2p": 0.4,
    "grouped_matmul": 0.8,
    "jitter": 0.005,
    "latency": 1.0,
    "overlap_sharpness": 6.0,
    "fixed_seconds": 0.005,
    "expert_kernels": 8.0,
    "flash_attention_2": 0.7,
    "loss_bytes_per_logit": 52.0,
    "collective_start": 3e-5,
    "all_to_all": 0.6,
    "tensor_wait": 2e-4,
}
# Family-specific priors. Matmuls: the best isolated measurement (Bekman, ml-engineering, "Maximum Achievable Matmul
# FLOPS"), and nearly the peak on a TPU's systolic arrays. Attention: the FlashAttention 2 and 3 papers.
FAMILY_PRIOR = {
    "ampere": {"matmul": 0.87, "attention": 0.65},
    "hopper": {"matmul": 0.80, "low_precision_matmul": 0.72, "attention": 0.65},
    "blackwell": {"matmul": 0.76, "low_precision_matmul": 0.75},
    "tpu": {"matmul": 0.95},
}
FAMILY_KEYS = ("matmul", "low_precision_matmul", "attention", "memory")
# By hand, for families without measured runs. MI300X: the vendor's largest matmuls ("Measuring Max-Achievable FLOPs",
# ROCm blog, 2025: 708 TFLOP/s in bf16, 1,273 in fp8); attention in proportion.
OTHER_FAMILIES = {"other": (0.75, 0.6, 0.55, 0.7), "cdna3": (0.54, 0.49, 0.4, 0.7)}
# These devices have no low precision, and V100 runs no fused attention: the prior stands.
UNUSED = {("volta", "low_precision_matmul"), ("volta", "attention"), ("ampere", "low_precision_matmul")}
COMMON_KEYS = tuple(key for key in PRIOR if key not in FAMILY_KEYS)
LOG_KEYS = (
    "kernel_launch",
    "matmul_half_rate_depth",
    "jitter",
    "latency",
    "overlap_sharpness",
    "fixed_seconds",
    "expert_kernels",
    "loss_bytes_per_logit",
    "collective_start",
    "tensor_wait",
)  # fitted on a log scale; the others are fractions, fitted on a logit scale
PRIOR_WEIGHT = 0.5
# Multiples of that weight: large matmuls, links and kernel launches are known from isolated timings, the traffic of
# PyTorch's loss, scores and gradient accumulation from counting operators.
PRIOR_STRENGTH = {
    "matmul": 4.0, "kernel_launch": 8.0, "inner": 4.0, "outer": 4.0, "loss_bytes_per_logit": 6.0,
    "collective_start": 4.0, "tensor_wait": 4.0, "latency": 2.0,
}  # fmt: skip
GROUP_WEIGHT = 5.0
# Of a framework's memory, lost to fragmentation: `--check` fits it, `frameworks.py` has it by hand.
FRAGMENTATIONS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
SOFT_L1_SCALE = 0.2  # larger errors count linearly

FILES = ("runs.csv", "unseen.csv", "out_of_memory.csv")
CONSTANTS_FILE = ROOT / "shardwise" / "planner" / "constants.toml"
ACCURACY_FILE = ROOT / "shardwise" / "planner" / "accuracy.toml"
FRAMEWORKS_FILE = ROOT / "benchmarks" / "frameworks.toml"
FRAMEWORK_KEYS = {field.name for field in fields(FrameworkEfficiency)} - {field.name for field in fields(Efficiency)}

RunAndLayout = tuple[MeasuredRun, Layout]
Rows = list[tuple[Path, dict[str, str]]]


def to_unconstrained(key: str, value: float) -> float:
    return log(value) if key in LOG_KEYS else log(value / (1 - value))


def from_unconstrained(key: str, value: float) -> float:
    return exp(value) if key in LOG_KEYS else 1 / (1 + exp(-value))


def load(paths: list[Path]) -> list[RunAndLayout]:
    """Returns the runs with a measured time, each with its full layout, which depends on no constant."""
    runs = []
    for path in paths:
        for values in read_rows(path):
            try:
                row = parse_row(values)
            except SkipRow:
                continue
            if row.seconds and row.quality in "AB" and not out_of_memory(path, values):
                runs.append((row, evaluate_run(row)[1]))
    return runs


def group_ids(runs: list[RunAndLayout]) -> np.ndarray:
    """Returns each run's group, or -1. A group has at least three runs that differ only in their layout."""
    keys = [repr((row.source, row.shape, row.cluster, row.layout.world, row.samples)) for row, _ in runs]
    counts = Counter(keys)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys)) if counts[key] >= 3}
    return np.array([numbers.get(key, -1) for key in keys])


class EfficiencyFit:
    def __init__(self, runs: list[RunAndLayout], families: list[str] | None = None):
        self.runs = runs
        self.families = families or sorted({row.cluster.device.family for row, _ in runs})
        self.parameter_names = [("", key) for key in COMMON_KEYS] + [
            (family, key) for family in self.families for key in FAMILY_KEYS if (family, key) not in UNUSED
        ]
        self.prior = np.array(
            [
                to_unconstrained(key, FAMILY_PRIOR.get(family, PRIOR).get(key, PRIOR[key]))
                for family, key in self.parameter_names
            ]
        )
        self.prior_weight = PRIOR_WEIGHT * np.array([PRIOR_STRENGTH.get(key, 1.0) for _, key in self.parameter_names])
        self.run_family = np.array([row.cluster.device.family for row, _ in runs])
        counts = Counter(row.source for row, _ in runs)
        self.run_weight = np.array([counts[row.source] ** -0.4 for row, _ in runs])
        self.run_weight /= self.run_weight.mean()
        self.group_id = group_ids(runs)

    def efficiencies(self, x: np.ndarray) -> dict[str, FrameworkEfficiency]:
        values = constants(self, x)
        return {family: FrameworkEfficiency(**{**values[""], **values[family]}) for family in self.families}

    def errors(self, x: np.ndarray, only: str = "") -> np.ndarray:
        """Returns log(predicted / measured) of each run; zero outside family `only`, if given."""
        efficiencies = self.efficiencies(x)
        out = np.zeros(len(self.runs))
        for n, (row, layout) in enumerate(self.runs):
            if not only or self.run_family[n] == only:
                out[n] = log(predicted_seconds(row, layout, efficiencies[self.run_family[n]]) / row.seconds)  # type: ignore[operator]
        return out

    def terms(self, errors: np.ndarray) -> np.ndarray:
        """Returns the weighted errors, and the errors relative to the group's mean; linear in `errors`."""
        in_group = self.group_id >= 0
        means = np.zeros(len(errors))
        for number in np.unique(self.group_id[in_group]):
            members = self.group_id == number
            means[members] = errors[members].mean()
        return np.concatenate(
            [self.run_weight * errors, GROUP_WEIGHT * self.run_weight * np.where(in_group, errors - means, 0.0)]
        )

    def solve(self, rounds: int, start: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Minimises the cost by Levenberg-Marquardt with iteratively reweighted residuals; returns the constants and
        the slopes of every run's error at the last but one."""
        x = self.prior.copy() if start is None else start
        for _ in range(rounds):
            slopes = self.slopes(x)
            x = self.refine(x, slopes, 3)
        return x, slopes

    def slopes(self, x: np.ndarray) -> np.ndarray:
        errors = self.errors(x)
        return np.stack([self.slope(x, errors, n) for n in range(len(x))], axis=1)

    def refine(self, x: np.ndarray, slopes: np.ndarray, steps: int, is_linear: bool = False) -> np.ndarray:
        """Takes steps with the same slopes, each accepted only if it lowers the cost: the true one, or, much faster,
        that of errors which change with the constants as these slopes say."""
        errors, damping = self.errors(x), 0.1
        cost = self.cost(errors, x)
        linear = np.stack([self.terms(column) for column in slopes.T], axis=1)
        for _ in range(steps):
            terms = self.terms(errors)
            robust_weight = 1 / np.sqrt(1 + (terms / SOFT_L1_SCALE) ** 2)
            matrix = linear.T @ (robust_weight[:, None] * linear) + np.diag(self.prior_weight)
            vector = linear.T @ (robust_weight * terms) + self.prior_weight * (x - self.prior)
            while damping < 1e4:
                step = np.clip(np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -vector), -1.0, 1.0)
                trial_errors = errors + slopes @ step if is_linear else self.errors(x + step)
                if (trial_cost := self.cost(trial_errors, x + step)) < cost:
                    x, errors, cost, damping = x + step, trial_errors, trial_cost, max(damping / 4, 1e-4)
                    break
                damping *= 4
        return x

    def slope(self, x: np.ndarray, errors: np.ndarray, n: int, epsilon: float = 0.03) -> np.ndarray:
        family = self.parameter_names[n][0]
        moved = x.copy()
        moved[n] += epsilon
        difference = self.errors(moved, family) - errors
        return np.where(self.run_family == family, difference, 0.0) / epsilon if family else difference / epsilon

    def cost(self, errors: np.ndarray, x: np.ndarray) -> float:
        terms = self.terms(errors) / SOFT_L1_SCALE
        return float(
            np.sum(2 * SOFT_L1_SCALE**2 * (np.sqrt(1 + terms**2) - 1))
            + np.sum(self.prior_weight * (x - self.prior) ** 2)
        )


def fragmentation_errors(rows: Rows) -> dict[float, dict[str, list[float]]]:
    """Returns the errors of peak memory by source, for each fraction that may be lost to fragmentation."""
    errors: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path, values in rows:
        for fraction in FRAGMENTATIONS if values["peak_mem_gib"] and not out_of_memory(path, values) else ():
            result = predict_row(path, values, None, lambda row: with_fragmentation(row, fraction))  # noqa: B023
            if "skipped" not in result and result["row"].memory_profile.fragmentation == fraction:
                errors[fraction][values["source"]].append(abs(result["memory"] / result["row"].memory - 1))
    return errors


def with_fragmentation(row: MeasuredRun, fraction: float) -> MeasuredRun:
    is_fitted = row.memory_profile.fragmentation == FRAGMENTATION and not row.is_allocated
    return replace(row, memory_profile=replace(row.memory_profile, fragmentation=fraction)) if is_fitted else row


def leave_out(runs: list[RunAndLayout], rows: Rows, x: np.ndarray, slopes: np.ndarray) -> list[dict[str, Any]]:
    """Returns every row's prediction by constants that are fitted without its source. The fit starts from that to all
    runs, takes its slopes as constant, and steps until the cost without the source no longer falls."""
    results, memory_errors_by_fraction = [], fragmentation_errors(rows)
    for source in sorted({values["source"] for _, values in rows}):
        kept = [n for n, (row, _) in enumerate(runs) if row.source != source]
        fit = EfficiencyFit([runs[n] for n in kept], sorted({row.cluster.device.family for row, _ in runs}))
        found = fit.refine(x, slopes[kept], 20, is_linear=True) if len(kept) < len(runs) else x
        efficiencies = fit.efficiencies(found)
        medians = {
            fraction: statistics.median(others)
            for fraction, by in memory_errors_by_fraction.items()
            if (others := [statistics.median(errors) for name, errors in by.items() if name != source])
        }
        fraction = min(medians, key=lambda fraction: medians[fraction], default=FRAGMENTATION)  # noqa: B023
        own = [
            predict_row(path, values, efficiencies, lambda row: with_fragmentation(row, fraction))  # noqa: B023
            for path, values in rows if values["source"] == source
        ]  # fmt: skip
        results += own
        errors = error_summary(time_errors([result for result in own if "skipped" not in result]))
        figures = ", ".join(f"{name} {100 * error:5.1f}%" for name, error in errors.items())
        print(f"  {source:24s} {len(own):4d} runs  {figures}", flush=True)
    return results


def print_fit(fit: EfficiencyFit, x: np.ndarray) -> None:
    errors = np.exp(fit.errors(x)) - 1
    print(f"{len(errors)} runs: median {100 * np.median(abs(errors)):.1f}%, "
          f"p90 {100 * np.quantile(abs(errors), 0.9):.1f}%, bias {100 * np.median(errors):+.1f}%")  # fmt: skip
    by: dict[str, list[float]] = defaultdict(list)
    for (row, _), error in zip(fit.runs, errors, strict=True):
        by[f"{row.source} / {row.cluster.device.name}"].append(float(error))
    for name, values in sorted(by.items()):
        print(f"  {name:40s} {len(values):4d}  median {100 * statistics.median(map(abs, values)):5.1f}%  "
              f"bias {100 * statistics.median(values):+6.1f}%")  # fmt: skip


def constants(fit: EfficiencyFit, x: np.ndarray) -> dict[str, dict[str, float]]:
    """Returns the fitted constants by family; "": for all families."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for family, key in UNUSED:
        values[family][key] = PRIOR[key]
    for (family, key), number in zip(fit.parameter_names, x, strict=True):
        values[family][key] = from_unconstrained(key, number)
    return values


def write_constants(values: dict[str, dict[str, float]], planner_file: Path, frameworks_file: Path) -> None:
    common = values[""]
    families = {family: values[family] for family in sorted(values) if family}
    families |= {name: dict(zip(FAMILY_KEYS, shares, strict=True)) for name, shares in OTHER_FAMILIES.items()}
    _write_toml(planner_file, "shardwise/cluster.py", {
        "common": {key: value for key, value in common.items() if key not in FRAMEWORK_KEYS},
        **{f"families.{family}": family_values for family, family_values in families.items()},
    })  # fmt: skip
    framework_values = {key: value for key, value in common.items() if key in FRAMEWORK_KEYS}
    _write_toml(frameworks_file, "benchmarks/frameworks.py", {"common": framework_values})


def _write_toml(path: Path, reader: str, tables: dict[str, dict[str, float]]) -> None:
    text = f"# Written by tools/fit_planner.py from benchmarks/*.csv; do not edit. {reader} explains each.\n"
    for name, values in tables.items():
        text += f"\n[{name}]\n" + "".join(f"{key} = {value:.3g}\n" for key, value in values.items())
    path.write_text(text, encoding="utf-8")


def accuracy_figures(report: dict[str, Any], results: list[dict[str, Any]], rows: Rows) -> str:
    """The TOML file that `shardwise/planner/plan.py` reads and `docs/explanation/planner.md` shows."""
    figures = {"time_runs": len(time_errors(results)), "memory_runs": len(memory_errors(results))}
    for name in ("time", "memory"):
        figures |= {f"{name}_{key}": report[name][key] for key in ("median", "p90")}
        figures[f"{name}_over_sources"] = report["over_sources"][name]
    figures |= {**report["fits"], "regret": report["regret"]["by_row"]}
    # The range of a plan's memory is that of the reserves in use, which are less biased than those fitted here.
    in_use = [result for path, values in rows if "skipped" not in (result := predict_row(path, values))]
    ratios = np.quantile([1 / (1 + error) for error in memory_errors(in_use)], np.linspace(0.025, 0.975, 20))
    text = "# Written by tools/fit_planner.py --check: every run predicted without its source; do not edit.\n"
    text += "".join(f"{name} = {round(value, 3)}\n" for name, value in figures.items())
    text += f"memory_ratios = [{', '.join(f'{ratio:.3f}' for ratio in ratios)}]  # measured over predicted peaks\n"
    text += "\n[sources]  # runs; median error and bias of the step time, median error of the memory; -9: none\n"
    for source, values in report["by_source"].items():
        shares = [round(values.get(key, -9), 3) for key in ("median", "bias", "memory")]
        text += f'"{source}" = {[values["rows"], *shares]}\n'
    return text


def current(fit: EfficiencyFit) -> np.ndarray:
    """Returns the constants of the last fit, or the prior of those that it did not have."""
    tables = tomllib.loads(CONSTANTS_FILE.read_text(encoding="utf-8"))
    own = tomllib.loads(FRAMEWORKS_FILE.read_text(encoding="utf-8"))["common"]
    return np.array([
        to_unconstrained(key, table[key]) if key in table else prior
        for (family, key), prior in zip(fit.parameter_names, fit.prior, strict=True)
        for table in [tables["families"].get(family, {}) if family else {**tables["common"], **own}]
    ])  # fmt: skip


def run(files: list[Path], is_check: bool, rounds: int) -> None:
    """Fits or cross-validates; writes what it found only if no files are given."""
    paths = files or [ROOT / "benchmarks" / name for name in FILES]
    runs = load(paths)
    if len({row.source for row, _ in runs}) < 1 + is_check:
        least = "two sources, to leave one out" if is_check else "one source"
        raise UserError(f"{', '.join(map(str, paths))}: needs rows with a step time of at least {least}.")
    fit = EfficiencyFit(runs)
    if not is_check:
        x, _ = fit.solve(rounds, current(fit))
        print_fit(fit, x)
        if not files:
            write_constants(constants(fit, x), CONSTANTS_FILE, FRAMEWORKS_FILE)
        return
    x = current(fit)
    slopes = fit.slopes(x)
    rows = [(path, values) for path in paths for values in read_rows(path)]
    print(f"{len(x)} constants, fitted without the source that they predict:")
    results = [result for result in leave_out(runs, rows, x, slopes) if "skipped" not in result]
    report = summary(results)
    print_report(report)
    if not files:
        ACCURACY_FILE.write_text(accuracy_figures(report, results, rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: those in benchmarks/, and only then it writes")
    parser.add_argument("--check", action="store_true", help="leave out one source at a time")
    parser.add_argument("--rounds", type=int, default=2, help="of new slopes")
    options = parser.parse_args()
    try:
        run(options.files, options.check, options.rounds)
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
