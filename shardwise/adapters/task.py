"""A task: a module that is not ours, with its loss, its data and how a batch is handed to it.

A batch is what `collate` makes of samples: a tensor, or a tuple, list or mapping of tensors, nested or not, each tensor
with the samples along its first dimension. A mapping, such as the BatchEncoding of a collator of transformers, is
handed on as a dict. The forward gets the values of a dict whose names it takes; all but the last element of a tuple;
otherwise the batch itself. The loss gets the output and the target (the last element of a tuple) or the batch. Without
a loss, the forward returns it. The loss is a mean over the samples of the batch it gets. If the samples count
differently (padding, masked targets), give `count`, the number of targets in a batch, and let the loss be a sum."""

import copy
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from shardwise.data.sample_stream import Samples, read_sample
from shardwise.errors import DataError, JobError
from shardwise.random import generator_states, generators_kept

RANDOM_TEST_SAMPLES = 8  # that are collated twice


class Callback:
    """Does nothing; override what you need."""

    def on_start(self, step: int) -> None:
        """Called before the first step, and after a restart, with the step that training continues from."""

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Called after each step with its row of `metrics.jsonl`."""

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Called after each validation with loss and metrics."""

    def on_checkpoint(self, step: int) -> None:
        """Called when a checkpoint is being saved."""

    def on_end(self, step: int) -> None:
        """Called after the last step."""


