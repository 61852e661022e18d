"""A job under random real faults, beside the same job undisturbed: what was noticed, how fast, and what came of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.chaos.victim import PHASES, Fault, happened, plant, samples_of
from shardwise.errors import JobError
from shardwise.guard.nursery import Nursery
from shardwise.job import Job, load_job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import check
from shardwise.train.folder import RunFolder
from shardwise.train.launch import launch
from shardwise.words import counted

VICTIM = "shardwise.chaos.victim"
NUMBERS = ("weight", "state", "gradient")  # of which a bit is flipped
KINDS = ("kill", "kill", "kill", "stop", "flip", "nan", *NUMBERS)
EVENT = {"kill": "killed", "stop": "halted", "flip": "killed", "nan": "rollback"} | dict.fromkeys(NUMBERS, "corruption")
ENDS = ("killed", "halted", "stuck", "failed", "rollback", "corruption")


@dataclass(frozen=True)
class Tale:
    """What became of one fault."""

    fault: Fault
    noticed: str
    """The event that names it; "together": that of another fault that ended the same attempt; empty: none does."""
    seconds: float
    named: bool
    """Whether the event is of its kind and names its rank, or for a NaN its step."""


@dataclass(frozen=True)
class Tally:
    layout: str
    tales: list[Tale]
    finished: bool
    equal: bool
    """Whether loss and gradient norm of every step are those of the undisturbed run, bit by bit."""
    lost: int
    repeated: int
    flips: int
    refused: int
    """Damaged checkpoints that were made, and that were refused when a run wanted to load them."""

    @property
    def ok(self) -> bool:
        return (
            self.finished and self.equal and not self.lost and not self.repeated and all(t.noticed for t in self.tales)
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def text(self) -> str:
        rows = [
            "fault     rank  step  phase      noticed     after",
            "--------  ----  ----  ---------  ----------  ------",
        ]
        for tale in self.tales:
            fault, after = tale.fault, f"{tale.seconds:.2f} s" if tale.noticed else ""
            where = f"{fault.kind:<8}  {fault.rank:>4}  {fault.step:>4}  {fault.phase:<9}"
            rows.append(f"{where}  {tale.noticed or 'NOT':<10}  {after}")
        named = sum(tale.named for tale in self.tales)
        together = sum(tale.noticed == "together" for tale in self.tales)
        seconds = sorted(tale.seconds for tale in self.tales if tale.named) or [0.0]
        verdict = "equals" if self.equal else "DIFFERS FROM"
        rows += [
            f"layout '{self.layout}': {counted(len(self.tales), 'fault')}, {named} named rightly, {together} together "
            f"with another; after {seconds[len(seconds) // 2]:.2f} s in the median, {seconds[-1]:.2f} s at most;",
            f"the run {'finished' if self.finished else 'DID NOT FINISH'}; its curve {verdict} that of the undisturbed "
            "run, bit by bit;",
            f"samples lost: {self.lost}, repeated: {self.repeated}; checkpoints damaged: {self.flips}, refused: "
            f"{self.refused}.",
        ]
        return "\n".join(rows)


def draw_faults(count: int, seed: int, layout: Layout, job: Job) -> list[Fault]:
    """Faults at random ranks, steps and phases, in the order of their steps; none in the first two steps."""
    draw = random.Random(seed)
    every = job.checkpoint.every
    if job.total_steps < 4 or not every:
        raise JobError("chaos needs at least 4 steps, and checkpoint.every above 0.")
    steps = sorted(draw.randint(3, job.total_steps - 1) for _ in range(count))
    faults = []
    for number, step in enumerate(steps):
        kind, rank = draw.choice(KINDS), draw.randrange(layout.world)
        if (kind == "flip" and step < 2 * every + 3) or (kind in NUMBERS and step < every + 3):
            kind = "kill"  # there is no checkpoint yet to fall back on
        if kind == "gradient" and layout.replicate == 1:
            kind = "weight"  # a sum that nobody else has
        phase = "data" if kind == "flip" else "gradient" if kind in ("nan", "gradient") else draw.choice(PHASES)
        phase = draw.choice(PHASES[:3]) if kind in ("weight", "state") else phase
        faults.append(Fault(kind, rank, step, phase, number))
    return faults


def chaos_job(
    job_file: Path | None, settings: list[str], faults: int, seed: int, say: Callable[[str], None]
) -> Tally:  # fmt: skip
    """Runs a job twice in its layout, the second time with faults planted, and compares."""
    job = load_job(job_file, settings)
    if job.layout == "auto":
        raise JobError("chaos needs a layout of more than one process; give one with --layout, such as 'shard=2'.")
    layout = Layout.parse(job.layout)
    check(job, layout)
    if layout.world == 1:
        raise JobError(f"layout '{layout}' has one process, which nobody supervises; chaos needs two or more.")
    base = RunFolder.create(_beneath(job, "undisturbed", faults))
    nursery = Nursery(VICTIM)
    try:
        plant(base.path, [])
        say("the undisturbed run:")
        launch(base, layout, resume=False, entry=f"{VICTIM}:main", nursery=nursery)
        say(f"the same with {faults} faults:")
        harmed = RunFolder.create(_beneath(job, "harmed", faults))
        drawn = draw_faults(faults, seed, layout, job)
        plant(harmed.path, drawn)
        launch(harmed, layout, resume=False, entry=f"{VICTIM}:main", nursery=nursery)
    finally:
        nursery.close()
    return judge(str(layout), drawn, harmed, base)


def _beneath(job: Job, name: str, faults: int) -> Job:
    """The job in a folder of its own, with as many restarts as there are faults, and all looked at in each step."""
    folder = str(Path(job.run.folder or "runs/chaos") / name)
    kept = max(2, job.checkpoint.keep)
    run = job.run.model_copy(
        update={"folder": folder, "restarts": faults + 1, "on_nan": "rollback", "corruptions": faults, "check": 1}
    )
    return job.model_copy(update={"run": run, "checkpoint": job.checkpoint.model_copy(update={"keep": kept})})


def judge(layout: str, faults: list[Fault], harmed: RunFolder, base: RunFolder) -> Tally:
    times = happened(harmed.path)
    came = sorted((fault for fault in faults if fault.number in times), key=lambda one: times[one.number])
    ends = [event for event in harmed.events() if event["event"] in ENDS and "settled" not in event]
    by = {one.number: next((end for end in ends if end["time"] >= times[one.number]), None) for one in came}
    named = {one.number for one in came if _names(by[one.number], one)}
    tales = []
    for fault in came:
        end = by[fault.number]
        others = [one for one in came if by[one.number] is end and one.number in named]
        word = "" if end is None else end["event"] if fault.number in named else "together" if others else ""
        tales.append(Tale(fault, word, end["time"] - times[fault.number] if end else 0.0, fault.number in named))
    wanted, taken = ([place for ids in samples_of(run.path).values() for place in ids] for run in (base, harmed))
    kinds = [event["event"] for event in harmed.events()]
    return Tally(
        layout, tales, "finished" in kinds, _curve(harmed) == _curve(base),
        lost=len(set(wanted) - set(taken)), repeated=len(taken) - len(set(taken)),
        flips=len(list((harmed.path / "faults").glob("flipped-*"))), refused=kinds.count("damaged checkpoint"),
    )  # fmt: skip


def _names(end: dict[str, Any] | None, fault: Fault) -> bool:
    if end is None:
        return False
    if fault.kind == "nan" and end["event"] == "rollback":
        return bool(end["step"] >= fault.step)
    found = "corruption" if fault.kind == "nan" else EVENT[fault.kind]  # a NaN that a replica does not have
    return end["event"] == found and fault.rank in end["ranks"]


def _curve(run: RunFolder) -> list[tuple[int, int, str]]:
    """Step, samples, and loss and norm to the last bit."""
    return [(r["step"], r["samples"], json.dumps([r["loss"], r["grad_norm"]])) for r in run.metrics()]
