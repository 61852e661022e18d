"""List scheduling of a pipeline: starts each action as soon as its inputs have arrived and its rank is free.

One pass in order of time. A free rank runs a forward while it is below its in-flight limit and has memory, else a
backward, else a backward-weight if that fits before the next input arrives. `synthesize` tries many `PriorityRules`.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from shardwise.schedules.simulate import Action, PipelineProgram, StageCosts


@dataclass(frozen=True)
class SchedulingProblem:
    """Stage costs, ranks, micro-batches and memory limits of a pipeline to schedule."""

    costs: StageCosts
    ranks: int
    micro_batches: int
    activation_sizes: tuple[float, ...] = ()  # memory of a micro-batch in flight, by stage; default 1 for every stage
    memory_limits: tuple[float, ...] = ()  # memory limit by rank; default unlimited
    # Fraction of the memory held after the backward-input (see `PipelineProgram.peak_memory`); may exceed 1.
    retained_fraction: float = 1.0
    # Whether a rank's second stage is as far from the last stage as its first is from the first one.
    is_v_shaped: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation_sizes", tuple(self.activation_sizes) or (1.0,) * self.costs.stages)
        object.__setattr__(self, "memory_limits", tuple(self.memory_limits) or (inf,) * self.ranks)

    @property
    def virtual(self) -> int:
        return self.costs.stages // self.ranks

    @property
    def stage_to_rank(self) -> list[int]:
        first_to_last = list(range(self.ranks))
        return first_to_last + first_to_last[::-1] if self.is_v_shaped else first_to_last * self.virtual

    def fits(self, program: PipelineProgram) -> bool:
        peaks = program.peak_memory(self.activation_sizes, self.retained_fraction)
        return all(peak <= limit * (1.0 + 1e-9) for peak, limit in zip(peaks, self.memory_limits))


@dataclass(frozen=True)
class PriorityRules:
    """How a rank chooses among actions whose inputs have arrived."""

    max_in_flight: tuple[int, ...]  # forwards ahead of backwards, by rank: below it forwards first, at it none
    min_gap_fraction: float = 0.0  # fraction of a backward-weight that must fit before the next input arrives
    later_stages_first: bool = True  # whether forwards of later stages have priority
    split_backward: bool = True


class ListScheduler:
    def __init__(self, problem: SchedulingProblem, rules: PriorityRules):
        costs, stages, ranks, retained = problem.costs, problem.costs.stages, problem.ranks, problem.retained_fraction
        self.problem, self.rules = problem, rules
        self.stage_to_rank = problem.stage_to_rank
        self.stages_by_rank = [[s for s in range(stages) if self.stage_to_rank[s] == rank] for rank in range(ranks)]
        # By kind of action: seconds by stage, and the change of memory in activations of a micro-batch.
        full_backward = [i + w for i, w in zip(costs.backward_input, costs.backward_weight)]
        self.seconds = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight, "B": full_backward}
        self.memory_change = {"F": 1.0, "I": retained - 1.0, "W": -retained, "B": -1.0}
        # When the input of each stage's forward and backward arrives, by micro-batch.
        self.forward_ready_at = [[0.0 if s == 0 else inf] * problem.micro_batches for s in range(stages)]
        self.backward_ready_at = [[inf] * problem.micro_batches for _ in range(stages)]
        self.backward = "I" if rules.split_backward else "B"
        self.next = {kind: [0] * stages for kind in "FIWB"}  # micro-batch, by kind of action and stage
        self.pending_weights: list[deque[int]] = [deque() for _ in range(ranks)]  # stages, by rank
        self.in_flight = [0] * ranks
        self.memory_used, self.free_at = [0.0] * ranks, [0.0] * ranks
        self.order: dict[int, list[Action]] = {rank: [] for rank in range(ranks)}
        self.events: list[tuple[float, int]] = []

    def run(self) -> dict[int, list[Action]] | None:
        """Returns each rank's actions, or None if the memory limits cause a deadlock."""
        for rank in range(self.problem.ranks):
            heappush(self.events, (0.0, rank))
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.free_at[rank]:
                self._schedule_next(rank, now)
        m = self.problem.micro_batches
        done = all(n == m for n in self.next[self.backward]) and not any(self.pending_weights)
        return self.order if done else None

    def _schedule_next(self, rank: int, now: float) -> None:
        forward, forward_at, blocked = self._next_forward(rank, now)
        started, ended = self.next["F"], self.next[self.backward]
        begun = ((self.backward_ready_at[s][ended[s]], s) for s in self.stages_by_rank[rank] if ended[s] < started[s])
        backward_at, backward = min(begun, default=(inf, -1))
        pending, next_input_at, costs = self.pending_weights[rank], min(forward_at, backward_at), self.problem.costs
        if forward_at <= now:
            self._start("F", rank, forward, now)
        elif blocked and pending:  # frees memory for the blocked forward
            self._start("W", rank, pending.popleft(), now)
        elif backward_at <= now:
            self._start(self.backward, rank, backward, now)
        elif pending and next_input_at - now >= self.rules.min_gap_fraction * costs.backward_weight[pending[0]]:
            self._start("W", rank, pending.popleft(), now)
        elif next_input_at < inf:
            heappush(self.events, (next_input_at, rank))

    def _next_forward(self, rank: int, now: float) -> tuple[int, float, bool]:
        """Returns the next stage to run, when its input arrives, and whether memory alone blocks another forward."""
        if self.in_flight[rank] >= self.rules.max_in_flight[rank]:
            return -1, inf, False
        room = self.problem.memory_limits[rank] * (1.0 + 1e-9) - self.memory_used[rank]
        options: list[tuple[float, int]] = []
        blocked = False
        for stage in reversed(self.stages_by_rank[rank]):
            micro_batch = self.next["F"][stage]
            if micro_batch < self.problem.micro_batches:
                at = self.forward_ready_at[stage][micro_batch]
                if self.problem.activation_sizes[stage] <= room:
                    options.append((at, stage))
                elif at <= now:
                    blocked = True
            room -= self.problem.activation_sizes[stage]  # reserve memory for this rank's later stages
        ready = [stage for at, stage in options if at <= now]
        if ready:
            return ready[0] if self.rules.later_stages_first else ready[-1], now, blocked
        at, stage = min(options, default=(inf, -1))
        return stage, at, blocked

    def _start(self, kind: str, rank: int, stage: int, now: float) -> None:
        """Starts an action on the next micro-batch of its kind and stage, and delivers its result to the next action
        that needs it."""
        micro_batch, end, last = self.next[kind][stage], now + self.seconds[kind][stage], len(self.stage_to_rank) - 1
        self.next[kind][stage] += 1
        self.in_flight[rank] += {"F": 1, "W": 0}.get(kind, -1)
        self.memory_used[rank] += self.memory_change[kind] * self.problem.activation_sizes[stage]
        self.order[rank].append(Action(stage, kind, micro_batch))
        self.free_at[rank] = end
        heappush(self.events, (end, rank))
        if kind == "I":
            self.pending_weights[rank].append(stage)
        if kind == "F" and stage == last:
            self.backward_ready_at[stage][micro_batch] = end
        elif kind == "F":
            self._deliver(self.forward_ready_at, stage + 1, micro_batch, end)
        elif kind != "W" and stage:
            self._deliver(self.backward_ready_at, stage - 1, micro_batch, end)

    def _deliver(self, ready: list[list[float]], stage: int, micro_batch: int, at: float) -> None:
        ready[stage][micro_batch] = at
        rank = self.stage_to_rank[stage]
        heappush(self.events, (max(at, self.free_at[rank]), rank))
