"""A job under random real faults, beside the same job undisturbed: what was noticed, how fast, and what came of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.chaos.faulty_worker import PHASES, Fault, inject_faults, samples_by_step, trigger_times
from shardwise.console import pluralize
from shardwise.errors import JobError
from shardwise.job import Job, load_job
from shardwise.launch.launch import launch
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import ForkServer

FAULTY_WORKER = "shardwise.chaos.faulty_worker"
BIT_FLIP_KINDS = ("weight", "state", "gradient")  # of which a bit is flipped
FAULT_KINDS = ("kill", "kill", "kill", "stop", "flip", "nan", *BIT_FLIP_KINDS)
EXPECTED_EVENT = {"kill": "killed", "stop": "suspended", "flip": "killed", "nan": "rollback"} | dict.fromkeys(
    BIT_FLIP_KINDS, "corruption"
)
FAILURE_EVENTS = ("killed", "suspended", "hung", "failed", "rollback", "corruption")


@dataclass(frozen=True)
class FaultOutcome:
    """What became of one fault."""

    fault: Fault
    detected_as: str
    """The event that names it; "together": that of another fault that ended the same attempt; empty: none does."""
    seconds: float
    is_attributed: bool
    """Whether the event is of its kind and names its rank, or for a NaN its step."""


@dataclass(frozen=True)
class ChaosReport:
    layout: str
    outcomes: list[FaultOutcome]
    finished: bool
    matches_baseline: bool
    """Whether loss and gradient norm of every step are those of the undisturbed run, bit by bit."""
    lost_samples: int
    repeated_samples: int
    corrupted_checkpoints: int
    rejected_checkpoints: int
    """Damaged checkpoints that were made, and that were refused when a run wanted to load them."""

    @property
    def ok(self) -> bool:
        return (
            self.finished
            and self.matches_baseline
            and not self.lost_samples
            and not self.repeated_samples
            and all(t.detected_as for t in self.outcomes)
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def text(self) -> str:
        rows = [
            "fault     rank  step  phase      noticed     after",
            "--------  ----  ----  ---------  ----------  ------",
        ]
        for outcome in self.outcomes:
            fault, after = outcome.fault, f"{outcome.seconds:.2f} s" if outcome.detected_as else ""
            where = f"{fault.kind:<8}  {fault.rank:>4}  {fault.step:>4}  {fault.phase:<9}"
            rows.append(f"{where}  {outcome.detected_as or 'NOT':<10}  {after}")
        named = sum(outcome.is_attributed for outcome in self.outcomes)
        together = sum(outcome.detected_as == "together" for outcome in self.outcomes)
        seconds = sorted(outcome.seconds for outcome in self.outcomes if outcome.is_attributed) or [0.0]
        verdict = "equals" if self.matches_baseline else "DIFFERS FROM"
        rows += [
            f"layout '{self.layout}': {pluralize(len(self.outcomes), 'fault')}, {named} named rightly, {together} together "
            f"with another; after {seconds[len(seconds) // 2]:.2f} s in the median, {seconds[-1]:.2f} s at most;",
            f"the run {'finished' if self.finished else 'DID NOT FINISH'}; its curve {verdict} that of the undisturbed "
            "run, bit by bit;",
            f"samples lost: {self.lost_samples}, repeated: {self.repeated_samples}; checkpoints damaged: {self.corrupted_checkpoints}, refused: "
            f"{self.rejected_checkpoints}.",
        ]
        return "\n".join(rows)


def draw_faults(count: int, seed: int, layout: Layout, job: Job) -> list[Fault]:
    """Faults at random ranks, steps and phases, in the order of their steps; none in the first two steps."""
    rng = random.Random(seed)
    every = job.checkpoint.every
    if job.total_steps < 4 or not every:
        raise JobError("chaos needs at least 4 steps, and checkpoint.every above 0.")
    steps = sorted(rng.randint(3, job.total_steps - 1) for _ in range(count))
    faults = []
    for number, step in enumerate(steps):
        kind, rank = rng.choice(FAULT_KINDS), rng.randrange(layout.world)
        if (kind == "flip" and step < 2 * every + 3) or (kind in BIT_FLIP_KINDS and step < every + 3):
            kind = "kill"  # there is no checkpoint yet to fall back on
        if kind == "gradient" and layout.replicate == 1:
            kind = "weight"  # a sum that nobody else has
        phase = "data" if kind == "flip" else "gradient" if kind in ("nan", "gradient") else rng.choice(PHASES)
        phase = rng.choice(PHASES[:3]) if kind in ("weight", "state") else phase
        faults.append(Fault(kind, rank, step, phase, number))
    return faults


def run_chaos(
    job_file: Path | None, settings: list[str], faults: int, seed: int, say: Callable[[str], None]
) -> ChaosReport:  # fmt: skip
    """Runs a job twice in its layout, the second time with faults planted, and compares."""
    job = load_job(job_file, settings)
    if job.layout == "auto":
        raise JobError("chaos needs a layout of more than one process; give one with --layout, such as 'shard=2'.")
    layout = Layout.parse(job.layout)
    prepare(job, layout)
    if layout.world == 1:
        raise JobError(f"layout '{layout}' has one process, which nobody supervises; chaos needs two or more.")
    baseline = RunFolder.create(_derive_job(job, "baseline", faults))
    fork_server = ForkServer(FAULTY_WORKER)
    try:
        inject_faults(baseline.path, [])
        say("the undisturbed run:")
        launch(baseline, layout, resume=False, entry=f"{FAULTY_WORKER}:main", fork_server=fork_server)
        say(f"the same with {faults} faults:")
        faulty = RunFolder.create(_derive_job(job, "faulty", faults))
        faults_drawn = draw_faults(faults, seed, layout, job)
        inject_faults(faulty.path, faults_drawn)
        launch(faulty, layout, resume=False, entry=f"{FAULTY_WORKER}:main", fork_server=fork_server)
    finally:
        fork_server.close()
    return evaluate_run(str(layout), faults_drawn, faulty, baseline)


def _derive_job(job: Job, name: str, faults: int) -> Job:
    """The job in a folder of its own, with as many restarts as there are faults, and all looked at in each step."""
    folder = str(Path(job.run.folder or "runs/chaos") / name)
    kept = max(2, job.checkpoint.keep)
    run = job.run.model_copy(
        update={
            "folder": folder,
            "max_restarts": faults + 1,
            "on_nan": "rollback",
            "max_corruptions": faults,
            "checksum_every": 1,
        }
    )
    return job.model_copy(update={"run": run, "checkpoint": job.checkpoint.model_copy(update={"keep": kept})})


def evaluate_run(layout: str, faults: list[Fault], faulty: RunFolder, baseline: RunFolder) -> ChaosReport:
    times = trigger_times(faulty.path)
    triggered = sorted((fault for fault in faults if fault.number in times), key=lambda one: times[one.number])
    ends = [event for event in faulty.events() if event["event"] in FAILURE_EVENTS and "settled" not in event]
    event_by_fault = {
        one.number: next((end for end in ends if end["time"] >= times[one.number]), None) for one in triggered
    }
    named = {one.number for one in triggered if _is_attributed(event_by_fault[one.number], one)}
    outcomes = []
    for fault in triggered:
        end = event_by_fault[fault.number]
        others = [one for one in triggered if event_by_fault[one.number] is end and one.number in named]
        word = "" if end is None else end["event"] if fault.number in named else "together" if others else ""
        outcomes.append(
            FaultOutcome(fault, word, end["time"] - times[fault.number] if end else 0.0, fault.number in named)
        )
    expected_samples, used_samples = (
        [place for ids in samples_by_step(run.path).values() for place in ids] for run in (baseline, faulty)
    )
    kinds = [event["event"] for event in faulty.events()]
    return ChaosReport(
        layout,
        outcomes,
        "finished" in kinds,
        _loss_curve(faulty) == _loss_curve(baseline),
        lost_samples=len(set(expected_samples) - set(used_samples)),
        repeated_samples=len(used_samples) - len(set(used_samples)),
        corrupted_checkpoints=len(list((faulty.path / "faults").glob("flipped-*"))),
        rejected_checkpoints=kinds.count("checkpoint_corrupt"),
    )


def _is_attributed(end: dict[str, Any] | None, fault: Fault) -> bool:
    if end is None:
        return False
    if fault.kind == "nan" and end["event"] == "rollback":
        return bool(end["step"] >= fault.step)
    found = "corruption" if fault.kind == "nan" else EXPECTED_EVENT[fault.kind]  # a NaN that a replica does not have
    return end["event"] == found and fault.rank in end["ranks"]


def _loss_curve(run: RunFolder) -> list[tuple[int, int, str]]:
    """Step, samples, and loss and norm to the last bit."""
    return [(r["step"], r["samples"], json.dumps([r["loss"], r["grad_norm"]])) for r in run.metrics()]
