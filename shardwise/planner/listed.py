"""Models that are no row of equal blocks, as lists of pieces: T5, ResNet, DLRM; or any module, by its trace.

The same `Estimator` and search serve; to them such a model is a row of mean pieces. All are planned along the data
axes, whole on each rank or in pieces by ZeRO; T5 over tensor and pipeline ranks, too. Its stages are taken to be even
in time, as our engine cuts them, and as large in memory as if all blocks were like the largest. The lists are of
operators that run one by one: norms, activations and sums each read and write memory.

The tables of a DLRM lie in the hosts' memory, dealt over the data ranks. Each step every rank reads the rows that the
samples of all ranks ask of it, sends them over the host's link and to the rank whose sample it is, and takes gradients
back the same way; nothing hides that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from statistics import fmean as mean

from shardwise.kinds import DLRM, T5, Model, ResNet
from shardwise.layout import Layout, keep_share
from shardwise.models.resnet import shapes
from shardwise.planner.cost import Cut, Seconds
from shardwise.planner.memory import Held, Weights
from shardwise.planner.pieces import Attention, Piece, Product, mean_of, seconds_of
from shardwise.planner.predict import Estimator
from shardwise.planner.shape import Shape, shape_of

HOST_ROWS = 20e9  # bytes a second that one rank's share of a host reads or writes at random, in rows of some 500 bytes
HOST_LINK = 25e9  # bytes a second and direction between host and device: PCIe 4 x16


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Embedding tables in the hosts' memory."""

    bytes: float
    rows: float
    """Bytes of rows that one sample reads."""
    sums: float
    """Bytes that reach the device for one sample."""


@dataclass(frozen=True, kw_only=True)
class Listed(Shape):
    """A model as its pieces. To the search it has one head and one position, unless tensor ranks can cut it."""

    make: Callable[..., tuple[Piece, ...]]
    """The pieces for a micro-batch of some samples, and for so many tensor ranks where there is more than one head."""
    tables: Tables | None = None
    ends: bool = False
    """Whether the first and the last piece are ends of a row of blocks that a pipeline can cut."""

    @property
    def stages(self) -> int:
        return self.layers if self.ends else 1

    @property
    def contexts(self) -> int:
        return 1

    @cached_property
    def parameters(self) -> int:
        return sum(piece.parameters for piece in self.make(1)) + (round(self.tables.bytes / 4) if self.tables else 0)

    @cached_property
    def active_parameters(self) -> int:
        return sum(piece.parameters for piece in self.make(1))

    def precision(self, asked: str) -> str:
        """Of most of the work."""
        largest = max((p for piece in self.make(1) for p in piece.products), key=lambda p: p.flops)
        return largest.precision(asked)

    def flops(self, samples: int) -> float:
        return 3.0 * self.block_flops(samples)

    def block_flops(self, samples: int) -> float:
        return samples * sum(piece.flops for piece in self.make(1))


def listed(
    make: Callable[..., tuple[Piece, ...]], tables: Tables | None = None, heads: int = 1, sequence: int = 1,
    ends: bool = False,
) -> Listed:  # fmt: skip
    """A model that `make` gives for any micro-batch: a closed list, or `lambda n: trace(module, inputs(n))`."""
    return Listed(
        layers=len(make(1)) - 2 * ends, width=1, heads=heads, kv_heads=1, head_size=1, ffn=0, vocab=0,
        sequence=sequence, make=make, tables=tables, ends=ends,
    )  # fmt: skip


def form_of(model: Model | T5 | ResNet | DLRM, size: int) -> Shape:
    """A job's model in the form that the planner takes; `size`: bytes of a number."""
    if isinstance(model, Model):
        return shape_of(model)
    lists: dict[type, Callable[..., Iterator[Piece]]] = {T5: t5, ResNet: resnet, DLRM: dlrm}
    make = partial(_made, lists[type(model)], model, size)
    if isinstance(model, T5):
        return listed(make, heads=model.heads, sequence=model.sequence + model.targets, ends=True)
    if not isinstance(model, DLRM):
        return listed(make)
    row = 4.0 * model.width
    sums = model.tables * row
    return listed(make, Tables(bytes=row * sum(model.sizes), rows=sums * model.lookups, sums=sums))


