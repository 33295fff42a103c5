"""The probe of torch, in a process of its own: the time of its import, and a sum over all ranks.

Invariant: what is known is in the result file after each stage, so that the waiting process learns where a hang is. The
file is the only thing it leaves. Run as `python -m shardway.ranks.doctor.torch_probe TASK`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardway.hardware.command import run_command
from shardway.ranks.launcher import Placement, find_placement
from shardway.rundir.file_io import write_json

_ROUNDS = 5


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


class _Progress:
    """The result file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {}

    def note(self, **facts: Any) -> None:
        """Add facts, so that they are known even if the process hangs afterwards."""
        self._found.update(facts)
        write_json(self._path, self._found, durable=False)


def main() -> None:
    """Do the task that the command line names."""
    table = json.loads(sys.argv[1])
    progress = _Progress(Path(table.pop("result")))
    task = Task(**table)
    try:
        _measure(task, progress, os.environ)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        progress.note(error=lines[0])


def _measure(task: Task, progress: _Progress, environ: Mapping[str, str]) -> None:
    progress.note(stage="import torch")
    start = time.monotonic()
    import torch

    progress.note(import_s=time.monotonic() - start, torch=torch.__version__, cuda=torch.version.cuda or "")
    placement = find_placement(environ)
    if task.device == "cuda":
        progress.note(stage="CUDA")
        progress.note(devices=torch.cuda.device_count(), available=torch.cuda.is_available())
    if task.deep and task.device == "cuda" and torch.cuda.is_available():
        progress.note(stage="matrix product")
        progress.note(**_measure_device(placement.local_rank % torch.cuda.device_count()))
    if task.sum_bytes and placement.world > 1:
        progress.note(stage="process group")
        signal.alarm(_limit_s(task))  # gloo and NCCL can wait for ever; the default action ends this process
        _sum(task, placement, progress)
    progress.note(stage="end")


def _sum(task: Task, placement: Placement, progress: _Progress) -> None:
    """Time the sum of a tensor over all ranks."""
    import torch
    from torch import distributed as dist

    from shardway.ranks.start import StartOptions, start_ranks

    options = StartOptions(task.device, 1, start_timeout_s=task.wait_s, collective_timeout_s=task.wait_s)
    ranks = start_ranks(placement, options)
    progress.note(stage="sum over all ranks")
    values = torch.ones(task.sum_bytes // 4, device=ranks.device)
    seconds = []
    for _ in range(_ROUNDS + 1):
        ranks.barrier()
        start = time.monotonic()
        dist.all_reduce(values)
        if ranks.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.monotonic() - start)
        values.fill_(1.0)
    progress.note(sum_s=sorted(seconds[1:])[_ROUNDS // 2], sum_bytes=task.sum_bytes)
    ranks.end()


def _measure_device(index: int) -> dict[str, Any]:
    """Rate of a bf16 matrix product over about two seconds, and which other devices this one reaches directly."""
    import torch

    size, device = 8192, torch.device("cuda", index)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    torch.matmul(a, b)
    torch.accelerator.synchronize(device)
    start, products = time.monotonic(), 0
    while time.monotonic() - start < 2.0:
        for _ in range(10):
            torch.matmul(a, b)
        torch.accelerator.synchronize(device)
        products += 10
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    apart = [other for other in others if not torch.cuda.can_device_access_peer(index, other)]
    return {"tflops": products * 2 * size**3 / (time.monotonic() - start) / 1e12, "apart": apart, "others": len(others)}


if __name__ == "__main__":
    main()
