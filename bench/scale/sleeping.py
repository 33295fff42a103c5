"""A user's script whose step takes a known time: a part that no rank shortens, and a part that ranks share by samples.

    torchrun --nproc-per-node 2 bench/scale/sleeping.py --share 0.3

A step of all samples on one rank takes `--seconds`, of which `--share` does not shrink. The loss sleeps until that time
has passed since it last did, so what a busy machine adds to a step (passes, sums of gradients, records) is within it.
Sleeping ranks need no core: two cores hold many of them.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardway

BATCH = 16

parser = argparse.ArgumentParser()
parser.add_argument("--share", type=float, default=0.3)
parser.add_argument("--seconds", type=float, default=0.4)
args, keys = parser.parse_known_args()


class Pace:
    """When the last sleep ended; each next one ends a step later, or at once where that has passed."""

    until = 0.0

    def sleep(self, step_s: float) -> None:
        self.until = max(self.until + step_s, time.monotonic())
        time.sleep(max(0.0, self.until - time.monotonic()))


pace = Pace()


def sleeping_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of this rank's samples, after the time that a step with so many takes."""
    pace.sleep(args.seconds * (args.share + (1 - args.share) * len(targets) / BATCH))
    return functional.cross_entropy(outputs, targets)


with shardway.start(*keys, directory="runs/sleeping") as run:
    model = run.shard(nn.Linear(8, 2))
    optimizer = run.optimizer(torch.optim.SGD, model, lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    for batch in run.steps(run.loader(data, batch_size=BATCH)):
        run.step(model, batch, sleeping_loss)
