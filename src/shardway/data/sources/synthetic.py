"""Synthetic data that can be learnt, without storage.

Invariant: each sample is a pure function of (seed, id) by splitmix64, the same on every machine. This module must
not read files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardway.data.content import data_error, fingerprint
from shardway.data.order import SampleOrder, Words, derive_keys
from shardway.data.sources.base import Arrays, DataRequest, Ids, SourceFacts

NOISE = 0.1
"""Fraction of the tokens that are drawn at random instead of following the successor table."""


@dataclass(frozen=True, eq=False)
class SyntheticTokens:
    """Each token is followed by its successor in one random cycle of the vocabulary, with probability 1 - NOISE.

    A model that has learnt the table reaches a loss of about NOISE ln V plus the entropy of the noise itself.
    """

    samples: int
    seed: int
    seq_len: int
    cycle: npt.NDArray[np.int64]
    facts: SourceFacts

    def __len__(self) -> int:
        return self.samples

    @property
    def tokens_per_sample(self) -> int:
        return self.seq_len

    def batch(self, ids: Ids) -> Arrays:
        drawn = _draw(self.seed, ids, self.seq_len + 1)
        columns = np.arange(self.seq_len + 1)
        jumps = _as_unit(drawn) < NOISE
        jumps[:, 0] = True
        # The place in the cycle is that of the last jump plus the steps since, without a loop over the sequence.
        last = np.maximum.accumulate(np.where(jumps, columns, 0), axis=1)
        places = (drawn & np.uint64(0xFFFFFFFF)).astype(np.int64) % len(self.cycle)
        starts = np.take_along_axis(places, last, axis=1)
        tokens = self.cycle[(starts + columns - last) % len(self.cycle)]
        return {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}


@dataclass(frozen=True, eq=False)
class SyntheticImages:
    """Images of uniform noise in [-1, 1] around a fixed random pattern in [-1, 1] for each class."""

    samples: int
    seed: int
    patterns: npt.NDArray[np.float32]
    facts: SourceFacts

    def __len__(self) -> int:
        return self.samples

    @property
    def tokens_per_sample(self) -> int:
        return 1

    def batch(self, ids: Ids) -> Arrays:
        shape = self.patterns.shape[1:]
        drawn = _draw(self.seed, ids, 1 + math.prod(shape))
        labels = (drawn[:, 0] % np.uint64(len(self.patterns))).astype(np.int64)
        noise = _as_unit(drawn[:, 1:]).reshape(len(ids), *shape) * 2.0 - 1.0
        return {"inputs": self.patterns[labels] + noise.astype(np.float32), "targets": labels}


def open_synthetic(asked: DataRequest) -> SyntheticTokens | SyntheticImages:
    """data.samples synthetic samples of the kind that the model takes."""
    section, seed, samples = asked.section, asked.seed, asked.section.samples
    if asked.wants == "tokens":
        seq_len, vocab = section.seq_len, asked.vocab
        if vocab is None:
            what = '"synthetic" has no vocabulary of its own'
            raise data_error("data.kind", what, remedy="set model.vocab to a number of tokens")
        facts = SourceFacts(
            description=f"{samples} made-up samples of {seq_len} tokens, vocabulary {vocab}",
            fingerprint=fingerprint("synthetic tokens", seed, samples, seq_len, vocab),
            sample_shape=(seq_len,),
            vocab=vocab,
        )
        return SyntheticTokens(samples, seed, seq_len, SampleOrder(vocab, seed).ids(np.arange(vocab)), facts)
    shape, classes = tuple(section.shape), asked.classes
    if classes is None:
        raise data_error("data.kind", '"synthetic" has no classes of its own', remedy="set model.classes")
    facts = SourceFacts(
        description=f"{samples} made-up images of shape {list(shape)}, {classes} classes",
        fingerprint=fingerprint("synthetic images", seed, samples, shape, classes),
        sample_shape=shape,
        classes=classes,
    )
    # Patterns take the ids just below zero, which no sample has.
    drawn = _draw(seed, -1 - np.arange(classes), math.prod(shape))
    patterns = (_as_unit(drawn) * 2.0 - 1.0).astype(np.float32).reshape(classes, *shape)
    return SyntheticImages(samples, seed, patterns, facts)


def _draw(seed: int, ids: Ids, count: int) -> Words:
    keys = derive_keys(np.array([seed], np.uint64), ids)
    return derive_keys(keys[:, None], np.arange(count)[None, :])


def _as_unit(words: Words) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) from the upper 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
