"""Weights in and out: Hugging Face folders and our own runs, as initial weights and as exports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardwise.adapters.module_family import meta_chain
from shardwise.comm.world import run_world
from shardwise.errors import CheckpointError, JobError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models.chain import init_weights
from shardwise.models.pretrained import INDEX_FILE
from shardwise.models.pretrained_config import FORMATS, make_config, read_config
from shardwise.models.registry import parse_model
from shardwise.parallel.prepare import prepare
from shardwise.train.checkpoint_folder import CheckpointGroup, find_newest_valid
from shardwise.train.dcp_storage import dtype_of, read_index, read_pieces, weight_pieces
from shardwise.train.export import export_run, open_checkpoint
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.train.warm_start import check_start, name_step

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 24, "vocab_size": 61, "head_dim": 8}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "llama": SMALL, "mistral": {**SMALL, "sliding_window": None}, "qwen2": SMALL, "qwen3": SMALL,
    "mixtral": {**SMALL, "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                  "norm_topk_prob": True},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 61},
}  # fmt: skip


def save(folder: Path, kind: str, changes: dict[str, Any] | None = None, dtype: Any = None, **saving: Any) -> Any:
    """Saves transformers' module of a tiny config, with random biases and norms too."""
    config = transformers.CONFIG_MAPPING[kind](**TINY[kind] | (changes or {}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape).to(weight.dtype))
    model.save_pretrained(folder, **saving)
    return model


def make_run(folder: Path, model: dict[str, Any], steps: int = 2, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "steps": steps, "model": model, "batch": {"samples": 4}, "checkpoint": {"snapshot_every": 0},
        "data": {"source": "synthetic", "samples": 64}, "run": {"folder": str(folder), "device": "cpu"},
        "validation": {"samples": 4}, "optimizer": {"lr": 0.01},
    }  # fmt: skip
    return make_job(values | changes)


def train_rank(path: str, layout: str) -> None:
    folder = RunFolder(Path(path))
    TrainingLoop(prepare(folder.job(), Layout.parse(layout)), folder, torch.device("cpu")).run()


def train(job: Job, layout: str) -> RunFolder:
    """Trains in a world of its own. The job is prepared here first, so that no rank needs to trace the model again."""
    folder = RunFolder.create(name_step(job))
    prepare(folder.job(), Layout.parse(layout))
    run_world(train_rank, Layout.parse(layout).world, str(folder.path), layout)
    return folder


