"""What a run starts from, known by its content, so that adapters are never put beside other weights.

Checkpoints hold what is trained, and what a forward changes. Whatever reads a run again (a resume, `merge`, `export`,
`sample`, `eval`) reads its other weights where the run found them: in a Hugging Face folder, or in a checkpoint of
another run. A new run records SHA-256 digests of these files in `base.json`, and each of those uses compares them. A
checkpoint's digests are those of its manifest. Of a folder whose model transformers builds, `config.json` counts
too."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardwise.console import print_line
from shardwise.errors import CheckpointError
from shardwise.files import os_errors_as, parse_json, write_text
from shardwise.host_memory import num_threads
from shardwise.job import Job
from shardwise.models.adapter_files import WEIGHTS_FILE
from shardwise.models.pretrained import weight_file_names
from shardwise.models.pretrained_config import read_config_file
from shardwise.parallel.prepare import Prepared
from shardwise.train.checkpoint_folder import read_manifest, valid_checkpoints
from shardwise.train.run_folder import RunFolder
from shardwise.train.warm_start import start_checkpoint

BASE_FILE = "base.json"
SHOWN_DIGITS = 12  # of a digest, in messages
# Fields of config.json that say who wrote it and in which dtype: the model is the same without them.
FIELDS_OF_NO_MODEL = ("transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache")


@dataclass(frozen=True)
class BaseFile:
    """A file of the base, as a run has read it."""

    bytes: int
    sha256: str
    mtime_ns: int


Files = Mapping[str, BaseFile]  # by absolute path


@dataclass(frozen=True)
class Base:
    """What a run starts from."""

    weights: Files = field(default_factory=dict)
    adapter: Files = field(default_factory=dict)
    """An adapter that training starts from (`model.lora.adapter`); every checkpoint has its weights."""
    config: str = ""
    """Digest of the `config.json` that the model is built from at every start; empty if there is none."""
    is_always_read: bool = False
    """Whether checkpoints lack weights of the base, because they are frozen."""

    @classmethod
    def of_new_run(cls, prepared: Prepared) -> "Base":
        """Returns the base of a run that begins. The digests of a checkpoint are those of its manifest, with which
        `check_start` has just compared its files."""
        job = prepared.job
        weights = dict(prepared.model.named_unique_parameters())
        has_frozen = not all(weight.requires_grad for weight in weights.values())
        checkpoint = start_checkpoint(job)
        known: dict[str, BaseFile] = {}

        if checkpoint is not None:
            for name, info in read_manifest(checkpoint)["files"].items():
                path = checkpoint / name
                known[str(path)] = BaseFile(info["bytes"], info["sha256"], path.stat().st_mtime_ns)

        return cls(
            weights=_read_files(_weight_files(job), known),
            adapter=_read_files(_adapter_files(job), {}),
            config=_config_digest(job),
            is_always_read=job.model.lora is not None or has_frozen,
        )

    @classmethod
    def load(cls, folder: RunFolder) -> "Base | None":
        """Returns what a run has recorded; None if it has recorded nothing, as those of version 0.2.0."""
        path = folder.path / BASE_FILE
        if not path.exists():
            return None
        try:
            values = parse_json(path.read_bytes())
            return cls(
                weights={name: BaseFile(**info) for name, info in values["weights"].items()},
                adapter={name: BaseFile(**info) for name, info in values["adapter"].items()},
                config=str(values["config"]),
                is_always_read=bool(values["is_always_read"]),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); restore it, or remove it to go on without knowing whether the weights "
                f"that the run started from are still the same."
            ) from None

    def save(self, folder: RunFolder) -> None:
        if not (self.weights or self.adapter or self.config):
            return  # training starts from random weights, which follow from the seed
        write_text(folder.path / BASE_FILE, json.dumps(asdict(self), indent=1) + "\n")


def check_base(folder: RunFolder, job: Job, is_quick: bool = False) -> Base | None:
    """Raises CheckpointError unless what a run reads again has the content that it began with. Returns the base as it
    is now; None if the run has recorded none. A quick check reads only files whose size or time is another."""
    recorded = Base.load(folder)
    if recorded is None:
        return None

    config = _config_digest(job)
    if recorded.config and not config:
        raise CheckpointError(
            f"{folder.place} starts from {job.model.name.removeprefix('hf:')}, which has no config.json any more; put "
            f"the folder back where it was."
        )
    if recorded.config and config != recorded.config:
        raise CheckpointError(
            f"{job.model.pretrained_folder}/config.json describes another model than when {folder.place} began "
            f"(its digest is {config[:SHOWN_DIGITS]} instead of {recorded.config[:SHOWN_DIGITS]}); restore the file, "
            f"or start a new run from the folder as it is."
        )

    weights, adapter = recorded.weights, recorded.adapter
    has_checkpoint = bool(valid_checkpoints(folder.checkpoints))
    if recorded.is_always_read or not has_checkpoint:
        weights = _compare(folder, weights, _weight_files(job), is_quick)
    if not has_checkpoint:
        adapter = _compare(folder, adapter, _adapter_files(job), is_quick)
    return Base(weights, adapter, recorded.config, recorded.is_always_read)


def check_base_of_resume(folder: RunFolder, job: Job) -> tuple[Base | None, str]:
    """Checks the base of a run that goes on. Returns it with the times of its files as they are now, by which workers
    tell quickly that they are the same, and a warning. A run without a record gets one, so that at least later changes
    are noticed. It is saved by the caller, once nothing else refuses the resume."""
    base = check_base(folder, job)
    if base is not None:
        return base, ""
    warning = _warning_of_unknown(folder, job)
    if not warning:
        return None, ""
    base = Base(_read_files(_weight_files(job), {}), config=_config_digest(job), is_always_read=True)
    return base, f"{warning} It is recorded as it is now."


def check_base_of_use(folder: RunFolder, job: Job) -> None:
    """Checks the base of a run whose model is used. Of the processes of a machine, the first one reads the files."""
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return
    if check_base(folder, job) is None and (warning := _warning_of_unknown(folder, job)):
        print_line(f"warning: {warning}")


def _warning_of_unknown(folder: RunFolder, job: Job) -> str:
    """Returns a warning about a run whose adapters belong to weights that it has not recorded; empty for others."""
    if job.model.lora is None or not _weight_files(job):
        return ""
    place = job.model.weights_folder or job.model.weights
    return (
        f"{folder.place} does not know the content of the weights that its adapters belong to, as runs of version "
        f"0.2.0: nobody can tell whether {place} has changed since it began."
    )


def _weight_files(job: Job) -> list[Path]:
    """Returns the files of the weights that a job starts from."""
    source = job.model.weights_folder
    if source is not None:
        return [source / name for name in weight_file_names(source)]
    checkpoint = start_checkpoint(job)
    if checkpoint is None:
        return []
    return [checkpoint / name for name in read_manifest(checkpoint)["files"]]


def _adapter_files(job: Job) -> list[Path]:
    if job.model.lora is None or not job.model.lora.adapter:
        return []
    return [Path(job.model.lora.adapter, WEIGHTS_FILE)]


def _config_digest(job: Job) -> str:
    """Returns a digest of what the config.json says that a model is built from at every start. A model of ours takes
    its keys into the job instead."""
    source = job.model.pretrained_folder
    if source is None or not job.model.name.startswith("hf:"):
        return ""
    values = read_config_file(source)
    values = {name: value for name, value in values.items() if name not in FIELDS_OF_NO_MODEL}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _read_files(paths: list[Path], known: Files) -> dict[str, BaseFile]:
    """Returns files with their digests, several at once; those `known` that have the same size and time are not
    read."""

    def read(path: Path) -> BaseFile:
        with os_errors_as(CheckpointError, f"{path}, which the run starts from, cannot be read"):
            stat = path.stat()
            before = known.get(os.path.abspath(path))
            if before is not None and (before.bytes, before.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return before
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        return BaseFile(stat.st_size, digest, stat.st_mtime_ns)

    with os_errors_as(CheckpointError, "the weights that the run starts from cannot be read"):
        size = sum(path.stat().st_size for path in paths)
    with ThreadPoolExecutor(num_threads(size)) as pool:
        return dict(zip(map(os.path.abspath, paths), pool.map(read, paths), strict=True))


def _compare(folder: RunFolder, recorded: Files, paths: list[Path], is_quick: bool) -> Files:
    """Returns the files as they are now; raises CheckpointError if their names or contents are not those recorded."""
    # By name: the folder of a 0.2.0 run may be a relative path, and a checkpoint may be saved twice.
    before = {Path(path).name: info for path, info in recorded.items()}
    names = [path.name for path in paths]
    changes = [f"{path} is missing" for path in recorded if Path(path).name not in names]
    changes += [f"{path} is new" for path in paths if path.name not in before]

    known = {os.path.abspath(path): before[path.name] for path in paths if path.name in before}
    now = _read_files(paths, known if is_quick else {})
    for path, info in now.items():
        old = before.get(Path(path).name)
        if old is not None and old.sha256 != info.sha256:
            digests = f"{info.sha256[:SHOWN_DIGITS]} instead of {old.sha256[:SHOWN_DIGITS]}"
            changes.append(f"the SHA-256 of {path} is {digests}")

    if changes:
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        raise CheckpointError(
            f"the weights that {folder.place} starts from have changed since it began: {changes[0]}{more}; "
            f"put the files back that it began with, or start a new run from those that are there."
        )
    return now
