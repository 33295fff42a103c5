"""A stream of samples that are drawn while it is read, in a loader process."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import shardway


class Stream(IterableDataset):
    """Points and their distance, of an order that Python's and torch's random numbers give."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(90):
            point = torch.randn(3) * random.choice([0.5, 1.0, 2.0])
            yield point, point.norm().view(1)


if __name__ == "__main__":
    words = ("checkpoint.every=4 steps", "data.prefetch=2")
    with shardway.start(*words, *sys.argv[1:], directory="run") as run:
        torch.manual_seed(7)
        model = run.shard(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)))
        optimizer = run.optimizer(torch.optim.Adam, model, lr=0.01)
        for batch in run.steps(run.loader(Stream(), batch_size=8, workers=1), 36):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - run.step_number / 36)
            run.step(model, batch, F.mse_loss)
        results = {"lr": optimizer.param_groups[0]["lr"], "at one": model(torch.ones(1, 3)).item()}
        if run.is_first:
            Path("results.json").write_text(json.dumps(results), encoding="utf-8")
