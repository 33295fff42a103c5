"""The report of a long run: its size, and the time and memory that it takes, in a process of its own.

    python bench/watch/report.py [--hours 24] [--nodes 4] [--gpus 4] [--dir FOLDER]
    python bench/watch/report.py --of RUN

Writes a run as a trainer and the samplers of its nodes would have: two attempts, steps of 0.8 s, a sample a second of
every node, one GPU that never works, one that slows down with heat, a node whose ranks share four cores, a rank that
waits for its data; then makes its report. `write_run` is also what tests look at.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from shardway.rundir.directory import RunDir
from shardway.telemetry.store import DeviceInfo, NodeInfo, TelemetryWriter
from shardway.watch.report import render_report

BEGIN = 1_795_000_000.0
_GIB = 2.0**30


def write_run(
    folder: Path,
    *,
    hours: float = 24.0,
    nodes: int = 4,
    gpus: int = 4,
    step_s: float = 0.8,
    every_s: float = 1.0,
    seed: int = 0,
) -> RunDir:
    """A run of two attempts with telemetry; its last GPU never works, the one before it throttles."""
    run, draw = RunDir(folder), np.random.default_rng(seed)
    run.create()
    run.write_request("", _RESOLVED)
    half, wait = hours * 1800, 2.5 * 3600
    spans = [(BEGIN, BEGIN + half), (BEGIN + half + wait, BEGIN + 2 * half + wait)]
    total = int(2 * half / step_s)
    lines: list[dict[str, Any]] = []
    at_step = 0
    for number, (first, last) in enumerate(spans):
        base = at_step - at_step % 500
        start = {"event": "started", "time": first, "step": base, "world": nodes * gpus, "device": "cuda", "host": "n1"}
        lines.append({**start, "total_steps": total, "tokens_per_step": 1 << 20, "samples_per_step": 256,
                      "parameters": 7_241_732_096, "bytes_per_token": 4.2, "launcher": "shardway", "torch": "2.13.0",
                      "python": "3.12.1", "machine": {"CPU": "2 x 32 cores", "accelerator": "4 x H100 SXM 64 GB"},
                      "spent": {"start": 40.0}})  # fmt: skip
        now, step, spent = first + 60, base, {"start": 60.0, "step": 0.0, "data": 0.0, "save": 0.0, "validate": 0.0}
        while now < last - 30 and step < total:
            slow = 1.6 if step % 4000 > 3700 else 1.0
            took = step_s * (1 + 0.03 * draw.standard_normal() ** 2) * (1.15 if slow > 1 else 1)
            idle = 0.01 * slow + (0.25 * draw.random() if slow > 1 else 0)
            now, step = now + took + idle, step + 1
            spent["step"] += took
            spent["data"] += idle
            loss = 1.9 + 9.2 / (1 + step / 300) ** 0.6 + 0.03 * draw.standard_normal()
            spike = 3.0 if step in (20_000, 20_001) else 0.0
            warm = min(1.0, step / 2000)
            lines.append({"event": "step", "step": step, "loss": round(loss + spike, 5), "position": step * 256,
                          "grad_norm": round(float(0.4 + 0.1 * draw.standard_normal() ** 2 + 4 * spike), 4),
                          "lr": 3e-4 * warm * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * step / total))),
                          "tokens_per_s": (1 << 20) / took, "samples_per_s": 256 / took, "seconds": took,
                          "time": now})  # fmt: skip
            if step % 500 == 0:
                now += 6.0
                spent["save"] += 6.0
                lines.append({"event": "saved", "step": step, "name": f"step-{step:09d}", "bytes": 86 * 10**9,
                              "seconds": 6.0, "spent": dict(spent), "time": now})  # fmt: skip
            if step % 2000 == 0:
                now += 20.0
                spent["validate"] += 20.0
                lines.append({"event": "validation", "step": step, "loss": loss + 0.05, "seconds": 20.0, "time": now})
        at_step = step
        if number == 0:
            lines.append({"event": "fault", "step": step, "kind": "JobError",
                          "message": "rank 5 was lost: node n2 rebooted",
                          "exit_code": 4, "time": last - 10})  # fmt: skip
            lines.append({"event": "failed", "step": step, "reason": "rank 5 was lost: node n2 rebooted",
                          "spent": dict(spent), "time": last - 9})  # fmt: skip
        else:
            lines.append({"event": "finished", "step": step, "reason": "all steps are done", "spent": dict(spent),
                          "time": now})  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "events" / "rank-00000.jsonl").write_text(text)
    run.write_status(state="finished", step=at_step, total_steps=total, reason="all steps are done")
    for node in range(nodes):
        _write_node(run, node, gpus, spans, draw, every_s=every_s, is_last=node == nodes - 1)
    return run


def _write_node(
    run: RunDir, node: int, gpus: int, spans: list[tuple[float, float]], draw: Any, *, every_s: float, is_last: bool
) -> None:
    devices = tuple(
        DeviceInfo(index, "NVIDIA H100 SXM", f"GPU-{node}-{index}", int(80 * _GIB), 700.0, "nvidia")
        for index in range(gpus)
    )
    for attempt, (first, last) in enumerate(spans, 1):
        info = NodeInfo(f"n{node + 1}.cluster", node, f"{4000 + attempt}", attempt, first, every_s, 64,
                        tuple(range(64)),
                        int(512 * _GIB), None, devices, {"lustre/*": "the counters are for root alone"})  # fmt: skip
        every = round(every_s)
        sampled = _sample(node, gpus, first, last, draw, is_last=is_last)
        columns = {name: values[::every] for name, values in sampled.items()}
        writer = TelemetryWriter(run.telemetry_folder, info, [*columns])
        rows = np.array([*columns.values()], dtype=np.float64).T.tolist()
        for number, row in enumerate(rows):
            writer.append(first + 3 + number * every, row)
        writer.close()


def _sample(node: int, gpus: int, first: float, last: float, draw: Any, *, is_last: bool) -> dict[str, Any]:
    count = int(last - first - 6)
    seconds = np.arange(count)
    since = first - BEGIN + seconds
    begins, saves = seconds > 55, seconds % 406 < 6
    works = begins & ~saves
    found: dict[str, Any] = {}

    def noise(scale: float) -> Any:
        return scale * draw.standard_normal(count)

    for index in range(gpus):
        idle, hot = is_last and index == gpus - 1, is_last and index == gpus - 2
        on = np.zeros(count, bool) if idle else works
        slow = 1 - 0.12 * (hot & (np.sin(since / 4000) > 0.3))
        use = np.where(on, np.clip(96 + noise(2.5), 0, 100), 0.0)
        use = np.where(on & (seconds % 3300 > 3000), use * 0.72, use)
        power = np.where(on, (610 + noise(25)) * slow * use / 96, 78 + noise(2))
        found |= {
            f"gpu/{index}/use_percent": np.round(use),
            f"gpu/{index}/sm_percent": np.round(use * 0.74, 1),
            f"gpu/{index}/tensor_percent": np.round(use * 0.43, 1),
            f"gpu/{index}/dram_percent": np.round(use * 0.38, 1),
            f"gpu/{index}/memory_bytes": np.where(begins & (not idle), (68.4 + (0.3 * index)) * _GIB, 0.6 * _GIB),
            f"gpu/{index}/power_w": np.round(power, 1),
            f"gpu/{index}/temperature_c": np.round(np.where(on, 61 + 3 * index + (14 if hot else 0) + noise(1), 34)),
            f"gpu/{index}/sm_clock_mhz": np.round(np.where(on, 1755 * slow, 345)),
            f"gpu/{index}/throttle_bits": np.where(on & (slow < 1), 0x20, 0),
            f"gpu/{index}/energy_j": np.cumsum(power),
            f"gpu/{index}/ecc_errors": np.zeros(count),
            f"gpu/{index}/nvlink_rx_bytes_per_s": np.where(on, 92e9 + noise(4e9), 0),
            f"gpu/{index}/nvlink_tx_bytes_per_s": np.where(on, 92e9 + noise(4e9), 0),
        }
    for core in range(64):  # an eighth of them feeds the GPUs; node 2 of more is bound to four cores
        busy = (core < 4) if node == 1 else core % 8 == 0
        found[f"core/{core}/use_percent"] = np.clip(
            np.where(works, (88 if busy else 7) + noise(4), 2 + noise(1)), 0, 100
        )
    for index in range(gpus):  # the last rank waits for its data
        late = is_last and index == gpus - 1
        draws = draw.random(count)
        activity = np.where(draws < (0.25 if late else 0.012), 2, 3)
        found[f"rank/{node * gpus + index}/activity"] = np.where(works, activity, np.where(begins, 6, 0))
    return found | {
        "cpu/load": np.clip(np.where(works, (96 if node == 1 else 11) + noise(1), 1), 0, None),
        "cpu/use_percent": np.clip(np.where(works, 17 + noise(2), 3 + noise(0.5)), 0, 100),
        "cpu/job_cores": np.clip(np.where(works, 10 + noise(1), 2), 0, 64),
        "memory/job_bytes": (88 + 30 * (since / max(1.0, since[-1])) * (node == 1) + noise(0.5)) * _GIB,
        "io/read_bytes_per_s": np.abs(np.where(works, 38e6 + noise(9e6), 0)),
        "io/write_bytes_per_s": np.where(saves & begins, 3.4e9 + noise(2e8), 1e4),
        "io/rchar_bytes_per_s": np.abs(np.where(works, 120e6 + noise(2e7), 0)),
        "net/lo/rx_bytes_per_s": np.full(count, 5e5),
        "net/eth0/rx_bytes_per_s": np.abs(2e5 + noise(5e4)),
        "ib/mlx5_0:1/rx_bytes_per_s": np.where(works, 21e9 + noise(2e9), 1e5),
        "ib/mlx5_0:1/tx_bytes_per_s": np.where(works, 21e9 + noise(2e9), 1e5),
    }


_RESOLVED = """format = 1
[model]
kind = "transformer"                     # default
dim = 4096                               # my.toml
layers = 32                              # my.toml
norm_eps = 1e-05                         # default
[data]
path = "/data/tokens"                    # my.toml
seq_len = 4096                           # my.toml
[train]
global_batch = 256                       # my.toml
steps = 108000                           # --set
seed = 0                                 # default
[optim]
lr = 0.0003                              # my.toml
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--of", type=Path, default=None, help="the report of this run alone")
    options = parser.parse_args()
    if options.of is not None:
        measure(RunDir(options.of))
        return
    with tempfile.TemporaryDirectory() as scratch:
        run = write_run(
            options.dir or Path(scratch) / "run", hours=options.hours, nodes=options.nodes, gpus=options.gpus
        )
        print(f"{options.hours:g} h, {options.nodes} x {options.gpus} GPUs at 1 Hz: ", end="", flush=True)
        subprocess.run([sys.executable, __file__, "--of", str(run.path)], check=True)


def measure(run: RunDir) -> None:
    """Print what the report of a run takes."""
    begun, busy = time.perf_counter(), time.process_time()
    html = render_report(run)
    took, busy = time.perf_counter() - begun, time.process_time() - busy
    run.write_report(html)
    # Not by getrusage: its largest size of a program includes that of the process that it was forked from.
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    print(f"{len(html.encode()) / 1e6:.2f} MB, {took:.1f} s ({busy:.1f} s CPU), peak {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
