"""Models that are not a sequence of equal blocks, as lists of operator costs: ResNet, T5, or any module by its trace.

The lists of ResNet and T5 are written by hand because tracing them is too slow for a search and counts unfused
operators. A trace takes 4 s of CPU time for ResNet-101 and 7.5 s for T5-11B; a search would need two per tensor degree
and should finish in 2 s. Parameters and matmul FLOPs of trace and list agree (T5's trace adds the relative-position
tables, 0.3%), but our BatchNorm and RMSNorm are many operators in a trace, which then moves 2.2 (float32) to 5.9 (bf16)
times as many bytes as the fused kernels of a compiled block. DLRM is traced, in 0.2 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.kinds import ResNetConfig, T5Config
from shardwise.models.resnet import block_shapes
from shardwise.planner.costs.decoder_shape import ModelShape
from shardwise.planner.costs.operator_costs import AttentionOp, MatMul, OperatorCosts


@dataclass(frozen=True, kw_only=True)
class HostEmbeddingTables:
    """Embedding tables in host memory."""

    bytes: float
    rows: float
    """Bytes of the rows that one sample reads."""
    pooled_bytes: float
    """Bytes per sample that reach the device."""


@dataclass(frozen=True, kw_only=True)
class OperatorListModel(ModelShape):
    """A model as a list of modules. The search sees one head and one position, unless tensor ranks can split it."""

    make_operators: Callable[..., tuple[OperatorCosts, ...]]
    """Returns the modules' costs for a micro-batch size and, if the model has several heads, a tensor degree."""
    tables: HostEmbeddingTables | None = None
    has_ends: bool = False
    """Whether the first and last module are the ends of a sequence of blocks that a pipeline can split."""

    @property
    def stages(self) -> int:
        return self.layers if self.has_ends else 1

    @property
    def context_positions(self) -> int:
        return 1

    @cached_property
    def parameters(self) -> int:
        return self.active_parameters + (round(self.tables.bytes / 4) if self.tables else 0)

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


def operator_list_model(
    make: Callable[..., tuple[OperatorCosts, ...]],
    tables: HostEmbeddingTables | None = None,
    heads: int = 1,
    sequence: int = 1,
    has_ends: bool = False,
) -> OperatorListModel:
    """Returns the model whose modules' costs `make` computes: by a list, or by `interpolate_traces`."""
    return OperatorListModel(
        layers=len(make(1)) - 2 * has_ends, width=1, heads=heads, kv_heads=1, head_dim=1, ffn=0, vocab=0,
        sequence=sequence, make_operators=make, tables=tables, has_ends=has_ends,
    )  # fmt: skip


def resnet_operators(model: ResNetConfig, itemsize: int, samples: int) -> Iterator[OperatorCosts]:
    """Yields the costs of stem, blocks and head. A bottleneck's stride is in its 3 x 3 convolution."""
    imagenet = model.stem == "imagenet"
    side = -(-model.image_size // 2) if imagenet else model.image_size
    pixels = samples * 3 * model.image_size**2
    stem = _convolution_costs(itemsize, samples, side, 3, model.width, 7 if imagenet else 3, pixels)
    if imagenet:
        side = -(-side // 2)
        pooled = itemsize * samples * model.width * side**2
        saved = stem.output_bytes + 8 * pooled // itemsize  # with the indices of the maxima
        yield _merge_costs("stem", [stem], pooled, saved, stem.output_bytes + pooled, 1)
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
        if stride > 1 or width_in != width_out:  # the shortcut; its input is already counted as saved
            operators.append(_convolution_costs(itemsize, samples, side, width_in, width_out, 1, 0, relu=False))
        out = itemsize * samples * width_out * side**2
        # The residual sum, and an in-place ReLU whose output the next block saves.
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
    """Returns the costs of a convolution with `side` x `side` outputs, its norm and an in-place ReLU. The convolution
    saves `kept` elements, the norm its input."""
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
    """Yields the costs of a T5's modules: pre-norm blocks without biases, relative positions inside fused attention.
    Tensor ranks split heads, FFN features and vocabulary, and the positions between those matmuls."""
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
    # The loss widens logits to 32 bits, normalises them and gathers the targets'.
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
