"""`shardway checkpoint inspect` and `diff`: what they print, their exit codes, what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from command_line import TINY, Shardway, write_text

RUN = (*TINY, "checkpoint.every=1 steps", "optim.schedule=constant", "model.vocab=256")


@pytest.fixture(name="trained")
def _trained(shardway: Shardway, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    write_text(tmp_path)
    assert shardway("train", *RUN, "--dir", "a").code == 0
    return tmp_path / "a"


def test_inspect_lists_every_tensor_and_its_bytes(shardway: Shardway, trained: Path) -> None:
    ended = shardway("checkpoint", "inspect", "a", "--json")
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(ended.out)
    assert (found["step"], found["world"], found["numbers"]["position"]) == (2, 1, 4)
    assert found["bytes"] == sum(found["files"].values()) > sum(part["bytes"] for part in found["parts"].values())
    assert list(found["parts"]) == ["model", "optimizer", "random"]
    tensors = {each["name"]: each for each in found["tensors"]}
    assert list(tensors) == sorted(tensors)
    assert all(each["bytes"] == 4 * math.prod(each["shape"]) for each in tensors.values() if each["dtype"] == "float32")
    embedding = next(name for name in tensors if name.startswith("model.") and "embedding" in name)
    assert (tensors[embedding]["shape"], tensors[embedding]["bytes"]) == ([256, 16], 256 * 16 * 4)
    ended = shardway("checkpoint", "inspect", "a/checkpoints/step-000000001")
    lines = ended.out.splitlines()
    assert lines[:2] == ["a/checkpoints/step-000000001", lines[1]]
    assert lines[1].startswith("step 1, saved by 1 rank; samples 2, targets 16, position 2, data ")
    assert f"  {embedding}" in ended.out
    assert "float32    16.0 KiB  256 x 16" in ended.out or "float32      16 KiB  256 x 16" in ended.out
    assert shardway("checkpoint", "inspect", "a", "--step", "1", "--head").out.splitlines() == lines[:5]


def test_diff_says_what_differs_and_by_how_much(shardway: Shardway, trained: Path) -> None:
    ended = shardway("checkpoint", "diff", "a", "a/checkpoints/step-000000002")
    assert (ended.code, ended.out.splitlines()[-1][:14]) == (0, "equal: every b")
    ended = shardway("checkpoint", "diff", "a", "a", "--step", "1", "--other-step", "2", "--part", "model", "--json")
    found = json.loads(ended.out)
    assert (ended.code, found["equal"], found["files"]) == (1, False, [])
    assert 0 < len(found["tensors"]) <= found["compared"]
    assert {each["name"].partition(".")[0] for each in found["tensors"]} == {"model"}
    values = found["tensors"][0]["values"]
    assert 0 < values["max_absolute"] < 0.1
    assert 0 <= values["same_bits"] < values["elements"]
    ended = shardway("checkpoint", "diff", "a", "a", "--step", "1")
    assert ended.code == 1
    assert " numbers differ, by at most " in ended.out


def test_a_damaged_checkpoint_is_told(shardway: Shardway, trained: Path) -> None:
    folder = trained / "checkpoints/step-000000002"
    shard = folder / "rank-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    ended = shardway("checkpoint", "diff", "a", "a", "--other-step", "1")
    assert (ended.code, ended.out) == (4, "")
    assert ended.err.startswith(
        "shardway: the checkpoint a/checkpoints/step-000000002 is damaged: the content of rank-00000.bin"
    )
    shard.write_bytes(whole[:-1])
    ended = shardway("checkpoint", "inspect", "a")
    assert (ended.code, ended.out) == (4, "")
    assert f"has {len(whole) - 1} bytes, the manifest says {len(whole)}" in ended.err


def test_a_step_that_is_not_there(shardway: Shardway, trained: Path) -> None:
    ended = shardway("checkpoint", "inspect", "a", "--step", "7")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "shardway: a holds no checkpoint of step 7.\n      allowed: 1, 2\n"
    ended = shardway("checkpoint", "diff", "a", "nothing")
    assert (ended.code, ended.err.partition("\n")[0]) == (2, "shardway: nothing holds no checkpoint.")
