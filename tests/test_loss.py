"""The projection with its loss in one, against PyTorch's own in two steps; on a GPU, its kernel against its twin."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.models import loss
from shardwise.models.chain import IGNORE_INDEX

ROWS, WIDTH, VOCABULARY = 37, 24, 61
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=make)
    targets[::5] = IGNORE_INDEX
    return x, weight, targets


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("rows", [0, 1, 8, ROWS, 128])
def test_any_chunk_gives_what_the_whole_gives(rows: int, multiple: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of 61 is padded to `multiple`, which must change neither the loss nor a gradient."""
    monkeypatch.setitem(loss.VOCAB_MULTIPLES, "cpu", multiple)
    x, weight, targets = inputs(torch.float64)
    whole = F.cross_entropy(F.linear(x, weight), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    expected = torch.autograd.grad(whole * 0.3, (x, weight))
    ours = loss.fused_linear_cross_entropy(x, weight, targets, None, rows)
    assert ours.item() == pytest.approx(whole.item(), rel=1e-13)
    for got, right in zip(torch.autograd.grad(ours * 0.3, (x, weight)), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_without_gradients_none_are_made() -> None:
    x, weight, targets = inputs(torch.float64)
    with torch.no_grad():
        ours = loss.fused_linear_cross_entropy(x, weight, targets, None, 8)
    assert not ours.requires_grad
    assert ours.item() == pytest.approx(loss.fused_linear_cross_entropy(x, weight, targets, None, 0).item(), rel=1e-13)


def test_a_scale_is_not_rounded_to_the_narrow_type() -> None:
    """1/3 has no short form: rounded to bf16, it would make every gradient 0.1% too large."""
    x, weight, targets = inputs(torch.bfloat16)
    (grad,) = torch.autograd.grad(loss.fused_linear_cross_entropy(x, weight, targets, None, 8) * (1.0 / 3.0), weight)
    (whole,) = torch.autograd.grad(loss.fused_linear_cross_entropy(x, weight, targets, None, 8), weight)
    ratio = (grad.double().norm() / whole.double().norm()).item()
    assert ratio == pytest.approx(1.0 / 3.0, rel=2e-4)


@pytest.mark.parametrize("vocabulary", [61, 8192, 50257, 128256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_gpu
def test_the_kernel_is_its_twin(dtype: torch.dtype, vocabulary: int) -> None:
    from shardwise.models.kernels import cross_entropy_with_grad_

    torch.manual_seed(0)
    logits = (3 * torch.randn(40, vocabulary + 67, device="cuda")).to(dtype)  # 67 columns of padding
    targets = torch.randint(0, vocabulary, (40,), device="cuda")
    targets[::7] = IGNORE_INDEX
    right, grad = loss.cross_entropy_with_grad(logits.double(), targets, None, vocabulary)
    ours = logits.clone()
    total = cross_entropy_with_grad_(ours, targets, IGNORE_INDEX, vocabulary)
    assert not ours[:, vocabulary:].any()
    limit = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert total.item() == pytest.approx(right.item(), rel=1e-5)
    assert ((ours.double() - grad).norm() / grad.norm()).item() < limit


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
@on_gpu
def test_the_scale_kernel_is_its_twin(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, scale = torch.randn(61, 100, device="cuda").to(dtypes[0]), torch.tensor(1.0 / 3.0, device="cuda")
    assert torch.equal(loss.scale_to_dtype(x, scale, dtypes[1]), (x.float() * scale).to(dtypes[1]))
