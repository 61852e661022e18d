"""Per-rank step metrics: one row of numbers per rank and step, written to `ranks.jsonl`.

Ranks exchange the row of their previous step together with the stop flag, in one collective per step. Rank 0 writes
one line per window of steps, with sums over it. Windows grow, so that the file of any run has about 2000 lines."""

import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.comm.collectives import Axis, all_gather
from shardwise.job import Job
from shardwise.layout import DEGREES
from shardwise.parallel.engine import Engine

EmitEvent = Callable[[str, str], None]
Figures = dict[str, float]
PHASES = ("compute", "optimizer", "data", "checkpoint", "validation")
WAIT_AXES = (*DEGREES, "data", "local_sgd", "world")
MEMORY_KINDS = ("weights", "gradients", "optimizer")
GPU_SENSORS = ("gpu_temperature", "gpu_power", "gpu_utilization")  # degrees Celsius, watts, percent
# Numeric fields of metrics.jsonl that the page and the trackers read.
SCALAR_METRICS = ("samples", "loss", "grad_norm", "lr", "tokens_per_s", "seconds", "flops_per_s", "memory_gib", "time",
                  "mfu", "loss_scale", "gradient_compression_ratio", "expert_imbalance", "expert_drop_fraction",
                  *GPU_SENSORS)  # fmt: skip
TARGET_LINES = 1000  # a window covers at most total_steps / TARGET_LINES steps ...
MIN_LINES = 200  # ... and at most step / MIN_LINES, which keeps early windows short
TIMELINE_SAMPLES = 50  # steps per run whose pipeline timeline is recorded
ALERT_WINDOW = 20  # steps per check for stragglers and data stalls
STRAGGLER_RATIO = 1.5  # a straggler computes more than this many times as long as the median of its peers ...
ALERT_SHARE = 0.2  # ... and delays them by more than this share of the step. Also the threshold for data stalls

START, SECONDS, FIRST_PHASE = 0, 1, 2  # columns of a row: step start, step time, phases, waits, memory, sensors
FIRST_WAIT = FIRST_PHASE + len(PHASES)
PEAK_MEMORY = FIRST_WAIT + len(WAIT_AXES)
FIRST_SENSOR = PEAK_MEMORY + 1 + len(MEMORY_KINDS)


def metrics_row(start: float, seconds: float, phases: Figures, waits: Figures, device: Figures) -> list[float]:
    """Returns the row of one step of one rank, from its start (Unix time on the clock of rank 0) to the next. Phases do
    not include waits; `device`: bytes of weights, gradients and optimizer state, the peak so far, and sensors."""
    groups = (phases, PHASES), (waits, WAIT_AXES), (device, ("peak", *MEMORY_KINDS, *GPU_SENSORS))
    return [start, seconds, *(values.get(name, 0.0) for values, names in groups for name in names)]


