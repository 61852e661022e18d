"""Models that are no row of equal blocks, as lists of pieces: T5, ResNet, DLRM; or any module, by its trace.

The same `Estimator` and search serve; to them such a model is a row of mean pieces. All are planned along the data
axes, whole on each rank or in pieces by ZeRO; T5 over tensor and pipeline ranks, too. Its stages are taken to be even
in time, as our engine cuts them, and as large in memory as if all blocks were like the largest. The lists are of
operators that run one by one: norms, activations and sums each read and write memory.

The tables of a DLRM lie in the hosts' memory, dealt over the data ranks. Each step every rank reads the rows that the
samples of all ranks ask of it, sends them over the host's link and to the rank whose sample it is, and takes gradients
back the same way; nothing hides that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from statistics import fmean as mean

from shardwise.layout import Layout, kept_activation_fraction
from shardwise.models.dlrm_family import DLRMConfig
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.resnet import block_shapes
from shardwise.models.resnet_family import ResNetConfig
from shardwise.models.t5_family import T5Config
from shardwise.planner.costs.block_time import ModuleTime, ParallelDegrees
from shardwise.planner.costs.memory_model import MemoryInputs, WeightCounts
from shardwise.planner.costs.model_shape import ModelShape, shape_of
from shardwise.planner.costs.operator_costs import AttentionOp, MatMul, OperatorCosts, mean_module_time, operators_time
from shardwise.planner.estimate import Estimator

HOST_ROW_BANDWIDTH = (
    20e9  # bytes a second that one rank's share of a host reads or writes at random, in rows of some 500 bytes
)
HOST_LINK_BANDWIDTH = 25e9  # bytes a second and direction between host and device: PCIe 4 x16


@dataclass(frozen=True, kw_only=True)
class HostEmbeddingTables:
    """Embedding tables in the hosts' memory."""

    bytes: float
    rows: float
    """Bytes of rows that one sample reads."""
    pooled_bytes: float
    """Bytes that reach the device for one sample."""


@dataclass(frozen=True, kw_only=True)
class OperatorListModel(ModelShape):
    """A model as its pieces. To the search it has one head and one position, unless tensor ranks can cut it."""

    make_operators: Callable[..., tuple[OperatorCosts, ...]]
    """The pieces for a micro-batch of some samples, and for so many tensor ranks where there is more than one head."""
    tables: HostEmbeddingTables | None = None
    has_ends: bool = False
    """Whether the first and the last piece are ends of a row of blocks that a pipeline can cut."""

    @property
    def stages(self) -> int:
        return self.layers if self.has_ends else 1

    @property
    def context_positions(self) -> int:
        return 1

    @cached_property
    def parameters(self) -> int:
        return sum(piece.parameters for piece in self.make_operators(1)) + (
            round(self.tables.bytes / 4) if self.tables else 0
        )

    @cached_property
    def active_parameters(self) -> int:
        return sum(piece.parameters for piece in self.make_operators(1))

    def precision(self, requested: str) -> str:
        """Of most of the work."""
        largest = max((p for piece in self.make_operators(1) for p in piece.products), key=lambda p: p.flops)
        return largest.precision(requested)

    def flops(self, samples: int) -> float:
        return 3.0 * self.block_flops(samples)

    def block_flops(self, samples: int) -> float:
        return samples * sum(piece.flops for piece in self.make_operators(1))


def operator_list_model(
    make: Callable[..., tuple[OperatorCosts, ...]],
    tables: HostEmbeddingTables | None = None,
    heads: int = 1,
    sequence: int = 1,
    has_ends: bool = False,
) -> OperatorListModel:
    """A model that `make` gives for any micro-batch: a closed list, or `lambda n: trace(module, inputs(n))`."""
    return OperatorListModel(
        layers=len(make(1)) - 2 * has_ends, width=1, heads=heads, kv_heads=1, head_dim=1, ffn=0, vocab=0,
        sequence=sequence, make_operators=make, tables=tables, has_ends=has_ends,
    )  # fmt: skip


