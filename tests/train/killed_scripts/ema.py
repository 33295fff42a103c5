"""Two averages of the weights: torch's own, and one as people write it."""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import shardway


class Shadow:
    """Slow weights, faster while they are young."""

    def __init__(self, model: nn.Module) -> None:
        self.updates = 0
        self.weights = {name: each.detach().clone() for name, each in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(0.99, (1 + self.updates) / (10 + self.updates))
        for name, each in model.named_parameters():
            self.weights[name].lerp_(each.detach(), 1 - decay)

    def state_dict(self) -> dict[str, object]:
        return {"updates": self.updates, "weights": self.weights}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.updates, self.weights = state["updates"], state["weights"]


x = torch.randn(160, 8, generator=torch.Generator().manual_seed(2))
data = TensorDataset(x, x.relu().sum(1, keepdim=True))

with shardway.start("checkpoint.every=5 steps", *sys.argv[1:], directory="run") as run:
    torch.manual_seed(2)
    model = run.shard(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)))
    run.optimizer(torch.optim.AdamW, model, lr=0.01)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    shadow = run.keep("shadow", Shadow(model))
    for batch in run.steps(run.loader(data, batch_size=16), 40):
        run.step(model, batch, F.mse_loss)
        average.update_parameters(model)
        shadow.update(model)
    average.eval()
    results = {
        "averaged": average(x[:5]).flatten().tolist(),
        "averages": int(average.n_averaged),
        "shadow": {name: each.sum().item() for name, each in shadow.weights.items()},
        "updates": shadow.updates,
    }
    if run.is_first:
        Path("results.json").write_text(json.dumps(results), encoding="utf-8")
