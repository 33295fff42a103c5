"""A generator and what judges it, each with an optimizer of its own; the noise is torch's own."""

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardway


def rings(count: int) -> TensorDataset:
    angle = torch.rand(count, generator=torch.Generator().manual_seed(1)) * 6.283
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))


def layers(*sizes: int) -> nn.Sequential:
    parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.LeakyReLU(0.2))]
    return nn.Sequential(*parts[:-1])


with shardway.start("checkpoint.every=4 steps", *sys.argv[1:], directory="run") as run:
    torch.manual_seed(0)
    generator = run.shard(layers(4, 16, 2), name="generator")
    judge = run.shard(layers(2, 16, 1), name="judge")
    run.optimizer(torch.optim.Adam, generator, lr=1e-3, betas=(0.5, 0.9))
    run.optimizer(torch.optim.Adam, judge, name="judge", lr=4e-3, betas=(0.5, 0.9))

    def judged(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        made = generator(torch.randn(len(batch[0]), 4)).detach()
        return F.softplus(-model(batch[0])).mean() + F.softplus(model(made)).mean()

    def fooled(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return F.softplus(-judge(model(torch.randn(len(batch[0]), 4)))).mean()

    for batch in run.steps(run.loader(rings(200), batch_size=16), 40):
        run.step(judge, batch, judged)
        if run.step_number % 3 == 0:  # two more looks for the judge
            run.step(judge, batch, judged)
            run.step(judge, batch, judged)
        run.step(generator, batch, fooled)
    with torch.no_grad():
        samples = generator(torch.linspace(-1, 1, 12).view(3, 4))
    if run.is_first:
        Path("results.json").write_text(json.dumps({"samples": samples.tolist()}), encoding="utf-8")
