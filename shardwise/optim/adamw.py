"""AdamW for parameter shards with features that PyTorch's fused AdamW lacks.

It takes gradients in the compute dtype, writes the compute copy of the updated weights in the same pass over memory,
and can keep its moments in bf16, in 8 bits or in host memory. It updates one parameter at a time: float32 weights on a
GPU with a Triton kernel (`shardwise.models.kernels`), all others with PyTorch's fused kernel.

With `optimizer.offload`, page-locked memory of the host holds the moments. An update copies them to the GPU a part at a
time, and back. A few buffers take turns, so that copies both ways and updates overlap; a CUDA graph can capture it."""

import mmap
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.host_memory import in_huge_pages, pack, page_lock, unpack
from shardwise.models.quantize import decode_blocks, encode_blocks
from shardwise.optim.param_shard import ParamShard
from shardwise.optim.sharded_optimizer import ParamGroup, ShardedOptimizer

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether they are signed
PART = 1 << 25  # elements that are copied at once from or to host memory
BUFFERS = 3
BLOCK_SIZE = 256  # of 8-bit moments
MIN_8BIT_NUMEL = 4096  # smaller parameters keep full-precision moments


class AdamW(ShardedOptimizer):
    """AdamW with compute copies and an optional dtype for its moments. State names are PyTorch's."""

    def __init__(self, groups: list[ParamGroup], defaults: ParamGroup, shards: Sequence[ParamShard],
                 state_dtype: torch.dtype | None, offload: bool = False):  # fmt: skip
        """`offload`: keep the moments of weights on a GPU in host memory; others are there already."""
        super().__init__(groups, defaults, shards)
        self.state_dtype = state_dtype
        weights = [weight for group in groups for weight in group["params"]]
        self.offload = offload and weights[0].is_cuda
        self.stream: StateStream | None = None
        self.host_moments: dict[tuple[Tensor, str], Tensor] = {}
        if self.offload:
            owners, dtype = [(weight, key) for weight in weights for key in MOMENTS], state_dtype or weights[0].dtype
            like = [torch.empty_like(weight, dtype=dtype, device="meta") for weight, _ in owners]
            entries, size = pack({str(number): moment for number, moment in enumerate(like)})
            self.host_buffer = in_huge_pages(mmap.mmap(-1, size))
            page_lock(self.host_buffer)  # as long as it is kept
            self.host_moments = dict(zip(owners, unpack(self.host_buffer, entries).values()))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.copy_lr_to_device()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for weight in weights:
            if not self.state[weight]:
                dtype = self.state_dtype or weight.dtype
                moments = {key: self.state_zeros(weight, key, weight.shape, dtype) for key in MOMENTS}
                self.state[weight] = {"step": torch.zeros((), dtype=torch.float32, device=weight.device), **moments}
        if self.offload and weights[0].dtype == torch.float32:
            self.stream = self.stream or StateStream(weights[0].device, self.state[weights[0]]["exp_avg"].dtype)
            self.stream.begin()
        steps = [self.state[weight]["step"] for weight in weights]
        increment = torch.ones_like(steps[0]) if self.found_inf is None else 1.0 - self.found_inf
        torch._foreach_add_(steps, [increment] * len(steps))
        for group, lr_tensor in zip(self.param_groups, self.lr_tensors, strict=True):
            for weight in group["params"]:
                shard, state = self.shards[weight], self.state[weight]
                if weight.is_cuda and weight.dtype == torch.float32:
                    self._kernel_step(shard, state, group, lr_tensor)
                else:
                    torch_adamw_(shard, state, group, self.grad_scale, self.found_inf)
                shard.is_compute_copy_current = shard.compute_copy is not None
        if self.stream is not None:
            self.stream.end()

    def state_zeros(self, weight: Tensor, key: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        if (weight, key) in self.host_moments and self.host_moments[weight, key].dtype == dtype:
            return self.host_moments[weight, key]
        return torch.zeros_like(weight, dtype=dtype)

    def _kernel_step(self, shard: ParamShard, state: dict[str, Tensor], group: dict[str, Any], lr: Tensor) -> None:
        from shardwise.models.kernels import fused_adamw_

        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        weight, grad, copy, step = shard.tensor.detach(), shard.grad, shard.compute_copy, state["step"]
        scale_and_inf = self.grad_scale, self.found_inf
        if self.stream is None:
            fused_adamw_(weight, grad, exp_avg, exp_avg_sq, copy, step, lr, group, *scale_and_inf)
            return
        weight, grad = weight.view(-1), grad.contiguous().view(-1)
        copy = None if copy is None else copy.detach().view(-1)
        for part, (first, second) in self.stream.parts(exp_avg.view(-1), exp_avg_sq.view(-1)):
            part_copy = None if copy is None else copy[part]
            fused_adamw_(weight[part], grad[part], first, second, part_copy, step, lr, group, *scale_and_inf)


def torch_adamw_(shard: ParamShard, state: dict[str, Tensor], group: dict[str, Any], grad_scale: Tensor | None,
                 found_inf: Tensor | None) -> None:  # fmt: skip
    """Updates one shard with PyTorch's fused kernel, converting moments of another dtype or device for the call."""
    weight, moments = shard.tensor.detach(), (state["exp_avg"], state["exp_avg_sq"])
    exp_avg, exp_avg_sq = (moment.to(weight) for moment in moments)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_([weight], [shard.grad.to(weight.dtype)], [exp_avg], [exp_avg_sq], [], [state["step"]],
                        lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
                        amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=found_inf)  # fmt: skip
    for moment, updated in zip(moments, (exp_avg, exp_avg_sq)):
        if moment is not updated:
            moment.copy_(updated)
    if shard.compute_copy is not None:
        shard.compute_copy.copy_(weight)


class StateStream:
    """Copies parts of both moments from host memory to the GPU and back, behind the computation."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.load, self.store = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.buffers = [[torch.empty(PART, dtype=dtype, device=device) for _ in MOMENTS] for _ in range(BUFFERS)]

    def begin(self) -> None:
        """Begins an update: copies wait for what has been computed so far."""
        self.stored: list[torch.cuda.Event | None] = [None] * BUFFERS
        self.turn = 0
        self.load.wait_stream(torch.cuda.current_stream())

    def parts(self, *host: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yields parts of flat host tensors on the GPU; what the caller has written into them goes back."""
        compute = torch.cuda.current_stream()
        for start in range(0, host[0].numel(), PART):
            part = slice(start, min(start + PART, host[0].numel()))
            turn, self.turn = self.turn, (self.turn + 1) % BUFFERS
            staged = [buffer[: part.stop - start] for buffer in self.buffers[turn]]
            with torch.cuda.stream(self.load):
                if (stored := self.stored[turn]) is not None:
                    self.load.wait_event(stored)
                for on_gpu, tensor in zip(staged, host, strict=True):
                    on_gpu.copy_(tensor[part], non_blocking=True)
            compute.wait_stream(self.load)
            yield part, staged
            self.store.wait_stream(compute)
            with torch.cuda.stream(self.store):
                for on_gpu, tensor in zip(staged, host, strict=True):
                    tensor[part].copy_(on_gpu, non_blocking=True)
                self.stored[turn] = self.store.record_event()

    def end(self) -> None:
        """Ends an update: what follows waits for the copies."""
        torch.cuda.current_stream().wait_stream(self.store)


class AdamW8bit(ShardedOptimizer):
    """AdamW with 8-bit moments: block-wise dynamic quantization (Dettmers et al. 2022, docs/explanation/optimizers.md).
    Checkpoints store dequantized moments, for any layout and state dtype; the same blocks get the same codes again."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for shard, state, group in self.iter_shards():
            for key in MOMENTS:
                if key not in state:
                    self._store_moment(shard, key, torch.zeros_like(shard.tensor))
            self.increment_step(shard, state)
            full_state = {"step": state["step"], **{key: self._load_moment(shard, key) for key in MOMENTS}}
            torch_adamw_(shard, full_state, group, self.grad_scale, self.found_inf)
            for key in MOMENTS:
                self._store_moment(shard, key, full_state[key])
            shard.is_compute_copy_current = shard.compute_copy is not None

    def state_for_checkpoint(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns dequantized moments in host memory, since the device may lack room for them."""
        return {key: self._load_moment(self.shards[weight], key, torch.device("cpu")) if key in MOMENTS else value
                for key, value in self.state.get(weight, {}).items() if not key.endswith("_scale")}  # fmt: skip

    def after_load(self) -> None:
        """Quantizes the moments loaded from a checkpoint."""
        for shard, state, _ in self.iter_shards():
            for key in MOMENTS.keys() & state.keys():
                self._store_moment(shard, key, state[key])

    def _store_moment(self, shard: ParamShard, key: str, moment: Tensor) -> None:
        state = self.state[shard.tensor]
        state[key] = moment
        if len(shard.shape) > 1 and shard.shape.numel() >= MIN_8BIT_NUMEL:
            rows = moment.flatten(0, -2)
            codes, state[f"{key}_scale"] = encode_blocks(rows, code_map(key, moment.device), BLOCK_SIZE)
            state[key] = codes.view(moment.shape)

    def _load_moment(self, shard: ParamShard, key: str, device: torch.device | None = None) -> Tensor:
        state = self.state[shard.tensor]
        if f"{key}_scale" not in state:
            return state[key]
        codes, scale = (state[name].to(device or shard.tensor.device) for name in (key, f"{key}_scale"))
        moment = decode_blocks(codes.flatten(0, -2), scale, code_map(key, codes.device), BLOCK_SIZE)
        return moment.view(codes.shape).to(shard.tensor.dtype)


@cache
def code_map(key: str, device: torch.device) -> Tensor:
    return torch.tensor(dynamic_map(MOMENTS[key]), device=device)


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
