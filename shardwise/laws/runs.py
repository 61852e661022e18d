"""Reads the runs to fit a law to, from a CSV file or from run folders of `shardwise train`.

A CSV file has these columns, under any of these names, in upper or lower case:

    parameters   parameters, params, n, n_params        tokens   tokens, d, n_tokens, training_tokens
    loss         loss, final_loss                       flops    flops, c, compute, training_flops

Two of parameters, tokens and flops are enough: the third follows from flops = 6 x parameters x tokens. Other columns
are ignored.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.files import malformed_as_data_error
from shardwise.job import Job
from shardwise.models.gpt_family import DecoderConfig
from shardwise.planner.costs.model_shape import shape_of
from shardwise.train.run_folder import RunFolder

Array = NDArray[np.float64]
RunRow = tuple[str, float, float, float, float]  # name, parameters, tokens, loss, FLOPs
COLUMN_ALIASES = {
    "parameters": ("parameters", "params", "n", "n_params"), "tokens": ("tokens", "d", "n_tokens", "training_tokens"),
    "loss": ("loss", "final_loss"), "flops": ("flops", "c", "compute", "training_flops"),
}  # fmt: skip
PARAMETER_SCOPES = {"all": "including embeddings and head", "blocks": "without embeddings and head"}
FINAL_LOSS_FRACTION = 0.05  # without validation, the final loss is the mean training loss of this last part of a run


@dataclass(frozen=True)
class Runs:
    """Measured runs, one array entry per run."""

    names: tuple[str, ...]
    parameters: Array
    tokens: Array
    loss: Array
    flops: Array
    parameter_scope: str = "all"
    """Which parameters count: `all`, including embeddings and head (tied weights once), or only the `blocks`."""

    def __len__(self) -> int:
        return len(self.names)

    def select(self, selection: Any) -> "Runs":
        """Returns the runs at the given indices or mask."""
        indices = np.arange(len(self))[selection]
        columns = self.parameters[indices], self.tokens[indices], self.loss[indices], self.flops[indices]
        return Runs(tuple(self.names[index] for index in indices), *columns, self.parameter_scope)


def read_runs(paths: Sequence[Path], parameter_scope: str = "all") -> Runs:
    """Reads runs from one CSV file, or from run folders and folders that contain run folders."""
    check_parameter_scope(parameter_scope)
    if len(paths) == 1 and not paths[0].is_dir():
        return read_csv(paths[0], parameter_scope)
    folders: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise DataError(f"{path} is not a folder; give either one CSV file or run folders.")
        is_run = (path / "job.toml").is_file()
        folders += [path] if is_run else sorted(job.parent for job in path.glob("*/job.toml"))
    if not folders:
        raise DataError(f"{', '.join(map(str, paths))}: no run folder found; a run folder contains a job.toml.")
    return _runs_from_rows([_read_run(folder, parameter_scope) for folder in folders], parameter_scope)


def _runs_from_rows(rows: Sequence[RunRow], parameter_scope: str) -> Runs:
    names = tuple(name for name, *_ in rows)
    parameters, tokens, loss, flops = np.array([values for _, *values in rows], dtype=float).T
    return Runs(names, parameters, tokens, loss, flops, parameter_scope)


def read_csv(path: Path, parameter_scope: str = "all") -> Runs:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except FileNotFoundError:
        raise DataError(f"no file or folder {path}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}.") from None
    if len(lines) < 2:
        raise DataError(f"{path} contains no runs; it needs a header line and one line per run.")
    columns = _find_columns(path, lines[0])
    rows = [_parse_row(path, number, line, columns) for number, line in enumerate(lines[1:], start=2) if line]
    return _runs_from_rows(rows, parameter_scope)


def _find_columns(path: Path, header: Sequence[str]) -> dict[str, int]:
    """Returns the column index of each quantity."""
    column_names = [column.strip().lower() for column in header]
    columns: dict[str, int] = {}
    for quantity, names in COLUMN_ALIASES.items():
        matches = [index for index, column in enumerate(column_names) if column in names]
        if len(matches) > 1:
            first, second, *_ = (header[index] for index in matches)
            raise DataError(f"{path}: columns {first!r} and {second!r} both contain {quantity}; keep one.")
        if matches:
            columns[quantity] = matches[0]
    sizes = [quantity for quantity in ("parameters", "tokens", "flops") if quantity in columns]
    if "loss" not in columns or len(sizes) < 2:
        missing = "loss" if "loss" not in columns else "two of parameters, tokens and flops"
        raise DataError(f"{path} has no column for {missing}; its columns are {', '.join(header)}.")
    return columns


def _parse_row(path: Path, number: int, line: Sequence[str], columns: dict[str, int]) -> RunRow:
    values = {}
    for quantity, index in columns.items():
        text = line[index].strip() if index < len(line) else ""
        try:
            values[quantity] = float(text)
        except ValueError:
            reason = f"{text!r} is not a number" if text else "the value is missing"
            raise DataError(f"{path}, line {number}, column {quantity}: {reason}.") from None
        if not 1e-9 <= values[quantity] <= 1e40:
            raise DataError(f"{path}, line {number}, column {quantity}: {text} must be positive and at most 1e40.")
    if "parameters" not in values:
        values["parameters"] = values["flops"] / 6 / values["tokens"]
    if "tokens" not in values:
        values["tokens"] = values["flops"] / 6 / values["parameters"]
    flops = values.get("flops", 6 * values["parameters"] * values["tokens"])
    return f"line {number}", values["parameters"], values["tokens"], values["loss"], flops


def _read_run(path: Path, parameter_scope: str) -> RunRow:
    folder = RunFolder.open(path)
    job = folder.job()
    model = job.require_decoder()
    with malformed_as_data_error(path):
        loss, samples = _final_loss_and_samples(folder, job)
    flops = shape_of(model).flops(1) * samples
    return path.name, float(count_parameters(model, parameter_scope)), float(samples * model.sequence), loss, flops


def _final_loss_and_samples(folder: RunFolder, job: Job) -> tuple[float, int]:
    """Returns the final loss (validation loss, else mean over the last steps) and the number of samples trained on."""
    records = [record for record in folder.metrics() if isinstance(record.get("loss"), float)]
    if not records or records[-1].get("step") != job.total_steps:
        done = records[-1].get("step", 0) if records else 0
        raise DataError(
            f"{folder.path} is not finished: {done} of {job.total_steps} steps have a finite loss; "
            f"continue it with `shardwise train --resume {folder.path}`, or omit it."
        )
    validation_losses = [event["loss"] for event in folder.events()
                if event.get("event") == "validation" and event.get("step") == job.total_steps]  # fmt: skip
    last = records[-max(1, round(FINAL_LOSS_FRACTION * len(records))) :]
    loss = validation_losses[-1] if validation_losses else sum(record["loss"] for record in last) / len(last)
    return float(loss), int(records[-1]["samples"])


def check_parameter_scope(parameter_scope: str) -> None:
    if parameter_scope not in PARAMETER_SCOPES:
        raise DataError(f"--count {parameter_scope!r}: use {' or '.join(PARAMETER_SCOPES)}.")


def count_parameters(model: DecoderConfig, parameter_scope: str) -> int:
    """Counts parameters as the planner does (without norms and biases), with or without embeddings and head."""
    shape = shape_of(model)
    if parameter_scope == "all":
        return shape.parameters
    return shape.parameters - shape.embedding_weights - (0 if shape.tied else shape.vocab * shape.width)
