"""Pipeline parallelism on PyTorch's stages and schedules, with PyTorch's pipelining internals in this one file.

Each stage is a slice of the chain. The last stage computes the loss itself, from targets passed as keyword arguments,
so the schedule's loss function only scales it. Shapes between stages are known, so no shape inference runs.

We need what `torch.distributed.pipelining` does not offer: the order of a schedule without a process group, schedules
with an order of our own, timed stages and waits, and FSDP that reshards and reduces as it does without a pipeline.

PyTorch's stage looks for FSDP in its module and then keeps weights and gradients unsharded, whatever the ZeRO stage.
`StageModule` hides FSDP, which then reshards and reduces at every backward: ZeRO 2 and 3 as defined. FSDP does not
support a split backward: `PatchedPipelineStage` disables its reduction during both halves, and runs it afterwards."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _Action
from torch.distributed.pipelining.stage import _RecvInfo

from shardwise.comm.collectives import StepTimer
from shardwise.data.sample_stream import Samples
from shardwise.errors import LayoutError, ShardwiseError
from shardwise.layout import AUTO_SCHEDULES, Layout
from shardwise.parallel.fsdp import finish_backward
from shardwise.parallel.mesh import Mesh

SCHEDULE_CLASSES = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B,
                    "interleaved": schedules.ScheduleInterleaved1F1B,
                    "zero-bubble": schedules.ScheduleInterleavedZeroBubble, "zbv": schedules.ScheduleZBVZeroBubble,
                    "dualpipev": schedules.ScheduleDualPipeV}  # fmt: skip
PipelineOrder = Mapping[int, Sequence[Any]]  # the actions of each pipeline rank, with the fields of PyTorch's `_Action`

# What a stage computes: forward, whole backward, its halves for the input and the weights, and two chunks at once. The
# orders hold other actions besides, of which each PyTorch has more (2.15 waits for reduced gradients).
_COMPUTING_ACTIONS = ("F", "B", "I", "W", "OVERLAP_F_B")

# From PyTorch 2.15 on. Before, a stage has a buffer for every micro-batch of a step from the start.
ALLOCATES_RECEIVE_BUFFERS_ON_DEMAND = hasattr(_RecvInfo, "allocate_buffer")


def schedule_actions(schedule: str, ranks: int, virtual: int, micro_batches: int) -> dict[int, list[_Action]]:
    """Returns the actions each pipeline rank executes under one of PyTorch's schedules. Needs no process group."""
    schedule_class: Any = SCHEDULE_CLASSES[schedule]
    schedules.logger.setLevel(logging.CRITICAL)  # it prints bubbles on every rank
    stage = SimpleNamespace(num_stages=ranks * virtual, group_size=ranks, group_rank=0, submod=None)
    if issubclass(schedule_class, PipelineScheduleSingle):
        order = schedule_class(stage, micro_batches).pipeline_order
    else:
        # Without sends and receives, which take PyTorch far longer to insert than the actions themselves.
        without_comms = type("Bare", (schedule_class,), {"_prepare_schedule_with_comms": lambda self, actions: None})
        order = without_comms([stage] * virtual, micro_batches).pipeline_order
    actions_by_rank = {
        rank: [action for action in actions if action and action[1].value in _COMPUTING_ACTIONS]
        for rank, actions in order.items()
    }
    if schedule == "1f1b":
        # PyTorch's list numbers the last rank's forwards from 1; what it executes is numbered from 0.
        numbers = iter(range(micro_batches))
        actions_by_rank[ranks - 1] = [
            action._replace(microbatch_index=next(numbers)) if action[1] == schedules.FORWARD else action
            for action in actions_by_rank[ranks - 1]
        ]
    return actions_by_rank


@contextmanager
def _timed_waits(timer: StepTimer) -> Iterator[None]:
    """Times PyTorch's waits for neighbouring stages; every schedule calls one module-level function for them."""
    wait = schedules._wait_batch_p2p

    def timed_wait(work: Any) -> None:
        with timer.waiting("pipeline"):
            wait(work)

    schedules._wait_batch_p2p = timed_wait
    try:
        yield
    finally:
        schedules._wait_batch_p2p = wait