def planner_shape(model: DecoderConfig | T5Config | ResNetConfig | DLRMConfig, itemsize: int) -> ModelShape:
    """A job's model in the form that the planner takes; `size`: bytes of a number."""
    if isinstance(model, DecoderConfig):
        return shape_of(model)
    lists: dict[type, Callable[..., Iterator[OperatorCosts]]] = {
        T5Config: t5_operators,
        ResNetConfig: resnet_operators,
        DLRMConfig: dlrm_operators,
    }
    make = partial(_cached_operators, lists[type(model)], model, itemsize)
    if isinstance(model, T5Config):
        return operator_list_model(
            make, heads=model.heads, sequence=model.sequence + model.target_sequence, has_ends=True
        )
    if not isinstance(model, DLRMConfig):
        return operator_list_model(make)
    row = 4.0 * model.width
    sums = model.tables * row
    return operator_list_model(
        make, HostEmbeddingTables(bytes=row * sum(model.table_rows), rows=sums * model.lookups, pooled_bytes=sums)
    )


@lru_cache(maxsize=64)
def _cached_operators(
    pieces: Callable[..., Iterator[OperatorCosts]], model: DecoderConfig, itemsize: int, samples: int, tensor: int = 1
) -> tuple[OperatorCosts, ...]:
    return tuple(pieces(model, itemsize, samples, tensor) if tensor > 1 else pieces(model, itemsize, samples))


class OperatorListEstimator(Estimator):
    """Predicts layouts of a model that is given as pieces."""

    @property
    def model(self) -> OperatorListModel:
        assert isinstance(self.work.shape, OperatorListModel)
        return self.work.shape

    def module_times(self, cut: ParallelDegrees) -> tuple[ModuleTime, ModuleTime, ModuleTime]:
        if cut not in self._module_times:
            first, blocks, last = self._split_ends(cut.micro_batch, cut.tensor)
            block_times, *ends = (
                [operators_time(self.machine, self.work.kernel_profile, piece, cut.tensor) for piece in part]
                for part in (blocks, first, last)
            )
            self._module_times[cut] = (
                mean_module_time(block_times),
                mean_module_time(ends[0]),
                mean_module_time(ends[1]),
            )
        return self._module_times[cut]

    def _split_ends(
        self, micro_batch: int, tensor: int
    ) -> tuple[Sequence[OperatorCosts], Sequence[OperatorCosts], Sequence[OperatorCosts]]:
        """First piece, blocks and last piece; all are blocks where there are no ends."""
        blocks = self.model.make_operators(micro_batch, *([tensor] if tensor > 1 else []))
        return (blocks[:1], blocks[1:-1], blocks[-1:]) if self.model.has_ends else ((), blocks, ())

    def stage_output_bytes(self, layout: Layout) -> float:
        return self.memory_inputs(layout).stage_output_bytes

    def memory_inputs(self, layout: Layout) -> MemoryInputs:
        key = layout.micro_batch, layout.recompute, layout.tensor, layout.pipeline > 1
        if key not in self._memory_inputs:
            first, blocks, last = self._split_ends(layout.micro_batch, layout.tensor)
            itemsize = self.work.kernel_profile.itemsize
            typical = max if layout.pipeline > 1 else mean  # some stage has the largest blocks alone
            weights = WeightCounts(
                typical(piece.parameters for piece in blocks), 0.0, sum(p.parameters for p in first),
                sum(p.parameters for p in last),
            )  # fmt: skip
            saved_all, inputs = typical(p.saved_bytes for p in blocks), typical(p.output_bytes for p in blocks)
            products = typical(
                sum(itemsize * p.groups * p.rows * p.columns for p in piece.products) for piece in blocks
            )
            share = kept_activation_fraction(layout.recompute)
            kept_fraction = float(layout.recompute != "full") if share is None else share
            saved_per_block = (
                min(saved_all, products + inputs) if layout.recompute == "selective" else kept_fraction * saved_all
            )
            saved_per_block += (1 - kept_fraction) * inputs
            recomputed_per_block = max(piece.saved_bytes for piece in blocks) if layout.recompute != "none" else 0.0
            hidden_bytes = max(piece.output_bytes for piece in (*first, *blocks))
            logits = sum(piece.saved_bytes for piece in last)
            self._memory_inputs[key] = MemoryInputs(
                weights=weights,
                framework_profile=self.work.framework_profile,
                itemsize=itemsize,
                saved_per_block=saved_per_block,
                recomputed_per_block=recomputed_per_block,
                logits=logits,
                hidden_bytes=hidden_bytes,
                stage_output_bytes=hidden_bytes,
                kept_fraction=kept_fraction,
                head_weights=weights.first,
            )
        return self._memory_inputs[key]

    def data(self, layout: Layout, own: float, experts: float, last_pass: float) -> float:
        seconds = super().data(layout, own, experts, last_pass)
        tables = self.model.tables
        if tables is None:
            return seconds
        samples = self.work.samples / layout.data
        one_way = samples * tables.pooled_bytes / HOST_LINK_BANDWIDTH + self.machine.all_to_all(
            samples * tables.pooled_bytes, layout.data, 1
        )
        # Rows are read for the forward, read and written for the update.
        return seconds + 2 * one_way + 3 * samples * tables.rows / HOST_ROW_BANDWIDTH


