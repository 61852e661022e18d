"""Step time and memory of one layout on one cluster, from closed forms: microseconds, so that a search can ask often.

A pipeline takes the slowest rank's time for every micro-batch, and beside it the lead-in and lead-out of its schedule
by the closed form for even stages (`shardwise.planner.closed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

from shardwise.layout import Layout, keep_share
from shardwise.planner.closed import closed_form
from shardwise.planner.cost import Cut, Machine, Seconds, Setting, block, embedding, head
from shardwise.planner.memory import Habit, Held, Memory, expert_shards, hold, hold_of, shards
from shardwise.planner.shape import Shape

BUCKET = 1e8  # bytes of gradients that travel at once
AXES = ("tensor", "context", "expert")


@dataclass(frozen=True)
class Work:
    """What is computed in a step, however it is cut."""

    shape: Shape
    setting: Setting
    samples: int
    habit: Habit = Habit()
    sequence_parallel: bool = True


@dataclass(frozen=True)
class Timing:
    """Seconds of a step, and of its parts that come once."""

    seconds: float
    bubble: float
    """Share of the pipeline's time in which the slowest rank waits for the others."""
    data: float
    """Exposed traffic of the data axes."""
    update: float
    hop: float
    """Exposed transfers between stages, of one micro-batch."""


