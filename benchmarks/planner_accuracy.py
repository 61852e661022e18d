"""Measures the planner's accuracy: predicts measured runs from their configuration alone and compares.

    python benchmarks/planner_accuracy.py benchmarks/runs.csv                 a report
    python benchmarks/planner_accuracy.py benchmarks/runs.csv --json          the same as JSON
    python benchmarks/planner_accuracy.py benchmarks/runs.csv --rows out.csv  every row with its prediction

Columns: model shape (`layers`, `hidden`, `heads`, `kv_heads`, `ffn_hidden`, `vocab`, `seq_len`, `experts`,
`experts_per_token`, `params_b`), machine (`gpu`, `gpus`, `gpus_per_node`), layout (`dp`, `fsdp`, `tp`, `sp`, `pp`,
`virtual_pp`, `cp`, `ep`, `zero_stage`), batch (`micro_batch`, `global_batch`, in sequences), `precision`, `recompute`;
measured: `iter_time_s`, `tokens_per_s_per_gpu` or `tflops_per_gpu` with `tflops_kind`, `peak_mem_gib`. A row whose note
says OUT OF MEMORY, or whose file is named so, must be predicted not to fit. `benchmarks/published.py` lists the
assumptions about empty cells.

Errors are |predicted / measured - 1|. Regret is computed over groups of at least three rows with the same model,
machine, number of devices, global batch and precision: the measured time of the row predicted to be fastest, over that
of the fastest row, minus 1. Of rows with equal predictions (one layout in several releases) the first counts.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frameworks import FrameworkEfficiency
from published import MeasuredRun, SkipRow, evaluate_run, parse_row, read_rows

from shardwise.errors import UserError
from shardwise.planner.plan import HIGHEST

UNDERESTIMATE = -0.05
Constants = dict[str, FrameworkEfficiency]  # by device family


def out_of_memory(path: Path, values: dict[str, str]) -> bool:
    return "out_of_memory" in path.stem or "OUT OF MEMORY" in values.get("note", "").upper()


def predict_row(
    path: Path, values: dict[str, str], constants: Constants | None = None,
    change: Callable[[MeasuredRun], MeasuredRun] = lambda row: row,
) -> dict[str, Any]:  # fmt: skip
    """Returns predicted seconds, memory and whether it fits, with the measurements; or why the row was skipped."""
    is_oom = out_of_memory(path, values)
    try:
        row = change(parse_row(values))
        if row.seconds is None and row.memory is None and not is_oom:
            raise SkipRow("neither time nor memory was measured")
        prediction, layout = evaluate_run(row, not is_oom, (constants or {}).get(row.cluster.device.family))
    except SkipRow as reason:
        return {"skipped": str(reason)}
    limit, peak = row.cluster.device.memory, max(prediction.memory, key=lambda rank: rank.total)
    measured_part = peak.total - (peak.reserve if row.is_allocated else 0.0)
    return {
        "row": row, "layout": str(layout), "seconds": prediction.seconds, "memory": measured_part / 2**30,
        "fits": prediction.peak_memory <= limit, "surely_fits": HIGHEST * prediction.peak_memory <= limit,
        "is_oom": is_oom,
    }  # fmt: skip


def error_summary(pairs: list[float]) -> dict[str, float]:
    if not pairs:
        return {}
    ordered = sorted(map(abs, pairs))
    return {
        "median": statistics.median(ordered), "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "bias": statistics.median(pairs),
    }  # fmt: skip


def time_errors(results: list[dict[str, Any]]) -> list[float]:
    return [r["seconds"] / r["row"].seconds - 1 for r in results if r["row"].seconds and not r["is_oom"]]


def memory_errors(results: list[dict[str, Any]]) -> list[float]:
    return [r["memory"] / r["row"].memory - 1 for r in results if r["row"].memory and not r["is_oom"]]


def group_key(row: MeasuredRun) -> tuple[Any, ...]:
    written = row.values["model"], row.values["precision"]
    return row.source, row.shape, row.cluster, row.layout.world, row.samples, *written


def regret(results: list[dict[str, Any]]) -> dict[str, float]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        if result["row"].seconds and not result["is_oom"]:
            groups[repr(group_key(result["row"]))].append(result)  # type: ignore[index]
    losses = []
    for group in groups.values():
        if len(group) >= 3:
            chosen = min(group, key=lambda r: r["seconds"])["row"]
            losses.append((chosen.seconds / min(r["row"].seconds for r in group) - 1, len(group)))
    if not losses:
        return {"groups": 0}
    by_row = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    return {"groups": len(losses), "by_row": by_row, "mean": statistics.mean(loss for loss, _ in losses),
            "max": max(losses)[0]}  # fmt: skip


def summary(all_results: list[dict[str, Any]]) -> dict[str, Any]:
    results = [r for r in all_results if "skipped" not in r]
    ran, oom_results = [r for r in results if not r["is_oom"]], [r for r in results if r["is_oom"]]
    memory = memory_errors(results)
    fits: dict[str, float] = {}
    if ran:
        fits["ran_ok"] = sum(r["fits"] for r in ran) / len(ran)
    if oom_results:
        fits["oom_ok"] = sum(not r["fits"] for r in oom_results) / len(oom_results)
        fits["oom_warned"] = sum(not r["surely_fits"] for r in oom_results) / len(oom_results)
    by: dict[str, dict[str, list[dict[str, Any]]]] = {"by_source": defaultdict(list), "by_device": defaultdict(list)}
    for result in results:
        by["by_source"][result["row"].source].append(result)
        by["by_device"][result["row"].cluster.device.name].append(result)
    return {
        "rows": len(all_results),
        "used": len(results),
        "time": error_summary(time_errors(results)),
        "over_sources": {
            name: statistics.median(medians)
            for name, errors in (("time", time_errors), ("memory", memory_errors))
            if (medians := [error_summary(e)["median"] for rows in by["by_source"].values() if (e := errors(rows))])
        },
        "memory": {**error_summary(memory), "under": sum(e < UNDERESTIMATE for e in memory) / len(memory)}
        if memory
        else {},
        "fits": fits,
        "regret": regret(results),
        "skipped": dict(Counter(r["skipped"] for r in all_results if "skipped" in r)),
        **{
            word: {
                name: {
                    "rows": len(rows),
                    **error_summary(time_errors(rows)),
                    **({"memory": error_summary(memory)["median"]} if (memory := memory_errors(rows)) else {}),
                }
                for name, rows in sorted(groups.items())
            }
            for word, groups in by.items()
        },
    }


def print_report(report: dict[str, Any]) -> None:
    def percent(values: dict[str, float]) -> str:
        return ", ".join(f"{key} {100 * value:+.1f}%" if key == "bias" else f"{key} {100 * value:.1f}%"
                         for key, value in values.items() if key not in ("rows", "groups"))  # fmt: skip

    print(f"rows {report['rows']}, used {report['used']}")
    for reason, count in sorted(report["skipped"].items(), key=lambda item: -item[1]):
        print(f"  skipped {count}: {reason}")
    print(f"median over sources: {percent(report['over_sources']) or 'nothing was measured'}")
    print(f"step time: {percent(report['time']) or 'not measured'}")
    print(f"memory: {percent(report['memory']) or 'not measured'}")
    print(f"fits: {percent(report['fits']) or 'no rows'}")
    print(f"regret over {report['regret']['groups']} groups: {percent(report['regret']) or 'none'}")
    for word in ("by_source", "by_device"):
        print(f"\n{word.replace('_', ' ')}:")
        for name, values in report[word].items():
            print(f"  {name:24s} {values['rows']:4d} rows  {percent(values)}")


def write_rows(path: Path, rows: list[dict[str, str]], results: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "predicted_layout", "predicted_time_s", "predicted_mem_gib",
                                       "predicted_fits", "measured_time_s", "skipped"])  # fmt: skip
        writer.writeheader()
        for values, result in zip(rows, results, strict=True):
            if "skipped" in result:
                writer.writerow({**values, "skipped": result["skipped"]})
                continue
            writer.writerow({
                **values, "predicted_layout": result["layout"], "predicted_time_s": f"{result['seconds']:.6g}",
                "predicted_mem_gib": f"{result['memory']:.4g}", "predicted_fits": int(result["fits"]),
                "measured_time_s": result["row"].seconds or "", "skipped": "",
            })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=Path, metavar="OUT.csv")
    options = parser.parse_args()
    try:
        rows = read_rows(options.file)
        results = [predict_row(options.file, values) for values in rows]
        report = summary(results)
        if options.rows:
            write_rows(options.rows, rows, results)
    except UserError as error:
        parser.exit(2, f"{error}\n")
    except OSError as error:
        parser.exit(2, f"{options.rows} cannot be written: {error.strerror}.\n")
    if options.json:
        print(json.dumps(report))
    else:
        print_report(report)


if __name__ == "__main__":
    main()