@lru_cache(maxsize=64)
def _made(
    pieces: Callable[..., Iterator[Piece]], model: Model, size: int, samples: int, tensor: int = 1
) -> tuple[Piece, ...]:
    return tuple(pieces(model, size, samples, tensor) if tensor > 1 else pieces(model, size, samples))


class ListedEstimator(Estimator):
    """Predicts layouts of a model that is given as pieces."""

    @property
    def model(self) -> Listed:
        assert isinstance(self.work.shape, Listed)
        return self.work.shape

    def pieces(self, cut: Cut) -> tuple[Seconds, Seconds, Seconds]:
        if cut not in self._pieces:
            first, rows, last = self._parts(cut.micro_batch, cut.tensor)
            blocks, *ends = (
                [seconds_of(self.machine, self.work.setting, piece, cut.tensor) for piece in part]
                for part in (rows, first, last)
            )
            self._pieces[cut] = mean_of(blocks), mean_of(ends[0]), mean_of(ends[1])
        return self._pieces[cut]

    def _parts(self, micro_batch: int, tensor: int) -> tuple[Sequence[Piece], Sequence[Piece], Sequence[Piece]]:
        """First piece, blocks and last piece; all are blocks where there are no ends."""
        rows = self.model.make(micro_batch, *([tensor] if tensor > 1 else []))
        return (rows[:1], rows[1:-1], rows[-1:]) if self.model.ends else ((), rows, ())

    def passed(self, layout: Layout) -> float:
        return self.held(layout).passed

    def held(self, layout: Layout) -> Held:
        key = layout.micro_batch, layout.recompute, layout.tensor, layout.pipeline > 1
        if key not in self._held:
            first, rows, last = self._parts(layout.micro_batch, layout.tensor)
            size = self.work.setting.bytes
            typical = max if layout.pipeline > 1 else mean  # some stage has the largest blocks alone
            weights = Weights(
                typical(piece.parameters for piece in rows), 0.0, sum(p.parameters for p in first),
                sum(p.parameters for p in last),
            )  # fmt: skip
            every, inputs = typical(p.saved for p in rows), typical(p.output for p in rows)
            products = typical(sum(size * p.groups * p.rows * p.columns for p in piece.products) for piece in rows)
            share = keep_share(layout.recompute)
            kept = float(layout.recompute != "full") if share is None else share
            stays = min(every, products + inputs) if layout.recompute == "selective" else kept * every
            stays += (1 - kept) * inputs
            again = max(piece.saved for piece in rows) if layout.recompute != "none" else 0.0
            stream = max(piece.output for piece in (*first, *rows))
            logits = sum(piece.saved for piece in last)
            self._held[key] = Held(
                weights=weights, habit=self.work.habit, size=size, stays=stays, again=again, logits=logits,
                stream=stream, passed=stream, kept=kept, table=weights.first,
            )  # fmt: skip
        return self._held[key]

    def data(self, layout: Layout, own: float, experts: float, last_pass: float) -> float:
        seconds = super().data(layout, own, experts, last_pass)
        tables = self.model.tables
        if tables is None:
            return seconds
        samples = self.work.samples / layout.data
        there = samples * tables.sums / HOST_LINK + self.machine.exchange(samples * tables.sums, layout.data, 1)
        # Rows are read for the forward, read and written for the update.
        return seconds + 2 * there + 3 * samples * tables.rows / HOST_ROWS


# The lists


