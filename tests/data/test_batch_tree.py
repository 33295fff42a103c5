"""Batches of any structure: their rows, how they are cut, and what moves to a device."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from shardway.data.batch_tree import FieldList, count_rows, cut_rows, fill_empty, is_pair, map_tensors, move_batch
from shardway.errors import UserError

ROWS = 8
X = torch.arange(ROWS)
NAMES = [f"sample {index}" for index in range(ROWS)]
BOXES = [torch.full((1 + index % 3, 4), index) for index in range(ROWS)]


class Pair(NamedTuple):
    x: Any
    names: Any


@dataclass(frozen=True)
class Sheet:
    """A batch that is a dataclass."""

    x: Any
    names: Any
    scale: float = 2.0


class Graph:
    """As a batch of PyTorch Geometric: it moves to a device and is no tree."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(str(device))


def of(tree: Any, path: Callable[[Any], Any], start: int, end: int) -> Any:
    """A part of the rows `start` to `end`."""
    return path(cut_rows(tree, ROWS, start, end))


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"x": X, "names": NAMES}, lambda b: b["names"]),
        ((X, NAMES), lambda b: b[1]),
        ((NAMES, X), lambda b: b[0]),
        ([X, tuple(NAMES)], lambda b: list(b[1])),
        (Pair(X, NAMES), lambda b: b.names),
        (Sheet(X, NAMES), lambda b: b.names),
        (UserDict({"x": X, "names": NAMES}), lambda b: b["names"]),
        (OrderedDict(x=X, deep={"names": [NAMES, X]}), lambda b: b["deep"]["names"][0]),
        ({"x": X, "names": np.array(NAMES)}, lambda b: b["names"].tolist()),
        ({"x": X, "names": np.array(NAMES, object)}, lambda b: b["names"].tolist()),
        (FieldList([X, NAMES]), lambda b: b[1]),
        (NAMES, lambda b: b),
        (tuple(NAMES), list),
        ({"x": X, "meta": [{"name": name, "other": None} for name in NAMES]}, lambda b: [m["name"] for m in b["meta"]]),
        ({"x": X, "names": [(name, index) for index, name in enumerate(NAMES)]}, lambda b: [m[0] for m in b["names"]]),
    ],
)
def test_strings_are_cut_as_the_tensors_beside_them(batch: Any, path: Callable[[Any], Any]) -> None:
    assert of(batch, path, 2, 5) == NAMES[2:5]
    assert of(batch, path, 0, 1) == NAMES[:1]
    assert type(cut_rows(batch, ROWS, 2, 5)) is type(batch) or isinstance(batch, FieldList)


def test_every_kind_of_field_is_cut() -> None:
    batch = {
        "boxes": BOXES,
        "targets": [{"boxes": boxes, "id": index} for index, boxes in enumerate(BOXES)],
        "missing": [None if index % 2 else index for index in range(ROWS)],
        "array": np.arange(ROWS) * 10,
        "deep": ({"x": X}, [X.float(), X.double()]),
        "bool": X > 3,
        "sparse": torch.eye(ROWS).to_sparse(),
    }
    part = cut_rows(batch, ROWS, 3, 6)
    assert [int(boxes[0, 0]) for boxes in part["boxes"]] == [3, 4, 5]
    assert [target["id"] for target in part["targets"]] == [3, 4, 5]
    assert part["missing"] == [None, 4, None]
    assert part["array"].tolist() == [30, 40, 50]
    assert part["deep"][0]["x"].tolist() == part["deep"][1][0].tolist() == [3, 4, 5]
    assert part["bool"].tolist() == [False, True, True]
    assert part["sparse"].to_dense().argmax(1).tolist() == [3, 4, 5]


def test_what_belongs_to_all_rows_is_in_every_part() -> None:
    shared = {"none": None, "name": "imagenet", "rate": 0.5, "scalar": torch.tensor(3.0), "size": torch.Size([8, 4])}
    names = {"classes": ["cat", "dog"], "empty": [], "kind": torch.float32, "np": np.float32(1.0)}
    part = cut_rows({"x": X, **shared, **names}, ROWS, 0, 2)
    assert {name: part[name] for name in (*shared, *names)} == {**shared, **names}


