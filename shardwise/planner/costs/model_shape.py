"""The shape of a job's model: everything its cost depends on. A decoder is an embedding, blocks (dense, or sparse: with
experts) and a head; any other family is a list of the costs of its modules: traced, or listed by the family."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.models.config import ModelConfig
from shardwise.models.family import TableSpec
from shardwise.models.operator_costs import OperatorCosts
from shardwise.models.registry import family_of


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = True
    tied: bool = False
    causal: bool = True
    positions: int = 0  # learned position embeddings
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0  # hidden size of the experts that every token uses
    sparse_layers: int = 0  # blocks with experts; the others are dense
    # Multi-head latent attention: ranks of the low-rank projections of queries, and of keys and values.
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0  # multi-head latent attention: features per head with rotary positions
    logit_fraction: float = 1.0  # fraction of positions for which logits are computed
    has_ends: bool = True  # whether it is a pipeline of blocks between two ends
    single_micro_batch: bool = False  # whether each rank runs its samples as one
    has_exact_cost_model: bool = False  # whether `EngineModel` knows it exactly: so far dense decoders

    @property
    def stages(self) -> int:
        """The most pipeline stages it can be split into."""
        return self.layers if self.has_ends else 1

    @property
    def context_positions(self) -> int:
        """Positions that context ranks can split."""
        return self.sequence

    def precision(self, requested: str) -> str:
        """Returns the precision of the matmuls in a job of precision `requested`."""
        return requested

    @cached_property
    def query_width(self) -> int:
        return self.heads * (self.head_dim + self.qk_rope_head_dim)

    @cached_property
    def attention_width(self) -> int:
        """Features per token of attention's output."""
        return self.heads * self.head_dim

    @cached_property
    def projections(self) -> tuple[tuple[int, int, bool], ...]:
        """Attention's linear layers as (in, out, split by the tensor axis)."""
        width, kv = self.width, self.kv_heads * self.head_dim
        if not self.kv_lora_rank:
            return ((width, self.query_width + 2 * kv, True), (self.attention_width, width, True))
        down = self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim
        up = (self.q_lora_rank, self.query_width, True), (self.kv_lora_rank, 2 * self.attention_width, True)
        return ((width, down, False), *up, (self.attention_width, width, True))

    @cached_property
    def attention_weights(self) -> int:
        return sum(inner * outer for inner, outer, _ in self.projections)

    @cached_property
    def ffn_matrices(self) -> int:
        """Matrices of width x hidden in a feed-forward layer."""
        return 3 if self.gated else 2

    @cached_property
    def dense_ffn_weights(self) -> int:
        return self.ffn_matrices * self.width * self.ffn

    @cached_property
    def expert_weights(self) -> int:
        """Weights of all experts of one block."""
        return self.experts * self.ffn_matrices * self.width * self.expert_ffn

    @cached_property
    def non_expert_weights(self) -> int:
        """Weights of a sparse block without its experts."""
        shared_experts, router = self.ffn_matrices * self.width * self.shared_expert_ffn, self.width * self.experts
        return self.attention_weights + shared_experts + router

    @cached_property
    def embedding_weights(self) -> int:
        return (self.vocab + self.positions) * self.width

    @cached_property
    def parameters(self) -> int:
        dense = (self.layers - self.sparse_layers) * (self.attention_weights + self.dense_ffn_weights)
        sparse = self.sparse_layers * (self.non_expert_weights + self.expert_weights)
        return dense + sparse + self.embedding_weights + (0 if self.tied else self.vocab * self.width)

    @cached_property
    def active_parameters(self) -> int:
        """Matmul weights that one token uses, including the head."""
        unused = 0.0
        if self.experts:
            unused = self.sparse_layers * self.expert_weights * (1 - self.experts_per_token / self.experts)
        return round(self.parameters - unused - self.embedding_weights + (self.vocab * self.width if self.tied else 0))

    def flops(self, samples: int) -> float:
        """Returns the FLOPs of forward and backward; causal attention counts half of the scores."""
        head = 2.0 * self.logit_fraction * samples * self.sequence * self.vocab * self.width
        return 3.0 * (self.block_flops(samples) + head)

    def block_flops(self, samples: int) -> float:
        """Returns the forward FLOPs of all blocks, which full recomputation repeats."""
        tokens = samples * self.sequence
        scores = self.sequence * (0.5 if self.causal else 1.0)
        attention_flops = 2.0 * tokens * scores * (self.query_width + self.attention_width)
        return 2.0 * (self.active_parameters - self.vocab * self.width) * tokens + self.layers * attention_flops


@dataclass(frozen=True, kw_only=True)
class OperatorListModel(ModelShape):
    """A model as a list of modules. The search sees one head and one position, unless tensor ranks can split it."""

    # Returns the modules' costs for a micro-batch size and, if the model has several heads, a tensor degree.
    make_operators: Callable[..., tuple[OperatorCosts, ...]]
    untraceable: str = ""  # why the costs are a rough estimate from the parameters; empty: they were traced
    tables: Sequence[TableSpec] = ()  # embedding tables
    has_ends: bool = False  # if so, they are the first and the last module

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


def shape_of(config: ModelConfig, itemsize: int = 4) -> ModelShape:
    """Returns the shape from which the planner predicts a model; `itemsize`: bytes per element of an activation."""
    family = family_of(config)
    decoder = family.decoder_shape(config)
    if decoder is not None:
        return ModelShape(**decoder)
    refused = family.refusals(config)
    splits_layers, splits_heads = "pipeline" not in refused, "tensor" not in refused
    make_operators = family.operator_costs(config, itemsize)
    return OperatorListModel(
        layers=len(make_operators(1)) - 2 * splits_layers, make_operators=make_operators, has_ends=splits_layers,
        heads=int(getattr(config, "heads", 1)) if splits_heads else 1, sequence=config.length if splits_heads else 1,
        width=1, kv_heads=1, head_dim=1, ffn=0, vocab=0, tables=family.tables(config),
        single_micro_batch=bool(config.single_micro_batch), untraceable=family.untraceable(config))  # fmt: skip
