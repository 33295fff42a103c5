"""Rules of number formats, the optimizer's formats, float8, compilation, and keys left to the device.

Invariants:
- A rule derives an open key or refuses; it never changes what the user set.
- A key left to the device gets no value that another rule would refuse.
"""

from __future__ import annotations

from shardway.resolve.device_defaults import KEYS, choose
from shardway.resolve.draft import Draft
from shardway.runfile.write import render_value

# --- keys left to the device


def what_is_left_to_the_device_is_what_it_does_fast(draft: Draft) -> None:
    for key in KEYS:
        if draft.get(key) == "auto":
            settled = choose(draft, key)
            draft.derive(key, settled.value, settled.reason)


# --- compilation and recompute


def a_pipeline_compiles_blocks(draft: Draft) -> None:
    """No rank of a pipeline calls its whole part of the model."""
    if draft.get("parallel.pp") > 1 and draft.get("train.compile") == "model":
        draft.refuse(
            "train.compile", f'"model" does not go with parallel.pp = {draft.get("parallel.pp")}', '"blocks" or "off"'
        )


def a_memory_budget_needs_the_compiler(draft: Draft) -> None:
    if draft.get("recompute.mode") == "budget" and draft.get("train.compile") == "off":
        draft.refuse(
            "recompute.mode",
            '"budget": it is the compiler that chooses, and train.compile is "off"',
            '"none", "selective", "full"; or train.compile = "blocks"',
        )


# --- number formats and the optimizer


def tf32_needs_a_device_that_has_it(draft: Draft) -> None:
    if draft.get("precision.tf32") and draft.get("run.device") == "cpu":
        draft.refuse("precision.tf32", "true has no effect on a CPU", "false")


def bf16_weights_need_bf16_products(draft: Draft) -> None:
    compute = draft.get("precision.compute")
    if draft.get("precision.weights") == "bf16" and compute in ("fp32", "fp16"):
        draft.refuse(
            "precision.weights",
            f'"bf16" holds fewer digits than precision.compute = "{compute}" multiplies',
            '"fp32"; or precision.compute = "bf16" or "float8"',
        )


def cudnn_tries_kernels_where_it_runs_and_may(draft: Draft) -> None:
    if not draft.get("train.cudnn_benchmark"):
        return
    if draft.get("run.device") == "cpu":
        draft.refuse("train.cudnn_benchmark", "true has no effect on a CPU", "false")
    elif draft.get("train.deterministic"):
        draft.refuse(
            "train.cudnn_benchmark",
            "true may choose another kernel in each run, and train.deterministic is true",
            "one of the two",
        )


def nesterov_needs_momentum(draft: Draft) -> None:
    if draft.get("optim.nesterov") and draft.get("optim.momentum") == 0:
        draft.refuse("optim.nesterov", "true needs optim.momentum above 0", "false, or a momentum")


def muon_needs_matrices(draft: Draft) -> None:
    """The kernels of convolutions are not orthogonalised, nor is an output layer."""
    kind = draft.get("model.kind")
    without = kind == "convnet" or (kind == "mlp" and not draft.get("model.hidden"))
    if draft.get("optim.name") == "muon" and without and not draft.get("model.hf"):
        what = f'"muon" is for the matrices of blocks, and this model.kind = "{kind}" has none'
        draft.refuse("optim.name", what, '"adamw"')


def bf16_weights_need_an_optimizer_that_rounds_them(draft: Draft) -> None:
    """With rounding to nearest, weights lose every update below 1/512 of themselves; torchao rounds per replica."""
    name = draft.get("optim.name")
    if draft.get("precision.weights") == "bf16" and name in ("adafactor", "adamw8bit"):
        draft.refuse(
            "optim.name",
            f'"{name}" does not round stochastically, and precision.weights = "bf16" would lose its small updates',
            '"adamw", "sgd", "muon"; or precision.weights = "fp32"',
        )


def narrow_momentum_needs_momentum(draft: Draft) -> None:
    without = draft.get("optim.name") == "sgd" and draft.get("optim.momentum") == 0
    if without and draft.get("optim.state_dtype") == "bf16":
        draft.refuse("optim.state_dtype", '"bf16": without momentum there is no state', '"fp32", or a momentum')


# --- float8


def float8_needs_a_device_that_has_it(draft: Draft) -> None:
    """The number of accelerators is known here; their abilities are checked when the model is built."""
    if not _is_float8(draft) or draft.get("run.device") != "cpu":
        return
    if not draft.get("precision.float8_emulate"):
        draft.refuse(
            "precision.compute",
            '"float8": a CPU has no such matrix products',
            '"fp32", "bf16", "fp16"; or precision.float8_emulate = true, which is slow and for tests',
        )
    elif draft.get("precision.float8_recipe") == "blockwise":
        draft.refuse("precision.float8_recipe", '"blockwise" is not emulated', "any other recipe")


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
    against = _what_keeps_float8_from_travelling(draft)
    wish = draft.get("precision.float8_all_gather")
    if wish == "auto":
        draft.derive("precision.float8_all_gather", not against, against or "one scale a weight")
    elif wish and against:
        draft.refuse("precision.float8_all_gather", f"true, but {against}", "false")


def float8_multiplies_whole_groups_of_tokens(draft: Draft) -> None:
    """The product for a weight's gradient sums over tokens, and its kernels take whole groups of them."""
    if not _is_float8(draft) or draft.get("precision.float8_emulate"):
        return
    group = {"mxfp8": 32, "blockwise": 128}.get(draft.get("precision.float8_recipe"), 16)
    parts = draft.get("parallel.cp")
    if draft.get("model.kind") == "transformer" and draft.get("data.seq_len") % (group * parts):
        split = f" over parallel.cp = {parts} ranks" if parts > 1 else ""
        draft.refuse(
            "data.seq_len",
            f"{draft.get('data.seq_len')} tokens{split} are no whole groups of {group}, as float8 products take them",
            f"a multiple of {group * parts}",
        )


def _is_float8(draft: Draft) -> bool:
    return bool(draft.get("precision.compute") == "float8")


def _what_keeps_float8_from_travelling(draft: Draft) -> str:
    recipe, engine = draft.get("precision.float8_recipe"), draft.get("precision.float8_engine")
    reshard = draft.get("parallel.reshard_after_forward")
    if draft.get("parallel.dp_shard") == 1 and draft.get("parallel.cp") == 1:
        return "weights are not sharded"
    if engine != "torchao" or recipe != "tensorwise":
        return f'only torchao\'s recipe "tensorwise" does, and this is {engine}\'s "{recipe}"'
    if isinstance(reshard, int) and not isinstance(reshard, bool):
        return f"parallel.reshard_after_forward = {reshard} gathers within smaller groups"
    return ""
