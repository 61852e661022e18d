"""Progress display of rank 0: one live line on a terminal, about ten plain lines otherwise."""

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardwise.console import print_line

HIDDEN_EVENTS = {"checkpoint"}  # too frequent to print


class Progress:
    def __init__(self, total: int, enabled: bool, unit: str = "tokens"):
        self.total, self.enabled, self.unit = total, enabled, unit
        self.console = Console(highlight=False)
        self.is_terminal = enabled and self.console.file.isatty()
        self._live: Live | None = None
        self._start: tuple[int, float] | None = None  # first step seen, and when

    def update(self, record: dict[str, Any]) -> None:
        if not self.enabled:
            return
        done = record["step"]
        if self._start is None:
            self._start = (done, time.monotonic())
        line = self._line(record)
        if self.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, refresh_per_second=8, transient=False)
                self._live.start()
            self._live.update(Text(line))
        elif done == 1 or done == self.total or done % max(1, self.total // 10) == 0:
            print_line(line)

    def _line(self, record: dict[str, Any]) -> str:
        done = record["step"]
        assert self._start is not None
        steps, seconds = done - self._start[0], time.monotonic() - self._start[1]
        remaining = f"{_format_duration((self.total - done) * seconds / steps)} left" if steps else ""
        loss = record["loss"] if isinstance(record["loss"], str) else f"{record['loss']:.4f}"
        step = f"step {done:>{len(str(self.total))}}/{self.total}"
        return f"{step}  loss {loss}  {record['tokens_per_s']:,.0f} {self.unit}/s  {remaining}".rstrip()

    def print_event(self, kind: str, message: str) -> None:
        if not self.enabled or kind in HIDDEN_EVENTS:
            return
        if self.is_terminal:
            self.console.print(f"{kind}: {message}", markup=False, soft_wrap=True)  # above the live line
        else:
            print_line(f"{kind}: {message}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _format_duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
