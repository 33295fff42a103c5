"""Images (or arrays) with a class, decoded from the fields of records and scaled or transformed when they are gathered.

Invariants:
- Inputs are float32 of data.shape, targets int64.
- A sample is a function of its record, train.seed and the epoch: the same for any rank, worker, or batch that it is in.
  The generators of Python, NumPy and torch are seeded for each call of a transform, and restored after a batch.
- What cannot be decoded is an error that names the record, its file and offset, never a grey or shortened image.
- torch is imported only where there is a transform; a loader process imports the transform by its name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath, data_error, fingerprint
from shardway.data.formats.base import DamagedData, Record, Records, need_library
from shardway.data.formats.image_folder import IMAGE_SUFFIXES, ImageFolder
from shardway.data.formats.npy import MAGIC, parse_npy
from shardway.data.order import Words, derive_keys
from shardway.data.sources.base import Arrays, DataRequest, FileBlocks, Hold, Ids, SourceFacts
from shardway.data.sources.dali import DaliDecoder, import_dali
from shardway.errors import JobError, UserError

INPUT_NAMES = frozenset(
    {suffix[1:] for suffix in IMAGE_SUFFIXES}
    | {"image", "img", "images", "pixels", "pixel_values", "x", "input", "inputs", "npy"}
)
"""Usual names of the field that is the input."""
TARGET_NAMES = (*("cls", "label", "labels", "target", "targets", "class", "y", "fine_label", "label_idx", "class_id"),)
"""Usual names of the field that is the class, the first of them first."""

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Channels -> mode of an image."""

_BILINEAR = 2
"""`PIL.Image.Resampling.BILINEAR`."""
_JPEG_MAGIC = b"\xff\xd8\xff"
_TRANSFORM_KEYS = 2**63 + 2**61
"""The counter of the keys of transforms, apart from those of orders."""
_GAP = 3.0
"""An image is reduced by a whole factor first, to at least so many times its final size."""

_AT_ONCE = 8
"""So many samples are normalised at once."""

Pixels = npt.NDArray[Any]


