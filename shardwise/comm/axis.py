"""One axis of the process mesh as this rank sees it: the argument of every timed collective."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardwise.comm.step_timer import StepTimer


@dataclass(frozen=True)
class Axis:
    """Size, this rank's index, and the process group. An axis of size 1 has no group and skips its collectives."""

    size: int
    index: int
    group: dist.ProcessGroup | None
    name: str = field(default="world", compare=False)  # the name under which the step timer records waits for this axis
    timer: StepTimer | None = field(default=None, compare=False, repr=False)  # None: waits are not timed

    def __post_init__(self) -> None:
        assert (self.group is None) == (self.size == 1), "an axis has a process group if and only if its size exceeds 1"

    def span(self, total: int) -> tuple[int, int]:
        """Returns start and length of this rank's chunk when `torch.chunk` splits `total` rows over the axis."""
        size = -(-total // self.size)
        first = min(self.index * size, total)
        return first, min(size, total - first)

    def waiting(self, device: torch.device) -> AbstractContextManager[None]:
        """Times the block it wraps as a wait for the other ranks of this axis."""
        return nullcontext() if self.timer is None else self.timer.waiting(self.name, device)


SINGLE_RANK = Axis(1, 0, None)
