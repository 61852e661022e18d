"""A model that is not a sequence of equal blocks, as the costs of its modules: traced, or listed by its family."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.models.family import TableSpec
from shardwise.models.operator_costs import OperatorCosts
from shardwise.planner.costs.decoder_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class OperatorListModel(ModelShape):
    """A model as a list of modules. The search sees one head and one position, unless tensor ranks can split it."""

    # Returns the modules' costs for a micro-batch size and, if the model has several heads, a tensor degree.
    make_operators: Callable[..., tuple[OperatorCosts, ...]]
    tables: Sequence[TableSpec] = ()  # embedding tables in host memory
    has_ends: bool = False  # whether the first and last module are the ends of a pipeline of blocks

    @property
    def stages(self) -> int:
        return self.layers if self.has_ends else 1

    @property
    def context_positions(self) -> int:
        return 1

    @cached_property
    def parameters(self) -> int:
        return self.active_parameters + sum(table.size for table in self.tables)

    @cached_property
    def active_parameters(self) -> int:
        return sum(module.parameters for module in self.make_operators(1))

    def precision(self, requested: str) -> str:
        """Returns the precision of the largest matmul."""
        matmuls = (matmul for module in self.make_operators(1) for matmul in module.products)
        return max(matmuls, key=lambda matmul: matmul.flops).precision(requested)

    def flops(self, samples: int) -> float:
        return 3.0 * self.block_flops(samples)

    def block_flops(self, samples: int) -> float:
        return samples * sum(module.flops for module in self.make_operators(1))
