"""Pipeline parallelism on PyTorch's stages and schedules. The one file that touches their inside.

Each stage is a part of the chain. The last one computes the loss itself, from targets that reach it by keyword, so the
schedule's loss function only scales. Shapes between stages are known, so nothing is run to learn them.

PyTorch's stage looks for FSDP in the module that it is given and then keeps weights and gradients whole whatever ZeRO
stage was asked for. `Stage` hides it: FSDP then frees and reduces by its own rules on every backward, which is ZeRO 2
and 3 as the words mean.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, ScheduleDualPipeV

from shardwise.data.stream import Samples
from shardwise.layout import Layout
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


class Stage(nn.Module):
    """A module as the pipeline sees it: plain, with contiguous outputs."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor:
        return self.module(x, **batch).contiguous()


class Peer(PipelineStage):
    """Warms up no link to its own rank: in a V two neighbours share one, and gloo knows no such link."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class Pipeline:
    """Runs all micro-batches of a step through this rank's stages."""

    def __init__(
        self, modules: list[nn.Module], layout: Layout, mesh: Mesh, micro_batches: int,
        token_shape: tuple[int, int], stream_shape: tuple[int, int, int], dtype: torch.dtype,
    ):  # fmt: skip
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
                    Stage(module),
                    index,
                    layout.stage_count,
                    mesh.device,
                    group=mesh["pipeline"].group,
                    input_args=tokens if index == 0 else self.stream,
                    output_args=loss if index == last else self.stream,
                )  # fmt: skip
            )
        kind: Any = SCHEDULE[layout.schedule]
        single = issubclass(kind, PipelineScheduleSingle)
        self.schedule = kind(
            self.stages[0] if single else self.stages, micro_batches, loss_fn=self._scaled, scale_grads=False,
        )  # fmt: skip

    def _scaled(self, loss: Tensor, target: Tensor) -> Tensor:
        return loss * self._scale

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        """Forward and backward of all micro-batches. Returns this rank's sum of scaled losses, 0 off the last stage."""
        self._scale = scale
        losses: list[Tensor] = []
        inputs = (samples.tokens,) if self.first else ()
        batch = {"ids": samples.ids, "targets": samples.targets} if self.last else {"ids": samples.ids}
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
                x = stage.submod(x, ids=part.ids, targets=part.targets)
                if after is None:
                    total += x
                elif after != stage.group_rank:
                    dist.send(x, group=group, group_dst=after)
        return total

    def _owner(self, index: int) -> int | None:
        """The pipeline rank that holds a stage; None beyond the ends."""
        return self.stages[0].stage_index_to_group_rank.get(index)
