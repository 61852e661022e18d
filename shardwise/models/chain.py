"""A model as a chain: a sequence of modules (embedding, blocks, head), each called on the output of the one before.

On one device the chain is the model. A pipeline stage is a slice of it under the same parameter names. The chain holds
no parallel code; its `sharding_plan` is data (`shardwise.models.sharding`)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.quantize import round_slice
from shardwise.models.sharding import ShardingPlan
from shardwise.random import hash_key, normal_

IGNORE_INDEX = -100  # targets with this value do not count
ROUNDED_ROWS = 2**11  # at a time
COPIED_ELEMENTS = 2**24  # at a time, of a weight that is read from a file


class InitialValues:
    """Where the weights of a chain come from."""

    def value(self, name: str) -> Any:
        """Returns the initial value of a parameter: a tensor, or what gives one when it is indexed by slices."""
        raise NotImplementedError

    def check(self, chain: "Chain") -> None:
        """Raises JobError if these are not the weights of the chain, which is on the meta device."""


class Chain(nn.Module):
    """Runs its modules in order. Each gets the output of the one before and the batch's other tensors by keyword."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], sharding_plan: ShardingPlan):
        super().__init__()
        self.is_taken = False  # whether an engine has sharded it
        self.sharding_plan = sharding_plan
        self.initial: InitialValues | None = None  # where weights come from; None: from the sharding plan's `init`
        for name, module in modules:
            self.add_module(name, module)
        self.tie_weights()

    def tie_weights(self, applies_to: Callable[[Tensor], bool] | None = None) -> None:
        """Makes tied parameters, or those of a kind, one object if the chain holds both."""
        weights = dict(self.named_parameters(remove_duplicate=False))
        for alias, name in self.sharding_plan.ties:
            if name in weights and alias in weights and (applies_to is None or applies_to(weights[name])):
                owner, _, leaf = alias.rpartition(".")
                # Not with setattr: the attribute may be parametrized.
                self.get_submodule(owner)._parameters[leaf] = weights[name]

    @property
    def differs_between_calls(self) -> bool:
        """Whether a forward draws random numbers of its own, or may take another path than the one before."""
        return False

    @property
    def written_weights(self) -> frozenset[str]:
        """Parameters that the forward changes, such as those of a teacher. Checkpoints have them, also if they are
        frozen."""
        return frozenset()

    def slice(self, first: int, last: int) -> "Chain":
        """Returns a chain of the modules [first, last), which it shares with this one."""
        modules = list(self.named_children())
        if (first, last) == (0, len(modules)):
            return self
        chain = Chain(modules[first:last], self.sharding_plan)
        chain.initial = self.initial
        return chain

    def named_unique_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields each parameter once, under its canonical name."""
        for name, parameter in self.named_parameters():
            yield self.sharding_plan.canonical_name(name), parameter

    def computing_modules(self) -> Iterator[nn.Module]:
        """Yields the modules whose forward uses parameters."""
        return self.modules()

    def blocks(self) -> list[nn.Module]:
        """Returns the repeated blocks, which are checkpointed and compiled one by one."""
        return [module for name, module in self.named_children() if fnmatchcase(name, self.sharding_plan.block_pattern)]

    def compiled_ends(self) -> list[nn.Module]:
        """Returns what else is compiled: what comes before or after the blocks and takes as long as one."""
        return [module for module in self.children() if getattr(module, "is_compiled_end", False)]

    def in_place_blocks(self) -> set[nn.Module]:
        """Returns the blocks that change activations in place, which selective checkpointing must not save."""
        return set()

    def fsdp_units(self) -> Sequence[nn.Module]:
        """Returns the modules that FSDP shards one by one, in forward order; tied weights stay with the chain."""
        tied = {name.partition(".")[0] for pair in self.sharding_plan.ties for name in pair}
        children = dict(self.named_children())
        return [child for name, child in children.items() if not (name in tied and tied <= children.keys())]

    def pass_sample_ids(self) -> None:
        """Called before blocks are wrapped for activation checkpointing; ours get the sample ids as an argument."""

    def recomputable(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward of a block as it runs in the forward and again in the backward, which recomputes it."""
        return forward

    def configure(self, device: torch.device, dtype: torch.dtype, tensor_degree: int) -> None:
        """Called once the parameters have memory, with the dtype of activations."""

    def take_metrics(self) -> dict[str, float]:
        """Returns the user's metrics, summed over the samples that were evaluated since the last call."""
        return {}

    def stacked_experts(self) -> dict[str, nn.Module]:
        """Returns by name the modules whose parameters have the experts of a layer as their first dimension."""
        return {name: module for name, module in self.named_modules() if getattr(module, "stacks_experts", False)}

    def dispatch_tokens(self, experts: nn.Module, dispatcher: Any) -> None:
        """Called for stacked experts of which this rank keeps some; ours get the dispatcher of their layer."""

    def split_sequence(self, axis: Any, positions: Tensor, attention_fn: Any) -> None:
        """Called if the sequence is split over an axis; `positions` are those of all its ranks, rank by rank."""

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None, **extra: Tensor) -> Tensor:
        """Returns the loss summed over the targets, or the logits if there are no targets. `ids` key dropout masks by
        sample; `extra` are inputs of some families only, such as `document_ids`."""
        for module in self.children():
            x = module(x, ids=ids, targets=targets, **extra)
        return x


def init_weights(chain: Chain, seed: int) -> None:
    """Initializes a full chain on one device; every layout starts from these weights."""
    for name, weight in chain.named_unique_parameters():
        init_slice(chain, name, weight.data, weight.shape, (0,) * weight.dim(), seed)


@torch.no_grad()
def init_slice(chain: Chain, name: str, out: Tensor, shape: torch.Size, offset: tuple[int, ...], seed: int) -> None:
    """Fills `out`, the slice at `offset` of a parameter of this shape, with its initial values."""
    plan = chain.sharding_plan
    if name in plan.quantized and out.numel():
        fill = lambda part, at: _fill_slice(chain, name, part, shape, at, seed)  # noqa: E731
        for rows, part in zip(range(0, len(out), ROUNDED_ROWS), out.split(ROUNDED_ROWS)):
            round_slice(fill, plan.quantize, part, shape[1], (offset[0] + rows, offset[1]))
    else:
        _fill_slice(chain, name, out, shape, offset, seed)


def _fill_slice(chain: Chain, name: str, out: Tensor, shape: torch.Size, offset: tuple[int, ...], seed: int) -> None:
    value = chain.initial.value(name) if chain.initial is not None else None
    if out.numel() == 0:
        return
    if value is not None:
        rows = max(1, COPIED_ELEMENTS * len(out) // out.numel()) if out.dim() else 1
        for number, part in enumerate(out.split(rows) if out.dim() else [out]):
            start = (offset[0] + number * rows, *offset[1:]) if out.dim() else ()
            part.copy_(value[tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))])
        return
    init = next(init for pattern, init in chain.sharding_plan.init if fnmatchcase(name, pattern))
    std = (3 * shape[-1]) ** -0.5 if init.kind == "fan_in" else init.std
    if std:
        normal_(out, hash_key("init", seed, name), shape, offset, std)
    else:
        out.fill_(1.0 if init.kind == "ones" else 0.0)
