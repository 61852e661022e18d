"""Modules whose proof is hard: they cast to float32, return exact zeros, normalise, or pad their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from user_modules import CLASSES, FEATURES, TOKENS, VOCAB, Rows, floats, images, integers, sentences, vectors

from shardwise.adapters.task import Task

WIDTH = 8


class Trunk(nn.Module):
    """Blocks on the rows of a matrix."""

    def __init__(self, block: Callable[[], nn.Module], head: Callable[[], nn.Module], depth: int = 4):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(depth)))
        self.head = head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


class Pictures(nn.Module):
    """Blocks on images."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = 4):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.Sequential(*(block() for _ in range(depth)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(pictures)).mean((2, 3)))


class Texts(nn.Module):
    """Blocks on sequences of tokens."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = 4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(depth)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))


def rows_through(block: Callable[[], nn.Module], head: Callable[[], nn.Module] | None = None) -> Task:
    make_head = head or (lambda: nn.Linear(WIDTH, CLASSES))
    return Task(lambda: Trunk(block, make_head), nn.CrossEntropyLoss(), vectors())


def pictures_through(block: Callable[[], nn.Module]) -> Task:
    return Task(lambda: Pictures(block), nn.CrossEntropyLoss(), images())


def texts_through(block: Callable[[], nn.Module]) -> Task:
    return Task(lambda: Texts(block), nn.CrossEntropyLoss(), sentences())


# Blocks that cast to float32


class RootMeanSquare(nn.Module):
    """Llama's norm: it computes in float32 whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.project(self.weight * normed.to(x.dtype))


def root_mean_square() -> Task:
    return rows_through(RootMeanSquare)


class Attention(nn.Module):
    """Its softmax gets the dtype by position."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        weights = torch.softmax(scores, -1, torch.float32).type_as(value)
        return x + self.out(weights @ value)


def softmax_in_float32() -> Task:
    return texts_through(Attention)


class ComplexRotation(nn.Module):
    """Rotary positions as complex numbers, with a table of complex64."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        angles = torch.outer(torch.arange(TOKENS).float(), 0.1 ** torch.arange(WIDTH // 2).float())
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.project(x).float().unflatten(-1, (-1, 2)))
        return x + torch.view_as_real(pairs * self.turns).flatten(-2).to(x.dtype)


def complex_rotation() -> Task:
    return texts_through(ComplexRotation)


class Scan(nn.Module):
    """A state-space layer: its state and its outputs are made in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.project(x).to(torch.float32)
        state = torch.zeros(x.shape[0], WIDTH, dtype=torch.float32, device=x.device)
        states = []
        for place in range(x.shape[1]):
            state = torch.sigmoid(self.decay.float()) * state + inputs[:, place]
            states.append(state)
        return x + self.out(torch.stack(states, 1).to(x.dtype))


def scan() -> Task:
    return texts_through(Scan)


class Scatter(nn.Module):
    """Sums into a tensor of zeros that is made in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = torch.arange(x.shape[-1], device=x.device).flip(0)
        sums = sums.index_add(-1, order, self.project(x).float())
        return x + torch.tanh(sums).to(x.dtype)


def scatter() -> Task:
    return rows_through(Scatter)


class CastByType(nn.Module):
    """Casts as code of old does: to a tensor type, to the dtype of another tensor, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x).type("torch.FloatTensor")
        y = y.to(torch.ones(1)) / y.norm(dim=-1, keepdim=True).type_as(torch.ones(1))
        return x + y.to(x.dtype)


def cast_by_type() -> Task:
    return rows_through(CastByType)


class Float32Product(torch.autograd.Function):
    """A kernel with a backward of its own, which computes in float32 both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].float()
        return (grad @ weight.float()).to(x.dtype), (grad.T @ x.float()).to(weight.dtype)


class OwnKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(Float32Product.apply(x, self.project.weight))


def own_kernel() -> Task:
    return rows_through(OwnKernel)


class OwnCheckpoint(nn.Module):
    """The author recomputes by himself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = RootMeanSquare()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def own_checkpoint() -> Task:
    return rows_through(OwnCheckpoint)


# Blocks that return exact zeros


def zeroed(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


class ZeroLast(nn.Module):
    """Its last projection is zero, as in muP and Fixup."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), zeroed(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def zero_last() -> Task:
    return rows_through(ZeroLast)


def zero_head() -> Task:
    """All logits are exactly zero, and no gradient reaches the blocks in the first step."""
    return rows_through(ZeroLast, lambda: zeroed(nn.Linear(WIDTH, CLASSES)))


class ZeroGate(nn.Module):
    """ReZero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.inner(x))


def zero_gate() -> Task:
    return rows_through(ZeroGate)


class TanhGate(nn.Module):
    """Flamingo's gate, of a whole module that is compared."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gate = Attention(), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.gate) * self.inner(x)

    def __init__(self) -> None:
        super().__init__()
        self.gated = self.Gated()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gated(x)


def tanh_gate() -> Task:
    return texts_through(TanhGate)


