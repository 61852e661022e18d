"""Compares the planner's predictions with the measured runs of `benchmarks/runs.csv` and writes the errors to

- `docs/explanation/planner-time.svg` and `planner-memory.svg`: predicted against measured, a dot a run;
- the generated part of `docs/explanation/planner.md`: the errors, overall and by source, with each source left out as
  `tools/fit_planner.py --check` found them.

Run it after every change of the planner or its constants: python tools/plots.py [--check]; takes some seconds.
With `--check`: exits 1 if one of them is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from planner_accuracy import predict_row, summary  # noqa: E402
from published import read_rows  # noqa: E402

DOCS = ROOT / "docs" / "explanation"
MARK = re.compile(r"(<!-- generated: accuracy \(tools/plots\.py\) -->\n).*?(<!-- end generated -->)", re.DOTALL)
SIDE, EDGE = 460, 56  # pixels of the plot area and its margin
FAMILIES = {
    "one A100 node (vTrain)": ("#8aa4bd", "vtrain"), "Megatron-LM papers": ("#c0392b", "megatron-sc21 megatron-2020"),
    "NVIDIA's recipes": ("#59a14f", "megatron-bridge nemo dgxc"),
    "BigScience": ("#b07aa1", "bigscience"), "LLM Foundry": ("#f28e2b", "llm-foundry"),
    "TPU": ("#2f7fb8", "maxtext tpu"), "others": ("#7f6a58", ""),
}  # fmt: skip

Result = dict[str, Any]
Pairs = dict[str, list[tuple[float, float]]]


def family(source: str) -> str:
    """Returns the first family with a prefix of the source's name; the last one has no prefixes and takes the rest."""
    return next(name for name, (_, words) in FAMILIES.items() if not words or source.startswith(tuple(words.split())))


# Plots


def plot(pairs: Pairs, what: str, unit: str) -> str:
    """A log-log scatter plot; the diagonal is a perfect prediction, the dashed lines are 25% off."""
    numbers = [number for dots in pairs.values() for pair in dots for number in pair]
    low, high = floor(5 * log10(min(numbers))) / 5, ceil(5 * log10(max(numbers))) / 5
    scale = SIDE / (high - low)

    def x(value: float) -> float:
        return EDGE + scale * (log10(value) - low)

    def y(value: float) -> float:
        return EDGE / 2 + SIDE - scale * (log10(value) - low)

    begin, end = 10**low, 10**high
    lines = [_line(x(begin), y(begin), x(end), y(end), "line")]
    for off in (1.25, 0.8):
        first, last = max(begin, begin / off), min(end, end / off)
        lines.append(_line(x(first), y(first * off), x(last), y(last * off), "far"))
    steps = (1, 2, 5) if high - low < 2 else (1,)
    for value in (step * 10.0**power for power in range(floor(low), ceil(high) + 1) for step in steps):
        if not 0.999 * begin <= value <= 1.001 * end:
            continue
        lines += [
            _line(x(value), y(begin), x(value), y(end), "grid"),
            _line(x(begin), y(value), x(end), y(value), "grid"),
        ]
        lines.append(_text(x(value), y(begin) + 18, f"{value:g}", "middle"))
        lines.append(_text(EDGE - 8, y(value) + 4, f"{value:g}", "end"))
    for place, (name, dots) in enumerate(pairs.items()):
        path = "".join(f"M{x(measured):.0f} {y(predicted):.0f}h0" for measured, predicted in dots)
        colour, down = FAMILIES[name][0], EDGE / 2 + 16 + 22 * place
        lines.append(f'<path d="{path}" stroke="{colour}" class="dots"/>')
        lines.append(f'<path d="M{EDGE + SIDE + 24} {down - 4:.0f}h0" stroke="{colour}" class="key"/>')
        lines.append(_text(EDGE + SIDE + 36, down, f"{name}: {len(dots)} runs", "start"))
    middle = EDGE / 2 + SIDE / 2
    turned = f'transform="rotate(-90 14 {middle})"'
    lines.append(_text(EDGE + SIDE / 2, SIDE + EDGE / 2 + 40, f"measured {what}, {unit}", "middle"))
    lines.append(_text(14, middle, f"predicted {what}, {unit}", "middle", turned))
    lines.append(_text(EDGE + SIDE + 24, SIDE, "dashed: 25% off", "start"))
    return _drawing(f"Predicted against measured {what}", "\n".join(lines))


