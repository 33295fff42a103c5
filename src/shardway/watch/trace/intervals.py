"""Sets of time as sorted intervals that do not overlap.

Invariants: an interval is [start, end), a set is an array of shape (n, 2), sorted, its intervals apart and none empty.
Time that two events share counts once.
"""

from __future__ import annotations

import numpy as np


def unite(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The union of intervals in any order."""
    some = end > start
    start, end = start[some], end[some]
    if not len(start):
        return np.empty((0, 2))
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    begins = np.empty(len(start), dtype=bool)
    begins[0] = True
    np.greater(start[1:], reach[:-1], out=begins[1:])
    first = np.flatnonzero(begins)
    last = np.append(first[1:] - 1, len(start) - 1)
    return np.column_stack((start[first], reach[last]))


def join(*sets: np.ndarray) -> np.ndarray:
    """The union of sets."""
    parts = [each for each in sets if len(each)]
    return unite(*np.concatenate(parts).T) if parts else np.empty((0, 2))


def invert(times: np.ndarray, low: float, high: float) -> np.ndarray:
    """The time of [low, high) that the set lacks."""
    inside = clip(times, low, high)
    edges = np.concatenate(([low], inside.ravel(), [high])).reshape(-1, 2)
    return np.asarray(edges[edges[:, 1] > edges[:, 0]])


def clip(times: np.ndarray, low: float, high: float) -> np.ndarray:
    """The part of the set within [low, high)."""
    cut = np.clip(times, low, high)
    return np.asarray(cut[cut[:, 1] > cut[:, 0]])


def remove(times: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """What is in the first set and not in the second."""
    if not len(times) or not len(taken):
        return times
    return intersect(times, invert(taken, float(times[0, 0]), float(times[-1, 1])))


def intersect(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """What is in both sets."""
    if not len(one) or not len(other):
        return np.empty((0, 2))
    first = np.searchsorted(other[:, 1], one[:, 0], side="right")
    last = np.searchsorted(other[:, 0], one[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(one)), counts)
    theirs = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    start, end = np.maximum(one[mine, 0], other[theirs, 0]), np.minimum(one[mine, 1], other[theirs, 1])
    some = end > start
    return np.column_stack((start[some], end[some]))


def measure(times: np.ndarray) -> float:
    """How long it is."""
    return float((times[:, 1] - times[:, 0]).sum())


def measure_within(times: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """How much of the set lies in each of many intervals."""
    if not len(times):
        return np.zeros(len(low))
    edges = times.ravel()
    lengths = np.zeros(len(edges))
    lengths[1::2] = times[:, 1] - times[:, 0]
    upto = np.cumsum(lengths)
    return np.asarray(np.interp(high, edges, upto) - np.interp(low, edges, upto))
