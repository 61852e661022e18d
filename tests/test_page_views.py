"""Every page in a real browser, on a desktop and on a phone, light and dark: nothing is cut off, nothing leaves the
machine, axe finds nothing serious. And what a person does there: zoom, smooth, sort, filter, compare, write notes."""

from __future__ import annotations

import importlib.util
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from test_plan_page import plan_of, plan_page
from test_watch import rank_line, step, write_run

from shardwise.watch.page_data import compare
from shardwise.watch.report_page import render_page, write_report
from shardwise.watch.serve import make_server

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
PHONE, DESKTOP = 390, 1200
LAYOUTS = "pipeline=2 tensor=2", "shard=2"


def full_run(folder: Path, ends: bool = True, scale: float = 1.0) -> Path:
    """A run that was resumed in another layout after 60 of 100 steps."""
    metrics = [{**step(n, 1000.0 + n), "loss": scale * (2 + math.exp(-n / 30)), "lr": 1e-3 / n} for n in range(1, 101)]
    events: list[dict[str, Any]] = [
        {"time": 1000.0, "event": "started", "layout": LAYOUTS[0], "step": 0, "message": "begun"},
        {"time": 1060.5, "event": "resumed", "layout": LAYOUTS[1], "step": 60, "message": "elsewhere"},
        {"time": 1080.5, "event": "validation", "step": 80, "loss": 2.2, "seconds": 0.1, "message": "loss 2.2"},
        *([{"time": 1100.5, "event": "finished", "step": 100, "message": "all steps are done."}] if ends else []),
    ]
    write_run(folder, metrics, events)
    lines = [rank_line(n, *((4, "tensor") if n <= 60 else (2, "shard"))) for n in range(1, 101)]
    (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "plan.toml").write_text(f'layout = "{LAYOUTS[1]}"\n[predicted]\nstep_seconds = 2.0\n')
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder of runs, and the address of their list."""
    home = tmp_path_factory.mktemp("pages")
    full_run(home / "runs" / "moved")
    full_run(home / "runs" / "slow", ends=False, scale=1.5)
    write_run(home / "runs" / "<b>empty", [], [])
    (home / "runs" / "broken").mkdir()
    (home / "runs" / "broken" / "job.toml").write_text("steps = [")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        server = make_server(None, 0)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield home, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(DESKTOP, 900) as found:
        yield found


def serious(browser: Browser) -> list[Any]:
    """What axe calls serious or critical; nothing where it is not installed."""
    package = importlib.util.find_spec("axe_core_python")
    if package is None or package.origin is None:
        return []
    browser.js((Path(package.origin).parent / "axe.min.js").read_text(encoding="utf-8") + ";0")
    found = browser.js("axe.run().then((all) => all.violations.map((one) => [one.impact, one.id, one.nodes[0].html]))")
    return [one for one in found if one[0] in ("serious", "critical")]


def pages(home: Path, address: str) -> dict[str, str]:
    compared = compare([home / "runs" / name for name in ("moved", "slow")])
    (home / "sweep.html").write_text(render_page(compared, "Runs compared"))
    (home / "plan.html").write_text(plan_page(plan_of("pipeline=4 micro_batch=1")))
    return {
        "list": f"{address}/", "live": f"{address}/run/slow", "finished": f"file://{write_report(home / 'runs/moved')}",
        "empty": f"{address}/run/%3Cb%3Eempty", "compare": f"{address}/compare?run=moved&run=slow",
        "sweep": f"file://{home / 'sweep.html'}", "plan": f"file://{home / 'plan.html'}",
    }  # fmt: skip


def cut_off(browser: Browser) -> list[str]:
    """What reaches beyond the window, other than within a part that scrolls."""
    return browser.js(  # type: ignore[no-any-return]
        """[...document.querySelectorAll("main td, main th, main svg, main canvas")].filter((one) => {
            const box = one.getBoundingClientRect();
            return box.width && !one.closest(".scroll") && box.right > innerWidth + 1;
        }).map((one) => one.outerHTML.slice(0, 80))"""
    )


@pytest.mark.cluster
def test_every_page_fits_every_screen(runs: tuple[Path, str], browser: Browser) -> None:
    home, address = runs
    for name, url in pages(home, address).items():
        for width, first in ((DESKTOP, False), (PHONE, True)):
            browser.scheme(first)
            browser.size(width, 900)
            browser.open(url)
            for dark in (first, not first):
                browser.scheme(dark)
                where = f"{name}, {width} px, {'dark' if dark else 'light'}"
                assert browser.js("document.documentElement.scrollWidth") <= width, where
                back = "rgb(20, 25, 31)" if dark else "rgb(255, 255, 255)"
                assert browser.js("getComputedStyle(document.body).backgroundColor") == back, where
                assert cut_off(browser) == [], where
                if dark == first:
                    assert serious(browser) == [], where
    assert browser.console == []
    assert all(url.startswith((address, "file://")) for url in browser.requests)
    browser.scheme(False)
    browser.size(DESKTOP, 900)


def zoomed(browser: Browser) -> list[float]:
    return browser.js("((x) => [x.min, x.max])(plots.get('loss').plot.scales.x)")  # type: ignore[no-any-return]


def test_curves_are_smoothed_zoomed_and_linked(runs: tuple[Path, str], browser: Browser) -> None:
    home, _ = runs
    url = f"file://{write_report(home / 'runs' / 'moved')}"
    browser.open(url)
    legend = browser.js("[...document.querySelectorAll('#loss .u-series')].map((one) => one.textContent)")
    assert legend[0] == "step100" and legend[1].startswith("loss2.0") and legend[2] == "validation2.2"
    assert zoomed(browser) == [1, 100]
    box = browser.js("((b) => [b.left, b.top, b.width, b.height])(plots.get('loss').plot.over.getBoundingClientRect())")
    left, top, width, height = box
    browser.drag(left + 0.25 * width, top + height / 2, left + 0.5 * width)
    browser.wait("location.hash.includes('from=')")
    low, high = zoomed(browser)
    assert (low, high) == pytest.approx((1 + 0.25 * 99, 1 + 0.5 * 99), abs=1.5)
    assert browser.js("((x) => [x.min, x.max])(plots.get('lr').plot.scales.x)") == [low, high]  # all curves follow
    browser.drag(left + 0.5 * width, top + height / 2, left + 0.4 * width, 8)
    browser.wait(f"plots.get('loss').plot.scales.x.min > {low}")
    assert zoomed(browser)[1] - zoomed(browser)[0] == pytest.approx(high - low, rel=1e-3)
    before = zoomed(browser)
    browser.press("ArrowLeft")
    browser.wait(f"plots.get('loss').plot.scales.x.min < {before[0]}")
    browser.press("]")
    browser.press("]")
    browser.press("l")
    assert browser.js("plots.get('loss').plot.scales.y.distr") == 3
    assert browser.js("document.querySelector('#loss .u-legend').textContent").count("smoothed 0.6") == 1
    raw, smooth = browser.js("plots.get('loss').plot.data.slice(1, 3)")
    expected, share = 0.0, 1.0
    for value, found in zip(raw, smooth, strict=True):
        expected, share = 0.6 * expected + 0.4 * value, share * 0.6
        assert found == pytest.approx(expected / (1 - share))
    link, seen = browser.js("location.href"), zoomed(browser)
    browser.ask("Page.navigate", url="about:blank")
    browser.open(link)  # a link shows the same view
    assert zoomed(browser) == seen and browser.js("plots.get('loss').plot.scales.y.distr") == 3
    assert browser.js("[view.smooth, document.getElementById('smooth-value').textContent]") == ["0.6", "0.6"]
    browser.press("0")
    browser.wait("!location.hash.includes('from=')")
    browser.press("x")
    assert browser.js("document.getElementById('x-axis').value") == "tokens"
    assert zoomed(browser) == [16 * 8, 16 * 8 * 100]
    browser.press("x")
    assert zoomed(browser) == pytest.approx([0, 99])
    browser.press("?")
    assert browser.js("document.getElementById('help').open")
    assert browser.console == []


def test_each_layout_has_its_own_figures(runs: tuple[Path, str], browser: Browser) -> None:
    home, _ = runs
    browser.open(f"file://{write_report(home / 'runs' / 'moved')}#segment=9")
    text = "document.body.innerText"
    parts = "((one) => [one.textContent, one.nextElementSibling.textContent])(document.querySelector('header .badge'))"
    assert browser.js(parts) == ["finished", LAYOUTS[1]]  # a badge, and the layout beside it
    assert "wait (shard)" in browser.js(text) and "(tensor)" not in browser.js(text)
    assert browser.js("document.querySelectorAll('#segment option').length") == 2
    choose = (
        "((one) => { one.value = '0'; one.dispatchEvent(new Event('change')) })(document.getElementById('segment'))"
    )
    browser.js(choose)
    assert "wait (tensor)" in browser.js(text) and "wait (shard)" not in browser.js(text)
    assert "segment=0" in browser.js("location.hash")
    assert browser.js("document.querySelectorAll('#heat tbody tr').length") == 4
    assert "No prediction" in browser.js("document.getElementById('plan').innerText")  # the plan is of the other layout
    marks = browser.js("marksOf({ ...latest, allSegments: [...latest.segments, latest] })")
    assert marks == [[60, f"layout: {LAYOUTS[1]}", False]] and browser.console == []


def test_the_list_is_sorted_filtered_and_leads_to_a_comparison(runs: tuple[Path, str], browser: Browser) -> None:
    _, address = runs
    browser.open(f"{address}/")
    names = "[...document.querySelectorAll('#runs tbody .name')].map((one) => one.textContent)"
    assert sorted(browser.js(names)) == ["<b>empty", "broken", "moved", "slow"]
    row = "[...document.querySelectorAll('#runs tbody tr')].find((one) => one.textContent.includes('moved'))"
    cells = browser.js(f"[...{row}.children].map((one) => one.innerText.trim())")
    assert cells[2] == "finished" and cells[4:7] == ["1 min 41 s", "100 of 8", "2.0357"]
    assert browser.js("document.querySelectorAll('.spark').length") == 2
    browser.js("document.querySelector('[data-column=loss] button').click()")
    assert browser.js(names)[:2] == ["moved", "slow"]
    assert browser.js("document.querySelector('[data-column=loss]').getAttribute('aria-sort')") == "ascending"
    browser.js("document.querySelector('[data-column=loss] button').click()")
    assert browser.js(names)[2:] == ["slow", "moved"] and "sort=loss.down" in browser.js("location.hash")
    browser.press("/")
    for letter in "shard":
        browser.press(letter)
    assert (
        browser.js(names) == ["slow", "moved"]
        and browser.js("document.getElementById('count').textContent") == "2 of 4 runs"
    )
    browser.js("for (const one of document.querySelectorAll('#runs tbody input')) one.click()")
    browser.js("document.getElementById('compare').click()")
    browser.wait("document.querySelector('#loss canvas') !== null")
    legend = browser.js("[...document.querySelectorAll('#loss .u-series .u-label')].map((one) => one.textContent)")
    assert legend == ["tokens", "slow", "moved"]
    browser.js("document.getElementById('back').click()")
    browser.wait("document.getElementById('runs') !== null")
    assert browser.console == []


def test_notes_are_written_on_the_page_and_shown_in_the_list(runs: tuple[Path, str], browser: Browser) -> None:
    home, address = runs
    browser.open(f"{address}/run/slow")
    browser.js("document.querySelector('#notes details').open = true")
    browser.js("document.getElementById('tags').value = 'good, <i>again'")
    browser.js("document.getElementById('note').value = 'a longer warm-up'")
    browser.js("document.querySelector('#notes form button').click()")
    browser.wait("document.querySelector('#notes [role=status]').textContent === 'Saved.'")
    assert json.loads((home / "runs/slow/notes.json").read_text()) == {
        "tags": ["good", "<i>again"],
        "notes": "a longer warm-up",
    }
    browser.open(f"{address}/#filter=warm-up")
    assert browser.js("[...document.querySelectorAll('#runs .tag')].map((one) => one.textContent)") == [
        "good",
        "<i>again",
    ]
    browser.open(f"file://{write_report(home / 'runs' / 'slow')}")
    assert "a longer warm-up" in browser.js("document.getElementById('notes').textContent")
    assert browser.js("document.querySelectorAll('#notes form').length") == 0 and browser.console == []
