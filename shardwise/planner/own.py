"""What our own engine makes of a layout: its stages and weights, exactly, and from them the memory of each rank.

Foreign frameworks are described by a `Habit` (`shardwise.planner.memory`). Our engine can be asked: parameters are
those of the model's chain, stages are cut by the same `cut_stages` as in training, and what forwards keep was read off
dry runs, against which tests hold the sums.

A rank's memory is the largest of a few moments: a block's backward (with what is computed again), the loss, the
gradient of the embedding, the update; each at every fullest point of the schedule (`flights`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch

from shardwise.kinds import Model
from shardwise.layout import Layout, keep_share
from shardwise.models.gpt import cost, gpt
from shardwise.models.loss import rows_at_once
from shardwise.parallel.balance import cut_stages
from shardwise.parallel.data import BUCKET
from shardwise.parallel.tensor import divides
from shardwise.planner.memory import Habit, Memory, Part


class Parameter(NamedTuple):
    """One parameter on the first rank of the tensor axis."""

    name: str
    rows: int
    columns: int
    cut: bool
    """Over the tensor axis."""

    @property
    def numbers(self) -> int:
        return self.rows * self.columns

    def piece(self, shard: int) -> int:
        """Numbers of the largest of `shard` pieces; the others are padded to it where they travel."""
        return ceil(self.rows / shard) * self.columns


class Own:
    """One job's model in our engine."""

    def __init__(self, model: Model, precision: str, compiled: bool = False):
        """`compiled`: blocks keep for the backward what a compiler leaves of it."""
        self.model, self.compiled = model, compiled
        self.size = {"float64": 8, "float32": 4}.get(precision, 2)
        self.wide = max(4, self.size)
        self.costs = tuple(cost(model))
        with torch.device("meta"):
            self._chain = gpt(model.model_copy(update={"layers": 1}), 0)
        self._pieces: dict[int, dict[str, tuple[Parameter, ...]]] = {}
        self._stages: dict[tuple[int, tuple[int, ...]], tuple[Part, ...]] = {}
        self._sizes: dict[int, tuple[int, int, int]] = {}
        self._kept: dict[tuple[object, ...], Kept] = {}

    @property
    def mixed(self) -> bool:
        return self.size != self.wide

    def stages(self, layout: Layout) -> tuple[Part, ...]:
        """As training cuts them."""
        key = layout.stage_count, layout.stages
        if key not in self._stages:
            last = len(self.costs) - 1
            spans = cut_stages(layout, self.costs)
            self._stages[key] = tuple(Part(b - a - (a == 0) - (b > last), a == 0, b > last) for a, b in spans)
        return self._stages[key]

    def pieces(self, tensor: int) -> dict[str, tuple[Parameter, ...]]:
        """Parameters of `embed`, `block` and `head`, in the chain's order; tied ones in both ends."""
        if tensor not in self._pieces:
            found: dict[str, list[Parameter]] = {"embed": [], "block": [], "head": []}
            for name, weight in self._chain.named_parameters(remove_duplicate=False):
                cut = self._chain.rules.cut_of(name)
                rows, columns = weight.shape[0], weight[0].numel()
                whole = cut is None or tensor == 1 or not divides(cut, weight.shape, tensor)
                if not whole and cut is not None:
                    rows, columns = (ceil(rows / tensor), columns) if cut.dim == 0 else (rows, ceil(columns / tensor))
                found[name.partition(".")[0].rstrip("0")].append(Parameter(name, rows, columns, not whole))
            self._pieces[tensor] = {piece: tuple(rows) for piece, rows in found.items()}
        return self._pieces[tensor]

    def parameters(self, layout: Layout, part: Part) -> Iterator[Parameter]:
        """Of one stage, each once."""
        pieces = self.pieces(layout.tensor)
        if part.first:
            yield from pieces["embed"]
        for _ in range(part.blocks):
            yield from pieces["block"]
        if part.last:
            tied = self._chain.rules.ties and part.first
            yield from (each for each in pieces["head"] if not (tied and each.name == self._chain.rules.ties[0][0]))

    def kept(self, layout: Layout) -> Kept:
        key = layout.tensor, layout.context, layout.micro_batch, layout.split_backward
        if key not in self._kept:
            self._kept[key] = Kept.of(self, layout)
        return self._kept[key]

    def least(self, layout: Layout, parts: Sequence[Part], micro_batches: int, state: float) -> float:
        """Bytes that the fullest of some ranks holds at least: weights, gradients, optimizer states, and, if there are
        more to come, what the blocks keep of one micro-batch. `state`: bytes of states per weight."""
        (embed, block, head), k = self.sizes(layout.tensor), self.kept(layout)
        whole = 2 if layout.zero == 1 or layout.shard == 1 else 0  # weights and gradients that are not cut
        each = self.wide * whole + (self.wide * (2 - whole) + state) / (layout.shard * layout.context)
        stays = {"none": k.every, "selective": k.selective}.get(layout.recompute, k.stream)
        kept = block * each + (stays if micro_batches > 1 and layout.context == layout.expert == 1 else 0.0)
        return max([n * kept + each * ((embed if a else 0) + (head if b else 0)) for n, a, b in parts])

    def sizes(self, tensor: int) -> tuple[int, int, int]:
        """Numbers of the embedding, of a block, and of the head without what it may share."""
        if tensor not in self._sizes:
            tied = self._chain.rules.ties[0][0] if self._chain.rules.ties else ""
            embed, block, head = (
                sum(each.numbers for each in rows if each.name != tied) for rows in self.pieces(tensor).values()
            )
            self._sizes[tensor] = embed, block, head
        return self._sizes[tensor]

    def memory(
        self, layout: Layout, rank: int, micro_batches: int, habit: Habit, points: tuple[Flight, ...] | None = None
    ) -> Memory:
        """Of a pipeline rank at its fullest moment. `points`: the fullest ones of an order that has no name."""
        points = points or flights(layout, rank, micro_batches)
        stages = self.stages(layout)
        parts = [stages[stage] for stage in layout.stages_of(rank)]
        k, s, w = self.kept(layout), self.size, self.wide
        fsdp, three = layout.shard > 1 and layout.zero > 1, layout.shard > 1 and layout.zero == 3
        both = any(p.first and p.last for p in parts)
        own = sum(p.blocks * k.block + p.first * k.embed + p.last * (k.head - both * k.tied) for p in parts)
        cut = own / layout.shard
        weights, gradients = float(w * own), w * (cut if fsdp else own)
        if self.alone(layout):
            weights, gradients = float((w + s) * own), float((s if micro_batches == 1 else w) * own)
        if fsdp:
            weights = w * cut + (0 if three else s * own)
        state = habit.state * cut
        buffers = self.neighbours(layout, rank) * k.stream * micro_batches + 16 * k.samples * micro_batches
        moments = _Moments(self, k, layout, parts)
        held = max(moments.all(points))
        biggest = max(k.largest, min(own, BUCKET / w))
        update = 0.0 if fsdp or layout.data == 1 else w * biggest * (1 + 1 / layout.shard)
        buckets = layout.replicate == layout.world > 1  # of DDP: gradients have their place from the begin
        if not buckets and points[0][0] == (micro_batches,):
            # All are in flight before there are gradients: these come as the first activations go.
            later = max(moments.all(points, fewer=1), default=0.0)
            if parts[0].first:
                first = moments.embed() - w * k.embed / (layout.shard if fsdp else 1)  # nothing to be added to as yet
                later = max(later, first + (micro_batches - 1) * moments.live(parts[0]))
            if held > gradients + max(later, update):
                gradients = 0.0
            else:
                held = later
        activations = max(held, update)
        subtotal = weights + gradients + state + activations + buffers
        return Memory(weights, gradients, state, activations, buffers, habit.spare * subtotal + habit.fixed)

    def compiles(self, layout: Layout) -> bool:
        """Whether a layout's blocks are compiled."""
        return self.compiled and not layout.split_backward

    def alone(self, layout: Layout) -> bool:
        """Whether weights are kept twice, and rounded once a step."""
        return self.mixed and layout.world == 1

    def neighbours(self, layout: Layout, rank: int) -> int:
        """Stages next to a rank's own and on other ranks: PyTorch's have a buffer for each and every micro-batch."""
        stages, last = layout.stages_of(rank), layout.stage_count - 1
        if layout.pipeline == 1:
            return 0
        local = 2 * (stages[-1] - stages[0] == 1)  # at the turn of a V
        return 2 * len(stages) - (stages[0] == 0) - (stages[-1] == last) - local


