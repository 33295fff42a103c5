"""The values of `precision.compute`, `precision.tf32` and `train.compile` that are "auto": what a device does fast.

Invariant: pure functions of facts about devices and of the other keys. Of several devices the weakest decides; unknown
hardware computes in fp32 and compiles nothing; no rule refuses a chosen value. The machine is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardway.hardware.device import A_CPU, DeviceFacts
from shardway.resolve.draft import Resolved, Settled
from shardway.runfile.write import render_value

if TYPE_CHECKING:
    from shardway.resolve.draft import Draft

COMPUTE, TF32, COMPILE = KEYS = ("precision.compute", "precision.tf32", "train.compile")
"""The keys that follow the device."""

WEAKEST: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {COMPUTE: ("fp32", "bf16"), TF32: (False, True), COMPILE: ("off", "blocks")}
)
"""Key -> the values that a device may choose, the weakest first."""

SHORT_RUN = 100
"""With fewer steps, compilation (about a minute) takes longer than it saves."""

TRITON_FROM = (7, 0)
"""Compute capability from which Triton supports a device: Volta."""

BEFORE = "as this run computed before"
"""The reason why a resumed run keeps a value that its device would not choose."""

DROPS = "dropout starts anew from a seed at each block"
"""The reason why blocks with dropout are not compiled."""

_ZERO_BUBBLE = ("zero_bubble", "zbv")
_KEPT_COMPUTE = ("fp32", "bf16", "fp16")
_FORMATS_OF_DEEPSPEED = ("bf16", "fp16", "data_types", "bfloat16")


# --- the choice of one device


def choose_compute(device: DeviceFacts) -> Settled:
    """bf16 if the device multiplies it natively, and faster than fp32 as far as that is known."""
    if device.kind in ("cpu", "mps"):
        return Settled("fp32", device.name)
    if device.native_bf16 is None or device.kind == "unknown":
        return Settled("fp32", f"what {device.name} multiplies fast is not known")
    if not device.native_bf16:
        return Settled("fp32", f"{device.name} has no bf16 products of its own")
    if device.bf16_gain is None:
        return Settled("bf16", f"{device.name} has bf16 products of its own")
    if device.bf16_gain <= 1:
        return Settled("fp32", f"{device.name} multiplies bf16 no faster than fp32")
    return Settled("bf16", f"{device.name} multiplies bf16 {device.bf16_gain:.3g} times as fast as fp32")


def choose_tf32(device: DeviceFacts) -> Settled:
    """TF32 on every device that has it."""
    if device.kind in ("cpu", "mps"):
        return Settled(False, device.name)
    if device.has_tf32 is None or device.kind == "unknown":
        return Settled(False, f"whether {device.name} has TF32 is not known")
    return Settled(device.has_tf32, f"{device.name} has {'' if device.has_tf32 else 'no '}TF32")


def choose_compile(device: DeviceFacts) -> Settled:
    """Blocks on a CUDA device that Triton supports here. A part of the catalogue has no capability, and all parts in it
    are Volta or newer."""
    if device.kind in ("cpu", "mps"):
        return Settled("off", device.name)
    if device.kind != "cuda":
        return Settled("off", f"what compiled blocks gain on {device.name} is not known")
    if device.capability is not None and device.capability < TRITON_FROM:
        version = ".".join(map(str, device.capability))
        return Settled("off", f"Triton makes no kernels for {device.name} (compute capability {version})")
    if device.no_compiler:
        return Settled("off", device.no_compiler)
    return Settled("blocks", f"{device.name} gains by compiled blocks")


_CHOICES: Mapping[str, Callable[[DeviceFacts], Settled]] = MappingProxyType(
    {COMPUTE: choose_compute, TF32: choose_tf32, COMPILE: choose_compile}
)


def choose_for(key: str, devices: Sequence[DeviceFacts]) -> Settled:
    """The choice of the weakest of several devices."""
    if not devices:
        return _CHOICES[key](DeviceFacts("unknown", "this accelerator"))
    return min((_CHOICES[key](device) for device in devices), key=lambda choice: WEAKEST[key].index(choice.value))


# --- the choice for a run


def choose(draft: Draft, key: str) -> Settled:
    """The value of a key that is "auto", with the reason: what the other keys or the script require, else the value of
    the run's earlier attempts, else what the devices do fast."""
    facts = draft.circumstances
    devices = (A_CPU,) if draft.get("run.device") == "cpu" else facts.devices
    usual = choose_for(key, devices)
    if (needed := _NEEDS[key](draft, usual)) is not None:
        return needed
    before = facts.before.get(key, usual.value)
    if before == usual.value or not _may_keep(draft, key, before):
        return usual
    return Settled(before, f"{BEFORE} (a new run: {render_value(usual.value)}, {usual.reason})")


