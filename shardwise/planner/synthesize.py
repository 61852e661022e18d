"""A schedule made for the stages that there are, where those with a name are made for even ones.

Stages are seldom even: the first holds the embedding, the last the head, layers do not divide. `synthesize` lays out
actions in time by a few rules, rank by rank, as soon as their inputs arrive, and tries many settings of the rules; then
it takes the longest path through the best result apart. Schedules with a name that fit are among the candidates, so
what it returns is never slower in simulation than the best of them, and no rank ever holds more than it may.

The search is counted in simulated actions, not in seconds: every rank of a run finds the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from random import Random

from shardwise.errors import LayoutError
from shardwise.layout import MADE, V_SHAPED, Layout, micro_batch_rule
from shardwise.planner.greedy import LOOP, Rules, Task, V, lay_out
from shardwise.planner.simulate import Action, Program, Simulation, named, read, simulate
from shardwise.words import counted

FILLS = (0.0, 0.5, 1.0)
CLOSE = 2e-3  # an order within this share of the least time that there can be is good enough


@dataclass(frozen=True)
class Synthesis:
    """The best order that was found."""

    simulation: Simulation
    placement: str
    """`loop` or `v`."""
    name: str
    """The schedule with a name that it is, or `synthesised`."""
    named: dict[str, float]
    """Seconds of the schedules with a name that fit."""

    @property
    def seconds(self) -> float:
        return self.simulation.seconds

    @property
    def order(self) -> dict[int, list[Action]]:
        """What each rank executes; `shardwise.parallel.pipeline.Pipeline` runs it."""
        return self.simulation.program.order


def synthesize(task: Task, placements: Sequence[str] = (LOOP, V), effort: int = 200_000) -> Synthesis:
    """The fastest order that fits. `effort`: simulated actions to spend on each part of the search."""
    timed: dict[str, float] = {}
    found: list[Synthesis] = []
    for placement in placements:
        if placement == LOOP or task.virtual == 2:
            found += with_name(task, placement, timed)
            best = min((one.simulation for one in found if one.placement == placement), key=_seconds, default=None)
            made = _search(task, placement, effort, best)
            if made is not None and (best is None or made.seconds < best.seconds * (1 - 1e-9)):
                found.append(Synthesis(made, placement, "synthesised", timed))
    if not found:
        raise LayoutError(
            f"no order of {counted(task.micro_batches, 'micro-batch')} over {counted(task.ranks, 'rank')} fits: "
            f"one in flight holds {', '.join(f'{size:g}' for size in task.sizes)} by stage and a rank may hold "
            f"{', '.join(f'{limit:g}' for limit in task.limits)}; use a smaller micro-batch or more recomputation."
        )
    return min(found, key=_seconds)


def _seconds(result: Synthesis | Simulation) -> float:
    return result.seconds


def with_name(task: Task, placement: str, timed: dict[str, float]) -> Iterator[Synthesis]:
    """Schedules with a name that fit; notes their times."""
    for name in _names(task, placement):
        program = named(name, task.ranks, task.virtual, task.micro_batches)
        if task.fits(program):
            timed[name] = _run(task, program).seconds
            # Read again, a pair of forward and backward sends each result at once.
            yield Synthesis(_run(task, read(program.order)), placement, name, timed)


def _names(task: Task, placement: str) -> list[str]:
    """Schedules with a name for a placement and a number of micro-batches."""
    if task.ranks == 1:
        return []
    if placement == V:
        names = [name for name in V_SHAPED if name not in MADE] if task.split else []
    else:
        names = ["gpipe", "1f1b"] if task.virtual == 1 else ["interleaved"]
        names += ["zero-bubble"] if task.split else []
    layouts = {name: Layout(pipeline=task.ranks, schedule=name, virtual=task.virtual) for name in names}
    return [name for name in names if not micro_batch_rule(layouts[name], task.micro_batches)]


def _run(task: Task, program: Program) -> Simulation:
    return simulate(program, task.costs, task.overlapped)


# Searching


def _search(task: Task, placement: str, effort: int, named_best: Simulation | None) -> Simulation | None:
    """The best that rules give, then the best of its neighbours."""
    floor = _floor(task, placement) * (1 + CLOSE)
    if named_best is not None and named_best.seconds <= floor:
        return named_best
    found: list[tuple[float, int, Rules, Simulation]] = []
    size = task.costs.stages * task.micro_batches * (3 if task.split else 2)
    for number, rules in enumerate(_settings(task, placement)):
        if number * size > max(effort, 4 * size):
            break
        made = _try(task, placement, rules)
        if made is not None:
            found.append((made.seconds, number, rules, made))
            if made.seconds <= floor:
                break
    best = None
    if found:
        _, _, rules, best = min(found)
        best = _climb(task, placement, rules, best, effort // 2, floor)
    if named_best is not None and (best is None or named_best.seconds < best.seconds):
        best = named_best
    if best is None:
        return None
    return _join(task, _shorten(task, best, effort // 2, floor))


def _floor(task: Task, placement: str) -> float:
    """Seconds that no order can beat: a rank's work, the first micro-batch's way to it, the last one's way back."""
    costs, owner, m = task.costs, task.owner(placement), task.micro_batches
    best = lead = out = 0.0
    for rank in range(task.ranks):
        own = [stage for stage, place in enumerate(owner) if place == rank]
        halves = m * sum(costs.forward[s] + costs.input[s] for s in own)
        weights = m * sum(costs.weight[s] for s in own)
        if task.split:
            best = max(best, lead + halves + weights, lead + halves + out)
        else:
            best = max(best, lead + halves + weights + out)
        if rank < task.ranks - 1:
            lead += costs.forward[rank] + costs.transfer[rank]
            out += costs.input[rank] + costs.transfer[rank] + (0.0 if task.split else costs.weight[rank])
    return best


