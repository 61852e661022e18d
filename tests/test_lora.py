"""LoRA: adapters in every axis, against peft, in peft's files, merged, and beside the weights of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_weights import TINY, weights_of

from shardwise.adapters.module_chain import KeepFloat64
from shardwise.comm.world import run_world
from shardwise.errors import CheckpointError, JobError
from shardwise.files import write_text
from shardwise.job import Job, load_job, make_job
from shardwise.layout import Layout
from shardwise.models.sharding import is_adapter
from shardwise.parallel.prepare import prepare
from shardwise.train.checkpoint_folder import list_checkpoints
from shardwise.train.dcp_storage import read_index
from shardwise.train.export import export_run, open_checkpoint
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.train.warm_start import check_start, name_step
from shardwise.verify.parity import verify

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

CONFIGS: dict[str, dict[str, Any]] = {
    **TINY, "gpt_oss": {**TINY["llama"], "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}  # fmt: skip
GPT = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "vocab": 61, "sequence": 16}


def save_base(folder: Path, kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**CONFIGS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    model.save_pretrained(folder)
    return model


def save_adapter(folder: Path, base: Any, **options: Any) -> Any:
    """Saves a random adapter of peft; returns peft's model."""
    peft = pytest.importorskip("peft")
    experts = [name for name, part in base.named_modules() if name.endswith("mlp.experts")]
    parameters = [f"{name}.{leaf}" for name in experts for leaf in ("gate_up_proj", "down_proj")]
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM",
                             target_parameters=parameters or None, **options)  # fmt: skip
    model = peft.get_peft_model(base, config).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.1 * torch.randn(weight.shape))
    model.save_pretrained(folder)
    return model


def make_run(folder: Path, model: dict[str, Any], steps: int = 2, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "steps": steps, "model": model, "batch": {"samples": 4}, "checkpoint": {"snapshot_every": 0},
        "data": {"source": "synthetic", "samples": 64}, "run": {"folder": str(folder), "device": "cpu"},
        "validation": {"samples": 4}, "optimizer": {"lr": 0.01, "schedule": "constant", "warmup": 0},
        "precision": "float64",
    }  # fmt: skip
    return make_job({**values, **changes})


def train_rank(path: str, layout: str, resume: bool) -> None:
    folder = RunFolder(Path(path))
    TrainingLoop(prepare(folder.job(), Layout.parse(layout)), folder, torch.device("cpu"), resume).run()


def train(job: Job, layout: str, resume: RunFolder | None = None) -> RunFolder:
    folder = resume or RunFolder.create(name_step(job))
    write_text(folder.path / "job.toml", name_step(job).to_toml())
    prepare(folder.job(), Layout.parse(layout))  # so that no rank needs to trace the model again
    run_world(train_rank, Layout.parse(layout).world, str(folder.path), layout, resume is not None)
    return folder


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt_oss"])
def test_logits_and_gradients_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    theirs = save_adapter(tmp_path / "adapter", save_base(tmp_path / "base", kind))
    job = make_job({"model": {"name": f"hf:{tmp_path / 'base'}", "sequence": 12,
                              "lora": {"adapter": str(tmp_path / "adapter")}}})  # fmt: skip
    assert job.model.lora is not None and (job.model.lora.rank, job.model.lora.alpha) == (3, 5.0)
    ours: Any = job.family.build_reference(job.model, 0, torch.float64)
    for module in (ours, theirs.get_base_model()):
        module.config._experts_implementation = module.config._attn_implementation = "eager"
        for part in module.modules():
            if hasattr(part, "inv_freq"):
                part.inv_freq = part.inv_freq.double()
    tokens = torch.randint(0, 61, (2, 12))
    with KeepFloat64():
        found, expected = (module(input_ids=tokens).logits for module in (ours, theirs))
        found.square().sum().backward()
        expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    from shardwise.models.adapter_files import file_names, to_file

    gradients = {name.replace(".default", ""): weight.grad for name, weight in theirs.named_parameters()}
    adapters = [name for name, _ in ours.named_parameters() if is_adapter(name)]
    assert adapters == [name for name, _, _ in file_names(ours)] and len(adapters) >= 12
    for name, file, experts in file_names(ours):
        gradient = to_file(ours.get_parameter(name).grad, name, experts)
        torch.testing.assert_close(gradient, gradients[file], rtol=1e-10, atol=1e-12)
    assert all(weight.grad is None for name, weight in ours.named_parameters() if not is_adapter(name))


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind, layout", [
    ("llama", "pipeline=2 tensor=2"), ("llama", "shard=2 zero=3"),
    ("gpt_oss", "pipeline=2 shard=2 expert=2"), ("gpt_oss", "replicate=2"),
])  # fmt: skip
def test_layouts_of_a_folder(kind: str, layout: str, tmp_path: Path) -> None:
    save_base(tmp_path / "base", kind)
    lora = {"rank": 3, "ranks": {"q_proj": 2}, "alphas": {"q_proj": 7.0}, "init_std": 0.1}
    job = make_run(tmp_path / "run", {"name": f"hf:{tmp_path / 'base'}", "sequence": 16, "lora": lora})
    (result,) = verify(job, [Layout.parse(layout)], steps=2)
    assert result.ok, result


@pytest.mark.thin(7)
@pytest.mark.parametrize("name, layout", [
    ("gpt", "tensor=3 shard=2 zero=3"),  # 4 heads on 3 ranks
    ("gpt", "pipeline=2 context=2 schedule=zero-bubble"),
    ("moe", "shard=2 expert=2 tensor=2"), ("moe", "tensor=2 expert=2"),
])  # fmt: skip
def test_layouts_of_our_models(name: str, layout: str, tmp_path: Path) -> None:
    sizes = GPT | {"sequence": 24, "name": name} | ({"experts": 4, "experts_per_token": 2} if name == "moe" else {})
    job = make_run(tmp_path / "run", {**sizes, "lora": {"rank": 3, "init_std": 0.1}}, batch={"samples": 8})
    (result,) = verify(job, [Layout.parse(layout)], steps=2)
    assert result.ok, result


