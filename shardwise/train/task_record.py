"""What a run of one's own module trains, in `task.json`: a resume with another task is refused.

The job file of such a run only names a function or a script. What that makes is recorded when the run begins: names and
shapes of the parameters, values of frozen ones, what the loss, the optimizer and the other functions are, and some of
the samples. `shardwise.adapters.code_identity` says how a function is known."""

import json
from typing import Any

from shardwise.adapters.code_identity import PYTHON, describe, differences
from shardwise.adapters.task import NumberedStream
from shardwise.data.content import describe_content, describe_sample, is_same
from shardwise.data.input_files import MAX_SHOWN
from shardwise.data.sample_stream import read_sample
from shardwise.errors import JobError
from shardwise.files import parse_json, write_text
from shardwise.job import Job
from shardwise.models.chain import Chain
from shardwise.models.sharding import is_adapter
from shardwise.random import generators_kept, seed_generators
from shardwise.train.run_folder import RunFolder
from shardwise.train.warm_start import parse_start

TASK_FILE = "task.json"
FUNCTIONS = {
    "loss": "loss", "count": "count", "collate": "collate", "inputs": "inputs", "optimizer": "optimizer",
    "learning_rate": "learning rate schedule",
}  # fmt: skip
SAMPLES = 8  # of a dataset, of which the contents are recorded
READINGS = 4  # of each, to tell whether they are always the same

Record = dict[str, Any]


def has_own_task(job: Job) -> bool:
    """Whether the model is a module of the user's; the tasks of transformers' models are ours."""
    return job.model.name.startswith(("python:", "script:"))


def describe_task(job: Job, chain: Chain) -> Record:
    """Returns what a job of one's own module trains. `chain`: its module, on the meta device."""
    task = job.family.task(job.model)
    assert task is not None, "has_own_task"
    return {
        "python": PYTHON,
        "parameters": {name: list(weight.shape) for name, weight in chain.named_unique_parameters()},
        "frozen": _describe_frozen(job, chain),
        "functions": {name: describe(getattr(task, name)) for name in FUNCTIONS},
        "data": _describe_data(task.data),
        "validation": _describe_data(task.validation),
    }


def load_record(folder: RunFolder) -> Record | None:
    """Returns what a run has recorded; None if it has recorded nothing, as those of version 0.2.0."""
    path = folder.path / TASK_FILE
    if not path.exists():
        return None
    try:
        found = parse_json(path.read_bytes())
        if not {"python", "parameters", "frozen", "functions", "data", "validation"} <= found.keys():
            raise ValueError("it lacks entries")
        return dict(found)
    except (OSError, ValueError, AttributeError) as error:
        raise JobError(
            f"{path} is damaged ({error}); restore it, or remove it to go on without knowing whether this is the task "
            f"that the run began with."
        ) from None


def save_record(folder: RunFolder, record: Record) -> None:
    write_text(folder.path / TASK_FILE, json.dumps(record, indent=1) + "\n")


def changes_of_task(old: Record, new: Record, steps_changed: bool = False) -> list[str]:
    """Returns how a task differs from the one that was recorded, in words. With another number of steps, a schedule of
    one's own may have other values, as our schedules do."""
    found = changes_of_module(old, new)
    same_python = old["python"] == new["python"]
    for name, what in FUNCTIONS.items():
        compare_values = name != "learning_rate" or not steps_changed
        before, now = old["functions"].get(name), new["functions"][name]
        found += differences(what, before, now, same_python, compare_values)
    return found


def changes_of_module(old: Record, new: Record) -> list[str]:
    """Returns how a module differs from the one that was recorded: its parameters, and the values of frozen ones."""
    before, now = old["parameters"], new["parameters"]
    for name in (*before, *now):
        if before.get(name) != now.get(name):
            shapes = f"{now.get(name, 'nothing')} instead of {before.get(name, 'nothing')}"
            return [f"its module has {shapes} for {name}"]
    for name, value in new["frozen"].items():
        if name in old["frozen"] and not is_same(old["frozen"][name], value):
            return [f"its frozen weight {name} has other values"]
    return []


def changes_of_data(old: Record, new: Record) -> list[str]:
    """Returns how the samples differ from those that were recorded. Another number of them has its own message."""
    found = []
    for name, what in (("data", "training"), ("validation", "validation")):
        before, now = old[name], new[name]
        if not before or not now or before["count"] != now["count"]:
            continue
        unstable = {*before["unstable"], *now["unstable"]}
        for index, sample in before["samples"].items():
            places = [place for place in _differing(sample, now["samples"].get(index, {})) if place not in unstable]
            if places:
                found.append(f"{what} sample {index} is another{f', in {places[0]!r}' if places[0] else ''}")
                break
    return found


