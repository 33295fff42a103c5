"""A loop of one's own: model, data, loss, optimizer and scheduler are the script's. `--stop-after=N` stops it."""

import os
import signal
import sys

import torch
from torch import nn

import shardway


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.norm(self.inner(x))))


torch.manual_seed(7)
inputs = torch.rand(64, 6)
data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] * 3).long())
words = [word for word in sys.argv[1:] if not word.startswith("--")]
stops = [int(word.partition("=")[2]) for word in sys.argv[1:] if word.startswith("--stop-after=")]

own = ("run.device=cpu", "run.threads=1", "run.display=off", "checkpoint.background=false", "checkpoint.every=off")
with shardway.start(*own, "optim.clip=0.5", *words, directory=None) as run:
    model = run.shard(Net())
    optimizer = run.optimizer(torch.optim.AdamW, model, lr=0.05, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    loader = run.loader(data, batch_size=8)
    for batch in run.steps(loader, "10 steps", run.validation(data, shardway.class_cross_entropy)):
        run.step(model, batch, nn.functional.cross_entropy)
        scheduler.step()
        if run.step_number in stops:
            os.kill(os.getpid(), signal.SIGTERM)
