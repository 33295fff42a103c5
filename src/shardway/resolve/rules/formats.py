"""Rules of [precision], [optim], [recompute] and what compiles; the values of "auto" that follow from the device.

Invariants:
- A rule derives an open key or refuses; it never changes what the user set. A key left to the device gets no value that
  another rule would refuse.
- Choices are pure functions of facts about devices and of the other keys. Of several devices the weakest decides;
  unknown hardware computes in fp32 and compiles nothing. The machine is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardway.hardware.catalogue import A_CPU, DeviceFacts
from shardway.layout import AXES
from shardway.plugins import GROUPS
from shardway.resolve.draft import Draft, Resolved, Rule, Settled, batch_of, fact_of, list_rules, of_what_is_described
from shardway.runfile.load import render_value
from shardway.runfile.schema import RunFile
from shardway.units import Scale

# --- values that a device does fast

COMPUTE, TF32, COMPILE = KEYS = ("precision.compute", "precision.tf32", "train.compile")
"""The keys that follow the device."""

SHORT_RUN = 100
"""With fewer steps, compilation (about a minute) takes longer than it saves."""

BEFORE = "as this run computed before"
"""The reason why a resumed run keeps a value that its device would not choose."""

DROPS = "dropout starts anew from a seed at each block"
"""The reason why blocks with dropout are not compiled."""


def choose_compute(device: DeviceFacts) -> Settled:
    """bf16 if the device multiplies it natively, and faster than fp32 as far as that is known."""
    name, gain = device.name, device.bf16_gain
    if device.kind in ("cpu", "mps"):
        return Settled("fp32", name)
    if device.native_bf16 is None or device.kind == "unknown":
        return Settled("fp32", f"what {name} multiplies fast is not known")
    if not device.native_bf16:
        return Settled("fp32", f"{name} has no bf16 products of its own")
    if gain is None:
        return Settled("bf16", f"{name} has bf16 products of its own")
    if gain <= 1:
        return Settled("fp32", f"{name} multiplies bf16 no faster than fp32")
    return Settled("bf16", f"{name} multiplies bf16 {gain:.3g} times as fast as fp32")


def choose_tf32(device: DeviceFacts) -> Settled:
    """TF32 on every device that has it."""
    if device.kind in ("cpu", "mps"):
        return Settled(False, device.name)
    if device.has_tf32 is None or device.kind == "unknown":
        return Settled(False, f"whether {device.name} has TF32 is not known")
    return Settled(device.has_tf32, f"{device.name} has {'' if device.has_tf32 else 'no '}TF32")


def choose_compile(device: DeviceFacts) -> Settled:
    """Blocks on a CUDA device that Triton supports here: from Volta on. A part of the catalogue has no capability, and
    all parts in it are Volta or newer."""
    if device.kind in ("cpu", "mps"):
        return Settled("off", device.name)
    if device.kind != "cuda":
        return Settled("off", f"what compiled blocks gain on {device.name} is not known")
    if device.capability is not None and device.capability < (7, 0):
        version = ".".join(map(str, device.capability))
        return Settled("off", f"Triton makes no kernels for {device.name} (compute capability {version})")
    if device.no_compiler:
        return Settled("off", device.no_compiler)
    return Settled("blocks", f"{device.name} gains by compiled blocks")


_CHOICES: Mapping[str, tuple[Callable[[DeviceFacts], Settled], tuple[Any, ...]]] = {
    COMPUTE: (choose_compute, ("fp32", "bf16")),
    TF32: (choose_tf32, (False, True)),
    COMPILE: (choose_compile, ("off", "blocks")),
}
"""Key -> the choice of one device, and the values that it may choose, the weakest first."""


def choose_for(key: str, devices: Sequence[DeviceFacts]) -> Settled:
    choose, weakest = _CHOICES[key]
    choices = [choose(device) for device in devices or [DeviceFacts("unknown", "this accelerator")]]
    return min(choices, key=lambda choice: weakest.index(choice.value))


# --- the choice for a run: what the other keys or the script require, else the value of the run's earlier attempts,
# else what the devices do fast


def what_is_left_to_the_device_is_what_it_does_fast(draft: Draft) -> None:
    facts, on_cpu = draft.circumstances, draft.get("run.device") == "cpu"
    for key in KEYS:
        if draft.get(key) != "auto":
            continue
        usual = choose_for(key, (A_CPU,) if on_cpu else facts.devices)
        chosen, before = find_needed(draft, key, usual), facts.before.get(key, usual.value)
        if chosen is None and before != usual.value and _may_keep(draft, key, before):
            chosen = Settled(before, f"{BEFORE} (a new run: {render_value(usual.value)}, {usual.reason})")
        chosen = chosen or usual
        draft.derive(key, chosen.value, chosen.reason)


def _may_keep(draft: Draft, key: str, value: Any) -> bool:
    """Whether the value of earlier attempts is possible here and no rule refuses it."""
    on_cpu = draft.get("run.device") == "cpu"
    if key == COMPUTE:
        kept = ("fp32", "bf16", "fp16")
        return value in kept or (value == "float8" and draft.get("train.tune") == "auto" and not on_cpu)
    if key == TF32:
        return isinstance(value, bool) and not (value and on_cpu)
    if value == "off":
        return True
    splits = draft.get("parallel.pp") > 1 or draft.get("train.engine") == "deepspeed"
    tried = draft.get("train.tune") == "auto"  # on a CPU nothing else compiles
    can_compile = (tried or not on_cpu) and not any(device.no_compiler for device in draft.circumstances.devices)
    return can_compile and value in (("blocks",) if splits else ("blocks", "model"))


def find_needed(draft: Draft, key: str, usual: Settled) -> Settled | None:
    """What other keys or the script require in place of the usual value of a device."""
    deepspeed = draft.get("train.engine") == "deepspeed"
    if key == COMPUTE and draft.get("precision.weights") == "bf16" and not deepspeed:
        return Settled("bf16", 'precision.weights = "bf16" is multiplied as it is')
    if settled := draft.circumstances.settled.get(key):
        return settled
    if key == COMPUTE and deepspeed:
        settings = draft.get("deepspeed.settings")
        if named := [name for name in ("bf16", "fp16", "data_types", "bfloat16") if name in settings]:
            return Settled("fp32", f"deepspeed.settings has {named[0]}")
        if usual.value == "bf16" and draft.get("deepspeed.stage") == 1:
            return Settled("fp32", "ZeRO 1 adds bf16 gradients up in bf16, which loses small ones")
    if key != COMPILE:
        return None
    schedule = draft.get("parallel.pp_schedule")
    may_split = draft.get("parallel.pp") > 1 or draft.get("parallel.layout") == "auto"
    if may_split and schedule in ("zero_bubble", "zbv"):
        return Settled("off", f'parallel.pp_schedule = "{schedule}" splits backward passes')
    if draft.get("recompute.mode") == "budget":
        return Settled("blocks", 'recompute.mode = "budget" is the compiler\'s')
    if usual.value == "off" or COMPILE in draft.circumstances.before:
        return None
    reason = next(_find_no_gain(draft), "")
    return Settled("off", reason) if reason else None


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
    if draft.get("model.adapter") != "none" and draft.get("model.lora_dropout"):
        yield DROPS
    if draft.get("precision.compute") == "float8" and draft.get("precision.float8_engine") != "torchao":
        yield "Transformer Engine has kernels of its own"
    span = draft.get("train.steps")
    if span.unit in ("steps", "samples"):  # the length does not depend on the data
        steps = span.in_steps(Scale(batch_of(draft), tokens_per_sample=1, samples_per_epoch=1))
        if steps < SHORT_RUN:
            yield describe_short(steps)


def find_replay_obstacle(values: RunFile) -> str:
    """Why a run cannot replay its passes as CUDA graphs on a device that has them; "" where it can."""
    model, parallel, precision = values.model, values.parallel, values.precision
    obstacles = {
        "train.cuda_graphs is off": not values.train.cuda_graphs,
        "another engine runs the model": values.train.engine != "torch",
        "there are several ranks": any(getattr(parallel, axis) not in (1, "auto") for axis in AXES),
        "weights lie in the host's memory": parallel.cpu_offload,
        "models of this kind have not been tried": bool(model.hf) or model.kind != "transformer",
        "dropout is seeded in each pass": model.dropout > 0,
        "experts take another number of tokens in each pass": bool(model.experts),
        "the scales of float8 change in each pass": precision.compute == "float8",
        "the loss scale of fp16 changes": precision.compute == "fp16",
        "activations are computed again": values.recompute.mode != "none",
        "each batch has another number of documents (data.pack)": values.data.pack,
        "each batch has another shape (data.group_tokens)": values.data.group_tokens > 0,
        "train.deterministic keeps to kernels one by one": values.train.deterministic,
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def leave_short_runs_uncompiled(resolved: Resolved) -> Resolved:
    """The run without compiled blocks if the data shows that it is short and nothing else requires them."""
    facts, steps = resolved.circumstances, resolved.derived.total_steps
    is_open = resolved.is_derived(COMPILE) and resolved.values.recompute.mode != "budget"
    is_long = steps >= SHORT_RUN or resolved.values.train.compile == "off"
    if not is_open or is_long or COMPILE in facts.before or COMPILE in facts.settled:
        return resolved
    return resolved.with_values({COMPILE: Settled("off", describe_short(steps))})


def describe_short(steps: int) -> str:
    return f"compiling takes longer than it saves in {steps} steps"


def tf32_needs_a_device_that_has_it(draft: Draft) -> None:
    if draft.get("precision.tf32") and draft.get("run.device") == "cpu":
        draft.refuse("precision.tf32", "true has no effect on a CPU", "false")


BEFORE_A_LAYOUT: tuple[Rule, ...] = list_rules(globals())


# --- number formats and the optimizer


def nesterov_needs_momentum(draft: Draft) -> None:
    if draft.get("optim.nesterov") and draft.get("optim.momentum") == 0:
        draft.refuse("optim.nesterov", "true needs optim.momentum above 0", "false, or a momentum")


def muon_needs_matrices(draft: Draft) -> None:
    """The kernels of convolutions are not orthogonalised, nor is an output layer."""
    kind = draft.get("model.kind")
    without = kind == "convnet" or (kind == "mlp" and not draft.get("model.hidden"))
    name = draft.get("optim.name")
    if fact_of("optim.name", name, "needs_blocks") and without and not draft.get("model.hf"):
        what = f'"{name}" is for the matrices of blocks, and this model.kind = "{kind}" has none'
        draft.refuse("optim.name", what, '"adamw"')


def bf16_weights_need_an_optimizer_that_rounds_them(draft: Draft) -> None:
    """With rounding to nearest, weights lose every update below 1/512 of themselves; torchao rounds per replica."""
    name = draft.get("optim.name")
    if draft.get("precision.weights") == "bf16" and not fact_of("optim.name", name, "rounds"):
        what = f'"{name}" does not round stochastically, and precision.weights = "bf16" would lose its small updates'
        draft.refuse("optim.name", what, f'{list_own("rounds")}; or precision.weights = "fp32"')


def list_own(fact: str) -> str:
    return ", ".join(f'"{name}"' for name in GROUPS["optimizers"].own if fact_of("optim.name", name, fact))


def narrow_momentum_needs_momentum(draft: Draft) -> None:
    without = draft.get("optim.name") == "sgd" and draft.get("optim.momentum") == 0
    if without and draft.get("optim.state_dtype") == "bf16":
        draft.refuse("optim.state_dtype", '"bf16": without momentum there is no state', '"fp32", or a momentum')


def bf16_weights_need_bf16_products(draft: Draft) -> None:
    compute = draft.get("precision.compute")
    if draft.get("precision.weights") == "bf16" and compute in ("fp32", "fp16"):
        what = f'"bf16" holds fewer digits than precision.compute = "{compute}" multiplies'
        draft.refuse("precision.weights", what, '"fp32"; or precision.compute = "bf16" or "float8"')


def cudnn_tries_kernels_where_it_runs_and_may(draft: Draft) -> None:
    if not draft.get("train.cudnn_benchmark"):
        return
    if draft.get("run.device") == "cpu":
        draft.refuse("train.cudnn_benchmark", "true has no effect on a CPU", "false")
    elif draft.get("train.deterministic"):
        what = "true may choose another kernel in each run, and train.deterministic is true"
        draft.refuse("train.cudnn_benchmark", what, "one of the two")


# --- float8


def float8_needs_a_device_that_has_it(draft: Draft) -> None:
    """The number of accelerators is known here; their abilities are checked when the model is built."""
    if not _is_float8(draft) or draft.get("run.device") != "cpu":
        return
    if not draft.get("precision.float8_emulate"):
        what = '"float8": a CPU has no such matrix products'
        allowed = '"fp32", "bf16", "fp16"; or precision.float8_emulate = true, which is slow and for tests'
        draft.refuse("precision.compute", what, allowed)
    elif draft.get("precision.float8_recipe") == "blockwise":
        draft.refuse("precision.float8_recipe", '"blockwise" is not emulated', "any other recipe")


@of_what_is_described
def an_adapter_multiplies_in_wider_formats(draft: Draft) -> None:
    if _is_float8(draft) and draft.get("model.adapter") != "none":
        what = '"float8" converts plain linear layers, and model.adapter = "lora" puts others in their place'
        draft.refuse("precision.compute", what, '"bf16"')


def transformer_engine_knows_other_recipes(draft: Draft) -> None:
    if not _is_float8(draft) or draft.get("precision.float8_engine") == "torchao":
        return
    problems = {
        "precision.float8_recipe": (
            draft.get("precision.float8_recipe") in ("rowwise", "rowwise_with_gw_hp"),
            '"tensorwise", "mxfp8", "blockwise"',
        ),
        "precision.float8_emulate": (draft.get("precision.float8_emulate"), "false"),
        "parallel.tp": (draft.get("parallel.tp") > 1, "1"),
    }
    for dotted, (is_wrong, allowed) in problems.items():
        if is_wrong:
            what = f'{render_value(draft.get(dotted))} is not for precision.float8_engine = "transformer_engine"'
            draft.refuse(dotted, what, allowed, 'change it, or set float8_engine = "torchao"')


def float8_gathers_what_has_one_scale(draft: Draft) -> None:
    """torchao gathers weights in float8 only if one number scales the whole weight, and not into subgroups."""
    if not _is_float8(draft):
        return
    recipe, engine = draft.get("precision.float8_recipe"), draft.get("precision.float8_engine")
    reshard, against = draft.get("parallel.reshard_after_forward"), ""
    if draft.get("parallel.dp_shard") == 1 and draft.get("parallel.cp") == 1:
        against = "weights are not sharded"
    elif engine != "torchao" or recipe != "tensorwise":
        against = f'only torchao\'s recipe "tensorwise" does, and this is {engine}\'s "{recipe}"'
    elif isinstance(reshard, int) and not isinstance(reshard, bool):
        against = f"parallel.reshard_after_forward = {reshard} gathers within smaller groups"
    wish = draft.get("precision.float8_all_gather")
    if wish == "auto":
        draft.derive("precision.float8_all_gather", not against, against or "one scale a weight")
    elif wish and against:
        draft.refuse("precision.float8_all_gather", f"true, but {against}", "false")


@of_what_is_described
def float8_multiplies_whole_groups_of_tokens(draft: Draft) -> None:
    """The product for a weight's gradient sums over tokens, and its kernels take whole groups of them."""
    if not _is_float8(draft) or draft.get("precision.float8_emulate"):
        return
    group = {"mxfp8": 32, "blockwise": 128}.get(draft.get("precision.float8_recipe"), 16)
    parts = draft.get("parallel.cp")
    if draft.get("model.kind") == "transformer" and draft.get("data.seq_len") % (group * parts):
        split = f" over parallel.cp = {parts} ranks" if parts > 1 else ""
        what = f"{draft.get('data.seq_len')} tokens{split} are no whole groups of {group}, as float8 products take them"
        draft.refuse("data.seq_len", what, f"a multiple of {group * parts}")


def _is_float8(draft: Draft) -> bool:
    return bool(draft.get("precision.compute") == "float8")


# --- compilation and recompute


def a_pipeline_compiles_blocks(draft: Draft) -> None:
    """No rank of a pipeline calls its whole part of the model."""
    if draft.get("parallel.pp") > 1 and draft.get("train.compile") == "model":
        what = f'"model" does not go with parallel.pp = {draft.get("parallel.pp")}'
        draft.refuse("train.compile", what, '"blocks" or "off"')


def a_memory_budget_needs_the_compiler(draft: Draft) -> None:
    if draft.get("recompute.mode") == "budget" and draft.get("train.compile") == "off":
        what = '"budget": it is the compiler that chooses, and train.compile is "off"'
        draft.refuse("recompute.mode", what, '"none", "selective", "full"; or train.compile = "blocks"')


OF_A_LAYOUT: tuple[Rule, ...] = list_rules(globals())[len(BEFORE_A_LAYOUT) :]
