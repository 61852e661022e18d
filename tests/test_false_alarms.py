"""The proof of modules that cast, return zeros, normalise or pad: each is proven, or refused in one true sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import alarm_modules
import pytest
import torch
from test_any_module import any_job

import shardwise.verify.parity as parity
import shardwise.verify.rounding as rounding
from shardwise.comm.world import run_world
from shardwise.errors import JobError, RunError, UserError, WorkerError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.optim.param_shard import ParamShard
from shardwise.verify.parity import VerifyResult, error_ratio, output_error, verify

LAYOUTS = (
    "replicate=2", "shard=2 zero=3 recompute=full", "pipeline=2 micro_batch=2 recompute=selective",
    "pipeline=2 micro_batch=2 schedule=zero-bubble recompute=full",
)  # fmt: skip
BATCH_NORM = "running statistics of batch norm twice|batch norm spans the whole batch"
# By module: what the sentence says in the layouts in which it is refused.
CASTS = {
    "root_mean_square": "", "softmax_in_float32": "", "complex_rotation": "", "scan": "", "scatter": "",
    "cast_by_type": "", "own_kernel": "",
    "own_checkpoint": "the model itself fails in one process in float64: CheckpointError: .*Recomputed values for",
}  # fmt: skip
ZEROS = {
    "zero_last": "", "zero_head": "", "zero_gate": "", "tanh_gate": "", "adaptive_norm": "", "zero_conv": "",
    "zero_router": "", "nothing": "no list of blocks was found", "standardized_loss": "",
}  # fmt: skip
NORMS = {kind: BATCH_NORM if kind.startswith("batch") else "" for kind in alarm_modules.NORMS}
NORMS["instance_with_statistics"] = "the forward updates buffer .*running_mean, which each rank would do independently"
OTHER_NORMS = {
    "small_inputs": BATCH_NORM, "weight_norm": "", "key_bias": "",
    "spectral_norm": "the forward updates buffer .*_u, which each rank would do independently",
}  # fmt: skip


def module_job(name: str, **args: Any) -> Job:
    job = any_job(name, args)
    model = job.model.model_copy(update={"name": f"python:alarm_modules:{name}"})
    return job.model_copy(update={"model": model})


def proven_or_refused(job: Job, layout: str, sentence: str) -> None:
    try:
        (result,) = verify(job, [Layout.parse(layout)], steps=2)
    except UserError as error:
        assert sentence and re.search(sentence, str(error)), error
        assert "\n" not in str(error)
    else:
        assert result.ok, result.describe()


MODULES = [
    pytest.param(name, sentence, id=f"{group}-{name}")
    for group, modules in {"casts": CASTS, "zeros": ZEROS, "norms": OTHER_NORMS}.items()
    for name, sentence in modules.items()
]


@pytest.mark.thin(11, by_kind=True)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "sentence"), MODULES)
def test_modules(name: str, sentence: str, layout: str) -> None:
    proven_or_refused(module_job(name), layout, sentence)


@pytest.mark.thin(12)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("only", [False, True], ids=["beside", "only"])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_behind_a_bias(kind: str, only: bool, layout: str) -> None:
    proven_or_refused(module_job("norm", kind=kind, only=only), layout, NORMS[kind])


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("layout", ["replicate=2", "shard=2 zero=3 recompute=full micro_batch=2"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_samples_padded_by_each_rank(side: str, layout: str) -> None:
    proven_or_refused(module_job("padded", side=side), layout, "")


def test_padding_that_takes_part_is_still_a_difference() -> None:
    (result,) = verify(module_job("padded", sees_padding=True), [Layout.parse("replicate=2")], steps=2)
    assert result.first_difference is not None
    assert result.loss > 1e-6


def test_stages_exchange_tensors_of_one_shape() -> None:
    what = r"an output of shape \(2, \d, 8\) for this batch, but stages exchange tensors of one shape, \(2, \d, 8\)"
    (result,) = verify(module_job("padded"), [Layout.parse("pipeline=2 micro_batch=2")], steps=3)
    assert not result.ok
    assert re.search(what, result.failure or "")


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_transformers_model_recomputes_its_blocks(recompute: str) -> None:
    args = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "precision": "float64", "steps": 2, "batch": {"samples": 4}, "data": {"source": "synthetic"},
        "model": {"name": "hf:qwen3", "sequence": 8, "args": args},
    }  # fmt: skip
    (result,) = verify(make_job(settings), [Layout.parse(f"shard=2 recompute={recompute}")], steps=1)
    assert result.ok, result.describe()


# What went wrong is said in the words of the error itself


def fail_with_advice() -> None:
    try:
        raise ValueError("the cause\nadvice\nworkaround examples.")
    except ValueError as error:
        raise RuntimeError("[Stage 0] failed to run forward:") from error


def test_what_a_process_raised_is_said_by_its_first_line() -> None:
    with pytest.raises(WorkerError, match="(?s)Traceback .*workaround examples") as raised:
        run_world(fail_with_advice, 1)
    assert raised.value.cause == "rank 0: ValueError: the cause"


def test_a_layout_that_did_not_finish_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "_compare_layout", lambda *args: fail_with_advice())
    (result,) = verify(module_job("zero_last"), [Layout()], steps=1)
    assert result.failure == "rank 0: ValueError: the cause"

    def fail(*args: Any) -> None:
        raise RunError("ranks [1] did not finish within 240 s.\nrank 1:\nthe stack")

    monkeypatch.setattr(parity, "_compare_layout", fail)
    (result,) = verify(module_job("zero_last"), [Layout()], steps=1)
    assert result.failure == "ranks [1] did not finish within 240 s."


# Nothing is excused but rounding


def test_two_zeros_are_equal_and_nothing_else_equals_zero() -> None:
    assert error_ratio(0.0, 0.0) == 0.0
    assert error_ratio(1e-300, 0.0) == float("inf")
    assert error_ratio(float("nan"), 1.0) != 0.0


def test_only_what_both_have_may_be_compared_of_padded_rows() -> None:
    row = torch.arange(12.0, dtype=torch.float64).reshape(2, 6)
    assert output_error(row[:, :4], row, 0.0) == output_error(row[:, 2:], row, 0.0) == 0.0
    assert output_error(row[:, 1:5], row, 0.0) > 1e-2
    assert output_error(row[:1], row, 0.0) == float("inf")  # a sample is missing
    assert output_error(row[0], row, 0.0) == float("inf")


def altered_gradient(factor: float, name: str) -> VerifyResult:
    """Returns the verdict on gradients of a bias before a norm, of which one is altered on one rank."""
    right: Any = ParamShard.full_grad

    def altered(shard: ParamShard) -> Any:
        gradient = right.fget(shard)
        return gradient + factor if shard.name == name else gradient

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParamShard, "full_grad", property(altered))
        (result,) = verify(module_job("norm", kind="batch"), [Layout.parse("replicate=2")], steps=1)
    return result


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", ["blocks.3.conv.bias", "blocks.0.norm.weight"])
def test_a_difference_above_rounding_is_found(name: str) -> None:
    """The gradients' RMS norm is about 1, so a bug of 1e-8 is a hundred millionth of it: noise is 1e-16."""
    result = altered_gradient(1e-8, name)
    assert result.first_difference is not None
    assert (result.first_difference.kind, result.first_difference.name) == ("gradient", name)


