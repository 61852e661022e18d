"""The planner's view of a module that is not ours: the costs of its prologue, its blocks and its epilogue."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from shardwise.adapters.module_chain import ModuleChain
from shardwise.models.operator_costs import OperatorCosts
from shardwise.models.trace import interpolate_traces, trace_module


@lru_cache(maxsize=8)
def trace_parts(family: Any, config: Any, itemsize: int) -> Callable[..., tuple[OperatorCosts, ...]]:
    """Returns a function from a micro-batch size to the costs of each part."""
    dtype = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}[itemsize]

    @lru_cache(maxsize=16)
    def trace(samples: int) -> tuple[OperatorCosts, ...]:
        chain: ModuleChain = family.build_on_meta(config)
        chain.to(dtype)
        chain.compute_dtype = dtype
        names = [*chain.anatomy.blocks, *chain.anatomy.units]
        parts = {name: chain.root.get_submodule(name) for name in names}
        found = trace_module(chain, parts=parts, **family.example_batch(config, samples, dtype))
        return tuple(_ordered(chain, found))

    return interpolate_traces(trace)


def _ordered(chain: ModuleChain, found: tuple[OperatorCosts, ...]) -> list[OperatorCosts]:
    """Merges what lies outside of the blocks into one part before and one after them."""
    anatomy = chain.anatomy
    blocks = [costs for costs in found if costs.name in anatomy.blocks]
    ends: tuple[list[OperatorCosts], list[OperatorCosts]] = ([], [])
    for costs in found:
        if costs.name not in anatomy.blocks:
            used = [parts for name, parts in anatomy.parts_of.items() if name.startswith(f"{costs.name}.")]
            is_after = not costs.name or any(len(anatomy.blocks) + 1 in parts for parts in used)
            ends[is_after].append(costs)
    return [_merge(ends[0]), *blocks, _merge(ends[1])]


def _merge(costs: list[OperatorCosts]) -> OperatorCosts:
    total = OperatorCosts(
        name="ends", parameters=0, parameter_bytes=0, output_bytes=0, saved_bytes=0, moved_bytes=0, num_ops=0
    )
    for part in costs:
        added = {key: getattr(total, key) + getattr(part, key) for key in total.__dataclass_fields__ if key != "name"}
        total = replace(total, **added)
    return total
