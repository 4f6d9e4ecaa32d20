"""A multi-layer perceptron, a small convolutional network and residual networks.

Their blocks are one flat dictionary rather than stages, so that they can be sharded, checkpointed and split into
pipeline stages one by one.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from app.errors import UserError

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
DEPTHS = {18: (False, (2, 2, 2, 2)), 34: (False, (3, 4, 6, 3)), 50: (True, (3, 4, 6, 3))}
"""Depth of a ResNet: (whether blocks are bottlenecks, blocks per stage)."""
SMALL_IMAGE = 64  # up to this many pixels a side the stem keeps the resolution, as is usual for CIFAR and MNIST
Norm = Callable[[int], nn.Module]


class Layer(nn.Module):
    """Linear, activation, dropout: (N, in) to (N, out)."""

    def __init__(self, in_features: int, out_features: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.activation(self.linear(x)))


class MLP(nn.Module):
    """Hidden layers and a linear output: (N, …) with `in_features` numbers per row, to (N, out_features)."""

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
        pairs = enumerate(itertools.pairwise(widths))
        self.blocks = nn.ModuleDict({str(i): Layer(before, after, activation, dropout) for i, (before, after) in pairs})
        self.head = nn.Linear(widths[-1], out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


# --- a small CNN: 97 % and more of MNIST's digits in seconds on a CPU ----------------------------------------------


class ConvBlock(nn.Module):
    """3×3 convolution, ReLU, 2×2 max-pooling: (N, in, H, W) to (N, out, H/2, W/2)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.activation = nn.ReLU()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        # Pooling first gives the same numbers (ReLU is monotonic) from a quarter of the work.
        return self.activation(self.pool(self.conv(x)))


class CNN(nn.Module):
    """Convolutions that halve the image, then two linear layers: (N, channels, height, width) to (N, classes)."""

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
        height_left, width_left = height >> len(widths), width >> len(widths)
        if height_left < 1 or width_left < 1:
            raise UserError(
                f"a CNN of {len(widths)} convolutions halves an image of {height}×{width} to nothing; "
                "write fewer model_args.widths"
            )
        pairs = enumerate(itertools.pairwise([channels, *widths]))
        self.blocks = nn.ModuleDict({str(i): ConvBlock(before, after) for i, (before, after) in pairs})
        self.hidden = nn.Linear(widths[-1] * height_left * width_left, hidden)
        self.activation = nn.ReLU()
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.activation(self.hidden(x.flatten(1))))


# --- residual networks (He et al. 2015, "Deep residual learning for image recognition") ----------------------------


class ResidualBlock(nn.Module):
    """A residual branch added to its input: (N, in, H, W) to (N, out, H/stride, W/stride).

    Basic: two 3×3 convolutions. Bottleneck: 1×1 down to a quarter of `out_channels`, 3×3, 1×1 up.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, bottleneck: bool, norm: Norm) -> None:
        super().__init__()
        inner = out_channels // 4 if bottleneck else out_channels
        size = 1 if bottleneck else 3
        layers = [_conv(in_channels, inner, size, 1 if bottleneck else stride), norm(inner), nn.ReLU()]
        if bottleneck:
            layers += [_conv(inner, inner, 3, stride), norm(inner), nn.ReLU()]
        layers += [_conv(inner, out_channels, size), norm(out_channels)]
        # The last norm starts at zero, so that every block starts as the identity (Goyal et al. 2017).
        nn.init.zeros_(layers[-1].weight)  # type: ignore[arg-type]
        self.branch = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(_conv(in_channels, out_channels, 1, stride), norm(out_channels))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


class ResNet(nn.Module):
    """(N, channels, height, width) to (N, classes).

    `width`: channels of the first stage. `norm`: "batch" (BatchNorm, whose statistics are those of one worker's
    micro-batch) or "group" (GroupNorm, Wu and He 2018: the same whatever the number of workers).
    """

    def __init__(
        self, channels: int, image_size: int, classes: int, *, depth: int = 18, width: int = 64, norm: str = "batch"
    ) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise UserError(f"there is no ResNet of depth {depth}; write {', '.join(map(str, DEPTHS))}")
        bottleneck, counts = DEPTHS[depth]
        make_norm = _norm(norm, width)
        small = image_size <= SMALL_IMAGE
        stem: list[nn.Module] = [_conv(channels, width, 3) if small else _conv(channels, width, 7, 2)]
        stem += [make_norm(width), nn.ReLU()]
        if not small:
            stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*stem)

        blocks: dict[str, nn.Module] = {}
        before = width
        for stage, count in enumerate(counts):
            after = width * 2**stage * (4 if bottleneck else 1)
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks[str(len(blocks))] = ResidualBlock(before, after, stride, bottleneck, make_norm)
                before = after
        self.blocks = nn.ModuleDict(blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(torch.mean(x, dim=(2, 3)))


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias (a norm follows), initialised for ReLU (He et al. 2015)."""
    conv = nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _norm(name: str, width: int) -> Norm:
    if name == "batch":
        return nn.BatchNorm2d
    if name != "group":
        raise UserError(f"there is no norm {name!r} for a ResNet; write batch or group")
    groups = next(groups for groups in (32, 16, 8, 4, 2, 1) if width % (4 * groups) == 0 or groups == 1)
    return lambda channels: nn.GroupNorm(groups, channels)
