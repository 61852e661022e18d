"""Runs a job with and without random faults; reports which were detected, how fast, and whether the results agree."""

import json
import random
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.chaos.faulty_worker import PHASES, Fault, inject_faults, samples_used, trigger_times
from shardwise.console import align_columns, fill_in, pluralize
from shardwise.errors import JobError
from shardwise.job import Job, load_job
from shardwise.launch.start import Say, launch
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.train.local_machine import require_memory
from shardwise.train.run_folder import RunFolder
from shardwise.workers.fork_server import ForkServer
from shardwise.workers.repeated_failures import MAX_REPEATS

FAULTY_WORKER = "shardwise.chaos.faulty_worker"
BIT_FLIP_KINDS = ("weight", "state", "gradient")  # tensors in which a bit is flipped
FAULT_KINDS = ("kill", "kill", "kill", "stop", "flip", "nan", *BIT_FLIP_KINDS)
EXPECTED_EVENT = {"kill": "killed", "stop": "suspended", "flip": "killed"}
EXPECTED_EVENT |= dict.fromkeys(BIT_FLIP_KINDS, "corruption")
FAILURE_EVENTS = ("killed", "suspended", "hung", "failed", "rollback", "corruption")


@dataclass(frozen=True)
class FaultOutcome:
    fault: Fault
    detected_as: str  # the event that reports it; "masked": another fault ended the same attempt; empty: not detected
    seconds: float  # seconds from the fault to the event
    is_attributed: bool  # whether the event has the expected kind and names the fault's rank (for a NaN: its step)


@dataclass(frozen=True)
class ChaosReport:
    layout: str
    outcomes: list[FaultOutcome]
    finished: bool
    matches_baseline: bool  # whether every step's loss and gradient norm are bitwise those of the fault-free run
    lost_samples: int
    repeated_samples: int
    corrupted_checkpoints: int
    rejected_checkpoints: int  # checkpoints that a restart rejected; one that is never loaded is never rejected

    @property
    def ok(self) -> bool:
        same_samples = self.lost_samples == self.repeated_samples == 0
        all_detected = all(outcome.detected_as for outcome in self.outcomes)
        return self.finished and self.matches_baseline and same_samples and all_detected

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def text(self) -> str:
        rows = [["fault", "rank", "step", "phase", "detected", "after"]]
        for outcome in self.outcomes:
            fault, after = outcome.fault, f"{outcome.seconds:.2f} s" if outcome.detected_as else ""
            rows.append([fault.kind, str(fault.rank), str(fault.step), fault.phase, outcome.detected_as or "NO", after])
        attributed = sorted(outcome.seconds for outcome in self.outcomes if outcome.is_attributed)
        values = {"table": align_columns(rows, left=(0, 3, 4)), "attributed": attributed}
        return fill_in(Path(__file__).with_name("report.txt"), vars(self) | values)


def draw_faults(count: int, seed: int, layout: Layout, job: Job) -> list[Fault]:
    """Draws faults at random ranks, steps and phases, ordered by step; none in the first two steps."""
    rng = random.Random(seed)
    every = job.checkpoint.every
    if job.total_steps < 4 or not every:
        raise JobError(f"chaos needs 4 steps or more, not {job.total_steps}, and checkpoint.every > 0, not {every}.")
    places = MAX_REPEATS * (job.total_steps - 3)
    if count > places:
        raise JobError(
            f"--faults {count} is too many for {job.total_steps} steps: a run ends after {MAX_REPEATS} restarts for "
            f"the same cause at one step; use --faults {places} or fewer, or more steps."
        )
    steps = sorted(_draw_steps(rng, count, job.total_steps))
    faults = list[Fault]()
    for number, step in enumerate(steps):
        kind, rank = rng.choice(FAULT_KINDS), rng.randrange(layout.world)
        if (kind == "flip" and step < 2 * every + 3) or (kind in BIT_FLIP_KINDS and step < every + 3):
            kind = "kill"  # no checkpoint to roll back to yet
        if kind == "gradient" and layout.replicate == 1:
            kind = "weight"  # no replica has the same gradient to compare with
        phase = "data" if kind == "flip" else "gradient" if kind in ("nan", "gradient") else rng.choice(PHASES)
        phase = rng.choice(PHASES[:3]) if kind in ("weight", "state") else phase
        last_phases = [fault.phase for fault in faults[-MAX_REPEATS:]]
        if phase == "load" and last_phases == ["load"] * MAX_REPEATS:  # each hits the restart after the one before
            phase = "data"
        faults.append(Fault(kind, rank, step, phase, number))
    return faults