@dataclass(eq=False)
class DecodedSamples:
    """Samples of the fields `inputs` and `targets` of records.

    A uint8 input becomes (x / 255 - mean) / std; without a transform also a floating input is normalised, from a
    transform it is taken as it is.
    """

    records: Records
    place: DataPath
    inputs: str
    targets: str
    shape: tuple[int, ...]
    mean: float
    std: float
    seed: int
    transform: str
    facts: SourceFacts
    decode: str = "pil"
    _dali: DaliDecoder | None = field(default=None, repr=False)
    _function: Callable[[Any], Any] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.records)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None, "_dali": None}

    @property
    def tokens_per_sample(self) -> int:
        """1: a sample is one image."""
        return 1

    @property
    def draws(self) -> bool:
        """Whether samples may differ from epoch to epoch: there is a transform."""
        return bool(self.transform)

    def locate(self, number: int) -> str:
        """The record, its file and offset."""
        return f"record {number}, {self.records.extent(number)}"

    def file_blocks(self) -> FileBlocks | None:
        """The samples by file."""
        ends = self.records.file_ends()
        return None if ends is None else FileBlocks(ends, self.records.parts)

    def slow_in_random_order(self) -> str:
        """Why records come slowly in a random order; "" if they do not."""
        return self.records.slow_in_random_order()

    def staged(self, hold: Hold) -> DecodedSamples:
        """The same, read from staged files."""
        return replace(self, records=self.records.staged(hold))

    def batch(self, ids: Ids) -> Arrays:
        """The samples as they are in epoch 0."""
        return self.batch_of(ids, np.zeros(len(ids), np.int64))

    def batch_of(self, ids: Ids, epochs: Ids) -> Arrays:
        """The samples, each as it is in its epoch. Raises DamagedData for what cannot be decoded, UserError for a
        target that is no class, JobError where the transform fails."""
        numbers = ids.tolist()
        found = self.records.read(numbers, (self.inputs, self.targets))
        targets = np.fromiter(map(self._read_target, found, numbers), np.int64, len(numbers))
        self._check_targets(targets, numbers)
        pixels = np.empty((len(numbers), *self.shape), np.float32)
        if self.transform:
            self._transform_all(found, numbers, epochs, pixels)
        else:
            scaled = np.zeros(len(numbers), np.bool_)
            done = self._decode_by_dali(found, numbers, pixels) if self.decode == "dali" else set()
            scaled[list(done)] = True
            with _bombs_are_errors():
                for at, (record, number) in enumerate(zip(found, numbers, strict=True)):
                    if at in done:
                        continue
                    prepared = self._prepare(record, number)
                    pixels[at], scaled[at] = prepared, prepared.dtype == np.uint8
            for chosen, unit in ((scaled, 255.0), (~scaled, 1.0)):
                self._normalise(pixels, chosen, unit)
        return {"inputs": pixels, "targets": targets}

    # --- targets

    def _read_target(self, record: Record, number: int) -> int:
        value = record.get(self.targets)
        if type(value) is int:
            return value
        found = as_class(value)
        if found is None:
            raise _refuse_target(self.targets, value, f"record {number} ({self.records.extent(number)})")
        return found

    def _check_targets(self, targets: npt.NDArray[np.int64], numbers: Sequence[int]) -> None:
        classes = self.facts.classes
        if classes is None or not len(targets):
            return
        wrong = np.flatnonzero((targets < 0) | (targets >= classes))
        if len(wrong):
            at = int(wrong[0])
            raise self.place.error(
                f"has the target {targets[at]} in record {numbers[at]}",
                allowed=f"0 to {classes - 1}, for {classes} classes",
                remedy="set model.classes to the number of classes of the data",
            )

    # --- inputs

    def _normalise(self, pixels: npt.NDArray[np.float32], chosen: npt.NDArray[np.bool_], unit: float) -> None:
        """Replace the chosen samples x by (x / unit - mean) / std."""
        rows = np.flatnonzero(chosen)
        if len(rows) == len(chosen):  # the usual case without copies, in parts that stay in the processor's cache
            parts = [pixels[start : start + _AT_ONCE] for start in range(0, len(pixels), _AT_ONCE)]
        else:
            parts = [pixels[row : row + 1] for row in rows.tolist()]
        for part in parts:
            part *= np.float32(1.0 / (unit * self.std))
            part -= np.float32(self.mean / self.std)

    def _decode_by_dali(self, found: Sequence[Record], numbers: Sequence[int], pixels: Pixels) -> set[int]:
        """Decode those that are encoded images, all at once; returns which. If DALI refuses one of them, none: Pillow
        then decodes them or names the one that is damaged."""
        values = [self._read_input(record, number) for record, number in zip(found, numbers, strict=True)]
        encoded = [at for at, value in enumerate(values) if isinstance(value, bytes)]
        if not encoded:
            return set()
        if self._dali is None:
            self._dali = DaliDecoder(self.shape)
        try:
            pixels[encoded] = self._dali.decode([values[at] for at in encoded])
        except RuntimeError:
            self._dali = None  # a pipeline in which an image failed is not used again
            return set()
        return set(encoded)

    def _prepare(self, record: Record, number: int) -> Pixels:
        """The input of a record, of data.shape: an image scaled so that it covers the shape, and its centre cut."""
        value = self._read_input(record, number)
        if isinstance(value, bytes):
            try:
                image = _open_image(value)
                mode = MODES[self.shape[0]]
                reduced = image.draft(mode, (self.shape[2], self.shape[1]))
                return _cut(_convert(image, mode), self.shape, reduced[1][2:] if reduced else None)
            except Exception as error:
                raise self._describe_image(error, number) from error
        if value.dtype != np.uint8 and value.dtype.kind != "f":
            raise self._fail(number, f"is an array of {value.dtype}", "uint8, or a floating type")
        fitting = fit_array(value, self.shape)
        if fitting is not None:
            return fitting
        channels = value.shape[2] if value.ndim == 3 else 1
        if value.dtype == np.uint8 and value.ndim in (2, 3) and len(self.shape) == 3 and channels in MODES:
            image = _pil().fromarray(value[..., 0] if value.ndim == 3 and channels == 1 else value)
            return _cut(_convert(image, MODES[self.shape[0]]), self.shape)
        raise self._fail(
            number, f"is an array of {value.dtype} {list(value.shape)}", f"data.shape = {list(self.shape)}, or an image"
        )

    def _read_input(self, record: Record, number: int) -> Any:
        """The bytes of an image, or an array."""
        value = record.get(self.inputs)
        if isinstance(value, dict) and "bytes" in value:
            value = value["bytes"]  # as the images of Hugging Face `datasets`
        if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1 and len(self.shape) == 3:
            value = value.tobytes()  # how HDF5 keeps bytes of any length
        if isinstance(value, memoryview | bytearray):
            value = bytes(value)
        if isinstance(value, bytes):
            if not value:
                raise self._damaged(number, "it is empty")
            if not value.startswith(MAGIC):
                return value
            try:
                return parse_npy(value)
            except (ValueError, EOFError) as error:
                raise self._damaged(number, f"it is not a NumPy array that can be read: {error}") from error
        if isinstance(value, list):
            try:
                value = np.asarray(value)
            except ValueError as error:
                raise self._fail(number, f"is a ragged list: {error}", "an image or an array") from error
            return value.astype(np.float32) if value.dtype == np.float64 else value
        if isinstance(value, np.ndarray):
            return value
        what = "is not there" if value is None else f"is {type(value).__name__}"
        raise self._fail(number, what, "the bytes of an image or of a .npy file, or an array")

    def _describe_image(self, error: Exception, number: int) -> Exception:
        """The error for an image that Pillow does not decode; it raises many types."""
        return error if isinstance(error, UserError | MemoryError) else self._damaged(number, f"{error}")

    def _damaged(self, number: int, what: str) -> DamagedData:
        place = self.records.extent(number)
        return DamagedData(
            f"{place}: the {self.inputs} of record {number} cannot be decoded: {what}\n"
            '  To do: copy the file again from where it came, or set guard.damaged_data = "skip".',
            place,
        )

    def _fail(self, number: int, what: str, allowed: str) -> JobError:
        return JobError(
            f"{self.records.extent(number)}: the {self.inputs} of record {number} {what}\n  Allowed: {allowed}."
        )

    # --- the transform

    def _transform_all(self, found: Sequence[Record], numbers: Sequence[int], epochs: Ids, pixels: Pixels) -> None:
        from shardway.data.samplers import kept_random_states

        if self._function is None:
            self._function = load_transform(self.transform)
        function = self._function
        with _bombs_are_errors():
            inputs = [self._read_whole(record, number) for record, number in zip(found, numbers, strict=True)]
        seeds = derive_seeds(self.seed, epochs, np.array(numbers, np.int64)).tolist()
        scaled = np.zeros(len(numbers), np.bool_)
        with kept_random_states():
            for at, (value, number, seed) in enumerate(zip(inputs, numbers, seeds, strict=True)):
                seed_draws(seed)
                try:
                    made = function(value)
                except Exception as error:
                    raise self._describe_failure(number, error) from error
                result = self._take_result(made, number)
                pixels[at], scaled[at] = result, result.dtype == np.uint8
        self._normalise(pixels, scaled, 255.0)

    def _read_whole(self, record: Record, number: int) -> Any:
        """The input of a record at its own size: an image in the mode of data.shape, or an array."""
        value = self._read_input(record, number)
        if not isinstance(value, bytes):
            return value
        try:
            image = _open_image(value)
            image.load()
            return _convert(image, MODES[self.shape[0]]) if len(self.shape) == 3 and self.shape[0] in MODES else image
        except Exception as error:
            raise self._describe_image(error, number) from error

    def _take_result(self, made: Any, number: int) -> Pixels:
        """What the transform has returned, as an array of data.shape."""
        if hasattr(made, "detach"):
            made = made.detach().cpu()
            made = (made.float() if made.is_floating_point() else made).numpy()
        elif not isinstance(made, np.ndarray) and hasattr(made, "__array_interface__"):
            made = np.asarray(made)
        if not isinstance(made, np.ndarray):
            raise self._refuse_result(number, f"has returned {type(made).__name__}")
        fitting = fit_array(made, self.shape)
        if fitting is None or (fitting.dtype != np.uint8 and fitting.dtype.kind != "f"):
            raise self._refuse_result(number, f"has returned {made.dtype} {list(made.shape)}")
        return fitting

    def _refuse_result(self, number: int, what: str) -> JobError:
        return JobError(
            f'data.transform "{self.transform}" {what} for record {number}\n'
            f"  Allowed: a tensor, array or image of data.shape = {list(self.shape)}, of a floating type or uint8."
        )

    def _describe_failure(self, number: int, error: Exception) -> JobError:
        return JobError(
            f'data.transform "{self.transform}" failed at record {number}: {describe_raised(error)}\n'
            f"  The record lies in {self.records.extent(number)}."
        )


