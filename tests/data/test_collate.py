"""Samples joined to a batch: as torch joins them, None besides, and one sentence where they cannot be joined."""

from __future__ import annotations

import datetime
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from shardway.data.batch_tree import (
    FieldList,
    FieldTuple,
    SampleList,
    SampleTuple,
    collate_by,
    collate_samples,
    cut_rows,
    is_pair,
)
from shardway.errors import UserError


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Example:
    x: Any
    name: str


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.full((3,), i),
        lambda i: (torch.full((3,), i), i, float(i), f"name {i}"),
        lambda i: {"x": np.full((2, 2), i, np.float32), "deep": {"y": [i, i + 1]}, "flag": i > 1},
        lambda i: Point(i, (torch.ones(1), b"bytes")),
        lambda i: OrderedDict(x=np.float64(i), y=np.array(i)),
    ],
)
def test_what_torch_joins_is_joined_alike(make: Any) -> None:
    samples = [make(index) for index in range(4)]
    found, expected = collate_samples(samples), default_collate(samples)
    assert type(found) is type(expected) or isinstance(found, FieldList)
    pairs = list(zip(tree_leaves(_plain(found)), tree_leaves(_plain(expected)), strict=True))
    assert pairs
    for a, b in pairs:
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _plain(value) for name, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, list | tuple) else tree


def test_none_stays_none() -> None:
    assert collate_samples([{"x": 1, "mask": None}, {"x": 2, "mask": None}])["mask"] is None
    assert collate_samples([None, None]) is None
    assert collate_samples([(1, None), (2, "b")])[1] == [None, "b"]
    mixed = collate_samples([{"m": torch.ones(2)}, {"m": None}])["m"]
    assert (len(mixed), mixed[1]) == (2, None)


def test_a_dataclass_is_a_batch_of_its_fields() -> None:
    batch = collate_samples([Example(torch.ones(2), "a"), Example(torch.zeros(2), "b")])
    assert isinstance(batch, Example)
    assert (batch.x.shape, batch.name) == ((2, 2), ["a", "b"])


def test_lists_of_samples_and_of_fields_are_told_apart() -> None:
    """Three images of three channels; three fields of three samples; both in one batch."""
    samples = [(torch.full((3, 2), index), torch.full((2,), index)) for index in range(3)]

    def collate(samples: list[Any]) -> Any:
        images, fields = zip(*samples, strict=True)
        stacked = torch.stack(fields)
        return {"images": images, "list": list(images), "fields": [stacked, stacked, stacked], "same": (stacked,) * 3}

    batch = collate_by(collate, samples)
    assert [type(part) for part in batch.values()] == [SampleTuple, SampleList, FieldList, FieldTuple]
    part = cut_rows(batch, 3, 1, 2)
    assert [int(each[0, 0]) for each in (*part["images"], *part["list"])] == [1, 1]
    assert [each.tolist() for each in (*part["fields"], *part["same"])] == [[[1, 1]]] * 6
    two = collate_by(list, [torch.ones(2), torch.zeros(2)])
    assert not is_pair(two, 2)
    assert is_pair(collate_by(lambda samples: [torch.stack(samples)] * 2, [torch.ones(2), torch.zeros(2)]), 2)
    assert type(collate_by(lambda samples: {"x": [torch.ones(4)] * 4}, samples)["x"]) is list


@pytest.mark.parametrize(
    ("samples", "first_line"),
    [
        (
            [torch.arange(3 + i) for i in range(6)],
            "sample has different shapes in the samples of one batch, so they cannot be stacked: [3], [4], [5], [6] "
            "and others.",
        ),
        (
            [{"x": (1, np.ones((2, 3 + i)))} for i in range(2)],
            'sample["x"][1] has different shapes in the samples of one batch, so they cannot be stacked: [2, 3], '
            "[2, 4].",
        ),
        ([[1, 2], [1]], "sample is a list of a different length in each sample: 1, 2."),
        ([{"x": 1}, {"x": 1, "y": 2}], "sample has the field 'y' in some samples only."),
        ([Point(1, {1}), Point(1, {2})], "sample.y is of the type set, and values of it cannot be stacked to a batch."),
        (
            [{"when": datetime.date(2026, 1, 1)}] * 2,
            'sample["when"] is of the type date, and values of it cannot be stacked to a batch.',
        ),
    ],
)
def test_what_cannot_be_joined_is_named(samples: list[Any], first_line: str) -> None:
    with pytest.raises(UserError) as failure:
        collate_samples(samples)
    first, second = str(failure.value).splitlines()
    assert first == first_line
    assert second.startswith("  To do: give run.loader (or run.validation) a collate_fn")
