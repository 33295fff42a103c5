"""Opens the sources that the [data] section names.

Invariant: all that is wrong with the data is one UserError here, before any rank starts. Text is prepared here. Ranks
that share a cache folder call `open_data` first on rank 0 and then, after a barrier, on the others, so that the work is
done once (all at once is safe, but each would do it). This module must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from shardway.data.kinds import DataKind
from shardway.data.sources.base import DataPath, DataRequest, DataSource, Slice, Wants, data_error
from shardway.data.sources.tokens import open_tokenizer
from shardway.plugins import GROUPS, load_plugin
from shardway.resolve import DataFacts
from shardway.resolve.draft import takes_of
from shardway.runfile.schema import DataSection, RunFile

T = TypeVar("T")


@dataclass(frozen=True)
class Data:
    """What a run trains and validates on; validation is None if nothing is held out."""

    train: DataSource
    validation: DataSource | None

    @property
    def facts(self) -> DataFacts:
        return DataFacts(len(self.train), self.train.tokens_per_sample, self.train.facts.vocab)


def find_kind(section: DataSection) -> DataKind:
    """The kind of the data."""
    kind: DataKind = load_plugin("data_sources", section.kind)()
    return kind


def are_there(values: RunFile) -> bool:
    """Whether anything exists at the paths of a run file's data."""
    return find_kind(values.data).exists(values.data)


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
    if section.kind != "text":
        raise data_error(
            "data.path",
            f'"{section.path}" is not there, so its vocabulary is not known',
            remedy="set model.vocab to a number of tokens",
        )
    return (section.seq_len,), 256 if section.tokenizer == "bytes" else open_tokenizer(section.tokenizer).vocab


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
    samples of data.path (of windows that share one token with the training part).

    Raises UserError for anything wrong with the data, JobError if the cache has no space.
    """
    asked, kind = DataRequest(section, seed, wants, vocab, classes), find_kind(section)
    if wants not in kind.gives:
        fitting = (name for name in GROUPS["data_sources"].own if wants in load_plugin("data_sources", name).gives)
        raise data_error(
            "data.kind",
            f'"{section.kind}" gives {kind.gives[0]}, but the model takes {wants}',
            allowed=", ".join(fitting),
        )
    place = DataPath("data.path", section.path)
    if not kind.reads_files():
        if section.validation:
            raise data_error(
                "data.validation",
                f'"{section.validation}" cannot go with data.kind = "{section.kind}", which reads no files',
                remedy="leave it out; data.validation_fraction of the samples is held out",
            )
        return _hold_out(kind.open(place, asked), "data.samples", section)
    train = _open(kind.open, place, asked)
    asked = replace(asked, classes=train.facts.classes)
    validation: DataSource | None
    if section.validation:
        validation = _open(kind.open_validation, DataPath("data.validation", section.validation), asked)
    else:
        validation = _open(kind.open_held_out, place, asked)
    if validation is None:
        return _hold_out(train, place.key, section)
    if train.facts.sample_shape != validation.facts.sample_shape:
        raise data_error(
            "data.validation",
            f"has samples of shape {list(validation.facts.sample_shape)}",
            allowed=f"{list(train.facts.sample_shape)}, the shape of the training samples",
        )
    return Data(train, validation)


def _open(opener: Callable[[DataPath, DataRequest], T], place: DataPath, asked: DataRequest) -> T:
    try:
        return opener(place, asked)
    except OSError as error:
        at = f' at "{error.filename}"' if error.filename else ""
        raise place.error(f"cannot be read: {error.strerror}{at}") from error


def _hold_out(whole: DataSource, key: str, section: DataSection) -> Data:
    """The last part of the samples, at least one, for validation; the samples before it for training."""
    fraction = section.validation_fraction
    if fraction == 0.0:
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