def open_decoded(records: Records, place: DataPath, request: DataRequest) -> DecodedSamples:
    """Samples of records as data.inputs, data.targets, data.shape and data.transform say.

    The number of classes is the model's, or that of a folder of images. Record 0 is read, so that a field that does not
    serve is refused now. Raises UserError.
    """
    section, fields = request.section, records.fields
    if not len(records):
        raise place.error("has no records")
    targets = _find_field("data.targets", section.targets, _rank_targets(fields, section.inputs), fields)
    inputs = _find_field("data.inputs", section.inputs, _rank_inputs(fields, targets), fields)
    shape = tuple(section.shape)
    names = len(records.classes) if isinstance(records, ImageFolder) else None
    classes = request.classes or names
    if classes is None:
        what = f'"{records.format}" does not say how many classes there are'
        raise data_error("data.kind", what, remedy="set model.classes")
    if names is not None and names > classes:
        raise place.error(
            f"has {names} folders of classes",
            allowed=f"at most {classes}, the classes of the model",
            remedy="set model.classes to the number of classes of the data",
        )
    parts: tuple[object, ...] = (shape, section.mean, section.std, inputs, targets, section.transform)
    parts += ("dali",) if section.decode == "dali" else ()
    description = f"{len(records)} records of {records.format} in {place.path}, {inputs} of shape {list(shape)}"
    empty = records.empty_classes if isinstance(records, ImageFolder) else 0
    facts = SourceFacts(
        description=f"{description}, {classes} classes" + (f", {empty} of them without images" if empty else ""),
        fingerprint=fingerprint("decoded", records.fingerprint, *parts),
        sample_shape=shape,
        classes=classes,
    )
    samples = DecodedSamples(
        records=records,
        place=place,
        inputs=inputs,
        targets=targets,
        shape=shape,
        mean=section.mean,
        std=section.std,
        seed=request.seed,
        transform=section.transform,
        facts=facts,
        decode=section.decode,
    )
    if section.decode == "dali":
        _check_dali(section.transform, shape)
    _check_first(records, place, samples)
    if section.transform:
        load_transform(section.transform)
    return samples