# The lists


def resnet_operators(model: ResNetConfig, itemsize: int, samples: int) -> Iterator[OperatorCosts]:
    """The stride of a bottleneck is in its 3 x 3 convolution."""
    imagenet = model.stem == "imagenet"
    side = -(-model.image_size // 2) if imagenet else model.image_size
    pixels = samples * 3 * model.image_size**2
    stem = _convolution_costs(itemsize, samples, side, 3, model.width, 7 if imagenet else 3, pixels)
    if imagenet:
        side = -(-side // 2)
        pooled = itemsize * samples * model.width * side**2
        # Places of maxima.
        yield _merge_costs(
            "stem", [stem], pooled, stem.output_bytes + 8 * pooled // itemsize, stem.output_bytes + pooled, 1
        )
    else:
        yield _merge_costs("stem", [stem], stem.output_bytes, 0, 0, 0)
    for number, (width_in, inner, stride) in enumerate(block_shapes(model)):
        inputs, input_side, side = samples * width_in * side**2, side, -(-side // stride)
        if model.has_bottlenecks:
            operators = [
                _convolution_costs(itemsize, samples, input_side, width_in, inner, 1, inputs),
                _convolution_costs(itemsize, samples, side, inner, inner, 3, samples * inner * input_side**2),
                _convolution_costs(itemsize, samples, side, inner, 4 * inner, 1, samples * inner * side**2, relu=False),
            ]
        else:
            operators = [
                _convolution_costs(itemsize, samples, side, width_in, inner, 3, inputs),
                _convolution_costs(itemsize, samples, side, inner, inner, 3, samples * inner * side**2, relu=False),
            ]
        width_out = inner * (4 if model.has_bottlenecks else 1)
        if stride > 1 or width_in != width_out:
            operators.append(
                _convolution_costs(itemsize, samples, side, width_in, width_out, 1, 0, relu=False)
            )  # of the same input
        out = itemsize * samples * width_out * side**2
        # The sum of both ways, and an activation in place, whose output the next block keeps.
        yield _merge_costs(f"block{number}", operators, out, 0, 5 * out, 2)
    width_in = 8 * model.width * (4 if model.has_bottlenecks else 1)
    weights = (width_in + 1) * model.num_classes
    yield OperatorCosts(
        name="head",
        parameters=weights,
        parameter_bytes=weights * itemsize,
        output_bytes=samples * model.num_classes * itemsize,
        saved_bytes=samples * width_in * itemsize,
        moved_bytes=itemsize * samples * width_in * (side**2 + 1),
        num_ops=2,
        products=(MatMul(samples, width_in, model.num_classes),),
    )


def _convolution_costs(
    itemsize: int, samples: int, side: int, inner: int, outer: int, window: int, kept: int, relu: bool = True
) -> OperatorCosts:
    """A convolution with `side` x `side` outputs, its norm, and an activation in place. The convolution keeps `kept`
    numbers, the norm what it reads and two numbers a channel."""
    out = itemsize * samples * outer * side**2
    weights = inner * outer * window**2 + 2 * outer
    product = MatMul(samples * side**2, inner * window**2, outer, 1, window**2)
    return OperatorCosts(
        name="",
        parameters=weights,
        parameter_bytes=weights * itemsize,
        output_bytes=out,
        saved_bytes=kept * itemsize + out,
        moved_bytes=(4 if relu else 2) * out,
        num_ops=3 if relu else 2,
        products=(product,),
    )


def _merge_costs(
    name: str, operators: list[OperatorCosts], output: int, saved: int, moved: int, calls: int
) -> OperatorCosts:
    return OperatorCosts(
        name=name,
        parameters=sum(p.parameters for p in operators),
        parameter_bytes=sum(p.parameter_bytes for p in operators),
        output_bytes=output,
        saved_bytes=saved + sum(p.saved_bytes for p in operators),
        moved_bytes=moved + sum(p.moved_bytes for p in operators),
        num_ops=calls + sum(p.num_ops for p in operators),
        products=tuple(q for p in operators for q in p.products),
        attention=tuple(q for p in operators for q in p.attention),
        all_reduce_bytes=sum(p.all_reduce_bytes for p in operators),
    )


def t5_operators(model: T5Config, itemsize: int, samples: int, tensor: int = 1) -> Iterator[OperatorCosts]:
    """Pre-norm blocks without biases; the position's bias is added inside of a fused attention. Over tensor ranks are
    cut: heads, hidden features, words, and between the cut products the positions."""
    encoder_tokens, decoder_tokens = samples * model.sequence, samples * model.target_sequence
    table = model.vocab * model.width // tensor
    stream = (encoder_tokens + decoder_tokens) * model.width * itemsize
    yield OperatorCosts(
        name="embed",
        parameters=table,
        parameter_bytes=table * itemsize,
        output_bytes=stream // tensor,
        num_ops=2,
        saved_bytes=(encoder_tokens + decoder_tokens) * 8,
        moved_bytes=2 * stream // tensor,
        all_reduce_bytes=stream / 2,
    )
    for index in range(model.layers):
        operators = [
            _attention_costs(model, itemsize, encoder_tokens, encoder_tokens, samples, tensor, False),
            _ffn_costs(model, itemsize, encoder_tokens, tensor),
        ]
        yield _merge_costs(f"encoder{index}", operators, encoder_tokens * model.width * itemsize // tensor, 0, 0, 0)
    for index in range(model.layers):
        self_attention = _attention_costs(model, itemsize, decoder_tokens, decoder_tokens, samples, tensor, True)
        operators = [
            self_attention,
            _attention_costs(model, itemsize, decoder_tokens, encoder_tokens, samples, tensor, False),
            _ffn_costs(model, itemsize, decoder_tokens, tensor),
        ]
        yield _merge_costs(f"decoder{index}", operators, decoder_tokens * model.width * itemsize // tensor, 0, 0, 0)
    logits = decoder_tokens * model.vocab // tensor
    weights = 0 if model.tied else table
    # The loss in 32 bits: logits are widened, normalised, gathered from.
    yield OperatorCosts(
        name="head",
        parameters=weights,
        parameter_bytes=weights * itemsize,
        output_bytes=4,
        saved_bytes=decoder_tokens * model.width * itemsize + 8 * logits,
        moved_bytes=logits * (itemsize + 12),
        num_ops=6,
        products=(MatMul(decoder_tokens, model.width, -(-model.vocab // tensor)),),
        all_reduce_bytes=decoder_tokens * model.width * itemsize / 2,
    )


def _attention_costs(
    model: T5Config, itemsize: int, queries: int, keys: int, samples: int, tensor: int, causal: bool
) -> OperatorCosts:
    width, head = model.width, model.head_dim
    attention_width = model.heads * head // tensor
    products = (
        MatMul(queries, width, attention_width),
        MatMul(keys, width, 2 * attention_width),
        MatMul(queries, attention_width, width),
    )
    heads = samples * model.heads // tensor
    square = AttentionOp(heads, queries // samples, keys // samples, head, head, causal)
    weights = 4 * width * attention_width + width
    hidden_numel, qkv_numel = queries * width // tensor, (2 * queries + 2 * keys) * attention_width
    return OperatorCosts(
        name="",
        parameters=weights,
        parameter_bytes=weights * itemsize,
        output_bytes=hidden_numel * itemsize,
        saved_bytes=itemsize * (2 * hidden_numel + qkv_numel),
        moved_bytes=itemsize * (6 * hidden_numel + qkv_numel),
        num_ops=8,
        products=products,
        attention=(square,),
        all_reduce_bytes=itemsize * width * (queries + keys * (keys != queries) / 2),
    )


def _ffn_costs(model: T5Config, itemsize: int, tokens: int, tensor: int) -> OperatorCosts:
    gates = 2 if model.activation == "geglu" else 1
    width, ffn = model.width, model.ffn // tensor
    weights = (gates + 1) * width * ffn + width
    hidden_numel, hidden = tokens * width // tensor, tokens * ffn
    return OperatorCosts(
        name="",
        parameters=weights,
        parameter_bytes=weights * itemsize,
        output_bytes=hidden_numel * itemsize,
        saved_bytes=itemsize * (2 * hidden_numel + (2 * gates) * hidden),
        moved_bytes=itemsize * (6 * hidden_numel + (1 + 2 * gates) * hidden),
        num_ops=5 + gates,
        products=(MatMul(tokens, width, gates * ffn), MatMul(tokens, ffn, width)),
        all_reduce_bytes=itemsize * width * tokens,
    )


def dlrm_operators(model: DLRMConfig, itemsize: int, samples: int) -> Iterator[OperatorCosts]:
    """The part on the device: two rows of products, and between them the products of all pairs of rows."""
    vectors = model.tables + 1
    interaction_width = model.width + vectors * (vectors - 1) // 2
    vector_bytes = samples * vectors * model.width * itemsize
    yield from _mlp_costs("bottom", itemsize, samples, (model.dense_features, *model.bottom, model.width))
    yield OperatorCosts(
        name="meet",
        parameters=0,
        parameter_bytes=0,
        output_bytes=samples * interaction_width * itemsize,
        saved_bytes=vector_bytes,
        moved_bytes=2 * vector_bytes + 2 * samples * interaction_width * itemsize,
        num_ops=3,
        products=(MatMul(vectors, model.width, vectors, samples),),
    )
    yield from _mlp_costs("top", itemsize, samples, (interaction_width, *model.top, 1))


def _mlp_costs(name: str, itemsize: int, samples: int, sides: tuple[int, ...]) -> Iterator[OperatorCosts]:
    """Products with a bias, each with an activation behind it; both keep what they read."""
    for place, (inner, outer) in enumerate(pairwise(sides)):
        weights, out = (inner + 1) * outer, samples * outer * itemsize
        yield OperatorCosts(
            name=f"{name}{place}",
            parameters=weights,
            parameter_bytes=weights * itemsize,
            output_bytes=out,
            moved_bytes=2 * out,
            saved_bytes=samples * inner * itemsize + out,
            num_ops=2,
            products=(MatMul(samples, inner, outer),),
        )
