"""One encoded picture (PNG or JPEG) to pixels, from bytes that nobody vouches for."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

#: A picture with more pixels is not decoded: a few kilobytes can claim to be gigabytes.
MOST_PIXELS = 1 << 26
FORMATS = ("PNG", "JPEG")
#: Modes of eight bits per channel, by the number of channels that they are read as.
CHANNELS = {"1": 1, "L": 1, "LA": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3, "RGBX": 3, "CMYK": 3, "YCbCr": 3}
MODES = {1: "L", 3: "RGB"}


class Unreadable(Exception):
    """The bytes are no whole picture that can be used; the text says why."""


def decode(raw: bytes, channels: int = 0, size: tuple[int, int] | None = None) -> np.ndarray:
    """uint8 ``[channels, height, width]``, turned as its EXIF data says and brought to ``size`` if that is given.

    ``channels`` (1 grey, 3 RGB) is what the picture is converted to; 0 leaves it what it is. Raises ``Unreadable``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
                check(picture)
                wanted = MODES[channels or CHANNELS[picture.mode]]
                upright = ImageOps.exif_transpose(picture).convert(wanted)
                if size and size != (upright.height, upright.width):
                    upright = upright.resize((size[1], size[0]), Image.Resampling.BILINEAR)
                pixels = np.asarray(upright)
    except Unreadable:
        raise
    except Exception as error:
        # What a decoder may raise on hostile bytes is not documented; whatever it is, the picture is not whole.
        raise Unreadable(f"no whole PNG or JPEG: {type(error).__name__}: {str(error)[:100]}") from None
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def check(picture: Image.Image) -> None:
    if picture.width * picture.height > MOST_PIXELS:
        raise Unreadable(f"{picture.width} x {picture.height} pixels, more than {MOST_PIXELS:,}")
    if picture.mode not in CHANNELS:
        raise Unreadable(f"mode {picture.mode}; expected eight bits per channel")
