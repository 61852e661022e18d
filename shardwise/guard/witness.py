"""Numbers that change by themselves: found in the step in which it happens, with the rank and the tensor.

- What a rank keeps (weights, optimizer states) has the checksums right before an update that it had right after the
  last one. If not, this rank's memory has changed: it is named, whether or not others hold the same.
- What several ranks hold (copies of weights, states and summed gradients) has the same checksums on all of them after
  each update. If not, one of them computed something else: most are right, and of two the one that is wrong shows when
  the step is taken again, which gives what it should have given.

Nothing waits for it: checksums stay on the device, one small row of each rank travels with the signal to stop, and
whether anything is wrong is read with the loss. All ranks come to the same verdict. The run then goes back to the last
checkpoint; a checkpoint is confirmed when it was copied, so none of a changed state stays. The tensors of a rank are in
`shardwise.guard.sums`.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import all_gather
from shardwise.errors import RunError
from shardwise.files import write_text
from shardwise.guard.judge import GoBack
from shardwise.guard.sums import KINDS, Kept, firsts, gradients_of, mixer, states_of, sums_of, weights_of
from shardwise.job import Job
from shardwise.parallel.engine import Engine
from shardwise.parallel.recommender import Recommender
from shardwise.words import counted, ranks_text

SIGNAL, CHANGED, COPIES = 0, 1, 2  # places in a rank's row


@dataclass(frozen=True)
class Find:
    """`ranks`: of whom one is wrong, where there is more than one."""

    step: int
    ranks: list[int]
    label: str
    words: str


class Witness:
    def __init__(
        self, job: Job, engine: Engine, optimizer: torch.optim.Optimizer, run: Path, tell: Callable[..., None]
    ):
        """Keeps in `run` which ranks were found corrupt."""
        self.job, self.engine, self.optimizer, self.tell = job, engine, optimizer, tell
        self.device, self.world = engine.mesh.device, engine.mesh.layout.world
        self.on = job.run.check and not isinstance(engine, Recommender)
        self.quarantine = run / "quarantine.json"
        self.firsts = firsts(engine.mesh.layout, engine.mesh["apart"].size > 1).to(self.device)
        self.mixer: Tensor | None = None
        self.about: list[tuple[str, frozenset[str]]] = []
        """What `sums` are of: gradients, and weights and states after the last step; with the kinds of copies."""
        self.about_gradients = self.about
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.sums = self.kept = self.seen = self.gradients = none
        self.changed = none.bool()
        self.open: tuple[Find, int] | None = None
        """A find that is to be settled when its step is taken again, and what the checksum was here."""

    def forget(self) -> None:
        """To be called when weights and states were made or loaded."""
        if self.on:
            self.seen = self.kept = sums_of(self._state(), self.device)

    def before(self, outcome: Any) -> None:
        """To be called when gradients are summed and nothing is updated yet."""
        if self.on:
            self.seen = sums_of(self._state(), self.device)
            gradients = gradients_of(self.engine)
            self.gradients = sums_of(gradients, self.device)
            self.about_gradients = [(one.label, one.kinds) for one in gradients]

    def after(self) -> None:
        """To be called when all is updated."""
        if not self.on:
            return
        state = self._state()
        self.changed = self.seen[: len(self.kept)] != self.kept  # states are made in the first step, after weights
        self.kept = sums_of(state, self.device)
        self.sums = torch.cat((self.gradients, self.kept))
        if self.mixer is None or self.mixer.shape[1] != len(self.sums):
            self.about = self.about_gradients + [(one.label, one.kinds) for one in state]
            self.mixer = mixer([kinds for _, kinds in self.about]).to(self.device)

    def agreed(self, signal: int) -> Tensor:
        """The highest signal that any rank was sent, and whether anything is wrong on any; still on the device."""
        row = torch.zeros(COPIES + len(KINDS), dtype=torch.int64, device=self.device)
        row[SIGNAL] = signal
        if self.mixer is not None:
            row[CHANGED] = self.changed.any()
            row[COPIES:] = (self.mixer * self.sums).sum(1)
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
            self._settle(*self.open)
            self.open = None
        if wrong:
            self._tell(self._find(done))

    def confirm(self, done: int) -> None:
        """To be called when a checkpoint was copied: raises `GoBack` where the state is not that of its step."""
        if not self.on:
            return
        self.changed = sums_of(self._state(), self.device) != self.kept
        bad = self.changed.any().long()
        if self.world > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad:
            self._tell(self._find(done))

    # Behind the scenes

    def _state(self) -> list[Kept]:
        return weights_of(self.engine) + states_of(self.engine, self.optimizer)

    def _find(self, done: int) -> list[Find]:
        """Who has what is wrong, from what all ranks know."""
        mine = {
            "host": socket.gethostname(), "sums": self.sums.tolist(), "about": self.about,
            "changed": [one.label for one, bad in zip(self._state(), self.changed.tolist()) if bad],
        }  # fmt: skip
        everyone = self._everyone(mine)
        self.hosts = [one["host"] for one in everyone]
        finds = []
        for rank, one in enumerate(everyone):
            if one["changed"]:
                others = f", and {len(one['changed']) - 1} more" if len(one["changed"]) > 1 else ""
                words = f"rank {rank}: {one['changed'][0]} has changed since step {done - 1}, without an update{others}"
                finds.append(Find(done, [rank], one["changed"][0], words))
        return finds or self._compare(done, everyone)

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
                        same |= {rank for rank, value in group.items() if value == right}
            if suspects:
                ranks = sorted(set.intersection(*suspects) or set.union(*suspects))
                others = f"{ranks_text(sorted(same))}, with the same samples" if same else "each other"
                verb = "has" if len(ranks) == 1 else "have"
                words = f"{ranks_text(ranks)} {verb} another result for {label} in step {done} than {others}"
                return [Find(done, ranks, label, words)]
        raise RunError(f"step {done}: checksums that were mixed differ between ranks, those of single tensors do not.")

    def _tell(self, finds: list[Find]) -> None:
        for find in finds:
            decided = len(find.ranks) == 1
            later = "" if decided else "; which of them is wrong shows when the step is taken again"
            self.tell("corruption", f"{find.words}{later}.", step=find.step, ranks=find.ranks, tensor=find.label)
            if decided:
                self._note(find)
            else:
                self.open = find, self._own(find.label)
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
        found = known.setdefault(str(rank), [])
        host = self.hosts[rank]
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
