"""A curve that LBFGS fits: each step evaluates the loss several times, and remembers how it went."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardway

x = torch.linspace(-2, 2, 96).unsqueeze(1)

with shardway.start("checkpoint.every=3 steps", *sys.argv[1:], directory="run") as run:
    torch.manual_seed(1)
    model = run.shard(nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = run.optimizer(
        torch.optim.LBFGS, model, lr=0.5, max_iter=5, history_size=6, line_search_fn="strong_wolfe"
    )
    for batch in run.steps(run.loader(TensorDataset(x, torch.sin(3 * x)), batch_size=32), 30):
        run.step(model, batch, F.mse_loss)
    state = optimizer.state[next(model.parameters())]
    results = {"evaluations": state["func_evals"], "fit": model(x[::12]).flatten().tolist()}
    if run.is_first:
        Path("results.json").write_text(json.dumps(results), encoding="utf-8")
