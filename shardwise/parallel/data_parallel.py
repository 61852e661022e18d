"""Data parallelism: where weights, gradients and optimizer state live, and how gradients are reduced.

    SingleProcess  one process in mixed precision: modules hold bf16 or fp16 weights, next to fp32 master weights.
    Zero1          full weights and gradients on every rank, reduced once per step. With `shard`, gradients are
                   reduce-scattered, each rank updates its rows, and weights are all-gathered: ZeRO 1. It does not
                   hook into autograd, so it works under every pipeline schedule. Also for `replicate` combined with
                   tensor or pipeline.
    DDP            PyTorch's DDP, for `replicate` alone: the all-reduce overlaps the last backward.
    FSDP           PyTorch's FSDP2 (`fsdp.py`) on the (replicate, shard) mesh: ZeRO 2 reduce-scatters gradients after
                   each backward, ZeRO 3 also reshards weights after each forward and backward.

All of them sum gradients instead of averaging them: the loss is already divided by the targets of the global batch.

ZeRO 1 is our own because PyTorch's ZeroRedundancyOptimizer assigns whole parameters, not rows, to ranks, and supports
neither tensor-parallel weights nor pipeline stages."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.collectives import Axis, all_gather, all_reduce, all_reduce_coalesced, reduce_scatter
from shardwise.errors import RunError
from shardwise.models.chain import Chain
from shardwise.optim.param_shard import ParamShard
from shardwise.parallel.gradient_reduction import Compressor, flatten_and_pad
from shardwise.parallel.mesh import Mesh

# By parameter: full shape, the dimension split over the tensor axis, whether its experts are split over ranks.
ParamSpecs = dict[str, tuple[torch.Size, int | None, bool]]
ParamPairs = list[tuple[nn.Parameter, ParamShard]]
BUCKET_BYTES = 64 << 20  # bytes of gradients per collective


class DataParallel:
    """The interface that a step uses. `modules` are the callables that compute, one per chain."""

    def __init__(self, chains: list[Chain], mesh: Mesh, compressor: Compressor | None):
        self.chains, self.mesh, self.compressor = chains, mesh, compressor
        self.modules: list[nn.Module] = list(chains)
        self.param_pairs: ParamPairs = []
        self.frozen_shards: list[ParamShard] = []  # of parameters that are not trained: initialized, then left as is
        self.compression_paused = False  # in the steps before `gradient.compress_after`

    def make_param_shards(self, specs: ParamSpecs) -> list[ParamShard]:
        """Returns this rank's parameter shards; call it once the parameters have memory."""
        for chain in self.chains:
            for name, weight in chain.named_unique_parameters():
                shape, tensor_dim, expert = specs[name]
                axis = self.mesh["expert_replicas" if expert else "fsdp"]
                splits: list[tuple[int | None, Axis]] = [(tensor_dim, self.mesh["tensor"])]
                if expert:
                    splits.append((0, self.mesh["expert"]))
                if weight.requires_grad or isinstance(weight, DTensor):  # others are frozen, and whole on every rank
                    splits.append((self.sharded_dim(weight, axis), axis))
                sharded_dims = tuple((dim, over) for dim, over in splits if dim is not None and over.size > 1)
                if not weight.requires_grad:
                    local = weight.to_local() if isinstance(weight, DTensor) else weight
                    self.frozen_shards.append(ParamShard(name, local.detach(), shape, sharded_dims))
                    continue
                replicas = self.mesh["replicate" if expert else "replicas"]
                num_replicas = replicas.size * (self.mesh["tensor"].size if tensor_dim is None else 1)
                if is_scalar(weight):
                    num_replicas *= axis.size
                if self.mesh["pipeline"].size > 1 and name in chain.sharding_plan.tied_parameters:
                    num_replicas *= 2  # on the first and on the last stage
                param_shard = ParamShard(name, self.local_shard(weight, axis), shape, sharded_dims, num_replicas,
                                         tensor_dim, expert, replicas if replicas.size > 1 else None,
                                         chain.sharding_plan.is_matrix(name, len(shape)))  # fmt: skip
                self.param_pairs.append((weight, param_shard))
        return [param_shard for _, param_shard in self.param_pairs]

    def sharded_dim(self, weight: Tensor, axis: Axis) -> int | None:
        """Returns the dimension along which the ranks of an axis shard a weight: the first, unless it is a stack of
        matrices, such as experts, whose number they do not divide, but another dimension. None: a scalar has none."""
        if is_scalar(weight):
            return None
        is_uneven = weight.dim() == 3 and weight.shape[0] % axis.size > 0 and self.compressor is None
        return next((dim for dim in (1, 2) if is_uneven and weight.shape[dim] % axis.size == 0), 0)

    def should_compress(self, param_shard: ParamShard) -> bool:
        """Whether a gradient is reduced compressed: it is large, and only data-parallel ranks contribute to it."""
        layout = self.mesh.layout
        is_tensor_sharded = layout.tensor == 1 or param_shard.tensor_dim is not None
        is_tied = layout.pipeline > 1 and param_shard.name in self.chains[0].sharding_plan.tied_parameters
        compression_active = self.compressor is not None and not self.compression_paused
        return compression_active and len(param_shard.shape) > 1 and is_tensor_sharded and not is_tied

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Wraps forward and backward of one micro-batch."""
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Sums gradients over all samples and sets the gradient of each parameter shard."""
        for weight, param_shard in self.param_pairs:
            if weight.grad is None and param_shard.tensor.grad is None:  # the hook may have accumulated it already
                self._take_zero_gradient(weight, param_shard)
        self.sum_gradients()

    def _take_zero_gradient(self, weight: nn.Parameter, param_shard: ParamShard) -> None:
        """Gives a parameter that this step did not use the gradient zero, if no other rank could have used it."""
        if self.mesh["world"].size > 1:
            raise RunError(
                f"the parameter {param_shard.name} got no gradient in this step, though it got one when the forward "
                "was tried on an example batch; let every forward use it, if only times zero, or use one process."
            )
        weight.grad = torch.zeros_like(weight)

    def sync_weights(self) -> None:
        """Frees the gradients and makes the updated weights available on every rank."""
        for weight, param_shard in self.param_pairs:
            weight.grad = param_shard.tensor.grad = None
        self.gather_weights()

    # By default every rank holds, reduces and updates all of a weight by itself.

    def local_shard(self, weight: nn.Parameter, axis: Axis) -> Tensor:
        """Returns the part of a weight that this rank updates; `axis`: the ranks that shard it."""
        return weight

    def sum_gradients(self) -> None:
        """Sums gradients over ranks into the parameter shards."""

    def gather_weights(self) -> None:
        """Makes the updated shards available on every rank."""

    def sum_scalar_gradients(self) -> None:
        """Sums the gradients of scalars, which every rank of the fsdp axis keeps whole, over all ranks with samples."""
        scalars = [(weight, param_shard) for weight, param_shard in self.param_pairs if is_scalar(weight)]
        gradients = []
        for weight, param_shard in scalars:
            assert weight.grad is not None, "checked in reduce_gradients"
            param_shard.tensor.grad = weight.grad
            gradients.append(weight.grad)

        for axis in ("fsdp", "replicas"):
            all_reduce_coalesced(gradients, self.mesh[axis])


