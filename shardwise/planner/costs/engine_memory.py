"""What our own engine makes of a layout: its stages and weights, exactly, and from them the memory of each rank.

Foreign frameworks are described by a `FrameworkProfile` (`shardwise.planner.costs.memory_model`). Our engine can be asked: parameters are
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

from shardwise.layout import Layout, kept_activation_fraction
from shardwise.models.gpt import build_gpt, forward_flops
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.loss import loss_chunk_size
from shardwise.parallel.balance import cut_stages
from shardwise.parallel.data_parallel import BUCKET_BYTES
from shardwise.parallel.tensor import splits_evenly
from shardwise.planner.costs.memory_model import FrameworkProfile, RankMemory, StageLayers


class ParamSpec(NamedTuple):
    """One parameter on the first rank of the tensor axis."""

    name: str
    rows: int
    columns: int
    is_sharded: bool
    """Over the tensor axis."""

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def shard_numel(self, shard: int) -> int:
        """Numbers of the largest of `shard` pieces; the others are padded to it where they travel."""
        return ceil(self.rows / shard) * self.columns


class EngineModel:
    """One job's model in our engine."""

    def __init__(self, model: DecoderConfig, precision: str, compiled: bool = False):
        """`compiled`: blocks keep for the backward what a compiler leaves of it."""
        self.model, self.is_compiled = model, compiled
        self.itemsize = {"float64": 8, "float32": 4}.get(precision, 2)
        self.master_itemsize = max(4, self.itemsize)
        self.layer_costs = tuple(forward_flops(model))
        with torch.device("meta"):
            self._chain = build_gpt(model.model_copy(update={"layers": 1}), 0)
        self._pieces: dict[int, dict[str, tuple[ParamSpec, ...]]] = {}
        self._stages: dict[tuple[int, tuple[int, ...]], tuple[StageLayers, ...]] = {}
        self._sizes: dict[int, tuple[int, int, int]] = {}
        self._kept: dict[tuple[object, ...], BlockSizes] = {}

    @property
    def is_mixed_precision(self) -> bool:
        return self.itemsize != self.master_itemsize

    def stages(self, layout: Layout) -> tuple[StageLayers, ...]:
        """As training cuts them."""
        key = layout.stage_count, layout.stages
        if key not in self._stages:
            last = len(self.layer_costs) - 1
            spans = cut_stages(layout, self.layer_costs)
            self._stages[key] = tuple(StageLayers(b - a - (a == 0) - (b > last), a == 0, b > last) for a, b in spans)
        return self._stages[key]

    def params_by_module(self, tensor: int) -> dict[str, tuple[ParamSpec, ...]]:
        """Parameters of `embed`, `block` and `head`, in the chain's order; tied ones in both ends."""
        if tensor not in self._pieces:
            params: dict[str, list[ParamSpec]] = {"embed": [], "block": [], "head": []}
            for name, weight in self._chain.named_parameters(remove_duplicate=False):
                split = self._chain.sharding_plan.shard_dim_of(name)
                rows, columns = weight.shape[0], weight[0].numel()
                is_replicated = split is None or tensor == 1 or not splits_evenly(split, weight.shape, tensor)
                if not is_replicated and split is not None:
                    rows, columns = (ceil(rows / tensor), columns) if split.dim == 0 else (rows, ceil(columns / tensor))
                params[name.partition(".")[0].rstrip("0")].append(ParamSpec(name, rows, columns, not is_replicated))
            self._pieces[tensor] = {piece: tuple(rows) for piece, rows in params.items()}
        return self._pieces[tensor]

    def parameters(self, layout: Layout, stage: StageLayers) -> Iterator[ParamSpec]:
        """Of one stage, each once."""
        pieces = self.params_by_module(layout.tensor)
        if stage.first:
            yield from pieces["embed"]
        for _ in range(stage.blocks):
            yield from pieces["block"]
        if stage.last:
            tied = self._chain.sharding_plan.ties and stage.first
            yield from (
                each for each in pieces["head"] if not (tied and each.name == self._chain.sharding_plan.ties[0][0])
            )

    def block_sizes(self, layout: Layout) -> BlockSizes:
        key = layout.tensor, layout.context, layout.micro_batch, layout.has_split_backward
        if key not in self._kept:
            self._kept[key] = BlockSizes.for_layout(self, layout)
        return self._kept[key]

    def min_memory(self, layout: Layout, parts: Sequence[StageLayers], micro_batches: int, state: float) -> float:
        """Bytes that the fullest of some ranks holds at least: weights, gradients, optimizer states, and, if there are
        more to come, what the blocks keep of one micro-batch. `state`: bytes of states per weight."""
        (embed, block, head), k = self.module_numels(layout.tensor), self.block_sizes(layout)
        unsharded_itemsizes = (
            2 if layout.zero == 1 or layout.shard == 1 else 0
        )  # weights and gradients that are not cut
        bytes_per_weight = self.master_itemsize * unsharded_itemsizes + (
            self.master_itemsize * (2 - unsharded_itemsizes) + state
        ) / (layout.shard * layout.context)
        saved = {"none": k.saved_all, "selective": k.saved_selective}.get(layout.recompute, k.hidden_bytes)
        kept = block * bytes_per_weight + (saved if micro_batches > 1 and layout.context == layout.expert == 1 else 0.0)
        return max([n * kept + bytes_per_weight * ((embed if a else 0) + (head if b else 0)) for n, a, b in parts])

    def module_numels(self, tensor: int) -> tuple[int, int, int]:
        """Numbers of the embedding, of a block, and of the head without what it may share."""
        if tensor not in self._sizes:
            tied = self._chain.sharding_plan.ties[0][0] if self._chain.sharding_plan.ties else ""
            embed, block, head = (
                sum(each.numel for each in rows if each.name != tied) for rows in self.params_by_module(tensor).values()
            )
            self._sizes[tensor] = embed, block, head
        return self._sizes[tensor]

    def memory(
        self,
        layout: Layout,
        rank: int,
        micro_batches: int,
        framework_profile: FrameworkProfile,
        in_flight_peaks: tuple[InFlightCounts, ...] | None = None,
    ) -> RankMemory:
        """Of a pipeline rank at its fullest moment. `points`: the fullest ones of an order that has no name."""
        in_flight_peaks = in_flight_peaks or schedule_peak_in_flight(layout, rank, micro_batches)
        stages = self.stages(layout)
        stages_of_rank = [stages[stage] for stage in layout.stages_of(rank)]
        k, s, w = self.block_sizes(layout), self.itemsize, self.master_itemsize
        fsdp, is_zero3 = layout.shard > 1 and layout.zero > 1, layout.shard > 1 and layout.zero == 3
        has_both_ends = any(p.first and p.last for p in stages_of_rank)
        numel = sum(
            p.blocks * k.block + p.first * k.embed + p.last * (k.head - has_both_ends * k.tied) for p in stages_of_rank
        )
        sharded_numel = numel / layout.shard
        weights, gradients = float(w * numel), w * (sharded_numel if fsdp else numel)
        if self.keeps_rounded_weights(layout):
            weights, gradients = float((w + s) * numel), float((s if micro_batches == 1 else w) * numel)
        if fsdp:
            weights = w * sharded_numel + (0 if is_zero3 else s * numel)
        state = framework_profile.optimizer_bytes * sharded_numel
        buffers = self.remote_neighbors(layout, rank) * k.hidden_bytes * micro_batches + 16 * k.tokens * micro_batches
        candidates = _PeakCandidates(self, k, layout, stages_of_rank)
        peak = max(candidates.candidates(in_flight_peaks))
        largest_bucket = max(k.largest_param, min(numel, BUCKET_BYTES / w))
        update = 0.0 if fsdp or layout.data == 1 else w * largest_bucket * (1 + 1 / layout.shard)
        buckets = layout.replicate == layout.world > 1  # of DDP: gradients have their place from the begin
        if not buckets and in_flight_peaks[0][0] == (micro_batches,):
            # All are in flight before there are gradients: these come as the first activations go.
            without_gradients = max(candidates.candidates(in_flight_peaks, drop=1), default=0.0)
            if stages_of_rank[0].first:
                first = candidates.embed() - w * k.embed / (
                    layout.shard if fsdp else 1
                )  # nothing to be added to as yet
                without_gradients = max(
                    without_gradients, first + (micro_batches - 1) * candidates.saved_bytes(stages_of_rank[0])
                )
            if peak > gradients + max(without_gradients, update):
                gradients = 0.0
            else:
                peak = without_gradients
        activations = max(peak, update)
        subtotal = weights + gradients + state + activations + buffers
        return RankMemory(
            weights,
            gradients,
            state,
            activations,
            buffers,
            framework_profile.fragmentation * subtotal + framework_profile.fixed_bytes,
        )

    def compiles_blocks(self, layout: Layout) -> bool:
        """Whether a layout's blocks are compiled."""
        return self.is_compiled and not layout.has_split_backward

    def keeps_rounded_weights(self, layout: Layout) -> bool:
        """Whether weights are kept twice, and rounded once a step."""
        return self.is_mixed_precision and layout.world == 1

    def remote_neighbors(self, layout: Layout, rank: int) -> int:
        """Stages next to a rank's own and on other ranks: PyTorch's have a buffer for each and every micro-batch."""
        stages, last = layout.stages_of(rank), layout.stage_count - 1
        if layout.pipeline == 1:
            return 0
        local = 2 * (stages[-1] - stages[0] == 1)  # at the turn of a V
        return 2 * len(stages) - (stages[0] == 0) - (stages[-1] == last) - local