@dataclass(frozen=True)
class Task:
    """A module that is not ours, and how to train it."""

    model: Callable[[], nn.Module] | nn.Module
    """A class or function that builds the module, or a module, whose weights are then kept."""
    loss: Callable[..., Tensor] | None = None  # From output and target to a scalar. None: the forward returns the loss
    data: Any = None
    """A dataset: map-style, or iterable with `state_dict` and `load_state_dict`. None: the samples of the job's
    `[data]` section, as input_ids and labels; labels are the next tokens, -100 is ignored."""
    validation: Any = None
    """A map-style dataset of held-out samples; `validation.samples` of the job says how many of them count."""
    collate: Callable[[list[Any]], Any] | None = None  # From a list of samples to a batch; None: PyTorch's default
    count: Callable[[Any], Any] | None = None  # From a batch to its number of targets; the loss is then a sum over them
    inputs: Callable[[Any], Any] | None = None
    """From a batch to the arguments of the forward: a dict, a tuple or a single one."""
    example_batch: Callable[[int], Any] | None = None
    """From a number of samples to a batch, for shapes. None: the first samples of `data`."""
    configure: Callable[[nn.Module, torch.device, torch.dtype], None] | None = None
    """Called with the module, its device and the dtype of activations once its weights have memory."""
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    """Functions of output and target that validation averages over the samples."""
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    """A class like those of `torch.optim`, instead of the job's optimizer."""
    learning_rate: Callable[[int], float] | None = None
    """From a step, counted from 0, to its learning rate, instead of the job's schedule."""
    callbacks: tuple[Callback, ...] = ()
    casts_inputs: bool = True
    """Whether bf16 and fp16 cast the inputs of every module with parameters, because buffers keep float32 and what is
    computed with them too. False: the forward casts by itself."""
    split_sequence: Callable[[nn.Module], None] | None = None
    """Called with the module if context > 1, to make it attend through `shardwise.attention`."""
    dispatch_tokens: Callable[[nn.Module, Any], None] | None = None
    """Called with each module that stacks experts and a `TokenDispatcher`, if expert > 1."""
    trunk: str = ""  # Name of the list of blocks, if it is not found or another one is wanted
    plan: Mapping[str, str] = field(default_factory=dict)
    """Tensor parallelism by pattern of module names: colwise, rowwise, ..."""

    def __post_init__(self) -> None:
        for name in ("data", "validation"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, indexed(getattr(self, name)))

    def build(self) -> nn.Module:
        module = self.model if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise JobError(f"the model must be an nn.Module or a function that returns one, not a {kind}.")
        return module

    @property
    def reads_tokens(self) -> bool:
        return self.data is None

    def example(self, samples: int, length: int = 0) -> Any:
        """Returns a batch of this many samples, for shapes."""
        if self.example_batch is not None:
            return plain_batch(self.example_batch(samples))
        if self.reads_tokens:
            tokens = torch.zeros(samples, length, dtype=torch.int64)
            return {"input_ids": tokens, "labels": tokens}
        if not len(self.data):
            raise JobError(f"the dataset {type(self.data).__name__} is empty; give it at least one sample.")
        return self.collate_rows([self.data[index % len(self.data)] for index in range(samples)])

    @property
    def collates_at_random(self) -> bool:
        """Whether `collate` draws random numbers, as one that masks words does: by the states of the generators, since
        two draws for a few samples may be equal, and by two results, since it may have a generator of its own."""
        if self.collate is None or self.reads_tokens or not len(self.data):
            return False
        first, second = self._same_rows_twice()
        with generators_kept():
            before = generator_states()
            once, again = (tree_flatten(self.collate_rows(rows))[0] for rows in (first, second))
            has_drawn = generator_states() != before
        return has_drawn or not all(map(_are_equal, once, again))

    def _same_rows_twice(self) -> tuple[list[Any], list[Any]]:
        """Returns some samples twice, since `collate` may change those that it gets. They are copied, because a dataset
        may augment them at random; those that cannot be, such as open files or tensors with a graph, are read again."""

        def read() -> list[Any]:
            with generators_kept():
                return [read_sample(self.data, index % len(self.data)) for index in range(RANDOM_TEST_SAMPLES)]

        rows = read()
        try:
            return rows, copy.deepcopy(rows)
        except Exception:  # noqa: BLE001 - any class of the user's may refuse in its own way
            return rows, read()

    @property
    def sequence_length(self) -> int:
        """The size of dimension 1 of all tensors of a batch; 1 if they differ."""
        leaves, _ = flatten_batch(self.example(2), 2)
        lengths = {leaf.shape[1] if leaf.dim() > 1 else 1 for leaf in leaves}
        return lengths.pop() if len(lengths) == 1 else 1

    def collate_rows(self, rows: list[Any]) -> Any:
        try:
            return plain_batch((self.collate or torch.utils.data.default_collate)(rows))
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            remedy = "Give samples of one shape, or a `collate` that pads them."
            raise DataError(f"{len(rows)} samples cannot be collated: {reason}. {remedy}") from error

    def call(self, module: nn.Module, batch: Any, measured: dict[str, float] | None = None) -> Tensor:
        """Runs the forward and the loss; returns the loss as its author defined it. Puts metrics into `measured`."""
        args, kwargs = self._arguments(module, batch)
        output = module(*args, **kwargs)
        target = batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else batch
        loss = _own_loss(output) if self.loss is None else self.loss(output, target)
        if measured is not None:
            measured.update((name, self._measure(name, output, target)) for name in self.metrics)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"({type(loss).__name__})"
            raise JobError(f"the loss must be a scalar tensor, but it is {shape}; return its mean over the samples.")
        return loss if loss.dim() == 0 else loss.sum()

    def _measure(self, name: str, output: Any, target: Any) -> float:
        try:
            return float(self.metrics[name](output, target))
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            raise JobError(
                f"the metric {name!r} cannot be computed: {type(error).__name__}: {reason}. It gets the output of the "
                "forward and the target of a batch, and must return one number."
            ) from error

    def _arguments(self, module: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.inputs is not None:
            chosen = self.inputs(batch)
            return ((), dict(chosen)) if isinstance(chosen, Mapping) else (_as_tuple(chosen), {})
        if isinstance(batch, Mapping):
            parameters = inspect.signature(module.forward).parameters
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            return (), {key: value for key, value in batch.items() if takes_all or key in parameters}
        rows = _as_tuple(batch)
        return rows[:-1] if self.loss is not None and len(rows) > 1 else rows, {}


def plain_batch(value: Any) -> Any:
    """Returns a batch with a dict for every mapping in it. PyTorch's trees take dicts apart, but no other mapping, and
    a batch is taken apart wherever it is cut, cast or sent."""
    if isinstance(value, Mapping):
        return {key: plain_batch(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain_batch, value))
    if type(value) in (list, tuple):
        return type(value)(map(plain_batch, value))
    return value


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        both_nan = (one != one) & (other != other)  # such as a missing feature
        return bool(((one == other) | both_nan).all())
    return type(one) is type(other)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple | list):
        losses = [value for value in output if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad]
        if len(losses) > 1:
            what = f"the forward returns {len(losses)} losses, but a job has one loss and one optimizer"
            raise JobError(f"{what}; return their sum, or train with a loop of your own if each needs an optimizer.")
        found = output[0]
    if found is None:
        raise JobError("the forward returns no loss; give one with `loss`, or return a scalar or an object with .loss.")
    return found


class NumberedStream:
    """An iterable dataset with a state, read by index in its own order; where it ends, it starts anew.
    Every rank iterates over the whole dataset and keeps its own samples, so the layout changes nothing."""

    def __init__(self, dataset: Any):
        self.dataset, self.iterator, self.next_index = dataset, iter(()), 0
        self.states = {0: copy.deepcopy(dataset.state_dict())}  # by index of the next sample: the dataset's state

    def __len__(self) -> int:
        return 2**40  # unknown

    def seek(self, index: int) -> None:
        """Goes to a sample, and records the state there."""
        if index < self.next_index or self.next_index == 0:
            self.next_index = max(known for known in self.states if known <= index)
            self.dataset.load_state_dict(copy.deepcopy(self.states[self.next_index]))
            self.iterator = iter(self.dataset)
        while self.next_index < index:
            self._advance()
        self.states[index] = copy.deepcopy(self.dataset.state_dict())
        for old in sorted(self.states)[1:-64]:
            del self.states[old]

    def __getitem__(self, index: int) -> Any:
        if index != self.next_index or index == 0:
            self.seek(index)
        return self._advance()

    def _advance(self) -> Any:
        self.next_index += 1
        try:
            return next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.dataset)
            return next(self.iterator)

    def state_before(self, index: int) -> tuple[int, Any] | None:
        """Returns the last recorded state at or before a sample, and its index; None if JSON cannot hold it."""
        known = max(number for number in list(self.states) if number <= index)
        with suppress(TypeError):
            return known, json.loads(json.dumps(self.states[known]))
        return None