def check_resumed_task(folder: RunFolder, record: Record, steps_changed: bool, accept_task_change: bool,
                       accept_data_change: bool) -> list[tuple[str, str]]:  # fmt: skip
    """Raises JobError if a run would go on with another task than its own. Returns events to log."""
    recorded = load_record(folder)
    if recorded is None:
        message = (
            f"{folder.place} has no {TASK_FILE}, as runs of version 0.2.0: nobody can tell whether its module, loss "
            f"and data are those that it began with. They are recorded as they are now."
        )
        return [("warning", message)]

    task_events = _accepted_changes(
        "task",
        changes_of_task(recorded, record, steps_changed),
        accept_task_change,
        f"{folder.place} began with another task",
    )
    data_events = _accepted_changes(
        "data",
        changes_of_data(recorded, record),
        accept_data_change,
        f"the data has changed since {folder.place} began",
    )
    return [*task_events, *data_events]


def _accepted_changes(what: str, changes: list[str], is_accepted: bool, problem: str) -> list[tuple[str, str]]:
    """Returns an event for changes that were accepted; raises JobError, which begins with the problem, for others."""
    if not changes:
        return []
    if not is_accepted:
        raise JobError(
            f"{problem}: {'; '.join(changes[:MAX_SHOWN])}. Restore it or start a new run, or go on with it as it is by "
            f"--accept-{what}-change, in a script by fit(resume=..., accept_changes=True)."
        )
    return [(f"{what}_changed", f"the {what} as it is now is accepted. Changed: {'; '.join(changes)}.")]


def check_module_of_use(folder: RunFolder, job: Job, chain: Chain) -> None:
    """Raises JobError if frozen weights, which checkpoints lack, are not those that a run was trained beside."""
    recorded = load_record(folder)
    if recorded is None or not recorded["frozen"]:
        return
    new = {"parameters": recorded["parameters"], "frozen": _describe_frozen(job, chain)}
    changes = changes_of_module(recorded, new)
    if changes:
        raise JobError(
            f"{folder.place} was trained with another module: {changes[0]}; restore the module, or start a new run."
        )


def _describe_frozen(job: Job, chain: Chain) -> dict[str, Any]:
    """Returns the values of the frozen weights of a module that brings its own. Those from a folder or a run are
    recorded with it (`shardwise.train.base_weights`)."""
    if chain.initial is None or job.model.weights_folder is not None or parse_start(job) is not None:
        return {}
    weights = dict(chain.named_unique_parameters())
    frozen = [name for name, weight in weights.items() if not weight.requires_grad and not is_adapter(name)]
    return {name: describe_content(chain.initial.value(name)) for name in frozen}


def _describe_data(dataset: Any) -> Record | None:
    """Returns the contents of some samples, first and last included. They are read several times: what the dataset
    augments with random numbers of its own differs, so that its content cannot be known."""
    if dataset is None:
        return None
    is_stream = isinstance(dataset, NumberedStream)
    count = 2 if is_stream else len(dataset)
    spread = min(SAMPLES, count) - 1
    indices = sorted({round(number * (count - 1) / max(1, spread)) for number in range(spread + 1)})

    with generators_kept():  # the program draws the same random numbers afterwards
        readings = [{index: _read_sample(dataset, index) for index in indices} for _ in range(READINGS)]
    first = readings[0]
    unstable = {
        place for reading in readings for index in indices for place in _differing(first[index], reading[index])
    }
    samples = {str(index): {place: content for place, content in sample.items() if place not in unstable}
               for index, sample in first.items()}  # fmt: skip
    return {"count": -1 if is_stream else count, "samples": samples, "unstable": sorted(unstable)}


def _read_sample(dataset: Any, index: int) -> Record:
    """Returns the contents of a sample, read with random numbers that are the same in every process."""
    seed_generators(index)
    return describe_sample(read_sample(dataset, index))


def _differing(first: Record, second: Record) -> list[str]:
    """Returns the places where two readings of a sample differ."""
    places = {**first, **second}
    return [place for place in places
            if place not in first or place not in second or not is_same(first[place], second[place])]  # fmt: skip
