"""Hooks of MkDocs: what the pages need to be a site, so that they stay plain Markdown for any Git host."""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Homepage"]
OUTWARD = re.compile(r"(\]\()((?:\.\./)+[^)\s#]*)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """The version stands at the foot of every page, with where to find the pages of others."""
    config["copyright"] = (
        f"Shardwise {PROJECT['version']}. The pages of another version are in the "
        f'<a href="{REPOSITORY}/tags">repository at its tag</a>.'
    )
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the repository; the home page has no side bars."""
    here = posixpath.dirname(page.file.src_uri)
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]

    def outward(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", here, link[2]))
        if path.startswith("docs/") or not (ROOT / path).exists():
            return link[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{link[1]}{REPOSITORY}/{kind}/main/{path}{link[3] or ''}{link[4]}"

    return OUTWARD.sub(outward, markdown)
