"""Modules as users write them: nothing here knows how it will be split, sharded or cut."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.adapters.task import Task

SAMPLES, TOKENS, FEATURES, CLASSES, VOCAB = 40, 6, 8, 5, 18


class Rows:
    """A map-style dataset of the rows of some tensors."""

    def __init__(self, *columns: Tensor, names: tuple[str, ...] = ()):
        self.columns, self.names = columns, names

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        row = tuple(column[index] for column in self.columns)
        return dict(zip(self.names, row, strict=True)) if self.names else row


def floats(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(0, high, (SAMPLES, *shape), generator=torch.Generator().manual_seed(seed))


def vectors() -> Rows:
    return Rows(floats(FEATURES), integers(CLASSES))


def images() -> Rows:
    return Rows(floats(3, 8, 8), integers(CLASSES))


def sentences() -> Rows:
    return Rows(integers(VOCAB, TOKENS), integers(CLASSES))


# A ViT


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module | None = None, dropout: float = 0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.drop = attention or Attention(width, 2), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), mask))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


BLOCK_PLAN = {
    "blocks.*.attention.q": "colwise", "blocks.*.attention.k": "colwise", "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise",
}  # fmt: skip


class ViT(nn.Module):
    def __init__(self, width: int = 8, depth: int = 4):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, dropout=0.1) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit(depth: int = 4) -> Task:
    return Task(lambda: ViT(depth=depth), nn.CrossEntropyLoss(), images(), plan=BLOCK_PLAN)


class Gated(nn.Module):
    """Its hidden features are normalized, so a plan must gather them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.softmax(self.up(x), -1))


def gated(style: str) -> Task:
    plan = {"*.up": style, "*.down": "rowwise" if style == "colwise" else "rowwise_split"}

    def build() -> nn.Module:
        return nn.Sequential(*(Gated() for _ in range(3)), nn.Linear(FEATURES, CLASSES))

    return Task(build, nn.CrossEntropyLoss(), vectors(), plan=plan)


# A U-Net: skip connections


