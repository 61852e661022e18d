"""The content of samples and weights in a few numbers, so that others are noticed.

Whole numbers and text count exactly, by a digest. Floats and pixels, also those of an image of PIL, count up to
rounding, by their root mean square and some of their values: another machine, or another version of what decodes an
image, may compute other last bits. Of what has no values that can be read, such as an open file, the type counts."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

VALUES = 6  # that are recorded of a tensor of floats
TOLERANCE = 1e-3  # relative to a value, or to the root mean square of its tensor
MAX_ITEMS = 1000  # of a nested sample


def describe_content(value: Any, digits: int = 0) -> dict[str, Any]:
    """Returns what a value holds, as JSON. With `digits`, floats are rounded to so many, to be compared as text."""
    if _is_pil_image(value):
        with suppress(OSError, ValueError):  # a damaged or closed file has no pixels
            value = np.asarray(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        return _describe_array(value, digits)
    if isinstance(value, Tensor):
        return _describe_tensor(value.detach(), digits)
    if isinstance(value, float):
        return _describe_tensor(torch.tensor(value, dtype=torch.float64), digits)
    if isinstance(value, bool | int | str | bytes | type(None)):
        return {"form": type(value).__name__, "digest": _digest(repr(value).encode())}
    return {"form": type(value).__qualname__}


def describe_sample(sample: Any) -> dict[str, dict[str, Any]]:
    """Returns the contents of a nested sample by place, such as `0` or `image`."""
    found: dict[str, dict[str, Any]] = {}
    _collect(sample, "", found)
    return found


def _collect(value: Any, place: str, found: dict[str, dict[str, Any]]) -> None:
    if len(found) >= MAX_ITEMS:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, f"{place}.{key}" if place else str(key), found)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for number, item in enumerate(value):
            _collect(item, f"{place}.{number}" if place else str(number), found)
    else:
        found[place] = describe_content(value)


def is_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two descriptions are of the same content, as far as they tell."""
    if old["form"] != new["form"]:
        return False
    if "digest" in old and "digest" in new:
        return bool(old["digest"] == new["digest"])
    if "numbers" in old and "numbers" in new:
        return _are_close(old["numbers"], new["numbers"])
    return True


def _are_close(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Compares [root mean square, some values]."""
    scale = abs(float(old[0]))
    for before, now in zip(map(float, old), map(float, new), strict=False):
        if math.isnan(before) or math.isnan(now):
            if math.isnan(before) != math.isnan(now):
                return False
        elif not math.isclose(before, now, rel_tol=TOLERANCE, abs_tol=TOLERANCE * scale):
            return False
    return len(old) == len(new)


def _is_pil_image(value: Any) -> bool:
    """Whether a value is an image of PIL, which need not be installed."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


def _describe_array(array: np.ndarray, digits: int) -> dict[str, Any]:
    form = f"{array.dtype.name} {list(array.shape)}"
    if array.dtype.kind not in "biufc":
        return {"form": form}
    native = array.astype(array.dtype.newbyteorder("="))
    try:
        return _describe_tensor(torch.from_numpy(np.ascontiguousarray(native)), digits)
    except TypeError:  # PyTorch has no such dtype, such as np.longdouble
        return {"form": form}


def _describe_tensor(tensor: Tensor, digits: int) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:
        return {"form": f"nested {dtype}"}
    form = f"{dtype} {list(tensor.shape)}"
    is_fake = isinstance(tensor, FakeTensor)  # has no values
    if is_fake or tensor.device.type == "meta" or tensor.layout is not torch.strided or tensor.is_quantized:
        return {"form": form}
    if tensor.is_complex():
        return {"form": form, "digest": _digest(repr(tensor.tolist()).encode())}
    is_image = tensor.dtype is torch.uint8 and tensor.dim() >= 2
    if not (tensor.is_floating_point() or is_image):
        return {"form": form, "digest": _digest(_bytes(tensor))}

    flat = tensor.cpu().reshape(-1).double()
    places = [round(number * (len(flat) - 1) / (VALUES - 1)) for number in range(VALUES)] if len(flat) else []
    root_mean_square = float(flat.square().mean().sqrt()) if len(flat) else 0.0
    numbers = [root_mean_square, *(float(flat[place]) for place in places)]
    # As text: JSON has no nan, and a record is read by people too.
    return {"form": form, "numbers": [f"{number:.{digits or 9}g}" for number in numbers]}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
