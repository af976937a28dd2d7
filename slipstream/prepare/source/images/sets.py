"""Where images come from: a directory of class folders, or arrays in ``.npz`` files; read in parts, labels known."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from slipstream.errors import UserError
from slipstream.prepare.columns import value_types
from slipstream.prepare.config import DataConfig
from slipstream.prepare.quarantine import BadRow
from slipstream.prepare.source.files import Listing, SourceFile
from slipstream.storage import StorageUnavailable

#: Pixels that are worked on at once.
CHUNK_BYTES = 8 << 20
#: A larger file is no picture that training could use.
MOST_BYTES = 256 << 20
IMAGES, LABELS = ("images", "image", "x", "X"), ("labels", "label", "y")

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Chunk:
    """Some pictures that follow each other: ``pixels`` uint8 ``[rows, *shape]``, of which those not in ``good`` (bool
    ``[rows]``) could not be read; ``labels`` are numbers of classes (int32), ``hashes`` of contents (uint64)."""

    pixels: np.ndarray
    labels: np.ndarray
    hashes: np.ndarray
    good: np.ndarray
    bad: list[BadRow] = field(default_factory=list)


class Part(Protocol):
    """A part of the images that is read by itself."""

    @property
    def rows(self) -> int: ...

    def chunks(self) -> Iterator[Chunk]: ...


@dataclass(frozen=True)
class ImageSet:
    """All images of a set. ``target`` names what the classes are."""

    name: str
    target: str
    classes: tuple[str, ...]
    shape: Shape
    parts: list[Any]
    warnings: list[str] = field(default_factory=list)


def hash_images(pixels: np.ndarray) -> np.ndarray:
    """uint64 ``[rows]`` of uint8 ``[rows, channels, height, width]``: equal pictures share a split."""
    return np.array([xxhash.xxh3_64_intdigest(np.ascontiguousarray(p).data) for p in pixels], np.uint64)


def rows_at_once(shape: tuple[int, ...]) -> int:
    return max(1, CHUNK_BYTES // int(np.prod(shape)))


# Class folders


@dataclass(frozen=True)
class FolderPart:
    """Some of the files, with the number of each one's class."""

    files: tuple[SourceFile, ...]
    labels: tuple[int, ...]
    shape: Shape
    config: DataConfig

    @property
    def rows(self) -> int:
        return len(self.files)

    def chunks(self) -> Iterator[Chunk]:
        """All files in one chunk. Raises ``UserError`` for a whole image of another shape."""
        from slipstream.prepare.source.images.decoding import Unreadable

        pixels = np.zeros((self.rows, *self.shape), np.uint8)
        good, bad = np.ones(self.rows, bool), []
        for place, file in enumerate(self.files):
            try:
                picture = decoded(file, self.config)
            except Unreadable as error:
                good[place] = False
                bad.append(BadRow(file.uri, 1, "", str(error), ""))
                continue
            if picture.shape != self.shape:
                raise UserError(
                    f"{file.uri}: is {shape_text(picture.shape)}, the first image {shape_text(self.shape)}; set "
                    "data.image_size to [height, width] and data.image_channels to 1 or 3, and all are made alike"
                )
            pixels[place] = picture
        yield Chunk(pixels, np.array(self.labels, np.int32), hash_images(pixels), good, bad)


def shape_text(shape: Shape) -> str:
    return f"{shape[1]} x {shape[2]} {'grey' if shape[0] == 1 else 'RGB'}"


def decoded(file: SourceFile, config: DataConfig) -> np.ndarray:
    from slipstream.prepare.source.images.decoding import Unreadable, decode

    if file.size > MOST_BYTES:
        raise Unreadable(f"{file.size:,} bytes, more than {MOST_BYTES:,}")
    with file.open() as stream:
        raw = stream.read()
    height_width = (config.image_size[0], config.image_size[1]) if config.image_size else None
    return decode(raw, config.image_channels, height_width)


def open_folders(data: Listing, files: list[SourceFile], target: str, config: DataConfig) -> ImageSet:
    """Images by the folder they lie in. Raises ``UserError`` unless there are class folders and a readable image."""
    if target:
        raise UserError(f"target: {target!r} is not needed, as images are labelled by their folders; leave it out")
    folders = [data.relative(file).split("/")[:-1] for file in files]
    for file, folder in zip(files, folders, strict=True):
        if not folder:
            raise UserError(
                f"{file.uri}: lies in no class folder; expected a directory with one folder of images for each class"
            )
    classes = sorted({folder[-1] for folder in folders})
    if len(classes) == 1:
        raise UserError(f"data: {data.address!r} has only one class folder, {classes[0]!r}; expected two or more")
    places = {name: place for place, name in enumerate(classes)}
    labels = [places[folder[-1]] for folder in folders]
    shape = first_shape(data, files, config)
    above = sorted({"/".join(folder[:-1]) for folder in folders} - {""})
    warnings = [
        f"the folders above the class folders, such as {name!r}, count for nothing: splits go by content, as "
        "data.split says"
        for name in above[:1]
    ]
    step = rows_at_once(shape)
    parts = [
        FolderPart(tuple(files[start : start + step]), tuple(labels[start : start + step]), shape, config)
        for start in range(0, len(files), step)
    ]
    return ImageSet(Path(data.address).name, "class", tuple(classes), shape, parts, warnings)


