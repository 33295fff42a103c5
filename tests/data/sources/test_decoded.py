from __future__ import annotations

import io
import itertools
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shardway.data.content import DataPath
from shardway.data.formats.arrays import ArrayRecords
from shardway.data.formats.base import DamagedData, FileParts, Record, Records
from shardway.data.formats.image_folder import ImageFolder
from shardway.data.loader import LoaderOptions, Share, StepLoader, validation_batches
from shardway.data.order import SampleOrder
from shardway.data.sources.base import DataRequest, DataSource, Slice, is_drawing
from shardway.data.sources.decoded import DecodedSamples, derive_seeds, fit_array, open_decoded
from shardway.errors import JobError, UserError
from shardway.runfile.schema import DataSection

AUGMENT = '''
import random
import numpy as np
import torch

def flip(image):
    """As torchvision's ToTensor, RandomHorizontalFlip and a crop."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    top, left = torch.randint(0, pixels.shape[1] - 3, (2,)).tolist()
    pixels = pixels[:, top : top + 4, left : left + 4]
    if torch.rand(()) < 0.5:
        pixels = pixels.flip(-1)
    return pixels + random.random() + np.random.rand()

def whole(image):
    return np.array(image)

def resized(image):
    return image.resize((4, 4))

def wrong_shape(image):
    return torch.zeros(3, 2, 2)

def wrong_type(image):
    return "pixels"

def whole_numbers(image):
    return np.zeros((3, 4, 4), np.int32)

def failing(image):
    raise LookupError("no such colour")

class Kept:
    flip = staticmethod(flip)

number = 3
'''


class Listed(Records):
    """Records of a list, as if each lay at its own place in a file."""

    format = "jsonl"

    def __init__(self, records: Sequence[Record], kinds: dict[str, str]) -> None:
        self._records, self._kinds = list(records), kinds
        self.parts = FileParts(Path("/data"), ())

    @classmethod
    def is_at(cls, path: Path) -> bool:
        raise NotImplementedError

    @classmethod
    def open(cls, place: DataPath) -> Listed:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._records)

    @property
    def fields(self) -> dict[str, str]:
        return self._kinds

    def read(self, ids: Sequence[int], fields: Sequence[str] = ()) -> list[Record]:
        return [{key: value for key, value in self._records[number].items() if key in fields} for number in ids]

    def extent(self, number: int) -> Any:
        return f"/data/x.tar, byte {512 * number}"


def request(classes: int | None = 10, **keys: Any) -> DataRequest:
    keys = {"shape": [3, 4, 4], **keys}
    return DataRequest(DataSection(kind="jsonl", path="/data/x.tar", **keys), 7, "images", classes=classes)


def opened(
    records: Sequence[Record], kinds: dict[str, str] | None = None, classes: int | None = 10, **keys: Any
) -> DecodedSamples:
    kinds = kinds or {"jpg": "bytes", "cls": "int"}
    return open_decoded(Listed(records, kinds), DataPath("data.path", "/data/x.tar"), request(classes, **keys))


