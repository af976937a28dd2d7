"""A small residual network for images (He et al. 2015) with group normalisation (Wu and He 2018)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from tasks.artifacts.prepared import Signature


def normalised(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(8, channels), channels)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; the first convolution and the shortcut have the stride."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = normalised(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = normalised(out_channels)
        same = stride == 1 and channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Takes standardised images ``[batch, channels, height, width]`` of at least 4x4; returns ``[batch, outputs]``.

    ``widths`` are the channels of the stages; each stage after the first halves height and width. GroupNorm uses no
    statistics of the batch, so the result does not depend on how a batch is divided among processes.
    """

    def __init__(self, signature: Signature, widths: tuple[int, ...] = (16, 32, 64), depth: int = 1) -> None:
        super().__init__()
        channels = signature.inputs[0].shape[0]
        self.stem = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.norm = normalised(widths[0])
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            for index in range(depth):
                blocks.append(Block(channels, width, stride=2 if stage and not index else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, signature.outputs)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(image)))
        return self.head(self.blocks(x).mean(dim=(2, 3)))
