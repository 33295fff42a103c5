from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from shardway.bench import kernels
from shardway.bench.kernels import CopyTimes, KernelTimes, LayerTimes
from shardway.hardware.catalogue import Dtype
from shardway.hardware.command import CommandResult
from shardway.ranks.doctor import torch_probe
from shardway.ranks.doctor.torch_probe import Task, measure

TASK = Task("cpu", 1024, wait_s=30.0)


@pytest.mark.parametrize(
    ("noted", "answer", "found"),
    [
        ({"stage": "end", "sum_s": 0.1}, CommandResult(0), {"stage": "end", "sum_s": 0.1}),
        # hangs or aborts only while it is torn down, after it has said all
        ({"stage": "end", "sum_s": 0.1}, CommandResult(-9, hung=True), {"stage": "end", "sum_s": 0.1}),
        ({"stage": "end", "sum_s": 0.1}, CommandResult(-signal.SIGABRT), {"stage": "end", "sum_s": 0.1}),
        (
            {"stage": "process group"},
            CommandResult(-signal.SIGALRM),
            {"stage": "process group", "error": "no end within 45 s"},
        ),
        (
            {"stage": "import torch"},
            CommandResult(-9, hung=True),
            {"stage": "import torch", "error": "no end within 100 s"},
        ),
        (
            {"stage": "CUDA", "error": "no driver"},
            CommandResult(-9, hung=True),
            {"stage": "CUDA", "error": "no driver"},
        ),
        (
            None,
            CommandResult(1, err="Traceback\nModuleNotFoundError: x\n"),
            {"stage": "python", "error": "ModuleNotFoundError: x"},
        ),
        (None, CommandResult(-11), {"stage": "python", "error": "exit code -11"}),
    ],
)
def test_what_the_process_left_tells_where_it_stopped(
    noted: dict[str, Any] | None, answer: CommandResult, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: tuple[str, ...], limit_s: float) -> CommandResult:
        packed = json.loads(words[-1])
        assert (packed["device"], packed["sum_bytes"], packed["wait_s"]) == ("cpu", 1024, 30.0)
        if noted is not None:
            Path(packed["result"]).write_text(json.dumps(noted))
        return answer

    monkeypatch.setattr(torch_probe, "run_command", run)
    assert measure(TASK, 100.0) == found


def test_a_gpu_is_measured_as_bench_device_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver that is pretended: the second of three devices, which does not reach the third."""
    times, device = KernelTimes(9, 0.01, 0.01), torch.device("cuda", 1)

    def time_layer(where: torch.device, name: Dtype, seconds: float) -> LayerTimes:
        assert (where, name) == (device, "bf16")
        return LayerTimes(name, ((1000, 1000, 1000),), times)

    def time_copy(where: torch.device, size: int, seconds: float) -> CopyTimes:
        if is_full:
            raise torch.OutOfMemoryError
        return CopyTimes(size, times)

    monkeypatch.setattr(kernels, "list_formats", lambda where: ("fp32", "bf16", "fp16"))
    monkeypatch.setattr(kernels, "time_layer", time_layer)
    monkeypatch.setattr(kernels, "time_copy", time_copy)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: there == 0)
    is_full = False
    found = torch_probe._measure_device(1)
    assert (found["apart"], found["others"], found["format"]) == ([2], 2, "bf16")
    assert found["tflops"] == pytest.approx(2 * 1000**3 / 0.01 / 1e12, rel=1e-12)
    assert found["copy_gbs"] == pytest.approx(2 * 2**30 / 0.01 / 1e9, rel=1e-12)
    is_full = True
    assert set(torch_probe._measure_device(1)) == {"apart", "others", "format", "tflops"}
