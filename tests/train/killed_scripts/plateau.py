"""The learning rate falls when the held-out loss does no longer, and the weight decay with it."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import shardway


def noisy(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, x.prod(1, keepdim=True).tanh() + torch.randn(count, 1, generator=generator))


words = ("checkpoint.every=4 steps", "train.validate_every=3 steps")
with shardway.start(*words, *sys.argv[1:], directory="run") as run:
    torch.manual_seed(3)
    model = run.shard(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = run.optimizer(torch.optim.SGD, model, lr=0.2, momentum=0.9, weight_decay=0.01)
    scheduler = run.scheduler(ReduceLROnPlateau, optimizer, factor=0.5, patience=1, cooldown=1)
    validation = run.validation(noisy(40, 8), F.mse_loss)
    for batch in run.steps(run.loader(noisy(160, 7), batch_size=16), 48, validation):
        if validation.last is not None and validation.step == run.step_number:
            scheduler.step(validation.last["loss"])
            optimizer.param_groups[0]["weight_decay"] = optimizer.param_groups[0]["lr"] / 20
        run.step(model, batch, F.mse_loss)
    results = {"validations": validation.results, "lr": scheduler.get_last_lr(), "bad": scheduler.num_bad_epochs}
    if run.is_first:
        Path("results.json").write_text(json.dumps(results), encoding="utf-8")
