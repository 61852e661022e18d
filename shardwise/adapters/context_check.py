"""Whether a module that is not ours can be split along the sequence, from one run on fake tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.adapters.anatomy import SHAPE_ONLY
from shardwise.adapters.split_attention import SPLIT, split_sequence
from shardwise.models.trace import tensors_in, with_fake_tensors

_VIEWS = ("view", "_unsafe_view", "slice", "select", "unsqueeze", "expand", "_to_copy", "alias", "detach")


class _TokenUses(TorchDispatchMode):
    """Finds lookups by numbers that are computed from the token ids, and convolutions."""

    def __init__(self, tokens: list[Tensor]):
        super().__init__()
        self.tokens, self.computed = tokens, list[Tensor]()  # kept alive, so that no id is used twice
        self.looks_up_computed = self.convolves = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.convolves |= name == "convolution"
        inputs = {id(leaf) for leaf in tensors_in((args, kwargs))}
        is_computed = not inputs.isdisjoint(map(id, self.computed))
        is_token = not inputs.isdisjoint(map(id, self.tokens))
        if name == "embedding":
            self.looks_up_computed |= is_computed
        elif (is_computed or is_token) and name not in SHAPE_ONLY:
            found = self.tokens if is_token and name in _VIEWS else self.computed
            found += tensors_in(out)
        return out


def context_refusal(
    module: nn.Module, blocks: tuple[str, ...], batch: Any, run: Callable[[Any], Any], interface: str,
    attending: AbstractContextManager[None] | None = None,
) -> str:  # fmt: skip
    """Returns why a module on the meta device cannot be split along the sequence; empty if it can.
    `run` computes a batch with the module, within `attending`; `interface` is what its attention must go through."""
    counts: list[int] = []  # calls of our attention, when each block has run
    handles = [
        module.get_submodule(name).register_forward_hook(lambda *args: counts.append(SPLIT.calls)) for name in blocks
    ]
    module.eval()  # nothing is drawn at random
    split_sequence(None, None, None)
    SPLIT.calls = 0
    try:
        with with_fake_tensors(module) as to_fake, attending or nullcontext():
            batch = tree_map_only(Tensor, to_fake, batch)
            uses = _TokenUses([leaf for leaf in tree_leaves(batch) if not leaf.is_floating_point()])
            with uses:
                run(batch)
    except Exception as error:
        if not SPLIT.calls:
            return f"it does not attend through {interface}"
        return f"it fails with our attention ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    finally:
        module.train()
        for handle in handles:
            handle.remove()
    missing = [name for name, before, after in zip(blocks, [0, *counts], counts, strict=False) if before == after]
    if missing or not SPLIT.calls:
        return f"{missing[0] if missing else 'it'} does not attend through {interface}"
    if uses.convolves:
        return "it convolves over positions"
    return "its positions depend on the tokens (padding)" if uses.looks_up_computed else ""