def refused(*args: Any, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        opened(*args, **keys)
    return str(caught.value)


def encode(pixels: np.ndarray | Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    stream = io.BytesIO()
    (Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels).save(stream, kind, **how)
    return stream.getvalue()


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def first(samples: DecodedSamples) -> np.ndarray:
    found: np.ndarray = samples.batch(np.array([0]))["inputs"][0]
    return found


def single(value: Any, kind: str = "bytes", **keys: Any) -> np.ndarray:
    return first(opened([{"jpg": value, "cls": 1}], {"jpg": kind, "cls": "int"}, **keys))


@pytest.fixture(scope="module")
def transforms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module of the user's that can be imported, also by loader processes."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "augment_of_a_test.py").write_text(AUGMENT)
    (folder / "broken_of_a_test.py").write_text("import no_such_package_at_all")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
        for name in ("augment_of_a_test", "broken_of_a_test"):
            sys.modules.pop(name, None)


def named(function: str) -> str:
    return f"augment_of_a_test:{function}"


# --- images without a transform


def test_an_image_of_the_shape_is_scaled_and_normalised() -> None:
    pixels = draw(4, 4, 3)
    samples = opened([{"jpg": encode(pixels), "cls": 1}, {"jpg": encode(pixels[::-1]), "cls": 9}], mean=0.4, std=0.2)
    batch = samples.batch(np.array([1, 0, 1]))
    expected = ((np.stack([pixels[::-1], pixels, pixels[::-1]]) / 255 - 0.4) / 0.2).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(batch["inputs"], expected, atol=1e-5)
    assert batch["inputs"].dtype == np.float32
    assert batch["inputs"].flags.c_contiguous
    assert batch["targets"].tolist() == [9, 1, 9]
    assert batch["targets"].dtype == np.int64
    empty = samples.batch(np.zeros(0, np.int64))
    assert empty["inputs"].shape == (0, 3, 4, 4)
    assert empty["targets"].shape == (0,)
    assert (len(samples), samples.tokens_per_sample, samples.draws) == (2, 1, False)
    assert isinstance(samples, DataSource)


@pytest.mark.parametrize(
    ("size", "box"),
    [((8, 8), (0, 0, 8, 8)), ((16, 8), (4, 0, 12, 8)), ((8, 20), (0, 6, 8, 14)), ((2, 3), (0, 0.5, 2, 2.5))],
)
def test_the_centre_that_covers_the_shape_is_cut(size: tuple[int, int], box: tuple[float, ...]) -> None:
    image = Image.fromarray(draw(size[1], size[0], 3))
    expected = np.asarray(image.resize((4, 4), Image.Resampling.BILINEAR, box)).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(single(encode(image)), expected, atol=1e-6)


def test_a_shape_that_is_not_square_keeps_proportions() -> None:
    image = Image.fromarray(draw(30, 30, 3))
    found = single(encode(image), shape=[3, 4, 8])
    box = (0, 7.5, 30, 22.5)
    expected = np.asarray(image.resize((8, 4), Image.Resampling.BILINEAR, box, 3.0)).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(found, expected, atol=1.5 / 255)


def test_a_large_jpeg_is_close_to_the_exact_reduction() -> None:
    smooth = Image.fromarray(draw(6, 6, 3)).resize((301, 200), Image.Resampling.BICUBIC)
    content = encode(smooth, "JPEG", quality=95)
    box = (50.5, 0, 250.5, 200)
    exact = np.asarray(Image.open(io.BytesIO(content)).resize((32, 32), Image.Resampling.BILINEAR, box))
    found = single(content, shape=[3, 32, 32]) * 255
    assert np.abs(found - exact.transpose(2, 0, 1)).mean() < 2.0


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "LA", "1", "CMYK"])
def test_the_mode_follows_the_channels(channels: int, mode: str) -> None:
    image = Image.new("RGB", (4, 4), (200, 200, 200)).convert(mode)
    found = single(encode(image, "TIFF" if mode == "CMYK" else "PNG"), shape=[channels, 4, 4])
    assert found.shape == (channels, 4, 4)
    if mode != "1":
        np.testing.assert_allclose(found[:3], 200 / 255, atol=5 / 255)


def test_sixteen_bits_of_grey_keep_their_range() -> None:
    grey = np.array([[0, 65535], [32768, 255]], np.uint16)
    found = single(encode(Image.fromarray(grey)), shape=[1, 2, 2])
    np.testing.assert_allclose(found[0] * 255, [[0, 255], [128, 0]], atol=1e-4)


def test_transparent_palettes_are_decoded_without_a_warning() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    found = single(encode(image, transparency=b"\x00\xff"))
    np.testing.assert_allclose(found[:, 0, 0], [1, 0, 0])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_usual_kinds_of_files_are_decoded(kind: str) -> None:
    found = single(encode(Image.new("RGB", (9, 9), (250, 250, 250)), kind))
    np.testing.assert_allclose(found, 250 / 255, atol=3 / 255)


def test_images_of_hugging_face_are_decoded() -> None:
    pixels = draw(4, 4, 3)
    found = single({"bytes": encode(pixels), "path": "a.png"}, "dict")
    np.testing.assert_allclose(found, pixels.transpose(2, 0, 1) / 255, atol=1e-6)


def test_bytes_in_an_array_are_decoded() -> None:
    """As HDF5 keeps them: a row of uint8 of its own length."""
    pixels = draw(4, 4, 3)
    found = single(np.frombuffer(encode(pixels), np.uint8), "uint8[]")
    np.testing.assert_allclose(found, pixels.transpose(2, 0, 1) / 255, atol=1e-6)


