"""A step under ZeRO: the exact mean over targets, fp16's loss scale, losses that are not finite, wishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zero_runs import UNEVEN, needs_deepspeed, stage

from pool import ranks
from runs import TINY_IMAGES, open_tiny, pool_ranks, read_column, read_named, signal_at, train_tiny, worst_difference
from shardway.errors import JobError
from shardway.train.loss import IGNORED, token_cross_entropy
from speed import picked

pytestmark = needs_deepspeed

VOCAB = 16
needs_fp16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="DeepSpeed wants a CPU with instructions for fp16"
)


class Padded(torch.utils.data.Dataset):
    """Sequences of which sample i has i % 7 targets that count."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (torch.arange(8) * (index + 3)) % VOCAB
        targets = torch.where(torch.arange(7) < index % 7, tokens[1:], IGNORED)
        return tokens[:-1], targets


def own_loop(directory: Path, *words: str, length: int = 6) -> None:
    """A script's own loop, model and optimizer."""
    torch.manual_seed(0)
    with open_tiny(directory, pool_ranks(), "run.device=cpu", *words, base=()) as run:
        model = run.shard(nn.Sequential(nn.Embedding(VOCAB, 12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, VOCAB)))
        run.optimizer(torch.optim.AdamW, model, lr=0.01)
        for batch in run.steps(run.loader(Padded(), batch_size=10), length):
            run.step(model, batch, token_cross_entropy)


@pytest.mark.parametrize("number", picked([1, 2, 3], 3))
@pytest.mark.parametrize("clip", picked([(), ("optim.clip=0.05",)], ("optim.clip=0.05",)), ids=["free", "clipped"])
@ranks(2, timeout_s=180.0)
def test_targets_that_do_not_count(rank: int, tmp_path: Path, number: int, clip: tuple[str, ...]) -> None:
    words = ("train.micro_batch=2", *clip)
    own_loop(tmp_path / "torch", *words)
    own_loop(tmp_path / "zero", *words, *stage(number))
    if rank == 0:
        for name in ("loss", "grad_norm"):
            ours, theirs = read_column(tmp_path / "torch", name), read_column(tmp_path / "zero", name)
            assert worst_difference(theirs, ours) < 1e-5
        assert read_column(tmp_path / "zero", "lr") == [0.01] * 6


def nothing_counts(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return token_cross_entropy(outputs, torch.full_like(targets, IGNORED))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
@ranks(2, timeout_s=180.0)
def test_a_step_without_targets_changes_nothing(rank: int, tmp_path: Path, number: int) -> None:
    """Weights do not decay in it, momentum does not fade, and the steps after it are torch's."""
    for name, words in (("torch", ()), ("zero", stage(number))):
        torch.manual_seed(0)
        with open_tiny(tmp_path / name, pool_ranks(), "run.device=cpu", *words, base=()) as run:
            model = run.shard(nn.Sequential(nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB)))
            run.optimizer(torch.optim.SGD, model, lr=0.1, weight_decay=0.1, momentum=0.9)
            for step, batch in enumerate(run.steps(run.loader(Padded(), batch_size=10), 4)):
                run.step(model, batch, nothing_counts if step == 1 else token_cross_entropy)
    if rank == 0:
        torchs, zeros = (read_named(tmp_path / name, "step") for name in ("torch", "zero"))
        assert (zeros[1]["loss"], zeros[1]["grad_norm"], zeros[1]["skipped"]) == (None, 0.0, True)
        for key in ("loss", "grad_norm"):
            expected = [event[key] for event in torchs]
            assert [event[key] for event in zeros] == [each and pytest.approx(each, rel=1e-5) for each in expected]


@needs_fp16
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 2, 3])
@ranks(2, timeout_s=180.0)
def test_fp16_scales_and_skips(rank: int, tmp_path: Path, number: int) -> None:
    words = ("precision.compute=fp16", "precision.loss_scale=1e9", "train.steps=20", "precision.loss_scale_backoff=0.1")
    train_tiny(tmp_path, pool_ranks(), *words, *stage(number), base=UNEVEN)
    if rank:
        return
    skipped, scales = read_column(tmp_path, "skipped"), read_column(tmp_path, "loss_scale")
    assert skipped[0]
    assert not skipped[-1]
    assert scales[0] == pytest.approx(1e8)
    first = skipped.index(False)
    assert scales[-1] == scales[first]
    losses = read_column(tmp_path, "loss")
    assert losses[-1] < losses[first]


@pytest.mark.parametrize(
    ("compute", "number"),
    [
        ("bf16", 3),
        *(pytest.param("bf16", number, marks=pytest.mark.exhaustive) for number in (1, 2)),
        *(pytest.param("fp16", number, marks=[needs_fp16, pytest.mark.exhaustive]) for number in (1, 3)),
    ],
)
@ranks(2, timeout_s=180.0)
def test_half_formats_follow_torch(rank: int, tmp_path: Path, compute: str, number: int) -> None:
    words = (f"precision.compute={compute}", "precision.loss_scale=1024.0", "train.micro_batch=auto")
    train_tiny(tmp_path / "torch", pool_ranks(), *words[: 2 if compute == "fp16" else 1], words[2], base=UNEVEN)
    ours = words if compute == "fp16" else (words[0], words[2])
    train_tiny(tmp_path / "zero", pool_ranks(), *ours, *stage(number), base=UNEVEN)
    if rank == 0:
        found, expected = read_column(tmp_path / "zero"), read_column(tmp_path / "torch")
        assert worst_difference(found, expected) < (5e-3 if compute == "bf16" else 5e-4)


@ranks(2, timeout_s=180.0)
def test_a_loss_that_is_not_finite_ends_the_run(rank: int, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No checkpoint was made"):
        train_tiny(tmp_path, pool_ranks(), *stage(2), "optim.lr=1e30", "optim.warmup=0 steps", base=UNEVEN)


@ranks(2, timeout_s=180.0)
def test_a_signal_stops_and_saves(rank: int, tmp_path: Path) -> None:
    outcome = train_tiny(tmp_path, pool_ranks(), *stage(3), base=UNEVEN, before_step=signal_at(3, rank=1))
    if rank == 0:
        assert (outcome.state, outcome.step) == ("stopped", 3)
        assert [event["step"] for event in read_named(tmp_path, "saved")] == [3]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 3])
@ranks(2, timeout_s=180.0)
def test_batch_norm_counts_all_ranks(rank: int, tmp_path: Path, number: int) -> None:
    words = ("train.steps=6", "train.validate_every=3")
    train_tiny(tmp_path / "torch", pool_ranks(), *words, base=TINY_IMAGES)
    train_tiny(tmp_path / "zero", pool_ranks(), *words, *stage(number), base=TINY_IMAGES)
    if rank == 0:
        found, expected = ([e["loss"] for e in read_named(tmp_path / n, "validation")] for n in ("zero", "torch"))
        assert worst_difference(found, expected) < 1e-5
