"""How many small changes of the package the suite notices.

    pytest --reach reach.jsonl -n 2                               which functions each test runs
    pytest --mutants 300 --reach-file reach.jsonl --report r.jsonl     the verdict on each mutant

A mutant is one change of one function (`suite.mutants`). It is judged by the tests that run this function, the shortest
first, until one fails. Nothing is imported or collected again: a process is forked per mutant, in which the function's
code is replaced where it is, so that every process forked from there has the changed code too."""

import ast
import gc
import importlib
import json
import mmap
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import pytest

import shardwise
from suite.mutants import Mutant, code_of, draw_mutants
from suite.warm import WarmProcess

PACKAGE = Path(shardwise.__file__).parent
ROOMS = ("parallel", "train/checkpoint", "verify", "planner", "data")
"""Whose files are changed: those that begin with one of these."""
PROBES = "__shardwise_probes__"
AT_ONCE = 2
LEAST_SECONDS = 120.0  # before a mutant counts as hanging
SLOWER = 5.0  # how many times longer than before its tests may take
Place = tuple[str, str]  # file and qualified name of a function


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutation testing")
    group.addoption("--reach", type=Path, metavar="FILE", help="append which functions each test runs")
    group.addoption("--mutants", type=int, metavar="N", help="judge N mutants instead of running the tests")
    group.addoption("--mutant-seed", type=int, default=0, metavar="SEED", help="draws the mutants")
    group.addoption("--reach-file", type=Path, metavar="FILE", help="what --reach has written")
    group.addoption("--report", type=Path, metavar="FILE", help="append the verdicts; those in it are kept")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if config.getoption("reach") and not config.getoption("collectonly"):
        config.pluginmanager.register(Reach(config.getoption("reach").absolute()), "reach")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if session.config.getoption("mutants") is None:
        return None
    judge_mutants(session)
    return True


# The functions of the package


def import_everything() -> None:
    """Imports every module of the package, so that no code is read later on."""
    for found in pkgutil.walk_packages([str(PACKAGE)], "shardwise."):
        if not found.name.endswith("__main__"):
            with suppress(ModuleNotFoundError):  # what needs a GPU
                importlib.import_module(found.name)


def live_functions() -> dict[tuple[str, str, int], list[FunctionType]]:
    """Returns the functions of the package by file, qualified name and first line, wherever a decorator keeps them."""
    gc.unfreeze()
    found = defaultdict(list)
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename.startswith(str(PACKAGE)):
            code = one.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(one)
    gc.freeze()
    return found


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)


def replace_code(functions: list[FunctionType], code: CodeType) -> None:
    for function in functions:
        if len(code.co_freevars) == len(function.__code__.co_freevars):
            function.__code__ = code


# Which functions a test runs


