"""Randomness depends on the seed alone: any slice of a tensor, any rank, any step gives the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.random import Dropout, Permutation, hash_key, normal_


def whole(shape: tuple[int, ...], key: int = 7) -> torch.Tensor:
    out = torch.empty(shape)
    normal_(out, key, out.shape, (0,) * len(shape), 1.0)
    return out


@given(st.integers(1, 40), st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_piece_of_a_start_is_the_start_of_a_piece(rows: int, columns: int, data: st.DataObject) -> None:
    full = whole((rows, columns))
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    piece = torch.empty(rows - top, columns - left)
    normal_(piece, 7, full.shape, (top, left), 1.0)
    assert torch.equal(piece, full[top:, left:])


def test_start_is_normal_and_does_not_depend_on_precision() -> None:
    full = whole((1000, 300))
    assert abs(full.mean()) < 0.01
    assert abs(full.std() - 1) < 0.01
    assert abs((full.abs() > 2).double().mean() - 0.0455) < 0.003
    double = torch.empty(1000, 300, dtype=torch.float64)
    normal_(double, 7, double.shape, (0, 0), 1.0)
    assert torch.equal(double.float(), full)


def test_start_is_made_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    full = whole((64, 48))
    monkeypatch.setattr("shardwise.random.CHUNK", 100)
    assert torch.equal(whole((64, 48)), full)


def test_names_do_not_share_numbers() -> None:
    first, second = whole((500,), hash_key("init", 0, "a")), whole((500,), hash_key("init", 0, "b"))
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 0.2


@given(st.integers(1, 5000), st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_permutation_hits_every_place_once(count: int, epoch: int) -> None:
    order = Permutation(count, "order", 0, epoch)
    assert np.array_equal(np.sort(order(np.arange(count))), np.arange(count))


def test_permutation_of_a_huge_set_needs_no_table() -> None:
    order = Permutation(10**15, "order", 3)
    places = order(np.arange(1000))
    assert len(set(places.tolist())) == 1000
    assert places.max() < 10**15


@given(st.integers(0, 2**40), st.integers(0, 30), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_mask_of_a_slice_is_the_slice_of_the_mask(first_id: int, start: int, length: int) -> None:
    ids = torch.arange(4) + first_id
    x = torch.ones(4, 64, 16)
    dropout = Dropout(0.3, "site", 0)
    full = dropout(x, ids)
    part = Dropout(0.3, "site", 0)
    part.position_ids = torch.arange(start, start + length)
    assert torch.equal(part(x[2:, start : start + length], ids[2:]), full[2:, start : start + length])


def test_dropout_rate_mean_and_independence() -> None:
    ids = torch.arange(64)
    x = torch.ones(64, 32, 64)
    masks = {site: Dropout(0.25, site, 0)(x, ids) for site in ("a", "b")}
    assert abs((masks["a"] == 0).double().mean() - 0.25) < 0.005
    assert abs(masks["a"].mean() - 1) < 0.01
    both = ((masks["a"] == 0) & (masks["b"] == 0)).double().mean()
    assert abs(both - 0.0625) < 0.005
    rows = (masks["a"] == 0).double().flatten(0, 1)
    assert rows.mean(1).std() < 0.07  # no row is dropped or kept as a whole


def test_dropout_changes_with_the_sample_and_is_off_in_evaluation() -> None:
    x = torch.ones(1, 8, 32)
    dropout = Dropout(0.5, "site", 0)
    assert not torch.equal(dropout(x, torch.tensor([1])), dropout(x, torch.tensor([2])))
    assert torch.equal(dropout.eval()(x, None), x)
