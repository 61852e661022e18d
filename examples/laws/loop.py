"""The whole loop on this machine: designs small runs, trains them, fits a law, and holds it against a larger run.

    python examples/laws/loop.py                   about ten minutes on two CPU cores
    python examples/laws/loop.py --plot law.svg    draws the fit too

Twelve decoders of 10 to 114 thousand parameters learn the text of Python's standard library, byte by byte, at three
budgets. The law fitted to them must foretell the loss of a thirteenth run, whose budget is three times the largest
of theirs, within 3%. Runs that are finished are not trained again, others go on. Ends with 1 if the law is off.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardwise.errors import DataError
from shardwise.laws.command import fit_text
from shardwise.laws.fit import fit_scaling_law
from shardwise.laws.fitted_law import to_fitted_law
from shardwise.laws.isoflop_grid import design_grid, write_grid
from shardwise.laws.plot import write_plot
from shardwise.laws.recommend import prediction_interval
from shardwise.laws.runs import read_runs

GRID = {"low": 5e10, "high": 3e11, "budgets": 3, "sizes": 4, "spread": 2.0}
LARGEST = 9e11
SETTINGS = [
    "model.sequence=32", "validation.samples=2048", "layout=replicate=1", "data.source=stdlib", "run.device=cpu",
]  # fmt: skip
ALLOWED = 0.03


def train(path: Path, folder: Path) -> None:
    """One run, in a process of its own."""
    begun = (folder / "job.toml").exists()
    if begun and finished(folder):
        print(f"{folder} is there already", flush=True)
        return
    command = [sys.executable, "-m", "shardwise", "train", *(["--resume", str(folder)] if begun else [str(path)])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    print(f"{folder} trained", flush=True)


def finished(folder: Path) -> bool:
    try:
        return bool(read_runs([folder]))
    except DataError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/laws"), help="for job files and runs")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of samples")
    parser.add_argument("--plot", type=Path, help="an SVG file for the drawing")
    options = parser.parse_args()
    folder: Path = options.folder
    settings = [*SETTINGS, f"seed={options.seed}"]
    grid = design_grid(**GRID, family="gpt", settings=settings, parameter_count="all", folder=folder)  # type: ignore[arg-type]
    (largest,) = design_grid(LARGEST, LARGEST, 1, 1, 1.0, "gpt", settings, "all", folder)
    jobs = [largest, *grid]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, write_grid(jobs, folder), [folder / "runs" / one.name for one in jobs]))

    places = [folder / "runs" / one.name for one in grid]
    print(fit_text(places, None, 400, 0, "all", folder / "law.json", None, False))
    found = fit_scaling_law(read_runs(places))
    if options.plot:
        write_plot(found, options.plot, "Scaling law of tiny decoders on the standard library's text")
    run = read_runs([folder / "runs" / largest.name])
    N, D, loss = float(run.parameters[0]), float(run.tokens[0]), float(run.loss[0])
    said = float(found.law.loss(N, D))
    low, high = prediction_interval(to_fitted_law(found, "the grid"), N, D)
    print(f"largest run: {N:,.0f} parameters, {D:,.0f} tokens: loss {loss:.4f}")
    words = f"the law of the {len(found.runs)} others says {said:.4f} (95%: {low:.4f} to {high:.4f})"
    print(f"{words}: {said / loss - 1:+.2%}")
    sys.exit(abs(said / loss - 1) > ALLOWED)


if __name__ == "__main__":
    main()
