"""ResNet: residual convolutional networks for images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from shardwise.models.config import ModelConfig
from shardwise.models.family import Family, listed_costs

if TYPE_CHECKING:
    import torch

    from shardwise.models.chain import Chain
    from shardwise.models.operator_costs import OperatorCosts


class ResNetConfig(ModelConfig):
    """A residual network, for images."""

    description = "a ResNet"
    sample_kind = "images"
    mixes_samples = True
    needs_whole_batch = True
    has_block_matrices = False
    name: str = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Convolutions in a row, and the last product."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """The first convolution: 7 x 7 in steps of two and pooled, or 3 x 3."""
    width: int = Field(64, ge=1)
    """Channels of the first blocks; each of the three stages after them has twice as many."""
    image_size: int = Field(224, ge=8)
    """Pixels of a side."""
    num_classes: int = Field(1000, ge=1)

    @property
    def has_bottlenecks(self) -> bool:
        """Whether blocks are bottlenecks."""
        return self.depth >= 50

    def _shrunk_values(self) -> dict[str, Any]:
        return {
            "width": min(self.width, 8),
            "image_size": min(self.image_size, 32),
            "num_classes": min(self.num_classes, 10),
        }


class ResNetFamily(Family):
    config = ResNetConfig

    def build(self, config: ResNetConfig, seed: int) -> Chain:
        from shardwise.models.resnet import build_resnet

        return build_resnet(config, seed)

    def refusals(self, config: ResNetConfig) -> dict[str, str]:
        samples_only = (
            f"{config.description} is split along its samples only (batch norm needs the whole batch, images are "
            "small); use replicate or shard."
        )
        return {
            **dict.fromkeys(("tensor", "pipeline", "context", "expert"), samples_only),
            "recompute": "batch norm would update its running statistics twice; use recompute=none.",
            "redundant_compute": "batch norm mixes the samples of all ranks.",
        }

    def operator_costs(self, config: ResNetConfig, itemsize: int) -> Callable[..., tuple[OperatorCosts, ...]]:
        from shardwise.models.resnet_operators import resnet_operators

        return listed_costs(resnet_operators, config, itemsize)

    def example_batch(self, config: ResNetConfig, samples: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        import torch

        pixels = torch.empty(samples, 3, config.image_size, config.image_size, dtype=torch.uint8, device="meta")
        labels = torch.empty(samples, 1, dtype=torch.int64, device="meta")
        return {"x": pixels, "ids": labels[:, 0], "targets": labels}