def first_shape(data: Listing, files: list[SourceFile], config: DataConfig) -> Shape:
    from slipstream.prepare.source.images.decoding import Unreadable

    first = None
    for file in files:
        try:
            channels, height, width = decoded(file, config).shape
        except Unreadable as error:
            first = first or f"{file.uri}: {error}"
            continue
        return channels, height, width
    raise UserError(f"data: no image in {data.address!r} can be read; the first one, {first}")


# Arrays


@dataclass(frozen=True)
class ArrayPart:
    """One ``.npz`` file. ``labels`` holds the numbers of its classes (int32 ``[rows]``)."""

    file: SourceFile
    images: str
    labels: np.ndarray
    last: bool  # whether the channels are the last axis of the stored array

    @property
    def rows(self) -> int:
        return len(self.labels)

    def chunks(self) -> Iterator[Chunk]:
        with member(self.file, self.images) as stream:
            shape, _ = header(self.file, self.images, stream)
            rows = rows_at_once(shape[1:])
            for start in range(0, self.rows, rows):
                count = min(rows, self.rows - start)
                wanted = count * int(np.prod(shape[1:]))
                raw = stream.read(wanted)
                if len(raw) != wanted:
                    raise UserError(f"{self.file.uri}: {self.images!r} ends too early; expected {self.rows:,} images")
                pixels = channels_first(np.frombuffer(raw, np.uint8).reshape(count, *shape[1:]), self.last)
                labels = self.labels[start : start + count]
                yield Chunk(pixels, labels, hash_images(pixels), np.ones(count, bool))


def channels_first(pixels: np.ndarray, last: bool) -> np.ndarray:
    if pixels.ndim == 3:
        return pixels[:, None]
    return pixels.transpose(0, 3, 1, 2) if last else pixels


@contextmanager
def member(file: SourceFile, name: str) -> Iterator[Any]:
    """One array of an ``.npz`` file as a stream of ``.npy`` bytes. Raises ``UserError`` if the file is damaged."""
    try:
        with file.open() as raw, zipfile.ZipFile(raw) as archive, archive.open(f"{name}.npy") as stream:
            yield stream
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, MemoryError) as error:
        if isinstance(error, (UserError, StorageUnavailable)):
            raise
        raise UserError(f"{file.uri}: not a whole .npz file ({str(error)[:200]})") from None


def header(file: SourceFile, name: str, stream: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, columnwise, dtype = read(stream)
    if columnwise:
        raise UserError(f"{file.uri}: {name!r} is stored column by column; save it as np.ascontiguousarray(...)")
    return shape, dtype


def open_arrays(data: Listing, files: list[SourceFile], target: str, config: DataConfig) -> ImageSet:
    """Images and labels as arrays. Raises ``UserError`` for what is not there or is something else."""
    if config.image_size or config.image_channels:
        raise UserError("data.image_size, data.image_channels: arrays are taken as they are; leave both out")
    found = [open_array(file, target) for file in files]
    for file, (_, shape, _) in zip(files, found, strict=True):
        if shape != found[0][1]:
            raise UserError(
                f"{file.uri}: its images are {shape_text(shape)}, in {files[0].uri} {shape_text(found[0][1])}"
            )
    names = [[value_types.label(value) for value in labels.tolist()] for _, _, labels in found]
    numeric = all(labels.dtype.kind in "iu" for _, _, labels in found)
    classes = sorted({name for labels in names for name in labels}, key=float if numeric else None)
    places = {name: place for place, name in enumerate(classes)}
    parts = [
        ArrayPart(file, images, np.array([places[name] for name in labels], np.int32), last)
        for file, ((images, last), _, _), labels in zip(files, found, names, strict=True)
    ]
    return ImageSet(Path(data.address).name, target or "label", tuple(classes), found[0][1], parts)


def open_array(file: SourceFile, target: str) -> tuple[tuple[str, bool], Shape, np.ndarray]:
    """The name of the images and whether their channels come last, their shape, and the labels."""
    try:
        with file.open() as raw, zipfile.ZipFile(raw) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()]
    except zipfile.BadZipFile as error:
        raise UserError(f"{file.uri}: not a whole .npz file ({error})") from None
    images = next((name for name in IMAGES if name in there), None)
    labelled = next((name for name in ((target,) if target else LABELS) if name in there), None)
    if images is None or labelled is None:
        expected = f"{IMAGES[0]!r} and {target or LABELS[0]!r}"
        raise UserError(f"{file.uri}: holds the arrays {', '.join(map(repr, there))}; expected {expected}")
    with member(file, images) as stream:
        shape, dtype = header(file, images, stream)
    axes = [axis for axis in (3, 1) if len(shape) == 4 and shape[axis] in (1, 3)]
    if dtype != np.uint8 or not (len(shape) == 3 or axes) or 0 in shape:
        raise UserError(
            f"{file.uri}: {images!r} is {dtype} {list(shape)}; expected uint8 [rows, height, width], [rows, height, "
            "width, channels] or [rows, channels, height, width] with 1 or 3 channels"
        )
    with member(file, labelled) as stream:
        labels = np.lib.format.read_array(stream, allow_pickle=False)
    if labels.shape != shape[:1] or labels.dtype.kind not in "iubU":
        raise UserError(
            f"{file.uri}: {labelled!r} is {labels.dtype} {list(labels.shape)}; expected a whole number or a text for "
            f"each of the {shape[0]:,} images"
        )
    if len(shape) == 3:
        return (images, False), (1, shape[1], shape[2]), labels
    last = axes[0] == 3
    channels, height, width = (shape[3], shape[1], shape[2]) if last else shape[1:]
    return (images, last), (channels, height, width), labels
