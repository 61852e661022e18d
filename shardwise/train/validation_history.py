"""The validation losses of a run, and what follows from them: which step is the best, and when to end.

The history is what the rows of metrics.jsonl say, since the last resume that changed what is validated: losses of other
samples do not compare. A run that falls back to an earlier step reads it again, so that no loss of the steps that it
takes again is counted twice, or counts although it never came back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


def is_lower(loss: float, than: float) -> bool:
    """Whether a loss is the better one of two; a loss that is no number is worse than any that is one."""
    if math.isnan(than):
        return not math.isnan(loss)
    return loss < than


@dataclass
class ValidationHistory:
    """The losses in the order of their steps."""

    losses: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[float]]) -> "ValidationHistory":
        """Returns a history of pairs of step and loss, as JSON brings them to the other ranks."""
        return cls([(int(step), float(loss)) for step, loss in rows])

    def add(self, step: int, loss: float) -> None:
        self.losses.append((step, loss))

    @property
    def lowest(self) -> tuple[int, float] | None:
        """The first step with the lowest loss, and that loss; None before the first validation."""
        found: tuple[int, float] | None = None
        for step, loss in self.losses:
            if found is None or is_lower(loss, found[1]):
                found = step, loss
        return found

    @property
    def since_lowest(self) -> int:
        """The number of validations after the lowest one."""
        if self.lowest is None:
            return 0
        return len(self.losses) - 1 - self.losses.index(self.lowest)

    def is_out_of_patience(self, patience: int) -> bool:
        """Whether the last `patience` validations were no lower than one before them; 0 waits for ever."""
        return 0 < patience <= self.since_lowest

    def loss_at(self, step: int) -> float | None:
        """Returns the loss of a step; None if it was not validated."""
        return dict(self.losses).get(step)