def weights_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    return dict(open_checkpoint(folder).load(torch.float32).named_unique_parameters())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@st.composite
def llama_like(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A config of any kind that our decoder computes."""
    kind = draw(st.sampled_from(sorted(FORMATS)))
    layers, seed_theta = draw(st.integers(1, 3)), draw(st.sampled_from([1e4, 5e5]))
    changes: dict[str, Any] = {"vocab_size": draw(st.sampled_from([7, 61, 128])),
                               "tie_word_embeddings": draw(st.booleans())}  # fmt: skip
    if kind == "gpt2":
        heads = draw(st.sampled_from([1, 3, 4]))
        return kind, changes | {"n_layer": layers, "n_head": heads, "n_embd": 8 * heads,
                                "n_inner": draw(st.sampled_from([None, 20]))}  # fmt: skip
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 5]))
    rope = {"rope_type": "default"}
    if draw(st.booleans()):
        rope = draw(st.sampled_from([
            {"rope_type": "linear", "factor": 4.0},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64},
        ]))  # fmt: skip
    return kind, changes | {
        "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * group,
        "hidden_size": kv_heads * group * draw(st.sampled_from([3, 8])), "head_dim": draw(st.sampled_from([2, 6])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])), "rope_parameters": {**rope, "rope_theta": seed_theta},
    }  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(llama_like())
def test_a_folder_computes_the_same_as_ours(tmp_path_factory: pytest.TempPathFactory, drawn: Any) -> None:
    """Random configs: every logit and every gradient of our decoder is that of transformers' module."""
    from shardwise.adapters.module_chain import KeepFloat64
    from shardwise.models.pretrained import ModuleWeights

    kind, changes = drawn
    folder = tmp_path_factory.mktemp("folder")
    theirs = save(folder, kind, changes, torch.float64).eval()
    job = make_job({"model": {"weights": str(folder)} | ({} if kind == "gpt2" else {"sequence": 12})})
    ours = job.family.build(job.model, 0).double().eval()
    init_weights(ours, 0)
    if kind != "gpt2":
        theirs.model.rotary_emb = job.family.reference(job.model).model.rotary_emb  # with frequencies in float64
    theirs.config._experts_implementation = "eager"
    tokens = torch.randint(0, job.model.vocab_size, (2, 12))
    found = ours(tokens, ids=torch.arange(2))
    with KeepFloat64():
        expected = theirs(tokens).logits
    assert (found - expected).norm() <= 1e-12 * expected.norm()
    (found * expected.detach()).sum().backward()
    (expected * expected.detach()).sum().backward()
    gradients = {name: weight.grad for name, weight in ours.named_unique_parameters()}
    renamed = ModuleWeights(job.family.export_weights(job.model, gradients), theirs)
    scale = max(float(weight.grad.norm()) for weight in theirs.parameters())
    for name, weight in theirs.named_parameters():
        value = renamed.value(name)
        value = value[(slice(None),) * len(value.shape)]
        assert (value - weight.grad).norm() <= 1e-11 * max(float(weight.grad.norm()), 1e-6 * scale), name


@pytest.mark.parametrize("kind", FORMATS)
def test_configs_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    """What a config.json omits has transformers' default, and a config of ours comes back from its own."""
    needs = {"sliding_window": None} if kind in ("mistral", "mixtral") else {}
    needs |= {"norm_topk_prob": True} if kind == "qwen3_moe" else {}
    whole = transformers.CONFIG_MAPPING[kind](**needs)
    sizes = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"} & {kind}
    short = {"model_type": kind, **needs} | ({} if not sizes else {
        key: getattr(whole, key) for key in FORMATS[kind].keys
        if key not in ("tie_word_embeddings", "rms_norm_eps", "head_dim")
    })  # fmt: skip
    if kind == "gpt2":
        short |= {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    found = []
    for values in (short, whole.to_dict()):
        (tmp_path / "config.json").write_text(json.dumps(values))
        config = parse_model(read_config(tmp_path))
        found.append(config)
    assert found[0] == found[1]
    (tmp_path / "config.json").write_text(json.dumps(make_config(found[0]) | {"sliding_window": None}))
    assert parse_model(read_config(tmp_path)).model_dump() == found[0].model_dump()


@pytest.mark.parametrize(("change", "sentence"), [
    ({"final_logit_softcapping": 30.0}, r"has the field 'final_logit_softcapping' = 30.0, which our decoder has not"),
    ({"hidden_act": "gelu"}, r"hidden_act = 'gelu', but our decoder needs 'silu'"),
    ({"quantization_config": {"quant_method": "fp8"}}, r"has the field 'quantization_config'"),
    ({"model_type": "gemma2"}, r"our decoders compute llama, .*, not 'gemma2'; train it as transformers' own module"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type"),
    ({"layer_types": ["sliding_attention"]}, "layer_types"),
])  # fmt: skip
def test_a_config_that_we_cannot_compute_is_refused(change: Any, sentence: str, tmp_path: Path) -> None:
    values = {"model_type": "llama", **TINY["llama"], **change}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(JobError, match=sentence):
        make_job({"model": {"weights": str(tmp_path)}})


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    file, whole = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")

    def refusal(**model: Any) -> str:
        with pytest.raises(JobError) as refused:
            check_start(prepare(make_job({"model": {"weights": str(tmp_path), **model}}), Layout()))
        return str(refused.value)

    assert "embed_tokens.weight has shape (61, 16), but the model needs (62, 16)" in refusal(vocab=62)
    save_file({name: value for name, value in whole.items() if "norm" not in name}, file)
    assert "has no weight 'model.layers.0.input_layernorm.weight' of shape (16,)" in refusal(sequence=17)
    save_file(whole | {"model.extra.weight": torch.zeros(3)}, file)
    assert "has the weight 'model.extra.weight', which the model has not" in refusal(sequence=18)
    file.write_bytes(file.read_bytes()[:-9])
    assert "model.safetensors cannot be read" in refusal(sequence=19)
    file.rename(tmp_path / "pytorch_model.bin")
    assert "has no *.safetensors files" in refusal(sequence=20)
    assert "changes the form" in refusal(bias=True)
    for weights, name in ((str(tmp_path / "none"), "gpt"), (str(tmp_path), "moe"), (str(tmp_path), "resnet-50")):
        with pytest.raises(JobError, match="neither a run nor|leave out model.name"):
            prepare(make_job({"model": {"weights": weights, "name": name}}), Layout())


def _rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))


def _in_two_files(folder: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(folder / "model.safetensors", folder / name)
    (folder / "model.safetensors").unlink()


def _as_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def _indexed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}))


