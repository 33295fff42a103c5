"""The training script for torchft: two groups of one rank each, which share every step as long as both are there.

A group that comes back takes the state of one that lives; each saves a checkpoint of its own every 20 steps, for the
case that all are gone. Samples follow from the step, so that a step that did not count is tried with the same ones.

torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000
REPLICA_GROUP_ID=0 TORCHFT_LIGHTHOUSE=http://... torchrun --standalone --nproc-per-node 1 train_torchft.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from harm import read_harm
from parts import EVERY, STEPS, Model, Order, Records, Tokens, checkpoint_steps, load, save
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.data import DistributedSampler

GROUPS = 2


def wait_for_all(folder: Path, group: int) -> None:
    """Begin together: a group that began alone would do the first steps alone."""
    (folder / f"up-{group}").touch()
    while len(list(folder.glob("up-*"))) < GROUPS:
        time.sleep(0.01)


def main() -> None:
    folder, group = Path(sys.argv[1]), int(os.environ["REPLICA_GROUP_ID"])
    own = folder / f"group-{group}"
    own.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    records, harm = Records(folder, group), read_harm(group)
    torch.manual_seed(0)
    data, model = Tokens(), Model()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state,
        state_dict=state,
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        replica_id=f"group_{group}",
        hostname="localhost",
        init_sync=False,
    )
    newest = max(checkpoint_steps(own), default=0)
    if newest:
        saved = load(own, newest)
        load_state(saved)
        manager.load_state_dict(saved["manager"])
    order = Order(DistributedSampler(data, group, GROUPS, group_rank=0, num_replicas=1, seed=0), GROUPS)
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    wait_for_all(folder, group)
    while manager.current_step() < STEPS:
        step = manager.current_step() + 1
        harm.before_step(step)
        torch.manual_seed(step * GROUPS + group)
        ids = order.ids(step)
        optimizer.zero_grad()
        loss = parallel(torch.stack([data[each] for each in ids]))
        loss.backward()
        takes_part, before = manager.is_participating(), manager.current_step()
        optimizer.step()
        done = manager.current_step()
        if done == before:
            records.write("refused", step=step)
            continue
        records.write("step", step=done, loss=loss.item(), ids=ids if takes_part else [])
        if done % EVERY == 0:
            save(own, done, {**state(), "manager": manager.state_dict()}, harm)
    manager.shutdown()


if __name__ == "__main__":
    main()
