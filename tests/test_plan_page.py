"""The page of a plan: one well-formed file that fetches nothing and shows what it must."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardwise.cluster import CLUSTERS
from shardwise.errors import JobError
from shardwise.job import make_job
from shardwise.planner.plan import Plan, make_plan
from shardwise.planner.show import MEMORY_PARTS

sys.path.append(str(Path(__file__).parent.parent / "tools"))
from plan_page import LABEL_WIDTH, MAX_ROWS, PAGE_WIDTH, main, plan_page  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = [
    None, "pipeline=4 micro_batch=1", "pipeline=2 schedule=zbv tensor=2", "pipeline=4 schedule=interleaved virtual=2",
    "pipeline=32 micro_batch=1 recompute=full", "shard=4 zero=3",
]  # fmt: skip


@cache
def plan_of(layout: str | None, samples: int = 64) -> Plan:
    job = make_job({"model": {"name": "llama3-8b"}, "precision": "bf16", "batch": {"samples": samples}, "steps": 1000})
    return make_plan(job, CLUSTERS["h100"], 8 if layout is None else None, layout)


@cache
def page_of(layout: str | None) -> str:
    return plan_page(plan_of(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_page_is_whole(layout: str | None) -> None:
    plan = plan_of(layout)
    text = page_of(layout)
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    words = " ".join(" ".join(root.itertext()).split())
    for one in plan.layouts:
        assert str(one.layout) in words
    assert re.fullmatch(r"\S.*: [\d.e+]+ s per step, [\d.e+]+ of 7\d(\.\d)? GiB on \d+ x H100.*", str(plan))
    for line in (*plan.near_misses, *filter(None, plan.reasons), plan.accuracy, *MEMORY_PARTS):
        assert line in words
    # Nothing from elsewhere, nothing that runs.
    assert set(re.findall(r"\w+://[^'\"]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|link|img|iframe|object)|url\(|@import|\b(src|href|on\w+)=", text)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_drawings_stay_within_their_frame(layout: str) -> None:
    root = ElementTree.fromstring(page_of(layout).removeprefix("<!DOCTYPE html>\n"))
    for drawing in root.iter(f"{SVG}svg"):
        height = float(drawing.attrib["viewBox"].split()[3])
        for rect in drawing.iter(f"{SVG}rect"):
            left, top = float(rect.attrib["x"]), float(rect.attrib["y"])
            assert left + 0.1 >= LABEL_WIDTH and left + float(rect.attrib["width"]) <= PAGE_WIDTH + 0.2
            assert top >= 0 and top + float(rect.attrib["height"]) <= height


def test_the_timeline_shows_every_action_of_a_small_pipeline() -> None:
    text = plan_page(plan_of("pipeline=2 micro_batch=8"))
    notes = re.findall(r"<title>((?:forward|backward), stage \d+, micro-batch \d+)", text)
    assert len(notes) == len(set(notes)) == 2 * 2 * 8


def test_a_deep_pipeline_says_what_is_left_out() -> None:
    text = plan_page(plan_of("pipeline=32 micro_batch=1", samples=4096))
    assert f"the last {MAX_ROWS} of 32 pipeline ranks" in text and f"{MAX_ROWS} of 32 pipeline ranks" in text
    assert "of the 4096 micro-batches" in text
    assert len(text) < 600_000


def test_the_script_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parent.parent / "examples" / "dlrm-1tb.toml"
    arguments = ["plan_page.py", str(example), str(tmp_path / "plan.html"), "--cluster", "a100-80g"]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    assert "None of these layouts has a pipeline" in (tmp_path / "plan.html").read_text()
    monkeypatch.setattr(sys, "argv", [*arguments[:2], str(tmp_path / "no" / "plan.html")])
    with pytest.raises(JobError, match="does not exist"):
        main()
