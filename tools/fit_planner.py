"""Fits the planner's efficiency constants to measured runs, and says how good they are on runs they were not fitted to.

    python tools/fit_planner.py                 fits to benchmarks/runs.csv and prints the table for efficiency.py
    python tools/fit_planner.py --check         leaves one source after the other out, and predicts it with the rest

Least squares of log(predicted / measured), robust against outliers (soft L1), with two kinds of terms: each run's own
error, and within a group of runs that differ only in the layout each run's error against the group's, since ranking
layouts is what the planner is for. A source with many runs weighs less per run. Every constant is drawn towards the
prior below, so that a device with few runs stays near the common value. Never a constant per run, model or source.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from math import exp, log
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from published import Row, Skip, evaluate, parse, read, seconds_of  # noqa: E402

from shardwise.layout import Layout  # noqa: E402
from shardwise.planner.efficiency import Efficiency  # noqa: E402

# What such kernels and links are known to reach. Chosen by hand; not from the runs, but after looking at some of them.
PRIOR = {
    "product": 0.75, "narrow": 0.6, "attention": 0.5, "memory": 0.6, "inner": 0.7, "outer": 0.7, "launch": 1.6e-5,
    "attention_backward": 0.8, "depth": 100.0, "wave": 0.8, "ragged": 0.8, "hidden_tensor": 0.2, "hidden_data": 0.8,
    "contention": 0.1, "hidden_expert": 0.4, "hidden_transfer": 0.4, "hidden_interleaved": 0.8, "grouped": 0.8,
    "jitter": 0.005, "latency": 1.0, "apart": 6.0, "fixed": 0.005, "routing": 100.0,
    "eager": 2.0, "older": 0.7, "scores": 4.5, "logits": 70.0, "added": 10.0, "start": 3e-5, "waits": 2e-4,
    "scattered": 0.6,
}  # fmt: skip
# Of some families more is known. Products: the best that anybody measured of one alone (Bekman, ml-engineering,
# "Maximum Achievable Matmul FLOPS"), and near all on a TPU's systolic arrays. Attention: the papers of FlashAttention 2
# and 3.
KNOWN = {
    "ampere": {"product": 0.87, "attention": 0.65},
    "hopper": {"product": 0.80, "narrow": 0.72, "attention": 0.65},
    "blackwell": {"product": 0.76, "narrow": 0.75},
    "blackwell-ultra": {"product": 0.79, "narrow": 0.745},
    "tpu": {"product": 0.95},
}
FAMILY = ("product", "narrow", "attention", "memory", "inner", "outer", "launch", "hidden_tensor")
COMMON = tuple(key for key in PRIOR if key not in FAMILY)
POSITIVE = (
    "launch",
    "depth",
    "jitter",
    "latency",
    "apart",
    "fixed",
    "routing",
    "eager",
    "scores",
    "logits",
    "added",
    "start",
    "waits",
)  # the others are shares
PULL = 0.5
# Times as strongly: what large products, links and hosts do is known from timing them alone, what PyTorch's own loss,
# scores and sums move from counting operators.
FIRMER = {
    "product": 4.0, "launch": 8.0, "inner": 4.0, "outer": 4.0, "logits": 6.0, "added": 2.0, "scores": 2.0, "waits": 4.0,
    "contention": 2.0, "latency": 2.0,
}  # fmt: skip
GROUPED = 5.0
SCALE = 0.2  # errors far above it count less

Run = tuple[Row, Layout]


def encode(key: str, value: float) -> float:
    return log(value) if key in POSITIVE else log(value / (1 - value))


def decode(key: str, value: float) -> float:
    return exp(value) if key in POSITIVE else 1 / (1 + exp(-value))


def load(paths: list[Path]) -> list[Run]:
    """Rows with a measured time, and the layout each stands for: that does not depend on any constant."""
    runs = []
    for path in paths:
        for values in read(path):
            try:
                row = parse(values)
            except Skip:
                continue
            if row.seconds and row.quality in "AB":
                runs.append((row, evaluate(row)[1]))
    return runs


def groups_of(runs: list[Run]) -> np.ndarray:
    """For each run the number of its group, or -1."""
    keys = [repr((row.source, row.shape, row.cluster, row.layout.world, row.samples)) for row, _ in runs]
    counts = Counter(keys)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys)) if counts[key] >= 3}
    return np.array([numbers.get(key, -1) for key in keys])


class Fit:
    def __init__(self, runs: list[Run]):
        self.runs = runs
        self.families = sorted({row.cluster.device.family for row, _ in runs})
        self.names = [("", key) for key in COMMON] + [(family, key) for family in self.families for key in FAMILY]
        self.prior = np.array(
            [encode(key, KNOWN.get(family, PRIOR).get(key, PRIOR[key])) for family, key in self.names]
        )
        self.pull = PULL * np.array([FIRMER.get(key, 1.0) for _, key in self.names])
        self.of = np.array([row.cluster.device.family for row, _ in runs])
        counts = Counter(row.source for row, _ in runs)
        self.weight = np.array([counts[row.source] ** -0.4 for row, _ in runs])
        self.weight /= self.weight.mean()
        self.group = groups_of(runs)

    def efficiencies(self, x: np.ndarray) -> dict[str, Efficiency]:
        values: dict[str, dict[str, float]] = defaultdict(dict)
        for (family, key), number in zip(self.names, x, strict=True):
            values[family][key] = decode(key, number)
        return {family: replace(Efficiency(), **{**values[""], **values[family]}) for family in self.families}

    def errors(self, x: np.ndarray, only: str = "") -> np.ndarray:
        """log(predicted / measured); of one family alone, zero for the others."""
        efficiencies = self.efficiencies(x)
        out = np.zeros(len(self.runs))
        for n, (row, layout) in enumerate(self.runs):
            if not only or self.of[n] == only:
                out[n] = log(seconds_of(row, layout, efficiencies[self.of[n]]) / row.seconds)  # type: ignore[operator]
        return out

    def terms(self, errors: np.ndarray) -> np.ndarray:
        """Own errors, and errors against the group's mean; linear in `errors`."""
        inside = self.group >= 0
        means = np.zeros(len(errors))
        for number in np.unique(self.group[inside]):
            members = self.group == number
            means[members] = errors[members].mean()
        return np.concatenate([self.weight * errors, GROUPED * self.weight * np.where(inside, errors - means, 0.0)])

    def solve(self, rounds: int, start: np.ndarray | None = None) -> np.ndarray:
        """Levenberg-Marquardt with weights for outliers."""
        x = self.prior.copy() if start is None else start
        errors, damping = self.errors(x), 1.0
        cost = self.cost(errors, x)
        for _ in range(rounds):
            slopes = np.stack([self.terms(self.slope(x, errors, n)) for n in range(len(x))], axis=1)
            terms = self.terms(errors)
            trust = 1 / np.sqrt(1 + (terms / SCALE) ** 2)
            matrix = slopes.T @ (trust[:, None] * slopes) + np.diag(self.pull)
            vector = slopes.T @ (trust * terms) + self.pull * (x - self.prior)
            while damping < 1e4:
                step = np.clip(np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -vector), -1.0, 1.0)
                tried = self.errors(x + step)
                if (lower := self.cost(tried, x + step)) < cost:
                    x, errors, cost, damping = x + step, tried, lower, max(damping / 4, 1e-4)
                    break
                damping *= 4
        return x

    def slope(self, x: np.ndarray, errors: np.ndarray, n: int, by: float = 0.03) -> np.ndarray:
        family = self.names[n][0]
        moved = x.copy()
        moved[n] += by
        difference = self.errors(moved, family) - errors
        return np.where(self.of == family, difference, 0.0) / by if family else difference / by

    def cost(self, errors: np.ndarray, x: np.ndarray) -> float:
        terms = self.terms(errors) / SCALE
        return float(np.sum(2 * SCALE**2 * (np.sqrt(1 + terms**2) - 1)) + np.sum(self.pull * (x - self.prior) ** 2))