def _drawing(title: str, body: str) -> str:
    wide, high = EDGE + SIDE + 300, SIDE + EDGE + 20
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img" aria-label="{title}">
<title>{title}</title>
<style>
text {{ font: 13px system-ui, sans-serif; fill: #1f2933 }} .grid {{ stroke: #d5dbe1 }} .line {{ stroke: #52606d }}
.far {{ stroke: #52606d; stroke-dasharray: 4 4 }} .dots, .key {{ stroke-linecap: round; stroke-width: 5; opacity: 0.6 }}
.key {{ stroke-width: 10; opacity: 1 }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e4e7eb }} .grid {{ stroke: #3b4651 }} .line, .far {{ stroke: #a8b3bf }}
}}
</style>
{body}
</svg>
"""


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path d="M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}" class="{kind}"/>'


def _text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" {more}>{words}</text>'.replace(" >", ">")


def pairs_of(results: Sequence[Result], key: str) -> Pairs:
    """Measured and predicted values by family, in legend order."""
    pairs: Pairs = defaultdict(list)
    for result in results:
        if measured := getattr(result["row"], key):
            pairs[family(result["row"].source)].append((measured, result[key]))
    return {name: pairs[name] for name in FAMILIES if name in pairs}


# The page


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def page(results: Sequence[Result], left_out: dict[str, Any]) -> str:
    """The generated section of the page: each source predicted without it, and by constants fitted to all."""
    fitted = summary(list(results))
    rows = [
        ("step time: median over sources", left_out["time_over_sources"], fitted["over_sources"]["time"]),
        ("step time: median over runs", left_out["time_median"], fitted["time"]["median"]),
        ("step time: 90th percentile", left_out["time_p90"], fitted["time"]["p90"]),
        ("memory: median over sources", left_out["memory_over_sources"], fitted["over_sources"]["memory"]),
        ("memory: median over runs", left_out["memory_median"], fitted["memory"]["median"]),
        ("memory: 90th percentile", left_out["memory_p90"], fitted["memory"]["p90"]),
        ("ran, and said to fit", left_out["ran_ok"], fitted["fits"]["ran_ok"]),
        ("ran out of memory, and said so", left_out["oom_ok"], fitted["fits"]["oom_ok"]),
        ("ran out of memory, and said to be tight or not to fit", left_out["oom_warned"], fitted["fits"]["oom_warned"]),
        ("regret of the chosen layout, by row", left_out["regret"], fitted["regret"]["by_row"]),
    ]
    parts = _table(("", "source left out", "source fitted"), ((name, *map(percent, values)) for name, *values in rows))
    sources = ((name, str(n), *(percent(value) if value >= -1 else "" for value in values))
               for name, (n, *values) in left_out["sources"].items())  # fmt: skip
    head = ("source, left out", "runs", "step time: median", "bias", "memory: median")
    return "\n".join([*parts, "", *_table(head, sources)]) + "\n"


def _table(head: Sequence[str], rows: Any) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "| --- |" + " ---: |" * (len(head) - 1)
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if something is stale")
    options = parser.parse_args()
    results = [
        result for name in ("runs.csv", "unseen.csv", "out_of_memory.csv")
        for values in read_rows(ROOT / "benchmarks" / name)
        if "skipped" not in (result := predict_row(ROOT / "benchmarks" / name, values))
    ]  # fmt: skip
    words, numbers = DOCS / "planner.md", ROOT / "shardwise" / "planner" / "accuracy.toml"
    old, left_out = words.read_text(encoding="utf-8"), tomllib.loads(numbers.read_text(encoding="utf-8"))
    if not MARK.search(old):
        sys.exit(f"{words}: the markers of the generated section are missing.")
    ran = [result for result in results if not result["is_oom"]]
    outputs = {
        DOCS / "planner-time.svg": plot(pairs_of(ran, "seconds"), "step time", "seconds"),
        DOCS / "planner-memory.svg": plot(pairs_of(ran, "memory"), "peak memory", "GiB"),
        words: MARK.sub(lambda match: match[1] + page(results, left_out) + match[2], old),
    }
    stale = [path for path, text in outputs.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is stale' if options.check else 'written'}")
        if not options.check:
            path.write_text(outputs[path], encoding="utf-8")
    sys.exit(options.check and bool(stale))


if __name__ == "__main__":
    main()
