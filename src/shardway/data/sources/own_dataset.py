"""Samples of a torch Dataset of the user's own, which the function of data.dataset makes; one that is map-style is read
here, one that is iterable in `own_stream`.

Invariants:
- Inputs are float32 with int64 classes, or int64 tokens with int64 targets one token later.
- A sample of a map-style one is a function of its number, train.seed and the epoch: the same for any rank, worker, or
  batch that it is in.
  The generators of Python, NumPy and torch are seeded before the dataset is made and before each sample, and restored
  afterwards; a dataset that draws from elsewhere is refused.
- A sample of another structure, type or shape than the first is an error that names its number.
- A source is pickled without its dataset: a loader process imports the function by its name and makes the dataset anew.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardway.data.content import data_error, fingerprint
from shardway.data.order import derive_keys
from shardway.data.sources.base import Arrays, DataRequest, Ids, SourceFacts, Wants
from shardway.data.sources.decoded import derive_seeds, describe_raised, importing_here, load_function, seed_draws
from shardway.data.sources.packed import NOT_COUNTED
from shardway.errors import Bug, JobError, UserError

if TYPE_CHECKING:
    from shardway.data.sources.own_stream import OwnStream

TRAIN, VALIDATION = "train", "validation"
"""Values of the argument `split`."""

INPUT_FIELDS = ("inputs", "input_ids", "image", "pixel_values", "images", "tokens", "input", "img", "x", "data")
"""Names of the field of a dict that is the input, the first of them first."""
TARGET_FIELDS = ("targets", "labels", "label", "target", "cls", "class", "y")
"""Names of the field of a dict that is the target."""

_ALLOWED = {
    "images": "(input, class), or a dict with inputs and targets; the class is an integer",
    "tokens": "(inputs, targets), a dict with inputs and targets, or data.seq_len + 1 tokens alone",
}
"""What the model takes -> what a sample may be."""
_MAKING_KEYS = 2**63 + 2**60
"""The counter of the key with which a dataset is made, apart from those of orders and samples."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DatasetCall:
    """How a dataset is made: the function, its keyword arguments, the split that it has as well ("": it takes none)
    and the seed of what it draws."""

    name: str
    settings: Mapping[str, Any]
    split: str
    seed: int

    def make(self) -> Any:
        """The dataset. Raises UserError for a function that cannot be imported, that fails, or that returns something
        else."""
        from shardway.data.samplers import kept_random_states

        function = load_function("data.dataset", self.name, '"mydata:Pairs" for the class Pairs of mydata.py')
        arguments = {**self.settings, **({"split": self.split} if self.split else {})}
        with kept_random_states(), importing_here():
            counter = np.array([_MAKING_KEYS], np.uint64)
            seed_draws(int(derive_keys(derive_keys(np.array([self.seed], np.uint64), counter), np.array([0]))[0]))
            try:
                made = function(**arguments)
            except Exception as error:
                what = f"failed{self.render_split()}: {describe_raised(error)}"
                shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
                called = f"what a call as {self.name.rpartition(':')[2]}({shown}) takes"
                remedy = "data.settings has its arguments" if isinstance(error, TypeError) else ""
                if self.split == VALIDATION:
                    remedy = "set split in data.settings, so that data.validation_fraction of the samples is held out"
                raise self.error(what, called, remedy) from error
        self._check(made)
        return made

    def error(self, what: str, allowed: str = "", remedy: str = "") -> UserError:
        """The error for this dataset: `what` follows its name."""
        return data_error("data.dataset", f'"{self.name}" {what}', allowed, remedy)

    def differs(self, what: str) -> UserError:
        """The error for a dataset that is another one when it is made again: `what` follows "has made"."""
        remedy = "let nothing but its arguments decide; sort what a folder lists"
        return self.error(f"has made {what}", "a dataset that is the same in every process", remedy)

    def failure(self, number: int, error: Exception) -> JobError:
        """The error for a sample at which the dataset has raised one."""
        what = f"failed at sample {number}: {describe_raised(error)}"
        return JobError(f'data.dataset "{self.name}"{self.render_split()} {what}')

    def render_split(self) -> str:
        """For the middle of a sentence: that the split is the one for validation."""
        return f' with split="{VALIDATION}"' if self.split == VALIDATION else ""

    def _check(self, made: Any) -> None:
        from torch.utils.data import DataLoader

        from shardway.data.loader import is_map_style

        if made is None and self.split == VALIDATION:
            return
        kind = type(made).__name__
        allowed = "a torch Dataset, map-style or iterable: an object with __len__ and __getitem__, or with __iter__"
        if isinstance(made, Mapping | str | bytes):
            remedy = f"return one of its parts: {', '.join(map(str, made))}" if isinstance(made, Mapping) else ""
            raise self.error(f"has returned a {kind}, whose samples have no numbers", allowed, remedy)
        if isinstance(made, DataLoader):
            raise self.error(f"has returned a {kind}, which gives batches", allowed, "return its dataset")
        if not is_map_style(made) and not hasattr(made, "__iter__"):
            missing = " and ".join(name for name in ("__len__", "__getitem__") if not hasattr(made, name))
            raise self.error(f"has returned {'None' if made is None else kind}, which lacks {missing}", allowed)