class BlockSizes(NamedTuple):
    """Numbers of weights and bytes of activations of one micro-batch on one rank."""

    embed: int
    block: int
    head: int
    tied: int
    """Numbers that embedding and head share."""
    largest_param: int
    """Numbers of the largest parameter."""
    projection: int
    """Numbers of the projection."""
    largest_matmul: int
    """Numbers of the largest product's weights in a block."""
    hidden_bytes: float
    """Bytes between two pieces, cut along the sequence."""
    gathered_hidden_bytes: float
    """The same, gathered."""
    ffn_hidden: float
    """Bytes of one map of the feed-forward part."""
    saved_all: float
    """Bytes that a block keeps where nothing is computed again."""
    saved_selective: float
    saved_common: float
    """Bytes that are in both."""
    pending_weight_grad: float
    """Bytes of gradients that a block keeps between the halves of a backward."""
    logits: float
    """Bytes of all logits, widened."""
    tokens: float
    """Tokens of a micro-batch."""

    @classmethod
    def for_layout(cls, engine: EngineModel, layout: Layout) -> BlockSizes:
        m, s, t = engine.model, engine.itemsize, layout.tensor
        pieces = engine.params_by_module(t)
        tokens = layout.micro_batch * m.sequence / layout.context
        gathered_hidden_bytes = s * tokens * m.width
        hidden_bytes = gathered_hidden_bytes / t
        query, kv = s * tokens * m.heads * m.head_dim / t, s * tokens * 2 * m.kv_heads * m.head_dim / t
        softmax_stats = engine.master_itemsize * tokens * m.heads / t  # of each row of scores
        hidden, ffn_maps = s * tokens * m.ffn / t, 2 if m.activation == "swiglu" else 1
        shared = hidden_bytes + 2 * query + kv + softmax_stats + ffn_maps * hidden
        # Queries and keys that are turned are copies, and attention's result then is laid out by head: one more copy.
        rope_copies = (
            2 * query + kv / 2 + 4 * engine.master_itemsize * m.sequence * m.head_dim / 2
            if m.positions == "rotary"
            else 0.0
        )
        gathered = 2 * gathered_hidden_bytes if t > 1 else 0.0
        sizes = {piece: sum(each.numel for each in rows) for piece, rows in pieces.items()}
        projection = next(each.numel for each in pieces["head"] if each.name.endswith("project.weight"))
        saved_all = (
            shared + hidden_bytes + 2 * gathered_hidden_bytes + rope_copies + (2 if ffn_maps == 2 else 1) * hidden
        )
        if engine.compiles_blocks(layout):
            # The block's input, what attention added to it, one norm; products' inputs that are gathered.
            saved_all = shared + 2 * hidden_bytes + (2 * gathered_hidden_bytes - hidden_bytes if t > 1 else 0.0)
        return cls(
            sizes["embed"],
            sizes["block"],
            sizes["head"],
            projection if m.tied else 0,
            largest_param=max(each.numel for rows in pieces.values() for each in rows),
            projection=projection,
            largest_matmul=max(each.numel for each in pieces["block"]),
            hidden_bytes=hidden_bytes,
            gathered_hidden_bytes=gathered_hidden_bytes,
            ffn_hidden=hidden,
            saved_all=saved_all,
            saved_selective=shared + 2 * gathered_hidden_bytes + (gathered + 2 * hidden_bytes if t > 1 else 0.0),
            saved_common=shared + gathered,
            pending_weight_grad=ffn_maps * hidden + query + kv + 2 * gathered_hidden_bytes + 4 * hidden_bytes,
            logits=engine.master_itemsize * tokens * m.vocab / t,
            tokens=layout.micro_batch * m.sequence,
        )


