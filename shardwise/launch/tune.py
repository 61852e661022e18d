"""`shardwise tune`: trains the planner's best layouts on this machine for a few steps each, and keeps the fastest.

One road: the planner proposes layouts (`Candidate`), the launcher and workers of `train` run each in processes of its
own, what they measure refines the planner's constants, and with these it proposes the rest. Then successive halving:
the better half, and whoever may still be the fastest, again for twice as many steps, until one is left or those left
cannot be told apart. Out of memory, a refusal or a hang is the result of a candidate and ends nothing.
"""

import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.cluster import GIB, Cluster, write_cluster
from shardwise.console import fill_in, format_seconds, pluralize
from shardwise.errors import RunError, ShardwiseError, StoppedError
from shardwise.files import write_text
from shardwise.job import Job
from shardwise.launch import worker
from shardwise.launch.start import StartOptions, launch, open_data
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.planner.calibrate import refine
from shardwise.planner.estimate import Prediction
from shardwise.planner.plan import Plan, make_estimator
from shardwise.planner.search import search
from shardwise.train.local_machine import check_memory, choose_plan, pick_device
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.watch.page_data import ASSETS
from shardwise.workers.fork_server import ForkServer

WARMUP_STEPS, FIRST_STEPS, MAX_STEPS = 4, 8, 32  # that do not count; that do, in the first round and in the last
MIN_SECONDS = 60.0  # that a candidate may take, at least: the first step may compile
TIE = 0.01  # times closer than this cannot be told apart
MAX_LAYOUTS = 1000  # that the search keeps, to have some of each combination of degrees


