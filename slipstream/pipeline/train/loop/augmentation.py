"""Random augmentation of the images of training rows, in the loader.

The random numbers of a row are a pure function of the seed, the epoch and the row's position in the global order. The
pixels are computed with integers on the training's device, which gives the same bits on every device and in batches of
every size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.pipeline.train.config import ONE, AugmentConfig, TrainingConfig
from slipstream.pipeline.train.data_order import BatchPlan, GlobalOrder, rank_slice
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.distributed.process_group import RankContext

IMAGE = "image"
#: Fixed-point factors of colours have this many fractional bits.
BITS = 16
#: Weights of red, green and blue in the luminance (ITU-R 601-2), in sixteen bits, as in Pillow.
LUMINANCE = (19595, 38470, 7471)
#: Candidates of a crop by area; the first that lies within the image is taken.
CANDIDATES = 10
#: Maximum number of pixels that are computed at once: on CPUs they stay in cache, on GPUs they take little memory.
AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}


class ImageTransform(ABC):
    """Transform of uint8 images ``[rows, channels, height, width]`` with integer parameters per row."""

    #: Number of random numbers and of parameters per row.
    draws: int
    width: int

    @abstractmethod
    def parameters(self, drawn: np.ndarray) -> np.ndarray:
        """Return the parameters ``[rows, width]`` for random numbers in [0, 1), float64 ``[rows, draws]``."""

    @abstractmethod
    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        """Return the transformed images; ``parameters`` is int32 ``[rows, width]``."""


@dataclass(frozen=True)
class RandomFlip(ImageTransform):
    """Flip along ``axis`` with a probability."""

    axis: int
    probability: float
    draws = width = 1

    def parameters(self, drawn: np.ndarray) -> np.ndarray:
        return drawn < self.probability

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        place = torch.arange(images.shape[self.axis], device=images.device)
        return taken(images, torch.where(parameters != 0, place.flip(0), place), self.axis)


@dataclass(frozen=True)
class PaddedCrop(ImageTransform):
    """Crop of the original size from an image padded with zeros."""

    padding: int
    draws = width = 2

    def parameters(self, drawn: np.ndarray) -> np.ndarray:
        return np.floor(drawn * (2 * self.padding + 1)) - self.padding

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        within = torch.ones(1, 1, 1, 1, dtype=torch.uint8, device=images.device)
        for axis in (2, 3):
            size = images.shape[axis]
            at = torch.arange(size, device=images.device) + parameters[:, axis - 2, None]
            within = within * along((at >= 0) & (at < size), axis)
            images = taken(images, at.clamp(0, size - 1), axis)
        return images * within


@dataclass(frozen=True)
class AreaCrop(ImageTransform):
    """Crop of a random area and aspect ratio, resized bilinearly to the original ``size`` [height, width]."""

    area: tuple[float, float]
    aspect: tuple[float, float]
    size: tuple[int, int]
    draws = 2 * CANDIDATES + 2
    width = 4

    def parameters(self, drawn: np.ndarray) -> np.ndarray:
        height, width = self.size
        areas = between(self.area, drawn[:, :CANDIDATES]) * (height * width)
        low, high = self.aspect
        ratios = low * (high / low) ** drawn[:, CANDIDATES : 2 * CANDIDATES]
        heights, widths = np.rint(np.sqrt(areas / ratios)), np.rint(np.sqrt(areas * ratios))
        within = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
        chosen = within.argmax(axis=1)[:, None]
        h = np.take_along_axis(heights, chosen, 1).clip(1, height)
        w = np.take_along_axis(widths, chosen, 1).clip(1, width)
        top, left = drawn[:, -2:-1] * (height - h + 1), drawn[:, -1:] * (width - w + 1)
        return np.hstack([np.floor(top), np.floor(left), h, w])

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        # Weights are multiples of 1 / (2 * size) along every axis, so the sums are exact until they are divided.
        height, width = self.size
        whole = 4 * height * width
        dtype = torch.int32 if 256 * whole < 2**31 else torch.int64
        values = images
        for axis, size in zip((2, 3), self.size, strict=True):
            start, length = parameters[:, axis - 2, None], parameters[:, axis, None]
            place = torch.arange(1, 2 * size, 2, device=images.device) * length - size
            lower = place.div(2 * size, rounding_mode="floor")
            weight = along(place - 2 * size * lower, axis).to(dtype)
            last = length - 1
            one = taken(values, lower.clamp(min=0) + start, axis)
            other = taken(values, torch.minimum(lower + 1, last) + start, axis)
            values = one.to(dtype) * (2 * size - weight) + other.to(dtype) * weight
        return (values + whole // 2).div(whole, rounding_mode="floor").to(torch.uint8)


@dataclass(frozen=True)
class RandomColour(ImageTransform):
    """Change of brightness, contrast and saturation by random factors, in this order, each rounded to whole pixels."""

    ranges: tuple[tuple[float, float], ...]
    draws = width = 3

    def parameters(self, drawn: np.ndarray) -> np.ndarray:
        return np.rint(np.stack([between(r, drawn[:, i]) for i, r in enumerate(self.ranges)], 1) * 2**BITS)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        for number, limits in enumerate(self.ranges):
            if limits == ONE:
                continue
            values = images.to(torch.int32)
            gray = torch.zeros_like(values[:, :1]) if number == 0 else luminance(values)
            if number == 1:
                pixels = gray[0].numel()
                mean = (2 * gray.sum(dim=(1, 2, 3)) + pixels).div(2 * pixels, rounding_mode="floor")
                gray = mean.to(torch.int32)[:, None, None, None]
            factor = parameters[:, number, None, None, None]
            mixed = values * factor + gray * (2**BITS - factor)
            images = rounded(mixed).clamp(0, 255).to(torch.uint8)
        return images


def luminance(images: Tensor) -> Tensor:
    """Return the luminance of int32 RGB images ``[rows, 3, height, width]``; for one channel, the images."""
    if images.shape[1] != len(LUMINANCE):
        return images
    red, green, blue = (images[:, i : i + 1] * weight for i, weight in enumerate(LUMINANCE))
    return rounded(red + green + blue)


def rounded(fixed: Tensor) -> Tensor:
    """Round fixed-point numbers half up."""
    return (fixed + 2 ** (BITS - 1)) >> BITS


def between(limits: tuple[float, float], drawn: np.ndarray) -> np.ndarray:
    low, high = limits
    return low + (high - low) * drawn


def along(values: Tensor, axis: int) -> Tensor:
    """Return ``[rows, size]`` as a view that broadcasts along ``axis`` of images."""
    return values[:, None, :, None] if axis == 2 else values[:, None, None, :]


def taken(images: Tensor, places: Tensor, axis: int) -> Tensor:
    """Return the lines of every image at ``places``, int64 ``[rows, size]``, along ``axis``."""
    rows, channels, height, width = images.shape
    if axis == 3:
        return images.gather(3, along(places, axis).expand_as(images))
    # Five times as fast as ``gather``, which copies single pixels.
    starts = torch.arange(0, rows * channels * height, height, device=images.device).view(rows, channels, 1)
    lines = (starts + places[:, None]).flatten()
    return images.reshape(-1, width).index_select(0, lines).view(images.shape)


def made(config: AugmentConfig, size: tuple[int, int]) -> ImageTransform:
    """Return the transform of images of ``size`` [height, width]."""
    match config.transform:
        case "horizontal_flip":
            return RandomFlip(3, config.probability)
        case "vertical_flip":
            return RandomFlip(2, config.probability)
        case "crop" if config.padding:
            return PaddedCrop(config.padding)
        case "crop":
            area, aspect = config.ranges("area", "aspect")
            return AreaCrop(area, aspect, size)
        case _:
            return RandomColour(config.ranges("brightness", "contrast", "saturation"))


class Augmentation:
    """Augmentation of this rank's training rows by a list of transforms."""

    def __init__(
        self, transforms: Sequence[AugmentConfig], signature: Signature, order: GlobalOrder, group: RankContext
    ) -> None:
        (number,) = (n for n, spec in enumerate(signature.inputs) if spec.name == IMAGE)
        #: Position of the images among the inputs.
        self.input = number
        _, height, width = signature.inputs[number].shape
        self.transforms = [made(config, (height, width)) for config in transforms]
        #: Number of parameters of a row.
        self.width = sum(transform.width for transform in self.transforms)
        self._order, self._group = order, group

    def parameters(self, plan: BatchPlan) -> np.ndarray:
        """Return the parameters of a batch's rows, ``[rows, width]``."""
        epoch, position = divmod(plan.consumed - plan.size, self._order.blocks.rows)
        position += rank_slice(self._group.rank, self._group.world, plan.size).start
        found = []
        for number, transform in enumerate(self.transforms, 1):
            # Philox gives four numbers for each value of its counter. The third word tells these numbers from those of
            # the order.
            counts = -(-transform.draws // 4)
            counter = [position * counts, 0, number, 0]
            generator = np.random.Philox(key=[self._order.seed, epoch], counter=counter)
            raw = generator.random_raw(len(plan.rows) * counts * 4)
            drawn = (raw >> np.uint64(11)) * 2.0**-53
            found.append(transform.parameters(drawn.reshape(-1, counts * 4)[:, : transform.draws]))
        return np.hstack(found)

    def apply(self, images: Tensor, parameters: Tensor) -> None:
        """Augment images in place; ``parameters`` is int32 ``[rows, width]`` on their device."""
        rows = max(1, AT_ONCE[images.device.type] // max(1, images[:1].numel()))
        for some, theirs in zip(images.split(rows), parameters.split(rows), strict=True):
            result, start = some, 0
            for transform in self.transforms:
                result = transform.apply(result, theirs[:, start : start + transform.width])
                start += transform.width
            some.copy_(result)


def check_augment(training: TrainingConfig, signature: Signature) -> None:
    """Raise ``UserError`` if the training augments data that are not images, or lack the colours."""
    if not training.augment:
        return
    shapes = [spec.shape for spec in signature.inputs if spec.name == IMAGE]
    if not shapes:
        kind = "text" if signature.task == "next token" else "a table"
        raise training.reject("augment", f"[], as the data are {kind}: only images are augmented")
    if shapes[0][0] != len(LUMINANCE) and any(each.saturation for each in training.augment):
        raise training.reject("augment", f"no saturation for images of {shapes[0][0]} channel")
