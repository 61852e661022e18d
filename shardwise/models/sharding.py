"""Sharding plans: how tensor parallelism splits a model, which weights are tied and how each is initialized, as data.

A model states its plan and holds no parallel code. `shardwise.parallel` applies the plan, the planner computes costs
from it, and `verify` checks the result. Names are `fnmatch` patterns of parameters or modules; the first match wins."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial


def is_adapter(parameter: str) -> bool:
    """Whether this is the name of an adapter's parameter (`shardwise.models.lora`)."""
    return parameter.endswith(("lora_A", "lora_B"))


def base_weight(adapter: str) -> str:
    """Returns the name of the weight that an adapter's parameter belongs to."""
    name = adapter.removesuffix("lora_A").removesuffix("lora_B")
    return f"{name}weight" if name.endswith(".") else name.removesuffix("_")


@dataclass(frozen=True)
class ShardDim:
    """Splits the parameters that match `parameter` along `dim`. `unit` rows, such as those of a head, stay together.
    If the units do not divide by the tensor degree and `head_rows` is set, every rank keeps the full parameter and uses
    the rows that its own heads need."""

    parameter: str
    dim: int
    unit: int = 1
    head_rows: tuple[tuple[int, ...], ...] = ()


Colwise = partial(ShardDim, dim=0)
"""Splits output features: dim 0 of a linear weight or bias, dim 1 of stacked experts (E, out, in)."""
Rowwise = partial(ShardDim, dim=1)
"""Splits input features: dim 1 of a linear weight, dim 2 of stacked experts, dim 0 of an embedding."""


@dataclass(frozen=True)
class ModuleRule:
    """What tensor parallelism does around the modules that match `module`."""

    module: str


@dataclass(frozen=True)
class SequenceRegion(ModuleRule):
    """A module that runs on full sequences with sharded weights.

    Its input is all-gathered along the sequence; its output is a partial sum, which is reduce-scattered along the
    sequence. `rowwise` names the submodule or parameter that computes the partial sum; the bias of a submodule is added
    once, after the sum. `uneven` lists attributes to set on the module if its heads do not divide by the tensor degree.
    """

    rowwise: str
    uneven: tuple[tuple[str, object], ...] = ()


class VocabEmbedding(ModuleRule):
    """An embedding with a sharded vocabulary; the sum over ranks is reduce-scattered along the sequence."""


class VocabHead(ModuleRule):
    """An LM head with a sharded vocabulary, whose input is all-gathered along the sequence, and its loss."""


@dataclass(frozen=True)
class AllReduceOutput(ModuleRule):
    """A linear layer with split inputs: its output is a partial sum, which is all-reduced; the bias is added once."""

    splits_input: bool = False  # whether the input is whole, so that each rank takes its own features of it


class GatherOutput(ModuleRule):
    """A linear layer with split outputs, which are all-gathered."""


class VocabLookup(ModuleRule):
    """An embedding with a sharded vocabulary, whose lookups are all-reduced."""


@dataclass(frozen=True)
class InitSpec:
    """How a parameter is initialized: `normal` with standard deviation `std`, `ones`, `zeros`, or `fan_in`, which is
    normal with the variance of PyTorch's linear layers, 1 / (3 x input features)."""

    kind: str
    std: float = 0.0


@dataclass(frozen=True)
class ShardingPlan:
    shard_dims: tuple[ShardDim, ...]
    modules: tuple[ModuleRule, ...]
    ties: tuple[tuple[str, str], ...] = ()  # tied parameters, as pairs (alias, canonical name)
    init: tuple[tuple[str, InitSpec], ...] = ()  # pairs (parameter pattern, initialization)
    stage_ties: tuple[str, ...] | None = None  # parameters that the first and last stage share; None: all tied
    splits_sequence: bool = True
    """Whether activations between the modules of `modules` are split along the sequence over the tensor axis."""
    block_pattern: str = "block*"  # pattern of the repeated blocks
    compared_modules: tuple[str, ...] = ()
    """Patterns of the modules with (sample, position, feature) outputs that `verify` compares, in forward order."""

    quantize: str = ""  # how the weights of `quantized` are rounded (`shardwise.models.quantize`)
    quantized: frozenset[str] = frozenset()

    def shard_dim_of(self, parameter: str) -> ShardDim | None:
        """Returns how a parameter is split. Of an adapter, A has the columns of its weight, and B the rows; a layer
        that splits its input gives partial sums either way, and gradients of the whole part are summed."""
        if is_adapter(parameter):
            rule = self.shard_dim_of(base_weight(parameter))
            of_experts = not parameter.endswith((".lora_A", ".lora_B"))
            own_dim = (1 if parameter.endswith("lora_A") else 0) + of_experts
            is_split = rule is not None and (rule.dim == own_dim or (of_experts and rule.dim == 0))
            return rule if is_split else None
        return next((rule for rule in self.shard_dims if fnmatchcase(parameter, rule.parameter)), None)

    def is_matrix(self, parameter: str, dims: int) -> bool:
        """Whether a parameter is a block's matmul weight or a stack of them; routers and embeddings are not."""
        is_matmul_weight = (dims == 2 and parameter.endswith(".weight")) or (dims == 3 and ".bank." in parameter)
        return is_matmul_weight and fnmatchcase(parameter, f"{self.block_pattern}.*")

    @property
    def tied_parameters(self) -> set[str]:
        """Returns the canonical names of parameters that the first and the last stage share."""
        return {name for _, name in self.ties} if self.stage_ties is None else set(self.stage_ties)

    def canonical_name(self, parameter: str) -> str:
        """Returns the canonical name of a tied parameter, and any other name unchanged."""
        return dict(self.ties).get(parameter, parameter)