def _draw_steps(rng: random.Random, count: int, total: int) -> list[int]:
    """Draws the steps of faults, of which no step has more than a run can be restarted for."""
    steps: list[int] = []
    while len(steps) < count:
        step = rng.randint(3, total - 1)
        if steps.count(step) < MAX_REPEATS:
            steps.append(step)
    return steps


def run_chaos(job_file: Path | None, settings: list[str], faults: int, seed: int, say: Say) -> ChaosReport:
    """Runs a job twice in its layout, the second time with injected faults, and compares the two runs."""
    job = load_job(job_file, settings)
    if job.layout == "auto":
        raise JobError("chaos needs an explicit layout; set one with --layout, such as 'shard=2'.")
    layout = Layout.parse(job.layout)
    prepare(job, layout)
    require_memory(job, 8, layout.world)
    if layout.world == 1:
        raise JobError(f"layout '{layout}' has one process, which runs without a supervisor; chaos needs two or more.")
    drawn, runs = draw_faults(faults, seed, layout, job), []
    with closing(ForkServer(FAULTY_WORKER)) as fork_server:
        for name, injected in (("baseline", []), ("faulty", drawn)):
            say(f"run with {pluralize(len(injected), 'fault')}:" if injected else "run without faults:")
            run = RunFolder.create(_derive_job(job, name, faults))
            inject_faults(run.path, injected)
            launch(run, layout, resume=False, entry=f"{FAULTY_WORKER}:main", fork_server=fork_server)
            runs.append(run)
    return evaluate_run(str(layout), drawn, *runs)


def _derive_job(job: Job, name: str, faults: int) -> Job:
    """Returns the job in its own folder, with enough restarts for all faults and all checksums in every step."""
    changes = {"folder": str(Path(job.run.folder or "runs/chaos") / name), "max_restarts": faults + 1,
               "on_nan": "rollback", "max_corruptions": faults, "checksum_every": 1}  # fmt: skip
    checkpoint = job.checkpoint.model_copy(update={"keep": max(2, job.checkpoint.keep)})
    return job.model_copy(update={"run": job.run.model_copy(update=changes), "checkpoint": checkpoint})


def evaluate_run(layout: str, faults: list[Fault], baseline: RunFolder, faulty: RunFolder) -> ChaosReport:
    """Matches each triggered fault with the first failure event after it, and compares the run with its baseline."""
    times = trigger_times(faulty.path)
    all_events = list(faulty.events())
    kinds = [event["event"] for event in all_events]
    failures = [event for event in all_events if event["event"] in FAILURE_EVENTS and "settled" not in event]
    found = []
    for fault in sorted((fault for fault in faults if fault.number in times), key=lambda fault: times[fault.number]):
        event = next((event for event in failures if event["time"] >= times[fault.number]), None)
        found.append((fault, event, event is not None and _is_attributed(event, fault)))
    outcomes = []
    for fault, event, is_attributed in found:
        is_masked = any(other is event for _, other, explained in found if explained)
        detected_as = "" if event is None else event["event"] if is_attributed else "masked" if is_masked else ""
        seconds = event["time"] - times[fault.number] if event else 0.0
        outcomes.append(FaultOutcome(fault, detected_as, seconds, is_attributed))
    expected, used = samples_used(baseline.path), samples_used(faulty.path)
    return ChaosReport(layout, outcomes, "finished" in kinds, _loss_curve(faulty) == _loss_curve(baseline),
                       lost_samples=len(set(expected) - set(used)), repeated_samples=len(used) - len(set(used)),
                       corrupted_checkpoints=len(list((faulty.path / "faults").glob("flipped-*"))),
                       rejected_checkpoints=kinds.count("checkpoint_corrupt"))  # fmt: skip


def _is_attributed(event: dict[str, Any], fault: Fault) -> bool:
    if fault.kind == "nan" and event["event"] == "rollback":
        return bool(event["step"] >= fault.step)
    # A NaN on one replica only is reported as corruption: its copies differ.
    expected = "corruption" if fault.kind == "nan" else EXPECTED_EVENT[fault.kind]
    return event["event"] == expected and fault.rank in event["ranks"]


def _loss_curve(run: RunFolder) -> list[tuple[int, int, str]]:
    """Returns step, samples, and loss and gradient norm with all digits; as JSON text, because NaN != NaN."""
    return [(row["step"], row["samples"], json.dumps([row["loss"], row["grad_norm"]])) for row in run.metrics()]