class Kept(NamedTuple):
    """Numbers of weights and bytes of activations of one micro-batch on one rank."""

    embed: int
    block: int
    head: int
    tied: int
    """Numbers that embedding and head share."""
    largest: int
    """Numbers of the largest parameter."""
    table: int
    """Numbers of the projection."""
    product: int
    """Numbers of the largest product's weights in a block."""
    stream: float
    """Bytes between two pieces, cut along the sequence."""
    whole: float
    """The same, gathered."""
    hidden: float
    """Bytes of one map of the feed-forward part."""
    every: float
    """Bytes that a block keeps where nothing is computed again."""
    selective: float
    shared: float
    """Bytes that are in both."""
    waiting: float
    """Bytes of gradients that a block keeps between the halves of a backward."""
    logits: float
    """Bytes of all logits, widened."""
    samples: float
    """Tokens of a micro-batch."""

    @classmethod
    def of(cls, own: Own, layout: Layout) -> Kept:
        m, s, t = own.model, own.size, layout.tensor
        pieces = own.pieces(t)
        tokens = layout.micro_batch * m.sequence / layout.context
        whole = s * tokens * m.width
        x = whole / t
        query, kv = s * tokens * m.heads * m.head_size / t, s * tokens * 2 * m.kv_heads * m.head_size / t
        sums = own.wide * tokens * m.heads / t  # of each row of scores
        hidden, maps = s * tokens * m.ffn / t, 2 if m.activation == "swiglu" else 1
        shared = x + 2 * query + kv + sums + maps * hidden
        # Queries and keys that are turned are copies, and attention's result then is laid out by head: one more copy.
        turned = 2 * query + kv / 2 + 4 * own.wide * m.sequence * m.head_size / 2 if m.positions == "rotary" else 0.0
        gathered = 2 * whole if t > 1 else 0.0
        sizes = {piece: sum(each.numbers for each in rows) for piece, rows in pieces.items()}
        table = next(each.numbers for each in pieces["head"] if each.name.endswith("project.weight"))
        every = shared + x + 2 * whole + turned + (2 if maps == 2 else 1) * hidden
        if own.compiles(layout):
            # The block's input, what attention added to it, one norm; products' inputs that are gathered.
            every = shared + 2 * x + (2 * whole - x if t > 1 else 0.0)
        return cls(
            sizes["embed"], sizes["block"], sizes["head"], table if m.tied else 0,
            largest=max(each.numbers for rows in pieces.values() for each in rows), table=table,
            product=max(each.numbers for each in pieces["block"]), stream=x, whole=whole, hidden=hidden,
            every=every,
            selective=shared + 2 * whole + (gathered + 2 * x if t > 1 else 0.0), shared=shared + gathered,
            waiting=maps * hidden + query + kv + 2 * whole + 4 * x, logits=own.wide * tokens * m.vocab / t,
            samples=layout.micro_batch * m.sequence,
        )  # fmt: skip


