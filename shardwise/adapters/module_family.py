"""The family of modules that are not ours: `model.name = "python:package.module:function"`, and those of a script.

A script makes a `shardwise.Trainer` and calls one of its methods. The process that the user started is the launcher, or
under torchrun a rank. A worker that the launcher starts runs the script again, up to that call, and takes its task."""

import io
import json
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only, tree_unflatten

from shardwise.adapters.anatomy import TRACED_SAMPLES, Anatomy, find_anatomy
from shardwise.adapters.deferred_init import build_deferred, build_plain
from shardwise.adapters.gradient_hooks import copy_with_hooks, first_hook
from shardwise.adapters.module_chain import (
    KeepFloat64,
    ModuleChain,
    find_sample_dims,
    keep_float64_in_backward,
    replace_dropout,
)
from shardwise.adapters.split_attention import SPLIT, context_refusal
from shardwise.adapters.task import DatasetSource, Task, flatten_batch, load_python_task
from shardwise.adapters.tensor_plan import make_sharding_plan
from shardwise.errors import JobError, RunError
from shardwise.models import lora
from shardwise.models.config import ModelConfig
from shardwise.models.family import Family, reasons
from shardwise.models.layers import Linear
from shardwise.models.operator_costs import OperatorCosts, costs_of_parameters
from shardwise.models.quantize import round_quantized
from shardwise.models.registry import family_of
from shardwise.models.sharding import ShardingPlan
from shardwise.models.trace import trace_family, trace_module
from shardwise.random import random_numbers_of

SCRIPT_PREFIX = "script:"
SCRIPT_TASKS: dict[str, Task] = {}  # those that `shardwise.Trainer` was given in this process, by model name
_ANATOMIES: dict[Any, tuple[Anatomy, dict[str, int | None]]] = {}
"""By config: the module's anatomy, and which dimension is the samples in each dropout."""


class ModuleConfig(ModelConfig):
    """A module that is not ours."""

    description = "this module"
    passes_batch: ClassVar[bool] = True
    is_recomputable_elsewhere = False
    name: str = "python:"
    args: dict[str, Any] = {}  # Keyword arguments of the function that builds the module
    trunk: str = ""  # Name of the list of blocks, such as `model.layers`; empty: it is found
    tensor_plan: dict[str, str] = {}
    """Tensor parallelism by pattern of module names: `"layers.*.q_proj" = "colwise"`. Styles: colwise, rowwise,
    colwise_gather (the output is gathered), vocab (an embedding); modules without a style stay whole."""
    sequence: int = Field(256, ge=1, le=10**7)  # Tokens per sample, if the samples come from the `[data]` section
    vocab: int = Field(256, ge=2, le=10**7)  # Number of token ids, if the samples come from the `[data]` section
    blocks: int = Field(0, ge=0)  # Keep only the first blocks of the trunk, as `verify --shrink` does; 0: all

    def __hash__(self) -> int:
        return hash(json.dumps(self.model_dump(), sort_keys=True, default=str))

    @property
    def task(self) -> Task:
        return load_task(self)

    @property
    def sample_kind(self) -> Any:  # type: ignore[override]
        return "tokens" if self.task.reads_tokens else "batch"

    @property
    def counts_samples(self) -> bool:  # type: ignore[override]
        return self.task.count is None

    @property
    def sequence_length(self) -> int:
        return self.sequence if self.task.reads_tokens else 1

    @property
    def length(self) -> int:
        return self.sequence_length if self.task.reads_tokens else self.task.sequence_length

    @property
    def heads(self) -> int:
        return check_context(self)[1]

    @property
    def single_micro_batch(self) -> str:  # type: ignore[override]
        chain = meta_chain(self)
        hook, parameter = first_hook(chain.root)
        if hook:
            return f"the gradient hook {hook} of the parameter {parameter} must get the gradient of all samples"
        if not chain.has_batch_statistics:
            return ""
        if chain.unsynchronized_buffer:
            return f"its forward updates the buffer {chain.unsynchronized_buffer} from the samples that run together"
        return "its batch norms take means over all samples that run together"

    @property
    def targets_are_text(self) -> bool:  # type: ignore[override]
        return self.task.reads_tokens and not self.counts_samples


