"""The suite itself: which cases run, and what it says of those that fail or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from suite.mutants import Mutant, code_of, draw_mutants
from suite.mutation_testing import replace_code

pytest_plugins = ["pytester"]

CASES = """
    import pytest

    @pytest.mark.thin(4)
    @pytest.mark.parametrize("number", range({count}))
    def test_thin(number): pass

    @pytest.mark.thin(by_kind=True)
    @pytest.mark.parametrize("case", ["deaf a", "deaf b", "mute a", "mute b"])
    def test_kinds(case): pass

    @pytest.mark.cluster
    def test_far(): pass

    def test_plain(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A suite of its own with our plugins."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pytester.makeconftest('pytest_plugins = ["suite.selection", "suite.report"]')
    return pytester


def run_names(suite: pytest.Pytester, *options: str) -> set[str]:
    found = suite.inline_run("-p", "no:timeout", *options)
    return {call.report.nodeid.split("::")[1] for call in found.getcalls("pytest_runtest_logreport")}


def test_a_new_case_moves_no_other(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_one=CASES.format(count=40))
    before = {name for name in run_names(suite) if "thin" in name}
    suite.makepyfile(test_one=CASES.format(count=60))
    after = {name for name in run_names(suite) if "thin" in name}
    assert 4 <= len(before) <= 16 and before < after


def test_one_case_of_each_kind_and_at_least_one_of_each_test(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_one=CASES.format(count=1))
    names = run_names(suite)
    assert "test_thin[0]" in names and "test_plain" in names and "test_far" not in names
    assert sorted(name[:15] for name in names if "kinds" in name) == ["test_kinds[deaf", "test_kinds[mute"]


def test_parts_of_the_rest_are_all_of_it(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_one=CASES.format(count=40))
    parts = [run_names(suite, "--share", f"{part}/3") for part in range(3)]
    parts += [run_names(suite), run_names(suite, "-m", "cluster")]
    assert set.union(*parts) == run_names(suite, "--all")
    assert sum(map(len, parts)) == 40 + 4 + 2


def test_what_is_asked_for_by_name_runs(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_one=CASES.format(count=40))
    assert run_names(suite, "-m", "cluster") == {"test_far"}
    assert "test_far" in run_names(suite, "test_one.py")
    left_out = sorted(run_names(suite, "--all") - run_names(suite) - {"test_far"})
    assert run_names(suite, f"test_one.py::{left_out[0]}") == {left_out[0]}


@pytest.mark.parametrize("share", ["3/3", "1", "a/b"])
def test_a_part_that_is_none_is_a_sentence(suite: pytest.Pytester, share: str) -> None:
    suite.makepyfile(test_one=CASES.format(count=1))
    result = suite.runpytest("-p", "no:timeout", "--share", share)
    result.stderr.fnmatch_lines([f"ERROR: --share {share}: write K/N, as 0/10 for the first of ten parts."])


def test_a_failure_tells_how_to_run_it_alone(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_one="def test_wrong(): assert False")
    result = suite.runpytest("-p", "no:timeout")
    result.stdout.fnmatch_lines(["* -m pytest test_one.py::test_wrong"])


def test_a_test_that_hangs_shows_where_all_its_processes_are(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_one="""
        import multiprocessing
        import time

        import pytest

        def sleep_in_the_other_process():
            time.sleep(60)

        @pytest.mark.timeout(1)
        def test_hangs():
            process = multiprocessing.get_context("fork").Process(target=sleep_in_the_other_process, daemon=True)
            process.start()
            process.join()
        """
    )
    said = suite.runpytest_subprocess().stdout.str()
    for part in ("the test has not ended after 1 s", "in test_hangs", "process ", "in sleep_in_the_other_process"):
        assert part in said


# Commands of tests, which are forked from a warm process

SCRIPT = """
import os, sys, torch
print(os.getpid(), sys.argv[1:], os.getcwd(), os.environ["WORD"], sys.stdin.read().strip(), __name__)
print("to the other", file=sys.stderr)
sys.exit(3)
"""


def test_a_forked_command_is_like_one_of_an_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", "one", "two"], cwd=tmp_path, env={**os.environ, "WORD": "word"}, input="given",
        text=True, capture_output=True,
    )  # fmt: skip
    number, rest = done.stdout.split(maxsplit=1)
    assert rest == f"['one', 'two'] {tmp_path} word given __main__\n" and int(number) != os.getpid()
    assert (done.stderr, done.returncode) == ("to the other\n", 3)


def test_what_a_forked_command_raises_is_shown(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('a sentence')")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: a sentence\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_forked_command_gets_the_signals_of_its_starter(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's job in the background ignores it
    )
    assert process.stdout is not None
    forked = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(30) == -number
    deadline = time.monotonic() + 30
    while psutil.pid_exists(forked):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Small changes of the code, which tests must notice

SOURCE = '''
"""A sentence."""


class Counter:
    def more(self, count: int = 1) -> int:
        """Returns 1 more."""
        if count < 0 and not self:
            raise ValueError("1 is too few")
        return (
            count
            + 1
        )
'''


def mutated_sources(tmp_path: Path) -> list[Mutant]:
    (tmp_path / "counter.py").write_text(SOURCE)
    return draw_mutants([tmp_path / "counter.py"], tmp_path, 100, 0)


def test_mutants_change_behaviour_and_neither_words_nor_lines(tmp_path: Path) -> None:
    mutants = mutated_sources(tmp_path)
    assert sorted(mutant.after for mutant in mutants) == [
        "(count - 1)",
        "(count < 0 or not self)",
        "(count <= 0)",
        "(self)",
        "1",
        "2",
        "not (count < 0 and (not self))",
        "return None",
    ]
    for mutant in mutants:
        assert mutant.function == "Counter.more"
        assert mutant.source.count("\n") == SOURCE.count("\n")
        assert "1 is too few" in mutant.source and "count: int = 1" in mutant.source and "Returns 1" in mutant.source


def test_a_mutant_takes_the_place_of_a_function_that_is_there(tmp_path: Path) -> None:
    (mutant,) = [one for one in mutated_sources(tmp_path) if one.after.strip("()") == "count - 1"]
    space: dict[str, Any] = {}
    exec(compile(SOURCE, "counter.py", "exec"), space)
    more = space["Counter"].more
    counter = space["Counter"]()
    assert counter.more(3) == 4

    replace_code([more], code_of(mutant.source, "counter.py", mutant.function))
    assert counter.more(3) == 2


def test_mutants_are_those_of_the_seed(tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(SOURCE)
    drawn = [draw_mutants([tmp_path / "counter.py"], tmp_path, 3, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
