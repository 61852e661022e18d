"""The inputs and results of an estimate."""

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.layout import Layout
from shardwise.planner.costs.block_time import KernelProfile
from shardwise.planner.costs.engine_memory import EngineModel
from shardwise.planner.costs.memory_model import FrameworkProfile, RankMemory, StageLayers
from shardwise.planner.costs.model_shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """What a step computes, independent of the layout."""

    shape: ModelShape
    kernel_profile: KernelProfile
    samples: int
    framework_profile: FrameworkProfile = FrameworkProfile()
    # Our engine's exact stages, memory and traffic, if known. Otherwise stages are split as evenly as possible.
    engine: EngineModel | None = None


@dataclass(frozen=True)
class StepTiming:
    """Seconds of a step and of its parts."""

    seconds: float
    bubble: float  # fraction of the pipeline's time in which the slowest rank idles
    data: float  # exposed communication of the data axes
    update: float  # optimizer update


@dataclass(frozen=True)
class Prediction:
    """Predicted step time, and memory of each pipeline rank."""

    layout: Layout
    timing: StepTiming
    memory: tuple[RankMemory, ...]
    exposed: dict[str, float]  # seconds of communication that does not overlap with compute, by axis
    # Bytes per step that each pipeline rank communicates, by axis; empty without an `EngineModel`.
    traffic: tuple[dict[str, int], ...] = ()

    @property
    def seconds(self) -> float:
        return self.timing.seconds

    @property
    def bubble(self) -> float:
        return self.timing.bubble

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


class ModuleLoad(NamedTuple):
    """Seconds of forward and backward of one micro-batch through a block, the embedding and the head."""

    block: float
    first: float
    last: float

    def slowest_rank_time(self, partition: StagePartition) -> float:
        block, first, last = self
        return max([n * block + (first if a else 0.0) + (last if b else 0.0) for n, a, b in partition.distinct_ranks])


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one micro-batch through one block, including exposed communication and recomputation."""

    forward: float
    backward: float
    weight_grad: float  # the part of `backward` that computes weight gradients
    exposed: dict[str, float]
