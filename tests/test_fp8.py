"""Products in 8 bits against float64: as far off as the rounding of their factors, and no further."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.models import fp8, loss
from shardwise.models.chain import IGNORE_INDEX

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


def factors(rows: int, width: int, out: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of very different size: a scale for all of them would lose the small ones."""
    make = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 3, rows).unsqueeze(1)
    x = (torch.randn(rows, width, generator=make) * sizes).bfloat16().to(device).requires_grad_()
    weight = (0.02 * torch.randn(out, width, generator=make)).bfloat16().to(device).requires_grad_()
    return x, weight, torch.randn(rows, out, generator=make).bfloat16().to(device)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double().cpu() - right).norm() / right.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_products_and_gradients(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "MIN_WEIGHTS", 0)
    x, weight, grad = factors(64, 128, 96, device)
    y = fp8.linear(x, weight, None)
    y.backward(grad)
    wide, matrix, gradient = x.detach().double().cpu(), weight.detach().double().cpu(), grad.double().cpu()
    right = wide @ matrix.T
    assert x.grad is not None and weight.grad is not None
    assert 0.005 < error(y.detach(), right) < 0.05  # 3 bits of mantissa, two factors
    assert 0.005 < error(x.grad, gradient @ matrix) < 0.05
    assert 0.005 < error(weight.grad, gradient.T @ wide) < 0.06
    rows = ((y.detach().double().cpu() - right).norm(dim=1) / right.norm(dim=1)).max()
    assert rows < 0.08  # small rows are as good as large ones


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(64, 128), (100, 144), (16, 16), (272, 48)])
def test_transposed_and_rounded_at_once(device: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    x8, row_scale = fp8.quantize_rows(x)
    found = fp8.transpose_to_fp8(x8.to(device)).cpu()
    assert found.is_contiguous() and torch.equal(found.float(), x8.float().t())
    for factor in (row_scale / row_scale.amax(), torch.logspace(-1, 1, shape[1]).unsqueeze(0)):
        found = fp8.transpose_to_fp8(x.to(device), factor.to(device)).cpu()
        right = (x.float() * factor).t().to(fp8.E4M3)
        assert found.is_contiguous() and (found.float() == right.float()).float().mean() > 0.99
        # A number halfway between two may fall to either; the smallest are 2**-9 apart.
        assert torch.allclose(found.float(), right.float(), rtol=0.13, atol=2**-9)
    found, scale = fp8.quantize_columns(x.to(device))
    right, right_scale = fp8.quantize_rows(x.t())
    assert torch.allclose(scale.cpu(), right_scale) and (found.cpu().float() == right.float()).float().mean() > 0.99


def test_sides_that_8_bits_cannot_have() -> None:
    x, weight, _ = factors(10, 24, 7, "cpu")
    bias = torch.ones(7, dtype=torch.bfloat16)
    assert torch.equal(fp8.linear(x, weight, bias), F.linear(x, weight, bias))


def test_nothing_is_divided_by_zero() -> None:
    x, weight = torch.zeros(16, 16, requires_grad=True), torch.zeros(16, 16, requires_grad=True)
    y = fp8.linear(x, weight, None)
    y.sum().backward()
    for tensor in (y, x.grad, weight.grad):
        assert tensor is not None and bool(tensor.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_unlikely_words_is_not_lost(device: str) -> None:
    """Of the logits' gradient: all but the target's are far below the largest of their row."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(32, 48, generator=make).bfloat16().to(device).requires_grad_()
    weight = (0.02 * torch.randn(4096, 48, generator=make)).bfloat16().to(device).requires_grad_()
    targets = torch.randint(0, 4096, (32,), generator=make).to(device)
    targets[3] = IGNORE_INDEX
    ours = loss.fused_linear_cross_entropy(x, weight, targets, None, 16, use_fp8=True)
    ours.backward()
    wide = x.detach().double().cpu().requires_grad_()
    logits = wide @ weight.detach().double().cpu().T
    F.cross_entropy(logits, targets.cpu(), ignore_index=IGNORE_INDEX, reduction="sum").backward()
    assert x.grad is not None and wide.grad is not None
    assert error(x.grad, wide.grad) < 0.12  # 2 bits of mantissa
    assert not bool(x.grad[3].any())
    few = fp8.quantize_rows(torch.tensor([[0.9, 2e-6, 2e-6]]), fp8.E5M2, fp8.E5M2_MAX)
    assert bool((few[0].float() > 0).all())
