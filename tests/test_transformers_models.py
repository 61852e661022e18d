"""Transformers models against their own unmodified modules in one process; `benchmarks/transformers_matrix.py` has all
families."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardwise.adapters.module_chain import KeepFloat64
from shardwise.adapters.module_family import meta_chain
from shardwise.cluster import find_cluster
from shardwise.comm.world import run_world
from shardwise.errors import JobError, LayoutError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.planner.plan import make_plan
from shardwise.train.checkpoint import CheckpointManager
from shardwise.train.export import export_run, open_checkpoint
from shardwise.train.loop import TrainingLoop
from shardwise.train.run_folder import RunFolder
from shardwise.verify.parity import VerifyResult, verify

pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 61}
LLAMA = {**SIZES, "num_key_value_heads": 2, "head_dim": 4, "bos_token_id": 1, "eos_token_id": 2}
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 61, "attn_pdrop": 0.0}
BERT = {**SIZES, "max_position_embeddings": 32, "attention_probs_dropout_prob": 0.0}
VIT = {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 5, "attention_probs_dropout_prob": 0.0}
del VIT["vocab_size"]
MAMBA2 = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 61, "num_heads": 4, "head_dim": 8, "state_size": 4,
          "n_groups": 1, "chunk_size": 8}  # fmt: skip
BART = {"d_model": 16, "encoder_layers": 3, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 61, "dropout": 0.0,
        "max_position_embeddings": 32}  # fmt: skip
ZERO_BUBBLE = "pipeline=2 schedule=zero-bubble micro_batch=2"


T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
OPT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24, "word_embed_proj_dim": 16}


def job(model_type: str, args: dict[str, object], plan: dict[str, str] | None = None) -> Job:
    model = {"name": f"hf:{model_type}", "args": args, "sequence": 16, "tensor_plan": plan or {}}
    return make_job({"precision": "float64", "model": model, "batch": {"samples": 4}})


def verify_layouts(case: Job, *layouts: str) -> list[VerifyResult]:
    return verify(case, [Layout.parse(layout) for layout in layouts], steps=2)


FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL, "bert": BERT, "vit": VIT, "t5": T5, "mamba2": MAMBA2,
            "bart": BART}  # fmt: skip
PROVEN_LAYOUTS = {
    "llama": ["shard=2 zero=3", "pipeline=2 micro_batch=2", ZERO_BUBBLE, "tensor=2", "context=2",
              "context=2 context_method=ulysses", "pipeline=2 shard=2 tensor=2 micro_batch=1"],
    "gpt2": ["pipeline=2 micro_batch=2", "pipeline=2 shard=2 context=2 micro_batch=1"],  # tied, with dropout
    "mixtral": ["shard=2 zero=3", "tensor=2 context=2", "shard=2 expert=2 zero=3",
                "pipeline=2 shard=2 expert=2 micro_batch=1"],
    "bert": [ZERO_BUBBLE, "context=2"],
    "vit": ["shard=2 zero=3", ZERO_BUBBLE],
    "t5": ["shard=2 zero=3", "replicate=2 tensor=2"],
    "mamba2": ["shard=2 zero=3", "pipeline=2 micro_batch=2"],
    "bart": ["pipeline=2 shard=2 zero=3 micro_batch=1"],  # the decoder, as epilogue, is a stage of its own
}  # fmt: skip


@pytest.mark.thin(by_kind=True)  # of each family one layout
@pytest.mark.parametrize(("model_type", "layout"), [
    pytest.param(family, layout, id=f"{family} in {layout}")
    for family, layouts in PROVEN_LAYOUTS.items() for layout in layouts
])  # fmt: skip
def test_a_layout_computes_what_the_module_computes(model_type, layout):
    (result,) = verify_layouts(job(model_type, FAMILIES[model_type]), layout)
    assert result.ok, result.describe()
    assert max(result.loss, result.grad, result.weight) < 1e-11


MLP = "model.layers.*.mlp"


@pytest.mark.thin(2)
@pytest.mark.parametrize(("plan", "culprit"), [
    ({f"{MLP}.gate_proj": "colwise", f"{MLP}.up_proj": "colwise", f"{MLP}.down_proj": "colwise"},
     "model.layers.0.mlp.down_proj"),
    ({f"{MLP}.gate_proj": "colwise", f"{MLP}.down_proj": "rowwise"}, "model.layers.0.mlp"),
], ids=["colwise for rowwise", "a missing style"])  # fmt: skip
def test_a_plan_with_shapes_that_do_not_fit_names_the_module(plan, culprit):
    (result,) = verify_layouts(job("llama", LLAMA, plan), "tensor=2")
    assert f"did not finish: tensor_plan: shapes do not fit in {culprit} (" in result.describe()


def test_a_plan_with_wrong_numbers_names_the_module():
    """Phi-3 packs gate and up projection in one weight: a plain split gives each rank one of the two."""
    plan = {f"{MLP}.gate_up_proj": "colwise", f"{MLP}.down_proj": "rowwise"}
    args = {key: value for key, value in LLAMA.items() if key != "head_dim"}
    (result,) = verify_layouts(job("phi3", {**args, "pad_token_id": 0}, plan), "tensor=2")
    assert not result.ok
    assert result.first_difference is not None and result.first_difference.name == "model.layers.0.mlp"


def test_the_anatomy_of_llama():
    chain = meta_chain(job("llama", LLAMA).model)
    anatomy = chain.anatomy
    assert anatomy.blocks == ("model.layers.0", "model.layers.1")
    assert anatomy.stream is not None and tuple(anatomy.stream.shape) == (2, 16, 16)
    assert (anatomy.stream_key, anatomy.returns_tuple, anatomy.crossing, anatomy.second_path) == (0, False, "", "")
    assert anatomy.units == ("model.embed_tokens", "model.norm", "lm_head")
    assert anatomy.parts_of["model.embed_tokens.weight"] == (0,)
    assert anatomy.parts_of["model.layers.1.mlp.up_proj.weight"] == (2,)
    assert anatomy.parts_of["lm_head.weight"] == (3,)
    shapes = [math.prod(parameter.shape) for parameter in chain.parameters()]
    assert sum(shapes) == sum(math.prod(p.shape) for p in chain.root.parameters())


@pytest.mark.parametrize(("model_type", "args", "layout", "sentence"), [
    ("llamo", {}, "shard=2", 'model.name = "hf:llamo" is neither a folder with a config.json nor a model type of '
     "transformers; did you mean 'llama'?"),
    ("llama", {"hiden_size": 16}, "shard=2", "[model.args]: LlamaConfig has no field 'hiden_size'; did you mean "
     "'hidden_size'?"),
    ("gpt2", {**GPT2, "attn_pdrop": 0.1}, "shard=2", "shard=2: model.args: attn_pdrop = 0.1, and attention kernels "
     "cannot draw the same dropout masks in every layout; set attn_pdrop = 0, or use one process."),
    ("detr", {}, "shard=2", "model.name = 'hf:detr': DetrConfig is no language model, encoder-decoder or image "
     'classifier; build it in a function of your own and name that: "python:package.module:function".'),
    ("gpt2", GPT2, "tensor=2", "tensor=2: the model has no tensor-parallel plan; set plan= or [model.tensor_plan]."),
    ("llama", LLAMA, "shard=2 expert=2", "expert=2: it has no experts that can be split; leave expert at 1."),
    ("mixtral", MIXTRAL, "shard=2 tensor=2 expert=4", "expert=4 must divide shard x context, 2; use shard=4 or a "
     "multiple."),
    ("mamba2", MAMBA2, "context=2", "context=2: its forward takes no position_ids, so its sequences "
     "cannot be split; use shard."),
    ("roberta", {**BERT, "pad_token_id": 1}, "context=2", "context=2: its positions depend on the "
     "tokens (padding), so its sequences cannot be split; use shard."),
    ("vit", VIT, "context=2", "context=2: its samples are images, so its sequences cannot be split; use "
     "shard."),
    ("bart", BART, ZERO_BUBBLE, "schedule=zero-bubble: model.decoder.layernorm_embedding uses weights on an input "
     "other than the blocks' output, so PyTorch cannot split its backward; use schedule=1f1b or interleaved."),
    ("opt", OPT, "shard=2", "shard=2: model.decoder.layers.0 draws random "
     "numbers in its forward (functional dropout, for example), which would differ between layouts; use nn.Dropout "
     "there, set its probability to 0, or use one process."),
], ids=lambda value: value if isinstance(value, str) and len(value) < 9 else "")  # fmt: skip
def test_what_cannot_run_is_refused_in_a_sentence(model_type, args, layout, sentence):
    with pytest.raises((JobError, LayoutError)) as refused:
        prepare(job(model_type, args), Layout.parse(layout))
    assert str(refused.value) == sentence


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(JobError, match="is neither a folder with a config.json nor a model type of transformers"):
        prepare(job(str(tmp_path), {}), Layout.parse("shard=2"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llamo"}), encoding="utf-8")
    with pytest.raises(JobError, match=r"config\.json cannot be read: "):
        prepare(job(str(tmp_path), {}), Layout.parse("shard=2"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}), encoding="utf-8")
    assert prepare(job(str(tmp_path), {}), Layout.parse("shard=2")).shapes["lm_head.weight"] == (61, 16)


def test_tensor_parallelism_can_be_planned():
    whole, split = (
        make_plan(job("llama", LLAMA), find_cluster("h100"), None, layout).best for layout in ("shard=2", "tensor=2")
    )
    assert split.peak_memory < whole.peak_memory * 2 and split.seconds > 0
    with pytest.raises(JobError, match="exceeds the model's 61; set model.args.vocab_size"):
        assert job("llama", LLAMA).model.model_copy(update={"vocab": 62}).vocab_size


def save(folder, model_type, args, noise=0.0, dtype=None, **saving):
    import transformers

    config = transformers.CONFIG_MAPPING[model_type](**args)
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(noise * torch.randn(weight.shape))
    module.to(dtype).save_pretrained(folder, **saving)


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("model_type", "args", "layout"),
    [("llama", LLAMA | {"tie_word_embeddings": True}, "pipeline=2 tensor=2"), ("mixtral", MIXTRAL, "shard=2 expert=2")],
)
def test_training_starts_from_the_weights_of_a_folder(model_type, args, layout, tmp_path):
    """The reference is what transformers reads from the same files: several, of which experts have one each."""
    save(tmp_path, model_type, args, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    case = job(str(tmp_path), {})
    for result in verify_layouts(case, layout):
        assert result.ok and max(result.loss, result.grad, result.weight) < 1e-11, result.describe()
    random = case.model_copy(update={"model": case.model.model_copy(update={"weights": "random"})})
    read, drawn = (prepare(one, Layout()).take_model().initial.value("model.norm.weight") for one in (case, random))
    assert torch.equal(read[:], drawn[:])  # ones
    read, drawn = (
        prepare(one, Layout()).take_model().initial.value("model.embed_tokens.weight") for one in (case, random)
    )
    assert not torch.equal(read[:], drawn[:])


def test_weights_that_do_not_fit_are_named(tmp_path):
    save(tmp_path, "llama", LLAMA)
    with pytest.raises(JobError, match=r"embed_tokens.weight has shape \(61, 16\), but the model needs \(77, 16\)"):
        prepare(job(str(tmp_path), {"vocab_size": 77}), Layout())
    with pytest.raises(JobError, match=r"no weight 'model.layers.2.self_attn.q_proj.weight' of shape"):
        prepare(job(str(tmp_path), {"num_hidden_layers": 3}), Layout())
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(JobError, match=r"model.safetensors cannot be read"):
        prepare(job(str(tmp_path), {"vocab_size": 77}), Layout())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(JobError, match=r"no \*.safetensors files"):
        prepare(job(str(tmp_path), {"vocab_size": 77}), Layout())


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("model_type", "args"), [("llama", LLAMA | {"tie_word_embeddings": True}), ("mixtral", MIXTRAL)]
)
def test_transformers_loads_what_a_run_exports(model_type, args, tmp_path):
    """The weights of a folder, trained in two ranks, come back: in several files, equal to the checkpoint's, and the
    logits of transformers' module are those that give the loss of the run's validation."""
    import transformers

    save(tmp_path / "base", model_type, args)
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")
    case = job(str(tmp_path / "base"), {})
    changes = {"run": case.run.model_copy(update={"folder": str(tmp_path / "run"), "device": "cpu"}), "steps": 2}
    case = case.model_copy(update=changes | {"data": case.data.model_copy(update={"source": "synthetic"})})
    folder = RunFolder.create(case)
    prepare(folder.job(), Layout.parse(TRAINED_LAYOUT))  # so that no rank needs to trace the module again
    run_world(train_run, 2, str(folder.path))
    (sentence,) = export_run(folder.path, tmp_path / "out", None, "float64", 4000)
    assert "step 2" in sentence and (tmp_path / "out" / "tokenizer_config.json").exists()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    model = open_checkpoint(folder).load(torch.float32)
    ours, theirs = dict(model.named_parameters()), dict(exported.named_parameters())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name].float()) for name in ours)
    drawn = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    assert not torch.equal(drawn.model.embed_tokens.weight, exported.model.embed_tokens.weight)
    with pytest.raises(JobError, match="exists"):
        list(export_run(folder.path, tmp_path / "out", None, "float32", 10**9))


TRAINED_LAYOUT = "shard=2 zero=3"


def train_run(path: str) -> None:
    folder = RunFolder(Path(path))
    prepared = prepare(folder.job(), Layout.parse(TRAINED_LAYOUT))
    TrainingLoop(prepared, folder, torch.device("cpu")).run()


ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
]  # fmt: skip
SWEPT = ("gemma2", "gemma3_text", "olmo2", "olmo3", "phi3", "gpt_neox", "cohere", "cohere2", "glm4", "smollm3",
         "granite", "gpt_oss", "deepseek_v3", "mistral")  # fmt: skip


@st.composite
def unseen_config(draw):
    """A config of a family that our decoder does not compute: odd heads, biases, ties, windows, rope scaling."""
    import transformers

    kind, flag, choose = draw(st.sampled_from(SWEPT)), st.booleans(), lambda *values: draw(st.sampled_from(values))
    kv_heads, group, head_dim = choose(1, 2, 3), choose(1, 2, 3), choose(4, 6, 8)
    heads = kv_heads * group
    args = {
        "hidden_size": heads * head_dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "num_hidden_layers": choose(1, 2, 3), "intermediate_size": choose(20, 30), "vocab_size": choose(37, 128),
        "max_position_embeddings": choose(16, 64), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": draw(flag), "attention_bias": draw(flag), "mlp_bias": draw(flag),
        "use_qk_norm": draw(flag), "use_parallel_residual": draw(flag), "sliding_window": choose(4, 7),
        "no_rope_layer_interval": 2,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "logit_scale": 0.3,
        "embedding_multiplier": 2.0, "logits_scaling": 1.7, "residual_multiplier": 0.6, "final_logit_softcapping": 5.0,
        "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "n_group": 2, "topk_group": 1, "q_lora_rank": choose(None, 8), "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6, "v_head_dim": 6, "first_k_dense_replace": 1,
    }  # fmt: skip
    if kind == "phi3":
        factors = {"short_factor": [1.5] * (head_dim // 2), "long_factor": [3.0] * (head_dim // 2)}
        rope = {"rope_type": "longrope", **factors, "factor": 2.0, "original_max_position_embeddings": 16}
    else:
        rope = draw(st.sampled_from(ROPES))
    args |= {"rope_parameters": {**rope, "rope_theta": 1e4}} if kind != "gemma3_text" else {}
    if kind in ("gemma2", "gemma3_text", "glm4", "smollm3", "gpt_oss", "mistral"):
        args |= {"head_dim": choose(4, 8), "hidden_size": heads * choose(5, 8)}
    args |= {"num_key_value_heads": heads, "head_dim": 4} if kind == "deepseek_v3" else {}
    default = transformers.CONFIG_MAPPING[kind]()
    known = {*default.to_dict(), *getattr(default, "attribute_map", {})}
    return kind, {key: value for key, value in args.items() if key in known}, choose(torch.float32, torch.bfloat16)


@pytest.mark.cluster
@settings(max_examples=6, deadline=None)
@given(unseen_config(), st.sampled_from([3000, 10**9]))
def test_folders_nobody_has_seen(tmp_path_factory, drawn, max_file_bytes):
    """Loss and every gradient are those of `from_pretrained` in float64; the export has every bit of the folder."""
    import transformers

    kind, args, dtype = drawn
    place = tmp_path_factory.mktemp("unseen")
    save(place / "base", kind, args, 0.05, dtype, max_shard_size=max_file_bytes)  # biases and norms are random too
    run = {"folder": str(place / "run"), "device": "cpu"}
    model = {"name": f"hf:{place / 'base'}", "sequence": 12}
    case = make_job({"precision": "float64", "model": model, "batch": {"samples": 2}, "run": run})
    engine = parallelize(prepare(case, Layout()), torch.device("cpu"))
    (chain,) = engine.chains
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float64)
    theirs.config._experts_implementation = "eager"
    own_buffers = dict(chain.root.named_buffers())
    for name, buffer in list(theirs.named_buffers()):  # it computes frequencies in float32
        torch.testing.assert_close(own_buffers[name].double(), buffer.double(), rtol=1e-6, atol=1e-6)
        theirs.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = own_buffers[name].clone()
    tokens, labels = torch.randint(0, args["vocab_size"], (2, 2, 12))
    found = chain(tokens, ids=torch.arange(2), targets=labels, input_0=tokens, input_1=labels)
    with KeepFloat64():
        logits = theirs(input_ids=tokens).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        assert (found - expected).abs() <= 1e-10 * expected.abs()
        found.backward()
        expected.backward()
    own, grads = dict(chain.root.named_parameters()), {n: w.grad for n, w in theirs.named_parameters()}
    floor = 1e-6 * max(grad.norm() for grad in grads.values() if grad is not None)
    for name, grad in grads.items():
        assert grad is None or (own[name].grad - grad).norm() <= 1e-10 * max(grad.norm(), floor), name
    folder = RunFolder.create(case)
    CheckpointManager(folder.checkpoints, 1, False).save(1, engine, engine.make_optimizer(case), {"seed": case.seed})
    list(export_run(folder.path, place / "out", None, "auto", max_file_bytes))
    before, after = ({name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
                     for path in (place / "base", place / "out"))  # fmt: skip
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)


def test_in_float64_positions_meet_frequencies_in_float64() -> None:
    """As transformers 5.17 writes rotary embeddings: frequencies and whole numbers, both cast to float32."""
    frequencies = torch.tensor([1.0, 0.1], dtype=torch.float64)
    positions = torch.arange(3)
    with KeepFloat64():
        angles = positions[:, None].float() * frequencies[None, :].float()
        same_angles = positions[:, None].to(torch.float32) @ frequencies[None, :].to(dtype=torch.float32)
    assert angles.dtype is torch.float64 and same_angles.dtype is torch.float64
    assert torch.equal(angles[2], 2 * frequencies)
