"""Documents of tokens in groups of similar length: samples that are rectangles, each of a shape of its own.

Invariants:
- Sample i is group i of `shardway.data.grouping`: a row for each document, in the order of the store, with padding
  behind it up to the longest. What does not count, padding and what the store says, has the target -100.
- No mask is needed: padding stands behind its document, so causal attention never sees it from a token that counts. A
  model without causal attention would see it.
- Groups are computed once for a store, a length and a size, and kept beside the data; a source is pickled without them
  and without tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardway.data.content import DataPath, fingerprint_arrays
from shardway.data.formats.base import Offsets
from shardway.data.formats.token_store import TokenStore
from shardway.data.grouping import GROUPING_VERSION, DocumentGroups, group_documents
from shardway.data.sources.base import Arrays, DataRequest, Ids, SourceFacts
from shardway.data.sources.packed import (
    NOT_COUNTED,
    BinnedDocuments,
    check_samples,
    list_pieces,
    read_documents,
    read_pairs,
    use_bins,
)
from shardway.units import render_count


@dataclass(eq=False)
class GroupedDocuments(BinnedDocuments):
    """Groups of at most `tokens` places: "inputs" and "targets" are arrays of objects [n], one int64 array
    [rows, length] for each group.

    `batch` raises UserError for a token at or above the vocabulary, as `TokenWindows` does.
    """

    tokens: int = 0

    @property
    def tokens_per_sample(self) -> int:
        """The mean number of pairs in a group, rounded: padding is no token, and groups differ."""
        return max(1, round(float(self.bins.pairs.sum()) / max(1, len(self))))

    def find_bins(self, ends: Offsets) -> DocumentGroups:
        return _use_groups(self.store, ends, self.seq_len, self.tokens)

    @property
    def groups(self) -> DocumentGroups:
        """The bins as what they are."""
        return cast(DocumentGroups, self.bins)

    def batch(self, ids: Ids) -> Arrays:
        groups = self.groups
        pieces, rows = list_pieces(groups.firsts, ids)
        starts, pairs = groups.starts[pieces], groups.pairs[pieces].astype(np.int64)
        # All rows of all groups, one after the other, and where each begins.
        lengths = groups.lengths[ids].astype(np.int64)
        widths = np.repeat(lengths, rows)
        begins = np.cumsum(widths) - widths
        read, found, counted = read_pairs(self.store, starts, pairs, self.facts.vocab, self.place)
        places = np.repeat(begins - (np.cumsum(pairs) - pairs), pairs) + np.arange(len(found))
        # One block for both: of several, malloc gives memory back after each batch.
        inputs, targets = flat = np.empty((2, int(widths.sum())), np.int64)
        inputs[:], targets[:] = 0, NOT_COUNTED
        inputs[places], targets[places] = read, found
        if counted is not None:
            targets[places[~counted]] = NOT_COUNTED
        return {name: _split(array, rows, lengths) for name, array in zip(("inputs", "targets"), flat, strict=True)}


def _split(flat: Offsets, rows: Offsets, lengths: Offsets) -> npt.NDArray[Any]:
    """Rectangles of so many rows and such lengths, which stand one after the other in `flat`; views of it."""
    found, begin = np.empty(len(rows), object), 0
    for number, shape in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        end = begin + shape[0] * shape[1]
        found[number] = flat[begin:end].reshape(shape)
        begin = end
    return found


def open_grouped(store: TokenStore, place: DataPath, asked: DataRequest, facts: SourceFacts) -> GroupedDocuments:
    """The groups of a store's documents; the fingerprint combines that of `facts`, the documents and the grouping.

    Raises UserError if the store does not mark documents, if no document has two tokens, or if sampled tokens exceed
    the vocabulary.
    """
    seq_len, tokens = asked.section.seq_len, asked.section.group_tokens
    ends = read_documents(store, place, f"data.group_tokens = {tokens}", "data.group_tokens = 0")
    groups = _use_groups(store, ends, seq_len, tokens)
    check_samples(store, len(groups), place, facts.vocab)
    cuts = f"cuts of longer ones: {render_count(groups.cuts)}" if groups.cuts else "none of them cut"
    complete = replace(
        facts,
        description=f"{facts.description}; {render_count(len(ends))} documents in {render_count(len(groups))} groups "
        f"of at most {tokens} tokens, {100 * groups.padding:.2f} % padding, {cuts}",
        fingerprint=store.make_fingerprint(seq_len, facts.fingerprint, _name_groups(ends, seq_len, tokens)),
    )
    return GroupedDocuments(store, seq_len, place, complete, groups, tokens)


# --- the groups of a store, kept


def _use_groups(store: TokenStore, ends: Offsets, seq_len: int, tokens: int) -> DocumentGroups:
    name = _name_groups(ends, seq_len, tokens)
    return DocumentGroups(*use_bins(store, name, lambda: group_documents(ends, seq_len, tokens)))


def _name_groups(ends: Offsets, seq_len: int, tokens: int) -> str:
    return f"groups-{seq_len}-{tokens}-{fingerprint_arrays([ends], GROUPING_VERSION)[:16]}"
