from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

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
