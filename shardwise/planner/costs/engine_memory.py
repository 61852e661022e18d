"""Predicts each rank's peak memory in our engine from the exact stages and parameters of a layout.

Formulas come from dry runs, with which `tests/test_dryrun.py` compares. A rank's peak is the largest of candidates: a
block's backward, the loss, the embedding's gradient and the update, at every peak of the schedule. `k` is the
`BlockSizes`, `s` the bytes per element of the compute dtype, `w` those of the master dtype."""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from shardwise.layout import Layout
from shardwise.models.fp8 import MIN_WEIGHTS
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.loss import loss_chunk_size
from shardwise.parallel.data_parallel import BUCKET_BYTES
from shardwise.parallel.prepare import cut_stages, meta_model
from shardwise.parallel.tensor import splits_evenly
from shardwise.parallel.torch_pipelining import ALLOCATES_RECEIVE_BUFFERS_ON_DEMAND
from shardwise.planner.costs import cached_by
from shardwise.planner.costs.memory_model import FrameworkProfile, RankMemory, StageLayers
from shardwise.schedules.simulate import PeakCounts


class EngineModel:
    """Parameters and memory of one job's model in our engine."""

    def __init__(self, model: DecoderConfig, precision: str, compiled: bool = False):
        """`compiled`: blocks are compiled, and save what AOTAutograd's partitioner chooses."""
        self.model, self.is_compiled, self.use_fp8 = model, compiled, precision == "fp8"
        self.itemsize = {"float64": 8, "float32": 4}.get(precision, 2)
        self.master_itemsize = max(4, self.itemsize)
        self.is_mixed_precision = self.itemsize != self.master_itemsize
        self._chain = meta_model(model.model_copy(update={"layers": 1}))

    @cached_by(lambda _, tensor: tensor)
    def params_by_module(self, tensor: int) -> dict[str, dict[str, int]]:
        """Returns the elements of each parameter of `embed`, `block` and `head` on tensor rank 0; tied ones are in both
        `embed` and `head`."""
        params: dict[str, dict[str, int]] = {"embed": {}, "block": {}, "head": {}}
        for name, weight in self._chain.named_parameters(remove_duplicate=False):
            split, numel = self._chain.sharding_plan.shard_dim_of(name), weight.numel()
            if split is not None and splits_evenly(split, weight.shape, tensor):
                size = weight.shape[split.dim]
                numel = numel // size * ceil(size / tensor)
            params[name.partition(".")[0].rstrip("0")][name] = numel  # the only block is block0
        return params

    @cached_by(lambda _, layout: (layout.tensor, layout.context, layout.micro_batch, layout.has_split_backward))
    def block_sizes(self, layout: Layout) -> "BlockSizes":
        m, s, t = self.model, self.itemsize, layout.tensor
        params = self.params_by_module(t)
        tokens = layout.micro_batch * m.sequence / layout.context
        gathered_hidden_bytes = s * tokens * m.width
        hidden_bytes = gathered_hidden_bytes / t
        query, kv = s * tokens * m.heads * m.head_dim / t, s * tokens * 2 * m.kv_heads * m.head_dim / t
        softmax_stats = self.master_itemsize * tokens * m.heads / t  # log-sum-exp of each query
        hidden, num_up_projections = s * tokens * m.ffn / t, 2 if m.activation == "swiglu" else 1
        shared = hidden_bytes + 2 * query + kv + softmax_stats + num_up_projections * hidden
        shared += query / 2 if layout.context > 1 else 0.0  # of the parts of attention
        # Rotary embeddings copy queries and keys; attention's output is then laid out by head, which adds another copy.
        rope_copies = 0.0
        if m.positions == "rotary":
            copies = (2 if layout.context == 1 else 1) * query + kv / 2
            rope_copies = copies + 4 * self.master_itemsize * m.sequence * m.head_dim / 2
        gathered_inputs = 2 * gathered_hidden_bytes if t > 1 else 0.0
        sizes = {module: sum(numels.values()) for module, numels in params.items()}
        lm_head = next(numel for name, numel in params["head"].items() if name.endswith("project.weight"))
        saved_all = shared + hidden_bytes + 2 * gathered_hidden_bytes + rope_copies + num_up_projections * hidden
        if self.compiles_blocks(layout):
            # The block's input, the residual after attention, an RMSNorm, rotated keys; and gathered matmul inputs.
            saved_all = shared + (2 * gathered_hidden_bytes - hidden_bytes if t > 1 else 0.0)
            saved_all += (1 if m.norm == "layer" else 2) * hidden_bytes
            saved_all += kv / 2 if m.positions == "rotary" else 0.0
        widths = {"qkv": m.width, "out": m.heads * m.head_dim / t, "up": m.width, "down": m.ffn / t}
        fp8_matrices = [(widths.get(name.split(".")[-2], 0), numel) for name, numel in params["block"].items()]
        return BlockSizes(
            sizes["embed"], sizes["block"], sizes["head"], lm_head if m.tied else 0,
            largest_param=max(numel for numels in params.values() for numel in numels.values()), lm_head=lm_head,
            largest_matrix=max(params["block"].values()), hidden_bytes=hidden_bytes,
            gathered_hidden_bytes=gathered_hidden_bytes, ffn_hidden=hidden, saved_all=saved_all,
            saved_selective=shared + 2 * gathered_hidden_bytes + (gathered_inputs + 2 * hidden_bytes if t > 1 else 0.0),
            saved_common=shared + gathered_inputs,
            pending_weight_grad=num_up_projections * hidden + query + kv + 2 * gathered_hidden_bytes + 4 * hidden_bytes,
            logits=self.master_itemsize * tokens * m.vocab / t, tokens=layout.micro_batch * m.sequence,
            fp8_inputs=tokens * sum(width for width, numel in fp8_matrices if self.use_fp8 and numel >= MIN_WEIGHTS),
        )  # fmt: skip

    def min_memory(self, layout: Layout, ranks: Sequence[StageLayers], micro_batches: int, state_bytes: float) -> float:
        """Returns a lower bound of the peak over these ranks, each given by its modules: weights, gradients, optimizer
        state (`state_bytes` bytes per weight) and, with several micro-batches, the saved activations of one."""
        k = self.block_sizes(layout)
        unsharded = 2 if layout.zero == 1 or layout.shard == 1 else 0  # both weights and gradients, or neither
        sharded_bytes = self.master_itemsize * (2 - unsharded) + state_bytes
        bytes_per_weight = self.master_itemsize * unsharded + sharded_bytes / (layout.shard * layout.context)
        saved = {"none": k.saved_all, "selective": k.saved_selective}.get(layout.recompute, k.hidden_bytes)
        embed, head, kept = k.embed, k.head - k.tied, k.block * bytes_per_weight + (saved if micro_batches > 1 else 0.0)
        return max([n * kept + bytes_per_weight * (first * embed + last * head) for n, first, last in ranks])

    def memory(
        self, layout: Layout, rank: int, stages_of_rank: list[StageLayers], micro_batches: int,
        in_flight_peaks: PeakCounts, framework_profile: FrameworkProfile,
    ) -> RankMemory:  # fmt: skip
        """Returns the peak memory of a pipeline rank; `in_flight_peaks`: of its schedule."""
        k, s, w = self.block_sizes(layout), self.itemsize, self.master_itemsize
        peaks = _PeakCandidates(self, k, layout, stages_of_rank, framework_profile.offloads_activations)
        fsdp = peaks.fsdp
        head = k.head - k.tied * any(p.first and p.last for p in stages_of_rank)
        numel = sum(p.blocks * k.block + p.first * k.embed + p.last * head for p in stages_of_rank)
        sharded_numel = numel / layout.weight_shards
        weights, gradients = float(w * numel), w * (sharded_numel if fsdp else numel)
        if self.keeps_compute_copy(layout):
            weights, gradients = float((w + s) * numel), float((s if micro_batches == 1 else w) * numel)
        if fsdp:
            weights = w * sharded_numel + (0 if peaks.is_zero3 else s * numel)
        state = framework_profile.optimizer_bytes * sharded_numel
        buffers = k.hidden_bytes * _receive_buffers(layout, rank, micro_batches, in_flight_peaks)
        buffers += 16 * k.tokens * micro_batches  # int64 tokens and targets
        buffers += framework_profile.buffer_bytes
        peak = max(peaks.candidate_bytes(in_flight_peaks))
        largest_bucket = max(k.largest_param, min(numel, BUCKET_BYTES / w))
        update = (
            0.0 if fsdp or layout.data == layout.context == 1 else w * largest_bucket * (1 + 1 / layout.weight_shards)
        )
        is_ddp = layout.replicate == layout.world > 1  # its buckets are allocated from the start
        if not (is_ddp or peaks.offloads) and in_flight_peaks[0][0] == (micro_batches,):
            # All micro-batches run forward before any backward: gradients are allocated as activations are freed.
            without_gradients = max(peaks.candidate_bytes(in_flight_peaks, drop=1), default=0.0)
            if stages_of_rank[0].first:
                # The first embedding gradient is not accumulated into an existing one.
                first = peaks.embed_grad_bytes() - w * k.embed / (layout.weight_shards if fsdp else 1)
                saved = (micro_batches - 1) * peaks.saved_bytes(stages_of_rank[0])
                without_gradients = max(without_gradients, first + saved)
            if peak > gradients + max(without_gradients, update):
                gradients = 0.0
            else:
                peak = without_gradients
        gathered = min(peak := max(peak, update), peaks.gathered_weights)
        activations, buffers = peak - gathered, buffers + gathered
        subtotal = weights + gradients + state + activations + buffers
        reserve = framework_profile.fragmentation * subtotal + framework_profile.fixed_bytes
        return RankMemory(weights, gradients, state, activations, buffers, reserve)

    def compiles_blocks(self, layout: Layout) -> bool:
        return self.is_compiled and not layout.has_split_backward

    def keeps_compute_copy(self, layout: Layout) -> bool:
        """Returns whether a compute copy of the weights is kept, and updated once per step."""
        return self.is_mixed_precision and layout.world == 1