def indexed(dataset: Any) -> Any:
    """Returns a dataset whose samples are read by index; raises JobError if that is impossible."""
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return dataset
    if all(hasattr(dataset, name) for name in ("__iter__", "state_dict", "load_state_dict")):
        return NumberedStream(dataset)
    what = f"the dataset {type(dataset).__name__} has no length or cannot be indexed; samples are read by index"
    raise JobError(f"{what}: give it __len__ and __getitem__, or, for a stream, state_dict and load_state_dict.")


def flatten_batch(batch: Any, samples: int) -> tuple[list[Tensor], TreeSpec]:
    """Returns the tensors of a batch and its structure; raises JobError if a tensor is not one row per sample."""
    found, spec = tree_flatten_with_path(batch)
    for path, leaf in found:
        place = f"batch{keystr(path)}"
        if not isinstance(leaf, Tensor):
            raise JobError(
                f"a batch must hold tensors only, but {place} has the type {type(leaf).__name__}; convert or drop it "
                "in `collate`, which may return a tensor, or tuples, lists and mappings of tensors."
            )
        if leaf.dim() == 0 or leaf.shape[0] != samples:
            raise JobError(
                f"a batch of {samples} samples has a tensor of shape {tuple(leaf.shape)} at {place}; its first "
                "dimension must be the samples, so that a batch can be split."
            )
    if not found:
        raise JobError("a batch has no tensors; return tensors from the dataset or from `collate`.")
    return [leaf for _, leaf in found], spec


def flatten_like(batch: Any, spec: TreeSpec, samples: int) -> list[Tensor]:
    """Returns the tensors of a batch in the order of the example batch: its keys may come in another order. Raises
    DataError if it has other parts."""
    flatten_batch(batch, samples)
    with suppress(ValueError):
        leaves = spec.flatten_up_to(batch)
        if all(isinstance(leaf, Tensor) for leaf in leaves):
            return leaves

    expected = tree_unflatten([None] * spec.num_leaves, spec)
    raise DataError(
        f"a batch of {samples} samples has other parts than the example batch: {_places(batch)} instead of "
        f"{_places(expected)}; return the same structure and keys for every batch from `collate`."
    )


def _places(batch: Any) -> str:
    """Returns where the tensors of a batch are, in words."""
    found, _ = tree_flatten_with_path(batch)
    return ", ".join(f"batch{keystr(path)}" for path, _ in found)


def load_python_task(name: str, args: Mapping[str, Any]) -> Task:
    """Returns what `package.module:function` builds: a task, or a module that returns its own loss."""
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise JobError(f'model.name = "python:{name}" must name a function: "python:package.module:function".')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise JobError(f'model.name = "python:{name}" cannot be loaded: {error}.') from error
    if not (isinstance(function, type) and issubclass(function, nn.Module)):
        try:
            inspect.signature(function).bind(**args)
        except TypeError as error:
            raise JobError(f"[model.args] do not fit {name}: {error}.") from error
        built = function(**args)
        if isinstance(built, Task):
            return built
        if not isinstance(built, nn.Module):
            raise JobError(f"{name} must return an nn.Module or a shardwise.Task, not {type(built).__name__}.")
    return Task(lambda: function(**args))


class DatasetSource:
    length, vocab = 1, 0

    def __init__(self, task: Task, dataset: Any, spec: TreeSpec):
        """`spec`: the structure in which the module gets every batch."""
        self.task, self.dataset, self.spec = task, indexed(dataset), spec
        self.stream = self.dataset if isinstance(self.dataset, NumberedStream) else None  # read in its own order

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def samples(self, indices: np.ndarray, positions: np.ndarray) -> Samples:
        if self.stream is not None:
            self.stream.seek(int(indices[0]))
        rows = [read_sample(self.dataset, index) for index in indices.tolist()]
        batch = self.task.collate_rows(rows)
        leaves = flatten_like(batch, self.spec, len(rows))
        total = len(rows) if self.task.count is None else float(self.task.count(batch))
        counts = torch.full((len(rows),), total / len(rows), dtype=torch.float64)
        targets = torch.zeros(len(rows), 1, dtype=torch.int64)
        return Samples(leaves[0], targets, torch.from_numpy(positions.astype(np.int64)), None, tuple(leaves), counts)
