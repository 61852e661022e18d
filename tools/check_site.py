"""Checks a built documentation site: whatever a page loads lies in the site's folder and is there. Exits 1 otherwise.

Links that a reader clicks may lead anywhere. Run: python tools/check_site.py [FOLDER]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
LOADS = {"src", "srcset", "poster", "data", "xlink:href"}
RELATIONS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
IN_CSS = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")


class Loads(HTMLParser):
    """Collects what a page or a picture loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.in_style = tag == "style"
        for name, value in values.items():
            if name == "srcset":
                self.found += [part.split()[0] for part in value.split(",") if part.split()]
            elif name in LOADS or (name == "href" and tag in ("use", "image")):
                self.found.append(value)
            elif name == "style":
                self.handle_css(value)
        if tag == "link" and RELATIONS & set(values.get("rel", "").split()):
            self.found.append(values.get("href", ""))

    def handle_data(self, text: str) -> None:
        if self.in_style:
            self.handle_css(text)

    def handle_css(self, text: str) -> None:
        self.found += [one or other for one, other in IN_CSS.findall(text)]


def loads(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    return [one or other for one, other in IN_CSS.findall(text)] if file.suffix == ".css" else Loads(text).found


def problems(site: Path) -> Iterator[str]:
    for file in sorted(path for path in site.rglob("*") if path.suffix in (".html", ".css", ".svg")):
        for address in loads(file):
            parts = urlsplit(address)
            if parts.scheme in ("data", "about") or not (parts.netloc or parts.path):
                continue
            if parts.scheme or parts.netloc:
                yield f"{file.relative_to(site)} loads {address}"
            elif not (site / parts.path[1:] if parts.path[0] == "/" else file.parent / unquote(parts.path)).exists():
                yield f"{file.relative_to(site)} loads {address}, which is not there"


def main() -> None:
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    found = list(problems(site))
    print("\n".join(found) or f"{site}: {len(list(site.rglob('*.html')))} pages; nothing is loaded from elsewhere")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
