"""`shardwise verify`, `shardwise inspect`, and the proof of a model that is not ours before its first step."""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.adapters.module_chain import KeepFloat64
from shardwise.console import Answer, fill_in, format_count, pluralize
from shardwise.errors import JobError, UserError
from shardwise.files import cache_folder, parse_toml, write_text
from shardwise.job import BatchConfig, GradientConfig, Job, load_job
from shardwise.layout import AXES, Layout
from shardwise.models.chain import init_weights
from shardwise.models.pretrained import ModuleWeights
from shardwise.parallel.prepare import Prepared, meta_model, prepare
from shardwise.train.local_machine import require_memory
from shardwise.verify.parity import VerifyResult, relative_error, verify

LAYOUTS = parse_toml(Path(__file__).with_name("layouts.toml").read_text(encoding="utf-8"))
TOLERANCE = 1e-10  # of the comparison with transformers
GRADIENT_FLOOR = 1e-6  # norm below which a gradient is compared absolutely
MAX_PARAMETERS = 100_000_000  # of the model that is compared, in float64 on every rank
ERROR_NOTE = "The largest |difference| / |reference| of any tensor and step: rounding, if up to 1e-10 in float64."


def verify_job(job_file: Path | None, settings: list[str], layouts: list[str], shrink: bool, steps: int,
               show: Callable[[VerifyResult], None]) -> list[VerifyResult]:  # fmt: skip
    """Verifies the given layouts, or else the job's layout, or else every default layout that the job supports."""
    job = load_job(job_file, ["precision=float64", *settings])
    requested = layouts or ([job.layout] if job.layout != "auto" else [])
    selected = [Layout.parse(text) for text in requested or LAYOUTS[job.family.verify_layouts]]
    if job.model.lora is not None:  # with B at zero, most of its gradients would be zero too
        lora = job.model.lora.model_copy(update={"init_std": job.model.lora.init_std or 0.02})
        job = job.model_copy(update={"model": job.model.model_copy(update={"lora": lora})})
    if shrink:
        job = shrink_batch(shrink_model(job), selected)
    if not requested:
        selected = [layout for layout in selected if not _refusal(job, layout)]
    return verify(job, selected, steps, show)


def _refusal(job: Job, layout: Layout) -> str:
    """Returns why a job cannot run in a layout; empty if it can."""
    try:
        prepare(job, layout)
    except UserError as error:
        return str(error)
    return ""


def shrink_model(job: Job) -> Job:
    return job.model_copy(update={"model": job.family.shrink(job.model)})


def shrink_batch(job: Job, layouts: list[Layout]) -> Job:
    """Returns the job with the smallest batch (16, 24, ..., 1024 samples) that every layout can run, or unchanged."""
    for samples in range(16, min(job.samples, 1025), 8):
        small = job.model_copy(update={"batch": BatchConfig(samples=samples)})
        if not any(_refusal(small, layout) for layout in layouts):
            return small
    return job


