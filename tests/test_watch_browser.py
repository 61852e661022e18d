"""The page of a run in a real browser, live and as a file: it updates, every panel has data, nothing leaves the
machine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from test_watch import long_run, make_run, step, write_run

from shardwise.watch.report_page import render_page, write_report

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")

JOB = """
steps = 1000000
layout = "pipeline=2 replicate=2"
[model]
layers = 4
width = 32
heads = 2
vocab = 61
sequence = 16
[data]
source = "synthetic"
[batch]
samples = 16
[checkpoint]
every = 10
[validation]
every = 10
samples = 4
[run]
folder = "runs/live"
device = "cpu"
"""
# By panel, what is there when it has data.
FULL = {
    "loss": "#loss canvas", "time": "#time canvas", "heat": "#heat canvas", "pipeline": "#measured-plot canvas",
    "memory": "#memory .bar i", "mesh": "#mesh svg rect", "plan": "#plan tbody tr", "goodput": "#goodput tbody tr",
    "curves": "#curves canvas", "events": "#events tbody tr", "job": "#job pre",
}  # fmt: skip


def command(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise", *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, str, subprocess.Popen[str]]]:
    """A run under way, and the address of its page."""
    (tmp_path / "job.toml").write_text(JOB)
    training = command("train", "job.toml", folder=tmp_path)
    assert training.stdout is not None
    for line in training.stdout:
        if re.match(r"step +[1-9]", line):
            break
    watching = command("watch", "runs/live", "--port", "0", folder=tmp_path)
    assert watching.stdout is not None
    found = re.search(r"http://\S+", watching.stdout.readline())
    try:
        assert found is not None
        yield tmp_path / "runs" / "live", found[0], training
    finally:
        for process in (training, watching):
            process.kill()
            process.communicate()


def full(browser: Browser) -> None:
    """Every panel has data, and says so to who cannot see it."""
    for panel, what in FULL.items():
        assert browser.js(f"document.querySelectorAll({json.dumps(what)}).length") > 0, f"{panel} is empty"
    drawn = browser.js(
        """[...document.querySelectorAll("canvas")].filter((one) => {
            const seen = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
            return !seen.some((value) => value);
        }).length"""
    )
    assert drawn == 0, "a canvas has nothing on it"
    assert browser.js("[...document.querySelectorAll('[role=img]')].every((one) => one.getAttribute('aria-label'))")
    assert browser.js("[...document.querySelectorAll('section')].every((one) => one.getAttribute('aria-labelledby'))")


def test_the_live_page_follows_a_run(live: tuple[Path, str, subprocess.Popen[str]], tmp_path: Path) -> None:
    run, address, training = live
    with Browser() as browser:
        browser.open(address)
        browser.wait("document.querySelector('#measured-plot canvas') !== null", 120)
        browser.wait("document.querySelectorAll('#events tbody tr').length > 2", 120)
        full(browser)
        text = "document.querySelector('#tiles b').textContent"
        before = browser.js(text)
        assert re.fullmatch(r"[\d,]+ of 1,000,000", before)
        browser.wait(f"{text} !== {json.dumps(before)}")
        rows = browser.js(
            "[...document.querySelectorAll('#pipeline > div > table td:first-child')].map((x) => x.textContent)"
        )
        assert rows == ["predicted by the plan", "measured"]
        # A folded table opens by the keyboard and stays open.
        browser.js("document.querySelector('#heat summary').focus()")
        for kind in ("keyDown", "keyUp"):
            browser.ask(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )
        assert browser.js("document.querySelector('#heat details').open")
        before = browser.js(text)
        browser.wait(f"{text} !== {json.dumps(before)}")
        assert browser.js("document.querySelector('#heat details').open")
        assert browser.js("document.activeElement.parentElement.id") == "heat-plot-table"
        browser.size(390, 800)
        browser.wait("document.documentElement.scrollWidth <= 390")  # a phone needs no sideways scrolling
        training.send_signal(signal.SIGTERM)
        training.communicate(timeout=120)
        browser.wait("document.getElementById('status').textContent.startsWith('stopped')")
        assert browser.console == []
        assert browser.requests and all(url.startswith(address) for url in browser.requests)
    with Browser(dark=True) as browser:  # what a run leaves behind when it ends
        browser.open(f"file://{run}/report.html")
        full(browser)
        assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(20, 25, 31)"
        assert browser.console == [] and all(url.startswith("file://") for url in browser.requests)


def test_the_page_names_a_straggler_and_a_stall(tmp_path: Path) -> None:
    for fault, words in (("straggler", "rank 1 computes"), ("data", "waiting for data")):
        run = make_run(tmp_path / fault, "replicate=2", fault)
        with Browser() as browser:
            browser.open(f"file://{write_report(run.path)}")
            assert browser.js(
                "[...document.querySelectorAll('#heat tr.slow td:first-child')].map((x) => x.textContent)"
            ) == ["1"]
            assert words in browser.js("document.getElementById('summary').textContent").lower()
            heads = browser.js("[...document.querySelectorAll('#heat thead th')].map((x) => x.textContent)")
            place = heads.index("compute, s" if fault == "straggler" else "data loading, s")
            cells = browser.js(
                f"[...document.querySelectorAll('#heat tbody tr')].map((x) => +x.children[{place}].textContent)"
            )
            assert cells[1] - cells[0] > 0.1


def test_markup_from_files_stays_text(tmp_path: Path) -> None:
    evil = "</script><img src=http://evil.example/x onerror=document.title='evil'>"
    event = {"time": 1.0, "event": evil, "message": evil, "step": 1}
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>", [step(n, float(n)) for n in range(1, 9)], [event])
    (run / "plan.toml").write_text(f"layout = {json.dumps(evil)}\nreason = {json.dumps(evil)}\n")
    with Browser() as browser:
        browser.open(f"file://{write_report(run)}".replace("<", "%3C").replace(">", "%3E"))
        assert browser.js("document.querySelectorAll('img').length") == 0
        assert evil in browser.js("document.querySelector('#events').textContent")
        assert browser.console == [] and "evil" not in browser.js("document.title")
        assert not [url for url in browser.requests if not url.startswith("file://")]


def test_a_long_run_and_runs_beside_each_other_are_drawn(tmp_path: Path) -> None:
    with Browser() as browser:
        browser.open(f"file://{write_report(long_run(tmp_path / 'long'))}")
        assert browser.js("document.querySelectorAll('#heat tbody tr').length") == 100
        assert browser.js("document.querySelector('#heat tr.slow td').textContent") == "42"
        runs = [
            {
                "name": name,
                "step": [1, 2],
                "samples": [8, 16],
                "hours": [0.0, 0.1],
                "loss": [3, 2],
                "tokens_per_s": [1, 2],
            }
            for name in "ab"
        ]
        given = {
            "runs": runs,
            "headers": ["run", "loss"],
            "rows": [["a", "3"], ["b", "2"]],
            "differences": [["lr", "1", "2"]],
        }
        (tmp_path / "both.html").write_text(render_page(given, "both"))
        browser.open(f"file://{tmp_path / 'both.html'}")
        assert browser.js("document.querySelectorAll('canvas').length") == 2
        assert browser.js("document.querySelectorAll('#jobs tbody tr').length") == 1
        assert browser.console == []
