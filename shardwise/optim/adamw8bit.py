"""AdamW with 8-bit moments: block-wise dynamic quantization (Dettmers et al. 2022).

A block is 256 consecutive elements of a row of the shard, with one float32 scale. Shards along the first dimension have
the same blocks as the full parameter; shards along the last one start new blocks, so rounding then depends slightly on
the layout. Vectors and small parameters keep full-precision moments. Checkpoints store dequantized moments: quantizing
them into the same blocks gives the same codes, and any layout or state dtype can resume from them.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.optim.adamw import torch_adamw_
from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sharded_optimizer import ShardedOptimizer

BLOCK_SIZE = 256
MIN_8BIT_NUMEL = 4096  # smaller parameters keep full-precision moments
MOMENT_IS_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class AdamW8bit(ShardedOptimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for shard, state, group in self.iter_shards():
            for key in MOMENT_IS_SIGNED:
                if key not in state:
                    self._store_moment(shard, key, torch.zeros_like(shard.tensor))
            self.increment_step(shard, state)
            full_state = {"step": state["step"], **{key: self._load_moment(shard, key) for key in MOMENT_IS_SIGNED}}
            torch_adamw_(shard, full_state, group, self.grad_scale, self.found_inf)
            for key in MOMENT_IS_SIGNED:
                self._store_moment(shard, key, full_state[key])
            shard.is_compute_copy_current = shard.compute_copy is not None

    def state_for_checkpoint(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns dequantized moments in host memory, since the device may lack room for them."""
        return {
            key: self._load_moment(self.shards[weight], key, torch.device("cpu")) if key in MOMENT_IS_SIGNED else value
            for key, value in self.state.get(weight, {}).items() if not key.endswith("_scale")
        }  # fmt: skip

    def after_load(self) -> None:
        """Quantizes the moments loaded from a checkpoint."""
        for shard, state, _ in self.iter_shards():
            for key in MOMENT_IS_SIGNED.keys() & state.keys():
                self._store_moment(shard, key, state[key])

    def _store_moment(self, shard: ParamShard, key: str, moment: Tensor) -> None:
        state = self.state[shard.tensor]
        state[key] = moment
        if len(shard.shape) > 1 and shard.shape.numel() >= MIN_8BIT_NUMEL:
            state[key], state[f"{key}_scale"] = quantize_blockwise(moment, code_map(key, moment.device))

    def _load_moment(self, shard: ParamShard, key: str, device: torch.device | None = None) -> Tensor:
        state = self.state[shard.tensor]
        if f"{key}_scale" not in state:
            return state[key]
        codes, scale = (state[name].to(device or shard.tensor.device) for name in (key, f"{key}_scale"))
        return dequantize_blockwise(codes, scale, code_map(key, codes.device)).to(shard.tensor.dtype)


@cache
def code_map(key: str, device: torch.device) -> Tensor:
    return torch.tensor(dynamic_map(MOMENT_IS_SIGNED[key]), device=device)


def dynamic_map(signed: bool) -> tuple[float, ...]:
    """Returns the 256 values of the dynamic data type: seven decades, with more values in the larger ones."""
    values = [0.0, 1.0]
    for exponent in range(7):
        steps = 2**exponent if signed else 2 ** (exponent + 1)
        middles = [10.0 ** (exponent - 6) * (0.1 + 0.9 * (number + 0.5) / steps) for number in range(steps)]
        values += middles + ([-middle for middle in middles] if signed else [])
    values.sort()
    # Both -1 and 1 are values, so that the largest element of a block is exact.
    return (-1.0, *values[1:]) if signed else tuple(values)


def quantize_blockwise(tensor: Tensor, code_map: Tensor) -> tuple[Tensor, Tensor]:
    """Returns uint8 codes of the same shape and the scale of each block."""
    rows = tensor.float().flatten(0, -2)
    blocks = F.pad(rows, (0, -rows.shape[1] % BLOCK_SIZE)).unflatten(1, (-1, BLOCK_SIZE))
    scale = blocks.abs().amax(2)
    tiny = torch.finfo(torch.float32).tiny
    midpoints = (code_map[1:] + code_map[:-1]) / 2
    codes = torch.bucketize(blocks / scale.clamp(min=tiny)[..., None], midpoints, out_int32=True)
    return codes.to(torch.uint8).flatten(1)[:, : rows.shape[1]].reshape(tensor.shape), scale


def dequantize_blockwise(codes: Tensor, scale: Tensor, code_map: Tensor) -> Tensor:
    decoded = code_map[codes.flatten(0, -2).int()]
    scales = scale.repeat_interleave(BLOCK_SIZE, 1)[:, : decoded.shape[1]]
    return (decoded * scales).view(codes.shape)
