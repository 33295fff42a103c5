"""The rules by which advice is given: each looks at the evidence of a run and yields findings.

Invariants:
- A rule is silent where a series, an event or a fact of the hardware that it needs is missing; nothing is guessed.
- Thresholds are the constants below and are quoted in the rule's own text, from which docs/advice.md is generated.
- Rules are independent of each other: what hides what, and the order, is in their registration.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardway.plain_arrays import find_arrays
from shardway.rundir.attempts import Ending
from shardway.telemetry.store import NodeInfo
from shardway.units import render_clock
from shardway.watch.advice.evidence import Evidence, GpuEvidence, HostEvidence, mean, quantile, share, spread
from shardway.watch.advice.findings import Advice
from shardway.watch.words import render_size

# --- thresholds, each with its source

LOW_USE = 75.0  # percent; LLview and jobstats warn at 25 and 15, long after the money is gone
FULL_USE = 85.0  # percent, from which an accelerator always has a kernel
WAITING_POWER = 0.45  # of the power limit: a collective that spins draws 30 to 40 %
LIKELY_POWER = 0.50  # up to here it may be waiting, or work that memory limits: a hint
APART_POWER = 0.20  # of the limit, between a step's phases where samples are dense enough to show them
STARVED_SM = 35.0  # percent of multiprocessors: a collective occupies some tens of 132, a small kernel too
MEMORY_BOUND = 45.0  # percent of DRAM cycles: low power is then the memory's doing
DATA_SHARE, SAVE_SHARE, VALIDATION_SHARE = 0.05, 0.05, 0.25
PROBLEM_PERCENT = 10.0  # of a step, from which a finding is a problem and not a hint
APART = 0.20  # (max - min) / mean from which ranks are imbalanced; Open XDMoD's homogeneity
SLOW_CLOCK = 0.90  # of the other nodes' clock
SATURATED, BUSY_CORE, QUIET_CORE = 90.0, 85.0, 15.0  # percent of a core
OWN_WORK = 0.2  # of what keeps the cores busy, below which it is the work of others
LEAK_R2, LEAK_SHARE, LEAK_BYTES, LEAK_S = 0.9, 0.05, 256 * 2**20, 600.0
TIME_NOTE, TIME_RED, TIME_LEFT_S = 0.60, 0.10, 1800.0  # used over asked; jobstats
SHORT_S = 60.0
STALLED_S, STALLED_STEPS = 300.0, 10
PHASE_SHARE, PHASE_S = 0.25, 900.0
FREE_MEMORY = 0.5
NO_TENSOR, TENSOR_SM = 1.0, 40.0  # percent of time
HOT_SHARE, CAP_SHARE, CAPPED_CLOCK, LOWERED_LIMIT = 0.01, 0.5, 0.75, 0.85
QUIET_IB, BUSY_NET, QUIET_LINK = 1e6, 30e6, 20e6  # bytes per second
HOST_CORES = (0.7, 1.7)  # cores of the job an accelerator: one thread that launches kernels

THROTTLE = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that a healthy device does not show."""
POWER_CAP = 0x04

# --- registration


@dataclass(frozen=True)
class AdviceRule:
    """A rule and its documentation. `tier`: findings of a lower one come first. `hides`: rules whose findings are
    consequences of this one's."""

    name: str
    tier: int
    when: str
    why: str
    do: str
    find: Callable[[Evidence], Iterable[Advice]]
    hides: tuple[str, ...] = ()


ADVICE_RULES: list[AdviceRule] = []
Finder = Callable[[Evidence], Iterator[Advice]]


def _rule(
    name: str, tier: int, *, when: str, why: str, do: str, hides: Sequence[str] = ()
) -> Callable[[Finder], Finder]:
    def register(find: Finder) -> Finder:
        ADVICE_RULES.append(AdviceRule(name, tier, when, why, do, find, tuple(hides)))
        return find

    return register


_LOW = ("data-wait", "host-bound", "small-kernels", "communication", "low-use")

# --- words


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f} %" if value >= 10 or value == 0 else f"{value:.1f} %"


