"""Records that cannot be read: the first ends the run, or each is named, counted and passed over (`data.bad`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import DataError
from shardwise.words import counted

NAMED = 3  # in what is told


@dataclass
class Bad:
    skip: bool = False
    log: Path | None = None
    """Where each is written, a line each; several processes may."""
    seen: dict[str, None] = field(default_factory=dict)
    """What was told to this process, in order and each once."""

    def tell(self, error: DataError) -> None:
        """Raises, or keeps what it says."""
        if not self.skip:
            raise DataError(f'{error} With data.bad = "skip" such records are passed over.') from None
        sentence = " ".join(str(error).split())
        if sentence in self.seen:
            return
        self.seen[sentence] = None
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(sentence + "\n")

    def words(self) -> str:
        """How many, and the first of them; empty if there are none."""
        found = list(self.seen)
        if self.log is not None and self.log.exists():
            found = list(dict.fromkeys(self.log.read_text(encoding="utf-8").splitlines()))
        if not found:
            return ""
        more = f" And {len(found) - NAMED} more." if len(found) > NAMED else ""
        return f"{counted(len(found), 'bad record')} passed over. {' '.join(found[:NAMED])}{more}"