def _receive_buffers(layout: Layout, rank: int, micro_batches: int, in_flight_peaks: PeakCounts) -> int:
    """Returns how many hidden states a pipeline rank holds at once that it received from other ranks."""
    stages = layout.stages_of(rank)
    last = layout.stage_count - 1
    receives_inputs = [stage > 0 and stage - 1 not in stages for stage in stages]
    receives_gradients = [stage < last and stage + 1 not in stages for stage in stages]
    all_at_once = micro_batches * (sum(receives_inputs) + sum(receives_gradients))
    if not ALLOCATES_RECEIVE_BUFFERS_ON_DEMAND:
        return all_at_once

    # An input is kept until its backward, both halves of it, is done; a gradient is used at once.
    inputs = 0
    for in_flight, pending_weight in in_flight_peaks:
        counts = zip(receives_inputs, in_flight, pending_weight, strict=True)
        inputs = max(inputs, sum(live + pending for is_received, live, pending in counts if is_received))
    return min(all_at_once, inputs + sum(receives_gradients))


class BlockSizes(NamedTuple):
    """Elements of weights, and bytes of one micro-batch's activations, on one rank."""

    embed: int
    block: int
    head: int
    tied: int  # elements that embedding and head share
    largest_param: int
    lm_head: int  # elements of the LM head's matrix
    largest_matrix: int  # elements of the largest matrix in a block
    hidden_bytes: float  # bytes of the hidden state between modules, split along the sequence
    gathered_hidden_bytes: float  # the same, all-gathered along the sequence
    ffn_hidden: float  # bytes of one hidden activation of the feed-forward layer
    saved_all: float  # bytes a block saves without recomputation
    saved_selective: float  # bytes a block saves with selective recomputation
    saved_common: float  # bytes that a block saves both with selective and without recomputation
    pending_weight_grad: float  # bytes of output gradients kept between the halves of a split backward
    logits: float  # bytes of all logits in the master dtype
    tokens: float  # tokens per micro-batch
    fp8_inputs: float  # bytes of the 8-bit inputs of a block's matmuls, which its forward saves for the backward


