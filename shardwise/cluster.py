"""What the devices are: for now, the peak rates by which a run's utilisation is counted.

Dense bf16 rates from the makers' data sheets, in FLOP/s; a device that is not listed has no stated utilisation.
"""

from __future__ import annotations

import torch

# fmt: off
PEAK_BF16 = {
    "V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12,
}
# fmt: on


def peak_rate(device: torch.device, precision: str) -> float | None:
    """The device's peak for products in this precision, where it is known."""
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for key, rate in PEAK_BF16.items() if key in name), None)
