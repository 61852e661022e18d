"""Keeping a world of workers alive: a rank that dies, stops or gets stuck is named at once, and all begin again.

How a rank is found: one that ends or is stopped is reported by its parent, the nursery; one that is stuck has made no
new mark in its beat, nor has any other rank, for `patience` seconds. None of it waits for a collective to run out of
time. A fault ends the attempt: what the ranks know is kept for the doctor, all are killed, and a new attempt goes on
from the newest good checkpoint, with stand-bys where there are some: workers that are ready but for the state.

What would only happen again is not tried again: errors that we raise on purpose, another exception twice at the same
step, and `restarts` attempts in a row none of which got further than one before it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardwise.console import format_ranks, pluralize, signal_name
from shardwise.errors import RunError, ShardwiseError, UserError
from shardwise.workers import diagnosis
from shardwise.workers.heartbeat import clear_heartbeats, heartbeat_folder, read_heartbeats
from shardwise.workers.worker_pool import WorkerGroup, WorkerPool

POLL_SECONDS = 0.1
STOPPED_SECONDS = 0.2  # seconds that a rank is stopped; Ctrl-Z stops and wakes all at once, but not in one instant
STANDBY_DELAY = 2.0  # seconds of steps after which stand-bys are worth their while
STARTUP_TIMEOUT = 60.0  # seconds of patience at least, until a step is done: the first ones build, compile and connect
ERROR_REPORT_SECONDS = 0.5  # seconds that others get to write down why they end
INITIAL_BACKOFF, MAX_BACKOFF = 0.5, 60.0  # seconds before another try; doubled each time, up to the second


@dataclass(frozen=True)
class WorkerFailure:
    kind: str
    """killed, halted, stuck, failed or lost."""
    ranks: list[int]
    step: int
    message: str
    error_text: str = ""
    """All that it said itself, where it could."""
    is_expected: bool = False
    """Whether it is an error that we raise on purpose."""
    exit_code: int = 1

    def to_exception(self, why: str = "") -> ShardwiseError:
        text = " ".join(part for part in (self.error_text or self.message, why) if part)
        return (UserError if self.exit_code == 2 else RunError)(text)


class ErrorLog(Protocol):
    """What failed ranks wrote down."""

    def error_records(self) -> list[dict[str, Any]]: ...
    def clear_errors(self) -> None: ...


@dataclass
class Supervisor:
    run: Path
    worker_pool: WorkerPool
    entry: str
    layout: str
    size: int
    max_restarts: int
    hang_timeout: float
    error_log: ErrorLog
    log_event: Callable[..., None]
    """Takes a kind of event, a message, and facts."""
    replan: Callable[[int], tuple[str, int]] | None = None
    """Of a run that may go on with fewer processes: a layout for at most so many, and how many it uses."""
    rejoin_timeout: float = 0.0
    """Seconds that a lost machine has to come back."""
    use_standby: bool = False
    """Whether a second world of workers waits, ready but for the state, while the first one trains."""
    stop_signal: int = 0
    """The signal that this run was told to stop by."""
    worker_group: WorkerGroup | None = None
    standby_group: WorkerGroup | None = None
    max_step: int = -1
    attempts: int = 0
    last_failure: WorkerFailure | None = None
    suspect_ranks: set[int] = field(default_factory=set)
    """Ranks that were at fault in every try since the run last got further."""
    group_counter: int = 0
    is_scaling_up: bool = False

    def __post_init__(self) -> None:
        self.target = self.layout, self.size

    def forward_signal(self, signal_number: int) -> None:
        """A signal to the launcher is one to every worker; they end by themselves."""
        self.stop_signal = signal_number
        if self.worker_group is not None:
            self.worker_pool.kill(self.worker_group, signal_number)

    def supervise(self, resume: bool) -> None:
        """Runs the world to its end. Raises the fault that nothing helps against."""
        self.worker_pool.remove_snapshots()
        try:
            while True:
                failure = self._run_attempt(resume)
                if failure is None:
                    return
                self._handle_failure(failure)
                resume = True
        finally:
            for worker_group in (self.worker_group, self.standby_group):
                self.worker_pool.kill_and_wait(worker_group)
            self.worker_pool.remove_snapshots()

    def _run_attempt(self, resume: bool) -> WorkerFailure | None:
        """One attempt. Returns what ended it, None where all is done."""
        clear_heartbeats(self.run)
        self.error_log.clear_errors()
        ready = self._take_standby(resume)
        if self.worker_pool.size < self.size:
            return WorkerFailure("node_lost", [], max(self.max_step, 0), "a node was lost while all began again.")
        self.worker_group = worker_group = ready or self._fork_group(["--resume"] if resume else [], as_standby=False)
        monitor = ProgressMonitor(self.hang_timeout)
        while True:
            had_started = worker_group.all_started
            self.worker_pool.receive(POLL_SECONDS)
            if worker_group.all_started and not had_started:
                monitor = ProgressMonitor(self.hang_timeout)  # until now PyTorch was imported
            if self.stop_signal and not monitor.stop_forwarded:
                monitor.stop_forwarded = True
                self.worker_pool.kill(worker_group, self.stop_signal)  # also those that were just born
            if worker_group.lost_ranks:
                return self._diagnose_lost_node(worker_group)
            if worker_group.failed_ranks:
                return self._diagnose_exit(worker_group)
            if worker_group.all_started and not worker_group.alive_ranks:
                return self._run_attempt(resume=True) if self._finish_scale_up() else None
            if (
                self.size < self.target[1] <= self.worker_pool.size
                and monitor.stepping_seconds
                and not self.is_scaling_up
            ):
                self.is_scaling_up = True
                self.worker_pool.kill(worker_group, signal.SIGTERM)  # they save, and end
            now = time.monotonic()
            stopped = [rank for rank, since in worker_group.stopped_since.items() if now - since >= STOPPED_SECONDS]
            heartbeats = read_heartbeats(self.run)
            if stopped or (worker_group.all_started and monitor.is_hung(heartbeats)):
                return self._diagnose_hang(worker_group, stopped)
            if self.use_standby and monitor.stepping_seconds > STANDBY_DELAY and not self.stop_signal:
                self._start_standby()

    def _finish_scale_up(self) -> bool:
        """Whether workers ended to make room for more."""
        if not self.is_scaling_up or self.stop_signal:
            return False
        self.is_scaling_up, (self.layout, self.size) = False, self.target
        message = f"a node is back: going on with {pluralize(self.size, 'process')} in layout '{self.layout}'."
        self.log_event("scaled_up", message, layout=self.layout)
        return True

    def _take_standby(self, resume: bool) -> WorkerGroup | None:
        """The stand-bys, where they are well; else they are ended."""
        ready, self.standby_group = self.standby_group, None
        if ready is not None and resume and ready.layout == self.layout and not ready.exit_codes:
            self.worker_pool.release(ready)
            return ready
        self.worker_pool.kill_and_wait(ready)
        return None

    def _fork_group(self, extra_arguments: list[str], as_standby: bool) -> WorkerGroup:
        self.group_counter += 1
        name = f"world-{self.group_counter}-{time.monotonic_ns()}"
        return self.worker_pool.fork(name, self.layout, self.size, self.entry, extra_arguments, as_standby)

    def _start_standby(self) -> None:
        if self.standby_group is not None and self.standby_group.exit_codes:
            self.worker_pool.kill_and_wait(self.standby_group)
            self.use_standby, self.standby_group = False, None  # what cannot even wait is not tried again
        elif self.standby_group is None:
            self.standby_group = self._fork_group(["--resume"], as_standby=True)

    def _diagnose_exit(self, worker_group: WorkerGroup) -> WorkerFailure:
        """A rank is dead. One that was killed could write nothing, so it comes before all; then who was first."""
        first = list(worker_group.failed_ranks)
        codes = [worker_group.exit_codes[rank] for rank in first]
        aborted = -signal.SIGABRT in codes  # perhaps another's mistake
        killed = min(codes) < 0 and not aborted
        self._request_dumps(worker_group, worker_group.alive_ranks, 2.0 if aborted else 0.1 if killed else 0.0)
        self.worker_pool.wait_for_exit(worker_group, POLL_SECONDS if killed else ERROR_REPORT_SECONDS)
        if worker_group.lost_ranks:  # its machine was heard of last, but was first
            return self._diagnose_lost_node(worker_group)
        records = self.error_log.error_records()
        reported = {record["rank"] for record in records}
        silent = [
            rank for rank in worker_group.failed_ranks if rank not in reported and worker_group.exit_codes[rank] < 0
        ]
        silent = sorted(silent, key=lambda rank: rank not in first)
        heartbeats = read_heartbeats(self.run)
        if silent or not records:
            finding = self._record_diagnosis(
                "killed", {rank: _exit_reason(worker_group.exit_codes[rank]) for rank in silent or first[:1]}
            )
            ranks = finding.culprits or first[:1]
            failure = WorkerFailure("killed", ranks, heartbeats.get(ranks[0], {}).get("step", 0), finding.message)
        else:
            first_record = records[0]
            rank, error_text, code = (
                first_record["rank"],
                first_record["trace"] or first_record["message"],
                first_record["exit_code"],
            )
            error_text = error_text if code == 2 else f"rank {rank} failed: {error_text.rstrip()}"
            last = first_record["message"].strip().splitlines()[:1]
            finding = self._record_diagnosis("failed", {rank: f"failed with {first_record['kind']}: {' '.join(last)}"})
            ranks, step = finding.culprits or [rank], heartbeats.get(rank, {}).get("step", 0)
            failure = WorkerFailure(
                "failed", ranks, step, finding.message, error_text, first_record["trace"] is None, code
            )
        self.worker_pool.kill_and_wait(worker_group)
        return failure

    def _diagnose_hang(self, worker_group: WorkerGroup, stopped: list[int]) -> WorkerFailure:
        """A rank is stopped or stuck."""
        exit_reasons = dict.fromkeys(stopped, "is stopped (SIGSTOP)")
        kind = "suspended" if stopped else "hung"
        self._request_dumps(
            worker_group,
            [rank for rank in worker_group.alive_ranks if rank not in exit_reasons],
            0.3 if stopped else 2.0,
        )
        finding = self._record_diagnosis(kind, exit_reasons)
        ranks = finding.culprits or [0]
        step = read_heartbeats(self.run).get(ranks[0], {}).get("step", 0)
        self.worker_pool.kill_and_wait(worker_group)
        return WorkerFailure(kind, ranks, step, finding.message)

    def _diagnose_lost_node(self, worker_group: WorkerGroup) -> WorkerFailure:
        """A machine is gone, or cut off."""
        self._record_diagnosis("node_lost", worker_group.lost_ranks)
        ranks, step = (
            sorted(worker_group.lost_ranks),
            max((heartbeat["step"] for heartbeat in read_heartbeats(self.run).values()), default=0),
        )
        reasons = sorted(set(worker_group.lost_ranks.values()))
        verb = reasons[0] if len(ranks) == 1 else reasons[0].replace("is cut off", "are cut off")
        self.worker_pool.kill_and_wait(worker_group)
        return WorkerFailure("node_lost", ranks, step, f"{format_ranks(ranks)} {verb}, in step {step}.")

    def _request_dumps(self, worker_group: WorkerGroup, ranks: list[int], seconds: float) -> None:
        diagnosis.request_dumps(
            self.run, ranks, seconds, lambda: self.worker_pool.kill(worker_group, signal.SIGUSR1, ranks)
        )

    def _record_diagnosis(self, kind: str, exit_reasons: dict[int, str]) -> diagnosis.Diagnosis:
        finding = diagnosis.diagnose(diagnosis.read_rank_states(heartbeat_folder(self.run), exit_reasons), time.time())
        with suppress(OSError):
            diagnosis.save_diagnosis(self.run, finding, kind, exit_reasons)
        return finding

    def _handle_failure(self, failure: WorkerFailure) -> None:
        """Tells of a fault, and raises it where another attempt would not help."""
        if self.stop_signal:
            if failure.kind == "failed":
                raise failure.to_exception()
            if not failure.step:
                raise RunError(f"told to stop by {signal_name(self.stop_signal)} before training began.")
            raise RunError(f"told to stop by {signal_name(self.stop_signal)}, but {failure.message}")
        latest_step = max((heartbeat["step"] for heartbeat in read_heartbeats(self.run).values()), default=0)
        self.suspect_ranks = (
            set(failure.ranks) if latest_step > self.max_step else self.suspect_ranks & set(failure.ranks)
        )
        self.attempts = 1 if latest_step > self.max_step else self.attempts + 1
        previous, self.last_failure, self.max_step = self.last_failure, failure, max(self.max_step, latest_step)
        is_repeated = previous is not None and previous.kind == "failed" and previous.message == failure.message
        if failure.is_expected or not self.max_restarts:
            raise failure.to_exception("" if failure.is_expected else "The others ended because of it.")
        if is_repeated and previous is not None and previous.step == failure.step:
            raise failure.to_exception(f"The same happened before at step {failure.step}, so it is not tried again.")
        if self.attempts > self.max_restarts and failure.kind != "failed" and 0 < len(self.suspect_ranks) < self.size:
            self._continue_without(sorted(self.suspect_ranks), failure)
            return
        if self.attempts > self.max_restarts:
            raise failure.to_exception(f"Given up after {pluralize(self.max_restarts, 'restart')} that got no further.")
        if self.worker_pool.size < self.size:
            self._wait_for_nodes(failure)
            return
        pause = 0.0 if self.attempts == 1 else min(MAX_BACKOFF, INITIAL_BACKOFF * 2.0 ** (self.attempts - 2))
        after = f" after {pause:g} s" if pause else ""
        message = f"{failure.message} All begin again{after} from the newest good checkpoint."
        self.log_event(failure.kind, message, ranks=failure.ranks, step=failure.step, restart=self.attempts)
        time.sleep(pause)

    def _wait_for_nodes(self, failure: WorkerFailure) -> None:
        """Until lost machines are back; goes on without them where that may be."""
        wait = f"Waiting at most {self.rejoin_timeout:g} s for it to come back."
        self.log_event(
            "node_lost", f"{failure.message} {wait}", ranks=failure.ranks, step=failure.step, restart=self.attempts
        )
        self.worker_pool.wait_for_slots(self.size, self.rejoin_timeout)
        if self.worker_pool.size >= self.size:
            return
        if self.replan is None:
            raise failure.to_exception(
                f"It did not come back within {self.rejoin_timeout:g} s; start it again and go on with --resume."
            )
        self.layout, self.size = self.replan(self.worker_pool.size)
        message = f"going on without it, with {pluralize(self.size, 'process')} in layout '{self.layout}'."
        self.log_event("scaled_down", message, ranks=failure.ranks, step=failure.step, layout=self.layout)

    def _continue_without(self, ranks: list[int], failure: WorkerFailure) -> None:
        """Takes their places from the run, and a layout for those that are left; raises where that may not be."""
        given_up = f"Given up after {pluralize(self.max_restarts, 'restart')} that got no further."
        if self.replan is None or self.worker_group is None:
            raise failure.to_exception(given_up)
        self.worker_pool.exclude_ranks(self.worker_group, ranks)
        try:
            self.layout, self.size = self.replan(self.worker_pool.size)
        except ShardwiseError as error:
            raise failure.to_exception(
                f"{given_up} Without {format_ranks(ranks)} there is no layout: {error}"
            ) from None
        self.attempts, self.suspect_ranks = 0, set()
        self.log_event(
            "scaled_down",
            f"{failure.message} The place of {format_ranks(ranks)} is given up after {pluralize(self.max_restarts, 'restart')}; "
            f"going on with {pluralize(self.size, 'process')} in layout '{self.layout}'.",
            ranks=ranks,
            step=failure.step,
            layout=self.layout,
        )


def _exit_reason(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@dataclass
class ProgressMonitor:
    """What is seen of ranks that have not ended."""

    hang_timeout: float
    stop_forwarded: bool = False
    stepping_seconds: float = 0.0
    """Seconds since a step was done for the first time."""
    _progress: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _last_progress: float = field(default_factory=time.monotonic)
    _last_poll: float = field(default_factory=time.monotonic)
    _first_step: tuple[int, float] = (0, 0.0)
    """The first step that was seen, and when another one was."""

    def is_hung(self, heartbeats: dict[int, dict[str, Any]]) -> bool:
        progress = {
            rank: (heartbeat["step"], heartbeat["phase"], heartbeat["since"]) for rank, heartbeat in heartbeats.items()
        }
        if any(self._progress.get(rank) != entry for rank, entry in progress.items()):
            self._progress |= progress
            self._last_progress = time.monotonic()
        now = time.monotonic()
        gap, self._last_poll = now - self._last_poll, now
        if gap > 20 * POLL_SECONDS:  # we were stopped ourselves, and the workers with us
            self._last_progress += gap
        step, when = self._first_step
        latest = max((heartbeat["step"] for heartbeat in heartbeats.values()), default=0)
        if not step or (latest > step and not when):
            self._first_step = step or latest, now if step else 0.0
        self.stepping_seconds = now - when if when else 0.0
        is_stepping = any(heartbeat["step"] > 1 for heartbeat in heartbeats.values())
        return now - self._last_progress > (
            self.hang_timeout if is_stepping else max(self.hang_timeout, STARTUP_TIMEOUT)
        )
