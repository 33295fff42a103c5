"""`shardway checkpoint import`: what it prints, its exit codes, and models of the Hugging Face library."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import TINY, Shardway, write_text

from saved_tensors import read_whole
from shardway.models.build import build_model
from shardway.rundir.directory import RunDir
from shardway.runfile.schema import ModelSection
from tiny_hf import TOKENS, logits_of, save_tiny

RUN = (*TINY, "checkpoint.every=1 steps", "optim.schedule=constant", "model.vocab=256")
LIBRARY = (*(word for word in RUN if not word.startswith("model.")), "data.kind=synthetic")
LIBRARY = tuple(word for word in LIBRARY if not word.startswith("data.path"))


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in RunDir(run).events() if event["event"] == "step"]


def test_a_run_is_exported_imported_and_the_same(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    assert shardway("train", *RUN, "--dir", "a").code == 0
    assert shardway("checkpoint", "export", "a", "out").code == 0
    ended = shardway("checkpoint", "import", "out", *RUN, "--dir", "b")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[0] == "11 tensors of the model (8240 parameters) from out, safetensors"
    assert ended.out.endswith("--dir begins with them and a fresh optimizer\n")
    assert shardway("checkpoint", "diff", "a", "b", "--part", "model").code == 0
    assert shardway("checkpoint", "verify", "b").code == 0
    found = json.loads(shardway("checkpoint", "inspect", "b", "--head", "--json").out)
    assert (found["step"], found["numbers"]["position"]) == (0, 0)
    assert found["numbers"]["imported_from"] == f"{tmp_path / 'out'} (safetensors)"
    ended = shardway("checkpoint", "import", "out", *RUN, "--dir", "b")
    assert ended.code == 2
    assert "nothing is imported over what exists" in ended.err
    assert shardway("train", *RUN, "--dir", "b").code == 0
    assert losses(tmp_path / "b")[0] < losses(tmp_path / "a")[0]
    ended = shardway("train", *RUN, "--dir", "b", "--fresh")  # the weights are moved aside with the run
    assert ended.code == 0
    assert losses(tmp_path / "b") == losses(tmp_path / "a")


class Harm:
    """Unpickled by Python, it makes a folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm was done",)


def test_what_is_refused_is_one_message_and_nothing_is_written(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    torch.save({"embedding.weight": torch.zeros(256, 16), "more": Harm()}, tmp_path / "harm.pt")
    torch.save({"embedding.weight": torch.zeros(256, 16)}, tmp_path / "short.pt")
    (tmp_path / "short.pt").write_bytes((tmp_path / "short.pt").read_bytes()[:-100])
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Harm()))
    for name, what in (
        ("harm.pt", "holds more than tensors and plain data (posix.mkdir)"),
        ("short.pt", "cannot be read as a file of torch.save"),
        ("old.pt", "is a bare pickle"),
        ("gone.pt", "cannot be read: No such file"),
    ):
        before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
        ended = shardway("checkpoint", "import", name, *RUN, "--dir", "b")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith(f"shardway: {name} {what}")
        assert "Nothing was written. To do: " in ended.err
        assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
    assert not (tmp_path / "harm was done").exists()


def test_a_model_of_the_library_gives_the_same_logits_and_losses(shardway: Shardway, tmp_path: Path) -> None:
    """Into Shardway's own transformer, in bf16 files that are cut in several, and into the library's."""
    save_tiny(tmp_path / "hub", "llama", file_size="20KB", rms_norm_eps=1e-5)
    shape = (
        "model.dim=32",
        "model.layers=3",
        "model.heads=4",
        "model.kv_heads=2",
        "model.ffn_dim=48",
        "model.vocab=50",
    )
    settings = ("model.tied=false", "model.rope_theta=500.0")
    ended = shardway("checkpoint", "import", "hub", *LIBRARY, *shape, *settings, "--dir", "own", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["tensors"] == 30
    sizes = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "vocab": 50}
    section = ModelSection(**sizes, tied=False, rope_theta=500.0)
    model = build_model(section, vocab=50, sample_shape=(16,), device="cpu")
    weights = read_whole(RunDir(tmp_path / "own").checkpoint_path(0))
    model.load_state_dict({name.removeprefix("model."): each for name, each in weights.items()})
    assert torch.allclose(model(TOKENS), logits_of(tmp_path / "hub"), atol=1e-5)
    ended = shardway("checkpoint", "import", "hub", *LIBRARY, *shape, "model.tied=false", "--dir", "other")
    assert (ended.code, "model.rope_theta: 10000.0 in this run, 500.0 where" in ended.err) == (2, True)
    for words in (("--dir", "direct"), ("--dir", "imported")):
        if words[1] == "imported":
            assert shardway("checkpoint", "import", "hub", *LIBRARY, "model.hf=hub", *words).code == 0
        assert shardway("train", *LIBRARY, "model.hf=hub", *words).code == 0
    assert losses(tmp_path / "direct") == losses(tmp_path / "imported")  # both begin with a fresh optimizer


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "qwen3_moe"])
def test_other_families_come_in_as_torch_saves_them(family: str, shardway: Shardway, tmp_path: Path) -> None:
    """Tied embeddings, norms of queries and keys, stacks of experts; half of the range of numbers."""
    from tiny_hf import load_reference

    model = load_reference(save_tiny(tmp_path / "hub", family))
    narrow = {name: each.bfloat16() for name, each in model.state_dict().items()}
    model.load_state_dict(narrow)  # not model.bfloat16(), which rounds the frequencies of positions too
    torch.save({"model": narrow}, tmp_path / "x.pt")
    ended = shardway("checkpoint", "import", "x.pt", *LIBRARY, "model.hf=hub", "--dir", "a")
    assert ended.code == 0, ended.err
    assert "converted from bfloat16 to float32" in ended.out
    assert shardway("checkpoint", "export", "a", "out").code == 0
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert torch.equal(logits_of(tmp_path / "out"), expected)
