"""`shardway checkpoint export`, from a run in any layout to a folder of the library."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from command_line import TINY, Shardway, write_text
from transformers import AutoTokenizer

from drawn_layouts import SMALL
from pool import ranks
from runs import lone_rank, open_tiny, pool_ranks, train_tiny
from saved_tensors import read_whole
from shardway.rundir.directory import RunDir
from shardway.train.loss import LossSum
from shardway.train.run_weights import Which, _resolve, export_on

RUN = ("checkpoint.every=100 steps", "train.steps=5", "model.tied=false", "model.kv_heads=2")
TOKENS = torch.arange(24).reshape(2, 12) % 32


def library_logits(folder: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder))
    with torch.no_grad():
        return model(TOKENS).logits


def saved_weights(run: RunDir) -> list[torch.Tensor]:
    """Every weight of the newest checkpoint, whole, by size and content."""
    folder = run.checkpoint_path(run.checkpoint_steps()[-1])
    return sorted((t for name, t in read_whole(folder).items() if name.startswith("model.")), key=order)


def library_weights(folder: Path) -> list[torch.Tensor]:
    import safetensors.torch

    return sorted(safetensors.torch.load_file(str(folder / "model.safetensors")).values(), key=order)


def order(tensor: torch.Tensor) -> tuple[int, float]:
    return tensor.numel(), float(tensor.double().sum())


@pytest.mark.parametrize("words", [("parallel.tp=2",), ("parallel.pp=2",), ("parallel.cp=2",)])
@ranks(2)
def test_a_run_of_any_layout_is_read_by_the_library(rank: int, tmp_path: Path, words: tuple[str, ...]) -> None:
    train_tiny(tmp_path / "run", pool_ranks(), *RUN, *words, base=SMALL)
    run = RunDir(tmp_path / "run")
    together = export_on(pool_ranks(), _resolve(run, 2, 2), run, tmp_path / "two", "fp32")
    assert together.step == 5
    if rank == 0:
        export_on(lone_rank(), _resolve(run, 1, 1), run, tmp_path / "one", "fp32")
        assert torch.equal(library_logits(tmp_path / "one"), library_logits(tmp_path / "two"))
        pairs = list(zip(saved_weights(run), library_weights(tmp_path / "one"), strict=True))
        assert all(torch.equal(saved, written) for saved, written in pairs)


def test_verify_tells_each_checkpoint_and_changes_nothing(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    assert shardway("train", *TINY, "checkpoint.every=1 steps", "--dir", "a").code == 0
    ended = shardway("checkpoint", "verify", "a")
    assert ended.code == 0
    assert [line.partition("  ")[0] for line in ended.out.splitlines()] == ["step-000000002", "step-000000001"]
    assert "  whole  " in ended.out
    assert ", saved by 1 rank\n" in ended.out
    shard = tmp_path / "a/checkpoints/step-000000002/rank-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "a/checkpoints/step-000000001/manifest.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    ended = shardway("checkpoint", "verify", "a", "--json")
    assert ended.code == 4
    newest, oldest = json.loads(ended.out)
    assert (newest["whole"], newest["world"]) == (False, 1)
    assert newest["reasons"][0].startswith("rank-00000.bin has ")
    assert (oldest["reasons"], oldest["bytes"]) == (["its manifest.json is missing"], None)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == before
    ended = shardway("checkpoint", "verify", "a")
    assert (ended.code, ended.out.count("damaged: ")) == (4, 2)


def test_verify_of_one_checkpoint_wherever_it_lies(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    assert shardway("train", *TINY, "checkpoint.every=1 steps", "--dir", "a").code == 0
    ended = shardway("checkpoint", "verify", "a/checkpoints/step-000000001")
    assert (ended.code, ended.out.partition("  ")[0], ended.out.count("\n")) == (0, "step-000000001", 1)
    shutil.copytree(tmp_path / "a/checkpoints/step-000000001", tmp_path / "best")
    assert json.loads(shardway("checkpoint", "verify", "best", "--json").out)[0]["step"] == 1
    shutil.copytree(tmp_path / "best", tmp_path / "step-000000009")
    ended = shardway("checkpoint", "verify", "step-000000009")
    assert (ended.code, ended.out) == (4, "step-000000009  damaged: its manifest is that of step 1\n")


def test_verify_of_no_run(shardway: Shardway) -> None:
    ended = shardway("checkpoint", "verify", "none")
    assert (ended.code, ended.out) == (2, "")
    assert "none holds no checkpoint" in ended.err


def test_export_says_what_it_wrote(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    assert shardway("train", *TINY, "--dir", "runs/a").code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    ended = shardway("checkpoint", "export", "runs/a", "out", "--dtype", "bf16", "--json")
    assert ended.code == 0
    assert json.loads(ended.out) == {"folder": "out", "step": 2, "passed_over": []}
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert after == before
    assert shardway("checkpoint", "export", "runs/a", "served", "--tokenizer").code == 0
    read = AutoTokenizer.from_pretrained(str(tmp_path / "served"))
    assert read("def é")["input_ids"] == list("def é".encode())
    assert read.decode(list("def é".encode())) == "def é"


def test_a_scripts_own_model_goes_out_under_its_own_names(shardway: Shardway, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    words = ("run.device=cpu", "run.threads=1", "train.steps=2", "checkpoint.background=false")
    with open_tiny(tmp_path / "r", lone_rank(), *words, base=()) as run:
        model = run.shard(net)
        run.optimizer(torch.optim.AdamW, model)
        for batch in run.steps(run.loader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=8)):
            run.step(model, batch, lambda model, batch: (model(batch[0]) - 1).square().mean())
    ended = shardway("checkpoint", "export", "r", "out")
    assert (ended.code, ended.out) == (0, "step 2 written to out: model.safetensors, model.pt\n")
    found, expected = torch.load(tmp_path / "out" / "model.pt"), net.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    ended = shardway("checkpoint", "export", "r", "again", "--dtype", "fp16", "--json")
    assert json.loads(ended.out)["files"] == ["model.safetensors", "model.pt"]


def test_a_model_that_the_library_lacks_goes_out_under_its_own_names(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    assert shardway("train", *TINY, "model.norm=layernorm", "--dir", "a").code == 0
    ended = shardway("checkpoint", "export", "a", "out")
    assert ended.code == 2
    assert ended.err.endswith(
        "  `--own-names` writes its weights as model.safetensors and model.pt under its own names.\n"
    )
    ended = shardway("checkpoint", "export", "a", "out", "--own-names")
    assert (ended.code, ended.out) == (0, "step 2 written to out: model.safetensors, model.pt\n")
    assert "embedding.weight" in torch.load(tmp_path / "out" / "model.pt")


def train_by_f1(folder: Path, values: list[float], *words: str) -> None:
    """A script whose validation after step s finds `values[s - 1]` as its f1."""
    quiet = ("run.device=cpu", "run.threads=1", "checkpoint.background=false", "train.validate_every=1 steps")
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
    with open_tiny(folder, lone_rank(), *quiet, *words, base=()) as run:

        def validated(model: torch.nn.Module, batch: list[torch.Tensor]) -> LossSum:
            return LossSum(model(batch[0]).sum(), len(batch[0]), metrics={"f1": values[run.step_number - 1]})

        torch.manual_seed(0)
        model = run.shard(torch.nn.Linear(4, 1))
        run.optimizer(torch.optim.AdamW, model, lr=0.1)
        validation = run.validation(torch.utils.data.Subset(data, [0]), validated)
        for batch in run.steps(run.loader(data, batch_size=8), len(values), validation):
            run.step(model, batch, lambda model, batch: (model(batch[0]) - 1).square().mean())


def test_the_best_checkpoint_is_marked_and_exported(shardway: Shardway, tmp_path: Path) -> None:
    train_by_f1(tmp_path / "r", [0.5, 0.8125, 0.25, 0.75], "checkpoint.monitor=max f1", "checkpoint.keep_best=2")
    lines = shardway("checkpoint", "verify", "r").out.splitlines()
    assert [line.partition(", the best: ")[2] for line in lines] == ["", "f1 0.8125", ""]
    facts = json.loads(shardway("checkpoint", "verify", "r", "--json").out)
    assert [(each["step"], each["best"]) for each in facts] == [(4, False), (2, True), (1, False)]
    for words, step in ((("--best",), 2), (("--step", "4"), 4), ((), 4)):
        ended = shardway("checkpoint", "export", "r", f"out{step}{len(words)}", *words)
        assert (ended.code, ended.out.partition(" written")[0]) == (0, f"step {step}")
        found = torch.load(tmp_path / f"out{step}{len(words)}" / "model.pt")
        saved = read_whole(RunDir(tmp_path / "r").checkpoint_path(step))
        assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in found.items())
    assert "  best        f1 0.8125 at step 2, kept\n" in shardway("status", "r").out
    ended = shardway("checkpoint", "export", "r", "both", "--best", "--step", "2")
    assert (ended.code, ended.err.splitlines()[0]) == (2, "shardway: --best and --step 2 name two checkpoints.")
    ended = shardway("checkpoint", "export", "r", "none", "--step", "3")
    assert ended.code == 2
    assert "r holds no checkpoint of step 3.\n      allowed: 1, 2, 4" in ended.err
    shard = tmp_path / "r/checkpoints/step-000000002/rank-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    ended = shardway("checkpoint", "export", "r", "damaged", "--best")
    assert ended.code == 4
    assert ended.err.startswith("shardway: the checkpoint of step 2 is damaged: rank-00000.bin has ")


def test_the_best_that_was_not_kept_is_told(shardway: Shardway, tmp_path: Path) -> None:
    train_by_f1(tmp_path / "r", [0.5, 0.9, 0.25, 0.75], "checkpoint.monitor=max f1", "checkpoint.keep=1")
    told = "  best        f1 0.9000 at step 2, not kept; of those that are, step 4 is the best\n"
    assert told in shardway("status", "r").out
    assert shardway("checkpoint", "export", "r", "out", "--best").out.startswith("step 4 written")
    words = ("train.validate_every=off", "checkpoint.keep=1")
    train_by_f1(tmp_path / "s", [0.5, 0.9], *words)
    ended = shardway("checkpoint", "export", "s", "none", "--best")
    assert ended.code == 2
    assert ended.err == (
        "shardway: no checkpoint in s is of a step that was validated, so none is the best.\n"
        "  To do: leave out --best for the newest, or name one by --step; checkpoint.keep_best in the run file keeps "
        "the best ones.\n"
    )


@ranks(2)
def test_the_best_of_a_run_file_goes_out_from_any_layout(rank: int, tmp_path: Path) -> None:
    words = ("parallel.dp_shard=2", "parallel.dp_replicate=1", "train.validate_every=1 steps", "optim.lr=10.0")
    train_tiny(tmp_path / "run", pool_ranks(), *RUN, *words, "checkpoint.keep_best=1", "checkpoint.keep=1", base=SMALL)
    run = RunDir(tmp_path / "run")
    best = run.checkpoint_steps()[0]
    assert len(run.checkpoint_steps()) == 2
    exported = export_on(pool_ranks(), _resolve(run, 2, 2), run, tmp_path / "two", "fp32", Which(best=True))
    assert exported.step == best
    if rank == 0:
        saved = [t for name, t in read_whole(run.checkpoint_path(best)).items() if name.startswith("model.")]
        pairs = list(zip(sorted(saved, key=order), library_weights(tmp_path / "two"), strict=True))
        assert all(torch.equal(one, other) for one, other in pairs)


def test_export_never_overwrites(shardway: Shardway, tmp_path: Path) -> None:
    write_text(tmp_path)
    shardway("train", *TINY, "--dir", "runs/a")
    (tmp_path / "out").mkdir()
    ended = shardway("checkpoint", "export", "runs/a", "out")
    assert ended.code == 2
    assert ended.err.startswith("shardway: out exists, and is not overwritten.")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_run_without_a_checkpoint_is_told(shardway: Shardway, tmp_path: Path) -> None:
    ended = shardway("checkpoint", "export", "nowhere", "out")
    assert ended.code == 2
    assert ended.err.startswith("shardway: nowhere holds no checkpoint to export.")
    assert not (tmp_path / "out").exists()