def test_images_of_a_folder_have_the_classes_of_its_folders(tmp_path: Path) -> None:
    for number, name in enumerate(("ant/1.png", "bee/2.png", "bee/3.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encode(draw(4, 4, 3, seed=number)))
    (tmp_path / "cat").mkdir()
    place = DataPath("data.path", str(tmp_path))
    samples = open_decoded(ImageFolder.open(place), place, request(classes=None))
    assert (samples.inputs, samples.targets) == ("image", "label")
    assert samples.facts.classes == 3
    assert samples.facts.sample_shape == (3, 4, 4)
    assert samples.facts.description == (
        f"3 records of images in {tmp_path}, image of shape [3, 4, 4], 3 classes, 1 of them without images"
    )
    assert samples.batch(np.arange(3))["targets"].tolist() == [0, 1, 1]
    assert open_decoded(ImageFolder.open(place), place, request(classes=5)).facts.classes == 5
    with pytest.raises(UserError, match="has 3 folders of classes\n      allowed: at most 2, the classes of the model"):
        open_decoded(ImageFolder.open(place), place, request(classes=2))


# --- arrays


@pytest.mark.parametrize("axes", [(2, 0, 1), (0, 1, 2)])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_arrays_are_taken_with_channels_first_or_last(axes: tuple[int, ...], as_bytes: bool) -> None:
    last = draw(4, 5, 3)
    value: Any = np.ascontiguousarray(last.transpose(axes))
    if as_bytes:
        stream = io.BytesIO()
        np.save(stream, value)
        value = stream.getvalue()
    found = single(value, shape=[3, 4, 5], mean=0.5, std=0.5)
    np.testing.assert_allclose(found, (last.transpose(2, 0, 1) / 255 - 0.5) / 0.5, atol=1e-6)


def test_arrays_of_other_types_and_shapes() -> None:
    grey = draw(4, 5)
    np.testing.assert_allclose(single(grey, "uint8[4, 5]", shape=[1, 4, 5])[0], grey / 255, atol=1e-6)
    features = np.array([1.0, -2.0, 3.0])
    np.testing.assert_allclose(single(features, "float64[3]", shape=[3], mean=1.0, std=2.0), (features - 1) / 2)
    np.testing.assert_allclose(single([1.0, -2.0, 3.0], "list", inputs="jpg", shape=[3]), features)
    np.testing.assert_allclose(single(draw(8, 8, 3) * 0 + 51, "uint8[8, 8, 3]"), 0.2, atol=1e-6)


def test_a_batch_may_mix_bytes_and_floating_arrays() -> None:
    pixels = draw(4, 4, 3)
    records = [{"jpg": encode(pixels), "cls": 0}, {"jpg": pixels.transpose(2, 0, 1) / 255, "cls": 0}]
    found = opened(records, mean=0.3, std=0.5).batch(np.arange(2))["inputs"]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((3, 4, 4), np.int16), "is an array of int16\n  Allowed: uint8, or a floating type."),
        (
            np.zeros((2, 2, 2, 2)),
            "is an array of float64 [2, 2, 2, 2]\n  Allowed: data.shape = [3, 4, 4], or an image.",
        ),
        (None, "is not there\n  Allowed: the bytes of an image or of a .npy file, or an array."),
        ([[1.0], [1.0, 2.0]], "is a ragged list: "),
    ],
)
def test_values_that_do_not_fit_are_named(value: Any, text: str) -> None:
    good = {"jpg": draw(3, 4, 4), "cls": 0}
    samples = opened([good, {"jpg": value, "cls": 0}])
    with pytest.raises(JobError) as caught:
        samples.batch(np.array([0, 1]))
    assert str(caught.value).startswith(f"/data/x.tar, byte 512: the jpg of record 1 {text}")


@given(st.sampled_from([(3, 4, 5), (1, 4, 5), (4, 4, 4)]))
def test_an_array_of_the_shape_itself_stays_as_it_is(shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)
    assert fit_array(array, shape) is array
    if shape != (4, 4, 4):
        last = np.ascontiguousarray(array.transpose(1, 2, 0))
        assert np.array_equal(fit_array(last, shape), array)
    assert fit_array(array[:, :2], shape) is None


# --- damage


