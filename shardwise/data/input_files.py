"""The files that a run reads: whether they are still the same, and what happens to records that cannot be read.

A new run records size, time and a hash of sampled content of every file in `data.json`. Each start and restart
compares. New files, and what has been appended to old ones, are not read, so the run continues with the data that it
began with; any other change is an error. The hash covers files of up to 256 KiB in full, and 16 blocks of 16 KiB of
larger ones, first and last included; a change in between shows by its time only. Of a folder of images the names and
sizes of its files are recorded, and any change is an error. Compressed files are decompressed."""

import gzip
import io
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shardwise.console import pluralize
from shardwise.errors import DataError
from shardwise.files import import_extra, os_errors_as, parse_json, write_text
from shardwise.object_store import cached_path, local_copy, original_name, parse_url

BLOCK_BYTES, BLOCKS = 16 << 10, 16
TIME_PRECISION_NS = 1_000_000  # of times of objects that were copied at different times
MAX_SHOWN = 3  # bad records or changes that a message quotes


def _open_with_arrow(kind: str, file: io.BufferedReader) -> Any:
    arrow = import_extra("pyarrow", "arrow", f"a file in {kind}'s format")
    return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file, "r"), kind), 1 << 18)


DECOMPRESSORS: dict[str, Any] = {".gz": gzip.open}
DECOMPRESSORS |= {".zst": partial(_open_with_arrow, "zstd"), ".bz2": partial(_open_with_arrow, "bz2")}