def resnet(model: ResNet, size: int, samples: int) -> Iterator[Piece]:
    """The stride of a bottleneck is in its 3 x 3 convolution."""
    imagenet = model.stem == "imagenet"
    side = -(-model.image // 2) if imagenet else model.image
    pixels = samples * 3 * model.image**2
    stem = _convolution(size, samples, side, 3, model.width, 7 if imagenet else 3, pixels)
    if imagenet:
        side = -(-side // 2)
        pooled = size * samples * model.width * side**2
        # Places of maxima.
        yield _block("stem", [stem], pooled, stem.output + 8 * pooled // size, stem.output + pooled, 1)
    else:
        yield _block("stem", [stem], stem.output, 0, 0, 0)
    for number, (wide, inner, stride) in enumerate(shapes(model)):
        inputs, before, side = samples * wide * side**2, side, -(-side // stride)
        if model.deep:
            rows = [
                _convolution(size, samples, before, wide, inner, 1, inputs),
                _convolution(size, samples, side, inner, inner, 3, samples * inner * before**2),
                _convolution(size, samples, side, inner, 4 * inner, 1, samples * inner * side**2, relu=False),
            ]
        else:
            rows = [
                _convolution(size, samples, side, wide, inner, 3, inputs),
                _convolution(size, samples, side, inner, inner, 3, samples * inner * side**2, relu=False),
            ]
        wide_out = inner * (4 if model.deep else 1)
        if stride > 1 or wide != wide_out:
            rows.append(_convolution(size, samples, side, wide, wide_out, 1, 0, relu=False))  # of the same input
        out = size * samples * wide_out * side**2
        # The sum of both ways, and an activation in place, whose output the next block keeps.
        yield _block(f"block{number}", rows, out, 0, 5 * out, 2)
    wide = 8 * model.width * (4 if model.deep else 1)
    weights = (wide + 1) * model.classes
    yield Piece(
        name="head", parameters=weights, parameter_bytes=weights * size, output=samples * model.classes * size,
        saved=samples * wide * size, moved=size * samples * wide * (side**2 + 1), calls=2,
        products=(Product(samples, wide, model.classes),),
    )  # fmt: skip


def _convolution(
    size: int, samples: int, side: int, inner: int, outer: int, window: int, kept: int, relu: bool = True
) -> Piece:
    """A convolution with `side` x `side` outputs, its norm, and an activation in place. The convolution keeps `kept`
    numbers, the norm what it reads and two numbers a channel."""
    out = size * samples * outer * side**2
    weights = inner * outer * window**2 + 2 * outer
    product = Product(samples * side**2, inner * window**2, outer, 1, window**2)
    return Piece(
        name="", parameters=weights, parameter_bytes=weights * size, output=out, saved=kept * size + out,
        moved=(4 if relu else 2) * out, calls=3 if relu else 2, products=(product,),
    )  # fmt: skip


def _block(name: str, rows: list[Piece], output: int, saved: int, moved: int, calls: int) -> Piece:
    return Piece(
        name=name, parameters=sum(p.parameters for p in rows), parameter_bytes=sum(p.parameter_bytes for p in rows),
        output=output, saved=saved + sum(p.saved for p in rows), moved=moved + sum(p.moved for p in rows),
        calls=calls + sum(p.calls for p in rows), products=tuple(q for p in rows for q in p.products),
        attention=tuple(q for p in rows for q in p.attention), summed=sum(p.summed for p in rows),
    )  # fmt: skip


def t5(model: T5, size: int, samples: int, tensor: int = 1) -> Iterator[Piece]:
    """Pre-norm blocks without biases; the position's bias is added inside of a fused attention. Over tensor ranks are
    cut: heads, hidden features, words, and between the cut products the positions."""
    read, made = samples * model.sequence, samples * model.targets
    table = model.vocab * model.width // tensor
    stream = (read + made) * model.width * size
    yield Piece(name="embed", parameters=table, parameter_bytes=table * size, output=stream // tensor, calls=2,
                saved=(read + made) * 8, moved=2 * stream // tensor, summed=stream / 2)  # fmt: skip
    for place in range(model.layers):
        parts = [_attend(model, size, read, read, samples, tensor, False), _feed(model, size, read, tensor)]
        yield _block(f"encoder{place}", parts, read * model.width * size // tensor, 0, 0, 0)
    for place in range(model.layers):
        own = _attend(model, size, made, made, samples, tensor, True)
        parts = [own, _attend(model, size, made, read, samples, tensor, False), _feed(model, size, made, tensor)]
        yield _block(f"decoder{place}", parts, made * model.width * size // tensor, 0, 0, 0)
    logits = made * model.vocab // tensor
    weights = 0 if model.tied else table
    # The loss in 32 bits: logits are widened, normalised, gathered from.
    yield Piece(
        name="head", parameters=weights, parameter_bytes=weights * size, output=4,
        saved=made * model.width * size + 8 * logits, moved=logits * (size + 12), calls=6,
        products=(Product(made, model.width, -(-model.vocab // tensor)),), summed=made * model.width * size / 2,
    )  # fmt: skip


def _attend(model: T5, size: int, queries: int, keys: int, samples: int, tensor: int, causal: bool) -> Piece:
    width, head = model.width, model.head_size
    wide = model.heads * head // tensor
    products = Product(queries, width, wide), Product(keys, width, 2 * wide), Product(queries, wide, width)
    heads = samples * model.heads // tensor
    square = Attention(heads, queries // samples, keys // samples, head, head, causal)
    weights = 4 * width * wide + width
    stream, inside = queries * width // tensor, (2 * queries + 2 * keys) * wide
    return Piece(
        name="", parameters=weights, parameter_bytes=weights * size, output=stream * size,
        saved=size * (2 * stream + inside), moved=size * (6 * stream + inside), calls=8, products=products,
        attention=(square,), summed=size * width * (queries + keys * (keys != queries) / 2),
    )  # fmt: skip


def _feed(model: T5, size: int, tokens: int, tensor: int) -> Piece:
    gates = 2 if model.activation == "geglu" else 1
    width, ffn = model.width, model.ffn // tensor
    weights = (gates + 1) * width * ffn + width
    stream, hidden = tokens * width // tensor, tokens * ffn
    return Piece(
        name="", parameters=weights, parameter_bytes=weights * size, output=stream * size,
        saved=size * (2 * stream + (2 * gates) * hidden), moved=size * (6 * stream + (1 + 2 * gates) * hidden),
        calls=5 + gates, products=(Product(tokens, width, gates * ffn), Product(tokens, ffn, width)),
        summed=size * width * tokens,
    )  # fmt: skip


def dlrm(model: DLRM, size: int, samples: int) -> Iterator[Piece]:
    """The part on the device: two rows of products, and between them the products of all pairs of rows."""
    many = model.tables + 1
    met = model.width + many * (many - 1) // 2
    rows = samples * many * model.width * size
    yield from _row("bottom", size, samples, (model.features, *model.bottom, model.width))
    yield Piece(
        name="meet", parameters=0, parameter_bytes=0, output=samples * met * size, saved=rows,
        moved=2 * rows + 2 * samples * met * size, calls=3, products=(Product(many, model.width, many, samples),),
    )  # fmt: skip
    yield from _row("top", size, samples, (met, *model.top, 1))


def _row(name: str, size: int, samples: int, sides: tuple[int, ...]) -> Iterator[Piece]:
    """Products with a bias, each with an activation behind it; both keep what they read."""
    for place, (inner, outer) in enumerate(pairwise(sides)):
        weights, out = (inner + 1) * outer, samples * outer * size
        yield Piece(
            name=f"{name}{place}", parameters=weights, parameter_bytes=weights * size, output=out, moved=2 * out,
            saved=samples * inner * size + out, calls=2, products=(Product(samples, inner, outer),),
        )  # fmt: skip
