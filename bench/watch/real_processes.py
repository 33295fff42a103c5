"""Advice on jobs that run: real processes and the real sampler, over devices of a fake NVML.

    python bench/watch/real_processes.py [--seconds 12]

A program reads files in the process that should launch kernels; eight threads share one of two cores; one of four
devices works; a collective spins; a model is small; a power limit was set; a device is hot; nothing is wrong. Ten
samples a second, so that each takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shardway.rundir.directory import RunDir
from shardway.telemetry.store import read_telemetry
from shardway.watch.advice.advise import advise

ROOT = Path(__file__).parents[2]

READS = """
import os, sys, time
data = os.urandom(1 << 22); open('data', 'wb').write(data)
end = time.time() + float(sys.argv[1])
while time.time() < end:
    open('data', 'rb').read(); time.sleep(0.2)
"""
THREADS = """
import hashlib, sys, threading, time
end = time.time() + float(sys.argv[1])
def work():
    while time.time() < end:
        hashlib.sha256(bytes(1 << 20)).digest()
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
"""
QUIET = "import sys, time; time.sleep(float(sys.argv[1]))"


def _device(number: int, use: Any, power: Any, limit_w: int = 700, **more: Any) -> dict[str, Any]:
    values = {"use_percent": use, "power_w": power, "memory_bytes": 3e10, "sm_clock_mhz": 1900, **more}
    name = "NVIDIA H100 80GB HBM3"
    return {
        "name": name,
        "uuid": f"GPU-{number}",
        "memory_bytes": 8.5e10,
        "power_limit_w": limit_w,
        "gpm": False,
        "mig": [],
        "pids": [],
        "values": values,
    }


IDLE = {"memory_bytes": 1e6}
CASES: dict[str, tuple[str, str, list[dict[str, Any]], list[str]]] = {
    "healthy": ("", QUIET, [_device(n, 96, 560) for n in range(4)], []),
    "one of four works": (
        "idle-gpus",
        QUIET,
        [_device(0, 95, 600), *(_device(n, 0, 70, **IDLE) for n in range(1, 4))],
        [],
    ),
    "reads in its main process": ("data-wait", READS, [_device(0, {"wave": [35, 30, 1.0]}, 250)], []),
    "eight threads on one core": ("too-few-cores", THREADS, [_device(0, 25, 200)], ["taskset", "-c", "0"]),
    "a collective spins": ("communication", QUIET, [_device(n, 100, 240) for n in range(2)], []),
    "a small model": ("small-kernels", QUIET, [_device(0, 97, 150)], []),
    "a low power limit": (
        "power-limit",
        QUIET,
        [_device(n, 98, 395, limit_w=400, throttle_bits=4, sm_clock_mhz=1300) for n in range(2)],
        [],
    ),
    "a hot device": (
        "throttling",
        QUIET,
        [_device(0, 99, 600), _device(1, 99, 450, throttle_bits=0x20, sm_clock_mhz=1100)],
        [],
    ),
}


def run_case(name: str, seconds: float) -> list[str]:
    """The rules that speak on one case, in order."""
    _, program, devices, before = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "devices.json"
        described.write_text(json.dumps({"driver": "580.0", "start": time.time(), "devices": devices}))
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests/telemetry")))
        environ = {
            **os.environ,
            "SHARDWAY_NVML": "fake_nvml",
            "SHARDWAY_FAKE_NVML": str(described),
            "PYTHONPATH": paths,
        }
        command = [*before, sys.executable, "-c", program, str(seconds)]
        with subprocess.Popen(command, cwd=folder) as job:
            sampler = [*before, sys.executable, "-m", "shardway.telemetry.sampler", f"into={folder}/telemetry"]
            sampler += ["every_s=0.1", "host=node1", "node=0", "job=1", "attempt=1", f"top={job.pid}"]
            with subprocess.Popen(sampler, env=environ):
                job.wait()
        samples = sum(len(host.times) for host in read_telemetry(Path(folder) / "telemetry"))
        print(f"  {name}: {samples} samples", file=sys.stderr)
        return [advice.rule for advice in advise(RunDir(Path(folder)))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=12.0)
    options = parser.parse_args()
    right = 0
    for name, (wanted, *_) in CASES.items():
        found = run_case(name, options.seconds)
        hit = found[:1] == ([wanted] if wanted else [])
        right += hit
        print(f"{name:28} {'right' if hit else 'WRONG'}  {', '.join(found) or 'nothing'}", flush=True)
    print(f"{right} of {len(CASES)}")


if __name__ == "__main__":
    main()
