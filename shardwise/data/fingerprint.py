"""The files that a run reads, and whether they are still the same.

A new run records size, time and a hash of sampled content of every file in `data.json`. Each start and restart
compares. New files, and what has been appended to old ones, are not read, so the run continues with the data that it
began with; any other change is an error. The hash covers files of up to 256 KiB in full, and 16 blocks of 16 KiB of
larger ones, the first and the last among them; a change between these blocks shows by its time only.
"""

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shardwise.errors import DataError
from shardwise.files import parse_json, write_text

BLOCK_BYTES, BLOCKS = 16 << 10, 16
MAX_SHOWN = 3  # changes that an error names


@dataclass(frozen=True)
class DataFile:
    """The first `size` bytes of a file."""

    path: Path
    size: int
    mtime_ns: int
    digest: str

    @classmethod
    def of(cls, path: Path, max_size: int | None = None) -> "DataFile":
        """Returns the file, or its first bytes, as it is now."""
        digest = blake2b(digest_size=16)
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                size = stat.st_size if max_size is None else min(max_size, stat.st_size)
                last = max(BLOCK_BYTES * (BLOCKS - 1), size - BLOCK_BYTES)
                for number in range(BLOCKS):
                    file.seek(number * last // (BLOCKS - 1))
                    digest.update(file.read(min(BLOCK_BYTES, max(0, size - file.tell()))))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        return cls(path, size, stat.st_mtime_ns, digest.hexdigest())

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(_Extent(self), 1 << 18)

    def change(self, compare_time: bool) -> str:
        """Returns how the file differs from what it was, apart from growth; empty if it does not."""
        if not self.path.is_file():
            return f"{self.path} is missing"
        now, size = DataFile.of(self.path, self.size), self.path.stat().st_size
        if size < self.size:
            return f"{self.path} has {size} bytes instead of {self.size}"
        if now.digest != self.digest:
            return f"the content of {self.path} has changed"
        is_written = compare_time and size == self.size > BLOCKS * BLOCK_BYTES and now.mtime_ns != self.mtime_ns
        return f"{self.path} was written again, so its content may have changed" if is_written else ""


class _Extent(io.FileIO):
    def __init__(self, extent: DataFile):
        super().__init__(extent.path)
        self._left = extent.size

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(memoryview(buffer)[: self._left]) or 0
        self._left -= count
        return count


@dataclass
class DataRecord:
    """What a run reads. A new run fills it in; a later start reads no more than it says."""

    files: dict[str, DataFile] = field(default_factory=dict)
    samples: tuple[int, ...] = ()
    """Number of samples for training and for validation."""
    tokenizer: str = ""
    """Hash of the run's own tokenizer; empty if it has none."""
    is_new: bool = True

    @classmethod
    def load(cls, path: Path) -> "DataRecord":
        """Returns the record of a run; a new one if the run has none."""
        try:
            values = parse_json(path.read_bytes())
            files = {name: DataFile(Path(name), int(s), int(t), str(d)) for name, (s, t, d) in values["files"].items()}
            return cls(files, tuple(map(int, values["samples"])), str(values["tokenizer"]), is_new=False)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise DataError(f"{path} is damaged; restore it, or delete it to record the run's data anew.") from None

    def save(self, path: Path) -> None:
        files = {name: (file.size, file.mtime_ns, file.digest) for name, file in self.files.items()}
        write_text(path, json.dumps({"files": files, "samples": self.samples, "tokenizer": self.tokenizer}))

    def take(self, paths: Sequence[Path]) -> list[DataFile]:
        """Returns what the run reads of these files."""
        if self.is_new:
            self.files |= {str(path): DataFile.of(path) for path in paths}
        if not any(str(path) in self.files for path in paths):
            raise DataError(f"{paths[0]} is not among the files that the run began with; restore data.path in its job.")
        return [self.files[str(path)] for path in paths if str(path) in self.files]

    def changes(self, compare_times: bool = True, samples: tuple[int, ...] = ()) -> list[str]:
        """Returns how the files, or the numbers of samples, differ from the record."""
        changes = [] if samples else [file.change(compare_times) for file in self.files.values()]
        if samples and self.samples and not self.is_new and samples != self.samples:
            changes = ["it has {} + {} samples instead of {} + {}".format(*samples, *self.samples)]
        return [change for change in changes if change]

    def check(self, run: Path, compare_times: bool = True, samples: tuple[int, ...] = ()) -> None:
        """Raises DataError if anything differs from the record."""
        changes = self.changes(compare_times, samples)
        if changes and not self.is_new:
            more = f"; and {len(changes) - MAX_SHOWN} more" if len(changes) > MAX_SHOWN else ""
            raise DataError(
                f"the data has changed since the run began: {'; '.join(changes[:MAX_SHOWN])}{more}. Restore it, or "
                f"continue with the changed data: shardwise train --resume {run} --accept-data-change."
            )
