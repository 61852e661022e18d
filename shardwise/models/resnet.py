"""ResNet: residual networks for images (He et al. 2015), written for one device.

18 and 34 have blocks of two 3 x 3 convolutions, 50, 101 and 152 bottlenecks, whose stride is in the 3 x 3 convolution.
The stem is ImageNet's (7 x 7, stride 2, pooled) or CIFAR's (3 x 3).

A norm takes mean and variance over the whole batch, on one device as on many (`shardwise.parallel.norm` sums them over
ranks): so the batch is one micro-batch. What it remembers of them for validation is a pair of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kinds import ResNet
from shardwise.models.chain import IGNORED, Chain, Init, Rules

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
MOMENTUM = 0.1
# A target is a class, or two classes of a blend in one number: from bit 24 on the second, from bit 48 on its share in
# parts of 32,768. A plain class is thus one whose second has no share.
SECOND, SHARE, WHOLE = 24, 48, 1 << 15


def resnet(model: ResNet, seed: int) -> Chain:
    """The chain stem, block0, block1, ..., head."""
    pieces: list[tuple[str, nn.Module]] = [("stem", Stem(model))]
    pieces += [(f"block{i}", Block(*shape, deep=model.deep)) for i, shape in enumerate(shapes(model))]
    chain = Chain([*pieces, ("head", Head(8 * model.width * (4 if model.deep else 1), model.classes))], Rules((), ()))
    chain.rules = Rules(
        cuts=(),
        modules=(),
        # He et al.'s start: of each convolution's own outputs.
        init=(
            *((f"{name}.weight", Init("normal", (2 / (one.out_channels * one.kernel_size[0] ** 2)) ** 0.5))
              for name, one in chain.named_modules() if isinstance(one, nn.Conv2d)),
            ("*norm*.weight", Init("ones")),
            ("*.bias", Init("zeros")),
            ("head.weight", Init("normal", 0.01)),
        ),
        watched=("stem", "block*"),
    )  # fmt: skip
    return chain


def shapes(model: ResNet) -> Iterator[tuple[int, int, int]]:
    """Channels in, channels inside, and stride of each block."""
    wide = model.width
    for stage, count in enumerate(BLOCKS[model.depth]):
        inner = model.width * 2**stage
        for place in range(count):
            yield wide, inner, 2 if stage and not place else 1
            wide = inner * (4 if model.deep else 1)


class Norm(nn.Module):
    """Batch norm. `total` sums over the ranks that share a batch, of which there are `parts`; None: one has it all."""

    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(channels)) for _ in range(2))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))
        self.eps, self.parts = eps, 1
        self.total: Callable[[Tensor], Tensor] | None = None

    def forget(self) -> None:
        """Starts what is remembered, once it has memory."""
        wide = torch.promote_types(self.mean.dtype, torch.float32)
        self.mean, self.variance = torch.zeros_like(self.mean, dtype=wide), torch.ones_like(self.mean, dtype=wide)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self._of_the_batch(x) if self.training else (self.mean, self.variance)
        wide = torch.promote_types(x.dtype, torch.float32)
        factor = (variance + self.eps).rsqrt() * self.weight.to(wide)
        shift = self.bias.to(wide) - mean * factor
        return (x.to(wide) * factor[:, None, None] + shift[:, None, None]).to(x.dtype)

    def _of_the_batch(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = self.parts * wide.numel() // wide.shape[1]
        mean = self._sum(wide.sum((0, 2, 3))) / count
        variance = self._sum((wide - mean[:, None, None]).square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.mean.lerp_(mean.to(self.mean.dtype), MOMENTUM)
            self.variance.lerp_((variance * (count / max(1, count - 1))).to(self.variance.dtype), MOMENTUM)
        return mean, variance

    def _sum(self, numbers: Tensor) -> Tensor:
        return numbers if self.total is None else self.total(numbers)


class Stem(nn.Module):
    def __init__(self, model: ResNet):
        super().__init__()
        window, stride = (7, 2) if model.stem == "imagenet" else (3, 1)
        self.conv = nn.Conv2d(3, model.width, window, stride, window // 2, bias=False)
        self.norm = Norm(model.width)
        self.pools = model.stem == "imagenet"

    def forward(self, images: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        x = self.norm(self.conv(images.to(self.conv.weight.dtype))).relu()
        return F.max_pool2d(x, 3, 2, 1) if self.pools else x


class Block(nn.Module):
    def __init__(self, wide: int, inner: int, stride: int, deep: bool):
        super().__init__()
        out = 4 * inner if deep else inner
        # Windows, strides and channels of the convolutions in a row.
        rows = [(1, 1, inner), (3, stride, inner), (1, 1, out)] if deep else [(3, stride, inner), (3, 1, inner)]
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        before = wide
        for window, step, channels in rows:
            self.convs.append(nn.Conv2d(before, channels, window, step, window // 2, bias=False))
            self.norms.append(Norm(channels))
            before = channels
        beside = stride > 1 or wide != out
        self.beside = nn.Conv2d(wide, out, 1, stride, bias=False) if beside else None
        self.beside_norm = Norm(out) if beside else None

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y if number == 0 else y.relu()))
        if self.beside is not None and self.beside_norm is not None:
            x = self.beside_norm(self.beside(x))
        return (x + y).relu()


class Head(nn.Module):
    """The mean over the image, and its class: logits (B, 1, classes), or the loss summed over the targets."""

    def __init__(self, wide: int, classes: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(classes, wide)), nn.Parameter(torch.empty(classes))
        self.right: int | Tensor = 0
        """Of all samples outside training since it was last set to 0, how many had their class as the likeliest."""

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        logits = F.linear(x.mean((2, 3)), self.weight, self.bias).unsqueeze(1)
        if targets is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        counts = targets.flatten() != IGNORED
        first, second, share = classes_of(targets.flatten())
        if not self.training:
            self.right = self.right + ((wide.argmax(-1) == first) & counts).sum()
        lost = [F.cross_entropy(wide, which.where(counts, IGNORED), ignore_index=IGNORED, reduction="none")
                for which in (first, second)]  # fmt: skip
        return (lost[0] * (1 - share) + lost[1] * share).sum()


def classes_of(targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both classes of each target, and the second's share."""
    mask = (1 << SECOND) - 1
    return targets & mask, (targets >> SECOND) & mask, (targets >> SHARE).clamp(min=0) / WHOLE


def cost(model: ResNet) -> list[float]:
    """Forward floating-point operations per sample of each piece of the chain."""
    side = -(-model.image // 2) if model.stem == "imagenet" else model.image
    found = [2.0 * side**2 * 3 * model.width * (49 if model.stem == "imagenet" else 9)]
    side = -(-side // 2) if model.stem == "imagenet" else side
    for wide, inner, stride in shapes(model):
        before, side = side, -(-side // stride)
        if model.deep:
            work = before**2 * wide * inner + side**2 * (9 * inner**2 + 4 * inner**2)
        else:
            work = side**2 * (9 * wide * inner + 9 * inner**2)
        out = inner * (4 if model.deep else 1)
        work += side**2 * wide * out if stride > 1 or wide != out else 0
        found.append(2.0 * work)
    return [*found, 2.0 * 8 * model.width * (4 if model.deep else 1) * model.classes]
