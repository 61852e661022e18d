"""Regenerates the generated sections of the docs from the code. With `--check`: exits 1 if one is stale.

A generated section stands between two markers in an otherwise hand-written page:

    <!-- generated: NAME (tools/docs.py) -->
    <!-- end generated -->

Run: python tools/docs.py [--check]
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

import peer_tables
import support_table as support
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo
from typer.utils import get_params_from_function

import shardwise
from shardwise import cli, errors
from shardwise.files import parse_toml
from shardwise.job import Job
from shardwise.layout import SCHEDULES, Layout, micro_batch_error
from shardwise.models.config import PRESETS, Count, LoRA, ModelConfig
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.registry import BUILT_IN
from shardwise.verify import parity

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
MARK = re.compile(r"(<!-- generated: (\S+) \(tools/docs\.py\) -->\n).*?(<!-- end generated -->)", re.DOTALL)
SHOWN = 16  # the largest micro-batch count in the table of allowed counts

# Meanings of names that have no docstring of their own.
MEANING = {
    "shardwise.Callback": "Base class of callbacks, which run on rank 0 during training; override what you need.",
    "shardwise.Task": 'A module, its loss, its data and how to train it, for `model.name = "python:..."`.',
    "shardwise.ShardwiseError": "Base class of every error raised on purpose.",
    "shardwise.UserError": "An error that the caller can fix.",
    "shardwise.parallelize": "Builds this rank's part of a job in a layout: an `Engine`.",
}

JOB_KEYS = parse_toml((ROOT / "shardwise" / "job_keys.toml").read_text(encoding="utf-8"))
LAYOUT_KEYS = parse_toml((ROOT / "shardwise" / "layout_keys.toml").read_text(encoding="utf-8"))
MODEL_KEYS = parse_toml((ROOT / "shardwise" / "models" / "model_keys.toml").read_text(encoding="utf-8"))


# Text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(value: object) -> str:
    return f"`{value}`"


def sentence(text: str) -> str:
    """Joins lines and adds a full stop if there is none."""
    flat = " ".join(text.split())
    return flat if flat.endswith((".", "?", "!")) else f"{flat}."


# The job


def job_keys() -> Iterator[tuple[str, str, FieldInfo, str]]:
    """Yields section, key, field and meaning of every key in file order; for a kind of decoder, only what it adds."""
    sections: list[tuple[str, type[BaseModel]]] = [("", Job)]
    for name, field in Job.model_fields.items():
        if name == "model":
            sections += [
                ("model" if kind == "gpt" else f"model: {kind}", section)
                for kind, section in ((name, family.config) for name, family in BUILT_IN.items())
            ]
            sections.append(("model.lora", LoRA))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections.append((name, field.annotation))
    for section, kind in sections:
        texts = JOB_KEYS.get(section, {}) if section else JOB_KEYS
        if section.startswith("model"):
            texts = MODEL_KEYS["gpt"] | MODEL_KEYS[section.removeprefix("model").strip(":. ") or "gpt"]
        is_decoder = kind is not DecoderConfig and issubclass(kind, DecoderConfig)
        known = DecoderConfig.model_fields if is_decoder else ModelConfig.model_fields
        for name, field in kind.model_fields.items():
            if (kind is Job and name in dict(sections)) or (": " in section and name in known):
                continue
            yield section, name, field, texts.get(name, "")


def job_tables() -> str:
    rows: dict[str, list[list[str]]] = {}
    for section, name, field, meaning in job_keys():
        rows.setdefault(section, []).append([code(name), value_of(field), default_of(field), sentence(meaning)])
    parts = []
    for section, lines in rows.items():
        title = f"## `[{section}]`" if section else "## Top-level keys"
        if ": " in section:
            kind = section.removeprefix("model: ")
            relation = (
                "In addition to the keys of `gpt`:"
                if issubclass(BUILT_IN[kind].config, DecoderConfig)
                else "Instead of the keys of `gpt`:"
            )
            described = BUILT_IN[kind].config.description.removeprefix("a ")
            title = f'### `[model]` with `name = "{kind}"` ({described})\n\n{relation}'
        parts += [title, table(("key", "value", "default", "meaning"), lines)]
    return "\n\n".join(parts)


def default_of(field: FieldInfo) -> str:
    if field.default is None:
        return ""
    if isinstance(field.default, bool):
        return code(str(field.default).lower())
    if isinstance(field.default, str):
        return code(f'"{field.default}"')
    if isinstance(field.default, int):
        return code(field.default)
    if isinstance(field.default, tuple):
        return code(list(field.default))
    return code(f"{field.default:g}" if isinstance(field.default, float) else field.default)


def value_of(field: FieldInfo) -> str:
    """Describes the values a field accepts: its type and limits."""
    kind: Any = field.annotation
    options = [part for part in get_args(kind) if part is not type(None)]
    if type(None) in get_args(kind):
        kind = options[0]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a table"
    words = [word for part in options if get_origin(part) is typing.Literal for word in get_args(part)]
    if get_origin(kind) is typing.Literal:
        return _words(get_args(kind))
    if words and bool in options:
        return "`true`, `false`, " + _words(words)
    if words and get_origin(options[-1]) is tuple:
        return _words(get_args(options[0])) + ", or a list of these"
    if words and get_origin(kind) is not tuple:
        return f"integer{_limits(options[0].__metadata__[0])}, or {_words(words)}"
    if any(get_origin(part) is tuple for part in options):
        return "integer >= 1, or a list of them"
    counts = kind is Count or any(part is Count for part in options) or _is_count(field)
    if get_origin(kind) is typing.Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is dict:
        return "a table of numbers" if get_args(kind)[1] is float else "a table"
    if get_origin(kind) is tuple and ... in get_args(kind):
        if get_args(kind)[0] is str:
            return "list of texts"
        return f"list of {_words(words)}" if words else "list of integers >= 1"
    if get_origin(kind) is tuple:
        return "two numbers >= 0, < 1"
    if kind is str:
        return "text"
    if kind is bool:
        return "`true`, `false`"
    name = "number" if kind is float else "integer"
    return f"{name}{_limits(field)}" + (', or `"0.5M"`' if counts else "")


def _words(known: Sequence[object]) -> str:
    return ", ".join(code(f'"{word}"' if isinstance(word, str) else word) for word in known)


def _is_count(field: FieldInfo) -> bool:
    return any(type(part).__name__ == "BeforeValidator" for part in field.metadata)


def _limits(field: FieldInfo) -> str:
    limits = {name: getattr(part, name) for part in field.metadata for name in ("ge", "gt", "le", "lt")
              if getattr(part, name, None) is not None}  # fmt: skip
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return ",".join(f" {signs[name]} {limit:g}" for name, limit in limits.items())


def presets() -> str:
    keys = ["layers", "width", "heads", "kv_heads", "ffn", "vocab", "sequence"]
    rows = []
    for name, values in PRESETS.items():
        model = Job.model_validate({"model": {"name": name}}).model.model_dump()
        others = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()
                  if key not in (*keys, "family", "norm_eps")]  # fmt: skip
        rows.append([code(name), code(values["family"]), *(str(model.get(key, "")) for key in keys), " ".join(others)])
    return table(("name", "family", *keys, "other keys"), rows)


# The layout


def layout_fields() -> str:
    rows = []
    for field in dataclasses.fields(Layout):
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        rows.append([code(field.name), code(default) if default != "" else "empty", sentence(LAYOUT_KEYS[field.name])])
    return table(("field", "default", "meaning"), rows)


def micro_batch_limits() -> str:
    rows = []
    for name in SCHEDULES:
        cells = [code(name)]
        for pipeline in (2, 4):
            layout = Layout(pipeline=pipeline, schedule=name)
            allowed = [n for n in range(1, SHOWN + 1) if micro_batch_error(layout, n) is None]
            cells.append(_ranges(allowed))
        rows.append(cells)
    return table(("schedule", "`pipeline=2`", "`pipeline=4`"), rows)


def _ranges(numbers: Sequence[int]) -> str:
    """Formats ascending numbers as ranges: `1 to 4, 6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


# The commands


def commands() -> str:
    parts = []
    known = [(command, command.name or "") for command in cli.app.registered_commands]
    known += [(command, f"{group.name} {command.name}") for group in cli.app.registered_groups
              if group.typer_instance for command in group.typer_instance.registered_commands]  # fmt: skip
    for command, name in known:
        assert command.callback is not None
        parts.append(f"## `{usage(command.callback, name)}`\n\n{sentence(inspect.getdoc(command.callback) or '')}")
        rows = [_parameter(*parameter) for parameter in parameters(command.callback)]
        parts.append(table(("", "value", "default", "meaning"), rows))
    return "\n\n".join(parts)


def parameters(function: Callable[..., Any]) -> Iterator[tuple[str, Any, ArgumentInfo | OptionInfo]]:
    """Yields name, type and typer metadata of each parameter of a command."""
    for name, parameter in get_params_from_function(function).items():
        assert isinstance(parameter.default, (ArgumentInfo, OptionInfo))
        yield name, parameter.annotation, parameter.default


def usage(function: Callable[..., Any], command: str = "") -> str:
    words = [f"shardwise {command or function.__name__}"]
    for name, _, info in parameters(function):
        if isinstance(info, ArgumentInfo):
            words.append(name.upper() if info.default is ... else f"[{name.upper()}]")
    return " ".join([*words, "[OPTIONS]"])


def _parameter(name: str, kind: Any, info: ArgumentInfo | OptionInfo) -> list[str]:
    shown = name.upper()
    if isinstance(info, OptionInfo):
        shown = ", ".join(info.param_decls or ()) or f"--{name.replace('_', '-')}"
    base = [part for part in (get_args(kind) or (kind,)) if part is not type(None)][0]
    base = get_args(base)[0] if get_origin(base) is list else base
    words = {Path: "path", str: "text", int: "integer", float: "number", bool: ""}
    value = info.metavar or words[base]
    value += f" >= {info.min:g}" if info.min is not None else ""
    default = "" if info.default in (..., None, "") or info.default is False else code(info.default)
    return [code(shown), value, default, sentence(info.help) if info.help else ""]


# The support table


def support_grid() -> str:
    """One row per group of schedules and ZeRO stages with equal verdicts; precisions appear only if they differ."""
    verdicts = dict(support.all_combinations())
    notes = {verdict.explanation: str(number) for number, verdict in enumerate(_explained_verdicts(), start=1)}
    schedules = list(dict.fromkeys(words.schedule for words in verdicts))
    recomputes = list(dict.fromkeys(words.recompute for words in verdicts))
    lines: dict[tuple[str, ...], dict[tuple[str, ...], list[int]]] = {}
    for zero in dict.fromkeys(words.zero for words in verdicts):
        groups: dict[tuple[str, ...], list[str]] = {}
        for schedule in schedules:
            cells = tuple(_cell(verdicts, schedule, zero, recompute, notes) for recompute in recomputes)
            groups.setdefault(cells, []).append(schedule)
        for cells, members in groups.items():
            lines.setdefault(tuple(members), {}).setdefault(cells, []).append(zero)
    rows = []
    for names, by_cells in lines.items():
        label = ", ".join("no pipeline" if name == support.NO_PIPELINE else code(name) for name in names)
        for cells, zeros in by_cells.items():
            rows.append([label, ", ".join(map(str, zeros)), *cells])
    return table(("schedule", "zero", *(f"recompute {name}" for name in recomputes)), rows)


def _cell(verdicts: dict[Any, Any], schedule: str, zero: int, recompute: str, notes: dict[str, str]) -> str:
    kinds: dict[str, list[str]] = {}
    for words, support_of in verdicts.items():
        if (words.schedule, words.zero, words.recompute) == (schedule, zero, recompute):
            short = {support.EXACT: "exact", support.EXACT_AT_COST: "exact, at a cost"}[support_of.verdict]
            label = f"{short} ({notes[support_of.explanation]})" if support_of.explanation else short
            kinds.setdefault(label, []).append(words.precision)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{', '.join(precisions)}: {kind}" for kind, precisions in kinds.items())


def _explained_verdicts() -> list[support.SupportRule]:
    """The distinct verdicts with an explanation, in the order of the table."""
    verdicts = {verdict.explanation: verdict for _, verdict in support.all_combinations() if verdict.explanation}
    order = [row.explanation for row in support.SUPPORT_RULES]
    return sorted(verdicts.values(), key=lambda verdict: order.index(verdict.explanation))


def support_sentences() -> str:
    lines = []
    for number, verdict in enumerate(_explained_verdicts(), start=1):
        text = verdict.explanation[0].upper() + verdict.explanation[1:]
        lines.append(f"{number}. {sentence(text)}")
    return "\n".join(lines)


# Python


def names() -> str:
    rows = []
    for name in sorted(shardwise.__all__):
        value = getattr(shardwise, name)
        if not isinstance(value, str):
            meaning = MEANING.get(f"shardwise.{name}") or (value.__doc__ or "").partition("\n\n")[0]
            rows.append([code(f"shardwise.{name}"), code(value.__module__), sentence(meaning)])
    return table(("name", "module", "meaning"), rows)


# Verify and the errors


def limits() -> str:
    rows = [[name, f"{parity.TOLERANCE[name]:g}", f"{parity.NORM_FLOOR[name]:g}"] for name in support.PRECISIONS]
    return table(("precision", "tolerance", "floor"), rows)


def error_tree() -> str:
    def branches(parent: Any, indent: str = "") -> Iterator[str]:
        kinds = [kind for kind in parent.__subclasses__() if kind.__module__ == errors.__name__]
        for kind in kinds:
            fork, margin = ("└── ", "    ") if kind is kinds[-1] else ("├── ", "│   ")
            text = (kind.__doc__ or "").rstrip(".")
            yield f"{indent + fork + kind.__name__:<25}{text[:1].lower()}{text[1:]}"
            yield from branches(kind, indent + margin)

    tree = "\n".join([errors.ShardwiseError.__name__, *branches(errors.ShardwiseError)])
    return f"```text\n{tree}\n```"


BLOCKS: dict[str, Callable[[], str]] = {
    "job": job_tables,
    "presets": presets,
    "layout": layout_fields,
    "micro-batches": micro_batch_limits,
    "commands": commands,
    "support-grid": support_grid,
    "support-sentences": support_sentences,
    "names": names,
    "limits": limits,
    "errors": error_tree,
    **{f"from-{name}": partial(peer_tables.peer_table, name) for name in peer_tables.FLAGS},
}


def regenerate(text: str) -> str:
    """Returns a page with its generated sections regenerated."""
    return MARK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n\n{match[3]}", text)


def stale_pages() -> list[Path]:
    return [page for page in PAGES if regenerate(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]


def main() -> None:
    """Rewrites stale pages, or with `--check` only lists them."""
    stale = stale_pages()
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"{page.relative_to(ROOT)} is stale; run `make docs`.")
        sys.exit(bool(stale))
    for page in stale:
        page.write_text(regenerate(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{page.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