def is_scalar(weight: Tensor) -> bool:
    """Whether a parameter has no dimension, such as the temperature of a contrastive loss. Nothing can be split of it:
    every rank keeps it, sums its gradient and updates it."""
    return weight.dim() == 0


class SingleProcess(DataParallel):
    """One process. The optimizer casts weights to the compute dtype once per step, not at every use. With one
    micro-batch, gradients stay in the compute dtype; with several they are accumulated in the master dtype."""

    def __init__(self, *args: Any, master_dtype: torch.dtype, micro_batches: int):
        super().__init__(*args)
        self.master_dtype, self.accumulates = master_dtype, micro_batches > 1

    def make_param_shards(self, specs: ParamSpecs) -> list[ParamShard]:
        param_shards = super().make_param_shards(specs)
        for weight, param_shard in self.param_pairs:
            param_shard.compute_copy = weight
            if self.accumulates:
                weight.register_post_accumulate_grad_hook(partial(_accumulate, param_shard.tensor))
        return param_shards

    def local_shard(self, weight: nn.Parameter, axis: Axis) -> Tensor:
        return torch.empty_like(weight, dtype=self.master_dtype, requires_grad=False)

    @torch.no_grad()
    def gather_weights(self) -> None:
        stale = [(weight, shard.tensor) for weight, shard in self.param_pairs if not shard.is_compute_copy_current]
        if stale:
            torch._foreach_copy_([weight for weight, _ in stale], [master for _, master in stale])
        for _, shard in self.param_pairs:
            shard.is_compute_copy_current = False


