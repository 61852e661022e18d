"""The files that a run reads, and whether they are still the same.

A new run records size, time and a hash of sampled content of every file in `data.json`. Each start and restart
compares. New files, and what has been appended to old ones, are not read, so the run continues with the data that it
began with; any other change is an error. The hash covers files of up to 256 KiB in full, and 16 blocks of 16 KiB of
larger ones, the first and the last among them; a change between these blocks shows by its time only.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from shardwise.errors import DataError
from shardwise.files import write_text

BLOCK_BYTES, BLOCKS = 16 << 10, 16
MAX_SHOWN = 3  # changed files that an error names


@dataclass(frozen=True)
class DataFile:
    """The first `size` bytes of a file."""

    path: Path
    size: int
    mtime_ns: int
    digest: str

    @classmethod
    def of(cls, path: Path, max_size: int | None = None) -> DataFile:
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


class _Extent(io.RawIOBase):
    def __init__(self, extent: DataFile):
        self._file, self._left = extent.path.open("rb", buffering=0), extent.size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(memoryview(buffer)[: self._left]) or 0
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


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
    def load(cls, path: Path) -> DataRecord:
        """Returns the record of a run; a new one if the run has none."""
        try:
            values = json.loads(path.read_bytes())
            files = {name: DataFile(Path(name), int(s), int(t), str(d)) for name, (s, t, d) in values["files"].items()}
            return cls(files, tuple(map(int, values["samples"])), str(values["tokenizer"]), is_new=False)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DataError(f"{path}, the record of the data that the run reads, is damaged; restore it.") from None

    def save(self, path: Path) -> None:
        files = {name: (file.size, file.mtime_ns, file.digest) for name, file in self.files.items()}
        write_text(path, json.dumps({"files": files, "samples": self.samples, "tokenizer": self.tokenizer}))

    def take(self, paths: Sequence[Path]) -> list[DataFile]:
        """Returns what the run reads of these files."""
        if self.is_new:
            self.files |= {str(path): DataFile.of(path) for path in paths}
        taken = [self.files[str(path)] for path in paths if str(path) in self.files]
        if not taken:
            raise DataError(
                f"the run did not read {paths[0]} or any file beside it when it began, but "
                f"{next(iter(self.files), 'none')}; restore data.path in its job.toml, or pass --accept-data-change."
            )
        return taken

    def changes(self, compare_times: bool = True) -> list[str]:
        """Returns how the files differ from the record, apart from growth."""
        problems = (_describe_change(file, compare_times) for file in self.files.values())
        return [problem for problem in problems if problem]

    def check(self, run: Path, compare_times: bool = True) -> None:
        """Raises DataError if the files differ from the record."""
        _raise_changed(run, [] if self.is_new else self.changes(compare_times))

    def check_samples(self, run: Path, *samples: int) -> None:
        """Raises DataError if the sources, which may be the user's own, have other numbers of samples."""
        expected = self.samples if not self.is_new and self.samples else samples
        problem = f"it has {samples[0]} + {samples[1]} samples instead of {expected[0]} + {expected[-1]}"
        _raise_changed(run, [problem] if samples != expected else [])


def _raise_changed(run: Path, problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        raise DataError(
            f"the data has changed since the run began: {'; '.join(problems[:MAX_SHOWN])}{more}. Restore it, or "
            f"continue with the changed data: shardwise train --resume {run} --accept-data-change."
        )


def _describe_change(recorded: DataFile, compare_times: bool) -> str:
    if not recorded.path.is_file():
        return f"{recorded.path} is missing"
    now, size = DataFile.of(recorded.path, recorded.size), recorded.path.stat().st_size
    if size < recorded.size:
        return f"{recorded.path} has {size} bytes instead of {recorded.size}"
    if now.digest != recorded.digest:
        return f"the content of {recorded.path} has changed"
    is_sampled = recorded.size > BLOCKS * BLOCK_BYTES
    if compare_times and is_sampled and size == recorded.size and now.mtime_ns != recorded.mtime_ns:
        return f"{recorded.path} was written again, so its content may have changed"
    return ""
