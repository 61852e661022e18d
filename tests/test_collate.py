"""What `collate` may return: any mapping, tuples and lists of tensors; anything else is one sentence."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from test_any_module import any_job, proven

from shardwise.adapters.task import Task
from shardwise.errors import DataError, JobError, LayoutError
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("layout", ["pipeline=1", "replicate=2", "shard=2 zero=3 micro_batch=2"])
@pytest.mark.parametrize(
    "collator",
    ["padding", "language modeling", "longest", "user dict", "read-only", "nested", "named tuple", "any order"],
)
def test_taken(collator: str, layout: str) -> None:
    if collator in ("padding", "language modeling"):
        pytest.importorskip("transformers")
    proven(any_job("collated", {"kind": collator}), layout)


@pytest.mark.parametrize(
    ("collator", "sentence"),
    [
        ("dataclass", r"a batch must hold tensors only, but batch has the type PaddedData; convert or drop it in"),
        ("names", r"but batch\['names'\]\[0\] has the type str; convert or drop it in `collate`, which may return"),
        ("number", r"but batch\['length'\] has the type int;"),
    ],
)
def test_refused_by_its_place(collator: str, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        prepare(any_job("collated", {"kind": collator}), Layout())


def test_a_batch_with_other_parts_than_the_others_is_a_sentence() -> None:
    """Samples 2 and 7 have the same length, so this batch alone has no mask."""
    job = any_job("collated", {"kind": "without a mask"})
    (source, _) = job.family.sources(job.model)
    source.samples(np.array([0, 1]), np.array([0, 1]))
    sentence = r"has other parts than the example batch: .* instead of batch\['input_ids'\], batch\['attention_mask'\]"
    with pytest.raises(DataError, match=sentence):
        source.samples(np.array([2, 7]), np.array([2, 7]))


@pytest.mark.parametrize("collator", ["random", "masked language modeling"])
def test_random_numbers_need_one_process(collator: str) -> None:
    if collator != "random":
        pytest.importorskip("transformers")
    job = any_job("collated", {"kind": collator})
    prepare(job, Layout())
    for layout in ("replicate=2", "shard=2"):
        with pytest.raises(
            LayoutError, match=r"=2: `collate` draws random numbers, which each rank would do for itself"
        ):
            prepare(job, Layout.parse(layout))


class Rows:
    """Samples of any kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if self.kind == "graph":
            return torch.full((2,), float(index), requires_grad=True) * 2
        if self.kind == "augmented":
            return torch.rand(2)
        file = io.BufferedReader(io.BytesIO(bytes([index, index])))
        return {"file": file}


def stacked(rows: list[Any]) -> torch.Tensor:
    """Changes the samples that it gets, as collators of transformers do."""
    if isinstance(rows[0], dict):
        return torch.stack([torch.tensor(list(row.pop("file").read())) for row in rows])
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["graph", "file", "augmented"])
def test_samples_that_cannot_be_copied_are_collated(kind: str) -> None:
    state = torch.get_rng_state()
    assert not Task(torch.nn.Identity, data=Rows(kind), collate=stacked).collates_at_random
    assert Task(torch.nn.Identity, data=Rows(kind), collate=lambda rows: torch.rand(len(rows))).collates_at_random
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_without_a_value_are_no_random_numbers() -> None:
    """NaN, which stands for a missing feature, equals nothing, not even itself."""
    rows = [torch.tensor([float(number), float("nan")]) for number in range(4)]
    assert not Task(torch.nn.Identity, data=rows, collate=torch.stack).collates_at_random
