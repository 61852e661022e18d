"""Models in shape form: closed forms against traces on fake tensors, published sizes, plans of all examples."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.cluster import CLUSTERS
from shardwise.errors import JobError, LayoutError
from shardwise.job import load_job, make_job
from shardwise.layout import Layout
from shardwise.models.chain import Chain
from shardwise.models.dlrm_family import DLRMConfig
from shardwise.models.gpt import build_gpt
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.operator_costs import OperatorCosts
from shardwise.models.registry import family_of
from shardwise.models.resnet_family import ResNetConfig
from shardwise.models.t5_family import T5Config
from shardwise.models.trace import interpolate_traces, trace_module
from shardwise.parallel.precision import Precision
from shardwise.parallel.prepare import forward_flops
from shardwise.planner.costs.machine import KernelProfile, Machine, efficiency_of
from shardwise.planner.costs.memory_model import block_activation_bytes, engine_profile
from shardwise.planner.costs.model_shape import OperatorListModel, shape_of
from shardwise.planner.operator_list_estimate import OperatorListEstimator
from shardwise.planner.plan import make_plan
from shardwise.planner.search import search

EXAMPLES = Path(__file__).parent.parent / "examples"
GUIDE = EXAMPLES.parent / "docs" / "how-to" / "plan-a-run.md"
GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True, "kv_heads": 4}
DECODERS = [
    {},
    {"kv_heads": 2, "ffn": 96, "tied": False},
    {**GPT2, "sequence": 48},
    {"positions": "learned", "norm": "layer", "kv_heads": 1, "head_dim": 32},
]


def traced(values: dict[str, object], samples: int = 2) -> tuple[DecoderConfig, tuple[OperatorCosts, ...]]:
    return once(
        DecoderConfig(**({"layers": 2, "width": 64, "heads": 4, "vocab": 101, "sequence": 32} | values)), samples
    )


def plain(model: DecoderConfig) -> Chain:
    """With a head whose backward is by itself, as in a pipeline; else its products are all in the forward."""
    with torch.device("meta"):
        chain = build_gpt(model, 0)
    chain.get_submodule("head.project").loss_chunk_size = 0
    return chain


@cache
def once(model: DecoderConfig, samples: int) -> tuple[DecoderConfig, tuple[OperatorCosts, ...]]:
    chain = plain(model)
    tokens = torch.zeros(samples, model.sequence, dtype=torch.int64)
    return model, trace_module(chain, tokens, ids=tokens[:, 0], targets=tokens)


# Closed forms of the decoder against its trace


@pytest.mark.parametrize("values", DECODERS)
def test_flops_of_a_decoder_are_those_of_its_trace(values: dict[str, object]) -> None:
    model, pieces = traced(values)
    assert [piece.name for piece in pieces] == ["embed", "block0", "block1", "head"]
    assert 3 * sum(piece.flops for piece in pieces) == shape_of(model).flops(2)
    assert [piece.flops for piece in pieces[1:]] == [2 * flops for flops in forward_flops(model)[1:]]
    assert sum(piece.flops for piece in pieces[1:3]) == shape_of(model).block_flops(2)


@pytest.mark.parametrize("values", DECODERS)
def test_parameters_of_a_decoder_are_those_of_its_trace(values: dict[str, object]) -> None:
    """But for norms and biases, which no cost depends on."""
    model, pieces = traced(values)
    norms = (2 * model.layers + 1) * model.width * (2 if model.norm == "layer" and model.bias else 1)
    products = (model.heads + 2 * model.kv_heads) * model.head_dim + 2 * model.width
    products += model.ffn * (2 if model.activation == "swiglu" else 1)
    biases = model.layers * products if model.bias else 0
    twice = model.vocab * model.width if model.tied else 0  # both ends name it
    assert sum(piece.parameters for piece in pieces) == shape_of(model).parameters + norms + biases + twice


def test_what_a_block_saves() -> None:
    """Of GPT-2's kind, number by number: two inputs of norms, two of products, queries, keys and values, what attention
    gives, both sides of the activation; and small sums: mean and deviation of norms, one number a row of attention."""
    model, pieces = traced(GPT2)
    tokens, width = 2 * model.sequence, model.width
    small = tokens * (4 + model.heads)
    assert pieces[1].saved_bytes == 4 * (tokens * (4 * width + 3 * width + width + 2 * model.ffn) + small)
    assert pieces[1].output_bytes == 4 * tokens * width


@pytest.mark.parametrize("values", [{}, GPT2, {"kv_heads": 2, "norm": "layer"}])
def test_closed_saved_bytes_are_near_the_trace(values: dict[str, object]) -> None:
    """The closed form is that of a GPU. On a CPU RMSNorm is several operators, each of which keeps an input; and the
    small sums are left out of it."""
    model, pieces = traced(values)
    tokens = 2 * model.sequence
    closed = block_activation_bytes(shape_of(model), 4, Layout(micro_batch=2), False)[0]
    more = 4 * 2 * tokens * model.width if model.norm == "rms" else 0
    assert closed == pytest.approx(pieces[1].saved_bytes - more, rel=0.13)


def test_the_trace_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    first, relu, last = trace_module(module, torch.zeros(5, 4))
    assert (first.flops, last.flops) == (2 * 5 * 4 * 8, 2 * 5 * 8 * 2)
    assert (relu.moved_bytes, relu.num_ops, relu.parameters) == (2 * 4 * 5 * 8, 1, 0)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(weight.grad is None for weight in module.parameters())
    assert module(torch.zeros(5, 4)).shape == (5, 2)


def test_work_outside_of_children_is_told() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x)) @ torch.ones(4, 3)

    inner, rest = trace_module(Doubled(), torch.zeros(2, 4))
    assert (inner.name, inner.flops, inner.parameters) == ("inner", 2 * 2 * 2 * 4 * 4, 16)
    assert (rest.name, rest.flops, rest.parameters) == ("", 2 * 2 * 4 * 3, 0)
    (alone,) = trace_module(nn.Linear(4, 3), torch.zeros(2, 4))
    assert (alone.name, alone.flops, alone.parameters, alone.saved_bytes) == ("Linear", 2 * 2 * 4 * 3, 15, 4 * 2 * 4)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b"])
def test_published_shapes_are_traced_too(name: str) -> None:
    """Two blocks of each, at full width and length; nothing is computed."""
    model = DecoderConfig(name=name, layers=2)
    chain = plain(model)
    tokens = torch.zeros(1, model.sequence, dtype=torch.int64)
    pieces = trace_module(chain, tokens, ids=tokens[:, 0], targets=tokens)
    assert 3 * sum(piece.flops for piece in pieces) == pytest.approx(shape_of(model).flops(1), rel=1e-12)


def test_in_16_bits_a_block_keeps_its_rounded_weights() -> None:
    """As our engine runs it: activations take half, and beside them stay the rounded weights of the products."""
    model = DecoderConfig(layers=1, width=64, heads=4, vocab=101, sequence=32, **GPT2)
    wide, narrow = build_gpt(model, 0), build_gpt(model, 0)
    Precision("bf16").apply(narrow)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    blocks = [trace_module(chain, tokens, ids=tokens[:, 0], targets=tokens)[1] for chain in (wide, narrow)]
    matrices = 12 * model.width**2
    assert blocks[1].saved_bytes - engine_profile("bf16").compute_copy_bytes * matrices == pytest.approx(
        blocks[0].saved_bytes / 2, rel=0.02
    )


# Lists against traces


class Bottleneck(nn.Module):
    def __init__(self, wide: int, inner: int, stride: int):
        super().__init__()
        self.row = nn.Sequential(
            nn.Conv2d(wide, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner),
        )  # fmt: skip
        self.side = nn.Identity()
        if wide != 4 * inner:
            self.side = nn.Sequential(nn.Conv2d(wide, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.row(x) + self.side(x))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def resnet50(classes: int) -> nn.Sequential:
    rows: list[nn.Module] = [nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    )]  # fmt: skip
    wide = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for place in range(count):
            rows.append(Bottleneck(wide, 64 * 2**stage, 2 if stage and not place else 1))
            wide = 256 * 2**stage
    return nn.Sequential(*rows, nn.Sequential(Mean(), nn.Linear(wide, classes)))


def test_a_resnet_costs_what_torchvisions_costs() -> None:
    """Of blocks that are equal, one is traced for all; the heads differ in the loss."""
    with torch.device("meta"):
        module = resnet50(10)
    theirs = trace_module(module, torch.zeros(2, 3, 72, 72))
    config = ResNetConfig(name="resnet-50", image_size=72, num_classes=10)
    ours = family_of(config).operator_costs(config, 4)(2)
    assert len(theirs) == len(ours) == 18
    for mine, its in zip(ours[:-1], theirs[:-1], strict=True):
        assert (mine.parameters, mine.flops, mine.output_bytes) == (its.parameters, its.flops, its.output_bytes)
        assert sorted(mine.products, key=str) == sorted(its.products, key=str)
        assert mine.saved_bytes == its.saved_bytes
        assert mine.moved_bytes == pytest.approx(its.moved_bytes, rel=0.1)
    assert ours[-1].products == theirs[-1].products and ours[-1].parameters == theirs[-1].parameters


def test_a_dlrm_is_traced() -> None:
    """Both MLPs and the interaction between them, for any micro-batch size."""
    model = DLRMConfig(tables=3, width=8, dense_features=5, bottom=(16,), top=(32, 4))
    shape = shape_of(model)
    assert isinstance(shape, OperatorListModel)
    bottom, top, interaction = shape.make_operators(7)
    sizes = [[(p.rows, p.inner, p.columns) for p in module.products] for module in (bottom, top)]
    assert sizes == [[(7, 5, 16), (7, 16, 8)], [(7, 14, 32), (7, 32, 4), (7, 4, 1)]]
    assert [(p.groups, p.rows, p.inner, p.columns) for p in interaction.products] == [(7, 4, 8, 4)]
    assert interaction.saved_bytes > 4 * 7 * 4 * 8
    assert shape.active_parameters == 5 * 16 + 16 + 16 * 8 + 8 + 14 * 32 + 32 + 32 * 4 + 4 + 4 + 1
    assert shape.parameters == shape.active_parameters + 3 * 1_000_000 * 8


@pytest.mark.parametrize("samples", [1, 2, 8, 31])
def test_interpolated_costs_are_those_of_a_trace(samples: int) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))

    def trace(count: int) -> tuple[OperatorCosts, ...]:
        return trace_module(module, torch.zeros(count, 3, 8, 8))

    assert interpolate_traces(trace)(samples) == trace(samples)


def test_any_module_can_be_planned() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)))
    shape = OperatorListModel(
        layers=4, width=1, heads=1, kv_heads=1, head_dim=1, ffn=0, vocab=0, sequence=1,
        make_operators=lambda samples: trace_module(module, torch.zeros(samples, 1024)),
    )  # fmt: skip
    cluster = CLUSTERS["a100-80g"]
    machine = Machine(cluster, efficiency_of(cluster.device, cluster.measured))
    found = search(OperatorListEstimator(machine, shape, KernelProfile("float32"), 64, engine_profile("float32")), 8)
    assert shape.parameters == 4 * 1024 * 1025
    assert all(p.layout.pipeline == p.layout.tensor == 1 for p in found.best)
    assert all(p.peak_memory < 8 * 2**30 and 0 < p.seconds < 1 for p in found.best)


# Published sizes


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("gpt3-175b", 175e9, None), ("llama3-8b", 8.03e9, None), ("llama3-70b", 70.6e9, None),
        ("llama3-405b", 405.9e9, None), ("mixtral-8x7b", 46.7e9, 12.9e9), ("deepseek-v3", 671e9, 37e9),
        ("bert-base", 110e6, None), ("bert-large", 335e6, None), ("t5-11b", 11.3e9, None),
        ("resnet-50", 25.557e6, None), ("resnet-101", 44.549e6, None), ("resnet-152", 60.193e6, None),
    ],
)  # fmt: skip
def test_published_sizes(name: str, total: float, active: float | None) -> None:
    shape = shape_of(make_job({"model": {"name": name}}).model, 2)
    assert shape.parameters == pytest.approx(total, rel=0.012)
    if active:
        assert shape.active_parameters == pytest.approx(active, rel=0.02)
    if name.startswith("resnet"):
        assert shape.parameters == pytest.approx(total, rel=2e-5)


def test_flops_of_a_resnet_and_a_t5() -> None:
    """7.8 billion products and sums of an image (He et al. 2015, table 1: 7.6); two for each weight and token."""
    assert shape_of(ResNetConfig(name="resnet-101"), 2).flops(1) / 6 == pytest.approx(7.8e9, rel=0.01)
    model = T5Config(name="t5-11b")
    attention, ffn = 4 * 1024 * 16384, 2 * 1024 * 65536
    weights = 512 * (attention + ffn) + 114 * (attention + ffn) + (114 * 2 + 512 * 2) * 1024 * 16384
    squares = 2 * 16384 * (2 * 512**2 + 114**2 + 2 * 114 * 512)
    assert shape_of(model, 2).flops(1) == 3 * (24 * (2 * weights + squares) + 2 * 114 * 1024 * 32128)


# Jobs


def test_a_dry_run_of_embedding_tables_is_refused_in_a_sentence(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "dlrm"\n')
    result = CliRunner().invoke(app, ["dryrun", str(job), "--layout", "shard=2"])
    assert isinstance(result.exception, JobError) and result.exception.exit_code == 2
    assert "embedding tables" in str(result.exception) and "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "moe", "expert": 4}, ["model.expert", "expert=4 in layout"]),
        ({"experts": 4}, ["model.experts", "'moe'", "not of 'gpt'"]),
        ({"name": "resnet", "layers": 4}, ["model.layers", "not of 'resnet'", "depth"]),
        ({"name": "resnet", "depth": 19}, ["model.depth", "50"]),
        ({"name": "dlrm", "bottom": [0]}, ["model.bottom.0"]),
        ({"name": "mixtral-8x7", "layers": 2}, ["mixtral-8x7b"]),
        ({"name": "moe", "experts_per_token": 9}, ["experts_per_token (9)", "experts (8)"]),
        ({"name": "moe", "dense_layers": 8}, ["dense_layers (8)"]),
        ({"name": "moe", "qk_rope_head_dim": 8}, ["latent attention"]),
    ],
)
def test_keys_of_other_kinds_are_told(model: dict[str, object], words: list[str]) -> None:
    with pytest.raises(JobError) as told:
        make_job({"model": model})
    assert all(word in str(told.value) for word in words), told.value


PLANS = {
    "gpt3-175b": 256, "llama3-8b": 64, "llama3-70b": 64, "llama3-405b": 256, "mixtral-8x7b": 64,
    "deepseek-v3": 256, "bert-base": 1, "bert-large": 8, "t5-11b": 64, "resnet-101": 8, "dlrm-1tb": 8,
}  # fmt: skip


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", PLANS)
def test_examples_can_be_planned(name: str) -> None:
    words = ["plan", str(EXAMPLES / f"{name}.toml"), "--cluster", "a100-80g", "--devices", str(PLANS[name])]
    if name == "deepseek-v3":  # whose search takes seconds
        words += ["--layout", "pipeline=2 shard=128 expert=64 zero=3 micro_batch=1 recompute=full schedule=1f1b"]
    elif PLANS[name] > 8:
        words += ["--set", f"batch.samples={PLANS[name]}"]  # a small batch has fewer layouts
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    best = found["layouts"][0]
    assert best["fits"] and 0 < best["peak_memory_gib"] < 80
    assert 0 < best["model_flops_per_device"] <= best["hardware_flops_per_device"] < 312e12
    assert found["training"]["device_hours"] == pytest.approx(PLANS[name] * found["training"]["hours"])


@pytest.mark.parametrize(
    ("name", "low", "high", "fits"),
    [("resnet-101", 30, 55, True), ("bert-base", 40, 105, True), ("gpt3-175b", 0.45e6, 1.0e6, False)],
)
def test_full_trainings_on_one_device(name: str, low: float, high: float, fits: bool) -> None:
    """Told are 44 h, 84 h, and 3.1 million h for a V100 at 28 TFLOP/s, a fifth of what an A100 reaches."""
    plan = make_plan(load_job(EXAMPLES / f"{name}.toml"), CLUSTERS["a100-80g"], 1)
    hours = plan.training_seconds / 3600
    if name == "bert-base":  # in two phases
        second = load_job(EXAMPLES / f"{name}.toml", ["model.sequence=512", "steps=100_000"])
        hours += make_plan(second, CLUSTERS["a100-80g"], 1).training_seconds / 3600
    assert low < hours < high
    told = re.search(rf"`examples/{name}.toml`.*\| ([\d.]+)( million)? h \|", GUIDE.read_text(encoding="utf-8"))
    assert told, f"{GUIDE.name} has no line for {name}"
    assert hours == pytest.approx(float(told[1]) * (1e6 if told[2] else 1), rel=0.2)
    assert plan.fits(plan.best) == fits
    assert 0.1 < plan.mfu(plan.best) < 0.7
    result = CliRunner().invoke(
        app, ["plan", str(EXAMPLES / f"{name}.toml"), "--cluster", "a100-80g", "--devices", "1"]
    )
    assert result.exit_code == 0
    assert ("if it did fit" in " ".join(result.stdout.split())) is not fits


def test_what_is_computed_again_counts_for_the_hardware() -> None:
    job = make_job({"precision": "bf16", "model": {"name": "llama3-8b"}, "batch": {"samples": 8}})
    none, full = (
        make_plan(job, CLUSTERS["h100"], None, f"shard=8 zero=3 recompute={word}") for word in ("none", "full")
    )
    assert none.hardware_flops(none.best) == none.flops(none.best)
    head = 6 * 8 * 8192 * 128256 * 4096 / full.best.seconds / 8
    assert full.hardware_flops(full.best) - head == pytest.approx(4 / 3 * (full.flops(full.best) - head))


@pytest.mark.parametrize("layout", ["tensor=2", "pipeline=2", "shard=2 expert=2"])
def test_only_data_axes_cut_a_resnet(layout: str) -> None:
    with pytest.raises(LayoutError, match="a ResNet supports data parallelism only"):
        make_plan(load_job(EXAMPLES / "resnet-101.toml"), CLUSTERS["a100-80g"], None, layout)
