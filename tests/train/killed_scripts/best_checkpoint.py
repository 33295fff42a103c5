"""The best weights so far are kept with the run, and written out at its end."""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardway


class Best:
    """The weights of the lowest held-out loss, and their step."""

    def __init__(self) -> None:
        self.loss, self.step, self.weights = float("inf"), 0, {}

    def look(self, loss: float, step: int, model: nn.Module) -> None:
        if loss < self.loss:
            self.loss, self.step, self.weights = loss, step, copy.deepcopy(model.state_dict())

    def state_dict(self) -> dict[str, object]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, object]) -> None:
        vars(self).update(state)


def images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 6, 6, generator=generator)
    return TensorDataset(x, (x.mean((1, 2, 3)) * 20).long().clamp(-1, 1) + 1)


words = ("checkpoint.every=4 steps", "train.validate_every=3 steps", "checkpoint.keep=2")
with shardway.start(*words, *sys.argv[1:], directory="run") as run:
    torch.manual_seed(5)
    model = run.shard(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)))
    run.optimizer(torch.optim.SGD, model, lr=0.3)
    best = run.keep("best", Best())
    validation = run.validation(images(50, 11), shardway.class_cross_entropy)
    for batch in run.steps(run.loader(images(96, 10), batch_size=12), 40, validation):
        if validation.last is not None and validation.step == run.step_number:
            best.look(validation.last["loss"], validation.step, model)
        run.step(model, batch, F.cross_entropy)
    if validation.last is not None:
        best.look(validation.last["loss"], validation.step, model)
    if run.is_first:
        torch.save(best.weights, "best.pt")
    sums = {name: each.double().sum().item() for name, each in best.weights.items()}
    results = {"validations": validation.results, "best": [best.step, best.loss], "weights": sums}
    if run.is_first:
        Path("results.json").write_text(json.dumps(results), encoding="utf-8")
