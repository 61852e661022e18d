"""What a step gave: one line of metrics, written by the first rank, and the numbers that every rank decides by."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.cluster import peak_rate
from shardwise.comm.meter import METER
from shardwise.guard.judge import Told
from shardwise.guard.witness import Witness
from shardwise.job import Job
from shardwise.kinds import DLRM, MoE
from shardwise.models import dlrm
from shardwise.models.families import cost_of
from shardwise.parallel.engine import Engine
from shardwise.parallel.expert import Routing, routing
from shardwise.step import Outcome
from shardwise.train.folder import RunFolder
from shardwise.train.progress import Progress


@dataclass
class StopFlag:
    """The signal that told this rank to stop, 0 for none; the world agrees on it at the end of each step."""

    number: int = 0


@dataclass
class Measure:
    job: Job
    engine: Engine
    folder: RunFolder
    progress: Progress
    witness: Witness
    stop: StopFlag = field(default_factory=StopFlag)

    def __post_init__(self) -> None:
        self.device, self.world = self.engine.mesh.device, self.engine.mesh["world"]
        self.step_flops = 3 * flops_of(self.job) * self.job.samples
        self.peak = peak_rate(self.device, self.job.precision)

    def take(self, done: int, outcome: Outcome, rate: float, begin: float, waited: float) -> Told:
        """Writes down what a step gave that began at `begin` and waited so long for data."""
        engine = self.engine
        apart = engine.mesh["apart"]
        if apart.size > 1:
            outcome = outcome.mean_over(apart)
        values = [outcome.loss, outcome.grad_norm, outcome.skipped, engine.scale.value]
        values.extend(self.witness.agreed(self.stop.number))
        model, (sent, seconds_by_axis) = self.job.model, METER.read()
        if isinstance(model, MoE):
            own = sent.get("expert", 0), seconds_by_axis.get("expert", 0.0)
            values.extend(routing(model, engine.chains, self.world, self.device, *own))
        loss, norm, skipped, scale, told, wrong, *more = torch.stack(values).tolist()  # the one wait for the device
        seconds = time.perf_counter() - begin
        if self.world.index == 0:
            record: dict[str, Any] = {
                "step": done, "samples": done * self.job.samples,
                "loss": _plain(loss), "grad_norm": _plain(norm), "lr": rate,
                "tokens_per_s": self.job.samples * self.job.model.sequence / seconds, "seconds": seconds,
                "flops_per_s": self.step_flops / seconds, "data_wait": waited,
                "memory_gib": peak_memory(self.device) / 2**30,
            }  # fmt: skip
            if seconds_by_axis:
                record["waited"] = {axis: round(value, 6) for axis, value in sorted(seconds_by_axis.items())}
            if "data" in sent:
                record["gradient_bytes"] = sent["data"]
            if self.peak:
                record["utilisation"] = self.step_flops / seconds / self.world.size / self.peak
            if skipped:
                record["skipped"] = True
            if engine.scale.dynamic:
                record["loss_scale"] = scale
            if more:
                record |= _told(Routing.of(more))
            self.folder.metric(record)
            self.progress.show(record)
        return Told(loss, norm, bool(skipped), int(told), bool(wrong))


def _told(routing: Routing) -> dict[str, Any]:
    record: dict[str, Any] = {"expert_imbalance": routing.imbalance, "expert_dropped": routing.dropped}
    if routing.sent:
        record |= {"expert_bytes": int(routing.sent), "expert_seconds": routing.waited}
    return {**record, "expert_load": [round(share, 5) for share in routing.load]}


def flops_of(job: Job) -> float:
    """Floating-point operations of a sample's forward."""
    return dlrm.cost(job.model) if isinstance(job.model, DLRM) else sum(cost_of(job.built()))


def _plain(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: on the device, or in all where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
