"""A worker with faults planted in it, for `chaos` and the tests: real signals, real hangs, real damage.

`faults.json` in the run folder lists them, `{"kind": "kill", "rank": 1, "step": 7, "phase": "backward"}`. Each happens
once: its rank first writes `faults/NUMBER` with the time, and does nothing where that file is there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise import step as stepping
from shardwise.data.stream import Samples, Stream
from shardwise.files import write_text
from shardwise.guard.judge import Told
from shardwise.guard.sums import INTEGER, Kept
from shardwise.train import checkpoint, worker
from shardwise.train.loop import Trainer
from shardwise.train.stored import good_checkpoints

PHASES = ("data", "forward", "backward", "optimizer", "save", "load")


@dataclass(frozen=True)
class Fault:
    kind: str
    """kill, stop, flip (a checkpoint), flip memory (a snapshot), weight, state or gradient (a bit of one), nan, inf,
    spike, fill or free (the disk), loop, sleep, raise, skip, mismatch or slip (a block computes wrongly once)."""
    rank: int
    step: int
    phase: str = "data"
    number: int = 0


def plant(run: Path, faults: list[Fault]) -> None:
    write_text(run / "faults.json", json.dumps([asdict(fault) for fault in faults]))
    (run / "faults").mkdir(exist_ok=True)


def planted(run: Path) -> list[Fault]:
    return [Fault(**fault) for fault in json.loads((run / "faults.json").read_text())]


def happened(run: Path) -> dict[int, float]:
    """When each fault happened, by its number."""
    return {int(path.name): float(path.read_text()) for path in (run / "faults").glob("[0-9]*")}


def main(arguments: list[str]) -> None:
    run, rank = Path(arguments[0]), int(os.environ["RANK"])
    done = happened(run)
    own = [fault for fault in planted(run) if fault.rank == rank and fault.number not in done]
    begin = Trainer.run

    def begin_harmed(trainer: Trainer) -> None:
        _Harm(run, trainer, own).install()
        begin(trainer)

    Trainer.run = begin_harmed  # type: ignore[assignment, method-assign]
    worker.main(arguments)


def samples_of(run: Path) -> dict[int, list[int]]:
    """Which samples each step was at last taken with, by place in the stream, in order."""
    taken: dict[tuple[int, str], list[int]] = {}
    for path in (run / "faults").glob("samples-*"):
        for line in path.read_text().splitlines():
            step, *ids = map(int, line.split())
            taken[step, path.name] = ids
    found: dict[int, list[int]] = {}
    for (step, _), ids in taken.items():
        found[step] = sorted(found.get(step, []) + ids)
    return found


class _Harm:
    def __init__(self, run: Path, trainer: Trainer, faults: list[Fault]):
        self.run, self.trainer, self.faults, self.step = run, trainer, faults, 0
        self.forwards: Counter[int] = Counter()

    def install(self) -> None:
        trainer, mark = self.trainer, self.trainer.mark

        def note(phase: str, step: int) -> None:
            self.step = step
            mark(phase, step)
            if phase in ("data", "loading"):
                self.fire("load" if phase == "loading" else phase)

        trainer.mark = note
        engine = trainer.engine
        if engine.counts_samples:
            _before(engine, "run", self._note_samples)
        if not self.faults:
            return
        for module in engine.chains[:1]:
            module.register_forward_hook(self._forward)
        trainer.optimizer.register_step_pre_hook(lambda *_: self.fire("optimizer"))
        _after(checkpoint, "write_pieces", lambda: self.fire("save"))
        _after(engine.data, "reduce", self._poison)
        _before(stepping, "measure", lambda *_: self._flip(trainer.witness.books.gradients, "gradient"))
        if any(fault.kind == "inf" for fault in self.faults):
            for name, module in engine.chains[-1].named_modules():
                if not list(module.children()) and name.endswith(self.faults[0].phase):
                    module.register_forward_hook(self._blow_up)
                    break
        if any(fault.kind == "slip" for fault in self.faults):
            engine.chains[0].blocks()[-1].register_forward_hook(self._slip)
        if any(fault.kind == "spike" for fault in self.faults):
            self._raise_loss()
        if any(fault.kind == "sleep" for fault in self.faults):
            _before(Stream, "read", self._sleep)
        if any(fault.kind in ("skip", "mismatch") for fault in self.faults):
            self._disorder()

    def _note_samples(self, samples: Samples, scale: Tensor) -> None:
        with (self.run / "faults" / f"samples-{self.trainer.engine.mesh.rank}").open("a") as file:
            file.write(" ".join(map(str, [self.step, *samples.ids.flatten().tolist()])) + "\n")

    def due(self, *kinds: str, phase: str | None = None) -> Fault | None:
        """The fault of these kinds whose time has come, marked as happened."""
        for fault in self.faults:
            now = phase == "load" or self.step >= fault.step
            if fault.kind in kinds and now and phase in (None, fault.phase):
                try:
                    with (self.run / "faults" / str(fault.number)).open("x") as file:
                        file.write(repr(time.time()))
                except FileExistsError:
                    continue
                return fault
        return None

    def fire(self, phase: str) -> None:
        books = self.trainer.witness.books
        self._flip(books.weights, "weight", phase)
        self._flip(lambda: books.states()[:-1], "state", phase)
        fault = self.due("kill", "stop", "flip", "flip memory", "fill", "free", "loop", "raise", phase=phase)
        if fault is None:
            return
        if fault.kind in ("fill", "free"):
            fill_disk(self.run, fault.kind == "fill")
            return
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "loop":
            while True:
                pass
        elif fault.kind == "raise":
            raise ValueError(f"planted at step {self.step}")
        else:
            if fault.kind == "flip":
                flip_bit(self.run, fault.number)
            elif fault.kind == "flip memory":
                flip_memory(Path(self.trainer.memory), fault.rank)
            os.kill(os.getpid(), signal.SIGKILL)

    def _flip(self, kept: Callable[[], list[Kept]], kind: str, phase: str | None = None) -> None:
        """The sign or a bit of the exponent of one number."""
        fault = self.due(kind, phase=phase)
        if fault is not None:
            draw = random.Random(fault.number)
            chosen = draw.choice([one for one in kept() if one.tensor.numel()])
            flip_number(chosen.tensor, draw)
            (self.run / "faults" / f"number-{fault.number}").write_text(chosen.label)

    def _forward(self, module: torch.nn.Module, given: Any, output: Any) -> None:
        self.fire("forward")
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: self.fire("backward"))

    def _poison(self) -> None:
        if self.due("nan"):
            self.trainer.engine.holdings[0].grad.view(-1)[:1] = float("nan")

    def _blow_up(self, module: torch.nn.Module, given: Any, output: Any) -> Any:
        """At its step a module gives infinity, as often as the step is taken."""
        return output * float("inf") if self.step == self.faults[0].step else None

    def _slip(self, module: torch.nn.Module, given: Any, output: Tensor) -> Tensor | None:
        """A result that is off, in the first or the second forward of a step."""
        self.forwards[self.step] += 1
        fault = self.due("slip", phase={1: "first", 2: "second"}.get(self.forwards[self.step], ""))
        return output * 1.25 if fault is not None else None

    def _raise_loss(self) -> None:
        judge = self.trainer.judge
        real = judge.judge

        def misled(done: int, told: Told, samples: Samples) -> None:
            real(done, Told(1e3, 1.0, False) if self.due("spike") else told, samples)

        judge.judge = misled  # type: ignore[method-assign]

    def _sleep(self, stream: Stream, places: Any) -> None:
        if places[0] // self.trainer.job.samples >= self.faults[0].step - 1 and self.due_now("sleep"):
            time.sleep(3600)

    def due_now(self, kind: str) -> bool:
        self.step = max(self.step, max(fault.step for fault in self.faults))
        return self.due(kind) is not None

    def _disorder(self) -> None:
        """Has the first sum of a step left out, or made with another size."""
        real = stepping.all_reduce

        def disordered(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.due("skip"):
                return None
            return real(tensor.new_zeros(77) if self.due("mismatch") else tensor, *args, **kwargs)

        stepping.all_reduce = disordered


def _after(owner: Any, name: str, act: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        act()
        return result

    setattr(owner, name, both)


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    real = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, both)


def flip_number(tensor: Tensor, draw: random.Random) -> None:
    """The sign, or a bit of the exponent, half of the time each; of integers any bit."""
    size = 8 * tensor.element_size()
    low = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}.get(tensor.dtype, 0)
    bit = draw.choice((size - 1, draw.randrange(low, size - 1)))
    flat = tensor.data.view(-1).view(INTEGER[tensor.element_size()])  # behind the back of autograd, which would tell
    flat[draw.randrange(flat.numel())] ^= -(2**bit) if bit == size - 1 else 2**bit


def flip_bit(run: Path, seed: int) -> None:
    """One bit of one file of the newest checkpoint, where there is another one before it."""
    good = good_checkpoints(run / "checkpoints")
    if len(good) < 2:
        return
    draw = random.Random(seed)
    path = draw.choice(sorted(good[0][1].iterdir()))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    (run / "faults" / f"flipped-{seed}").write_text(f"{path.parent.name}/{path.name}")


def flip_memory(folder: Path, rank: int) -> None:
    """One bit in each snapshot of a rank."""
    for path in folder.glob(f"rank-{rank}.[0-9]"):
        with path.open("r+b") as file:
            byte = file.read(1)[0]
            file.seek(0)
            file.write(bytes([byte ^ 64]))


def fill_disk(run: Path, full: bool) -> None:
    """Leaves room for some lines and no checkpoint, on a disk of the run's own; or gives the room back."""
    ballast = run / "faults" / "ballast"
    if not full:
        ballast.unlink()
        return
    disk = os.statvfs(run)
    with ballast.open("wb") as file:
        file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - (32 << 10))))
