"""Tensors of every kind are written and come back with their bits, into whatever place they go."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from runs import lone_rank
from shardway.checkpoint.file_format import TABLE, FileChecksum, Manifest, Special, TensorTable, read_table
from shardway.checkpoint.reader import read_tensors
from shardway.checkpoint.state import put_together, take_apart
from shardway.checkpoint.writer import write_tensors
from shardway.errors import Bug

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def saved(folder: Path, state: dict[str, object]) -> tuple[Path, dict[str, FileChecksum], TensorTable]:
    """A state on the disk."""
    seals = write_tensors(folder, lone_rank(), {"model": state})
    return folder, seals, read_table(folder, Manifest(1, 1, {}, seals))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bytes = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


def test_one_number_may_have_any_stride(tmp_path: Path) -> None:
    """It is contiguous for torch, and no view of its bytes."""
    state = {"w": torch.arange(1.0, 8.0)[::7], "v": torch.arange(1.0, 8.0).view(7, 1)[:1]}
    source = saved(tmp_path, dict(state))
    again = {name: torch.zeros(7)[::7].view(tensor.shape) for name, tensor in state.items()}
    assert read_tensors(*source, {"model": again}) == []
    assert all(torch.equal(again[name], state[name]) for name in state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_survive(dtype: torch.dtype, tmp_path: Path) -> None:
    numbers = torch.randn(7, 5, 3).mul(9).to(dtype)
    state = {"whole": numbers, "one": numbers[0, 0, 0], "none": numbers[:0], "turned": numbers.permute(2, 0, 1)}
    source = saved(tmp_path, dict(state))
    again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert read_tensors(*source, {"model": again}) == []
    assert all(same_bits(again[name], state[name]) for name in state)


def test_a_target_may_have_gaps_or_another_format(tmp_path: Path) -> None:
    numbers = torch.arange(24.0).view(4, 6)
    source = saved(tmp_path, {"a": numbers, "b": numbers, "c": numbers})
    gaps, wide, turned = torch.zeros(4, 12)[:, ::2], torch.zeros(4, 6, dtype=torch.float64), torch.zeros(6, 4).T
    assert read_tensors(*source, {"model": {"a": gaps, "b": wide, "c": turned}}) == []
    assert torch.equal(gaps, numbers)
    assert torch.equal(wide, numbers.double())
    assert torch.equal(turned, numbers)


def test_files_hold_no_code(tmp_path: Path) -> None:
    saved(tmp_path, {"w": torch.ones(3), "count": 3, "rate": math.inf, "words": ["a", None, {"b": True}]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.bin", TABLE]
    assert (tmp_path / "rank-00000.bin").read_bytes() == torch.ones(3).numpy().tobytes()
    content = json.loads((tmp_path / TABLE).read_text())
    assert content["tensors"]["model.w"] == {"dtype": "float32", "shape": [3], "chunks": [[0, 0, [0], [3]]]}
    values = {name: json.loads(text) for name, text in content["values"].items()}
    assert values["model.count"] == 3
    assert values["model.rate"] == math.inf


def test_values_that_are_no_tensors_come_back(tmp_path: Path) -> None:
    source = saved(tmp_path, {"w": torch.ones(1), "rate": 0.1, "limit": -math.inf, "name": "ä"})
    again: dict[str, object] = {"w": torch.zeros(1), "rate": 0.0, "limit": 0.0, "name": ""}
    assert read_tensors(*source, {"model": again}) == []
    assert again == {"w": torch.ones(1), "rate": 0.1, "limit": -math.inf, "name": "ä"}


def test_what_json_does_not_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="the state is a complex, which JSON does not keep"):
        saved(tmp_path, {"w": torch.ones(1), "z": 1j})


def test_a_tensor_of_eight_bits_comes_back_in_its_parts(tmp_path: Path) -> None:
    eight = pytest.importorskip("torchao.optim.subclass_8bit")
    state = eight.OptimState8bit.zeros((4, 512), signed=False)
    state.copy_(torch.rand(4, 512))
    source = saved(tmp_path, {"v": state})
    again = eight.OptimState8bit.zeros((4, 512), signed=False)
    assert read_tensors(*source, {"model": {"v": again}}) == []
    assert same_bits(again.codes, state.codes)
    assert same_bits(again.scale, state.scale)
    plain = torch.zeros(4, 512)
    assert read_tensors(*source, {"model": {"v": plain}}) == []
    assert torch.equal(plain, state.dequantize())


def test_a_file_cannot_choose_what_is_imported() -> None:
    with pytest.raises(ValueError, match="a tensor is a system, which this Shardway does not know"):
        put_together(Special("system", [], ()), [])


def test_an_unknown_class_is_not_saved() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(Bug, match="a checkpoint cannot hold a NestedTensor"):
        take_apart(nested)