def test_a_packed_sequence_is_cut_by_its_sequences() -> None:
    sequences = [torch.arange(1 + index % 4) + 10 * index for index in range(ROWS)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    part = cut_rows((packed, X), ROWS, 2, 5)
    assert isinstance(part[0], PackedSequence)
    padded, lengths = pad_packed_sequence(part[0], batch_first=True)
    assert [padded[i, : lengths[i]].tolist() for i in range(3)] == [each.tolist() for each in sequences[2:5]]


def test_a_nested_tensor_is_cut() -> None:
    nested = torch.nested.nested_tensor([torch.arange(1 + i) for i in range(ROWS)], layout=torch.jagged)
    part = cut_rows({"x": nested, "y": X}, ROWS, 2, 4)
    assert [each.tolist() for each in part["x"].unbind()] == [[0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("batch", "first_line"),
    [
        ({"x": X, "mask": torch.ones(3, 8)}, 'batch["mask"] has the shape [3, 8] in a batch of 8 samples'),
        ((X, {"deep": [torch.ones(7)]}), 'batch[1]["deep"][0] has the shape [7] in a batch of 8 samples'),
        (Sheet(torch.ones(5, 8), None), "batch.x has the shape [5, 8] in a batch of 8 samples"),
        ({"x": X, "weights": np.ones(3)}, 'batch["weights"] has the shape [3] in a batch of 8 samples'),
        ({"x": X, "graph": Graph()}, 'batch["graph"] is of the type Graph in a batch of 8 samples'),
        ({"x": X, "names": set(NAMES)}, 'batch["names"] is of the type set in a batch of 8 samples'),
        (Graph(), "batch is of the type Graph in a batch of 8 samples"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, first_line: str) -> None:
    with pytest.raises(UserError) as failure:
        cut_rows(batch, ROWS, 0, 4)
    lines = str(failure.value).splitlines()
    assert lines[0] == f"{first_line}, and it cannot be cut into micro-batches with the other fields."
    assert "collate_fn" in lines[2]
    assert "train.micro_batch" in lines[2]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_that_may_be_of_samples_or_of_fields_is_refused(kind: Any) -> None:
    """Three images of three channels, or three fields of three samples: nobody can know."""
    images = kind(torch.zeros(3, 4, 4) for _ in range(3))
    with pytest.raises(UserError, match=r'batch\["images"\] is a .* of 3 elements which have 3 rows each'):
        cut_rows({"images": images, "y": torch.arange(3)}, 3, 0, 1)
    fields = FieldList(torch.arange(3) for _ in range(3))
    assert [field.tolist() for field in cut_rows({"a": fields}, 3, 1, 2)["a"]] == [[1], [1], [1]]


def test_a_pair_of_two_samples_stays_a_pair() -> None:
    two = torch.arange(2)
    assert [each.tolist() for each in cut_rows((two, two + 5), 2, 1, 2)] == [[1], [6]]
    assert [each.tolist() for each in cut_rows([two, two + 5], 2, 1, 2)] == [[1], [6]]
    assert is_pair((two, two), 2)
    assert is_pair([two, ["a", "b"]], 2)
    assert is_pair((Graph(), X), ROWS)
    assert not is_pair(["first sample", "second sample"], 2)
    assert not is_pair([{"boxes": torch.ones(5, 4)}, {"boxes": torch.ones(6, 4)}], 2)
    assert not is_pair({"a": two, "b": two}, 2)


@pytest.mark.parametrize(
    ("batch", "known", "rows"),
    [
        ({"x": X}, ROWS, ROWS),
        ({"x": X, "weights": torch.ones(3)}, ROWS, ROWS),
        ({"x": X[:6], "y": X[:6]}, ROWS, 6),  # a collate function has left two samples out
        ({"x": X[:6], "names": NAMES[:6]}, ROWS, 6),
        ({"weights": torch.ones(3), "names": NAMES}, ROWS, ROWS),  # of classes
        ({"x": torch.ones(5, ROWS, 2)}, ROWS, ROWS),  # time comes first
        ({"views": torch.ones(2 * ROWS, 3)}, ROWS, ROWS),
        ({"names": NAMES}, ROWS, ROWS),
        ({"boxes": BOXES, "names": NAMES}, ROWS, ROWS),
        (Graph(), ROWS, ROWS),
        ({"x": X[:1]}, 0, 0),
    ],
)
def test_rows_are_what_the_loader_says_unless_the_tensors_have_fewer(batch: Any, known: int, rows: int) -> None:
    assert count_rows(batch, known) == rows


def test_trees_move_as_what_they_are() -> None:
    meta = torch.device("meta")
    batch = Sheet(Pair(X, NAMES), UserDict({"graph": Graph(), "array": np.ones(2)}))
    moved = move_batch(batch, meta)
    assert isinstance(moved, Sheet)
    assert isinstance(moved.x, Pair)
    assert isinstance(moved.names, UserDict)
    assert moved.x.x.device == meta
    assert moved.names["graph"].device == "meta"
    assert batch.x.x.device.type == batch.names["graph"].device == "cpu"
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert move_batch({"x": packed}, meta)["x"].data.device == meta


def test_a_batch_without_rows_gets_one() -> None:
    filled = fill_empty((torch.ones(0, 3), {"n": torch.tensor(2), "y": torch.ones(0, dtype=torch.int64)}, "x"))
    assert filled[0].tolist() == [[0.0, 0.0, 0.0]]
    assert (filled[1]["n"].item(), filled[1]["y"].tolist(), filled[2]) == (2, [0], "x")


def test_mappings_that_refuse_to_be_updated_are_mapped() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    found = map_tensors(lambda tensor: tensor + 1, outputs.CausalLMOutput(logits=torch.zeros(2)))
    assert found.logits.tolist() == found["logits"].tolist() == [1.0, 1.0]
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": torch.zeros(ROWS, 3), "text": NAMES})
    part = cut_rows(encoding, ROWS, 1, 3)
    assert (type(part), part["text"], part["input_ids"].shape) == (type(encoding), NAMES[1:3], (2, 3))
