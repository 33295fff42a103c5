"""Checks of GPUs: that the driver answers, how many there are, which ones ranks may use, and whether any is ill.

Invariant: every verdict is made from what `look_around` gathered; nothing here asks a driver. Thresholds of ECC are
those with which operators of large systems did not reject healthy nodes (aggregate errors alone are no defect).

Sources: nvidia-smi(1); NVML API reference, "NvmlClocksEventReasons"; CUDA C++ Programming Guide, "CUDA Environment
Variables"; ROCm documentation, "GPU isolation techniques".
"""

from __future__ import annotations

from shardway.ranks.doctor.finding import CheckResult, bad, good, poor, unknown
from shardway.ranks.doctor.surroundings import MachineView
from shardway.sites.schema import CPU

_ECC_WARN, _ECC_FAIL = 8, 64
_BUSY_MIB = 1024
_HW_SLOWDOWN, _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
_REASONS = {
    _HW_SLOWDOWN: "hardware slowdown",
    _HW_THERMAL: "too hot (hardware)",
    _POWER_BRAKE: "power brake",
    _SW_THERMAL: "too hot (driver)",
}
_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_OTHER_NODE = "leave this node out (Slurm: --exclude={host}) and tell the site's support"


def check_query(around: MachineView) -> CheckResult:
    """Whether nvidia-smi answers."""
    state = around.nvidia
    if state.answer == "hung":
        return bad(state.said, f"the driver of this node hangs: {_OTHER_NODE.format(host=around.host)}")
    if state.answer == "failed":
        remedy = f"the driver does not work here: {_OTHER_NODE.format(host=around.host)}"
        return bad(f"nvidia-smi: {state.said}", remedy)
    if state.answer == "absent":
        if around.device_files and around.in_job:
            return poor(
                "this node has NVIDIA devices, but no nvidia-smi is to be found",
                "in a container: bring the driver's tools in (apptainer exec --nv, NVIDIA_DRIVER_CAPABILITIES=all)",
            )
        return unknown("no nvidia-smi here")
    return good(f"nvidia-smi answers, driver {_driver(around) or 'n/a'}", driver=_driver(around))


def _driver(around: MachineView) -> str:
    return next(iter(around.nvidia.columns.get("driver", ())), "")


def check_count(around: MachineView) -> CheckResult:
    """Whether there are as many GPUs as the profile says, as the scheduler gave, and as ranks need."""
    found, said = around.devices, _describe(around)
    if around.nvidia.answer in ("hung", "failed"):
        return unknown("the driver does not say")
    wanted, why = _expect(around)
    if found < wanted:
        return bad(f"{said}; {wanted} are {why}", _ask_for(around, wanted), gpus=found)
    if not wanted and not found:
        return good("none, and none is expected", gpus=0)
    return good(said + (f"; {wanted} are {why}" if wanted else ""), gpus=found)


def _expect(around: MachineView) -> tuple[int, str]:
    """How many GPUs this node must have at least, and who says so."""
    if around.wanted.device == "cpu":
        return 0, ""
    node = around.site.node
    if around.gpus_given is not None:
        return around.gpus_given, "what the scheduler gave"
    if node.accelerators_per_node and around.site.request.whole_nodes is not False:
        return node.accelerators_per_node, f"in the profile of {around.site.name}"
    if around.wanted.device == "cuda":
        return around.local_world, "what the ranks of this node need"
    return 0, ""


def _describe(around: MachineView) -> str:
    names = around.nvidia.names
    if around.nvidia.slices:
        return f"{around.nvidia.slices} MIG slices of {len(names)} GPUs"
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(kinds) or (f"{around.amd} AMD devices" if around.amd else "no GPU")


def _ask_for(around: MachineView, wanted: int) -> str:
    option = {
        "gres": f"--gres=gpu:{wanted}",
        "gpus-per-node": f"--gpus-per-node={wanted}",
        "ngpus": f"ngpus={wanted} in select",
        "none": "a whole node",
    }.get(around.site.request.accelerators or "", "all GPUs of the node")
    return f"ask the scheduler for {option}; if the job did, {_OTHER_NODE.format(host=around.host)}"


def check_visible(around: MachineView) -> CheckResult:
    """Whether the variables that hide GPUs leave each rank of the node one of its own."""
    lists = {name: around.environ[name] for name in _LISTS if name in around.environ}
    if not lists:
        return good("no variable hides a GPU") if _expects_gpus(around) else unknown("no GPU is wanted or hidden")
    for name, text in lists.items():
        trouble = _judge_list(around, name, text)
        if trouble is not None:
            return trouble
    if "HIP_VISIBLE_DEVICES" in lists and "ROCR_VISIBLE_DEVICES" in lists:
        said = ", ".join(f"{name}={text}" for name, text in lists.items())
        return poor(f"{said}: the second counts within what the first leaves", "unset HIP_VISIBLE_DEVICES")
    return good(", ".join(f"{name}={text}" for name, text in lists.items()))