class UNet(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        sizes = [3, width, 2 * width]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(sizes, sizes[1:]))
        self.bottom = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(4 * width, width, 3, padding=1), nn.Conv2d(2 * width, width, 3, padding=1)])
        self.norm, self.out = nn.GroupNorm(2, width), nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.down:
            x = F.relu(conv(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.relu(self.bottom(x))
        for conv, skip in zip(self.up, reversed(skips)):
            x = F.interpolate(x, scale_factor=2.0)
            x = F.relu(conv(torch.cat([x, skip], 1)))
        return self.out(self.norm(x))


def unet() -> Task:
    noisy = floats(3, 8, 8)
    return Task(UNet, nn.MSELoss(), Rows(noisy, noisy * 0.5))


class SkipMLP(nn.Module):
    """A U-Net whose levels are one list of blocks, so that a skip connection crosses every cut."""

    def __init__(self, depth: int = 4):
        super().__init__()
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.levels = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.stem(x)
        for level in self.levels:
            x = level(x)
        return self.head(x + start)


def skip_mlp() -> Task:
    return Task(SkipMLP, nn.CrossEntropyLoss(), vectors())


# An LSTM tagger: a target per word, and words that do not count


class Tagger(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.words = nn.Embedding(VOCAB, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(2 * width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        out, _ = self.lstm(self.words(words))
        return self.tags(out)


def tagged_sentences() -> Rows:
    tags = integers(CLASSES, TOKENS, seed=3)
    lengths = integers(TOKENS, seed=4)
    return Rows(integers(VOCAB, TOKENS), tags.masked_fill(torch.arange(TOKENS) > lengths[:, None], -100))


def tag_loss_sum(logits: Tensor, tags: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum")


def tag_loss_mean(logits: Tensor, tags: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100)


def lstm_tagger(held_out: int = SAMPLES) -> Task:
    rows = tagged_sentences()
    held = Rows(*(column[:held_out] for column in rows.columns))
    return Task(Tagger, tag_loss_sum, rows, validation=held, count=lambda batch: (batch[1] != -100).sum())


def masked_mean() -> Task:
    """Wrong: the mean over the targets that count is not the mean over the samples."""
    return Task(Tagger, tag_loss_mean, tagged_sentences())


# nn.TransformerEncoder


class Encoder(nn.Module):
    def __init__(self, width: int = 8, batch_first: bool = True, dropout: float = 0.0):
        super().__init__()
        self.batch_first = batch_first
        self.words, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=dropout, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.classes = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions.weight
        x = self.encoder(x if self.batch_first else x.transpose(0, 1))
        return self.classes(x.mean(1 if self.batch_first else 0))


def encoder() -> Task:
    return Task(Encoder, nn.CrossEntropyLoss(), sentences())


def sequence_first_encoder() -> Task:
    """With dropout between the layers, but not in attention, whose dropout is no module."""

    def build() -> nn.Module:
        model = Encoder(8, batch_first=False, dropout=0.1)
        for layer in model.encoder.layers:
            layer.self_attn.dropout = 0.0
        return model

    return Task(build, nn.CrossEntropyLoss(), sentences())


def default_encoder() -> Task:
    return Task(lambda: Encoder(dropout=0.1), nn.CrossEntropyLoss(), sentences())


# Two towers: a recommender


class TwoTowers(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.users, self.items = nn.Embedding(VOCAB, width), nn.EmbeddingBag(VOCAB, width, mode="sum")
        self.user_tower = nn.Sequential(nn.Linear(width + 2, width), nn.ReLU(), nn.Linear(width, width))
        self.item_tower = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, user: Tensor, context: Tensor, items: Tensor) -> Tensor:
        left = self.user_tower(torch.cat([self.users(user), context], -1))
        return (left * self.item_tower(self.items(items))).sum(-1)


def two_towers() -> Task:
    rows = Rows(
        integers(VOCAB), floats(2), integers(VOCAB, 3, seed=5), integers(2, seed=6).float(),
        names=("user", "context", "items", "clicked"),
    )  # fmt: skip
    return Task(TwoTowers, lambda logit, batch: F.binary_cross_entropy_with_logits(logit, batch["clicked"]), rows)


# A GAN: its two losses need two optimizers


class GAN(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(noise)
        seen = F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(fake.detach()))
        return F.softplus(-self.discriminator(fake)).mean(), seen.mean()


def gan() -> Task:
    return Task(GAN, None, Rows(floats(4), floats(FEATURES, seed=7)))


# Shared, frozen and tied parameters


class SharedLayer(nn.Module):
    """One layer is used twice in every block."""

    def __init__(self, depth: int = 4):
        super().__init__()
        self.shared = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(depth))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(torch.tanh(self.shared(x)))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def shared_layer() -> Task:
    return Task(SharedLayer, nn.CrossEntropyLoss(), vectors())


class RepeatedBlock(nn.Module):
    """A block is used in every layer, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        block = Block(FEATURES)
        self.embed, self.layers = nn.Linear(FEATURES, TOKENS * FEATURES), nn.ModuleList([block] * 3)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unflatten(-1, (TOKENS, FEATURES))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def repeated_block() -> Task:
    return Task(RepeatedBlock, nn.CrossEntropyLoss(), vectors())


class Frozen(nn.Module):
    """Its backbone and half of each block are frozen, and one parameter is not used."""

    def __init__(self, depth: int = 4):
        super().__init__()
        self.backbone = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Block(FEATURES, dropout=0.1) for _ in range(depth))
        self.unused, self.head = nn.Parameter(torch.ones(3)), nn.Linear(FEATURES, CLASSES)
        self.backbone.requires_grad_(False)
        for block in self.blocks:
            block.attention.requires_grad_(False)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone(x)[:, None].repeat(1, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def frozen(held_out: int = 0) -> Task:
    rows = vectors()
    held = Rows(*(column[:held_out] for column in rows.columns)) if held_out else None
    return Task(Frozen, nn.CrossEntropyLoss(), rows, validation=held, plan=BLOCK_PLAN)


class TiedLM(nn.Module):
    """A language model with tied embeddings, a causal buffer, and the mask handed to its blocks by keyword."""

    causal: Tensor

    def __init__(self, width: int = 8, depth: int = 4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, dropout=0.1) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("causal", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())
        self.register_buffer("decay", 0.5 ** torch.arange(float(TOKENS)), persistent=False)
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])) * self.decay[:, None]
        for block in self.blocks:
            x = block(x, mask=self.causal)
        return self.head(self.norm(x))


def tied_lm() -> Task:
    words = integers(VOCAB, TOKENS + 1)
    plan = BLOCK_PLAN | {"tokens": "vocab", "head": "colwise_gather"}
    return Task(
        TiedLM, lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y), Rows(words[:, :-1], words[:, 1:]),
        plan=plan,
    )  # fmt: skip


class GroupedAttention(nn.Module):
    """Grouped-query attention through `shardwise.attention`."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim = width // heads
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, kv_heads * self.head_dim) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(shardwise.attention(q, k, v).transpose(1, 2).flatten(2))


class LongLM(nn.Module):
    """A language model for long sequences: attention and positions are those of shardwise."""

    def __init__(self, depth: int = 4, arange: bool = False, scaled: bool = False):
        super().__init__()
        self.arange = arange
        self.scale = nn.Parameter(torch.tensor(0.8)) if scaled else 1.0
        self.tokens, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(16, GroupedAttention(16, 4, 2), 0.1) for _ in range(depth))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]) if self.arange else shardwise.positions(tokens.shape[1])
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.scale * x)


