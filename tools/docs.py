"""Fills the generated parts of the pages from the code. With `--check`: exits 1 if one is stale.

A generated part stands between two marks, in a page whose other words are written by hand:

    <!-- generated: NAME (tools/docs.py) -->
    <!-- end generated -->

Run: python tools/docs.py [--check]
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo
from typer.utils import get_params_from_function

import shardwise
from shardwise import cli, errors, support
from shardwise.job import Job
from shardwise.kinds import MODEL_CONFIGS, Count, DecoderConfig
from shardwise.layout import SCHEDULES, Layout, micro_batch_error
from shardwise.presets import PRESETS
from shardwise.verify import parity

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
MARK = re.compile(r"(<!-- generated: (\S+) \(tools/docs\.py\) -->\n).*?(<!-- end generated -->)", re.DOTALL)
SHOWN = 16  # micro-batch counts that the table of limits tries

# Where the docstring of a key or name is missing or too short for a reader who does not see the code.
MEANING = {
    "seed": "Decides initial weights, sample order and dropout; nothing else does.",
    "steps": "Optimizer steps; without `steps` and `tokens`: 200.",
    "tokens": "Tokens to train on instead of `steps`, or samples of a model without tokens; rounded up to whole steps.",
    "layout": 'A cut in [text form](layout.md); `"auto"`: as [planned](../how-to/plan-a-run.md) for this machine.',
    "precision": "What is computed in. Weights, sums and optimizer states are float64 for float64, else float32.",
    "compile": "Compiles each block with `torch.compile`, on a CPU by a C++ compiler; not where the backward is split.",
    "model.name": "A kind of model (`gpt`, `moe`, ...), or a [preset](#presets) whose shape becomes the default here.",
    "model: resnet.classes": "Classes that images are told apart by.",
    "model.layers": "Blocks.",
    "model.width": "Features of the stream between blocks.",
    "model.heads": "Heads of queries.",
    "model.vocab": "Token ids; at least as many as the tokenizer has.",
    "model.sequence": "Tokens in a sample.",
    "model.positions": "Learned table or rotary angles.",
    "model.norm": "LayerNorm or RMSNorm.",
    "model.activation": "Of the feed-forward part; `gelu` in its tanh form.",
    "model.bias": "Whether products and LayerNorms have a bias.",
    "model.attention_dropout": "Refused unless 0 (see [assumptions](../explanation/assumptions.md)).",
    "model.rope_theta": "Base of the rotary angles.",
    "model.norm_eps": "Added to the variance in a norm.",
    "model.init_std": "Standard deviation of initial matrices; `1/sqrt(2 layers)` of it where a block ends.",
    "data.source": "Where samples come from.",
    "batch.samples": "The global batch in samples; without `samples` and `tokens`: 32.",
    "batch.tokens": "The global batch in tokens, rounded down to whole samples.",
    "optimizer.lr": "The highest learning rate.",
    "optimizer.betas": "Decay of the two moments, of adamw, lamb and the part of muon that is adamw.",
    "optimizer.eps": "Added to the root of the second moment.",
    "checkpoint.asynchronous": "Whether files are written while training goes on.",
    "run.device": "Devices to run on; `auto`: GPUs where PyTorch sees any.",
    "validation.samples": "Held-out samples that are read each time, at most.",
    "shardwise.ShardwiseError": "Whatever is raised on purpose.",
    "shardwise.UserError": "What the caller can mend.",
    "shardwise.parallelize": "The job's model as this process holds and runs it in a layout: an `Engine`.",
}


# Text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(value: object) -> str:
    return f"`{value}`"


def sentence(text: str) -> str:
    """One line with an end."""
    flat = " ".join(text.split())
    return flat if flat.endswith((".", "?", "!")) else f"{flat}."


def docstrings(kind: type) -> dict[str, str]:
    """The text below each field of a class: Python forgets it, the source does not."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for line, after in zip(body.body, body.body[1:]):
        match line, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


# The job


def job_keys() -> Iterator[tuple[str, str, FieldInfo, str]]:
    """Section, key, field and meaning of every key, in the order of the file; of kinds of models, what they add."""
    sections: list[tuple[str, type[BaseModel]]] = [("", Job)]
    for name, field in Job.model_fields.items():
        if name == "model":
            sections += [
                ("model" if kind == "gpt" else f"model: {kind}", section) for kind, section in MODEL_CONFIGS.items()
            ]
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections.append((name, field.annotation))
    for section, kind in sections:
        texts = docstrings(kind)
        known = (
            DecoderConfig.model_fields if kind is not DecoderConfig and issubclass(kind, DecoderConfig) else ("name",)
        )
        for name, field in kind.model_fields.items():
            if (kind is Job and name in dict(sections)) or (": " in section and name in known):
                continue
            path = f"{section}.{name}" if section else name
            yield section, name, field, MEANING.get(path) or texts.get(name) or MEANING.get(f"model.{name}", "")


