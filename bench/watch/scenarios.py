"""Is the first piece of advice the right one? Jobs with one known fault, and healthy ones, as samples show them.

    python bench/watch/scenarios.py [--draws 20] [--healthy 200] [--seed 0] [--only NAME] [--misses]

Each scenario is drawn often: nodes, accelerators and their kind, length (5 minutes to 24 hours at 1 Hz), a step's time,
noise, start-up, saves, validations, missing series, own runs (with events) and foreign commands. A job is simulated
from what its devices do in each phase of a step (computing, a collective that spins, waiting for the host), and not
from any threshold of the rules, which this file must not import. Seeds from 1,000,000 on are held out: rules are not
changed by what they show. The baseline is what jobstats and LLview look at: use of accelerators, kills, time asked.
Own runs have at most 3,000 steps, so that a draw is quick.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardway.rundir.directory import RunDir
from shardway.telemetry.host import OF_PROCESSES
from shardway.telemetry.sampler import PROCESSES_EACH
from shardway.telemetry.store import DeviceInfo, HostTelemetry, NodeInfo
from shardway.watch.advice.advise import advise_on
from shardway.watch.advice.evidence import gather

GIB = 2**30
KINDS = {  # name: memory GiB, watts, watts at rest, MHz, whether GPM, maker
    "Tesla V100-SXM2-32GB": (32, 300, 45, 1530, False, "nvidia"),
    "NVIDIA A100-SXM4-80GB": (80, 400, 62, 1410, False, "nvidia"),
    "NVIDIA A100-SXM4-40GB": (40, 400, 55, 1410, False, "nvidia"),
    "NVIDIA H100 80GB HBM3": (80, 700, 75, 1980, True, "nvidia"),
    "NVIDIA H200": (141, 700, 80, 1980, True, "nvidia"),
    "NVIDIA Q77 Prototype": (64, 500, 60, 1700, False, "nvidia"),
    "AMD Instinct MI250X": (64, 560, 95, 1700, False, "amd"),
}


@dataclass
class Job:
    """What one draw is. Shares are of a step; `late`: per device, how much longer than the others it computes."""

    rng: np.random.Generator
    nodes: int = 1
    per_node: int = 4
    kind: str = "NVIDIA H100 80GB HBM3"
    foreign: bool = False
    length_s: int = 3600
    period_s: float = 1.0
    start_s: float = 60.0
    data: float = 0.004
    host: float = 0.02
    comm: float = 0.04
    intensity: float = 0.7  # of the power above rest, while computing
    spin: float = 0.25  # the same while a collective waits
    sm: float = 80.0
    tensor: float = 35.0
    dram: float = 30.0
    late: dict[tuple[int, int], float] = field(default_factory=dict)
    gaps: dict[tuple[int, int], float] = field(default_factory=dict)
    clocks: dict[tuple[int, int], float] = field(default_factory=dict)
    idle: set[tuple[int, int]] = field(default_factory=set)
    hot: dict[tuple[int, int], float] = field(default_factory=dict)
    cap: float = 1.0  # the power limit that was set, of the part's own
    ecc: tuple[int, int] | None = None
    memory: float = 0.75
    host_cores: float = 1.0  # of the job for each device that works
    loader_cores: float = 0.4
    cores: int = 64
    allowed: int = 64
    bound: int = 0  # cores that all threads share; 0: not bound
    load: float | None = None
    leak: float = 0.0  # bytes per second
    kills: bool = False
    lead_s: float = 0.0
    tail_s: float = 0.0
    save_every_s: float = 900.0
    save_s: float = 4.0
    validate_every_s: float = 700.0
    validation_s: float = 8.0
    asked_share: float | None = None
    hang_at: float | None = None
    values: dict[str, Any] = field(default_factory=dict)
    numerics: dict[str, Any] = field(default_factory=lambda: {"precision.compute": "bf16", "train.compile": "model"})
    machine: dict[str, str] = field(default_factory=dict)
    log: str = ""
    sockets: bool = False
    linked: bool = False  # whether traffic between devices is always measured
    read: float = 4e7
    result: str = "finished"
    passes: int = 1

    def places(self) -> list[tuple[int, int]]:
        return [(node, gpu) for node in range(self.nodes) for gpu in range(self.per_node)]

    def between(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]


def draw_healthy(rng: np.random.Generator) -> Job:
    job = Job(rng)
    job.kind = job.pick(*KINDS)
    job.nodes, job.per_node = job.pick((1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 4), (2, 2), (3, 4), (8, 1), (1, 4))
    if job.per_node == 1 and job.nodes > 1:
        job.cores = job.allowed = 72
    else:
        job.cores = job.pick(32, 48, 64, 96, 128)
        job.allowed = job.cores if job.nodes > 1 or rng.random() < 0.5 else max(8 * job.per_node, job.cores // 2)
        job.allowed = min(job.allowed, job.cores)
    job.foreign = bool(rng.random() < 0.4)
    job.length_s = int(
        math.exp(rng.uniform(math.log(300), math.log(86400 if job.nodes * job.per_node <= 4 else 14400)))
    )
    shortest = 0.05 if job.foreign else max(0.05, job.length_s / 3000)
    job.period_s = max(shortest, math.exp(rng.uniform(math.log(0.05), math.log(20))))
    job.start_s = min(job.between(15, 300), 0.2 * job.length_s)
    job.data, job.host, job.comm = job.between(0, 0.02), job.between(0.0, 0.06), job.between(0.0, 0.15)
    if job.nodes * job.per_node == 1:
        job.comm = 0.0
    job.intensity, job.spin = job.between(0.5, 0.98), job.between(0.15, 0.3)
    job.sm, job.tensor, job.dram = job.between(65, 98), job.between(12, 65), job.between(15, 60)
    if "Q77" in job.kind:  # no catalogue knows it
        job.numerics["precision.compute"] = job.pick("bf16", "fp32")
    if "V100" in job.kind:
        job.numerics["precision.compute"] = "fp16"
    job.memory = job.between(0.3, 0.96)
    job.host_cores, job.loader_cores = job.between(0.6, 1.2), job.between(0.1, 3.0)
    job.save_every_s, job.save_s = job.between(300, 3600), job.between(0.3, 8)
    job.validate_every_s, job.validation_s = job.between(200, 2000), job.between(1, 20)
    job.asked_share = job.pick(None, job.between(0.65, 0.98))
    job.read = math.exp(rng.uniform(math.log(1e5), math.log(3e8)))
    job.values = {
        "model": {
            "kind": "transformer",
            "hf": "",
            "layers": 16,
            "dim": 2048,
            "ffn_dim": 5632,
            "heads": 16,
            "kv_heads": 16,
            "head_dim": 128,
            "vocab": 50304,
        },
        "train": {"micro_batch": 4, "global_batch": 4 * job.nodes * job.per_node, "compile": "model"},
        "data": {"workers": job.pick(2, 4, 8), "seq_len": 1024},
        "parallel": {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp_replicate": 1},
        "checkpoint": {"every": "30 min", "background": job.pick(True, False)},
    }
    return job


# --- from a job to samples and events


def _busy(times: np.ndarray, period: float, begin: float, end: float) -> np.ndarray:
    """The share of each second that lies between two parts of a step, from a clock that runs with the steps."""

    def until(at: np.ndarray) -> np.ndarray:
        whole = np.floor(at / period)
        return whole * (end - begin) * period + np.clip(at - whole * period - begin * period, 0, (end - begin) * period)

    return until(times) - until(times - 1.0)


def simulate(job: Job, folder: Path) -> tuple[RunDir, list[HostTelemetry]]:
    """A run directory with events, and the samples of its hosts."""
    rng, now = job.rng, 1.79e9
    count, alone = job.length_s, job.nodes * job.per_node - len(job.idle) == 1
    t = np.arange(count, dtype=np.float64)
    begin, end = job.lead_s + job.start_s, count - job.tail_s - min(job.between(2, 20), 0.02 * count)
    stop = job.hang_at * count if job.hang_at is not None else end
    breaks: list[tuple[float, float, str]] = []
    for name, every, lasts in (
        ("saved", job.save_every_s, job.save_s),
        ("validation", job.validate_every_s, job.validation_s),
    ):
        at = begin + every * job.between(0.3, 1.0)
        while at < stop - lasts - job.period_s:
            breaks.append((at, at + lasts * job.between(0.8, 1.2), name))
            at += every
    breaks.sort()
    training = (t >= begin) & (t < stop)
    saving, validating = np.zeros(count, bool), np.zeros(count, bool)
    for first, last, name in breaks:
        (saving if name == "saved" else validating)[int(first) : math.ceil(last)] = True
    clock = np.cumsum(1.0 + 0.02 * rng.standard_normal(count)).clip(1)
    hosts = []
    watts_of = KINDS[job.kind]
    slow = 1.0 + max(job.late.values(), default=0.0)
    for node in range(job.nodes):
        series: dict[str, np.ndarray] = {}
        gib, limit, rest, mhz, gpm, maker = watts_of
        denied = rng.random() < 0.25
        uses = []
        for gpu in range(job.per_node):
            place = (node, gpu)
            start = f"gpu/{gpu}/"
            is_idle = place in job.idle
            own = (1.0 + job.late.get(place, 0.0)) / slow if job.late else 1.0
            wait = job.data + job.host + job.gaps.get(place, 0.0)
            busiest = job.data + job.host + max(job.gaps.values(), default=0.0)
            computing_end = wait + (1.0 - busiest - job.comm) * own
            compute = _busy(clock, job.period_s, wait, min(1.0, computing_end))
            comm = np.zeros(count) if alone else _busy(clock, job.period_s, min(1.0, computing_end), 1.0)
            if alone:
                compute = _busy(clock, job.period_s, wait, 1.0)
            compute, comm = compute * training, comm * training
            if job.hang_at is not None:
                after = t >= stop
                compute, comm = np.where(after, 0, compute), np.where(after, 1.0, comm)
            compute, comm = np.where(saving, 0.02, compute), np.where(saving, 0, comm)
            compute = np.where(validating & training, 0.6 * compute, compute)
            warming = (t >= job.lead_s + 0.5 * job.start_s) & (t < begin)
            compute = np.where(warming, (rng.random(count) < 0.15) * 0.5, compute)
            if is_idle:
                compute, comm = np.zeros(count), np.zeros(count)
            hot = np.zeros(count, bool)
            if place in job.hot:
                hot = (rng.random(count) < max(0.02, 120 / count)).cumsum() % 20 < 20 * job.hot[place]
            speed = np.where(hot, job.between(0.55, 0.8), 1.0) * job.clocks.get(place, 1.0)
            drawn = rest + (limit - rest) * (compute * job.intensity * speed + comm * job.spin)
            capped = drawn > job.cap * limit  # a clock that is x times as high takes about x squared of the power
            speed = np.where(capped, speed * np.sqrt((job.cap * limit - rest) / np.maximum(drawn - rest, 1.0)), speed)
            use = (100 * (compute + comm) + 1.5 * rng.standard_normal(count) * (compute + comm > 0.01)).clip(0, 100)
            power = np.minimum(drawn, job.cap * limit)
            power = np.convolve(power, [0.5, 0.3, 0.2])[:count] * job.between(0.97, 1.03)
            power = (power + 0.01 * limit * rng.standard_normal(count)).clip(rest * 0.9, job.cap * limit * 1.01)
            series[start + "use_percent"] = use
            series[start + "power_w"] = power
            loaded = (t > job.lead_s + 0.5 * job.start_s) & (not is_idle)
            series[start + "memory_bytes"] = np.where(loaded, job.memory * gib * GIB, job.between(3, 500) * 2**20)
            series[start + "temperature_c"] = 35 + 35 * power / limit + 15 * hot
            busy = compute + comm > 0.05
            series[start + "sm_clock_mhz"] = np.where(busy, mhz * speed * (1 - 0.01 * rng.random(count)), 0.3 * mhz)
            bits = np.where(busy, np.where(power > 0.93 * job.cap * limit, 4, 0), 1) | np.where(
                hot & busy, job.pick(0x20, 0x48), 0
            )
            series[start + "throttle_bits"] = bits
            series[start + "energy_j"] = power.cumsum()
            errors = np.zeros(count)
            if job.ecc == place:
                errors[int(job.between(0.2, 0.9) * count) :] = job.pick(1, 2, 8)
            series[start + "ecc_errors"] = errors
            series[start + "job_processes"] = np.where(loaded, 1, 0)
            if gpm and not denied:
                series[start + "sm_percent"] = compute * job.sm + comm * job.between(8, 22)
                series[start + "tensor_percent"] = compute * job.tensor
                series[start + "dram_percent"] = compute * job.dram + comm * job.between(1, 6)
            if (rng.random() < 0.7 or job.linked) and maker == "nvidia":
                series[start + "nvlink_tx_bytes_per_s"] = comm * job.between(1e9, 1e11)
            uses.append(compute + comm)
        working = sum((node, gpu) not in job.idle for gpu in range(job.per_node))
        demand = working * (job.host_cores + job.loader_cores) * np.where(training, 1.0, 0.5)
        if job.hang_at is not None:
            demand = np.where(t >= stop, working * 1.0, demand)
        demand = demand * (1 + 0.05 * rng.standard_normal(count))
        most = job.bound or job.allowed
        spent = demand.clip(0.01, most)
        series["cpu/job_cores"] = spent
        series["cpu/use_percent"] = (100 * spent / job.allowed + 0.5 * rng.random(count)).clip(0, 100)
        load = job.load if job.load is not None else None
        series["cpu/load"] = (np.full(count, load) if load else demand.clip(0.01)) * (1 + 0.05 * rng.random(count))
        threads, ready = working * job.pick(30, 60, 120) + 5.0, demand if load is None else np.full(count, load)
        series["cpu/runnable_threads"] = np.minimum(threads, ready.clip(0).round())
        if rng.random() < 0.8 or job.bound:
            shown = min(job.allowed, 32)
            for core in range(shown):
                if job.bound:
                    level = np.where(core < job.bound, 99.0, 1.0)
                else:
                    level = 100 * (spent - core).clip(0, 1) if spent.mean() < shown else 100 * spent / job.allowed
                series[f"core/{core}/use_percent"] = (level + rng.random(count)).clip(0, 100)
        base = job.between(4, 40) * GIB
        fills = 1 - np.exp(-t / (0.08 * count))
        series["memory/job_bytes"] = (
            base * (0.7 + 0.3 * fills) + job.leak * t + 0.01 * base * rng.standard_normal(count)
        )
        series["memory/oom_kills"] = np.where(t > 0.95 * count, 1.0, 0.0) * (job.kills and node == 0)
        series["io/rchar_bytes_per_s"] = job.read * (0.5 + rng.random(count)) * training
        series["io/read_bytes_per_s"] = 0.3 * series["io/rchar_bytes_per_s"]
        if job.nodes > 1:
            traffic = job.between(5e8, 8e9)
            series["ib/mlx5_0:1/tx_bytes_per_s"] = training * (job.between(0, 1e4) if job.sockets else traffic)
            series["ib/mlx5_0:1/rx_bytes_per_s"] = series["ib/mlx5_0:1/tx_bytes_per_s"]
            series["net/eth0/tx_bytes_per_s"] = training * (job.between(1e8, 1e9) if job.sockets else 2e5)
        for name in [name for name in series if rng.random() < 0.02 and not name.endswith("use_percent")]:
            del series[name]
        lost, unread = rng.random(count) < 0.002, np.arange(count) % PROCESSES_EACH != node % PROCESSES_EACH
        kept = {
            name: np.where(lost | unread if name in OF_PROCESSES else lost, np.nan, values).astype(np.float32)
            for name, values in series.items()
        }
        devices = tuple(
            DeviceInfo(gpu, job.kind, f"GPU-{node}-{gpu}", gib * GIB, job.cap * limit, maker)
            for gpu in range(job.per_node)
        )
        host = f"node{node + 1:02d}"
        info = NodeInfo(
            host, node, "101", 1, now, 1.0, job.cores, tuple(range(job.allowed)), 512 * GIB, 256 * GIB, devices, {}
        )
        hosts.append(HostTelemetry(host, (info,), now + t, kept))
    run = _write_run(job, folder, now, begin, stop, breaks, count)
    return run, hosts


def _write_run(
    job: Job, folder: Path, now: float, begin: float, stop: float, breaks: list[tuple[float, float, str]], count: int
) -> RunDir:
    run = RunDir(folder)
    attempt = folder / "attempts/0001"
    (attempt / "log").mkdir(parents=True)
    (attempt / "log/job.out").write_text(job.log or "epoch 1\n")
    asked = None if job.asked_share is None else count / job.asked_share
    submission = {"scheduler": "slurm", "token": "t", "job": "101", "asked": {"walltime_s": asked}}
    (attempt / "submission.json").write_text(json.dumps(submission))
    (attempt / "started.json").write_text(json.dumps({"job": "101", "started": now}))
    over = job.hang_at is None
    if over:
        result = {"state": job.result, "reason": "", "job": "101", "ended": now + count}
        (attempt / "result.json").write_text(json.dumps(result))
    if job.foreign:
        return run
    (folder / "events").mkdir()
    world = job.nodes * job.per_node
    spent = {"start": begin, "data": 0.0, "step": 0.0, "save": 0.0, "validate": 0.0}
    started = {
        "event": "started",
        "step": 0,
        "world": world,
        "device": "cuda",
        "samples_per_step": job.values["train"]["micro_batch"] * world * job.passes,
        "tokens_per_step": 4096,
        "machine": job.machine,
        "numerics": {key: [value, "derived"] for key, value in job.numerics.items()},
        "spent": dict(spent),
        "pid": 1,
        "host": "node01",
        "time": now + begin,
    }
    lines, at, step, due = [started], begin, 0, list(breaks)
    while True:
        period = job.period_s * (1 + 0.03 * float(job.rng.standard_normal()))
        if at + period > stop:
            break
        wait = period * job.data
        at, step = at + period, step + 1
        spent["data"] += wait
        spent["step"] += period - wait
        facts = {"step": step, "loss": 2.0, "seconds": period - wait, "samples_per_s": 1.0, "time": now + at}
        lines.append({"event": "step", **facts})
        while due and due[0][0] <= at:
            first, last, name = due.pop(0)
            at += last - first
            spent["save" if name == "saved" else "validate"] += last - first
            more = {"name": f"step-{step:09d}", "bytes": 10**9} if name == "saved" else {"loss": 2.0}
            lines.append(
                {"event": name, "step": step, "seconds": last - first, "time": now + at, **more, "spent": dict(spent)}
            )
    status = {"state": "running", "pid": 1, "host": "node01", "step": step, "spent": spent, "time": now + at}
    if over:
        lines.append({"event": "finished", "step": step, "reason": "", "time": now + at + 1, "spent": dict(spent)})
        status["state"] = "finished"
    (folder / "events/rank-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "status.json").write_text(json.dumps(status))
    toml = ["format = 1"]
    sections = {**job.values, "parallel": {**job.values["parallel"], "dp_shard": world}}
    for section, values in sections.items():
        toml += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    (folder / "resolved.toml").write_text("\n".join(toml) + "\n")
    return run


# --- the scenarios: name, diagnoses that are right, what is wrong


@dataclass(frozen=True)
class Scenario:
    name: str
    right: tuple[str, ...]
    spoil: Callable[[Job], None]


SCENARIOS: list[Scenario] = []


def _scenario(*right: str) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    def register(spoil: Callable[[Job], None]) -> Callable[[Job], None]:
        SCENARIOS.append(Scenario(spoil.__name__, right, spoil))
        return spoil

    return register


def _several(job: Job, nodes: bool = False) -> None:
    job.nodes, job.per_node = (
        job.pick((2, 4), (4, 4), (3, 2), (2, 8)) if nodes else job.pick((1, 2), (1, 4), (1, 8), (2, 4))
    )
    job.allowed = job.cores = max(job.cores, 64)
    job.length_s = min(job.length_s, 14400)
    job.comm = job.between(0.02, 0.12)
    job.values["train"]["global_batch"] = 4 * job.nodes * job.per_node


def _own(job: Job) -> None:
    job.foreign = False
    job.period_s = max(job.period_s, job.length_s / 3000)


def _starve(job: Job, low: float = 0.35, high: float = 0.7) -> None:
    job.host = job.between(low, high)


@_scenario("idle-gpus")
def one_of_several_works(job: Job) -> None:
    _several(job)
    job.nodes = 1
    job.idle = {(0, gpu) for gpu in range(1, job.per_node)}


@_scenario("idle-gpus")
def one_of_several_idles(job: Job) -> None:
    _several(job)
    job.idle = {(node, job.per_node - 1) for node in range(job.nodes)}


@_scenario("idle-gpus")
def foreign_uses_half(job: Job) -> None:
    _several(job)
    job.foreign = True
    job.idle = {(node, gpu) for node in range(job.nodes) for gpu in range(job.per_node // 2, job.per_node)}


@_scenario("idle-gpus")
def no_accelerator_used(job: Job) -> None:
    _several(job)
    job.idle, job.foreign = set(job.places()), True
    job.host_cores = job.between(1, 6)


@_scenario("idle-nodes")
def half_of_the_nodes_idle(job: Job) -> None:
    _several(job, nodes=True)
    job.idle = {(node, gpu) for node, gpu in job.places() if node >= (job.nodes + 1) // 2}


@_scenario("idle-nodes")
def foreign_on_the_first_node(job: Job) -> None:
    _several(job, nodes=True)
    job.foreign = True
    job.idle = {(node, gpu) for node, gpu in job.places() if node}


@_scenario("data-wait")
def loader_in_the_main_process(job: Job) -> None:
    _own(job)
    job.data, job.loader_cores = job.between(0.15, 0.8), 0.0
    job.values["data"]["workers"] = 0


@_scenario("data-wait")
def slow_storage(job: Job) -> None:
    _own(job)
    job.data, job.loader_cores, job.host_cores = job.between(0.12, 0.6), job.between(0.05, 0.3), job.between(0.4, 0.8)


@_scenario("data-wait")
def foreign_decoding(job: Job) -> None:
    job.foreign, job.data = True, job.between(0.35, 0.8)
    job.loader_cores = job.between(2.5, 7.0)
    job.allowed = job.cores = 128


@_scenario("data-wait")
def foreign_waits_for_files(job: Job) -> None:
    job.foreign, job.data = True, job.between(0.4, 0.85)
    job.host_cores, job.loader_cores, job.read = job.between(0.1, 0.3), job.between(0.02, 0.25), job.between(5e6, 5e8)


@_scenario("host-bound")
def eager_small_kernels(job: Job) -> None:
    _own(job)
    _starve(job)
    job.host_cores, job.loader_cores, job.sm = job.between(0.95, 1.2), job.between(0.0, 0.3), job.between(15, 45)
    job.numerics["train.compile"] = "off"


@_scenario("host-bound")
def foreign_launch_bound(job: Job) -> None:
    _starve(job)
    job.foreign, job.host_cores, job.loader_cores = True, job.between(0.95, 1.15), job.between(0.0, 0.25)
    job.sm, job.intensity = job.between(15, 45), job.between(0.2, 0.5)


@_scenario("communication")
def waits_in_collectives(job: Job) -> None:
    _several(job)
    job.comm, job.spin = job.between(0.7, 0.9), job.between(0.12, 0.3)
    job.data, job.host = job.between(0, 0.01), job.between(0, 0.03)


@_scenario("communication")
def foreign_waits_in_collectives(job: Job) -> None:
    waits_in_collectives(job)
    job.foreign = True


@_scenario("slow-network", "communication")
def sockets_in_place_of_the_fabric(job: Job) -> None:
    _several(job, nodes=True)
    job.sockets, job.comm = True, job.between(0.6, 0.9)


@_scenario("imbalance")
def one_rank_has_more_work(job: Job) -> None:
    _several(job)
    job.nodes, job.per_node = 1, max(4, job.per_node)
    job.late = {job.pick(*job.places()): job.between(0.6, 2.0)}
    job.intensity = job.between(0.7, 0.95)


@_scenario("imbalance")
def one_rank_waits_for_its_host(job: Job) -> None:
    _several(job)
    job.nodes, job.per_node = 1, max(4, job.per_node)
    job.gaps = {job.pick(*job.places()): job.between(0.3, 0.6)}


@_scenario("straggler-node")
def slow_clock_on_one_node(job: Job) -> None:
    _several(job, nodes=True)
    bad, by = int(job.rng.integers(job.nodes)), job.between(0.5, 0.8)
    for gpu in range(job.per_node):
        job.clocks[bad, gpu] = by
        job.late[bad, gpu] = 1 / by - 1


@_scenario("straggler-node")
def slow_host_on_one_node(job: Job) -> None:
    _several(job, nodes=True)
    bad, by = int(job.rng.integers(job.nodes)), job.between(0.25, 0.6)
    job.gaps = {(bad, gpu): by for gpu in range(job.per_node)}


@_scenario("no-tensor-cores")
def fp32_products(job: Job) -> None:
    _own(job)
    job.kind = job.pick("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "Tesla V100-SXM2-32GB")
    job.numerics |= {"precision.compute": "fp32", "precision.tf32": False}
    job.tensor, job.intensity = 0.0, job.between(0.45, 0.8)


@_scenario("unaligned-dims")
def odd_vocabulary(job: Job) -> None:
    _own(job)
    job.kind = job.pick("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200")
    job.numerics["precision.compute"] = "bf16"
    job.values["model"]["vocab"] = job.pick(50257, 32001, 128257, 49155)


@_scenario("small-micro-batch")
def memory_left_free(job: Job) -> None:
    _several(job)  # a device alone gains less than a percent, by the plan
    _own(job)
    job.passes, job.memory = job.pick(4, 8, 16), job.between(0.08, 0.4)
    job.values["train"] |= {"micro_batch": 1, "global_batch": job.passes * job.nodes * job.per_node}
    job.values["data"]["seq_len"] = 512


@_scenario("throttling")
def hot_device(job: Job) -> None:
    if KINDS[job.kind][5] != "nvidia":
        job.kind = "NVIDIA H100 80GB HBM3"
    place = job.pick(*job.places())
    job.hot = {place: job.between(0.15, 0.9)}
    job.late = {place: job.between(0.1, 0.4)}


@_scenario("power-limit")
def power_limit_set_low(job: Job) -> None:
    job.kind = job.pick("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200")
    job.numerics["precision.compute"] = "bf16"
    job.cap, job.intensity = job.between(0.4, 0.7), job.between(0.85, 0.98)
    job.comm = job.between(0.0, 0.08) * (job.nodes * job.per_node > 1)


@_scenario("small-kernels")
def small_kernels(job: Job) -> None:
    job.nodes = job.per_node = 1
    job.comm, job.data, job.host = 0.0, job.between(0, 0.01), job.between(0, 0.05)
    job.sm, job.intensity = job.between(3, 25), job.between(0.05, 0.28)
    job.tensor, job.dram = job.between(0, 5), job.between(1, 20)
    job.values["train"]["global_batch"] = 4


@_scenario("small-kernels")
def a_small_model_on_each_device(job: Job) -> None:
    """Programs that have nothing to do with each other, as in a search over settings."""
    small_kernels(job)
    job.foreign, job.per_node, job.linked = True, job.pick(2, 4, 8), True
    job.kind = job.pick("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "Tesla V100-SXM2-32GB")


@_scenario("low-use")
def waits_for_another_program(job: Job) -> None:
    """Such as a simulation that sends its results: no files, no busy core."""
    job.foreign = True
    _starve(job, 0.5, 0.8)
    job.host_cores, job.loader_cores, job.read = job.between(0.1, 0.4), job.between(0, 0.1), job.between(1e4, 3e5)


@_scenario("ecc-errors")
def memory_errors(job: Job) -> None:
    job.ecc = job.pick(*job.places())


@_scenario("too-few-cores")
def one_core_for_all(job: Job) -> None:
    job.allowed, job.cores = job.pick(1, 2), job.pick(64, 96, 128)
    job.loader_cores = job.between(3, 6)
    if job.foreign:
        job.data = job.between(0.4, 0.8)
    else:
        _own(job)
        job.data = job.between(0.2, 0.8)
    job.load = job.between(4, 12)


@_scenario("bad-binding")
def threads_on_one_core(job: Job) -> None:
    job.cores = job.allowed = job.pick(48, 64, 96)
    job.bound, job.load = 1, job.between(8, 17)
    _starve(job)


@_scenario("memory-leak")
def keeps_every_batch(job: Job) -> None:
    job.length_s = max(job.length_s, 2400)
    _own(job) if not job.foreign else None
    job.leak = job.between(20, 150) * GIB / job.length_s


@_scenario("out-of-memory")
def killed_by_the_kernel(job: Job) -> None:
    job.kills, job.result = True, "crashed"
    job.leak = job.between(50, 200) * GIB / job.length_s


@_scenario("out-of-memory")
def device_memory_full(job: Job) -> None:
    job.result = "crashed"
    job.log = "Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


@_scenario("over-asked-time")
def asks_for_a_day(job: Job) -> None:
    job.length_s = max(job.length_s, 1200)
    _own(job) if not job.foreign else None
    job.asked_share = job.between(0.02, 0.4)


@_scenario("short-job")
def done_within_a_minute(job: Job) -> None:
    job.length_s, job.asked_share = int(job.between(20, 58)), job.pick(None, job.between(0.01, 0.3))
    job.period_s, job.start_s = job.between(0.05, 0.5), job.between(3, 8)


@_scenario("validation-time")
def validates_too_often(job: Job) -> None:
    job.length_s = max(job.length_s, 1500)
    _own(job)
    job.start_s = min(job.start_s, 120)
    job.validate_every_s = job.between(100, 250)
    job.validation_s = job.between(0.42, 0.75) * job.validate_every_s


@_scenario("save-stalls")
def saves_often(job: Job) -> None:
    job.length_s = max(job.length_s, 1500)
    _own(job)
    job.save_every_s, job.save_s = job.between(100, 250), job.between(15, 60)
    job.start_s = min(job.start_s, 120)


@_scenario("cudnn-shadowed")
def module_with_another_cudnn(job: Job) -> None:
    job.log = (
        "RuntimeError: cuDNN version incompatibility: PyTorch was compiled  against (9, 19, 0) but found runtime "
        "version (8, 9, 7). PyTorch already comes bundled with cuDNN.\n"
    )


@_scenario("hang")
def stops_in_a_collective(job: Job) -> None:
    _several(job)
    job.length_s = max(job.length_s, 3600)
    _own(job)
    job.hang_at, job.spin = job.between(0.3, 0.7), job.between(0.12, 0.3)
    job.period_s = min(job.period_s, 20.0)


@_scenario("idle-phase")
def tokenises_first(job: Job) -> None:
    job.length_s = max(job.length_s, 7200)
    job.foreign = True
    job.lead_s = job.between(0.35, 0.6) * job.length_s


@_scenario("idle-phase")
def copies_results_last(job: Job) -> None:
    job.length_s = max(job.length_s, 7200)
    job.foreign = True
    job.tail_s = job.between(0.35, 0.6) * job.length_s


@_scenario("gpu-fragmentation")
def one_device_on_each_node(job: Job) -> None:
    job.nodes, job.per_node, job.cores, job.allowed = job.pick(2, 4, 8), 1, 128, job.pick(16, 32)
    job.length_s = min(job.length_s, 14400)
    job.values["train"]["global_batch"] = 4 * job.nodes


# --- baseline


def advise_by_use(hosts: list[HostTelemetry], job: Job) -> list[str]:
    """What rules on use alone say: unused devices, use up to 25 % (15 % red), kills, time used of time asked."""
    means = [
        float(np.nanmean(host.series[f"gpu/{each.index}/use_percent"])) for host in hosts for each in host.info.devices
    ]
    found = []
    if any(float(np.nanmax(host.series.get("memory/oom_kills", np.zeros(1)))) > 0 for host in hosts):
        found.append("out-of-memory")
    if any(value < 0.5 for value in means):
        whole = [
            all(np.nanmean(host.series[f"gpu/{each.index}/use_percent"]) < 0.5 for each in host.info.devices)
            for host in hosts
        ]
        found.append("idle-nodes" if any(whole) and not all(whole) else "idle-gpus")
    used = [value for value in means if value >= 0.5]
    if used and sum(used) / len(used) < 25:
        found.append("low-use")
    if job.asked_share is not None and job.asked_share < 0.6:
        found.append("over-asked-time")
    return found


def run_one(name: str, seed: int, spoil: Callable[[Job], None] | None) -> tuple[list[str], list[str], Job]:
    """Rules that speak on one draw, in order; those of the baseline; the job."""
    number = sum(map(ord, name)) * 7919 + seed
    job = draw_healthy(np.random.default_rng(number))
    if spoil is not None:
        spoil(job)
    with tempfile.TemporaryDirectory() as folder:
        run, hosts = simulate(job, Path(folder) / "run")
        found = [advice.rule for advice in advise_on(gather(run, hosts))]
        return found, advise_by_use(hosts, job), job


def _describe(job: Job) -> str:
    what = f"{job.nodes}x{job.per_node} {job.kind} {job.length_s} s"
    return f"{what} step {job.period_s:.2f} s foreign={job.foreign}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--healthy", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--misses", action="store_true")
    options = parser.parse_args()
    right = by_use = total = 0
    began = time.perf_counter()
    for scenario in SCENARIOS:
        if options.only not in scenario.name:
            continue
        hits = base = 0
        for draw in range(options.draws):
            found, simple, job = run_one(scenario.name, options.seed + draw, scenario.spoil)
            hit = bool(found) and found[0] in scenario.right
            hits += hit
            base += bool(simple) and simple[0] in scenario.right
            if options.misses and not hit:
                what = _describe(job)
                print(f"  miss {scenario.name} {draw}: {found[:4]} {what}", file=sys.stderr)
        right, by_use, total = right + hits, by_use + base, total + options.draws
        print(f"{scenario.name:32} {hits:3}/{options.draws}   use alone {base:3}/{options.draws}", flush=True)
    alarms = simple_alarms = 0
    for draw in range(options.healthy):
        found, simple, job = run_one("healthy", options.seed + draw, None)
        alarms += bool(found)
        simple_alarms += bool(simple)
        if found and options.misses:
            what = _describe(job)
            print(f"  alarm {draw}: {found} {what}", file=sys.stderr)
    print(f"right diagnosis first: {right} of {total} ({right / max(1, total):.1%}); use alone {by_use} of {total}")
    print(f"false alarms on healthy draws: {alarms} of {options.healthy}; use alone {simple_alarms}")
    print(f"{len(SCENARIOS)} scenarios, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
