"""Seconds of each piece of a model on one rank: products by shape, attention, memory traffic, collectives.

A piece is the embedding, a block, or the head. Its cost depends on how many samples it sees at once, on the degrees
that cut it and on the device, not on the pipeline or on the other pieces.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import ceil, inf

from shardwise.cluster import Cluster
from shardwise.planner.efficiency import Efficiency
from shardwise.planner.shape import Shape

NARROW = ("fp8", "fp4")
RAGGED_HEADS = 8.0  # times as long, batched products of heads whose size is no multiple of 8; from published runs
TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))  # sides, and rate against the largest
HEAD = 60  # kernels of norm, logits and loss in PyTorch's own operators, one way
ENQUEUED = 5  # kernels that the host could start in the time it takes to start one collective
SHORTEST = 4e-6  # seconds of the shortest kernel
FUSED_LOSS = 16.0  # bytes moved per logit in forward and backward of a fused loss


@dataclass(frozen=True)
class Setting:
    """How a model is computed, beyond its layout."""

    precision: str
    """Of the products; accumulation and norms are wider."""
    fused: bool = True
    """Whether attention never writes its square of scores to memory."""
    older: bool = False
    """Whether that attention is FlashAttention 2 or before."""
    eager: bool = False
    """Whether operators between the products are PyTorch's own, started one by one."""
    loss: float | None = FUSED_LOSS
    """Bytes moved per logit in forward and backward of the loss; None: as many as PyTorch's own operators move."""
    overlapped: bool = True
    """Whether gradient sums and tensor traffic hide behind computation."""

    @property
    def bytes(self) -> int:
        """Of one number of an activation."""
        return {"float64": 8, "float32": 4}.get(self.precision, 2)


@dataclass(frozen=True)
class Cut:
    """How a piece is cut, and how many samples it sees at once."""

    tensor: int
    context: int
    expert: int
    micro_batch: int
    expert_tensor: int = 1
    """The part of the tensor axis that cuts each expert; the rest of it works on other tokens."""
    sequence_parallel: bool = True
    """Whether what lies between the cut products is cut along the sequence over the tensor axis."""


@dataclass(frozen=True)
class Seconds:
    """One pass of one micro-batch through one piece on one rank."""

    forward: float = 0.0
    backward: float = 0.0
    """Both halves, without anything computed again."""
    weight: float = 0.0
    """The part of `backward` that makes weight gradients."""
    core: float = 0.0
    """The part of `forward` that selective recomputation runs again."""
    tensor: float = 0.0
    """Exposed traffic of the tensor axis in a forward; a backward has as much."""
    context: float = 0.0
    expert: float = 0.0
    moved: float = 0.0
    """Bytes that a forward's other operators move; a backward moves twice as many."""
    host: float = 0.0
    """Seconds of the host to start a forward's kernels; a backward has twice as many."""

    @property
    def traffic(self) -> float:
        return self.tensor + self.context + self.expert

    @property
    def both(self) -> float:
        """Forward and backward with their traffic."""
        return self.forward + self.backward + 2 * self.traffic

    def mixed(self, other: Seconds, share: float) -> Seconds:
        """The mean of both, with `share` of the other."""
        if share in (0.0, 1.0):
            return other if share else self
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Seconds(*((1.0 - share) * mine + share * its for mine, its in pairs))


