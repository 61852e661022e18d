"""The job.toml of a run folder: whether it is there, whole, and that of a run.

A run's own job has every key, as `RunFolder.create` writes it. A file that lacks keys must not be read as a job, whose
missing keys have defaults: the command would go on with another model, and not say so."""

from pathlib import Path

from shardwise.errors import JobError
from shardwise.files import parse_toml

# Every version has written these to a run's job.toml, whatever the user's own file says.
WRITTEN_KEYS = ("seed", "layout", "precision", "model", "data", "batch", "optimizer", "checkpoint", "run")


def has_job_file(folder: Path) -> bool:
    """Whether a folder has a job.toml. Raises JobError if none can be there, such as for a name that is too long."""
    try:
        return (folder / "job.toml").is_file()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "") or error
        raise JobError(f"{str(folder)!r} cannot be the folder of a run: {reason}; choose another name.") from None


def check_job_file(folder: Path, place: object = None) -> None:
    """Raises JobError unless a folder has the job of a run. `place`: what the user calls the folder."""
    place = folder if place is None else place
    if not has_job_file(folder):
        raise JobError(f"{place} is not a run folder: it has no job.toml.")

    try:
        values = parse_toml((folder / "job.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{place}/job.toml, the job of the run, cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise JobError(
            f"{place}/job.toml, the job of the run, is not valid TOML: {error}; restore it, or name another folder."
        ) from None

    if not values and (folder / "metrics.jsonl").exists():
        raise JobError(
            f"{place}/job.toml is empty, but a run's has the whole job; restore it (a checkpoint's manifest.json has "
            "the values that matter), or start a new run in another folder."
        )
    if not values:
        raise JobError(
            f"{place}/job.toml is empty, but a run begins with its whole job: the creation of this run was cut short "
            f"(a full disk, for example); remove {place}/job.toml and start the run again with its job file."
        )

    model = values.get("model")
    missing = [key for key in WRITTEN_KEYS if key not in values]
    if isinstance(model, dict) and "name" not in model:
        missing.append("model.name")
    if missing:
        raise JobError(
            f"{place}/job.toml is not the job of a run: it lacks {', '.join(missing)}, but a run's has every key with "
            f"its value; name the folder of a run, or begin one: shardwise train {place}/job.toml."
        )
