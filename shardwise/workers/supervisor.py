"""Supervises a run: detects a rank that dies, stops or hangs, names it, and restarts all ranks.

Detection never waits for a collective to time out. A fault ends the attempt: the supervisor saves a diagnosis, kills
all workers, and starts a new attempt, by standby workers if there are any, from the newest valid snapshot or
checkpoint. docs/explanation/faults.md says what counts as a fault, and after what it does not restart."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.console import format_ranks, pluralize, signal_name
from shardwise.errors import RepeatedFailure, RunError, ShardwiseError, StoppedError, UserError
from shardwise.workers import diagnosis
from shardwise.workers.repeated_failures import MAX_REPEATS, RepeatedFailures, normalise
from shardwise.workers.worker_pool import WorkerGroup, WorkerPool

POLL_SECONDS = 0.1
STOPPED_SECONDS = 0.2  # a rank stopped this long is a fault; Ctrl-Z and `fg` reach ranks at slightly different times
STANDBY_DELAY = 2.0  # seconds of training before standby workers are started
STARTUP_TIMEOUT = 60.0  # minimum hang timeout until the first step is done, which includes connecting and compiling
ERROR_REPORT_SECONDS = 0.5  # time that the other ranks get to write their error records
INITIAL_BACKOFF, MAX_BACKOFF = 0.5, 60.0  # seconds before the second restart without progress, then doubled each time


@dataclass(frozen=True)
class WorkerFailure:
    """Why an attempt ended."""

    kind: str  # killed, suspended, hung, failed or node_lost: the kind of the event
    ranks: list[int]
    step: int
    message: str
    error_text: str = ""  # the rank's own error message or traceback, if it wrote one
    is_expected: bool = False  # whether Shardwise raised the error on purpose
    exit_code: int = 1
    cause: str = ""  # what another failure of the same cause has, too: the error or signal, without what varies

    def to_exception(self, why: str = "", is_repeated: bool = False) -> ShardwiseError:
        text = " ".join(part for part in (self.error_text or self.message, why) if part)
        if is_repeated:
            return RepeatedFailure(text)
        return (UserError if self.exit_code == 2 else RunError)(text)


@dataclass
class Supervisor:
    run_path: Path
    worker_pool: WorkerPool
    entry: str
    layout: str
    size: int
    max_restarts: int
    hang_timeout: float
    error_log: Any  # the run folder: `error_records` of failed ranks, `clear_errors`, `place`
    log_event: Callable[..., None]  # called with the kind of an event, its message, and its fields as keywords
    replan: Callable[[int], tuple[str, int]] | None = None  # if elastic: for at most so many, a layout and its size
    rejoin_timeout: float = 0.0  # seconds to wait for a lost node to rejoin
    use_standby: bool = False  # whether to keep a second group of workers ready while the first one trains
    stop_signal: int = 0  # the signal that asked this run to stop; 0 if none
    worker_group: WorkerGroup | None = None
    standby_group: WorkerGroup | None = None
    max_step: int = -1
    attempts: int = 0
    last_failure: WorkerFailure | None = None
    suspect_ranks: set[int] = field(default_factory=set)  # at fault in every attempt since the last progress
    group_counter: int = 0
    is_scaling_up: bool = False

    def __post_init__(self) -> None:
        self.full_layout, self.full_size = self.layout, self.size
        self.repeated = RepeatedFailures(self.run_path)
        self.given_up: set[tuple[str, int]] = set()  # causes and steps for which ranks were removed

    def forward_signal(self, signal_number: int) -> None:
        """Forwards a stop signal to every worker; workers then save and exit on their own."""
        self.stop_signal = signal_number
        if self.worker_group is not None:
            self.worker_pool.kill(self.worker_group, signal_number)

    def supervise(self, resume: bool) -> None:
        """Runs to completion, through restarts. Raises the failure that restarts cannot fix."""
        self.worker_pool.remove_snapshots()
        try:
            while (failure := self._run_attempt(resume)) is not None:
                self.worker_pool.kill_and_wait(self.worker_group)
                self._handle_failure(failure)
                resume, self.worker_group = True, None
        finally:
            for worker_group in (self.worker_group, self.standby_group):
                self.worker_pool.kill_and_wait(worker_group)
            self.repeated.reached(self._latest_step())
            self.worker_pool.remove_snapshots()

    def _run_attempt(self, resume: bool) -> WorkerFailure | None:
        """Runs one attempt. Returns the failure that ended it, or None if training is done."""
        for path in diagnosis.heartbeat_folder(self.run_path).glob("rank-*"):
            path.unlink(missing_ok=True)
        self.error_log.clear_errors()
        standby = self._take_standby(resume)
        if self.worker_pool.size < self.size:
            return WorkerFailure("node_lost", [], max(self.max_step, 0), "a node was lost during the restart.")
        self.worker_group = worker_group = standby or self._fork_group(["--resume"] if resume else [], as_standby=False)
        monitor = ProgressMonitor(self.hang_timeout)
        while True:
            had_started = worker_group.all_started
            self.worker_pool.receive(POLL_SECONDS)
            if worker_group.all_started and not had_started:
                monitor = ProgressMonitor(self.hang_timeout)  # all workers run: the hang timeout starts
            if self.stop_signal and not monitor.stop_forwarded:
                monitor.stop_forwarded = True
                self.worker_pool.kill(worker_group, self.stop_signal)  # reaches workers forked after the signal
            if worker_group.lost_ranks:
                return self._diagnose_lost_node(worker_group)
            if worker_group.failed_ranks:
                return self._diagnose_exit(worker_group)
            if worker_group.all_started and not worker_group.alive_ranks:
                return self._run_attempt(resume=True) if self._finish_scale_up() else None
            can_scale_up = self.size < self.full_size <= self.worker_pool.size
            if can_scale_up and monitor.stepping_seconds and not self.is_scaling_up:
                self.is_scaling_up = True
                self.worker_pool.kill(worker_group, signal.SIGTERM)  # they save and exit
            now = time.monotonic()
            stopped = [rank for rank, since in worker_group.stopped_since.items() if now - since >= STOPPED_SECONDS]
            if stopped or (worker_group.all_started and monitor.is_hung(diagnosis.read_heartbeats(self.run_path))):
                return self._diagnose_hang(worker_group, stopped)
            if self.use_standby and monitor.stepping_seconds > STANDBY_DELAY and not self.stop_signal:
                self._start_standby()

    def _finish_scale_up(self) -> bool:
        """Returns whether the workers exited to scale up; if so, switches back to the full layout."""
        if not self.is_scaling_up or self.stop_signal:
            return False
        self.is_scaling_up, self.layout, self.size = False, self.full_layout, self.full_size
        message = f"a node rejoined; continuing with {pluralize(self.size, 'process')} in layout '{self.layout}'."
        self.log_event("scaled_up", message, layout=self.layout)
        return True

    def _take_standby(self, resume: bool) -> WorkerGroup | None:
        """Releases and returns the standby workers if they are usable; otherwise kills them."""
        standby, self.standby_group = self.standby_group, None
        if standby is not None and resume and standby.layout == self.layout and not standby.exit_codes:
            self.worker_pool.release(standby)
            return standby
        self.worker_pool.kill_and_wait(standby)
        return None

    def _fork_group(self, extra_arguments: list[str], as_standby: bool) -> WorkerGroup:
        self.group_counter += 1
        name = f"group-{self.group_counter}-{time.monotonic_ns()}"
        return self.worker_pool.fork(name, self.layout, self.size, self.entry, extra_arguments, as_standby)

    def _start_standby(self) -> None:
        if self.standby_group is not None and self.standby_group.exit_codes:
            self.worker_pool.kill_and_wait(self.standby_group)
            self.use_standby, self.standby_group = False, None  # they fail to start: do not retry
        elif self.standby_group is None:
            self.standby_group = self._fork_group(["--resume"], as_standby=True)

    def _diagnose_exit(self, worker_group: WorkerGroup) -> WorkerFailure:
        """Diagnoses a dead rank. A killed rank leaves no error record, but is blamed before ranks that left one."""
        first_failed = list(worker_group.failed_ranks)
        codes = [worker_group.exit_codes[rank] for rank in first_failed]
        aborted = -signal.SIGABRT in codes  # possibly because of another rank, so the stacks of all ranks are needed
        killed = min(codes) < 0 and not aborted
        self._request_dumps(worker_group, worker_group.alive_ranks, 2.0 if aborted else 0.1 if killed else 0.0)
        self.worker_pool.wait_for_exit(worker_group, POLL_SECONDS if killed else ERROR_REPORT_SECONDS)
        if worker_group.lost_ranks:  # the lost node caused the exit, but was detected later
            return self._diagnose_lost_node(worker_group)
        records = self.error_log.error_records()
        reported = {record["rank"] for record in records}
        exit_codes = worker_group.exit_codes
        # A rank that crashes later crashes because of the first one; but nothing in a run sends SIGKILL to the others.
        silent = [rank for rank in worker_group.failed_ranks if rank not in reported and exit_codes[rank] < 0]
        # SIGUSR1 is our own request for a dump, which ends a rank that has not set up its heartbeat yet.
        silent = [rank for rank in silent if exit_codes[rank] != -signal.SIGUSR1]
        silent = [r for r in silent if r in first_failed or min(codes) >= 0 or exit_codes[r] == -signal.SIGKILL]
        heartbeats = diagnosis.read_heartbeats(self.run_path)
        if silent or not records:
            blamed = {rank: exit_codes[rank] for rank in silent or first_failed[:1]}
            reasons = {rank: f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                       for rank, code in blamed.items()}  # fmt: skip
            finding = self._record_diagnosis("killed", reasons)
            ranks = finding.culprits or first_failed[:1]
            step = heartbeats.get(ranks[0], {}).get("step", 0)
            cause = next(iter(reasons.values()))
            message = finding.message
            if not finding.culprits:
                message = f"rank {next(iter(reasons))} {cause} before its first heartbeat."
            return WorkerFailure("killed", ranks, step, message, cause=normalise(cause))
        record = records[0]
        rank, trace, code = record["rank"], record["trace"], record["exit_code"]
        summary = " ".join(record["message"].strip().splitlines()[:1])
        finding = self._record_diagnosis("failed", {rank: f"failed with {record['kind']}: {summary}"})
        ranks, step = finding.culprits or [rank], heartbeats.get(rank, {}).get("step", 0)
        cause = f"{record['kind']}: {normalise(summary)}"
        return WorkerFailure("failed", ranks, step, finding.message, failure_text(record), trace is None, code, cause)

    def _diagnose_hang(self, worker_group: WorkerGroup, stopped: list[int]) -> WorkerFailure:
        exit_reasons = dict.fromkeys(stopped, "is stopped (SIGSTOP)")
        kind = "suspended" if stopped else "hung"
        responsive = [rank for rank in worker_group.alive_ranks if rank not in exit_reasons]
        self._request_dumps(worker_group, responsive, 0.3 if stopped else 2.0)  # stacks reveal the cause of a hang
        finding = self._record_diagnosis(kind, exit_reasons)
        ranks = finding.culprits or [0]
        step = diagnosis.read_heartbeats(self.run_path).get(ranks[0], {}).get("step", 0)
        return WorkerFailure(kind, ranks, step, finding.message)

    def _diagnose_lost_node(self, worker_group: WorkerGroup) -> WorkerFailure:
        self._record_diagnosis("node_lost", worker_group.lost_ranks)
        ranks, step = sorted(worker_group.lost_ranks), self._latest_step()
        reason = min(worker_group.lost_ranks.values())
        reason = reason if len(ranks) == 1 else reason.replace("is unreachable", "are unreachable")
        return WorkerFailure("node_lost", ranks, step, f"{format_ranks(ranks)} {reason} in step {step}.")

    def _latest_step(self) -> int:
        return max((heartbeat["step"] for heartbeat in diagnosis.read_heartbeats(self.run_path).values()), default=0)

    def _request_dumps(self, worker_group: WorkerGroup, ranks: list[int], timeout: float) -> None:
        send_signal = partial(self.worker_pool.kill, worker_group, signal.SIGUSR1, ranks)
        diagnosis.request_dumps(self.run_path, ranks, timeout, send_signal, self.worker_pool.receive)

    def _record_diagnosis(self, kind: str, exit_reasons: dict[int, str]) -> diagnosis.Diagnosis:
        finding = diagnosis.diagnose(diagnosis.read_rank_states(self.run_path, exit_reasons), time.time())
        with suppress(OSError):
            diagnosis.save_diagnosis(self.run_path, finding, kind, exit_reasons)
        return finding

    def _handle_failure(self, failure: WorkerFailure) -> None:
        """Logs a failure. Raises it if a restart would not help."""
        if self.stop_signal:
            if failure.kind == "failed":
                raise failure.to_exception()
            if not max(failure.step, self.max_step):
                raise StoppedError(f"stopped by {signal_name(self.stop_signal)} before training began.")
            raise StoppedError(f"while stopping on {signal_name(self.stop_signal)}: {failure.message}")
        latest_step = self._latest_step()
        made_progress, at_fault = latest_step > self.max_step, set(failure.ranks)
        self.suspect_ranks = at_fault if made_progress else self.suspect_ranks & at_fault
        self.attempts = 1 if made_progress else self.attempts + 1
        previous, self.last_failure, self.max_step = self.last_failure, failure, max(self.max_step, latest_step)
        is_repeated = previous is not None and previous.kind == "failed" and previous.message == failure.message
        key = (failure.cause or failure.kind, failure.step)
        count = self.repeated.add(*key, latest_step)
        if failure.is_expected or not self.max_restarts:
            raise failure.to_exception("" if failure.is_expected else "All other ranks were stopped.")
        if is_repeated and previous is not None and previous.step == failure.step:
            why = f"This is the second identical failure at step {failure.step}, so the run ends."
            raise failure.to_exception(why, is_repeated=True)
        if count > MAX_REPEATS and (key in self.given_up or not self._can_continue_without(failure)):
            place = self.error_log.place
            raise failure.to_exception(
                f"The run has restarted {MAX_REPEATS} times for this cause at step {failure.step} and got no further, "
                f"so it ends: see `shardwise doctor {place}`, remove the cause, and continue the run with "
                f"`shardwise train --resume {place}`.",
                is_repeated=True,
            )
        if count > MAX_REPEATS or self.attempts > self.max_restarts:
            self.given_up.add(key)
            self._continue_without(sorted(self.suspect_ranks), failure)
            return
        if self.worker_pool.size < self.size:
            self._wait_for_nodes(failure)
            return
        pause = 0.0 if self.attempts == 1 else min(MAX_BACKOFF, INITIAL_BACKOFF * 2.0 ** (self.attempts - 2))
        delay = f" in {pause:g} s" if pause else ""
        message = f"{failure.message} Restarting all ranks{delay} from the newest valid snapshot or checkpoint."
        self.log_event(failure.kind, message, ranks=failure.ranks, step=failure.step, restart=self.attempts)
        self._pause(pause)

    def _pause(self, seconds: float) -> None:
        """Waits before a restart. Raises StoppedError as soon as the run is asked to stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop_signal:
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        if self.stop_signal:
            raise StoppedError(
                f"stopped by {signal_name(self.stop_signal)} in the pause before a restart; what was trained since the "
                f"newest checkpoint is lost, and `shardwise train --resume {self.error_log.place}` goes on from there."
            )

    def _wait_for_nodes(self, failure: WorkerFailure) -> None:
        """Waits for lost nodes to rejoin; if they do not, an elastic run continues without them."""
        message = f"{failure.message} Waiting up to {self.rejoin_timeout:g} s for the node to rejoin."
        self.log_event("node_lost", message, ranks=failure.ranks, step=failure.step, restart=self.attempts)
        self.worker_pool.wait_for_slots(self.size, self.rejoin_timeout)
        if self.worker_pool.size >= self.size:
            return
        if self.replan is None:
            late = f"The node did not rejoin within {self.rejoin_timeout:g} s"
            raise failure.to_exception(f"{late}; start it again and continue with --resume.")
        self.layout, self.size = self.replan(self.worker_pool.size)
        message = f"continuing without the node: {pluralize(self.size, 'process')} in layout '{self.layout}'."
        self.log_event("scaled_down", message, ranks=failure.ranks, step=failure.step, layout=self.layout)

    def _can_continue_without(self, failure: WorkerFailure) -> bool:
        """Whether the run is elastic, and some of its ranks, but not all, were at fault each time."""
        is_at_fault = failure.kind != "failed" and 0 < len(self.suspect_ranks) < self.size
        return is_at_fault and self.replan is not None and self.attempts > 1

    def _continue_without(self, ranks: list[int], failure: WorkerFailure) -> None:
        """Removes the slots of these ranks and replans for the remaining ones; raises if the run is not elastic, or if
        nobody shows to be at fault."""
        restarts = f"{pluralize(self.attempts - 1, 'restart')} without progress"
        giving_up, is_at_fault = f"Giving up after {restarts}.", failure.kind != "failed" and 0 < len(ranks) < self.size
        if not is_at_fault or self.replan is None or self.worker_group is None:
            raise failure.to_exception(giving_up)
        self.worker_pool.exclude_ranks(self.worker_group, ranks)
        try:
            self.layout, self.size = self.replan(self.worker_pool.size)
        except ShardwiseError as error:
            raise failure.to_exception(f"{giving_up} No layout works without {format_ranks(ranks)}: {error}") from None
        self.attempts, self.suspect_ranks = 0, set()
        rest = f"continuing with {pluralize(self.size, 'process')} in layout '{self.layout}'"
        message = f"{failure.message} Removing {format_ranks(ranks)} after {restarts}; {rest}."
        self.log_event("scaled_down", message, ranks=ranks, step=failure.step, layout=self.layout)


