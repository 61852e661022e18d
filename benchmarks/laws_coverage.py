"""How often the 95% intervals of `shardwise laws fit` hold the truth: runs are made from a known law with noise.

    python benchmarks/laws_coverage.py                     200 trials of each design; minutes on one core
    python benchmarks/laws_coverage.py --trials 20 --draws 100

For each design and constant: the share of trials whose interval holds the true value. Exits 1 where one is outside
of 90 to 99%. Losses have normal noise in their logarithm.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from shardwise.laws.fit import fit_scaling_law
from shardwise.laws.runs import Runs
from shardwise.laws.scaling_law import CONSTANTS, ScalingLaw

TRUTH = ScalingLaw(1.8, 480.0, 2000.0, 0.35, 0.366)
DESIGNS = {
    "iso-FLOP, 6 budgets x 7 sizes, noise 0.5%": ("iso", 6, 7, 0.005),
    "scattered, 100 runs, noise 1%": ("scattered", 10, 10, 0.01),
    "iso-FLOP, 5 budgets x 6 sizes, noise 1%": ("iso", 5, 6, 0.01),
    "iso-FLOP, 12 budgets x 20 sizes, noise 0.5%": ("iso", 12, 20, 0.005),
}
ALLOWED = 0.90, 0.99


def made(kind: str, budgets: int, sizes: int, noise: float, trial: int) -> Runs:
    """Runs of a design, from 1e18 to 1e21 FLOPs or of about those sizes."""
    chance = np.random.default_rng(1000 + trial)
    if kind == "iso":
        flops = np.repeat(np.geomspace(1e18, 1e21, budgets), sizes)
        N = np.sqrt(flops / 120) * np.tile(np.geomspace(1 / 8, 8, sizes), budgets)
        D = flops / 6 / N
    else:
        N, D = np.exp(chance.uniform(np.log([[5e7], [5e8]]), np.log([[1e10], [3e11]]), (2, budgets * sizes)))
    loss = TRUTH.loss(N, D) * np.exp(noise * chance.standard_normal(len(N)))
    return Runs(tuple(map(str, range(len(N)))), N, D, loss, 6 * N * D)


def holds(design: tuple[str, int, int, float], draws: int, trial: int) -> list[bool]:
    """For each constant, whether its interval holds the truth."""
    constants = fit_scaling_law(made(*design, trial), bootstrap_samples=draws, seed=trial).constants()
    return [constants[name]["low"] <= getattr(TRUTH, name) <= constants[name]["high"] for name in CONSTANTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--designs", type=int, nargs="*", default=list(range(len(DESIGNS))), help="which, from 0 on")
    options = parser.parse_args()
    bad = False
    with ProcessPoolExecutor(options.processes) as pool:
        for name, design in (list(DESIGNS.items())[number] for number in options.designs):
            begin = time.perf_counter()
            held = list(pool.map(partial(holds, design, options.draws), range(options.trials), chunksize=5))
            shares = np.mean(held, axis=0)
            words = ", ".join(f"{constant} {100 * share:.1f}%" for constant, share in zip(CONSTANTS, shares))
            print(f"{name}: {words} ({time.perf_counter() - begin:.0f} s)", flush=True)
            bad = bad or not all(ALLOWED[0] <= share <= ALLOWED[1] for share in shares)
    sys.exit(bad)


if __name__ == "__main__":
    main()