class Machine:
    """A cluster with its efficiencies: what one operator takes."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency):
        self.cluster, self.device, self.efficiency = cluster, cluster.device, efficiency

    def product(self, m: float, k: float, n: float, precision: str, groups: float = 1.0, moved: float = 0.0) -> float:
        """Seconds of `groups` products side by side, of (m x k) and (k x n) each; `moved`: bytes, if not theirs."""
        if not (m and k and n):
            return 0.0
        e = self.efficiency
        narrow = precision in NARROW and self.device.rate(precision) > self.device.rate("bf16")
        share = (e.narrow if narrow else e.product) * k / (k + e.depth * (2 if narrow else 1))
        share *= max(self.filled(m, n, groups, *tile) for tile in TILES)
        if k % 8 or n % 8:
            share *= e.odd
        elif k % 64 or n % 64:
            share *= e.ragged
        if groups > 1:
            share *= e.grouped
        size = 1 if narrow else {"float64": 8, "float32": 4}.get(precision, 2)
        moved = moved or groups * (m * k + k * n + m * n) * size
        return max(2.0 * groups * m * k * n / (self.device.rate(precision) * share), self.move(moved))

    def filled(self, m: float, n: float, groups: float, high: int, wide: int, rate: float) -> float:
        """What tiles of one size make of a product: their own rate, less what the last wave and the edges waste."""
        waves = ceil(m / high) * ceil(n / wide) * groups / self.device.units
        used = groups * m * n / (ceil(waves) * self.device.units * high * wide)
        return rate * (1.0 - self.efficiency.wave * (1.0 - used))

    def felt(self, device: float, host: float) -> float:
        """Seconds of a pass: the device's or the host's, whichever is longer, and more where both are about alike, as
        each waits for the other in parts of it."""
        if not host:
            return device
        power = self.efficiency.apart
        return (device**power + host**power) ** (1.0 / power)

    def linear(self, m: float, k: float, n: float, precision: str, groups: float = 1.0) -> tuple[float, float, float]:
        """Seconds of a layer's product, and of those for the gradients of its input and of its weights."""
        sides = (m, k, n), (m, n, k), (k, m, n)
        own, back, gradient = (self.product(*three, precision, groups) for three in sides)
        return own, back, gradient

    def move(self, size: float) -> float:
        """Seconds to read or write so many bytes of device memory."""
        return max(size / (self.device.bandwidth * self.efficiency.memory), SHORTEST)

    def stream(self, size: float) -> float:
        """Seconds to move so many bytes in one large operator."""
        return max(size / (self.device.bandwidth * (self.efficiency.bulk or self.efficiency.memory)), SHORTEST)

    def bandwidth(self, ranks: int, stride: int) -> float:
        """What one rank of a group sees; `stride` devices lie between neighbours."""
        c, e = self.cluster, self.efficiency
        inner = c.inner.bandwidth * e.inner
        if ranks * stride <= c.domain:
            dims = int(c.topology[-1]) if c.topology.startswith("torus") else 1
            return inner / dims if ranks <= 16 else inner  # along one side of a torus, the links of that side only
        together = max(1, c.domain // stride)  # ranks of the group in one domain, each with a port of its own
        return min(inner, together * c.outer.bandwidth * e.outer)

    def gather(self, whole: float, ranks: int, stride: int, bucket: float = inf) -> float:
        """All-gather or reduce-scatter of `whole` bytes in all, in pieces of at most `bucket`."""
        if ranks == 1 or not whole:
            return 0.0
        c = self.cluster
        domains = max(1, ranks * stride // c.domain)
        hops = (ranks - domains) * c.inner.latency + (domains - 1) * c.outer.latency  # once around the ring
        sent = whole * (ranks - 1) / ranks
        once = self.efficiency.start + self.efficiency.latency * hops
        return sent / self.bandwidth(ranks, stride) + once * max(1, ceil(whole / bucket))

    def reduce(self, whole: float, ranks: int, stride: int, bucket: float = inf) -> float:
        """All-reduce."""
        return 2.0 * self.gather(whole, ranks, stride, bucket)

    def exchange(self, whole: float, ranks: int, stride: int) -> float:
        """All-to-all: each rank sends `whole` bytes in all."""
        if ranks == 1:
            return 0.0
        c, e = self.cluster, self.efficiency
        inside = min(ranks, max(1, c.domain // stride))
        near = whole * (inside - 1) / ranks / (c.inner.bandwidth * e.inner)
        far = whole * (ranks - inside) / ranks / (c.outer.bandwidth * e.outer * e.scattered)
        return max(near, far) + c.inner.latency * 2 + (c.outer.latency if far else 0.0)

    def transfer(self, size: float, stride: int) -> float:
        """Point to point between neighbours `stride` devices apart."""
        c, e = self.cluster, self.efficiency
        if stride < c.domain:
            return size / (c.inner.bandwidth * e.inner) + c.inner.latency
        return size / (c.outer.bandwidth * e.outer) + c.outer.latency


def block(machine: Machine, shape: Shape, setting: Setting, cut: Cut, sparse: bool) -> Seconds:
    e, size, precision = machine.efficiency, setting.bytes, setting.precision
    t, c = cut.tensor, cut.context
    tokens = cut.micro_batch * shape.sequence / c
    alone = tokens / (t if cut.sequence_parallel else 1)  # tokens of a rank between the cut products
    forward = backward = weight = 0.0
    products = [(k, n // t if cut_out else n) if i < len(shape.projections) - 1 else (k // t, n)
                for i, (k, n, cut_out) in enumerate(shape.projections)]  # fmt: skip
    hidden = shape.shared_ffn if sparse else shape.ffn
    if hidden:
        products += [(shape.width, (shape.matrices - 1) * hidden // t), (hidden // t, shape.width)]
    for k, n in products:
        own, back, gradient = machine.linear(tokens, k, n, precision)
        forward, backward, weight = forward + own, backward + back + gradient, weight + gradient
    core, core_backward = attention(machine, shape, setting, cut)
    forward, backward = forward + core, backward + core_backward
    # Norms, residual sums, dropout, rotary: numbers of the stream; activation: numbers of the hidden part.
    moved = size * (12 * alone * shape.width + 3 * tokens * (shape.query + 2 * shape.kv_heads * shape.head_size) / t)
    moved += size * tokens * hidden / t * (shape.matrices + 1)
    if precision in NARROW:
        moved += tokens * (4 * shape.width + 2 * (shape.attended + hidden) / t)
    steady = machine.move(moved)
    forward, backward = forward + steady, backward + 2 * steady
    kernels = 60.0 if _whole_softmax(shape, cut) else 80.0
    if setting.fused:
        kernels = 24.0 - (8 if shape.positions else 0) - (0 if shape.gated else 2)  # without rotation, without gate
        kernels *= e.eager if setting.eager else 1.0
    expert = 0.0
    if sparse:
        used = tokens * shape.chosen / t
        per_rank = shape.experts / cut.expert
        each = used * cut.expert_tensor * cut.expert / shape.experts
        inner = shape.expert_ffn // cut.expert_tensor
        for k, n in ((shape.width, (shape.matrices - 1) * inner), (inner, shape.width)):
            own, back, gradient = machine.linear(each, k, n, precision, per_rank)
            forward, backward, weight = forward + own, backward + back + gradient, weight + gradient
        spread = size * used * (6 * shape.width + (shape.matrices + 1) * shape.expert_ffn)
        forward, backward = forward + machine.move(spread), backward + 2 * machine.move(spread)
        moved += spread
        expert = 2 * machine.exchange(size * used * shape.width, cut.expert, t if cut.expert > 1 else 1)
        expert *= 1.0 - e.hidden_expert
        kernels += e.routing
    tensor = 0.0
    if t > 1:
        kernels += 2 * ENQUEUED
        tensor = 2 * machine.reduce(size * tokens * shape.width, t, 1)
        tensor = tensor * (1.0 - e.hidden_tensor) if setting.overlapped else tensor + 2 * e.waits
    context = 0.0
    if c > 1:
        kv = size * 2 * cut.micro_batch * shape.sequence * shape.kv_heads * shape.head_size / t
        context = max(0.0, machine.gather(kv, c, t) - 0.5 * core)
    return Seconds(
        forward=forward, backward=backward, weight=weight, core=core, tensor=tensor, context=context, expert=expert,
        moved=moved, host=kernels * e.launch,
    )  # fmt: skip


def attention(machine: Machine, shape: Shape, setting: Setting, cut: Cut) -> tuple[float, float]:
    """Seconds of forward and backward of the part between the projections."""
    e = machine.efficiency
    queries = shape.sequence / cut.context
    heads = cut.micro_batch * shape.heads / cut.tensor
    deep = 2 * shape.head_size + shape.rope_size
    if setting.fused:
        flops = 2.0 * heads * queries * shape.sequence * deep * (0.5 if shape.causal else 1.0)
        rate = machine.device.rate("bf16" if setting.precision in NARROW else setting.precision) * e.attention
        rate *= e.older if setting.older else 1.0
        rate *= shape.sequence / (shape.sequence + 512)  # short rows fill no tile
        rate *= min(1.0, 0.5 + shape.head_size / 256)
        forward = flops / rate
        return forward, 2.5 * forward / e.attention_backward
    # Every head's square of scores is written, masked, normalised, dropped out of and read again.
    precision = setting.precision
    scores = machine.product(queries, shape.head_size, shape.sequence, precision, heads)
    mixed = machine.product(queries, shape.sequence, shape.head_size, precision, heads)
    if shape.head_size % 8:  # batched products of such heads miss the tensor cores
        scores, mixed = RAGGED_HEADS * scores, RAGGED_HEADS * mixed
    moves = e.scores if _whole_softmax(shape, cut) else 2 * e.scores
    square = machine.move(setting.bytes * heads * queries * shape.sequence * moves)
    forward = scores + mixed + square
    return forward, 2 * (scores + mixed) + 1.2 * square


def _whole_softmax(shape: Shape, cut: Cut) -> bool:
    """Whether the masked softmax is one kernel where attention is not fused: Megatron's takes squares by fours."""
    return cut.micro_batch * shape.heads // cut.tensor % 4 == 0


def head(machine: Machine, shape: Shape, setting: Setting, cut: Cut) -> Seconds:
    """Final norm, logits, loss. The logits' product stays in 16 bits."""
    t = cut.tensor
    precision = "bf16" if setting.precision in NARROW else setting.precision
    tokens = shape.predicted * cut.micro_batch * shape.sequence / cut.context
    own, back, gradient = machine.linear(tokens, shape.width, ceil(shape.vocab / t), precision)
    moved = setting.loss
    if moved is None:  # of a cut vocabulary, measured runs show no more than a fused loss would take
        moved = machine.efficiency.logits if t == 1 else FUSED_LOSS
    loss = machine.stream(tokens * shape.vocab / t * moved / 2)
    host = HEAD * machine.efficiency.launch if setting.loss is None else 0.0
    tensor = machine.reduce(setting.bytes * tokens * shape.width, t, 1) / 2 if t > 1 else 0.0
    forward, backward = machine.felt(own + loss, host), machine.felt(back + gradient + loss, host)
    return Seconds(forward=forward, backward=backward, weight=gradient, tensor=tensor)


def embedding(machine: Machine, shape: Shape, setting: Setting, cut: Cut) -> Seconds:
    tokens = cut.micro_batch * shape.sequence / cut.context
    moved = machine.move(setting.bytes * tokens * shape.width * 4)
    tensor = machine.reduce(setting.bytes * tokens * shape.width, cut.tensor, 1) / 2 if cut.tensor > 1 else 0.0
    return Seconds(forward=moved, backward=3 * moved, weight=3 * moved, tensor=tensor)