HOSTILE_WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (_as_pipe, "cannot be read: it is no file"),
    "two files": (_in_two_files, "has the weight 'lm_head.weight' in two files"),
    "index elsewhere": (_indexed, "folder/elsewhere.safetensors cannot be read"),
    "header length": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 9), "cannot be read"),
    "integers": (lambda folder: save_file(
        {name: value.int() for name, value in load_file(folder / "model.safetensors").items()},
        folder / "model.safetensors"), "is stored as I32; save the model in bf16"),
}  # fmt: skip
HOSTILE_CONFIGS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "NaN": (lambda folder: _rewrite(folder / "config.json", rms_norm_eps=float("nan")), "NaN|finite number"),
    "layers": (lambda folder: _rewrite(folder / "config.json", num_hidden_layers=10**9), "layers"),
    "list": (lambda folder: _rewrite(folder / "config.json", num_attention_heads=[4]), "num_attention_heads|heads"),
    "negative": (lambda folder: _rewrite(folder / "config.json", intermediate_size=-3), "negative|ffn"),
    "heads": (lambda folder: _rewrite(folder / "config.json", num_attention_heads=0), "zero|heads"),
}  # fmt: skip


@pytest.fixture(scope="module")
def intact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "intact"
    save(folder, "llama")
    return folder


def check_refusal(folder: Path, sentence: str) -> None:
    """As a module of transformers and as a decoder of ours."""
    for model in ({"name": f"hf:{folder}"}, {"weights": str(folder)}):
        with pytest.raises(JobError, match=sentence) as refused:
            check_start(prepare(make_job({"model": {**model, "sequence": 16}}), Layout()))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", HOSTILE_WEIGHTS)
def test_hostile_weights_are_refused_in_a_sentence(name: str, intact_folder: Path) -> None:
    """The module is the same in all cases, and so is its path: it is traced for the first one alone."""
    folder = intact_folder.parent / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(intact_folder, folder)
    meta_chain.cache_clear()  # it has weights of the folder as it was
    spoil, sentence = HOSTILE_WEIGHTS[name]
    spoil(folder)
    check_refusal(folder, sentence)


@pytest.mark.parametrize("name", HOSTILE_CONFIGS)
def test_a_hostile_config_is_refused_in_a_sentence(name: str, intact_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(intact_folder, folder)
    spoil, sentence = HOSTILE_CONFIGS[name]
    spoil(folder)
    check_refusal(folder, sentence)


@pytest.mark.parametrize(("kind", "changes", "sequence", "sentence"), [
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, 16, "without quantization"),
    ("gpt2", {"n_positions": 16}, 32, "has 16 learned positions"),
])  # fmt: skip
def test_a_module_that_cannot_be_trained_so_is_refused(
    kind: str, changes: dict[str, Any], sequence: int, sentence: str, tmp_path: Path
) -> None:
    save(tmp_path, kind)
    _rewrite(tmp_path / "config.json", **changes)
    with pytest.raises(JobError, match=sentence):
        prepare(make_job({"model": {"name": f"hf:{tmp_path}", "sequence": sequence}}), Layout())


