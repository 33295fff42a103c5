"""Models known by their units: sums, files, and networks that are computed from their sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from saved_per_sample import saved_bytes_per_sample
from shardway.errors import UserError
from shardway.plan.shapes import (
    Measured,
    Unit,
    convnet,
    measured_from_json,
    perceptron,
    read_measured,
    residual_network,
)

BLOCK = Unit(name="blocks.0", count=3, parameters=10, forward_flops=40.0, saved_bytes=100.0, fixed_bytes=20.0)
HEAD = Unit(name="head", parameters=7, forward_flops=14.5, saved_bytes=8.0)
MODEL = Measured(name="net", units=(BLOCK, HEAD), source="computed")


def test_a_model_is_the_sum_of_its_units() -> None:
    assert MODEL.parameters == 37
    assert MODEL.forward_flops_per_sample == 134.5
    assert MODEL.flops_per_sample == 403.5
    assert saved_bytes_per_sample(MODEL) == 308


def test_kept_bytes_follow_the_format_but_for_masks_and_indices() -> None:
    assert saved_bytes_per_sample(MODEL, 4) == 308
    assert saved_bytes_per_sample(MODEL, 2) == 3 * (20 + 40) + 4
    assert saved_bytes_per_sample(Measured(name="half", units=(BLOCK,), value_bytes=2), 4) == 3 * (20 + 160)


def test_what_cannot_be_is_told_at_once() -> None:
    unit = Unit(name="u", count=0, parameters=-1, forward_flops=float("nan"), saved_bytes=1.0, fixed_bytes=2.0)
    with pytest.raises(UserError) as told:
        Measured(name="net", units=(unit,), value_bytes=3)
    message = str(told.value)
    assert message.startswith("5 problems in the model net\n")
    for line in (
        "value_bytes: 3 is the size of no number",
        "u: count: 0 cannot be",
        "u: parameters: -1 cannot be",
        "u: forward_flops: nan cannot be",
        "u: fixed_bytes: 2 is more than saved_bytes, 1",
    ):
        assert line in message
    with pytest.raises(UserError, match="units: there is none"):
        Measured(name="net", units=())


# --- files


def test_a_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text(MODEL.to_json())
    assert read_measured(path) == MODEL
    assert measured_from_json(MODEL.to_json()) == MODEL


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"format": 2}, ["format: 2 is not a format that is known"]),
        ({"name": None, "units": {}}, ["name: None cannot be", "units: {} cannot be"]),
        ({"units": [3]}, ["units[0].name: is missing", "units[0].forward_flops: is missing"]),
        (
            {"units": [{**json.loads(MODEL.to_json())["units"][1], "count": 1.5, "flops": 3}]},
            ["units[0].count: 1.5 cannot be\n      allowed: an integer", "units[0].flops: is not known"],
        ),
        ({"value_bytes": 5}, ["value_bytes: 5 is the size of no number"]),
    ],
)
def test_a_wrong_file_is_told(change: dict[str, Any], lines: list[str]) -> None:
    text = json.dumps({**json.loads(MODEL.to_json()), **change})
    with pytest.raises(UserError) as told:
        measured_from_json(text, "net.json")
    assert all(line in str(told.value) for line in lines), str(told.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the shape file .*gone.json cannot be read"):
        read_measured(tmp_path / "gone.json")
    for text in ("{", "[" * 9999):
        with pytest.raises(UserError, match="is no JSON"):
            measured_from_json(text)
    with pytest.raises(UserError, match="format: None is not a format that is known"):
        measured_from_json("[]")


# --- networks from their sizes


def test_a_convnet_in_numbers() -> None:
    """One block of 8 channels on images of 1 x 6 x 4, and 10 classes."""
    model = convnet((1, 6, 4), [8], 10)
    block, head = model.units
    assert block.parameters == 25 * 8 + 16
    assert block.forward_flops == 2 * 24 * 25 * 8
    assert block.fixed_bytes == 8 * 8 * 6
    assert block.saved_bytes == 4 * (24 + 2 * 24 * 8) + block.fixed_bytes
    assert (head.parameters, head.forward_flops, head.saved_bytes) == (490, 2 * 48 * 10, 4 * 48)


def test_a_perceptron_in_numbers() -> None:
    model = perceptron(6, [5], 2)
    assert model.parameters == 7 * 5 + 6 * 2
    assert model.forward_flops_per_sample == 2 * (30 + 10)
    assert saved_bytes_per_sample(model) == 4 * (6 + 5)
    assert saved_bytes_per_sample(perceptron(6, [5], 2, dropout=True)) == 4 * (6 + 10) + 5
    assert saved_bytes_per_sample(perceptron(6, [], 2)) == 4 * 6


def test_a_residual_network_needs_images_that_are_large_enough() -> None:
    with pytest.raises(UserError, match=r"image_size: net halves images of 3 x 7 x 9 to nothing\n.*at least 8"):
        residual_network("net", (1, 1), (8, 16), basic=True, image=(3, 7, 9))
    with pytest.raises(ValueError, match="longer"):
        residual_network("net", (1,), (8, 16), basic=True)


def test_layers_alike_are_one_unit() -> None:
    model = residual_network("net", (3, 1), (64, 128), basic=True)
    assert [(unit.name, unit.count) for unit in model.units] == [
        ("stem", 1),
        ("stage 1, first layer", 1),
        ("stage 1, other layers", 2),
        ("stage 2, first layer", 1),
        ("head", 1),
    ]
