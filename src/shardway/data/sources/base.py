"""What a source is: its protocol, its facts, and views of a part of it or of several together.

Invariant: a source whose data lie in a file is pickled without them (a worker opens the file anew). This module must
not read files or depend on a kind of data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, Protocol, TypeGuard, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardway.data.content import fingerprint
from shardway.data.order import BlendOrder, SampleOrder
from shardway.data.window_order import WindowOrder
from shardway.runfile.schema import DataSection

Ids = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
Wants = Literal["tokens", "images"]


@dataclass(frozen=True)
class SourceFacts:
    """Facts about a source that need no reading of samples.

    `sample_shape` is that of the inputs of one sample. `bytes_per_token` is the number of text bytes that a target
    token stands for, so that bits per byte = loss / ln 2 / bytes_per_token; None without text. `fingerprint` is
    xxh3-128 over what identifies the content: sizes, names, some blocks.
    """

    description: str
    fingerprint: str
    sample_shape: tuple[int, ...]
    vocab: int | None = None
    classes: int | None = None
    bytes_per_token: float | None = None


@runtime_checkable
class DataSource(Protocol):
    """Numbered samples, gathered many at once."""

    @property
    def facts(self) -> SourceFacts:
        """What is known without reading samples."""

    @property
    def tokens_per_sample(self) -> int:
        """Tokens that a sample trains on; 1 for images."""

    def __len__(self) -> int:
        """The number of samples."""

    def batch(self, ids: Ids) -> Arrays:
        """ "inputs" and "targets" of samples, along the first axis; no ids give arrays of length 0 with the right
        remaining shape. Samples with shapes of their own come in arrays of objects, an array for each sample."""


@runtime_checkable
class StreamSource(Protocol):
    """Samples that only come in sequence: sample p is the p-th that is given, over all epochs."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def facts(self) -> SourceFacts:
        """As of a `DataSource`."""

    @property
    def tokens_per_sample(self) -> int:
        """As of a `DataSource`."""

    @property
    def size(self) -> int:
        """Samples of an epoch; 0 if that is not known."""

    @property
    def state_is_exact(self) -> bool:
        """Whether the state of the iterable may be used, if it has `state_dict()` and `load_state_dict(state)`."""

    def open(self) -> Any:
        """The iterable of an epoch's samples, the same object whenever a process asks."""

    def reading(self, find_number: Callable[[], int]) -> AbstractContextManager[None]:
        """The context in which samples are taken from the iterable; its errors name sample `find_number()`."""

    def join(self, samples: Sequence[Any], numbers: Ids) -> Arrays:
        """ "inputs" and "targets" of samples that the iterable gave, along the first axis; `numbers` are theirs."""


@runtime_checkable
class DrawingSource(DataSource, Protocol):
    """A source whose samples may differ from epoch to epoch, such as images that are augmented at random."""

    @property
    def draws(self) -> bool:
        """Whether they do; if not, only `batch` is called."""

    def batch_of(self, ids: Ids, epochs: Ids) -> Arrays:
        """As `batch`, each sample as it is in its epoch: a function of sample and epoch alone. `batch(ids)` is that of
        epoch 0."""


def is_drawing(source: object) -> TypeGuard[DrawingSource]:
    """Whether samples of a source differ from epoch to epoch."""
    return isinstance(source, DrawingSource) and source.draws


def locate_sample(source: DataSource | StreamSource, number: int) -> str:
    """Where a sample lies, for a person: by the source's own `locate(number)`, or its number and description."""
    locate = getattr(source, "locate", None)
    return str(locate(number)) if locate is not None else f"sample {number} of {source.facts.description}"


Hold = Callable[[Any], Any]
"""Files of a data set -> where they are staged: `FileParts` -> `shardway.data.stage.StagedSet`."""


def stage_source(source: DataSource, hold: Hold) -> DataSource:
    """The same samples, read from where `hold` has put their files, by the source's own `staged(hold)`; a source
    without files is itself."""
    staged = getattr(source, "staged", None)
    return source if staged is None else cast(DataSource, staged(hold))