@dataclass(eq=False)
class OwnSamples:
    """What the samples of a dataset become, however they are read.

    Of images, a uint8 input becomes (x / 255 - mean) / std, and a floating one is taken as it is; targets are classes
    below `limit`. Of tokens, both are [seq_len], below `limit`; a target that does not count is -100. `size`: samples
    of an epoch. `fields`: names of input and target where samples are dicts, "auto" for the usual ones.
    """

    call: DatasetCall
    size: int
    wants: Wants
    fields: tuple[str, str]
    limit: int
    mean: float
    std: float
    facts: SourceFacts
    first: str = ""
    """`outline_sample` of sample 0, which it must have in every process."""
    _dataset: Any = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    @property
    def tokens_per_sample(self) -> int:
        """data.seq_len, or 1 for images."""
        return self.facts.sample_shape[0] if self.wants == "tokens" else 1

    def read_first(self) -> tuple[Array, Any]:
        """Input and target of sample 0 as it is in epoch 0, computed by one thread: a sum by several ends in other bits
        than one by one. The generators are left as they were."""
        import torch

        from shardway.data.samplers import kept_random_states

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with kept_random_states(), importing_here():
                inputs, target = self.draw_first()
                return inputs.copy(), np.array(target)  # a dataset may use its memory again
        finally:
            torch.set_num_threads(threads)

    def draw_first(self) -> tuple[Array, Any]:
        """`read_sample` of sample 0 of the dataset that is open, from generators that it seeds."""
        raise Bug(f"{type(self).__name__} does not read its first sample")

    def gather(self, ids: Ids, samples: Iterable[tuple[Array, Any]]) -> Arrays:
        """The arrays of samples that `read_sample` gave, in the order of their numbers `ids`. Raises UserError for one
        of another shape than sample 0, or out of range."""
        shape, of_tokens = self.facts.sample_shape, self.wants == "tokens"
        inputs = np.empty((len(ids), *shape), np.int64 if of_tokens else np.float32)
        targets = np.empty(inputs.shape if of_tokens else len(ids), np.int64)
        for at, (found, target) in enumerate(samples):
            if found.shape != shape:
                what = f"has inputs of shape {list(found.shape)}"
                raise self.refuse(int(ids[at]), what, f"{list(shape)}, as those of sample 0")
            inputs[at], targets[at] = found, target
        if of_tokens:
            self._check_range("input", inputs, ids, np.zeros((), np.bool_))
        self._check_range("target", targets, ids, targets == NOT_COUNTED if of_tokens else np.zeros((), np.bool_))
        return {"inputs": inputs, "targets": targets}

    def read_sample(self, sample: Any, number: int) -> tuple[Array, Any]:
        """Input and target of a sample: arrays of tokens, or an array of float32 and a class. Raises UserError."""
        value, target, aligned = self._split(sample, number)
        inputs = self._as_array(value, "inputs", number)
        if self.wants == "images":
            return self._read_image(inputs, number), self._read_class(target, number)
        self._check_tokens(inputs, "inputs", number)
        if target is _ALONE:
            return inputs[:-1], inputs[1:]
        targets = self._as_array(target, "targets", number)
        self._check_tokens(targets, "targets", number)
        if targets.shape != inputs.shape:
            what = f"has {len(targets)} targets and {len(inputs)} inputs"
            raise self.refuse(number, what, "a target for each input")
        return (inputs[:-1], targets[1:]) if aligned else (inputs, targets)

    def refuse(self, number: int, what: str, allowed: str, remedy: str = "") -> UserError:
        """The error for a sample: `what` follows its number."""
        place = f"sample {number} of {json.dumps(self.call.name)}{self.call.render_split()}"
        return data_error("data.dataset", f"{place} {what}", allowed, remedy)

    # --- the parts of a sample

    def _split(self, sample: Any, number: int) -> tuple[Any, Any, bool]:
        """Input and target (`_ALONE` for tokens without one) of a sample, and whether a target stands at the place of
        its own token, as the "labels" of Hugging Face do, not at the place of the token before it."""
        if isinstance(sample, Mapping):
            return self._split_fields(sample, number)
        of_tokens = self.wants == "tokens"
        if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
            if of_tokens and len(sample) == 1:
                return sample[0], _ALONE, False
            if len(sample) == 2 and not (of_tokens and isinstance(sample[0], int)):
                return sample[0], sample[1], False
            if not (of_tokens and isinstance(sample, list)):
                kinds = ", ".join(type(value).__name__ for value in sample[:4]) + (", ..." if len(sample) > 4 else "")
                what = f"is a {type(sample).__name__} of {len(sample)} ({kinds})"
                raise self.refuse(number, what, _ALLOWED[self.wants])
        elif not (of_tokens and hasattr(sample, "shape")):
            raise self.refuse(number, f"is {_describe(sample)}", _ALLOWED[self.wants])
        return sample, _ALONE, False

    def _split_fields(self, sample: Mapping[Any, Any], number: int) -> tuple[Any, Any, bool]:
        chosen = list[Any]()
        for key, wanted, usual in zip(("inputs", "targets"), self.fields, (INPUT_FIELDS, TARGET_FIELDS), strict=True):
            name = next((each for each in usual if each in sample), None) if wanted == "auto" else wanted
            if name is None and key == "targets" and self.wants == "tokens":
                chosen.append(None)
            elif name is None or name not in sample:
                fields = ", ".join(map(str, sample)) or "none"
                what = f'has no field "{name}"' if name is not None else f"has no field of a usual name for its {key}"
                raise self.refuse(number, what, f"its fields are: {fields}", f"set data.{key} to one of them")
            else:
                chosen.append(name)
        mask = sample.get("attention_mask")
        if self.wants == "tokens" and mask is not None and not np.all(self._as_array(mask, "attention_mask", number)):
            what = "masks tokens (attention_mask has zeros), and the model attends to all tokens before"
            remedy = "fill each sample with tokens, such as by cutting all documents, joined, into samples"
            raise self.refuse(number, what, "samples without padding", remedy)
        inputs, targets = chosen
        target = _ALONE if targets is None else sample[targets]
        return sample[inputs], target, chosen == ["input_ids", "labels"]

    def _as_array(self, value: Any, name: str, number: int) -> Array:
        """A tensor, array, number or list of numbers as an array."""
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            if value.is_floating_point():
                value = value.float()
            value = value.numpy()
        elif isinstance(value, list | tuple | int | float):
            try:
                value = np.asarray(value)
            except ValueError:
                raise self.refuse(number, f"has {name} in a ragged list", "a tensor or an array") from None
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
            return np.asarray(value)
        remedy, what = "", f"has {name} that are {_describe(value)}"
        if type(value).__module__.partition(".")[0] == "PIL":
            remedy = "make it a tensor in __getitem__, such as by a transform of torchvision"
        elif isinstance(value, str | bytes):
            remedy = "make it numbers in __getitem__, such as by a tokenizer"
        raise self.refuse(number, what, "a tensor or an array of numbers", remedy)

    def _read_image(self, pixels: Array, number: int) -> Array:
        if pixels.dtype != np.uint8 and pixels.dtype.kind != "f":
            raise self.refuse(number, f"has inputs of {pixels.dtype}", "a floating type, or uint8")
        if pixels.ndim not in (1, 2, 3):
            allowed = "[features], [height, width] or [channels, height, width]"
            raise self.refuse(number, f"has inputs of shape {list(pixels.shape)}", allowed)
        shaped = pixels[None] if pixels.ndim == 2 else pixels
        if pixels.dtype == np.uint8:
            scale, shift = np.float32(1.0 / (255.0 * self.std)), np.float32(self.mean / self.std)
            return shaped.astype(np.float32) * scale - shift
        return shaped

    def _read_class(self, target: Any, number: int) -> int:
        found = self._as_array(target, "targets", number)
        if found.ndim or found.dtype.kind not in "iu":
            what = f"has the target {found.dtype} {list(found.shape)}"
            raise self.refuse(number, what, "an integer, the number of a class")
        return int(found)

    def _check_tokens(self, tokens: Array, name: str, number: int) -> None:
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            what = f"has {name} of {tokens.dtype} {list(tokens.shape)}"
            raise self.refuse(number, what, "tokens: integers in one dimension")

    def _check_range(self, name: str, found: Array, ids: Ids, free: Array) -> None:
        """Raise UserError for what is outside 0 .. limit - 1."""
        wrong = ((found < 0) | (found >= self.limit)) & ~free
        if not wrong.any():
            return
        at = tuple(int(axis[0]) for axis in np.nonzero(wrong))
        what, key = ("tokens", "model.vocab") if self.wants == "tokens" else ("classes", "model.classes")
        allowed = f"0 to {self.limit - 1}, for {self.limit} {what}"
        remedy = f"set {key} to the number of {what} of the data"
        raise self.refuse(int(ids[at[0]]), f"has the {name} {found[at]}", allowed, remedy)


