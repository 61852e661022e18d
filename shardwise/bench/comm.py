"""A message there and back, from which `shardwise calibrate` and `shardwise doctor --preflight` measure links."""

import torch.distributed as dist
from torch import Tensor


def ping_pong(tensor: Tensor, first: int, second: int, group: dist.ProcessGroup | None = None) -> None:
    """Sends a tensor from one rank to another and back; other ranks do nothing."""
    if dist.get_rank() == first:
        dist.send(tensor, second, group)
        dist.recv(tensor, second, group)
    elif dist.get_rank() == second:
        dist.recv(tensor, first, group)
        dist.send(tensor, first, group)