@dataclass(frozen=True, eq=False)
class FileBlocks:
    """The samples of a source by the file that holds them: those of file i of `parts` (a `FileParts`) end at
    `ends[i]`."""

    ends: Ids
    parts: Any

    def order(self, seed: int, window_bytes: int) -> WindowOrder:
        """The order that visits them by windows of at most so many bytes (of one file, if it is larger)."""
        largest = max([1, *(self.parts.files[number].size for number in self.filled)])
        return WindowOrder(self.ends.tolist(), max(1, window_bytes // largest), seed)

    @property
    def filled(self) -> list[int]:
        """The numbers of the files that hold samples."""
        found: list[int] = np.flatnonzero(np.diff(self.ends, prepend=np.int64(0))).tolist()
        return found


def find_blocks(source: object) -> FileBlocks | None:
    """The samples by file, as the source's own `file_blocks()` says; None of a source that has none, or whose samples
    do not follow each other file by file."""
    blocks = getattr(source, "file_blocks", None)
    return None if blocks is None else cast(FileBlocks | None, blocks())


def describe_slow_order(source: object) -> str:
    """Why samples of a source come slowly in a random order, as its own `slow_in_random_order()` says; "" if they do
    not."""
    find = getattr(source, "slow_in_random_order", None)
    return "" if find is None else str(find())


@dataclass(frozen=True)
class Slice:
    """Samples start .. stop of another source, without a copy."""

    whole: DataSource
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def tokens_per_sample(self) -> int:
        return self.whole.tokens_per_sample

    @property
    def facts(self) -> SourceFacts:
        facts = self.whole.facts
        return replace(
            facts,
            description=f"{facts.description}, samples {self.start} to {self.stop - 1}",
            fingerprint=fingerprint(facts.fingerprint, self.start, self.stop),
        )

    def batch(self, ids: Ids) -> Arrays:
        return self.whole.batch(ids + self.start)

    def locate(self, number: int) -> str:
        return locate_sample(self.whole, number + self.start)

    def file_blocks(self) -> FileBlocks | None:
        whole = find_blocks(self.whole)
        return whole and FileBlocks(np.clip(whole.ends, self.start, self.stop) - self.start, whole.parts)

    def slow_in_random_order(self) -> str:
        return describe_slow_order(self.whole)

    def staged(self, hold: Hold) -> Slice:
        return replace(self, whole=stage_source(self.whole, hold))

    @property
    def draws(self) -> bool:
        return is_drawing(self.whole)

    def batch_of(self, ids: Ids, epochs: Ids) -> Arrays:
        return self.whole.batch_of(ids + self.start, epochs) if is_drawing(self.whole) else self.batch(ids)


@dataclass(frozen=True)
class BlendPart:
    """A part of a blend: what messages call it, its samples, and pairs (position, weight), the first from 0 on."""

    name: str
    source: DataSource
    steps: tuple[tuple[int, float | Fraction], ...]


@dataclass(frozen=True)
class ConcatSource:
    """The samples of all parts, numbered one part after the other: of one shape, in arrays of the same names."""

    parts: tuple[BlendPart, ...]

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def tokens_per_sample(self) -> int:
        """The mean over a cycle of the first weights, rounded: parts may differ in it."""
        weights = [float(part.steps[0][1]) for part in self.parts]
        tokens = (weight * part.source.tokens_per_sample for weight, part in zip(weights, self.parts, strict=True))
        return round(sum(tokens) / sum(weights))

    @cached_property
    def facts(self) -> SourceFacts:
        """Those of the parts together. The fingerprint is without weights, which may change at later positions."""
        facts = [part.source.facts for part in self.parts]
        sizes, per_token = [len(part.source) for part in self.parts], [each.bytes_per_token for each in facts]
        known = [bytes_ for bytes_ in per_token if bytes_ is not None]
        mean = sum(map(operator.mul, sizes, known)) / len(self) if len(known) == len(facts) else None
        return SourceFacts(
            description="; ".join(
                f"{part.name}: {each.description}" for part, each in zip(self.parts, facts, strict=True)
            ),
            fingerprint=fingerprint("blend", *(each.fingerprint for each in facts)),
            sample_shape=facts[0].sample_shape,
            vocab=max((each.vocab for each in facts if each.vocab is not None), default=None),
            classes=max((each.classes for each in facts if each.classes is not None), default=None),
            bytes_per_token=mean,
        )

    @property
    def draws(self) -> bool:
        return any(is_drawing(part.source) for part in self.parts)

    def order(self, seed: int, shuffle: bool) -> BlendOrder:
        """The order of the samples by the weights of the parts."""
        sizes = tuple(len(part.source) for part in self.parts)
        return BlendOrder(sizes, tuple(part.steps for part in self.parts), seed, shuffle)

    def place_of(self, number: int) -> tuple[BlendPart, int]:
        """The part of a sample, and its number there."""
        part = int(np.searchsorted(self._ends, number, side="right"))
        return self.parts[part], number - int(self._firsts[part])

    def locate(self, number: int) -> str:
        part, inner = self.place_of(number)
        return f"{part.name}: {locate_sample(part.source, inner)}"

    def slow_in_random_order(self) -> str:
        found = ((part.name, describe_slow_order(part.source)) for part in self.parts)
        return "; ".join(f"{name}: {why}" for name, why in found if why)

    def staged(self, hold: Hold) -> ConcatSource:
        return ConcatSource(tuple(replace(part, source=stage_source(part.source, hold)) for part in self.parts))

    def batch(self, ids: Ids) -> Arrays:
        return self._gather(ids, None)

    def batch_of(self, ids: Ids, epochs: Ids) -> Arrays:
        return self._gather(ids, epochs)

    def _gather(self, ids: Ids, epochs: Ids | None) -> Arrays:
        """The samples by part, put into the order of `ids`."""
        which = np.searchsorted(self._ends, ids, side="right")
        gathered: Arrays = {}
        for number in np.unique(which).tolist() or [0]:
            source, here = self.parts[number].source, np.flatnonzero(which == number)
            own = ids[here] - self._firsts[number]
            found = (
                source.batch_of(own, epochs[here]) if epochs is not None and is_drawing(source) else source.batch(own)
            )
            if len(here) == len(ids):
                return found
            for name, array in found.items():
                if name not in gathered:
                    gathered[name] = np.empty((len(ids), *array.shape[1:]), array.dtype)
                gathered[name][here] = array
        return gathered

    @cached_property
    def _ends(self) -> Ids:
        return np.cumsum([len(part.source) for part in self.parts], dtype=np.int64)

    @cached_property
    def _firsts(self) -> Ids:
        return np.concatenate([np.zeros(1, np.int64), self._ends[:-1]])


@dataclass(frozen=True)
class Mixed:
    """Another source in a fixed order in which any first samples are a random choice: those that a blend validates on,
    of which `train.validation_samples` may be few."""

    whole: DataSource

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def tokens_per_sample(self) -> int:
        return self.whole.tokens_per_sample

    @property
    def facts(self) -> SourceFacts:
        facts = self.whole.facts
        return replace(facts, fingerprint=fingerprint("mixed", facts.fingerprint))

    def batch(self, ids: Ids) -> Arrays:
        return self.whole.batch(SampleOrder(len(self.whole), 0).ids(ids))

    def staged(self, hold: Hold) -> Mixed:
        return Mixed(stage_source(self.whole, hold))


@dataclass(frozen=True)
class DataRequest:
    """The run's request for its data: the [data] section, train.seed and what the model takes.

    `vocab` and `classes` are those of the model, None if it takes what the data have.
    """

    section: DataSection
    seed: int
    wants: Wants
    vocab: int | None = None
    classes: int | None = None
