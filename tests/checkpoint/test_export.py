"""What is exported is read by `from_pretrained`, appears whole or not at all, and is gathered one weight at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pool import ranks
from runs import lone_rank, pool_ranks
from shardway.checkpoint import export
from shardway.checkpoint.export import save_weights
from shardway.errors import JobError, UserError
from shardway.models.contract import match_modules
from shardway.models.experts import MixtureShape
from shardway.models.huggingface.model import Form, HuggingFaceModel, build_huggingface, form_of
from shardway.models.huggingface.weights import keep_names
from shardway.models.image_models import MLP, MLPShape
from shardway.models.transformer import Transformer, TransformerShape
from shardway.train.loss import token_cross_entropy
from tiny_hf import TOKENS, load_reference, logits_of, save_tiny

FORM = Form({"model_type": "llama"}, keep_names)
TRANSFORMER = TransformerShape(vocab=50, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48)


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(4, 6, generator=torch.Generator().manual_seed(9)) for name in ("a", "b", "c")}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- files


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    folder = save_weights(tensors(), FORM, tmp_path / "out", lone_rank(), dtype=torch.float32)
    assert names_in(folder) == {"config.json", "model.safetensors"}
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors().keys()
    assert all(torch.equal(found[name], value) for name, value in tensors().items())
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama", "dtype": "float32"}


def test_a_large_model_is_cut_into_files_with_an_index(tmp_path: Path) -> None:
    folder = save_weights(tensors(), FORM, tmp_path / "out", lone_rank(), dtype=torch.bfloat16, file_bytes=100)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 3 * 24 * 2}
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], tensors()[name].to(torch.bfloat16))


def test_tokenizer_and_generation_config_go_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "merges.txt", "generation_config.json", "pytorch_model.bin", "README.md"):
        (source / name).write_text(name)
    form = Form({}, keep_names, source)
    folder = save_weights(tensors(), form, tmp_path / "out", lone_rank(), dtype=torch.float32)
    copied = {"tokenizer.json", "merges.txt", "generation_config.json"}
    assert names_in(folder) == {"config.json", "model.safetensors", *copied}
    assert all((folder / name).read_text() == name for name in copied)


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists, and is not overwritten"):
        save_weights(tensors(), FORM, tmp_path / "out", lone_rank(), dtype=torch.float32)
    assert names_in(tmp_path) == {"out"}
    assert names_in(tmp_path / "out") == set()


def test_what_a_killed_export_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "model.safetensors").write_text("half")
    save_weights(tensors(), FORM, tmp_path / "out", lone_rank(), dtype=torch.float32)
    assert names_in(tmp_path) == {"out"}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors().keys()


def full(*_: Any, **__: Any) -> Iterator[Any]:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["_TensorFileWriter._append", "os.fsync", "_write_json", "os.rename"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(f"shardway.checkpoint.export.{step}", full)
    with pytest.raises(JobError, match="No space left on device") as told:
        save_weights(tensors(), FORM, tmp_path / "out", lone_rank(), dtype=torch.float32)
    assert str(told.value).startswith(f"the model could not be written to {tmp_path / 'out'}: ")
    assert names_in(tmp_path) == set()


def test_a_model_of_another_sort_has_no_form() -> None:
    with pytest.raises(UserError, match="a MLP has no form among Hugging Face's decoder-only families"):
        form_of(MLP(MLPShape(4, (4,), 2)), max_positions=1)


# --- ranks


@ranks(2)
def test_one_rank_that_cannot_write_fails_all(rank: int, tmp_path: Path) -> None:
    """The second rank fails at its first weight; both go on gathering, so that neither waits for ever."""
    patch, mesh = pytest.MonkeyPatch(), init_device_mesh("cpu", (2,))
    held = {name: DTensor.from_local(value, mesh) for name, value in tensors().items()}
    if rank == 1:
        held = {"mine": torch.zeros(3), **held}
        patch.setattr(export._TensorFileWriter, "_append", full)
    with pytest.raises(JobError, match="No space left on device"):
        save_weights(held, FORM, tmp_path / "out", pool_ranks(), dtype=torch.float32)
    patch.undo()
    dist.barrier()
    assert names_in(tmp_path) == set()


@ranks(2)
def test_ranks_that_hold_different_weights_each_write_their_own(rank: int, tmp_path: Path) -> None:
    """As the stages of a pipeline do; what both hold is written once."""
    mine = {"shared": torch.full((2, 2), 7.0), f"stage.{rank}": torch.full((3,), float(rank))}
    folder = save_weights(mine, FORM, tmp_path / "out", pool_ranks(), dtype=torch.float32)
    placed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert placed == {
        "shared": "model-00001-of-00002.safetensors",
        "stage.0": "model-00001-of-00002.safetensors",
        "stage.1": "model-00002-of-00002.safetensors",
    }
    assert load_file(folder / placed["stage.1"])["stage.1"].tolist() == [1.0, 1.0, 1.0]


# --- with the library


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for _, block in match_modules(model, model.plan().blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model: nn.Module, steps: int, tokens: torch.Tensor = TOKENS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        output = model(tokens[:, :-1])
        loss = token_cross_entropy(getattr(output, "logits", output), tokens[:, 1:])
        (loss.total / (len(tokens) * 15)).backward()
        optimizer.step()
        optimizer.zero_grad()


def build(folder: Path) -> HuggingFaceModel:
    return build_huggingface(folder, vocab=50, seq_len=16)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
@ranks(2)
def test_a_model_comes_in_is_trained_in_shards_and_goes_out(rank: int, family: str, tmp_path: Path) -> None:
    """The library, trained alone on the samples of both ranks, ends with the same weights. Rank 0 alone imports it,
    which takes seconds."""
    written = tmp_path / "model"
    before = []
    if rank == 0:
        save_tiny(written, family, file_size="20KB", pad_token_id=None)
        before.append(logits_of(written))
    dist.barrier()
    model = build(written)
    shard(model)
    model.to_empty(device="cpu")
    model.init_weights(0)
    with torch.no_grad():
        loaded = model.eval()(TOKENS)
    for each in before:
        torch.testing.assert_close(loaded, each, rtol=0, atol=2e-6)
    model.reshard()  # a forward pass alone leaves weights gathered
    train(model.train(), 5, TOKENS[rank : rank + 1])
    state = dict(model.named_parameters())
    folder = save_weights(
        state, form_of(model, max_positions=16), tmp_path / "out", pool_ranks(), dtype=torch.float32, file_bytes=30_000
    )
    with torch.no_grad():
        logits = model(TOKENS)
    for each in before:
        reference = load_reference(written)
        train(reference, 5)
        with torch.no_grad():
            torch.testing.assert_close(logits_of(folder), logits, rtol=0, atol=2e-6)
            torch.testing.assert_close(logits, reference(TOKENS).logits, rtol=1e-4, atol=1e-4)
        assert (logits - each).abs().max() > 0.1
    assert (folder / "generation_config.json").read_text() == (written / "generation_config.json").read_text()
    dist.barrier()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False, "bias": True, "head_dim": 12},
        {"qkv_bias": True, "norm_eps": 1e-2, "rope_theta": 100.0},
        {"qk_norm": True, "head_dim": 16},
        {"mixture": MixtureShape(experts=4, per_token=2, expert_dim=24, balance="none")},
        {
            "qk_norm": True,
            "mixture": MixtureShape(experts=4, per_token=2, expert_dim=24, balance="loss", normalise=False),
            "dense_layers": 1,
        },
    ],
)
def test_a_transformer_of_our_own_becomes_one_of_the_library(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = Transformer(TransformerShape(**{**vars(TRANSFORMER), **changes}))
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
        expected = model.eval()(TOKENS)
    state = dict(model.named_parameters())
    folder = save_weights(state, form_of(model, max_positions=16), tmp_path / "out", lone_rank(), dtype=torch.float32)
    torch.testing.assert_close(logits_of(folder), expected, rtol=0, atol=1e-4)