_ALONE = object()
"""In place of the targets of tokens that have none of their own."""


def _describe(value: Any) -> str:
    """A value by its type, for messages."""
    kind = type(value)
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return (
        "None" if value is None else f"a {kind.__module__.partition('.')[0]} {kind.__name__}".replace("builtins ", "")
    )


@dataclass(eq=False)
class OwnDataset(OwnSamples):
    """The samples of a map-style dataset, gathered one after the other."""

    def __len__(self) -> int:
        return self.size

    @property
    def draws(self) -> bool:
        """True: samples may differ from epoch to epoch, as the dataset draws."""
        return True

    def locate(self, number: int) -> str:
        """The sample and the dataset that it is of."""
        return f'sample {number} of data.dataset "{self.call.name}"{self.call.render_split()}'

    def batch(self, ids: Ids) -> Arrays:
        """The samples as they are in epoch 0."""
        return self.batch_of(ids, np.zeros(len(ids), np.int64))

    def batch_of(self, ids: Ids, epochs: Ids) -> Arrays:
        """The samples, each as it is in its epoch. Raises JobError where the dataset fails, UserError for a sample that
        does not serve."""
        from shardway.data.samplers import kept_random_states

        pairs = zip(ids.tolist(), derive_seeds(self.call.seed, epochs, ids).tolist(), strict=True)
        with kept_random_states(), importing_here():
            return self.gather(ids, (self.draw(number, seed) for number, seed in pairs))

    def draw(self, number: int, seed: int) -> tuple[Array, Any]:
        """`read_sample` of a sample as it is drawn with a seed; the generators are left as they are then."""
        dataset = self._open()
        seed_draws(seed)
        try:
            sample = dataset[number]
        except Exception as error:
            raise self.call.failure(number, error) from error
        return self.read_sample(sample, number)

    def draw_first(self) -> tuple[Array, Any]:
        """Sample 0 of epoch 0."""
        zero = np.zeros(1, np.int64)
        return self.draw(0, int(derive_seeds(self.call.seed, zero, zero)[0]))

    def check_repeats(self, inputs: Array, target: Any) -> None:
        """Raise UserError if sample 0 is another one when it is read again."""
        if not is_same((inputs, target), self.read_first()):
            raise self.refuse(
                0,
                "is not the same when it is read twice, so that no run could go on exactly",
                "draws from the global generators of torch, numpy and random, which are seeded for each sample",
                "draw by torch.rand, np.random.rand or random.random, not by a generator that the dataset keeps or "
                "makes",
            )

    def _open(self) -> Any:
        """The dataset, made in this process where it was not yet."""
        if self._dataset is None:
            made = self.call.make()
            if len(made) != self.size:
                raise self.call.differs(f"{self.size} samples and, called again, {len(made)}")
            self._dataset = made
            if outline_sample(*self.read_first()) != self.first:
                raise self.call.differs("another sample 0 when it was called again")
        return self._dataset