def test_the_single_file_comes_first(tmp_path: Path) -> None:
    """As in transformers: folders of the hub may have the weights in a form of their maker beside it."""
    save(tmp_path, "llama")
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    check_start(prepare(make_job({"model": {"weights": str(tmp_path), "sequence": 16}}), Layout()))


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize(("kind", "layout"), [
    ("llama", "tensor=2"), ("llama", "pipeline=2 tensor=2 micro_batch=1"), ("mixtral", "shard=2 expert=2 zero=3"),
    ("gpt2", "pipeline=2 micro_batch=1"), ("gpt2", "tensor=2"),
])  # fmt: skip
def test_what_is_not_trained_comes_back_bit_by_bit(kind: str, layout: str, tmp_path: Path) -> None:
    save(tmp_path / "base", kind, dtype=torch.bfloat16, max_shard_size="5KB")
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")
    sequence = {} if kind == "gpt2" else {"sequence": 16}
    job = make_run(tmp_path / "run", {"weights": str(tmp_path / "base")} | sequence, 1, optimizer={"lr": 0.0})
    folder = train(job, layout)
    told = list(export_run(folder.path, tmp_path / "out", None, "auto", 4000, check=True))
    assert "bfloat16" in told[0] and "loads it, and its logits differ from the run's by" in told[1]
    before, after = stored(tmp_path / "base"), stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config["model_type"] == kind and len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_a_run_starts_from_another_run(tmp_path: Path) -> None:
    """In another layout, from any step, with more rows in the vocabulary and longer sequences."""
    sizes = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "vocab": 61, "sequence": 16, "tied": False}
    job = make_run(tmp_path / "run@home", sizes, 4, checkpoint={"every": 2, "keep": 5, "snapshot_every": 0})
    first = train(job, "shard=2 zero=3")
    model = {"weights": str(first.path), "vocab": 70, "sequence": 32, "rope_scaling": {"factor": 2.0}}
    for step, layout in ((4, "tensor=2 shard=2"), (2, "pipeline=2")):
        own = model | ({} if step == 4 else {"weights": f"{first.path}@{step}"})
        job = name_step(make_run(tmp_path / f"from{step}", own, 1, optimizer={"lr": 0.0}, seed=3))
        assert job.model.weights.endswith(f"@{step}") and job.model.layers == 2
        sentence = check_start(prepare(job, Layout.parse(layout)))
        assert "embed.tokens.weight has 9 new rows; head.project.weight has 9 new rows" in sentence
        found = weights_of(train(job, layout))
        again = name_step(make_run(job.run.folder, own, 1, optimizer={"lr": 0.0}, seed=3), previous=job)
        assert again == job, "a run that is continued takes the step that it had"
        if step == 4:
            expected = weights_of(first)
            for name, value in expected.items():
                assert torch.equal(found[name][: len(value)], value), name
            assert found["embed.tokens.weight"][61:].abs().sum() > 0
            newest = found
    assert not torch.equal(found["head.norm.weight"], newest["head.norm.weight"])
    for changed, sentence in (({"width": 32}, "only the vocabulary"), ({"vocab": 60}, "only the vocabulary"),
                              ({"weights": f"{first.path}@3"}, "no checkpoint of step 3"),
                              ({"weights": f"{first.path}@x"}, "is no step")):  # fmt: skip
        with pytest.raises(CheckpointError, match=sentence):
            check_start(prepare(name_step(make_run(tmp_path / "no", model | changed)), Layout()))


def saved(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    """The weights and buffers of a checkpoint, tables included."""
    choice = find_newest_valid(folder.checkpoints, CheckpointGroup(), step)
    assert choice.path is not None
    index = read_index(choice.path)
    index = {name: entry for name, entry in index.items() if name.startswith(("weights.", "buffers."))}
    tensors = {name: torch.empty(entry["shape"], dtype=dtype_of(entry)) for name, entry in index.items()}
    read_pieces(choice.path, index, weight_pieces(tensors), CheckpointGroup())
    return tensors


BLOCKS = {"layers": 2, "width": 16, "heads": 4, "vocab": 61, "sequence": 16}
# A model of each family, the layout of its first run, and the layout of the run that starts from it.
STARTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "moe": ({**BLOCKS, "name": "moe", "experts": 4, "expert_ffn": 12}, "shard=2 expert=2 zero=3", "tensor=2"),
    "bert": ({**BLOCKS, "name": "bert"}, "tensor=2", "pipeline=2"),
    "t5": ({**BLOCKS, "name": "t5", "head_dim": 4, "ffn": 24, "target_sequence": 8}, "pipeline=2", "shard=2 zero=3"),
    "resnet": ({"name": "resnet", "depth": 18, "stem": "cifar", "width": 4, "image_size": 8, "num_classes": 5},
               "shard=2 zero=3", "replicate=2"),
    "dlrm": ({"name": "dlrm", "tables": 3, "rows": [41, 7, 19], "width": 4, "bottom": [8], "top": [8]},
             "shard=2", "replicate=3"),
    "hf": ({"name": "hf:llama", "args": {**SMALL, "tie_word_embeddings": True}, "sequence": 16}, "pipeline=2",
           "tensor=2"),
    "python": ({"name": "python:user_modules:vit"}, "shard=2 zero=3", "pipeline=2"),
}  # fmt: skip


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", STARTS)
def test_every_model_can_start_from_a_run(name: str, tmp_path: Path) -> None:
    model, layout, other_layout = STARTS[name]
    saving = {"checkpoint": {"every": 1, "keep": 5, "snapshot_every": 0}, "batch": {"samples": 6}}
    first = train(make_run(tmp_path / "first", model, 2, **saving), layout)
    start = {"weights": f"{first.path}@1"}
    second = train(make_run(tmp_path / "second", start, 1, **saving, seed=7, optimizer={"lr": 0.0}), other_layout)
    before, newer, after = saved(first, 1), saved(first, 2), saved(second, 1)
    weights = [key for key in before if key.startswith("weights.")]
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in weights)
    assert any(not torch.equal(before[key], newer[key]) for key in weights)
    for key, value in before.items():  # of batch norm: the second run went on counting
        assert "num_batches_tracked" not in key or after[key] == value + 1
    if name == "dlrm":
        wrong = make_run(tmp_path / "no", start | {"rows": [41, 7, 20]})
        with pytest.raises(CheckpointError, match="for table2, .* has .19, 4., but this model needs .20, 4."):
            check_start(prepare(name_step(wrong), Layout()))


