"""LoRA (Hu et al. 2021, arXiv:2106.09685): trains small matrices beside the linear layers of a frozen model.

    y = W x + alpha / rank * B (A x)

A has the shape (rank, in), B (out, rank); for stacked experts both have the experts as first dimension, and the weight
reads as W + alpha / rank * B A. They are parameters of the module that has W, `lora_A` and `lora_B` (for stacked
experts `<weight>_lora_A`), and are split as W is: `ShardingPlan.shard_dim_of`. B starts at zero, so training starts at
the model that was given."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.models.adapter_files import read_adapter
from shardwise.models.chain import Chain, InitialValues, init_slice
from shardwise.models.config import LoRA
from shardwise.models.layers import parametrize
from shardwise.models.sharding import InitSpec, is_adapter


class AdaptedWeights(InitialValues):
    """Initial values of a model with adapters: those of the frozen model, and those of an adapter, if given."""

    def __init__(self, base: InitialValues | None, adapters: Mapping[str, Tensor]):
        self.base, self.adapters = base, adapters

    def value(self, name: str) -> Any:
        if is_adapter(name):
            return self.adapters.get(name)
        return None if self.base is None else self.base.value(name)

    def check(self, chain: Chain) -> None:
        if self.base is not None:
            self.base.check(chain)


def add_adapters(root: nn.Module, config: LoRA) -> None:
    """Gives the layers of a model that is not sharded yet their adapters."""
    names = [name for name, _, _ in _layers(root)]
    for target in (*config.targets, *config.ranks, *config.alphas):
        if not any(matches(name, target) for name in names):
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in names})) or "none"
            raise JobError(f"model.lora: no layer is named like {target!r}; the layers of this model are: {kinds}.")
    chosen = [layer for layer in _layers(root) if any(matches(layer[0], target) for target in config.targets or "*")]
    if not chosen:
        raise JobError("model.lora: this model has no linear layers in its blocks.")
    for name, module, leaf in chosen:
        _add_adapter(module, leaf, config.rank_of(name, matches), config.alpha_of(name, matches))


def adapt_chain(chain: Chain, root: nn.Module, config: LoRA) -> None:
    """Makes the adapters that the module of a chain has what is initialized and trained."""
    for name, parameter in chain.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    plan = chain.sharding_plan
    init = ("*lora_A", InitSpec("fan_in")), ("*lora_B", InitSpec("normal", config.init_std))
    chain.sharding_plan = replace(plan, init=(*init, *plan.init))
    mark_quantized(chain, root, config)
    adapters = read_adapter(Path(config.adapter), root) if config.adapter else {}
    chain.initial = AdaptedWeights(chain.initial, adapters)


def mark_quantized(chain: Chain, root: nn.Module, config: LoRA) -> None:
    """Makes the initial weights of linear layers rounded ones, if the config says so."""
    quantized = frozenset(f"{name}.weight" for name, _, leaf in _layers(root) if config.quantize and leaf == "weight")
    chain.sharding_plan = replace(chain.sharding_plan, quantize=config.quantize, quantized=quantized)


def add_initialized(root: nn.Module, config: LoRA, chain: Chain, seed: int) -> None:
    """Gives a reference model the adapters of a chain, with the same initial values."""
    add_adapters(root, config)
    for name, parameter in root.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            init_slice(chain, name, parameter.data, parameter.shape, (0,) * parameter.dim(), seed)


def _layers(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields the linear layers and stacked experts of the blocks: name, module, and its weight."""
    for name, module in root.named_modules():
        if not any(character.isdigit() for character in name):  # neither a block nor inside of one
            continue
        if isinstance(module, nn.Linear):
            yield name, module, "weight"
        elif getattr(module, "stacks_experts", False):
            weights = {leaf: weight for leaf, weight in module.named_parameters() if weight.dim() == 3}
            yield from ((f"{name}.{leaf}", module, leaf) for leaf in weights)


def matches(name: str, pattern: str) -> bool:
    """Whether a layer has this name, pattern or last part of a name."""
    return fnmatchcase(name, pattern) or name.endswith(f".{pattern}")


def _add_adapter(module: Any, leaf: str, rank: int, alpha: float) -> None:
    weight: Tensor = module._parameters[leaf]
    prefix, (*experts, rows, columns) = "" if leaf == "weight" else f"{leaf}_", weight.shape
    if is_transposed(module):
        rows, columns = columns, rows
    for name, shape in (("lora_A", (*experts, rank, columns)), ("lora_B", (*experts, rows, rank))):
        empty = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        module.register_parameter(f"{prefix}{name}", nn.Parameter(empty))
    module.__dict__[f"{prefix}lora_scale"] = alpha / rank
    if leaf == "weight":
        module.register_forward_hook(_add_update)
    else:
        parametrize(module, leaf, AddUpdate(module, leaf))


class AddUpdate:
    """The weight of experts as they use it. An object, not a closure: it is copied along with its module."""

    def __init__(self, module: nn.Module, leaf: str):
        self.module, self.leaf = module, leaf

    def __call__(self, weight: Tensor) -> Tensor:
        scale, down, up = (getattr(self.module, f"{self.leaf}_lora_{part}") for part in ("scale", "A", "B"))
        update = scale * (up @ down)
        return weight + (update.mT if is_transposed(self.module) else update)


def _add_update(module: Any, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y + module.lora_scale * F.linear(F.linear(args[0], module.lora_A), module.lora_B)


def is_transposed(module: nn.Module) -> bool:
    """Whether experts of transformers keep their weights as (E, in, out)."""
    return bool(getattr(module, "is_transposed", False))
