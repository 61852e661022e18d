"""Optimizer state in host memory (`optimizer.offload`).

Page-locked memory of the host holds the state. An update copies it to the GPU a part at a time, and back. A few buffers
take turns, so that copies in both directions and updates overlap; all of it can be captured in a CUDA graph.
"""

import mmap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.host_memory import in_huge_pages, pack, page_lock, unpack

PART = 1 << 25  # elements that are copied at once
BUFFERS = 3


def host_zeros(shapes: Sequence[torch.Size], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Returns zeros in host memory, and their buffer, which is page-locked as long as it is kept."""
    entries, size = pack({str(i): torch.empty(shape, dtype=dtype, device="meta") for i, shape in enumerate(shapes)})
    buffer = in_huge_pages(mmap.mmap(-1, size))
    page_lock(buffer)
    return list(unpack(buffer, entries).values()), buffer


class StateStream:
    """Copies parts of host tensors to the GPU and back, behind the computation."""

    def __init__(self, device: torch.device, dtype: torch.dtype, tensors: int):
        """`tensors`: how many tensors are copied together, which are parts of equal size."""
        self.load, self.store = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.buffers = [[torch.empty(PART, dtype=dtype, device=device) for _ in range(tensors)] for _ in range(BUFFERS)]

    def begin(self) -> None:
        """Begins an update: copies wait for what has been computed so far."""
        self.stored: list[torch.cuda.Event | None] = [None] * BUFFERS
        self.turn = 0
        self.load.wait_stream(torch.cuda.current_stream())

    def parts(self, *host: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yields parts of flat host tensors on the GPU; what the caller has written into them goes back."""
        compute = torch.cuda.current_stream()
        for start in range(0, host[0].numel(), PART):
            part = slice(start, min(start + PART, host[0].numel()))
            turn, self.turn = self.turn, (self.turn + 1) % BUFFERS
            staged = [buffer[: part.stop - start] for buffer in self.buffers[turn]]
            with torch.cuda.stream(self.load):
                if (stored := self.stored[turn]) is not None:
                    self.load.wait_event(stored)
                for on_gpu, tensor in zip(staged, host, strict=True):
                    on_gpu.copy_(tensor[part], non_blocking=True)
            compute.wait_stream(self.load)
            yield part, staged
            self.store.wait_stream(compute)
            with torch.cuda.stream(self.store):
                for on_gpu, tensor in zip(staged, host, strict=True):
                    tensor[part].copy_(on_gpu, non_blocking=True)
                self.stored[turn] = self.store.record_event()

    def end(self) -> None:
        """Ends an update: what follows waits for the copies."""
        torch.cuda.current_stream().wait_stream(self.store)
