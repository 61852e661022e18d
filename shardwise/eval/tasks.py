"""Perplexity of files, and tasks of local files in lm-eval's YAML format: the part of it that needs no code, and
metrics of one's own, called with the record and the prediction. docs/how-to/evaluate.md lists the keys."""

import math
import os
import statistics
import string
import sys
from ast import literal_eval
from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from shardwise.comm.collectives import leave_world
from shardwise.comm.world import run_world
from shardwise.console import Answer
from shardwise.data.input_files import DataRecord
from shardwise.data.text import find_files, read_chunks, source_by_name
from shardwise.errors import DataError, JobError, shorten
from shardwise.eval.language_model import LanguageModel, load_eval_job
from shardwise.files import parse_record
from shardwise.job import DataConfig
from shardwise.layout import Layout
from shardwise.models.config import ConfigSection

DEFAULT_METRICS = {"multiple_choice": ("acc", "acc_norm"), "generate_until": ("exact_match",),
                   "loglikelihood": ("perplexity", "acc"), "loglikelihood_rolling": ("byte_perplexity",)}  # fmt: skip
OUTPUT_TYPES = tuple(DEFAULT_METRICS)
Results = dict[str, dict[str, float]]  # metrics by task or file
Request = namedtuple("Request", "args")  # what lm-eval passes to a model


def file_perplexity(model: Any, path: str, field: str = "text") -> dict[str, float]:
    """Returns the perplexity per token and per byte of a text or JSONL file, a folder or a glob."""
    source, path = source_by_name(path)
    data = DataConfig(source=source, path=path, text_field=field)  # type: ignore[arg-type]
    texts, parts = list[str](), list[str]()
    for chunk in read_chunks(data, DataRecord().take(find_files(source, path))):
        parts.append(chunk.text)
        if chunk.ends_document:
            texts.append("".join(parts))
            parts = []
    if not texts:
        raise DataError(f"{path} has no text; give a text file, or JSONL records with a field {field!r}.")
    return _perplexity(model, texts)


def _perplexity(model: Any, texts: Sequence[str]) -> dict[str, float]:
    windows = [window for text in texts for window in model.rolling_requests(text)]
    total = sum(score for score, _ in model.score_tokens(windows))
    tokens, size = sum(len(window[1]) for window in windows), sum(len(text.encode()) for text in texts)
    return {"documents": len(texts), "tokens": tokens, "bytes": size, "loss": -total / tokens,
            "perplexity": _exp(-total / tokens), "byte_perplexity": _exp(-total / size),
            "bits_per_byte": -total / size / math.log(2)}  # fmt: skip


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


class EvalTask(ConfigSection):
    """A task; the keys are those of lm-eval."""

    task: str
    data: str = ""
    dataset_kwargs: dict[str, Any] = {}
    output_type: str = "multiple_choice"
    doc_to_text: str = ""
    doc_to_choice: str | list[str] = ""
    doc_to_target: str | int = ""
    target_delimiter: str = " "
    generation_kwargs: dict[str, Any] = {}
    metric_list: list[dict[str, Any]] = []

    def records(self, folder: Path) -> list[dict[str, Any]]:
        """Returns the records of the task's file, which is relative to the task's folder."""
        files = self.dataset_kwargs.get("data_files") or {}
        named = files if isinstance(files, str) else next(iter(files.values()), "")
        name = self.data or (named[0] if isinstance(named, list) else named)
        if not name:
            raise JobError(f"task {self.task!r} names no file; set data, or dataset_kwargs.data_files.")
        records = [parse_record(line) for line in (folder / name).read_bytes().splitlines() if line.strip()]
        if not records or None in records:
            place = f"line {records.index(None) + 1} is no JSON object" if records else "it is empty"
            raise DataError(f"task {self.task!r}: {folder / name}: {place}; write one JSON object per line.")
        return [record for record in records if record is not None]


def load_tasks(path: Path) -> list[EvalTask]:
    """Reads a task file: one task, a list of tasks, or several documents."""
    try:
        import yaml
    except ImportError:
        raise JobError("task files need PyYAML, which is not installed; run `pip install pyyaml`.") from None
    try:
        found = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    known, tasks = EvalTask.model_fields, list[EvalTask]()
    for values in [value for part in found for value in (part if isinstance(part, list) else [part])]:
        if not isinstance(values, dict) or "task" not in values:
            raise JobError(f"{path}: a task needs a name: write `task: my-task`.")
        if values.get("output_type", OUTPUT_TYPES[0]) not in OUTPUT_TYPES:
            raise JobError(f"{path}: output_type is {shorten(values['output_type'])}; use {', '.join(OUTPUT_TYPES)}.")
        try:
            tasks.append(EvalTask(**{key: value for key, value in values.items() if key in known}))
        except ValueError as error:
            raise JobError(f"{path}: task {shorten(values['task'])}: {str(error).splitlines()[-2].strip()}.") from None
    return tasks


def _render(template: Any, record: dict[str, Any]) -> Any:
    """Returns a field of the record, or a jinja2 template filled in with it, as lm-eval reads them."""
    if not isinstance(template, str):
        return template
    if template in record:
        return record[template]
    import jinja2.sandbox  # PyTorch needs jinja2 too; a template runs no code

    try:
        environment = jinja2.sandbox.SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        return environment.from_string(template).render(**record)
    except jinja2.TemplateError as error:
        raise DataError(f"the template {shorten(template)} does not fit a record: {error}.") from None


def _render_list(template: Any, record: dict[str, Any]) -> list[str]:
    found = _render(template, record)
    if isinstance(found, str):
        with suppress(ValueError, SyntaxError):
            found = literal_eval(found)
    if not isinstance(found, list) or not found:
        raise DataError(f"doc_to_choice = {shorten(template)} gives {shorten(found)}, which is no list of choices.")
    return [str(choice) for choice in found]