# --- opening


def open_dataset(request: DataRequest, split: str) -> OwnDataset | OwnStream:
    """The samples of data.dataset. Sample 0 is read twice, so that one that does not serve is refused now. Raises
    UserError."""
    opened = _open(request, split if _takes_split(request) else "")
    if opened is None:
        raise Bug("a dataset for training that is None has not been refused")
    return opened


def open_validation_split(request: DataRequest) -> OwnDataset | OwnStream | None:
    """The samples for validation, if the function takes a split and gives some for it."""
    return _open(request, VALIDATION) if _takes_split(request) else None


def _takes_split(request: DataRequest) -> bool:
    """Whether the function has a parameter `split` that data.settings leaves open."""
    section = request.section
    if "split" in section.settings:
        return False
    function = load_function("data.dataset", section.dataset, '"mydata:Pairs" for the class Pairs of mydata.py')
    try:
        found = inspect.signature(function).parameters.get("split")
    except (TypeError, ValueError):  # of a function that is not written in Python
        return False
    return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)


def _open(request: DataRequest, split: str) -> OwnDataset | OwnStream | None:
    from shardway.data.loader import is_map_style
    from shardway.data.sources.own_stream import OwnStream, find_length

    section, of_tokens = request.section, request.wants == "tokens"
    limit = request.vocab if of_tokens else request.classes
    if limit is None:
        what, key = ("what its vocabulary is", "vocab") if of_tokens else ("how many classes there are", "classes")
        raise data_error("data.kind", f'"dataset" does not say {what}', remedy=f"set model.{key}")
    call = DatasetCall(section.dataset, section.settings, split, request.seed)
    made = call.make()
    if made is None:
        return None
    has_numbers = is_map_style(made)
    try:
        size = len(made) if has_numbers else find_length(made)
    except Exception as error:
        raise call.error(
            f"has made a dataset without a length: {describe_raised(error)}", "one with __len__"
        ) from error
    if size == 0:
        raise call.error(f"has made a dataset without samples{call.render_split()}")
    opened, fields = OwnDataset if has_numbers else OwnStream, (section.inputs, section.targets)
    probe = opened(call, size or 0, request.wants, fields, limit, section.mean, section.std, _NO_FACTS, _dataset=made)
    shape, first = _check_first(probe, request)
    kind = f"tokens, vocabulary {limit}" if of_tokens else f"shape {list(shape)}, {limit} classes"
    settings = json.dumps(section.settings, sort_keys=True, default=str)
    parts = (section.dataset, settings, split, size, fields, section.mean, section.std, first)
    count = f"{size} samples" if has_numbers else f"{size or 'an unknown number of'} samples in sequence"
    facts = SourceFacts(
        description=f'{count} of data.dataset "{section.dataset}"{call.render_split()}, '
        + (f"{shape[0]} {kind}" if of_tokens else kind),
        fingerprint=fingerprint("dataset" if has_numbers else "stream", *parts),
        sample_shape=shape,
        vocab=limit if of_tokens else None,
        classes=None if of_tokens else limit,
    )
    return replace(probe, facts=facts, first=first)


