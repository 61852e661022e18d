"""Actions of a pipeline laid out in time by rules: each as soon as its inputs are there and its rank is free.

One pass in order of time. Whenever a rank is free it chooses: a forward while it is not too far ahead of its backwards
and there is room, else a backward, else a weight half if that fits before the next input arrives. `synthesize` tries
many settings of the rules.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from shardwise.errors import LayoutError
from shardwise.planner.simulate import Action, Costs, Program

LOOP, V = "loop", "v"


@dataclass(frozen=True)
class Task:
    """What is to be scheduled."""

    costs: Costs
    ranks: int
    micro_batches: int
    sizes: tuple[float, ...] = ()
    """What a micro-batch in flight holds, by stage; 1 for each where nothing is given."""
    limits: tuple[float, ...] = ()
    """The most that a rank may hold; any number where nothing is given."""
    kept: float = 1.0
    """The share that is held after the input half of a backward (see `Program.peak`)."""
    split: bool = True
    """Whether a backward may run in two halves."""
    overlapped: bool = True
    """Whether transfers hide behind computation (see `simulate`)."""

    def __post_init__(self) -> None:
        if self.costs.stages % self.ranks:
            raise LayoutError(f"{self.costs.stages} stages do not divide over {self.ranks} ranks; each holds as many.")
        object.__setattr__(self, "sizes", tuple(self.sizes) or (1.0,) * self.costs.stages)
        object.__setattr__(self, "limits", tuple(self.limits) or (inf,) * self.ranks)

    @property
    def virtual(self) -> int:
        return self.costs.stages // self.ranks

    def owner(self, placement: str) -> list[int]:
        """The rank of each stage."""
        down = list(range(self.ranks))
        return down + down[::-1] if placement == V else down * self.virtual

    def fits(self, program: Program) -> bool:
        room = 1.0 + 1e-9
        return all(peak <= limit * room for peak, limit in zip(program.peak(self.sizes, self.kept), self.limits))


@dataclass(frozen=True)
class Rules:
    """How a rank chooses among actions whose inputs are there."""

    depth: tuple[int, ...]
    """By rank, forwards ahead of input halves: below it forwards go first, at it none may start."""
    fill: float = 0.0
    """The share of a weight half that must fit before the next input arrives."""
    deep: bool = True
    """Whether forwards of later stages go before those of earlier ones."""
    split: bool = True


def lay_out(task: Task, placement: str, rules: Rules) -> dict[int, list[Action]] | None:
    """Actions as soon as they can start, by `rules`; None where memory leaves no way on."""
    return _Layout(task, placement, rules).run()


class _Layout:
    """The state of `lay_out`."""

    def __init__(self, task: Task, placement: str, rules: Rules):
        costs, m = task.costs, task.micro_batches
        self.task, self.rules = task, rules
        self.owner = task.owner(placement)
        self.own = [[s for s, rank in enumerate(self.owner) if rank == r] for r in range(task.ranks)]
        hops = [0.0 if a == b else hop for a, b, hop in zip(self.owner, self.owner[1:], costs.transfer)]
        into, back = [0.0, *hops], [*hops, 0.0]
        self.forward, self.input = list(costs.forward), list(costs.input)
        if not task.overlapped:  # a receive then is part of the action that waits for it
            self.forward = [f + hop for f, hop in zip(self.forward, into)]
            self.input = [b + hop for b, hop in zip(self.input, back)]
            into = back = [0.0] * costs.stages
        self.into, self.back = into, back
        # When the input of each stage's forward and backward is there, by micro-batch.
        self.down = [[0.0 if s == 0 else inf] * m for s in range(costs.stages)]
        self.up = [[inf] * m for _ in range(costs.stages)]
        self.next_down, self.next_up = [0] * costs.stages, [0] * costs.stages
        self.waiting: list[deque[tuple[int, int]]] = [deque() for _ in range(task.ranks)]
        self.ahead, self.held, self.free = [0] * task.ranks, [0.0] * task.ranks, [0.0] * task.ranks
        self.order: dict[int, list[Action]] = {rank: [] for rank in range(task.ranks)}
        self.events: list[tuple[float, int]] = []

    def run(self) -> dict[int, list[Action]] | None:
        for rank in range(self.task.ranks):
            heappush(self.events, (0.0, rank))
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.free[rank]:
                self._decide(rank, now)
        m = self.task.micro_batches
        done = all(n == m for n in self.next_up) and not any(self.waiting)
        return self.order if done else None

    def _decide(self, rank: int, now: float) -> None:
        forward, forward_at, blocked = self._next_forward(rank, now)
        backward, backward_at = self._next_backward(rank)
        weights, soon = self.waiting[rank], min(forward_at, backward_at)
        if forward_at <= now:
            self._forward(rank, forward, now)
        elif blocked and weights:  # makes room
            self._weight(rank, now)
        elif backward_at <= now:
            self._backward(rank, backward, now)
        elif weights and soon - now >= self.rules.fill * self.task.costs.weight[weights[0][0]]:
            self._weight(rank, now)
        elif soon < inf:
            heappush(self.events, (soon, rank))

    def _next_forward(self, rank: int, now: float) -> tuple[int, float, bool]:
        """The stage to run next, when its input is there, and whether only memory is in the way of another."""
        if self.ahead[rank] >= self.rules.depth[rank]:
            return -1, inf, False
        room = self.task.limits[rank] * (1.0 + 1e-9) - self.held[rank]
        options: list[tuple[float, int]] = []
        blocked = False
        for stage in reversed(self.own[rank]):
            number = self.next_down[stage]
            if number < self.task.micro_batches:
                at = self.down[stage][number]
                if self.task.sizes[stage] <= room:
                    options.append((at, stage))
                elif at <= now:
                    blocked = True
            room -= self.task.sizes[stage]  # so that a micro-batch finds room on this rank's later stages
        ready = [stage for at, stage in options if at <= now]
        if ready:
            return ready[0] if self.rules.deep else ready[-1], now, blocked
        at, stage = min(options, default=(inf, -1))
        return stage, at, blocked

    def _next_backward(self, rank: int) -> tuple[int, float]:
        best, at = -1, inf
        for stage in self.own[rank]:
            number = self.next_up[stage]
            if number < self.next_down[stage] and self.up[stage][number] < at:
                best, at = stage, self.up[stage][number]
        return best, at

    def _forward(self, rank: int, stage: int, now: float) -> None:
        number = self.next_down[stage]
        self.next_down[stage] += 1
        self.ahead[rank] += 1
        self.held[rank] += self.task.sizes[stage]
        end = self._add(rank, stage, "F", number, now, self.forward[stage])
        if stage + 1 < len(self.owner):
            self._send(self.down, stage + 1, number, end + self.into[stage + 1])
        else:
            self.up[stage][number] = end

    def _backward(self, rank: int, stage: int, now: float) -> None:
        number = self.next_up[stage]
        self.next_up[stage] += 1
        self.ahead[rank] -= 1
        size, weight = self.task.sizes[stage], self.task.costs.weight[stage]
        if self.rules.split:
            self.held[rank] -= size * (1.0 - self.task.kept)
            self.waiting[rank].append((stage, number))
            end = self._add(rank, stage, "I", number, now, self.input[stage])
        else:
            self.held[rank] -= size
            end = self._add(rank, stage, "B", number, now, self.input[stage] + weight)
        if stage:
            self._send(self.up, stage - 1, number, end + self.back[stage - 1])

    def _weight(self, rank: int, now: float) -> None:
        stage, number = self.waiting[rank].popleft()
        self.held[rank] -= self.task.sizes[stage] * self.task.kept
        self._add(rank, stage, "W", number, now, self.task.costs.weight[stage])

    def _add(self, rank: int, stage: int, kind: str, number: int, now: float, seconds: float) -> float:
        self.order[rank].append(Action(stage, kind, number))
        self.free[rank] = now + seconds
        heappush(self.events, (now + seconds, rank))
        return now + seconds

    def _send(self, ready: list[list[float]], stage: int, number: int, at: float) -> None:
        ready[stage][number] = at
        rank = self.owner[stage]
        heappush(self.events, (max(at, self.free[rank]), rank))
