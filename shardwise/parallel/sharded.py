"""Data parallelism by PyTorch's FSDP2, and the choice between it and the engines of `data.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from shardwise.comm.collectives import reduce_scatter
from shardwise.comm.meter import METER
from shardwise.job import Gradient
from shardwise.layout import Batch, Layout
from shardwise.models.chain import Chain
from shardwise.models.experts import Bank
from shardwise.parallel.compress import Compressor, Way
from shardwise.parallel.data import Alone, Bucketed, DataParallel, Whole, everywhere
from shardwise.parallel.gradient import Sum
from shardwise.parallel.holding import Holding
from shardwise.parallel.mesh import Axis, Mesh
from shardwise.parallel.precision import Precision


def _metered(act: Any) -> Any:
    def acts(group: Any, *args: Any, **keys: Any) -> Any:
        with METER.waiting(group._reduce_scatter_process_group, group.device):
            return act(group, *args, **keys)

    return acts


# What gathers weights and sums gradients: on a GPU in streams of their own, for which the one that computes waits here.
for _name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward"):
    setattr(FSDPParamGroup, _name, _metered(getattr(FSDPParamGroup, _name)))


class Sharded(DataParallel):
    """PyTorch's FSDP2."""

    def __init__(
        self, chains: list[Chain], mesh: Mesh, policy: MixedPrecisionPolicy, compressor: Compressor | None = None
    ):
        super().__init__(chains, mesh)
        self.compressor = compressor
        self.shapes = {name: weight.shape for chain in chains for name, weight in chain.named_weights()}
        """Of the weights of this tensor rank."""
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
        far = self.compressor is not None and self.mesh.layout.replicate > 1
        if far:
            mesh = mesh["shard"]  # the sum over replicas is ours
        fully_shard(module, mesh=mesh, reshard_after_forward=free, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no premultiplied sum
        module.set_reshard_after_backward(free, recurse=False)
        if far:
            module.set_all_reduce_hook(lambda flat: self._sum_far(module, flat))
        elif self.compressor is not None:
            module.set_custom_reduce_scatter(Scatter(self, module))

    def group_of(self, module: FSDPModule) -> list[tuple[Holding, int]]:
        """The weights whose gradients FSDP reduces for a module, in its order, with the size of their pieces."""
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        holdings = {id(weight): holding for weight, holding in self.pairs}
        return [
            (holdings[id(param.sharded_param)], param.padded_sharded_param_size.numel())
            for group in groups for param in group.fsdp_params
        ]  # fmt: skip

    def _sum_far(self, module: FSDPModule, flat: Tensor) -> None:
        known = self.group_of(module)
        pieces = flat.split([size for _, size in known])
        shaped = [
            (holding, piece[: holding.tensor.numel()].view(holding.tensor.shape))
            for (holding, _), piece in zip(known, pieces, strict=True)
        ]
        everywhere(self, shaped, self.mesh["replicate"])

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


class Scatter(DefaultReduceScatter):
    """What FSDP calls to sum the gradients of a module."""

    def __init__(self, data: Sharded, module: FSDPModule):
        self.data, self.module = data, module

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        data, shard = self.data, self.data.mesh["shard"]
        assert data.compressor is not None
        known = data.group_of(self.module)
        parts = input_tensor.view(shard.size, -1).split([size for _, size in known], 1)
        pieces = output_tensor.split([size for _, size in known])
        every = list(zip(known, parts, pieces, strict=True))
        few = [(holding, part, piece) for (holding, _), part, piece in every if data.compresses(holding)]
        rest = [(part, piece) for (holding, _), part, piece in every if not data.compresses(holding)]
        if few:
            shapes = [data.shapes[holding.name] for holding, _, _ in few]
            sums = data.compressor.scatter([h.name for h, _, _ in few], [part for _, part, _ in few], shapes, shard)
            for (_, _, piece), found in zip(few, sums, strict=True):
                piece.copy_(found)
        if rest:
            own = rest[0][0].new_empty(sum(part.shape[1] for part, _ in rest))
            reduce_scatter(own, torch.cat([part for part, _ in rest], 1).view(-1), group=shard.group)
            for (_, piece), found in zip(rest, own.split([part.shape[1] for part, _ in rest]), strict=True):
                piece.copy_(found)


def _local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def is_alone(layout: Layout, precision: Precision) -> bool:
    return layout.world == 1 and precision.mixed


def is_sharded(layout: Layout) -> bool:
    return layout.shard > 1 and layout.zero > 1


def data_parallel(
    chains: list[Chain], layout: Layout, mesh: Mesh, precision: Precision, batch: Batch, gradient: Gradient, seed: int
) -> DataParallel:  # fmt: skip
    compressor = Compressor(Way.parse(gradient.compress), seed) if gradient.compress and layout.data > 1 else None
    if is_alone(layout, precision):
        return Alone(chains, mesh, precision.master, batch.micro_batches)
    if is_sharded(layout):
        return Sharded(chains, mesh, precision.fsdp_policy(), compressor)
    if mesh["replicate"].size == layout.world > 1 and compressor is None:
        return Bucketed(chains, mesh, Sum(gradient))
    whole = Whole(chains, mesh, Sum(gradient))
    whole.compressor = compressor
    return whole
