"""Data parallelism: who holds whole weights, and how gradients of different samples become one sum.

    Alone    one process in mixed precision: the modules hold rounded weights, the holdings the wide ones beside them.
    Whole    weights and gradients whole; one sum per step over all samples. With `shard` the sum is a reduce-scatter,
             each rank updates its rows and the rows are gathered again: ZeRO 1. Knows nothing of autograd, so it is
             right under every pipeline schedule. `replicate` beside tensor or pipeline comes here too.
    Bucketed PyTorch's DDP: `replicate` alone, the sum overlaps the last backward; one by `gradient.reduce` waits for
             its end.
    Sharded  PyTorch's FSDP2 (`sharded.py`): ZeRO 2 (gradients reduce-scattered after each backward) and 3 (weights too
             are freed after each forward and backward), on the (replicate, shard) mesh.

Every engine gives sums, not means: the loss is already divided by the number of targets in the whole batch.

PyTorch's ZeroRedundancyOptimizer hands out whole parameters, not rows, and knows neither cut weights nor stages, so
ZeRO 1 is written here.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardwise.comm.meter import METER
from shardwise.errors import RunError
from shardwise.models.chain import Chain
from shardwise.parallel.compress import Compressor
from shardwise.parallel.gradient import Sum
from shardwise.parallel.holding import Holding, cuts_of
from shardwise.parallel.mesh import Axis, Mesh

# Meant for later versions of PyTorch; what it says to use instead does something else.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")

# By parameter: the whole shape, the dimension cut over the tensor axis, whether its experts are cut.
Cuts = dict[str, tuple[torch.Size, int | None, bool]]
Pairs = list[tuple[nn.Parameter, Holding]]
BUCKET = 64 << 20  # bytes of gradients that travel at once


class DataParallel(ABC):
    """What a step needs of each engine. `modules` are what is called to compute, one per chain."""

    def __init__(self, chains: list[Chain], mesh: Mesh):
        self.chains, self.mesh = chains, mesh
        self.modules: list[nn.Module] = list(chains)
        self.pairs: Pairs = []
        self.compressor: Compressor | None = None
        self.plain = False
        """Whether sums are plain for now, in the steps before `gradient.compress_after`."""

    def hold(self, cuts: Cuts) -> list[Holding]:
        """The holdings, once the parameters have memory."""
        for chain in self.chains:
            for name, weight in chain.named_weights():
                shape, cut, expert = cuts[name]
                axis = self.mesh["alike" if expert else "shared"]
                same = self.mesh["replicate" if expert else "same"]
                copies = same.size * (self.mesh["tensor"].size if cut is None else 1)
                if self.mesh["pipeline"].size > 1 and name in chain.rules.tied:
                    copies *= 2  # the first stage and the last
                holding = Holding(name, self.piece(weight, axis), shape, cut, axis.size > 1, copies, expert)
                holding.cuts = tuple((dim, axis) for dim, axis in cuts_of(holding, self.mesh) if axis.size > 1)
                holding.same = same if same.size > 1 else None
                holding.matrix = chain.rules.is_matrix(name, len(shape))
                self.pairs.append((weight, holding))
        return [holding for _, holding in self.pairs]

    def compresses(self, holding: Holding) -> bool:
        """Whether the gradient of a weight travels compressed: it is large, and nothing but a sum over samples."""
        layout = self.mesh.layout
        whole = layout.tensor == 1 or holding.tensor_dim is not None
        tied = layout.pipeline > 1 and holding.name in self.chains[0].rules.tied
        compressed = self.compressor is not None and not self.plain
        return compressed and len(holding.shape) > 1 and whole and not tied

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """To be entered around the forward and backward of one micro-batch."""
        return nullcontext()

    def reduce(self) -> None:
        """Sums gradients over all samples and hands each holding its piece."""
        for weight, holding in self.pairs:
            if weight.grad is None and holding.tensor.grad is None:  # of several micro-batches it may be added already
                raise RunError(f"the parameter {holding.name} got no gradient in this step.")
        self.sum_gradients()

    def publish(self) -> None:
        """Drops the gradients and lets every rank compute with the updated weights."""
        for weight, holding in self.pairs:
            weight.grad = holding.tensor.grad = None
        self.spread_weights()

    @abstractmethod
    def piece(self, weight: nn.Parameter, axis: Axis) -> Tensor:
        """The part of a weight that this rank updates, in the weight's own memory; `axis`: the ranks that share it."""

    @abstractmethod
    def sum_gradients(self) -> None: ...

    @abstractmethod
    def spread_weights(self) -> None: ...