def test_a_trained_decoder_becomes_a_llama(tmp_path: Path) -> None:
    sizes = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "vocab": 61, "sequence": 16}
    folder = train(make_run(tmp_path / "run", sizes), "pipeline=2")
    assert "LlamaForCausalLM" in list(export_run(folder.path, tmp_path / "out", None, "auto", 10**9, check=True))[1]
    job = make_run(tmp_path / "no", sizes | {"mup_base_width": 8})
    with pytest.raises(JobError, match="has no form that transformers knows"):
        job.family.export_config(job.model)


WITHOUT = """
import json
import sys

sys.modules["transformers"] = None
from shardwise.cli import app

for command in json.loads(sys.argv[1]):
    assert not app(command, standalone_mode=False), command
"""


def test_in_and_out_without_transformers(tmp_path: Path) -> None:
    save(tmp_path / "base", "qwen3", dtype=torch.float32)
    settings_ = [f"model.name=hf:{tmp_path / 'base'}", "model.sequence=16", "steps=1", "layout=shard=1",
                 f"run.folder={tmp_path / 'run'}", "optimizer.lr=0", "data.source=synthetic"]  # fmt: skip
    arguments = [part for setting in settings_ for part in ("--set", setting)]
    commands = json.dumps([["train", *arguments], ["export", str(tmp_path / "run"), str(tmp_path / "out")]])
    done = subprocess.run([sys.executable, "-c", WITHOUT, commands], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, after = stored(tmp_path / "base"), stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_tokenizer_and_vocabulary_follow_each_other(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", *"abcdefg", " "])}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(tmp_path / "tokenizer.json"))
    path = str(tmp_path / "tokenizer.json")
    assert make_job({"data": {"tokenizer": path}}).model.vocab_size == 9
    assert make_job({"data": {"tokenizer": path}, "model": {"name": "bert"}}).model.vocab_size == 10
    assert make_job({"data": {"tokenizer": path}, "model": {"vocab": 64}}).model.vocab_size == 64
    assert make_job({"data": {"tokenizer": "bpe:300"}}).model.vocab_size == 300
    save(tmp_path, "llama")
    masked = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    masked.add_special_tokens(["[MASK]"])
    masked.save(str(tmp_path / "masked.json"))
    for name in ("bert", "hf:bert"):
        model = {"name": name} if name == "bert" else {"name": name, "args": {"vocab_size": 10}}
        masked_model = make_job({"data": {"tokenizer": str(tmp_path / "masked.json")}, "model": model}).model
        assert (masked_model.vocab_size, masked_model.reserved_ids, masked_model.resolved_mask_id) == (10, 0, 9)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "text.txt").write_text("abc def gab " * 200)
    data = {"data": {"source": "text", "path": str(tmp_path / "text.txt")}}
    run = train(make_run(tmp_path / "run", {"weights": str(tmp_path), "sequence": 16}, **data), "pipeline=1")
    assert "messages" in (run.path / "tokenizer_config.json").read_text()  # for those who start from this run
    for model in ({"weights": str(tmp_path)}, {"name": f"hf:{tmp_path}"}):
        job = make_job({"model": model})
        assert job.data.tokenizer == str(tmp_path) and job.model.vocab_size == 61
