"""Counter-based random numbers that depend only on the seed, never on the layout or the number of devices.

Every random number is a hash of its purpose (docs/explanation/same-run-any-layout.md), so a rank can generate exactly
those it needs. PyTorch's generators would depend on what was drawn before and on the shape of the draw.
The mixers are the finalizers of splitmix64 (Steele, Lea, Flood 2014) and "lowbias32" (Wellons 2018)."""

import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 divided by the golden ratio
CHUNK = 1 << 20  # elements generated at once, which bounds temporary memory


def hash_key(*parts: object) -> int:
    """Returns a signed 64-bit key for any tuple of plain values."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def generator_states_outside_torch() -> tuple[object, ...]:
    """Returns the states of Python's and NumPy's generators as values that can be compared."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def generator_states() -> tuple[object, ...]:
    """Returns the states of the generators on the CPU that a function may draw from, as values that can be compared."""
    return *generator_states_outside_torch(), torch.get_rng_state().numpy().tobytes()


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """After it, the generators of PyTorch (on the CPU and a device), NumPy and Python are where they were before."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = [device] if device is not None and device.type != "cpu" else []

    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def seed_generators(seed: int) -> None:
    """Seeds the generators of Python, NumPy and the CPU; those of GPUs stay as they are."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def random_numbers_of(seed: int, sample: int, device: torch.device) -> Iterator[None]:
    """Within it, the generators of PyTorch, NumPy and Python start from a state that only seed and sample determine;
    afterwards they are where they were before. It is for modules that draw from them in their forward."""
    key = hash_key("forward", seed, sample) & 0xFFFFFFFFFFFFFFFF

    with generators_kept(device):
        seed_generators(key)
        torch.manual_seed(key)  # of the device, too
        yield


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def mix64(x: Tensor) -> Tensor:
    """Splitmix64's finalizer on int64 tensors: products wrap around, masks make the shifts logical."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def mix32(x: Tensor) -> Tensor:
    """Lowbias32 on int32 tensors."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x7FEB352D, 32)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B, 32)
    return x ^ ((x >> 16) & 0xFFFF)


def hash_key_uint64(*parts: object) -> np.uint64:
    return np.uint64(hash_key(*parts) & 0xFFFFFFFFFFFFFFFF)


def mix64_numpy(x: np.ndarray) -> np.ndarray:
    """Splitmix64's finalizer on uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def to_unit_interval(bits: np.ndarray) -> np.ndarray:
    """Maps uint64 to floats in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _standard_normals(key: int, index: Tensor) -> Tensor:
    """Returns a standard normal for each index by Box-Muller, rounded to float32 in every precision."""
    bits = mix64(index * _signed(GOLDEN_GAMMA, 64) + key)
    u = ((bits >> 32) & 0xFFFFFFFF).double().add_(0.5).mul_(2.0**-32)
    v = (bits & 0xFFFFFFFF).double().mul_(2.0 * math.pi * 2.0**-32)
    return u.log_().mul_(-2.0).sqrt_().mul_(v.cos_()).float()


@torch.no_grad()
def normal_(out: Tensor, key: int, shape: torch.Size, start: tuple[int, ...], std: float) -> None:
    """Fills `out`, the shard at offset `start` of a tensor of `shape`, with the values of the full tensor."""
    if out.numel() == 0:
        return
    size = tuple(out.shape) or (1,)
    shape = shape if len(shape) else torch.Size((1,))
    start = start or (0,)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    # Rows of the innermost dimension have consecutive indices; a chunk is as many full rows as fit.
    offset = torch.zeros((), dtype=torch.int64, device=out.device)
    for d in range(len(size) - 1):
        offset = offset.unsqueeze(-1) + (torch.arange(size[d], device=out.device) + start[d]) * strides[d]
    inner = torch.arange(size[-1], device=out.device) + start[-1]
    offset = offset.reshape(-1)
    rows = out.view(-1, size[-1])
    step = max(1, CHUNK // size[-1])
    for first in range(0, rows.shape[0], step):
        index = offset[first : first + step, None] + inner
        rows[first : first + step].copy_(_standard_normals(key, index) * std)


class Permutation:
    """A pseudorandom permutation of range(n) without a table: a Feistel network with cycle walking."""

    def __init__(self, n: int, *key: object):
        self.n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._keys = [hash_key_uint64("permutation", *key, round) for round in range(4)]

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        values = self._feistel(np.asarray(indices, dtype=np.uint64))
        while (outside := values >= self.n).any():
            values[outside] = self._feistel(values[outside])
        return values.astype(np.int64)

    def _feistel(self, x: np.ndarray) -> np.ndarray:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = x >> half, x & mask
        for key in self._keys:
            mixed = (right + key) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & mask)
        return (left << half) | right


class Dropout(nn.Module):
    """Dropout whose mask is a hash of (seed, site, sample, position, feature). `ids` are stream positions, which
    identify sample and step; `position_ids` are the positions of a part of a sequence."""

    def __init__(self, p: float, site: str, seed: int):
        super().__init__()
        self.p, self.site = p, site
        self.position_ids: Tensor | None = None
        self._key = hash_key("dropout", seed, site)
        self._limit = _signed(int(p * 2**32) - 2**31, 33)

    def forward(self, x: Tensor, ids: Tensor | None) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if ids is None:
            raise ValueError(f"dropout at {self.site} needs the sample ids")
        positions = torch.arange(x.shape[1], device=x.device) if self.position_ids is None else self.position_ids
        # XOR instead of a product: compilers treat products of `arange` as index arithmetic, which must not wrap.
        row = mix64(mix64(ids.to(torch.int64) ^ self._key)[:, None] + positions)
        feature = mix64(torch.arange(x.shape[2], device=x.device) ^ ~self._key)
        bits = mix32(row.to(torch.int32)[:, :, None] ^ feature.to(torch.int32))
        return torch.where(bits >= self._limit, x / (1.0 - self.p), torch.zeros((), dtype=x.dtype, device=x.device))
