"""Opens the sources that the [data] section names.

Invariant: all that is wrong with the data is one UserError here, before any rank starts. Text is prepared here. Ranks
that share a cache folder call `open_data` first on rank 0 and then, after a barrier, on the others, so that the work is
done once (all at once is safe, but each would do it). This module must not import torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardway.data.content import DataPath, data_error
from shardway.data.kinds import DataKind, EnergonKind
from shardway.data.order import BlendOrder, SampleOrder
from shardway.data.sources.base import (
    BlendPart,
    ConcatSource,
    DataRequest,
    DataSource,
    Mixed,
    Slice,
    StreamSource,
    Wants,
    find_blocks,
)
from shardway.data.tokenizers import open_tokenizer
from shardway.data.window_order import WindowOrder
from shardway.errors import Problem, UserError, check_no_problems
from shardway.plugins import GROUPS, load_plugin
from shardway.resolve import DataFacts
from shardway.resolve.draft import Resolved, kinds_of_data, takes_of
from shardway.runfile.blend import BlendEntry
from shardway.runfile.load import DEFAULT
from shardway.runfile.schema import STDLIB, DataSection, RunFile

if TYPE_CHECKING:
    from shardway.data.formats.base import Records

T = TypeVar("T")


@dataclass(frozen=True)
class Data:
    """What a run trains and validates on; validation is None if nothing is held out."""

    train: DataSource | StreamSource
    validation: DataSource | StreamSource | None

    @property
    def facts(self) -> DataFacts:
        train, held_out = self.train, self.validation is not None
        in_sequence = train.name if isinstance(train, StreamSource) else ""
        size = train.size if isinstance(train, StreamSource) else len(train)
        return DataFacts(size, train.tokens_per_sample, train.facts.vocab, held_out=held_out, in_sequence=in_sequence)


def find_kind(section: DataSection) -> DataKind:
    """The kind of the data."""
    kind: DataKind = load_plugin("data_sources", section.kind)()
    return kind


def order_of(values: RunFile, source: DataSource) -> SampleOrder | BlendOrder | WindowOrder:
    """The order in which a run takes the samples of a source: that of a blend follows its weights. Raises UserError for
    windows over samples that do not follow each other file by file."""
    seed, shuffle = values.train.seed, values.data.shuffle
    if shuffle == "windows":
        return _order_windows(source, seed, values.data.window)
    if isinstance(source, ConcatSource):
        return source.order(seed, bool(shuffle))
    return SampleOrder(len(source), seed, bool(shuffle))


def _order_windows(source: DataSource | StreamSource, seed: int, window_bytes: int) -> WindowOrder:
    blocks, of_blend = find_blocks(source), isinstance(source, ConcatSource)
    if blocks is None:
        what = "a blend" if of_blend else "these data, whose samples do not follow each other file by file"
        prepare = "copy the data with `shardway data prepare SOURCE OUT`, which writes such shards, or "
        raise data_error(
            "data.shuffle",
            f'"windows" cannot go with {what}',
            allowed="one data set of token or record shards, WebDataset, MDS, Parquet or JSON lines (not compressed, "
            "without data.pack)",
            remedy=f"{'' if of_blend else prepare}set data.shuffle = true",
        )
    return blocks.order(seed, window_bytes)


def are_there(values: RunFile) -> bool:
    """Whether something exists at each path of a run file's data."""
    return not find_missing(values.data)


def find_missing(section: DataSection) -> str:
    """The first path of the data at which there is nothing; "" if there is none."""
    parts = [_section_of(section, entry) for entry in section.blend] or [section]
    return next((part.path for part in parts if not find_kind(part).exists(part)), "")


