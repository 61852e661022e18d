"""The full scaling-law workflow on one machine: design small runs, train them, fit a law, predict a larger run.

    python examples/laws/loop.py                   about ten minutes on two CPU cores
    python examples/laws/loop.py --plot law.svg    also plots the fit

Trains twelve decoders of 10 to 114 thousand parameters on the source code of Python's standard library, byte by byte,
at three budgets. The law fitted to them must predict the loss of a thirteenth run, with three times the largest budget,
within 3%. Finished runs are not repeated, unfinished ones resume. Exits with 1 if the prediction is off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardwise.errors import DataError
from shardwise.files import write_text
from shardwise.laws.budget import design_grid, prediction_interval, write_grid
from shardwise.laws.fit import fit_as_dict, fit_scaling_law, fit_text, parse_fitted_law, read_runs

GRID = {"low": 5e10, "high": 3e11, "budgets": 3, "sizes": 4, "spread": 2.0}
LARGEST = 9e11
SETTINGS = [
    "model.sequence=32", "validation.samples=2048", "layout=replicate=1", "data.source=stdlib", "run.device=cpu",
]  # fmt: skip
ALLOWED = 0.03
TOOLS = Path(__file__).resolve().parents[2] / "tools"


def train(path: Path, folder: Path) -> None:
    """Trains or resumes one run in its own process."""
    started = (folder / "job.toml").exists()
    if started and finished(folder):
        print(f"{folder} is already trained", flush=True)
        return
    command = [sys.executable, "-m", "shardwise", "train", *(["--resume", str(folder)] if started else [str(path)])]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(result.stdout)
    print(f"{folder} trained", flush=True)


def finished(folder: Path) -> bool:
    try:
        return bool(read_runs([folder]))
    except DataError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/laws"), help="folder for job files and runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and sample order")
    parser.add_argument("--plot", type=Path, help="SVG file for the plot")
    options = parser.parse_args()
    folder: Path = options.folder
    settings = [*SETTINGS, f"seed={options.seed}"]
    grid = design_grid(**GRID, settings=settings, parameter_scope="all", folder=folder)  # type: ignore[arg-type]
    jobs = [*design_grid(LARGEST, LARGEST, 1, 1, 1.0, settings, "all", folder), *grid]
    write_grid(jobs)
    largest, *run_folders = (Path(job.job.run.folder) for job in jobs)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, [job.path for job in jobs], [largest, *run_folders]))

    fit = fit_scaling_law(read_runs(run_folders))
    values = fit_as_dict(fit)
    write_text(folder / "law.json", json.dumps(values) + "\n")
    print(fit_text(values))
    if options.plot:
        sys.path.append(str(TOOLS))
        from plot_law import draw_fit

        options.plot.write_text(draw_fit(fit, "Scaling law of tiny decoders on the standard library's text"))
    run = read_runs([largest])
    N, D, loss = float(run.parameters[0]), float(run.tokens[0]), float(run.loss[0])
    predicted = float(fit.law.loss(N, D))
    low, high = prediction_interval(parse_fitted_law(values, "the grid"), N, D)
    print(f"largest run: {N:,.0f} parameters, {D:,.0f} tokens: loss {loss:.4f}")
    prediction = f"predicted from the {len(fit.runs)} other runs: {predicted:.4f} (95%: {low:.4f} to {high:.4f})"
    print(f"{prediction}, error {predicted / loss - 1:+.2%}")
    sys.exit(abs(predicted / loss - 1) > ALLOWED)


if __name__ == "__main__":
    main()