def run_task(model: Any, task: EvalTask, folder: Path) -> dict[str, float]:
    """Returns the metrics of a task: the mean over its records, and its standard error."""
    records = task.records(folder)
    contexts = [str(_render(task.doc_to_text, record)) for record in records]
    if task.output_type == "loglikelihood_rolling":
        return _perplexity(model, [str(_render(task.doc_to_target, record)) for record in records])
    names = [str(entry.get("metric")) for entry in task.metric_list] or DEFAULT_METRICS[task.output_type]
    values: dict[str, list[float]] = {}

    def add(record: dict[str, Any], prediction: Any, **known: float) -> None:
        for name in names:
            if name not in known and not name.startswith("python:"):
                raise JobError(f"task {task.task!r}: the metric {name!r} is not one of {', '.join(known)}, python:...")
            found = known[name] if name in known else own_metric(name)(record, prediction)
            values.setdefault(name, []).append(float(found))

    if task.output_type == "multiple_choice":
        choices = [_render_list(task.doc_to_choice, record) for record in records]
        pairs = [(context, task.target_delimiter + choice) for context, own in zip(contexts, choices) for choice in own]
        found = iter(model.loglikelihood([Request(pair) for pair in pairs]))
        for record, own in zip(records, choices):
            scores, gold = [next(found)[0] for _ in own], _gold(task, record, own)
            best = max(range(len(own)), key=scores.__getitem__)
            by_length = [score / max(1, len(choice)) for score, choice in zip(scores, own)]
            add(record, best, acc=best == gold, acc_norm=by_length.index(max(by_length)) == gold)
    elif task.output_type == "loglikelihood":
        targets = [task.target_delimiter + str(_render(task.doc_to_target, record)) for record in records]
        results = model.loglikelihood([Request(pair) for pair in zip(contexts, targets)])
        for record, (score, greedy) in zip(records, results):
            add(record, score, perplexity=-score, acc=greedy)
    else:
        texts = model.generate_until([Request((context, task.generation_kwargs)) for context in contexts])
        options = next((entry for entry in task.metric_list if entry.get("metric") == "exact_match"), {})
        for record, text in zip(records, texts):
            target = str(_render(task.doc_to_target, record))
            add(record, text, exact_match=_plain(text, options) == _plain(target, options))
    result: dict[str, float] = {"samples": len(records)}
    for name, numbers in values.items():
        mean = sum(numbers) / len(numbers)
        result[name] = _exp(mean) if name == "perplexity" else mean
        if name != "perplexity" and len(numbers) > 1:
            result[f"{name}_stderr"] = statistics.stdev(numbers) / math.sqrt(len(numbers))
    return result


def _gold(task: EvalTask, record: dict[str, Any], choices: list[str]) -> int:
    found = _render(task.doc_to_target, record)
    if isinstance(found, str) and found not in choices and found.isdecimal():
        found = int(found)
    number = found if isinstance(found, int) else choices.index(found) if found in choices else -1
    if not 0 <= number < len(choices):
        raise DataError(f"task {task.task!r}: the answer {shorten(found)} is none of the choices {shorten(choices)}.")
    return number


def _plain(text: str, options: dict[str, Any]) -> str:
    text = text.lower() if options.get("ignore_case") else text
    return text.translate(str.maketrans("", "", string.punctuation)) if options.get("ignore_punctuation") else text


def own_metric(name: str) -> Callable[[dict[str, Any], Any], Any]:
    """Returns the function that `python:module:function` names."""
    try:
        return resolve_name(name.removeprefix("python:"))  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        raise JobError(f"the metric {name!r} cannot be imported: {error}; write python:module:function.") from None


def evaluate(path: Path, data: Sequence[str], tasks: Sequence[Path], layout: str = "", step: str = "",
             overrides: Sequence[str] = (), batch: int = 8) -> Results:  # fmt: skip
    """Returns the metrics of each data file and of each task. A layout of several processes gets a world of its own,
    on the CPU; under torchrun, it is that of torchrun."""
    if not data and not tasks:
        raise JobError("nothing to evaluate on; give --data FILE or --tasks FILE.")
    found = [(file.parent, task) for file in tasks for task in load_tasks(file)]
    sys.path.insert(0, os.getcwd())  # for metrics of one's own, as `python -m` finds them
    for name in (str(entry.get("metric")) for _, task in found for entry in task.metric_list):
        own_metric(name) if name.startswith("python:") else None
    world = Layout.parse(layout).world if layout else 1
    if world > 1 and not load_eval_job(path, overrides).model.is_causal_lm:
        raise JobError(f"--layout: {path} runs as a module of transformers, in one process; leave out --layout.")

    def run() -> Results:
        model = LanguageModel(path, layout, step, batch, overrides)
        results = {name: file_perplexity(model, name, model.job.data.text_field) for name in data}
        return results | {task.task: run_task(model, task, folder) for folder, task in found}

    if world == 1:
        return run()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        results = run()
        leave_world()
        return results
    return run_world(run, world, timeout=10.0**6)[0]  # type: ignore[no-any-return]


def results_answer(results: Results) -> Answer:
    """Returns a line per task or file; in JSON, what is not finite is text."""
    rows, lines = dict[str, Any](), []
    for name, values in results.items():
        rows[name] = {key: value if math.isfinite(value) else str(value) for key, value in values.items()}
        shown = (f"{key} {value:{',' if isinstance(value, int) else '.4f'}}" for key, value in values.items())
        lines.append(f"{name}: {', '.join(shown)}")
    return Answer(rows, "\n".join(lines))
