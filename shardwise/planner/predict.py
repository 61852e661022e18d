"""Step time and memory of one layout on one cluster, from closed forms: microseconds, so that a search can ask often.

A pipeline takes what the closed form of its schedule says (`shardwise.planner.closed`): exact for even stages, never
too long for others. Layouts of our own engine can be simulated too: `predict` does, a search only for its finalists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import Any, NamedTuple

from shardwise.layout import MADE, V_SHAPED, Layout, keep_share
from shardwise.planner.closed import at_least, at_most
from shardwise.planner.cost import Cut, Machine, Seconds, Setting, block, embedding, head
from shardwise.planner.made import make_order
from shardwise.planner.memory import Habit, Held, Memory, Part, expert_shards, hold, hold_of, joined, shards
from shardwise.planner.own import Own
from shardwise.planner.shape import Shape
from shardwise.planner.simulate import Costs, step_seconds
from shardwise.planner.synthesize import Synthesis
from shardwise.planner.traffic import by_axis

BUCKET = 1e8  # bytes of gradients that travel at once
BUCKET_RANKS = 40  # data ranks beyond which buckets grow with their number in Megatron-Core
# Bytes moved to update a weight of one process: itself, two averages, the gradient twice, the rounded copy.
UPDATED = 34.0
ADDED = 8.0  # and to add the gradient of one of several micro-batches
AXES = ("tensor", "context", "expert")


@dataclass(frozen=True)
class Work:
    """What is computed in a step, however it is cut."""

    shape: Shape
    setting: Setting
    samples: int
    habit: Habit = Habit()
    sequence_parallel: bool = True
    own: Own | None = None
    """Our engine's view of the model, if it is to run it. Others cut stages as even as can be."""


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
    traffic: tuple[dict[str, int], ...] = ()
    """Bytes by axis that each pipeline rank sends and receives in a step; empty where it is not for our own engine."""

    @property
    def seconds(self) -> float:
        return self.timing.seconds

    @property
    def bubble(self) -> float:
        return self.timing.bubble

    @property
    def peak(self) -> float:
        return max(memory.total for memory in self.memory)


class Stages(NamedTuple):
    """How a pipeline is cut."""

    stages: tuple[Part, ...]
    ranks: tuple[Part, ...]
    kinds: tuple[int, ...]
    """Of each kind of rank, the first and the last; and the second of all."""
    parts: tuple[Part, ...]
    """The kinds of ranks."""


