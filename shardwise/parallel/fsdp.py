"""ZeRO 2 and 3 with PyTorch's FSDP2, and the choice of the data-parallel strategy for a layout.

The one file with FSDP2's internals: it has no public hooks around its waits, no public way to reduce gradients and
reshard at the end of a split backward, and no public access to the order in which it packs gradients."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard

from shardwise.comm.collectives import Axis, reduce_scatter
from shardwise.job import GradientConfig
from shardwise.layout import BatchSplit, Layout
from shardwise.models.chain import Chain
from shardwise.optim.param_shard import ParamShard
from shardwise.parallel.data_parallel import DDP, DataParallel, SingleProcess, Zero1, all_reduce_gradients, is_scalar
from shardwise.parallel.gradient_reduction import CompressionSpec, Compressor
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.precision import Precision


def _timed(name: str) -> Any:
    method: Any = getattr(FSDPParamGroup, name)

    def timed_method(group: Any, *args: Any, **kwargs: Any) -> Any:
        with group.timed_axis.waiting(group.device):
            return method(group, *args, **kwargs)

    return timed_method


# The methods that gather weights and reduce gradients. On a GPU they make the compute stream wait for the collectives.
_WAITING_METHODS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
TimedParamGroup: Any = type("TimedParamGroup", (FSDPParamGroup,), {name: _timed(name) for name in _WAITING_METHODS})


def param_groups(module: FSDPModule) -> list[Any]:
    """Returns the parameter groups that FSDP gathers and reduces for a module, without those of its submodules."""
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)  # a list in newer versions of PyTorch
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


def finish_backward(root: FSDPModule) -> None:
    """Reduces gradients and reshards weights, which FSDP does by itself only at the end of a full backward."""
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    context = state._state_ctx

    # PyTorch 2.15 opens an iteration when gradients arrive at FSDP's outputs and closes it with this call, which must
    # find one open. The weight half starts inside: after another micro-batch's weight half, none is open.
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = False

    state._root_post_backward_final_callback()


class FSDP(DataParallel):
    def __init__(self, chains: list[Chain], mesh: Mesh, *args: Any, policy: MixedPrecisionPolicy):
        super().__init__(chains, mesh, *args)
        self.shapes = {name: weight.shape for chain in chains for name, weight in chain.named_unique_parameters()}
        """Shapes of this tensor rank's weights before FSDP shards them."""
        self.scalars = {weight for chain in chains for weight in chain.parameters() if is_scalar(weight)}
        """FSDP splits rows and refuses what has none, so these stay plain parameters, whole on every rank."""
        has_split_experts, device_mesh = mesh.layout.expert_ranks > 1, mesh.fsdp_mesh()
        expert_mesh = mesh.fsdp_mesh(experts=True) if has_split_experts else device_mesh
        for chain in chains:
            for experts in chain.stacked_experts().values() if has_split_experts else ():
                self._shard(experts, policy, expert_mesh, mesh["expert_replicas"])
            units = chain.fsdp_units()
            for unit in (*units, chain):
                self._shard(unit, policy, device_mesh, mesh["fsdp"])
            if mesh.layout.pipeline > 1 and units:
                # The backward prefetches the weights of the module before. By default FSDP follows the order of all
                # forwards, and with several micro-batches in flight gathers modules that are not next.
                modules = [unit for unit in units if isinstance(unit, FSDPModule)]
                for previous, module in zip([modules[0], *modules], modules):
                    module.set_modules_to_backward_prefetch([previous])

    def _shard(self, module: nn.Module, policy: MixedPrecisionPolicy, mesh: DeviceMesh, axis: Axis) -> None:
        # No unit's output is changed in place: `shardwise.adapters.anatomy` leaves those modules to the chain.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        reshard = self.mesh.layout.zero == 3
        compress_over_replicas = self.compressor is not None and self.mesh.layout.replicate > 1
        if compress_over_replicas:
            mesh = mesh["shard"]  # we all-reduce over replicas, compressed

        def placement(weight: nn.Parameter) -> Shard:
            dim = self.sharded_dim(weight, axis)
            assert dim is not None, "FSDP does not see scalars"
            return Shard(dim)

        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy,
            shard_placement_fn=placement,
            ignored_params=self.scalars,
        )
        assert isinstance(module, FSDPModule)
        for group in param_groups(module):  # their waits are reported to the axis's step timer
            group.__class__, group.timed_axis = TimedParamGroup, axis
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
        module.set_reshard_after_backward(reshard, recurse=False)
        if compress_over_replicas:
            module.set_all_reduce_hook(lambda flat: self._all_reduce_replicas(module, flat))
        elif self.compressor is not None:
            module.set_custom_reduce_scatter(CompressedReduceScatter(self, module))

    def fsdp_params_of(self, module: FSDPModule) -> list[tuple[ParamShard, int]]:
        """Returns the parameter shards FSDP reduces for a module, in its order, with their padded sizes."""
        param_shards = {id(weight): param_shard for weight, param_shard in self.param_pairs}
        return [(param_shards[id(param.sharded_param)], param.padded_sharded_param_size.numel())
                for group in param_groups(module) for param in group.fsdp_params]  # fmt: skip

    def _all_reduce_replicas(self, module: FSDPModule, flat: Tensor) -> None:
        params = self.fsdp_params_of(module)
        pieces = flat.split([size for _, size in params])
        pairs = [(shard, piece) for (shard, _), piece in zip(params, pieces, strict=True)]
        gradients = [(shard, piece[: shard.tensor.numel()].view(shard.tensor.shape)) for shard, piece in pairs]
        all_reduce_gradients(self, gradients, self.mesh["replicate"])

    def local_shard(self, weight: nn.Parameter, axis: Axis) -> Tensor:
        if is_scalar(weight):
            return weight
        return _to_local(weight.detach())

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sets the local gradients, which FSDP has reduced after each backward, and sums those of scalars."""
        for weight, param_shard in self.param_pairs:
            if not is_scalar(weight):
                param_shard.tensor.grad = _to_local(weight.grad)
        self.sum_scalar_gradients()

    def gather_weights(self) -> None:
        for chain in self.chains:
            for module in chain.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # frees unsharded weights, which are stale after the update


class CompressedReduceScatter(DefaultReduceScatter):
    """The reduce-scatter FSDP calls for the gradients of a module: compressed for large weights."""

    def __init__(self, data: FSDP, module: FSDPModule):
        self.data, self.module = data, module

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        data, shard = self.data, self.data.mesh["shard"]
        assert data.compressor is not None
        params = data.fsdp_params_of(self.module)
        parts = input_tensor.view(shard.size, -1).split([size for _, size in params], 1)
        outputs = output_tensor.split([size for _, size in params])
        entries = list(zip(params, parts, outputs, strict=True))
        compressed = [(p.name, part, output) for (p, _), part, output in entries if data.should_compress(p)]
        uncompressed = [(part, output) for (p, _), part, output in entries if not data.should_compress(p)]
        if compressed:
            names, parts, outputs = zip(*compressed)
            sums = data.compressor.reduce_scatter(names, parts, [data.shapes[name] for name in names], shard)
            for output, reduced in zip(outputs, sums, strict=True):
                output.copy_(reduced)
        if uncompressed:
            parts, outputs = zip(*uncompressed)
            sizes = [part.shape[1] for part in parts]
            flat = parts[0].new_empty(sum(sizes))
            reduce_scatter(flat, torch.cat(parts, 1).view(-1), axis=shard)
            for output, reduced in zip(outputs, flat.split(sizes), strict=True):
                output.copy_(reduced)


def _to_local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def is_single_process(layout: Layout, precision: Precision) -> bool:
    return layout.world == 1 and precision.is_mixed


def uses_fsdp(layout: Layout) -> bool:
    return layout.shard > 1 and layout.zero > 1


def make_data_parallel(chains: list[Chain], layout: Layout, mesh: Mesh, precision: Precision, batch: BatchSplit,
                       gradient: GradientConfig, seed: int) -> DataParallel:  # fmt: skip
    compressor = None
    if gradient.compress and layout.data > 1:
        compressor = Compressor(CompressionSpec.parse(gradient.compress), seed, mesh.timer)
    args = chains, mesh, compressor
    if is_single_process(layout, precision):
        return SingleProcess(*args, master_dtype=precision.master_dtype, micro_batches=batch.micro_batches)
    if uses_fsdp(layout):
        dtypes = (precision.compute_dtype, precision.master_dtype) if precision.is_mixed else ()
        return FSDP(*args, policy=MixedPrecisionPolicy(*dtypes))  # of weights, and of the reduction of gradients
    return DDP(*args) if mesh["replicate"].size == layout.world > 1 and compressor is None else Zero1(*args)