@dataclass(frozen=True)
class DataFile:
    """The first `size` bytes of a file."""

    path: Path
    size: int
    mtime_ns: int
    digest: str

    @classmethod
    def of(cls, path: Path, max_size: int | None = None) -> "DataFile":
        """Returns the file, or its first bytes, as it is now; of a folder, the names and sizes of its files."""
        if path.is_dir():
            found = sorted((str(f.relative_to(path)), f.stat().st_size) for f in path.rglob("[!.]*") if f.is_file())
            return cls(path, len(found), 0, blake2b(repr(found).encode(), digest_size=16).hexdigest())
        digest = blake2b(digest_size=16)
        with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
            stat = os.fstat(file.fileno())
            size = stat.st_size if max_size is None else min(max_size, stat.st_size)
            last = max(BLOCK_BYTES * (BLOCKS - 1), size - BLOCK_BYTES)
            for number in range(BLOCKS):
                file.seek(number * last // (BLOCKS - 1))
                digest.update(file.read(min(BLOCK_BYTES, max(0, size - file.tell()))))
        return cls(path, size, stat.st_mtime_ns, digest.hexdigest())

    def open(self) -> Any:
        return DECOMPRESSORS.get(self.path.suffix, lambda file: file)(io.BufferedReader(_Extent(self), 1 << 18))

    def change(self, compare_time: bool) -> str:
        """Returns how the file differs from what it was, apart from growth; empty if it does not."""
        if not self.path.exists():
            return f"{self.path} is missing"
        if self.path.is_dir():
            return f"the files in {self.path} have changed" * (DataFile.of(self.path).digest != self.digest)
        now, size = DataFile.of(self.path, self.size), self.path.stat().st_size
        if size > self.size and self._was_cut(now):
            name = original_name(str(self.path))
            return f"the run began with {self.size} of the {size} bytes of {name}: its copy had been cut short"
        if size < self.size:
            return f"{self.path} has {size} bytes instead of {self.size}"
        if now.digest != self.digest:
            return f"the content of {self.path} has changed"
        is_written = compare_time and size == self.size > BLOCKS * BLOCK_BYTES and now.mtime_ns != self.mtime_ns
        return f"{self.path} was written again, so its content may have changed" if is_written else ""

    def _was_cut(self, now: "DataFile") -> bool:
        """Whether the run began with a part of an object, although the object is the same: a copy has its time."""
        is_copy = original_name(str(self.path)) != str(self.path)
        return is_copy and abs(now.mtime_ns - self.mtime_ns) < TIME_PRECISION_NS


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
    samples: tuple[int, ...] = ()  # number of samples for training and for validation
    tokenizer: str = ""  # hash of the run's own tokenizer; empty if it has none
    validation_sets: dict[str, "DataRecord"] = field(default_factory=dict)  # by format and path, as in `data.mix`
    is_new: bool = True
    has_other_sets: bool = False  # whether its validation sets are others than those of the file that it was read from

    @classmethod
    def load(cls, path: Path) -> "DataRecord":
        """Returns the record of a run; a new one if the run has none."""
        try:
            values = parse_json(path.read_bytes())
            sets = {
                str(name): cls(_parse_files(one["files"], download=False), is_new=False)  # not all may be chosen
                for name, one in values.get("validation_sets", {}).items()
            }
            files, samples = _parse_files(values["files"]), tuple(map(int, values["samples"]))
            return cls(files, samples, str(values["tokenizer"]), sets, is_new=False)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise DataError(f"{path} is damaged; restore it, or delete it to record the run's data anew.") from None

    def save(self, path: Path) -> None:
        values: dict[str, Any] = {
            "files": _format_files(self.files),
            "samples": self.samples,
            "tokenizer": self.tokenizer,
        }
        if self.validation_sets:
            values["validation_sets"] = {
                name: {"files": _format_files(one.files)} for name, one in self.validation_sets.items()
            }
        write_text(path, json.dumps(values))

    def choose_sets(self, names: Collection[str]) -> None:
        """Makes the record that of these validation sets; one that it does not have yet is recorded when it is read.

        Those that a resume leaves out are forgotten: their files may go."""
        self.has_other_sets = set(names) != set(self.validation_sets)
        self.validation_sets = {name: self.validation_sets.get(name, DataRecord()) for name in names}

    def take(self, paths: Sequence[Path]) -> list[DataFile]:
        """Returns what the run reads of these files."""
        if self.is_new:
            self.files |= {str(path): DataFile.of(path) for path in paths}
        if paths and not any(str(path) in self.files for path in paths):
            raise DataError(f"{paths[0]} is not among the files that the run began with; restore the path in its job.")
        return [self.files[str(path)] for path in paths if str(path) in self.files]

    def changes(self, compare_times: bool = True, samples: tuple[int, ...] = ()) -> list[str]:
        """Returns how the files, or the numbers of samples, differ from the record."""
        changes = [] if samples else [file.change(compare_times) for file in self._all_files()]
        if samples and self.samples and not self.is_new and samples != self.samples:
            changes = ["it has {} + {} samples instead of {} + {}".format(*samples, *self.samples)]
        return [change for change in changes if change]

    def _all_files(self) -> list[DataFile]:
        """Returns the files of training and validation, each once: a set may read what training reads."""
        found = list(self.files.values())
        for one in self.validation_sets.values():
            found += [file for file in one.files.values() if file not in found]
        return found

    def check(self, run: Path, compare_times: bool = True, samples: tuple[int, ...] = ()) -> None:
        """Raises DataError if anything differs from the record."""
        changes = self.changes(compare_times, samples)
        if changes and not self.is_new:
            more = f"; and {len(changes) - MAX_SHOWN} more" if len(changes) > MAX_SHOWN else ""
            accept = f", or continue with it: shardwise train --resume {run} --accept-data-change."
            remedy = f"Restore it{'.' if all(change.endswith(' is missing') for change in changes) else accept}"
            shown = "; ".join(changes[:MAX_SHOWN])
            raise DataError(f"the data has changed since the run began: {shown}{more}. {remedy}")


def _parse_files(entries: dict[str, Any], download: bool = True) -> dict[str, DataFile]:
    """Returns the files of a saved record by path; downloads those whose copies are not here, if asked for."""
    found = [DataFile(cached_path(name), int(s), int(t), str(d)) for name, (s, t, d) in entries.items()]
    for name in entries:
        if download and parse_url(name) and not cached_path(name).exists():
            local_copy(name)
    return {str(file.path): file for file in found}


def _format_files(files: dict[str, DataFile]) -> dict[str, tuple[int, int, str]]:
    """Returns the files as a record saves them: by the name that the user gave, not that of a copy."""
    return {original_name(name): (file.size, file.mtime_ns, file.digest) for name, file in files.items()}


@dataclass
class BadRecords:
    """Unreadable records, as `data.on_bad_record` says: fail at the first one, or skip and log each."""

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
        return f"{shown}: {reason}; convert with iconv, move away, or read tables by data.mix." if names else ""

    def summary(self) -> str:
        """Returns the number of skipped records and the first few messages; empty if there are none."""
        messages = list(self.messages)
        if self.log_path is not None and self.log_path.exists():
            messages = list(dict.fromkeys(self.log_path.read_text(encoding="utf-8").splitlines()))
        if not messages:
            return ""
        more = f" And {len(messages) - MAX_SHOWN} more." if len(messages) > MAX_SHOWN else ""
        return f"{pluralize(len(messages), 'bad record')} skipped. {' '.join(messages[:MAX_SHOWN])}{more}"
