"""Takes screenshots of a run's report page for the documentation, with Chromium. Run: python tools/screens.py RUN"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser  # noqa: E402

from shardwise.watch.report_page import write_report  # noqa: E402

WIDTH = 1000  # pixels


def main() -> None:
    path = write_report(Path(sys.argv[1]).resolve())
    for name, dark, hidden in (
        ("watch-light", False, "#memory, #mesh, #plan, #goodput, #curves, #events, #job"),
        ("watch-dark", True, "header, #loss, #time, #heat, #pipeline, #job"),
    ):
        with Browser(WIDTH, 900, dark) as browser:
            browser.open(f"file://{path}")
            browser.js(f"for (const panel of document.querySelectorAll('{hidden}')) panel.hidden = true")
            browser.shoot(ROOT / "docs" / f"{name}.png")


if __name__ == "__main__":
    main()
