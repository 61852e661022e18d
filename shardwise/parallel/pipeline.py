"""Pipeline parallelism on PyTorch's stages and schedules. The one file that touches their inside.

Each stage is a part of the chain. The last one computes the loss itself, from targets that reach it by keyword, so the
schedule's loss function only scales. Shapes between stages are known, so nothing is run to learn them.

PyTorch's stage looks for FSDP in the module that it is given and then keeps weights and gradients whole whatever ZeRO
stage was asked for. `Stage` hides it: FSDP then frees and reduces by its own rules on every backward, which is ZeRO 2
and 3 as the words mean. Those rules know nothing of a backward in two halves: `Peer` holds FSDP back in the first,
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

from shardwise.comm.meter import METER
from shardwise.data.stream import Samples
from shardwise.errors import LayoutError
from shardwise.layout import MADE, Layout
from shardwise.parallel.mesh import Mesh

# It prints the whole schedule, a line a slot and from every rank, when a stage raises; the error itself says enough.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

SCHEDULE = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


Order = Mapping[int, Sequence[Any]]
"""Each pipeline rank's actions."""


def named_order(schedule: str, ranks: int, virtual: int, micro_batches: int) -> dict[int, list[_Action]]:
    """What each rank executes, in its order, as PyTorch's own classes have it. Needs no process group."""
    kind: Any = SCHEDULE[schedule]
    stage = SimpleNamespace(num_stages=ranks * virtual, group_size=ranks, group_rank=0, submod=None)
    if issubclass(kind, PipelineScheduleSingle):
        order = kind(stage, micro_batches).pipeline_order
    else:
        # Without the transfers, which take far longer to put in than the actions themselves.
        bare = type("Bare", (kind,), {"_prepare_schedule_with_comms": lambda self, actions: None})
        order = bare([stage] * virtual, micro_batches).pipeline_order
    found = {
        rank: [action for action in actions if action is not None and action.computation_type != REDUCE_GRAD]
        for rank, actions in order.items()
    }
    if schedule == "1f1b":
        # PyTorch's list counts the last rank's forwards from 1; what it executes counts from 0.
        last = found[ranks - 1]
        numbers = iter(range(micro_batches))
        found[ranks - 1] = [a._replace(microbatch_index=next(numbers)) if a[1] == FORWARD else a for a in last]
    return found


def _metered(wait: Any) -> Any:
    def waits(*args: Any, **keys: Any) -> Any:
        with METER.over("pipeline"):
            return wait(*args, **keys)

    return waits


schedules._wait_batch_p2p = _metered(schedules._wait_batch_p2p)  # type: ignore[assignment]


class Stage(nn.Module):
    """A module as the pipeline sees it: plain, with contiguous outputs. `frees`: its weights are freed after use."""

    def __init__(self, module: nn.Module, frees: bool):
        super().__init__()
        self.module, self.frees = module, frees

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        return self.module(x, **batch).contiguous()