class _PeakCandidates:
    """Bytes beyond what a rank always holds, at the moments that can be its fullest."""

    def __init__(self, engine: EngineModel, k: BlockSizes, layout: Layout, stages: list[StageLayers]):
        self.engine, self.k, self.layout, self.stages = engine, k, layout, stages
        s, w = engine.itemsize, engine.master_itemsize
        self.fsdp, self.is_zero3 = layout.shard > 1 and layout.zero > 1, layout.shard > 1 and layout.zero == 3
        self.keeps_rounded_weights = engine.keeps_rounded_weights(layout)
        # Bytes of a weight's rounded copy, made for each use; of its gradient, beside the one that is kept.
        self.rounded_itemsize = (
            s if engine.is_mixed_precision and not self.fsdp and not self.keeps_rounded_weights else 0
        )
        self.grad_itemsize = w if not engine.is_mixed_precision else s if self.keeps_rounded_weights else s + w
        kept_fraction = kept_activation_fraction(layout.recompute)
        self.kept_fraction = float(layout.recompute == "none") if kept_fraction is None else kept_fraction
        self.saved_recomputed = k.saved_selective if layout.recompute == "selective" else k.hidden_bytes
        shared = k.saved_common if layout.recompute == "selective" else k.hidden_bytes
        self.recomputed = max(0.0, k.saved_all - shared) + self.rounded_itemsize * k.block
        # FSDP: a block's weights and the next one's; while the gradients of the one before are being summed.
        self.gathered_weights = 2 * s * k.block if self.is_zero3 else 0.0
        self.grad_reduce_bytes = 0.0
        if self.fsdp:
            self.grad_reduce_bytes = (
                w * k.block + max(w / layout.shard, s if self.is_zero3 else 0) * k.block + self.gathered_weights / 2
            )
            self.grad_reduce_bytes -= k.saved_all if self.kept_fraction else self.saved_recomputed

    def candidates(self, in_flight_peaks: tuple[InFlightCounts, ...], drop: int = 0) -> Iterator[float]:
        k, s, w = self.k, self.engine.itemsize, self.engine.master_itemsize
        lives, halves = (
            [self.saved_bytes(part) for part in self.stages],
            [self.half_backward_bytes(part) for part in self.stages],
        )
        block = (self.recomputed if self.kept_fraction < 1 else 0.0) + k.ffn_hidden + s * k.largest_matmul
        if self.engine.compiles_blocks(self.layout):
            # What is cheap is computed again: the hidden map; and the gradients of its parts lie side by side.
            block += (2 if self.engine.model.activation == "swiglu" else 1) * k.ffn_hidden
        # By stage, what its backward needs at most.
        backward_bytes = []
        for part in self.stages:
            beside = max(self.gathered_weights, self.grad_reduce_bytes) if part.blocks > 1 else self.gathered_weights
            backward_bytes.append(max(block + beside if part.blocks else 0.0, self.loss_bytes() if part.last else 0.0))
        for in_flight, pending in in_flight_peaks:
            in_flight = tuple(n - drop for n in in_flight)
            held = sum([n * size for n, size in zip(in_flight, lives)])
            if any(pending):
                held += sum([n * size for n, size in zip(pending, halves)])
                yield held + (s + 2 * w if self.engine.is_mixed_precision else w) * k.largest_matmul
            yield held + max([size if n else 0.0 for n, size in zip(in_flight, backward_bytes)])
            if in_flight[-1] and self.stages[-1].last and self.layout.pipeline > 1:
                yield held + self.after_loss_bytes(lives[-1])
            if in_flight[0] and self.stages[0].first:
                yield held - lives[0] + self.embed()

    def saved_bytes(self, stage: StageLayers) -> float:
        """Of a micro-batch whose backward is still to come."""
        k = self.k
        without_recompute = int(stage.blocks * self.kept_fraction)
        held = (
            without_recompute * (k.saved_all + self.rounded_itemsize * k.block)
            + (stage.blocks - without_recompute) * self.saved_recomputed
        )
        if stage.last and self.layout.pipeline == 1:
            held += (
                k.hidden_bytes + k.gathered_hidden_bytes + self.engine.master_itemsize * k.projection
            )  # gradients of what entered and of the weights
        elif stage.last:
            held += (
                k.logits * self.engine.itemsize / self.engine.master_itemsize
                + k.hidden_bytes
                + k.gathered_hidden_bytes
                + self.rounded_itemsize * k.projection
            )
        if self.layout.pipeline > 1:
            # What enters lies in a buffer, what leaves is kept until the backward.
            held += (not stage.last) * k.hidden_bytes - (not stage.first and stage.blocks > 0) * k.hidden_bytes
        return held

    def half_backward_bytes(self, stage: StageLayers) -> float:
        """Of a micro-batch of which only the weight half is still to come: all that was computed again, too."""
        k = self.k
        if stage.first:
            return self.saved_bytes(stage)  # it has no gradient of its input to make: its weight half does all
        held = stage.blocks * (k.saved_all + self.rounded_itemsize * k.block + k.pending_weight_grad)
        if stage.last:
            held += (
                k.logits * self.engine.itemsize / self.engine.master_itemsize
                + 2 * k.gathered_hidden_bytes
                + k.hidden_bytes
                + self.rounded_itemsize * k.projection
            )
        return held

    def loss_bytes(self) -> float:
        """Of the backward of the loss, beyond what its forward keeps; weights as FSDP gathers them."""
        k, s, w = self.k, self.engine.itemsize, self.engine.master_itemsize
        more = s * (k.head + k.block) if self.is_zero3 else 0.0
        if self.layout.pipeline == 1:
            chunk = min(1.0, loss_chunk_size(self.engine.model.vocab) * self.layout.tensor / k.tokens)
            logits = (
                chunk * k.logits * (s / w + (1 if self.engine.is_mixed_precision and self.layout.tensor > 1 else 0))
            )
            logits += (
                k.gathered_hidden_bytes
                + (self.rounded_itemsize if self.engine.is_mixed_precision else w) * k.projection
            )
            return (
                max(logits, (s if self.fsdp and self.engine.is_mixed_precision else self.grad_itemsize) * k.projection)
                + more
            )
        # Widened for a softmax over ranks; the gradient times its factor; that of the weights.
        widened = k.logits if self.engine.is_mixed_precision and self.layout.tensor > 1 else 0.0
        scaled = k.logits * s / w
        weight_grad = s * k.projection + (scaled if self.layout.has_split_backward else 0.0)
        return max(widened, scaled, weight_grad) + more

    def after_loss_bytes(self, live: float) -> float:
        """Of the gradient of the projection on its way to where it is kept, in a pipeline: the logits are gone by then,
        and with FSDP all that its micro-batch, which held `live`, kept."""
        k, s, w = self.k, self.engine.itemsize, self.engine.master_itemsize
        if self.fsdp:
            return (self.grad_itemsize + w / self.layout.shard) * k.projection - live
        return self.grad_itemsize * k.projection - k.logits * s / w - self.rounded_itemsize * k.projection

    def embed(self) -> float:
        """Of the gradient of the embedding: as it is made, as it is added."""
        k, s, w = self.k, self.engine.itemsize, self.engine.master_itemsize
        if self.fsdp:
            return (s + w + w / self.layout.shard) * k.embed
        return self.grad_itemsize * (k.embed - self._position_numel())

    def _position_numel(self) -> int:
        return sum(each.numel for each in self.engine.params_by_module(self.layout.tensor)["embed"][1:])


