"""Predicts step time and memory of a layout in closed form, fast enough for a search over many layouts; only the
pipeline schedules of those that can be among the best are simulated."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from shardwise.layout import AUTO_SCHEDULES, V_SHAPED, Layout
from shardwise.planner.costs import cached_by, memory_model
from shardwise.planner.costs.engine_memory import EngineModel, stage_layers
from shardwise.planner.costs.machine import BlockTimeModel, KernelProfile, Machine, ModuleTime, ParallelDegrees
from shardwise.planner.costs.memory_model import FrameworkProfile, MemoryInputs, RankMemory, StageLayers
from shardwise.planner.costs.model_shape import ModelShape
from shardwise.schedules.simulate import PeakCounts, Simulation, StageCosts, lower_bound, peaks_in_flight, step_seconds
from shardwise.schedules.synthesize import make_auto_schedule


@dataclass(frozen=True)
class Prediction:
    layout: Layout
    seconds: float
    bubble: float  # fraction of the pipeline's time in which the slowest rank idles
    update: float  # seconds of the optimizer update
    memory: tuple[RankMemory, ...]
    exposed: dict[str, float]  # seconds of communication that does not overlap with compute, by axis
    kept_fraction: float  # of the blocks: those that are not recomputed

    @property
    def peak_memory(self) -> float:
        return max(memory.total for memory in self.memory)


class StagePartition(NamedTuple):
    """How a pipeline splits the model."""

    stages: tuple[StageLayers, ...]
    ranks: tuple[StageLayers, ...]  # the stages of each rank, added up
    # Ranks among which one has the peak memory: the first and last of each distinct kind, and rank 1.
    representative_ranks: tuple[int, ...]
    distinct_ranks: tuple[StageLayers, ...]

    def largest_sum(self, block: float, first: float, last: float) -> float:
        return max([n * block + a * first + b * last for n, a, b in self.distinct_ranks])


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one micro-batch through one block, including exposed communication and recomputation."""

    forward: float
    backward: float
    weight_grad: float  # the part of `backward` that computes weight gradients
    exposed: dict[str, float]


BUCKET_BYTES = 1e8  # per gradient bucket
# Bytes per weight that the update of a single process moves: weight and two moments (read and written), gradient (read
# twice), low-precision copy (written).
UPDATE_BYTES = 34.0
ACCUMULATE_BYTES = 8.0  # per weight and micro-batch, to accumulate gradients over several micro-batches
CONTENTION = 0.1  # slowdown of compute by overlapped communication, as a fraction of the communication time
HOST_LINK_BANDWIDTH = 50e9  # bytes per second in each direction between page-locked host memory and a GPU (PCIe 5)
# Seconds of a schedule with a number of ranks, stages per rank and micro-batches.
ScheduleTime = Callable[[str, int, int, int, StageCosts], float]


def memory_inputs_key(estimator: "Estimator", layout: Layout) -> Hashable:
    return estimator.parallel_degrees(layout), layout.recompute, layout.pipeline == 1, layout.has_split_backward