class StageModule(nn.Module):
    """A module as the pipeline sees it: without FSDP, and with contiguous outputs and input gradients."""

    def __init__(self, module: nn.Module, reshard_after_use: bool, sent_shape: torch.Size | None):
        """`sent_shape`: of what the next stage receives; None for the last stage, which sends nothing."""
        super().__init__()
        self.module, self.reshard_after_use = module, reshard_after_use
        self.sent_shape = sent_shape

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)
        output = self.module(x, **batch).contiguous()

        # Gloo would abort the process that receives it.
        if self.sent_shape is not None and output.shape != self.sent_shape:
            raise LayoutError(
                f"a pipeline stage has an output of shape {tuple(output.shape)} for this batch, but stages exchange "
                f"tensors of one shape, {tuple(self.sent_shape)}; pad all batches to the same length in `collate`, "
                "or use shard instead of pipeline."
            )
        return output


class PatchedPipelineStage(PipelineStage):
    """PyTorch's stage with three fixes and timed actions."""

    def __init__(self, module: StageModule, *args: Any, timer: StepTimer, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self.timer = timer

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Skips messages to itself, which gloo lacks: in a V-shaped placement neighbouring stages share a rank. Called
        by PyTorch up to 2.13; from 2.14 on, it leaves them out itself."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        """Votes for static shapes: each stage knows its own, and a fake tensor has no value to read. Called by PyTorch
        2.13 and 2.14."""
        super()._warmup_backward_result(received_result)
        return torch.tensor([1], dtype=torch.int32, device=self.device)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.timer.record_action("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        kind = "B" if kwargs.get("full_backward", True) else "I"
        with self.timer.record_action(kind, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.timer.record_action("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        for weight in self.submod.parameters():
            if weight.grad is not None and weight.grad.stride() != weight.stride():
                # As autograd does in a whole backward: PyTorch's fused AdamW pairs elements by their place in memory.
                weight.grad = torch.empty_like(weight).copy_(weight.grad)

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        """Under FSDP, runs half a backward on unsharded weights and reduces gradients after the weight half."""
        stage: Any = self.submod
        root = stage.module
        if backward_type == "full" or not isinstance(root, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        fsdp_modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        for module in fsdp_modules:
            module.unshard()  # the graph's leaves are the unsharded weights, so the modules must hold those
        _set_fsdp_sync(root, sync_gradients=False, reshard=False)
        result = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        _set_fsdp_sync(root, sync_gradients=True, reshard=stage.reshard_after_use)
        if backward_type == "weight":
            finish_backward(root)
        elif stage.reshard_after_use:
            for module in fsdp_modules:
                module.reshard()
        return result


def _set_fsdp_sync(root: FSDPModule, sync_gradients: bool, reshard: bool) -> None:
    """Sets whether FSDP reduces gradients and reshards weights at the end of a backward."""
    root.set_is_last_backward(sync_gradients)
    root.set_requires_gradient_sync(sync_gradients)
    root.set_reshard_after_backward(reshard)


class Pipeline:
    """Runs all micro-batches of a step through this rank's stages, in an order of PyTorch's or our own."""

    def __init__(self, modules: list[nn.Module], layout: Layout, mesh: Mesh, micro_batches: int,
                 first_input: Tensor, hidden_shape: tuple[int, ...], dtype: torch.dtype,
                 order: PipelineOrder | None = None):  # fmt: skip
        """`first_input`: the first stage's, on the meta device. `order` replaces the layout's schedule."""
        if order is None and layout.schedule in AUTO_SCHEDULES:
            raise LayoutError(f"schedule={layout.schedule} needs an `order`; pass a synthesized one to parallelize.")
        indices = layout.stages_of(mesh["pipeline"].index)
        last = layout.stage_count - 1
        sent_shape = torch.Size(hidden_shape)
        self.has_first_stage, self.has_last_stage = 0 in indices, last in indices
        self._scale = torch.ones(())
        self.micro_batch = first_input.shape[0]
        self.hidden_states = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
        self.stages = [
            PatchedPipelineStage(
                StageModule(
                    module, reshard_after_use=layout.zero == 3, sent_shape=None if index == last else sent_shape
                ), index, layout.stage_count, mesh.device,
                group=mesh["pipeline"].group, timer=mesh.timer, input_args=self.hidden_states if index else first_input,
                output_args=loss if index == last else self.hidden_states,
            )
            for index, module in zip(indices, modules, strict=True)
        ]  # fmt: skip
        schedule_class: Any = schedules._PipelineScheduleRuntime if order else SCHEDULE_CLASSES[layout.schedule]
        self.is_single_stage, self.timer = issubclass(schedule_class, PipelineScheduleSingle), mesh.timer
        schedules.logger.setLevel(logging.CRITICAL)  # it prints bubbles on every rank, and the schedule after an error
        own_stages: Any = self.stages[0] if self.is_single_stage else list(self.stages)
        scale_loss = lambda loss, _: loss * self._scale  # noqa: E731
        self.schedule = schedule_class(own_stages, micro_batches, loss_fn=scale_loss, scale_grads=False)
        if order:
            kind = schedules._ComputationType
            actions = {rank: [_Action(s, kind(k), *rest) for s, k, *rest in order[rank]] for rank in order}
            self.schedule._prepare_schedule_with_comms(actions)

    def initialize(self) -> None:
        """Connects to the neighbouring stages and allocates receive buffers, which the first step does otherwise."""
        for stage in self.stages:
            stage.has_backward = True
        (self.schedule._initialize_stage if self.is_single_stage else self.schedule._initialize_stages)((), {})

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        """Runs forward and backward of all micro-batches. Returns the summed scaled loss; 0 without the last stage."""
        self._scale = scale
        losses: list[Tensor] = []
        inputs = (samples.tokens,) if self.has_first_stage else ()
        batch = samples.forward_kwargs | ({"targets": samples.targets} if self.has_last_stage else {})
        target = samples.targets if self.has_last_stage else None
        with _timed_waits(self.timer):
            try:
                self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **batch)
            except RuntimeError as error:
                if isinstance(error.__cause__, ShardwiseError):  # PyTorch wraps what a stage raises
                    raise error.__cause__ from None
                raise
        return torch.stack([loss.detach() for loss in losses]).sum() if self.has_last_stage else torch.zeros_like(scale)

    def evaluate(self, samples: Samples) -> Tensor:
        """Runs the forward only, stage after stage. Returns the sum of losses; 0 without the last stage."""
        total = torch.zeros((), dtype=torch.float64, device=samples.tokens.device)
        for part in samples.split(self.micro_batch):
            loss = self.forward(part, part.targets)
            total += 0 if loss is None else loss
        return total

    def forward(self, part: Samples, targets: Tensor | None = None) -> Tensor | None:
        """Returns the loss of a micro-batch, or its logits if there are no targets; None without the last stage. By
        hand, because the schedules' own `eval` fails if two neighbouring stages share a rank."""
        group, ranks = self.stages[0].group, self.stages[0].stage_index_to_group_rank
        x, output = part.tokens, None
        for stage in self.stages:
            previous_rank, next_rank = (ranks.get(stage.stage_index + step) for step in (-1, 1))
            if previous_rank is not None and previous_rank != stage.group_rank:
                x = torch.empty_like(self.hidden_states, device=part.tokens.device, requires_grad=False)
                dist.recv(x, group=group, group_src=previous_rank)
            x = stage.submod(x, targets=targets, **part.forward_kwargs)
            if next_rank is None:
                output = x
            elif next_rank != stage.group_rank:
                dist.send(x, group=group, group_dst=next_rank)
        return output
