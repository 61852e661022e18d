"""What a run starts from is known by its content: adapters are never put beside other weights than their own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.errors import CheckpointError, LayoutError
from shardwise.launch.start import start_training
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.train import local_machine
from shardwise.train.base_weights import check_base_of_use
from shardwise.train.checkpoint_folder import write_manifest
from shardwise.train.export import export_run, open_checkpoint
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder

transformers = pytest.importorskip("transformers")

JOB = """
layout = "replicate=1"
steps = 2
[data]
source = "synthetic"
samples = 64
[batch]
samples = 4
[validation]
samples = 4
[run]
device = "cpu"
"""
GPT = ["model.name=gpt", "model.layers=2", "model.width=16", "model.heads=2", "model.vocab=61", "model.sequence=16"]
LORA = "model.lora.rank=2"


def predict_nothing(*arguments: Any, **options: Any) -> NoReturn:
    """What the planner does with a layout that it cannot estimate. A prediction would trace the model at each start."""
    raise LayoutError("nothing is predicted")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Trains in this process, as a world of its own, in an empty folder; returns what was said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(local_machine, "choose_plan", predict_nothing)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**place, "TORCHELASTIC_RUN_ID": "test"}.items():
        monkeypatch.setenv(name, value)
    Path("job.toml").write_text(JOB)

    def start(*settings: str, resume: str = "") -> list[str]:
        said: list[str] = []
        job_file = None if resume else Path("job.toml")
        start_training(job_file, list(settings), Path(resume) if resume else None, said.append)
        return said

    return start


def save_llama(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        max_position_embeddings=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def scale_weights(folder: Path) -> None:
    """Multiplies the weights of a folder by 1.5; names, shapes and sizes stay."""
    file = folder / "model.safetensors"
    save_file({name: 1.5 * value for name, value in load_file(file).items()}, file, {"format": "pt"})


def flip_bit(checkpoint: Path) -> None:
    """Flips a bit in the middle of the largest file; its size and its time stay."""
    file = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    stat, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def losses(run: str) -> list[float]:
    return [record["loss"] for record in RunFolder(Path(run)).metrics()]


@pytest.mark.parametrize("model", ["model.name=hf:", "model.weights="])
def test_adapters_are_not_put_beside_other_weights(model: str, start: Callable[..., list[str]]) -> None:
    """The path is given as the run's folder records it, so that one trace serves the start and what follows it."""
    save_llama(Path("base"))
    start(f"{model}{Path.cwd()}/base", "model.sequence=16", LORA, "run.folder=run")
    before = Path("base/model.safetensors").read_bytes()
    scale_weights(Path("base"))
    run = RunFolder(Path("run"))

    sentence = r"the weights that run starts from have changed since it began: the SHA-256 of \S*/base/model.safetensor"
    with pytest.raises(CheckpointError, match=sentence):
        start("steps=3", resume="run")
    with pytest.raises(CheckpointError, match=sentence):
        list(export_run(run.path, Path("merged"), None, "auto", 10**9, merge=True))
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(run)
    with pytest.raises(CheckpointError, match=sentence):  # what a worker does after a fault
        TrainingLoop(prepare(run.job(), Layout()), run, torch.device("cpu"), resume=True)
    assert len(losses("run")) == 2 and not Path("merged").exists()

    Path("base/model.safetensors").write_bytes(before)  # with another time
    start("steps=3", resume="run")
    list(export_run(run.path, Path("merged"), None, "auto", 10**9, merge=True))
    assert len(losses("run")) == 3


def test_a_base_that_is_a_run_is_known_by_its_bits(start: Callable[..., list[str]]) -> None:
    start(*GPT, "run.folder=base")
    start("model.weights=base", LORA, "run.folder=run")
    flip_bit(Path("base/checkpoints/step-00000002"))
    with pytest.raises(CheckpointError, match=r"the SHA-256 of \S*/step-00000002/\S+ is \w{12} instead of \w{12}"):
        start("steps=3", resume="run")
    with pytest.raises(CheckpointError, match="the weights that run starts from have changed"):
        open_checkpoint(RunFolder(Path("run")))


def test_a_base_is_found_from_another_working_folder(
    start: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(Path("base"))
    for name, model in (("module", "model.name=hf:base"), ("ours", "model.weights=base")):
        start(model, "model.sequence=16", LORA, f"run.folder={name}")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for name in ("module", "ours"):
        start("steps=3", resume=f"../{name}")
        assert len(losses(f"../{name}")) == 3
        list(export_run(Path("..", name), Path(f"merged-{name}"), None, "auto", 10**9, merge=True))


def test_a_run_that_starts_again_at_step_0_starts_from_the_same(start: Callable[..., list[str]]) -> None:
    """Also where all weights are trained: no checkpoint has them yet."""
    save_llama(Path("base"))
    start("model.weights=base", "model.sequence=16", "run.folder=run")
    scale_weights(Path("base"))
    start("steps=3", resume="run")  # the checkpoint has all weights, so nothing is read from the folder
    shutil.rmtree("run/checkpoints")
    for name in ("metrics.jsonl", "events.jsonl"):
        Path("run", name).unlink()
    with pytest.raises(CheckpointError, match="the weights that run starts from have changed since it began"):
        start("steps=3", resume="run")


def test_a_base_folder_that_is_gone_is_named(start: Callable[..., list[str]]) -> None:
    save_llama(Path("base"))
    start("model.name=hf:base", "model.weights=base", "model.sequence=16", LORA, "run.folder=run")
    Path("base").rename("elsewhere")
    with pytest.raises(CheckpointError, match="run starts from .*/base, which has no config.json any more; put the"):
        check_base_of_use(RunFolder.open(Path("run")), RunFolder.open(Path("run")).job())


def test_a_config_that_describes_another_model_is_refused(start: Callable[..., list[str]]) -> None:
    save_llama(Path("base"))
    start("model.name=hf:base", "model.sequence=16", "run.folder=run")
    file = Path("base/config.json")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"transformers_version": "9.9", "dtype": "bfloat16"}))
    start("steps=3", resume="run")
    file.write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(CheckpointError, match="base/config.json describes another model than when run began"):
        start("steps=4", resume="run")


def test_a_run_of_0_2_0_goes_on_with_a_warning(
    start: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    save_llama(Path("base"))
    start("model.name=hf:base", "model.sequence=16", LORA, "run.folder=run")
    Path("run/base.json").unlink()
    job = Path("run/job.toml").read_text()
    Path("run/job.toml").write_text(job.replace(f"{Path.cwd()}/base", "base"))
    manifest = Path("run/checkpoints/step-00000002/manifest.json")
    assert f"hf:{Path.cwd()}/base" in manifest.read_text() and 'name = "hf:base"' in Path("run/job.toml").read_text()
    for path in Path("run/checkpoints").iterdir():
        state = json.loads((path / "manifest.json").read_text())
        del state["sha256"]
        state["state"]["job"]["model.name"] = "hf:base"
        write_manifest(path, {key: value for key, value in state.items() if key != "format"})

    capsys.readouterr()
    open_checkpoint(RunFolder(Path("run")))
    assert (
        "warning: run does not know the content of the weights that its adapters belong to" in capsys.readouterr().out
    )
    said = start("steps=3", resume="run")
    assert any("nobody can tell whether base has changed since it began. It is recorded as it is" in s for s in said)
    scale_weights(Path("base"))
    with pytest.raises(CheckpointError, match="the weights that run starts from have changed since it began"):
        start("steps=4", resume="run")