class Peer(PipelineStage):
    """PyTorch's stage, mended in three places; its actions are timed."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Warms up no link to its own rank: in a V two neighbours share one, and gloo knows no such link."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        """Each stage knows its shapes, so the vote on it (2.13) has one outcome, which a fake tensor could not tell."""
        super()._warmup_backward_result(received_result)
        return torch.tensor([1], dtype=torch.int32, device=self.device)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with METER.action("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with METER.action("B" if kwargs.get("full_backward", True) else "I", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with METER.action("W", self.stage_index, bwd_chunk_id):
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
        _let(root, act=False, free=False)
        result = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        _let(root, act=True, free=stage.frees)
        if backward_type == "weight":
            fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]
        elif stage.frees:
            for module in shards:
                module.reshard()
        return result


def _let(root: FSDPModule, act: bool, free: bool) -> None:
    """Whether FSDP sums gradients, and frees weights, when it sees a backward end."""
    root.set_is_last_backward(act)
    root.set_requires_gradient_sync(act)
    root.set_reshard_after_backward(free)


class Pipeline:
    """Runs all micro-batches of a step through this rank's stages."""

    def __init__(
        self, modules: list[nn.Module], layout: Layout, mesh: Mesh, micro_batches: int,
        token_shape: tuple[int, int], stream_shape: tuple[int, int, int], dtype: torch.dtype,
        order: Order | None = None,
    ):  # fmt: skip
        """`order`: each pipeline rank's actions, instead of the layout's schedule; stages lie as the layout says."""
        indices = layout.stages_of(mesh["pipeline"].index)
        last = layout.stage_count - 1
        self.first, self.last = 0 in indices, last in indices
        self._scale = torch.ones(())
        self.stream = torch.empty(stream_shape, dtype=dtype, device="meta", requires_grad=True)
        self.stages: list[PipelineStage] = []
        for index, module in zip(indices, modules, strict=True):
            tokens = torch.empty(token_shape, dtype=torch.int64, device="meta")
            loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
            self.stages.append(
                Peer(
                    Stage(module, frees=layout.zero == 3),
                    index,
                    layout.stage_count,
                    mesh.device,
                    group=mesh["pipeline"].group,
                    input_args=tokens if index == 0 else self.stream,
                    output_args=loss if index == last else self.stream,
                )  # fmt: skip
            )
        if order is None and layout.schedule in MADE:
            raise LayoutError(f"schedule={layout.schedule} runs an order that is made for it, and none was given.")
        kind: Any = _PipelineScheduleRuntime if order else SCHEDULE[layout.schedule]
        single = issubclass(kind, PipelineScheduleSingle)
        self.schedule = kind(
            self.stages[0] if single else self.stages, micro_batches, loss_fn=self._scaled, scale_grads=False,
        )  # fmt: skip
        if order:
            # The planner's actions have the fields of PyTorch's.
            actions = {rank: [_Action(s, _ComputationType(k), *rest) for s, k, *rest in order[rank]] for rank in order}
            self.schedule._prepare_schedule_with_comms(actions)

    def _scaled(self, loss: Tensor, target: Tensor) -> Tensor:
        return loss * self._scale

    def prepare(self) -> None:
        """Greets the neighbours and makes what receives from them, which otherwise the first step does."""
        for stage in self.stages:
            stage.has_backward = True
        schedule: Any = self.schedule
        single = isinstance(schedule, PipelineScheduleSingle)
        (schedule._initialize_stage if single else schedule._initialize_stages)((), {})

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        """Forward and backward of all micro-batches. Returns this rank's sum of scaled losses, 0 off the last stage."""
        self._scale = scale
        losses: list[Tensor] = []
        inputs = (samples.tokens,) if self.first else ()
        batch = samples.batch | ({"targets": samples.targets} if self.last else {})
        target = samples.targets if self.last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **batch)
        return torch.stack([loss.detach() for loss in losses]).sum() if self.last else torch.zeros_like(scale)

    def evaluate(self, samples: Samples) -> Tensor:
        """Forward only, stage after stage. Returns this rank's sum of losses, 0 off the last stage.

        By hand, because the schedules' own evaluation fails where two neighbouring stages share a rank.
        """
        group = self.stages[0].group
        total = torch.zeros((), dtype=torch.float64, device=samples.tokens.device)
        for part in samples.split(self.stream.shape[0]):
            x = part.tokens
            for stage in self.stages:
                before, after = (self._owner(stage.stage_index + step) for step in (-1, 1))
                if before is not None and before != stage.group_rank:
                    x = torch.empty_like(self.stream, device=part.tokens.device, requires_grad=False)
                    dist.recv(x, group=group, group_src=before)
                x = stage.submod(x, targets=part.targets, **part.batch)
                if after is None:
                    total += x
                elif after != stage.group_rank:
                    dist.send(x, group=group, group_dst=after)
        return total

    def _owner(self, index: int) -> int | None:
        """The pipeline rank that holds a stage; None beyond the ends."""
        return self.stages[0].stage_index_to_group_rank.get(index)
