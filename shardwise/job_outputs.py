"""The sections `[validation]` and `[export]` of a job: how a model is judged while it trains, and before it leaves."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from shardwise.models.config import ConfigSection

_GATE = re.compile(r"\s*(<=|>=|<|>)\s*([-+]?[\d.]+(?:e[-+]?\d+)?)\s*", re.IGNORECASE)


class ValidationSet(ConfigSection):
    path: str
    """A file, folder or glob; its suffix or a prefix gives the format, as in `data.mix`."""
    source: str = ""
    """The format, if `path` does not give it: a value of `data.source`."""
    weight: float = Field(1.0, ge=0.0)
    """Weight of the set's loss in the validation loss."""


class ValidationConfig(ConfigSection):
    every: int = Field(0, ge=0)
    """Steps between validations; 0 validates only at the end."""
    samples: int = Field(64, ge=1, le=10**9)
    """Maximum number of held-out samples to evaluate, of each set."""
    sets: dict[str, ValidationSet] = {}
    """Sets with files of their own, by name: `code = "code.jsonl"`, or with keys: `{ path = "a.txt", weight = 2 }`. The
    validation loss is then the mean of theirs by weight."""
    patience: int = Field(0, ge=0, le=10**9)
    """End the run after this many validations in a row without a lower validation loss; 0: never."""
    keep_best: bool = False
    """Whether to keep the checkpoint with the lowest validation loss, in the folder `best`."""

    @field_validator("sets", mode="before")
    @classmethod
    def _read_paths(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: {"path": value} if isinstance(value, str) else value for name, value in values.items()}

    @model_validator(mode="after")
    def _check_sets(self) -> "ValidationConfig":
        for name in self.sets:
            if not re.fullmatch(r"[\w-]{1,40}", name) or name in ("loss", "bits_per_byte", "accuracy"):
                raise ValueError(f"sets: {name!r} is no name for a set; use letters, digits, - and _, and no metric")
        if self.sets and not any(one.weight for one in self.sets.values()):
            raise ValueError("sets: all weights are 0; give at least one set a weight")
        if self.patience and not self.every:
            raise ValueError("patience counts validations; set every as well")
        return self


class ExportConfig(ConfigSection):
    gates: dict[str, Any] = {}
    """What must hold for `shardwise export`, by metric: `validation.loss = "<= 2.1"`."""

    @model_validator(mode="after")
    def _check_gates(self) -> "ExportConfig":
        self.conditions()
        return self

    def conditions(self) -> dict[str, tuple[str, float]]:
        """Returns the gates by dotted name: the comparison and its bound."""
        return dict(_conditions(self.gates, ""))


def _conditions(values: Mapping[str, Any], prefix: str) -> Any:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _conditions(value, f"{prefix}{name}.")
        elif isinstance(value, str) and (match := _GATE.fullmatch(value)):
            yield f"{prefix}{name}", (match[1], float(match[2]))
        else:
            raise ValueError(f'gates: {prefix}{name} = {value!r} is no condition; write for example "<= 2.1"')
