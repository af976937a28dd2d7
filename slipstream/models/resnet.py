"""A small residual network for images (He et al. 2015) with group normalisation (Wu and He 2018) or batch
normalisation (Ioffe and Szegedy 2015)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from slipstream.artifacts.prepared.data import Signature


def normalised(channels: int, norm: str) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(min(8, channels), channels)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut; the first convolution and the shortcut have the stride."""

    def __init__(self, channels: int, out_channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = normalised(out_channels, norm)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = normalised(out_channels, norm)
        same = stride == 1 and channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Takes standardised images ``[batch, channels, height, width]`` of at least 4x4; returns ``[batch, outputs]``.

    ``widths`` are the channels of the stages; each stage after the first halves height and width. With ``norm`` "group"
    no statistics of the batch are used, so the result does not depend on how a batch is divided among processes. With
    "batch" it does: on another number of processes the same samples give other numbers. In return the export folds the
    normalisation into the convolutions, which makes the network faster, and much more so in INT8.

    Raises ``ValueError`` for another ``norm``, and for "batch" with images so small that a batch of one row would leave
    one value per channel.
    """

    def __init__(
        self, signature: Signature, widths: tuple[int, ...] = (16, 32, 64), depth: int = 1, norm: str = "group"
    ) -> None:
        super().__init__()
        if norm not in ("group", "batch"):
            raise ValueError(f'norm is {norm!r}; expected "group" or "batch"')
        smallest = 2 ** (len(widths) - 1)
        if norm == "batch" and max(signature.inputs[0].shape[1:]) <= smallest:
            raise ValueError(f'norm: "batch" needs images larger than {smallest} x {smallest} with so many widths')
        channels = signature.inputs[0].shape[0]
        self.stem = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.norm = normalised(widths[0], norm)
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            for index in range(depth):
                blocks.append(Block(channels, width, stride=2 if stage and not index else 1, norm=norm))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, signature.outputs)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(image)))
        return self.head(self.blocks(x).mean(dim=(2, 3)))