GOOD = encode(draw(64, 64, 3), "JPEG")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "it is empty"),
        (b"not an image", "cannot identify image file"),
        (GOOD[: len(GOOD) // 2], "image file is truncated"),
        (GOOD[:20], ""),
        (GOOD[:3], ""),
        (encode(draw(64, 64, 3))[:-300], ""),
        (encode(Image.new("F", (4, 4)), "TIFF"), "it has 32 bits a pixel (mode F); decode it by data.transform"),
        (b"\x93NUMPY\x01\x00", "it is not a NumPy array that can be read"),
    ],
)
@pytest.mark.parametrize("transform", ["", "whole"])
def test_what_cannot_be_decoded_is_damage(transforms: None, content: bytes, what: str, transform: str) -> None:
    keys = {"transform": named(transform)} if transform else {}
    samples = opened([{"jpg": GOOD, "cls": 0}, {"jpg": content, "cls": 0}], **keys)
    with pytest.raises(DamagedData) as caught:
        samples.batch(np.array([1]))
    text = str(caught.value)
    assert text.startswith("/data/x.tar, byte 512: the jpg of record 1 cannot be decoded: ")
    assert what in text


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image_with_too_many_pixels_is_damage(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    samples = opened([{"jpg": encode(draw(64, 64, 3), kind), "cls": 0}])
    with pytest.raises(DamagedData, match=r"the jpg of record 0 cannot be decoded: .*4096 pixels"):
        samples.batch(np.array([0]))


# --- targets and fields


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), b"3", "3", b" 3\n"])
def test_a_class_is_a_number_or_its_digits(value: Any) -> None:
    assert opened([{"jpg": GOOD, "cls": value}]).batch(np.array([0]))["targets"].tolist() == [3]


@pytest.mark.parametrize("value", ["cat", b"\xff", 1.5, True, [0, 1], None])
def test_a_label_that_is_no_number_is_refused(value: Any) -> None:
    text = refused([{"jpg": GOOD, "cls": value}])
    assert 'data.targets: "cls" is ' in text
    assert "in record 0" in text
    assert "allowed: an integer, or the digits of one" in text
    samples = opened([{"jpg": GOOD, "cls": 0}, {"jpg": GOOD, "cls": value}])
    with pytest.raises(UserError, match=r"in record 1 \(/data/x.tar, byte 512\)"):
        samples.batch(np.array([1]))


def test_a_target_out_of_range_is_refused() -> None:
    samples = opened([{"jpg": GOOD, "cls": 0}, {"jpg": GOOD, "cls": 10}, {"jpg": GOOD, "cls": -1}])
    with pytest.raises(UserError, match="has the target 10 in record 1\n      allowed: 0 to 9, for 10 classes"):
        samples.batch(np.array([0, 1]))
    with pytest.raises(UserError, match="has the target -1 in record 2"):
        samples.batch(np.array([2]))


@pytest.mark.parametrize(
    ("kinds", "inputs", "targets"),
    [
        ({"__key__": "text", "cls": "int", "jpg": "bytes"}, "jpg", "cls"),
        ({"img": "dict", "coarse_label": "int", "fine_label": "int"}, "img", "fine_label"),
        ({"label": "int", "image": "uint8[28, 28]"}, "image", "label"),
        ({"x": "float32[3]", "y": "int"}, "x", "y"),
        ({"id": "text", "scan": "bytes", "grade": "int64"}, "scan", "grade"),
        ({"depth": "float32[4, 4]", "IMAGE": "bytes", "Target": "uint8"}, "IMAGE", "Target"),
        ({"left.png": "bytes", "cls": "bytes"}, "left.png", "cls"),
    ],
)
def test_fields_are_found_by_usual_names_and_types(kinds: dict[str, str], inputs: str, targets: str) -> None:
    samples = opened([{inputs: GOOD, targets: 0}], kinds)
    assert (samples.inputs, samples.targets) == (inputs, targets)


def test_fields_may_be_named() -> None:
    kinds = {"jpg": "bytes", "depth": "bytes", "cls": "int", "level": "int"}
    samples = opened([{"depth": GOOD, "level": 2}], kinds, inputs="depth", targets="level")
    assert samples.batch(np.array([0]))["targets"].tolist() == [2]


def test_fields_that_are_not_there_are_refused_with_a_list() -> None:
    record = {"jpg": GOOD, "cls": 0}
    assert 'data.inputs: "png" is not a field of the records\n      allowed: jpg (bytes), cls (int)' in refused(
        [record], inputs="png"
    )
    text = refused([{"text": "a", "level": 0}], {"text": "text", "level": "int"})
    assert (
        "data.inputs: no field of the records has a usual name or type\n      allowed: text (text), level (int)" in text
    )
    assert "to do: set data.inputs to one of them" in text
    assert "data.targets: no field" in refused([{"jpg": GOOD}], {"jpg": "bytes"})
    assert 'data.inputs: "jpg" is text' in refused([{"jpg": "a", "cls": 0}])


