"""The mode in which tensors are fake, entered so that this process can fork workers afterwards.

A CUDA build of PyTorch on a machine without a GPU (what `pip install torch` gives on Linux) stands in for CUDA as soon
as a fake tensor is made, with eight devices. The first backward of a process starts one thread per device that it
finds, and a process with such threads cannot fork workers that run a backward. So the first backward comes first."""

from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


def fake_tensor_mode() -> FakeTensorMode:
    """Returns a new mode, which leaves alone the real tensors that it meets."""
    _start_autograd()
    return FakeTensorMode(allow_non_fake_inputs=True)


@cache
def _start_autograd() -> None:
    """Lets autograd count the devices, once per process. With a GPU there is no stand-in, and the threads for real
    devices must not start any earlier than they do."""
    if torch.cuda.is_available():
        return

    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()