def find_sample(values: RunFile) -> tuple[tuple[int, ...], int | None]:
    """The shape of a sample and the vocabulary (None if the model takes none): of the data, or, if they do not exist
    yet, of data.shape, data.seq_len and data.tokenizer. Raises UserError if none of them gives it."""
    section, tokens = values.data, takes_of(values.model.kind) == "tokens" or bool(values.model.hf)
    if are_there(values):
        facts = open_described(values).train.facts
        return facts.sample_shape, facts.vocab
    if not tokens:
        return tuple(section.shape), None
    if isinstance(values.model.vocab, int):
        return (section.seq_len,), values.model.vocab
    if kinds_of_data(section.kind, section.blend, "") != ("text",):
        raise data_error(
            "data.blend" if section.blend else "data.path",
            f'"{find_missing(section)}" is not there, so its vocabulary is not known',
            remedy="set model.vocab to a number of tokens",
        )
    return (section.seq_len,), 256 if section.tokenizer == "bytes" else open_tokenizer(section.tokenizer).vocab


def may_draw(section: DataSection) -> bool:
    """Whether opening the data calls code that is not ours, which may draw random numbers."""
    kinds = {_section_of(section, entry).kind for entry in section.blend} or {section.kind}
    return bool(section.transform) or "dataset" in kinds or not kinds <= GROUPS["data_sources"].own.keys()


def open_resolved(resolved: Resolved) -> Data:
    """The data of a run that is to train, for its model. Raises UserError also where data.kind is not set and a
    file is of another kind than its default."""
    values, section = resolved.values, resolved.values.data
    if resolved.origins["data.kind"] == DEFAULT and section.kind == "text":
        places = [
            DataPath(f"data.blend[{number}].path", entry.path)
            for number, entry in enumerate(section.blend)
            if not entry.kind
        ] or [DataPath("data.path", section.path)]
        places += [DataPath("data.validation", section.validation)] if section.validation else []
        for place in places:
            if place.text != STDLIB and "://" not in place.text:
                from shardway.data.detect import check_is_text

                check_is_text(place)
    return open_described(values)


def open_described(values: RunFile) -> Data:
    """The data of a resolved run file, for its model."""
    model, wants = values.model, takes_of(values.model.kind)
    vocab = model.vocab if wants == "tokens" and isinstance(model.vocab, int) else None
    classes = model.classes if wants == "images" else None
    return open_data(values.data, values.train.seed, wants, vocab=vocab, classes=classes)


def open_data(
    section: DataSection, seed: int, wants: Wants, vocab: int | None = None, classes: int | None = None
) -> Data:
    """The sources that a [data] section names, checked.

    `wants` is what the model takes; `vocab` and `classes` are the model's, None if they follow the data. Validation is
    data.validation; for idx without it the t10k files if they exist; else the last data.validation_fraction of the
    samples of data.path (of windows that share one token with the training part), or of each part of a blend.

    Raises UserError for anything wrong with the data, JobError if the cache has no space.
    """
    asked, place = DataRequest(section, seed, wants, vocab, classes), DataPath("data.path", section.path)
    if section.blend:
        data = _open_blend([_read_part(asked, *pair) for pair in enumerate(section.blend)], asked)
    else:
        part = _Part(section.path, place, asked, find_kind(section))
        data = _open_blend([part], asked) if part.is_metadataset else _open_one(part)
    if section.shuffle == "windows":
        _order_windows(data.train, seed, section.window)
    return data


# --- one path


@dataclass(frozen=True)
class _Part:
    """A path to open: what messages call it, the request for it (its section has its kind and path), its kind, and its
    weights in a blend as pairs (position, weight)."""

    name: str
    place: DataPath
    asked: DataRequest
    kind: DataKind
    steps: tuple[tuple[int, float | Fraction], ...] = ((0, 1),)

    @property
    def is_metadataset(self) -> bool:
        """Whether it is a file of Energon that blends several folders."""
        return self.asked.section.kind == "energon" and self.place.path.is_file()

    def expand(self, split: str = "train") -> list[_Part]:
        """The parts that a metadataset blends in a split; itself for any other path."""
        if not self.is_metadataset:
            return [self]
        from shardway.data.formats.energon import read_metadataset

        leaves = []
        for path, share, own in read_metadataset(self.place, split):
            if share:
                steps = tuple((start, Fraction(str(weight)) * Fraction(str(share))) for start, weight in self.steps)
                place = DataPath(self.place.key, path)
                leaves.append(replace(self, name=path, place=place, kind=_EnergonSplit(own), steps=steps))
        return leaves