def _check_dali(transform: str, shape: Sequence[int]) -> None:
    """Raise UserError if DALI cannot decode what is asked for."""
    if transform:
        what = '"dali" gives images that are scaled and cut, and data.transform takes them as they are'
        raise data_error("data.decode", what, allowed='"pil" with data.transform')
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise data_error("data.decode", f'"dali" makes no image of shape {list(shape)}', allowed="1 or 3 channels")
    import_dali()


def _check_first(records: Records, place: DataPath, samples: DecodedSamples) -> None:
    """Raise UserError if record 0 has no class, or an image that needs what is not there. A damaged one says nothing;
    it is met when its turn comes."""
    try:
        (first,) = records.read([0], (samples.inputs, samples.targets))
    except DamagedData:
        return
    if as_class(first.get(samples.targets)) is None:
        raise _refuse_target(samples.targets, first.get(samples.targets), "record 0")
    value = first.get(samples.inputs)
    if isinstance(value, str):
        what = f'"{samples.inputs}" is text'
        raise data_error("data.inputs", what, allowed="a field with images or arrays: " + _list(records.fields))
    if isinstance(value, dict) or (isinstance(value, bytes) and not value.startswith(MAGIC)):
        need_library("PIL.Image", place, "image")
        shape = samples.shape
        if not samples.transform and (len(shape) != 3 or shape[0] not in MODES):
            what = f"{list(shape)} is not the shape of an image"
            raise data_error("data.shape", what, allowed="[channels, height, width] with 1, 3 or 4 channels")