class AdaptiveNorm(nn.Module):
    """DiT's block: shift, scale and gate come from a projection that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, WIDTH)
        self.modulate = nn.Sequential(nn.SiLU(), zeroed(nn.Linear(WIDTH, 3 * WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate = self.modulate(x).chunk(3, -1)
        return x + gate * self.inner(self.norm(x) * (1 + scale) + shift)


def adaptive_norm() -> Task:
    return rows_through(AdaptiveNorm)


class ZeroConv(nn.Module):
    """ControlNet's convolution, beside a norm whose weight is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)
        nn.init.zeros_(self.norm.weight)
        self.zero = zeroed(nn.Conv2d(WIDTH, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.copy(x)
        return x + self.zero(F.relu(y)) + self.norm(y)


def zero_conv() -> Task:
    return pictures_through(ZeroConv)


class ZeroRouter(nn.Module):
    """All experts are chosen equally at first."""

    def __init__(self) -> None:
        super().__init__()
        self.router = zeroed(nn.Linear(WIDTH, 3, bias=False))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        return x + sum(shares[:, [n]] * torch.tanh(expert(x)) for n, expert in enumerate(self.experts))


def zero_router() -> Task:
    return rows_through(ZeroRouter)


class Nothing(nn.Module):
    """Predicts zero and is right: the loss and all gradients are exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.project = zeroed(nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)


def nothing() -> Task:
    return Task(Nothing, nn.MSELoss(), Rows(floats(FEATURES), torch.zeros(40, FEATURES)))


# Normalisations


class Normed(nn.Module):
    """A convolution with a bias before a norm."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), norm

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class NormedOnly(Normed):
    """Without a stream beside it: nothing but the norm's own scale is left of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x)))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(WIDTH),
    "batch_without_statistics": lambda: nn.BatchNorm2d(WIDTH, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(WIDTH, affine=True),
    "instance_with_statistics": lambda: nn.InstanceNorm2d(WIDTH, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, WIDTH),
    "group_of_one": lambda: nn.GroupNorm(WIDTH, WIDTH),
    "local_response": lambda: nn.LocalResponseNorm(3),
    "layer_without_weight": lambda: nn.LayerNorm((WIDTH, 8, 8), elementwise_affine=False),
    "rms_without_weight": lambda: nn.RMSNorm((8, 8), elementwise_affine=False),
}


def norm(kind: str, only: bool = False) -> Task:
    make = NormedOnly if only else Normed
    return pictures_through(lambda: make(NORMS[kind]()))


def small_inputs() -> Task:
    """What the first norm divides by is small, so the noise of the bias before it is large."""
    pictures = Rows(1e-3 * floats(3, 8, 8), integers(CLASSES))

    class Small(Pictures):
        def __init__(self) -> None:
            super().__init__(lambda: NormedOnly(nn.BatchNorm2d(WIDTH)))
            self.first = nn.BatchNorm2d(WIDTH, eps=1e-12)

        def forward(self, pictures: Tensor) -> Tensor:
            return self.head(self.blocks(self.first(self.stem(pictures))).mean((2, 3)))

    return Task(Small, nn.CrossEntropyLoss(), pictures)


class WeightNormed(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.project = wrap(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.project(x))


def weight_norm() -> Task:
    return rows_through(lambda: WeightNormed(parametrizations.weight_norm))


def spectral_norm() -> Task:
    """Each forward improves an estimate that it keeps in buffers."""
    return rows_through(lambda: WeightNormed(parametrizations.spectral_norm))


class KeyBias(nn.Module):
    """The bias of the keys has no effect on the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


def key_bias() -> Task:
    return texts_through(KeyBias)


def standardized_loss() -> Task:
    """A policy gradient's first loss: the mean of advantages of mean zero."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        ratio = torch.exp(output[:, 0] - output[:, 0].detach())
        advantage = target.to(output.dtype) % 2 * 2 - 1
        return -(ratio * advantage).mean()

    return Task(lambda: Trunk(ZeroLast, lambda: nn.Linear(WIDTH, 1)), loss, Rows(floats(FEATURES), torch.arange(40)))


# Batches padded to their own longest sample


class Ragged:
    """Sequences of 2 to 6 tokens."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        tokens = integers(VOCAB - 1, TOKENS)[index] + 1
        return tokens[: 2 + index * 7 % 5], index % CLASSES


def pad_right(rows: list[Any]) -> tuple[Tensor, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)
    return tokens, torch.tensor([row[1] for row in rows])


def pad_left(rows: list[Any]) -> tuple[Tensor, Tensor]:
    tokens, classes = pad_right([(row[0].flip(0), row[1]) for row in rows])
    return tokens.flip(1), classes


class Masked(nn.Module):
    """Looks at no padding."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            query, key, value = self.qkv(x).chunk(3, -1)
            return x + self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None]))

    def __init__(self, sees_padding: bool = False) -> None:
        super().__init__()
        self.embed, self.sees_padding = nn.Embedding(VOCAB, WIDTH), sees_padding
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens, dtype=torch.bool) if self.sees_padding else tokens != 0
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def padded(side: str = "right", sees_padding: bool = False) -> Task:
    collate = pad_right if side == "right" else pad_left
    return Task(lambda: Masked(sees_padding), nn.CrossEntropyLoss(), Ragged(), collate=collate)
