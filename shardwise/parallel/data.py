"""Data parallelism: who holds whole weights, and how gradients of different samples become one sum.

    Whole    weights and gradients whole; one sum per step over all samples. With `shard` the sum is a reduce-scatter,
             each rank updates its rows and the rows are gathered again: ZeRO 1. Knows nothing of autograd, so it is
             right under every pipeline schedule.
    Bucketed PyTorch's DDP: `replicate` alone, the sum overlaps the last backward.
    Sharded  PyTorch's FSDP2: ZeRO 2 (gradients reduce-scattered after each backward) and 3 (weights too are freed
             after each forward and backward), on the (replicate, shard) mesh.

Every engine gives sums, not means: the loss is already divided by the number of targets in the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.collectives import all_gather, all_reduce, reduce_scatter
from shardwise.errors import RunError
from shardwise.models.chain import Chain
from shardwise.parallel.holding import Holding
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.tensor import span

Cuts = dict[str, tuple[torch.Size, int | None]]  # by parameter: the whole shape, the dimension cut over the tensor axis

BUCKET = 64 << 20  # bytes of gradients that travel at once


class Whole:
    """Whole weights and gradients on every rank."""

    loss_factor = 1.0
    """What the loss is multiplied by so that the gradients come out as the sum over ranks."""

    def __init__(self, chains: list[Chain], cuts: Cuts, mesh: Mesh):
        self.mesh, self.shard, self.replicate = mesh, mesh["shard"], mesh["replicate"]
        self.modules: list[nn.Module] = list(chains)
        self.chains, self.cuts = chains, cuts
        self.pairs: list[tuple[nn.Parameter, Holding]] = []

    def hold(self) -> list[Holding]:
        """The holdings, once the parameters have memory. A shared one is a run of rows of the whole weight itself."""
        for chain in self.chains:
            for name, weight in chain.named_weights():
                shape, cut = self.cuts[name]
                piece: Tensor = weight
                if self.shard.size > 1:
                    first, length = span(weight.shape[0], self.shard.size, self.shard.index)
                    piece = weight.detach()[first : first + length]
                copies = self.replicate.size * (self.mesh["tensor"].size if cut is None else 1)
                self.pairs.append((weight, Holding(name, piece, shape, cut, self.shard.size > 1, copies)))
        return [holding for _, holding in self.pairs]

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """To be entered around the forward and backward of one micro-batch."""
        return nullcontext()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums gradients over all samples and hands each holding its piece."""
        _demand_gradients(self.pairs)
        if self.shard.size == self.replicate.size == 1:
            return  # a holding is its weight
        parts = self.shard.size
        for bucket in self._buckets():
            sizes = [self._piece_size(weight) for weight, _ in bucket]
            rows = [_padded(w.grad, size * parts).view(parts, size) for (w, _), size in zip(bucket, sizes)]
            packed = torch.cat(rows, dim=1)
            for weight, _ in bucket:
                weight.grad = None
            own = packed[0]
            if parts > 1:
                own = torch.empty_like(packed[0])
                reduce_scatter(own, packed.view(-1), group=self.shard.group)
            if self.replicate.size > 1:
                all_reduce(own, group=self.replicate.group)
            for (_, holding), piece in zip(bucket, own.split(sizes), strict=True):
                holding.tensor.grad = piece[: holding.tensor.numel()].view(holding.tensor.shape)

    @torch.no_grad()
    def publish(self) -> None:
        """Drops the gradients and makes the updated pieces whole again on every rank."""
        for weight, holding in self.pairs:
            weight.grad = holding.tensor.grad = None
        if self.shard.size == 1:
            return
        for bucket in self._buckets():
            sizes = [self._piece_size(weight) for weight, _ in bucket]
            own = torch.cat([_padded(holding.tensor, size) for (_, holding), size in zip(bucket, sizes, strict=True)])
            whole = own.new_empty(self.shard.size * own.numel())
            all_gather(whole, own, group=self.shard.group)
            columns = whole.view(self.shard.size, -1).split(sizes, dim=1)
            for (weight, _), column in zip(bucket, columns, strict=True):
                weight.detach().copy_(column.reshape(-1)[: weight.numel()].view(weight.shape))

    def _piece_size(self, weight: Tensor) -> int:
        """Numbers in the largest piece of a weight on the shard axis; the smaller ones are padded to it."""
        return -(-weight.shape[0] // self.shard.size) * (weight.numel() // weight.shape[0])

    def _buckets(self) -> Iterator[list[tuple[nn.Parameter, Holding]]]:
        bucket: list[tuple[nn.Parameter, Holding]] = []
        held = 0
        for weight, holding in self.pairs:
            size = weight.numel() * weight.element_size()
            if bucket and held + size > BUCKET:
                yield bucket
                bucket, held = [], 0
            bucket.append((weight, holding))
            held += size
        if bucket:
            yield bucket


def _padded(tensor: Tensor | None, size: int) -> Tensor:
    assert tensor is not None
    flat = tensor.reshape(-1)
    return flat if flat.numel() == size else torch.nn.functional.pad(flat, (0, size - flat.numel()))


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _demand_gradients(pairs: list[tuple[nn.Parameter, Holding]]) -> None:
    for weight, holding in pairs:
        if weight.grad is None:
            raise RunError(f"the parameter {holding.name} got no gradient in this step.")


class Bucketed(Whole):
    """PyTorch's DDP: `replicate` alone."""

    def __init__(self, chains: list[Chain], cuts: Cuts, mesh: Mesh):
        super().__init__(chains, cuts, mesh)
        self.loss_factor = float(mesh["replicate"].size)  # DDP gives the mean of what we want the sum of

    def hold(self) -> list[Holding]:
        self.ddp = DistributedDataParallel(
            self.chains[0], process_group=self.replicate.group, init_sync=False, gradient_as_bucket_view=True
        )
        self.modules = [self.ddp]
        return super().hold()

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.ddp.no_sync()

    def reduce(self) -> None:
        _demand_gradients(self.pairs)


class Sharded:
    """PyTorch's FSDP2."""

    loss_factor = 1.0

    def __init__(self, chains: list[Chain], cuts: Cuts, mesh: Mesh, policy: MixedPrecisionPolicy):
        self.mesh, self.zero = mesh, mesh.layout.zero
        self.chains, self.cuts = chains, cuts
        self.modules: list[nn.Module] = list(chains)
        self.pairs: list[tuple[nn.Parameter, Holding]] = []
        for chain in chains:
            tied = {name.partition(".")[0] for pair in chain.rules.ties for name in pair}
            pieces = dict(chain.named_children())
            for name, piece in pieces.items():
                if not (name in tied and tied <= pieces.keys()):  # tied weights stay together, in the root
                    self._shard(piece, policy)
            self._shard(chain, policy)

    def _shard(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        fully_shard(module, mesh=self.mesh.fsdp, reshard_after_forward=self.zero == 3, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no premultiplied sum
        module.set_reshard_after_backward(self.zero == 3, recurse=False)

    def hold(self) -> list[Holding]:
        for chain in self.chains:
            for name, weight in chain.named_weights():
                shape, cut = self.cuts[name]
                copies = self.mesh["replicate"].size * (self.mesh["tensor"].size if cut is None else 1)
                self.pairs.append((weight, Holding(name, _local(weight.detach()), shape, cut, True, copies)))
        return [holding for _, holding in self.pairs]

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.no_grad()
    def reduce(self) -> None:
        _demand_gradients(self.pairs)
        for weight, holding in self.pairs:
            holding.tensor.grad = _local(weight.grad)

    @torch.no_grad()
    def publish(self) -> None:
        for weight, holding in self.pairs:
            weight.grad = holding.tensor.grad = None
        for chain in self.chains:
            for module in chain.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # whole weights of before the update must not be used again