def test_adapters_of_our_decoder_beside_the_weights_of_a_folder(tmp_path: Path) -> None:
    save_base(tmp_path / "base", "llama")
    job = make_run(tmp_path / "run", {"weights": str(tmp_path / "base"), "sequence": 16, "lora": {"rank": 3}})
    assert "starts from the weights" in check_start(prepare(job, Layout()))
    for result in verify(job, [Layout.parse("tensor=2 shard=2 zero=3")], steps=2):
        assert result.ok, result


def adapters_of(run: RunFolder) -> dict[str, torch.Tensor]:
    saved = open_checkpoint(run, dtype=torch.float64)
    names = [name.removeprefix("weights.") for name in saved.index if name.startswith("weights.")]
    assert names and all(map(is_adapter, names))
    return {name: saved._read_adapter(name) for name in names}


@pytest.mark.cluster
@pytest.mark.parametrize("kind, layout", [("llama", "tensor=2 shard=2"), ("mixtral", "shard=2 expert=2")])
def test_a_trained_adapter_loads_in_peft_and_is_merged(kind: str, layout: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    save_base(tmp_path / "base", kind)
    model = {"name": f"hf:{tmp_path / 'base'}", "sequence": 16, "lora": {"rank": 3, "ranks": {"o_proj": 2}}}
    run = train(make_run(tmp_path / "run", model), layout)
    list(export_run(run.path, tmp_path / "adapter", None, "float64", 10**9))
    told = list(export_run(run.path, tmp_path / "merged", None, "float64", 10**9, check=True, merge=True))
    assert "its logits differ from the run's by" in told[1]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").double()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    tokens = torch.randint(0, 61, (2, 12))
    with torch.no_grad(), KeepFloat64():
        for module in (adapted.get_base_model(), merged):
            module.config._experts_implementation = "eager"
        found, expected = adapted(input_ids=tokens).logits, merged(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("q_proj" in name for name in changed) and not any("norm" in name or "embed" in name for name in changed)
    # A second run starts from the adapter that the first one gave.
    own = {**model, "lora": {"adapter": str(tmp_path / "adapter")}}
    job = make_run(tmp_path / "again", own, 1, optimizer={"lr": 0.0})
    first, again = adapters_of(run), adapters_of(train(job, "shard=2 zero=3"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.cluster
def test_adapters_beside_the_weights_of_a_run(tmp_path: Path) -> None:
    base = train(make_run(tmp_path / "base", GPT), "pipeline=2")
    model = {"weights": str(base.path), "lora": {"rank": 2, "targets": ["qkv", "block1.mlp.*"]}}
    job = name_step(make_run(tmp_path / "run", model, 2, seed=5))
    assert "starts from the weights of" in check_start(prepare(job, Layout.parse("tensor=2")))
    run = train(job, "tensor=2 shard=2 zero=3")
    before, after = weights_of(base), weights_of(run)
    index = read_index(list_checkpoints(run.checkpoints)[0][1])
    adapters = {name.removeprefix("weights.") for name in index if name.startswith("weights.")}
    assert all(map(is_adapter, adapters)) and len(adapters) == 2 * (2 + 3)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}  # adapters are merged
    assert before.keys() == after.keys() and changed == {f"{name.rpartition('.')[0]}.weight" for name in adapters}
    assert {name.split(".", 1)[1].rpartition(".")[0] for name in index if name.startswith("optimizer.")} == adapters
    longer = load_job(run.path / "job.toml", ["steps=3"])
    once = name_step(make_run(tmp_path / "once", model, 3, seed=5))
    assert weights_of(train(once, "shard=1")).keys() == after.keys()
    resumed = train(longer, "pipeline=2", resume=run)
    for name, value in weights_of(RunFolder(tmp_path / "once")).items():
        torch.testing.assert_close(weights_of(resumed)[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lora, sentence", [
    ({"targets": ["q_poj"]}, "no layer is named like 'q_poj'; the layers of this model are: down, gate, out, qkv, up"),
    ({"rank": 0}, "greater than or equal to 1"),
    ({"adapter": "nowhere"}, "nowhere/adapter_config.json cannot be read"),
    ({"ranks": {"x": 2}}, "no layer is named like 'x'"),
])  # fmt: skip
def test_what_cannot_be_adapted_is_a_sentence(lora: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        prepare(make_job({"model": {**GPT, "activation": "swiglu", "lora": lora}}), Layout())


@pytest.mark.parametrize(
    "field, value", [("use_dora", True), ("bias", "all"), ("target_modules", "q_.*|v"), ("r", "x")]
)
def test_adapters_that_we_cannot_compute_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    import json

    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], field: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(JobError, match="adapter_config.json|rank"):
        make_job({"model": {"name": "hf:llama", "lora": {"adapter": str(tmp_path)}}})


def test_only_adapters_can_be_merged(tmp_path: Path) -> None:
    run = train(make_run(tmp_path / "run", GPT, 1), "shard=1")
    with pytest.raises(JobError, match="has no adapters to merge"):
        list(export_run(run.path, tmp_path / "out", None, "auto", 10**9, merge=True))
    with pytest.raises(CheckpointError, match="no intact checkpoint of step 7"):
        train(make_run(tmp_path / "no", {"weights": f"{run.path}@7", "lora": {}}), "shard=1")
