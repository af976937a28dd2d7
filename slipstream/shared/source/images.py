"""Labelled images from class folders, ``.npz`` files or scikit-learn's digits, read in parts."""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from slipstream.shared.errors import UserError
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.identity import hash_rows
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.npz import DAMAGED, ArrayHeader, open_member, read_content, read_header
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.resolved import ResolvedSource, class_folders, load_digits
from slipstream.shared.storage import StorageUnavailable

if TYPE_CHECKING:
    from PIL import Image

#: Bytes of decoded pixels processed at once.
CHUNK_BYTES = 8 << 20
#: Largest image file in bytes; larger ones are quarantined.
MOST_BYTES = 256 << 20
#: Largest number of pixels that is decoded: a file of a few kilobytes can declare gigabytes.
MOST_PIXELS = 1 << 26
FORMATS = ("PNG", "JPEG")
#: PIL's modes with eight bits per channel, and the number of channels to which each is converted.
CHANNELS = {"1": 1, "L": 1, "LA": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3, "RGBX": 3, "CMYK": 3, "YCbCr": 3}
MODES = {1: "L", 3: "RGB"}
#: Allowed array names in a ``.npz`` file.
IMAGES, LABELS = ("images", "image", "x", "X"), ("labels", "label", "y")
DIGITS_TARGET = "digit"

Shape = tuple[int, int, int]
#: Independently readable part of an image set, with ``rows`` images that ``chunks()`` yields.
Part: TypeAlias = "FolderPart | ArrayPart | DigitsPart"


@dataclass(frozen=True)
class ImageChunk:
    """Consecutive images: ``pixels`` uint8 ``[rows, channels, height, width]``.

    ``labels`` are class numbers (int32), ``hashes`` are of the pixels (uint64). ``good`` (bool ``[rows]``) is False for
    images that could not be read; their pixels are zeros.
    """

    pixels: np.ndarray
    labels: np.ndarray
    hashes: np.ndarray
    good: np.ndarray
    bad: list[BadRow] = field(default_factory=list)


@dataclass(frozen=True)
class ImageSet:
    """Opened set of labelled images; ``target`` is the name of the label, ``shape`` is [channels, height, width]."""

    name: str
    target: str
    classes: tuple[str, ...]
    shape: Shape
    parts: Sequence[Part]
    warnings: list[str] = field(default_factory=list)


def hash_images(pixels: np.ndarray) -> np.ndarray:
    """Return the uint64 ``[rows]`` hashes of images, uint8 ``[rows, channels, height, width]``.

    Images with equal hashes are in the same split.
    """
    return np.array([xxhash.xxh3_64_intdigest(np.ascontiguousarray(p).data) for p in pixels], np.uint64)


