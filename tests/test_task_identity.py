"""A run of one's own module goes on with its own task only: module, loss, optimizer, schedule and data."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.adapters import code_identity
from shardwise.adapters.module_family import _ANATOMIES, SCRIPT_TASKS, load_task, meta_chain
from shardwise.data.content import describe_content, is_same
from shardwise.errors import CheckpointError, JobError, LayoutError
from shardwise.parallel.prepare import forward_flops, meta_model, split_shapes
from shardwise.train import local_machine
from shardwise.train.run_folder import RunFolder
from shardwise.train.task_record import TASK_FILE, _describe_data, changes_of_data
from shardwise.trainer import Run, Trainer


class Net(nn.Module):
    def __init__(self, width: int = 8, has_bias: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.head = nn.Linear(width, 3, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.stem(x)))


def rows(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, generator=generator), torch.tensor(n % 3)) for n in range(24)]


def weighted(output: torch.Tensor, target: torch.Tensor, smoothing: float = 0.1) -> torch.Tensor:
    """A loss of one's own."""
    return nn.functional.cross_entropy(output, target, label_smoothing=smoothing)


def constant_rate(rate: float) -> Callable[[int], float]:
    return lambda step: rate


BASIC: dict[str, Any] = {"model": Net, "loss": nn.CrossEntropyLoss(), "data": rows(), "layout": "replicate=1"}


def predict_nothing(*arguments: Any, **options: Any) -> NoReturn:
    """What the planner does with a layout that it cannot estimate. A prediction would trace the model at each start."""
    raise LayoutError("nothing is predicted")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """Makes a trainer as a script of its own would, whose runs train in this process as a world of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(local_machine, "choose_plan", predict_nothing)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**place, "TORCHELASTIC_RUN_ID": "test"}.items():
        monkeypatch.setenv(name, value)
    Path("script.py").touch()
    monkeypatch.setattr("sys.argv", ["script.py"])
    monkeypatch.setattr("__main__.__file__", "script.py", raising=False)

    def make(**changes: Any) -> Trainer:
        for known in (SCRIPT_TASKS, _ANATOMIES):  # each trainer is that of another process
            known.clear()
        for cached in (load_task, meta_chain, meta_model, forward_flops, split_shapes):
            cached.cache_clear()
        settings = {"run": {"device": "cpu"}, "checkpoint": {"snapshot_every": 0}}
        return Trainer(**{"steps": 2, "batch": 8, "folder": "run", "settings": settings, **BASIC, **changes})

    return make


def losses() -> list[float]:
    return [record["loss"] for record in RunFolder(Path("run")).metrics()]


Change = tuple[dict[str, Any], str]  # what another task has, and what is said of it
# How a run began, and what it does not go on with.
CHANGES: dict[str, tuple[dict[str, Any], list[Change]]] = {
    "basic": ({}, [
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "its loss CrossEntropyLoss has label_smoothing = 0.1"),
        ({"loss": weighted}, "its loss is weighted instead of CrossEntropyLoss"),
        ({"optimizer": torch.optim.RMSprop}, "its optimizer is RMSprop instead of none"),
        ({"lr": lambda step: 1e-3}, "its learning rate schedule is <lambda> instead of none"),
        ({"data": rows(seed=1)}, r"the data has changed since run began: training sample 0 is another, in '0'"),
        ({"collate": lambda batch: torch.utils.data.default_collate(batch)},
         "its collate is <lambda> instead of none"),
        ({"model": partial(Net, width=9)}, r"its module has \[9, 4\] instead of \[8, 4\] for stem.weight"),
    ]),
    "own loss": ({"loss": weighted}, [
        ({"loss": partial(weighted, smoothing=0.3)}, "its loss weighted has smoothing = 0.3 instead"),
    ]),
    "own optimizer": ({"optimizer": partial(torch.optim.SGD, momentum=0.9)}, [
        ({"optimizer": partial(torch.optim.SGD, momentum=0.5)}, "its optimizer SGD has momentum = 0.5 instead of 0.9"),
    ]),
    "own schedule": ({"lr": lambda step: 1e-3 / (1 + step)}, [
        ({"lr": lambda step: 1e-3}, "the code of its learning rate schedule <lambda> has changed"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_does_not_go_on_with_another_task(name: str, make: Callable[..., Trainer]) -> None:
    before, changes = CHANGES[name]
    make(**before).fit(proof=False)
    for after, sentence in changes:
        with pytest.raises(JobError, match=sentence):
            make(**{**before, **after}, steps=3).fit(resume="run", proof=False)
        assert len(losses()) == 2, sentence
    make(**before, steps=3).fit(resume="run", proof=False)
    assert len(losses()) == 3


def test_what_has_changed_can_be_accepted(make: Callable[..., Trainer]) -> None:
    make().fit(proof=False)
    changed = {"loss": weighted, "data": rows(seed=1)}
    make(**changed, steps=3).fit(resume="run", proof=False, accept_changes=True)
    kinds = [event["event"] for event in RunFolder(Path("run")).events()]
    assert "task_changed" in kinds and "data_changed" in kinds
    make(**changed, steps=4).fit(resume="run", proof=False)  # it is the task of the run now
    assert len(losses()) == 4


def test_accepted_changes_are_never_those_of_another_script(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would go on with the task of the script that began it, not with the one that was given."""
    make().fit(proof=False)

    Path("other.py").touch()
    monkeypatch.setattr("sys.argv", ["other.py"])
    monkeypatch.setattr("__main__.__file__", "other.py")
    other = make(loss=weighted, steps=3)
    with pytest.raises(JobError, match="its loss is weighted instead of CrossEntropyLoss"):
        other.fit(resume="run", proof=False, accept_changes=True)
    assert len(losses()) == 2