def _try(task: Task, placement: str, rules: Rules) -> Simulation | None:
    order = lay_out(task, placement, rules)
    if order is None:
        return None
    program = read(order)
    return _run(task, program) if task.fits(program) else None


def _settings(task: Task, placement: str) -> Iterator[Rules]:
    depths = list(dict.fromkeys(_depths(task, placement)))
    for depth, deep in product(depths, (True, False) if task.virtual > 1 else (True,)):
        if task.split:
            for fill in FILLS:
                yield Rules(depth, fill, deep)
        yield Rules(depth, 0.0, deep, split=False)


def _depths(task: Task, placement: str) -> Iterator[tuple[int, ...]]:
    """Forwards ahead of backwards: as 1f1b has them, twice that, as many as the way down and up takes, any number."""
    p, m, v = task.ranks, task.micro_batches * task.virtual, task.virtual
    one = [p - rank if v == 1 else (v - 1) * p + 2 * (p - rank) - 1 for rank in range(p)]
    two = [2 * depth - 1 for depth in one]
    need = _round_trips(task, placement)
    for depth in (one, two, *([n + more for n in need] for more in (0, 1, 2, 3)), [v * p] * p, [m] * p):
        yield tuple(max(1, min(m, d)) for d in depth)


def _round_trips(task: Task, placement: str) -> list[int]:
    """By rank, micro-batches that start on its stages while one is on its way down and back."""
    costs, owner = task.costs, task.owner(placement)
    busy = [0.0] * task.ranks
    for stage, rank in enumerate(owner):
        busy[rank] += costs.forward[stage] + costs.input[stage] + costs.weight[stage]
    away, trips = 0.0, [0.0] * task.ranks
    for stage in reversed(range(costs.stages)):
        away += costs.forward[stage] + costs.input[stage]
        trips[owner[stage]] += away
        if stage and owner[stage] != owner[stage - 1]:
            away += 2 * costs.transfer[stage - 1]
    return [ceil(trip / max(busy)) for trip in trips]


def _climb(task: Task, placement: str, rules: Rules, best: Simulation, effort: int, floor: float) -> Simulation:
    """Other depths of a rank or two, other fills: each kept that is no slower."""
    dice, top = Random(0), task.micro_batches * task.virtual
    for _ in range(_tries(best, effort)):
        if best.seconds <= floor:
            break
        depth = list(rules.depth)
        for rank in dice.sample(range(task.ranks), dice.choice((1, 1, min(2, task.ranks), task.ranks))):
            depth[rank] = max(1, min(top, depth[rank] + dice.choice((-1, 1, 1, 2))))
        fill = dice.choice((rules.fill, rules.fill, *FILLS))
        other = replace(rules, depth=tuple(depth), fill=fill)
        made = _try(task, placement, other)
        if made is not None and made.seconds <= best.seconds:
            rules, best = other, made
    return best


