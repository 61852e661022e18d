"""Collects every rank's metrics of the previous step on all ranks, in one small all-gather per step."""

import json
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.collectives import all_gather
from shardwise.job import Job
from shardwise.metrics import rank_metrics
from shardwise.metrics.rank_metrics import RankMetrics, RankMetricsWriter
from shardwise.parallel.engine import Engine

TIMELINE_SAMPLES = 50  # steps per run whose pipeline timeline is recorded


class RankMetricsCollector:
    """Measures this rank's steps and all-gathers the metrics. Calls `emit_event` for new alerts (stragglers and data
    stalls, both as `straggler` events)."""

    def __init__(
        self, job: Job, engine: Engine, optimizer: torch.optim.Optimizer, run_path: Path,
        emit_event: Callable[[str, str], None],
    ):  # fmt: skip
        mesh, world = engine.mesh, engine.mesh.layout.world
        self.timer = engine.timer
        self.engine, self.optimizer, self.run_path, self.emit_event = engine, optimizer, run_path, emit_event
        self.device, self.rank, self.world, self.is_main = mesh.device, mesh.rank, world, mesh.rank == 0
        self.last_step, self.last_metrics = 0, RankMetrics()
        """The last step taken (0 if none since `reset`), and the metrics of the last step that has ended."""
        self.memory_by_kind: dict[str, float] = {}
        self._memory_read_time, self._peak_bytes = -1.0, 0.0
        self._gradient_bytes_hook = optimizer.register_step_pre_hook(self._count_gradient_bytes)
        self.writer = RankMetricsWriter(run_path / "ranks.jsonl", job.total_steps, mesh.layout.pipeline)
        self.clock_offset = rank_metrics.clock_offset(mesh.all_ranks, self.device) if world > 1 else 0.0
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
        phase_seconds, wait_seconds = self.timer.elapsed()
        if "weights" not in self.memory_by_kind:
            self._gradient_bytes_hook.remove()
            states = [value for state in self.optimizer.state.values() for value in state.values()]
            states = [value for value in states if isinstance(value, Tensor)]
            self.memory_by_kind |= rank_metrics.sum_bytes_by_kind({"weights": self._weights(), "optimizer": states})
        seconds = time.perf_counter() - self._step_perf_counter
        memory = self.peak_memory(), self.memory_by_kind
        self.last_metrics = RankMetrics(self._step_start, seconds, phase_seconds, wait_seconds, *memory)
        if actions := self.timer.take_recorded_actions():
            offset = self.clock_offset
            shifted = [[*action, round(begin - offset, 6), round(end - offset, 6)] for *action, begin, end in actions]
            path = self.run_path / "timeline" / f"rank-{self.rank}.jsonl"
            with suppress(OSError):
                path.parent.mkdir(exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps({"step": self.last_step, "actions": shifted}) + "\n")

    def peak_memory(self) -> float:
        """Returns this rank's peak memory in bytes: of the GPU, or resident. Read at most once a second: it is slow."""
        if time.monotonic() - self._memory_read_time >= 1.0:
            self._memory_read_time = time.monotonic()
            self._peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # resident memory
            if self.device.type == "cuda":
                self._peak_bytes = torch.cuda.max_memory_allocated(self.device)
        return self._peak_bytes

    def _count_gradient_bytes(self, *_: Any) -> None:
        """Counts gradient bytes right before the first optimizer step, while gradients exist."""
        gradients = [weight.grad for weight in self._weights() if weight.grad is not None]
        self.memory_by_kind = self.memory_by_kind or rank_metrics.sum_bytes_by_kind({"gradients": gradients})

    def _weights(self) -> list[Tensor]:
        tensors = [w for chain in self.engine.chains for w in (*chain.parameters(), *chain.buffers())]
        return tensors + [param_shard.tensor for param_shard in self.engine.param_shards]

    def exchange(self) -> Tensor:
        """All-gathers the metrics of the previous step (ranks, columns), on the device if there are several ranks."""
        device = self.device if self.world > 1 else None  # a copy to the device would wait for the step
        local_row = torch.tensor(self.last_metrics.to_list(), dtype=torch.float64, device=device)
        all_rows = local_row.unsqueeze(0)
        if self.world > 1:
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
        return {"step": step, **rank_metrics.find_slowest_rank(table)} if self.world > 1 else {}

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
