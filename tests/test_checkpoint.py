"""Checkpoints: every layout into every other, and every way to be torn, flipped, killed or out of room."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardwise.comm.world import run_world
from shardwise.data.sample_stream import rank_positions
from shardwise.errors import CheckpointError, RunError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.engine import Engine
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import step
from shardwise.train import checkpoint_folder
from shardwise.train.checkpoint import CheckpointManager, valid_checkpoints
from shardwise.train.checkpoint_folder import CheckpointGroup, read_manifest
from shardwise.train.dcp_storage import read_index, read_pieces, weight_pieces
from shardwise.verify.parity import make_stream

# A vocabulary that nothing divides, and 4 hidden features, of which the last of 3 ranks gets none.
SMALL = {"layers": 4, "width": 16, "heads": 4, "kv_heads": 2, "vocab": 61, "sequence": 8, "dropout": 0.1, "ffn": 4}
JOB = make_job({"precision": "float64", "model": SMALL, "batch": {"samples": 12}})
LAYOUTS = [
    "pipeline=1",
    "shard=2",
    "shard=2 zero=3",
    "replicate=2",
    "shard=3",
    "tensor=2",
    "pipeline=2",
    "pipeline=2 schedule=zbv",
    "pipeline=2 shard=2 tensor=2",
]
ALONE = Layout.parse("pipeline=1")


def start(job: Job, layout: Layout) -> tuple[Engine, torch.optim.Optimizer]:
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    return engine, make_optimizer(job.optimizer, engine.param_shards)


def train(job: Job, engine: Engine, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    stream, data, losses = make_stream(job), engine.mesh["data"], []
    for number in range(first, last):
        samples = stream.read(rank_positions(number, job.samples, data.size, data.index))
        losses.append(float(step(engine, optimizer, samples, job.optimizer.clip).loss))
    return losses


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def everything(engine: Engine, optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    """All that a rank has, bit by bit: pieces, optimizer states, whole weights, loss scale."""
    found = [(f"scale {key}", bits(value)) for key, value in engine.scale.state().items()]
    for param_shard in engine.param_shards:
        found.append((param_shard.name, bits(param_shard.tensor)))
        found += [
            (f"{param_shard.name} {key}", bits(value)) for key, value in optimizer.state[param_shard.tensor].items()
        ]
    for chain in engine.chains:
        for name, weight in chain.named_unique_parameters():
            whole = weight.to_local() if hasattr(weight, "to_local") else weight
            found.append((f"whole {name}", bits(whole)))
    return sorted(found)


# Any layout into any other


def make_source(folder: Path, layout: Layout) -> tuple[list[float], list[tuple[str, str]]]:
    engine, optimizer = start(JOB, layout)
    checkpoints = CheckpointManager(folder, 2, asynchronous=True)
    train(JOB, engine, optimizer, 0, 2)
    checkpoints.save(2, engine, optimizer, {"samples": 24})
    held = everything(engine, optimizer)
    losses = train(JOB, engine, optimizer, 2, 4)  # while it is being written
    checkpoints.finish()
    return losses, held


def load_sources(
    folders: dict[str, Path], layout: Layout, last: int = 4
) -> dict[str, tuple[Any, list[float], list[tuple[str, str]]]]:
    engine, optimizer = start(JOB, layout)
    results = {}
    for text, folder in folders.items():
        checkpoints = CheckpointManager(folder, 2, asynchronous=True)
        state = checkpoints.load(engine, optimizer)
        held = everything(engine, optimizer)
        results[text] = state, train(JOB, engine, optimizer, 2, last), held
    return results


class Sources(dict[str, tuple[Path, list[Any]]]):
    """By layout: a folder with a checkpoint of step 2, and what each rank had then and lost in steps 3 and 4.

    Each is made when a test first asks for it, since parallel test workers need few of them."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory

    def __missing__(self, text: str) -> tuple[Path, list[Any]]:
        folder, layout = self.factory.mktemp("source"), Layout.parse(text)
        prepare(JOB, layout)  # once, for all ranks
        self[text] = folder, run_world(make_source, layout.world, folder, layout)
        return self[text]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory)


