"""What a step gave: one line of metrics, written by the first rank, and the numbers that every rank decides by. Where
its time went is told by the meter, and by every rank to the first."""

from __future__ import annotations

import math
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
from shardwise.watch.ranks import Ranks
from shardwise.watch.track import Tracker


@dataclass
class StopFlag:
    """The signal that told this rank to stop, 0 for none; the world agrees on it at the end of each step."""

    number: int = 0


@dataclass
class Measure:
    job: Job
    engine: Engine
    optimizer: torch.optim.Optimizer
    folder: RunFolder
    progress: Progress
    witness: Witness
    stop: StopFlag = field(default_factory=StopFlag)

    def __post_init__(self) -> None:
        self.device, self.world = self.engine.mesh.device, self.engine.mesh["world"]
        self.step_flops = 3 * flops_of(self.job) * self.job.samples
        self.peak = peak_rate(self.device, self.job.precision)
        self.ranks = Ranks(self.job, self.engine, self.optimizer, self.folder.path, self._alert)
        self.track = Tracker(self.job, self.folder.path, self._alert)

    def _alert(self, kind: str, words: str) -> None:
        self.folder.event(kind, words, step=self.ranks.before)
        self.progress.say(kind, words)

    def take(self, done: int, outcome: Outcome, rate: float, begin: float, waited: float) -> Told:
        """Writes down what a step gave that began at `begin` and waited so long for data."""
        METER.phase("")
        engine = self.engine
        apart = engine.mesh["apart"]
        if apart.size > 1:
            outcome = outcome.mean_over(apart)
        values = [outcome.loss, outcome.grad_norm, outcome.skipped, engine.scale.value]
        values.extend(self.witness.agreed(self.stop.number))
        rows = self.ranks.exchange()
        model, sent = self.job.model, dict(METER.sent)
        METER.sent.clear()
        if isinstance(model, MoE):
            now = METER.waited if self.device.type == "cpu" else self.ranks.row.waited  # a GPU is not there yet
            values.extend(
                routing(model, engine.chains, self.world, self.device, sent.get("expert", 0), now.get("expert", 0.0))
            )
        loss, norm, skipped, scale, told, wrong, *more = torch.stack(values).tolist()  # the one wait for the device
        seconds = time.perf_counter() - begin
        behind = self.ranks.keep(rows, done)
        if self.ranks.main:
            spent, waits = METER.so_far()
            record: dict[str, Any] = {
                "step": done, "samples": done * self.job.samples,
                "loss": plain(loss), "grad_norm": plain(norm), "lr": rate,
                "tokens_per_s": self.job.samples * self.job.model.sequence / seconds, "seconds": seconds,
                "flops_per_s": self.step_flops / seconds, "data_wait": waited,
                "memory_gib": self.ranks.memory() / 2**30, "time": round(time.time(), 3),
            }  # fmt: skip
            spent["other"] = seconds - sum(spent.values()) - sum(waits.values())
            record["spent"] = {part: round(value, 6) for part, value in spent.items()}
            if waits:
                record["waited"] = {axis: round(value, 6) for axis, value in sorted(waits.items())}
            if behind:
                record["slowest"] = behind
            if "data" in sent:
                record |= {"gradient_bytes": sent["data"], "gradient_ratio": round(sent["whole"] / sent["data"], 3)}
            if self.peak:
                record["utilisation"] = self.step_flops / seconds / self.ranks.world / self.peak
            if skipped:
                record["skipped"] = True
            if engine.scale.dynamic:
                record["loss_scale"] = scale
            if more:
                record |= _told(Routing.of(more))
            self.folder.metric(record)
            self.track(record)
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


def plain(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)
