"""`shardwise tune`: trains the planner's best layouts on this machine for a few steps each, and keeps the fastest.

One road: the planner proposes (`Candidate`), the launcher and the workers of `train` run each proposal in processes of
its own (`Tuner.measure`), the planner's constants are refined by what was measured, and it proposes the rest with them.
Then successive halving: the better half is measured again for twice as many steps, until one is left or those left
cannot be told apart. Out of memory, a refusal or a hang is the result of a candidate and ends nothing.
"""

import json
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from shardwise.cluster import GIB, Cluster, write_cluster
from shardwise.console import fill_in, format_seconds, pluralize
from shardwise.errors import LayoutError, RunError, ShardwiseError
from shardwise.files import write_text
from shardwise.job import Job
from shardwise.launch import worker
from shardwise.launch.start import StartOptions, check_layout_fits, launch, open_data
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.planner.calibrate import refine
from shardwise.planner.estimate import Prediction
from shardwise.planner.plan import make_estimator
from shardwise.planner.search import search
from shardwise.train.local_machine import check_memory, choose_plan
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.watch.report_page import ASSETS
from shardwise.workers.fork_server import ForkServer

WARMUP_STEPS, FIRST_STEPS = 3, 8  # of a candidate: that do not count, and that do, in its first round
MIN_SECONDS = 60.0  # that a candidate may take, at least: before the first step, blocks may be compiled
TIE = 0.01  # medians closer than this cannot be told apart
SEARCHED = 200  # layouts that the search keeps for each one that is measured
Say = Callable[[str], None]