def neighbours(text: str) -> list[str]:
    """Itself, and the two that come before it in the ring of layouts."""
    return [LAYOUTS[LAYOUTS.index(text) - back] for back in range(3)]


@pytest.mark.thin(5)
@pytest.mark.parametrize("text", LAYOUTS)
def test_any_layout_loads_from_any_other(sources: dict[str, Any], text: str) -> None:
    layout = Layout.parse(text)
    chosen = LAYOUTS if text == "shard=2 zero=3" else [*neighbours(text), "pipeline=1"]
    truth = sources["pipeline=1"][1][0][0]
    results = run_world(load_sources, layout.world, {source: sources[source][0] for source in chosen}, layout)
    for source in chosen:
        state, losses, _ = results[0][source]
        assert state == {"step": 2, "samples": 24}
        assert losses == pytest.approx(truth, rel=1e-10, abs=0), f"{source} -> {text}"
    for rank, result in enumerate(results):
        assert result[text][2] == sources[text][1][rank][1], f"rank {rank} of '{text}' is not the same bit by bit"
        assert result[text][1] == sources[text][1][rank][0]


def load_all_whole(folders: dict[str, Path]) -> dict[str, tuple[dict[str, Any] | None, dict[str, str]]]:
    return {text: load_whole(folder) for text, folder in folders.items()}


def load_whole(folder: Path) -> tuple[dict[str, Any] | None, dict[str, str]]:
    model = JOB.family.build_on_meta(JOB.model, JOB.seed).double().to_empty(device="cpu")
    model.tie_weights()
    path = valid_checkpoints(folder)[0][1]
    weights = {f"weights.{name}": weight.detach() for name, weight in model.named_unique_parameters()}
    read_pieces(path, read_index(path), weight_pieces(weights), CheckpointGroup())
    state = read_manifest(path)["state"]
    return state, {name: bits(weight) for name, weight in model.named_unique_parameters()}


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "texts", [("shard=3", "tensor=2", "pipeline=2"), ("pipeline=2 shard=2 tensor=2",)], ids=["one axis", "three axes"]
)
def test_whole_weights_load_in_one_process(sources: dict[str, Any], texts: tuple[str, ...]) -> None:
    folders = {text: sources[text][0] for text in texts}
    whole = run_world(load_all_whole, 1, folders)[0]
    loaded = run_world(load_sources, 1, folders, ALONE, 2)[0]
    for text in texts:
        state, weights = whole[text]
        assert state == {"step": 2, "samples": 24}
        held = {name.removeprefix("whole "): value for name, value in loaded[text][2] if name.startswith("whole ")}
        assert weights == held


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_reads_it_too(sources: dict[str, Any]) -> None:
    _, path = valid_checkpoints(sources["shard=3"][0])[0]
    into = {"weights.embed.tokens.weight": torch.zeros(61, 16, dtype=torch.float64)}
    dcp.load(into, checkpoint_id=path, no_dist=True)
    state, weights = run_world(load_whole, 1, sources["shard=3"][0])[0]
    assert bits(into["weights.embed.tokens.weight"]) == weights["embed.tokens.weight"]


# One process from here on, unless two are the point. A mark is a number that fills everything there is.


def mark(engine: Engine, optimizer: torch.optim.Optimizer, number: float) -> None:
    with torch.no_grad():
        for param_shard in engine.param_shards:
            param_shard.tensor.fill_(number)
            for value in optimizer.state[param_shard.tensor].values():
                value.fill_(number)


def marks(engine: Engine, optimizer: torch.optim.Optimizer) -> set[float]:
    tensors = [param_shard.tensor.detach() for param_shard in engine.param_shards]
    tensors += [value for tensor in tensors for value in optimizer.state[tensor].values()]
    tensors += [weight.detach() for chain in engine.chains for _, weight in chain.named_unique_parameters()]
    return {float(number) for tensor in tensors for number in tensor.unique()}


