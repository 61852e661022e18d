"""T5: an encoder-decoder transformer (Raffel et al. 2020), written for one device.

The residual stream concatenates encoder and decoder along the sequence: (B, S + T, D) with S encoder and T decoder
positions. An encoder block updates only the first S positions, a decoder block only the last T. So the model is a
chain: a pipeline stage sends one tensor, and sequence parallelism splits one dimension.

Attention adds a learned bias per head and relative position to its scores. Each block has its own bias table, as in
UMT5; the original T5 shares one among all encoder blocks and one among all decoder blocks, which would tie weights
across every pipeline stage. Scores are not scaled by 1/sqrt(head_dim), norms are RMSNorm, linear layers have no bias.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import gpt, layers, sharding
from shardwise.models.chain import Chain
from shardwise.models.t5_family import T5Config
from shardwise.random import Dropout


def build_t5(config: T5Config, seed: int) -> Chain:
    """Returns the chain embed, encoder0, ..., bridge, decoder0, ..., head."""
    modules: list[tuple[str, nn.Module]] = [("embed", gpt.DecoderEmbedding(config, seed))]
    modules += [(f"encoder{i}", T5Block(config, "encoder", i, seed)) for i in range(config.layers)]
    modules += [("bridge", gpt.DecoderHead(OneSideRMSNorm(config, decoder=False), None))]
    modules += [(f"decoder{i}", T5Block(config, "decoder", i, seed)) for i in range(config.layers)]
    head = gpt.DecoderHead(gpt.build_norm(config), T5LMHead(config))
    return Chain([*modules, ("head", head)], sharding_plan(config))


def sharding_plan(config: T5Config) -> sharding.ShardingPlan:
    attention_width = config.heads * config.head_dim
    head_std = 1.0 if config.tied else config.width**-0.5
    attentions = ("*coder*.attention", "decoder*.cross")
    return sharding.ShardingPlan(
        shard_dims=(
            sharding.Rowwise("embed.tokens.weight", dim=0),
            *(sharding.Colwise(f"{name}.{part}.weight", unit=config.head_dim) for name in attentions for part in "qkv"),
            *(sharding.Rowwise(f"{name}.out.weight", unit=config.head_dim) for name in attentions),
            sharding.Colwise("*.attention.distances", dim=1),
            *(sharding.Colwise(name) for name in ("*.mlp.up.weight", "*.mlp.gate.weight", "head.project.weight")),
            sharding.Rowwise("*.mlp.down.weight"),
        ),
        modules=(
            sharding.VocabEmbedding("embed.tokens"),
            *(sharding.SequenceRegion(name, rowwise="out") for name in attentions),
            sharding.SequenceRegion("*coder*.mlp", rowwise="down"),
            sharding.VocabHead("head.project"),
        ),
        ties=(("head.project.weight", "embed.tokens.weight"),) if config.tied else (),
        init=(
            ("*norm*.weight", sharding.InitSpec("ones")),
            ("embed.tokens.weight", sharding.InitSpec("normal", 1.0)),
            ("*.q.weight", sharding.InitSpec("normal", (config.width * config.head_dim) ** -0.5)),
            ("*.out.weight", sharding.InitSpec("normal", attention_width**-0.5)),
            ("*.down.weight", sharding.InitSpec("normal", config.ffn**-0.5)),
            ("head.project.weight", sharding.InitSpec("normal", head_std)),
            ("*", sharding.InitSpec("normal", config.width**-0.5)),
        ),
        block_pattern="*coder*",
        compared_modules=("embed", "encoder*.attention", "encoder*.mlp", "encoder*", "bridge", "decoder*.attention",
                 "decoder*.norm2", "decoder*.cross", "decoder*.mlp", "decoder*", "head.norm"),
    )  # fmt: skip


class OneSideRMSNorm(nn.Module):
    """RMSNorm of the encoder's or the decoder's positions; the others pass unchanged."""

    def __init__(self, config: T5Config, decoder: bool):
        super().__init__()
        self.norm = gpt.build_norm(config)
        self.encoder_length, self.decoder = config.sequence, decoder
        self.position_ids: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        position_ids = torch.arange(x.shape[1], device=x.device) if self.position_ids is None else self.position_ids
        is_decoder = position_ids >= self.encoder_length
        is_own = is_decoder if self.decoder else ~is_decoder  # PyTorch 2.11 cannot compile a comparison of booleans
        return torch.where(is_own[:, None], self.norm(x), x)


class T5Block(nn.Module):
    """A block of the encoder or the decoder; its branches, each with norm and dropout, are numbered from 1."""

    def __init__(self, config: T5Config, side: str, index: int, seed: int):
        super().__init__()
        positions = slice(0, config.sequence) if side == "encoder" else slice(config.sequence, config.length)
        self.branches = ("attention", "mlp") if side == "encoder" else ("attention", "cross", "mlp")
        for number, branch in enumerate(self.branches, start=1):
            is_cross = branch == "cross"  # the encoder's output is already normalized
            norm = OneSideRMSNorm(config, decoder=True) if is_cross else gpt.build_norm(config)
            self.add_module(f"norm{number}", norm)
            role = "cross" if is_cross else side
            self.add_module(branch, T5MLP(config, positions) if branch == "mlp" else T5Attention(config, role))
            self.add_module(f"dropout{number}", Dropout(config.dropout, f"{side}{index}.{number}", seed))

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        for number, branch in enumerate(self.branches, start=1):
            y = getattr(self, branch)(getattr(self, f"norm{number}")(x))
            x = x + getattr(self, f"dropout{number}")(y, ids)
        return x


class T5Attention(nn.Module):
    """Self-attention of the encoder, causal self-attention of the decoder, or cross-attention, by `role`."""

    def __init__(self, config: T5Config, role: str):
        super().__init__()
        attention_width = config.heads * config.head_dim
        self.q, self.k, self.v = (layers.Linear(config.width, attention_width, bias=False) for _ in "qkv")
        self.out = layers.Linear(attention_width, config.width, bias=False)
        buckets = config.relative_attention_num_buckets
        self.distances = nn.Parameter(torch.empty(buckets, config.heads)) if role != "cross" else None
        self.max_distance = config.relative_attention_max_distance
        self.head_dim, self.causal = config.head_dim, role == "decoder"
        encoder, decoder = slice(0, config.sequence), slice(config.sequence, config.length)
        self.query_slice = encoder if role == "encoder" else decoder
        self.key_slice = decoder if role == "decoder" else encoder

    def forward(self, x: Tensor) -> Tensor:
        q_in, kv_in = x[:, self.query_slice], x[:, self.key_slice]
        projected = self.q(q_in), self.k(kv_in), self.v(kv_in)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projected)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self._relative_bias(q_in.shape[1], q.dtype), scale=1.0)
        return _pad_to_stream(self.out(y.transpose(1, 2).flatten(2)), self.query_slice, x.shape[1])

    def _relative_bias(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """Returns the bias (heads, queries, keys), -inf for a decoder's future keys. None: cross-attention."""
        if self.distances is None:
            return None
        # By offset (key minus query, modulo 2 x length): the gradient of a lookup by query and key takes seconds.
        table, offsets = self.distances, torch.arange(2 * length, device=self.distances.device)
        offsets = torch.where(offsets < length, offsets, offsets - 2 * length)
        buckets = relative_position_bucket(offsets, not self.causal, len(table), self.max_distance)
        bias = (buckets[:, None] == torch.arange(len(table), device=table.device)).to(table.dtype) @ table
        if self.causal:
            bias = bias.masked_fill((offsets > 0)[:, None], -math.inf)
        # Rows of one element less: each begins one offset further back than the row before.
        flat = bias.t().unsqueeze(1).expand(-1, length, -1).flatten(1)[:, : length * (2 * length - 1)]
        return flat.unflatten(1, (length, 2 * length - 1))[..., :length].to(dtype)


