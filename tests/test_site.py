"""The documentation site: every page is on it, and in a real browser none asks for anything beyond its own folder."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import CHROMIUM, Browser
from test_docs import ROOT


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_on_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"[\w/-]+\.md", nav)
    there = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert set(listed) == there and len(listed) == len(there)


def test_the_home_page_leads_to_every_page() -> None:
    home = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    there = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} - {"README.md"}
    assert not there - set(re.findall(r"\]\(([\w/-]+\.md)\)", home))


@pytest.mark.parametrize(
    "name, text, is_seen",
    [
        ("page.html", '<img src="https://elsewhere/a.png">', True),
        ("page.html", '<script src="//elsewhere/a.js"></script>', True),
        ("page.html", '<link rel="preconnect" href="https://elsewhere">', True),
        ("page.html", '<img srcset="https://elsewhere/a.png 2x">', True),
        ("page.html", '<style>@import "https://elsewhere/a.css"</style>', True),
        ("page.html", '<p style="background: url(https://elsewhere/a.png)">', True),
        ("page.html", '<img src="gone.png">', True),
        ("page.html", '<img src="there.png"><img src="data:image/png;base64,AA"><svg><use href="#a"/></svg>', False),
        ("page.html", '<a href="https://elsewhere">a link</a> <link rel="canonical" href="https://elsewhere">', False),
        ("page.css", '@font-face { src: url("https://elsewhere/a.woff2") }', True),
        ("page.svg", '<svg xmlns="http://www.w3.org/2000/svg"><image href="https://elsewhere/a.png"/></svg>', True),
    ],
)
def test_loads_from_elsewhere_are_seen(name: str, text: str, is_seen: bool, tmp_path: Path) -> None:
    (tmp_path / "there.png").touch()
    (tmp_path / name).write_text(text)
    assert bool(list(tool("check_site").problems(tmp_path))) == is_seen


def test_a_recording_is_played_as_a_terminal_shows_it() -> None:
    record = tool("record")
    printed = [
        (0.0, "\x1b[1mbold\x1b[0m & plain\r\nstep 1"),
        (0.5, "\r\x1b[Kstep 2\r\n" + 81 * "-"),
        (9.0, "\r\nend\r\n"),
    ]
    showings, last, length = record.play([("command", printed)])
    assert last[1:6] == ['<tspan class="b">bold</tspan> &amp; plain', "step 2", 80 * "-", "-", "end"]
    assert [one.text for one in showings if one.row == 2] == ["step 1", "step 2"]
    assert all(0 <= one.begin < one.end <= length for one in showings) and length < 15  # a pause of 8.5 s is cut
    tail = [(0.0, "a\r\nstep time bre"), (1.0, "akdown\r\n1 2 3\r\nrun folder: x\r\n")]
    assert "".join(text for _, text in record.shorten(tail)) == "a\r\n...\r\nrun folder: x\r\n"
    ElementTree.fromstring(record.draw(showings, last, length, "a < b"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, text=True, capture_output=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.cluster
def test_the_site_is_built_whole(site: Path) -> None:
    assert not list(tool("check_site").problems(site))
    for page in site.rglob("*.html"):
        shown = re.sub(r"<pre>.*?</pre>|<code>.*?</code>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert "<p>```" not in shown and not re.search(r"<p>\|.*\| *---", shown), page
        listed = re.search(r"<p>[^<]*\n(?:- |\d+\. ).*", shown)
        assert not listed, f"{page.name}: a list that is not drawn as one: {listed and listed[0]}"


@pytest.mark.cluster
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
@pytest.mark.parametrize("width, dark", [(1280, False), (1280, True), (390, False), (390, True)])
def test_pages_in_a_browser(site: Path, width: int, dark: bool) -> None:
    """No console errors, no request to another host, nothing wider than the screen; search finds and links lead."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with Browser(width, 900, dark) as browser:
            for page in ("index", "tutorial", "reference/job", "how-to/from-torchtitan", "explanation/planner"):
                browser.open(f"{home}/{page}.html")
                assert browser.js("document.documentElement.scrollWidth") <= width, page
                background = browser.js("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 300) == dark, background
                broken = "[...document.images].filter(one => !one.naturalWidth).map(one => one.src).join()"
                assert browser.js(broken) == "", page
            browser.js("document.querySelector('[data-md-toggle=search]').click()")
            asked = "q.value = 'recompute'; for (const kind of ['input', 'keyup']) q.dispatchEvent(new Event(kind))"
            browser.js(f"(q => {{ {asked} }})(document.querySelector('.md-search__input'))")
            browser.wait("document.querySelectorAll('.md-search-result__item').length > 2")
            assert not browser.console
            assert all(one.startswith((home, "data:", "blob:")) for one in browser.requests), browser.requests
    finally:
        server.shutdown()
        server.server_close()
