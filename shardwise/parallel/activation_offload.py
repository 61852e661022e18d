"""Activation offloading: what blocks save for the backward waits for it in host memory (`offload_activations`).

While a block computes, a stream of its own copies what the block before saved to page-locked memory; in the backward
it brings back what the next block needs. So the device has the activations of two blocks at a time. PyTorch's
`save_on_cpu` copies on the computing stream, which waits for each copy.

Whole storages move, since blocks save several views of one. Weights stay where they are."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.models.chain import Chain

MIN_BYTES = 1024  # smaller storages stay on the device


def host_buffer(tensor: Tensor) -> Tensor:
    """Returns host memory for a tensor; PyTorch reuses page-locked memory once the copies that use it are done."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


class ActivationOffload:
    """Moves the activations of one device's blocks; `apply` wraps the blocks of a chain."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.newest: Callable[[], SavedStorages | None] = lambda: None

    def apply(self, chain: Chain) -> None:
        for block in chain.blocks():  # around a compiled block, whose graph saves tensors
            name = "forward" if block._compiled_call_impl is None else "_compiled_call_impl"
            setattr(block, name, self._wrap(block, getattr(block, name)))

    def _wrap(self, block: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return call(*args, **kwargs)
            saved = SavedStorages(self, block)
            with saved_tensors_hooks(saved.pack, saved.unpack):
                result = call(*args, **kwargs)
            if (before := self.newest()) is not None:  # leaves the device: this block has been launched by now
                before.wait()
                before.on_device = None
            self.newest = weakref.ref(saved)
            return result

        return offloaded


class SavedStorages:
    """The storages that one call of a block saved: on the device, in host memory, or both."""

    def __init__(self, offload: ActivationOffload, block: nn.Module):
        self.offload, self.block, self.before = offload, block, offload.newest
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
            self.on_device.append(tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0))
            self.host.append(host_buffer(self.on_device[-1]))
            self._copy(self.host[-1:], self.on_device[-1:])
        return number, tensor.shape, tensor.stride(), tensor.storage_offset(), self

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, *place, _ = packed
        self.fetch()
        self.wait()
        if (before := self.before()) is not None:
            before.fetch()
        assert self.on_device is not None
        return self.on_device[number].as_strided(*place)

    def fetch(self) -> None:
        """Starts the copies to the device, if they are not under way."""
        if self.on_device is None:
            self.on_device = [torch.empty_like(host, device=self.offload.device) for host in self.host]
            self._copy(self.on_device, self.host)

    def _copy(self, to: list[Tensor], tensors: list[Tensor]) -> None:
        """Copies behind what has been launched so far."""
        stream = self.offload.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for target, tensor in zip(to, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
        self.copied = None if stream is None else stream.record_event()

    def wait(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