class Alone(DataParallel):
    """One process. Weights are rounded once a step, by the optimizer as it updates them, and not in every use. With one
    micro-batch the gradients stay as narrow as they were made; with more they are added up in the wide type."""

    def __init__(self, chains: list[Chain], mesh: Mesh, wide: torch.dtype, micro_batches: int):
        super().__init__(chains, mesh)
        self.wide, self.adds = wide, micro_batches > 1

    def hold(self, cuts: Cuts) -> list[Holding]:
        found = super().hold(cuts)
        for weight, holding in self.pairs:
            holding.rounded = weight
            if self.adds:
                weight.register_post_accumulate_grad_hook(_adder(holding.tensor))
        return found

    def piece(self, weight: nn.Parameter, axis: Axis) -> Tensor:
        return torch.empty_like(weight, dtype=self.wide, requires_grad=False)

    def sum_gradients(self) -> None:
        """There is one share."""

    @torch.no_grad()
    def spread_weights(self) -> None:
        stale = [(weight, holding.tensor) for weight, holding in self.pairs if not holding.current]
        if stale:
            torch._foreach_copy_([weight for weight, _ in stale], [wide for _, wide in stale])
        for _, holding in self.pairs:
            holding.current = False


def _adder(wide: Tensor) -> Callable[[Tensor], None]:
    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        if wide.grad is None:
            wide.grad = weight.grad.to(wide.dtype)
        else:
            wide.grad.add_(weight.grad)
        weight.grad = None

    return add


class Whole(DataParallel):
    """Whole weights and gradients on every rank."""

    def __init__(self, chains: list[Chain], mesh: Mesh, sum_over: Sum):
        super().__init__(chains, mesh)
        self.sum_over = sum_over

    def piece(self, weight: nn.Parameter, axis: Axis) -> Tensor:
        if axis.size == 1:
            return weight
        first, length = axis.span(weight.shape[0])
        return weight.detach()[first : first + length]

    def shared(self) -> Iterator[tuple[Axis, Axis, Pairs]]:
        """Weights by the ranks that share their updates, and those that hold the same: of cut experts others."""
        for expert, axis, same in ((False, "shared", "same"), (True, "alike", "replicate")):
            pairs = [pair for pair in self.pairs if pair[1].expert == expert]
            if pairs:
                yield self.mesh[axis], self.mesh[same], pairs

    @torch.no_grad()
    def sum_gradients(self) -> None:
        for shard, same, pairs in self.shared():
            self._sum_over(shard, same, pairs)

    def _sum_over(self, shard: Axis, same: Axis, pairs: Pairs) -> None:
        if shard.size == same.size == 1:
            return  # a holding is its weight
        few = [pair for pair in pairs if self.compresses(pair[1])]
        if same.size == 1:
            for bucket in _buckets(few):
                self._scatter(shard, bucket)
            pairs, few = [pair for pair in pairs if not self.compresses(pair[1])], []
        for bucket in _buckets(pairs):
            sizes = [_piece_size(weight, shard) for weight, _ in bucket]
            rows = [_padded(w.grad, size * shard.size).view(shard.size, size) for (w, _), size in zip(bucket, sizes)]
            packed = torch.cat(rows, dim=1)
            for weight, _ in bucket:
                weight.grad = None
            own = packed[0]
            if shard.size > 1 and self.sum_over.library:
                own = torch.empty_like(packed[0])
                reduce_scatter(own, packed.view(-1), group=shard.group)
            elif shard.size > 1:
                self.sum_over(packed, shard.group)
                own = packed[shard.index].clone()
            if same.size > 1 and not few:
                self.sum_over(own, same.group)
            for (_, holding), piece in zip(bucket, own.split(sizes), strict=True):
                holding.tensor.grad = piece[: holding.tensor.numel()].view(holding.tensor.shape)
        if few:
            everywhere(self, [(holding, holding.grad) for _, holding in pairs], same)

    def _scatter(self, shard: Axis, bucket: Pairs) -> None:
        """Of each weight of a bucket, the compressed sum of this rank's rows."""
        assert self.compressor is not None
        sizes = [_piece_size(weight, shard) for weight, _ in bucket]
        rows = [_padded(w.grad, size * shard.size).view(shard.size, size) for (w, _), size in zip(bucket, sizes)]
        shapes = [weight.shape for weight, _ in bucket]
        sums = self.compressor.scatter([holding.name for _, holding in bucket], rows, shapes, shard)
        for (weight, holding), piece in zip(bucket, sums, strict=True):
            weight.grad = None
            holding.tensor.grad = piece[: holding.tensor.numel()].view(holding.tensor.shape)

    @torch.no_grad()
    def spread_weights(self) -> None:
        for shard, _, pairs in self.shared():
            if shard.size > 1:
                self._spread_over(shard, pairs)

    def _spread_over(self, shard: Axis, pairs: Pairs) -> None:
        for bucket in _buckets(pairs):
            sizes = [_piece_size(weight, shard) for weight, _ in bucket]
            own = torch.cat([_padded(holding.tensor, size) for (_, holding), size in zip(bucket, sizes, strict=True)])
            whole = own.new_empty(shard.size * own.numel())
            all_gather(whole, own, group=shard.group)
            columns = whole.view(shard.size, -1).split(sizes, dim=1)
            for (weight, _), column in zip(bucket, columns, strict=True):
                weight.detach().copy_(column.reshape(-1)[: weight.numel()].view(weight.shape))


