"""Handles unreadable records as `data.on_bad_record` says: fail at the first one, or skip and log each."""

from dataclasses import dataclass, field
from pathlib import Path

from shardwise.console import pluralize
from shardwise.errors import DataError

MAX_SHOWN = 3  # bad records that a summary quotes


@dataclass
class BadRecords:
    skip: bool = False
    log_path: Path | None = None  # file that every process appends its bad records to, one per line
    messages: dict[str, None] = field(default_factory=dict)  # messages of this process, in order and without duplicates
    skipped_files: dict[str, None] = field(default_factory=dict)  # files of a folder that are not text

    def report(self, error: DataError) -> None:
        """Raises the error, or records its message if bad records are skipped."""
        if not self.skip:
            raise DataError(f'{error} With data.on_bad_record = "skip" such records are skipped.') from None
        message = " ".join(str(error).split())
        if message in self.messages:
            return
        self.messages[message] = None
        if self.log_path is not None:
            with self.log_path.open("a", encoding="utf-8") as file:
                file.write(message + "\n")

    def skipped_text(self) -> str:
        """Returns a sentence about files that are not text; empty if there are none."""
        names, count = list(self.skipped_files), len(self.skipped_files)
        shown = ", ".join(names[:MAX_SHOWN]) + (f" and {count - MAX_SHOWN} more" if count > MAX_SHOWN else "")
        reason = "not UTF-8 text, so the run does not read them" if count > 1 else "not UTF-8 text, so it is not read"
        return f"{shown}: {reason}; convert with iconv, or move out of data.path." if names else ""

    def summary(self) -> str:
        """Returns the number of skipped records and the first few messages; empty if there are none."""
        messages = list(self.messages)
        if self.log_path is not None and self.log_path.exists():
            messages = list(dict.fromkeys(self.log_path.read_text(encoding="utf-8").splitlines()))
        if not messages:
            return ""
        more = f" And {len(messages) - MAX_SHOWN} more." if len(messages) > MAX_SHOWN else ""
        return f"{pluralize(len(messages), 'bad record')} skipped. {' '.join(messages[:MAX_SHOWN])}{more}"
