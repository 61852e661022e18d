"""Proves every layout: all products of pipeline, tensor, shard and replicate up to 8 processes x every combination of
schedule, ZeRO stage and recomputation that the support table does not refuse x tied and untied head, in float64.

    python benchmarks/verify_matrix.py                   all of it, about two hours on two cores
    python benchmarks/verify_matrix.py --quick           worlds of up to 4 processes
    python benchmarks/verify_matrix.py --limit 200       at most so many cases now; run again to go on
    python benchmarks/verify_matrix.py --part 2/4        every fourth case from the second on, for four runs at once
    python benchmarks/verify_matrix.py --table           no runs, only the table of what is there

Each case is appended to `--results` as one JSON line as soon as it is done; cases that are there are not run again.
The table goes to standard output as Markdown, one row per schedule, ZeRO stage and recomputation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from shardwise.job import Job, make_job
from shardwise.layout import Layout, micro_batch_error
from shardwise.support import (
    EXACT_AT_COST,
    FRACTION,
    NO_PIPELINE,
    REFUSED,
    SUPPORT_RULES,
    Combination,
    all_combinations,
)
from shardwise.verify.parity import verify

LAYERS = (4, 6)  # six stages, or eight, hold embedding, blocks and head
MODEL = {
    "width": 16, "heads": 8, "kv_heads": 4, "head_dim": 4, "ffn": 32, "vocab": 61, "sequence": 24,
    "dropout": 0.1,
}  # fmt: skip
ERRORS = ("loss", "grad_norm", "grad", "weight")


def layouts(largest: int) -> Iterator[tuple[Combination, Layout]]:
    """Every layout of the matrix, small worlds first."""
    degrees = product(range(1, 9), (1, 2, 3, 4, 6, 8), range(1, 9), range(1, 9))  # a sequence of 24 divides by these
    worlds = sorted((p * t * s * r, p, t, s, r) for p, t, s, r in degrees if p * t * s * r <= largest)
    for (_, pipeline, tensor, shard, replicate), (words, found) in product(worlds, all_combinations()):
        refused = found.verdict == REFUSED
        meaningless = (words.schedule == NO_PIPELINE) != (pipeline == 1) or (words.zero > 1 and shard == 1)
        if refused or meaningless or words.precision != "float64":
            continue
        layout = Layout(
            pipeline=pipeline, tensor=tensor, shard=shard, replicate=replicate, zero=words.zero, micro_batch=1,
            schedule="1f1b" if words.schedule == NO_PIPELINE else words.schedule,
            recompute="0.5" if words.recompute == FRACTION else words.recompute,
        )  # fmt: skip
        if layout.stage_count <= max(LAYERS) + 2:
            yield words, layout


def job_for(layout: Layout, tied: bool) -> Job:
    """As few micro-batches as the schedule can run, but at least two, so that there is something to add up."""
    count = next(n for n in range(2, 100) if micro_batch_error(layout, n) is None)
    samples = layout.data * layout.micro_batch * count
    model = {**MODEL, "layers": next(n for n in LAYERS if layout.stage_count <= n + 2), "tied": tied}
    return make_job({"precision": "float64", "model": model, "batch": {"samples": samples}})


def run(cases: list[tuple[Combination, Layout, bool]], results: Path, limit: int) -> None:
    done = {(record["layout"], record["tied"]) for record in read(results)}
    waiting = [case for case in cases if (str(case[1]), case[2]) not in done][: limit or None]
    print(f"{len(cases)} cases, {len(done)} done before, {len(waiting)} to run now", file=sys.stderr)
    for number, (words, layout, tied) in enumerate(waiting, start=1):
        start = time.perf_counter()
        (record,) = verify(job_for(layout, tied), [layout])
        seconds = round(time.perf_counter() - start, 2)
        line = {**record.as_dict(), "tied": tied, "words": words[:3], "world": layout.world, "seconds": seconds}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        head, verdict = "tied" if tied else "untied", "exact" if record.ok else record.describe()
        print(f"{number}/{len(waiting)} {seconds:6.2f} s  {layout}, {head}: {verdict}", file=sys.stderr)


def read(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def markdown(records: list[dict[str, Any]]) -> Iterator[str]:
    """The worst error of each row of the support table over all its worlds, then costs and refusals."""
    costs = list(dict.fromkeys(found.sentence for _, found in all_combinations() if found.verdict == EXACT_AT_COST))
    yield "| schedule | zero | recompute | verdict | layouts | loss | grad norm | gradients | weights | seconds |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for words, found in all_combinations():
        if words.precision != "float64" or found.verdict == REFUSED:
            continue
        verdict = f"exact, cost {costs.index(found.sentence) + 1}" if found.verdict == EXACT_AT_COST else found.verdict
        rows = [record for record in records if tuple(record["words"]) == words[:3]]
        worst = [f"{max(_number(row[key]) for row in rows):.0e}" if rows else "" for key in ERRORS]
        seconds = sum(row["seconds"] for row in rows)
        yield f"| {' | '.join(map(str, [*words[:3], verdict, len(rows), *worst, round(seconds)]))} |"
    yield ""
    yield from (f"Cost {number}: {sentence}\n" for number, sentence in enumerate(costs, start=1))
    for row in SUPPORT_RULES:
        if row.verdict == REFUSED:
            zero, recompute = ", ".join(map(str, row.zero)), ", ".join(row.recompute)
            yield f"Refused: {', '.join(row.schedule)} with zero {zero} and recompute {recompute}: {row.sentence}\n"
    bad = [record for record in records if not record["ok"]]
    yield f"{len(records)} layouts, {len(records) - len(bad)} exact to 1e-10, {len(bad)} not."
    yield from (f"- {record['layout']}: {record['failure'] or record['first_difference']}" for record in bad)


def _number(value: float | None) -> float:
    return float("inf") if value is None else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="worlds of up to 4 processes")
    parser.add_argument("--limit", type=int, default=0, help="at most so many cases in this run")
    parser.add_argument("--results", type=Path, default=Path("verify_matrix.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of the results there are")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th case from the K-th on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(words, layout, tied) for words, layout in layouts(4 if options.quick else 8) for tied in (True, False)]
    part, parts = map(int, options.part.split("/"))
    if not options.table:
        run(cases[part - 1 :: parts], options.results, options.limit)
    records = read(options.results)
    print("\n".join(markdown(records)))
    return 0 if all(record["ok"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
