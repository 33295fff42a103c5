"""The plain training script for torchrun and ft_launcher: DDP on gloo, a checkpoint every 20 steps, resumed by itself.

With FAULT_CATCH_TERM=1 a SIGTERM asks for a save and an end after the step. Under ft_launcher each step is a heartbeat.

torchrun --standalone --nproc-per-node 2 bench/faults/train.py FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harm import read_harm
from parts import EVERY, STEPS, Model, Order, Records, Tokens, checkpoint_steps, load, save
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler


class Wish:
    """Whether this rank was asked to stop."""

    def __init__(self) -> None:
        self._asked = False
        self._catches = os.environ.get("FAULT_CATCH_TERM") == "1"
        if self._catches:
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._asked = True

    def is_of_all(self) -> bool:
        """Whether any rank was asked, the same answer on all."""
        if not self._catches:
            return False
        asked = torch.tensor(int(self._asked))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)


def heartbeats() -> Any:
    """The client of ft_launcher's monitor, where that has started this rank."""
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    records, harm, wish, client = Records(folder, rank), read_harm(rank), Wish(), heartbeats()
    torch.manual_seed(0)
    data, model = Tokens(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    newest: list[int] = [max(checkpoint_steps(folder), default=0)]
    dist.broadcast_object_list(newest)
    if newest[0]:
        state = load(folder, newest[0])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    order = Order(DistributedSampler(data, world, rank, seed=0), world)
    parallel = DistributedDataParallel(model)
    for step in range(newest[0] + 1, STEPS + 1):
        if client is not None:
            client.send_heartbeat()
        harm.before_step(step)
        torch.manual_seed(step * world + rank)
        ids = order.ids(step)
        optimizer.zero_grad()
        loss = parallel(torch.stack([data[each] for each in ids]))
        loss.backward()
        optimizer.step()
        records.write("step", step=step, loss=loss.item(), ids=ids)
        leaving = wish.is_of_all()
        if rank == 0 and (step % EVERY == 0 or leaving):
            save(folder, step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, harm)
        if leaving:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
