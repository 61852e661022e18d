"""The run folder, files that stay valid after a crash (docs/reference/run-folder.md), and what a resume requires."""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tomli_w

from shardwise.data.input_files import BadRecords, DataRecord
from shardwise.data.make_sources import Sources, make_sources
from shardwise.data.sample_stream import Source
from shardwise.data.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_fingerprint
from shardwise.errors import CheckpointError, DataError, JobError, RunError
from shardwise.files import atomic_write, create_text, parse_json, parse_record, user_path, write_text
from shardwise.job import Job, load_job
from shardwise.object_store import ObjectStore, parse_url
from shardwise.run_job import check_job_file, has_job_file
from shardwise.train.checkpoint_folder import list_checkpoints, read_manifest, valid_checkpoints
from shardwise.train.run_store import NAMES, RunStore, fetch_run, local_folder

DISK_FULL_TIMEOUT = 5.0  # seconds to wait for space on a full disk: a checkpoint that did not fit gets removed
TOKENIZER_FILES, RESUMABLE_KEYS = NAMES["tokenizer_files"], NAMES["resumable_keys"]
# Of the keys that --resume may change, those on which the losses of a run depend, or the step at which it ends.
RESULT_KEYS = ("steps", "tokens", "validation.*")
# Keys that a checkpoint does not record: the record of the data and the run's own tokenizer say more than paths.
UNRECORDED_KEYS = (*RESUMABLE_KEYS, "run.*", "data.path", "data.tokenizer")


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copies those of a folder that another one lacks, byte by byte."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and not (target / name).exists():
            with atomic_write(target / name) as file:  # a part of it would be taken for the whole by every resume
                file.write((source / name).read_bytes())