def test_a_difference_that_rounding_never_makes_is_told_without_measuring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(parity, "_measure_rounding", lambda *args: measured.append(args))
    monkeypatch.setattr(parity, "run_world", _run_here_if(parity._measure_rounding))

    assert not altered_gradient(1e-3, "blocks.3.conv.bias").ok
    assert not measured
    assert not altered_gradient(1e-8, "blocks.3.conv.bias").ok
    assert len(measured) == 1


def _run_here_if(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run_world`, which runs one function in this process."""

    def run(called: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return [function()] if called is function else run_world(called, *args, **options)

    return run


def test_a_model_that_jumps_is_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last bit decides, a moved reference is no measure."""
    value = {"a": torch.ones(3, dtype=torch.float64)}
    zero = torch.zeros((), dtype=torch.float64)
    expected = {"outputs": value, "gradients": value, "weights": value, "loss": zero, "norm": zero}
    expected |= {"frozen": {}, "buffers": {}}
    moved = expected | {"gradients": {"a": value["a"] * (1 + 1e-12)}}
    (found,) = rounding.find_moved([expected], [[expected], [moved]]) or [None]
    assert found is not None
    assert found.allowance("gradient", "a") == pytest.approx(1e-10 * 3**0.5, rel=1e-3)
    assert found.allowance("output", "a") == 0.0

    jumped = expected | {"gradients": {"a": value["a"] * (1 + 1e-5)}}
    assert rounding.find_moved([expected], [[moved], [jumped]]) is None


def test_a_refused_proof_says_why() -> None:
    with pytest.raises(JobError, match="no layout can be compared, since the model itself fails in one process"):
        verify(module_job("own_checkpoint"), [Layout.parse("shard=2")], steps=1)
