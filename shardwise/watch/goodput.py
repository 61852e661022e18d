"""Goodput: the time of productive steps over the wall time of a run, and the lost time by cause.

A step is productive if it is in the metrics; a step that was repeated after a rollback or restart counts once. The time
between two steps is attributed by the events in it: checkpoints and validations by their measured seconds, the rest to
a restart or rollback if there was one. The time between a stop and the next resume does not count as wall time, and
neither does a stretch that is too long for a run without any record: the clock jumped, or the machine slept.
"""

from dataclasses import dataclass, field

import numpy as np

from shardwise.watch.run_data import JsonObject, RunData, to_float

LOST_TIME_CAUSE = {
    "rollback": "rollback", "killed": "restart", "suspended": "restart", "hung": "restart", "failed": "restart",
    "resumed": "restart",
}  # fmt: skip
END_EVENTS = ("finished", "stopped")
MAX_SILENCE = 3600.0  # seconds without a record of a run that starts or restarts
MEASURED_SECONDS = {"checkpoint": "stall_seconds", "validation": "seconds"}  # fields of these events


@dataclass
class Goodput:
    wall_seconds: float = 0.0  # from the first event or step to the last, without those between stop and resume
    productive_seconds: float = 0.0
    lost_seconds: dict[str, float] = field(default_factory=dict)  # lost seconds by cause

    @property
    def share(self) -> float:
        return self.productive_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0


def goodput(run: RunData) -> Goodput:
    """Returns the goodput of a run. Productive and lost seconds add up to the wall time."""
    ends, seconds = run.column("time"), run.column("seconds")
    finite = np.isfinite(ends) & np.isfinite(seconds)
    ends, seconds = ends[finite], seconds[finite]
    if not len(ends):
        return Goodput()
    result = Goodput(lost_seconds={})

    def add_lost(cause: str, time: float) -> None:
        if time > 0:
            result.lost_seconds[cause] = result.lost_seconds.get(cause, 0.0) + time

    # The first step compiles and allocates; its time above the median is startup.
    median = float(np.median(seconds))
    startup_seconds = max(0.0, float(seconds[0]) - median) if len(seconds) > 2 else 0.0
    add_lost("startup", startup_seconds)
    begin = min([run.events[0]["time"]] if run.events else [], default=float(ends[0] - seconds[0]))
    last = max(float(ends[-1]), run.events[-1]["time"] if run.events else 0.0)
    edges, hang_timeout = [begin, *ends.tolist()], run.job.run.hang_timeout
    starts = [*(ends - seconds).tolist(), last]
    event_index = 0
    # Each gap lies between the end of a step (or the start of the run) and the next start (or the end of the run).
    for index, (gap_begin, gap_end) in enumerate(zip(edges, starts, strict=True)):
        first = event_index
        while event_index < len(run.events) and run.events[event_index]["time"] <= gap_end + 1e-3:
            event_index += 1
        gap_events = run.events[first:event_index]
        max_silence = max(2 * hang_timeout, MAX_SILENCE if gap_events or not index else 0.0)
        gap, previous = 0.0, {"time": gap_begin, "event": ""}
        for event in [*gap_events, {"time": gap_end, "event": ""}]:
            silence = event["time"] - previous["time"] - _measured_seconds(event)
            was_stopped = previous["event"] in END_EVENTS and event["event"] in ("resumed", "steps_changed")
            if silence <= max_silence and not was_stopped:  # otherwise the run was not running
                gap += max(0.0, event["time"] - previous["time"])
            previous = event
        gap = min(gap, max(0.0, gap_end - gap_begin))
        for event in gap_events:
            duration = min(gap, _measured_seconds(event))
            add_lost(event["event"], duration)
            gap -= duration
        causes = [LOST_TIME_CAUSE[event["event"]] for event in gap_events if event["event"] in LOST_TIME_CAUSE]
        add_lost("startup" if index == 0 else causes[0] if causes else "between steps", gap)
    result.productive_seconds = float(seconds.sum()) - startup_seconds
    result.wall_seconds = result.productive_seconds + sum(result.lost_seconds.values())
    return result


def _measured_seconds(event: JsonObject) -> float:
    """The duration that an event states; 0 if it states none."""
    seconds = to_float(event.get(MEASURED_SECONDS.get(event["event"], "")))
    return seconds if seconds > 0 else 0.0