# --- which fields


def _rank_inputs(fields: dict[str, str], targets: str) -> list[str]:
    """Fields that may be the input, the likeliest first."""
    others = [name for name in fields if name != targets]
    named = [name for name in others if name.lower().rpartition(".")[2] in INPUT_NAMES]
    return named + [name for name in others if (fields[name] == "bytes" or "[" in fields[name]) and name[:2] != "__"]


def _rank_targets(fields: dict[str, str], inputs: str) -> list[str]:
    """Fields that may be the class, the likeliest first."""
    by_name = {name.lower(): name for name in reversed(fields) if name != inputs}
    named = [by_name[name] for name in TARGET_NAMES if name in by_name]
    integers = (name for name in fields if fields[name].startswith(("int", "uint")) and "[" not in fields[name])
    return [*named, *(name for name in integers if name != inputs and name[:2] != "__")]


def _find_field(key: str, wanted: str, ranked: Sequence[str], fields: dict[str, str]) -> str:
    if wanted != "auto":
        if wanted not in fields:
            raise data_error(key, f'"{wanted}" is not a field of the records', allowed=_list(fields))
        return wanted
    if not ranked:
        what = "no field of the records has a usual name or type"
        raise data_error(key, what, allowed=_list(fields), remedy=f"set {key} to one of them")
    return ranked[0]