def relative_position_bucket(offset: Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket of each relative position. Half of the buckets hold one distance each, the others grow
    logarithmically up to `max_distance`. If `bidirectional`, half of all buckets are for keys after the query."""
    first_bucket = torch.zeros_like(offset)
    if bidirectional:
        num_buckets //= 2
        first_bucket = torch.where(offset > 0, num_buckets, 0)
        distance = offset.abs()
    else:
        distance = (-offset).clamp(min=0)
    max_exact = num_buckets // 2
    # float64, so that rounding at bucket borders is the same on every device.
    log_fraction = (distance.clamp(min=1).double() / max_exact).log() / math.log(max_distance / max_exact)
    log_bucket = (max_exact + (log_fraction * (num_buckets - max_exact)).long()).clamp(max=num_buckets - 1)
    return first_bucket + torch.where(distance < max_exact, distance, log_bucket)


class T5MLP(gpt.FeedForward):
    def __init__(self, config: T5Config, side: slice):
        super().__init__(config)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        return _pad_to_stream(super().forward(x[:, self.side]), self.side, x.shape[1])


def _pad_to_stream(y: Tensor, side: slice, length: int) -> Tensor:
    """Pads the positions of `side` with zeros to the full stream."""
    return F.pad(y, (0, 0, side.start, length - side.stop))


class T5LMHead(gpt.LMHead):
    """An LM head that computes only the decoder's positions."""

    def __init__(self, config: T5Config):
        super().__init__(config)
        self.encoder_length, self.scale = config.sequence, config.width**-0.5 if config.tied else 1.0

    def forward(self, x: Tensor, targets: Tensor | None = None, preference: Tensor | None = None) -> Tensor:
        decoder = slice(self.encoder_length, None)
        return super().forward(x[:, decoder], None if targets is None else targets[:, decoder])