def _tries(result: Simulation, effort: int) -> int:
    return min(300, effort // len(result.starts))


def _shorten(task: Task, best: Simulation, effort: int, floor: float) -> Simulation:
    """Moves one action of the longest path at a time, while that helps."""
    tries, better = _tries(best, effort), True
    while better and best.seconds > floor:
        better = False
        for order in _moves(best):
            if tries <= 0:
                return best
            tries -= 1
            made = _checked(task, order)
            if made is not None and made.seconds < best.seconds * (1 - 1e-9):
                best, better = made, True
                break
    return best


def _checked(task: Task, order: dict[int, list[Action]]) -> Simulation | None:
    try:
        program = read(order)
    except LayoutError:
        return None
    return _run(task, program) if task.fits(program) else None


def _moves(result: Simulation) -> Iterator[dict[int, list[Action]]]:
    """Orders in which an action of the longest path comes before the one that kept it waiting."""
    order = result.program.order
    places = {action: place for row in order.values() for place, action in enumerate(row)}
    for rank, early, late in _kept_waiting(result):
        if early[::2] == late[::2] or early[:2] == late[:2]:  # it needs the other's result, or does the same
            continue
        first = places[early]
        yield {**order, rank: _moved(order[rank], first + 1, first)}
        if early.kind == "W":  # out of the way altogether
            for gap in _gaps(result, rank, first)[:3]:
                yield {**order, rank: _moved(order[rank], first, gap - 1)}


def _moved(actions: list[Action], old: int, new: int) -> list[Action]:
    row = list(actions)
    row.insert(new, row.pop(old))
    return row


def _kept_waiting(result: Simulation) -> Iterator[tuple[int, Action, Action]]:
    """Along the longest path, from its end: an action, and the next of its rank, which starts when it has ended."""
    program, starts, ends = result.program, result.starts, result.ends
    before: list[int] = []
    latest = [-1] * program.ranks
    for place, (rank, *_) in enumerate(program.steps):
        before.append(latest[rank])
        latest[rank] = place
    place = max(range(len(ends)), key=ends.__getitem__)
    while place >= 0:
        previous, waits = before[place], program.steps[place][2]
        if previous >= 0 and ends[previous] >= starts[place]:
            yield program.actions[place][0], program.action(previous), program.action(place)
            place = previous
        else:
            place = waits


def _gaps(result: Simulation, rank: int, after: int) -> list[int]:
    """Places in a rank's order, beyond `after`, before which it idles; its end too."""
    mine = [i for i, step in enumerate(result.program.steps) if step[0] == rank]
    idle = [k for k in range(after + 2, len(mine)) if result.starts[mine[k]] > result.ends[mine[k - 1]]]
    return [*idle, len(mine)]


def _join(task: Task, result: Simulation) -> Simulation:
    """Halves of a backward that follow each other become one, where that costs no time: it is less work to run."""
    order = result.program.order
    joints = [
        (rank, place)
        for rank, actions in order.items()
        for place, (one, two) in enumerate(zip(actions, actions[1:]))
        if one.kind == "I" and two == (one.stage, "W", one.micro_batch, None)
    ]
    groups = [joints]
    taken: set[tuple[int, int]] = set()
    while groups:
        group = groups.pop()
        made = _checked(task, _joined(order, taken | set(group))) if group else None
        if made is not None and made.seconds <= result.seconds * (1 + 1e-12):
            taken |= set(group)
        elif len(group) > 1 and len(groups) < 24:
            half = len(group) // 2
            groups += [group[:half], group[half:]]
    return _checked(task, _joined(order, taken)) or result


def _joined(order: dict[int, list[Action]], places: set[tuple[int, int]]) -> dict[int, list[Action]]:
    new: dict[int, list[Action]] = {}
    for rank, actions in order.items():
        new[rank] = []
        for place, action in enumerate(actions):
            if (rank, place) in places:
                new[rank].append(action._replace(kind="B"))
            elif (rank, place - 1) not in places:
                new[rank].append(action)
    return new
