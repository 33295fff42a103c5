"""What a heartbeat to the monitor of ft_launcher takes, and what a change of activity takes with it.

    python bench/faults/heartbeat.py        # with nvidia-resiliency-ext installed (the extra `nvidia`)

Invariant: the monitor is the real one, in a process of its own; nothing is trained.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing
from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorServer

from shardway.ranks.ft_launcher_client import MonitorHeartbeat, open_monitor
from shardway.ranks.hang import HangTimeout
from shardway.ranks.launcher import Placement
from shardway.telemetry.activity import Activity

TIMES = 2000
STEP_S = 0.01


def measure(work: Callable[[int], None]) -> str:
    """Median and 99th percentile in microseconds."""
    spent = []
    for number in range(TIMES):
        began = time.perf_counter()
        work(number)
        spent.append(1e6 * (time.perf_counter() - began))
    spent.sort()
    return f"median {spent[TIMES // 2]:.1f}, 99th percentile {spent[TIMES * 99 // 100]:.1f}"


def write(page: MonitorHeartbeat, apart_s: float) -> Callable[[int], None]:
    """A change of activity in the loop, so many seconds after the one before."""
    begun = time.monotonic()

    def change(number: int) -> None:
        page.write((Activity.DATA, Activity.STEP)[number % 2], number // 2, begun + (number + 1) * apart_s)

    return change


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "monitor")
        config = FaultToleranceConfig(enable_nic_monitor=False, log_level=logging.ERROR)
        start = torch.multiprocessing.get_context("fork")
        monitor = RankMonitorServer.run_in_subprocess(config, socket, mp_ctx=start)
        os.environ.update(FT_RANK_MONITOR_IPC_SOCKET=socket, RANK="0", LOCAL_RANK="0")
        page = open_monitor(Placement(0, 1, 0, 1, 0, 1, "127.0.0.1", 0, "ft_launcher"))
        if page is None:
            raise SystemExit("the monitor does not answer")
        page.watch(HangTimeout(600.0))
        print("us of a change of activity that beats:", measure(write(page, 2.0)))
        print("us of one in steps of 20 ms, of which one a second beats:", measure(write(page, STEP_S)))
        monitor.terminate()
        monitor.join()


if __name__ == "__main__":
    main()
