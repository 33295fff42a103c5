"""It ends itself when the held-out loss has not fallen for some validations; too many steps are asked for."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardway


def noisy(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin() + 0.7 * torch.randn(count, 1, generator=generator))


PATIENCE = 4
words = ("checkpoint.every=5 steps", "train.validate_every=2 steps")
with shardway.start(*words, *sys.argv[1:], directory="run") as run:
    torch.manual_seed(4)
    model = run.shard(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)))
    run.optimizer(torch.optim.Adam, model, lr=0.02)
    validation = run.validation(noisy(48, 9), F.mse_loss)
    for batch in run.steps(run.loader(noisy(48, 6), batch_size=16), 500, validation):
        run.step(model, batch, F.mse_loss)
        if validation.results:
            best = min(validation.results, key=lambda step: validation.results[step]["loss"])
            if (validation.step - best) // 2 >= PATIENCE:
                run.stop(f"no gain since step {best}")
    best = min(validation.results, key=lambda step: validation.results[step]["loss"])
    results = {"validations": validation.results, "best": best, "ended at": run.step_number}
    if run.is_first:
        Path("results.json").write_text(json.dumps(results), encoding="utf-8")
