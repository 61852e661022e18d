"""A worker with fault injection, for `shardwise chaos`: real signals, real damage. The tests add faults of their own.

`faults.json` in the run folder lists the faults, such as `{"kind": "kill", "rank": 1, "step": 7, "phase": "backward"}`.
Each fault triggers once: its rank first writes the time to `faults/NUMBER`, and skips a fault whose file exists."""

import ctypes
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise import step as stepping
from shardwise.data.sample_stream import Samples
from shardwise.files import create_text, write_text
from shardwise.integrity.checksums import INT_DTYPES, TrackedTensor
from shardwise.launch import worker
from shardwise.train import checkpoint
from shardwise.train.checkpoint_folder import valid_checkpoints
from shardwise.train.loop import TrainingLoop

Hook = Callable[..., None]
PHASES = ("data", "forward", "backward", "optimizer", "save", "load")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGABRT, "segfault": signal.SIGSEGV}
SIGNALS |= {"flip": signal.SIGKILL, "flip memory": signal.SIGKILL, "native abort": signal.SIGABRT}


@dataclass(frozen=True)
class Fault:
    kind: str
    """kill, abort, native abort (in a thread without Python), segfault, stop; flip or flip memory (a bit of a
    checkpoint or snapshot, then kill); weight, state or gradient (a bit of one); nan."""
    rank: int
    step: int
    phase: str = "data"
    number: int = 0


def inject_faults(run: Path, faults: list[Fault]) -> None:
    write_text(run / "faults.json", json.dumps([asdict(fault) for fault in faults]))
    (run / "faults").mkdir(exist_ok=True)


def trigger_times(run: Path) -> dict[int, float]:
    """Returns the time at which each fault triggered, by its number."""
    return {int(path.name): float(path.read_text()) for path in (run / "faults").glob("[0-9]*")}


def samples_used(run: Path) -> list[int]:
    """Returns the sample indices of the last execution of every step."""
    samples: dict[tuple[str, int], list[int]] = {}
    for path in (run / "faults").glob("samples-*"):
        for line in path.read_text().splitlines():
            step, *ids = map(int, line.split())
            samples[path.name, step] = ids
    return [index for ids in samples.values() for index in ids]