def test_more_steps_give_a_schedule_other_values(make: Callable[..., Trainer]) -> None:
    """As with the schedules of a job: a longer run may decay more slowly."""
    make(lr=constant_rate(1e-3)).fit(proof=False)
    with pytest.raises(JobError, match=r"its learning rate schedule <lambda> has rate = 0.002 instead of 0.001"):
        make(lr=constant_rate(2e-3)).fit(resume="run", proof=False)
    make(lr=constant_rate(2e-3), steps=3).fit(resume="run", proof=False)
    assert len(losses()) == 3


def test_weights_are_not_loaded_into_another_module(make: Callable[..., Trainer]) -> None:
    """What the checkpoint lacks would keep random values, without a word."""
    make(model=partial(Net, has_bias=False)).fit(proof=False)
    sentence = r"is of another model: for head.bias it has nothing, this model needs \[3\]"
    with pytest.raises(CheckpointError, match=sentence):
        make().load("run")

    other = make()
    other.run = Run(Path("run"))
    for use in (lambda: other.evaluate(rows()), other.module):
        with pytest.raises(CheckpointError, match=sentence):
            use()

    same = make(model=partial(Net, has_bias=False), loss=weighted)  # another loss may judge it
    same.load("run")
    assert (
        same.evaluate(rows())["loss"] > 0
        and same.module().state_dict().keys() == Net(has_bias=False).state_dict().keys()
    )


class Frozen(Net):
    """A frozen stem, as of a model that somebody else has trained."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        with torch.no_grad():
            self.stem.weight.copy_(factor * torch.arange(32.0).reshape(8, 4) / 32)
        self.stem.requires_grad_(False)


def test_frozen_weights_are_those_that_the_run_was_trained_beside(make: Callable[..., Trainer]) -> None:
    make(model=Frozen).fit(proof=False)
    other = make(model=partial(Frozen, factor=1.5), steps=3)
    with pytest.raises(JobError, match="its frozen weight stem.weight has other values"):
        other.fit(resume="run", proof=False)
    with pytest.raises(JobError, match="trained with another module: its frozen weight stem.weight has other values"):
        other.load("run")
    same = make(model=Frozen, steps=3)
    same.load("run")
    same.fit(resume="run", proof=False)
    assert len(losses()) == 3


def test_a_run_of_0_2_0_goes_on_with_a_warning(make: Callable[..., Trainer]) -> None:
    make().fit(proof=False)
    Path("run", TASK_FILE).unlink()
    make(steps=3).fit(resume="run", proof=False)
    warnings = [event["message"] for event in RunFolder(Path("run")).events() if event["event"] == "warning"]
    assert any("nobody can tell whether its module, loss and data are those" in text for text in warnings)
    with pytest.raises(JobError, match="its loss is weighted instead of CrossEntropyLoss"):
        make(loss=weighted, steps=4).fit(resume="run", proof=False)


# What is another sample, and what is not


def test_images_are_known_by_their_pixels() -> None:
    image = pytest.importorskip("PIL.Image")
    black, grey = image.new("RGB", (4, 3)), image.new("RGB", (4, 3), (90, 90, 90))
    assert is_same(describe_content(black), describe_content(black.copy()))
    assert not is_same(describe_content(black), describe_content(grey))


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (np.zeros(2, np.longdouble), np.dtype(np.longdouble).name + " [2]"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested float32"),
        (torch.ones(2, 3).to_sparse(), "float32 [2, 3]"),
        (np.array([object()]), "object [1]"),
    ],
    ids=["long double", "nested", "sparse", "object"],
)
def test_of_what_has_no_plain_values_the_form_counts(value: Any, form: str) -> None:
    assert describe_content(value) == {"form": form}


# What is another function, and what is not

FACTORY = """
import torch
import torch.nn.functional as F
SCALE = {scale}