class Load(NamedTuple):
    """Seconds of forward and backward of one micro-batch, by piece of the chain."""

    block: float
    first: float
    last: float

    def busiest(self, cut: Stages) -> float:
        """Of the slowest rank."""
        block, first, last = self
        return max([n * block + (first if head else 0.0) + (last if tail else 0.0) for n, head, tail in cut.parts])


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
        self._cuts: dict[tuple[int, ...], Cut] = {}
        self._pieces: dict[Cut, tuple[Seconds, Seconds, Seconds]] = {}
        self._held: dict[tuple[Any, ...], Held] = {}
        self._passes: dict[tuple[Any, ...], Pass] = {}
        self._stages: dict[tuple[Any, ...], Stages] = {}
        self._rest: dict[tuple[Any, ...], tuple[float, float]] = {}
        self._made: dict[Layout, Synthesis] = {}

    def predict(self, layout: Layout) -> Prediction:
        """Simulated, where it is for our own engine."""
        timing = self.time(layout, simulated=self.work.own is not None)
        memory = tuple(self.memory(layout, rank) for rank in range(layout.pipeline))
        return Prediction(layout, timing, memory, self.exposed(layout, timing), tuple(self.traffic(layout)))

    def traffic(self, layout: Layout) -> Iterator[dict[str, int]]:
        own, micro_batches = self.work.own, self.micro_batches(layout)
        if own is not None and layout.context == layout.expert == 1:
            program = self.made(layout).simulation.program if self.is_made(layout) else None
            yield from (by_axis(own, layout, rank, micro_batches, program) for rank in range(layout.pipeline))

    def memory(self, layout: Layout, rank: int) -> Memory:
        """Of a pipeline rank."""
        own, micro_batches = self.work.own, self.micro_batches(layout)
        if own is not None and layout.context == layout.expert == 1:
            points = self.made(layout).simulation.program.flights(rank) if self.is_made(layout) else None
            return own.memory(layout, rank, micro_batches, self.work.habit, points)
        return hold(self.held(layout), layout, rank, self.stages(layout).ranks[rank], micro_batches)

    @staticmethod
    def is_made(layout: Layout) -> bool:
        """Whether its order has no name."""
        return layout.pipeline > 1 and layout.schedule in MADE

    def made(self, layout: Layout) -> Synthesis:
        """The order of `schedule=auto`."""
        own, count = self.work.own, self.micro_batches(layout)
        assert own is not None
        if layout not in self._made:
            self._made[layout] = make_order(
                layout, self.costs(layout), count,
                lambda rank, points: own.memory(layout, rank, count, self.work.habit, points).total,
                self.machine.device.memory,
            )  # fmt: skip
        return self._made[layout]

    def peak(self, layout: Layout) -> float:
        """Bytes of the fullest rank."""
        return max([self.memory(layout, rank).total for rank in self.stages(layout).kinds])

    def fits(self, layout: Layout) -> bool:
        limit = self.machine.device.memory
        return all(self.memory(layout, rank).total <= limit for rank in self.stages(layout).kinds)

    def time(self, layout: Layout, simulated: bool = False) -> Timing:
        micro_batches, hop = self.micro_batches(layout), self.hop(layout)
        busy = micro_batches * self.busiest(layout)
        pipeline = busy
        if layout.pipeline > 1:
            shape = layout.schedule, layout.pipeline, layout.stages_per_rank, micro_batches
            if self.is_made(layout):
                pipeline = self.made(layout).seconds
            else:
                pipeline = (step_seconds if simulated else at_least)(*shape, self.costs(layout))
        data, update = self.rest(layout)
        return Timing(self.step(layout, pipeline), 1.0 - busy / pipeline, data, update, hop)

    def ceiling(self, layout: Layout) -> float:
        """Seconds that a layout takes at most."""
        if layout.pipeline == 1:
            return self.time(layout).seconds
        shape = layout.schedule, layout.pipeline, layout.stages_per_rank, self.micro_batches(layout)
        return self.step(layout, at_most(*shape, self.costs(layout)))

    def step(self, layout: Layout, pipeline: float) -> float:
        """Seconds of a step whose micro-batches take so long."""
        if self.efficiency.shared > 1.0 and layout.pipeline > 1:  # who waits leaves its processor to the others
            pipeline = max(pipeline / self.efficiency.shared, self._evenly(layout))
        return (pipeline + sum(self.rest(layout)) + self.efficiency.fixed) * self.jitter(layout.world)

    def _evenly(self, layout: Layout) -> float:
        """Seconds that the ranks of a pipeline work on all micro-batches, in the mean."""
        one, (_, first, last) = self.passes(layout), self.pieces(self.cut(layout))
        work = self.work.shape.layers * (one.forward + one.backward) + first.both + last.both
        return self.micro_batches(layout) * (work / layout.pipeline + self.hop(layout))

    def jitter(self, world: int) -> float:
        return 1.0 + self.efficiency.jitter * log2(max(1.0, world / self.machine.cluster.domain))

    def busiest(self, layout: Layout) -> float:
        """Seconds that the slowest rank works on one micro-batch."""
        return self.hop(layout) + self.load(layout).busiest(self.stages(layout))

    def load(self, layout: Layout) -> Load:
        one = self.passes(layout)
        _, first, last = self.pieces(self.cut(layout))
        return Load(one.forward + one.backward, first.both, last.both)

    def costs(self, layout: Layout) -> Costs:
        """Seconds by stage. What is felt of a transfer is work of both sides."""
        one, hop = self.passes(layout), self.hop(layout) / (2 * layout.stages_per_rank)
        _, first, last = self.pieces(self.cut(layout))
        known: dict[Part, tuple[float, float, float]] = {}
        parts = self.stages(layout).stages
        for part in set(parts):
            ends = [end for end, here in ((first, part.first), (last, part.last)) if here]
            forward = part.blocks * one.forward + sum([end.forward + end.traffic for end in ends])
            backward = part.blocks * one.backward + sum([end.backward + end.traffic for end in ends])
            weight = part.blocks * one.weight + sum([end.weight for end in ends])
            known[part] = forward + hop, backward - weight + hop, weight
        forward_, input_, weight_ = zip(*[known[part] for part in parts])
        costs = Costs(forward_, input_, weight_, (0.0,) * (len(parts) - 1))
        return costs.as_executed() if layout.split_backward else costs

    def rest(self, layout: Layout) -> tuple[float, float]:
        """Seconds that come once a step: exposed traffic of the data axes, and the update, of the fullest rank."""
        key = (
            self.cut(layout), layout.recompute, layout.zero, layout.shard, layout.replicate, layout.pipeline,
            layout.stage_count, layout.schedule in V_SHAPED, layout.stages, layout.world == 1,
            layout.micro_batch,
        )  # fmt: skip
        if key not in self._rest:
            one, weights, ranks = self.passes(layout), self.held(layout).weights, self.stages(layout).ranks
            full = max((ranks[0], ranks[-1]), key=weights.part)
            own, experts = weights.part(full), full.blocks * weights.experts
            data = self.data(layout, own, experts, full.blocks * (one.forward + one.backward))
            updated = own / shards(layout) + experts / expert_shards(layout)
            update = self.work.habit.update
            if self.alone(layout):
                update = UPDATED + (ADDED * self.micro_batches(layout) if self.micro_batches(layout) > 1 else 0.0)
            self._rest[key] = data, self.machine.stream(update * updated)
        return self._rest[key]

    def exposed(self, layout: Layout, timing: Timing) -> dict[str, float]:
        """Seconds of a step in which the busiest rank waits for traffic, by axis."""
        one, micro_batches = self.passes(layout), self.micro_batches(layout)
        exposed = {axis: micro_batches * max(self.counts(layout)) * seconds for axis, seconds in one.exposed.items()}
        exposed["shard"] = exposed.get("shard", 0.0) + timing.data
        exposed["pipeline"] = micro_batches * timing.hop
        return {axis: seconds for axis, seconds in exposed.items() if seconds}

    def counts(self, layout: Layout) -> list[int]:
        """Blocks per pipeline rank."""
        return [part.blocks for part in self.stages(layout).ranks]

    def stages(self, layout: Layout) -> Stages:
        """As our engine cuts them; for others as the user fixed them, or as even as can be."""
        p, v = layout.pipeline, layout.stages_per_rank
        key = p, v, layout.schedule in V_SHAPED, layout.stages
        if key not in self._stages:
            if self.work.own is not None:
                stages = self.work.own.stages(layout)
            else:
                blocks = list(layout.stages) or self._even(layout)
                stages = tuple(Part(n, stage == 0, stage == p * v - 1) for stage, n in enumerate(blocks))
            ranks = tuple(joined([stages[stage] for stage in layout.stages_of(rank)]) for rank in range(p))
            kinds = {min(1, p - 1)}
            for part in set(ranks):
                kinds |= {ranks.index(part), p - 1 - ranks[::-1].index(part)}
            self._stages[key] = Stages(stages, ranks, tuple(sorted(kinds)), tuple(set(ranks)))
        return self._stages[key]

    def _even(self, layout: Layout) -> list[int]:
        """Blocks by stage, as even as can be by rank."""
        blocks = [0] * layout.stage_count
        for rank, count in enumerate(even(self.work.shape.layers, layout.pipeline)):
            for stage, own in zip(layout.stages_of(rank), even(count, layout.stages_per_rank)):
                blocks[stage] = own
        return blocks

    def micro_batches(self, layout: Layout) -> int:
        return max(1, round(self.work.samples / layout.data / layout.micro_batch))

    def cut(self, layout: Layout) -> Cut:
        # Experts wider than the model are cut by the tensor axis too; narrow ones would make small products.
        degrees = layout.tensor, layout.context, layout.expert, layout.micro_batch
        if degrees not in self._cuts:
            shape = self.work.shape
            expert_tensor = layout.tensor if shape.expert_ffn > shape.width else 1
            self._cuts[degrees] = Cut(*degrees, expert_tensor, self.work.sequence_parallel)
        return self._cuts[degrees]

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
        key = cut, layout.recompute, layout.zero, layout.shard, layout.world == 1
        if key not in self._passes:
            self._passes[key] = self._pass(layout, self.pieces(cut)[0])
        return self._passes[key]

    def _pass(self, layout: Layout, inner: Seconds) -> Pass:
        share = keep_share(layout.recompute)
        again = 1.0 - share if share is not None else float(layout.recompute == "full")
        beside = inner.traffic
        moved = self.efficiency.added if self.work.habit.cast is None else self.work.habit.cast
        if moved and not self.alone(layout):
            weights = self.held(layout).weights
            beside += self.machine.stream(moved * (weights.block + weights.experts))
        forward = self.machine.felt(inner.forward + inner.traffic, inner.host)
        backward = self.machine.felt(inner.backward + beside, 2 * inner.host) + again * forward
        if layout.recompute == "selective":
            backward += self.machine.move(inner.moved) if self.work.habit.keeps_products else inner.core
        exposed = {axis: (2.0 + again) * getattr(inner, axis) for axis in AXES}
        if layout.zero >= 2 and layout.shard > 1:
            gather = self._gather(layout)
            ahead = self._exposed(gather, forward) if layout.zero == 3 else 0.0
            behind = self._exposed((2 if layout.zero == 3 else 1) * gather, backward)
            forward, backward = forward + ahead, backward + behind
            exposed["shard"] = ahead + behind
        return Pass(forward, backward, inner.weight, exposed)

    def alone(self, layout: Layout) -> bool:
        return self.work.own is not None and self.work.own.alone(layout)

    def _gather(self, layout: Layout) -> float:
        """Seconds to gather the weights of a block over the shard axis, or to sum its gradients over it."""
        stride, size, weights = layout.tensor * layout.context, self.work.setting.bytes, self.held(layout).weights
        # Software that overlaps gathers a block at once; before it, each weight by itself.
        piece = size * weights.block / (1 if self.work.setting.overlapped else 8)
        gather = self.machine.gather(size * weights.block, layout.shard, stride, piece)
        return gather + self.machine.gather(size * weights.experts, max(1, layout.shard // layout.expert), stride)

    def hop(self, layout: Layout) -> float:
        """Exposed transfers between stages, of one micro-batch on one rank."""
        if layout.pipeline == 1:
            return 0.0
        stride = layout.world // layout.pipeline
        transfer = self.machine.transfer(self.passed(layout), min(stride, self.machine.cluster.domain))
        # Between stages of one rank's own there is other work to do while a transfer is under way.
        hidden = self.efficiency.hidden_transfer if layout.stages_per_rank == 1 else self.efficiency.hidden_interleaved
        return 2 * layout.stages_per_rank * transfer * (1.0 - hidden)

    def passed(self, layout: Layout) -> float:
        """Bytes of a micro-batch from stage to stage."""
        shape = self.work.shape
        tokens = layout.micro_batch * shape.sequence / layout.context
        return self.work.setting.bytes * tokens * shape.width / layout.tensor

    def data(self, layout: Layout, own: float, experts: float, last_pass: float) -> float:
        """Exposed traffic of the data axes once a step: gradients to their sums, updated weights back."""
        stride = layout.tensor * layout.context
        alike = max(1, layout.data * layout.context // layout.expert)  # ranks with the same experts
        shard = min(alike, max(1, layout.shard * layout.context // layout.expert)) if layout.shard > 1 else 1
        there, back = self._sums(layout, own, layout.shard, layout.replicate, stride)
        more, again = self._sums(layout, experts, shard, alike // shard, stride * layout.expert)
        if self.work.setting.eager:  # nothing is computed before all weights are back
            return self._exposed(there + more, last_pass) + back + again
        return self._exposed(there + more + back + again, last_pass)

    def _sums(self, layout: Layout, numbers: float, shard: int, replicate: int, stride: int) -> tuple[float, float]:
        """Seconds to sum gradients over shard and replicate ranks, and to gather the updated weights; but for what
        ZeRO 2 and 3 have done after each micro-batch."""
        gradient, size = min(4.0, self.work.habit.gradient), self.work.setting.bytes
        among, across = self.machine.gather, self.machine.reduce
        grows = self.work.own is None and not self.work.setting.eager
        bucket = BUCKET * max(1.0, layout.data / BUCKET_RANKS) if grows else BUCKET
        there = among(gradient * numbers, shard, stride, bucket) if layout.zero == 1 else 0.0
        back = among(size * numbers, shard, stride, bucket) if layout.zero < 3 else 0.0
        return there + across(gradient * numbers / shard, replicate, stride * shard, bucket), back

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