def _list(fields: dict[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in fields.items())


def as_class(value: Any) -> int | None:
    """The class that a value states: an integer, or text or bytes of a decimal number; None for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, bytes | str):
        try:
            return int(value)
        except ValueError:
            return None
    return None


def _refuse_target(name: str, value: Any, where: str) -> UserError:
    shown = repr(value) if isinstance(value, str | bytes | int | float | None) else type(value).__name__
    return data_error(
        "data.targets",
        f'"{name}" is {shown[:60]} in {where}' if value is not None else f'"{name}" is not in {where}',
        allowed="an integer, or the digits of one",
        remedy="write the number of the class to a field of its own, and name it by data.targets",
    )


# --- arrays and images


def fit_array(array: Pixels, shape: tuple[int, ...]) -> Pixels | None:
    """An array as one of `shape` [C, H, W]: itself, with an axis for one channel, or with channels moved from the end
    to the front; None if it has another shape."""
    if array.shape == shape:
        return array
    if len(shape) == 3:
        if array.shape == shape[1:] and shape[0] == 1:
            return array[None]
        if array.shape == (*shape[1:], shape[0]):
            return array.transpose(2, 0, 1)
    return None


@functools.cache
def _pil() -> Any:
    return need_library("PIL.Image", DataPath("data.inputs", "an image"), "image")


def _open_image(content: bytes) -> Any:
    """An image whose header is read. A JPEG file is opened as such: Pillow's search for the format takes longer than
    reading it, and this asks for no second picture in the file."""
    if not content.startswith(_JPEG_MAGIC):
        return _pil().open(io.BytesIO(content))
    image, most = _jpeg()(io.BytesIO(content)), _pil().MAX_IMAGE_PIXELS
    if most is not None and image.size[0] * image.size[1] > most:
        raise ValueError(
            f"it has {image.size[0] * image.size[1]} pixels, more than {most} (PIL.Image.MAX_IMAGE_PIXELS)"
        )
    return image


@functools.cache
def _jpeg() -> Any:
    return importlib.import_module("PIL.JpegImagePlugin").JpegImageFile


def _convert(image: Any, mode: str) -> Any:
    """An image in a mode; 16 bits of grey become 8. Raises ValueError for 32 bits, whose range is not known."""
    if image.mode == mode:
        return image
    if image.mode.startswith("I;16"):
        image = _pil().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"it has 32 bits a pixel (mode {image.mode}); decode it by data.transform")
    elif image.mode == "P" and "transparency" in image.info and mode != "RGBA":
        image = image.convert("RGBA")
    return image.convert(mode)


def _cut(image: Any, shape: tuple[int, ...], extent: tuple[float, float] | None = None) -> Pixels:
    """The centre of an image as uint8 [C, H, W]: scaled in one step so that it just covers height and width.

    `extent`: width and height of what the image shows, where a JPEG file that was reduced as it was decoded ends within
    a pixel.
    """
    channels, height, width = shape
    wide, high = extent or image.size
    if image.size != (width, height):
        scale = max(width / wide, height / high)
        box = (0.0, 0.0, *extent) if extent else None
        if wide * height != high * width:
            left, top = (wide - width / scale) / 2, (high - height / scale) / 2
            box = (max(0.0, left), max(0.0, top), min(wide, wide - left), min(high, high - top))
        image = image.resize((width, height), _BILINEAR, box, _GAP if scale < 0.5 / _GAP else None)
    if channels == 1:
        return np.frombuffer(image.tobytes(), np.uint8).reshape(shape)
    # Rows of each channel one after the other, so that the copy to [C, H, W] reads whole rows.
    lines = image.tobytes("raw", f"{image.mode};L")
    return np.frombuffer(lines, np.uint8).reshape(height, channels, width).transpose(1, 0, 2)


@contextlib.contextmanager
def _bombs_are_errors() -> Iterator[None]:
    """Pillow's warning of an image with too many pixels is an error."""
    with warnings.catch_warnings():
        with contextlib.suppress(ImportError):  # arrays need no Pillow
            warnings.simplefilter("error", importlib.import_module("PIL.Image").DecompressionBombWarning)
        yield


# --- transforms


def load_transform(name: str) -> Callable[[Any], Any]:
    """The function of data.transform: `load_function`."""
    return load_function("data.transform", name, '"augment:train" for augment.py')


def load_function(key: str, name: str, example: str) -> Callable[..., Any]:
    """The function "module:name" (or "module:object.name") that a key names, looked up as Python imports, and in the
    current folder. Raises UserError."""
    module, colon, attribute = name.partition(":")
    allowed = f'"module:function", where Python can import the module, such as {example}'
    if not module or not colon or not attribute:
        raise data_error(key, f'"{name}" names no function', allowed=allowed)
    with importing_here():
        try:
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except Exception as error:  # whatever a module of the user's raises while it is imported
            what = f'"{name}" cannot be imported: {type(error).__name__}: {error}'
            remedy = "run from the folder of the module, or add it to PYTHONPATH"
            raise data_error(key, what, allowed=allowed, remedy=remedy) from error
    if not callable(found):
        what = f'"{name}" is {type(found).__name__}, which cannot be called'
        raise data_error(key, what, allowed=allowed)
    function: Callable[..., Any] = found
    return function


def describe_raised(error: Exception) -> str:
    """Type and text of an error that a function of the user's has raised, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}"


@contextlib.contextmanager
def importing_here() -> Iterator[None]:
    """Python imports from the current folder too, after all other folders."""
    here = "" not in sys.path
    if here:
        sys.path.append("")
    try:
        yield
    finally:
        if here:
            sys.path.remove("")


def seed_draws(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch by a word of `derive_seeds`."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def derive_seeds(seed: int, epochs: Ids, ids: Ids) -> Words:
    """The seed of the draws of each sample in its epoch, uint64."""
    key = derive_keys(np.array([seed], np.uint64), np.array([_TRANSFORM_KEYS], np.uint64))
    return derive_keys(derive_keys(key, epochs), ids)