def helper(output):
    return output * {factor}

def make():
    class Loss:
        '''{text}'''

        def __init__(self, smoothing=0.0):
            self.smoothing, self.calls = smoothing, 0

        def __call__(self, output, target):
            {comment}
            self.calls += 1
            return SCALE * F.cross_entropy(helper(output), target, label_smoothing=self.smoothing)

    return Loss({smoothing}), (lambda output, target: F.cross_entropy(helper(output), target))
"""
PLAIN = {"scale": 1.0, "factor": 2, "text": "A loss.", "comment": "# here", "smoothing": 0.1}


def described(folder: Path, lines: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Describes the loss object and the lambda of a script."""
    path = folder / "losses.py"
    path.write_text("\n" * lines + FACTORY.format(**{**PLAIN, **changes}))
    values: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(path.read_text(), str(path), "exec"), values)
    loss, function = values["make"]()
    loss.calls = os.getpid()  # what changes while it is used
    found = [code_identity.describe(loss), code_identity.describe(function)]
    return [one for one in found if one is not None]


def test_other_lines_comments_and_docstrings_are_the_same_code(tmp_path: Path) -> None:
    before = described(tmp_path)
    assert described(tmp_path) == before
    assert described(tmp_path, lines=7, text="Something else.", comment="pass  # moved") == before


@pytest.mark.parametrize(
    ("change", "is_function_another"), [({"scale": 2.0}, False), ({"factor": 3}, True), ({"smoothing": 0.2}, False)]
)
def test_another_constant_helper_or_value_is_noticed(
    change: dict[str, Any], is_function_another: bool, tmp_path: Path
) -> None:
    before, after = described(tmp_path), described(tmp_path, **change)
    assert code_identity.differences("loss", before[0], after[0], same_python=True)
    assert bool(code_identity.differences("loss", before[1], after[1], same_python=True)) == is_function_another


def test_code_is_not_compared_between_versions_of_python(tmp_path: Path) -> None:
    before, after = described(tmp_path), described(tmp_path, factor=3)
    assert not code_identity.differences("loss", before[1], after[1], same_python=False)


class Augmented:
    """Samples that are flipped at random: by the program's random numbers, or by its own."""

    def __init__(self, own: np.random.Generator | None, offset: float = 0.0) -> None:
        self.own, self.offset = own, offset

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.arange(4.0) + index + self.offset
        is_flipped = self.own.random() < 0.5 if self.own is not None else bool(torch.rand(()) < 0.5)
        return (x.flip(0) if is_flipped else x), index % 3


def test_samples_that_are_augmented_at_random_are_no_other_samples() -> None:
    def record(dataset: Any) -> dict[str, Any]:
        return {"data": _describe_data(dataset), "validation": None}

    state = torch.get_rng_state()
    before = record(Augmented(None))
    assert torch.equal(torch.get_rng_state(), state), "the program draws the same random numbers afterwards"
    torch.manual_seed(5)
    assert not changes_of_data(before, record(Augmented(None)))
    assert changes_of_data(before, record(Augmented(None, offset=0.5)))

    own = record(Augmented(np.random.default_rng(1)))
    assert not changes_of_data(own, record(Augmented(np.random.default_rng(2))))


def recorded_twice(make_value: Callable[[], Any]) -> tuple[Any, Any]:
    """Describes what two processes would make with other random numbers."""
    return code_identity.describe(make_value()), code_identity.describe(make_value())


class NetWithLoss(Net):
    """Its super() and its unseeded weights are no property of its loss."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(output), target)


class LearnedLoss(nn.Module):
    def __init__(self, has_bias: bool = True) -> None:
        super().__init__()
        self.scale = nn.Linear(3, 3, bias=has_bias)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.scale(output), target)


def loss_beside_a_module() -> Callable[..., torch.Tensor]:
    critic = nn.Linear(3, 3)
    return lambda output, target: nn.functional.cross_entropy(critic(output), target)


@pytest.mark.parametrize(
    "make_value", [lambda: NetWithLoss().loss, LearnedLoss, loss_beside_a_module], ids=["method", "module", "closure"]
)
def test_random_weights_are_no_other_task(make_value: Callable[[], Any]) -> None:
    first, second = recorded_twice(make_value)
    assert first == second
    assert not any("__class__" in name for name in first["values"])


def test_whether_there_is_a_parameter_and_the_buffers_are_compared() -> None:
    before, after = (code_identity.describe(LearnedLoss(has_bias)) for has_bias in (True, False))
    assert code_identity.differences("loss", before, after, same_python=True) == [
        "its loss LearnedLoss has scale.bias = None instead of a parameter"
    ]
    before, after = (
        code_identity.describe(nn.CrossEntropyLoss(weight=weight)) for weight in (torch.ones(3), torch.rand(3))
    )
    assert code_identity.differences("loss", before, after, same_python=True)


USES_OF_GLOBALS = """
import argparse, enum, functools
from dataclasses import dataclass
import torch
from torch import nn
import torch.nn.functional as F

