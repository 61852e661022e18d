"""Metrics of a step: rank 0 writes one record per step, and every rank gets the verdict that it acts on.

The step timer says where the time went; every rank reports its own metrics to rank 0, which also displays progress:
one live line on a terminal, about ten plain lines otherwise."""

import math
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from shardwise.cluster import device_peak_flops
from shardwise.console import print_line
from shardwise.integrity.detectors import CorruptionDetector, Verdict
from shardwise.job import Job
from shardwise.metrics.rank_metrics import RankMetricsCollector
from shardwise.metrics.trackers import Tracker
from shardwise.parallel.engine import Engine
from shardwise.parallel.expert import routing_stats
from shardwise.parallel.prepare import forward_flops
from shardwise.step import StepResult
from shardwise.train.run_folder import RunFolder

HIDDEN_EVENTS = {"checkpoint"}  # too frequent to print


class Progress:
    def __init__(self, total: int, enabled: bool, unit: str = "tokens"):
        self.total, self.enabled, self.unit = total, enabled, unit
        self._clear = "\r\033[K" if enabled and sys.stdout.isatty() else ""  # of a terminal: its live line
        self._start: tuple[int, float] | None = None  # first step seen, and when

    def update(self, record: dict[str, Any]) -> None:
        done = record["step"]
        self._start = self._start or (done, time.monotonic())
        if self._clear:
            print(f"{self._clear}{self._line(record)}", end="\n" if done == self.total else "", flush=True)
        elif self.enabled and (done in (1, self.total) or done % max(1, self.total // 10) == 0):
            print_line(self._line(record))

    def _line(self, record: dict[str, Any]) -> str:
        done = record["step"]
        assert self._start is not None
        steps, seconds = done - self._start[0], time.monotonic() - self._start[1]
        remaining = f"{timedelta(seconds=round((self.total - done) * seconds / steps))} left" if steps else ""
        loss = record["loss"] if isinstance(record["loss"], str) else f"{record['loss']:.4f}"
        step = f"step {done:>{len(str(self.total))}}/{self.total}"
        return f"{step}  loss {loss}  {record['tokens_per_s']:,.0f} {self.unit}/s  {remaining}".rstrip()

    def print_event(self, kind: str, message: str) -> None:
        if self.enabled and kind not in HIDDEN_EVENTS:
            print_line(f"{self._clear}{kind}: {message}")

    def close(self) -> None:
        print(self._clear, end="", flush=True)


@dataclass
class StopFlag:
    """The signal that asked this rank to stop, or 0; all ranks agree on it at the end of each step."""

    signal_number: int = 0

    def set(self, number: int, frame: object) -> None:
        self.signal_number = number


@dataclass
class MetricsProcessor:
    job: Job
    engine: Engine
    optimizer: torch.optim.Optimizer
    folder: RunFolder
    progress: Progress
    corruption_detector: CorruptionDetector
    stop: StopFlag = field(default_factory=StopFlag)
    writes_later: bool = False  # whether `log_step` leaves writing to `flush`, while the next step computes

    def __post_init__(self) -> None:
        self._unwritten: tuple[dict[str, Any], int, Tensor] | None = None
        self._pinned: Tensor | None = None
        self.device, self.world = self.engine.mesh.device, self.engine.mesh["world"]
        self.step_flops = 3 * sum(forward_flops(self.job.model)) * self.job.samples
        self.peak_flops = device_peak_flops(self.device, self.job.precision)
        self.ranks = RankMetricsCollector(self.job, self.engine, self.optimizer, self.folder.path, self._alert)
        self.tracker = Tracker(self.job, self.folder.path, self._alert)

    def _alert(self, kind: str, message: str) -> None:
        self.folder.log_event(kind, message, step=self.ranks.last_step)
        self.progress.print_event(kind, message)

    def log_step(self, step: int, outcome: StepResult, lr: float, start_time: float, data_wait: float) -> Verdict:
        """Logs a step that began at `start_time` and waited `data_wait` seconds for data. Returns the verdict on it."""
        self.engine.timer.begin_phase("")
        engine = self.engine
        replicas = engine.mesh["local_sgd"]
        if replicas.size > 1:
            outcome = outcome.average_over(replicas)
        values = [outcome.loss, outcome.grad_norm, outcome.skipped, engine.scale.value]
        values.extend(self.corruption_detector.reduce_flags(self.stop.signal_number))
        rows = self.ranks.exchange()
        model, sent = self.job.model, dict(self.engine.timer.bytes_sent)
        self.engine.timer.bytes_sent.clear()
        if model.reports_routing:
            # A GPU has not finished this step yet, so we report the wait times of the previous step.
            waits = engine.timer.wait_seconds if self.device.type == "cpu" else self.ranks.last_waits
            sent_bytes, waited = sent.get("expert", 0), waits.get("expert", 0.0)
            values.extend(routing_stats(model, engine.chains, self.world, self.device, sent_bytes, waited))
        loss, grad_norm, skipped, scale, stop_signal, is_corrupt, *routing_values = self._read(torch.stack(values))
        seconds = time.perf_counter() - start_time
        previous_step, self.ranks.last_step = self.ranks.last_step, step
        spent, waits = self.engine.timer.elapsed()
        record: dict[str, Any] = {"step": step, "samples": step * self.job.samples, "loss": json_number(loss),
                                  "grad_norm": json_number(grad_norm), "lr": lr,
                                  "tokens_per_s": self.job.samples * self.job.model.sequence_length / seconds,
                                  "seconds": seconds, "flops_per_s": self.step_flops / seconds,
                                  "data_wait_seconds": data_wait, "memory_gib": self.ranks.peak_memory() / 2**30,
                                  "time": round(time.time(), 3), **self.ranks.sensors}  # fmt: skip
        spent["other"] = seconds - sum(spent.values()) - sum(waits.values())
        record["phase_seconds"] = {part: round(value, 6) for part, value in spent.items()}
        if waits:
            record["wait_seconds"] = {axis: round(value, 6) for axis, value in sorted(waits.items())}
        if "data" in sent:
            ratio = round(sent["whole"] / sent["data"], 3)
            record |= {"gradient_bytes": sent["data"], "gradient_compression_ratio": ratio}
        if self.peak_flops:
            record["mfu"] = self.step_flops / seconds / self.ranks.world / self.peak_flops
        if skipped:
            record["skipped"] = True
        if engine.scale.dynamic:
            record["loss_scale"] = scale
        if routing_values:
            imbalance, dropped_fraction, total_sent, mean_wait, *load = routing_values
            record |= {"expert_imbalance": imbalance, "expert_drop_fraction": dropped_fraction}
            if total_sent:
                record |= {"expert_bytes": int(total_sent), "expert_wait_seconds": mean_wait}
            record["expert_load"] = [round(share, 5) for share in load]
        self._unwritten = record, previous_step, rows
        if not (self.writes_later or self.job.is_validated_after(step)):  # whose result belongs to the record
            self.flush()
        return Verdict(loss, grad_norm, bool(skipped), int(stop_signal), bool(is_corrupt))

    def _read(self, values: Tensor) -> list[float]:
        """Returns the values; the only synchronization with the device. Copies to pageable memory take longer."""
        if not values.is_cuda:
            return values.tolist()  # type: ignore[no-any-return]
        if self._pinned is None or self._pinned.shape != values.shape:
            self._pinned = torch.empty_like(values, device="cpu", pin_memory=True)
        self._pinned.copy_(values, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._pinned.tolist()  # type: ignore[no-any-return]

    def add_validation(self, values: dict[str, Any]) -> None:
        """Adds the result of a validation to the record of the last step, if it is unwritten."""
        if self._unwritten is not None:
            self._unwritten[0]["validation"] = values

    def flush(self) -> None:
        """Writes the record of the last step, if it is unwritten."""
        if self._unwritten is None:
            return
        (record, previous_step, rows), self._unwritten = self._unwritten, None
        self.ranks.read_sensors()
        if slowest := self.ranks.write(previous_step, rows):
            record["slowest"] = slowest
        if self.ranks.is_main:
            self.folder.log_metrics(record)
            self.tracker(record)
            self.progress.update(record)


def json_number(value: float) -> float | str:
    """Returns a non-finite value as a string, because JSON has no NaN or infinity."""
    return value if math.isfinite(value) else str(value)