InFlightCounts = tuple[tuple[int, ...], tuple[int, ...]]
"""By stage of a rank: micro-batches before their backward; between its two halves."""


def schedule_peak_in_flight(layout: Layout, rank: int, micro_batches: int) -> tuple[InFlightCounts, ...]:
    """The fullest points of a schedule, as far as they are not between two others."""
    return _schedule_peak_in_flight(layout.schedule, layout.pipeline, layout.stages_per_rank, rank, micro_batches)


@lru_cache(maxsize=4096)
def _schedule_peak_in_flight(schedule: str, p: int, v: int, r: int, m: int) -> tuple[InFlightCounts, ...]:
    none = (0,) * v
    if p == 1:
        return (((1,), (0,)),)
    if schedule == "gpipe":
        return (((m,), none),)
    if schedule == "1f1b":
        return (((min(m, p - r),), none),)
    if schedule == "interleaved":
        return tuple((live, none) for live in _interleaved_in_flight(p, v, r, m))
    if schedule == "zero-bubble":
        return tuple(_zero_bubble_in_flight(p, v, r, m))
    found: list[InFlightCounts] = []
    full = ((2 * p - 1 - r, r + 1), (2 * p - r, r)) if schedule == "zbv" else ((2 * p - r, r + 1),)
    for first, last in full:
        found.append(((min(m, first), min(m, last)), none))
    ends = (r + 1, r) if schedule == "zbv" else ((r + 2) // 2, (r + 1) // 2)
    found.append(((min(m, p - 1 - r), 0), (min(m, ends[0]), min(m, ends[1]))))
    found.append(((min(m, 2 * p - 1 - r), min(m, r)), (0, 1)))
    return tuple(found)


def _round_size(p: int, m: int) -> int:
    return m // max(1, m // p)


def _interleaved_in_flight(p: int, v: int, r: int, m: int) -> Iterator[tuple[int, ...]]:
    """Forwards go through the stages in rounds; each, once as many are ahead as the warm-up has, follows a backward,
    which go through them in rounds the other way."""
    size, total = _round_size(p, m), m * v
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


def _zero_bubble_in_flight(p: int, v: int, r: int, m: int) -> Iterator[InFlightCounts]:
    """Every rank has as many in flight; the later it is, the more of them only wait for their weight half."""
    size = _round_size(p, m)
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
