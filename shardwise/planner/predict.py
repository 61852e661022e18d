"""Step time and memory of one layout on one cluster, from closed forms: microseconds, so that a search can ask often.

The pipeline's closed form is that of full backwards in order: every rank is busy with its micro-batches, and the rest
is the time that the first and the last of them need to get through. `shardwise.planner.simulate` runs the very
schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from shardwise.layout import Layout, keep_share
from shardwise.planner.cost import Cut, Machine, Seconds, Setting, block, embedding, head
from shardwise.planner.memory import Habit, Held, Memory, Weights, hold, weights_of
from shardwise.planner.shape import Shape

AXES = ("tensor", "context", "expert")
OURS = Habit()


@dataclass(frozen=True)
class Work:
    """What is computed in a step, however it is cut."""

    shape: Shape
    setting: Setting
    samples: int
    habit: Habit = OURS
    sequence_parallel: bool = True


@dataclass(frozen=True)
class Prediction:
    """What a step takes, and holds on each pipeline rank."""

    layout: Layout
    seconds: float
    memory: tuple[Memory, ...]
    bubble: float
    """Share of the step in which the slowest rank waits for the others of its pipeline."""
    exposed: dict[str, float]
    """Seconds of traffic that nothing hides, by axis."""
    optimizer: float
    """Seconds of the update."""

    @property
    def peak(self) -> float:
        return max(memory.total for memory in self.memory)


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch through one block, traffic included."""

    forward: float
    backward: float
    exposed: dict[str, float]