class Rehearsal(TrainingLoop):
    """A few steps of a run that leaves nothing but its metrics, and ends when its time is up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.progress.enabled, self.progress._clear = False, ""  # the launcher reports
        self.begin = time.monotonic()

    def _save(self, done: int) -> None: ...

    def _validate(self, done: int) -> bool:
        self.metrics.flush()
        return False

    def _tell(self, what: str, step: int, metrics: Callable[[], Any] | None = None) -> None:
        if time.monotonic() - self.begin > self.job.run.hang_timeout:
            self.stop.signal_number = signal.SIGALRM  # the ranks agree to end after the next step


def rehearse(arguments: list[str], **options: Any) -> None:
    """Entry point of the workers."""
    worker.main(arguments, loop=Rehearsal, **options)


@dataclass
class Candidate:
    """A layout, what the planner predicted for it before anything was measured, and what was measured."""

    prediction: Prediction
    samples: list[float] = field(default_factory=list)  # seconds of each step after the warm-up, of all rounds
    memory: float = 0.0  # bytes, the peak of the fullest rank
    problem: str = ""

    @property
    def layout(self) -> Layout:
        return self.prediction.layout

    @property
    def seconds(self) -> float:
        """The median of its steps; infinite if it could not be measured."""
        return statistics.median(self.samples) if self.samples and not self.problem else math.inf

    @property
    def error(self) -> float:
        """The standard error of the median, from the quartiles."""
        low, _, high = statistics.quantiles(self.samples, n=4) if len(self.samples) > 1 else (0.0, 0.0, math.inf)
        return 0.93 * (high - low) / math.sqrt(len(self.samples))

    def as_dict(self) -> dict[str, Any]:
        return {
            "layout": str(self.layout), "predicted_seconds": self.prediction.seconds, "problem": self.problem,
            "seconds": self.seconds if self.samples else None, "steps": len(self.samples), "samples": self.samples,
            "memory_gib": self.memory / GIB, "predicted_memory_gib": self.prediction.peak_memory / GIB,
        }  # fmt: skip


@dataclass
class Tuner:
    """Measures layouts of a job on this machine until a deadline."""

    job: Job
    cluster: Cluster
    devices: int
    fork_server: ForkServer
    folder: Path  # of the runs of the candidates
    deadline: float
    say: Say
    candidates: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record, self.sources, _ = open_data(prepare(self.job, Layout()), None, StartOptions())
        self.runs = 0

    def measure(self, candidate: Candidate, steps: int, limit: float) -> None:
        """Trains for a few steps in new processes, for at most `limit` seconds, and adds what it finds."""
        self.runs += 1
        folder = RunFolder.create(rehearsal_job(self.job, candidate.layout, steps, limit, self.folder / str(self.runs)))
        try:
            check_layout_fits(candidate.layout, self.job)
            folder.write_data(self.record, *self.sources)
            entry = f"{__name__}:{rehearse.__name__}"
            launch(folder, candidate.layout, False, self.fork_server, entry)
        except ShardwiseError as error:
            candidate.problem = describe_failure(folder, str(error))
            return
        rows = list(folder.metrics())
        last = next((event for event in reversed(list(folder.events())) if event["event"] == "stopped"), None)
        if last is not None and signal.Signals.SIGALRM.name not in last["message"]:
            raise RunError(f"tune was stopped: {last['message'].partition(',')[0]}.")
        counted = rows[WARMUP_STEPS:] or rows[-1:]
        candidate.samples += [row["seconds"] for row in counted]
        candidate.memory = max(candidate.memory, *(GIB * row["memory_gib"] for row in rows))

    def measure_all(self, candidates: list[Candidate], steps: int) -> None:
        """Measures candidates one after the other, as long as there is time."""
        for number, candidate in enumerate(candidates):
            left = self.deadline - time.monotonic()
            if left <= 0:
                break
            self.measure(candidate, steps, max(MIN_SECONDS, 2 * left / (len(candidates) - number)))
            found = candidate.problem or f"{format_seconds(candidate.seconds)} per step"
            self.say(f"  {candidate.layout}: {found}")

    def propose(self, layouts: Iterable[Prediction], count: int) -> list[Candidate]:
        """Returns candidates for the first `count` layouts that the engine runs and that are none yet."""
        known, found = {one.layout for one in self.candidates}, list[Candidate]()
        for prediction in layouts:
            if len(found) < count and prediction.layout not in known:
                known.add(prediction.layout)
                with suppress(LayoutError):
                    prepare(self.job, prediction.layout)
                    found.append(Candidate(prediction))
        self.candidates += found
        return found

    def run(self, first: Prediction, top: int) -> Cluster:
        """Measures `top` layouts, `first` among them, and the better ones again. Returns the refined cluster."""
        found = self.search(self.cluster, top)
        self.say(f"the best of {pluralize(len(found), 'layout')} by combination of degrees")
        self.measure_all(self.propose([first, *best_by_degrees(found)], -(-top // 2)), WARMUP_STEPS + FIRST_STEPS)
        cluster = self.refined()
        planned = {prediction.layout: prediction for prediction in found}
        better = [planned.get(prediction.layout, prediction) for prediction in self.search(cluster, top)]
        if others := self.propose(better, top - len(self.candidates)):
            self.say("the best layouts, now that the planner knows these times")
            self.measure_all(others, WARMUP_STEPS + FIRST_STEPS)
        steps, left = FIRST_STEPS, self.ranking()
        while len(left := left[: -(-len(left) // 2)]) > 1 and time.monotonic() < self.deadline:
            if left[-1].seconds < (1.0 + TIE) * left[0].seconds and steps > FIRST_STEPS:
                break
            steps *= 2
            self.say(f"the better half again, for {steps} steps each")
            self.measure_all(left, WARMUP_STEPS + steps)
            left.sort(key=lambda candidate: candidate.seconds)
        return self.refined()

    def search(self, cluster: Cluster, top: int) -> tuple[Prediction, ...]:
        estimator = make_estimator(self.job, cluster)
        found = search(estimator, self.devices, SEARCHED * top).best
        if self.job.model.requires_single_micro_batch:
            whole = [replace(p.layout, micro_batch=self.job.samples // p.layout.data) for p in found]
            return tuple(estimator.predict(layout) for layout in dict.fromkeys(whole))
        return found

    def ranking(self) -> list[Candidate]:
        """Returns the candidates that were measured, the fastest first."""
        measured = [candidate for candidate in self.candidates if candidate.seconds < math.inf]
        return sorted(measured, key=lambda candidate: candidate.seconds)

    def refined(self) -> Cluster:
        measured = {candidate.layout: candidate.seconds for candidate in self.ranking()}
        return refine(self.cluster, self.job, measured) if measured else self.cluster


def rehearsal_job(job: Job, layout: Layout, steps: int, limit: float, folder: Path) -> Job:
    """Returns the job of a candidate's run: nothing is kept, and what fails is not repeated."""
    run = {"folder": str(folder), "max_restarts": 0, "standby": False, "elastic": False, "hang_timeout": limit}
    return job.model_copy(update={
        "layout": str(layout), "steps": steps, "tokens": None, "tracker": "",
        "checkpoint": job.checkpoint.model_copy(update={"every": 0, "snapshot_every": 0}),
        "validation": type(job.validation)(), "run": job.run.model_copy(update=run),
    })  # fmt: skip


def best_by_degrees(predictions: Iterable[Prediction]) -> Iterator[Prediction]:
    """Yields the first layout of each combination of degrees."""
    seen = set()
    for prediction in predictions:
        layout = prediction.layout
        degrees = layout.pipeline, layout.context, layout.tensor, layout.expert, layout.shard > 1
        if degrees not in seen:
            seen.add(degrees)
            yield prediction


