"""Runs with hardware, for tests of reports; an hour of two nodes, or what a foreign command leaves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np

from shardway.rundir.attempts import AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.telemetry.store import DeviceInfo, HostTelemetry, NodeInfo, TelemetryWriter

BEGIN = 1_700_000_000.0


def make_info(host: str = "n1", gpus: int = 2, **changes: Any) -> NodeInfo:
    devices = tuple(DeviceInfo(at, "H100", f"GPU-{host}-{at}", 80 * 2**30, 700.0, "nvidia") for at in range(gpus))
    usual: dict[str, Any] = {
        "host": host,
        "node": 0,
        "job": "17",
        "attempt": 1,
        "started": BEGIN,
        "every_s": 1.0,
        "cores": 8,
        "allowed_cores": tuple(range(8)),
        "memory_bytes": 2**36,
        "memory_limit_bytes": None,
        "devices": devices,
        "missing": {},
    }
    return NodeInfo(**{**usual, **changes})


def make_host(series: dict[str, Any], times: Any = None, **info: Any) -> HostTelemetry:
    """Samples of a node; one a second unless `times` say otherwise."""
    arrays = {name: np.asarray(values, dtype=np.float32) for name, values in series.items()}
    count = len(next(iter(arrays.values())))
    found = make_info(**info)
    clock = BEGIN + np.arange(count, dtype=np.float64) if times is None else np.asarray(times, dtype=np.float64)
    return HostTelemetry(found.host, (found,), clock, arrays)


def write_foreign(folder: Path, *, seconds: int = 300) -> RunDir:
    """A command that used one of two GPUs, as job 123_4 of Slurm."""
    run = RunDir(folder)
    attempt = run.attempt(1)
    attempt.make()
    attempt.write_submission(Submission("slurm", "token", "123_4", submitted=BEGIN - 60))
    attempt.write_started(AttemptStart("123_4", "n1", "n1", BEGIN, BEGIN + 3600))
    attempt.write_result(Result(Ending.CRASHED, "exit code 3 </script>", 0, 3, job="123_4", ended=BEGIN + seconds))
    attempt.order_path.write_text('{"command": ["python", "train.py", "<b>"]}')
    attempt.job_log.write_text("epoch 1\nTraceback </pre><script>alert(1)</script>\n")
    info = make_info(gpus=2, missing={"gpu/*/sm_percent": "GPM is <denied>"})
    rows = {
        "gpu/0/use_percent": 90.0,
        "gpu/1/use_percent": 0.0,
        "gpu/0/power_w": 360.0,
        "gpu/1/power_w": 72.0,
        "gpu/0/memory_bytes": 2.0**34,
        "gpu/1/memory_bytes": 2.0**20,
        "cpu/use_percent": 50.0,
    }
    writer = TelemetryWriter(run.telemetry_folder, info, [*rows])
    for second in range(seconds):
        writer.append(BEGIN + second, [*rows.values()])
    writer.close()
    return run


def load_bench() -> Any:
    """bench/watch/report.py, which writes a run of any length."""
    path = Path(__file__).parents[2] / "bench/watch/report.py"
    spec = importlib.util.spec_from_file_location("bench_watch_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