def stage_layers(layout: Layout, costs: Sequence[float]) -> tuple[StageLayers, ...]:
    """Returns the modules of each stage. `costs`: of embedding, layers and head, in this order."""
    modules = [(stop - start, start == 0, stop == len(costs)) for start, stop in cut_stages(layout, costs)]
    return tuple(StageLayers(n - first - last, first, last) for n, first, last in modules)


class _PeakCandidates:
    """Bytes beyond weights, gradients and optimizer state at the moments that can be a rank's peak."""

    def __init__(self, engine: EngineModel, k: BlockSizes, layout: Layout, stages: list[StageLayers], offloads: bool):
        self.engine, self.k, self.layout, self.stages, self.offloads = engine, k, layout, stages, offloads
        s, w = engine.itemsize, engine.master_itemsize
        self.fsdp, self.is_zero3 = layout.shard > 1 and layout.zero > 1, layout.shard > 1 and layout.zero == 3
        self.keeps_compute_copy = engine.keeps_compute_copy(layout)
        # Bytes per weight of the compute copy made in each forward, and of a new gradient before accumulation.
        makes_compute_copy = engine.is_mixed_precision and not self.fsdp and not self.keeps_compute_copy
        self.compute_copy_itemsize = s if makes_compute_copy else 0
        self.block_copies = self.compute_copy_itemsize * k.block + k.fp8_inputs
        self.grad_itemsize = w if not engine.is_mixed_precision else s if self.keeps_compute_copy else s + w
        # Bytes per weight while the weight half of a split backward computes a gradient: the gradient and, in mixed
        # precision, its cast and that of the matrix before, which PyTorch's loop still references.
        self.weight_half_itemsize = s + 2 * w if engine.is_mixed_precision else w
        self.kept_fraction = 0.0 if layout.recompute == "selective" else layout.kept_fraction
        self.saved_recomputed = k.saved_selective if layout.recompute == "selective" else k.hidden_bytes
        shared = k.saved_common if layout.recompute == "selective" else k.hidden_bytes
        # Where activations wait in host memory, the last block's do not yet, nor those of two blocks in the backward.
        saved_per_block = k.saved_all + self.block_copies if self.kept_fraction else self.saved_recomputed
        self.on_device = saved_per_block if offloads else 0.0
        self.recomputed = max(0.0, k.saved_all - shared) + self.block_copies
        # FSDP holds the weights of two blocks (one prefetched) while it reduces the previous block's gradients.
        self.gathered_weights = 2 * s * k.block if self.is_zero3 else 0.0
        self.grad_reduce_bytes = 0.0
        if self.fsdp:
            kept_itemsize = max(w / layout.weight_shards, s if self.is_zero3 else 0)
            self.grad_reduce_bytes = w * k.block + kept_itemsize * k.block + self.gathered_weights / 2
            self.grad_reduce_bytes -= k.saved_all if self.kept_fraction else self.saved_recomputed

    def candidate_bytes(self, in_flight_peaks: PeakCounts, drop: int = 0) -> Iterator[float]:
        """Yields the bytes of each candidate, with `drop` micro-batches fewer in flight."""
        k, s = self.k, self.engine.itemsize
        saved = [self.saved_bytes(stage) for stage in self.stages]
        block = (self.recomputed if self.kept_fraction < 1 else 0.0) + k.ffn_hidden + s * k.largest_matrix
        if self.engine.compiles_blocks(self.layout):
            # The compiler recomputes the FFN's hidden activation, and holds the gradients of both its inputs at once.
            block += (2 if self.engine.model.activation == "swiglu" else 1) * k.ffn_hidden
            # Nor does it reuse the hidden activation's gradient for one of theirs where it also recomputes the forward.
            block += k.ffn_hidden if self.kept_fraction < 1 and self.layout.recompute != "selective" else 0.0
        block += k.ffn_hidden if k.fp8_inputs else 0.0  # both operands of a weight gradient in 8 bits, transposed
        # The most that each stage's backward needs.
        backward_bytes = []
        for stage in self.stages:
            reduce_bytes = self.grad_reduce_bytes if stage.blocks > 1 else 0.0
            block_bytes = block + max(self.gathered_weights, reduce_bytes) if stage.blocks else 0.0
            loss_bytes = self.loss_bytes() + self.on_device if stage.last else 0.0
            backward_bytes.append(max(block_bytes + min(2, stage.blocks) * self.on_device, loss_bytes))
        for in_flight, pending in in_flight_peaks:
            in_flight = tuple(n - drop for n in in_flight)
            total = sum([n * size for n, size in zip(in_flight, saved)])
            if any(pending):
                total += sum([n * self.half_backward_bytes(stage) for n, stage in zip(pending, self.stages) if n])
                yield total + self.weight_half_itemsize * k.largest_matrix
            yield total + max([size if n else 0.0 for n, size in zip(in_flight, backward_bytes)])
            if in_flight[-1] and self.stages[-1].last and self.layout.pipeline > 1:
                yield total + self.after_loss_bytes(saved[-1]) + self.on_device
            if in_flight[0] and self.stages[0].first:
                yield total - saved[0] + self.embed_grad_bytes()

    def saved_bytes(self, stage: StageLayers) -> float:
        """Returns the bytes that a stage saves for the backward of one micro-batch."""
        k, s, w = self.k, self.engine.itemsize, self.engine.master_itemsize
        without_recompute = int(stage.blocks * self.kept_fraction)
        total = without_recompute * (k.saved_all + self.block_copies)
        total += (stage.blocks - without_recompute) * self.saved_recomputed
        total = 0.0 if self.offloads else total
        if stage.last and self.layout.pipeline == 1:
            # The fused loss already computed the gradients of its input and weights.
            total += k.hidden_bytes + k.gathered_hidden_bytes + w * k.lm_head
        elif stage.last:
            lm_head_copy = self.compute_copy_itemsize * k.lm_head
            total += k.logits * s / w + k.hidden_bytes + k.gathered_hidden_bytes + lm_head_copy
        if self.layout.pipeline > 1:
            # A stage's input is in the receive buffer; its output is kept until the backward.
            total += (not stage.last) * k.hidden_bytes - (not stage.first and stage.blocks > 0) * k.hidden_bytes
        return total

    def half_backward_bytes(self, stage: StageLayers) -> float:
        """Returns a stage's bytes for a micro-batch whose weight gradients are pending, with recomputed activations."""
        k, s, w = self.k, self.engine.itemsize, self.engine.master_itemsize
        if stage.first:
            return self.saved_bytes(stage)  # no input gradient: the weight half does the whole backward
        total = stage.blocks * (k.saved_all + self.block_copies + k.pending_weight_grad)
        if stage.last:
            lm_head_copy = self.compute_copy_itemsize * k.lm_head
            total += k.logits * s / w + 2 * k.gathered_hidden_bytes + k.hidden_bytes + lm_head_copy
        return total

    def loss_bytes(self) -> float:
        """Returns the bytes that the loss's backward needs beyond saved activations, including weights FSDP gathers."""
        k, s, w, mixed = self.k, self.engine.itemsize, self.engine.master_itemsize, self.engine.is_mixed_precision
        gathered = s * (k.head + k.block) if self.is_zero3 else 0.0
        if self.layout.pipeline == 1:
            chunk = min(1.0, loss_chunk_size(self.engine.model.vocab) * self.layout.tensor / k.tokens)
            logits = chunk * k.logits * (s / w + (1 if mixed and self.layout.tensor > 1 else 0))
            logits += k.gathered_hidden_bytes + (self.compute_copy_itemsize if mixed else w) * k.lm_head
            logits += k.lm_head if self.engine.use_fp8 else 0.0  # the head's weights in 8 bits
            return max(logits, (s if self.fsdp and mixed else self.grad_itemsize) * k.lm_head) + gathered
        # Logits upcast for the vocab-parallel softmax; the scaled gradient; the weight gradient.
        upcast = k.logits if mixed and self.layout.tensor > 1 else 0.0
        scaled = k.logits * s / w
        weight_grad = s * k.lm_head + (scaled if self.layout.has_split_backward else 0.0)
        return max(upcast, scaled, weight_grad) + gathered

    def after_loss_bytes(self, saved: float) -> float:
        """Returns the bytes while a pipeline accumulates the LM head's gradient: logits are freed by then, and with
        FSDP everything that the micro-batch saved (`saved` bytes)."""
        k, s, w = self.k, self.engine.itemsize, self.engine.master_itemsize
        if self.fsdp:
            return (self.grad_itemsize + w / self.layout.weight_shards) * k.lm_head - saved
        return self.grad_itemsize * k.lm_head - k.logits * s / w - self.compute_copy_itemsize * k.lm_head

    def embed_grad_bytes(self) -> float:
        """Returns the bytes of the embedding's gradient while it is computed and accumulated."""
        k, s, w = self.k, self.engine.itemsize, self.engine.master_itemsize
        if self.fsdp:
            return (s + w + w / self.layout.weight_shards) * k.embed
        tokens, *_ = self.engine.params_by_module(self.layout.tensor)["embed"].values()
        return self.grad_itemsize * tokens