def inspect_job(job: Job) -> dict[str, Any]:
    """Returns plain values: what was found, and for each axis "works" or why it does not."""
    chain: Any = meta_model(job.model, job.seed)
    weights = list(chain.named_unique_parameters())
    count = sum(weight.numel() for _, weight in weights)
    frozen = [name for name, weight in weights if not weight.requires_grad]
    found: dict[str, Any] = {"model": job.model.name, "parameters": f"{format_count(count)} in {len(weights)} tensors"}
    anatomy = getattr(chain, "anatomy", None)
    if anatomy is not None:
        prologue = [name for name, parts in anatomy.parts_of.items() if parts[0] == 0]
        epilogue = [name for name, parts in anatomy.parts_of.items() if parts[-1] == len(anatomy.blocks) + 1]
        trunk = anatomy.blocks[0].rpartition(".")[0] if anatomy.blocks else "none found"
        found |= {"trunk": f"{trunk} ({pluralize(len(anatomy.blocks), 'block')})" if anatomy.blocks else trunk,
                  "prologue": ", ".join(prologue) or "no parameters",
                  "epilogue": ", ".join(epilogue) or "no parameters",
                  "tied": ", ".join(f"{a} = {b}" for a, b in chain.sharding_plan.ties) or "none",
                  "frozen": ", ".join(frozen) or "none"}  # fmt: skip
    else:
        found["blocks"] = pluralize(len(chain.blocks()), "block")
    small = job.model_copy(update={"batch": BatchConfig(samples=max(4, 4 * (job.samples // 4)))})
    refusals = {axis: _refusal(small, Layout.parse(layout)) for axis, layout in LAYOUTS["inspect"].items()}
    found["axes"] = {axis: f"no: {why.partition(': ')[2] or why}" if why else "works" for axis, why in refusals.items()}
    return found


def prove(prepared: Prepared, say: Callable[[str], None]) -> None:
    """Proves the layout of a model that is not ours; raises JobError if it computes anything else. In float64, on a
    small copy with two ranks on every axis that it uses, two steps must equal those of the unmodified module. It is
    cached by the model's source and plan, the layout, and the versions of PyTorch and Shardwise."""
    if prepared.job.family.task(prepared.job.model) is None or prepared.layout.world == 1:
        return
    layout = small_layout(prepared.layout)
    exact = {"precision": "float64", "compile": False, "gradient": GradientConfig()}  # without lossy compression
    job = shrink_model(prepared.job).model_copy(update=exact)
    job = shrink_batch(job, [layout])
    path = cache_folder() / "proofs" / f"{_fingerprint(prepared, job, layout)}.json"
    if path.exists():
        say(f"proof:  layout '{layout}' equals one process (cached)")
        return
    size = sum(weight.numel() for weight in meta_model(job.model, job.seed).parameters())
    if size > MAX_PARAMETERS:
        say(f"proof:  none: even its small copy has {size:,} parameters; verify a smaller model of this kind")
        return
    (result,) = verify(job, [layout], steps=2)
    if not result.ok:
        remedy = "check the plan and the module named, use another layout, or skip the proof (--no-proof, proof=False)"
        raise JobError(f"{result.describe()} The run was not started, since it would train another model; {remedy}.")
    say(f"proof:  layout '{layout}' equals one process: gradients to {result.grad:.0e}, weights to {result.weight:.0e}")
    with suppress(OSError):  # it is proven again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(result.as_dict()))


def small_layout(layout: Layout) -> Layout:
    """Returns the layout with two ranks on every axis that it uses."""
    degrees = {axis: min(2, getattr(layout, axis)) for axis in (*AXES, "expert")}
    micro_batch = min(layout.micro_batch, 2) if layout.micro_batch else layout.micro_batch
    return replace(layout, **degrees, micro_batch=micro_batch)


def _fingerprint(prepared: Prepared, job: Job, layout: Layout) -> str:
    root: nn.Module = getattr(prepared.model, "root", prepared.model)
    files = set()
    task = prepared.job.family.task(prepared.job.model)
    functions = [getattr(task, name) for name in ("loss", "count", "collate", "inputs")]
    for code in (*map(type, root.modules()), *(f if inspect.isfunction(f) else type(f) for f in functions)):
        with suppress(TypeError, OSError):  # built in, or defined by exec
            files.add(inspect.getfile(code))
    sources = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files) if os.path.isfile(file)]
    versions = (shardwise.__version__, torch.__version__)
    parts = (sources, repr(prepared.model.sharding_plan), str(layout), job.model.model_dump_json(), versions)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def compare_with_transformers(job: Job, samples: int = 2) -> Answer:
    """Compares our model with transformers' module of the same weights, in float64 (`verify --against hf`): all logits,
    and the gradient that differs most, on random tokens and weights."""
    require_memory(job, 40)  # bytes per parameter: two models and their gradients in float64
    reference = job.family.reference(job.model)
    if reference is None:
        which = f"{job.model.description} of this shape, or it is not installed"
        raise JobError(f"transformers has no module for {which}; decoders in the form of Llama or GPT-2 have one.")
    ours = job.family.build(job.model, job.seed).double().eval()
    init_weights(ours, job.seed)
    generator = torch.Generator().manual_seed(job.seed)
    with torch.no_grad():
        for weight in ours.parameters():  # biases and norms too, which start at 0 and 1
            weight.add_(0.05 * torch.randn(weight.shape, dtype=weight.dtype, generator=generator))
        named = dict(reference.named_parameters())
        for name, value in _in_module(job, reference, dict(ours.named_unique_parameters())).items():
            named[name].copy_(value)
    tokens = torch.randint(0, job.model.vocab_size, (samples, job.model.sequence_length), generator=generator)
    logits = ours(tokens, ids=torch.arange(samples))
    with KeepFloat64():
        expected = reference(tokens).logits
    for found in (logits, expected):
        F.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    differences = {}
    gradients = {name: weight.grad for name, weight in ours.named_unique_parameters() if weight.grad is not None}
    for name, gradient in _in_module(job, reference, gradients).items():
        theirs = named[name].grad
        assert theirs is not None, f"{name} has no gradient"
        differences[name] = relative_error(gradient, theirs, GRADIENT_FLOOR)
    worst = max(differences, key=lambda name: differences[name])
    difference = relative_error(logits.detach(), expected.detach())
    found = {"module": type(reference).__name__, "logits": difference, "gradient": differences[worst],
             "parameter": worst, "count": len(differences)}  # fmt: skip
    found["ok"] = is_equal = max(difference, differences[worst]) <= TOLERANCE
    return Answer(found, fill_in(Path(__file__).with_name("against.txt"), found), is_equal)


def _in_module(job: Job, reference: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights or gradients of ours under the names and in the shapes of the reference, all of them."""
    found = ModuleWeights(job.family.export_weights(job.model, tensors), reference)
    names = [name for name, _ in reference.named_parameters()]
    if missing := [name for name in names if name not in found.found] or sorted(found.unused):
        raise JobError(f"{type(reference).__name__} and our model differ in the parameters {', '.join(missing)}.")
    return {name: found.value(name)[(slice(None),) * len(found.value(name).shape)] for name in names}