def save_marks(folder: Path, steps: list[int], keep: int = 10) -> None:
    engine, optimizer = start(JOB, ALONE)
    train(JOB, engine, optimizer, 0, 1)
    checkpoints = CheckpointManager(folder, keep, asynchronous=False)
    for number in steps:
        mark(engine, optimizer, number)
        checkpoints.save(number, engine, optimizer, {"note": "ü"})


def load_marks(folder: Path, step: int | None = None) -> tuple[Any, list[str], set[float]]:
    return load_marks_into(*start(JOB, ALONE), folder, step)


def load_marks_into(
    engine: Engine, optimizer: torch.optim.Optimizer, folder: Path, step: int | None = None
) -> tuple[Any, list[str], set[float]]:
    """Loads over a mark of its own, so that nothing is left of what was loaded before."""
    mark(engine, optimizer, -1.0)
    checkpoints = CheckpointManager(folder, 10, asynchronous=False)
    state = checkpoints.load(engine, optimizer, step)
    return state, checkpoints.damaged, marks(engine, optimizer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def ten_and_twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_world(save_marks, 1, folder, [10, 20])
    return folder


@pytest.fixture
def two(ten_and_twenty: Path, tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 10 and 20, to be harmed."""
    return shutil.copytree(ten_and_twenty, tmp_path / "two")


def flip_each(folder: Path) -> list[tuple[str, Any, list[str], set[float]]]:
    """Flips one bit in one file of step 20 after the other, at a place drawn by lot, and loads."""
    engine, optimizer = start(JOB, ALONE)
    lot, results = random.Random(0), []
    for path in sorted((folder / "step-00000020").iterdir()):
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[lot.randrange(len(content))] ^= 1 << lot.randrange(8)
        path.write_bytes(flipped)
        results.append((path.name, *load_marks_into(engine, optimizer, folder)))
        path.write_bytes(content)
    results.append(("", *load_marks_into(engine, optimizer, folder)))
    return results


def test_a_flipped_bit_is_found_in_any_file(two: Path) -> None:
    *flipped, mended = run_world(flip_each, 1, two)[0]
    assert {name for name, *_ in flipped} == {".metadata", "__0_0.distcp", "manifest.json", "tensors.json"}
    for name, state, damaged, found in flipped:
        assert len(damaged) == 1 and "step-00000020" in damaged[0] and name in damaged[0], damaged
        assert (state["step"], found) == (10, {10.0})
    assert mended[1:] == ({"step": 20, "note": "ü"}, [], {20.0})


HARMS = ("truncated", "missing", "no manifest", "manifest cut", "value changed")


def tear(newest: Path, harm: str) -> str:
    """Returns the name of the file that is harmed."""
    data, manifest = newest / "__0_0.distcp", newest / "manifest.json"
    if harm == "truncated":
        os.truncate(data, data.stat().st_size // 2)
    elif harm == "missing":
        data.unlink()
    elif harm == "no manifest":
        manifest.unlink()
    elif harm == "manifest cut":
        os.truncate(manifest, 100)
    else:
        manifest.write_text(manifest.read_text().replace('"step": 20', '"step": 30'))
    return data.name if harm in ("truncated", "missing") else manifest.name


def load_each(folders: dict[str, Path]) -> dict[str, tuple[Any, list[str], set[float]]]:
    engine, optimizer = start(JOB, ALONE)
    return {name: load_marks_into(engine, optimizer, folder) for name, folder in folders.items()}


def test_a_torn_checkpoint_is_passed_over(ten_and_twenty: Path, tmp_path: Path) -> None:
    folders = {harm: shutil.copytree(ten_and_twenty, tmp_path / harm) for harm in HARMS}
    culprits = {harm: tear(folder / "step-00000020", harm) for harm, folder in folders.items()}
    results = run_world(load_each, 1, folders)[0]
    for harm, folder in folders.items():
        state, damaged, found = results[harm]
        assert (state["step"], found) == (10, {10.0}), harm
        assert len(damaged) == 1 and "step-00000020" in damaged[0] and culprits[harm] in damaged[0], harm
        assert valid_checkpoints(folder) == [(10, folder / "step-00000010")], harm


def test_none_that_is_good(two: Path) -> None:
    for path in two.glob("step-*/__0_0.distcp"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"step-00000020 .*step-00000010 is damaged: __0_0.distcp is missing"):
        run_world(load_marks, 1, two)


def load_by_number(folder: Path) -> tuple[Any, list[str], set[float]]:
    """Loads step 10, then asks for step 15, which is not there."""
    engine, optimizer = start(JOB, ALONE)
    loaded = load_marks_into(engine, optimizer, folder, 10)
    with pytest.raises(CheckpointError, match="no checkpoint of step 15; available: 20, 10"):
        load_marks_into(engine, optimizer, folder, 15)
    return loaded


def test_a_step_by_number(two: Path) -> None:
    assert run_world(load_by_number, 1, two)[0] == ({"step": 10, "note": "ü"}, [], {10.0})


def load_other(folder: Path) -> None:
    other = make_job({"precision": "float64", "model": SMALL | {"layers": 3}, "batch": {"samples": 12}})
    engine, optimizer = start(other, ALONE)
    CheckpointManager(folder, 2, asynchronous=True).load(engine, optimizer)


def test_another_model_is_refused(two: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"another model: for block3.\S+ it has \[\S+ \S+\], this model needs nothing"
    ):
        run_world(load_other, 1, two)


def load_nothing(folder: Path) -> tuple[Any, bool]:
    engine, optimizer = start(JOB, ALONE)
    before = everything(engine, optimizer)
    state = CheckpointManager(folder / "new", 2, asynchronous=True).load(engine, optimizer)
    return state, before == everything(engine, optimizer)


def test_nothing_to_load(tmp_path: Path) -> None:
    assert run_world(load_nothing, 1, tmp_path) == [(None, True)]


# Retention


def test_the_newest_are_kept(tmp_path: Path) -> None:
    (tmp_path / "step-00000007.partial-dead").mkdir()
    (tmp_path / "other").mkdir()
    run_world(save_marks, 1, tmp_path, [1, 2, 3, 4], 2)
    assert names(tmp_path) == ["other", "step-00000003", "step-00000004"]


def save_twice(folder: Path) -> list[list[str]]:
    """Saves steps 30 and 40, each with a manager of its own; returns which checkpoints there are after each."""
    engine, optimizer = start(JOB, ALONE)
    found = []
    for number in (30, 40):
        CheckpointManager(folder, 2, asynchronous=False).save(number, engine, optimizer, {"note": "ü"})
        found.append(names(folder))
    return found


def test_a_damaged_one_does_not_count(two: Path) -> None:
    (two / "step-00000020" / "__0_0.distcp").unlink()
    after_30, after_40 = run_world(save_twice, 1, two)[0]
    assert after_30 == ["step-00000010", "step-00000020", "step-00000030"]
    assert after_40 == ["step-00000030", "step-00000040"]


def save_again_and_load(folder: Path) -> tuple[list[str], Any]:
    engine, optimizer = start(JOB, ALONE)
    CheckpointManager(folder, 2, asynchronous=False).save(20, engine, optimizer, {"note": "ü"})
    return names(folder), CheckpointManager(folder, 10, asynchronous=False).load(engine, optimizer)


def test_a_step_can_be_saved_again(two: Path) -> None:
    found, state = run_world(save_again_and_load, 1, two)[0]
    assert found == ["step-00000010", "step-00000020.1"]
    assert state["step"] == 20


def rewind(folder: Path) -> None:
    CheckpointManager(folder, 2, asynchronous=True).rewind(10)


def test_going_back(two: Path) -> None:
    run_world(rewind, 1, two)
    assert names(two) == ["step-00000010"]


# Asynchronous


def save_and_go_on(folder: Path, layout: Layout) -> set[float]:
    engine, optimizer = start(JOB, layout)
    train(JOB, engine, optimizer, 0, 1)
    checkpoints = CheckpointManager(folder, 2, asynchronous=True)
    for number in (1, 2):
        mark(engine, optimizer, number)
        checkpoints.save(number, engine, optimizer, {})
        mark(engine, optimizer, -number)
    checkpoints.finish()
    checkpoints.load(engine, optimizer)
    return marks(engine, optimizer)


@pytest.mark.thin(5)
@pytest.mark.parametrize("text", ["pipeline=1", "shard=2"])
def test_what_comes_after_the_call_is_not_saved(tmp_path: Path, text: str) -> None:
    layout = Layout.parse(text)
    assert run_world(save_and_go_on, layout.world, tmp_path, layout) == [{2.0}] * layout.world


def save_scale(folder: Path) -> bool:
    job = make_job({"precision": "fp16", "model": SMALL, "batch": {"samples": 12}})
    engine, optimizer = start(job, ALONE)
    engine.scale.value.fill_(2.0**13)
    engine.scale.growth_tracker.fill_(7)
    checkpoints = CheckpointManager(folder, 2, asynchronous=True)
    checkpoints.save(1, engine, optimizer, {})
    before = everything(engine, optimizer)
    engine, optimizer = start(job, ALONE)
    assert everything(engine, optimizer) != before
    checkpoints.load(engine, optimizer)
    return everything(engine, optimizer) == before


def test_the_loss_scale_comes_back(tmp_path: Path) -> None:
    assert run_world(save_scale, 1, tmp_path) == [True]


# Faults


class Full(checkpoint_folder.HashedFileWriter):
    """The kernel's own full disk, on one rank."""

    def __init__(self, path: str | os.PathLike[str]):
        full = str(path).endswith(".distcp") and dist.get_rank() == 1
        super().__init__("/dev/full" if full else path)


def fill_the_disks(folders: dict[bool, Path]) -> list[tuple[str, list[str], int]]:
    """Fills the disk of each folder, whose checkpoints are asynchronous or not."""
    engine, optimizer = start(JOB, Layout.parse("shard=2"))
    return [fill_the_disk(engine, optimizer, folder, asynchronous) for asynchronous, folder in folders.items()]


def fill_the_disk(
    engine: Engine, optimizer: torch.optim.Optimizer, folder: Path, asynchronous: bool
) -> tuple[str, list[str], int]:
    from shardwise.train import dcp_storage

    checkpoints = CheckpointManager(folder, 2, asynchronous)
    checkpoints.save(1, engine, optimizer, {})
    checkpoints.finish()
    dcp_storage.HashedFileWriter = Full  # type: ignore[misc]
    with pytest.raises(RunError) as caught:
        checkpoints.save(2, engine, optimizer, {})
        checkpoints.finish()
    dist.barrier()
    there = names(folder)
    dist.barrier()
    dcp_storage.HashedFileWriter = checkpoint_folder.HashedFileWriter  # type: ignore[misc]
    checkpoints.save(3, engine, optimizer, {})
    checkpoints.finish()
    state = checkpoints.load(engine, optimizer)
    assert state is not None
    return str(caught.value), there, state["step"]


def test_a_full_disk_is_named_on_every_rank(tmp_path: Path) -> None:
    folders = {False: tmp_path / "synchronous", True: tmp_path / "asynchronous"}
    for results in run_world(fill_the_disks, 2, folders):
        assert len(results) == 2
        for message, there, last in results:
            assert "step 2" in message and "rank 1" in message and "No space left on device" in message
            assert there == ["step-00000001"]  # nothing half-written is left
            assert last == 3


def save_a_bit(folder: Path) -> list[str]:
    save_marks(folder, [1])
    engine, optimizer = start(JOB, ALONE)
    checkpoints = CheckpointManager(folder, 2, asynchronous=True)
    messages = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    for number in (2, 3):
        if number == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            shutil.move(folder, f"{folder}-gone")
        checkpoints.save(number, engine, optimizer, {})
        with pytest.raises(RunError) as caught:
            checkpoints.finish()
        messages.append(str(caught.value))
    return messages


def test_a_limit_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    too_large, gone = run_world(save_a_bit, 1, tmp_path / "checkpoints")[0]
    assert "step 2" in too_large and "File too large" in too_large
    assert "step 3" in gone and "No such file or directory" in gone
    assert names(tmp_path / "checkpoints-gone") == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill_then_freeze(folder: Path) -> tuple[int, str, list[str], str, Any, set[float]]:
    """Saves until the disk is full, then once more while it is read-only, and loads."""
    engine, optimizer = start(JOB, ALONE)
    train(JOB, engine, optimizer, 0, 1)
    checkpoints, last, messages = CheckpointManager(folder, 1000, asynchronous=False), 0, []
    for number in range(1, 1000):
        mark(engine, optimizer, number)
        try:
            checkpoints.save(number, engine, optimizer, {})
        except RunError as error:
            messages.append(str(error))
            if len(messages) == 2:
                break
            there = [path.name for path in folder.iterdir()]
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        else:
            last = number
    return last, messages[0], there, messages[1], checkpoints.load(engine, optimizer), marks(engine, optimizer)


def test_a_disk_that_is_full_and_then_read_only(small_disk: Path) -> None:
    ((last, full, there, frozen, state, found),) = run_world(fill_then_freeze, 1, small_disk)
    assert last > 1 and len(there) == last and not any("partial" in name for name in there)
    assert "No space left on device" in full and f"step {last + 1} " in full
    assert "Read-only file system" in frozen and f"step {last + 2} " in frozen
    assert state["step"] == last and found == {float(last)}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot create the .* folder .*file/checkpoints: Not a directory"):
        run_world(rewind, 1, tmp_path / "file" / "checkpoints")


def save_for_ever(folder: Path, first: int) -> None:
    torch.set_num_threads(1)
    save_marks(folder, list(range(first, first + 10_000)), keep=2)


def test_kill_9_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """Each round kills while a part of a checkpoint is there, after a time of its own drawn by lot."""
    lot, last = random.Random(1), 0
    for _ in range(2):
        worker = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(tmp_path, last + 1))
        worker.start()
        try:
            assert worker.pid is not None
            until = time.monotonic() + 60
            while not any(step > last for step, _ in valid_checkpoints(tmp_path)):
                assert time.monotonic() < until and worker.is_alive()
                time.sleep(0.01)
            while True:
                time.sleep(lot.random() * 0.03)
                stop(worker.pid)
                if leftovers(tmp_path):
                    break
                assert time.monotonic() < until
                os.kill(worker.pid, signal.SIGCONT)
        finally:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        finished = valid_checkpoints(tmp_path)
        assert leftovers(tmp_path), "the kill came in the middle of a save"
        state, damaged, found = run_world(load_marks, 1, tmp_path)[0]
        assert damaged == [] and not leftovers(tmp_path)
        assert state["step"] == finished[0][0] > last and found == {float(state["step"])}
        last = state["step"]


def stop(worker: int) -> None:
    """Stops a child, and returns once it has stopped."""
    os.kill(worker, signal.SIGSTOP)
    os.waitid(os.P_PID, worker, os.WSTOPPED)


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob("*.partial-*"))


def test_the_manifest_is_for_people_too(two: Path) -> None:
    manifest = json.loads((two / "step-00000020" / "manifest.json").read_text())
    assert (manifest["step"], manifest["layout"], manifest["world"]) == (20, "pipeline=1", 1)
    assert manifest["torch"] == torch.__version__ and manifest["state"]["note"] == "ü"