class Kind(enum.Enum):
    MEAN = {member}

@dataclass
class Settings:
    steps: int = 3
    alpha: float = 0.5

class OwnLoss:
    scales = {scales}
    def __call__(self, output, target):
        return self.scales[0] * F.cross_entropy(output, target)

def scaled(factor):
    def decorate(function):
        @functools.wraps(function)
        def inner(output, target):
            return {operation}(function(output, target) * factor)
        return inner
    return decorate

critic = nn.CrossEntropyLoss(label_smoothing={smoothing})
table = {{"a": {entry}, "b": [1, 2]}}
job = {{"alpha": {entry}, "steps": {steps}}}
settings = Settings(steps={steps}, alpha={alpha})
arguments = argparse.Namespace(beta={alpha}, resume={steps})
names = {names}
ignored = {ignored}
text = "x" * 500 + {late!r}
many = list(range(300)) + [{last}]
weights = torch.tensor({weights})
history, state = [{steps}], {{"calls": {steps}}}
own = OwnLoss()
choice = Kind.MEAN

@functools.lru_cache
def cached(x):
    return x + {cached}

@scaled({factor})
def loss(output, target):
    history.append(1)
    state["calls"] += 1
    used = table, names, ignored, text, many, weights, choice, cached(1)
    return own(output, target) + critic(output, target) * settings.alpha * arguments.beta * job["alpha"]
"""
GLOBALS: dict[str, Any] = {
    "member": 1, "scales": [1.0], "operation": "abs", "smoothing": 0.0, "entry": 1, "alpha": 0.5, "names": [1, 2],
    "ignored": {1, 2}, "late": "y", "last": 0, "weights": [1.0, 2.0], "factor": 2.0, "cached": 1, "steps": 2,
}  # fmt: skip


def described_with_globals(folder: Path, **changes: Any) -> dict[str, Any]:
    path = folder / "uses_globals.py"
    path.write_text(USES_OF_GLOBALS.format(**{**GLOBALS, **changes}))
    values: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(path.read_text(), str(path), "exec"), values)
    found = code_identity.describe(values["loss"])
    assert found is not None
    return found


@pytest.mark.parametrize(
    "change",
    [
        {"smoothing": 0.1}, {"entry": 2}, {"alpha": 0.1}, {"names": [1, 3]}, {"ignored": {1, 3}}, {"late": "z"},
        {"last": 1}, {"weights": [1.0, 3.0]}, {"factor": 3.0}, {"operation": "float"}, {"member": 2},
        {"scales": [2.0]}, {"cached": 2},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_a_loss_finds_outside_of_itself_is_compared(change: dict[str, Any], tmp_path: Path) -> None:
    before, after = described_with_globals(tmp_path), described_with_globals(tmp_path, **change)
    assert code_identity.differences("loss", before, after, same_python=True)


def test_settings_that_a_loss_does_not_read_and_what_it_changes_itself_are_not_compared(tmp_path: Path) -> None:
    """One object often holds the settings of a whole script, such as its number of steps."""
    assert described_with_globals(tmp_path) == described_with_globals(tmp_path, steps=9)


def test_generated_code_of_a_library_is_known_by_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods of a dataclass have no file."""
    monkeypatch.setattr(code_identity, "library_folders", lambda: (str(tmp_path),))
    monkeypatch.syspath_prepend(tmp_path)
    text = "from dataclasses import dataclass\n@dataclass\nclass {name}:\n    smoothing: float = 0.1\n"
    Path(tmp_path, "installed_losses.py").write_text(text.format(name="Loss"))
    library = importlib.import_module("installed_losses")
    found = code_identity.describe(library.Loss)
    assert found == {"name": "Loss", "code": "", "values": {}}


class Settings:
    """Answers for the names that it has, and raises another error than AttributeError for all others."""

    def __init__(self) -> None:
        self.__dict__["values"] = {"scale": 2.0}

    def __getattr__(self, name: str) -> float:
        return float(self.__dict__["values"][name])


SETTINGS = Settings()


def test_an_object_that_answers_for_any_name_is_described() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return SETTINGS.scale * (output - target).square().mean()

    found = code_identity.describe(loss)
    assert found is not None and found["values"]["SETTINGS"] == "Settings"