def _may_keep(draft: Draft, key: str, value: Any) -> bool:
    """Whether the value of earlier attempts is possible here and no rule refuses it."""
    on_cpu = draft.get("run.device") == "cpu"
    if key == COMPUTE:
        return value in _KEPT_COMPUTE
    if key == TF32:
        return isinstance(value, bool) and not (value and on_cpu)
    splits = draft.get("parallel.pp") > 1 or draft.get("train.engine") == "deepspeed"
    if value == "off":
        return True
    can_compile = not on_cpu and not any(device.no_compiler for device in draft.circumstances.devices)
    return can_compile and value in (("blocks",) if splits else ("blocks", "model"))


def _find_compute_needed(draft: Draft, usual: Settled) -> Settled | None:
    deepspeed = draft.get("train.engine") == "deepspeed"
    if draft.get("precision.weights") == "bf16" and not deepspeed:
        return Settled("bf16", 'precision.weights = "bf16" is multiplied as it is')
    if settled := draft.circumstances.settled.get(COMPUTE):
        return settled
    named = [name for name in _FORMATS_OF_DEEPSPEED if deepspeed and name in draft.get("deepspeed.settings")]
    if named:
        return Settled("fp32", f"deepspeed.settings has {named[0]}")
    if deepspeed and usual.value == "bf16" and draft.get("deepspeed.stage") == 1:
        return Settled("fp32", "ZeRO 1 adds bf16 gradients up in bf16, which loses small ones")
    return None


def _find_tf32_needed(draft: Draft, usual: Settled) -> Settled | None:
    return draft.circumstances.settled.get(TF32)


def _find_compile_needed(draft: Draft, usual: Settled) -> Settled | None:
    if settled := draft.circumstances.settled.get(COMPILE):
        return settled
    schedule = draft.get("parallel.pp_schedule")
    may_split = draft.get("parallel.pp") > 1 or draft.get("parallel.layout") == "auto"
    if may_split and schedule in _ZERO_BUBBLE:
        return Settled("off", f'parallel.pp_schedule = "{schedule}" splits backward passes')
    if draft.get("recompute.mode") == "budget":
        return Settled("blocks", 'recompute.mode = "budget" is the compiler\'s')
    reason = next(_find_no_gain(draft), "") if usual.value != "off" else ""
    return Settled("off", reason) if reason and COMPILE not in draft.circumstances.before else None


def _find_no_gain(draft: Draft) -> Iterator[str]:
    """Reasons not to compile blocks on a device that could gain by it."""
    if draft.get("train.engine") != "torch":
        yield f'train.engine = "{draft.get("train.engine")}" runs the model'
    if draft.get("train.deterministic"):
        yield "train.deterministic: a compiler may choose other kernels in each run"
    if draft.get("model.experts") and not draft.get("model.hf") and not draft.circumstances.own_model:
        yield "experts take another number of tokens at each step"
    if draft.get("parallel.cp") > 1 and draft.get("parallel.cp_method") == "ring":
        yield "the ring of parallel.cp cuts each block into several graphs"
    if draft.get("model.dropout") and not draft.get("model.hf") and not draft.circumstances.own_model:
        yield DROPS
    if draft.get("precision.compute") == "float8" and draft.get("precision.float8_engine") != "torchao":
        yield "Transformer Engine has kernels of its own"
    steps = _count_steps(draft)
    if steps is not None and steps < SHORT_RUN:
        yield _describe_short(steps)


def leave_short_runs_uncompiled(resolved: Resolved) -> Resolved:
    """The run without compiled blocks if the data shows that it is short and nothing else requires them."""
    facts, steps = resolved.circumstances, resolved.derived.total_steps
    is_open = resolved.is_derived(COMPILE) and resolved.values.recompute.mode != "budget"
    if not is_open or COMPILE in facts.before or COMPILE in facts.settled or steps >= SHORT_RUN:
        return resolved
    if resolved.values.train.compile == "off":
        return resolved
    return resolved.with_values({COMPILE: Settled("off", _describe_short(steps))})


def _describe_short(steps: int) -> str:
    return f"compiling takes longer than it saves in {steps} steps"


def _count_steps(draft: Draft) -> int | None:
    """The length of the run in steps, if it does not depend on the data."""
    span = draft.get("train.steps")
    if span.unit not in ("steps", "samples"):
        return None
    size = draft.get("train.global_batch") if span.unit == "samples" else 1
    return int(span.amount // size)


_NEEDS: Mapping[str, Callable[[Draft, Settled], Settled | None]] = MappingProxyType(
    {COMPUTE: _find_compute_needed, TF32: _find_tf32_needed, COMPILE: _find_compile_needed}
)
