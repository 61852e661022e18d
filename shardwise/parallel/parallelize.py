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
from shardwise.kinds import DLRM, ResNet
from shardwise.layout import Batch, Layout, solve_batch
from shardwise.models.chain import Chain
from shardwise.models.families import chain_of, cost_of
from shardwise.models.gpt import prepare
from shardwise.parallel import context, expert, gradient, norm, recommender, recompute, sync, tensor
from shardwise.parallel.balance import cut_stages
from shardwise.parallel.data import Cuts
from shardwise.parallel.engine import Engine
from shardwise.parallel.holding import start
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import Order, Pipeline
from shardwise.parallel.precision import LossScale, Precision
from shardwise.parallel.sharded import data_parallel, is_alone, is_sharded
from shardwise.support import REFUSED, support


def shapes_of(chain: Chain) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in chain.named_weights()}


def build(job: Job, dtype: torch.dtype) -> Chain:
    """The whole model on the meta device."""
    with torch.device("meta"):
        return chain_of(job.built(), job.seed).to(dtype)


# Of what a compiled block would keep for its backward, the share that it may; the rest, operators that are cheap, it
# computes again. On an H200 a quarter less memory for a step that is as fast.
KEPT = 0.85
KEPT_NARROW = 1.0  # in 8 bits what is kept is half as large, and less would have attention computed again


def check(job: Job, layout: Layout) -> Batch:
    """Raises, before any process starts, for a layout that this job's model and batch cannot have."""
    if isinstance(job.model, DLRM):
        return recommender.check(job, layout)
    norm.check(job.built(), layout)
    chain = build(job, torch.float32)
    tensor.check(chain.rules, shapes_of(chain), job.model.length, layout.tensor)
    expert.check(job.built(), layout)
    context.check(job.built(), layout)
    gradient.check(job.gradient, layout)
    sync.check(job, layout)
    cut_stages(layout, cost_of(job.built()))
    found = support(layout, job.precision)
    if found.verdict == REFUSED:
        raise LayoutError(f"layout '{layout}': {found.sentence}")
    if job.compile is True and layout.split_backward:
        raise LayoutError(
            f"compile = true with schedule {layout.schedule}: PyTorch cannot split the backward of compiled blocks; "
            "use schedule=1f1b or interleaved, or compile = false."
        )
    batch = solve_batch(layout, job.samples)
    norm.check_batch(job.built(), batch)
    return batch


def choose_attention(kind: str, device: torch.device) -> None:
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
    order: Order | None = None,
) -> Engine:  # fmt: skip
    """This rank's part of the job. A dry run gives a `memory` in which weights have shapes and no numbers; who runs
    `schedule=auto` gives the `order` that was made for it (`shardwise.planner.plan.order_of`)."""
    if isinstance(job.model, DLRM):
        return recommender.parallelize(job, layout, device, memory)
    batch = check(job, layout)
    choose_attention(job.attention, device)
    apart = job.sync.every > 1
    mesh = Mesh(layout, device, apart)
    precision = Precision(job.precision)
    alone = is_alone(layout, precision)
    whole = build(job, precision.compute if alone else precision.master)
    shapes = shapes_of(whole)

    spans = cut_stages(layout, cost_of(job.built()))
    chains = [whole.part(*spans[index]) for index in layout.stages_of(mesh["pipeline"].index)]

    cuts: Cuts = {}
    for chain in chains:
        experts = expert.apply(chain, layout, mesh)
        for name, dim in tensor.apply(chain, mesh["tensor"]).items():
            cuts[name] = (shapes[name], dim, name in experts)

    sharded = is_sharded(layout)
    for chain in chains:
        if not sharded and not alone:
            precision.apply(chain)
        recompute.apply(chain, layout)
        if job.compiles(device.type, layout):
            functorch.activation_memory_budget = KEPT_NARROW if precision.narrow else KEPT
            for block in chain.blocks():
                block.compile()

    data = data_parallel(chains, layout, mesh, precision, batch, job.gradient, job.seed)

    scale = LossScale(precision, device)

    def weigh() -> Tensor:
        """Of a loss that is a sum over samples, and that every tensor rank computes."""
        return scale.value * mesh["apart"].size / (job.samples * layout.tensor)

    with memory or nullcontext():
        for chain in chains:
            chain.to_empty(device=device)
            if not sharded:
                chain.tie()  # PyTorch gives each name memory of its own; FSDP does not
            prepare(
                chain, job.built(), device, precision.compute, pipelined=layout.pipeline > 1,
                narrow=precision.narrow, chunk=job.loss.chunk, weigh=weigh,
            )  # fmt: skip
            context.apply(chain, layout, mesh, job.model.length, device)
            norm.apply(chain, mesh["data"])
        holdings = data.hold(cuts)
        if memory is None:
            for holding in holdings:
                start(holding, whole.rules.init_of(holding.name), job.seed, mesh)
        data.publish()

    pipeline = None
    if layout.pipeline > 1:
        length = job.model.length // layout.context
        model = job.built()
        assert not isinstance(model, ResNet)
        pipeline = Pipeline(
            data.modules, layout, mesh, batch.micro_batches, (batch.micro_batch, length),
            (batch.micro_batch, length // layout.tensor, model.width), precision.compute, order,
        )  # fmt: skip
    where = None
    if layout.context > 1:
        where = context.positions(job.model.length, mesh["context"], layout.context_by).to(device)
    engine = Engine(job.model, mesh, batch, chains, data, pipeline, holdings, scale, where)
    if apart:
        engine.meeting = sync.Meeting(job.sync, engine)
    return engine
