"""Runs to fit a law to: from a CSV file, or from the folders of `shardwise train`.

Columns of a file, by any of these names, upper or lower case:

    parameters   parameters, params, n, n_params        tokens   tokens, d, n_tokens, training_tokens
    loss         loss, final_loss                       flops    flops, c, compute, training_flops

Two of parameters, tokens and flops are enough: the third follows from flops = 6 x parameters x tokens. Other columns
are left alone.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.job import Job
from shardwise.models.gpt_family import DecoderConfig
from shardwise.planner.costs.model_shape import shape_of
from shardwise.train.run_folder import RunFolder

Array = NDArray[np.float64]
COLUMN_ALIASES = {
    "parameters": ("parameters", "params", "n", "n_params"),
    "tokens": ("tokens", "d", "n_tokens", "training_tokens"),
    "loss": ("loss", "final_loss"),
    "flops": ("flops", "c", "compute", "training_flops"),
}
PARAMETER_COUNTS = ("all", "blocks")
FINAL_LOSS_FRACTION = (
    0.05  # share of a run's steps whose mean training loss stands for its final one, where none were held out
)


@dataclass(frozen=True)
class Runs:
    """What was measured, a place for each run."""

    names: tuple[str, ...]
    parameters: Array
    tokens: Array
    loss: Array
    flops: Array
    parameter_count: str = "all"
    """Which parameters: `all`, embeddings and head included (tied ones once), or those of the `blocks` alone."""

    def __len__(self) -> int:
        return len(self.names)

    def select(self, selection: Any) -> Runs:
        kept = np.arange(len(self))[selection]
        columns = (self.parameters[kept], self.tokens[kept], self.loss[kept], self.flops[kept])
        return Runs(tuple(self.names[index] for index in kept), *columns, self.parameter_count)


def read_runs(paths: Sequence[Path], parameter_count: str = "all") -> Runs:
    """Runs from one CSV file, or from run folders and folders that hold some."""
    check_parameter_count(parameter_count)
    if len(paths) == 1 and not paths[0].is_dir():
        return read_csv(paths[0], parameter_count)
    folders = [folder for path in paths for folder in _run_folders(path)]
    if not folders:
        raise DataError(f"{', '.join(map(str, paths))}: no run folder in there (a run folder has a job.toml).")
    return _runs_from_rows([_read_run(folder, parameter_count) for folder in folders], parameter_count)


def _runs_from_rows(rows: Sequence[tuple[str, float, float, float, float]], parameter_count: str) -> Runs:
    names = tuple(name for name, *_ in rows)
    parameters, tokens, loss, flops = np.array([values for _, *values in rows], dtype=float).T
    return Runs(names, parameters, tokens, loss, flops, parameter_count)


# A file


def read_csv(path: Path, parameter_count: str = "all") -> Runs:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except FileNotFoundError:
        raise DataError(f"there is no file or folder {path}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}.") from None
    if len(lines) < 2:
        raise DataError(f"{path} holds no runs: a first line with column names and a line for each run belong there.")
    columns = _find_columns(path, lines[0])
    return _runs_from_rows(
        [_parse_row(path, number, line, columns) for number, line in enumerate(lines[1:], start=2) if line],
        parameter_count,
    )


def _find_columns(path: Path, header: Sequence[str]) -> dict[str, int]:
    """Where each quantity stands."""
    column_names = [column.strip().lower() for column in header]
    columns: dict[str, int] = {}
    for quantity, names in COLUMN_ALIASES.items():
        matches = [index for index, column in enumerate(column_names) if column in names]
        if len(matches) > 1:
            raise DataError(
                f"{path}: columns {header[matches[0]]!r} and {header[matches[1]]!r} both say {quantity}; keep one."
            )
        if matches:
            columns[quantity] = matches[0]
    sizes = [quantity for quantity in ("parameters", "tokens", "flops") if quantity in columns]
    if "loss" not in columns or len(sizes) < 2:
        missing = "loss" if "loss" not in columns else "two of parameters, tokens and flops"
        raise DataError(f"{path} has no column for {missing}; its columns are {', '.join(header)}.")
    return columns


def _parse_row(
    path: Path, number: int, line: Sequence[str], columns: dict[str, int]
) -> tuple[str, float, float, float, float]:
    values = {}
    for quantity, index in columns.items():
        text = line[index].strip() if index < len(line) else ""
        try:
            values[quantity] = float(text)
        except ValueError:
            reason = f"{text!r} is no number" if text else "the value is missing"
            raise DataError(f"{path}, line {number}, column {quantity}: {reason}.") from None
        if not (math.isfinite(values[quantity]) and values[quantity] > 0):
            raise DataError(
                f"{path}, line {number}, column {quantity}: {text} is not above 0 and finite, as it must be."
            )
    if "parameters" not in values:
        values["parameters"] = values["flops"] / 6 / values["tokens"]
    if "tokens" not in values:
        values["tokens"] = values["flops"] / 6 / values["parameters"]
    flops = values.get("flops", 6 * values["parameters"] * values["tokens"])
    return f"line {number}", values["parameters"], values["tokens"], values["loss"], flops


# Run folders


def _run_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"{path} is no folder; give one CSV file, or run folders alone.")
    if (path / "job.toml").is_file():
        return [path]
    return sorted(job.parent for job in path.glob("*/job.toml"))


def _read_run(path: Path, parameter_count: str) -> tuple[str, float, float, float, float]:
    folder = RunFolder.open(path)
    job = folder.job()
    model = job.require_decoder()
    loss, samples = _final_loss_and_samples(folder, job)
    flops = shape_of(model).flops(1) * samples
    return path.name, float(count_parameters(model, parameter_count)), float(samples * model.sequence), loss, flops


def _final_loss_and_samples(folder: RunFolder, job: Job) -> tuple[float, int]:
    """The loss at a run's end and the samples behind it: of held-out samples, or of its last steps where none are."""
    records = [record for record in folder.metrics() if isinstance(record.get("loss"), float)]
    if not records or records[-1].get("step") != job.total_steps:
        done = records[-1].get("step", 0) if records else 0
        raise DataError(
            f"{folder.path} is not finished: {done} of {job.total_steps} steps have a finite loss; "
            f"go on with `shardwise train --resume {folder.path}` or leave it out."
        )
    held_out = [event["loss"] for event in folder.events()
                if event.get("event") == "validation" and event.get("step") == job.total_steps]  # fmt: skip
    last = records[-max(1, round(FINAL_LOSS_FRACTION * len(records))) :]
    loss = held_out[-1] if held_out else sum(record["loss"] for record in last) / len(last)
    return float(loss), int(records[-1]["samples"])


def check_parameter_count(parameter_count: str) -> None:
    if parameter_count not in PARAMETER_COUNTS:
        raise DataError(f"--count {parameter_count!r}: it is {' or '.join(map(repr, PARAMETER_COUNTS))}.")


def count_parameters(model: DecoderConfig, parameter_count: str) -> int:
    """Parameters as the planner counts them (norms and biases left out), with or without embeddings and head."""
    shape = shape_of(model)
    if parameter_count == "all":
        return shape.parameters
    return shape.parameters - shape.embedding_weights - (0 if shape.tied else shape.vocab * shape.width)