class _Moments:
    """Bytes beyond what a rank always holds, at the moments that can be its fullest."""

    def __init__(self, own: Own, k: Kept, layout: Layout, parts: list[Part]):
        self.own, self.k, self.layout, self.parts = own, k, layout, parts
        s, w = own.size, own.wide
        self.fsdp, self.three = layout.shard > 1 and layout.zero > 1, layout.shard > 1 and layout.zero == 3
        self.alone = own.alone(layout)
        # Bytes of a weight's rounded copy, made for each use; of its gradient, beside the one that is kept.
        self.rounded = s if own.mixed and not self.fsdp and not self.alone else 0
        self.made = w if not own.mixed else s if self.alone else s + w
        share = keep_share(layout.recompute)
        self.share = float(layout.recompute == "none") if share is None else share
        self.stays = k.selective if layout.recompute == "selective" else k.stream
        shared = k.shared if layout.recompute == "selective" else k.stream
        self.again = max(0.0, k.every - shared) + self.rounded * k.block
        # FSDP: a block's weights and the next one's; while the gradients of the one before are being summed.
        self.gathered = 2 * s * k.block if self.three else 0.0
        self.sums = 0.0
        if self.fsdp:
            self.sums = w * k.block + max(w / layout.shard, s if self.three else 0) * k.block + self.gathered / 2
            self.sums -= k.every if self.share else self.stays

    def all(self, points: tuple[Flight, ...], fewer: int = 0) -> Iterator[float]:
        k, s, w = self.k, self.own.size, self.own.wide
        lives, halves = [self.live(part) for part in self.parts], [self.half(part) for part in self.parts]
        block = (self.again if self.share < 1 else 0.0) + k.hidden + s * k.product
        if self.own.compiles(self.layout):
            # What is cheap is computed again: the hidden map; and the gradients of its parts lie side by side.
            block += (2 if self.own.model.activation == "swiglu" else 1) * k.hidden
        # By stage, what its backward needs at most.
        more = []
        for part in self.parts:
            beside = max(self.gathered, self.sums) if part.blocks > 1 else self.gathered
            more.append(max(block + beside if part.blocks else 0.0, self.loss() if part.last else 0.0))
        for live, waiting in points:
            live = tuple(n - fewer for n in live)
            held = sum([n * size for n, size in zip(live, lives)])
            if any(waiting):
                held += sum([n * size for n, size in zip(waiting, halves)])
                yield held + (s + 2 * w if self.own.mixed else w) * k.product
            yield held + max([size if n else 0.0 for n, size in zip(live, more)])
            if live[-1] and self.parts[-1].last and self.layout.pipeline > 1:
                yield held + self.after_loss(lives[-1])
            if live[0] and self.parts[0].first:
                yield held - lives[0] + self.embed()

    def live(self, part: Part) -> float:
        """Of a micro-batch whose backward is still to come."""
        k = self.k
        whole = int(part.blocks * self.share)
        held = whole * (k.every + self.rounded * k.block) + (part.blocks - whole) * self.stays
        if part.last and self.layout.pipeline == 1:
            held += k.stream + k.whole + self.own.wide * k.table  # gradients of what entered and of the weights
        elif part.last:
            held += k.logits * self.own.size / self.own.wide + k.stream + k.whole + self.rounded * k.table
        if self.layout.pipeline > 1:
            # What enters lies in a buffer, what leaves is kept until the backward.
            held += (not part.last) * k.stream - (not part.first and part.blocks > 0) * k.stream
        return held

    def half(self, part: Part) -> float:
        """Of a micro-batch of which only the weight half is still to come: all that was computed again, too."""
        k = self.k
        if part.first:
            return self.live(part)  # it has no gradient of its input to make: its weight half does all
        held = part.blocks * (k.every + self.rounded * k.block + k.waiting)
        if part.last:
            held += k.logits * self.own.size / self.own.wide + 2 * k.whole + k.stream + self.rounded * k.table
        return held

    def loss(self) -> float:
        """Of the backward of the loss, beyond what its forward keeps; weights as FSDP gathers them."""
        k, s, w = self.k, self.own.size, self.own.wide
        more = s * (k.head + k.block) if self.three else 0.0
        if self.layout.pipeline == 1:
            chunk = min(1.0, rows_at_once(self.own.model.vocab) * self.layout.tensor / k.samples)
            logits = chunk * k.logits * (s / w + (1 if self.own.mixed and self.layout.tensor > 1 else 0))
            logits += k.whole + (self.rounded if self.own.mixed else w) * k.table
            return max(logits, (s if self.fsdp and self.own.mixed else self.made) * k.table) + more
        # Widened for a softmax over ranks; the gradient times its factor; that of the weights.
        widened = k.logits if self.own.mixed and self.layout.tensor > 1 else 0.0
        scaled = k.logits * s / w
        product = s * k.table + (scaled if self.layout.split_backward else 0.0)
        return max(widened, scaled, product) + more

    def after_loss(self, live: float) -> float:
        """Of the gradient of the projection on its way to where it is kept, in a pipeline: the logits are gone by then,
        and with FSDP all that its micro-batch, which held `live`, kept."""
        k, s, w = self.k, self.own.size, self.own.wide
        if self.fsdp:
            return (self.made + w / self.layout.shard) * k.table - live
        return self.made * k.table - k.logits * s / w - self.rounded * k.table

    def embed(self) -> float:
        """Of the gradient of the embedding: as it is made, as it is added."""
        k, s, w = self.k, self.own.size, self.own.wide
        if self.fsdp:
            return (s + w + w / self.layout.shard) * k.embed
        return self.made * (k.embed - self._positions())

    def _positions(self) -> int:
        return sum(each.numbers for each in self.own.pieces(self.layout.tensor)["embed"][1:])


