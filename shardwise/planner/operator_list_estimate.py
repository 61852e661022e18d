"""Predicts layouts of models given as lists of operator costs (`shardwise.planner.costs.model_shape`).

Estimator and search treat such a model as equal blocks of average cost. Stages are assumed equal in time, since our
engine balances them, and as large in memory as if all blocks were the largest.

A DLRM's tables are assumed in host memory, split over the data ranks. Every rank reads the rows that the global batch
needs, copies them to the device and sends them by an all-to-all; gradients return the same way. None of this overlaps.
"""

from collections.abc import Sequence
from statistics import fmean as mean

from shardwise.layout import Layout
from shardwise.models.operator_costs import OperatorCosts
from shardwise.planner.costs import cached_by
from shardwise.planner.costs.machine import KernelProfile, Machine, ModuleTime, ParallelDegrees
from shardwise.planner.costs.memory_model import MemoryInputs
from shardwise.planner.costs.model_shape import OperatorListModel
from shardwise.planner.estimate import Estimator, memory_inputs_key


def operators_time(machine: Machine, profile: KernelProfile, costs: OperatorCosts, tensor: int = 1) -> ModuleTime:
    """Returns the time of a module on one of the `tensor` ranks that its costs were computed for."""
    forward = backward = weight = 0.0
    for p in costs.products:
        precision, moved = p.precision(profile.precision), p.moved_numel * profile.itemsize
        rate = machine.efficiency.convolution if p.kernel_numel else 1.0
        times = [t / rate for t in machine.linear(p.rows, p.inner, p.columns, precision, p.groups, moved)]
        forward, backward, weight = forward + times[0], backward + times[1] + times[2], weight + times[2]
    for a in costs.attention:
        sizes = a.heads, a.keys, a.keys, a.v_head_dim, a.qk_head_dim - a.v_head_dim
        seconds = machine.attention(*sizes, a.causal, profile.precision)
        forward, backward = forward + seconds[0] * a.queries / a.keys, backward + seconds[1] * a.queries / a.keys
    elementwise = machine.memory_time(costs.moved_bytes) if costs.moved_bytes else 0.0
    return ModuleTime(
        forward=forward + elementwise, backward=backward + 2 * elementwise, weight_grad=weight,
        moved_bytes=costs.moved_bytes, launch_seconds=costs.num_ops * machine.efficiency.kernel_launch,
        tensor=machine.all_reduce(costs.all_reduce_bytes, tensor, 1) * (1.0 - machine.efficiency.overlap_tensor),
    )  # fmt: skip


Modules = Sequence[OperatorCosts]
HOST_ROW_BANDWIDTH = 20e9  # bytes per second and rank of random host reads or writes of rows of about 500 bytes
HOST_LINK_BANDWIDTH = 25e9  # bytes per second and direction between host and device: PCIe 4 x16


class OperatorListEstimator(Estimator):
    shape: OperatorListModel

    @cached_by(lambda self, degrees: degrees)
    def module_times(self, degrees: ParallelDegrees) -> tuple[ModuleTime, ModuleTime, ModuleTime]:
        machine, profile, tensor = self.machine, self.kernel_profile, degrees.tensor
        parts = self._split_ends(degrees.micro_batch, tensor)
        times = ([operators_time(machine, profile, module, tensor) for module in part] for part in parts)
        first, blocks, last = (ModuleTime(*map(mean, zip(*part))) for part in times)
        return blocks, first, last

    def _split_ends(self, micro_batch: int, tensor: int) -> tuple[Modules, Modules, Modules]:
        """Returns first module, blocks and last module; without ends, all modules are blocks."""
        modules = self.shape.make_operators(micro_batch, *([tensor] if tensor > 1 else []))
        return (modules[:1], modules[1:-1], modules[-1:]) if self.shape.has_ends else ((), modules, ())

    def stage_output_bytes(self, layout: Layout) -> float:
        return self.memory_inputs(layout).recv_buffer_bytes

    @cached_by(memory_inputs_key)
    def memory_inputs(self, layout: Layout) -> MemoryInputs:
        first, blocks, last = self._split_ends(layout.micro_batch, layout.tensor)
        itemsize = self.kernel_profile.itemsize
        typical = max if layout.pipeline > 1 else mean  # some stage has only the largest blocks
        saved_all = typical(module.saved_bytes for module in blocks)
        inputs = typical(module.output_bytes for module in blocks)
        product_sizes = [[itemsize * p.groups * p.rows * p.columns for p in block.products] for block in blocks]
        matmul_outputs = typical(map(sum, product_sizes))
        attention = itemsize * typical(sum(a.heads * a.queries * a.v_head_dim for a in b.attention) for b in blocks)
        if attention and self.kernel_profile.compiled:  # blocks of a transformer recompute what is between them
            saved_all = min(saved_all, matmul_outputs + attention + inputs)
        kept_fraction, is_selective = layout.kept_fraction, layout.recompute == "selective"
        saved = min(saved_all, matmul_outputs + inputs) if is_selective else kept_fraction * saved_all
        hidden_bytes = max(module.output_bytes for module in (*first, *blocks))
        first_weights, logits = sum(module.parameters for module in first), sum(module.saved_bytes for module in last)
        return MemoryInputs(
            typical(module.parameters for module in blocks), 0.0, first_weights,
            last_weights=sum(module.parameters for module in last),
            saved_per_block=saved + (1 - kept_fraction) * inputs,
            recomputed_per_block=0.0 if layout.recompute == "none" else max(module.saved_bytes for module in blocks),
            pending_per_block=saved_all + matmul_outputs + attention,
            logits=logits, saved_logits=logits, hidden_bytes=hidden_bytes,
            recv_buffer_bytes=hidden_bytes, kept_fraction=kept_fraction, head_weights=first_weights)  # fmt: skip

    def data(self, layout: Layout, dense_weights: float, experts: float, last_pass: float) -> float:
        seconds, tables = super().data(layout, dense_weights, experts, last_pass), self.shape.tables
        if not tables:
            return seconds
        samples = self.samples / layout.data
        pooled_bytes = samples * sum(4.0 * table.width for table in tables)
        row_bytes = sum(4.0 * table.width * table.lookups_per_sample for table in tables)  # read for one sample
        one_way = pooled_bytes / HOST_LINK_BANDWIDTH + self.machine.all_to_all(pooled_bytes, layout.data, 1)
        # Rows are read for the forward, and read and written for the update.
        return seconds + 2 * one_way + 3 * samples * row_bytes / HOST_ROW_BANDWIDTH