def describe_failure(folder: RunFolder, message: str) -> str:
    """Returns why a candidate could not be measured, in a few words."""
    for record in folder.error_records():
        if record["kind"] in ("OutOfMemoryError", "MemoryError") or "allocate memory" in record["message"]:
            return "ran out of memory"
    if "SIGKILL" in message:
        return "was killed (SIGKILL), as the system does when it runs out of memory"
    lines = [line.strip() for line in message.removesuffix("All other ranks were stopped.").splitlines()]
    return next((line for line in reversed(lines) if line), "failed")


@dataclass(frozen=True)
class TuneResult:
    candidates: list[Candidate]  # fastest first, those without a time last
    planned: Candidate  # what `layout = "auto"` would have chosen
    job: Job  # with the fastest layout
    cluster: Cluster
    folder: Path
    seconds: float

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def as_dict(self) -> dict[str, Any]:
        estimator = make_estimator(self.job, self.cluster)
        rows = [one.as_dict() | {"refined_seconds": estimator.predict_seconds(one.layout)} for one in self.candidates]
        best, planned = str(self.best.layout), str(self.planned.layout)
        return {"best": best, "planned": planned, "seconds": self.seconds, "candidates": rows,
                "job": str(self.folder / "best.toml"), "cluster": str(self.folder / "cluster.toml")}  # fmt: skip

    def table(self) -> Iterator[str]:
        """Yields lines of at most 80 columns."""
        yield f"{'per step':>10} {'error':>6} {'planned':>10} {'memory':>9}  layout"
        for one in self.candidates:
            share = f"{100 * one.error / one.seconds:.1f}%" if len(one.samples) > 1 else ""
            memory = f"{one.memory / GIB:.3g} GiB" if one.memory else ""
            measured = format_seconds(one.seconds) if one.samples else "-"
            left = f"{measured:>10} {share:>6} {format_seconds(one.prediction.seconds):>10} {memory:>9}  "
            text = f"{one.layout}: {one.problem}" if one.problem else str(one.layout)
            yield from wrap(text, 80, initial_indent=left, subsequent_indent=" " * len(left))

    def verdict(self) -> str:
        """Returns what the fastest layout gains, and which others are as fast as far as one can tell."""
        ties = [one for one in self.candidates[1:] if one.seconds - one.error < self.best.seconds + self.best.error]
        gain = 1.0 - self.best.seconds / self.planned.seconds
        than = "is what the planner would have chosen" if self.best is self.planned else (
            f"takes {100 * gain:.0f}% less time than '{self.planned.layout}', which the planner would have chosen")
        tied = f"; {pluralize(len(ties), 'other')} cannot be told apart from it" if ties else ""
        return f"'{self.best.layout}' {than}{tied}."


def tune_job(job: Job, top: int, minutes: float, out: Path, say: Say) -> TuneResult:
    """Finds the fastest layout of a job on this machine, and writes what it found below `out`."""
    begin = time.monotonic()
    automatic = job.model_copy(update={"layout": "auto"})
    plan, source = choose_plan(automatic)
    check_memory(automatic, plan)
    say(f"tuning {job.model.name} on {plan.devices} x {plan.cluster.device.name} ({source}): {pluralize(top, 'layout')}, "
        f"{minutes:g} min at most")  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as runs, closing(ForkServer(__name__)) as fork_server:
        deadline = begin + 60.0 * minutes
        tuner = Tuner(automatic, plan.cluster, plan.devices, fork_server, Path(runs), deadline, say)
        cluster = tuner.run(plan.best, top)
    if not (ranking := tuner.ranking()):
        raise RunError(f"no layout could be measured; '{plan.best.layout}' {tuner.candidates[0].problem or 'had no time'}.")
    failed = [one for one in tuner.candidates if one.seconds == math.inf]
    names = {"layout": str(ranking[0].layout), "run": job.run.model_copy(update={"cluster": str(out / "cluster.toml")})}
    result = TuneResult([*ranking, *failed], tuner.candidates[0], job.model_copy(update=names), cluster, out,
                        time.monotonic() - begin)  # fmt: skip
    write_cluster(cluster, out / "cluster.toml")
    write_text(out / "best.toml", result.job.to_toml())
    write_text(out / "tune.json", json.dumps(result.as_dict()))
    write_text(out / "tune.html", fill_in(ASSETS / "tune.html", {"result": result, "style": (ASSETS / "page.css").read_text()}))
    return result