def _list_places(gpus: Sequence[GpuEvidence]) -> str:
    """ "GPU 1, 2 and 3 of node7; GPU 0 of node8", the first few."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for gpu in gpus:
        by_host[gpu.host].append(gpu.device.index)
    shown = [f"GPU {_list_words(map(str, indices))} of {host}" for host, indices in list(by_host.items())[:4]]
    return "; ".join(shown) + (f"; and {len(by_host) - 4} more nodes" if len(by_host) > 4 else "")


def _list_words(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _list_hosts(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _average(gpus: Iterable[GpuEvidence], name: str) -> float | None:
    known = [value for gpu in gpus if (value := gpu.mean(name)) is not None]
    return sum(known) / len(known) if known else None


def _power(gpus: Iterable[GpuEvidence]) -> float | None:
    known = [gpu.power_share for gpu in gpus if gpu.power_share is not None]
    return sum(known) / len(known) if known else None


def _list_known(
    gpus: Sequence[GpuEvidence], read: Callable[[GpuEvidence], float | None]
) -> list[tuple[GpuEvidence, float]]:
    """The accelerators with a value, if at least half of them have one: a series may be missing for some."""
    found = [(gpu, value) for gpu in gpus if (value := read(gpu)) is not None]
    return found if 2 * len(found) >= len(gpus) else []


def _use(evidence: Evidence) -> float | None:
    return _average(evidence.used, "use_percent")


def _of_step(evidence: Evidence, percent: float | None) -> dict[str, Any]:
    """Both ceilings, and the severity that they mean."""
    if percent is None:
        return {}
    percent = min(99.0, max(0.0, percent))
    step_ms = evidence.step_ms
    return {
        "ceiling_percent": round(percent, 1),
        "ceiling_ms": None if step_ms is None else round(step_ms * percent / 100, 3),
        "severity": "problem" if percent >= PROBLEM_PERCENT else "hint",
    }


def _starts_more(evidence: Evidence, count: int) -> str:
    if evidence.has_events:
        return f"start a rank for each: site.ranks_per_node = {count} for a job, --nproc {count} by hand"
    return (
        f"start a process for each ({count} on a node: torchrun --nproc-per-node {count}, srun --ntasks-per-node "
        f"{count}), or ask for fewer accelerators"
    )


# --- tier 0: work is lost


@_rule(
    "out-of-memory",
    0,
    when="the kernel or the scheduler killed a process of the job for memory, or the result or the log says so",
    why="the attempt is lost since its last checkpoint, and the next one ends the same way",
    do="main memory: fewer loader processes (data.workers), site.memory; the device's: half of train.micro_batch, "
    'recompute.mode = "selective"',
    hides=("memory-leak", *_LOW),
)
def _out_of_memory(evidence: Evidence) -> Iterator[Advice]:
    killed = {}
    for host in evidence.hosts:
        kills = host.series.get("memory/oom_kills")
        first, last = quantile(kills, 0.0), quantile(kills, 1.0)
        if first is not None and last is not None and last > first:
            killed[host.host] = int(last - first)
    begun = [each for each in evidence.attempts if each.started is not None or each.result is not None]
    result = begun[-1].result if begun else None
    ended = result is not None and result.state == Ending.OUT_OF_MEMORY
    reason = result.reason if result is not None else ""
    of_device = _DEVICE_MEMORY.search(evidence.log + reason)
    check = "run it again: the peak of the memory in the report stays below the limit"
    if killed:
        host = next(host for host in evidence.hosts if host.host in killed)
        peak, limit = quantile(host.series.get("memory/job_bytes"), 1.0), host.info.memory_limit_bytes
        yield Advice(
            "out-of-memory",
            f"the kernel killed {sum(killed.values())} processes of the job on {_list_hosts(list(killed))}; its memory "
            f"reached {render_size(peak)}" + (f" of {render_size(limit)} allowed" if limit else ""),
            "take fewer loader processes (data.workers) or less prefetch (data.prefetch), or ask for more: site.memory"
            if evidence.has_events
            else "start fewer loader processes, or ask for more memory (--mem; PBS: mem=)",
            check,
        )
    elif of_device or ended:
        what = (
            f'the log has "{of_device[0]}"' if of_device else f"the attempt ended so: {reason or Ending.OUT_OF_MEMORY}"
        )
        do = (
            'halve train.micro_batch (the global batch stays), or recompute.mode = "selective"'
            if evidence.has_events and of_device
            else "halve the batch of one pass, or recompute activations"
            if of_device
            else "ask for more memory (site.memory), or take fewer loader processes"
        )
        yield Advice("out-of-memory", what, do, check)


_DEVICE_MEMORY = re.compile(r"(?:CUDA|HIP) out of memory|CUDNN_STATUS_ALLOC_FAILED|CUDA error: out of memory")


@_rule(
    "hang",
    0,
    when=f"no step has ended for {STALLED_S:.0f} s and {STALLED_STEPS} steps while the job went on; for a foreign "
    "command: accelerators that worked before stay at full use and low, flat power until the end",
    why="a rank waits in a collective that another one never enters: it looks like full use",
    do="stop it, look at the stacks that the report of the hang has (docs/hangs.md), start again from the checkpoint",
    hides=(*_LOW, "idle-phase", "imbalance", "straggler-node", "slow-network", "small-micro-batch", "over-asked-time"),
)
def _hang(evidence: Evidence) -> Iterator[Advice]:
    steps, progress = evidence.steps, evidence.progress
    if not evidence.hosts:
        return
    if steps is not None and progress is not None:
        known = [steps.last, *(save.time for save in progress.saves), *(each.time for each in progress.validations)]
        stalled_s = evidence.now - max(known)
        most_s = max(STALLED_S, STALLED_STEPS * (steps.period_s or 0.0))
        if progress.ending is not None or evidence.state in ("finished", "stopped") or stalled_s < most_s:
            return
        parts = []
        for gpu in evidence.used:
            values, power = gpu.every["use_percent"], gpu.every.get("power_w")
            host = next(host for host in evidence.hosts if host.host == gpu.host)
            after = host.times > max(known) + 5
            parts.append((mean(values[after]), mean(power[after]) if power is not None else None))
        use, power_w = (_mean_of([part[place] for part in parts]) for place in (0, 1))
        yield Advice(
            "hang",
            f"no step has ended for {render_clock(stalled_s)} after step {progress.step} (a step takes "
            f"{(steps.period_s or 0.0):.3g} s); since then the accelerators show {_percent(use)} use"
            + (f" at {power_w:.0f} W" if power_w is not None else "")
            + (": they wait in a collective" if use is not None and use > FULL_USE else ""),
            "stop it (shardway stop --now), read which rank is behind in docs/hangs.md's report; run.hang_timeout ends "
            "such a run by itself; then run the same command again: it goes on from the last checkpoint",
            "shardway status RUN: the step moves",
        )
    elif not evidence.has_events and len(evidence.used) > 1:
        yield from _foreign_hang(evidence)


def _mean_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _foreign_hang(evidence: Evidence) -> Iterator[Advice]:
    """Full use at low power without any change, from some minute to the end, of accelerators that changed before."""
    if not evidence.used:
        return
    np = find_arrays()

    begun = 0.0
    for gpu in evidence.used:
        use, power, limit = gpu.all("use_percent"), gpu.all("power_w"), gpu.power_limit_w
        host = next(host for host in evidence.hosts if host.host == gpu.host)
        if use is None or power is None or not limit or host.times[-1] - host.times[0] < 3 * STALLED_S:
            return
        tail = host.times > host.times[-1] - 2 * STALLED_S
        if (mean(use[tail]) or 0.0) < 97 or (mean(power[tail]) or limit) > WAITING_POWER * limit:
            return
        level, wide = mean(power[tail]) or 0.0, spread(power[tail]) or 0.0
        before = gpu.over("power_w", gpu.warm & ~tail)
        if before is None or not len(before):
            return
        # Flat against its own past: what happened in two thirds of the earlier time lies outside the tail's band.
        band = max(4 * wide, 0.03 * limit)
        known = before[np.isfinite(before)]
        outside = np.abs(known - level) > band
        if wide > 0.03 * limit or not len(known) or outside.mean() < 0.05:
            return
        last = float(host.times[np.flatnonzero(np.abs(np.nan_to_num(power, nan=level) - level) > band)[-1]])
        if host.times[-1] - last < STALLED_S:
            return
        begun = max(begun, host.times[-1] - last)
    yield Advice(
        "hang",
        f"for the last {render_clock(begun)} all {len(evidence.used)} accelerators show full use at low and flat power "
        "(before, it changed): they wait in a collective",
        "does the log still grow? dump the stacks of all processes (py-spy dump --pid PID) before you stop it; "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 names the collective next time",
        "the power goes up and down again with each step",
    )


@_rule(
    "ecc-errors",
    0,
    when="a device counts uncorrected memory errors",
    why="results may be wrong, and the process may be ended at any moment",
    do="leave the node out (--exclude, site.options) and report it to the centre",
)
def _ecc_errors(evidence: Evidence) -> Iterator[Advice]:
    for gpu in evidence.gpus:
        first, last = quantile(gpu.all("ecc_errors"), 0.0), quantile(gpu.all("ecc_errors"), 1.0)
        if not last or first is None:
            continue
        rose = last > first
        yield Advice(
            "ecc-errors",
            f"{gpu.place} counts {last:.0f} uncorrected memory errors"
            + (f", {last - first:.0f} of them during the run" if rose else ", all from before the run"),
            f"leave the node out: --exclude={gpu.host} (Slurm; site.options), and report it to the centre",
            "the count of the report stays 0",
            severity="problem" if rose else "hint",
        )


# --- tier 1: hardware that does nothing


@_rule(
    "idle-nodes",
    1,
    when="all accelerators of a node stay below 1 % of use after start-up, those of another node do not",
    why="the budget is charged for whole nodes",
    do="start ranks on every node (srun without -N 1; --nnodes), or ask for fewer nodes: site.nodes",
    hides=("over-asked-time",),
)
def _idle_nodes(evidence: Evidence) -> Iterator[Advice]:
    idle = [host for host in evidence.hosts if host.gpus and all(gpu.is_idle for gpu in host.gpus)]
    working = [host for host in evidence.hosts if any(gpu.is_idle is False for gpu in host.gpus)]
    if not idle or not working:
        return
    names = [host.host for host in idle]
    use = mean_of_use([gpu for host in working for gpu in host.gpus if gpu.is_idle is False])
    count = len(idle) + len(working)
    yield Advice(
        "idle-nodes",
        f"{len(idle)} of {count} nodes did nothing on their accelerators in {render_clock(evidence.measured_s)} "
        f"({_list_hosts(names)}); on the others they show {_percent(use)} use",
        f"start ranks on all nodes (srun --nodes={count}; torchrun --nnodes {count} by srun, not only on the first "
        f"node), or ask for {len(working)}: " + ("site.nodes" if evidence.has_events else "--nodes, select="),
        "shardway report: every row of the map of use has colour",
        **_of_step(evidence, 100 * len(idle) / count),
    )


def mean_of_use(gpus: Sequence[GpuEvidence]) -> float | None:
    """Mean use of some accelerators, after start-up."""
    return _mean_of([mean(gpu.over("use_percent", gpu.warm)) for gpu in gpus])


@_rule(
    "idle-gpus",
    1,
    when="an accelerator stays below 1 % of use after start-up (and below 5 % in 99 of 100 samples)",
    why="the first lesson of every workshop: four were asked for and one works",
    do="start one process for each accelerator, or ask for as many as the program uses",
    hides=("over-asked-time", "gpu-fragmentation"),
)
def _idle_gpus(evidence: Evidence) -> Iterator[Advice]:
    hosts = [host for host in evidence.hosts if any(gpu.is_idle is False for gpu in host.gpus)]
    gpus = [gpu for host in hosts or evidence.hosts for gpu in host.gpus if gpu.is_idle is not None]
    idle = [gpu for gpu in gpus if gpu.is_idle]
    if not idle:
        return
    used = [gpu for gpu in gpus if not gpu.is_idle]
    memory = max((gpu.memory_max or 0.0 for gpu in idle), default=0.0)
    doubled = [gpu for gpu in used if (quantile(gpu.all("job_processes"), 0.9) or 0) >= 2]
    where = f"{len(idle)} of {len(gpus)} accelerators did nothing in {render_clock(evidence.measured_s)}"
    where += f" ({_list_places(idle)}: below {_percent(1.0)} use, at most {render_size(memory)} of memory)"
    count = max(len(host.gpus) for host in hosts or evidence.hosts)
    if not used:
        on_cpu = evidence.progress is not None and evidence.progress.start is not None
        on_cpu = on_cpu and evidence.progress.start.device.startswith("cpu")  # type: ignore[union-attr]
        do = (
            'it trains on the CPU: run.device = "cuda" and a torch built for the device (shardway doctor), or a queue '
            "without accelerators"
            if on_cpu
            else "no process used one: see that torch.cuda.is_available() is true in the job (a torch without CUDA, a "
            "missing driver in the container: --nv), or take a queue without accelerators"
        )
        yield Advice("idle-gpus", where, do, "torch.cuda.is_available() in the job", None, None)
        return
    where += f"; {_list_places(used)}: {_percent(mean_of_use(used))} use"
    do = _starts_more(evidence, count)
    if doubled:
        most = int(quantile(doubled[0].all("job_processes"), 0.9) or 0)
        where += f"; {most} processes share {doubled[0].place}"
        do = "let each process take its own: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) at the start"
    yield Advice(
        "idle-gpus",
        where,
        do,
        "shardway report: each accelerator has a verdict other than idle",
        **{**_of_step(evidence, 100 * len(idle) / len(gpus)), "severity": "problem"},
    )


@_rule(
    "idle-phase",
    1,
    when=f"accelerators that work later (or worked before) do nothing for {PHASE_SHARE:.0%} of the job and "
    f"{PHASE_S / 60:.0f} minutes, at its start or its end",
    why="data are prepared or results copied while accelerators are paid for",
    do="prepare data in a job without accelerators; submit evaluation as a job of its own (--dependency=afterok)",
)
def _idle_phase(evidence: Evidence) -> Iterator[Advice]:
    if not evidence.used:
        return
    host = max(evidence.hosts, key=lambda each: float(each.times[-1] - each.times[0]))
    whole = float(host.times[-1] - host.times[0])
    work = host.times[host.warm]
    for at, idle_s, use in (
        ("start", float(work[0] - host.times[0]), _use_between(evidence, None, work[0])),
        ("end", float(host.times[-1] - work[-1]), _use_between(evidence, work[-1], None)),
    ):
        if idle_s >= PHASE_S and idle_s >= PHASE_SHARE * whole and use is not None and use < 10.0:
            what = "preparation" if at == "start" else "what follows the training"
            yield Advice(
                "idle-phase",
                f"for {render_clock(idle_s)} at the {at} of {render_clock(whole)} the accelerators did nothing "
                f"({_percent(use)} use)",
                f"do {what} in a job without accelerators"
                + (
                    " (shardway data prepare; --dependency=afterok)" if at == "start" else " (--dependency=afterok:JOB)"
                ),
                "shardway report: the map of use has colour from the first minutes to the last",
                None,
                round(100 * idle_s / whole, 1),
            )


def _use_between(evidence: Evidence, begin: float | None, end: float | None) -> float | None:
    found = []
    for host in evidence.hosts:
        mask = (host.times > (begin if begin is not None else -1)) & (
            host.times < (end if end is not None else float("inf"))
        )
        found += [mean(gpu.over("use_percent", mask)) for gpu in host.gpus if gpu.is_idle is False]
    return _mean_of(found)


# --- tier 2: something outside of the program is wrong


@_rule(
    "cudnn-shadowed",
    2,
    when="LD_LIBRARY_PATH holds another libcudnn (the machine's record has it), or the log names two versions",
    why="torch brings its own cuDNN; an older one from a module is slower or fails",
    do="module unload cudnn; in a run file take the module out of site.modules",
)
def _cudnn_shadowed(evidence: Evidence) -> Iterator[Advice]:
    start = evidence.progress.start if evidence.progress else None
    row = start.machine.get("cudnn", "") if start else ""
    found = _CUDNN.search(evidence.log)
    if not row and not found:
        return
    what = row or " ".join(found[0].split())  # type: ignore[index]
    yield Advice(
        "cudnn-shadowed",
        f"torch brings its own cuDNN, and another one comes first: {what}",
        "unload that module (module unload cudnn; site.modules), or take the folder out of LD_LIBRARY_PATH",
        "python -c 'import torch; print(torch.backends.cudnn.version())' prints the version that torch was built with",
        severity="problem" if found else "hint",
    )


_CUDNN = re.compile(
    r"cuDNN version incompatibility:\s+PyTorch was compiled\s+against \([^)]*\)\s+but found runtime version\s+\([^)]*\)"
)


def _gpu_load(evidence: Evidence) -> float | None:
    """How busy accelerators are kept, percent; what waits for data counts as idle."""
    use, data = _use(evidence), evidence.data_share
    return use if data is None else min(100 * (1 - data), 100.0 if use is None else use)


def _is_busy_with_others(host: HostEvidence) -> bool:
    """Whether the job itself does less than OWN_WORK of what keeps its allowed cores busy."""
    use, own = host.mean("cpu/use_percent"), host.mean("cpu/job_cores")
    return use is not None and own is not None and own < OWN_WORK * use / 100 * len(host.info.allowed_cores)


@_rule(
    "too-few-cores",
    2,
    when=f"the job's cores are {SATURATED:.0f} % busy, {100 * OWN_WORK:.0f} % of it or more by the job; they are at "
    "most half of the node's (or more threads want to run than there are cores), and accelerators wait",
    why="srun gives a task one core unless it is asked for more; loader processes then share it",
    do="--cpus-per-task, and export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun",
    hides=_LOW,
)
def _too_few_cores(evidence: Evidence) -> Iterator[Advice]:
    for host in evidence.hosts:
        use, allowed = host.mean("cpu/use_percent"), len(host.info.allowed_cores)
        if use is None or use < SATURATED or not allowed or _is_busy_with_others(host):
            continue
        load, threads, cores = host.mean("cpu/load"), host.mean("cpu/runnable_threads"), host.info.cores
        gpus = [gpu for gpu in host.gpus if gpu.is_idle is False]
        if gpus:
            busy = _gpu_load(evidence)
            if busy is None or busy >= FULL_USE or allowed > cores // 2:
                continue
        elif not (
            allowed == cores
            and load is not None
            and load >= 1.5 * allowed
            and (threads is None or threads > allowed)  # else it is the load of others
        ) and (threads is None or threads < 2 * allowed or allowed > cores // 4):
            continue
        words = f"{allowed} of {cores} cores of {host.host} are allowed, and they are {_percent(use)} busy"
        words += f" with {threads:.0f} threads that run or wait for a core" if threads is not None else ""
        words += f"; load {load:.0f}" if load is not None else ""
        words += f"; the accelerators show {_percent(_average(gpus, 'use_percent'))} use" if gpus else ""
        more = max(1, cores // max(1, len(host.info.devices)))
        yield Advice(
            "too-few-cores",
            words,
            (
                f"more threads than cores: OMP_NUM_THREADS (run.threads) times the processes must not exceed {allowed}"
                if allowed == cores
                else f"ask for more cores for each task (--cpus-per-task={more}), and hand them to srun: export "
                "SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"
            ),
            "shardway report: the map of cores shows more than the busy ones; taskset -p PID lists them",
            **_of_step(evidence, None if not gpus else 100 - (_gpu_load(evidence) or 100)),
        )
        return


@_rule(
    "bad-binding",
    2,
    when=f"a few of many allowed cores are above {BUSY_CORE:.0f} %, the others below {QUIET_CORE:.0f} %, and twice as "
    "many threads as busy cores want to run",
    why="threads or ranks are bound to the same cores",
    do="do not bind by hand: unset GOMP_CPU_AFFINITY and KMP_AFFINITY; srun --cpu-bind=cores with --cpus-per-task",
    hides=(*_LOW, "too-few-cores", "straggler-node", "imbalance"),
)
def _bad_binding(evidence: Evidence) -> Iterator[Advice]:
    for host in evidence.hosts:
        cores, load = host.core_use, host.mean("cpu/load")
        used = host.mean("cpu/job_cores")
        busy = [each for each in cores if each >= BUSY_CORE]
        rest = cores[len(busy) :]
        if len(cores) < 4 or not busy or len(busy) > len(cores) // 4 or load is None or used is None:
            continue
        crowded = load >= 2 * len(busy) + 1 and used <= 1.3 * len(busy)
        if not crowded or sum(rest) / len(rest) > QUIET_CORE:
            continue
        yield Advice(
            "bad-binding",
            f"on {host.host} {len(busy)} of {len(cores)} allowed cores are {_percent(sum(busy) / len(busy))} busy, the "
            f"others {_percent(sum(rest) / len(rest))}, while {load:.0f} threads want to run (load)",
            "let threads spread: unset GOMP_CPU_AFFINITY, KMP_AFFINITY and OMP_PLACES, give each task its cores "
            "(--cpus-per-task with SRUN_CPUS_PER_TASK, mpirun --map-by slot:PE=N), or srun --cpu-bind=none",
            "shardway report: the map of cores is even; taskset -cp PID lists more than one core",
            **_of_step(evidence, None if _gpu_load(evidence) is None else 100 - (_gpu_load(evidence) or 0)),
        )
        return


@_rule(
    "throttling",
    2,
    when=f"a device reports thermal or hardware slowdown or a power brake in more than {HOT_SHARE:.0%} of the samples",
    why="it runs slower than its neighbours, and every rank waits for the slowest",
    do="leave the node out and report it",
    hides=("straggler-node", "imbalance", "communication", "power-limit"),
)
def _throttling(evidence: Evidence) -> Iterator[Advice]:
    if not evidence.gpus:
        return
    np = find_arrays()

    hot: list[tuple[float, GpuEvidence, str, float | None]] = []
    for gpu in evidence.gpus:
        bits = gpu.over("throttle_bits", gpu.warm)
        if gpu.device.maker != "nvidia" or bits is None or not np.isfinite(bits).any():
            continue
        reasons = np.nan_to_num(bits).astype(np.int64)
        slowed = (reasons & sum(THROTTLE)) != 0
        if share(slowed) <= HOT_SHARE or slowed.sum() < 10:
            continue
        names = [name for bit, name in THROTTLE.items() if share((reasons & bit) != 0) > HOT_SHARE]
        clock, temperature = gpu.over("sm_clock_mhz", gpu.warm), gpu.over("temperature_c", gpu.warm)
        lost = None
        if clock is not None:
            below, above = mean(clock[slowed]), quantile(clock, 0.99)
            lost = max(0.0, 1 - below / above) * share(slowed) if below and above else None
        words = f"{_list_words(names or ['slowdown'])} in {_percent(100 * share(slowed))} of the samples"
        heat = quantile(temperature[slowed], 0.5) if temperature is not None else None
        words += f" at {heat:.0f} C" if heat is not None else ""
        words += f", clock {mean(clock[slowed]):.0f} of {quantile(clock, 0.99):.0f} MHz" if lost is not None else ""
        hot.append((share(slowed), gpu, words, lost))
    if hot:
        hot.sort(key=lambda row: -row[0])
        _, gpu, words, lost = hot[0]
        hosts = list(dict.fromkeys(row[1].host for row in hot))
        more = f"; and {len(hot) - 1} more ({_list_hosts(hosts)})" if len(hot) > 1 else ""
        seconds = sum(row[0] for row in hot[:1]) * float(gpu.warm.sum())
        yield Advice(
            "throttling",
            f"{gpu.place}: {words}, about {render_clock(seconds)} in all{more}",
            f"leave the node out (--exclude={hosts[0]}; site.options) and report it to the centre: cooling or power",
            "shardway report: the map of throttle reasons is empty and the clock is that of its neighbours",
            **{**_of_step(evidence, None if lost is None else 100 * lost), "severity": "problem"},
        )


@_rule(
    "straggler-node",
    2,
    when=f"one node differs from all others by {APART:.0%} in clock (10 %), use or power, more than its accelerators "
    "differ among each other",
    why="a step ends when the slowest node does; the others wait in a collective",
    do="leave the node out and see whether the step gets faster",
    hides=("imbalance", "communication", "host-bound", "low-use", "slow-network"),
)
def _straggler_node(evidence: Evidence) -> Iterator[Advice]:
    hosts = [host for host in evidence.hosts if any(gpu.is_idle is False for gpu in host.gpus)]
    gpus = {host.host: [gpu for gpu in host.gpus if gpu.is_idle is False] for host in hosts}
    if len(hosts) < 2 or len({gpu.device.name for gpu in evidence.used}) > 1:
        return
    odd = _find_odd_node(gpus)
    if odd is not None:
        host, words, percent = odd
        yield Advice(
            "straggler-node",
            f"{host} differs from the other {len(hosts) - 1} nodes: {words}",
            f"leave it out (--exclude={host}; site.options), and compare; if the step is faster, report it to the "
            "centre; if not, this node's share of the work is larger",
            "shardway report: power and clock of all nodes are alike, and a step is shorter",
            **_of_step(evidence, percent),
        )


def _find_odd_node(gpus: dict[str, list[GpuEvidence]]) -> tuple[str, str, float | None] | None:
    """The node that the others wait for, in words, and at most how much of a step that costs."""

    def rows(read: Callable[[GpuEvidence], float | None]) -> dict[str, tuple[float, float]] | None:
        found = {}
        for host, each in gpus.items():
            known = [value for _, value in _list_known(each, read)]
            if not known:
                return None
            found[host] = (sum(known) / len(known), max(known) - min(known))
        return found

    def busy_clock(gpu: GpuEvidence) -> float | None:
        clock, use = gpu.over("sm_clock_mhz", gpu.steady), gpu.over("use_percent", gpu.steady)
        return None if clock is None or use is None else mean(clock[use > 50])

    clocks = rows(busy_clock)
    if clocks:
        slowest = min(clocks, key=lambda host: clocks[host][0])
        usual = median(value for host, (value, _) in clocks.items() if host != slowest)
        own, apart = clocks[slowest]
        if own < SLOW_CLOCK * usual and apart < usual - own and _are_alike(clocks, slowest, usual - own):
            words = f"its clock is {own:.0f} MHz, that of the others {usual:.0f} MHz"
            return slowest, words, 100 * (1 - own / usual)
    uses, powers = rows(lambda gpu: gpu.use), rows(lambda gpu: gpu.power_share)
    if uses:
        lowest = min(uses, key=lambda host: uses[host][0])
        usual = median(value for host, (value, _) in uses.items() if host != lowest)
        own, apart = uses[lowest]
        far = usual - own
        if usual >= FULL_USE and far > 100 * APART * 0.75 and apart < far and _are_alike(uses, lowest, far):
            words = f"its accelerators show {_percent(own)} use, the others {_percent(usual)} (they wait for it)"
            return lowest, words, far
    if powers and uses and min(value for value, _ in uses.values()) >= FULL_USE - 5:
        highest = max(powers, key=lambda host: powers[host][0])
        usual = median(value for host, (value, _) in powers.items() if host != highest)
        own, apart = powers[highest]
        far = own - usual
        if far > APART * own and apart < far and _are_alike(powers, highest, far):
            words = f"it draws {own:.0%} of its power limit, the others {usual:.0%} at full use (they wait for it)"
            return highest, words, 100 * far / own
    return None


def _are_alike(rows: dict[str, tuple[float, float]], odd: str, far: float) -> bool:
    """Whether the other nodes differ among each other, and inside, by less than half of what the odd one does."""
    others = [value for host, value in rows.items() if host != odd]
    values = [value for value, _ in others]
    return max(values) - min(values) < far / 2 and max(apart for _, apart in others) < far


@_rule(
    "slow-network",
    2,
    when="several nodes, InfiniBand ports without traffic, and more than 30 MB/s over Ethernet",
    why="NCCL fell back to sockets: ten times slower than the fabric",
    do="NCCL_DEBUG=INFO names the reason; NCCL_IB_DISABLE unset, the fabric's devices in the container",
    hides=("communication",),
)
def _slow_network(evidence: Evidence) -> Iterator[Advice]:
    rows = [(host, host.total("ib/", "x_bytes_per_s"), host.total("net/", "tx_bytes_per_s")) for host in evidence.hosts]
    used = [row for row in rows if any(gpu.is_idle is False for gpu in row[0].gpus)]
    if len(used) < 2 or any(fabric is None or net is None for _, fabric, net in used):
        return
    fabric, net = max(row[1] or 0.0 for row in used), min(row[2] or 0.0 for row in used)
    if fabric < QUIET_IB and net > BUSY_NET:
        use, power = _use(evidence), _power(evidence.used)
        yield Advice(
            "slow-network",
            f"each node sends {net / 1e6:.0f} MB/s over Ethernet or sockets and nothing over InfiniBand "
            f"({fabric / 1e6:.1f} MB/s); the accelerators show {_percent(use)} use"
            + (f" at {power:.0%} of the power limit" if power is not None else ""),
            "unset NCCL_IB_DISABLE, give the container /dev/infiniband, and read the reason with "
            "NCCL_DEBUG=INFO (it must print NET/IB, not NET/Socket)",
            "shardway report: InfiniBand has the traffic, and a step is shorter",
            **{**_of_step(evidence, None if power is None else 100 * (1 - power)), "severity": "problem"},
        )


@_rule(
    "imbalance",
    2,
    when=f"(max - min) / mean of power or use is above {APART:.0%} among accelerators that all work",
    why="ranks with less work wait for the one with most",
    do="even out the work: samples of like length (data.group_tokens, packing), parallel.pp_split, an even expert load",
    hides=("communication", "host-bound", "low-use"),
)
def _imbalance(evidence: Evidence) -> Iterator[Advice]:
    gpus = evidence.used
    if len(gpus) < 2 or len({gpu.device.name for gpu in gpus}) > 1:
        return
    readers: tuple[tuple[str, Callable[[GpuEvidence], float | None], float, str], ...] = (
        ("use", lambda gpu: gpu.use, 1.0, "% use"),
        ("power", lambda gpu: gpu.power_share, 100.0, "% of the power limit"),
    )
    for what, read, scale, unit in readers:
        rows = [(gpu, scale * value) for gpu, value in _list_known(gpus, read)]
        if len(rows) < 2:
            continue
        known = [value for _, value in rows]
        high, low, middle = max(known), min(known), sum(known) / len(known)
        if middle <= 0 or (high - low) / middle <= APART * (1.0 if what == "use" else 1.25):
            continue
        if what == "power" and min(gpu.use or 0.0 for gpu in gpus) < LOW_USE:
            continue
        top, bottom = rows[known.index(high)][0], rows[known.index(low)][0]
        late = bottom if what == "use" else top
        yield Advice(
            "imbalance",
            f"{top.place} shows {high:.0f} {unit}, {bottom.place} {low:.0f}; the mean of {len(rows)} is {middle:.0f}: "
            f"the others wait for {late.place}",
            _even_out(evidence),
            "shardway report: the rows of power and use are alike; the step is shorter",
            **_of_step(evidence, 100 * (high - low) / high),
        )
        return


def _even_out(evidence: Evidence) -> str:
    pp = evidence.value("parallel", "pp")
    if isinstance(pp, int) and pp > 1:
        return "move layers between stages: parallel.pp_split (shardway plan prints the balance)"
    if evidence.has_events:
        return "give ranks samples of like length (data.pack, data.group_tokens); with experts, model.balance"
    return (
        "give each rank as much work: sort samples by length into batches (DistributedSampler with buckets), an even "
        "split of stages, no evaluation or logging of media on rank 0 alone"
    )


# --- tier 3: where the time of a step goes


@_rule(
    "data-wait",
    3,
    when=f"more than {DATA_SHARE:.0%} of the usual steps' time passes in waiting for the next batch; for a foreign "
    f"command: use below {LOW_USE:.0f} % while loader processes are busy or files are waited for",
    why="accelerators wait for files, decoding or tokenising",
    do='data.workers = "auto", data.stage, prepared data (shardway data prepare); num_workers, pin_memory',
    hides=("host-bound", "low-use", "small-kernels"),
)
def _data_wait(evidence: Evidence) -> Iterator[Advice]:
    part = evidence.data_share
    if evidence.has_events:
        if part is None or part < DATA_SHARE:
            return
        workers = evidence.value("data", "workers")
        cores = _mean_of([host.mean("cpu/use_percent") for host in evidence.hosts])
        others = any(_is_busy_with_others(host) for host in evidence.hosts)
        full = cores is not None and cores > SATURATED and not others
        read = _mean_of([host.mean("io/rchar_bytes_per_s") for host in evidence.hosts])
        words = f"{_percent(100 * part)} of the time between steps is spent waiting for data"
        words += f" (data.workers = {workers})" if workers is not None else ""
        words += f"; the cores are {_percent(cores)} busy" if cores is not None else ""
        words += ", mostly with other programs" if cores is not None and cores > SATURATED and others else ""
        words += f"; {read / 1e6:.0f} MB/s are read on a node" if read is not None else ""
        if full:
            do = "all cores are busy: prepare the data once (shardway data prepare) so that a step decodes nothing"
        elif workers == 0:
            do = 'data.workers = "auto" (or 4): batches are read in processes of their own'
        else:
            do = 'more loader processes (data.workers = "auto"), or the node\'s own disk: data.stage'
        yield Advice(
            "data-wait", words, do, "shardway status: waiting for data below 1 %", **_of_step(evidence, 100 * part)
        )
        return
    use = _use(evidence)
    if use is None or use >= LOW_USE:
        return
    cores = _cores_per_gpu(evidence)
    read = _mean_of([host.mean("io/rchar_bytes_per_s") for host in evidence.hosts])
    if cores is None or HOST_CORES[0] <= cores <= HOST_CORES[1]:
        return
    if cores < HOST_CORES[0] and (read is None or read < _FILES_READ):
        return
    many = cores > HOST_CORES[1]
    yield Advice(
        "data-wait",
        f"the accelerators show {_percent(use)} use while the job uses {cores:.1f} cores for each of them"
        + (f" and reads {read / 1e6:.0f} MB/s a node" if read is not None else "")
        + (": loader processes are the slowest part" if many else ": it waits for files"),
        "store what each sample is decoded to (tensors or tokens in few large files), more cores for each accelerator"
        if many
        else "DataLoader(num_workers=4, persistent_workers=True, pin_memory=True); few large files in place of many "
        "small ones, on the node's own disk ($TMPDIR) or the scratch file system",
        f"shardway report: use above {LOW_USE:.0f} %",
        **_of_step(evidence, 100 - use),
    )


_FILES_READ = 1e6  # bytes per second and node from which a job reads its data while it computes


def _cores_per_gpu(evidence: Evidence) -> float | None:
    """Cores that the job uses, for each accelerator that works."""
    rows = [(host.mean("cpu/job_cores"), sum(gpu.is_idle is False for gpu in host.gpus)) for host in evidence.hosts]
    known = [cores / count for cores, count in rows if cores is not None and count]
    return sum(known) / len(known) if known else None


@_rule(
    "host-bound",
    3,
    when=f"use below {LOW_USE:.0f} % although no data are waited for, and about one core for each accelerator is busy",
    why="Python launches kernels slower than the device runs them",
    do='train.compile = "model", a larger train.micro_batch, no .item() in the loop',
    hides=("low-use",),
)
def _host_bound(evidence: Evidence) -> Iterator[Advice]:
    use, part, cores = _use(evidence), evidence.data_share, _cores_per_gpu(evidence)
    if use is None or use >= LOW_USE or (part is not None and part >= DATA_SHARE):
        return
    busy = cores is not None and HOST_CORES[0] <= cores <= HOST_CORES[1]
    account = evidence.account
    running = evidence.running_s
    in_steps = account is not None and bool(running) and account.script_s < 0.2 * (running or 1.0)
    if not busy and not (evidence.has_events and in_steps and (cores is None or cores >= HOST_CORES[0])):
        return
    words = f"the accelerators show {_percent(use)} use"
    words += f", multiprocessors {_percent(sm)}" if (sm := _average(evidence.used, "sm_percent")) is not None else ""
    words += f"; {_percent(100 * part)} of the time is spent waiting for data" if part is not None else ""
    words += f"; the job uses {cores:.1f} cores for each accelerator: one thread launches kernels" if busy else ""
    compiled = evidence.numerics("train.compile")
    if evidence.has_events:
        first = 'train.compile = "model"' if compiled in ("off", None) else "train.cuda_graphs = true where it is off"
        do = f"{first}; a larger train.micro_batch; in your own code no .item(), print or .cpu() in each step"
    else:
        do = (
            "torch.compile(model) or CUDA graphs, a larger batch, fused optimizer (fused=True), no .item() in each step"
        )
    check = f"shardway report: use above {LOW_USE:.0f} %; shardway profile shows no gaps between kernels"
    yield Advice("host-bound", words, do, check, **_of_step(evidence, 100 - use))


@_rule(
    "communication",
    3,
    when=f"several accelerators above {FULL_USE:.0f} % of use, but below {STARVED_SM:.0f} % of multiprocessors with "
    f"little memory traffic; where that is not measured: below {WAITING_POWER:.0%} of the power limit (a hint below "
    f"{LIKELY_POWER:.0%}) or, where the phases of a step show, in most samples; and not without traffic between them",
    why="a collective that waits keeps a kernel on the device: full use, low power",
    do="fewer or larger messages: a larger train.micro_batch, parallel axes inside a node (shardway plan)",
    hides=("small-kernels", "small-micro-batch"),
)
def _communication(evidence: Evidence) -> Iterator[Advice]:
    gpus = evidence.used
    if len(gpus) < 2 or _is_quiet(evidence):
        return
    use, power, sm = _use(evidence), _power(gpus), _average(gpus, "sm_percent")
    sure = _is_starved(gpus)
    waits = None if sure or sm is not None or use is None or use < FULL_USE else _find_waiting(gpus)
    if waits is not None and waits <= 0.5:
        return
    likely = use is not None and use >= FULL_USE and sm is None and power is not None and power < LIKELY_POWER
    if not (sure or waits or likely):
        return
    traffic = _mean_of([host.total("ib/", "tx_bytes_per_s") for host in evidence.hosts])
    nvlink = _average(gpus, "nvlink_tx_bytes_per_s")
    words = f"{len(gpus)} accelerators show {_percent(use)} use"
    words += f" at {power:.0%} of the power limit" if power is not None else ""
    words += f", multiprocessors {_percent(sm)}" if sm is not None else ""
    words += f", and less than {WAITING_POWER:.0%} in {waits:.0%} of the samples" if waits is not None else ""
    words += ": they wait in collectives" if sure or waits is not None else ": they may wait in collectives"
    words += f"; InfiniBand {traffic / 1e9:.2g} GB/s a node" if traffic is not None else ""
    words += f"; NVLink {nvlink / 1e9:.2g} GB/s each" if nvlink is not None else ""
    if evidence.has_events:
        do = (
            "split less finely: shardway plan my.toml prints a faster layout; a larger train.micro_batch; parallel.tp "
            "and parallel.cp inside a node"
        )
    else:
        do = "fewer, larger messages: gradient accumulation (no_sync), a larger batch for each rank, fewer ranks"
    percent = 100 - sm if sm is not None else None if power is None else 100 * (1 - power)
    found = _of_step(evidence, percent if waits is None else 100 * waits)
    found |= {} if sure or waits is not None else {"severity": "hint"}
    check = "shardway profile: exposed communication; shardway report: power above half of the limit"
    yield Advice("communication", words, do, check, **found)


def _is_quiet(evidence: Evidence) -> bool:
    """Whether accelerators exchange nothing: by NVLink on a node, and by no network where there are several nodes."""
    if not _list_known(evidence.used, lambda gpu: gpu.mean("nvlink_tx_bytes_per_s")):
        return False
    sent = [_average(evidence.used, "nvlink_tx_bytes_per_s") or 0.0]
    if len(evidence.hosts) > 1:
        found = [(host.total("ib/", "tx_bytes_per_s"), host.total("net/", "tx_bytes_per_s")) for host in evidence.hosts]
        if any(None in each for each in found):
            return False
        sent += [value for each in found for value in each if value is not None]
    return max(sent) < QUIET_LINK


def _find_waiting(gpus: Sequence[GpuEvidence]) -> float | None:
    """The share of samples at low power, where the phases of a step are long enough to show in the samples; else None.
    The mean hides it: a third of a step at full power lifts it above that of waiting."""
    np = find_arrays()

    shares = []
    for gpu in gpus:
        power, limit = gpu.over("power_w", gpu.steady), gpu.power_limit_w
        low, high = quantile(power, 0.1), quantile(power, 0.9)
        if low is None or high is None or not limit:
            continue
        if low >= WAITING_POWER * limit or high - low < APART_POWER * limit:
            return None
        shares.append(share(power[np.isfinite(power)] < (low + high) / 2))
    return _mean_of(shares)


def _is_starved(gpus: Sequence[GpuEvidence]) -> bool:
    """Whether accelerators always have a kernel that does little."""
    use, sm, power = _average(gpus, "use_percent"), _average(gpus, "sm_percent"), _power(gpus)
    if use is None or use < FULL_USE:
        return False
    if (_average(gpus, "dram_percent") or 0.0) > MEMORY_BOUND:
        return False
    if sm is not None:
        return sm < STARVED_SM
    return power is not None and power < WAITING_POWER


@_rule(
    "small-kernels",
    3,
    when=f"one accelerator above {FULL_USE:.0f} % of use, but below {STARVED_SM:.0f} % of multiprocessors (or "
    f"{WAITING_POWER:.0%} of the power limit); or several that send each other nothing",
    why="use counts a kernel of one block like one that fills the device",
    do="a larger train.micro_batch, train.compile",
)
def _small_kernels(evidence: Evidence) -> Iterator[Advice]:
    gpus = evidence.used
    if not gpus or not _is_starved(gpus) or (len(gpus) > 1 and not _is_quiet(evidence)):
        return
    use, power, sm = _use(evidence), _power(gpus), _average(gpus, "sm_percent")
    words = f"{_list_places(gpus)}: {_percent(use)} use"
    words += f" at {power:.0%} of the power limit" if power is not None else ""
    words += f", but {_percent(sm)} of the multiprocessors work" if sm is not None else ""
    words += "; nothing is sent between them" if len(gpus) > 1 else ""
    micro = evidence.value("train", "micro_batch")
    do = (
        f'a larger train.micro_batch (now {micro}), train.compile = "model"'
        if evidence.has_events
        else "a larger batch, torch.compile(model), fewer small tensors in the step"
    )
    percent = 100 - sm if sm is not None else None if power is None else 100 * (1 - power)
    yield Advice(
        "small-kernels", words, do, "shardway report: power rises with the batch", **_of_step(evidence, percent)
    )


@_rule(
    "save-stalls",
    3,
    when=f"saving takes more than {SAVE_SHARE:.0%} of the time after start-up",
    why="ranks stand still while a checkpoint is written",
    do="checkpoint.background = true, checkpoint.local_every, a rarer checkpoint.every (shardway plan prints the best)",
)
def _save_stalls(evidence: Evidence) -> Iterator[Advice]:
    account, running, progress = evidence.account, evidence.running_s, evidence.progress
    if account is None or not running or progress is None or running < STALLED_S:
        return
    part = account.save_s / running
    if part < SAVE_SHARE:
        return
    times = [save.seconds for save in progress.saves if save.seconds is not None]
    every, background = evidence.value("checkpoint", "every"), evidence.value("checkpoint", "background")
    words = f"saving takes {_percent(100 * part)} of {render_clock(running)}: {len(progress.saves)} saves"
    words += f" of {sum(times) / len(times):.1f} s" if times else ""
    size = max((save.size_bytes or 0 for save in progress.saves), default=0)
    words += f" and {render_size(size)}" if size else ""
    rarer = f"a rarer checkpoint.every (now {every})" if every is not None else "a rarer checkpoint.every"
    first = "" if background is True else "checkpoint.background = true; "
    do = f"{first}{rarer}; checkpoint.local_every saves to the nodes' own disks"
    check = "shardway status: saving below 1 % of the time account"
    yield Advice("save-stalls", words, do, check, **_of_step(evidence, 100 * part))


@_rule(
    "no-tensor-cores",
    3,
    when="matrix products are fp32 without TF32 on a device with tensor cores, or tensor cores are busy for less than "
    f"{NO_TENSOR:.0f} % of the time while multiprocessors are busy for {TENSOR_SM:.0f} %",
    why="16-bit products are 8 to 16 times as fast",
    do='precision.compute = "bf16" (or precision.tf32 = true); torch.autocast("cuda", torch.bfloat16)',
    hides=("unaligned-dims",),
)
def _no_tensor_cores(evidence: Evidence) -> Iterator[Advice]:
    gpus = evidence.used
    compute, tf32 = evidence.numerics("precision.compute"), evidence.numerics("precision.tf32")
    tensor, sm = _average(gpus, "tensor_percent"), _average(gpus, "sm_percent")
    wide = evidence.has_events and compute == "fp32" and tf32 is not True
    unused = tensor is not None and sm is not None and tensor < NO_TENSOR and sm > TENSOR_SM
    part = next((gpu.part for gpu in gpus if gpu.part is not None), None)
    plain, fast = (part.peak("fp32"), part.peak("bf16") or part.peak("fp16")) if part is not None else (None, None)
    if not gpus or not (unused or (wide and plain and fast and fast > 2 * plain)):
        return
    ratio = fast / plain if plain and fast else None
    narrow = "bf16" if part is None or part.peak("bf16") or not part.peak("fp16") else "fp16"
    percent = 100 * (1 - 1 / ratio) if ratio else None
    before, after = (evidence.plan(), evidence.plan(precision=narrow)) if wide else (None, None)
    planned = before is not None and after is not None and after.time.seconds < before.time.seconds
    if planned:
        percent = 100 * (1 - after.time.seconds / before.time.seconds)  # type: ignore[union-attr]
    words = f"products are computed in {compute} without TF32" if wide else "the tensor cores are not used"
    words += f" on {part.name}" if part is not None else ""
    words += f": tensor cores {_percent(tensor)}, multiprocessors {_percent(sm)}" if tensor is not None else ""
    words += f"; {narrow} products are up to {ratio:.0f} times as fast" if ratio else ""
    words += " (the ceiling is the plan's)" if planned else ""
    do = (
        f'precision.compute = "{narrow}"' + ("; or precision.tf32 = true" if part and part.peak("tf32") else "")
        if evidence.has_events and wide
        else "sizes that are multiples of 8 (64), and 16-bit products"
        if evidence.has_events
        else f'with torch.autocast("cuda", torch.{ {"bf16": "bfloat16", "fp16": "float16"}[narrow] }): in the step; or '
        'torch.set_float32_matmul_precision("high")'
    )
    yield Advice(
        "no-tensor-cores",
        words,
        do,
        "the loss after some hundred steps is that of fp32; a step is shorter; tensor cores above 10 %",
        **{**_of_step(evidence, percent), "severity": "problem"},
    )


@_rule(
    "memory-leak",
    3,
    when=f"the job's memory on a node grows along a line (R2 above {LEAK_R2}) over the second half, by "
    f"{LEAK_SHARE:.0%} of its size and {LEAK_BYTES >> 20} MiB at least, in {LEAK_S / 60:.0f} min of samples or more",
    why="at the limit the kernel kills the job",
    do="keep no tensors with their graph (losses.append(loss.item())), bounded caches; arrays in place of Python lists",
)
def _memory_leak(evidence: Evidence) -> Iterator[Advice]:
    worst: tuple[float, HostEvidence, float, float] | None = None
    for host in evidence.hosts:
        found = _fit_growth(host)
        if found is not None and (worst is None or found[0] > worst[0]):
            worst = (found[0], host, found[1], found[2])
    if worst is None:
        return
    slope, host, r2, now = worst
    limit = host.info.memory_limit_bytes or host.info.memory_bytes
    left_s = (limit - now) / slope if limit else None
    words = f"the job's memory on {host.host} grows by {render_size(slope * 3600)} an hour (R2 {r2:.2f})"
    words += f", now {render_size(now)}"
    if limit and left_s is not None:
        words += f" of {render_size(limit)}: full in {render_clock(max(0.0, left_s))}"
    ranks = "data.workers = 0 shows whether loader processes leak; " if evidence.has_events else ""
    yield Advice(
        "memory-leak",
        words,
        f"{ranks}keep numbers, not tensors (losses.append(loss.item())), bound every cache, hold lists of samples as "
        "arrays (a list of Python objects is copied page by page in each loader process)",
        "shardway report: the curve of the job's memory is flat after the first epoch",
        severity="problem" if left_s is not None and left_s < 24 * 3600 else "hint",
    )


def _fit_growth(host: HostEvidence) -> tuple[float, float, float] | None:
    """Bytes per second, R2 and the last level of the job's memory over the second half; None where it does not grow."""
    np = find_arrays()

    values = host.series.get("memory/job_bytes")
    if values is None:
        return None
    known = np.isfinite(values) & host.warm
    times, level = host.times[known], values[known].astype(np.float64)
    if len(times) < 60 or times[-1] - times[0] < LEAK_S:
        return None
    half = times >= (times[0] + times[-1]) / 2
    blocks = np.array_split(np.arange(len(times))[half], 40)
    at = np.array([times[block].mean() for block in blocks if len(block)])
    low = np.array([np.median(level[block]) for block in blocks if len(block)])
    slope, base = np.polyfit(at - at[0], low, 1)
    rest = low - (slope * (at - at[0]) + base)
    r2 = 1.0 - rest.var() / low.var() if low.var() > 0 else 0.0
    grown = slope * (at[-1] - at[0])
    late = np.polyfit(at[len(at) // 2 :], low[len(at) // 2 :], 1)[0]
    steady = late > 0.5 * slope  # a cache that fills grows ever slower
    if r2 <= LEAK_R2 or not steady or grown < LEAK_SHARE * low.mean() or grown < LEAK_BYTES:
        return None
    return float(slope), float(r2), float(low[-1])


@_rule(
    "low-use",
    3,
    when=f"use below {LOW_USE:.0f} % (a foreign command: 60 %) and no rule names the cause",
    why="accelerators wait, and what was measured does not show for what",
    do="shardway profile (or torch.profiler) over some steps, then shardway trace",
)
def _low_use(evidence: Evidence) -> Iterator[Advice]:
    use = _use(evidence)
    if use is None or use >= (LOW_USE if evidence.has_events else _FOREIGN_LOW):
        return
    missing = sorted({name for host in evidence.hosts for name in host.info.missing})
    words = f"the accelerators show {_percent(use)} use, and neither waiting for data nor a busy core explains it"
    words += f" (not sampled: {', '.join(missing[:4])})" if missing else ""
    do = (
        "shardway profile my.toml --steps 3"
        if evidence.has_events
        else "torch.profiler over some steps, shardway trace FILE"
    )
    yield Advice("low-use", words, do, "the gaps of the trace have a cause", **_of_step(evidence, 100 - use))


_FOREIGN_LOW = 60.0  # its saves and validations are not known, and count as idle

# --- tier 4: what could be better


@_rule(
    "gpu-fragmentation",
    4,
    when="one accelerator on each of several nodes, of which the job has at most half of the cores",
    why="messages cross the network in place of the link inside a node",
    do="ask for them on one node",
    hides=(),
)
def _gpu_fragmentation(evidence: Evidence) -> Iterator[Advice]:
    infos: list[NodeInfo] = [host.info for host in evidence.hosts if host.gpus]
    if len(infos) < 2 or any(len(info.devices) != 1 for info in infos):
        return
    parts = [info for info in infos if info.cores and len(info.allowed_cores) <= info.cores // 2]
    if len(parts) < len(infos) and not any(info.devices[0].index > 0 for info in infos):
        return
    info = parts[0] if parts else infos[0]
    yield Advice(
        "gpu-fragmentation",
        f"{len(infos)} nodes with one accelerator each ({_list_hosts([each.host for each in infos])}), and "
        f"{len(info.allowed_cores)} of {info.cores} cores on {info.host}: the nodes have more",
        f"ask for {len(infos)} on one node: "
        + (
            f"site.nodes = 1, site.ranks_per_node = {len(infos)}"
            if evidence.has_events
            else f"--nodes=1 --gpus-per-node={len(infos)}"
        ),
        "shardway report: one node with all accelerators; the step is shorter",
        severity="hint",
    )


@_rule(
    "unaligned-dims",
    4,
    when="model.vocab, dim, ffn_dim or the head's width is no multiple of 8 (64 for the vocabulary), on tensor cores",
    why="kernels for tensor cores need rows of whole 16 bytes, and waste part of each tile otherwise",
    do="round up: vocab 50257 -> 50304; rows of the vocabulary that no token uses cost nothing else",
)
def _unaligned_dims(evidence: Evidence) -> Iterator[Advice]:
    part = next((gpu.part for gpu in evidence.used if gpu.part is not None), None)
    if part is None or not (part.peak("bf16") or part.peak("fp16")) or evidence.value("model", "hf"):
        return
    changes: dict[str, int] = {}
    for name, by in (("vocab", 64), ("dim", 8), ("ffn_dim", 8), ("head_dim", 8)):
        size = evidence.value("model", name)
        if isinstance(size, int) and size > 0 and size % by and (name != "vocab" or size > 1024):
            changes[name] = -(-size // by) * by if name != "vocab" or size < 8192 else -(-size // 128) * 128
    if not changes:
        return
    before = evidence.plan()
    after = evidence.plan(**changes) if before is not None else None
    percent = None
    if before is not None and after is not None:
        percent = 100 * (1 - after.time.seconds / before.time.seconds)
    now = {name: evidence.value("model", name) for name in changes}
    odd = any(size % 8 for size in now.values())
    words = _list_words(f"model.{name} = {size} ({_name_rest(size)})" for name, size in now.items())
    words += f" on {part.name}; by the plan the step takes {percent:.1f} % less with the sizes below" if percent else ""
    found = _of_step(evidence, percent) if percent and percent > 0 else {}
    yield Advice(
        "unaligned-dims",
        words,
        _list_words(f"model.{name} = {size}" for name, size in changes.items())
        + " (a new run: shapes of weights change)",
        "shardway plan, and the step's time of 50 steps before and after",
        **{**found, "severity": "problem" if odd and (percent or 0.0) >= PROBLEM_PERCENT else "hint"},
    )


def _name_rest(size: int) -> str:
    return "odd" if size % 2 else f"no multiple of {next(by for by in (8, 64, 128) if size % by)}"


@_rule(
    "small-micro-batch",
    4,
    when=f"a step has several micro-batches, and half of the device's memory ({FREE_MEMORY:.0%}) stays free",
    why="larger products fill the device better, and there are fewer of everything else",
    do="double train.micro_batch; the global batch stays the same, and so does the loss",
)
def _small_micro_batch(evidence: Evidence) -> Iterator[Advice]:
    micro, start = evidence.value("train", "micro_batch"), evidence.progress.start if evidence.progress else None
    if (
        not isinstance(micro, int)
        or start is None
        or not evidence.used
        or not start.world
        or not start.samples_per_step
    ):
        return
    split = 1
    for axis in ("tp", "cp", "pp"):
        size = evidence.value("parallel", axis)
        split *= size if isinstance(size, int) else 1
    passes = start.samples_per_step * split / (start.world * micro)
    peaks = _list_known(
        evidence.used,
        lambda gpu: gpu.memory_max / gpu.memory_bytes if gpu.memory_max and gpu.memory_bytes else None,
    )
    part = max((share for _, share in peaks), default=1.0)
    if passes < 2 or part >= FREE_MEMORY:
        return
    before, after = evidence.plan(), evidence.plan(micro_batch=2 * micro)
    percent = None
    if before is not None and after is not None:
        percent = 100 * (1 - after.time.seconds / before.time.seconds)
        if percent < 1.0 or not after.fits:
            return
    words = f"a step has {passes:.0f} micro-batches of {micro}, and at most {part:.0%} of a device's memory is used"
    words += f"; by the plan twice the micro-batch takes {percent:.1f} % off the step" if percent else ""
    yield Advice(
        "small-micro-batch",
        words,
        f"train.micro_batch = {2 * micro}",
        "the step is shorter, and the peak of memory stays below 90 %",
        **{**_of_step(evidence, percent), "severity": "hint"},
    )


@_rule(
    "power-limit",
    4,
    when=f"the power limit is below {LOWERED_LIMIT:.0%} of the part's, or clocks are below {CAPPED_CLOCK:.0%} of their "
    f"maximum for it, in {CAP_SHARE:.0%} of the samples",
    why="the centre (or a broken supply) limits the power; products take longer",
    do="nothing in the run; ask the centre, count it in when you compare with other machines",
)
def _power_limit(evidence: Evidence) -> Iterator[Advice]:
    if not evidence.used:
        return
    np = find_arrays()

    for gpu in evidence.used:
        bits, clock = gpu.over("throttle_bits", gpu.steady), gpu.over("sm_clock_mhz", gpu.steady)
        if gpu.device.maker != "nvidia" or bits is None or clock is None:
            continue
        capped = (np.nan_to_num(bits).astype(np.int64) & POWER_CAP) != 0
        if share(capped) < CAP_SHARE:
            continue
        below, above = mean(clock[capped]), quantile(gpu.all("sm_clock_mhz"), 1.0)
        limit, usual = gpu.device.power_limit_w, gpu.part.power_w if gpu.part else None
        lowered = bool(limit and usual and limit < LOWERED_LIMIT * usual)
        slow = bool(below and above and below < CAPPED_CLOCK * above)
        if not lowered and not slow:
            continue
        words = f"{gpu.place} is held at its power limit in {_percent(100 * share(capped))} of the samples"
        words += f", {limit:.0f} W of the part's {usual:.0f} W" if lowered else ""
        words += f", clock {below:.0f} of {above:.0f} MHz" if below and above else ""
        yield Advice(
            "power-limit",
            words,
            "ask the centre whether the limit is meant; nothing in the run changes it",
            "nvidia-smi -q -d POWER on the node",
            **{**_of_step(evidence, 100 * (1 - below / above) if below and above else None), "severity": "hint"},
        )
        return


@_rule(
    "over-asked-time",
    4,
    when=f"the work was done in less than {TIME_NOTE:.0%} of the wall-time asked for, with half an hour left at least",
    why="a shorter job starts sooner: it fits into gaps of the queue",
    do="site.walltime (--time, walltime=) with a third to spare",
)
def _over_asked_time(evidence: Evidence) -> Iterator[Advice]:
    last = evidence.attempts[-1] if evidence.attempts else None
    if last is None or last.result is None or last.result.state != Ending.FINISHED or not last.is_queued:
        return
    asked, used = last.asked_s, last.used_s
    if not asked or not used or used >= TIME_NOTE * asked or asked - used < TIME_LEFT_S or used < SHORT_S:
        return
    wanted = max(600.0, -(-used * 1.3 // 300) * 300)
    yield Advice(
        "over-asked-time",
        f"job {last.result.job or last.number} used {render_clock(used)} of {render_clock(asked)} ({used / asked:.0%})",
        (f'site.walltime = "{wanted / 60:.0f}min"' if evidence.has_events else f"--walltime {wanted / 60:.0f}min")
        + " the next time: it starts sooner",
        "shardway status: it ends before its wall-time",
        severity="problem" if used < TIME_RED * asked else "hint",
    )


@_rule(
    "validation-time",
    4,
    when=f"validation takes more than {VALIDATION_SHARE:.0%} of the time after start-up",
    why="it costs as much as a third of the training",
    do="train.validate_every, train.validation_samples",
)
def _validation_time(evidence: Evidence) -> Iterator[Advice]:
    account, running = evidence.account, evidence.running_s
    if account is None or not running or running < STALLED_S or account.validation_s < VALIDATION_SHARE * running:
        return
    percent = 100 * account.validation_s / running
    every, samples = evidence.value("train", "validate_every"), evidence.value("train", "validation_samples")
    yield Advice(
        "validation-time",
        f"validation takes {_percent(percent)} of {render_clock(running)}",
        f"validate more rarely (train.validate_every, now {every}) or on fewer samples (train.validation_samples, now "
        f"{samples})",
        "shardway status: validation below 10 % of the time account",
        **{**_of_step(evidence, percent), "severity": "hint"},
    )


@_rule(
    "short-job",
    4,
    when=f"a submitted job was done in less than {SHORT_S:.0f} s",
    why="the queue and the start take longer than the work, and its speed cannot be judged",
    do="put several into one job, or run it in an interactive one",
)
def _short_job(evidence: Evidence) -> Iterator[Advice]:
    last = evidence.attempts[-1] if evidence.attempts else None
    if last is None or last.result is None or last.result.state != Ending.FINISHED or not last.is_queued:
        return
    if last.used_s is not None and last.used_s < SHORT_S:
        yield Advice(
            "short-job",
            f"job {last.result.job or last.number} was done after {last.used_s:.0f} s",
            "put several such runs into one job, or try it in an interactive one (salloc, qsub -I)",
            "it runs for some minutes at least",
            severity="hint",
        )