class _EnergonSplit(EnergonKind):
    """A split of a prepared folder, as a metadataset names it."""

    def __init__(self, split: str) -> None:
        self._split = split

    def open_records(self, place: DataPath) -> Records:
        from shardway.data.formats.energon import DEFAULT_SPLIT, open_split

        return open_split(place, "" if self._split == DEFAULT_SPLIT else self._split)


def _open_one(part: _Part) -> Data:
    place, asked, kind, section = part.place, part.asked, part.kind, part.asked.section
    if asked.wants not in kind.gives:
        fitting = (
            name for name in GROUPS["data_sources"].own if asked.wants in load_plugin("data_sources", name).gives
        )
        raise data_error(
            "data.kind",
            f'"{section.kind}" gives {kind.gives[0]}, but the model takes {asked.wants}',
            allowed=", ".join(fitting),
        )
    if not kind.reads_files():
        if section.validation:
            raise data_error(
                "data.validation",
                f'"{section.validation}" cannot go with data.kind = "{section.kind}", which reads no files',
                remedy="leave it out; data.validation_fraction of the samples is held out",
            )
        train, key = kind.open(place, asked), next(iter(kind.keys), "data.kind")
        validation = kind.open_held_out(place, asked)
        if validation is None:
            return _hold_out(train, key, section)
        _check_shape(train, validation, DataPath(key, place.text))
        return Data(train, validation)
    train = _open(kind.open, place, asked)
    asked = replace(asked, classes=train.facts.classes)
    if section.validation:
        return Data(train, _open_validation(train, asked))
    validation = _open(kind.open_held_out, place, asked)
    if validation is None:
        return _hold_out(train, place.key, section)
    _check_shape(train, validation, DataPath("data.validation", place.text))
    return Data(train, validation)


def _open_validation(train: DataSource | StreamSource, asked: DataRequest) -> DataSource | StreamSource:
    """The samples at data.validation, of the kind data.kind."""
    place, kind = DataPath("data.validation", asked.section.validation), find_kind(asked.section)
    leaves = _Part(place.text, place, asked, kind).expand("val")
    found = [_open(leaf.kind.open_validation, leaf.place, leaf.asked) for leaf in leaves]
    for leaf, each in zip(leaves, found, strict=True):
        _check_shape(train, each, leaf.place)
    return _join_validation(leaves, found)


def _check_shape(train: DataSource | StreamSource, validation: DataSource | StreamSource, place: DataPath) -> None:
    if train.facts.sample_shape != validation.facts.sample_shape:
        raise data_error(
            place.key,
            f"has samples of shape {list(validation.facts.sample_shape)}",
            allowed=f"{list(train.facts.sample_shape)}, the shape of the training samples",
        )


def _open(opener: Callable[[DataPath, DataRequest], T], place: DataPath, asked: DataRequest) -> T:
    if "://" in place.text:
        remedy = f"copy it to this machine first: `shardway data prepare {shlex.quote(place.text)} OUT`"
        raise place.error("is an address, and a run reads files", remedy=remedy)
    try:
        return opener(place, asked)
    except OSError as error:
        at = f' at "{error.filename}"' if error.filename else ""
        raise place.error(f"cannot be read: {error.strerror}{at}") from error


def _hold_out(whole: DataSource | StreamSource, key: str, section: DataSection) -> Data:
    """The last part of the samples, at least one, for validation; the samples before it for training. Of samples that
    come in sequence nothing is held out, which `resolve_with_data` judges."""
    fraction = section.validation_fraction
    if fraction == 0.0 or isinstance(whole, StreamSource):
        return Data(whole, None)
    samples = len(whole)
    held = max(1, round(samples * fraction))
    if held >= samples:
        raise data_error(
            key,
            f"has too few samples ({samples}) to hold out data.validation_fraction = {fraction} of them",
            allowed="at least one sample to train on and one to validate on",
            remedy="give more data, or set data.validation_fraction = 0.0",
        )
    return Data(Slice(whole, 0, samples - held), Slice(whole, samples - held, samples))


