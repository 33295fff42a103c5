"""Rules of the axes that split a model: tensor, context, expert; and of the traffic between copies.

Invariants:
- A rule derives an open key or refuses; it never changes what the user set. No files are read.
- A proposed degree satisfies the other rules of the same axis as well, and divides the ranks.
"""

from __future__ import annotations

import math

from shardway.resolve.applies import AXES_OF_KIND, BLOCK_MODELS
from shardway.resolve.draft import Draft
from shardway.resolve.rules.numbers import ceil_div, join_words, nearest_divisor, nearest_multiple, nearest_where


def a_model_splits_along_the_axes_it_is_made_for(draft: Draft) -> None:
    kind = draft.get("model.kind")
    for axis in ("tp", "cp", "pp", "ep"):
        degree = draft.get(f"parallel.{axis}")
        if degree > 1 and axis not in AXES_OF_KIND[kind]:
            others = [f'"{name}"' for name, axes in AXES_OF_KIND.items() if axis in axes]
            draft.refuse(
                f"parallel.{axis}",
                f'{degree}: model.kind = "{kind}" does not split along {axis} '
                f"({join_words(others)} {'does' if len(others) == 1 else 'do'})",
                "1",
                "split over parallel.dp_replicate or parallel.dp_shard, which take any model",
            )


def the_tensor_axis_splits_evenly(draft: Draft) -> None:
    degree = draft.get("parallel.tp")
    uneven = {dotted: size for dotted, size in _tensor_sizes(draft).items() if size % degree}
    if not uneven:
        return
    sizes = join_words([f"{dotted} = {size}" for dotted, size in uneven.items()])
    padded = ceil_div(draft.get("model.vocab"), degree) * degree if uneven.keys() == {"model.vocab"} else 0
    draft.refuse(
        "parallel.tp",
        f"{degree} does not divide {sizes}",
        f"a divisor of {'it' if len(uneven) == 1 else 'them all'}, such as {_nearest_tensor_degree(draft)}",
        f"or pad the vocabulary: set model.vocab = {padded}" if padded and not draft.get("model.hf") else "",
    )


def key_value_heads_split_or_are_repeated(draft: Draft) -> None:
    """If there are as many key/value heads as heads, the rule above reports it."""
    degree, heads = draft.get("parallel.tp"), draft.get("model.kv_heads")
    if heads != draft.get("model.heads") and not _splits_key_values(draft, degree):
        draft.refuse(
            "parallel.tp",
            f"{degree} neither divides model.kv_heads = {heads} nor is a multiple of it",
            f"a divisor or a multiple of {heads}, such as {_nearest_tensor_degree(draft)}",
        )


def a_sequence_splits_into_equal_parts(draft: Draft) -> None:
    """Twice the degree of cp, since each rank holds a chunk from the front and one from the back; then over tp."""
    length, cp, tp = draft.get("data.seq_len"), draft.get("parallel.cp"), draft.get("parallel.tp")
    if draft.get("model.kind") != "transformer":
        return
    near = nearest_multiple(_sequence_unit(draft, cp, tp), length)
    if not _splits_sequence(length, cp):
        draft.refuse(
            "parallel.cp",
            f"{cp}: data.seq_len = {length} does not split into 2 x {cp} equal chunks, two for each rank",
            f"a degree of which twice divides {length}, such as {_nearest_context_degree(draft)}",
            f"or set data.seq_len = {near}",
        )
    elif not _splits_stream(draft, tp):
        draft.refuse(
            "parallel.tp",
            f"{tp}: the {length // cp} tokens of a sequence that a rank has do not split into {tp} equal parts",
            f"a divisor of {length // cp}, such as {_nearest_tensor_degree(draft)}",
            f"or set parallel.tp_sequence = false, or set data.seq_len = {near}",
        )


def experts_split_over_the_ranks_that_share_the_states(draft: Draft) -> None:
    ep, shard, cp = (draft.get(f"parallel.{axis}") for axis in ("ep", "dp_shard", "cp"))
    if shard != "auto" and shard * cp % ep:
        draft.refuse(
            "parallel.ep",
            f"{ep} does not divide parallel.dp_shard {shard} x parallel.cp {cp} = {shard * cp}",
            f"a divisor of it, such as {_nearest_expert_degree(draft)}",
        )


def experts_split_evenly(draft: Draft) -> None:
    ep, experts = draft.get("parallel.ep"), draft.get("model.experts")
    if ep == 1 or draft.get("model.kind") != "transformer":
        return
    if experts == 0:
        draft.refuse("parallel.ep", f"{ep}, and the model has no experts (model.experts = 0)", "1")
    elif experts % ep:
        near = _nearest_expert_degree(draft)
        draft.refuse("parallel.ep", f"{ep} does not divide model.experts = {experts}", f"a divisor, such as {near}")