def _accumulate(master: Tensor, weight: Tensor) -> None:
    assert weight.grad is not None
    if master.grad is None:
        master.grad = weight.grad.to(master.dtype)
    else:
        master.grad.add_(weight.grad)
    weight.grad = None


class Zero1(DataParallel):
    def local_shard(self, weight: nn.Parameter, axis: Axis) -> Tensor:
        dim = self.sharded_dim(weight, axis)
        if axis.size == 1 or dim is None:
            return weight
        return weight.detach().narrow(dim, *axis.span(weight.shape[dim])).contiguous()

    def reduction_groups(self) -> Iterator[tuple[Axis, Axis, ParamPairs]]:
        """Yields (shard axis, replica axis, weights that ranks share); experts split over ranks have their own axes.
        Scalars are in no group: their gradients are summed by `sum_scalar_gradients`."""
        for expert, axis, replicas in ((False, "fsdp", "replicas"), (True, "expert_replicas", "replicate")):
            pairs = [pair for pair in self.param_pairs if pair[1].is_expert == expert and not is_scalar(pair[0])]
            if pairs and max(self.mesh[axis].size, self.mesh[replicas].size) > 1:
                yield self.mesh[axis], self.mesh[replicas], pairs

    @torch.no_grad()
    def sum_gradients(self) -> None:
        for shard, replicas, pairs in self.reduction_groups():
            self._reduce_pairs(shard, replicas, pairs)
        self.sum_scalar_gradients()

    def _reduce_pairs(self, shard: Axis, replicas: Axis, pairs: ParamPairs) -> None:
        compressed = [pair for pair in pairs if self.should_compress(pair[1])]
        if replicas.size == 1:
            for bucket in _make_buckets(compressed):
                self._reduce_scatter_compressed(shard, bucket)
            pairs, compressed = [pair for pair in pairs if not self.should_compress(pair[1])], []
        for bucket in _make_buckets(pairs):
            rows = [self._gradient_rows(weight, shard) for weight, _ in bucket]
            sizes, packed = [row.shape[1] for row in rows], torch.cat(rows, dim=1)
            for weight, _ in bucket:
                weight.grad = None
            reduced = packed[0]
            if shard.size > 1:
                reduced = torch.empty_like(packed[0])
                reduce_scatter(reduced, packed.view(-1), axis=shard)
            if not compressed:
                all_reduce(reduced, axis=replicas)
            for (_, param_shard), piece in zip(bucket, reduced.split(sizes), strict=True):
                param_shard.tensor.grad = piece[: param_shard.tensor.numel()].view(param_shard.tensor.shape)
        if compressed:
            all_reduce_gradients(self, [(param_shard, param_shard.grad) for _, param_shard in pairs], replicas)

    def _reduce_scatter_compressed(self, shard: Axis, bucket: ParamPairs) -> None:
        """Reduce-scatters a bucket compressed and sets this rank's gradients."""
        assert self.compressor is not None
        rows = [self._gradient_rows(weight, shard) for weight, _ in bucket]
        shapes = [weight.shape for weight, _ in bucket]
        sums = self.compressor.reduce_scatter([param_shard.name for _, param_shard in bucket], rows, shapes, shard)
        for (weight, param_shard), piece in zip(bucket, sums, strict=True):
            weight.grad = None
            param_shard.tensor.grad = piece[: param_shard.tensor.numel()].view(param_shard.tensor.shape)

    def _gradient_rows(self, weight: nn.Parameter, shard: Axis) -> Tensor:
        """Returns a weight's gradient as one row per shard rank, zero-padded to rows of equal length."""
        assert weight.grad is not None
        dim, size = self.sharded_dim(weight, shard), self._padded_shard_numel(weight, shard)
        grad = torch.cat(weight.grad.chunk(shard.size, dim)) if dim else weight.grad
        return flatten_and_pad(grad, shard.size * size).view(shard.size, size)

    def _padded_shard_numel(self, weight: Tensor, shard: Axis) -> int:
        """Returns the elements of a weight's largest shard; smaller shards are padded to it."""
        dim = self.sharded_dim(weight, shard)
        assert dim is not None, "scalars are in no reduction group"
        length = weight.shape[dim]
        return -(-length // shard.size) * (weight.numel() // length)

    @torch.no_grad()
    def gather_weights(self) -> None:
        for shard, _, pairs in self.reduction_groups():
            for bucket in _make_buckets(pairs) if shard.size > 1 else ():
                sizes = [self._padded_shard_numel(weight, shard) for weight, _ in bucket]
                local = torch.cat([flatten_and_pad(p.tensor, size) for (_, p), size in zip(bucket, sizes)])
                gathered = local.new_empty(shard.size * local.numel())
                all_gather(gathered, local, axis=shard)
                columns = gathered.view(shard.size, -1).split(sizes, dim=1)
                for (weight, p), column in zip(bucket, columns, strict=True):
                    dim, flat = self.sharded_dim(weight, shard), column.reshape(-1)[: weight.numel()]
                    parts = flat.view(shard.size, *p.tensor.shape).unbind() if dim else [flat.view(weight.shape)]
                    weight.detach().copy_(torch.cat(parts, dim) if dim else parts[0])


def all_reduce_gradients(data: DataParallel, gradients: list[tuple[ParamShard, Tensor]], replicas: Axis) -> None:
    """All-reduces gradients over replicas in place, those of large weights compressed."""
    compressed = [(shard, grad) for shard, grad in gradients if data.should_compress(shard) and grad.numel()]
    if compressed:
        assert data.compressor is not None
        names, grads = [shard.name for shard, _ in compressed], [grad for _, grad in compressed]
        for grad, reduced in zip(grads, data.compressor.all_reduce(names, grads, replicas), strict=True):
            grad.copy_(reduced)
    all_reduce_coalesced([grad for shard, grad in gradients if not data.should_compress(shard)], replicas)


def _make_buckets(pairs: ParamPairs) -> Iterator[ParamPairs]:
    bucket: ParamPairs = []
    bucket_bytes = 0
    for weight, param_shard in pairs:
        size = weight.numel() * weight.element_size()
        if bucket and bucket_bytes + size > BUCKET_BYTES:
            yield bucket
            bucket, bucket_bytes = [], 0
        bucket.append((weight, param_shard))
        bucket_bytes += size
    if bucket:
        yield bucket


class DDP(DataParallel):
    def make_param_shards(self, specs: ParamSpecs) -> list[ParamShard]:
        axis = self.mesh["replicate"]
        with warnings.catch_warnings():
            # PyTorch 2.13 deprecates `broadcast_buffers`; the replacement it names does something else.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            self.ddp = DistributedDataParallel(self.chains[0], process_group=axis.group, init_sync=False,
                                               gradient_as_bucket_view=True, broadcast_buffers=False)  # fmt: skip
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # of size-1 dims
        self.ddp.register_comm_hook((self, axis), _sum_bucket)  # by default DDP averages
        self.modules = [self.ddp]
        return super().make_param_shards(specs)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.ddp.no_sync()

    def sum_gradients(self) -> None:
        """DDP has reduced the gradients: its backward ends when the last bucket has arrived."""
        self.mesh.timer.end_wait("replicate")


def _sum_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    data, axis = state
    buffer = bucket.buffer()
    work = all_reduce(buffer, axis=axis, async_op=True)
    data.mesh.timer.begin_wait()  # the last bucket fills with the last gradient, so only the last call counts
    return work.get_future().then(lambda future: buffer)
