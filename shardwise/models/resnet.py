"""ResNet: residual networks for images (He et al. 2015), written for one device.

BatchNorm computes mean and variance over the global batch (`shardwise.parallel.batch_norm` all-reduces them), so each
rank runs its share of the batch as a single micro-batch. The running statistics for validation are buffers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models.chain import IGNORE_INDEX, Chain
from shardwise.models.resnet_family import ResNetConfig
from shardwise.models.sharding import InitSpec, ShardingPlan

BLOCKS_PER_STAGE = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def build_resnet(config: ResNetConfig, seed: int) -> Chain:
    """Returns the chain stem, block0, block1, ..., head."""
    blocks: list[nn.Module] = []
    channels, has_bottlenecks = config.width, config.depth >= 50
    for stage, count in enumerate(BLOCKS_PER_STAGE[config.depth]):
        mid_channels = config.width * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            blocks.append(ResNetBlock(channels, mid_channels, stride, has_bottlenecks))
            channels = mid_channels * (4 if has_bottlenecks else 1)
    head = ClassifierHead(channels, config.num_classes)
    named_blocks = [(f"block{number}", block) for number, block in enumerate(blocks)]
    chain = Chain([("stem", ResNetStem(config)), *named_blocks, ("head", head)], ShardingPlan((), ()))
    chain.sharding_plan = ShardingPlan(
        shard_dims=(),
        modules=(),
        # He initialization, by the fan-out of each convolution.
        init=(
            *((f"{name}.weight", InitSpec("normal", (2 / (conv.out_channels * conv.kernel_size[0] ** 2)) ** 0.5))
              for name, conv in chain.named_modules() if isinstance(conv, nn.Conv2d)),
            ("*norm*.weight", InitSpec("ones")),
            ("*.bias", InitSpec("zeros")),
            ("head.weight", InitSpec("normal", 0.01)),
        ),
        compared_modules=("stem", "block*"),
    )  # fmt: skip
    return chain


class BatchNorm(nn.BatchNorm2d):
    def __init__(self, channels: int):
        super().__init__(channels)
        self.num_batches_tracked = None  # only a cumulative average would need it

    def reset_buffers(self) -> None:
        """Initializes the running statistics on the device of the weights."""
        assert self.running_mean is not None
        dtype = torch.promote_types(self.running_mean.dtype, torch.float32)
        self.running_mean = torch.zeros_like(self.running_mean, dtype=dtype)
        self.running_var = torch.ones_like(self.running_mean)


class ResNetStem(nn.Module):
    is_compiled_end = True

    def __init__(self, config: ResNetConfig):
        super().__init__()
        kernel_size, stride = (7, 2) if config.stem == "imagenet" else (3, 1)
        self.conv = nn.Conv2d(3, config.width, kernel_size, stride, kernel_size // 2, bias=False)
        self.norm = BatchNorm(config.width)
        self.has_max_pool = config.stem == "imagenet"

    def forward(self, images: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        if images.is_cuda:  # the memory format in which convolutions are fastest; all that follows keeps it
            images = images.contiguous(memory_format=torch.channels_last)
        x = self.norm(self.conv(images.to(self.conv.weight.dtype))).relu_()
        return F.max_pool2d(x, 3, 2, 1) if self.has_max_pool else x


class ResNetBlock(nn.Module):
    def __init__(self, in_channels: int, mid_channels: int, stride: int, has_bottlenecks: bool):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        convolutions = [(3, stride, mid_channels), (3, 1, mid_channels)]  # kernel size, stride, output channels
        if has_bottlenecks:
            convolutions = [(1, 1, mid_channels), (3, stride, mid_channels), (1, 1, 4 * mid_channels)]
        channels_before = in_channels
        for kernel_size, conv_stride, channels in convolutions:
            padding = kernel_size // 2
            self.convs.append(nn.Conv2d(channels_before, channels, kernel_size, conv_stride, padding, bias=False))
            self.norms.append(BatchNorm(channels))
            channels_before = channels
        # The projection shortcut. Initial weights are hashes of parameter names, so its name stays.
        has_projection = stride > 1 or in_channels != channels
        self.beside = nn.Conv2d(in_channels, channels, 1, stride, bias=False) if has_projection else None
        self.beside_norm = BatchNorm(channels) if has_projection else None

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y if number == 0 else y.relu_()))
        if self.beside is not None and self.beside_norm is not None:
            x = self.beside_norm(self.beside(x))
        return (x + y).relu_()


class ClassifierHead(nn.Module):
    """Average pooling and the classifier. Returns logits (B, 1, classes), or the loss summed over the targets."""

    def __init__(self, in_channels: int, classes: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(classes, in_channels)), nn.Parameter(torch.empty(classes))
        self.num_correct: int | Tensor = 0  # correctly classified validation samples since the last reset

    def forward(self, x: Tensor, ids: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        logits = F.linear(x.mean((2, 3)), self.weight, self.bias).unsqueeze(1)
        if targets is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        classes = targets.flatten()
        if not self.training:
            self.num_correct = self.num_correct + (logits.argmax(-1) == classes).sum()
        return F.cross_entropy(logits, classes, ignore_index=IGNORE_INDEX, reduction="sum")