class FaultInjector:
    """Hooks a trainer so that its rank's faults trigger at their step and phase."""

    def __init__(self, run_path: Path, trainer: TrainingLoop, faults: list[Fault]):
        self.run_path, self.trainer, self.faults, self.step = run_path, trainer, faults, 0

    def install(self) -> None:
        trainer, engine = self.trainer, self.trainer.engine
        wrap(trainer, "set_phase", after=self._on_phase)
        if engine.is_data_leader:
            wrap(engine, "run", before=self._log_samples)
        if self.faults:
            engine.chains[0].register_forward_hook(self._on_forward)
            trainer.optimizer.register_step_pre_hook(lambda *_: self.trigger("optimizer"))
            wrap(checkpoint, "write_pieces", after=lambda *_: self.trigger("save"))
            wrap(engine.data, "reduce_gradients", after=self._inject_nan)
            gradients = trainer.corruption_detector.state_checksums.gradients
            wrap(stepping, "reduce_loss_and_norm", before=lambda *_: self._inject_bit_flip(gradients, "gradient"))

    def _on_phase(self, phase: str, step: int) -> None:
        self.step = step
        if phase in ("data", "loading"):
            self.trigger("load" if phase == "loading" else phase)

    def _log_samples(self, samples: Samples, scale: Tensor) -> None:
        with (self.run_path / "faults" / f"samples-{self.trainer.engine.mesh.rank}").open("a") as file:
            file.write(" ".join(map(str, [self.step, *samples.ids.flatten().tolist()])) + "\n")

    def take_due(self, *kinds: str, phase: str | None = None) -> Fault | None:
        """Returns a fault of these kinds that is due, and marks it as triggered; None if there is none."""
        for fault in self.faults:
            before = self.run_path / "faults" / str(fault.number - 1)
            is_due = self.step >= fault.step if phase != "load" else before.exists() or not fault.number
            if fault.kind in kinds and is_due and phase in (None, fault.phase):
                with suppress(FileExistsError):  # whole or not at all: the launcher may kill this rank as it writes
                    create_text(self.run_path / "faults" / str(fault.number), repr(time.time()))
                    return fault
        return None

    def trigger(self, phase: str) -> None:
        state_checksums = self.trainer.corruption_detector.state_checksums
        self._inject_bit_flip(state_checksums.weights, "weight", phase)
        self._inject_bit_flip(lambda: state_checksums.states()[:-1], "state", phase)  # the last has the step counts
        if (fault := self.take_due(*SIGNALS, phase=phase)) is None:
            return
        if fault.kind == "native abort":
            libc, delay = ctypes.CDLL(None), fault.number % 4 * 0.005  # in this phase, or somewhat later
            thread = (ctypes.byref(ctypes.c_ulong()), None, libc.abort, None)
            threading.Timer(delay, libc.pthread_create, thread).start()
            return
        if fault.kind == "flip":
            corrupt_checkpoint(self.run_path, fault.number)
        elif fault.kind == "flip memory":
            for path in Path(self.trainer.snapshots).glob(f"rank-{fault.rank}.[0-9]"):
                np.memmap(path, mode="r+")[0] ^= 64  # a bit of each of its snapshots
        os.kill(os.getpid(), SIGNALS[fault.kind])

    def _inject_bit_flip(self, tracked: Callable[[], list[TrackedTensor]], kind: str, phase: str | None = None) -> None:
        """Flips a bit of one element of a random tensor, and records which tensor."""
        if (fault := self.take_due(kind, phase=phase)) is not None:
            rng = random.Random(fault.number)
            target = rng.choice([entry for entry in tracked() if entry.tensor.numel()])
            flip_tensor_bit(target.tensor, rng)
            write_text(self.run_path / "faults" / f"tensor-{fault.number}", target.label)

    def _on_forward(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self.trigger("forward")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self.trigger("backward"))

    def _inject_nan(self, *_: Any) -> None:
        if self.take_due("nan"):
            self.trainer.engine.param_shards[0].grad.view(-1)[:1] = float("nan")


def wrap(owner: Any, name: str, before: Hook = lambda *_: None, after: Hook = lambda *_: None) -> None:
    """Makes a method or function of `owner` call `before` and `after` with its arguments."""
    original = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        before(*args)
        result = original(*args)
        after(*args)
        return result

    setattr(owner, name, wrapped)


def flip_tensor_bit(tensor: Tensor, rng: random.Random) -> None:
    """Flips a bit of one element: the sign or an exponent bit with equal probability; for integers any bit."""
    size = 8 * tensor.element_size()
    mantissa_bits = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}.get(tensor.dtype, 0)
    bit = rng.choice((size - 1, rng.randrange(mantissa_bits, size - 1)))
    flat = tensor.data.view(-1).view(INT_DTYPES[tensor.element_size()])  # `.data` hides the change from autograd
    flat[rng.randrange(flat.numel())] ^= -(2**bit) if bit == size - 1 else 2**bit


def corrupt_checkpoint(run: Path, seed: int) -> None:
    """Flips one bit in a file of the newest checkpoint, if an older checkpoint exists."""
    good = valid_checkpoints(run / "checkpoints")
    if len(good) < 2:
        return
    rng = random.Random(seed)
    path = rng.choice(sorted(good[0][1].iterdir()))
    content = np.memmap(path, mode="r+")
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    write_text(run / "faults" / f"flipped-{seed}", f"{path.parent.name}/{path.name}")


def main(arguments: list[str], injector: type[FaultInjector] = FaultInjector, **options: Any) -> None:
    """The entry point of a worker: trains like `shardwise.launch.worker`, with this rank's faults injected."""
    run, rank = Path(arguments[0]), int(os.environ["RANK"])
    triggered = trigger_times(run)
    faults = [Fault(**fault) for fault in json.loads((run / "faults.json").read_text())]
    pending = [fault for fault in faults if fault.rank == rank and fault.number not in triggered]
    original_run = TrainingLoop.run

    def run_with_faults(trainer: TrainingLoop) -> None:
        injector(run, trainer, pending).install()
        original_run(trainer)

    TrainingLoop.run = run_with_faults  # type: ignore[assignment, method-assign]
    worker.main(arguments, **options)
