"""Activation offloading: what blocks save for the backward waits for it in host memory (`offload_activations`).

While a block computes, a stream of its own copies what the block before saved to page-locked memory; in the backward
it brings back what the next block needs. So the device has the activations of two blocks at a time. PyTorch's
`save_on_cpu` copies on the computing stream, which waits for each copy.

Whole storages move, since blocks save several views of one. Weights stay where they are."""

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.host_memory import in_huge_pages, page_lock
from shardwise.models.chain import Chain

MIN_BYTES = 1024  # smaller storages stay on the device


class ActivationOffload:
    """Moves the activations of one device's blocks; `apply` wraps the blocks of a chain."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers: list[Tensor] = []  # page-locked as long as they are kept
        self.free: dict[int, list[Tensor]] = defaultdict(list)  # buffers that a backward has given back, by size
        self.newest: weakref.ref[SavedStorages] | None = None

    def apply(self, chain: Chain) -> None:
        for block in chain.blocks():
            if block._compiled_call_impl is not None:  # around the compiled block, whose graph saves tensors
                block._compiled_call_impl = self._wrap(block, block._compiled_call_impl)
            else:
                block.forward = self._wrap(block, block.forward)

    def _wrap(self, block: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return call(*args, **kwargs)
            before = None if self.newest is None else self.newest()
            saved = SavedStorages(self, block, before)
            with saved_tensors_hooks(saved.pack, saved.unpack):
                result = call(*args, **kwargs)
            if before is not None:
                before.leave_device()
            self.newest = weakref.ref(saved)
            return result

        return offloaded

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies behind what has been launched so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def buffer(self, size: int) -> Tensor:
        """Returns host memory that holds nothing."""
        return self.free[size].pop() if self.free[size] else self.allocate(size)

    def allocate(self, size: int) -> Tensor:
        buffer = in_huge_pages(mmap.mmap(-1, size))
        if self.stream is not None:
            page_lock(buffer)
        self.buffers.append(buffer)
        return buffer


class SavedStorages:
    """The storages that one call of a block saved: on the device, in host memory, or both."""

    def __init__(self, offload: ActivationOffload, block: nn.Module, before: "SavedStorages | None"):
        self.offload, self.block = offload, block
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.weights: set[int] | None = None  # and buffers, which stay on the device
        self.numbers: dict[tuple[int, int, torch.dtype], int] = {}
        self.host: list[Tensor] = []
        self.on_device: list[Tensor] | None = []  # each in one dimension
        self.copied: torch.cuda.Event | None = None  # when the last copy is done, in either direction

    def pack(self, tensor: Tensor) -> Any:
        if tensor.device.type != self.offload.device.type or is_traceable_wrapper_subclass(tensor):
            return tensor
        if self.weights is None:  # FSDP has gathered them by now
            weights = (*self.block.parameters(), *self.block.buffers())
            self.weights = {weight.untyped_storage()._cdata for weight in weights}
        storage = tensor.untyped_storage()
        stays = storage._cdata in self.weights or tensor.is_conj() or tensor.is_neg()
        if stays or storage.nbytes() < MIN_BYTES:
            return tensor
        number = self.numbers.setdefault((storage._cdata, tensor._version, tensor.dtype), len(self.host))
        assert self.on_device is not None
        if number == len(self.host):
            numel = storage.nbytes() // tensor.itemsize
            self.on_device.append(tensor.detach().as_strided((numel,), (1,), 0))
            self.host.append(self.offload.buffer(numel * tensor.itemsize))
            self._copy(self.host[-1].view(tensor.dtype), self.on_device[-1])
        return number, tensor.shape, tensor.stride(), tensor.storage_offset(), self

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, *place, _ = packed
        self.fetch()
        if (before := self.before()) is not None:
            before.fetch(wait=False)
        assert self.on_device is not None
        return self.on_device[number].as_strided(*place)

    def leave_device(self) -> None:
        """Frees the device's memory once the copies are done; the next block has been launched by then."""
        self._wait()
        self.on_device = None

    def fetch(self, wait: bool = True) -> None:
        """Starts the copies to the device, if they are not under way, and waits for them."""
        if self.on_device is None:
            dtypes = [dtype for _, _, dtype in self.numbers]  # in the order of their numbers
            host = [buffer.view(dtype) for buffer, dtype in zip(self.host, dtypes, strict=True)]
            self.on_device = [torch.empty_like(tensor, device=self.offload.device) for tensor in host]
            for to, tensor in zip(self.on_device, host, strict=True):
                self._copy(to, tensor)
        if wait:
            self._wait()

    def _copy(self, to: Tensor, tensor: Tensor) -> None:
        with self.offload.copying():
            to.copy_(tensor, non_blocking=True)
            if self.offload.stream is not None:
                self.copied = self.offload.stream.record_event()

    def _wait(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def __del__(self) -> None:
        for buffer in self.host:
            self.offload.free[buffer.numel()].append(buffer)