# --- a blend


def _section_of(section: DataSection, entry: BlendEntry) -> DataSection:
    """The section as if a part of the blend were all data."""
    return section.model_copy(update={"kind": entry.kind or section.kind, "path": entry.path, "blend": []})


def _read_part(asked: DataRequest, number: int, entry: BlendEntry) -> _Part:
    section = _section_of(asked.section, entry)
    place = DataPath(f"data.blend[{number}].path", entry.path)
    return _Part(entry.title, place, replace(asked, section=section), find_kind(section), entry.steps)


def _open_blend(parts: Sequence[_Part], asked: DataRequest) -> Data:
    """The parts as one source, and what each holds out (or data.validation). Raises UserError with the problems of all
    parts."""
    leaves, found, problems = list[_Part](), list[Data](), list[Problem]()
    # Parts hold nothing out if data.validation names something.
    apart = {"validation": "", **({"validation_fraction": 0.0} if asked.section.validation else {})}
    for part in parts:
        section = part.asked.section.model_copy(update=apart)
        try:
            opened = [replace(leaf, asked=replace(leaf.asked, section=section)) for leaf in part.expand()]
            found += [_open_one(leaf) for leaf in opened]
            leaves += opened
        except UserError as error:
            if not error.problems:
                raise
            problems += error.problems
    check_no_problems("the data", problems)
    trained = [_check_numbered(leaf, data.train) for leaf, data in zip(leaves, found, strict=True)]
    _check_alike(leaves, trained)
    blended = zip(leaves, trained, strict=True)
    train = ConcatSource(tuple(BlendPart(leaf.name, source, leaf.steps) for leaf, source in blended))
    if asked.section.validation:
        return Data(train, _open_validation(train, replace(asked, classes=train.facts.classes)))
    held = [(leaf, data.validation) for leaf, data in zip(leaves, found, strict=True) if data.validation is not None]
    return Data(train, _join_validation([leaf for leaf, _ in held], [each for _, each in held]) if held else None)


def _check_numbered(part: _Part, source: DataSource | StreamSource) -> DataSource:
    """The source of one of several parts. Raises UserError if its samples have no numbers."""
    if isinstance(source, StreamSource):
        what = f'"{part.place.text}" gives its samples in sequence alone, and parts are taken by the numbers of samples'
        raise data_error(part.place.key, what, allowed="samples with numbers", remedy="train on it alone, as data.path")
    return source


def _check_alike(parts: Sequence[_Part], sources: Sequence[DataSource]) -> None:
    """Raise UserError with all parts whose samples cannot stand in a batch with those of the first."""

    def describe(source: DataSource) -> str:
        arrays = source.batch(np.empty(0, np.int64))
        return ", ".join(f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in sorted(arrays.items()))

    problems, first = list[Problem](), describe(sources[0])
    for part, source in zip(parts, sources, strict=True):
        if (found := describe(source)) != first:
            what, allowed = f'"{part.place.text}" has samples of {found}', f'{first}, as those of "{parts[0].name}"'
            problems.append(Problem(part.place.key, what, allowed=allowed))
    check_no_problems("the data", problems)


def _join_validation(parts: Sequence[_Part], sources: Sequence[DataSource | StreamSource]) -> DataSource | StreamSource:
    """What is validated on: all of these, in an order in which the first samples are of all of them."""
    if len(sources) == 1:
        return sources[0]
    pairs = zip(parts, sources, strict=True)
    return Mixed(ConcatSource(tuple(BlendPart(each.name, _check_numbered(each, of), ((0, 1),)) for each, of in pairs)))
