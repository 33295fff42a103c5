"""Rules of `train.tune`: which keys are measured at the start of a run, and why others are not.

Invariants:
- Only keys that nothing sets are measured, and only where made-up batches of one shape are like the run's.
- A rule derives an open key or refuses; it never changes what the user set. The machine is not looked at.
"""

from __future__ import annotations

from importlib.util import find_spec

from shardway.hardware.catalogue import A_CPU
from shardway.resolve.draft import DERIVED, Draft, Rule, Settled, list_rules, share_of
from shardway.resolve.rules.formats import (
    BEFORE,
    COMPILE,
    COMPUTE,
    SHORT_RUN,
    choose_compile,
    describe_short,
    find_needed,
)

MICRO = "train.micro_batch"

TUNED = (COMPILE, MICRO, COMPUTE)
"""The keys that `train.tune` may choose, in the order in which they are tried."""

FLOAT8_CAPABILITY = (8, 9)
"""The least CUDA compute capability that multiplies in float8."""

AT_THE_START = "measured at the start (train.tune)"
"""What the origin of a key says that a run still has to measure."""


def a_model_that_is_measured_can_be_built_again(draft: Draft) -> None:
    if draft.get("train.tune") == "auto" and draft.circumstances.own_model:
        what = '"auto": a script builds its model itself, and measuring needs one for each try'
        remedy = "set train.compile and train.micro_batch in turn, and compare: `shardway compare RUN RUN`"
        draft.refuse("train.tune", what, '"off"', remedy)


def what_is_measured_at_the_start_says_so(draft: Draft) -> None:
    if draft.get("train.tune") == "off" or draft.problems:
        return
    for key in TUNED:
        if draft.origins[key].startswith(DERIVED) and not explain_untried(draft, key):
            draft.derive(key, draft.get(key), f"{draft.origins[key].removeprefix(DERIVED)}; {AT_THE_START}")


def explain_untried(draft: Draft, key: str, steps: int = 0) -> str:
    """Why a key of `TUNED` is not measured; "" if it is. `steps`: the length of the run, 0 while it is not known."""
    hf = bool(draft.get("model.hf"))
    if not draft.is_derived(key):
        return f"{key} is set"
    if draft.get("train.engine") != "torch":
        return f'train.engine = "{draft.get("train.engine")}" cannot be made twice in a process'
    if draft.get("data.group_tokens") or draft.get("data.pack"):
        varied = "data.group_tokens" if draft.get("data.group_tokens") else "data.pack"
        return f"each batch has another shape or other documents ({varied}), which made-up ones lack"
    if key == MICRO:
        return _explain_micro_batch(draft, hf)
    if key in draft.circumstances.before:
        return BEFORE
    return _explain_compile(draft, steps) if key == COMPILE else _explain_float8(draft)


def _explain_micro_batch(draft: Draft, hf: bool) -> str:
    reasons = {
        BEFORE: draft.origins[MICRO].startswith(f"{DERIVED}{BEFORE}"),
        "a rank has one sample of a step": share_of(draft) == 1,
        "masks of dropout follow the micro-batch": (draft.get("model.dropout") > 0 and not hf)
        or (draft.get("model.adapter") != "none" and draft.get("model.lora_dropout") > 0),
        "experts are balanced in each micro-batch": draft.get("model.experts") > 0 and not hf,
        "batch norms look at one micro-batch": draft.get("model.kind") == "convnet" and not hf,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _explain_compile(draft: Draft, steps: int) -> str:
    needed = find_needed(draft, COMPILE, Settled("blocks", ""))
    if needed is not None:
        return needed.reason
    for device in draft.circumstances.devices:  # on a CPU, or one that is not known, the try itself says it
        if device.kind == "cuda" and choose_compile(device).value == "off":
            return choose_compile(device).reason
    return describe_short(steps) if 0 < steps < SHORT_RUN else ""


def _explain_float8(draft: Draft) -> str:
    if draft.get("model.adapter") != "none":
        return "the layers of an adapter are not converted"
    devices = (A_CPU,) if draft.get("run.device") == "cpu" else draft.circumstances.devices
    for device in devices:  # a part of the catalogue has no capability
        if device.kind != "cuda" or (device.capability or FLOAT8_CAPABILITY) < FLOAT8_CAPABILITY:
            return f"{device.name} has no float8 products"
    if draft.get(COMPUTE) != "bf16":
        return f'what is not converted would be bf16, and this run computes in "{draft.get(COMPUTE)}"'
    return "" if find_spec("torchao") is not None else "torchao is not installed"


RULES: tuple[Rule, ...] = list_rules(globals())