@dataclass
class RankMetricsWriter:
    """Writes the rows of all ranks to `ranks.jsonl`; lives on rank 0. A step is an array (ranks, columns)."""

    path: Path
    total_steps: int
    stages: int  # pipeline stages, whose ranks have equal work

    def __post_init__(self) -> None:
        self.window: list[np.ndarray] = []
        self.recent_steps: list[np.ndarray] = []
        self.active_alerts: set[str] = set()

    def add(self, step: int, rows: np.ndarray) -> list[str]:
        """Adds a step. Returns new alerts (stragglers, data stalls) as sentences."""
        self.window.append(rows)
        # With many ranks lines are long, so each covers more steps: one more per 32 ranks.
        if len(self.window) >= max(1 + len(rows) // 32, min(self.total_steps // TARGET_LINES, step // MIN_LINES)):
            self.flush(step)
        self.recent_steps.append(rows)
        if len(self.recent_steps) < ALERT_WINDOW:
            return []
        total = sum_steps(self.recent_steps)
        current_alerts = dict(find_alerts(total[:, FIRST_PHASE:FIRST_WAIT].T, total[:, SECONDS], self.stages))
        self.recent_steps = []
        new = [message for key, message in current_alerts.items() if key not in self.active_alerts]
        self.active_alerts = set(current_alerts)
        return new

    def flush(self, step: int) -> None:
        """Writes the current window, which ends at `step`, as one line."""
        if not self.window:
            return
        rows, gib = sum_steps(self.window), 2.0**30

        def columns(names: Sequence[str], first: int, scale: float = 1.0) -> dict[str, list[float]]:
            values = rows[:, first : first + len(names)].T / scale
            return {name: column.round(5).tolist() for name, column in zip(names, values, strict=True) if column.any()}

        record = {"step": step, "steps": len(self.window), "start": rows[:, START].round(4).tolist(),
                  "seconds": rows[:, SECONDS].round(5).tolist(), "phase_seconds": columns(PHASES, FIRST_PHASE),
                  "wait_seconds": columns(WAIT_AXES, FIRST_WAIT),
                  "memory_gib": (rows[:, PEAK_MEMORY] / gib).round(4).tolist(),
                  "memory_by_kind_gib": columns(MEMORY_KINDS, PEAK_MEMORY + 1, gib),
                  **columns(GPU_SENSORS, FIRST_SENSOR)}  # fmt: skip
        with suppress(OSError), self.path.open("a") as file:  # a lost line is harmless; checkpoints report a full disk
            file.write(json.dumps(record) + "\n")
        self.window = []


def sum_steps(steps: list[np.ndarray]) -> np.ndarray:
    """Sums the steps of a window. Start times are those of the first step, memory and sensors those of the last."""
    total = np.sum(steps, axis=0)
    total[:, START], total[:, PEAK_MEMORY:] = steps[0][:, START], steps[-1][:, PEAK_MEMORY:]
    return np.asarray(total)


def find_slowest_rank(rows: np.ndarray) -> dict[str, Any]:
    """Returns the rank and phase that exceed the median over ranks by the most seconds."""
    phases = rows[:, FIRST_PHASE:FIRST_WAIT]
    medians = np.sort(phases, axis=0)[(len(phases) - 1) // 2]
    rank, phase = np.unravel_index(int((phases - medians).argmax()), phases.shape)
    seconds, median = float(phases[rank, phase]), float(medians[phase])
    return {"rank": int(rank), "phase": PHASES[phase], "seconds": round(seconds, 6), "median": round(median, 6)}


def find_alerts(phase_seconds: np.ndarray, seconds: np.ndarray, stages: int) -> Iterator[tuple[str, str]]:
    """Yields (key, sentence) for each straggler among the ranks of its stage, and for the worst data stall. The times
    are those of each rank in each of PHASES, and in all."""
    compute, optimizer, data, *_ = phase_seconds
    busy, seconds = compute + optimizer, np.maximum(seconds, 1e-9)
    for group in np.array_split(np.arange(len(busy)), stages):
        median = float(np.sort(busy[group])[(len(group) - 1) // 2])  # the lower median
        for rank in group:
            excess = float(busy[rank]) - median
            if busy[rank] > STRAGGLER_RATIO * median and excess > ALERT_SHARE * seconds[rank]:
                slowdown = f"computes {busy[rank] / max(median, 1e-9):.1f} times as long as its peers"
                cost = f"which wait {100 * excess / seconds[rank]:.0f}% of each step for it"
                yield f"straggler {rank}", f"rank {rank} {slowdown}, {cost}."
    data_shares = data / seconds
    rank = int(data_shares.argmax())
    if data_shares[rank] > ALERT_SHARE:
        message = f"rank {rank} spends {100 * data_shares[rank]:.0f}% of its step time waiting for data"
        yield f"data {rank}", f"{message}; raise data.workers or use a faster source."


def measure_clock_offset(ranks: Axis, device: torch.device) -> float:
    """Returns how many seconds this rank's clock is ahead of rank 0's, read right after collectives; 0 if noise."""
    sent = torch.zeros(1, dtype=torch.float64, device=device)
    received = sent.repeat(ranks.size)
    offsets = []
    for _ in range(8):
        all_gather(received, sent, axis=ranks)
        received.cpu()  # waits until the collective has finished
        sent.fill_(time.time())
        all_gather(received, sent, axis=ranks)
        times = received.tolist()
        offsets.append(times[ranks.index] - times[0])
    offset = statistics.median(offsets)
    return offset if abs(offset) > max(offsets) - min(offsets) else 0.0


def sum_bytes_by_kind(tensors_by_kind: dict[str, Sequence[Any]]) -> dict[str, float]:
    """Sums the bytes of tensors by kind. Shared storage counts once, for the first kind that holds it."""
    seen: set[int] = set()
    totals = dict.fromkeys(tensors_by_kind, 0.0)
    for kind, tensors in tensors_by_kind.items():
        for tensor in tensors:
            storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                totals[kind] += storage.nbytes()
    return totals


class RankMetricsCollector:
    """Measures this rank's steps, all-gathers the metrics, emits new stragglers and data stalls (as `straggler`)."""

    def __init__(self, job: Job, engine: Engine, optimizer: Optimizer, run_path: Path, emit_event: EmitEvent):
        mesh, world = engine.mesh, engine.mesh.layout.world
        self.timer = engine.timer
        self.engine, self.optimizer, self.run_path, self.emit_event = engine, optimizer, run_path, emit_event
        self.device, self.rank, self.world, self.is_main = mesh.device, mesh.rank, world, mesh.rank == 0
        self.last_step, self.last_row, self.last_waits = 0, metrics_row(0.0, 0.0, {}, {}, {}), dict[str, float]()
        """The last step taken (0 if none since `reset`); metrics and waits of the last step that has ended."""
        self.memory_by_kind: dict[str, float] = {}
        self._memory_read_time, self._peak_bytes = -1.0, 0.0
        self.sensors, self._sensor_read_time = dict[str, float](), -math.inf
        self._gradient_bytes_hook = optimizer.register_step_pre_hook(self._count_gradient_bytes)
        self.writer = RankMetricsWriter(run_path / "ranks.jsonl", job.total_steps, mesh.layout.pipeline)
        self.clock_offset = measure_clock_offset(mesh.all_ranks, self.device) if world > 1 else 0.0
        self.timeline_every = max(10, job.total_steps // TIMELINE_SAMPLES)
        # "loader": the data-parallel ranks of all local-SGD replicas.
        is_first_of_stage = all(mesh[axis].index == 0 for axis in ("loader", "context", "tensor"))
        self.records_timeline = engine.pipeline is not None and is_first_of_stage

    def reset(self) -> None:
        """Discards the current measurement; called before the first step and after a rollback."""
        self.timer.begin_step()
        self.last_step = 0

    def begin(self, steps_done: int) -> None:
        """Ends the measurement of the previous step and starts that of step `steps_done + 1`."""
        if self.last_step:
            self._end_step()
        self.timer.begin_step()
        self._step_start, self._step_perf_counter = time.time() - self.clock_offset, time.perf_counter()
        if self.records_timeline and steps_done % self.timeline_every == 2:  # the first steps are warm-up
            self.timer.start_recording()

    def _end_step(self) -> None:
        self.timer.begin_phase("")
        phase_seconds, self.last_waits = self.timer.elapsed()
        if "weights" not in self.memory_by_kind:
            self._gradient_bytes_hook.remove()
            states = [value for state in self.optimizer.state.values() for value in state.values()]
            states = [value for value in states if isinstance(value, Tensor)]
            self.memory_by_kind |= sum_bytes_by_kind({"weights": self._weights(), "optimizer": states})
        seconds = time.perf_counter() - self._step_perf_counter
        memory = self.memory_by_kind | {"peak": self.peak_memory()}
        self.last_row = metrics_row(self._step_start, seconds, phase_seconds, self.last_waits, memory | self.sensors)
        if actions := self.timer.take_recorded_actions():
            offset = self.clock_offset
            shifted = [[*action, round(begin - offset, 6), round(end - offset, 6)] for *action, begin, end in actions]
            path = self.run_path / "timeline" / f"rank-{self.rank}.jsonl"
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps({"step": self.last_step, "actions": shifted}) + "\n")

    def peak_memory(self) -> float:
        """Returns this rank's peak memory in bytes: of the GPU, or resident. Read every 0.1 s at most: it is slow."""
        if time.monotonic() - self._memory_read_time >= 0.1:
            self._memory_read_time = time.monotonic()
            self._peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # resident memory
            if self.device.type == "cuda":
                self._peak_bytes = torch.cuda.max_memory_allocated(self.device)
        return self._peak_bytes

    def read_sensors(self) -> None:
        """Reads the sensors of this rank's GPU, every five seconds: it takes milliseconds."""
        if self.device.type == "cuda" and time.monotonic() - self._sensor_read_time >= 5.0:
            self._sensor_read_time, cuda, gpu = time.monotonic(), torch.cuda, self.device
            with suppress(Exception):  # no NVML, or a GPU without these sensors: the run does not depend on them
                values = cuda.temperature(gpu), cuda.power_draw(gpu) / 1e3, cuda.utilization(gpu)
                self.sensors = dict(zip(GPU_SENSORS, map(float, values), strict=True))

    def _count_gradient_bytes(self, *_: Any) -> None:
        """Counts gradient bytes right before the first optimizer step, while gradients exist."""
        gradients = [weight.grad for weight in self._weights() if weight.grad is not None]
        self.memory_by_kind = self.memory_by_kind or sum_bytes_by_kind({"gradients": gradients})

    def _weights(self) -> list[Tensor]:
        tensors = [w for chain in self.engine.chains for w in (*chain.parameters(), *chain.buffers())]
        return tensors + [param_shard.tensor for param_shard in self.engine.param_shards]

    def exchange(self) -> Tensor:
        """All-gathers the metrics of the previous step (ranks, columns), on the device if there are several ranks."""
        device = self.device if self.world > 1 else None  # a copy to the device would wait for the step
        local_row = torch.tensor(self.last_row, dtype=torch.float64, device=device)
        all_rows = local_row.new_empty(self.world, local_row.numel())
        all_gather(all_rows.view(-1), local_row, axis=self.engine.mesh.all_ranks)
        return all_rows

    def write(self, step: int, rows: Tensor) -> dict[str, Any]:
        """On rank 0, writes the rows of a step and returns its slowest rank; otherwise, or if `step` is 0, {}."""
        if not step or not self.is_main:
            return {}
        table = rows.cpu().numpy()
        for message in self.writer.add(step, table):
            self.emit_event("straggler", message)
        return {"step": step, **find_slowest_rank(table)} if self.world > 1 else {}

    def finish(self) -> None:
        """Exchanges and writes the last step. Every rank must call it."""
        if not self.last_step:
            return
        self._memory_read_time = -1.0
        self._end_step()
        rows = self.exchange()
        if self.is_main:
            self.writer.add(self.last_step, rows.cpu().numpy())
            self.writer.flush(self.last_step)
