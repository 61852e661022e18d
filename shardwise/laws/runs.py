"""Reads the runs to fit a law to, from a CSV file or from run folders of `shardwise train`.

A CSV file has the columns of `COLUMN_NAMES`, in upper or lower case; others are ignored. Two of parameters, tokens and
flops are enough: the third follows from flops = 6 x parameters x tokens.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import DataError
from shardwise.files import malformed_as_data_error
from shardwise.models.gpt_family import DecoderConfig
from shardwise.planner.costs.model_shape import shape_of
from shardwise.train.run_folder import RunFolder

Array = NDArray[np.float64]
RunRow = tuple[str, float, float, float, float]  # name, parameters, tokens, loss, FLOPs
QUANTITIES = ("parameters", "tokens", "loss", "flops")
COLUMN_NAMES = {
    "parameters": "parameters", "params": "parameters", "n": "parameters", "n_params": "parameters",
    "tokens": "tokens", "d": "tokens", "n_tokens": "tokens", "training_tokens": "tokens",
    "loss": "loss", "final_loss": "loss",
    "flops": "flops", "c": "flops", "compute": "flops", "training_flops": "flops",
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
        indices = np.arange(len(self))[selection]
        columns = {quantity: getattr(self, quantity)[indices] for quantity in QUANTITIES}
        return replace(self, names=tuple(self.names[index] for index in indices), **columns)


def read_runs(paths: Sequence[Path], parameter_scope: str = "all") -> Runs:
    """Reads runs from one CSV file, or from run folders and folders that contain run folders."""
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
    names, parameters, tokens, loss, flops = zip(*rows)
    return Runs(names, np.array(parameters), np.array(tokens), np.array(loss), np.array(flops), parameter_scope)


def read_csv(path: Path, parameter_scope: str = "all") -> Runs:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header, *lines = list(csv.reader(file)) or [[]]
    except FileNotFoundError:
        raise DataError(f"no file or folder {path}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}.") from None
    if not any(lines):
        raise DataError(f"{path} contains no runs; it needs a header line and one line per run.")
    columns: dict[str, int] = {}
    for index, column in enumerate(header):
        quantity = COLUMN_NAMES.get(column.strip().lower(), "")
        if quantity in columns:
            first = header[columns[quantity]]
            raise DataError(f"{path}: columns {first!r} and {column!r} both contain {quantity}; keep one.")
        if quantity:
            columns[quantity] = index
    if "loss" not in columns or len(columns) < 3:
        missing = "loss" if "loss" not in columns else "two of parameters, tokens and flops"
        raise DataError(f"{path} has no column for {missing}; its columns are {', '.join(header)}.")
    rows = [_parse_row(path, number, line, columns) for number, line in enumerate(lines, start=2) if line]
    return _runs_from_rows(rows, parameter_scope)


def _parse_row(path: Path, number: int, line: Sequence[str], columns: dict[str, int]) -> RunRow:
    values: dict[str, float] = {}
    for quantity, index in columns.items():
        text = line[index].strip() if index < len(line) else ""
        try:
            values[quantity] = float(text)
        except ValueError:
            reason = f"{text!r} is not a number" if text else "the value is missing"
            raise DataError(f"{path}, line {number}, column {quantity}: {reason}.") from None
        if not 1e-9 <= values[quantity] <= 1e40:
            raise DataError(f"{path}, line {number}, column {quantity}: {text} must be positive and at most 1e40.")
    N = values.get("parameters") or values["flops"] / 6 / values["tokens"]
    D = values.get("tokens") or values["flops"] / 6 / N
    return f"line {number}", N, D, values["loss"], values.get("flops", 6 * N * D)


def _read_run(path: Path, parameter_scope: str) -> RunRow:
    """Reads a finished run; its loss is the final validation loss, else the mean over the last steps."""
    folder = RunFolder.open(path)
    job = folder.job()
    model, last_step = job.require_decoder(), job.total_steps
    with malformed_as_data_error(path):
        records = [record for record in folder.metrics() if isinstance(record.get("loss"), float)]
        done = records[-1].get("step", 0) if records else 0
        if done != last_step:
            raise DataError(
                f"{path} is not finished: {done} of {last_step} steps have a finite loss; "
                f"continue it with `shardwise train --resume {path}`, or omit it."
            )
        validations = [event for event in folder.events() if event.get("event") == "validation"]
        measured = [event for event in validations if event.get("step") == last_step][-1:]
        measured = measured or records[-max(1, round(FINAL_LOSS_FRACTION * len(records))) :]
        loss, samples = float(np.mean([record["loss"] for record in measured])), int(records[-1]["samples"])
    parameters, tokens = count_parameters(model, parameter_scope), samples * model.sequence
    return path.name, float(parameters), float(tokens), loss, shape_of(model).flops(1) * samples


def count_parameters(model: DecoderConfig, parameter_scope: str) -> int:
    """Counts parameters as the planner does (without norms and biases), with or without embeddings and head."""
    shape = shape_of(model)
    if parameter_scope == "all":
        return shape.parameters
    return shape.parameters - shape.embedding_weights - (0 if shape.tied else shape.vocab * shape.width)
