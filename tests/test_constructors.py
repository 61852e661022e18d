"""What a constructor draws, reads and copies is the same in every process and in the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import constructed_modules
import numpy as np
import pytest
import torch
from test_any_module import proven
from test_train import losses, train
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.adapters.deferred_init import build_deferred, build_plain
from shardwise.adapters.module_chain import KeepFloat64
from shardwise.errors import JobError, LayoutError, RunError
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.models.fake_caches import caches_kept
from shardwise.parallel.prepare import prepare
from shardwise.random import generator_states


def job_of(kind: str, function: str = "task", **changes: Any) -> Job:
    model = {"name": f"python:constructed_modules:{function}", "args": {"kind": kind}}
    return make_job({"precision": "float64", "steps": 3, "model": model, "batch": {"samples": 8}} | changes)


@pytest.mark.thin(7, by_kind=True)
@pytest.mark.parametrize("layout", ["pipeline=1", "shard=2 zero=3", "pipeline=2 micro_batch=4"])
@pytest.mark.parametrize("kind", ["RandomBuffer", "RandomOrder", "NumpyValues", "KeptValue"])
def test_constructors_that_draw_random_numbers_are_proven(kind: str, layout: str) -> None:
    proven(job_of(kind), layout)


@pytest.mark.parametrize("kind", constructed_modules.BLOCKS)
def test_the_generators_of_the_caller_are_where_they_were(kind: str) -> None:
    before = generator_states()
    build_deferred(constructed_modules.BLOCKS[kind], 3)
    build_plain(constructed_modules.BLOCKS[kind], 3)
    assert generator_states() == before


@pytest.mark.parametrize("kind", constructed_modules.BLOCKS)
def test_both_builds_have_the_same_values(kind: str) -> None:
    module, initial = build_deferred(constructed_modules.BLOCKS[kind], 3)
    np.random.seed(5)
    torch.manual_seed(5)
    plain = build_plain(constructed_modules.BLOCKS[kind], 3)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, initial.value(name)), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, module.get_buffer(name)), name


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ["pipeline=1", "shard=2 zero=3 micro_batch=2", "pipeline=2 micro_batch=4"])
def test_norms_that_stay_in_evaluation_mode(layout: str) -> None:
    proven(job_of("KeepsNormsInEvaluation"), layout)


def test_validating_leaves_norms_in_evaluation_mode(tmp_path: Path) -> None:
    plain = train(job_of("KeepsNormsInEvaluation", run={"folder": str(tmp_path / "plain")}), "pipeline=1")
    settings = {"run": {"folder": str(tmp_path / "validated")}, "validation": {"every": 1}}
    assert losses(train(job_of("KeepsNormsInEvaluation", **settings), "pipeline=1")) == losses(plain)


def test_hooks_on_gradients_run_in_one_process() -> None:
    proven(job_of("HookedGradient"), "pipeline=1", "recompute=full")


@pytest.mark.parametrize("function", ["task", "task_of_instance"])
def test_hooks_on_gradients_need_one_process(function: str) -> None:
    sentence = r"tril is a hook on the gradient of the parameter blocks\.0\.linear\.weight, .* use one process"
    for layout in ("replicate=2", "shard=2 zero=3", "pipeline=2"):
        with pytest.raises(LayoutError, match=sentence):
            prepare(job_of("HookedGradient", function), Layout.parse(layout))
    with pytest.raises(LayoutError, match=r"hook .*tril of the parameter .* must get the gradient of all samples"):
        prepare(job_of("HookedGradient", function), Layout.parse("micro_batch=2"))


def test_a_hook_that_updates_its_parameter_ends_the_run(tmp_path: Path) -> None:
    job = job_of("UpdatesItself", run={"folder": str(tmp_path)})
    with pytest.raises(RunError, match="the gradient hook update changes the parameter blocks.1.linear.weight"):
        train(job, "pipeline=1")


@pytest.mark.parametrize("kind", ["CopiesOfWeights", "Spectral", "OldSpectral", "Orthogonal", "Pruned"])
def test_what_a_constructor_computes_from_weights_has_its_values(kind: str) -> None:
    proven(job_of(kind), "pipeline=1")


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ["shard=2 zero=3", "replicate=2", "pipeline=2 micro_batch=4"])
def test_copies_of_weights_are_proven_in_several_processes(layout: str) -> None:
    proven(job_of("CopiesOfWeights"), layout)


def test_a_buffer_that_shares_memory_with_a_parameter_is_refused() -> None:
    with pytest.raises(JobError, match=r"the buffer alias shares the memory of the parameter linear\.weight"):
        build_deferred(constructed_modules.SharesMemory, 3)


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_tables_that_a_forward_caches_are_computed_again_after_a_trace(precision: str, tmp_path: Path) -> None:
    job = job_of("CachedTables", precision=precision, run={"folder": str(tmp_path)})
    if precision == "float64":
        proven(job, "pipeline=1", "shard=2 zero=3")
    assert len(losses(train(job, "pipeline=1"))) == 3
    assert isinstance(constructed_modules.bounded_table(8), torch.Tensor)
    assert not isinstance(constructed_modules.bounded_table(8), FakeTensor)


def test_modules_of_torch_jit_are_refused() -> None:
    with pytest.raises(JobError, match=r"the module 0 is compiled by torch\.jit, so its parameters cannot be replaced"):
        build_deferred(constructed_modules.Compiled, 3)


def test_float64_is_kept_beside_arrays_and_on_the_way_to_a_device() -> None:
    with KeepFloat64():
        chosen = torch.arange(3.0)[np.array([2, 0])]
        moved = torch.arange(3).to("meta", torch.float32)
        assert torch.zeros(2).type("torch.FloatTensor").dtype is torch.float64
    assert (chosen.tolist(), chosen.dtype) == ([2.0, 0.0], torch.float64)
    assert (moved.device.type, moved.dtype) == ("meta", torch.float64)


class Keeps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frequencies: dict[str, torch.Tensor] | None = None
        self.state: dict[str, dict[int, torch.Tensor]] = {"tables": {}}
        self.tables: list[torch.Tensor] = []


def test_what_holds_tables_is_there_after_a_trace_without_fake_ones() -> None:
    module = Keeps()
    module.tables.append(torch.ones(2))
    with caches_kept(module), FakeTensorMode():
        module.frequencies = {"cos": torch.ones(2)}
        module.state["tables"][2] = torch.ones(2)
        module.tables.append(torch.ones(3))
    assert module.frequencies is None and module.state == {"tables": {}}
    assert [table.tolist() for table in module.tables] == [[1.0, 1.0]]
