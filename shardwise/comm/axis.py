"""One axis of the process mesh as this rank sees it, the argument of every timed collective; and the step timer."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

DEVICE_PHASES = ("compute", "optimizer")  # timed on the GPU; the others on the host
PHASES_INCLUDING_WAITS = ("data", "checkpoint", "validation")  # waits in `waiting` blocks count towards these phases
Timestamp = Any  # `perf_counter` seconds on a CPU, otherwise a CUDA event
Span = tuple[str, str, Timestamp, Timestamp]  # axis (empty unless it is a wait), phase, begin and end


class StepTimer:
    """Seconds per phase, seconds of waiting per mesh axis, bytes sent and pipeline actions of this rank's current step.

    No interval is counted twice: a wait is subtracted from the phase around it, except in PHASES_INCLUDING_WAITS, whose
    waits are not timed, and nested `waiting` blocks are counted once. On a CPU the host's clock is used. On a GPU,
    device phases and waits are spans between CUDA events in the compute stream, read after they have completed, so
    timing never synchronizes. If a step replays a CUDA graph, these events are nodes of the graph. The engine's mesh
    owns the timer."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.enabled = True
        self.device = device or torch.device("cpu")
        self.bytes_sent: Counter[str] = Counter()  # bytes sent, by axis
        self.wait_seconds: defaultdict[str, float] = defaultdict(float)  # seconds of waiting, by axis
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)  # seconds by phase, without waits
        self._pending_spans: list[Span] = []
        self._captured_spans: list[Span] | None = None
        self._replayed_spans: tuple[list[Span], Timestamp] | None = None
        self._phase, self._phase_start, self._phase_is_on_device = "", time.perf_counter(), False
        self._wait_start: Timestamp = None
        self._actions: list[tuple[str, int, int, Timestamp, Timestamp]] | None = None
        self._wait_depth = 0
        self._thread: int | None = None

    def begin_step(self) -> None:
        """Resets the times and starts a step. On a CPU, only waits of the calling thread are timed from now on."""
        self.begin_phase("")
        self._thread = threading.get_ident()
        self._collect_finished_spans()
        self.wait_seconds.clear()
        self.phase_seconds.clear()

    def begin_phase(self, name: str, overlapped: bool = False) -> None:
        """Ends the current phase and begins another; an empty name only ends the current one. `overlapped`: the GPU is
        still computing, and only the time that it then waits for this phase counts."""
        if self._phase and self.enabled:
            end = self._timestamp() if self._phase_is_on_device else time.perf_counter()
            self._add_span("", self._phase, self._phase_start, end)
        self._phase, self._phase_is_on_device = name, overlapped or name in DEVICE_PHASES
        self._phase_start = self._timestamp() if self._phase_is_on_device else time.perf_counter()

    # Steps that replay a CUDA graph

    def begin_capture(self) -> None:
        """Begins the capture of a step, in the compute phase. Its spans go to `end_capture`."""
        self._captured_spans = []
        self._phase, self._phase_is_on_device, self._phase_start = "compute", True, self._timestamp()

    def end_capture(self) -> list[Span]:
        """Ends a capture; returns its spans for `add_replay`."""
        self.begin_phase("")
        spans = self._captured_spans or []
        self._captured_spans = None
        return spans

    def cancel_capture(self) -> None:
        """Forgets a capture that failed."""
        self._captured_spans, self._phase = None, ""

    def add_replay(self, spans: list[Span]) -> None:
        """Counts the spans of the graph that was just launched. The next replay overwrites their times."""
        self._replayed_spans = spans, self._timestamp()

    @contextmanager
    def waiting(self, axis: str, device: torch.device | None = None) -> Iterator[None]:
        """Times the block it wraps as a wait for the other ranks of an axis."""
        device = device or self.device
        is_other_thread = device.type == "cpu" and self._thread not in (None, threading.get_ident())
        if not self.enabled or self._wait_depth or is_other_thread or self._phase in PHASES_INCLUDING_WAITS:
            yield
            return
        self._wait_depth += 1
        begin = self._timestamp(device)
        try:
            yield
        finally:
            self._wait_depth -= 1
            self._add_span(axis, self._phase, begin, self._timestamp(device))

    def begin_wait(self) -> None:
        """Starts a wait that `end_wait` ends. Calling it again before `end_wait` restarts the wait."""
        self._wait_start = self._timestamp() if self.enabled else None

    def end_wait(self, axis: str) -> None:
        if self._wait_start is not None:
            self._add_span(axis, self._phase, self._wait_start, self._timestamp())
            self._wait_start = None

    # Pipeline actions, in steps whose timeline is recorded

    def start_recording(self) -> None:
        """Records pipeline actions until `take_recorded_actions`."""
        self._actions, self._recording_start = [], (self._timestamp(), time.time())

    @contextmanager
    def record_action(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        if self._actions is None:
            yield
            return
        begin = self._timestamp()
        yield
        self._actions.append((kind, stage, micro_batch, begin, self._timestamp()))

    def take_recorded_actions(self) -> list[tuple[str, int, int, float, float]]:
        """Returns (kind, stage, micro-batch, begin, end) per action, in Unix time. The GPU must have finished them."""
        actions, self._actions = self._actions, None
        if not actions:
            return []
        start_timestamp, start_unix_time = self._recording_start

        def to_unix_time(timestamp: Timestamp) -> float:
            if isinstance(start_timestamp, float):
                return float(start_unix_time + timestamp - start_timestamp)
            return float(start_unix_time + start_timestamp.elapsed_time(timestamp) / 1e3)

        return [(*action, to_unix_time(start), to_unix_time(end)) for *action, start, end in actions]  # type: ignore[misc]

    def _timestamp(self, device: torch.device | None = None) -> Timestamp:
        if (device or self.device).type != "cuda":
            return time.perf_counter()
        # An external event is recorded by each replay of the graph.
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def _add_span(self, axis: str, phase: str, begin: Timestamp, end: Timestamp) -> None:
        if isinstance(begin, float) and isinstance(end, float):
            self._accumulate(axis, phase, end - begin)
        else:
            spans = self._pending_spans if self._captured_spans is None else self._captured_spans
            spans.append((axis, phase, begin, end))

    def _accumulate(self, axis: str, phase: str, seconds: float) -> None:
        if axis:
            self.wait_seconds[axis] += seconds
        if phase:
            self.phase_seconds[phase] += -seconds if axis else seconds

    def _collect_finished_spans(self) -> None:
        """Accumulates the spans whose end event has completed; the others stay pending."""
        still_pending = []
        for axis, phase, begin, end in self._pending_spans:
            if end.query():
                self._accumulate(axis, phase, begin.elapsed_time(end) / 1e3)
            else:
                still_pending.append((axis, phase, begin, end))
        self._pending_spans = still_pending
        if self._replayed_spans is not None and self._replayed_spans[1].query():
            for axis, phase, begin, end in self._replayed_spans[0]:
                self._accumulate(axis, phase, begin.elapsed_time(end) / 1e3)
            self._replayed_spans = None

    def elapsed(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns seconds by phase and axis since the step began; late CUDA events count in a later step."""
        self._collect_finished_spans()
        return dict(self.phase_seconds), dict(self.wait_seconds)


@dataclass(frozen=True)
class Axis:
    """Size, this rank's index, and the process group. An axis of size 1 has no group and skips its collectives."""

    size: int
    index: int
    group: dist.ProcessGroup | None
    name: str = field(default="world", compare=False)  # the name under which the step timer records waits for this axis
    timer: StepTimer | None = field(default=None, compare=False, repr=False)  # None: waits are not timed

    def __post_init__(self) -> None:
        assert (self.group is None) == (self.size == 1), "an axis has a process group if and only if its size exceeds 1"

    def span(self, total: int) -> tuple[int, int]:
        """Returns start and length of this rank's chunk when `torch.chunk` splits `total` rows over the axis."""
        size = -(-total // self.size)
        first = min(self.index * size, total)
        return first, min(size, total - first)

    def waiting(self, device: torch.device) -> AbstractContextManager[None]:
        """Times the block it wraps as a wait for the other ranks of this axis."""
        return nullcontext() if self.timer is None else self.timer.waiting(self.name, device)


SINGLE_RANK = Axis(1, 0, None)
