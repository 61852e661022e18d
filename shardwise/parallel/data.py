"""Data parallelism: who holds whole weights, and how gradients of different samples become one sum.

    Alone    one process in mixed precision: the modules hold rounded weights, the holdings the wide ones beside them.
    Whole    weights and gradients whole; one sum per step over all samples. With `shard` the sum is a reduce-scatter,
             each rank updates its rows and the rows are gathered again: ZeRO 1. Knows nothing of autograd, so it is
             right under every pipeline schedule. `replicate` beside tensor or pipeline comes here too.
    Bucketed PyTorch's DDP: `replicate` alone, the sum overlaps the last backward; one by `gradient.reduce` waits for
             its end.
    Sharded  PyTorch's FSDP2: ZeRO 2 (gradients reduce-scattered after each backward) and 3 (weights too are freed
             after each forward and backward), on the (replicate, shard) mesh.

Every engine gives sums, not means: the loss is already divided by the number of targets in the whole batch.

PyTorch's ZeroRedundancyOptimizer hands out whole parameters, not rows, and knows neither cut weights nor stages, so
ZeRO 1 is written here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardwise.errors import RunError
from shardwise.job import Gradient
from shardwise.layout import Batch, Layout
from shardwise.models.chain import Chain
from shardwise.models.experts import Bank
from shardwise.parallel.gradient import Sum
from shardwise.parallel.holding import Holding, cuts_of
from shardwise.parallel.mesh import Axis, Mesh
from shardwise.parallel.precision import Precision

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
            if same.size > 1:
                self.sum_over(own, same.group)
            for (_, holding), piece in zip(bucket, own.split(sizes), strict=True):
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
        """Was done in the backward."""

    def spread_weights(self) -> None:
        """Every rank took the same step."""


# Without annotations: DDP compares them with classes, and here they would be text.
def _sum_beside(state, bucket):  # type: ignore[no-untyped-def]
    _, group = state
    buffer = bucket.buffer()
    work = all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: buffer)


def _sum_at_once(state, bucket):  # type: ignore[no-untyped-def]
    sum_over, group = state
    buffer = bucket.buffer()
    sum_over(buffer, group)
    done: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    done.set_result(buffer)
    return done


class Sharded(DataParallel):
    """PyTorch's FSDP2."""

    def __init__(self, chains: list[Chain], mesh: Mesh, policy: MixedPrecisionPolicy):
        super().__init__(chains, mesh)
        for chain in chains:
            tied = {name.partition(".")[0] for pair in chain.rules.ties for name in pair}
            pieces = dict(chain.named_children())
            if mesh.layout.expert_ranks > 1:
                for module in chain.modules():
                    if isinstance(module, Bank):
                        self._shard(module, policy, mesh.fsdp_experts)
            for name, piece in pieces.items():
                if not (name in tied and tied <= pieces.keys()):  # tied weights stay together, in the root
                    self._shard(piece, policy, mesh.fsdp)
            self._shard(chain, policy, mesh.fsdp)
            if mesh.layout.pipeline > 1:
                self._prefetch([piece for piece in pieces.values() if isinstance(piece, FSDPModule)])

    @staticmethod
    def _prefetch(pieces: list[FSDPModule]) -> None:
        """Tells each piece which weights its backward gathers ahead: those of the piece before; the first, none but its
        own. By itself FSDP goes by the order of all forwards so far, and with several micro-batches in flight it then
        gathers pieces whose turn is not near."""
        for before, piece in zip([pieces[0], *pieces], pieces):
            piece.set_modules_to_backward_prefetch([before])

    def _shard(self, module: nn.Module, policy: MixedPrecisionPolicy, mesh: DeviceMesh) -> None:
        free = self.mesh.layout.zero == 3
        fully_shard(module, mesh=mesh, reshard_after_forward=free, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no premultiplied sum
        module.set_reshard_after_backward(free, recurse=False)

    def piece(self, weight: nn.Parameter, axis: Axis) -> Tensor:
        return _local(weight.detach())

    def sum_gradients(self) -> None:
        """Was done after each backward; what is left is to take the local pieces."""
        for weight, holding in self.pairs:
            holding.tensor.grad = _local(weight.grad)

    def spread_weights(self) -> None:
        for chain in self.chains:
            for module in chain.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # whole weights of before the update must not be used again


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def is_alone(layout: Layout, precision: Precision) -> bool:
    return layout.world == 1 and precision.mixed


def is_sharded(layout: Layout) -> bool:
    return layout.shard > 1 and layout.zero > 1


def data_parallel(
    chains: list[Chain], layout: Layout, mesh: Mesh, precision: Precision, batch: Batch, gradient: Gradient
) -> DataParallel:  # fmt: skip
    if is_alone(layout, precision):
        return Alone(chains, mesh, precision.master, batch.micro_batches)
    if is_sharded(layout):
        return Sharded(chains, mesh, precision.fsdp_policy())
    if layout.replicate == layout.world > 1:
        return Bucketed(chains, mesh, Sum(gradient))
    return Whole(chains, mesh, Sum(gradient))
