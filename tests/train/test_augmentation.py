"""Augmented rows: every transform against NumPy, a pure function of the position, only in training, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image, ImageEnhance
from torch import Tensor, nn

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.pipeline.train.checks import check_data
from slipstream.pipeline.train.config import AugmentConfig, TrainingConfig, first_difference, resume_settings
from slipstream.pipeline.train.data_loader import evaluation_batches, stored_blocks, training_batches
from slipstream.pipeline.train.data_order import BatchPlan, GlobalOrder
from slipstream.pipeline.train.loop.augmentation import Augmentation, made
from slipstream.pipeline.train.loop.step import micro_batches, name_rows, padded_rows
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.pipeline.train.telemetry.step_times import LoaderTimes
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor
from tests.support.groups import ALONE, on_cpu
from tests.support.numbered_rows import write
from tests.support.tokens import token_data
from tests.support.training import table_of_numbers

SHAPE = (3, 12, 9)
ROWS, SIZE = 130, 50
ALL = [
    AugmentConfig("horizontal_flip"),
    AugmentConfig("crop", padding=2),
    AugmentConfig("vertical_flip", probability=0.2),
    AugmentConfig("crop", area=[0.3, 0.9]),
    AugmentConfig("colour", brightness=[0.6, 1.4], contrast=[0.5, 1.5], saturation=[0, 2]),
]


def signature(shape: tuple[int, ...] = SHAPE) -> Signature:
    mean = (100.0,) * shape[0]
    image = TensorSpec("image", "uint8", shape)
    return Signature((image,), "classification", "y", ("a", "b"), image_mean=mean, image_std=mean)


def records(rows: int, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    made = np.zeros(rows, signature(shape).record)
    made["image"] = draw.integers(0, 256, (rows, *shape))
    made[TARGET] = np.arange(rows) % 2
    return made


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    rows = records(ROWS)
    splits = {"train": [rows[:90], rows[90:]], "validation": [rows[:20]], "test": [rows[:20]]}
    return write(tmp_path_factory.mktemp("images") / "data", splits, 16, signature())


# References in NumPy, one image at a time


def drawn(number: int, count: int, seed: int, epoch: int, position: int) -> np.ndarray:
    """The random numbers of a row, from a generator of its own."""
    blocks = -(-count // 4)
    generator = np.random.Philox(key=[seed, epoch], counter=[position * blocks, 0, number, 0])
    return (generator.random_raw(count) >> np.uint64(11)) / 2.0**53


def flipped(image: np.ndarray, config: AugmentConfig, u: np.ndarray) -> np.ndarray:
    axis = 2 if config.transform == "horizontal_flip" else 1
    return np.flip(image, axis) if u[0] < config.probability else image


def padded_crop(image: np.ndarray, config: AugmentConfig, u: np.ndarray) -> np.ndarray:
    _, height, width = image.shape
    p = config.padding
    top, left = (int(each * (2 * p + 1)) for each in u[:2])
    return np.pad(image, [(0, 0), (p, p), (p, p)])[:, top : top + height, left : left + width]


def place_of_crop(shape: tuple[int, ...], config: AugmentConfig, u: np.ndarray) -> tuple[int, int, int, int]:
    _, height, width = shape
    low, high = config.aspect or (3 / 4, 4 / 3)
    sizes = []
    for first, second in zip(u[:10], u[10:20], strict=True):
        area = (config.area[0] + (config.area[1] - config.area[0]) * first) * height * width
        ratio = low * (high / low) ** second
        sizes.append((round(np.sqrt(area / ratio)), round(np.sqrt(area * ratio))))
    h, w = next((each for each in sizes if 1 <= each[0] <= height and 1 <= each[1] <= width), sizes[0])
    h, w = min(max(h, 1), height), min(max(w, 1), width)
    return int(u[20] * (height - h + 1)), int(u[21] * (width - w + 1)), h, w


def area_crop(image: np.ndarray, config: AugmentConfig, u: np.ndarray) -> np.ndarray:
    channels, height, width = image.shape
    top, left, h, w = place_of_crop(image.shape, config, u)
    result = np.zeros_like(image)
    for c, y, x in np.ndindex(channels, height, width):
        total = 0
        across, down = (2 * x + 1) * w - width, (2 * y + 1) * h - height
        for row, of_row in enumerate((2 * height - down % (2 * height), down % (2 * height))):
            for column, of_column in enumerate((2 * width - across % (2 * width), across % (2 * width))):
                at_row = top + min(max(down // (2 * height) + row, 0), h - 1)
                at_column = left + min(max(across // (2 * width) + column, 0), w - 1)
                total += int(image[c, at_row, at_column]) * of_row * of_column
        result[c, y, x] = (2 * total + 4 * height * width) // (8 * height * width)
    return result


def changed_colour(image: np.ndarray, config: AugmentConfig, u: np.ndarray) -> np.ndarray:
    for name, each in zip(("brightness", "contrast", "saturation"), u, strict=True):
        limits = getattr(config, name) or [1, 1]
        factor = int(np.rint((limits[0] + (limits[1] - limits[0]) * each) * 65536))
        values = image.astype(object)
        gray = (values[0] * 19595 + values[1] * 38470 + values[2] * 7471 + 32768) // 65536
        mean = (2 * gray.sum() + gray.size) // (2 * gray.size)
        other = {"brightness": 0, "contrast": mean, "saturation": gray}[name]
        mixed = (values * factor + other * (65536 - factor) + 32768) // 65536
        image = np.clip(mixed, 0, 255).astype(np.uint8)
    return image


REFERENCES: dict[str, tuple[int, Any]] = {
    "horizontal_flip": (1, flipped),
    "vertical_flip": (1, flipped),
    "padded crop": (2, padded_crop),
    "crop": (22, area_crop),
    "colour": (3, changed_colour),
}


def reference(image: np.ndarray, augment: list[AugmentConfig], *place: int) -> np.ndarray:
    for number, config in enumerate(augment, 1):
        count, change = REFERENCES["padded crop" if config.padding else config.transform]
        image = change(image, config, drawn(number, count, *place))
    return image


def order_of(prepared: PreparedData, seed: int = 4) -> GlobalOrder:
    return GlobalOrder(stored_blocks(prepared, "train"), SIZE, seed)


def epochs_of(
    prepared: PreparedData, augment: list[AugmentConfig], group: RankContext = ALONE, **more: Any
) -> np.ndarray:
    """The images of two epochs, in the order of this rank."""
    seed, begin = more.pop("seed", 4), more.pop("start", 0)
    batches = training_batches(prepared, order_of(prepared, seed), group, begin, 2 * ROWS, augment=augment, **more)
    return np.concatenate([batch.inputs[0][: batch.rows].numpy().copy() for batch in batches])


@pytest.mark.parametrize("augment", [[each] for each in ALL] + [ALL], ids=[*"abcde", "all"])
def test_rows_are_those_of_numpy_to_the_bit(prepared: PreparedData, augment: list[AugmentConfig]) -> None:
    order, stored = order_of(prepared), records(ROWS)["image"]
    rows = np.concatenate([order.batch(step) for step in range(2 * order.steps_per_epoch)])
    found = epochs_of(prepared, augment)
    changed = 0
    for place in range(0, 2 * ROWS, 7):
        expected = reference(stored[rows[place]], augment, 4, *divmod(place, ROWS))
        assert np.array_equal(found[place], expected)
        changed += not np.array_equal(expected, stored[rows[place]])
    assert changed >= 5, "the transforms change rows"


def applied(config: AugmentConfig, images: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _, _, height, width = images.shape
    transform = made(config, (height, width))
    parameters = torch.from_numpy(transform.parameters(u)).int()
    return transform.apply(torch.from_numpy(images), parameters).numpy(), parameters.numpy()


def test_a_resized_crop_is_torchs_interpolation() -> None:
    images, u = records(40, (3, 31, 20))["image"], np.random.default_rng(1).random((40, 22))
    found, places = applied(AugmentConfig("crop", area=[0.1, 1], aspect=[0.5, 2]), images, u)
    assert len({tuple(each) for each in places}) == 40
    for image, result, (top, left, h, w) in zip(images, found, places, strict=True):
        crop = torch.from_numpy(image[None, :, top : top + h, left : left + w]).double()
        expected = torch.nn.functional.interpolate(crop, (31, 20), mode="bilinear", align_corners=False)[0].numpy()
        assert np.abs(result - expected).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colours_are_pillows_and_exact_but_for_rounding(name: str) -> None:
    images, u = records(40)["image"], np.random.default_rng(1).random((40, 3))
    found, factors = applied(AugmentConfig.from_dict({"transform": "colour", name: [0.3, 1.7]}), images, u)
    number = ["brightness", "contrast", "saturation"].index(name)
    kinds = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    for image, result, drawn_of_row, factor in zip(images, found, u, factors[:, number] / 65536, strict=True):
        assert abs(factor - (0.3 + 1.4 * drawn_of_row[number])) < 1e-5
        picture = Image.fromarray(image.transpose(1, 2, 0))
        pillows = np.asarray(kinds[number](picture).enhance(factor)).transpose(2, 0, 1).astype(int)
        assert np.abs(pillows - result).max() <= 1  # Pillow cuts off fractions
        gray = np.asarray(picture.convert("L")).astype(float)
        other = [0.0, np.floor(gray.mean() + 0.5), gray][number]
        exact = np.clip(image * factor + other * (1 - factor), 0, 255)
        assert np.abs(result - exact).max() <= 0.5 + 1e-6 * 255


# A pure function of seed, epoch and position


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_are_equal_on_any_number_of_processes(prepared: PreparedData, world: int, accumulation: int) -> None:
    padded = padded_rows(-(-SIZE // world), accumulation)
    assert len(micro_batches(padded, accumulation)) == accumulation
    shares = [
        training_batches(prepared, order_of(prepared), on_cpu(rank, world), 0, 2 * ROWS, padded=padded, augment=ALL)
        for rank in range(world)
    ]
    found = [batch.inputs[0][: batch.rows].numpy().copy() for batches in zip(*shares, strict=True) for batch in batches]
    assert np.array_equal(np.concatenate(found), epochs_of(prepared, ALL))


def test_a_start_within_an_epoch_goes_on_with_the_same_rows(prepared: PreparedData) -> None:
    whole = epochs_of(prepared, ALL)
    for start in (SIZE, ROWS, ROWS + 2 * SIZE):
        assert np.array_equal(epochs_of(prepared, ALL, start=start), whole[start:])


def test_epochs_and_seeds_differ_and_no_other_state_counts(prepared: PreparedData) -> None:
    """Rows of one position, so that the order does not matter."""
    numbers = Augmentation(ALL, signature(), order_of(prepared), ALONE)
    first = numbers.parameters(BatchPlan(np.arange(SIZE), [], SIZE, SIZE))
    torch.manual_seed(9)
    np.random.seed(9)
    assert np.array_equal(first, numbers.parameters(BatchPlan(np.arange(SIZE), [], SIZE, SIZE)))
    later = numbers.parameters(BatchPlan(np.arange(SIZE), [], SIZE, SIZE + ROWS))
    other = Augmentation(ALL, signature(), order_of(prepared, 5), ALONE)
    third = other.parameters(BatchPlan(np.arange(SIZE), [], SIZE, SIZE))
    for a, b in ((first, later), (first, third)):
        assert (a != b).any(axis=1).mean() > 0.95
    assert np.array_equal(
        first[:, :1],
        Augmentation(ALL[:1], signature(), order_of(prepared), ALONE).parameters(
            BatchPlan(np.arange(SIZE), [], SIZE, SIZE)
        ),
    )


def test_large_images_are_divided_without_a_change(tmp_path: Path) -> None:
    """An image of more pixels than are computed at once, in 64 bits."""
    shape = (1, 1500, 1440)
    data = write(tmp_path / "data", {"train": [records(3, shape)]}, 4, signature(shape))
    crop = AugmentConfig("crop", area=[0.5, 0.5])
    order = GlobalOrder(stored_blocks(data, "train"), 3, 0)
    (batch,) = training_batches(data, order, ALONE, 0, 3, augment=[crop])
    rows, place = order.batch(0), drawn(1, 22, 0, 0, 1)
    top, left, h, w = place_of_crop(shape, crop, place)
    image = torch.from_numpy(records(3, shape)["image"][rows[1]][:, top : top + h, left : left + w])
    expected = torch.nn.functional.interpolate(image[None].double(), shape[1:], mode="bilinear")[0]
    assert float((batch.inputs[0][1] - expected).abs().max()) <= 0.5 + 1e-9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_the_same_bits(prepared: PreparedData) -> None:
    group = RankContext(0, 1, torch.device("cuda"), "nccl")
    batches = training_batches(prepared, order_of(prepared), group, 0, 2 * ROWS, augment=ALL)
    found = np.concatenate([batch.inputs[0].cpu().numpy() for batch in batches])
    assert np.array_equal(found, epochs_of(prepared, ALL))


# Training


class NoNumberFor(nn.Module):
    """A linear model whose answer is no number for one image, which must be as given up to rounding."""

    def __init__(self, image: np.ndarray) -> None:
        super().__init__()
        self.image = torch.from_numpy((image - 100.0) / 100.0).float()
        self.layer = nn.Linear(image.size, 2)

    def forward(self, images: Tensor) -> Tensor:
        found = ((images - self.image).abs() < 1e-4).flatten(1).all(1, keepdim=True)
        return torch.where(found, torch.nan, self.layer(images.flatten(1)))


def test_a_row_that_only_fails_augmented_is_named(prepared: PreparedData) -> None:
    order = order_of(prepared)
    for step in range(order.steps_per_epoch + 1, 2 * order.steps_per_epoch + 1):  # the second epoch's
        place = order.consumed(step - 1) + 9
        model = Predictor(signature(), NoNumberFor(epochs_of(prepared, ALL)[place]))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            found, without = (
                name_rows(step, ReplicatedModel(model), prepared, order, config, "fp32", ALONE)
                for config in (TrainingConfig(augment=ALL), TrainingConfig())
            )
        finally:
            dist.destroy_process_group()
        assert found.rows == [order.batch(step - 1)[9]] and without.rows == []


def test_only_training_rows_change(prepared: PreparedData) -> None:
    before = prepared.mapped("train-00000.rows").copy()
    times = LoaderTimes()
    augmented = epochs_of(prepared, ALL, times=times)
    assert times.augmentation > 0
    plain = epochs_of(prepared, [], times=(without := LoaderTimes()))
    assert (augmented != plain).mean() > 0.5 and without.augmentation < times.augmentation
    assert np.array_equal(before, prepared.mapped("train-00000.rows"))
    stored = np.concatenate([batch.inputs[0] for batch in evaluation_batches(prepared, "train", SIZE, ALONE)])
    assert np.array_equal(stored, records(ROWS)["image"])


@pytest.mark.prove
@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (2, 4)])
def test_kills_and_resumes_are_bit_for_bit(world: int, accumulation: int, tmp_path: Path) -> None:
    rows = records(600, (3, 8, 8))
    splits = {"train": [rows], "validation": [rows[:40]], "test": [rows[:40]]}
    write(tmp_path / "data", splits, 64, signature((3, 8, 8)))
    whole = TrainingJob(
        tmp_path / "data",
        tmp_path / "whole",
        world,
        str(tmp_path / "whole/home"),
        accumulation=accumulation,
        training={"augment": ALL},
        model=ModelConfig("resnet", {"widths": [4, 8]}),
    )
    killed = replace(whole, place=tmp_path / "killed", home=str(tmp_path / "killed/home"))
    plain = replace(whole, place=tmp_path / "plain", home=str(tmp_path / "plain/home"), training={})
    assert run_attempt(whole).finished and run_attempt(plain).finished
    for fault in (InjectedFault("step", at=11), InjectedFault("step", rank=world - 1, at=9)):
        ended = run_attempt(killed, fault)
        assert ended.fired and not ended.finished
    assert run_attempt(killed).finished
    assert result_digests(killed) == result_digests(whole) != result_digests(plain)
    assert (killed.place / "log-0").read_text().count("resumes from step ") == 2


def test_a_checkpoint_of_other_transforms_is_refused_and_of_the_same_not() -> None:
    one, other = (resume_settings(TrainingConfig(batch_size=8, augment=each)) for each in (ALL, ALL[:2]))
    stored = json.loads(json.dumps(one, sort_keys=True))
    assert first_difference(stored, one) is None
    assert first_difference(stored, other) == ("augment", stored["augment"], other["augment"])


# Refusals


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ([{"transform": "crop"}], r"training\.augment\.padding: 0 is not allowed; expected above 0, or an area"),
        ([{"transform": "crop", "padding": 2, "area": [0.5, 1]}], r"training\.augment\.padding: 2 .* in place"),
        ([{"transform": "crop", "padding": 2, "aspect": [1, 2]}], r"training\.augment\.aspect: .* none without area"),
        ([{"transform": "crop", "area": [0, 1]}], r"training\.augment\.area: .* \[lowest, highest\], above 0"),
        ([{"transform": "crop", "area": [0.5, 1.5]}], r"training\.augment\.area: .* at most 1"),
        ([{"transform": "colour"}], r"training\.augment\.brightness: \[\] .* a range"),
        ([{"transform": "colour", "contrast": [2, 1]}], r"training\.augment\.contrast: .* \[lowest, highest\]"),
        (
            [{"transform": "horizontal_flip", "padding": 2}],
            r"training\.augment\.padding: 2 .* none for horizontal_flip",
        ),
        ([{"transform": "horizontal_flip", "probability": 2}], r"training\.augment\[0\]\.probability: 2 .* at most 1"),
        ([{"transform": "rotate"}], r'training\.augment\[0\]\.transform: "rotate" .* "horizontal_flip"'),
        ([{"padding": 2}], r"training\.augment\[0\]\.transform: is missing"),
    ],
)
def test_wrong_transforms_are_refused_in_one_line(augment: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainingConfig.from_dict({"augment": augment})


def test_data_that_are_not_images_are_refused(tmp_path: Path) -> None:
    training = TrainingConfig(augment=ALL[:1])
    for data, kind in (
        (PreparedData.open(table_of_numbers(tmp_path / "table", 90)), "a table"),
        (token_data(tmp_path / "text"), "text"),
    ):
        with pytest.raises(UserError, match=rf"^training\.augment: .*{kind}"):
            check_data(data, training)
    gray = (1, 8, 8)
    splits = {name: [records(9, gray)] for name in ("train", "validation")}
    images = write(tmp_path / "gray", splits, 4, signature(gray))
    check_data(images, training)
    with pytest.raises(UserError, match=r"^training\.augment: .*saturation"):
        check_data(images, TrainingConfig(augment=ALL[-1:]))