def everywhere(data: DataParallel, gradients: list[tuple[Holding, Tensor]], same: Axis) -> None:
    """Sums over replicas, in place: compressed where it is worth it."""
    few = [(holding, gradient) for holding, gradient in gradients if data.compresses(holding) and gradient.numel()]
    rest = [gradient for holding, gradient in gradients if not data.compresses(holding)]
    if few:
        assert data.compressor is not None
        sums = data.compressor.everywhere([h.name for h, _ in few], [gradient for _, gradient in few], same)
        for (_, gradient), found in zip(few, sums, strict=True):
            gradient.copy_(found)
    if rest:
        flat = torch.cat([gradient.reshape(-1) for gradient in rest])
        all_reduce(flat, group=same.group)
        for gradient, found in zip(rest, flat.split([gradient.numel() for gradient in rest]), strict=True):
            gradient.copy_(found.view(gradient.shape))


def _buckets(pairs: Pairs) -> Iterator[Pairs]:
    bucket: Pairs = []
    held = 0
    for weight, holding in pairs:
        size = weight.numel() * weight.element_size()
        if bucket and held + size > BUCKET:
            yield bucket
            bucket, held = [], 0
        bucket.append((weight, holding))
        held += size
    if bucket:
        yield bucket


def _piece_size(weight: Tensor, shard: Axis) -> int:
    """Numbers in the largest piece of a weight on the shard axis; the smaller ones are padded to it."""
    return -(-weight.shape[0] // shard.size) * (weight.numel() // weight.shape[0])


def _padded(tensor: Tensor | None, size: int) -> Tensor:
    assert tensor is not None
    flat = tensor.reshape(-1)
    return flat if flat.numel() == size else torch.nn.functional.pad(flat, (0, size - flat.numel()))


class Bucketed(DataParallel):
    """PyTorch's DDP: `replicate` alone."""

    def __init__(self, chains: list[Chain], mesh: Mesh, sum_over: Sum):
        super().__init__(chains, mesh)
        self.sum_over = sum_over

    def hold(self, cuts: Cuts) -> list[Holding]:
        group = self.mesh["replicate"].group
        self.ddp = DistributedDataParallel(
            self.chains[0], process_group=group, init_sync=False, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        # The sum; DDP by itself gives the mean.
        self.ddp.register_comm_hook((self.sum_over, group), _sum_beside if self.sum_over.library else _sum_at_once)
        self.modules = [self.ddp]
        return super().hold(cuts)

    def piece(self, weight: nn.Parameter, axis: Axis) -> Tensor:
        return weight

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.ddp.no_sync()

    def sum_gradients(self) -> None:
        """Was done in the backward, which is over only when the last bucket is there."""
        METER.since("replicate")

    def spread_weights(self) -> None:
        """Every rank took the same step."""


# Without annotations: DDP compares them with classes, and here they would be text.
def _sum_beside(state, bucket):  # type: ignore[no-untyped-def]
    _, group = state
    buffer = bucket.buffer()
    work = all_reduce(buffer, group=group, async_op=True)
    METER.mark()  # the last bucket is full when the last gradient is made
    return work.get_future().then(lambda future: buffer)


def _sum_at_once(state, bucket):  # type: ignore[no-untyped-def]
    sum_over, group = state
    buffer = bucket.buffer()
    sum_over(buffer, group)
    done: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    done.set_result(buffer)
    return done
