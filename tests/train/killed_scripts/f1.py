"""F1 of the held-out data, from sums that a validation adds up over all samples and ranks; some batches have none."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardway


def rare(count: int, seed: int) -> TensorDataset:
    """Points of which one in five is a positive."""
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :2].sum(1) > 1.2).float())


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> shardway.LossSum:
    logits = logits.squeeze(1)
    guess, true = logits > 0, targets > 0.5
    counts = {"tp": (guess & true).sum(), "fp": (guess & ~true).sum(), "fn": (~guess & true).sum()}
    total = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    return shardway.LossSum(total, len(targets), metrics=counts)


def f1(sums: dict[str, float]) -> float:
    return 2 * sums["tp"] / max(1.0, 2 * sums["tp"] + sums["fp"] + sums["fn"])


if __name__ == "__main__":
    words = ("checkpoint.every=3 steps", "train.validate_every=4 steps")
    with shardway.start(*words, *sys.argv[1:], directory="run") as run:
        torch.manual_seed(8)
        model = run.shard(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
        run.optimizer(torch.optim.SGD, model, lr=0.2, momentum=0.9)
        validation = run.validation(rare(53, 13), loss_of)
        for batch in run.steps(run.loader(rare(160, 12), batch_size=16), 24, validation):
            run.step(model, batch, loss_of)
        if run.is_first:
            results = {"f1": {step: f1(sums) for step, sums in validation.results.items()}}
            Path("results.json").write_text(json.dumps(results), encoding="utf-8")
