"""The time of a module's operators (`shardwise.models.operator_costs`) on a machine."""

from collections.abc import Sequence

from shardwise.models.operator_costs import OperatorCosts
from shardwise.planner.costs.block_time import BlockTimeModel, KernelProfile, ModuleTime, ParallelDegrees
from shardwise.planner.costs.decoder_shape import ModelShape
from shardwise.planner.costs.machine import Machine


def operators_time(machine: Machine, profile: KernelProfile, costs: OperatorCosts, tensor: int = 1) -> ModuleTime:
    """Returns the time of a module on one of the `tensor` ranks that its costs were computed for."""
    forward = backward = weight = 0.0
    for p in costs.products:
        shapes = (p.rows, p.inner, p.columns), (p.rows, p.columns, p.inner), (p.inner, p.rows, p.columns)
        moved = p.moved_numel * profile.itemsize
        precision = p.precision(profile.precision)
        times = [machine.matmul(*side, precision, p.groups, moved) for side in shapes]
        forward, backward, weight = forward + times[0], backward + times[1] + times[2], weight + times[2]
    for a in costs.attention:
        square = ModelShape(
            layers=1, width=a.qk_head_dim, heads=a.heads, kv_heads=a.heads, head_dim=a.v_head_dim,
            qk_rope_head_dim=a.qk_head_dim - a.v_head_dim, ffn=0, vocab=0, sequence=a.keys, causal=a.causal,
        )  # fmt: skip
        seconds = BlockTimeModel(machine, square, profile).attention(ParallelDegrees(1, 1, 1, 1))
        forward, backward = forward + seconds[0] * a.queries / a.keys, backward + seconds[1] * a.queries / a.keys
    elementwise = machine.memory_time(costs.moved_bytes) if costs.moved_bytes else 0.0
    return ModuleTime(
        forward=forward + elementwise, backward=backward + 2 * elementwise, weight_grad=weight,
        moved_bytes=costs.moved_bytes, launch_seconds=costs.num_ops * machine.efficiency.kernel_launch,
        tensor=machine.all_reduce(costs.all_reduce_bytes, tensor, 1) * (1.0 - machine.efficiency.overlap_tensor),
    )  # fmt: skip


def mean_module_time(seconds: Sequence[ModuleTime]) -> ModuleTime:
    """Returns the mean of several modules; zero if there are none."""
    mean = ModuleTime()
    for number, time in enumerate(seconds, start=1):
        mean = mean.lerp(time, 1 / number)
    return mean
