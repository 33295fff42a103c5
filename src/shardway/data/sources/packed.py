"""Documents of tokens in bins: samples that hold several documents, each kept apart from the others.

Invariants:
- Sample i is bin i of `shardway.data.packing`. Its documents follow each other; "positions" begins at 0 with each of
  them, and with the padding at the end, so that it says where a document begins.
- Every token of a document but its first is a target exactly once in an epoch, unless the store says that it does not
  count. What does not count has the target -100.
- Bins are computed once for a store and a length of samples, and kept beside the data; a source is pickled without
  them and without tokens.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath, fingerprint_arrays, sample_blocks
from shardway.data.formats.base import DataFile, Offsets, describe_file
from shardway.data.formats.indexes import IndexArrays, use_index
from shardway.data.formats.token_store import Tokens, TokenStore, check_tokens
from shardway.data.packing import PACKING_VERSION, Bins, pack_documents
from shardway.data.sources.base import Arrays, DataRequest, Hold, Ids, SourceFacts
from shardway.units import render_count

NOT_COUNTED = -100
"""The target of a place that does not count."""
SAMPLED_FILES = 16
"""In so many files of a store some tokens are compared with the vocabulary when it is opened."""


@dataclass(eq=False)
class BinnedDocuments(ABC):
    """What samples of a store's documents have in common, whatever shape bins have."""

    store: TokenStore
    seq_len: int
    place: DataPath
    facts: SourceFacts
    _bins: Bins | None = field(default=None, repr=False)

    @abstractmethod
    def find_bins(self, ends: Offsets) -> Bins:
        """The bins of documents that end at the tokens `ends`."""

    def __len__(self) -> int:
        return len(self.bins)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bins": None}

    @property
    def bins(self) -> Bins:
        """The bins, read or computed at the first use."""
        if self._bins is None:
            ends = self.store.read_ends()
            self._bins = self.find_bins(ends if ends is not None else np.zeros(0, np.int64))
        return self._bins

    def locate(self, number: int) -> str:
        """The tokens of each document in a bin."""
        bins = self.bins
        pieces = range(int(bins.firsts[number]), int(bins.firsts[number + 1]))
        return ", ".join(self.store.locate(int(bins.starts[each]), int(bins.pairs[each]) + 1) for each in pieces)

    def staged(self, hold: Hold) -> Self:
        """The same, read from staged files."""
        return replace(self, store=self.store.staged(hold))


@dataclass(eq=False)
class PackedDocuments(BinnedDocuments):
    """Bins of `seq_len` pairs, int64: inputs, targets and positions [n, L].

    `batch` raises UserError for a token at or above the vocabulary, as `TokenWindows` does.
    """

    @property
    def tokens_per_sample(self) -> int:
        return self.seq_len

    def find_bins(self, ends: Offsets) -> Bins:
        return _use_bins(self.store, ends, self.seq_len)

    def batch(self, ids: Ids) -> Arrays:
        bins, length = self.bins, self.seq_len
        pieces, counts = list_pieces(bins.firsts, ids)
        starts, pairs = bins.starts[pieces], bins.pairs[pieces].astype(np.int64)
        # Where each piece begins in the flat batch.
        before = np.cumsum(pairs) - pairs
        rows = np.repeat(np.arange(len(ids)), counts)
        held = np.bincount(rows, weights=pairs, minlength=len(ids)).astype(np.int64)
        begins = before + np.repeat(np.arange(len(ids)) * length - (np.cumsum(held) - held), counts)
        read, found, counted = read_pairs(self.store, starts, pairs, self.facts.vocab, self.place)

        size = len(ids) * length
        # One block for all three: of several, malloc gives memory back after each batch.
        inputs, targets, positions = flat = np.empty((3, size), np.int64)
        if len(found) == size:
            inputs[:], targets[:] = read, found
        else:
            inputs[:], targets[:] = 0, NOT_COUNTED
            is_held = (np.arange(length) < held[:, None]).ravel()
            inputs[is_held], targets[is_held] = read, found
        if counted is not None:
            places = np.repeat(begins - before, pairs) + np.arange(len(found))
            targets[places[~counted]] = NOT_COUNTED
        # Each piece begins a document, and so does the padding of a bin.
        padding = np.flatnonzero(held < length) * length + held[held < length]
        marks = np.sort(np.concatenate((begins, padding)))
        np.subtract(np.arange(size), np.repeat(marks, np.diff(marks, append=size)), out=positions)
        return dict(zip(("inputs", "targets", "positions"), flat.reshape(3, len(ids), length), strict=True))