def job_tables() -> str:
    rows: dict[str, list[list[str]]] = {}
    for section, name, field, meaning in job_keys():
        rows.setdefault(section, []).append([code(name), value_of(field), default_of(field), sentence(meaning)])
    parts = []
    for section, lines in rows.items():
        title = f"## `[{section}]`" if section else "## Above all sections"
        if ": " in section:
            kind = section.removeprefix("model: ")
            more = (
                "Besides the keys above:"
                if issubclass(MODEL_CONFIGS[kind], DecoderConfig)
                else "Instead of the keys above:"
            )
            title = f'### `[model]` of {MODEL_CONFIGS[kind].description}: `name = "{kind}"`\n\n{more}'
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
    """The type in words, with its limits."""
    kind: Any = field.annotation
    inner = [part for part in get_args(kind) if part is not type(None)]
    if type(None) in get_args(kind):
        kind = inner[0]
    if get_origin(kind) is typing.Literal:
        return _words(get_args(kind))
    if bool in inner:
        return "`true`, `false`, " + _words([word for part in inner for word in get_args(part)])
    if any(get_origin(part) is tuple for part in inner):
        return "whole number, from 1, or a list of such"
    counts = kind is Count or any(part is Count for part in inner) or _is_count(field)
    if get_origin(kind) is typing.Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is dict:
        return "a table of numbers, above 0"
    if get_origin(kind) is tuple and ... in get_args(kind):
        return "whole numbers, from 1" if not (words := get_args(inner[0])) or int in words else _words(words)
    if get_origin(kind) is tuple:
        return "two numbers, 0 to below 1"
    if kind is str:
        return "text"
    if kind is bool:
        return "`true`, `false`"
    what = "number" if kind is float else "whole number"
    return f"{what}{_limits(field)}" + (', or `"0.5M"`' if counts else "")


def _words(known: Sequence[object]) -> str:
    return ", ".join(code(f'"{word}"' if isinstance(word, str) else word) for word in known)


def _is_count(field: FieldInfo) -> bool:
    return any(type(part).__name__ == "BeforeValidator" for part in field.metadata)


def _limits(field: FieldInfo) -> str:
    limits = {name: getattr(part, name) for part in field.metadata for name in ("ge", "gt", "le", "lt")
              if getattr(part, name, None) is not None}  # fmt: skip
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    return "".join(f", {words[name]} {limit:g}" for name, limit in limits.items()).replace(", to", " to")


def presets() -> str:
    keys = ["layers", "width", "heads", "kv_heads", "ffn", "vocab", "sequence"]
    rows = []
    for name, values in PRESETS.items():
        model = Job.model_validate({"model": {"name": name}}).model.model_dump()
        more = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()
                if key not in (*keys, "family", "norm_eps")]  # fmt: skip
        rows.append([code(name), code(values["family"]), *(str(model.get(key, "")) for key in keys), " ".join(more)])
    return table(("name", "family", *keys, "more"), rows)


# The layout


def layout_fields() -> str:
    texts = docstrings(Layout)
    rows = []
    for field in dataclasses.fields(Layout):
        default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        rows.append([code(field.name), code(default) if default != "" else "empty", sentence(texts[field.name])])
    return table(("field", "default", "meaning"), rows)


def micro_batch_limits() -> str:
    rows = []
    for name in SCHEDULES:
        cells = [code(name)]
        for pipeline in (2, 4):
            layout = Layout(pipeline=pipeline, schedule=name)
            allowed = [n for n in range(1, SHOWN + 1) if micro_batch_error(layout, n) is None]
            cells.append(_runs(allowed))
        rows.append(cells)
    return table(("schedule", "`pipeline=2`", "`pipeline=4`"), rows)


def _runs(numbers: Sequence[int]) -> str:
    """`1 to 4, 6`, and "and so on" in the words of the page."""
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
    known = [(command, "") for command in cli.app.registered_commands]
    known += [(command, f"{group.name} {command.name}") for group in cli.app.registered_groups
              if group.typer_instance for command in group.typer_instance.registered_commands]  # fmt: skip
    for command, name in known:
        assert command.callback is not None
        parts.append(f"## `{usage(command.callback, name)}`\n\n{sentence(inspect.getdoc(command.callback) or '')}")
        rows = [_parameter(*facts) for facts in parameters(command.callback)]
        parts.append(table(("", "value", "default", "meaning"), rows))
    return "\n\n".join(parts)


