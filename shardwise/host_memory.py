"""Host memory that holds copies of tensors: one buffer for all of them, page-locked if they come from a GPU."""

import mmap
import os
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

ALIGNMENT, PAGE = 64, 4096
PART = 1 << 28  # bytes that are worth a thread
Entry = tuple[str, str, list[int], int]  # name, dtype, shape, offset


def pack(tensors: Mapping[str, Tensor]) -> tuple[list[Entry], int]:
    """Returns where each tensor lies in a buffer that holds them all, and the buffer's size."""
    entries: list[Entry] = []
    end = 0
    for name, tensor in tensors.items():
        entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return entries, max(end, ALIGNMENT)


def unpack(buffer: Tensor, entries: list[Entry]) -> dict[str, Tensor]:
    """Returns the tensors of a buffer, as views."""
    views = {}
    for name, dtype_name, shape, start in entries:
        dtype = getattr(torch, dtype_name)
        views[name] = buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return views


def in_huge_pages(memory: mmap.mmap) -> Tensor:
    """Returns mapped memory as a tensor, in huge pages where the system has them."""
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def num_threads(size: int) -> int:
    """Returns how many threads of this rank should work on so many bytes."""
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, cores, size // PART))


def checksum(buffer: Tensor) -> int:
    """Returns the sum of all 64-bit words, which any single flipped bit changes."""
    with ThreadPoolExecutor(num_threads(buffer.numel())) as pool:
        return int(torch.stack(list(pool.map(Tensor.sum, buffer.view(torch.int64).split(PART // 8)))).sum())


def page_lock(buffer: Tensor) -> None:
    """Page-locks a buffer, so that a GPU copies to it at the full speed of the bus; harmless if that fails. Several
    threads touch the pages first, without changing them, because the driver would do so one by one."""
    if buffer.is_pinned():
        return
    with ThreadPoolExecutor(num_threads(buffer.numel())) as pool:
        list(pool.map(lambda part: part[::PAGE].add_(0), buffer.split(PART)))
    cuda = torch.cuda.cudart()
    if int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)):  # in one piece: no copy may cross two
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes the error, which the next kernel would report
        return
    weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr()).atexit = False
