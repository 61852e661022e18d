"""Counts how often a run has failed for the same cause at the same step: no run restarts forever.

The counts are in the run folder, because a scheduler may start the launcher again: a pod that failed is replaced, a job
is requeued. They begin anew once the run gets further than it ever was."""

import json
import re
from contextlib import suppress
from pathlib import Path

from shardwise.files import parse_json, write_text

MAX_REPEATS = 3  # restarts for the same cause at the same step
FILE_NAME = "restarts.json"
# What differs between two messages of one cause: addresses, sizes, ranks, process ids, times.
VARYING = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")
MAX_CAUSE = 200  # characters of a message


def normalise(message: str) -> str:
    """Returns a message without its numbers, by which two failures are compared."""
    return VARYING.sub("#", " ".join(message.split()))[:MAX_CAUSE]


class RepeatedFailures:
    def __init__(self, run: Path):
        self.path = run / FILE_NAME
        self.step = -1
        """The last step that any attempt has begun."""
        self.counts: dict[tuple[str, int], int] = {}
        """Failures by cause and step since then."""
        with suppress(OSError, ValueError, TypeError, KeyError):  # none yet, or damaged: counted from 0
            found = parse_json(self.path.read_bytes())
            counts = {(str(cause), int(step)): int(count) for cause, step, count in found["failures"]}
            self.step, self.counts = int(found["step"]), counts

    def add(self, cause: str, step: int, latest_step: int) -> int:
        """Counts a failure in `step` of an attempt that came to `latest_step`. Returns how many there have been for
        this cause at this step, without progress in between."""
        if latest_step > self.step:
            self.step = latest_step
            self.counts = {}
        key = (cause, step)
        self.counts[key] = self.counts.get(key, 0) + 1
        self._save()
        return self.counts[key]

    def reached(self, step: int) -> None:
        """Notes the last step of an attempt that has ended without a failure, such as by a scheduler's signal. If it is
        progress, the failures before it count no more."""
        if step <= self.step:
            return
        had_failures = bool(self.counts)
        self.step = step
        self.counts = {}
        if had_failures:
            self._save()

    def _save(self) -> None:
        failures = [[cause, step, count] for (cause, step), count in self.counts.items()]
        with suppress(OSError):  # a full disk: this launcher still knows
            write_text(self.path, json.dumps({"step": self.step, "failures": failures}))
