"""Exact bytes that a rank of our engine communicates per step, by axis and collective.

Counts as a dry run does: the larger side of each collective, on rank 0 of every axis but the pipeline. Parameters come
from `EngineModel`, padded as the engine pads them; `tests/test_dryrun.py` checks equality to the byte.
"""

from collections import Counter

from shardwise.layout import AXES, Layout
from shardwise.planner.costs.engine_memory import EngineModel
from shardwise.planner.costs.memory_model import StageLayers
from shardwise.schedules.simulate import PipelineProgram, named_program

Traffic = Counter[tuple[str, str]]  # bytes by axis and collective


def engine_traffic(
    engine: EngineModel, layout: Layout, rank: int, micro_batches: int, program: PipelineProgram | None = None
) -> dict[tuple[str, str], int]:
    """Returns a pipeline rank's bytes by axis and collective. `program`: that of a synthesized schedule."""
    stages = engine.stages(layout)
    stages_of_rank = [stages[stage] for stage in layout.stages_of(rank)]
    totals: Traffic = Counter()
    sent = engine.remote_neighbors(layout, rank) * micro_batches * round(engine.block_sizes(layout).hidden_bytes)
    totals["pipeline", "send"] = totals["pipeline", "receive"] = sent
    if layout.tensor > 1:
        _add_tensor_traffic(totals, engine, layout, stages_of_rank, micro_batches)
    if layout.data > 1:
        _add_data_traffic(totals, engine, layout, stages_of_rank, rank, micro_batches, program)
    if layout.pipeline > 1 and engine.model.tied and (stages_of_rank[0].first != stages_of_rank[-1].last):
        table, *_ = engine.params_by_module(layout.tensor)["embed"]
        totals["tied_weights", "all-reduce"] += engine.master_itemsize * table.shard_numel(layout.shard)
    # The number of targets; then loss and gradient norm.
    sole_axis = [axis for axis in AXES if getattr(layout, axis) == layout.world > 1]
    if layout.data > 1:
        totals[sole_axis[0] if sole_axis else "data", "all-reduce"] += engine.master_itemsize
    if layout.world > 1:
        world_axis = "data" if layout.data == layout.world else "world"
        totals[sole_axis[0] if sole_axis else world_axis, "all-reduce"] += 2 * engine.master_itemsize
    return {key: size for key, size in totals.items() if size}


def _add_tensor_traffic(
    totals: Traffic, engine: EngineModel, layout: Layout, stages_of_rank: list[StageLayers], micro_batches: int
) -> None:
    """Adds the all-gathers and reduce-scatters at the edges of sequence-parallel regions; a backward swaps them."""
    blocks, first, last = (sum(each) for each in zip(*stages_of_rank, strict=True))
    edges = 4 * blocks + first + last
    # The blocks that repeat their forward, including its collectives.
    recomputed = sum(stage.blocks - int(stage.blocks * layout.kept_fraction) for stage in stages_of_rank)
    stream = micro_batches * round(engine.block_sizes(layout).gathered_hidden_bytes)
    totals["tensor", "all-gather"] += stream * (edges + 2 * recomputed)
    # Recomputation stops once all saved tensors exist, which is before the block's last reduce-scatter.
    totals["tensor", "reduce-scatter"] += stream * (edges + (2 if layout.has_split_backward else 1) * recomputed)
    tokens = layout.micro_batch * engine.model.sequence
    # The loss reduces each token's maximum, sum and target logit.
    totals["tensor", "all-reduce"] += last * micro_batches * 3 * engine.master_itemsize * tokens
    for stage_layers in stages_of_rank:
        replicated = [p.shard_numel(layout.shard) for p in engine.parameters(layout, stage_layers) if not p.is_sharded]
        totals["tensor", "all-reduce"] += engine.master_itemsize * sum(replicated)


def _split_backward_count(layout: Layout, stage: int, micro_batches: int, program: PipelineProgram | None) -> int:
    """Returns how many backwards of a stage run in two halves, each of which gathers the weights."""
    if not layout.has_split_backward or stage == 0:
        return 0
    if program is None and layout.schedule != "dualpipev":
        return micro_batches
    simulated = min(micro_batches, 2 * layout.stage_count)  # backwards in the steady state are not split
    program = program or named_program(layout.schedule, layout.pipeline, layout.stages_per_rank, simulated)
    return sum(action.stage == stage and action.kind == "I" for action in program.actions)


def _add_data_traffic(
    totals: Traffic, engine: EngineModel, layout: Layout, stages_of_rank: list[StageLayers], rank: int,
    micro_batches: int, program: PipelineProgram | None,
) -> None:  # fmt: skip
    shard, w = layout.shard, engine.master_itemsize
    numels = [sum(p.shard_numel(shard) for p in engine.parameters(layout, stage)) for stage in stages_of_rank]
    fsdp = shard > 1 and layout.zero > 1
    times = micro_batches if fsdp else 1
    if shard > 1:
        totals["shard", "reduce-scatter"] += times * shard * sum(numels) * w
        size = shard * (engine.itemsize if fsdp else w)
        for numel, stage in zip(numels, layout.stages_of(rank)):
            gathers = 1
            if layout.zero == 3:
                gathers = 2 * micro_batches + _split_backward_count(layout, stage, micro_batches, program)
            totals["shard", "all-gather"] += gathers * size * numel
    if layout.replicate > 1:
        totals["replicate", "all-reduce"] += times * sum(numels) * w
