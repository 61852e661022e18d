"""Numbers that change by themselves: found in the step in which it happens, with the rank and the tensor.

- What a rank keeps (weights, optimizer states) has the checksums right before an update that it had right after the
  last one. If not, this rank's memory has changed: it is named, whether or not others hold the same.
- What several ranks hold (copies of weights, states and summed gradients) has the same checksums on all of them after
  each update. If not, one of them computed something else: most are right, and of two the one that is wrong shows when
  the step is taken again, which gives what it should have given.
- What a rank computes from its own samples is computed again by others, now and then (`shardwise.guard.again`).

Nothing waits for it: checksums stay on the device, one small row of each rank travels with the signal to stop, and
whether anything is wrong is read with the loss. All ranks come to the same verdict. The run then goes back to the last
checkpoint; a checkpoint is confirmed when it was copied, so none of a changed state stays.

Where reading all tensors twice a step would take more than a hundredth of it, each step looks at a part of them in
turn: copies that differ stay different, so they are found within one round, but what only one rank has is found only
where it is just looked at. After the first find all are looked at in each step. The tensors of a rank are in
`shardwise.guard.sums`.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import all_gather
from shardwise.data.stream import Samples
from shardwise.errors import RunError
from shardwise.files import write_text
from shardwise.guard.again import Again
from shardwise.guard.judge import GoBack
from shardwise.guard.sums import KINDS, Books, Kept, firsts, mixer, sums_of
from shardwise.job import Job
from shardwise.parallel.engine import Engine
from shardwise.words import counted, ranks_text

SIGNAL, CHANGED, COPIES = 0, 1, 2  # places in a rank's row
SHARE = 0.008  # of a step that checksums may take
OPERATIONS = {"cpu": 1.5, "cuda": 120.0}  # that a device computes while it reads a byte, as measured
MOST = 100  # parts
CALL = {"cpu": 4e5, "cuda": 6e9}  # and while a checksum is begun
MICRO_BATCH = "a micro-batch"
About = list[tuple[str, frozenset[str]]]
"""What checksums are of, each with its kinds of copies."""


@dataclass(frozen=True)
class Find:
    """`ranks`: of whom one is wrong, where there is more than one."""

    step: int
    ranks: list[int]
    label: str
    words: str


class Witness:
    def __init__(
        self, job: Job, engine: Engine, optimizer: torch.optim.Optimizer, run: Path, flops: float,
        tell: Callable[..., None],
    ):  # fmt: skip
        """`flops`: of a step of this rank, 0 where steps are not to be watched. Which ranks were found corrupt is kept
        in `run`."""
        self.job, self.engine, self.flops, self.tell = job, engine, flops, tell
        self.books, self.again = Books(engine, optimizer), Again(job, engine)
        self.device, self.world = engine.mesh.device, engine.mesh.layout.world
        self.on = bool(job.run.check and flops)
        self.parts = job.run.check if isinstance(job.run.check, int) else 0
        self.turn = 0
        self.quarantine, self.hosts = run / "quarantine.json", [socket.gethostname()]
        self.firsts = firsts(engine.mesh.layout, engine.mesh["apart"].size > 1).to(self.device)
        self.mixers: dict[tuple[int, int], Tensor] = {}
        self.about = self.about_gradients = self.kept_of = self.changed_of = About()
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.sums = self.gradients = self.kept = self.seen = none
        """Of all that is looked at in a step: gradients, and the state after it (`kept`); that before it."""
        self.changed = none.bool()
        self.open: tuple[Find, int] | None = None
        """A find that is to be settled when its step is taken again, and what the checksum was here."""

    def forget(self) -> None:
        """To be called when weights and states were made or loaded."""
        if self.on:
            self.parts = self.parts or self._affordable()
            self._keep(self._part(self._state()))
            self.seen = self.kept

    def ahead(self, done: int, samples: Samples) -> None:
        """To be called before step `done` is taken."""
        if self.on:
            self.again.ahead(done, samples)

    def before(self) -> None:
        """To be called when gradients are summed and nothing is updated yet."""
        if self.on:
            gradients = self._part(self.books.gradients())
            self.seen = sums_of(self._part(self._state()), self.device)
            self.gradients = sums_of(gradients, self.device)
            self.about_gradients = [(one.label, one.kinds) for one in gradients]

    def after(self) -> None:
        """To be called when all is updated."""
        if self.on:
            # States are made in the first step, and come after weights.
            self.changed, self.changed_of = self.seen[: len(self.kept)] != self.kept, self.kept_of
            self.turn = (self.turn + 1) % self.parts
            self._keep(self._part(self._state()))
            self.sums, self.about = torch.cat((self.gradients, self.kept)), self.about_gradients + self.kept_of

    def agreed(self, signal: int) -> Tensor:
        """The highest signal that any rank was sent, and whether anything is wrong on any; still on the device."""
        row = torch.zeros(COPIES + len(KINDS) + 2, dtype=torch.int64, device=self.device)
        row[SIGNAL] = signal
        if len(self.sums):
            key = self.turn, len(self.sums)
            if key not in self.mixers:
                self.mixers[key] = mixer([kinds for _, kinds in self.about]).to(self.device)
            row[CHANGED] = self.changed.any()
            row[COPIES:-2] = (self.mixers[key] * self.sums).sum(1)
            row[-2], row[-1] = self.again.second, self.again.first
        table = row[None]
        if self.world > 1:
            table = row.new_empty(self.world, len(row))
            all_gather(table.view(-1), row)
        copies = table[:, COPIES:]
        wrong = table[:, CHANGED].any() | (copies != copies.gather(0, self.firsts)).any()
        return torch.stack((table[:, SIGNAL].max(), wrong.long()))

    def judge(self, done: int, wrong: bool) -> None:
        """Raises `GoBack` where something is wrong, or `RunError` where a rank was found corrupt too often."""
        if self.open is not None and self.open[0].step == done:
            find, before = self.open
            self.open = None
            self._settle(find, before)
        if wrong:
            self._tell(self._find(done))

    def confirm(self, done: int) -> None:
        """To be called when a checkpoint was copied: raises `GoBack` where the state is not that of its step, or
        differs between ranks that hold the same."""
        if not self.on:
            return
        state = self._state()
        self.changed, self.changed_of = sums_of(self._part(state), self.device) != self.kept, self.kept_of
        if self.parts > 1:
            self.sums, self.about = sums_of(state, self.device), [(one.label, one.kinds) for one in state]
            self.mixers.pop((self.turn, len(self.sums)), None)
        if self.agreed(0)[1]:
            self._tell(self._find(done))

    # Behind the scenes

    def _keep(self, state: list[Kept]) -> None:
        self.kept, self.kept_of = sums_of(state, self.device), [(one.label, one.kinds) for one in state]

    def _state(self) -> list[Kept]:
        return self.books.weights() + self.books.states()

    def _part(self, kept: list[Kept]) -> list[Kept]:
        """What is looked at in this turn, on all ranks that hold it."""
        if self.parts == 1:
            return kept
        return [one for one in kept if crc32(one.label.encode()) % self.parts == self.turn]

    def _affordable(self) -> int:
        """In how many parts it takes no more than its share of a step, on the rank that has most to read."""
        weights, kind = [one.tensor.nbytes for one in self.books.weights()], self.device.type
        once = OPERATIONS[kind] * sum(weights) + CALL[kind] * len(weights)
        cost = torch.tensor(7.0 * once, device=self.device)  # weights and two averages, twice; gradients
        if self.world > 1:
            dist.all_reduce(cost, dist.ReduceOp.MAX)
        return min(max(1, math.ceil(float(cost) / (SHARE * self.flops))), MOST)

    def _find(self, done: int) -> list[Find]:
        """Who has what is wrong, from what all ranks know."""
        mine = {
            "host": socket.gethostname(), "sums": self.sums.tolist(), "about": self.about,
            "again": (int(self.again.second), int(self.again.first)),
            "changed": [label for (label, _), bad in zip(self.changed_of, self.changed.tolist()) if bad],
        }  # fmt: skip
        everyone = self._everyone(mine)
        self.hosts = [one["host"] for one in everyone]
        finds = []
        for rank, one in enumerate(everyone):
            if one["changed"]:
                others = f", and {len(one['changed']) - 1} more" if len(one["changed"]) > 1 else ""
                words = f"rank {rank}: {one['changed'][0]} has changed since step {done - 1}, without an update{others}"
                finds.append(Find(done, [rank], one["changed"][0], words))
        return finds or self._rerun(done, [one["again"] for one in everyone]) or self._compare(done, everyone)

    def _rerun(self, done: int, votes: Sequence[tuple[int, int]]) -> list[Find]:
        """Who computed a micro-batch otherwise than the others; of a tensor group that is all of it."""
        groups: dict[int, list[int]] = {}
        for rank, first in enumerate(self.firsts[:, -1].tolist()):
            groups.setdefault(first, []).append(rank)
        ranks = sorted({g[number] for g in groups.values() for number in self.again.wrong([votes[r] for r in g])})
        if not ranks:
            return []
        verb = "computes" if len(ranks) == 1 else "compute"
        words = f"{ranks_text(ranks)} {verb} another result for a micro-batch of step {done} than others that took it"
        return [Find(done, ranks, MICRO_BATCH, words)]

    def _compare(self, done: int, everyone: Sequence[dict[str, Any]]) -> list[Find]:
        """The first tensor, gradients before all, of which ranks that should have the same do not."""
        for label in dict.fromkeys(label for one in everyone for label, _ in one["about"]):
            suspects: list[set[int]] = []
            same: set[int] = set()
            for column, kind in enumerate(KINDS):
                groups: dict[int, dict[int, int]] = {}
                for rank, one in enumerate(everyone):
                    here = {what: value for (what, kinds), value in zip(one["about"], one["sums"]) if kind in kinds}
                    if label in here:
                        groups.setdefault(int(self.firsts[rank, column]), {})[rank] = here[label]
                for group in groups.values():
                    count = Counter(group.values()).most_common()
                    if len(count) > 1:
                        right = count[0][0] if 2 * count[0][1] > len(group) else None
                        suspects.append({rank for rank, value in group.items() if value != right})
                        same |= group.keys()
            if suspects:
                ranks = sorted(set.intersection(*suspects) or set.union(*suspects))
                if others := sorted(same - set(ranks)):
                    verb = "has" if len(ranks) == 1 else "have"
                    words = f"{ranks_text(ranks)} {verb} another result for {label} in step {done} than "
                    return [Find(done, ranks, label, words + ranks_text(others))]
                return [Find(done, ranks, label, f"{ranks_text(ranks)} do not agree on {label} in step {done}")]
        raise RunError(f"step {done}: checksums that were mixed differ between ranks, those of single tensors do not.")

    def _tell(self, finds: list[Find]) -> None:
        for find in finds:
            decided = len(find.ranks) == 1
            settles = not decided and self.parts == 1 and find.label != MICRO_BATCH
            later = "; which of them is wrong shows when the step is taken again" if settles else ""
            self.tell("corruption", f"{find.words}{later}.", step=find.step, ranks=find.ranks, tensor=find.label)
            if decided:
                self._note(find)
            elif settles:
                self.open = find, self._own(find.label)
        self.parts, self.turn = 1, 0
        words = " and ".join(ranks_text(find.ranks) for find in finds)
        raise GoBack(finds[0].step, f"{words} cannot be trusted with step {finds[0].step}", leave_out=False, sure=True)

    def _settle(self, find: Find, before: int) -> None:
        wrong = [rank for rank, other in enumerate(self._everyone(self._own(find.label) != before)) if other]
        if not wrong:
            return
        words = f"taken again, step {find.step} has another result for {find.label} on {ranks_text(wrong)}"
        message = f"{words}: what was there before was wrong."
        self.tell("corruption", message, step=find.step, ranks=wrong, tensor=find.label, settled=True)
        for rank in wrong:
            self._note(Find(find.step, [rank], find.label, words))

    def _own(self, label: str) -> int:
        """The checksum of a tensor here, if there is one."""
        return next((int(value) for (what, _), value in zip(self.about, self.sums.tolist()) if what == label), 0)

    def _note(self, find: Find) -> None:
        """Writes down who was found; too often, and the run ends."""
        rank = find.ranks[0]
        known: dict[str, list[Any]] = json.loads(self.quarantine.read_text()) if self.quarantine.exists() else {}
        if self.world > 1:
            dist.barrier()  # all have read it
        found, host = known.setdefault(str(rank), []), self.hosts[rank]
        found.append({"time": round(time.time(), 3), "step": find.step, "tensor": find.label, "host": host})
        if self.engine.mesh.rank == 0:
            write_text(self.quarantine, json.dumps(known, indent=1))
        if len(found) > self.job.run.corruptions:
            raise RunError(
                f"rank {rank} on {host} was found corrupt {counted(len(found), 'time')}, last by this: {find.words}. "
                "Take that device out and go on without it by --resume."
            )

    def _everyone(self, mine: Any) -> list[Any]:
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found
