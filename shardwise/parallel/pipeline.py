"""Pipeline parallelism on PyTorch's stages and schedules. The one file that touches their inside.

Each stage is a part of the chain. The last one computes the loss itself, from targets that reach it by keyword, so the
schedule's loss function only scales. Shapes between stages are known, so nothing is run to learn them.

PyTorch's stage looks for FSDP in the module that it is given and then keeps weights and gradients whole whatever ZeRO
stage was asked for. `StageModule` hides it: FSDP then frees and reduces by its own rules on every backward, which is ZeRO 2
and 3 as the words mean. Those rules know nothing of a backward in two halves: `PatchedPipelineStage` holds FSDP back in the first,
where there are no weight gradients yet, and lets it act at the end of the second.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    schedules,
)
from torch.distributed.pipelining.schedules import (
    FORWARD,
    REDUCE_GRAD,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from shardwise.comm.step_timer import STEP_TIMER
from shardwise.data.sample_stream import Samples
from shardwise.errors import LayoutError
from shardwise.layout import AUTO_SCHEDULES, Layout
from shardwise.parallel.mesh import Mesh

# It prints the whole schedule, a line a slot and from every rank, when a stage raises; the error itself says enough.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

SCHEDULE_CLASSES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


PipelineOrder = Mapping[int, Sequence[Any]]
"""Each pipeline rank's actions."""


def schedule_actions(schedule: str, ranks: int, virtual: int, micro_batches: int) -> dict[int, list[_Action]]:
    """What each rank executes, in its order, as PyTorch's own classes have it. Needs no process group."""
    schedule_class: Any = SCHEDULE_CLASSES[schedule]
    stage = SimpleNamespace(num_stages=ranks * virtual, group_size=ranks, group_rank=0, submod=None)
    if issubclass(schedule_class, PipelineScheduleSingle):
        order = schedule_class(stage, micro_batches).pipeline_order
    else:
        # Without the transfers, which take far longer to put in than the actions themselves.
        without_comms = type("Bare", (schedule_class,), {"_prepare_schedule_with_comms": lambda self, actions: None})
        order = without_comms([stage] * virtual, micro_batches).pipeline_order
    actions_by_rank = {
        rank: [action for action in actions if action is not None and action.computation_type != REDUCE_GRAD]
        for rank, actions in order.items()
    }
    if schedule == "1f1b":
        # PyTorch's list counts the last rank's forwards from 1; what it executes counts from 0.
        last = actions_by_rank[ranks - 1]
        numbers = iter(range(micro_batches))
        actions_by_rank[ranks - 1] = [
            a._replace(microbatch_index=next(numbers)) if a[1] == FORWARD else a for a in last
        ]
    return actions_by_rank


def _timed(wait: Any) -> Any:
    def timed_wait(*args: Any, **kwargs: Any) -> Any:
        with STEP_TIMER.waiting_for_axis("pipeline"):
            return wait(*args, **kwargs)

    return timed_wait


schedules._wait_batch_p2p = _timed(schedules._wait_batch_p2p)  # type: ignore[assignment]


class StageModule(nn.Module):
    """A module as the pipeline sees it: plain, with contiguous outputs. `frees`: its weights are freed after use."""

    def __init__(self, module: nn.Module, reshard_after_use: bool):
        super().__init__()
        self.module, self.reshard_after_use = module, reshard_after_use

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        return self.module(x, **batch).contiguous()