def parameters(function: Callable[..., Any]) -> Iterator[tuple[str, Any, ArgumentInfo | OptionInfo]]:
    """Name, type and what typer is told of each parameter of a command."""
    for name, facts in get_params_from_function(function).items():
        assert isinstance(facts.default, (ArgumentInfo, OptionInfo))
        yield name, facts.annotation, facts.default


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
    plain = [part for part in (get_args(kind) or (kind,)) if part is not type(None)][0]
    plain = get_args(plain)[0] if get_origin(plain) is list else plain
    words = {Path: "path", str: "text", int: "whole number", float: "number", bool: ""}
    value = info.metavar or words[plain]
    value += f", from {info.min:g}" if info.min is not None else ""
    default = "" if info.default in (..., None, "") or info.default is False else code(info.default)
    return [code(shown), value, default, sentence(info.help) if info.help else ""]


# The support table


def support_grid() -> str:
    """One line per schedules and ZeRO stages that have the same verdicts; precisions apart only where they differ."""
    verdicts = dict(support.all_combinations())
    notes = {found.explanation: str(number) for number, found in enumerate(_sentences(), start=1)}
    schedules = list(dict.fromkeys(words.schedule for words in verdicts))
    recomputes = list(dict.fromkeys(words.recompute for words in verdicts))
    lines: dict[tuple[str, ...], dict[tuple[str, ...], list[int]]] = {}
    for zero in dict.fromkeys(words.zero for words in verdicts):
        groups: dict[tuple[str, ...], list[str]] = {}
        for schedule in schedules:
            cells = tuple(_cell(verdicts, schedule, zero, recompute, notes) for recompute in recomputes)
            groups.setdefault(cells, []).append(schedule)
        for cells, alike in groups.items():
            lines.setdefault(tuple(alike), {}).setdefault(cells, []).append(zero)
    rows = []
    for names, by_cells in lines.items():
        label = ", ".join("no pipeline" if name == support.NO_PIPELINE else code(name) for name in names)
        for cells, zeros in by_cells.items():
            rows.append([label, ", ".join(map(str, zeros)), *cells])
    return table(("schedule", "zero", *(f"recompute {name}" for name in recomputes)), rows)


def _cell(verdicts: dict[Any, Any], schedule: str, zero: int, recompute: str, notes: dict[str, str]) -> str:
    kinds: dict[str, list[str]] = {}
    for words, found in verdicts.items():
        if (words.schedule, words.zero, words.recompute) == (schedule, zero, recompute):
            short = {support.EXACT: "exact", support.EXACT_AT_COST: "exact, cost", support.REFUSED: "refused"}[
                found.verdict
            ]
            kinds.setdefault(f"{short} ({notes[found.explanation]})" if found.explanation else short, []).append(
                words.precision
            )
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{', '.join(precisions)}: {kind}" for kind, precisions in kinds.items())


def _sentences() -> list[support.Support]:
    """The verdicts that say something, each once, in the order of the table."""
    found = {verdict.explanation: verdict for _, verdict in support.all_combinations() if verdict.explanation}
    order = [row.explanation for row in support.SUPPORT_RULES]
    return sorted(found.values(), key=lambda verdict: order.index(verdict.explanation))


def support_sentences() -> str:
    lines = []
    for number, found in enumerate(_sentences(), start=1):
        text = found.explanation[0].upper() + found.explanation[1:]
        lines.append(f"{number}. *{found.verdict}*: {sentence(text)}")
    return "\n".join(lines)


# Python


def names() -> str:
    rows = []
    for name in sorted(shardwise.__all__):
        found = getattr(shardwise, name)
        if not isinstance(found, str):
            meaning = MEANING.get(f"shardwise.{name}") or (found.__doc__ or "").partition("\n\n")[0]
            rows.append([code(f"shardwise.{name}"), code(found.__module__), sentence(meaning)])
    return table(("name", "lives in", "what it is"), rows)


# Verify and the errors


def limits() -> str:
    rows = [[name, f"{parity.TOLERANCE[name]:g}", f"{parity.NORM_FLOOR[name]:g}"] for name in support.PRECISIONS]
    return table(("precision", "limit", "floor"), rows)


def error_tree() -> str:
    tree = (errors.__doc__ or "").split("\n\n")[1]
    return f"```text\n{textwrap.dedent(tree)}\n```"


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
}


def filled(text: str) -> str:
    """A page with its generated parts made anew."""
    return MARK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n\n{found[3]}", text)


def stale_pages() -> list[Path]:
    return [page for page in PAGES if filled(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]


def main() -> None:
    """Writes what is stale, or with `--check` only names it."""
    stale = stale_pages()
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"{page.relative_to(ROOT)} is stale; run `make docs`.")
        sys.exit(bool(stale))
    for page in stale:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{page.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