_NO_FACTS = SourceFacts("", "", ())


def _check_first(probe: OwnDataset | OwnStream, request: DataRequest) -> tuple[tuple[int, ...], str]:
    """The shape and the outline of sample 0. Raises UserError if it does not serve, or is not the same twice."""
    try:
        inputs, target = probe.read_first()
        _check_length(probe, inputs, request)
        probe.check_repeats(inputs, target)
    except JobError as error:
        raise data_error("data.dataset", f"{error}".removeprefix("data.dataset ")) from error
    if request.wants == "tokens":
        _check_next(probe, inputs, target)
    replace(probe, facts=replace(_NO_FACTS, sample_shape=inputs.shape)).gather(
        np.zeros(1, np.int64), [(inputs, target)]
    )
    return inputs.shape, outline_sample(inputs, target)


def is_same(one: tuple[Array, Any], other: tuple[Array, Any]) -> bool:
    """Whether two samples are the same to the bit."""
    (inputs, target), (again, repeated) = one, other
    alike = inputs.shape == again.shape and inputs.tobytes() == again.tobytes()
    return alike and np.array_equal(target, repeated)


def outline_sample(inputs: Array, target: Any) -> str:
    """What identifies a sample: integers to the bit, and of floats what another kind of processor computes alike too:
    the shape, the largest, mean and mean square, and some elements, to two or three digits."""
    shown = str(np.asarray(target).tolist())
    if inputs.dtype.kind != "f" or not inputs.size:
        return f"{inputs.shape} {inputs.tobytes().hex()} {shown}"
    flat = inputs.astype(np.float64).reshape(-1)
    peak = float(np.abs(flat).max())
    flat /= peak or 1.0
    some = flat[np.linspace(0, flat.size - 1, 8).astype(np.int64)].tolist()
    numbers = " ".join(f"{round(number, 2) + 0.0:g}" for number in (float(flat.mean()), float((flat**2).mean()), *some))
    return f"{inputs.shape} {peak:.3g} {numbers} {shown}"


