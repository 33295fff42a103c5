"""Rules of the axes that split a model: tensor, context, expert; and of what travels between copies.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

from shardway.resolve.applies import AXES_OF_KIND
from shardway.resolve.draft import Draft
from shardway.resolve.rules.numbers import nearest_divisor

TENSOR_SPLITS = (("model.heads", "attention heads"), ("model.ffn_dim", "feed-forward features"), ("model.vocab", ""))


def a_model_splits_along_the_axes_it_is_made_for(draft: Draft) -> None:
    kind = draft.get("model.kind")
    for axis in ("tp", "cp", "pp", "ep"):
        degree = draft.get(f"parallel.{axis}")
        if degree > 1 and axis not in AXES_OF_KIND[kind]:
            kinds = [f'"{name}"' for name, axes in AXES_OF_KIND.items() if axis in axes]
            draft.refuse(
                f"parallel.{axis}",
                f'{degree}: model.kind = "{kind}" does not split along {axis}',
                f"1, or model.kind {' or '.join(kinds)}",
                "use dp_replicate and dp_shard, which take any model",
            )


def the_tensor_axis_splits_evenly(draft: Draft) -> None:
    degree = draft.get("parallel.tp")
    if degree == 1 or draft.get("model.kind") != "transformer":
        return
    for dotted, _ in TENSOR_SPLITS:
        size = draft.get(dotted)
        if size == "auto" or size % degree == 0:
            continue
        if dotted == "model.vocab":
            padded = -(-size // degree) * degree
            what = f"{degree} does not divide model.vocab = {size}"
            draft.refuse(
                "parallel.tp",
                what,
                f"a divisor, such as {nearest_divisor(size, degree)}",
                f"or pad the vocabulary: model.vocab = {padded}",
            )
        else:
            what = f"{degree} does not divide {dotted} = {size}"
            draft.refuse("parallel.tp", what, f"a divisor, such as {nearest_divisor(size, degree)}")


def key_value_heads_split_or_are_repeated(draft: Draft) -> None:
    degree, heads = draft.get("parallel.tp"), draft.get("model.kv_heads")
    if degree == 1 or draft.get("model.kind") != "transformer" or heads == "auto":
        return
    if heads % degree and degree % heads:
        draft.refuse(
            "parallel.tp",
            f"{degree} neither divides model.kv_heads = {heads} nor is a multiple of it",
            f"a divisor or multiple of {heads}, such as {nearest_divisor(heads, degree)}",
        )


def a_sequence_splits_into_equal_parts(draft: Draft) -> None:
    """Twice the degree of cp, since each rank holds a chunk from the front and one from the back; then over tp."""
    length, cp, tp = draft.get("data.seq_len"), draft.get("parallel.cp"), draft.get("parallel.tp")
    if draft.get("model.kind") != "transformer":
        return
    if cp > 1 and length % (2 * cp):
        near = max(2 * cp, round(length / (2 * cp)) * 2 * cp)
        draft.refuse(
            "parallel.cp",
            f"{cp}: data.seq_len = {length} does not split into 2 x {cp} equal chunks",
            f"a degree of which twice divides {length}",
            f"such as data.seq_len = {near}",
        )
    elif tp > 1 and draft.get("parallel.tp_sequence") and length // cp % tp:
        near = max(tp * cp, round(length / (tp * cp)) * tp * cp)
        draft.refuse(
            "parallel.tp",
            f"{tp}: {length // cp} tokens of a sequence on each rank do not split into {tp} equal parts",
            f"a degree that divides {length // cp}",
            f"set parallel.tp_sequence = false, or data.seq_len = {near}",
        )


def experts_split_over_the_ranks_that_share_the_states(draft: Draft) -> None:
    ep, shard, cp = (draft.get(f"parallel.{axis}") for axis in ("ep", "dp_shard", "cp"))
    if ep == 1 or shard == "auto":
        return
    if shard * cp % ep:
        draft.refuse(
            "parallel.ep",
            f"{ep} does not divide dp_shard {shard} x cp {cp} = {shard * cp}",
            f"a divisor, such as {nearest_divisor(shard * cp, ep)}",
        )


def experts_split_evenly(draft: Draft) -> None:
    ep, experts = draft.get("parallel.ep"), draft.get("model.experts")
    if ep == 1 or draft.get("model.kind") != "transformer":
        return
    if experts == 0:
        draft.refuse("parallel.ep", f"{ep}, and the model has no experts (model.experts = 0)", "1")
    elif experts % ep:
        near = nearest_divisor(experts, ep)
        draft.refuse("parallel.ep", f"{ep} does not divide model.experts = {experts}", f"a divisor, such as {near}")


def gathered_weights_are_kept_over_a_part_of_the_ranks(draft: Draft) -> None:
    """A number of ranks to reshard to must divide those that share the states (torch: `reshard_after_forward`)."""
    ranks = draft.get("parallel.reshard_after_forward")
    shard, cp = draft.get("parallel.dp_shard"), draft.get("parallel.cp")
    if isinstance(ranks, bool) or ranks == "auto" or shard == "auto":
        return
    if shard * cp % ranks or not 1 < ranks < shard * cp:
        near = [degree for degree in range(2, shard * cp) if shard * cp % degree == 0]
        draft.refuse(
            "parallel.reshard_after_forward",
            f"{ranks} is no part of the {shard * cp} ranks that share the states",
            ", ".join(map(str, near)) or "true or false: no number lies between",
        )


def only_plain_copies_compress_their_gradients(draft: Draft) -> None:
    """DDP's communication hooks: FSDP2 has none."""
    method = draft.get("parallel.compress")
    others = [axis for axis in ("dp_shard", "cp", "tp", "pp") if draft.get(f"parallel.{axis}") != 1]
    if method == "none":
        return
    if others:
        draft.refuse(
            "parallel.compress",
            f'"{method}" is for dp_replicate alone, and {others[0]} is {draft.get(f"parallel.{others[0]}")}',
            '"none"',
            'set precision.reduce = "bf16" to send less',
        )
    elif method == "bf16" and draft.get("run.device") == "cpu":
        draft.refuse("parallel.compress", '"bf16": gloo does not add bf16 up', '"fp16", "powersgd" or "none"')


def only_shared_states_are_kept_in_cpu_memory(draft: Draft) -> None:
    if draft.get("parallel.cpu_offload") and draft.get("parallel.dp_shard") == 1 and draft.get("parallel.cp") == 1:
        draft.refuse("parallel.cpu_offload", "true, and parallel.dp_shard is 1", "false, or dp_shard above 1")