def test_what_cannot_be_opened_is_refused() -> None:
    assert "has no records" in refused([])
    record = {"jpg": GOOD, "cls": 0}
    assert 'data.kind: "jsonl" does not say how many classes there are\n      to do: set model.classes' in refused(
        [record], classes=None
    )
    for shape in ([16], [2, 4, 4]):
        assert f"data.shape: {shape} is not the shape of an image" in refused([record], shape=shape)


def test_the_fingerprint_is_that_of_records_and_preparation(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 3, 4, 4), np.uint8), y=np.arange(2))
    place = DataPath("data.path", str(tmp_path / "a.npz"))
    records = ArrayRecords.open(place)
    base = open_decoded(records, place, request()).facts.fingerprint
    assert open_decoded(records, place, request()).facts.fingerprint == base
    others = ({"mean": 0.5}, {"std": 0.5}, {"shape": [3, 2, 2]}, {"targets": "y", "inputs": "y"})
    assert base not in {open_decoded(records, place, request(**keys)).facts.fingerprint for keys in others}


# --- transforms


def drawing(count: int = 12, function: str = "flip") -> DecodedSamples:
    records = [{"jpg": encode(draw(9, 9, 3, seed=number)), "cls": number % 3} for number in range(count)]
    return opened(records, transform=named(function))


def test_what_a_transform_returns_becomes_float32(transforms: None) -> None:
    pixels = draw(4, 4, 3)
    records = [{"jpg": encode(pixels), "cls": 0}]
    expected = pixels.transpose(2, 0, 1) / 255
    for function in ("whole", "resized"):  # uint8: normalised
        found = first(opened(records, transform=named(function), mean=0.5, std=0.25))
        np.testing.assert_allclose(found, (expected - 0.5) / 0.25, atol=1e-5)
    plain, normalised = (first(opened(records, transform=named("flip"), mean=mean)) for mean in (0.0, 0.5))
    assert np.array_equal(plain, normalised)
    assert plain.dtype == np.float32
    assert np.array_equal(first(opened(records, transform=named("Kept.flip"))), plain)


def test_a_transform_gets_an_image_in_the_mode_of_the_shape(transforms: None) -> None:
    grey = encode(draw(4, 4), "JPEG")
    assert first(opened([{"jpg": grey, "cls": 0}], transform=named("whole"))).shape == (3, 4, 4)


@settings(max_examples=25)
@given(data=st.data(), count=st.integers(1, 12))
def test_a_sample_is_the_same_in_any_batch(transforms: None, data: st.DataObject, count: int) -> None:
    samples = drawing()
    pairs = list(itertools.product(range(12), range(3)))
    chosen = data.draw(st.lists(st.sampled_from(pairs), min_size=count, max_size=count))
    ids, epochs = (np.array(column, np.int64) for column in zip(*chosen, strict=True))
    whole = samples.batch_of(ids, epochs)["inputs"]
    for row, number, epoch in zip(whole, ids, epochs, strict=True):
        alone = pickle.loads(pickle.dumps(samples)).batch_of(np.array([number]), np.array([epoch]))
        assert np.array_equal(alone["inputs"][0], row)


def test_draws_differ_by_epoch_sample_and_seed(transforms: None) -> None:
    samples = drawing(1)
    epochs = samples.batch_of(np.zeros(5, np.int64), np.arange(5))["inputs"]
    assert len({row.tobytes() for row in epochs}) == 5
    assert np.array_equal(samples.batch(np.array([0]))["inputs"][0], epochs[0])
    seeds = derive_seeds(0, np.repeat(np.arange(50), 50), np.tile(np.arange(50), 50))
    assert len(set(seeds.tolist())) == 2500
    assert not set(seeds.tolist()) & set(derive_seeds(1, np.zeros(50, np.int64), np.arange(50)).tolist())


def test_the_generators_are_left_as_they_were(transforms: None) -> None:
    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]

    before, samples = states(), drawing()
    samples.batch(np.arange(12))
    assert states() == before
    with pytest.raises(JobError):
        drawing(function="failing").batch(np.arange(3))
    assert states() == before


IN_PROCESS = LoaderOptions()
WHOLE_ORDER = SampleOrder(10, seed=3)