@dataclass(frozen=True)
class Prediction:
    """What a step takes, and holds on each pipeline rank."""

    layout: Layout
    timing: Timing
    memory: tuple[Memory, ...]
    exposed: dict[str, float]
    """Seconds of traffic that nothing hides, by axis."""

    @property
    def seconds(self) -> float:
        return self.timing.seconds

    @property
    def bubble(self) -> float:
        return self.timing.bubble

    @property
    def peak(self) -> float:
        return max(memory.total for memory in self.memory)


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch through one block, traffic included."""

    forward: float
    backward: float
    weight: float
    """The part of `backward` that makes weight gradients."""
    exposed: dict[str, float]


class Estimator:
    """Predicts layouts of one job on one machine. What many layouts share is computed once."""

    def __init__(self, machine: Machine, work: Work):
        self.machine, self.work = machine, work
        self.efficiency = machine.efficiency
        self._pieces: dict[Cut, tuple[Seconds, Seconds, Seconds]] = {}
        self._held: dict[tuple[Any, ...], Held] = {}
        self._passes: dict[tuple[Any, ...], Pass] = {}

    def predict(self, layout: Layout, counts: list[int] | None = None) -> Prediction:
        """`counts`: blocks per pipeline rank, if not as even as can be."""
        counts = counts or self.counts(layout)
        held, micro_batches = self.held(layout), self.micro_batches(layout)
        timing = self.time(layout, counts)
        memory = tuple(hold(held, layout, rank, count, micro_batches) for rank, count in enumerate(counts))
        return Prediction(layout, timing, memory, self.exposed(layout, counts, timing))

    def peak(self, layout: Layout, counts: list[int]) -> float:
        """Bytes of the fullest rank: one of the ends, the first between them, or the first with the most blocks."""
        held, micro_batches = self.held(layout), self.micro_batches(layout)
        ranks = {0, min(1, len(counts) - 1), counts.index(max(counts)), len(counts) - 1}
        return max(hold(held, layout, rank, counts[rank], micro_batches).total for rank in ranks)

    def time(self, layout: Layout, counts: list[int]) -> Timing:
        one = self.passes(layout)
        _, first, last = self.pieces(self.cut(layout))
        micro_batches = self.micro_batches(layout)
        hop = self.hop(layout)
        each = one.forward + one.backward
        ends = first.both + last.both
        total = sum(counts) * each + ends + hop * len(counts)
        if len(counts) == 1:
            slowest = total
        else:
            slowest = hop + max(counts[0] * each + first.both, counts[-1] * each + last.both, max(counts) * each)
        fill = self.fill(layout, total / len(counts), one.weight / each) if len(counts) > 1 else 0.0
        pipeline = micro_batches * slowest + fill

        weights = self.held(layout).weights
        fullest = max((0, len(counts) - 1), key=lambda rank: weights.rank(rank, counts[rank], layout))
        own, experts = weights.rank(fullest, counts[fullest], layout), counts[fullest] * weights.experts
        data = self.data(layout, own, experts, counts[fullest] * each)
        updated = own / shards(layout) + experts / expert_shards(layout)
        update = self.machine.stream(self.work.habit.update * updated)
        domains = max(1.0, layout.world / self.machine.cluster.domain)
        jitter = 1.0 + self.efficiency.jitter * log2(domains)
        seconds = (pipeline + data + update + self.efficiency.fixed) * jitter
        return Timing(seconds, fill / pipeline, data, update, hop)

    def fill(self, layout: Layout, busy: float, weight: float) -> float:
        """Lead-in and lead-out of a pipeline whose ranks are busy for so long with each micro-batch, by the closed form
        of its schedule; `weight` is the share of weight gradients in that."""
        p, v, count = layout.pipeline, layout.stages_per_rank, self.micro_batches(layout)
        stage = busy / v
        third = stage * (1.0 - weight) / 2  # forward and input half are about alike
        return closed_form(layout.schedule, p, v, count, third, third, stage * weight) - count * busy

    def exposed(self, layout: Layout, counts: list[int], timing: Timing) -> dict[str, float]:
        """Seconds of a step in which the busiest rank waits for traffic, by axis."""
        one, micro_batches = self.passes(layout), self.micro_batches(layout)
        exposed = {axis: micro_batches * max(counts) * seconds for axis, seconds in one.exposed.items()}
        exposed["shard"] = exposed.get("shard", 0.0) + timing.data
        exposed["pipeline"] = micro_batches * timing.hop
        return {axis: seconds for axis, seconds in exposed.items() if seconds}

    def counts(self, layout: Layout) -> list[int]:
        """Blocks per pipeline rank: as the user fixed them, or as even as can be."""
        if not layout.stages:
            return even(self.work.shape.layers, layout.pipeline)
        return [sum(layout.stages[stage] for stage in layout.stages_of(rank)) for rank in range(layout.pipeline)]

    def micro_batches(self, layout: Layout) -> int:
        return max(1, round(self.work.samples / layout.data / layout.micro_batch))

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

    def held(self, layout: Layout) -> Held:
        cut = self.cut(layout)
        key = cut, layout.recompute, layout.pipeline == 1
        if key not in self._held:
            work = self.work
            self._held[key] = hold_of(
                work.shape, work.setting, work.habit, layout, work.sequence_parallel, cut.expert_tensor
            )
        return self._held[key]

    def passes(self, layout: Layout) -> Pass:
        """Forward and backward of a block, with what is computed again and gathered for it."""
        cut = self.cut(layout)
        key = cut, layout.recompute, layout.zero, layout.shard
        if key not in self._passes:
            self._passes[key] = self._pass(layout, self.pieces(cut)[0])
        return self._passes[key]

    def _pass(self, layout: Layout, inner: Seconds) -> Pass:
        share = keep_share(layout.recompute)
        again = 1.0 - share if share is not None else float(layout.recompute == "full")
        forward = self._felt(inner.forward + inner.traffic, inner.host)
        backward = self._felt(inner.backward + inner.traffic, 2 * inner.host) + again * forward
        if layout.recompute == "selective":
            backward += self.machine.move(inner.moved) if self.work.habit.keeps_products else inner.core
        if self.work.habit.cast:
            weights = self.held(layout).weights
            backward += self.machine.stream(self.work.habit.cast * (weights.block + weights.experts))
        exposed = {axis: (2.0 + again) * getattr(inner, axis) for axis in AXES}
        if layout.zero >= 2 and layout.shard > 1:
            gather = self._gather(layout)
            ahead = self._exposed(gather, forward) if layout.zero == 3 else 0.0
            behind = self._exposed((2 if layout.zero == 3 else 1) * gather, backward)
            forward, backward = forward + ahead, backward + behind
            exposed["shard"] = ahead + behind
        return Pass(forward, backward, inner.weight, exposed)

    def _felt(self, device: float, host: float) -> float:
        """Seconds of a pass: the device's or the host's, whichever is longer, and more where both are about alike, as
        each waits for the other in parts of it."""
        power = self.efficiency.apart
        return (device**power + host**power) ** (1.0 / power)

    def _gather(self, layout: Layout) -> float:
        """Seconds to gather the weights of a block over the shard axis, or to sum its gradients over it."""
        stride, size, weights = layout.tensor * layout.context, self.work.setting.bytes, self.held(layout).weights
        gather = self.machine.gather(size * weights.block, layout.shard, stride)
        return gather + self.machine.gather(size * weights.experts, max(1, layout.shard // layout.expert), stride)

    def hop(self, layout: Layout) -> float:
        """Exposed transfers between stages, of one micro-batch on one rank."""
        if layout.pipeline == 1:
            return 0.0
        work = self.work
        tokens = layout.micro_batch * work.shape.sequence / layout.context
        size = work.setting.bytes * tokens * work.shape.width / layout.tensor
        stride = layout.world // layout.pipeline
        transfer = self.machine.transfer(size, min(stride, self.machine.cluster.domain))
        # Between stages of one rank's own there is other work to do while a transfer is under way.
        hidden = self.efficiency.hidden_transfer if layout.stages_per_rank == 1 else self.efficiency.hidden_interleaved
        return 2 * layout.stages_per_rank * transfer * (1.0 - hidden)

    def data(self, layout: Layout, own: float, experts: float, last_pass: float) -> float:
        """Exposed traffic of the data axes once a step: gradients to their sums, updated weights back."""
        group = layout.replicate if layout.zero == 3 else layout.data
        if group == 1:
            return 0.0
        stride = layout.tensor * layout.context
        gradient, size = min(4.0, self.work.habit.gradient), self.work.setting.bytes
        if layout.zero == 3:
            own, experts = own / layout.shard, experts / layout.shard
        alike = max(1, group * layout.context // layout.expert)
        there = self.machine.gather(gradient * own, group, stride, BUCKET)
        there += self.machine.gather(gradient * experts, alike, stride * layout.expert, BUCKET)
        back = there * (size / gradient if layout.shard > 1 and layout.zero < 3 else 1.0)
        if layout.zero == 2 and layout.shard > 1:
            there = 0.0  # after each micro-batch, counted there
        return self._exposed(there + back, last_pass)

    def _exposed(self, traffic: float, beside: float) -> float:
        """What is left of traffic that can hide behind `beside` seconds of work."""
        if not self.work.setting.overlapped:
            return traffic
        hidden = min(traffic, self.efficiency.hidden_data * beside)
        return traffic - hidden + self.efficiency.contention * hidden


def even(layers: int, pipeline: int) -> list[int]:
    """Blocks per pipeline rank, as even as can be, the fewer ones at the ends, where embedding and head are."""
    base, more = divmod(layers, pipeline)
    first = (pipeline - more) // 2
    return [base + (first <= rank < first + more) for rank in range(pipeline)]
