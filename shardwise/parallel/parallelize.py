"""From a model, a layout and a world to something that can take a step: the one place that knows the order.

    chain on the meta device -> this rank's pipeline stages -> tensor cuts -> precision, recomputation, compilation
    -> data parallelism -> memory and initial weights -> holdings -> pipeline schedule

Training and verification both come through here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor

from shardwise.errors import JobError, LayoutError
from shardwise.job import Job
from shardwise.kinds import DLRMConfig, ResNetConfig
from shardwise.layout import BatchSplit, Layout, solve_batch
from shardwise.models.chain import Chain
from shardwise.models.gpt import configure_modules
from shardwise.models.registry import build_chain, forward_flops_per_module
from shardwise.parallel import batch_norm, context, expert, gradient_reduction, local_sgd, recompute, tensor
from shardwise.parallel.balance import cut_stages
from shardwise.parallel.data_parallel import ParamSpecs
from shardwise.parallel.engine import Engine
from shardwise.parallel.fsdp import is_single_process, make_data_parallel, uses_fsdp
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.param_shard import init_param_shard
from shardwise.parallel.pipeline import Pipeline
from shardwise.parallel.precision import LossScale, Precision
from shardwise.parallel.tables import table_engine
from shardwise.parallel.torch_pipelining import PipelineOrder
from shardwise.support import REFUSED, support


def parameter_shapes(chain: Chain) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in chain.named_unique_parameters()}


def build_on_meta(job: Job, dtype: torch.dtype) -> Chain:
    """The whole model on the meta device."""
    with torch.device("meta"):
        return build_chain(job.require_chain_model(), job.seed).to(dtype)


# Of what a compiled block would keep for its backward, the share that it may; the rest, operators that are cheap, it
# computes again. On an H200 a quarter less memory for a step that is as fast.
ACTIVATION_MEMORY_BUDGET = 0.85
ACTIVATION_MEMORY_BUDGET_FP8 = (
    1.0  # in 8 bits what is kept is half as large, and less would have attention computed again
)


def check_layout(job: Job, layout: Layout) -> BatchSplit:
    """Raises, before any process starts, for a layout that this job's model and batch cannot have."""
    if isinstance(job.model, DLRMConfig):
        return table_engine.check_dlrm_layout(job, layout)
    batch_norm.check(job.require_chain_model(), layout)
    chain = build_on_meta(job, torch.float32)
    tensor.check(chain.sharding_plan, parameter_shapes(chain), job.model.length, layout.tensor)
    expert.check(job.require_chain_model(), layout)
    context.check(job.require_chain_model(), layout)
    gradient_reduction.check(job.gradient, layout)
    local_sgd.check(job, layout)
    cut_stages(layout, forward_flops_per_module(job.require_chain_model()))
    verdict = support(layout, job.precision)
    if verdict.verdict == REFUSED:
        raise LayoutError(f"layout '{layout}': {verdict.explanation}")
    if job.compile is True and layout.has_split_backward:
        raise LayoutError(
            f"compile = true with schedule {layout.schedule}: PyTorch cannot split the backward of compiled blocks; "
            "use schedule=1f1b or interleaved, or compile = false."
        )
    batch = solve_batch(layout, job.samples)
    batch_norm.check_batch(job.require_chain_model(), batch)
    return batch


