"""Measures the coverage of the 95% intervals of `shardwise laws fit` on runs simulated from a known law.

    python benchmarks/laws_coverage.py                     200 trials of each design; minutes on one core
    python benchmarks/laws_coverage.py --trials 20 --draws 100

Prints, for each design and constant, the fraction of trials whose interval contains the true value. Exits with 1 if one
is outside 90 to 99%. The simulated log losses have normal noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from shardwise.laws.fit import CONSTANTS, Runs, ScalingLaw, fit_as_dict, fit_scaling_law

TRUE_LAW = ScalingLaw(1.8, 480.0, 2000.0, 0.35, 0.366)
DESIGNS = {
    "iso-FLOP, 6 budgets x 7 sizes, noise 0.5%": ("iso", 6, 7, 0.005),
    "scattered, 100 runs, noise 1%": ("scattered", 10, 10, 0.01),
    "iso-FLOP, 5 budgets x 6 sizes, noise 1%": ("iso", 5, 6, 0.01),
    "iso-FLOP, 12 budgets x 20 sizes, noise 0.5%": ("iso", 12, 20, 0.005),
}
ALLOWED = 0.90, 0.99


def simulate_runs(kind: str, budgets: int, sizes: int, noise: float, trial: int) -> Runs:
    """Simulates the runs of a design, from 1e18 to 1e21 FLOPs or with about those sizes."""
    rng = np.random.default_rng(1000 + trial)
    if kind == "iso":
        flops = np.repeat(np.geomspace(1e18, 1e21, budgets), sizes)
        N = np.sqrt(flops / 120) * np.tile(np.geomspace(1 / 8, 8, sizes), budgets)
        D = flops / 6 / N
    else:
        N, D = np.exp(rng.uniform(np.log([[5e7], [5e8]]), np.log([[1e10], [3e11]]), (2, budgets * sizes)))
    loss = TRUE_LAW.loss(N, D) * np.exp(noise * rng.standard_normal(len(N)))
    return Runs(tuple(map(str, range(len(N)))), N, D, loss, 6 * N * D)


def covers(design: tuple[str, int, int, float], draws: int, trial: int) -> list[bool]:
    """Returns, for each constant, whether its interval contains the true value."""
    fit = fit_scaling_law(simulate_runs(*design, trial), bootstrap_samples=draws, seed=trial)
    constants = fit_as_dict(fit)
    return [constants[name]["low"] <= getattr(TRUE_LAW, name) <= constants[name]["high"] for name in CONSTANTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--designs", type=int, nargs="*", default=list(range(len(DESIGNS))), help="indices of the designs to run"
    )
    options = parser.parse_args()
    failed = False
    with ProcessPoolExecutor(options.processes) as pool:
        for name, design in (list(DESIGNS.items())[number] for number in options.designs):
            begin = time.perf_counter()
            covered = list(pool.map(partial(covers, design, options.draws), range(options.trials), chunksize=5))
            coverage = np.mean(covered, axis=0)
            line = ", ".join(f"{constant} {100 * value:.1f}%" for constant, value in zip(CONSTANTS, coverage))
            print(f"{name}: {line} ({time.perf_counter() - begin:.0f} s)", flush=True)
            failed = failed or not all(ALLOWED[0] <= value <= ALLOWED[1] for value in coverage)
    sys.exit(failed)


if __name__ == "__main__":
    main()
