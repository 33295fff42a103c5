"""Rules of float8: what its devices, libraries and kernels take.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.draft import Draft
from shardway.runfile.write import render_value


def float8_needs_a_device_that_has_it(draft: Draft) -> None:
    """How many accelerators there are is known here; what they can do is looked at when the model is built."""
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
    """torchao gathers weights in float8 where one number scales the whole weight, and not into smaller groups again."""
    if not _is_float8(draft):
        return
    against = _what_keeps_float8_from_travelling(draft)
    wish = draft.get("precision.float8_all_gather")
    if wish == "auto":
        draft.derive("precision.float8_all_gather", not against, against or "one scale a weight")
    elif wish and against:
        draft.refuse("precision.float8_all_gather", f"true, but {against}", "false")


def float8_multiplies_whole_groups_of_tokens(draft: Draft) -> None:
    """Tokens are what the product for a weight's gradient sums over, and its kernels take whole groups of them."""
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