class PatchedPipelineStage(PipelineStage):
    """PyTorch's stage, mended in three places; its actions are timed."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Warms up no link to its own rank: in a V two neighbours share one, and gloo knows no such link."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        """Each stage knows its shapes, so the vote on it (2.13) has one outcome, which a fake tensor could not tell."""
        super()._warmup_backward_result(received_result)
        return torch.tensor([1], dtype=torch.int32, device=self.device)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with STEP_TIMER.record_action("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with STEP_TIMER.record_action(
            "B" if kwargs.get("full_backward", True) else "I", self.stage_index, bwd_chunk_id
        ):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with STEP_TIMER.record_action("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        """With FSDP, half a backward finds weights whole; gradients are summed after the half that makes them."""
        stage: Any = self.submod
        root = stage.module
        if backward_type == "full" or not isinstance(root, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        shards = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        for module in shards:
            module.unshard()  # the graph ends in the whole weights, so the stage must show these and not the pieces
        _set_fsdp_sync(root, sync_gradients=False, reshard=False)
        result = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        _set_fsdp_sync(root, sync_gradients=True, reshard=stage.reshard_after_use)
        if backward_type == "weight":
            fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]
        elif stage.reshard_after_use:
            for module in shards:
                module.reshard()
        return result


def _set_fsdp_sync(root: FSDPModule, sync_gradients: bool, reshard: bool) -> None:
    """Whether FSDP sums gradients, and frees weights, when it sees a backward end."""
    root.set_is_last_backward(sync_gradients)
    root.set_requires_gradient_sync(sync_gradients)
    root.set_reshard_after_backward(reshard)


class Pipeline:
    """Runs all micro-batches of a step through this rank's stages."""

    def __init__(
        self, modules: list[nn.Module], layout: Layout, mesh: Mesh, micro_batches: int,
        token_shape: tuple[int, int], hidden_shape: tuple[int, int, int], dtype: torch.dtype,
        order: PipelineOrder | None = None,
    ):  # fmt: skip
        """`order`: each pipeline rank's actions, instead of the layout's schedule; stages lie as the layout says."""
        indices = layout.stages_of(mesh["pipeline"].index)
        last = layout.stage_count - 1
        self.has_first_stage, self.has_last_stage = 0 in indices, last in indices
        self._scale = torch.ones(())
        self.hidden_states = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
        self.stages: list[PipelineStage] = []
        for index, module in zip(indices, modules, strict=True):
            tokens = torch.empty(token_shape, dtype=torch.int64, device="meta")
            loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
            self.stages.append(
                PatchedPipelineStage(
                    StageModule(module, reshard_after_use=layout.zero == 3),
                    index,
                    layout.stage_count,
                    mesh.device,
                    group=mesh["pipeline"].group,
                    input_args=tokens if index == 0 else self.hidden_states,
                    output_args=loss if index == last else self.hidden_states,
                )  # fmt: skip
            )
        if order is None and layout.schedule in AUTO_SCHEDULES:
            raise LayoutError(f"schedule={layout.schedule} runs an order that is made for it, and none was given.")
        schedule_class: Any = _PipelineScheduleRuntime if order else SCHEDULE_CLASSES[layout.schedule]
        is_single_stage = issubclass(schedule_class, PipelineScheduleSingle)
        self.schedule = schedule_class(
            self.stages[0] if is_single_stage else self.stages,
            micro_batches,
            loss_fn=self._scale_loss,
            scale_grads=False,
        )
        if order:
            # The planner's actions have the fields of PyTorch's.
            actions = {rank: [_Action(s, _ComputationType(k), *rest) for s, k, *rest in order[rank]] for rank in order}
            self.schedule._prepare_schedule_with_comms(actions)

    def _scale_loss(self, loss: Tensor, target: Tensor) -> Tensor:
        return loss * self._scale

    def initialize(self) -> None:
        """Greets the neighbours and makes what receives from them, which otherwise the first step does."""
        for stage in self.stages:
            stage.has_backward = True
        schedule: Any = self.schedule
        is_single_stage = isinstance(schedule, PipelineScheduleSingle)
        (schedule._initialize_stage if is_single_stage else schedule._initialize_stages)((), {})

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        """Forward and backward of all micro-batches. Returns this rank's sum of scaled losses, 0 off the last stage."""
        self._scale = scale
        losses: list[Tensor] = []
        inputs = (samples.tokens,) if self.has_first_stage else ()
        batch = samples.batch | ({"targets": samples.targets} if self.has_last_stage else {})
        target = samples.targets if self.has_last_stage else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **batch)
        return torch.stack([loss.detach() for loss in losses]).sum() if self.has_last_stage else torch.zeros_like(scale)

    def evaluate(self, samples: Samples) -> Tensor:
        """Forward only, stage after stage. Returns this rank's sum of losses, 0 off the last stage.

        By hand, because the schedules' own evaluation fails where two neighbouring stages share a rank.
        """
        group = self.stages[0].group
        total = torch.zeros((), dtype=torch.float64, device=samples.tokens.device)
        for part in samples.split(self.hidden_states.shape[0]):
            x = part.tokens
            for stage in self.stages:
                previous_rank, next_rank = (self._rank_of_stage(stage.stage_index + step) for step in (-1, 1))
                if previous_rank is not None and previous_rank != stage.group_rank:
                    x = torch.empty_like(self.hidden_states, device=part.tokens.device, requires_grad=False)
                    dist.recv(x, group=group, group_src=previous_rank)
                x = stage.submod(x, targets=part.targets, **part.batch)
                if next_rank is None:
                    total += x
                elif next_rank != stage.group_rank:
                    dist.send(x, group=group, group_dst=next_rank)
        return total

    def _rank_of_stage(self, index: int) -> int | None:
        """The pipeline rank that holds a stage; None beyond the ends."""
        return self.stages[0].stage_index_to_group_rank.get(index)