def read_steps(options: LoaderOptions = IN_PROCESS, ranks: int = 1) -> list[tuple[bytes, bytes]]:
    """Inputs and targets of four steps over all ranks, which go over the end of an epoch."""
    whole = Slice(drawing(), 2, 12)
    loaders = [StepLoader(whole, WHOLE_ORDER, Share(6, rank, ranks), options) for rank in range(ranks)]
    found = []
    for step in zip(*(loader.batches(6, 4) for loader in loaders), strict=True):
        inputs, targets = (torch.cat([batch.data[name] for batch in step]) for name in ("inputs", "targets"))
        found.append((inputs.numpy().tobytes(), targets.numpy().tobytes()))
    return found


@pytest.mark.usefixtures("warm_starts")
def test_batches_do_not_depend_on_workers(transforms: None) -> None:
    alone = read_steps()
    for workers in (1, 3):
        assert read_steps(LoaderOptions(workers=workers)) == alone


def test_batches_do_not_depend_on_ranks_and_follow_epochs(transforms: None) -> None:
    whole, positions = Slice(drawing(), 2, 12), np.arange(6, 30)
    assert is_drawing(whole)
    expected = whole.batch_of(WHOLE_ORDER.ids(positions), WHOLE_ORDER.epochs(positions))["inputs"]
    for ranks in (1, 3):
        assert b"".join(inputs for inputs, _ in read_steps(ranks=ranks)) == expected.tobytes()


def test_an_empty_share_has_a_sample_of_a_source_that_draws(transforms: None) -> None:
    batch = next(StepLoader(drawing(), SampleOrder(12, 0), Share(2, 0, 4)).batches(0))
    assert batch.ids.shape == (0,)
    assert batch.data["inputs"].shape == (1, 3, 4, 4)


def test_validation_is_that_of_epoch_0(transforms: None) -> None:
    samples = drawing()
    found = torch.cat([batch.data["inputs"] for batch in validation_batches(samples, 12, Share(5))])
    assert np.array_equal(found.numpy(), samples.batch(np.arange(12))["inputs"])


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("wrong_shape", "has returned float32 [3, 2, 2]"),
        ("wrong_type", "has returned str"),
        ("whole_numbers", "has returned int32 [3, 4, 4]"),
    ],
)
def test_a_result_that_does_not_fit_is_named(transforms: None, function: str, text: str) -> None:
    with pytest.raises(JobError) as caught:
        drawing(function=function).batch(np.array([5]))
    assert str(caught.value) == (
        f'data.transform "{named(function)}" {text} for record 5\n'
        "  Allowed: a tensor, array or image of data.shape = [3, 4, 4], of a floating type or uint8."
    )


def test_a_transform_that_fails_is_named_with_its_line(transforms: None) -> None:
    with pytest.raises(JobError) as caught:
        drawing(function="failing").batch(np.array([5]))
    lines = str(caught.value).splitlines()
    line = AUGMENT.splitlines().index('    raise LookupError("no such colour")') + 1
    assert lines[0].startswith(f'data.transform "{named("failing")}" failed at record 5: LookupError: no such colour (')
    assert lines[0].endswith(f"augment_of_a_test.py:{line})")
    assert lines[1] == "  The record lies in /data/x.tar, byte 2560."
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("augment", '"augment" names no function'),
        (":flip", '":flip" names no function'),
        ("no_such_module:flip", '"no_such_module:flip" cannot be imported: ModuleNotFoundError'),
        ("broken_of_a_test:flip", '"broken_of_a_test:flip" cannot be imported: ModuleNotFoundError'),
        (named("turn"), "cannot be imported: AttributeError"),
        (named("number"), "is int, which cannot be called"),
    ],
)
def test_a_transform_that_cannot_be_used_is_refused(transforms: None, name: str, text: str) -> None:
    found = refused([{"jpg": GOOD, "cls": 0}], transform=name)
    assert "  data.transform: " in found
    assert text in found
    assert 'allowed: "module:function", where Python can import the module' in found


def test_a_transform_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here_of_a_test.py").write_text("import numpy as np\n\ndef whole(image):\n    return np.array(image)\n")
    monkeypatch.chdir(tmp_path)
    paths = list(sys.path)
    assert first(opened([{"jpg": encode(draw(4, 4, 3)), "cls": 0}], transform="here_of_a_test:whole")).shape == (
        3,
        4,
        4,
    )
    assert sys.path == paths
    sys.modules.pop("here_of_a_test")