def open_packed(store: TokenStore, place: DataPath, asked: DataRequest, facts: SourceFacts) -> PackedDocuments:
    """The bins of a store's documents; the fingerprint combines that of `facts`, the documents and the packing.

    Raises UserError if the store does not mark documents, if no document has two tokens, or if sampled tokens exceed
    the vocabulary.
    """
    seq_len, ends = asked.section.seq_len, read_documents(store, place, "data.pack = true", "data.pack = false")
    bins = _use_bins(store, ends, seq_len)
    check_samples(store, len(bins), place, facts.vocab)
    documents = f"{render_count(len(ends))} documents"
    cuts = f"cuts of longer ones: {render_count(bins.cuts)}" if bins.cuts else "none of them cut"
    complete = replace(
        facts,
        description=f"{facts.description}; {documents} packed into {render_count(len(bins))} samples of {seq_len}, "
        f"{100 * bins.fill(seq_len):.2f} % full, {cuts}",
        fingerprint=store.make_fingerprint(seq_len, facts.fingerprint, _name_bins(ends, seq_len)),
    )
    return PackedDocuments(store, seq_len, place, complete, bins)


# --- the bins of a store, kept


def _use_bins(store: TokenStore, ends: Offsets, seq_len: int) -> Bins:
    return Bins(*use_bins(store, _name_bins(ends, seq_len), lambda: pack_documents(ends, seq_len)))


def _name_bins(ends: Offsets, seq_len: int) -> str:
    return f"bins-{seq_len}-{fingerprint_arrays([ends], PACKING_VERSION)[:16]}"


# --- what samples of documents have in common


def read_documents(store: TokenStore, place: DataPath, key: str, off: str) -> Offsets:
    """The ends of a store's documents. Raises UserError if the store does not mark them: `key` wants them, and `off`
    does without."""
    ends = store.read_ends()
    if ends is None:
        raise place.error(
            f"does not say where a document ends, and {key} takes whole documents",
            allowed="data with documents, such as text files, JSON lines, Parquet, or Megatron's .bin and .idx",
            remedy=f"set {off}",
        )
    return ends


def check_samples(store: TokenStore, samples: int, place: DataPath, vocab: int | None) -> None:
    """Raise UserError if documents give no sample, or if sampled tokens exceed the vocabulary."""
    if not samples:
        raise place.error("has no document of at least two tokens", remedy="give more data")
    filled = [file for file in store.files if file.tokens]
    for file in filled[:: -(-len(filled) // SAMPLED_FILES)]:
        for block in sample_blocks(file.open()):
            check_tokens(block, vocab, place)


def list_pieces(firsts: Offsets, ids: Ids) -> tuple[Offsets, Offsets]:
    """The pieces of samples, one after the other, and how many each sample has; those of sample i are `firsts[i]` to
    `firsts[i + 1]`."""
    begins = firsts[ids]
    counts = firsts[ids + 1] - begins
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum())), counts


def read_pairs(
    store: TokenStore, starts: Offsets, pairs: Offsets, vocab: int | None, place: DataPath
) -> tuple[Tokens, Tokens, npt.NDArray[np.bool_] | None]:
    """Inputs and targets of pieces, flat, one piece after the other, and whether each target counts (None: all do).
    Raises UserError for a token outside the vocabulary."""
    runs = pairs + 1
    tokens = store.runs(starts, runs)
    check_tokens(tokens, vocab, place)
    ends = np.cumsum(runs)
    is_input = np.ones(len(tokens), np.bool_)
    is_input[ends - 1] = False
    is_target = np.ones(len(tokens), np.bool_)
    is_target[ends - runs] = False
    counted = store.count_runs(starts, runs)
    return tokens[is_input], tokens[is_target], None if counted is None else counted[is_target]


def use_bins(store: TokenStore, name: str, make: Callable[[], Bins]) -> tuple[Offsets, Offsets, Offsets, int]:
    """The fields of the bins of a store: kept beside its files, or in the cache; made now if they are not there."""

    def make_index() -> IndexArrays:
        made = make()
        return {
            "starts": made.starts,
            "pairs": made.pairs.astype(np.int32),
            "firsts": made.firsts,
            "cuts": np.array([made.cuts]),
        }

    root, files = _list_files(store)
    kept = use_index(root, name, files, make_index)
    return kept["starts"], kept["pairs"], kept["firsts"], int(kept["cuts"][0])


def _list_files(store: TokenStore) -> tuple[Path, list[DataFile]]:
    """The folder above all files of a store, and they as they are now."""
    paths = [file.path.absolute() for file in store.files]
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return root, [describe_file(root, path.relative_to(root).as_posix()) for path in paths]
