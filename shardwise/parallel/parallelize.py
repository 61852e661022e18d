"""Builds this rank's engine from a prepared job. This is the only place that knows the order of application:

    model on the meta device -> this rank's pipeline stages -> expert and tensor sharding -> precision, activation
    checkpointing, compilation -> data parallelism -> memory -> parameter shards and their initial values -> schedule

Training, verification and dry runs all use `parallelize`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.models.chain import Chain, init_slice
from shardwise.models.gpt import configure_modules
from shardwise.models.quantize import BLOCK, drop_weight, store_weight, whole_blocks
from shardwise.optim.param_shard import ParamShard, init_param_shard
from shardwise.parallel import batch_norm, context, expert, local_sgd, recompute, tensor
from shardwise.parallel.activation_offload import ActivationOffload
from shardwise.parallel.data_parallel import ParamSpecs, is_scalar
from shardwise.parallel.engine import Engine
from shardwise.parallel.fsdp import is_single_process, make_data_parallel, uses_fsdp
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.precision import LossScale, Precision
from shardwise.parallel.prepare import Prepared
from shardwise.parallel.tables.table_engine import TableEngine, make_tables
from shardwise.parallel.torch_pipelining import Pipeline, PipelineOrder

# The fraction of a compiled block's activations that torch.compile may save for the backward; it recomputes cheap
# operators for the rest. On an H200 this saves a quarter of the memory at the same speed.
ACTIVATION_MEMORY_BUDGET = 0.85
FULL_ACTIVATION_MEMORY_BUDGET = 1.0  # in fp8 and for LoRA, where a lower budget recomputes attention


def select_attention_backend(backend: str, device: torch.device) -> None:
    """Restricts PyTorch to one of its attention kernels in this process; "auto" leaves the choice to PyTorch."""
    if backend == "auto":
        return
    if device.type == "cpu" and backend in ("cudnn", "efficient"):
        raise JobError(f'sdpa_backend = "{backend}" is a kernel for GPUs; on a CPU use "flash", "math" or "auto".')
    torch.backends.cuda.enable_cudnn_sdp(backend == "cudnn")
    torch.backends.cuda.enable_flash_sdp(backend == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(backend == "efficient")
    torch.backends.cuda.enable_math_sdp(backend == "math")


def compile_blocks(chain: Chain, saves_all: bool) -> None:
    kinds = {tuple(weight.shape for weight in block.parameters()) for block in chain.blocks()}
    varied = len(kinds) > 2  # blocks that differ, as in a ResNet, must not share slow code for any shape
    saves_all = saves_all or varied  # a smaller budget recomputes convolutions
    functorch.activation_memory_budget = FULL_ACTIVATION_MEMORY_BUDGET if saves_all else ACTIVATION_MEMORY_BUDGET
    torch._dynamo.config.recompile_limit = 8 + 4 * len(kinds)  # for training and validation, with and without gradients
    for block in (*chain.blocks(), *chain.compiled_ends()):
        block.compile(dynamic=False if varied else None)


def drop_frozen(chain: Chain, specs: ParamSpecs, mesh: Mesh) -> Iterator[tuple[nn.Module, ParamShard]]:
    """Makes linear layers keep their frozen weights as codes; yields them, with what their weights were."""
    for name in chain.sharding_plan.quantized & dict(chain.named_parameters()).keys():
        layer, (shape, dim, _) = chain.get_submodule(name.rpartition(".")[0]), specs[name]
        if "weight" in layer.__dict__.get("_parametrizations", {}):
            continue  # it reads some of its rows
        sharded_dims = ((dim, mesh["tensor"]),) if dim is not None and mesh["tensor"].size > 1 else ()
        shard = ParamShard(name, torch.empty(0), shape, sharded_dims)
        drop_weight(layer, chain.sharding_plan.quantize, shard.offset_and_shape[0][1] % BLOCK)
        yield layer, shard


def store_frozen(layer: Any, shard: ParamShard, model: Chain, seed: int) -> None:
    """Reads the weight of a layer and keeps its codes."""
    (row, column), (rows, columns) = shard.offset_and_shape
    first, last = whole_blocks(column, columns, shard.shape[1])
    weight = torch.empty(rows, last - first, device=layer.weight_codes.device)
    init_slice(model, shard.name, weight, shard.shape, (row, first), seed)
    store_weight(layer, weight)


def parallelize(prepared: Prepared, device: torch.device, memory: AbstractContextManager[Any] | None = None,
                order: PipelineOrder | None = None) -> Engine:  # fmt: skip
    """Returns this rank's engine. Shards the prepared model in place, so a `Prepared` serves one engine. A dry run
    passes a `memory` context in which weights have shapes but no values; `schedule=auto` needs the `order` that was
    synthesized for it (`shardwise.planner.plan.auto_schedule_order`)."""
    job, layout, batch = prepared.job, prepared.layout, prepared.batch
    select_attention_backend(job.sdpa_backend, device)
    uses_local_sgd = job.local_sgd.every > 1
    mesh = Mesh(layout, device, uses_local_sgd)
    precision = Precision(job.precision)
    single_process = is_single_process(layout, precision)
    model = prepared.take_model().to(precision.compute_dtype if single_process else precision.master_dtype)
    for weight in model.parameters():
        if not weight.requires_grad:  # nothing is ever added to it, so it needs no master weight
            weight.data = weight.data.to(precision.compute_dtype)
    chains = [model.slice(*prepared.stages[index]) for index in layout.stages_of(mesh["pipeline"].index)]

    param_specs: ParamSpecs = {}
    for chain in chains:
        experts = expert.apply(chain, layout, mesh)
        for name, dim in tensor.apply(chain, mesh["tensor"]).items():
            param_specs[name] = (prepared.shapes[name], dim, name in experts)
        batch_norm.apply(chain, mesh["data"])

    fully_sharded = uses_fsdp(layout)
    offload = ActivationOffload(device) if job.offload_activations else None
    quantized = [] if fully_sharded else [shard for chain in chains for shard in drop_frozen(chain, param_specs, mesh)]
    for chain in chains:
        if not single_process:
            # FSDP casts by its own policy what it shards: all but the scalars.
            precision.apply(chain, is_scalar if fully_sharded else None)
        chain.pass_sample_ids()
        recompute.apply(chain, layout)
        if job.should_compile(device.type, layout):
            saves_all = precision.use_fp8 or job.model.lora is not None or layout.recompute == "selective"
            compile_blocks(chain, saves_all)
        if offload is not None:
            offload.apply(chain)

    data = make_data_parallel(chains, layout, mesh, precision, batch, job.gradient, job.seed)
    scale = LossScale(precision, device)

    def aux_loss_scale() -> Tensor:
        """Returns the scale of an auxiliary loss that is a sum over samples and that every tensor rank computes."""
        return scale.value * mesh["local_sgd"].size / (job.samples * layout.tensor)

    with memory or nullcontext():
        for chain in chains:
            chain.to_empty(device=device)
            # `to_empty` allocates tied weights separately; FSDP keeps those tied that it shards.
            chain.tie_weights(is_scalar if fully_sharded else None)
            configure_modules(chain, job.model, device, precision.compute_dtype, pipelined=layout.pipeline > 1,
                              use_fp8=precision.use_fp8, loss_chunk_size=job.loss.chunk_size,
                              aux_loss_scale=aux_loss_scale)  # fmt: skip
            chain.configure(device, precision.compute_dtype, layout.tensor)
            context.apply(chain, layout, mesh, job.model.length, device)
            batch_norm.reset_statistics(chain)
        param_shards = data.make_param_shards(param_specs)
        if memory is None:
            for layer, frozen in quantized:
                store_frozen(layer, frozen, model, job.seed)
            for param_shard in (*param_shards, *data.frozen_shards):
                init_param_shard(param_shard, model, job.seed)
        data.sync_weights()

    pipeline = None
    if layout.pipeline > 1:
        shapes = job.family.stage_shapes(job.model, layout, batch.micro_batch)
        pipeline = Pipeline(data.modules, layout, mesh, batch.micro_batches, *shapes, precision.compute_dtype, order)
    local_positions = None
    if layout.context > 1:
        local_positions = context.local_positions(job.model.length, mesh["context"], layout.context_method).to(device)
    parts = (job.model, mesh, batch, chains, data, pipeline, param_shards, scale, local_positions, job.is_packed)
    if prepared.tables:
        tables = make_tables(prepared, mesh, precision.master_dtype)
        param_shards += tables.local_shards
        return TableEngine(*parts, compute_dtype=precision.compute_dtype, tables=tables)
    engine = Engine(*parts)
    if uses_local_sgd:
        engine.outer_optimizer = local_sgd.OuterOptimizer(job.local_sgd, engine)
    return engine