class Estimator:
    """Predicts layouts of one job on one machine, and caches what layouts share.

    `benchmarks/frameworks.py` overrides attributes and methods to predict other people's software."""

    def __init__(
        self, machine: Machine, shape: ModelShape, kernel_profile: KernelProfile, samples: int,
        framework_profile: FrameworkProfile, engine: EngineModel | None = None,
    ):  # fmt: skip
        """`engine`: our engine's exact stages and memory, if known. Otherwise stages are as equal as possible."""
        self.machine, self.shape, self.kernel_profile, self.samples = machine, shape, kernel_profile, samples
        self.framework_profile, self.engine, self.efficiency = framework_profile, engine, machine.efficiency
        self.time_model = BlockTimeModel(machine, shape, kernel_profile)
        self.gathers_per_block = 1  # FSDP gathers a block's weights in one collective
        self.reduced_gradient_bytes = framework_profile.gradient_bytes
        self.schedule_time: ScheduleTime = step_seconds
        self.check: Callable[[Layout], object] = lambda layout: None  # raises LayoutError if the job cannot run in it
        self.layer_costs: Sequence[float] = ()  # of embedding, layers and head, by which our engine cuts stages
        self.loss_chunk = 0  # positions whose logits a fused loss has at once; 0: all
        self.memory_limit = machine.device.memory  # largest predicted peak that counts as fitting

    def predict(self, layout: Layout) -> Prediction:
        pipeline = self.pipeline_time(layout, self.schedule_time)
        bubble = 1.0 - self.micro_batches(layout) * self.slowest_rank_time(layout) / pipeline
        _, update = self.per_step_times(layout)
        memory = tuple(self.memory(layout, rank) for rank in range(layout.pipeline))
        seconds, kept_fraction = self.step_time(layout, pipeline), self.kept_fraction(layout)
        return Prediction(layout, seconds, bubble, update, memory, self.exposed(layout), kept_fraction)

    def memory(self, layout: Layout, rank: int, peaks: PeakCounts | None = None) -> RankMemory:
        """`peaks`: those of a schedule that is being synthesized."""
        count, profile = self.micro_batches(layout), self.framework_profile
        if peaks is None and self.is_auto_schedule(layout):
            peaks = self.auto_schedule(layout).program.peak_in_flight(rank)
        schedule = layout.schedule, layout.pipeline, layout.stages_per_rank
        place = layout, rank, [self.stages(layout).stages[stage] for stage in layout.stages_of(rank)]
        work = count, peaks or peaks_in_flight(*schedule, rank, count)
        if self.engine is not None:
            return self.engine.memory(*place, *work, profile)
        inputs, itemsize = self.memory_inputs(layout), self.kernel_profile.itemsize
        return memory_model.rank_memory(inputs, profile, itemsize, *place, *work)

    @staticmethod
    def is_auto_schedule(layout: Layout) -> bool:
        """Returns whether the planner synthesizes the layout's schedule."""
        return layout.pipeline > 1 and layout.schedule in AUTO_SCHEDULES

    @cached_by(lambda self, layout: layout)
    def auto_schedule(self, layout: Layout) -> Simulation:
        memory = lambda rank, peaks: self.memory(layout, rank, peaks).total  # noqa: E731
        costs, count = self.stage_costs(layout), self.micro_batches(layout)
        return make_auto_schedule(layout, costs, count, memory, self.memory_limit)

    def peak_memory(self, layout: Layout) -> float:
        return max([self.memory(layout, rank).total for rank in self.stages(layout).representative_ranks])

    def fits(self, layout: Layout) -> bool:
        ranks, limit = self.stages(layout).representative_ranks, self.memory_limit
        return all(self.memory(layout, rank).total <= limit for rank in ranks)

    def predict_seconds(self, layout: Layout) -> float:
        return self.step_time(layout, self.pipeline_time(layout, self.schedule_time))

    def min_seconds(self, layout: Layout) -> float:
        """Returns a lower bound of `predict_seconds` that takes no simulation."""
        return self.step_time(layout, self.pipeline_time(layout, lower_bound))

    def pipeline_time(self, layout: Layout, schedule_time: ScheduleTime) -> float:
        if layout.pipeline == 1:
            return self.micro_batches(layout) * self.slowest_rank_time(layout)
        if self.is_auto_schedule(layout):
            return self.auto_schedule(layout).seconds
        shape = layout.schedule, layout.pipeline, layout.stages_per_rank, self.micro_batches(layout)
        return schedule_time(*shape, self.stage_costs(layout))

    def step_time(self, layout: Layout, pipeline: float) -> float:
        """Returns the seconds of a step whose micro-batches take `pipeline` seconds."""
        if self.efficiency.uncontended_speedup > 1.0 and layout.pipeline > 1:  # idle ranks leave their cores to others
            whole_model = StageLayers(self.shape.layers, True, True)
            balanced = whole_model.sum(*self.module_load(layout)) / layout.pipeline
            balanced = self.micro_batches(layout) * (balanced + self.exposed_p2p(layout))
            pipeline = max(pipeline / self.efficiency.uncontended_speedup, balanced)
        pipeline *= self.efficiency.split_backward if layout.pipeline > 1 and layout.has_split_backward else 1.0
        return (pipeline + sum(self.per_step_times(layout)) + self.efficiency.fixed_seconds) * self.jitter(layout.world)

    def jitter(self, world: int) -> float:
        return 1.0 + self.efficiency.jitter * log2(max(1.0, world / self.machine.cluster.domain_size))

    def slowest_rank_time(self, layout: Layout) -> float:
        return self.exposed_p2p(layout) + self.stages(layout).largest_sum(*self.module_load(layout))

    def module_load(self, layout: Layout) -> tuple[float, float, float]:
        """Returns the seconds of one micro-batch, forward and backward, through a block, the embedding and the head."""
        block = self.block_time(layout)
        _, first, last = self.module_times(self.parallel_degrees(layout))
        return block.forward + block.backward, first.total, last.total

    def stage_costs(self, layout: Layout) -> StageCosts:
        """Returns the seconds of each stage. Exposed transfers count as work of both sender and receiver."""
        block, hop = self.block_time(layout), self.exposed_p2p(layout) / (2 * layout.stages_per_rank)
        _, first, last = self.module_times(self.parallel_degrees(layout))
        forwards = block.forward, first.forward + first.traffic, last.forward + last.traffic
        backwards = block.backward, first.backward + first.traffic, last.backward + last.traffic
        stage_times: dict[StageLayers, tuple[float, float, float]] = {}
        stages = self.stages(layout).stages
        for stage in set(stages):
            weight = stage.sum(block.weight_grad, first.weight_grad, last.weight_grad)
            stage_times[stage] = stage.sum(*forwards) + hop, stage.sum(*backwards) - weight + hop, weight
        costs = StageCosts(*zip(*[stage_times[stage] for stage in stages]))
        return costs.as_executed() if layout.has_split_backward else costs

    @cached_by(lambda self, layout: (
        self.parallel_degrees(layout), layout.recompute, layout.zero, layout.shard, layout.replicate, layout.pipeline,
        layout.stage_count, layout.schedule in V_SHAPED, layout.stages, layout.world == 1))  # fmt: skip
    def per_step_times(self, layout: Layout) -> tuple[float, float]:
        """Returns exposed seconds per step of data-parallel communication and of the update, on the fullest rank."""
        block, inputs = self.block_time(layout), self.memory_inputs(layout)
        ranks, micro_batches = self.stages(layout).ranks, self.micro_batches(layout)
        fullest = max((ranks[0], ranks[-1]), key=inputs.dense_weights)
        dense_weights, experts = inputs.dense_weights(fullest), fullest.blocks * inputs.expert_weights
        data = self.data(layout, dense_weights, experts, fullest.blocks * (block.forward + block.backward))
        updated = memory_model.sharded_weights(layout, dense_weights, experts)
        update_bytes = self.framework_profile.update_bytes
        if self.keeps_compute_copy(layout):
            update_bytes = UPDATE_BYTES + (ACCUMULATE_BYTES * micro_batches if micro_batches > 1 else 0.0)
            update_bytes *= self.machine.trained
        copied_seconds = self.framework_profile.offloaded_bytes * updated / HOST_LINK_BANDWIDTH
        return data, max(self.machine.memory_time(update_bytes * updated, bulk=True), copied_seconds)

    def exposed(self, layout: Layout) -> dict[str, float]:
        """Returns the seconds of a step that the busiest rank waits for communication, by axis."""
        block, micro_batches = self.block_time(layout), self.micro_batches(layout)
        blocks = max(rank.blocks for rank in self.stages(layout).ranks)
        exposed = {axis: micro_batches * blocks * seconds for axis, seconds in block.exposed.items()}
        exposed["data"] = exposed.get("data", 0.0) + self.per_step_times(layout)[0]
        exposed["pipeline"] = micro_batches * self.exposed_p2p(layout)
        return {axis: seconds for axis, seconds in exposed.items() if seconds}

    @cached_by(lambda _, layout: (layout.pipeline, layout.stages_per_rank, layout.schedule in V_SHAPED, layout.stages))
    def stages(self, layout: Layout) -> StagePartition:
        """Returns our engine's stages; of other software the user's, or stages as equal as possible."""
        p = layout.pipeline
        if self.layer_costs:
            stages = stage_layers(layout, self.layer_costs)
        else:
            blocks, last = list(layout.stages) or [0] * layout.stage_count, layout.stage_count - 1
            for rank, count in enumerate(split_evenly(self.shape.layers, p)) if not layout.stages else ():
                for stage, stage_blocks in zip(layout.stages_of(rank), split_evenly(count, layout.stages_per_rank)):
                    blocks[stage] = stage_blocks
            stages = tuple(StageLayers(n, stage == 0, stage == last) for stage, n in enumerate(blocks))
        parts = (zip(*(stages[stage] for stage in layout.stages_of(rank))) for rank in range(p))
        ranks = tuple(StageLayers(sum(blocks), any(first), any(last)) for blocks, first, last in parts)
        representatives = {*range(p)} if layout.schedule in V_SHAPED else {min(1, p - 1)}  # in a V, any may be fullest
        for rank_layers in set(ranks):
            representatives |= {ranks.index(rank_layers), p - 1 - ranks[::-1].index(rank_layers)}
        return StagePartition(stages, ranks, tuple(sorted(representatives)), tuple(set(ranks)))

    def micro_batches(self, layout: Layout) -> int:
        return max(1, round(self.samples / layout.data / layout.micro_batch))

    def parallel_degrees(self, layout: Layout) -> ParallelDegrees:
        # Our tensor axis splits experts unless it holds different ones; that of others, experts wider than the model.
        is_split = (
            layout.expert_ranks == layout.expert if self.layer_costs else self.shape.expert_ffn > self.shape.width
        )
        expert_tensor = layout.tensor if is_split else 1
        return ParallelDegrees(layout.tensor, layout.context, layout.expert, layout.micro_batch, expert_tensor)

    @cached_by(lambda self, degrees: degrees)
    def module_times(self, degrees: ParallelDegrees) -> tuple[ModuleTime, ModuleTime, ModuleTime]:
        """Returns the times of a block (dense and sparse blocks averaged), the embedding and the head."""
        model, share = self.time_model, self.shape.sparse_layers / self.shape.layers
        parts = [(1.0 - share, model.block(degrees, False))] if share < 1 else []
        parts += [(share, model.block(degrees, True))] if share else []
        block = ModuleTime(*(sum(weight * part[n] for weight, part in parts) for n in range(len(ModuleTime._fields))))
        return block, model.embedding(degrees), model.head(degrees)

    @cached_by(memory_inputs_key)
    def memory_inputs(self, layout: Layout) -> MemoryInputs:
        shape, itemsize, t = self.shape, self.kernel_profile.itemsize, layout.tensor
        tokens, share = layout.micro_batch * shape.sequence / layout.context, shape.sparse_layers / shape.layers
        dense_weights, head_weights = shape.attention_weights + shape.dense_ffn_weights, shape.vocab * shape.width / t
        dense = self.activation_bytes(layout, False)
        sparse = self.activation_bytes(layout, True) if share else dense
        saved_all, selective, full = ((1 - share) * d + share * s for d, s in zip(dense, sparse, strict=True))
        kept_fraction, hidden_bytes = layout.kept_fraction, itemsize * tokens * shape.width
        operands = 0.0
        if self.framework_profile.saves_fp8_inputs:
            saved_all += tokens * (2 * shape.width + (shape.attention_width + (1 - share) * shape.ffn) / t)
            operands = 2 * tokens * (1 - share) * shape.ffn / t  # both of a weight gradient in 8 bits, transposed
        partly = kept_fraction * saved_all + (1 - kept_fraction) * full
        saved_by_policy = {"none": saved_all, "selective": selective, "full": full}
        block_weights = (1 - share) * (dense_weights / t) + share * (shape.non_expert_weights / t)
        if self.engine is not None:  # whose tensor ranks have all weights of an attention with too few heads
            block_weights = sum(self.engine.params_by_module(t)["block"].values())
        positions = tokens * shape.logit_fraction
        return MemoryInputs(
            block_weights=block_weights,
            expert_weights=share * shape.expert_weights / layout.expert / self.parallel_degrees(layout).expert_tensor,
            first_weights=shape.embedding_weights / t, head_weights=head_weights,
            last_weights=0.0 if shape.tied and layout.pipeline == 1 else head_weights,
            saved_per_block=saved_by_policy.get(layout.recompute, partly),
            recomputed_per_block=operands + (0.0 if layout.recompute == "none" else saved_all),
            pending_per_block=saved_all + memory_model.pending_gradient_bytes(shape, itemsize, layout),
            logits=self.logits_bytes(layout, positions),
            saved_logits=itemsize * positions * shape.vocab / t if self.loss_chunk else 0.0,
            hidden_bytes=hidden_bytes, recv_buffer_bytes=hidden_bytes / t, kept_fraction=kept_fraction)  # fmt: skip

    def logits_bytes(self, layout: Layout, positions: float) -> float:
        if self.loss_chunk and layout.pipeline == 1:  # our fused loss has the logits of a chunk, which become gradients
            weight_grad = 4 * self.shape.vocab * self.shape.width / layout.tensor * (self.machine.trained == 1.0)
            logits = min(positions / layout.tensor, self.loss_chunk) * self.shape.vocab
            return self.kernel_profile.itemsize * logits + weight_grad
        size = self.framework_profile.logits
        if self.loss_chunk:  # ours are kept, and their scaled gradients or, for a vocabulary that is cut, upcast logits
            size = self.kernel_profile.itemsize + max(self.kernel_profile.itemsize, 4 * (layout.tensor > 1))
        return size * positions * self.shape.vocab / layout.tensor

    def activation_bytes(self, layout: Layout, sparse: bool) -> tuple[float, float, float]:
        profile = self.kernel_profile
        options = profile.compiled and not layout.has_split_backward, bool(profile.adapter_features)
        return memory_model.block_activation_bytes(self.shape, profile.itemsize, layout, sparse, *options)

    @cached_by(lambda self, layout: (self.parallel_degrees(layout), layout.recompute, layout.zero, layout.shard,
                                     layout.pipeline == 1, layout.world == 1, layout.has_split_backward,
                                     self.kept_fraction(layout)))  # fmt: skip
    def block_time(self, layout: Layout) -> BlockTime:
        """Returns the time of a block, with recomputation and exposed communication."""
        inner, _, _ = self.module_times(self.parallel_degrees(layout))
        recompute_fraction, backward_extra = 1.0 - self.kept_fraction(layout), inner.traffic
        if (moved := self.framework_profile.cast_bytes) and not self.keeps_compute_copy(layout):
            weights = (inputs := self.memory_inputs(layout)).block_weights + inputs.expert_weights
            backward_extra += self.machine.memory_time(moved * weights, bulk=True)
        host = 1.5 * inner.launch_seconds  # in both: a backward has twice the kernels, but no Python between them
        forward = self.machine.bottleneck_time(inner.forward + inner.traffic, host)
        backward = self.machine.bottleneck_time(inner.backward + backward_extra, host)
        backward += recompute_fraction * (forward - inner.not_recomputed)
        if layout.recompute == "selective":
            backward += self.selective_recompute_time(layout, inner)
        if self.framework_profile.offloads_activations:  # copied to the host behind a forward, and back
            copied = self.memory_inputs(layout).saved_per_block / HOST_LINK_BANDWIDTH
            forward, backward = max(forward, copied), max(backward, copied)
        exposed = {axis: (2.0 + recompute_fraction) * getattr(inner, axis) for axis in ("tensor", "context", "expert")}
        if layout.zero >= 2 and layout.shard > 1:
            gather = self.efficiency.weight_gather * self._weight_gather_time(layout)
            exposed_forward = self._exposed_comm(gather, forward) if layout.zero == 3 else 0.0
            exposed_backward = self._exposed_comm((2 if layout.zero == 3 else 1) * gather, backward)
            forward, backward = forward + exposed_forward, backward + exposed_backward
            exposed["data"] = exposed_forward + exposed_backward
        return BlockTime(forward, backward, inner.weight_grad, exposed)

    def kept_fraction(self, layout: Layout) -> float:
        """Returns the fraction of blocks that are not recomputed: in our engine whole blocks of each stage."""
        blocks = max(stage.blocks for stage in self.stages(layout).stages) if self.layer_costs else 0
        return int(blocks * layout.kept_fraction) / blocks if blocks else layout.kept_fraction

    def selective_recompute_time(self, layout: Layout, block: ModuleTime) -> float:
        """Returns the seconds that selective recomputation adds: it recomputes everything but matmuls and attention, as
        a compiled backward does anyway."""
        return 0.0 if self.kernel_profile.compiled else self.machine.memory_time(block.moved_bytes)

    def keeps_compute_copy(self, layout: Layout) -> bool:
        return self.framework_profile.casts_once and layout.world == 1

    def _weight_gather_time(self, layout: Layout) -> float:
        """Returns the seconds to all-gather a block's weights over their shards, or to reduce-scatter gradients."""
        shards, stride, size = layout.weight_shards, layout.tensor, self.kernel_profile.itemsize
        block, experts = size * (inputs := self.memory_inputs(layout)).block_weights, size * inputs.expert_weights
        gather = self.machine.all_gather(block, shards, stride, block / self.gathers_per_block)
        return gather + self.machine.all_gather(experts, max(1, shards // layout.expert), stride)

    def exposed_p2p(self, layout: Layout) -> float:
        """Returns the exposed seconds of transfers between stages, per micro-batch and rank."""
        if layout.pipeline == 1:
            return 0.0
        stride = layout.world // layout.pipeline
        transfer = self.machine.p2p(self.stage_output_bytes(layout), min(stride, self.machine.cluster.domain_size))
        stages = layout.stages_per_rank  # each of which gives the rank other work during a transfer
        return 2 * stages * transfer * (1.0 - self.efficiency.overlap_p2p) ** stages

    def stage_output_bytes(self, layout: Layout) -> float:
        """Returns the bytes of one micro-batch that one stage sends to the next."""
        tokens = layout.micro_batch * self.shape.sequence / layout.context
        return self.kernel_profile.itemsize * tokens * self.shape.width / layout.tensor

    def data(self, layout: Layout, dense_weights: float, experts: float, last_pass: float) -> float:
        """Returns the exposed seconds per step of reducing gradients and gathering updated weights."""
        ranks, shards, stride = layout.data * layout.context, layout.weight_shards, layout.tensor
        replicas = max(1, ranks // layout.expert)  # ranks that hold the same experts
        shard = min(replicas, max(1, shards // layout.expert))
        dense = self._sync_times(layout, dense_weights, shards, ranks // shards, stride)
        sparse = self._sync_times(layout, experts, shard, replicas // shard, stride * layout.expert)
        return self.exposed_sync_time(dense[0] + sparse[0], dense[1] + sparse[1], last_pass)

    def exposed_sync_time(self, reduce: float, gather: float, last_pass: float) -> float:
        """Returns the exposed seconds of gradient and weight traffic, which overlaps with the last micro-batch."""
        return self._exposed_comm(reduce + gather, last_pass)

    def bucket_bytes(self, layout: Layout) -> float:
        return BUCKET_BYTES

    def _sync_times(self, layout: Layout, numel: float, shard: int, replicas: int, stride: int) -> tuple[float, float]:
        """Returns the seconds to reduce gradients over shard and replicate ranks and to gather updated weights, without
        what ZeRO 2 and 3 communicate in each micro-batch."""
        gradient, size = self.reduced_gradient_bytes, self.kernel_profile.itemsize
        all_gather, all_reduce = self.machine.all_gather, self.machine.all_reduce
        bucket = self.bucket_bytes(layout)
        reduce = all_gather(gradient * numel, shard, stride, bucket) if layout.zero == 1 else 0.0
        gather = all_gather(size * numel, shard, stride, bucket) if layout.zero < 3 else 0.0
        reduce += self.efficiency.all_reduce * all_reduce(gradient * numel / shard, replicas, stride * shard, bucket)
        return reduce, gather

    def _exposed_comm(self, traffic: float, compute: float) -> float:
        """Returns the exposed part of `traffic` seconds that overlap with `compute` seconds, plus their contention."""
        return traffic - (1.0 - CONTENTION) * min(traffic, self.efficiency.overlap_data * compute)


def split_evenly(layers: int, pipeline: int) -> list[int]:
    """Returns the number of blocks of each pipeline rank; the first and last, with embedding and head, get fewer."""
    base, remainder = divmod(layers, pipeline)
    first = (pipeline - remainder) // 2
    return [base + (first <= rank < first + remainder) for rank in range(pipeline)]
