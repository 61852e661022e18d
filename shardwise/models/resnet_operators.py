"""Hand-written operator costs of a ResNet.

Tracing ResNet-101 takes 4 s of CPU time, too slow for a search that should take 2 s. Parameters and matmul
FLOPs agree with the trace, but our BatchNorm is many operators in a trace, which then moves 2.2 (float32) to 5.9 (bf16)
times as many bytes as the fused kernels of a compiled block.
"""

from collections.abc import Iterator

from shardwise.models.operator_costs import MatMul, OperatorCosts, merge_costs
from shardwise.models.resnet import block_convolutions, block_shapes
from shardwise.models.resnet_family import ResNetConfig


def resnet_operators(model: ResNetConfig, itemsize: int, samples: int) -> Iterator[OperatorCosts]:
    """Yields the costs of stem, blocks and head. A bottleneck's stride is in its 3 x 3 convolution."""
    imagenet = model.stem == "imagenet"
    side = -(-model.image_size // 2) if imagenet else model.image_size
    pixels = samples * 3 * model.image_size**2
    stem = _convolution_costs(itemsize, samples, side, 3, model.width, 7 if imagenet else 3, pixels)
    if imagenet:
        side = -(-side // 2)
        pooled = itemsize * samples * model.width * side**2
        saved = stem.output_bytes + 8 * pooled // itemsize  # with the indices of the maxima
        yield merge_costs("stem", [stem], pooled, saved, stem.output_bytes + pooled, 1)
    else:
        yield merge_costs("stem", [stem], stem.output_bytes, 0, 0, 0)
    for number, (width_in, inner, stride) in enumerate(block_shapes(model)):
        operators: list[OperatorCosts] = []
        convolutions, width_out = block_convolutions(inner, stride, model.has_bottlenecks), width_in
        for window, window_stride, channels in convolutions:
            saved, side = samples * width_out * side**2, -(-side // window_stride)
            relu = len(operators) < len(convolutions) - 1  # the last one's follows the residual sum
            operators.append(_convolution_costs(itemsize, samples, side, width_out, channels, window, saved, relu))
            width_out = channels
        if stride > 1 or width_in != width_out:  # the shortcut; its input is already counted as saved
            operators.append(_convolution_costs(itemsize, samples, side, width_in, width_out, 1, 0, relu=False))
        out = itemsize * samples * width_out * side**2
        # The residual sum, and an in-place ReLU whose output the next block saves.
        yield merge_costs(f"block{number}", operators, out, 0, 5 * out, 2)
    width_in = 8 * model.width * (4 if model.has_bottlenecks else 1)
    weights = (width_in + 1) * model.num_classes
    yield OperatorCosts(
        name="head", parameters=weights, parameter_bytes=weights * itemsize,
        output_bytes=samples * model.num_classes * itemsize, saved_bytes=samples * width_in * itemsize,
        moved_bytes=itemsize * samples * width_in * (side**2 + 1), num_ops=2,
        products=(MatMul(samples, width_in, model.num_classes),),
    )  # fmt: skip


def _convolution_costs(
    itemsize: int, samples: int, side: int, inner: int, outer: int, window: int, saved: int, relu: bool = True
) -> OperatorCosts:
    """Returns the costs of a convolution with `side` x `side` outputs, its norm and an in-place ReLU. The convolution
    saves `saved` elements, the norm its input."""
    out = itemsize * samples * outer * side**2
    weights = inner * outer * window**2 + 2 * outer
    product = MatMul(samples * side**2, inner * window**2, outer, 1, window**2)
    return OperatorCosts(
        name="", parameters=weights, parameter_bytes=weights * itemsize, output_bytes=out,
        saved_bytes=saved * itemsize + out, moved_bytes=(4 if relu else 2) * out, num_ops=3 if relu else 2,
        products=(product,),
    )  # fmt: skip