def failure_text(record: dict[str, Any]) -> str:
    """Returns the message of a failed worker: the sentence of an expected error, the traceback of any other."""
    text = record["trace"] or record["message"]
    return str(text) if record["exit_code"] == 2 else f"rank {record['rank']} failed: {text.rstrip()}"


@dataclass
class ProgressMonitor:
    """Tracks the progress of all ranks in one attempt, to detect hangs."""

    hang_timeout: float
    stop_forwarded: bool = False
    stepping_seconds: float = 0.0  # seconds since the first step was completed; 0 before
    _progress: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _last_progress: float = field(default_factory=time.monotonic)
    _last_poll: float = field(default_factory=time.monotonic)
    _first_step: int = 0
    _first_step_end: float = 0.0  # when a step after `_first_step` was first seen; 0 before

    def is_hung(self, heartbeats: dict[int, dict[str, Any]]) -> bool:
        """Returns whether no rank has made progress for the hang timeout."""
        progress = {rank: (beat["step"], beat["phase"], beat["since"]) for rank, beat in heartbeats.items()}
        if any(self._progress.get(rank) != entry for rank, entry in progress.items()):
            self._progress |= progress
            self._last_progress = time.monotonic()
        now = time.monotonic()
        gap, self._last_poll = now - self._last_poll, now
        if gap > 20 * POLL_SECONDS:  # the supervisor was stopped, and probably the workers too
            self._last_progress += gap
        latest = max((heartbeat["step"] for heartbeat in heartbeats.values()), default=0)
        if not self._first_step:
            self._first_step = latest
        elif latest > self._first_step and not self._first_step_end:
            self._first_step_end = now
        self.stepping_seconds = now - self._first_step_end if self._first_step_end else 0.0
        timeout = self.hang_timeout if latest > 1 else max(self.hang_timeout, STARTUP_TIMEOUT)
        return now - self._last_progress > timeout