class RunFolder:
    def __init__(self, path: Path):
        self.path, self.checkpoints, self.errors = path, path / "checkpoints", path / "errors"
        self.best = path / "best"  # the checkpoint with the lowest validation loss (`validation.keep_best`)
        self.tokenizer, self._preferences = path / "tokenizer.json", path / "preferences.json"
        self.bad_records_path = path / "bad-records.txt"

    @classmethod
    def create(cls, job: Job) -> "RunFolder":
        """Creates the folder of a job: `run.folder`, or the next number in `runs/`."""
        try:
            if url := parse_url(job.run.folder):
                folder = cls(local_folder(url))
                RunStore(folder.path).begin(job.to_toml())
            else:
                folder = cls(Path(job.run.folder) if job.run.folder else _make_next_folder(Path("runs")))
            folder.path.mkdir(parents=True, exist_ok=True)
            try:
                # Of several processes at once, one gets the folder.
                create_text(folder.path / "job.toml", job.to_toml())
            except FileExistsError:
                check_job_file(folder.path)
                raise JobError(
                    f"run.folder = {str(folder.path)!r} already has a run; "
                    f"`shardwise train --resume {folder.path}` goes on with it; or choose another folder."
                ) from None
        except OSError as error:
            raise JobError(f"cannot create the run folder: {error}.") from None
        return folder

    @classmethod
    def open(cls, path: Path, weights: bool = False, step: int | None = None) -> "RunFolder":
        """Opens a run; of one in an object store, a copy to read, with its checkpoint (of `step`) if `weights`."""
        local = fetch_run(path, weights, step)
        check_job_file(local, parse_url(path) or path)
        return cls(local)

    @staticmethod
    def exists(path: str) -> bool:
        """Whether a folder or URL has a run."""
        url = parse_url(path)
        return ObjectStore(url).read("job.toml") is not None if url else has_job_file(Path(path))

    @property
    def place(self) -> str:
        """What the user calls this run: the folder, or the URL of which it is a copy."""
        return store.url if (store := RunStore.of(self.path)) else str(self.path)

    def job(self) -> Job:
        check_job_file(self.path, self.place)  # `open` has not seen what was copied from a store later
        return load_job(self.path / "job.toml")

    def data_record(self) -> DataRecord:
        return DataRecord.load(self.path / "data.json")

    def save_data_record(self, record: DataRecord) -> None:
        record.save(self.path / "data.json")

    def sources(self, job: Job, record: DataRecord | None = None, bad_records: BadRecords | None = None) -> Sources:
        """Returns the run's sources for training and validation, and its own tokenizer, as it began with them."""
        record = self.data_record() if record is None else record
        own = self.tokenizer if job.data.tokenizer != "bytes" and self.tokenizer.exists() else None
        if record.tokenizer and (own is None or tokenizer_fingerprint(str(own)) != record.tokenizer):
            raise DataError(f"{self.tokenizer} is missing or has changed since the run began; restore it.")
        return make_sources(job, bad_records=bad_records, record=record, own_tokenizer=own)

    def write_data(self, record: DataRecord, training: Source, held_out: Source, tokenizer: Tokenizer | None) -> None:
        """Records what the run reads, and keeps its tokenizer."""
        if isinstance(tokenizer, HuggingFaceTokenizer):
            if not self.tokenizer.exists():
                tokenizer.save(self.tokenizer)
            record.tokenizer = tokenizer_fingerprint(str(self.tokenizer))
            given = user_path(self.job().data.tokenizer)
            if given.exists():
                copy_tokenizer_files(given if given.is_dir() else given.parent, self.path)
            if text := getattr(training, "tokenizer_config", ""):
                path, config = self.path / "tokenizer_config.json", parse_json(text)
                write_text(self.path / "chat_template.jinja", config.pop("chat_template"))
                given_config = json.loads(path.read_bytes()) if path.exists() else {}
                write_text(path, json.dumps(config | given_config, indent=2))
        record.samples = (len(training), len(held_out))
        self.save_data_record(record)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Writes plan.toml, and a copy that a resume keeps: the page compares each layout with its own plan."""
        (self.path / "plans").mkdir(exist_ok=True)
        for name in ("plan.toml", f"plans/{time.time():.0f}.toml"):
            write_text(self.path / name, tomli_w.dumps(plan))

    def log_event(self, kind: str, message: str, **fields: Any) -> None:
        record = {"time": round(time.time(), 3), "event": kind, "message": message, **fields}
        _append_record(self.path / "events.jsonl", record)

    def tell_event(self, say: Callable[[str], None], kind: str, message: str, **fields: Any) -> None:
        self.log_event(kind, message, **fields)
        say(f"{kind}: {message}")

    def log_metrics(self, record: dict[str, Any]) -> None:
        _append_record(self.path / "metrics.jsonl", record)

    def metrics(self) -> Iterator[dict[str, Any]]:
        return _read_records(self.path / "metrics.jsonl")

    def validations(self) -> list[tuple[int, float]]:
        """Returns step and loss of each validation that compares with the next one, in the order of the file: those
        since the last resume that changed what is validated."""
        first = self._validated_alike_since()
        validated = [record for record in self.metrics() if "validation" in record and record["step"] > first]
        return [(int(record["step"]), float(record["validation"]["loss"])) for record in validated]

    def _validated_alike_since(self) -> int:
        """Returns the step after which every validation was of the same samples as the next one will be."""
        since = 0
        has_changed = False
        for event in self.events():
            if event.get("event") == "validation_changed":  # the launcher, which does not know the step yet
                has_changed = True
            if event.get("event") != "resumed" or not isinstance(event.get("step"), int):
                continue

            if has_changed:
                since = event["step"]
                has_changed = False
            else:  # a run that went back behind the change took those steps again after it
                since = min(since, event["step"])
        return since

    def events(self) -> Iterator[dict[str, Any]]:
        return _read_records(self.path / "events.jsonl")

    @property
    def has_finished(self) -> bool:
        """Whether the run has ended by itself: its last event is `finished`."""
        kinds = [event.get("event") for event in self.events()]
        return bool(kinds) and kinds[-1] == "finished"

    def discard_after(self, step: int) -> None:
        """Moves the metrics after `step` to `*.discarded.jsonl`, since those steps will run again."""
        for name in ("metrics", "ranks"):
            path = self.path / f"{name}.jsonl"
            content = path.read_bytes() if path.exists() else b""
            kept, discarded = list[bytes](), list[bytes]()
            for line in content.splitlines(keepends=True):
                number = (parse_record(line) or {}).get("step")
                (discarded if isinstance(number, int) and number > step else kept).append(line)
            if not discarded:
                continue
            with (self.path / f"{name}.discarded.jsonl").open("ab") as copy:
                copy.writelines(discarded)
            if content.startswith(rest := b"".join(kept)):
                os.truncate(path, len(rest))
            else:  # not in step order
                with atomic_write(path) as file:
                    file.write(rest)

    def preferences(self, data: list[str]) -> list[list[float]] | None:
        """Returns how much the first model of a DPO run prefers each chosen answer, by source; None if none is kept."""
        with suppress(OSError, TypeError, ValueError, KeyError):
            kept = parse_json(self._preferences.read_bytes())
            return [[float(score) for score in scores] for scores in kept["scores"]] if kept["data"] == data else None
        return None

    def write_preferences(self, data: list[str], scores: list[list[float]]) -> None:
        write_text(self._preferences, json.dumps({"data": data, "scores": scores}))

    def skipped_batches(self) -> list[tuple[int, int]]:
        """Returns the skipped batches as (step, count): from this step on, that many batches are skipped."""
        path = self.path / "skips.json"
        try:
            pairs = parse_json(path.read_bytes()) if path.exists() else []
            if any(type(number) is not int or number < 0 for step, count in pairs for number in (step, count)):
                raise ValueError("it must list pairs of whole numbers")
            return [(step, count) for step, count in pairs]
        except (TypeError, ValueError) as error:
            raise JobError(f"{path} is damaged ({error}); restore it, or remove it to skip no batches.") from None

    def add_skip(self, step: int, count: int) -> None:
        write_text(self.path / "skips.json", json.dumps([*self.skipped_batches(), (step, count)]))

    def write_error(self, record: dict[str, Any]) -> None:
        self.errors.mkdir(parents=True, exist_ok=True)
        write_text(self.errors / f"rank-{record['rank']}.json", json.dumps(record))

    def error_records(self) -> list[dict[str, Any]]:
        records = (record for path in self.errors.glob("rank-*.json") for record in _read_records(path))
        return sorted(records, key=lambda record: record["time_ns"] if type(record.get("time_ns")) is int else 0)

    def clear_errors(self) -> None:
        for path in self.errors.glob("rank-*.json"):
            path.unlink()


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all complete records; ignores a line that a crash truncated."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        if (record := parse_record(line)) is not None:
            yield record


def _append_record(path: Path, record: dict[str, Any]) -> None:
    deadline = time.monotonic() + DISK_FULL_TIMEOUT
    while True:
        try:
            with open(path, "ab+") as file:
                ends_mid_line = file.tell() > 0 and file.seek(-1, os.SEEK_END) is not None and file.read(1) != b"\n"
                file.write((b"\n" if ends_mid_line else b"") + json.dumps(record).encode() + b"\n")
            return
        except OSError as error:
            if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                raise RunError(f"{path} cannot be written: {error}.") from None
            time.sleep(0.05)


def _make_next_folder(parent: Path) -> Path:
    """Creates the folder with the next free number, also if other processes do so at the same time."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [int(path.name) for path in parent.glob("[0-9]*") if path.name.isdigit()]
        with suppress(FileExistsError):
            folder = parent / f"{max(numbers, default=0) + 1:04d}"
            folder.mkdir()
            return folder


