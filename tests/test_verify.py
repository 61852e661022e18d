"""Every axis, schedule, ZeRO stage and kind of model against one process, in float64: a pairwise cover of the matrix.

The whole matrix is `benchmarks/verify_matrix.py`.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
from pairwise import Case, cover, pairs

from shardwise.errors import LayoutError
from shardwise.job import Job, make_job
from shardwise.layout import Layout, micro_batch_rule
from shardwise.support import REFUSED, support
from shardwise.verify.parity import verify

LAYOUT = {
    "pipeline": (1, 2, 4),
    "tensor": (1, 2, 4),
    "shard": (1, 2, 3, 4),
    "replicate": (1, 2),
    # Schedule and stages per rank.
    "schedule": (
        "none", "gpipe", "1f1b", "interleaved", "interleaved 3", "zero-bubble", "zero-bubble 2", "zbv", "dualpipev",
    ),
    "zero": (1, 2, 3),
    "recompute": ("none", "selective", "full", "0.5"),
    "micro_batch": (1, 2),
    # Micro-batches: the fewest that the schedule can run, or the next number that it can.
    "micro_batches": ("few", "more"),
}  # fmt: skip
MODEL = {
    "tied": (True, False),
    # Positions, norm, activation and bias; each pair of them is there.
    "kind": (
        ("learned", "layer", "gelu", True),
        ("rotary", "rms", "swiglu", False),
        ("learned", "rms", "swiglu", True),
        ("rotary", "layer", "gelu", False),
        ("learned", "layer", "swiglu", False),
        ("rotary", "rms", "gelu", True),
    ),
    # Heads and heads of keys and values: plain, grouped, uneven over tensor=2 and 4, fewer than tensor ranks.
    "heads": ((4, 4), (4, 2), (6, 3), (4, 1)),
    # Vocabulary and hidden features: even, odd.
    "sizes": ((64, 48), (61, 50)),
    "layers": (4, 7),
}


def layout_of(case: Case) -> Layout | None:
    """The layout of a case; None where its words do not go together or one of them would mean nothing."""
    schedule, _, virtual = case["schedule"].partition(" ")
    world = case["pipeline"] * case["tensor"] * case["shard"] * case["replicate"]
    if not 1 < world <= 8 or (schedule == "none") != (case["pipeline"] == 1) or (case["zero"] > 1 and case["shard"] == 1):
        return None
    degrees = {axis: case[axis] for axis in ("pipeline", "tensor", "shard", "replicate", "zero", "recompute", "micro_batch")}
    if schedule != "none":
        degrees |= {"schedule": schedule, "virtual": int(virtual or 0)}
    layout = Layout(**degrees)
    return None if support(layout, "float64").verdict == REFUSED else layout


def job_of(case: Case, layout: Layout) -> Job:
    counts = [n for n in range(1 if layout.pipeline == 1 else 2, 40) if not micro_batch_rule(layout, n)]
    count = counts[("few", "more").index(case["micro_batches"])]
    heads, kv_heads = case["heads"]
    model = {key: case[key] for key in MODEL if key != "heads"}
    model |= {"heads": heads, "kv_heads": kv_heads, "head_size": 4, "width": 24, "sequence": 8, "dropout": 0.1}
    batch = {"samples": layout.data * layout.micro_batch * count}
    return make_job({"precision": "float64", "seed": 1, "model": model, "batch": batch})


def every(factors: dict[str, tuple]) -> list[Case]:
    return [dict(zip(factors, values)) for values in product(*factors.values())]


def fits(case: Case) -> bool:
    layout = layout_of(case)
    return layout is not None and layout.stage_count <= case["layers"] + 2


def cost(case: Case) -> float:
    """About the seconds it takes."""
    return (case["pipeline"] * case["tensor"] * case["shard"] * case["replicate"])**0.5 * case["layers"] ** 0.5


CASES = cover([[case for case in every(LAYOUT) if layout_of(case)], every(MODEL)], fits, cost)
