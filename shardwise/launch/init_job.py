"""Writes a commented job for a task (`shardwise init`), by options or by four questions. What it writes is checked."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.console import fill_in
from shardwise.data.text import source_by_name, walk_files
from shardwise.errors import JobError, suggest
from shardwise.files import parse_toml, require_parent_folder, write_text
from shardwise.job import make_job

TEMPLATES = Path(__file__).parent / "templates"


def write_job(
    out: Path, given: Mapping[str, str | None], ask: Callable[[str, str | None], str] | None
) -> Iterator[str]:
    """Writes the job file `out`; yields what to tell. `ask` gets a question and its default; None: nobody answers."""
    tasks = parse_toml((TEMPLATES / "init.toml").read_text(encoding="utf-8"))
    require_parent_folder(out)
    if out.exists():
        raise JobError(f"{out} exists; name another file: shardwise init other.toml.")
    answers: dict[str, str] = {}
    for key in ("task", "data", "model", "devices"):
        question, *default = (tasks["any"] | tasks.get(answers.get("task", ""), {}))[key]
        answer = given[key]
        if answer is None:
            answer = ask(question, default[0] if default else None) if ask else "".join(default)
        if key == "task" and answer not in tasks:
            raise JobError(f"--task {answer} is unknown; {suggest(answer, [name for name in tasks if name != 'any'])}")
        if (not answer and not default) or (key == "devices" and not answer.isdecimal()):
            raise JobError(f"--{key} needs a {'number' if default else 'value'}. {question}.")
        answers[key] = answer
    text = fill_in(TEMPLATES / f"init-{answers['task']}.toml", {"out": str(out), **answers, **_look_at(answers)})
    make_job(parse_toml(text), str(out))
    write_text(out, text + "\n")
    yield f"{out}: {tasks[answers['task']]['about']}; every key has a comment"
    yield f"next: shardwise plan {out}, then shardwise train {out}"


def _look_at(answers: Mapping[str, str]) -> dict[str, Any]:
    """Returns what the files that the answers name say about the job."""
    data, run = Path(answers["data"]).expanduser(), Path(answers["model"].partition("@")[0]).expanduser()
    files = walk_files(data) if answers["data"] and data.is_dir() else iter(())
    source = source_by_name(str(next(files, answers["data"])))[0] if answers["data"] else ""
    classes = data / "train" if (data / "train").is_dir() else data
    found = [one for one in classes.iterdir() if one.is_dir()] if answers["data"] and classes.is_dir() else ()
    return {"source": source, "classes": len(found) or 10, "is_run": (run / "job.toml").is_file()}