def gathered_weights_are_kept_over_a_part_of_the_ranks(draft: Draft) -> None:
    """reshard_after_forward must divide the ranks that share the states (torch: `reshard_after_forward`)."""
    group, shard = draft.get("parallel.reshard_after_forward"), draft.get("parallel.dp_shard")
    if isinstance(group, bool) or group == "auto" or shard == "auto":
        return
    ranks = shard * draft.get("parallel.cp")
    if ranks % group == 0 and 1 < group < ranks:
        return
    near = nearest_where(lambda size: ranks % size == 0 and 1 < size < ranks, group, ranks)
    what = f"groups of {group} are no equal parts of the {ranks} ranks that share the states"
    draft.refuse(
        "parallel.reshard_after_forward",
        f"{group}: {'the states are not shared (parallel.dp_shard = 1)' if ranks == 1 else what}",
        'true, false, "auto"' + (f", or a divisor of {ranks} such as {near}" if near > 1 else ""),
    )


def only_plain_copies_compress_their_gradients(draft: Draft) -> None:
    """DDP has communication hooks, FSDP2 has none."""
    method = draft.get("parallel.compress")
    others = [axis for axis in ("dp_shard", "cp", "tp", "pp") if draft.get(f"parallel.{axis}") not in (1, "auto")]
    if method == "none":
        return
    if others:
        draft.refuse(
            "parallel.compress",
            f'"{method}" is for runs of copies alone (dp_replicate), and parallel.{others[0]} is '
            f"{draft.get(f'parallel.{others[0]}')}",
            '"none"',
            "choose with precision.reduce what the gradients of shards are added up in",
        )
    elif method == "bf16" and draft.get("run.device") == "cpu":
        draft.refuse("parallel.compress", '"bf16": gloo does not add bf16 up', '"fp16", "powersgd", "none"')


def only_shared_states_are_kept_in_cpu_memory(draft: Draft) -> None:
    shared = (draft.get("parallel.dp_shard"), draft.get("parallel.cp")) != (1, 1)
    if draft.get("parallel.cpu_offload") and not shared:
        draft.refuse(
            "parallel.cpu_offload",
            "true, and the states are not shared (parallel.dp_shard = 1)",
            "false, or parallel.dp_shard above 1",
        )


def _tensor_sizes(draft: Draft) -> dict[str, int]:
    """The sizes that the tensor axis splits, as far as they are known."""
    kind, experts = draft.get("model.kind"), draft.get("model.experts")
    if kind not in BLOCK_MODELS:
        return {}
    names = ["heads"]
    if not experts or draft.get("model.dense_layers"):
        names.append("ffn_dim")
    if kind == "transformer":
        names += ["expert_dim"] * bool(experts) + ["vocab"]
    sizes = {f"model.{name}": draft.get(f"model.{name}") for name in names}
    return {dotted: size for dotted, size in sizes.items() if size != "auto"}


def _splits_key_values(draft: Draft, degree: int) -> bool:
    heads = draft.get("model.kv_heads")
    if heads == "auto" or draft.get("model.kind") not in BLOCK_MODELS:
        return True
    return heads % degree == 0 or degree % heads == 0


def _splits_sequence(length: int, cp: int) -> bool:
    return cp == 1 or length % (2 * cp) == 0


def _splits_stream(draft: Draft, tp: int) -> bool:
    """Whether a rank's residual stream splits by sequence over the tensor axis, if it has to."""
    if not draft.get("parallel.tp_sequence") or draft.get("model.kind") != "transformer":
        return True
    return bool(draft.get("data.seq_len") // draft.get("parallel.cp") % tp == 0)


def _sequence_unit(draft: Draft, cp: int, tp: int) -> int:
    """The length of a sequence must be a multiple of this."""
    chunks = 2 * cp if cp > 1 else 1
    return math.lcm(chunks, cp * tp) if draft.get("parallel.tp_sequence") else chunks


def _nearest_tensor_degree(draft: Draft) -> int:
    sizes, ranks = _tensor_sizes(draft).values(), draft.circumstances.ranks

    def fits(degree: int) -> bool:
        whole = all(size % degree == 0 for size in (*sizes, ranks))
        return whole and _splits_key_values(draft, degree) and _splits_stream(draft, degree)

    return nearest_where(fits, draft.get("parallel.tp"), ranks)


def _nearest_context_degree(draft: Draft) -> int:
    length, ranks = draft.get("data.seq_len"), draft.circumstances.ranks
    return nearest_where(
        lambda degree: ranks % degree == 0 and _splits_sequence(length, degree), draft.get("parallel.cp"), ranks
    )


def _nearest_expert_degree(draft: Draft) -> int:
    """The nearest degree that also divides the experts, if the model is that of the run file."""
    shard = draft.get("parallel.dp_shard")
    shared = draft.circumstances.ranks if shard == "auto" else shard * draft.get("parallel.cp")
    experts = 0 if draft.circumstances.own_model else draft.get("model.experts")
    return nearest_divisor(math.gcd(shared, experts), draft.get("parallel.ep"))
