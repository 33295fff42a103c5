"""The probe of torch, in a process of its own: the time of its import, and a sum over all ranks.

Invariant: what is known is in the result file after each stage, so that the waiting process learns where a hang is. The
file is the only thing it leaves. Run as `python -m shardway.ranks.doctor.torch_probe TASK`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardway.hardware.command import run_command
from shardway.ranks.launcher import find_placement
from shardway.rundir.file_io import write_json


@dataclass(frozen=True)
class Task:
    """What to measure: on which device, the bytes that are summed over ranks (0: not at all), how long to wait."""

    device: str
    sum_bytes: int
    wait_s: float
    deep: bool = False


def measure(task: Task, limit_s: float) -> dict[str, Any]:
    """Run the probe and return its result: "stage" is the last one that began, "error" the reason why it stopped."""
    with tempfile.TemporaryDirectory(prefix="shardway-doctor-") as folder:
        result = Path(folder) / "result"
        packed = json.dumps({**asdict(task), "result": str(result)})
        answer = run_command((sys.executable, "-m", "shardway.ranks.doctor.torch_probe", packed), limit_s)
        try:
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {"stage": "python"}
    if "error" in found or found.get("stage") == "end":  # however the process ended after it wrote that
        return found
    if answer.hung or answer.code == -signal.SIGALRM:
        return {**found, "error": f"no end within {limit_s if answer.hung else _limit_s(task):g} s"}
    if not answer.ok:
        lines = [line for line in answer.err.splitlines() if line.strip()]
        return {**found, "error": lines[-1] if lines else f"exit code {answer.code}"}
    return found


def _limit_s(task: Task) -> int:
    """Seconds for starting the process group and the sum: a little more than the waits that torch is given."""
    return int(task.wait_s) + 15


def main() -> None:
    """Do the task that the command line names."""
    table, found = json.loads(sys.argv[1]), dict[str, Any]()
    path = Path(table.pop("result"))

    def note(**facts: Any) -> None:  # known even if the process hangs afterwards
        found.update(facts)
        write_json(path, found, durable=False)

    try:
        _measure(Task(**table), note)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        note(error=lines[0])


def _measure(task: Task, note: Callable[..., None]) -> None:
    note(stage="import torch")
    start = time.monotonic()
    import torch

    note(import_s=time.monotonic() - start, torch=torch.__version__, cuda=torch.version.cuda or "")
    placement = find_placement(os.environ)
    if task.device == "cuda":
        note(stage="CUDA")
        note(devices=torch.cuda.device_count(), available=torch.cuda.is_available())
    if task.deep and task.device == "cuda" and torch.cuda.is_available():
        note(stage="matrix product")
        note(**_measure_device(placement.local_rank % torch.cuda.device_count()))
    if not task.sum_bytes or placement.world == 1:
        note(stage="end")
        return
    note(stage="process group")
    signal.alarm(_limit_s(task))  # gloo and NCCL can wait for ever; the default action ends this process
    from torch import distributed as dist

    from shardway.ranks.start import StartOptions, start_ranks

    options = StartOptions(task.device, 1, start_timeout_s=task.wait_s, collective_timeout_s=task.wait_s)
    ranks = start_ranks(placement, options)
    note(stage="sum over all ranks")
    values = torch.ones(task.sum_bytes // 4, device=ranks.device)
    seconds = []
    for _ in range(6):  # the first warms up
        ranks.barrier()
        start = time.monotonic()
        dist.all_reduce(values)
        if ranks.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.monotonic() - start)
        values.fill_(1.0)
    note(sum_s=sorted(seconds[1:])[2], sum_bytes=task.sum_bytes)
    ranks.end()
    note(stage="end")


_PRODUCTS_S, _COPIES_S = 2.0, 0.5


def _measure_device(index: int) -> dict[str, Any]:
    """Rates of the products of a layer in 16 bits and of a copy through the memory, as `shardway bench device` measures
    them (none where its memory is in use), and which other devices this one reaches directly."""
    import torch

    from shardway.bench.kernels import PEAK_COPY, list_formats, time_copy, time_layer

    device = torch.device("cuda", index)
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    apart = [other for other in others if not torch.cuda.can_device_access_peer(index, other)]
    found: dict[str, Any] = {"apart": apart, "others": len(others)}
    with contextlib.suppress(torch.OutOfMemoryError):
        layer = time_layer(device, next(name for name in list_formats(device) if name in ("bf16", "fp16")), _PRODUCTS_S)
        found |= {"tflops": layer.flops_per_s / 1e12, "format": layer.format}
        torch.cuda.empty_cache()
        found["copy_gbs"] = time_copy(device, PEAK_COPY["cuda"], _COPIES_S).bytes_per_s / 1e9
    return found


if __name__ == "__main__":
    main()
