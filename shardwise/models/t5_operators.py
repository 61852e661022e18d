"""Hand-written operator costs of a T5.

A search should take 2 s, but would need two traces per tensor degree, and tracing T5-11B takes 7.5 s of CPU time.
Parameters and matmul FLOPs agree with the trace (which adds the relative-position tables, 0.3%), but RMSNorm is several
operators in a trace and one fused kernel in a compiled block.
"""

from collections.abc import Iterator

from shardwise.models.operator_costs import AttentionOp, MatMul, OperatorCosts, merge_costs
from shardwise.models.t5_family import T5Config


def t5_operators(model: T5Config, itemsize: int, samples: int, tensor: int = 1) -> Iterator[OperatorCosts]:
    """Yields the costs of a T5's modules: pre-norm blocks without biases, relative positions inside fused attention.
    Tensor ranks split heads, FFN features and vocabulary, and the positions between those matmuls."""
    encoder_tokens, decoder_tokens = samples * model.sequence, samples * model.target_sequence
    table = model.vocab * model.width // tensor
    stream = (encoder_tokens + decoder_tokens) * model.width * itemsize
    yield OperatorCosts(
        name="embed", parameters=table, parameter_bytes=table * itemsize, output_bytes=stream // tensor, num_ops=2,
        saved_bytes=(encoder_tokens + decoder_tokens) * 8, moved_bytes=2 * stream // tensor,
        all_reduce_bytes=stream / 2,
    )  # fmt: skip
    for side, tokens in (("encoder", encoder_tokens), ("decoder", decoder_tokens)):
        is_decoder = side == "decoder"
        operators = [_attention_costs(model, itemsize, tokens, tokens, samples, tensor, is_decoder)]
        if is_decoder:
            operators.append(_attention_costs(model, itemsize, tokens, encoder_tokens, samples, tensor, False))
        operators.append(_ffn_costs(model, itemsize, tokens, tensor))
        for index in range(model.layers):
            yield merge_costs(f"{side}{index}", operators, tokens * model.width * itemsize // tensor, 0, 0, 0)
    logits = decoder_tokens * model.vocab // tensor
    weights = 0 if model.tied else table
    # The loss casts logits to float32, normalizes them and gathers those of the targets.
    yield OperatorCosts(
        name="head", parameters=weights, parameter_bytes=weights * itemsize, output_bytes=4,
        saved_bytes=decoder_tokens * model.width * itemsize + 8 * logits, moved_bytes=logits * (itemsize + 12),
        num_ops=6, products=(MatMul(decoder_tokens, model.width, -(-model.vocab // tensor)),),
        all_reduce_bytes=decoder_tokens * model.width * itemsize / 2,
    )  # fmt: skip


def _attention_costs(
    model: T5Config, itemsize: int, queries: int, keys: int, samples: int, tensor: int, causal: bool
) -> OperatorCosts:
    width, head = model.width, model.head_dim
    attention_width = model.heads * head // tensor
    inputs = MatMul(queries, width, attention_width), MatMul(keys, width, 2 * attention_width)
    products = (*inputs, MatMul(queries, attention_width, width))
    heads = samples * model.heads // tensor
    attention = AttentionOp(heads, queries // samples, keys // samples, head, head, causal)
    weights = 4 * width * attention_width + width
    hidden_numel, qkv_numel = queries * width // tensor, (2 * queries + 2 * keys) * attention_width
    return OperatorCosts(
        name="", parameters=weights, parameter_bytes=weights * itemsize, output_bytes=hidden_numel * itemsize,
        saved_bytes=itemsize * (2 * hidden_numel + qkv_numel), moved_bytes=itemsize * (6 * hidden_numel + qkv_numel),
        num_ops=8, products=products, attention=(attention,),
        all_reduce_bytes=itemsize * width * (queries + keys * (keys != queries) / 2),
    )  # fmt: skip


def _ffn_costs(model: T5Config, itemsize: int, tokens: int, tensor: int) -> OperatorCosts:
    gates = 2 if model.activation == "geglu" else 1
    width, ffn = model.width, model.ffn // tensor
    weights = (gates + 1) * width * ffn + width
    hidden_numel, hidden = tokens * width // tensor, tokens * ffn
    return OperatorCosts(
        name="", parameters=weights, parameter_bytes=weights * itemsize, output_bytes=hidden_numel * itemsize,
        saved_bytes=itemsize * (2 * hidden_numel + (2 * gates) * hidden),
        moved_bytes=itemsize * (6 * hidden_numel + (1 + 2 * gates) * hidden), num_ops=5 + gates,
        products=(MatMul(tokens, width, gates * ffn), MatMul(tokens, ffn, width)),
        all_reduce_bytes=itemsize * width * tokens,
    )  # fmt: skip
