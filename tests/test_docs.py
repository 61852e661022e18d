"""The documentation says what is true: generated parts are fresh, links and names resolve, commands and jobs parse."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import typer
import yaml

from shardwise.cli import app
from shardwise.errors import UserError
from shardwise.job import load_job, make_job
from shardwise.layout import Layout
from shardwise.models.registry import ENTRY_POINTS
from shardwise.parallel.prepare import prepare
from shardwise.train.local_machine import choose_plan

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINKED = sorted([*PAGES, *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob(".github/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.toml"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:^|[\s`])shardwise ((?:train|verify|sample|data)(?:\s.*)?)$")
FILE = re.compile(r"(?:shardwise|tests|benchmarks|tools|docs|examples)/[\w./-]*")
PARSERS: dict[str, Any] = {
    "toml": tomllib.loads, "json": json.loads, "jsonl": lambda text: [*map(json.loads, text.splitlines())],
    "python": ast.parse, "yaml": yaml.safe_load, "jinja": jinja2.Environment().parse,
    "console": str, "text": str, "bash": str, "sh": str,
}  # fmt: skip


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(text: str) -> Iterator[str]:
    """What follows `shardwise` in code, whether in a block or amid a sentence."""
    fenced = "\n".join(content for _, content in FENCE.findall(text))
    for line in fenced.replace("\\\n", " ").splitlines():
        if found := COMMAND.search(line):
            yield found[1]
    for words in INLINE.findall(FENCE.sub("", text)):
        found = COMMAND.search(words)
        if found and " " in found[1] and "[OPTIONS]" not in words:  # a bare name is talk about the command
            yield found[1]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def generator() -> Any:
    """`tools/docs.py` as a module."""
    sys.path.append(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("docs_generator", ROOT / "tools" / "docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_fresh() -> None:
    assert not generator().stale_pages(), "run `make docs`"


def test_stale_pages_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = generator()
    page = tmp_path / "layout.md"
    page.write_text((ROOT / "docs/reference/layout.md").read_text().replace("Ranks that each hold", "Ranks that eat"))
    monkeypatch.setattr(docs, "PAGES", [page])
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["docs.py", "--check"])
    with pytest.raises(SystemExit) as told:
        docs.main()
    assert told.value.code == 1
    monkeypatch.setattr("sys.argv", ["docs.py"])
    docs.main()
    assert page.read_text() == (ROOT / "docs/reference/layout.md").read_text()


def test_every_key_has_a_meaning() -> None:
    for section, name, _, meaning in generator().job_keys():
        assert meaning, f"{section}.{name} has no meaning in job_keys.toml or model_keys.toml"


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: {name_of(target)} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse(page: Path) -> None:
    """Options exist and take their values; so do the keys and layouts that they name."""
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for line in commands(page.read_text(encoding="utf-8")):
        name, *words = shlex.split(line, comments=True)
        values = known[name].make_context(name, words).params
        for setting in values.get("overrides") or []:
            if setting.startswith(("model.weights=", "model.name=hf:./")):
                continue  # these folders are the reader's
            load_job(None, ["data.source=text", setting] if setting.startswith("data.path=") else [setting])
        layouts = values.get("layout") or []
        for layout in [layouts] if isinstance(layouts, str) else layouts:
            Layout.parse(layout)


def test_commands_are_found() -> None:
    """The search above does not look past what it is meant to find."""
    shown = "amid `shardwise train a.toml` and `shardwise data`\n```console\n$ shardwise verify \\\n  --json\n```\n"
    assert list(commands(shown)) == ["verify    --json", "train a.toml"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_toml_blocks_are_jobs(page: Path) -> None:
    for text in blocks(page, "toml"):
        job = make_job(tomllib.loads(text))
        if job.layout != "auto":
            prepare(job, Layout.parse(job.layout))


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_code_blocks_parse(page: Path) -> None:
    """Every block says its language, and is in it."""
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        assert language in PARSERS, f"a block in {language or 'no language'}"
        PARSERS[language](textwrap.dedent(text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_names_exist(page: Path) -> None:
    for words in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if FILE.fullmatch(words):
            assert (ROOT / words).exists(), f"there is no {words}"
        if re.fullmatch(r"shardwise(\.\w+)+", words) and words != ENTRY_POINTS:
            assert resolves(words), f"there is no {words}"


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            place: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            place = getattr(place, part, None)
        return place is not None
    return False


def test_the_house_is_complete() -> None:
    """Every room of the table exists, and every room that exists is in the table."""
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `shardwise/")]
    rooms = [room for row in rows for room in FILE.findall(row.split("|")[1])]
    assert rooms and all((ROOT / room).exists() for room in rooms)
    there = {f"shardwise/{path.name}/" for path in (ROOT / "shardwise").iterdir() if (path / "__init__.py").exists()}
    there |= {f"shardwise/{path.name}" for path in (ROOT / "shardwise").glob("[a-z]*.py")}
    assert there == set(rooms)
    for row in rows:
        room = FILE.findall(row.split("|")[1])[0]
        for file in re.findall(r"`(\w+\.py)`", row.split("|")[2]):
            assert (ROOT / room / file).exists(), f"{room} has no {file}"


@pytest.mark.thin(9)
@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_examples_can_be_trained(example: Path) -> None:
    job = load_job(example)
    prepare(job, choose_plan(job)[0].best.layout)
    assert example.read_text(encoding="utf-8").startswith("# "), "an example says what it is for"


def test_examples_speak_of_commands_that_parse() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = 0
    for example in EXAMPLES:
        for line in example.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"#\s+shardwise (.*)", line):
                name, *words = shlex.split(match[1])
                known[name].make_context(name, words)
                found += 1
    assert found >= len(EXAMPLES)


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tutorial,) = blocks(ROOT / "docs" / "tutorial.md", "toml")
    (tmp_path / "first.toml").write_text(tutorial)
    monkeypatch.chdir(tmp_path)
    for text in blocks(ROOT / "docs" / "reference" / "python.md", "python"):
        exec(compile(text, "python.md", "exec"), {"__name__": "__main__"})
    *records, first, _, _ = capsys.readouterr().out.splitlines()
    assert len(records) == 2 and all(" True " in record for record in records)
    assert float(first) > 5.0


def test_errors_shown_are_the_errors_raised() -> None:
    """The sentences on the pages are those of today's code, for the job of the tutorial."""
    (tutorial,) = blocks(ROOT / "docs" / "tutorial.md", "toml")
    values = tomllib.loads(tutorial)
    shown = 0
    for page in PAGES:
        for text in blocks(page, "console"):
            asked = re.search(r"^\$ shardwise train first\.toml --set layout=\"(.*)\"\nshardwise: (.*)$", text, re.M)
            if asked:
                with pytest.raises(UserError) as raised:
                    job = make_job({**values, "layout": asked[1]})
                    prepare(job, Layout.parse(job.layout))
                assert str(raised.value) == asked[2]
                shown += 1
    assert shown >= 3