def rows_at_once(shape: tuple[int, ...]) -> int:
    return max(1, CHUNK_BYTES // int(np.prod(shape)))


def open_images(source: ResolvedSource) -> ImageSet:
    return OPENERS[source.format](source)


# Class folders


@dataclass(frozen=True)
class FolderPart:
    """Part of the image files, with class numbers; ``given_by`` names the origin of ``shape`` in error messages."""

    files: tuple[SourceFile, ...]
    labels: tuple[int, ...]
    shape: Shape
    config: DataConfig
    given_by: str = "the first image"

    @property
    def rows(self) -> int:
        return len(self.files)

    def chunks(self) -> Iterator[ImageChunk]:
        """Yield all images in one chunk; raise ``UserError`` for an image of another shape."""
        pixels = np.zeros((self.rows, *self.shape), np.uint8)
        good, bad = np.ones(self.rows, bool), []
        for row, file in enumerate(self.files):
            try:
                picture = read_image(file, self.config)
            except UnusableImage as error:
                good[row] = False
                bad.append(BadRow(file.uri, 1, "", str(error), ""))
                continue
            if picture.shape != self.shape:
                raise UserError(
                    f"{file.uri}: is {shape_text(picture.shape)}, {self.given_by} {shape_text(self.shape)}; set "
                    "data.image_size to [height, width] and data.image_channels to 1 or 3 to convert all images"
                )
            pixels[row] = picture
        yield ImageChunk(pixels, np.array(self.labels, np.int32), hash_images(pixels), good, bad)


def shape_text(shape: Shape) -> str:
    return f"{shape[1]} x {shape[2]} {'grey' if shape[0] == 1 else 'RGB'}"


def read_image(file: SourceFile, config: DataConfig) -> np.ndarray:
    if file.size > MOST_BYTES:
        raise UnusableImage(f"{file.size:,} bytes, more than {MOST_BYTES:,}")
    with file.open() as stream:
        raw = stream.read()
    height_width = (config.image_size[0], config.image_size[1]) if config.image_size else None
    return decode_image(raw, config.image_channels, height_width)


def open_folders(source: ResolvedSource) -> ImageSet:
    """Open images labelled by folder; raise ``UserError`` without class folders or a readable image."""
    files = source.files
    if source.target:
        raise UserError(f"target: {source.target!r} is not used, as images are labelled by their folders; remove it")
    folders = class_folders(source, "images")
    classes = sorted({folder[-1] for folder in folders})
    if len(classes) == 1:
        raise UserError(f"data: {source.address!r} has only one class folder, {classes[0]!r}; expected two or more")
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [numbers[folder[-1]] for folder in folders]
    shape = first_shape(source)
    above = sorted({"/".join(folder[:-1]) for folder in folders} - {""})
    ignored = [
        f"the folders above the class folders, such as {name!r}, are ignored: splits depend on the content (data.split)"
        for name in above[:1]
        if not source.config.split.directories
    ]
    step = rows_at_once(shape)
    parts = [
        FolderPart(files[start : start + step], tuple(labels[start : start + step]), shape, source.config)
        for start in range(0, len(files), step)
    ]
    return ImageSet(source.name, "class", tuple(classes), shape, parts, ignored)


def first_shape(source: ResolvedSource) -> Shape:
    first = None
    for file in source.files:
        try:
            channels, height, width = read_image(file, source.config).shape
        except UnusableImage as error:
            first = first or f"{file.uri}: {error}"
            continue
        return channels, height, width
    raise UserError(f"data: no image in {source.address!r} can be read; the first one, {first}")


# Encoded images, from untrusted bytes


class UnusableImage(Exception):
    """Error for bytes that are not a usable image; its message is the reason."""


def decode_image(raw: bytes, channels: int = 0, size: tuple[int, int] | None = None) -> np.ndarray:
    """Decode untrusted bytes to uint8 ``[channels, height, width]``, rotated as EXIF says and resized to ``size``.

    ``size`` is (height, width); None keeps the size. ``channels`` is 1 (grey) or 3 (RGB); 0 keeps the image's own.
    Raise ``UnusableImage`` if decoding fails.
    """
    from PIL import Image, ImageOps  # slow to import, and not needed for tables

    stream = io.BytesIO(raw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(stream, formats=FORMATS) as picture:
                check(picture)
                wanted = MODES[channels or CHANNELS[picture.mode]]
                upright = ImageOps.exif_transpose(picture).convert(wanted)
                if size and size != (upright.height, upright.width):
                    upright = upright.resize((size[1], size[0]), Image.Resampling.BILINEAR)
                pixels = np.asarray(upright)
    except UnusableImage:
        raise
    except Exception as error:
        # Exceptions of decoders on hostile bytes are undocumented; any of them means an invalid image. The reason omits
        # the address of the stream, so that equal bytes give equal reasons.
        reason = str(error).replace(f" {stream!r}", "")[:100]
        raise UnusableImage(f"not a complete PNG or JPEG: {type(error).__name__}: {reason}") from None
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def check(picture: Image.Image) -> None:
    if picture.width * picture.height > MOST_PIXELS:
        raise UnusableImage(f"{picture.width} x {picture.height} pixels, more than {MOST_PIXELS:,}")
    if picture.mode not in CHANNELS:
        raise UnusableImage(f"mode {picture.mode}; expected eight bits per channel")


# Arrays


@dataclass(frozen=True)
class ArrayPart:
    """One ``.npz`` file; ``images`` is the name of its array, ``labels`` are class numbers (int32 ``[rows]``)."""

    file: SourceFile
    images: str
    labels: np.ndarray
    channels_last: bool

    @property
    def rows(self) -> int:
        return len(self.labels)

    def chunks(self) -> Iterator[ImageChunk]:
        with member(self.file, self.images) as stream:
            shape = rowwise_header(self.file, self.images, stream).shape
            rows = rows_at_once(shape[1:])
            for start in range(0, self.rows, rows):
                count = min(rows, self.rows - start)
                wanted = count * int(np.prod(shape[1:]))
                raw = stream.read(wanted)
                if len(raw) != wanted:
                    raise UserError(f"{self.file.uri}: {self.images!r} ends too early; expected {self.rows:,} images")
                pixels = channels_first(np.frombuffer(raw, np.uint8).reshape(count, *shape[1:]), self.channels_last)
                labels = self.labels[start : start + count]
                yield ImageChunk(pixels, labels, hash_images(pixels), np.ones(count, bool))


def channels_first(pixels: np.ndarray, channels_last: bool) -> np.ndarray:
    if pixels.ndim == 3:
        return pixels[:, None]
    return pixels.transpose(0, 3, 1, 2) if channels_last else pixels


@contextmanager
def damage_named(file: SourceFile) -> Iterator[None]:
    """Raise ``UserError`` for a damaged ``.npz`` file."""
    try:
        yield
    except DAMAGED as error:
        if isinstance(error, (UserError, StorageUnavailable)):
            raise
        raise UserError(f"{file.uri}: not a complete .npz file ({str(error)[:200]})") from None


@contextmanager
def member(file: SourceFile, name: str) -> Iterator[IO[bytes]]:
    """Open the array ``name`` of an ``.npz`` file as a stream; raise ``UserError`` for damage."""
    with damage_named(file), file.open() as raw, open_member(raw, name) as stream:
        yield stream


def rowwise_header(file: SourceFile, name: str, stream: IO[bytes]) -> ArrayHeader:
    header = read_header(stream)
    if header.columnwise:
        raise UserError(f"{file.uri}: {name!r} is stored column by column; save it as np.ascontiguousarray(...)")
    return header


def open_arrays(source: ResolvedSource) -> ImageSet:
    """Open images and labels in ``.npz`` files; raise ``UserError`` if arrays are missing or unsuitable."""
    files, target = source.files, source.target
    if source.config.image_size or source.config.image_channels:
        raise UserError("data.image_size, data.image_channels: arrays are used unchanged; remove both")
    arrays = [open_array(file, target) for file in files]
    shape = arrays[0].shape
    for file, array in zip(files, arrays, strict=True):
        if array.shape != shape:
            raise UserError(
                f"{file.uri}: its images are {shape_text(array.shape)}, but in {files[0].uri} {shape_text(shape)}; "
                "expected equal shapes"
            )
    names = [[value_types.class_label(value) for value in array.labels.tolist()] for array in arrays]
    numeric = all(array.labels.dtype.kind in "iu" for array in arrays)
    classes = sorted({name for labels in names for name in labels}, key=float if numeric else None)
    numbers = {name: number for number, name in enumerate(classes)}
    parts = [
        ArrayPart(file, array.images, np.array([numbers[name] for name in labels], np.int32), array.channels_last)
        for file, array, labels in zip(files, arrays, names, strict=True)
    ]
    return ImageSet(source.name, target or "label", tuple(classes), shape, parts)


class NpzArrays(NamedTuple):
    """Arrays of one ``.npz`` file: name, layout and shape of the images, and the labels."""

    images: str
    channels_last: bool
    shape: Shape
    labels: np.ndarray


def open_array(file: SourceFile, target: str) -> NpzArrays:
    with damage_named(file), file.open() as raw, zipfile.ZipFile(raw) as archive:
        stored = [name.removesuffix(".npy") for name in archive.namelist()]
    images = next((name for name in IMAGES if name in stored), None)
    labelled = next((name for name in ((target,) if target else LABELS) if name in stored), None)
    if images is None or labelled is None:
        expected = f"{IMAGES[0]!r} and {target or LABELS[0]!r}"
        raise UserError(f"{file.uri}: holds the arrays {', '.join(map(repr, stored))}; expected {expected}")
    with member(file, images) as stream:
        shape, _, dtype = rowwise_header(file, images, stream)
    axes = [axis for axis in (3, 1) if len(shape) == 4 and shape[axis] in (1, 3)]
    if dtype != np.uint8 or not (len(shape) == 3 or axes) or 0 in shape or math.prod(shape[1:]) > 3 * MOST_PIXELS:
        raise UserError(
            f"{file.uri}: {images!r} is {dtype} {list(shape)}; expected uint8 [rows, height, width], [rows, height, "
            "width, channels] or [rows, channels, height, width] with 1 or 3 channels and at most "
            f"{MOST_PIXELS:,} pixels"
        )
    with member(file, labelled) as stream:
        header = read_header(stream)
        if header.shape != shape[:1] or header.dtype.kind not in "iubU" or header.bytes > MOST_BYTES:
            raise UserError(
                f"{file.uri}: {labelled!r} is {header}; expected a whole number or a text for each of the "
                f"{shape[0]:,} images, {MOST_BYTES >> 20} MiB in all"
            )
        labels = read_content(stream, header)
    if len(shape) == 3:
        return NpzArrays(images, False, (1, shape[1], shape[2]), labels)
    if axes[0] == 3:
        return NpzArrays(images, True, (shape[3], shape[1], shape[2]), labels)
    return NpzArrays(images, False, (shape[1], shape[2], shape[3]), labels)


# The digits of scikit-learn


@dataclass(frozen=True)
class DigitsPart:
    rows: int

    def chunks(self) -> Iterator[ImageChunk]:
        pixels, labels = load_digits()
        # Hashed pixel by pixel since the first version; another hash would move rows between splits.
        flat = pixels.reshape(len(pixels), -1)
        columns = [(str(pixel), pa.array(flat[:, pixel])) for pixel in range(flat.shape[1])]
        yield ImageChunk(pixels, labels, hash_rows(columns, len(flat)), np.ones(len(pixels), bool))


def open_digits(source: ResolvedSource) -> ImageSet:
    """Open scikit-learn's digits; raise ``UserError`` for a target other than "digit"."""
    if source.target not in ("", DIGITS_TARGET):
        raise UserError(
            f"target: {source.target!r} needs --data; without it the digits data set is used, whose target is "
            f"{DIGITS_TARGET!r}"
        )
    pixels, _ = load_digits()
    classes = tuple(str(digit) for digit in range(10))
    return ImageSet(
        "handwritten digits (scikit-learn)", DIGITS_TARGET, classes, pixels.shape[1:], [DigitsPart(len(pixels))]
    )


OPENERS = {"images": open_folders, "arrays": open_arrays, "digits": open_digits}