def check(runs: list[Run], rounds: int) -> dict[str, float]:
    """Median error of each source when all constants are fitted without it."""
    start = None
    found: dict[str, float] = {}
    every: list[float] = []
    for source in sorted({row.source for row, _ in runs}):
        fit = Fit([run for run in runs if run[0].source != source])
        x = fit.solve(rounds, start)
        known = fit.efficiencies(x)
        common = {key: decode(key, x[n]) for n, (family, key) in enumerate(fit.names) if not family}
        mean = {key: decode(key, float(np.mean([x[n] for n, (f, k) in enumerate(fit.names) if f and k == key])))
                for key in FAMILY}  # fmt: skip
        spare = replace(Efficiency(), **{**common, **mean})  # a family of which nothing else is known
        errors = [abs(seconds_of(row, layout, known.get(row.cluster.device.family, spare)) / row.seconds - 1)  # type: ignore[operator]
                  for row, layout in runs if row.source == source]  # fmt: skip
        found[source] = statistics.median(errors)
        every += errors
        print(f"  {source:24s} {len(errors):4d} runs, median {100 * found[source]:5.1f}%", flush=True)
    found["all"] = statistics.median(every)
    return found


def show(fit: Fit, x: np.ndarray) -> None:
    errors = np.exp(fit.errors(x)) - 1
    print(f"{len(errors)} runs: median {100 * np.median(abs(errors)):.1f}%, "
          f"p90 {100 * np.quantile(abs(errors), 0.9):.1f}%, bias {100 * np.median(errors):+.1f}%")  # fmt: skip
    by: dict[str, list[float]] = defaultdict(list)
    for (row, _), error in zip(fit.runs, errors, strict=True):
        by[f"{row.source} / {row.cluster.device.name}"].append(float(error))
    for name, values in sorted(by.items()):
        print(f"  {name:40s} {len(values):4d}  median {100 * statistics.median(map(abs, values)):5.1f}%  "
              f"bias {100 * statistics.median(values):+6.1f}%")  # fmt: skip
    values = {name: decode(name[1], number) for name, number in zip(fit.names, x, strict=True)}
    for key in COMMON:
        print(f"    {key}: float = {values['', key]:.3g}")
    for family in fit.families:
        print(f'    "{family}": ({", ".join(f"{values[family, key]:.3g}" for key in FAMILY)}),')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "benchmarks" / "runs.csv"])
    parser.add_argument("--check", action="store_true", help="cross-validate by source")
    parser.add_argument("--pull", type=float, default=PULL)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", type=Path, help="write the constants as JSON too")
    options = parser.parse_args()
    globals()["PULL"] = options.pull
    runs = load(options.files)
    if options.check:
        print(f"all: median {100 * check(runs, options.rounds)['all']:.1f}%")
        return
    fit = Fit(runs)
    x = fit.solve(options.rounds)
    show(fit, x)
    if options.save:
        options.save.write_text(json.dumps({f"{f}.{k}": decode(k, v) for (f, k), v in zip(fit.names, x, strict=True)}))


if __name__ == "__main__":
    main()
