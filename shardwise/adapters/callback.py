"""Callbacks: what a user's code is told during training, in the process of rank 0."""

from typing import Any


class Callback:
    """Does nothing; override what you need."""

    def on_start(self, step: int) -> None:
        """Called before the first step, and after a restart, with the step that training continues from."""

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Called after each step with its row of `metrics.jsonl`."""

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Called after each validation with loss and metrics."""

    def on_checkpoint(self, step: int) -> None:
        """Called when a checkpoint is being saved."""

    def on_end(self, step: int) -> None:
        """Called after the last step."""
