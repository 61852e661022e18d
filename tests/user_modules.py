"""Modules as users write them: nothing here knows how it will be split, sharded or cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def vit() -> Task:
    return Task(ViT, nn.CrossEntropyLoss(), images(), plan=BLOCK_PLAN)


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


def frozen() -> Task:
    return Task(Frozen, nn.CrossEntropyLoss(), vectors(), plan=BLOCK_PLAN)


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

    def __init__(self, depth: int = 4, arange: bool = False):
        super().__init__()
        self.arange = arange
        self.tokens, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block(16, GroupedAttention(16, 4, 2), 0.1) for _ in range(depth))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]) if self.arange else shardwise.positions(tokens.shape[1])
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def long_lm(arange: bool = False) -> Task:
    words = integers(VOCAB, 9)
    return Task(
        lambda: LongLM(arange=arange),
        lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y, ignore_index=3, reduction="sum"),
        Rows(words[:, :-1], words[:, 1:]), count=lambda batch: (batch[1] != 3).sum(), plan=BLOCK_PLAN,
    )  # fmt: skip


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