class Reach:
    """Marks each function that runs, in this process or in one that is forked from it."""

    def __init__(self, file: Path):
        self.file = file
        self.places: list[Place] = []
        import_everything()
        functions = live_functions()
        sources = sorted({key[0] for key in functions})
        changed = {source: self._with_probes(Path(source)) for source in sources}
        self.marks = mmap.mmap(-1, max(1, len(self.places)))

        for source, code in changed.items():
            for one in codes_in(code):
                live = functions.get((source, one.co_qualname, one.co_firstlineno), [])
                for function in live:
                    function.__globals__[PROBES] = self.marks
                replace_code(live, one)

    def _with_probes(self, file: Path) -> CodeType:
        """Returns the code of a file in which every function first makes its mark."""
        tree = ast.parse(file.read_text())
        name = str(file.relative_to(PACKAGE.parent))
        pending: list[tuple[ast.AST, str]] = [(node, "") for node in tree.body]
        while pending:
            node, prefix = pending.pop()
            if isinstance(node, ast.ClassDef):
                pending += [(child, f"{prefix}{node.name}.") for child in node.body]
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            (mark,) = ast.parse(f"{PROBES}[{len(self.places)}] = 1").body
            has_docstring = ast.get_docstring(node, clean=False) is not None
            first = node.body[0]
            for part in ast.walk(mark):
                ast.copy_location(part, first)
            node.body.insert(1 if has_docstring else 0, mark)
            self.places.append((name, f"{prefix}{node.name}"))
        return compile(ast.fix_missing_locations(tree), str(file), "exec", dont_inherit=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.marks[:] = bytes(len(self.marks))
        begin = time.monotonic()
        try:
            return (yield)
        finally:
            reached = [place for place, mark in zip(self.places, self.marks[:], strict=False) if mark]
            row = {"test": item.nodeid, "seconds": round(time.monotonic() - begin, 2), "functions": reached}
            with self.file.open("a") as file:
                file.write(json.dumps(row) + "\n")


# The verdicts


@dataclass
class Trial:
    """A mutant that is being judged."""

    mutant: Mutant
    items: list[pytest.Item]
    deadline: float
    begin: float
    folder: Path


def judge_mutants(session: pytest.Session) -> None:
    options = session.config.option
    files = [file for file in PACKAGE.rglob("*.py") if str(file.relative_to(PACKAGE)).startswith(ROOMS)]
    mutants = draw_mutants(files, PACKAGE.parent, options.mutants, options.mutant_seed)
    known = {row["mutant"] for row in _rows(options.report)}
    import_everything()

    tests_of: dict[Place, list[str]] = defaultdict(list)
    seconds = {}
    for row in _rows(options.reach_file):
        seconds[row["test"]] = row["seconds"]
        for file, function in row["functions"]:
            tests_of[file, function].append(row["test"])
    items = {item.nodeid: item for item in session.items}

    waiting = [mutant for mutant in mutants if mutant.describe() not in known]
    running: dict[int, Trial] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            mutant = waiting.pop()
            names = sorted(set(tests_of[mutant.file, mutant.function]) & items.keys(), key=seconds.__getitem__)
            if names:
                longest = LEAST_SECONDS + SLOWER * sum(seconds[name] for name in names)
                pid, trial = begin_trial(session, mutant, [items[name] for name in names], longest)
                running[pid] = trial
            else:
                _append(options.report, mutant, "survived", "no test runs this function", 0.0)
        _end_trials(running, options.report)
        time.sleep(0.05)
    _print_table(_rows(options.report))


def begin_trial(session: pytest.Session, mutant: Mutant, items: list[pytest.Item], longest: float) -> tuple[int, Trial]:
    folder = Path(tempfile.mkdtemp(prefix="shardwise-mutant-"))
    pid = os.fork()
    if not pid:
        _run_tests(session, mutant, items, folder)
    now = time.monotonic()
    return pid, Trial(mutant, items, now + longest, now, folder)


def _run_tests(session: pytest.Session, mutant: Mutant, items: list[pytest.Item], folder: Path) -> NoReturn:
    """Runs tests with a mutant in this process, and ends it: with 1 once one has failed, with 0 if none has."""
    os.setsid()
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    file = str(PACKAGE.parent / mutant.file)
    code = code_of(mutant.source, file, mutant.function)
    replace_code(live_functions().get((file, mutant.function, code.co_firstlineno), []), code)
    WarmProcess()
    session.config._tmp_path_factory._given_basetemp = folder / "tmp"  # type: ignore[attr-defined]

    class EndOnFailure:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                (folder / "killer").write_text(report.nodeid)
                os._exit(1)

    session.config.pluginmanager.register(EndOnFailure())
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    os._exit(0)


def _end_trials(running: dict[int, Trial], report: Path) -> None:
    for pid, trial in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        is_late = time.monotonic() > trial.deadline
        if not ended and not is_late:
            continue
        _kill_group(pid)
        if not ended:
            os.waitpid(pid, 0)

        killer = trial.folder / "killer"
        took = time.monotonic() - trial.begin
        if killer.exists():
            _append(report, trial.mutant, "killed", killer.read_text(), took)
        elif is_late:
            _append(report, trial.mutant, "killed", "it hangs", took)
        elif status:
            _append(report, trial.mutant, "killed", f"the process ended with status {status}", took)
        else:
            _append(report, trial.mutant, "survived", f"{len(trial.items)} tests run this function", took)
        shutil.rmtree(trial.folder, ignore_errors=True)
        del running[pid]


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _rows(file: Path | None) -> list[dict[str, Any]]:
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def _append(report: Path, mutant: Mutant, verdict: str, reason: str, seconds: float) -> None:
    row = {
        "mutant": mutant.describe(),
        "file": mutant.file,
        "verdict": verdict,
        "reason": reason,
        "seconds": round(seconds, 1),
    }
    with report.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _print_table(rows: list[dict[str, Any]]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        room = next(room for room in ROOMS if row["file"].startswith(f"shardwise/{room}"))
        counts[room, row["verdict"]] += 1
        counts["all", row["verdict"]] += 1
    lines = ["", f"{'room':20}{'mutants':>10}{'killed':>10}"]
    for room in (*ROOMS, "all"):
        killed = counts[room, "killed"]
        total = killed + counts[room, "survived"]
        if total:
            lines.append(f"{room:20}{total:>10}{killed / total:>10.1%}")
    print("\n".join(lines), file=sys.stderr)
