"""Rules of the degrees and of the split of a global batch over them.

Invariant: a rule derives an open key or refuses; it never changes what the user set. No files are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardway.layout import AXES
from shardway.resolve.deepspeed import adds_gradients_in_bf16
from shardway.resolve.draft import Draft
from shardway.resolve.rules.numbers import count_of, nearest_divisor, replicas_of, share_of
from shardway.resolve.rules.pipeline import resolve_pipeline_micro_batch

if TYPE_CHECKING:
    from shardway.resolve.planned_layout import Sized


def degrees_multiply_to_the_ranks(draft: Draft) -> None:
    """One of dp_replicate and dp_shard may be "auto": it takes the ranks that the other axes leave."""
    ranks = draft.circumstances.ranks
    degrees = {axis: draft.get(f"parallel.{axis}") for axis in AXES}
    open_axes = [axis for axis, degree in degrees.items() if degree == "auto"]
    if len(open_axes) > 1:
        draft.derive("parallel.dp_replicate", 1, "dp_shard is auto and takes all ranks")
        degrees["dp_replicate"] = 1
        open_axes.remove("dp_replicate")
    known = math.prod(degree for degree in degrees.values() if degree != "auto")
    if open_axes and ranks % known == 0:
        draft.derive(f"parallel.{open_axes[0]}", ranks // known, _what_is_left(ranks, degrees))
    elif known != ranks:
        _refuse_product(draft, degrees, known)


def _what_is_left(ranks: int, degrees: Mapping[str, Any]) -> str:
    others = _above_one(degrees)
    return f"{ranks} ranks / {_product(others)}" if others else f"{ranks} ranks"


def _refuse_product(draft: Draft, degrees: Mapping[str, Any], known: int) -> None:
    ranks, above = draft.circumstances.ranks, _above_one(degrees)
    if not above:
        what = f"every degree is 1, and there are {ranks} ranks"
    elif "auto" in degrees.values():
        what = f"{_product(above)} does not divide the number of ranks, {ranks}"
    else:
        product = _product(above) if len(above) == 1 else f"{_product(above)} = {known}"
        what = f"{product} is not the number of ranks, {ranks}"
    start = f"start {count_of(known, 'rank')} (--nproc {known})"
    culprit = next((axis for axis in ("dp_shard", "dp_replicate", *AXES) if axis in above), "dp_replicate")
    near = _nearest_degree(ranks, degrees, culprit)
    draft.refuse(
        f"parallel.{culprit}",
        what,
        "degrees whose product is the number of ranks" + (f", such as {near} for this one" if near else ""),
        start
        + (", or change a degree" if len(above) > 1 else ", or change it")
        + '; "auto" takes what the others leave',
    )


def _nearest_degree(ranks: int, degrees: Mapping[str, Any], axis: str) -> int:
    """The degree of one axis with which the others fit the ranks; 0 if there is none."""
    others = math.prod(degree for name, degree in degrees.items() if degree != "auto" and name != axis)
    if ranks % others:
        return 0
    return nearest_divisor(ranks // others, degrees[axis]) if "auto" in degrees.values() else ranks // others


def _above_one(degrees: Mapping[str, Any]) -> dict[str, int]:
    return {axis: degree for axis, degree in degrees.items() if degree not in ("auto", 1)}


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())


def every_replica_gets_a_sample(draft: Draft) -> None:
    replicas, batch = replicas_of(draft), draft.get("train.global_batch")
    if batch < replicas:
        draft.refuse(
            "train.global_batch",
            f"{count_of(batch, 'sample')} cannot be shared by {replicas} data-parallel ranks",
            f"at least {replicas}",
            "raise train.global_batch or use fewer ranks",
        )


def a_micro_batch_is_a_part_of_a_rank_share(draft: Draft) -> None:
    replicas, batch = replicas_of(draft), draft.get("train.global_batch")
    share = share_of(draft)
    micro = draft.get("train.micro_batch")
    if micro == "auto" and draft.get("parallel.pp") > 1:
        size = resolve_pipeline_micro_batch(draft)
        draft.derive(
            "train.micro_batch", size, f"{share} samples of a rank's share for a pipeline of {draft.get('parallel.pp')}"
        )
    elif micro == "auto":
        sized = _find_fastest(draft, share)
        told = f"{batch} samples / {replicas} data-parallel ranks"
        draft.derive("train.micro_batch", sized.samples if sized else share, sized.reason if sized else told)
    elif micro > share:
        draft.refuse(
            "train.micro_batch",
            f"{micro} is more than a rank's share of {share} (train.global_batch {batch} / {replicas} ranks)",
            f"1 to {share}",
        )


def _find_fastest(draft: Draft, share: int) -> Sized | None:
    """The planner's choice, if it knows accelerator and model. None: a rank's whole share."""
    facts, values = draft.circumstances, draft.values
    # ZeRO 1 must not sum gradients of several micro-batches in bf16 (`zero_1_does_not_accumulate_in_bf16`).
    whole = values.train.engine == "deepspeed" and adds_gradients_in_bf16(values)
    if facts.machine is None or facts.own_model or draft.problems or whole:
        return None
    from shardway.resolve.planned_layout import fastest_micro_batch  # a laptop does not load the planner

    return fastest_micro_batch(values, share, facts.machine, facts.shape)