class Estimator:
    """Predicts layouts of one job on one machine."""

    def __init__(self, machine: Machine, work: Work):
        self.machine, self.work = machine, work
        self.efficiency = machine.efficiency
        self._pieces: dict[Cut, tuple[Seconds, Seconds, Seconds]] = {}

    def predict(self, layout: Layout, counts: list[int] | None = None) -> Prediction:
        """`counts`: blocks per pipeline rank, if not as even as can be."""
        work = self.work
        counts = counts or list(layout.stages) or even(work.shape.layers, layout.pipeline)
        micro_batches = max(1, round(work.samples / layout.data / layout.micro_batch))
        cut = self.cut(layout)
        inner, first, last = self.pieces(cut)
        weights = weights_of(work.shape, layout, cut.expert_tensor)
        one = self.passes(layout, inner, weights)

        busy = [count * (one.forward + one.backward) for count in counts]
        busy[0] += first.forward + first.backward + 2 * first.traffic
        busy[-1] += last.forward + last.backward + 2 * last.traffic
        hop = self.hop(layout)
        slowest = max(busy) + hop
        fill = (sum(busy) + hop * len(busy) - slowest) / layout.stages_per_rank
        if layout.split_backward:
            fill *= SPLIT_FILL
        pipeline = micro_batches * slowest + fill

        own = [weights.rank(rank, count, layout) for rank, count in enumerate(counts)]
        fullest = max(range(len(own)), key=lambda rank: own[rank])
        data = self.data(layout, own[fullest], counts[fullest] * weights.experts, busy[fullest])
        updated = own[fullest] / shards(layout) + counts[fullest] * weights.experts / expert_shards(layout)
        update = self.machine.move(30.0 * updated)  # four numbers read, three written, and the copy of 16 bits
        domains = max(1.0, layout.world / self.machine.cluster.domain)
        jitter = 1.0 + self.efficiency.jitter * log2(domains)
        seconds = (pipeline + data + update + self.efficiency.fixed) * jitter

        held = Held(work.shape, work.setting, layout, work.habit, work.sequence_parallel, weights, micro_batches)
        memory = tuple(hold(held, rank, count) for rank, count in enumerate(counts))
        most = micro_batches * max(counts)
        exposed = {axis: most * value for axis, value in one.exposed.items()}
        exposed["shard"] = exposed.get("shard", 0.0) + data
        exposed["pipeline"] = micro_batches * hop
        return Prediction(layout, seconds, memory, fill / pipeline, exposed, update)

    def cut(self, layout: Layout) -> Cut:
        # Experts wider than the model are cut by the tensor axis too; narrow ones would make small products.
        shape = self.work.shape
        expert_tensor = layout.tensor if shape.expert_ffn > shape.width else 1
        degrees = layout.tensor, layout.context, layout.expert, layout.micro_batch
        return Cut(*degrees, expert_tensor, self.work.sequence_parallel)

    def pieces(self, cut: Cut) -> tuple[Seconds, Seconds, Seconds]:
        """One block (dense and sparse ones mixed as the model does), the embedding, the head."""
        if cut not in self._pieces:
            machine, shape, setting = self.machine, self.work.shape, self.work.setting
            share = shape.sparse_layers / shape.layers
            dense = block(machine, shape, setting, cut, False) if share < 1 else Seconds()
            sparse = block(machine, shape, setting, cut, True) if share else Seconds()
            inner = dense.mixed(sparse, share)
            self._pieces[cut] = inner, embedding(machine, shape, setting, cut), head(machine, shape, setting, cut)
        return self._pieces[cut]

    def passes(self, layout: Layout, inner: Seconds, weights: Weights) -> Pass:
        """Forward and backward of a block, with what is computed again and gathered for it."""
        share = keep_share(layout.recompute)
        again = 1.0 - share if share is not None else float(layout.recompute == "full")
        forward = inner.forward + inner.traffic
        backward = inner.backward + inner.traffic + again * forward
        if layout.recompute == "selective":
            backward += inner.core
        exposed = {axis: (2.0 + again) * getattr(inner, axis) for axis in AXES}
        if layout.zero == 3 and layout.shard > 1:
            stride = layout.tensor * layout.context
            size = self.work.setting.bytes
            gather = self.machine.gather(size * weights.block, layout.shard, stride)
            gather += self.machine.gather(size * weights.experts, max(1, layout.shard // layout.expert), stride)
            ahead, behind = self._exposed(gather, forward), self._exposed(2 * gather, backward)
            forward, backward = forward + ahead, backward + behind
            exposed["shard"] = ahead + behind
        return Pass(forward, backward, exposed)

    def hop(self, layout: Layout) -> float:
        """Exposed transfers between stages, of one micro-batch on one rank."""
        if layout.pipeline == 1:
            return 0.0
        work = self.work
        tokens = layout.micro_batch * work.shape.sequence / layout.context
        size = work.setting.bytes * tokens * work.shape.width / layout.tensor
        stride = layout.world // layout.pipeline
        transfer = self.machine.transfer(size, min(stride, self.machine.cluster.domain))
        return 2 * layout.stages_per_rank * transfer * (1.0 - self.efficiency.hidden_transfer)

    def data(self, layout: Layout, own: float, experts: float, last_pass: float) -> float:
        """Exposed traffic of the data axes once a step: gradients to their sums, updated weights back."""
        group = layout.replicate if layout.zero == 3 else layout.data
        if group == 1:
            return 0.0
        stride = layout.tensor * layout.context
        gradient, size = self.work.habit.gradient, self.work.setting.bytes
        if layout.zero == 3:
            own, experts = own / layout.shard, experts / layout.shard
        alike = max(1, group * layout.context // layout.expert)
        there = self.machine.gather(gradient * own, group, stride)
        there += self.machine.gather(gradient * experts, alike, stride * layout.expert)
        back = there * (size / gradient if layout.shard > 1 and layout.zero < 3 else 1.0)
        return self._exposed(there + back, last_pass)

    def _exposed(self, traffic: float, beside: float) -> float:
        """What is left of traffic that can hide behind `beside` seconds of work."""
        if not self.work.setting.overlapped:
            return traffic
        hidden = min(traffic, self.efficiency.hidden_data * beside)
        return traffic - hidden + self.efficiency.contention * hidden


SPLIT_FILL = 0.4  # of the lead-in and lead-out, where weight gradients fill the gaps


def shards(layout: Layout) -> int:
    """Ranks that share the optimizer state of a weight."""
    return layout.shard * (layout.context if layout.shard > 1 else 1)


def expert_shards(layout: Layout) -> int:
    return max(1, shards(layout) // layout.expert)


def even(layers: int, pipeline: int) -> list[int]:
    """Blocks per pipeline rank, as even as can be, the fewer ones at the ends, where embedding and head are."""
    base, more = divmod(layers, pipeline)
    first = (pipeline - more) // 2
    return [base + (first <= rank < first + more) for rank in range(pipeline)]