Flight = tuple[tuple[int, ...], tuple[int, ...]]
"""By stage of a rank: micro-batches before their backward; between its two halves."""


def flights(layout: Layout, rank: int, micro_batches: int) -> tuple[Flight, ...]:
    """The fullest points of a schedule, as far as they are not between two others."""
    return _flights(layout.schedule, layout.pipeline, layout.stages_per_rank, rank, micro_batches)


@lru_cache(maxsize=4096)
def _flights(schedule: str, p: int, v: int, r: int, m: int) -> tuple[Flight, ...]:
    none = (0,) * v
    if p == 1:
        return (((1,), (0,)),)
    if schedule == "gpipe":
        return (((m,), none),)
    if schedule == "1f1b":
        return (((min(m, p - r),), none),)
    if schedule == "interleaved":
        return tuple((live, none) for live in _interleaved(p, v, r, m))
    if schedule == "zero-bubble":
        return tuple(_zero_bubble(p, v, r, m))
    found: list[Flight] = []
    full = ((2 * p - 1 - r, r + 1), (2 * p - r, r)) if schedule == "zbv" else ((2 * p - r, r + 1),)
    for first, last in full:
        found.append(((min(m, first), min(m, last)), none))
    ends = (r + 1, r) if schedule == "zbv" else ((r + 2) // 2, (r + 1) // 2)
    found.append(((min(m, p - 1 - r), 0), (min(m, ends[0]), min(m, ends[1]))))
    found.append(((min(m, 2 * p - 1 - r), min(m, r)), (0, 1)))
    return tuple(found)


def _round(p: int, m: int) -> int:
    return m // max(1, m // p)


def _interleaved(p: int, v: int, r: int, m: int) -> Iterator[tuple[int, ...]]:
    """Forwards go through the stages in rounds; each, once as many are ahead as the warm-up has, follows a backward,
    which go through them in rounds the other way."""
    size, total = _round(p, m), m * v
    ahead = min(total, (p - 1 - r) * 2 + (v - 1) * size)
    live = [0] * v
    found: set[tuple[int, ...]] = set()
    for step in range(min(total, ahead + 2 * size * v)):
        live[step // size % v] += 1
        if step >= ahead:
            if {step % size, (step - ahead) % size} & {0, size - 1}:  # between these, it changes evenly
                found.add(tuple(live))
            live[v - 1 - (step - ahead) // size % v] -= 1
    found.add(tuple(live))
    for one in found:
        if not any(other != one and all(a >= b for a, b in zip(other, one)) for other in found):
            yield one


def _zero_bubble(p: int, v: int, r: int, m: int) -> Iterator[Flight]:
    """Every rank has as many in flight; the later it is, the more of them only wait for their weight half."""
    size = _round(p, m)
    for more in {0, size if m > size and v > 1 else 0}:
        live = [size] * v
        live[0], live[-1] = live[0] + more, live[-1] - more
        if v == 1:
            live = [size]
        for wait in (min(r, m), min(r + 1, m)):
            for order in {tuple(range(v)), tuple(reversed(range(v)))}:
                left, rest, waiting = wait, list(live), [0] * v
                for stage in order:
                    taken = min(left, rest[stage])
                    left, rest[stage], waiting[stage] = left - taken, rest[stage] - taken, taken
                yield tuple(rest), tuple(waiting)
