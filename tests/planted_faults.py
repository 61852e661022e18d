"""Workers with faults that only the tests plant, beside those of `shardwise chaos`.

    fill, free      the disk of the run folder: full up to a few KiB, too little for a checkpoint; free again
    loop, raise     an endless loop; an exception
    sleep           reading samples blocks
    inf             a module whose name ends with the fault's phase returns infinity, in replays of the step too
    miscompute      a block returns a wrong result in the first or second forward of a step
    spike           a loss of 1000
    skip, mismatch  the first all-reduce of a step is skipped, or has another size

`main` is their entry point. Two files that a test leaves in the run folder change what workers do:

    faults/flops.json    name of the model's family and forward FLOPs of its modules: the model is not traced for them,
                         which takes half of a small worker's time
    faults/one-by-one    each attempt has the next fault alone
"""

import json
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise import step as stepping
from shardwise.chaos import faulty_worker
from shardwise.chaos.faulty_worker import FaultInjector, trigger_times, wrap
from shardwise.data.sample_stream import Samples, SampleStream
from shardwise.integrity.detectors import Verdict
from shardwise.models.registry import named_family


def main(arguments: list[str], **options: Any) -> None:
    use_kept_flops(Path(arguments[0]))
    faulty_worker.main(arguments, PlantedFaults, **options)


def use_kept_flops(run: Path) -> None:
    """Makes this process take the forward FLOPs of the run's model from its file instead of tracing the model."""
    with suppress(FileNotFoundError):
        name, flops = json.loads((run / "faults" / "flops.json").read_text())
        named_family(name).forward_flops = lambda config: flops  # type: ignore[method-assign, assignment]


class PlantedFaults(FaultInjector):
    def install(self) -> None:
        if (self.run_path / "faults" / "one-by-one").exists():
            count_triggered = len(trigger_times(self.run_path))
            self.faults = [fault for fault in self.faults if fault.number == count_triggered]
        super().install()
        self.forward_counts: Counter[int] = Counter()
        engine, kinds = self.trainer.engine, {fault.kind for fault in self.faults}
        if "inf" in kinds:
            for name, module in engine.chains[-1].named_modules():
                if not list(module.children()) and name.endswith(self.faults[0].phase):
                    module.register_forward_hook(self._inject_inf)
                    break
        if "miscompute" in kinds:
            engine.chains[0].blocks()[-1].register_forward_hook(self._inject_miscompute)
        if "spike" in kinds:
            self._inject_loss_spike()
        if "sleep" in kinds:
            wrap(SampleStream, "read", before=self._inject_sleep)
        if kinds & {"skip", "mismatch"}:
            self._inject_collective_mismatch()

    def trigger(self, phase: str) -> None:
        fault = self.take_due("fill", "free", "loop", "raise", phase=phase)
        if fault is not None and fault.kind in ("fill", "free"):
            fill_disk(self.run_path, fault.kind == "fill")
        elif fault is not None and fault.kind == "raise":
            raise ValueError(f"injected at step {self.step}")
        while fault is not None and fault.kind == "loop":
            pass
        super().trigger(phase)

    def _inject_inf(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return output * float("inf") if self.step == self.faults[0].step else None

    def _inject_miscompute(self, module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        self.forward_counts[self.step] += 1
        fault = self.take_due("miscompute", phase={1: "first", 2: "second"}.get(self.forward_counts[self.step], ""))
        return output * 1.25 if fault is not None else None  # any factor but 1

    def _inject_loss_spike(self) -> None:
        policy = self.trainer.anomaly_policy
        original = policy.evaluate

        def evaluate_with_spike(step: int, verdict: Verdict, samples: Samples) -> None:
            spike = Verdict(loss=1e3, grad_norm=1.0, skipped=False)
            original(step, spike if self.take_due("spike") else verdict, samples)

        policy.evaluate = evaluate_with_spike  # type: ignore[method-assign]

    def _inject_sleep(self, stream: SampleStream, positions: Any) -> None:
        if positions[0] // self.trainer.job.samples >= self.faults[0].step - 1:
            self.step = max(self.step, max(fault.step for fault in self.faults))  # the loader reads ahead of the step
            if self.take_due("sleep"):
                time.sleep(3600)

    def _inject_collective_mismatch(self) -> None:
        original = stepping.all_reduce

        def faulty_all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.take_due("skip"):
                return None
            # No all-reduce of a step has 77 elements.
            return original(tensor.new_zeros(77) if self.take_due("mismatch") else tensor, *args, **kwargs)

        stepping.all_reduce = faulty_all_reduce


def fill_disk(run: Path, fill: bool) -> None:
    ballast = run / "faults" / "ballast"
    if not fill:
        ballast.unlink()
        return
    disk = os.statvfs(run)
    with ballast.open("wb") as file:
        file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - (32 << 10))))