def long_lm(arange: bool = False, scaled: bool = False, depth: int = 4) -> Task:
    words = integers(VOCAB, 9)
    return Task(
        lambda: LongLM(depth, arange, scaled),
        lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y, ignore_index=3, reduction="sum"),
        Rows(words[:, :-1], words[:, 1:]), count=lambda batch: (batch[1] != 3).sum(), plan=BLOCK_PLAN,
    )  # fmt: skip


class ScaledLinear(nn.Linear):
    """A linear layer with a learned factor beside its weight."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ScaledBlock(Block):
    """A block with a learned number before each residual branch, as in ReZero, and one in a layer that is split."""

    def __init__(self, width: int):
        super().__init__(width, dropout=0.1)
        self.gates = nn.ParameterList([torch.tensor(0.3), torch.tensor(0.2)])
        self.up = ScaledLinear(width, 2 * width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.gates[0] * self.drop(self.attention(self.norm1(x), mask))
        return x + self.gates[1] * self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Rescale(nn.Module):
    """Holds nothing but a number."""

    def __init__(self, factor: nn.Parameter):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Temperatures(nn.Module):
    """Compares with class vectors as CLIP does, with a learned temperature; other numbers are shared or frozen."""

    def __init__(self, depth: int = 4):
        super().__init__()
        self.stem = nn.Linear(FEATURES, FEATURES)
        shared = nn.Parameter(torch.tensor(0.9))
        self.before, self.after = Rescale(shared), Rescale(shared)
        self.fixed = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.blocks = nn.ModuleList(ScaledBlock(FEATURES) for _ in range(depth))
        self.classes = nn.Parameter(torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(5)))
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.stem(x))
        x = torch.stack((x, x.flip(1)), 1)
        for block in self.blocks:
            x = block(x)
        x = self.fixed * self.after(x.mean(1))
        return self.logit_scale.exp() * F.normalize(x, dim=-1) @ F.normalize(self.classes, dim=-1).T


def temperatures(optimizer: str = "", depth: int = 4) -> Task:
    factory = getattr(torch.optim, optimizer) if optimizer else None
    return Task(lambda: Temperatures(depth), nn.CrossEntropyLoss(), vectors(), plan=BLOCK_PLAN, optimizer=factory)


# Inputs and outputs of many kinds


class ManyOutputs(nn.Module):
    """Blocks take several tensors and return a tuple; the forward returns a dict with a list."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.scale = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.ones(FEATURES))

        def forward(self, gate: Tensor, x: Tensor, *, extra: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            x = x + torch.tanh(self.mix(x)) * gate * self.scale + extra["shift"]
            return x, x.detach().mean()

    def __init__(self, depth: int = 4):
        super().__init__()
        self.embed, self.layers = nn.Linear(FEATURES, FEATURES), nn.ModuleList(self.Pair() for _ in range(depth))
        self.heads = nn.ModuleList([nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, 1)])

    def forward(self, features: Tensor, gate: Tensor, parts: list[Tensor]) -> dict[str, Any]:
        x = self.embed(features)
        for layer in self.layers:
            x, _ = layer(torch.sigmoid(gate), x, extra={"shift": parts[0] * 0.1})
        return {"scores": [head(x) for head in self.heads], "inputs": (features, parts)}


def many_outputs() -> Task:
    class Nested(Rows):
        def __getitem__(self, index: int) -> Any:
            features, gate, first, second, label, value = super().__getitem__(index)
            return {"features": features, "gate": gate, "parts": [first, second], "answer": (label, value)}

    def loss(output: dict[str, Any], batch: dict[str, Any]) -> Tensor:
        label, value = batch["answer"]
        return F.cross_entropy(output["scores"][0], label) + F.mse_loss(output["scores"][1][:, 0], value)

    columns = [floats(FEATURES, seed=seed) for seed in (8, 9, 10, 11)]
    return Task(ManyOutputs, loss, Nested(*columns, integers(CLASSES), floats(seed=12)))