class Rehearsal(TrainingLoop):
    """A few steps of a run that saves nothing; one before the last, or when its time is up, it ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.progress.enabled, self.progress._clear, self.begin = False, "", time.monotonic()  # the launcher reports

    def _save(self, done: int) -> None: ...

    def _tell(self, what: str, step: int, metrics: Callable[[], Any] | None = None) -> None:
        if step >= self.job.total_steps - 2 or time.monotonic() - self.begin > self.job.run.hang_timeout:
            self.stop.signal_number = signal.SIGALRM  # the ranks agree to end after the next step


rehearse = partial(worker.main, loop=Rehearsal)  # the entry point of the workers


def quick_step(run: list[float]) -> float:
    return sorted(run)[len(run) // 10]


@dataclass
class Candidate:
    """A layout, and what was measured of it."""

    layout: Layout
    planned: Prediction  # before anything was measured
    runs: list[list[float]] = field(default_factory=list)  # seconds of each step after the warm-up
    memory: float = 0.0  # GiB, the peak of the fullest rank
    problem: str = ""

    @property
    def seconds(self) -> float:
        """The fastest tenth of the steps of a fast run (the lower quartile), since other load only adds time."""
        return math.inf if self.problem or not self.runs else sorted(map(quick_step, self.runs))[len(self.runs) // 4]

    @property
    def spread(self) -> float:
        """How far the next run, or the median step of a single one, is from that; relative."""
        _, slower, *_ = [*sorted(map(quick_step, self.runs))[len(self.runs) // 4 :], statistics.median(self.runs[-1])]
        return slower / self.seconds - 1.0

    def may_be_faster_than(self, other: "Candidate") -> bool:
        return (1.0 - 2 * self.spread) * self.seconds < (1.0 + 2 * other.spread) * other.seconds

    def as_dict(self) -> dict[str, Any]:
        planned = {"predicted_seconds": self.planned.seconds, "predicted_memory_gib": self.planned.peak_memory / GIB}
        measured = {"seconds": self.seconds, "spread": self.spread} if self.seconds < math.inf else {}
        return {"layout": str(self.layout), "problem": self.problem, "memory_gib": self.memory,
                "steps": sum(map(len, self.runs)), **planned, **measured}  # fmt: skip


@dataclass
class Tuner:
    """Measures layouts of a job on this machine until a deadline."""

    plan: Plan
    fork_server: ForkServer
    folder: Path  # of the candidates' runs
    deadline: float
    say: Callable[[str], None]
    candidates: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job, self.finalists = self.plan.job, list[Candidate]()
        self.record, self.sources, _ = open_data(prepare(self.job, Layout()), None, StartOptions())
        self.planned = {prediction.layout: prediction for prediction in self.search(self.plan.cluster)}

    def search(self, cluster: Cluster) -> list[Prediction]:
        return list(search(make_estimator(self.job, cluster), self.plan.devices, MAX_LAYOUTS).best)

    def measure(self, candidate: Candidate, steps: int, limit: float) -> None:
        """Trains for a few steps in new processes, for at most `limit` seconds, and adds what it finds."""
        folder, job = RunFolder(Path(tempfile.mkdtemp(dir=self.folder))), self.job
        run = {"folder": "", "max_restarts": 0, "standby": False, "elastic": False, "hang_timeout": limit}
        sections = {"checkpoint": {"every": 0, "snapshot_every": 0}, "run": run}
        values = {name: getattr(job, name).model_copy(update=update) for name, update in sections.items()}
        values |= {"layout": str(candidate.layout), "steps": steps + 1, "tokens": None, "tracker": ""}
        values["validation"] = type(job.validation)()
        write_text(folder.path / "job.toml", job.model_copy(update=values).to_toml())
        folder.write_data(self.record, *self.sources)
        try:
            if launch(folder, candidate.layout, False, self.fork_server, f"{__name__}:rehearse"):
                raise KeyboardInterrupt
        except StoppedError:
            raise KeyboardInterrupt from None
        except ShardwiseError as error:
            candidate.problem = describe_failure(folder, str(error))
            return
        rows = list(folder.metrics())
        candidate.runs.append([row["seconds"] for row in rows[min(WARMUP_STEPS, len(rows) // 2) :]])
        candidate.memory = max(candidate.memory, *(row["memory_gib"] for row in rows))

    def measure_all(self, candidates: list[Candidate], steps: int) -> None:
        """Measures candidates one after the other, as long as there is time; on a CPU, where other load comes and goes,
        twice, the second time in reverse."""
        turns = [*candidates, *candidates[::-1]] if pick_device(self.job) == "cpu" else candidates
        for number, candidate in enumerate(turns):
            left = self.deadline - time.monotonic()
            if left > 0 and not candidate.problem:
                share = left / (len(turns) - number)  # a third of it for steps: there are further rounds
                most = share / 3 / (candidate.seconds if candidate.runs else candidate.planned.seconds)
                self.measure(candidate, max(3, min(WARMUP_STEPS + steps, int(most))), max(MIN_SECONDS, 2 * share))
                found = candidate.problem or f"{format_seconds(quick_step(candidate.runs[-1]))} per step"
                self.say(f"  {candidate.layout}: {found}")

    def propose(self, predictions: Iterable[Prediction], count: int) -> list[Candidate]:
        """Returns candidates for the first `count` layouts that are none yet; with less memory than what ran out."""
        known, found = {one.layout for one in self.candidates}, list[Candidate]()
        limit = min((one.planned.peak_memory for one in self.candidates if "memory" in one.problem), default=math.inf)
        for layout, prediction in {prediction.layout: prediction for prediction in predictions}.items():
            if len(found) < count and layout not in known and prediction.peak_memory < limit:
                found.append(Candidate(layout, self.planned.get(layout, prediction)))
        self.candidates += found
        return found

    def run(self, top: int) -> None:
        """Measures `top` layouts, the planner's choice first, the better ones again."""
        best: dict[Any, Prediction] = {}  # of each combination of degrees
        for layout, prediction in self.planned.items():
            degrees = layout.pipeline, layout.context, layout.tensor, layout.expert, layout.shard > 1
            best.setdefault(degrees, prediction)
        self.say(f"the best of {pluralize(len(self.planned), 'layout')} for each combination of degrees")
        self.measure_all(self.propose([self.plan.best, *best.values()], -(-top // 2)), FIRST_STEPS)
        while (count := max(top - len(self.candidates), not self.ranking())) and time.monotonic() < self.deadline:
            if not (others := self.propose(self.search(self.refined()), count)):
                break
            self.say("the best ones, by what is known now")
            self.measure_all(others, FIRST_STEPS)
        steps, left = FIRST_STEPS, self.ranking()
        while left and steps < MAX_STEPS and time.monotonic() < self.deadline:
            half = -(-len(left) // 2)
            left = [one for number, one in enumerate(left) if number < half or one.may_be_faster_than(left[0])]
            if len(left) == 1 or (steps > FIRST_STEPS and left[-1].seconds < (1.0 + TIE) * left[0].seconds):
                break
            steps *= 2
            self.say(f"those that may be the fastest again, for {steps} steps each")
            self.measure_all(left, steps)
            self.finalists, left = left, [one for one in self.ranking() if one in left]

    def ranking(self) -> list[Candidate]:
        """Returns the candidates that were measured: the fastest of the last round first, then all others."""
        measured = [one for one in self.candidates if one.seconds < math.inf]
        return sorted(measured, key=lambda one: (one not in self.finalists, one.seconds))

    def refined(self) -> Cluster:
        measured = {candidate.layout: candidate.seconds for candidate in self.ranking()}
        return refine(self.plan.cluster, self.job, measured) if measured else self.plan.cluster


def describe_failure(folder: RunFolder, message: str) -> str:
    """Returns why a candidate could not be measured, in a few words."""
    for record in folder.error_records():
        if record["kind"] in ("OutOfMemoryError", "MemoryError") or "allocate memory" in record["message"]:
            return "ran out of memory"
    if "SIGKILL" in message:
        return "was killed (SIGKILL), as the system does when memory runs out"
    return message.removesuffix("All other ranks were stopped.").strip().rpartition("\n")[2].strip()


def tune_job(job: Job, top: int, minutes: float, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Finds the fastest layout of a job on this machine and writes it, the refined cluster and a page below `out`.
    Returns what the page and the command's text (`templates/tune.txt`) are made of."""
    begin, auto = time.monotonic(), job.model_copy(update={"layout": "auto"})
    plan, source = choose_plan(auto)
    check_memory(auto, plan)
    where = f"{plan.devices} x {plan.cluster.device.name} ({source})"
    say(f"tuning {job.model.name} on {where}: {pluralize(top, 'layout')} within {minutes:g} min")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as runs, closing(ForkServer(__name__)) as fork_server:
        tuner = Tuner(plan, fork_server, Path(runs), begin + 60.0 * minutes, say)
        try:
            tuner.run(top)
            stopped = False
        except KeyboardInterrupt:
            if not tuner.ranking():
                raise
            stopped = True  # what was measured is kept
        cluster = tuner.refined()
    ranking, first = tuner.ranking(), tuner.candidates[0]
    if not ranking:
        raise RunError(f"no layout could be measured; '{first.layout}': {first.problem or 'the time was up'}.")
    files = {"job": out / "best.toml", "cluster": out / "cluster.toml", "page": out / "tune.html"}
    write_cluster(cluster, files["cluster"])
    run = job.run.model_copy(update={"cluster": str(files["cluster"].absolute())})
    write_text(files["job"], job.model_copy(update={"layout": str(ranking[0].layout), "run": run}).to_toml())
    estimator, others = make_estimator(job, cluster), [one for one in tuner.candidates if one not in ranking]
    rows = [one.as_dict() | {"refined_seconds": estimator.predict_seconds(one.layout)} for one in (*ranking, *others)]
    found = {"model": job.model.name, "where": where, "seconds": time.monotonic() - begin, "candidates": rows,
             "stopped": stopped, "planned": str(first.layout),
             "constants": cluster.measured, "constants_before": plan.cluster.measured,
             "indistinguishable": sum(one.may_be_faster_than(ranking[0]) for one in ranking[1:])}  # fmt: skip
    found |= {name: str(path) for name, path in files.items()}
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    write_text(files["page"], fill_in(ASSETS / "tune.html", {"found": found, "style": style}))
    return found
