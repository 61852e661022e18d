"""Writes `benchmarks/runs.csv`, the compact table of measured runs to which the planner's constants are fitted.

    python tools/compact_runs.py FILE.csv ... [-o benchmarks/runs.csv]

Keeps runs of quality A or B that can be predicted and have a measured time or memory, the columns that
`benchmarks/published.py` reads, and the source. Drops notes and redundant measurements that do not change how a run is
parsed, and checks row by row that the compact table gives the same runs.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from published import MeasuredRun, SkipRow, parse_row, read_rows  # noqa: E402

SOURCE = ("source", "source_ref")


class RecordingRow(dict[str, str]):
    """A row that records which columns are read, over all rows."""

    seen: set[str] = set()
    needed: set[str] = set()

    def __getitem__(self, key: str) -> str:
        self.needed.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


def parsed(values: dict[str, str]) -> MeasuredRun | None:
    """Returns the parsed run without its raw cells; None if it cannot be used."""
    try:
        row = parse_row(RecordingRow(values))
    except SkipRow:
        return None
    return replace(row, values={}) if (row.seconds or row.memory) and row.quality in "AB" else None


def shortened(values: dict[str, str]) -> dict[str, str]:
    """Returns the row without cells and parts of its note that do not change how it is parsed."""
    original, parts = parsed(values), values.get("note", "").split("; ")
    for part in list(parts):
        fewer = [other for other in parts if other is not part]
        if parsed({**values, "note": "; ".join(fewer)}) == original:
            parts = fewer
    values = {**values, "note": "; ".join(parts)}
    for key in ("tflops_kind", "tflops_per_gpu", "tokens_per_s_per_gpu", "kv_heads", "ffn_hidden"):
        if parsed(fewer_cells := {**values, key: ""}) == original:
            values = fewer_cells
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "benchmarks" / "runs.csv")
    options = parser.parse_args()
    rows = [values for path in options.files for values in read_rows(path)]
    kept = [shortened(values) for values in rows if parsed(values) is not None]
    used = {key for key in RecordingRow.seen if any(values.get(key) for values in kept)}
    columns = [key for key in rows[0] if key in (*SOURCE, *RecordingRow.needed, *used)]
    with options.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
    if [parsed(values) for values in read_rows(options.out)] != [parsed(values) for values in kept]:
        sys.exit(f"{options.out}: a row parses differently; published.py needs a column that was left out.")
    print(f"{options.out}: {len(kept)} of {len(rows)} rows, {len(columns)} columns, {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
