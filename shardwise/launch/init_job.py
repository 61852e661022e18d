"""Writes a commented job for a task (`shardwise init`), by options or by four questions. What it writes is checked."""

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.console import fill_in
from shardwise.data.text import source_by_name, walk_files
from shardwise.errors import JobError, suggest
from shardwise.files import parse_toml, require_parent_folder, user_path, write_text
from shardwise.job import make_job
from shardwise.object_store import parse_url
from shardwise.planner.costs.model_shape import shape_of

TEMPLATES = Path(__file__).parent / "templates"


def write_job(out: Path, given: Mapping[str, str | None], ask: Any) -> Iterator[str]:
    """Writes the job file `out`; yields what to tell. `ask(question, default)` answers, unless nobody is there."""
    tasks = parse_toml((TEMPLATES / "init.toml").read_text(encoding="utf-8"))
    questions, answers = tasks.pop("any"), dict[str, str]()
    require_parent_folder(out)
    if out.exists():
        raise JobError(f"{out} exists; name another file: shardwise init other.toml.")
    for key in ("task", "data", "model", "devices"):
        question, *default = (questions | tasks.get(answers.get("task", ""), {}))[key]
        asked = ask(question, *default or [None]) if given[key] is None and ask else given[key]
        answers[key] = answer = "".join(default) if asked is None else str(asked)
        if key == "task" and answer not in tasks:
            raise JobError(f"--task {answer} is unknown; {suggest(answer, tasks)}")
        if (not answer and not default) or (key == "devices" and not answer.isdecimal()):
            raise JobError(f"--{key} needs a {'number' if default else 'value'}. {question}.")
    data, start = user_path(answers["data"] or "-"), user_path(answers["model"].partition("@")[0])
    if answers["task"] in ("continue", "tune") and not start.is_dir() and not parse_url(answers["model"]):
        raise JobError(f"--model {answers['model']}: no such folder; it needs a Hugging Face folder or a run.")
    classes = data / "train" if (data / "train").is_dir() else data
    found = {"source": answers["data"] and source_by_name(str(next(walk_files(data), answers["data"])))[0],
             "classes": (sum(one.is_dir() for one in classes.iterdir()) if classes.is_dir() else 0) or 10,
             "is_run": (start / "job.toml").is_file()}  # fmt: skip
    # As large models have it: Llama 3's of 8B, 70B and 405B parameters have 3e-4, 1.5e-4 and 8e-5.
    named = {"model": {"name": answers["model"]}} if answers["task"] == "pretrain" and answers["model"] else {}
    lr = 0.6 * shape_of(make_job(named, str(out)).model).parameters ** (-1 / 3)
    found["lr"] = f"{min(1e-3, lr):.1e}".replace("e-0", "e-")
    text = fill_in(TEMPLATES / f"init-{answers['task']}.toml", {"out": str(out), **answers, **found})
    make_job(parse_toml(text), str(out))
    write_text(out, text + "\n")
    yield f"{out}: {tasks[answers['task']]['about']}; its comments say what to change"
    if answers["data"] and ":" not in answers["data"] and not glob.glob(str(data)):
        yield f"warning: --data {answers['data']}: there is no such file or folder yet"
    devices = int(answers["devices"])  # more than 16 are GPUs, as in the file, and not of this machine
    if devices > 16:
        options = f"{out} --slurm --nodes {-(-devices // 8)} --gpus-per-node 8"
        yield f"next: shardwise plan {out} --cluster h100 --devices {devices}, then shardwise submit {options}"
    else:
        yield f"next: shardwise plan {out}, then shardwise train {out}"
