"""ZeRO on two ranks trains what PyTorch trains: the same losses, norms, rates and samples."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from zero_runs import UNEVEN, needs_deepspeed, stage, train_both

from pool import ranks
from runs import read_column, read_named, read_steps, worst_difference
from speed import picked

pytestmark = needs_deepspeed


@pytest.mark.parametrize("number", picked([1, 2, 3], 3))
@ranks(2, timeout_s=180.0)
def test_the_curve_is_that_of_torch(rank: int, tmp_path: Path, number: int) -> None:
    watched = ("train.validate_every=2", "data.record_ids=true")
    ours, theirs = train_both(tmp_path, *watched, zero=stage(number))
    if rank:
        return
    for name in ("loss", "grad_norm"):
        assert worst_difference(read_column(theirs, name), read_column(ours, name)) < 1e-5
    for name in ("lr", "step"):
        assert read_column(theirs, name) == read_column(ours, name)
    for each in (0, 1):
        assert [s["ids"] for s in read_steps(theirs, each)] == [s["ids"] for s in read_steps(ours, each)]
    found, expected = ([e["loss"] for e in read_named(each, "validation")] for each in (theirs, ours))
    assert worst_difference(found, expected) < 1e-5
    assert read_named(theirs, "started")[0]["parameters"] == read_named(ours, "started")[0]["parameters"]
    written = json.loads((theirs / "ds_config.json").read_text())
    assert written["zero_optimization"]["stage"] == number
    assert written["gradient_accumulation_steps"] == 2


MODELS = {
    "dropout": ("model.dropout=0.2",),
    "experts": ("model.experts=4", "model.shared_experts=1"),
    "untied": ("model.tied=false", "model.positions=learned", "optim.name=sgd", "optim.lr=0.1"),
    "recomputed": ("recompute.mode=full", "model.dropout=0.1"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "number"), list(itertools.product(MODELS, [1, 3])))
@ranks(2, timeout_s=180.0)
def test_other_models(rank: int, tmp_path: Path, kind: str, number: int) -> None:
    ours, theirs = train_both(tmp_path, *MODELS[kind], zero=stage(number))
    if rank == 0:
        for name in ("loss", "grad_norm"):
            assert worst_difference(read_column(theirs, name), read_column(ours, name)) < 1e-5


@pytest.mark.parametrize("samples", ["data.pack=true", "data.group_tokens=72"])
@ranks(2, timeout_s=180.0)
def test_whole_documents(rank: int, tmp_path: Path, samples: str) -> None:
    """ZeRO counts each target once, though samples have different numbers of them."""
    if rank == 0:
        for number in range(60):
            (tmp_path / f"{number:02}.txt").write_text("abc de f"[: 2 + number % 7] * (1 + number % 3))
    dist.barrier()
    packed = (samples, "data.kind=text", f"data.path={tmp_path}", "data.include=*.txt", "data.seq_len=24")
    base = tuple(word for word in UNEVEN if not word.startswith(("data.", "model.vocab")))
    ours, theirs = train_both(tmp_path, *packed, "model.vocab=256", "train.micro_batch=1", zero=stage(2), base=base)
    if rank == 0:
        for name in ("loss", "grad_norm"):
            assert worst_difference(read_column(theirs, name), read_column(ours, name)) < 1e-5
        assert read_column(ours)[-1] < read_column(ours)[0]
