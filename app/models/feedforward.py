"""A multi-layer perceptron, a small convolutional network and residual networks.

Their blocks are in one flat dictionary rather than in stages, so that they can be sharded,
checkpointed and cut into pipeline stages one by one.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from app.errors import UserError

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
DEPTHS = {18: (False, (2, 2, 2, 2)), 34: (False, (3, 4, 6, 3)), 50: (True, (3, 4, 6, 3))}
"""For each depth of a ResNet: (whether blocks are bottlenecks, blocks of each stage)."""
SMALL_IMAGE = 64
"""Up to so many pixels a side the stem keeps the resolution, as is usual for CIFAR and MNIST."""
Norm = Callable[[int], nn.Module]
"""Makes a norm for a number of channels."""


class Layer(nn.Module):
    """Linear, activation, dropout: (N, in) to (N, out)."""

    def __init__(
        self, in_features: int, out_features: int, activation: str, dropout: float
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.activation(self.linear(x)))


class MLP(nn.Module):
    """Hidden layers and a linear output: (N, …) to (N, out_features).

    Args:
        in_features: Numbers of a row.
        out_features: Numbers of an output.
        hidden: The width of each hidden layer.
        activation: relu, gelu, silu or tanh.
        dropout: The probability of dropping a number.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        hidden: Sequence[int] = (256, 256),
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        self.blocks = nn.ModuleDict()
        for i, (width_in, width_out) in enumerate(itertools.pairwise(widths)):
            self.blocks[str(i)] = Layer(width_in, width_out, activation, dropout)
        self.head = nn.Linear(widths[-1], out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


# --- a small CNN: at least 97 % of MNIST's digits in seconds on a CPU -----------------------------


class ConvBlock(nn.Module):
    """3×3 convolution, ReLU, 2×2 max-pooling: (N, in, H, W) to (N, out, H/2, W/2)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.activation = nn.ReLU()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        # Pooling first gives the same numbers, as ReLU is monotonic, with a quarter of the work.
        return self.activation(self.pool(self.conv(x)))


class CNN(nn.Module):
    """Convolutions that halve the image, then two linear layers.

    (N, channels, height, width) to (N, classes).

    Args:
        channels: Of an image.
        height: In pixels.
        width: In pixels.
        classes: The number of classes.
        widths: The channels of each convolution.
        hidden: The width of the first linear layer.

    Raises:
        UserError: There are more convolutions than the image can be halved.
    """

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        classes: int,
        *,
        widths: Sequence[int] = (16, 32),
        hidden: int = 128,
    ) -> None:
        super().__init__()
        last_height = height >> len(widths)
        last_width = width >> len(widths)
        if last_height < 1 or last_width < 1:
            raise UserError(
                f"a CNN of {len(widths)} convolutions halves an image of {height}×{width} to "
                "nothing; write fewer model_args.widths"
            )
        self.blocks = nn.ModuleDict()
        for i, (width_in, width_out) in enumerate(itertools.pairwise([channels, *widths])):
            self.blocks[str(i)] = ConvBlock(width_in, width_out)
        self.hidden = nn.Linear(widths[-1] * last_height * last_width, hidden)
        self.activation = nn.ReLU()
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.activation(self.hidden(x.flatten(1))))


# --- residual networks (He et al. 2015, "Deep residual learning for image recognition") -----------


class ResidualBlock(nn.Module):
    """A residual branch that is added to its input: (N, in, H, W) to (N, out, H/stride, W/stride).

    A basic block has two 3×3 convolutions. A bottleneck has a 1×1 convolution to a quarter of
    `out_channels`, a 3×3 one, and a 1×1 one back.

    Args:
        in_channels: in.
        out_channels: out.
        stride: Of the first 3×3 convolution.
        bottleneck: Whether it is a bottleneck.
        norm: Makes its norms.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int,
        bottleneck: bool,
        norm: Norm,
    ) -> None:
        super().__init__()
        layers: list[nn.Module]
        if bottleneck:
            inner = out_channels // 4
            layers = [_conv(in_channels, inner, 1), norm(inner), nn.ReLU()]
            layers += [_conv(inner, inner, 3, stride), norm(inner), nn.ReLU()]
            layers.append(_conv(inner, out_channels, 1))
        else:
            layers = [_conv(in_channels, out_channels, 3, stride), norm(out_channels), nn.ReLU()]
            layers.append(_conv(out_channels, out_channels, 3))
        last_norm = norm(out_channels)
        # The last norm starts at zero, so that a block starts as the identity (Goyal et al. 2017).
        nn.init.zeros_(last_norm.weight)  # type: ignore[arg-type]
        self.branch = nn.Sequential(*layers, last_norm)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            projection = _conv(in_channels, out_channels, 1, stride)
            self.shortcut = nn.Sequential(projection, norm(out_channels))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network: (N, channels, height, width) to (N, classes).

    Args:
        channels: Of an image.
        image_size: Pixels of the longer side.
        classes: The number of classes.
        depth: 18, 34 or 50.
        width: Channels of the first stage.
        norm: "batch" (BatchNorm, with the statistics of one worker's micro-batch) or "group"
            (GroupNorm, Wu and He 2018: the same for any number of workers).

    Raises:
        UserError: There is no such depth or norm.
    """

    def __init__(
        self,
        channels: int,
        image_size: int,
        classes: int,
        *,
        depth: int = 18,
        width: int = 64,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        if depth not in DEPTHS:
            depths = ", ".join(str(known) for known in DEPTHS)
            raise UserError(f"there is no ResNet of depth {depth}; write {depths}")
        bottleneck, blocks_of_stages = DEPTHS[depth]
        make_norm = _norm(norm, width)
        self.stem = _stem(channels, width, make_norm, is_small=image_size <= SMALL_IMAGE)
        self.blocks = nn.ModuleDict()
        in_channels = width
        for stage, count in enumerate(blocks_of_stages):
            out_channels = width * 2**stage * (4 if bottleneck else 1)
            for number in range(count):
                self.blocks[str(len(self.blocks))] = ResidualBlock(
                    in_channels,
                    out_channels,
                    stride=2 if stage > 0 and number == 0 else 1,
                    bottleneck=bottleneck,
                    norm=make_norm,
                )
                in_channels = out_channels
        self.head = nn.Linear(in_channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(torch.mean(x, dim=(2, 3)))


def _stem(channels: int, width: int, norm: Norm, *, is_small: bool) -> nn.Sequential:
    """What comes before the blocks; for small images it keeps the resolution."""
    if is_small:
        return nn.Sequential(_conv(channels, width, 3), norm(width), nn.ReLU())
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(_conv(channels, width, 7, 2), norm(width), nn.ReLU(), pool)


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias (a norm follows), initialized for ReLU (He et al. 2015)."""
    conv = nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _norm(name: str, width: int) -> Norm:
    if name == "batch":
        return nn.BatchNorm2d
    if name != "group":
        raise UserError(f"there is no norm {name!r} for a ResNet; write batch or group")
    # As many groups as leave each of them at least four channels.
    possible = (number for number in (32, 16, 8, 4, 2) if width % (4 * number) == 0)
    groups = next(possible, 1)
    return lambda channels: nn.GroupNorm(groups, channels)