def changed_values(old: Job, new: Job) -> dict[str, str]:
    """Returns the keys in which two jobs differ; for each, what the new one has instead of what the old one has."""
    before, after = _flatten(old), _flatten(new)
    return {
        key: f"{key} = {after.get(key)!r} instead of {value!r}"
        for key, value in before.items()
        if value != after.get(key)
    }


def changed_results(old: Job, new: Job) -> list[str]:
    """Returns, as `changed_values` does, what makes the losses of two jobs differ by more than rounding."""
    changed = changed_values(old, new)
    return [text for key, text in changed.items() if _matches(key, RESULT_KEYS) or not _matches(key, RESUMABLE_KEYS)]


def check_same_run(old: Job, new: Job) -> None:
    """Raises JobError if the jobs differ in a key that --resume may not change."""
    changed = [key for key in changed_values(old, new) if not _matches(key, RESUMABLE_KEYS)]
    if changed:
        allowed = f"it may change only {', '.join(RESUMABLE_KEYS)}"
        raise JobError(f"--resume continues the same run, but {', '.join(changed)} would change; {allowed}.")


def defining_values(job: Job) -> dict[str, Any]:
    """Returns the job's values that determine the numbers of a run, by key, for its checkpoints to record."""
    values = {key: value for key, value in _flatten(job).items() if not _matches(key, UNRECORDED_KEYS)}
    return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def check_state(folder: RunFolder, job: Job, state: Mapping[str, Any]) -> None:
    """Raises JobError if a checkpoint's state is from another job, or from after the job's last step."""
    step, saved, now = int(state["step"]), state.get("job", {}), defining_values(job)
    changed = [f"{key} = {now[key]!r} instead of {saved[key]!r}" for key in now if now[key] != saved.get(key, now[key])]
    if changed:
        problem = f"{folder.path / 'job.toml'} is not the job that saved step {step} of this run"
        raise JobError(f"{problem}: it has {', '.join(changed)}. Restore the file, or start a new run.")
    if step > job.total_steps:
        raise JobError(f"{folder.path} is at step {step} already; set steps to {step} or more, or start a new run.")


def check_history(folder: RunFolder, job: Job) -> None:
    """Raises an error if a run cannot be resumed with this job, before anything of it is changed."""
    if not list_checkpoints(folder.checkpoints):
        check_none_lost(folder)
    for _, path in valid_checkpoints(folder.checkpoints)[:1]:
        check_state(folder, job, read_manifest(path)["state"])


def check_none_lost(folder: RunFolder) -> None:
    """Raises CheckpointError if a run that has no checkpoint has had one: it would start again at step 0. An object
    store may get events earlier than checkpoints; `RunStore.restore` knows what it has had."""
    if folder.place != str(folder.path):
        return
    started = saved = 0  # the step of the last save that began, and of the last that was completed
    for event in folder.events():
        kind, step = event.get("event"), event.get("step")
        if kind in ("checkpoint", "finished"):  # the next save waits for the one before
            started, saved = step if isinstance(step, int) else 0, started
        elif kind in ("checkpoint_failed", "resumed"):  # of a killed process, nobody knows whether its save ended
            started = saved
        elif kind == "corruption":  # corrupt checkpoints are removed
            started = saved = 0
    is_removed = next(folder.metrics(), None) is not None and not folder.checkpoints.is_dir()
    if saved or is_removed:
        what = f"has no checkpoint, although the run has saved step {saved}" if saved else "is missing"
        raise CheckpointError(f"{folder.checkpoints} {what}; restore it, or start a new run to train from step 0.")


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _flatten(job: Job) -> dict[str, object]:
    """Returns the job's values by dotted key."""
    flat: dict[str, object] = {}
    for key, value in job.model_dump().items():
        flat |= {f"{key}.{name}": leaf for name, leaf in value.items()} if isinstance(value, dict) else {key: value}
    return flat
