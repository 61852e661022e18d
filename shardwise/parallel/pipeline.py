"""Pipeline parallelism on PyTorch's stages and schedules (`shardwise.parallel.torch_pipelining`).

Each stage is a slice of the chain. The last stage computes the loss itself, from targets passed as keyword arguments,
so the schedule's loss function only scales it. Shapes between stages are known, so no shape inference runs.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data.sample_stream import Samples
from shardwise.errors import LayoutError
from shardwise.layout import AUTO_SCHEDULES, Layout
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.torch_pipelining import PatchedPipelineStage, PipelineOrder, PipelineSchedule, StageModule


class Pipeline:
    """Runs all micro-batches of a step through this rank's stages."""

    def __init__(
        self, modules: list[nn.Module], layout: Layout, mesh: Mesh, micro_batches: int,
        first_input: Tensor, hidden_shape: tuple[int, ...], dtype: torch.dtype,
        order: PipelineOrder | None = None,
    ):  # fmt: skip
        """`first_input`: the first stage's, on the meta device. `order` replaces the layout's schedule."""
        if order is None and layout.schedule in AUTO_SCHEDULES:
            raise LayoutError(f"schedule={layout.schedule} needs an `order`; pass a synthesized one to parallelize.")
        indices = layout.stages_of(mesh["pipeline"].index)
        last = layout.stage_count - 1
        self.has_first_stage, self.has_last_stage = 0 in indices, last in indices
        self._scale = torch.ones(())
        self.micro_batch = first_input.shape[0]
        self.hidden_states = torch.empty(hidden_shape, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
        self.stages = [
            PatchedPipelineStage(
                StageModule(module, reshard_after_use=layout.zero == 3), index, layout.stage_count, mesh.device,
                group=mesh["pipeline"].group, timer=mesh.timer,
                input_args=first_input if index == 0 else self.hidden_states,
                output_args=loss if index == last else self.hidden_states,
            )
            for index, module in zip(indices, modules, strict=True)
        ]  # fmt: skip
        self.schedule = PipelineSchedule(
            layout.schedule, order, list(self.stages), micro_batches, lambda loss, _: loss * self._scale, mesh.timer
        )

    def run(self, samples: Samples, scale: Tensor) -> Tensor:
        """Runs forward and backward of all micro-batches. Returns the summed scaled loss; 0 without the last stage."""
        self._scale = scale
        losses: list[Tensor] = []
        inputs = (samples.tokens,) if self.has_first_stage else ()
        batch = samples.forward_kwargs | ({"targets": samples.targets} if self.has_last_stage else {})
        target = samples.targets if self.has_last_stage else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **batch)
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
