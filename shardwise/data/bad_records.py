"""Records that cannot be read: the first ends the run, or each is named, counted and passed over (`data.on_bad_record`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardwise.console import pluralize
from shardwise.errors import DataError

MAX_SHOWN = 3  # in what is told


@dataclass
class BadRecords:
    skip: bool = False
    log_path: Path | None = None
    """Where each is written, a line each; several processes may."""
    messages: dict[str, None] = field(default_factory=dict)
    """What was told to this process, in order and each once."""

    def report(self, error: DataError) -> None:
        """Raises, or keeps what it says."""
        if not self.skip:
            raise DataError(f'{error} With data.on_bad_record = "skip" such records are passed over.') from None
        message = " ".join(str(error).split())
        if message in self.messages:
            return
        self.messages[message] = None
        if self.log_path is not None:
            with self.log_path.open("a", encoding="utf-8") as file:
                file.write(message + "\n")

    def summary(self) -> str:
        """How many, and the first of them; empty if there are none."""
        messages = list(self.messages)
        if self.log_path is not None and self.log_path.exists():
            messages = list(dict.fromkeys(self.log_path.read_text(encoding="utf-8").splitlines()))
        if not messages:
            return ""
        more = f" And {len(messages) - MAX_SHOWN} more." if len(messages) > MAX_SHOWN else ""
        return f"{pluralize(len(messages), 'bad record')} passed over. {' '.join(messages[:MAX_SHOWN])}{more}"