def select_attention_backend(kind: str, device: torch.device) -> None:
    """Lets PyTorch use only that one of its attention kernels in this process."""
    if kind == "auto":
        return
    if device.type == "cpu" and kind in ("cudnn", "efficient"):
        raise JobError(f'attention = "{kind}" is a kernel for GPUs; on a CPU use "flash", "math" or "auto".')
    torch.backends.cuda.enable_cudnn_sdp(kind == "cudnn")
    torch.backends.cuda.enable_flash_sdp(kind == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(kind == "efficient")
    torch.backends.cuda.enable_math_sdp(kind == "math")


def parallelize(
    job: Job, layout: Layout, device: torch.device, memory: AbstractContextManager[Any] | None = None,
    order: PipelineOrder | None = None,
) -> Engine:  # fmt: skip
    """This rank's part of the job. A dry run gives a `memory` in which weights have shapes and no numbers; who runs
    `schedule=auto` gives the `order` that was made for it (`shardwise.planner.plan.order_of`)."""
    if isinstance(job.model, DLRMConfig):
        return table_engine.parallelize_dlrm(job, layout, device, memory)
    batch = check_layout(job, layout)
    select_attention_backend(job.sdpa_backend, device)
    uses_local_sgd = job.local_sgd.every > 1
    mesh = Mesh(layout, device, uses_local_sgd)
    precision = Precision(job.precision)
    single_process = is_single_process(layout, precision)
    full_model = build_on_meta(job, precision.compute_dtype if single_process else precision.master_dtype)
    shapes = parameter_shapes(full_model)

    spans = cut_stages(layout, forward_flops_per_module(job.require_chain_model()))
    chains = [full_model.slice(*spans[index]) for index in layout.stages_of(mesh["pipeline"].index)]

    param_specs: ParamSpecs = {}
    for chain in chains:
        experts = expert.apply(chain, layout, mesh)
        for name, dim in tensor.apply(chain, mesh["tensor"]).items():
            param_specs[name] = (shapes[name], dim, name in experts)

    fully_sharded = uses_fsdp(layout)
    for chain in chains:
        if not fully_sharded and not single_process:
            precision.apply(chain)
        recompute.apply(chain, layout)
        if job.should_compile(device.type, layout):
            functorch.activation_memory_budget = (
                ACTIVATION_MEMORY_BUDGET_FP8 if precision.use_fp8 else ACTIVATION_MEMORY_BUDGET
            )
            for block in chain.blocks():
                block.compile()

    data = make_data_parallel(chains, layout, mesh, precision, batch, job.gradient, job.seed)

    scale = LossScale(precision, device)

    def loss_weight() -> Tensor:
        """Of a loss that is a sum over samples, and that every tensor rank computes."""
        return scale.value * mesh["local_sgd"].size / (job.samples * layout.tensor)

    with memory or nullcontext():
        for chain in chains:
            chain.to_empty(device=device)
            if not fully_sharded:
                chain.tie_weights()  # PyTorch gives each name memory of its own; FSDP does not
            configure_modules(
                chain, job.require_chain_model(), device, precision.compute_dtype, pipelined=layout.pipeline > 1,
                use_fp8=precision.use_fp8, loss_chunk_size=job.loss.chunk_size, aux_loss_scale=loss_weight,
            )  # fmt: skip
            context.apply(chain, layout, mesh, job.model.length, device)
            batch_norm.apply(chain, mesh["data"])
        param_shards = data.make_param_shards(param_specs)
        if memory is None:
            for param_shard in param_shards:
                init_param_shard(param_shard, full_model.sharding_plan.init_spec_of(param_shard.name), job.seed, mesh)
        data.sync_weights()

    pipeline = None
    if layout.pipeline > 1:
        length = job.model.length // layout.context
        model = job.require_chain_model()
        assert not isinstance(model, ResNetConfig)
        pipeline = Pipeline(
            data.modules, layout, mesh, batch.micro_batches, (batch.micro_batch, length),
            (batch.micro_batch, length // layout.tensor, model.width), precision.compute_dtype, order,
        )  # fmt: skip
    positions = None
    if layout.context > 1:
        positions = context.local_positions(job.model.length, mesh["context"], layout.context_method).to(device)
    engine = Engine(job.model, mesh, batch, chains, data, pipeline, param_shards, scale, positions)
    if uses_local_sgd:
        engine.outer_optimizer = local_sgd.OuterOptimizer(job.local_sgd, engine)
    return engine
