"""What is sent, and when: prompts of random ids or words, their lengths, and the times of their arrival.

Invariants: everything follows from the seed; nothing is read from a disk or a hub; no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LEAST_VOCABULARY = 10_000
"""Ids of prompts are below this where a model's vocabulary is unknown, as in SGLang's one_batch."""

_SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "ki", "lo", "mu", "na", "po", "ri", "sa", "to", "ve", "zu")


def draw_lengths(count: int, length: int, range_ratio: float, seed: int) -> list[int]:
    """Lengths in tokens, uniform from `range_ratio` * length to length (1: all alike), as in SGLang's random data."""
    low = max(1, math.floor(length * range_ratio))
    return np.random.default_rng((seed, 1)).integers(low, length + 1, count).tolist()


def draw_prompts(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of independent ids, uniform in the vocabulary: no two begin alike, so no prefix cache helps."""
    source = np.random.default_rng((seed, 2))
    return [source.integers(0, vocabulary, length).tolist() for length in lengths]


def draw_words(lengths: Sequence[int], seed: int) -> list[str]:
    """Prompts of so many made-up words, for a server that takes only text. Their tokens are counted by the server."""
    source = np.random.default_rng((seed, 3))
    texts = []
    for length in lengths:
        pairs = source.integers(0, len(_SYLLABLES), (length, 2))
        texts.append(" ".join(_SYLLABLES[first] + _SYLLABLES[second] for first, second in pairs))
    return texts


def draw_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are due, the first at 0. The gaps are drawn from a gamma distribution
    of mean 1 / rate and shape `burstiness`: 1 is a Poisson process, less is burstier, more is more even (vLLM's
    --burstiness). An infinite rate: all at once."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng((seed, 4)).gamma(burstiness, 1 / (rate * burstiness), count)
    gaps[:1] = 0.0
    return np.cumsum(gaps).tolist()
