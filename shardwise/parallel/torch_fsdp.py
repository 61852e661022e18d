"""PyTorch's FSDP2 internals, in one file.

FSDP2 has no public hooks around its waits, no public way to reduce gradients and reshard at the end of a split
backward, and no public access to the order in which it packs the gradients of a module.
"""

from typing import Any

from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardwise.comm.axis import Axis


def _timed(name: str) -> Any:
    method: Any = getattr(FSDPParamGroup, name)

    def timed_method(group: Any, *args: Any, **kwargs: Any) -> Any:
        with group.timed_axis.waiting(group.device):
            return method(group, *args, **kwargs)

    return timed_method


# The methods that gather weights and reduce gradients. On a GPU the collectives run in streams of their own, and these
# methods make the compute stream wait for them.
_WAITING_METHODS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
TimedParamGroup: Any = type("TimedParamGroup", (FSDPParamGroup,), {name: _timed(name) for name in _WAITING_METHODS})


def param_groups(module: FSDPModule) -> list[Any]:
    """Returns the parameter groups that FSDP gathers and reduces for a module, without those of its submodules."""
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)  # a list in newer versions of PyTorch
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


def time_waits(module: FSDPModule, axis: Axis) -> None:
    """Reports the waits of this module's parameter groups to the axis's step timer."""
    for group in param_groups(module):
        group.__class__ = TimedParamGroup
        group.timed_axis = axis


def finish_backward(root: FSDPModule) -> None:
    """Reduces gradients and reshards weights, which FSDP does by itself only at the end of a full backward."""
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


__all__ = ["DefaultReduceScatter", "finish_backward", "param_groups", "time_waits"]