@lru_cache(maxsize=8)
def load_task(config: ModuleConfig) -> Task:
    if config.name.startswith(SCRIPT_PREFIX):
        task = load_script_task(config.name, config.args)
    else:
        task = load_python_task(config.name.removeprefix("python:"), config.args)
    task = replace(task, trunk=config.trunk or task.trunk, plan=config.tensor_plan or task.plan)
    if not config.blocks:
        return task
    names = meta_chain(config.model_copy(update={"blocks": 0})).anatomy.blocks[config.blocks :]

    def build() -> nn.Module:
        module = copy_with_hooks(task.build())
        for name in names:
            parent, _, key = name.rpartition(".")
            del module.get_submodule(parent)._modules[key]
        return module

    return replace(task, model=build)


class ModuleFamily(Family):
    config = ModuleConfig
    verify_layouts = refused = "module"

    def task(self, config: Any) -> Task:
        return config.task  # type: ignore[no-any-return]

    def build(self, config: Any, seed: int) -> ModuleChain:
        task = self.task(config)
        module, init = build_deferred(task.build, seed)
        state: dict[str, Any] = {"ids": None, "stream": None, "seed": seed}
        replace_dropout(module, seed, state)
        _stop_own_synchronization(module)
        module.train()  # its author may keep some modules in evaluation mode
        if config.lora is not None:
            lora.add_adapters(module, config.lora)
        _, spec = flatten_batch(task.example(2, config.sequence), 2)
        anatomy = self.anatomy(config, module, state)
        _refuse_unforeseen_use(module, anatomy)
        for name, parameter in module.named_parameters():
            if name not in anatomy.parts_of or name in anatomy.without_gradient:
                parameter.requires_grad_(False)  # nothing would ever give it a gradient
        for linear in _block_linears(module, anatomy):
            linear.__class__ = Linear  # which can compute in FP8
        chain = ModuleChain(module, task, spec, anatomy, self._plan(config, module, anatomy), init, state)
        chain.initial = self.pretrained_weights(config, chain) or init
        if config.lora is not None:
            lora.adapt_chain(chain, module, config.lora)
        return chain

    def build_on_meta(self, config: Any, seed: int = 0) -> ModuleChain:
        return self.build(config, seed)

    def shrink(self, config: Any) -> Any:
        if not self.task(config).reads_tokens and len(meta_chain(config).anatomy.blocks) <= 4:
            return config  # and is not traced again
        changes = {"sequence": min(config.sequence, 32), "blocks": config.blocks or 4, "weights": ""}
        small = config.model_copy(update=changes)
        with suppress(Exception):  # a forward that needs all of its blocks may raise anything
            meta_chain(small)
            return small
        return config.model_copy(update={"sequence": small.sequence})

    def anatomy(self, config: Any, module: nn.Module, state: dict[str, Any]) -> Anatomy:
        """Traces a module that was built on the meta device."""
        task = self.task(config)
        shapes: dict[int, dict[str, list[torch.Size]]] = {}
        # Made here: the dataset computes, and must not do so on fake tensors.
        examples = {n: task.example(n, config.sequence) for n in (TRACED_SAMPLES, 2 * TRACED_SAMPLES)}

        def run(module: nn.Module, convert: Callable[[Tensor], Tensor], samples: int) -> Tensor:
            state["ids"], state["shapes"] = torch.arange(samples), shapes.setdefault(samples, {})
            shapes[samples].clear()
            return task.call(module, tree_map_only(torch.Tensor, convert, examples[samples]))

        if config not in _ANATOMIES:
            anatomy = find_anatomy(module, run, task.trunk)
            _ANATOMIES[config] = anatomy, find_sample_dims(shapes)
            state.pop("shapes", None)
        anatomy, state["sample_dims"] = _ANATOMIES[config]
        return anatomy

    def _plan(self, config: Any, module: nn.Module, anatomy: Anatomy) -> ShardingPlan:
        return make_sharding_plan(module, anatomy, self.task(config).plan)

    def refusals(self, config: Any) -> dict[str, str]:
        chain = meta_chain(config)
        anatomy = chain.anatomy
        found = {"fp8": not _block_linears(chain.root, anatomy), "context": check_context(config)[0],
                 "pipeline": anatomy.crossing, "split_backward": anatomy.second_path,
                 "tensor": not chain.sharding_plan.shard_dims, "recompute": anatomy.changes_input}  # fmt: skip
        possible = reasons(self.refused, config=config, **found)
        refused = {key: reason for key, reason in possible.items() if found.get(key, True)}
        if chain.has_batch_statistics:
            refused |= reasons("batch norm")
        if buffer := chain.unsynchronized_buffer:
            refused |= reasons("updated buffer", buffer=buffer)
        hook, parameter = first_hook(chain.root)
        if hook:
            refused |= reasons("gradient hook", hook=hook, parameter=parameter)
        if _collates_at_random(config):
            refused |= reasons("random collate")
        if anatomy.random_module:
            refused |= reasons("random numbers", module=anatomy.random_module)
        return refused

    def context_refusal(self, config: Any) -> str:
        """Returns why sequences cannot be split over context ranks; empty if they can."""
        task, chain = self.task(config), meta_chain(config)
        if task.count is None:
            return "the loss is a mean over samples (give `count`, and a loss that is a sum over targets)"
        if config.length == 1:
            return "the tensors of a batch do not have the sequence as their second dimension"
        batch = task.example(2, config.sequence)
        run = partial(task.call, chain.root)
        return context_refusal(chain.root, chain.anatomy.blocks, batch, run, "shardwise.attention")

    def example_batch(self, config: Any, samples: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves, _ = flatten_batch(self.task(config).example(samples, config.sequence), samples)
        leaves = [leaf.to("meta", dtype if leaf.is_floating_point() else leaf.dtype) for leaf in leaves]
        ids = torch.empty(samples, dtype=torch.int64, device="meta")
        return {"x": leaves[0], "ids": ids, **{f"input_{number}": leaf for number, leaf in enumerate(leaves)}}

    def forward_flops(self, config: Any) -> list[float]:
        return [flops / 2 for flops in meta_chain(config).anatomy.flops]  # traced on two samples

    def operator_costs(self, config: Any, itemsize: int) -> Callable[..., tuple[OperatorCosts, ...]]:
        chain = meta_chain(config)
        if self.untraceable(config):
            shapes = [tuple(parameter.shape) for parameter in chain.parameters()]
            return lambda samples, tensor=1: (costs_of_parameters(shapes, samples * config.length, itemsize),)
        whole = trace_family(self, config, itemsize)
        part_of = {name: parts[0] for name, parts in chain.anatomy.parts_of.items()}
        split = {part_of[name] for name in part_of if chain.sharding_plan.shard_dim_of(name) is not None}

        def costs(samples: int, tensor: int = 1) -> tuple[OperatorCosts, ...]:
            parts = whole(samples)
            if tensor == 1:
                return parts
            return tuple(_on_tensor_rank(part, tensor) if n in split else part for n, part in enumerate(parts))

        return lru_cache(maxsize=64)(costs)

    def untraceable(self, config: Any) -> str:
        return _why_untraceable(config)

    def trace_costs(self, config: Any, samples: int, dtype: torch.dtype) -> tuple[OperatorCosts, ...]:
        chain = self.build_on_meta(config).to(dtype)
        chain.compute_dtype = dtype
        parts = {name: chain.root.get_submodule(name) for name in (*chain.anatomy.blocks, *chain.anatomy.units)}
        batch = self.example_batch(config, samples, dtype)
        return _ordered(chain, trace_module(chain, parts=parts, has_equal_children=False, **batch))

    def stage_shapes(self, config: Any, layout: Any, samples: int) -> tuple[Tensor, tuple[int, ...]]:
        first = self.example_batch(config, samples, torch.float32)["x"]
        anatomy = meta_chain(config).anatomy
        assert anatomy.stream is not None
        stream = list(anatomy.stream.shape)
        stream[anatomy.stream_dim] = -(-stream[anatomy.stream_dim] * samples // TRACED_SAMPLES)
        if layout.context > 1:
            first = first[:, : config.length // layout.context]
            stream[1] //= layout.context
        return first, tuple(stream)

    def build_reference(self, config: Any, seed: int, dtype: torch.dtype) -> nn.Module:
        """Returns the module as its author wrote it, on the CPU, with the weights that every layout starts from."""
        task = self.task(config)
        _, init = build_deferred(task.build, seed)
        module = copy_with_hooks(task.model) if isinstance(task.model, nn.Module) else build_plain(task.build, seed)
        state: dict[str, Any] = {"sample_dims": meta_chain(config).state["sample_dims"], "seed": seed}
        replace_dropout(module, seed, state)
        _stop_own_synchronization(module)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(init.value(name))
        module.__dict__["shardwise_state"] = state
        module = _cast(module, dtype).train()
        if config.lora is not None:
            lora.add_initialized(module, config.lora, meta_chain(config), seed)
        round_quantized(module, meta_chain(config).sharding_plan)
        return module

    def reference_loss(self, config: Any, module: nn.Module, samples: Any, document_ids: Any = None) -> Tensor:
        """Returns the loss of a batch, as a mean over its targets."""
        task = self.task(config)
        loss = self._call_reference(partial(task.call, module), config, module, samples, document_ids)
        return loss if task.count is None else loss / samples.num_targets

    def reference_logits(self, config: Any, module: nn.Module, samples: Any, document_ids: Any = None) -> Tensor:
        inputs: Any = self.task(config).inputs
        call = lambda batch: module(**inputs(batch)).logits  # noqa: E731
        return self._call_reference(call, config, module, samples, document_ids)

    def _call_reference(self, call: Any, config: Any, module: nn.Module, samples: Any, document_ids: Any) -> Tensor:
        task = self.task(config)
        module.__dict__["shardwise_state"]["ids"] = samples.ids
        leaves = list(samples.inputs or (samples.tokens, samples.targets))
        _, spec = flatten_batch(task.example(2, config.sequence), 2)
        dtype = next(module.parameters()).dtype
        leaves = [leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in leaves]
        numbers: AbstractContextManager[None] = nullcontext()
        if meta_chain(config).differs_between_calls:
            seed = module.__dict__["shardwise_state"]["seed"]
            numbers = random_numbers_of(seed, int(samples.ids[0]), samples.ids.device)
        with numbers, KeepFloat64() if dtype is torch.float64 else torch.enable_grad():
            SPLIT.document_ids = document_ids
            try:
                output: Tensor = call(tree_unflatten(leaves, spec))
            finally:
                SPLIT.document_ids = None
        return keep_float64_in_backward(output) if dtype is torch.float64 else output

    def explain_difference(self, config: Any, layout: Any, kind: str) -> str:
        if layout.context > 1:
            return " Do positions come from shardwise.positions, and does nothing but attention mix them?"
        if kind == "buffer":
            return (
                " The forward updates it from the samples that it gets, once per rank and micro-batch; use one process"
                " without micro_batch, or normalization layers of PyTorch, which are synchronized."
            )
        if kind == "frozen weight":
            return (
                " The forward changes it: once per micro-batch, and for nothing where weights are sharded (zero=2,"
                " zero=3); use replicate or zero=1, without micro_batch."
            )
        if kind != "loss":
            return ""

        compares = (
            " If the loss compares the samples of a batch with one another (contrastive, triplet, ranking), the parts"
            " of a batch give another loss: use a layout without replicate, shard, pipeline and micro_batch."
        )
        if self.task(config).count is not None:
            return compares
        return (
            " If some targets are masked, samples count differently: return the sum, and give `count`, the number of"
            f" targets in a batch.{compares}"
        )

    def sources(self, config: Any) -> Any:
        task = self.task(config)
        if task.reads_tokens:
            return None
        spec = meta_chain(config).spec
        return tuple(DatasetSource(task, dataset, spec) for dataset in (task.data, task.validation or []))


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts as `Module.to` does, except that complex buffers, such as rotary frequencies, stay complex."""

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128) if dtype is torch.float64 else tensor
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return module._apply(convert)


def _refuse_unforeseen_use(module: nn.Module, anatomy: Anatomy) -> None:
    """Ends a run that trains through a module which the trial forward did not call: its parameters are about to be
    frozen, and would stay as they are without a word. What its author has frozen may be used at any time."""

    def refuse(name: str, part: nn.Module) -> None:
        if part.training and torch.is_grad_enabled():
            raise RunError(
                f"{name} is used in this step, but was not when the forward was tried on an example batch, so its "
                "parameters are frozen; let every forward use it, if only times zero, or set requires_grad=False."
            )

    for name, part in module.named_modules():
        trained = [
            f"{name}.{leaf}".removeprefix(".")
            for leaf, parameter in part.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        is_unused = name not in anatomy.called and not any(parameter in anatomy.parts_of for parameter in trained)
        if trained and is_unused:
            part.register_forward_pre_hook(lambda part, _, name=name: refuse(name, part))


class LocalBatchNorm(_BatchNorm):
    """A batch norm of one process for inputs of any number of dimensions, as `nn.SyncBatchNorm` takes them."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def _stop_own_synchronization(module: nn.Module) -> None:
    """Turns each `nn.SyncBatchNorm` into a batch norm of one process. Its own forward synchronizes over all ranks of a
    process group, in the trace and in the reference too, and PyTorch refuses it on CPUs. It is not needed:
    `shardwise.parallel.batch_norm` synchronizes every batch norm over the ranks that have different samples."""
    for part in module.modules():
        if type(part) is nn.SyncBatchNorm:
            part.__class__ = LocalBatchNorm  # type: ignore[assignment]


def _block_linears(module: nn.Module, anatomy: Anatomy) -> list[nn.Linear]:
    parts = (part for name in anatomy.blocks for part in module.get_submodule(name).modules())
    return [part for part in parts if isinstance(part, nn.Linear) and type(part) in (nn.Linear, Linear)]


@lru_cache(maxsize=8)
def check_context(config: Any) -> tuple[str, int]:
    """Returns why sequences cannot be split, empty if they can, and the number of heads of `shardwise.attention`."""
    family: Any = family_of(config)
    SPLIT.heads = 1
    return family.context_refusal(config), SPLIT.heads


@lru_cache(maxsize=8)
def _why_untraceable(config: Any) -> str:
    """Returns why the planner cannot trace a module's operators; empty if it can."""
    if meta_chain(config).anatomy.varies:
        return "its forward may differ from step to step"
    try:
        trace_family(family_of(config), config, itemsize=4)(1)
    except Exception as error:  # noqa: BLE001 - a module that runs may still not run on fake tensors
        first_line = (str(error).splitlines() or [""])[0]
        return f"it cannot be traced ({type(error).__name__}: {first_line})"
    return ""


@lru_cache(maxsize=8)
def _collates_at_random(config: Any) -> bool:
    return config.task.collates_at_random  # type: ignore[no-any-return]


@lru_cache(maxsize=4)
def meta_chain(config: Any) -> ModuleChain:
    """Returns the module on the meta device as the engine will get it; nobody may change it."""
    return family_of(config).build_on_meta(config)  # type: ignore[return-value]


def _on_tensor_rank(costs: OperatorCosts, tensor: int) -> OperatorCosts:
    """Returns the costs of a part on one of several tensor ranks, assuming that its matmuls are split, half of what it
    saves and moves is, and its output is all-reduced twice."""
    return replace(costs, parameters=costs.parameters // tensor, all_reduce_bytes=2.0 * costs.output_bytes,
                   saved_bytes=(costs.saved_bytes + costs.saved_bytes // tensor) // 2,
                   moved_bytes=(costs.moved_bytes + costs.moved_bytes // tensor) // 2,
                   products=tuple(replace(p, columns=-(-p.columns // tensor)) for p in costs.products),
                   attention=tuple(replace(a, heads=-(-a.heads // tensor)) for a in costs.attention))  # fmt: skip


def _ordered(chain: ModuleChain, found: tuple[OperatorCosts, ...]) -> tuple[OperatorCosts, ...]:
    """Merges what lies outside of the blocks into one part before and one after them."""
    anatomy = chain.anatomy
    blocks = [costs for costs in found if costs.name in anatomy.blocks]
    ends: tuple[list[OperatorCosts], list[OperatorCosts]] = ([], [])
    for costs in found:
        if costs.name not in anatomy.blocks:
            used = [parts for name, parts in anatomy.parts_of.items() if name.startswith(f"{costs.name}.")]
            is_after = not costs.name or any(len(anatomy.blocks) + 1 in parts for parts in used)
            ends[is_after].append(costs)
    keys = [field.name for field in fields(OperatorCosts) if field.name != "name"]

    def merged(parts: list[OperatorCosts]) -> OperatorCosts:
        starts: dict[str, Any] = {"products": (), "attention": ()}
        return OperatorCosts(name="ends", **{k: sum((getattr(p, k) for p in parts), starts.get(k, 0)) for k in keys})

    return merged(ends[False]), *blocks, merged(ends[True])


class TaskReached(BaseException):
    """Ends a script that is run for its task only; not an Exception, so that a script does not catch it."""

    wanted = ""  # the name of the task for which this process runs a script; empty: it runs for its own sake


def register_task(task: Task) -> tuple[str, list[str]]:
    """Returns the model name and the command-line arguments under which every process of a run finds this task."""
    script = getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0]
    if not script or not Path(script).is_file():
        raise JobError("a Trainer needs a script file, which every process of the run executes; save this as a file.")
    path = os.path.abspath(script if not TaskReached.wanted else _path_of(TaskReached.wanted))
    number = sum(name.partition("#")[0] == f"{SCRIPT_PREFIX}{path}" for name in SCRIPT_TASKS)
    name = f"{SCRIPT_PREFIX}{path}" + (f"#{number + 1}" if number else "")
    SCRIPT_TASKS[name] = task
    return name, sys.argv[1:]


def stop_if_collecting() -> None:
    """Called by whatever would start a run."""
    if TaskReached.wanted in SCRIPT_TASKS:
        raise TaskReached


def _path_of(name: str) -> str:
    return name.removeprefix(SCRIPT_PREFIX).partition("#")[0]


def load_script_task(name: str, args: dict[str, Any]) -> Task:
    """Runs a script until it has made the task of this name."""
    if name not in SCRIPT_TASKS:
        path = _path_of(name)
        if not Path(path).is_file():
            raise JobError(f"the run was started by the script {path}, which does not exist any more.")
        before, sys.argv = sys.argv, [path, *map(str, args.get("argv", []))]
        sys.path.insert(0, str(Path(path).parent))
        TaskReached.wanted = name
        try:
            with suppress(TaskReached, SystemExit), redirect_stdout(io.StringIO()):  # the launcher has printed it
                runpy.run_path(path, run_name="__main__")
        finally:
            TaskReached.wanted, sys.argv = "", before
    if name not in SCRIPT_TASKS:
        raise JobError(f"the script {_path_of(name)} ended without making the shardwise.Trainer of this run.")
    return SCRIPT_TASKS[name]
