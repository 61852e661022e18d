"""Verifies every layout in float64: all combinations of pipeline, tensor, shard and replicate with up to 8 processes,
of schedule, ZeRO stage and activation checkpointing that the support table allows, and of tied and untied heads.

    python benchmarks/verify_matrix.py                   everything, about two hours on two cores
    python benchmarks/verify_matrix.py --quick           world sizes up to 4
    python benchmarks/verify_matrix.py --limit 200       at most 200 cases now; run again to continue
    python benchmarks/verify_matrix.py --part 2/4        every fourth case from the second on, for four parallel runs
    python benchmarks/verify_matrix.py --table           only print the table of existing results

Each finished case is appended to `--results` as one JSON line; cases that have a result are not run again. The table
goes to standard output as Markdown, one row per schedule, ZeRO stage and recompute setting.
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
from shardwise.verify.parity import verify

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from support_table import EXACT_AT_COST, FRACTION, NO_PIPELINE, Combination, all_combinations  # noqa: E402

LAYERS = (4, 6)  # enough for six or eight stages, with embedding and head
MODEL = {
    "width": 16, "heads": 8, "kv_heads": 4, "head_dim": 4, "ffn": 32, "vocab": 61, "sequence": 24,
    "dropout": 0.1,
}  # fmt: skip
ERRORS = ("loss", "grad_norm", "grad", "weight")


def layouts(max_world: int) -> Iterator[tuple[Combination, Layout]]:
    """Yields every layout of the matrix, small world sizes first."""
    degrees = product(
        range(1, 9), (1, 2, 3, 4, 6, 8), range(1, 9), range(1, 9)
    )  # tensor degrees that divide the sequence of 24
    worlds = sorted((p * t * s * r, p, t, s, r) for p, t, s, r in degrees if p * t * s * r <= max_world)
    for (_, pipeline, tensor, shard, replicate), (combination, _) in product(worlds, all_combinations()):
        meaningless = (combination.schedule == NO_PIPELINE) != (pipeline == 1) or (combination.zero > 1 and shard == 1)
        if meaningless or combination.precision != "float64":
            continue
        layout = Layout(
            pipeline=pipeline, tensor=tensor, shard=shard, replicate=replicate, zero=combination.zero, micro_batch=1,
            schedule="1f1b" if combination.schedule == NO_PIPELINE else combination.schedule,
            recompute="0.5" if combination.recompute == FRACTION else combination.recompute,
        )  # fmt: skip
        if layout.stage_count <= max(LAYERS) + 2:
            yield combination, layout


def job_for(layout: Layout, tied: bool) -> Job:
    """Returns a job with the fewest micro-batches that the schedule allows, at least two to test accumulation."""
    count = next(n for n in range(2, 100) if micro_batch_error(layout, n) is None)
    samples = layout.data * layout.micro_batch * count
    model = {**MODEL, "layers": next(n for n in LAYERS if layout.stage_count <= n + 2), "tied": tied}
    return make_job({"precision": "float64", "model": model, "batch": {"samples": samples}})


def run(cases: list[tuple[Combination, Layout, bool]], results: Path, limit: int) -> None:
    done = {(record["layout"], record["tied"]) for record in read(results)}
    pending = [case for case in cases if (str(case[1]), case[2]) not in done][: limit or None]
    print(f"{len(cases)} cases, {len(done)} already done, {len(pending)} to run", file=sys.stderr)
    for number, (combination, layout, tied) in enumerate(pending, start=1):
        start = time.perf_counter()
        (record,) = verify(job_for(layout, tied), [layout])
        seconds = round(time.perf_counter() - start, 2)
        line = {
            **record.as_dict(),
            "tied": tied,
            "combination": combination[:3],
            "world": layout.world,
            "seconds": seconds,
        }
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        head, verdict = "tied" if tied else "untied", "exact" if record.ok else record.describe()
        print(f"{number}/{len(pending)} {seconds:6.2f} s  {layout}, {head}: {verdict}", file=sys.stderr)


def read(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def markdown(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yields a table with the worst error of each row of the support table, then the costs."""
    costs = list(dict.fromkeys(rule.explanation for _, rule in all_combinations() if rule.verdict == EXACT_AT_COST))
    yield "| schedule | zero | recompute | verdict | layouts | loss | grad norm | gradients | weights | seconds |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for combination, rule in all_combinations():
        if combination.precision != "float64":
            continue
        verdict = f"exact, cost {costs.index(rule.explanation) + 1}" if rule.verdict == EXACT_AT_COST else rule.verdict
        rows = [record for record in records if tuple(record["combination"]) == combination[:3]]
        worst = [f"{max(_number(row[key]) for row in rows):.0e}" if rows else "" for key in ERRORS]
        seconds = sum(row["seconds"] for row in rows)
        yield f"| {' | '.join(map(str, [*combination[:3], verdict, len(rows), *worst, round(seconds)]))} |"
    yield ""
    yield from (f"Cost {number}: {sentence}\n" for number, sentence in enumerate(costs, start=1))
    bad = [record for record in records if not record["ok"]]
    yield f"{len(records)} layouts, {len(records) - len(bad)} exact to 1e-10, {len(bad)} not."
    yield from (f"- {record['layout']}: {record['failure'] or record['first_difference']}" for record in bad)


def _number(value: float | None) -> float:
    return float("inf") if value is None else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="world sizes up to 4")
    parser.add_argument("--limit", type=int, default=0, help="maximum number of cases in this run")
    parser.add_argument("--results", type=Path, default=Path("verify_matrix.jsonl"))
    parser.add_argument("--table", action="store_true", help="only print the table of existing results")
    parser.add_argument("--part", default="1/1", help="K/N: every Nth case from the Kth on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        (combination, layout, tied)
        for combination, layout in layouts(4 if options.quick else 8)
        for tied in (True, False)
    ]
    part, parts = map(int, options.part.split("/"))
    if not options.table:
        run(cases[part - 1 :: parts], options.results, options.limit)
    records = read(options.results)
    print("\n".join(markdown(records)))
    return 0 if all(record["ok"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
