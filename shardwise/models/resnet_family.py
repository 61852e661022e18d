"""The config and family of ResNets: residual convolutional networks for images."""

from typing import Any, Literal

from pydantic import Field

from shardwise.models.config import ModelConfig
from shardwise.models.family import Family


class ResNetConfig(ModelConfig):
    """A residual convolutional network for image classification."""

    description = "a ResNet"
    sample_kind = "images"
    is_recomputable_elsewhere = False
    single_micro_batch = "its batch norms take means over all samples that run together"
    supports_muon = False
    name: str = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 50
    stem: Literal["imagenet", "cifar"] = "imagenet"
    width: int = Field(64, ge=1, le=10_000)
    image_size: int = Field(224, ge=8, le=10_000)
    num_classes: int = Field(1000, ge=1, le=10**6)

    def _shrunk_values(self) -> dict[str, Any]:
        limits = {"width": 8, "image_size": 32, "num_classes": 10}
        return {key: min(getattr(self, key), limit) for key, limit in limits.items()}


class ResNetFamily(Family):
    config = ResNetConfig
    builder = "shardwise.models.resnet:build_resnet"
    refused = "resnet"

    def example_batch(self, config: ResNetConfig, samples: int, dtype: Any) -> dict[str, Any]:
        import torch

        pixels = torch.empty(samples, 3, config.image_size, config.image_size, dtype=torch.uint8, device="meta")
        labels = torch.empty(samples, 1, dtype=torch.int64, device="meta")
        return {"x": pixels, "ids": labels[:, 0], "targets": labels}