def _judge_list(around: MachineView, name: str, text: str) -> CheckResult | None:
    """What is wrong with one variable; None for nothing."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    twice = sorted({entry for entry in entries if entries.count(entry) > 1})
    if twice:
        remedy = f"name each device once: unset {name} in the job script"
        return bad(f"{name}={text} names {', '.join(twice)} twice, and what follows is ignored", remedy)
    if not _expects_gpus(around):
        return None
    # Devices from the first that does not exist on are ignored; "-1", "NoDevFiles" and "" hide all.
    usable = entries.index("-1") if "-1" in entries else 0 if "NoDevFiles" in entries else len(entries)
    if usable < around.local_world:
        return bad(
            f"{name}={text} shows {usable} GPUs to each of the {around.local_world} ranks of this node",
            f"every rank must see all GPUs of its node: start without --gpus-per-task and --gpu-bind=single "
            f"(srun --gpu-bind=none), or unset {name}",
        )
    return None


def _expects_gpus(around: MachineView) -> bool:
    if around.wanted.device == "cpu":
        return False
    known = around.site.node.accelerator not in (None, CPU)
    return bool(around.wanted.device == "cuda" or around.devices or known)


def check_ecc(around: MachineView) -> CheckResult:
    """Whether a GPU's memory has failed: errors since the driver was loaded, rows that could not be replaced."""
    state = around.nvidia
    volatile, aggregate = (max(state.numbers(name), default=None) for name in ("ecc_volatile", "ecc_aggregate"))
    waiting, failed = ("Yes" in state.columns.get(name, ()) for name in ("rows_pending", "rows_failed"))
    if volatile is None and aggregate is None:
        return unknown("no GPU here counts memory errors")
    said = f"uncorrected memory errors: {_or_na(volatile)} since start, {_or_na(aggregate)} in all"
    remedy = _OTHER_NODE.format(host=around.host)
    if failed:
        return bad(f"{said}; rows of memory could not be replaced", remedy)
    if volatile or (aggregate or 0) >= _ECC_FAIL or waiting:
        return bad(said + ("; rows wait to be replaced at a reset" if waiting else ""), remedy)
    if (aggregate or 0) >= _ECC_WARN:
        return poor(said, "keep an eye on this node; tell the site's support if the number grows")
    return good(said)


def _or_na(number: float | None) -> str:
    return "n/a" if number is None else f"{number:g}"


def check_throttle(around: MachineView) -> CheckResult:
    """Whether a GPU is slowed down by heat or by its power supply."""
    masks = around.nvidia.numbers("throttle_now") or around.nvidia.numbers("throttle")
    if not masks:
        return unknown("no GPU here says why it is slow")
    active = 0
    for mask in masks:
        active |= int(mask)
    reasons = [text for bit, text in _REASONS.items() if active & bit]
    slow = [str(index) for index, mask in enumerate(masks) if int(mask) & sum(_REASONS)]
    if not reasons:
        return good("no GPU is slowed down")
    said = f"GPU {', '.join(slow)}: {', '.join(reasons)}"
    remedy = f"one slow GPU slows all ranks: {_OTHER_NODE.format(host=around.host)}"
    return bad(said, remedy) if active & ~_SW_THERMAL & sum(_REASONS) else poor(said, remedy)


def check_busy(around: MachineView) -> CheckResult:
    """Whether somebody else's program is on a GPU: what an earlier job left behind."""
    used = around.nvidia.numbers("memory_used_mib")
    if not used:
        return unknown("no GPU here tells its memory")
    busy = [f"GPU {index}: {mib / 1024:.1f} GiB" for index, mib in enumerate(used) if mib > _BUSY_MIB]
    if not busy:
        return good("all GPUs are idle")
    remedy = "see who: nvidia-smi --query-compute-apps=pid,used_memory --format=csv; ask for whole nodes (--exclusive)"
    return poor("memory in use before the job starts: " + ", ".join(busy), remedy)


def check_mode(around: MachineView) -> CheckResult:
    """Whether a GPU refuses programs, or is cut into slices."""
    modes, mig = (set(around.nvidia.columns.get(name, ())) for name in ("compute_mode", "mig"))
    if not modes:
        return unknown("no GPU here tells its mode")
    if "Prohibited" in modes:
        return bad("a GPU takes no programs (compute mode Prohibited)", _OTHER_NODE.format(host=around.host))
    if "Enabled" in mig:
        remedy = "ask for GPUs that are not cut into slices: NCCL joins no two slices"
        return (poor if around.local_world < 2 else bad)("MIG is on: a process sees one slice", remedy)
    return good(f"compute mode {', '.join(sorted(modes))}")
