"""What must hold when a run is resumed: the same job, and a history that its checkpoints can continue."""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shardwise.errors import CheckpointError, JobError
from shardwise.job import Job
from shardwise.train.checkpoint_folder import list_checkpoints, read_manifest, valid_checkpoints
from shardwise.train.run_folder import RunFolder

# Job keys that --resume may change. All others define the run.
RESUMABLE_KEYS = (
    "layout", "steps", "tokens", "compile", "tracker", "data.workers", "data.prefetch", "checkpoint.*", "validation.*",
    "run.device", "run.processes", "run.cluster", "run.max_restarts", "run.hang_timeout", "run.standby",
    "run.elastic", "run.rejoin_timeout", "run.on_nan", "run.loss_spike_threshold", "run.checksum_every",
    "run.redundant_compute_every", "run.max_corruptions",
    "embedding_tables.sharding", "embedding_tables.cached_rows", "embedding_tables.prefetch",
)  # fmt: skip
# Keys that a checkpoint does not record: the record of the data and the run's own tokenizer say more than paths.
UNRECORDED_KEYS = (*RESUMABLE_KEYS, "run.*", "data.path", "data.tokenizer")


def check_same_run(old: Job, new: Job) -> None:
    """Raises JobError if the jobs differ in a key that --resume may not change."""
    before, after = _flatten(old), _flatten(new)
    changed = [key for key in before if before[key] != after.get(key) and not _matches(key, RESUMABLE_KEYS)]
    if changed:
        raise JobError(
            f"--resume continues the same run, but {', '.join(changed)} would change; it may change only "
            f"{', '.join(RESUMABLE_KEYS)}. Start a new run to change other keys."
        )


def defining_values(job: Job) -> dict[str, Any]:
    """Returns the job's values that determine the numbers of a run, by key, for its checkpoints to record."""
    values = {key: value for key, value in _flatten(job).items() if not _matches(key, UNRECORDED_KEYS)}
    return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def check_state(folder: RunFolder, job: Job, state: Mapping[str, Any]) -> None:
    """Raises JobError if a checkpoint's state is from another job, or from after the job's last step."""
    step, saved, now = int(state["step"]), state.get("job", {}), defining_values(job)
    changed = [f"{key} = {now[key]!r} instead of {saved[key]!r}" for key in now if now[key] != saved.get(key, now[key])]
    if changed:
        raise JobError(
            f"{folder.path / 'job.toml'} is not the job that saved step {step} of this run: it has "
            f"{', '.join(changed)}. Restore the file, or start a new run."
        )
    if step > job.total_steps:
        raise JobError(
            f"{folder.path} is at step {step} already, so it cannot end at step {job.total_steps}; set steps to "
            f"{step} or more, or start a new run."
        )


def check_history(folder: RunFolder, job: Job) -> None:
    """Raises an error if a run cannot be resumed with this job, before anything of it is changed."""
    if not list_checkpoints(folder.checkpoints):
        check_none_lost(folder)
    for _, path in valid_checkpoints(folder.checkpoints)[:1]:
        check_state(folder, job, read_manifest(path)["state"])


def check_none_lost(folder: RunFolder) -> None:
    """Raises CheckpointError if a run that has no checkpoint has had one: it would start again at step 0."""
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