def _check_length(probe: OwnSamples, inputs: Array, request: DataRequest) -> None:
    wanted = request.section.seq_len
    if request.wants == "tokens" and len(inputs) != wanted:
        allowed = (
            f"data.seq_len = {wanted} (and one token more where targets are those tokens, or labels at their place)"
        )
        raise probe.refuse(0, f"has {len(inputs)} tokens with a target", allowed, f"set data.seq_len = {len(inputs)}")


def _check_next(probe: OwnSamples, inputs: Array, targets: Array) -> None:
    """Raise UserError if the targets of sample 0 are the inputs at another place than one later."""

    def lie(later: int) -> bool:
        there, counted = inputs[later:], targets[: len(inputs) - later]
        which = counted != NOT_COUNTED
        return bool(which.any() and np.array_equal(there[which], counted[which]))

    if lie(1):
        return
    if lie(0):
        what = "has its inputs as targets, so that a model would learn to copy them"
        remedy = "return data.seq_len + 1 tokens alone, or name both input_ids and labels, which are shifted here"
        raise probe.refuse(0, what, "as targets[i] the token after inputs[i]", remedy)
    if lie(2):
        what = "has labels that are shifted already"
        remedy = "name the fields inputs and targets; input_ids and labels are taken as Hugging Face has them"
        raise probe.refuse(0, what, "as labels[i] the token input_ids[i], or -100", remedy)
