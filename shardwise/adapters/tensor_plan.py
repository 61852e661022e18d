"""Tensor parallelism of a module that is not ours, from a plan as data: a style by pattern of module names.

The styles are in docs/reference/job.md; every other weight is whole on every rank. Each rank computes the whole loss,
which counts once; gradients of whole weights are summed over the ranks, so norms in split heads need none."""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from torch import nn

from shardwise.adapters.anatomy import Anatomy
from shardwise.errors import JobError, suggest
from shardwise.files import parse_toml
from shardwise.models import sharding

RULES: dict[str, Callable[[str], sharding.ModuleRule]] = {
    "rowwise": sharding.AllReduceOutput, "rowwise_split": partial(sharding.AllReduceOutput, splits_input=True),
    "colwise_gather": sharding.GatherOutput, "vocab": sharding.VocabLookup,
}  # fmt: skip
STYLES = ("colwise", *RULES)

NAMES = parse_toml((Path(__file__).parent / "names.toml").read_text(encoding="utf-8"))
"""What layers and config fields are called in models that are not ours."""
HEAD_NAMES, COLWISE_NAMES, ROWWISE_NAMES = (tuple(NAMES["layers"][key]) for key in ("heads", "colwise", "rowwise"))


def guess_plan(module: nn.Module, anatomy: Anatomy) -> dict[str, str]:
    """Returns a plan by the names of the blocks' linear layers; empty if a block has no pair of split layers."""
    plan: dict[str, str] = {}
    for block in anatomy.blocks:
        linear = [name for name, part in module.get_submodule(block).named_modules() if isinstance(part, nn.Linear)]
        columns = {f"{block}.{name}": "colwise" for name in linear if name.endswith(HEAD_NAMES + COLWISE_NAMES)}
        # Attention whose queries, keys and values are one layer stays whole.
        split = {name.partition(".")[0] for name in linear if name.endswith(HEAD_NAMES)}
        linear = [name for name in linear if name.partition(".")[0] in split or "att" not in name.partition(".")[0]]
        rows = {f"{block}.{name}": "rowwise" for name in linear if name.endswith(ROWWISE_NAMES)}
        if not columns or not rows:
            return {}
        plan |= columns | rows
    return plan


def make_sharding_plan(module: nn.Module, anatomy: Anatomy, styles: Mapping[str, str], head_dim: int = 1,
                       is_hint: bool = False) -> sharding.ShardingPlan:  # fmt: skip
    """Returns the plan of a module: what is split over the tensor axis, what is tied, what `verify` compares.
    The features of a head stay together. A hint may name modules that this model does not have."""
    for pattern, style in styles.items():
        if style not in STYLES:
            raise JobError(f"tensor_plan: {pattern!r} has the unknown style {style!r}; {suggest(style, STYLES)}")
    shard_dims: list[sharding.ShardDim] = []
    rules: list[sharding.ModuleRule] = []
    for pattern, style in styles.items():
        as_deep = {name: part for name, part in module.named_modules() if name.count(".") == pattern.count(".")}
        found = [(name, part) for name, part in as_deep.items() if fnmatchcase(name, pattern)]
        if not found and is_hint:
            continue
        if not found:
            raise JobError(f"tensor_plan: no module is named like {pattern!r}; {suggest(pattern, as_deep)}")
        for name, part in found:
            kind = nn.Embedding if style == "vocab" else nn.Linear
            if not isinstance(part, kind):
                found_kind = type(part).__name__
                raise JobError(f"tensor_plan: {name} is a {found_kind}, but {style!r} splits an nn.{kind.__name__}.")
            unit = head_dim if name.rpartition(".")[2] in HEAD_NAMES else 1
            if style in ("colwise", "colwise_gather"):
                shard_dims.append(sharding.Colwise(f"{name}.*", unit=unit if style == "colwise" else 1))
            else:
                shard_dims.append(sharding.Rowwise(f"{name}.weight", dim=0 if style == "vocab" else 1))
            rules += [RULES[style](name)] if style in RULES else []
    canonical = {id(parameter): name for name, parameter in module.named_parameters()}
    named = [(name, canonical[id(parameter)]) for name, parameter in module.named_parameters(remove_duplicate=False)]
    ties = tuple((name, first) for name, first in named if name != first)
    last = len(anatomy.blocks) + 1
    stage_ties = tuple(name for name, parts in anatomy.parts_of.items() if parts[0] == 0 and parts[-1] == last)
    prefix = anatomy.blocks[0].rpartition(".")[0] if anatomy.blocks else "-"
    has_sample_rows = anatomy.stream is not None and anatomy.stream.shape[0] == 2  # of the two samples traced
    summed = [rule.module for rule in rules if isinstance(rule, sharding.AllReduceOutput)]
    compared = tuple(name for name in _compared(module, anatomy, summed) if has_sample_rows)
    return sharding.ShardingPlan(tuple(shard_dims), tuple(rules), ties, stage_ties=stage_ties, splits_sequence=False,
                                 block_pattern=f"{prefix}.*", compared_modules=compared)  # fmt: skip


def scale_head_counts(root: nn.Module, plan: sharding.ShardingPlan, degree: int) -> None:
    """Divides the counts of heads and of their features that attention modules keep as attributes."""
    for name in {rule.parameter.rsplit(".", 2)[0] for rule in plan.shard_dims if rule.unit > 1}:
        module = root.get_submodule(name)
        for key in NAMES["layers"]["head_counts"]:
            value = module.__dict__.get(key)
            if isinstance(value, int) and value % degree == 0:
                setattr(module, key, value // degree)


def _compared(module: nn.Module, anatomy: Anatomy, summed: list[str]) -> Iterator[str]:
    """Yields the blocks and, in each, the children whose output is whole: with a plan, those that end in a sum."""
    for block in anatomy.blocks:
        for child, _ in module.get_submodule(block).named_children():
            name = f"{block}.{child}"
            ends_in_sum = any(f"{rule}.".startswith(f"{name}.") for rule in summed)
            if name in anatomy.called_once and (ends_in_sum or not summed):
                yield name
        yield block