class OwnLoss(nn.Module):
    def __init__(self, depth: int = 4):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.SiLU()) for _ in range(depth)))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.layers(x))
        return {"logits": logits} if labels is None else {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def own_loss() -> Task:
    return Task(OwnLoss, None, Rows(floats(FEATURES), integers(CLASSES), names=("x", "labels")))


class Clamp(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1.0, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * torch.exp(-x.abs())


class CustomAutograd(nn.Module):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            return x + Clamp.apply(self.linear(x))

    def __init__(self, depth: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(depth))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def custom_autograd() -> Task:
    return Task(CustomAutograd, nn.CrossEntropyLoss(), vectors())


class Convolutions(nn.Module):
    """Residual blocks with batch norm."""

    class Residual(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(self.norm(self.conv(x)))

    def __init__(self, width: int = 4, depth: int = 4):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, width, 3), nn.Sequential(*(self.Residual(width) for _ in range(depth)))
        self.pool_norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.pool_norm(self.blocks(self.stem(images)).mean((2, 3))))


def batch_norm() -> Task:
    return Task(Convolutions, nn.CrossEntropyLoss(), images(), validation=images())


class RunningNorm(nn.Module):
    """A norm of its author's: by running statistics that its forward updates."""

    mean: Tensor
    square: Tensor

    def __init__(self, features: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("square", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
            self.square.lerp_(x.detach().square().mean((0, 2, 3)), 0.1)
        scale = (self.square - self.mean.square()).clamp(min=1e-3).rsqrt()
        return (x - self.mean[:, None, None]) * scale[:, None, None]


class ReplacingNorm(RunningNorm):
    """Sets its buffers to new tensors instead of changing them in place."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return x - self.mean[:, None, None]


NORMS = {
    "batch 2d": nn.BatchNorm2d,
    "batch without statistics": lambda features: nn.BatchNorm2d(features, affine=False, track_running_stats=False),
    "sync": nn.SyncBatchNorm,
    "group": lambda features: nn.GroupNorm(2, features),
    "instance": nn.InstanceNorm2d,
    "tracked instance": lambda features: nn.InstanceNorm2d(features, track_running_stats=True),
    "running": RunningNorm,
    "replacing": ReplacingNorm,
}


def normalised(norm: str) -> Task:
    if norm == "batch 1d":
        return Task(
            lambda: nn.Sequential(
                nn.Linear(FEATURES, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)
            ),
            nn.CrossEntropyLoss(),
            vectors(),
        )
    if norm == "a block beside dropout":  # the trunk is the layers of one width, of which each is a block
        return Task(
            lambda: nn.Sequential(
                nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, CLASSES)
            ),
            nn.CrossEntropyLoss(),
            vectors(),
        )
    return Task(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), NORMS[norm](4), nn.Tanh(), nn.Flatten(), nn.Linear(144, CLASSES)
        ),
        nn.CrossEntropyLoss(),
        images(),
    )


class Experts(nn.Module):
    """The samples of a micro-batch choose one of many experts each, so most experts get none of them."""

    def __init__(self, experts: int = 6):
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(experts))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        x = self.embed(x)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any():
                y[chosen] = expert(x[chosen])
        return self.head(x + y)


def experts() -> Task:
    choice = torch.arange(SAMPLES) % 6
    return Task(Experts, nn.CrossEntropyLoss(), Rows(floats(FEATURES), choice, integers(CLASSES)))


# What cannot be split, or not like this


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.first(x), 0.1, self.training))


def functional_dropout() -> Task:
    return Task(FunctionalDropout, nn.CrossEntropyLoss(), vectors())


class ReadsValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.norm().item() > 1e6:
            x = x / x.norm()
        return self.head(x)


def reads_value() -> Task:
    return Task(ReadsValue, nn.CrossEntropyLoss(), vectors())


class Endless:
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(FEATURES), torch.tensor(0)


class Stream:
    """Samples in a row, without a length; its state is how many of them were read."""

    def __init__(self, count: int = 50):
        self.count, self.read = count, 0

    def __iter__(self) -> Iterator[Any]:
        while self.read < self.count:
            self.read += 1
            yield floats(FEATURES, seed=self.read)[0], torch.tensor(self.read % CLASSES)
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def streamed() -> Task:
    return Task(SkipMLP, nn.CrossEntropyLoss(), Stream())


def no_length() -> Task:
    return Task(lambda: OwnLoss(), nn.CrossEntropyLoss(), Endless())


class Ragged(Rows):
    def __getitem__(self, index: int) -> Any:
        words, label = super().__getitem__(index)
        return words[: 1 + index % TOKENS], label


def ragged() -> Task:
    return Task(Encoder, nn.CrossEntropyLoss(), Ragged(integers(VOCAB, TOKENS), integers(CLASSES)))


class WithText(Rows):
    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        return x, f"sample {index}", label


def not_a_tensor() -> Task:
    return Task(SkipMLP, nn.CrossEntropyLoss(), WithText(floats(FEATURES), integers(CLASSES)))


def lazy() -> Task:
    return Task(lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, CLASSES)), nn.CrossEntropyLoss(), vectors())


def detached_loss() -> Task:
    return Task(SkipMLP, lambda output, y: F.cross_entropy(output, y).detach(), vectors())


def loss_of_shape() -> Task:
    return Task(SkipMLP, nn.CrossEntropyLoss(reduction="none"), vectors())


class StackedLSTM(nn.Module):
    """A prologue and blocks that are LSTMs, which return tuples, and dropout of channels between them."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.words, self.first = nn.Embedding(VOCAB, width), nn.LSTM(width, width, batch_first=True)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(3))
        self.drop, self.tags = nn.Dropout1d(0.2), nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        x, _ = self.first(self.words(words))
        for layer in self.layers:
            x, _ = layer(x)
        return self.tags(self.drop(x))


def stacked_lstm() -> Task:
    return Task(StackedLSTM, tag_loss_sum, tagged_sentences(), count=lambda batch: (batch[1] != -100).sum())


class InPlace(nn.Module):
    """One flat nn.Sequential with in-place activations; the head's output is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(FEATURES, 12)]
        for _ in range(3):
            layers += [nn.Linear(12, 12), nn.ReLU(inplace=True)]
        self.net, self.head = nn.Sequential(*layers), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.net(x).unsqueeze(1))
        y += 1.0
        return y[:, 0]


def in_place() -> Task:
    return Task(InPlace, nn.CrossEntropyLoss(), vectors())


class FrozenBottom(SkipMLP):
    """The lower blocks are frozen: a first pipeline stage would have nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.stem, *list(self.levels)[:3]):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for level in self.levels:
            x = level(x)
        return self.head(x)


def frozen_bottom() -> Task:
    return Task(FrozenBottom, nn.CrossEntropyLoss(), vectors())


class EMA(nn.Module):
    """Its forward updates a buffer of its own."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.head(x - self.mean)


def ema() -> Task:
    return Task(EMA, nn.CrossEntropyLoss(), vectors(), validation=vectors())


class UnusedHead(SkipMLP):
    """A second head runs, but the loss does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.other(x)


def unused_head() -> Task:
    return Task(UnusedHead, lambda output, y: F.cross_entropy(output[0], y), vectors())


# Collators


class Text(nn.Module):
    """Classifies sentences of any length by the mean of their words; takes what transformers' tokenizers give."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask[..., None].to(self.words.weight.dtype)
        return self.head((self.words(input_ids) * mask).sum(1) / mask.sum(1))


class Words(nn.Module):
    """Predicts each word from the word itself: a language model for collators that make labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, FEATURES)
        self.head = nn.Linear(FEATURES, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.words(input_ids))


class Sentences:
    """Sentences of 2 to 6 words, as lists, as a tokenizer gives them."""

    def __init__(self, key: str = "label"):
        self.key = key

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 2 + index % 5
        row: dict[str, Any] = {"input_ids": [(3 * index + place) % VOCAB for place in range(length)]}
        if self.key:
            row[self.key] = index % CLASSES
        return row


def pad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads to the longest sentence of the batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": (torch.arange(longest) < lengths[:, None]).long(),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


class Padded(NamedTuple):
    inputs: dict[str, Tensor]
    labels: Tensor


@dataclass
class PaddedData:
    inputs: dict[str, Tensor]
    labels: Tensor


def as_named_tuple(rows: list[dict[str, Any]]) -> Padded:
    batch = pad(rows)
    labels = batch.pop("labels")
    return Padded(batch, labels)


def as_data(rows: list[dict[str, Any]]) -> PaddedData:
    return PaddedData(*as_named_tuple(rows))


def in_any_order(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Its keys come in the order of the longest sentence's parity."""
    batch = pad(rows)
    keys = list(batch)
    return {key: batch[key] for key in (keys if batch["input_ids"].shape[1] % 2 else reversed(keys))}


def without_a_mask(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Leaves out the mask where no sentence is padded."""
    batch = pad(rows)
    if bool(batch["attention_mask"].all()):
        batch.pop("attention_mask")
    return batch


def shuffled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Masks words at random."""
    batch = pad(rows)
    batch["attention_mask"] = batch["attention_mask"] * (torch.rand(batch["attention_mask"].shape) > 0.1)
    return batch


def of_transformers(kind: str) -> Any:
    import tokenizers
    import transformers

    words = {f"w{number}": number for number in range(VOCAB - 2)} | {"[PAD]": VOCAB - 2, "[MASK]": VOCAB - 1}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", mask_token="[MASK]")
    if kind == "padding":
        return transformers.DataCollatorWithPadding(tokenizer)
    mlm = kind == "masked language modeling"
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm=mlm)


COLLATORS: dict[str, Callable[[list[Any]], Any]] = {
    "longest": pad,
    "user dict": lambda rows: UserDict(pad(rows)),
    "read-only": lambda rows: MappingProxyType(pad(rows)),
    "nested": lambda rows: UserDict({"text": UserDict(pad(rows)), "more": [pad(rows)["labels"]]}),
    "named tuple": as_named_tuple,
    "dataclass": as_data,
    "names": lambda rows: {**pad(rows), "names": [f"sample {row['label']}" for row in rows]},
    "number": lambda rows: {**pad(rows), "length": 3},
    "any order": in_any_order,
    "without a mask": without_a_mask,
    "random": shuffled,
}


def _inputs_of(batch: Any) -> Any:
    inputs = batch
    if isinstance(batch, tuple):
        inputs = batch[0]
    elif "text" in batch:
        inputs = batch["text"]
    return UserDict({key: inputs[key] for key in ("input_ids", "attention_mask")})


def _labels_of(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    return batch["text"]["labels"] if "text" in batch else batch["labels"]


def collated(kind: str) -> Task:
    if kind in ("language modeling", "masked language modeling"):
        return Task(
            Words,
            lambda logits, batch: F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"),
            Sentences(key=""),
            collate=of_transformers(kind),
            count=lambda batch: (batch["labels"] != -100).sum(),
        )
    return Task(
        Text,
        lambda logits, batch: F.cross_entropy(logits, _labels_of(batch)),
        Sentences(),
        collate=of_transformers(kind) if kind == "padding" else COLLATORS[kind],
        inputs=_inputs_of,
    )


# Metrics


def error_of_each(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) != target).double()


def share_of_errors(output: Tensor, target: Tensor) -> Tensor:
    return error_of_each(output, target).mean()


def measured(metric: str) -> Task:
    metrics = {"errors": {"vector": error_of_each, "scalar": share_of_errors}[metric]}
    model = lambda: nn.Linear(FEATURES, CLASSES)  # noqa: E731
    return Task(model, nn.CrossEntropyLoss(), vectors(), validation=vectors(), metrics=metrics)


# What the forward changes, and what is no part of the module


class Taught(nn.Module):
    """Has a teacher: frozen parameters that follow the student in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(FEATURES, CLASSES)
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for weight, follows in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    weight.mul_(0.5).add_(follows, alpha=0.5)
        return self.student(x) + self.teacher(x)


def taught() -> Task:
    return Task(Taught, nn.CrossEntropyLoss(), vectors())


class ShiftedNorm(nn.BatchNorm1d):
    """A batch norm whose forward is its author's."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + 3


def shifted_norm() -> Task:
    model = lambda: nn.Sequential(nn.Linear(FEATURES, 6), ShiftedNorm(6), nn.Tanh(), nn.Linear(6, CLASSES))  # noqa: E731
    return Task(model, nn.CrossEntropyLoss(), vectors())


class TableOutside(nn.Module):
    """Multiplies by a tensor that is neither parameter nor buffer, so that no cast of the module reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = [torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(3))]
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.table[0])


def float32_outside() -> Task:
    """The class weights of the loss are in float32, too."""
    weighted = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2.0, CLASSES), reduction="sum")
    return Task(TableOutside, weighted, vectors(), count=lambda batch: len(batch[1]))
