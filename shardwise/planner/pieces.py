"""What a piece of any model costs, as lists: its products by shape, its attention, the bytes that it moves and keeps.

A list comes from a trace (`shardwise.planner.trace`) or from a closed form (`shardwise.planner.listed`); here is its
time on a machine. Bytes are those of one micro-batch, products too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.planner.cost import Cut, Machine, Seconds, Setting, attention
from shardwise.planner.shape import Shape


@dataclass(frozen=True)
class Product:
    """`groups` products side by side, of (rows x inner) and (inner x columns) each; a convolution is one of them."""

    rows: int
    inner: int
    columns: int
    groups: int = 1
    window: int = 0
    """Places of a convolution's window: so many times each number that it reads enters the product. 0: it is none."""

    def precision(self, asked: str) -> str:
        """PyTorch lets cuDNN round the convolutions of a float32 model to TF32, unless told otherwise."""
        return "tf32" if self.window and asked == "float32" else asked

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.rows * self.inner * self.columns

    @property
    def numbers(self) -> float:
        """That are read and written."""
        read = self.rows * self.inner / max(1, self.window) + self.inner * self.columns
        return self.groups * (read + self.rows * self.columns)


@dataclass(frozen=True)
class Attention:
    """Softmax attention over all heads of all samples; each head has `size` features to compare, `value` to mix."""

    heads: int
    queries: int
    keys: int
    size: int
    value: int
    causal: bool = False

    @property
    def flops(self) -> float:
        """Half of the square where it is causal: what must be computed."""
        return 2.0 * self.heads * self.queries * self.keys * (self.size + self.value) * (0.5 if self.causal else 1.0)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One child of a model in one forward; `backward` beside it."""

    name: str
    parameters: int
    parameter_bytes: int
    output: int
    """Bytes that it gives to the next."""
    saved: int
    """Bytes that stay for the backward, its input included, its parameters not."""
    moved: int
    """Bytes that all but products and attention read and write."""
    calls: int
    """Operators that do work."""
    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    backward: float = 0.0
    """Floating-point operations of the backward, attention apart."""
    summed: float = 0.0
    """Bytes that a forward sums over the tensor ranks, where there are some."""

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products) + sum(one.flops for one in self.attention)


def seconds_of(machine: Machine, setting: Setting, piece: Piece, tensor: int = 1) -> Seconds:
    """One forward and one backward of a piece on one rank, one of `tensor` that the piece was cut for."""
    forward = backward = weight = core = 0.0
    for p in piece.products:
        sides = (p.rows, p.inner, p.columns), (p.rows, p.columns, p.inner), (p.inner, p.rows, p.columns)
        moved = p.numbers * setting.bytes
        word = p.precision(setting.precision)
        own, back, gradient = (machine.product(*side, word, p.groups, moved) for side in sides)
        forward, backward, weight = forward + own, backward + back + gradient, weight + gradient
    for a in piece.attention:
        there, behind = _attention(machine, setting, a)
        forward, backward, core = forward + there, backward + behind, core + there
    steady = machine.move(piece.moved) if piece.moved else 0.0
    return Seconds(
        forward=forward + steady, backward=backward + 2 * steady, weight=weight, core=core, moved=piece.moved,
        host=piece.calls * machine.efficiency.launch,
        tensor=machine.reduce(piece.summed, tensor, 1) * (1.0 - machine.efficiency.hidden_tensor * setting.overlapped),
    )  # fmt: skip


def _attention(machine: Machine, setting: Setting, a: Attention) -> tuple[float, float]:
    square = Shape(
        layers=1, width=a.size, heads=a.heads, kv_heads=a.heads, head_size=a.value, rope_size=a.size - a.value, ffn=0,
        vocab=0, sequence=a.keys, causal=a.causal,
    )  # fmt: skip
    forward, backward = attention(machine, square, setting, Cut(1, 1, 1, 1))
    return forward * a.queries / a.keys, backward * a.queries / a.keys


def mean_of(seconds: Sequence[Seconds]) -> Seconds:
    """The mean of a row of pieces."""
    total = Seconds()
    for number, one in enumerate(seconds, start=1):
        total = total.mixed(one, 1 / number)
    return total
