"""Rules of [parallel] and of the split of a global batch: degrees, axes, pipeline, batch, a layout left to the planner.

Invariants:
- A rule derives an open key or refuses; it never changes what the user set. No files are read.
- A proposed degree satisfies the other rules of the same axis as well, and divides the ranks.
- The planner is loaded only if a layout or a micro-batch is left to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shardway.errors import UserError, render_reason
from shardway.layout import AXES, IN_ROUNDS, count_rounds, stages_of_rank, stages_of_schedule
from shardway.plugins import GROUPS
from shardway.resolve.draft import (
    BLOCK_MODELS,
    Draft,
    Rule,
    accumulation_of,
    batch_of,
    ceil_div,
    count_of,
    fact_of,
    join_words,
    list_rules,
    nearest_divisor,
    nearest_multiple,
    nearest_where,
    of_what_is_described,
    replicas_of,
    share_of,
)
from shardway.resolve.rules.deepspeed import adds_gradients_in_bf16
from shardway.resolve.rules.formats import BEFORE
from shardway.runfile.load import render_value

if TYPE_CHECKING:
    from shardway.plan.shapes import Architecture


# --- the degrees


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
    above = {axis: degree for axis, degree in degrees.items() if degree not in ("auto", 1)}
    product = " x ".join(f"{axis} {degree}" for axis, degree in above.items())
    if open_axes and ranks % known == 0:
        left = f"{ranks} ranks / {product}" if above else f"{ranks} ranks"
        draft.derive(f"parallel.{open_axes[0]}", ranks // known, left)
        return
    if known == ranks:
        return
    if not above:
        what = f"every degree is 1, and there are {ranks} ranks"
    elif open_axes:
        what = f"{product} does not divide the number of ranks, {ranks}"
    else:
        what = f"{product}{f' = {known}' if len(above) > 1 else ''} is not the number of ranks, {ranks}"
    culprit = next((axis for axis in ("dp_shard", "dp_replicate", *AXES) if axis in above), "dp_replicate")
    # The degree of one axis with which the others fit the ranks.
    others, near = known // above.get(culprit, 1), 0
    if ranks % others == 0:
        near = nearest_divisor(ranks // others, degrees[culprit]) if open_axes else ranks // others
    fits = draft.on_ranks(known).passes(RULES)
    start = f"start {count_of(known, 'rank')} (--nproc {known}), or " if fits else ""
    draft.refuse(
        f"parallel.{culprit}",
        what,
        "degrees whose product is the number of ranks" + (f", such as {near} for this one" if near else ""),
        f'{start}change {"a degree" if len(above) > 1 else "it"}; "auto" takes what the others leave',
    )


# --- axes that split a model: tensor, context, expert; and the traffic between copies


@of_what_is_described
def a_model_splits_along_the_axes_it_is_made_for(draft: Draft) -> None:
    kind = draft.get("model.kind")
    for axis in ("tp", "cp", "pp", "ep"):
        degree = draft.get(f"parallel.{axis}")
        if degree > 1 and axis not in fact_of("model.kind", kind, "axes"):
            others = [f'"{name}"' for name in GROUPS["models"].own if axis in fact_of("model.kind", name, "axes")]
            what = (
                f'{degree}: model.kind = "{kind}" does not split along {axis} '
                f"({join_words(others)} {'does' if len(others) == 1 else 'do'})"
            )
            remedy = "split over parallel.dp_replicate or parallel.dp_shard, which take any model"
            draft.refuse(f"parallel.{axis}", what, "1", remedy)


@of_what_is_described
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


@of_what_is_described
def key_value_heads_split_or_are_repeated(draft: Draft) -> None:
    """If there are as many key/value heads as heads, the rule above reports it."""
    degree, heads = draft.get("parallel.tp"), draft.get("model.kv_heads")
    if heads != draft.get("model.heads") and not _splits_key_values(draft, degree):
        what = f"{degree} neither divides model.kv_heads = {heads} nor is a multiple of it"
        allowed = f"a divisor or a multiple of {heads}, such as {_nearest_tensor_degree(draft)}"
        draft.refuse("parallel.tp", what, allowed)


@of_what_is_described
def a_sequence_splits_into_equal_parts(draft: Draft) -> None:
    """Twice the degree of cp, since each rank holds a chunk from the front and one from the back; then over tp."""
    length, cp, tp = draft.get("data.seq_len"), draft.get("parallel.cp"), draft.get("parallel.tp")
    if draft.get("model.kind") != "transformer":
        return
    chunks, ranks = 2 * cp if cp > 1 else 1, draft.circumstances.ranks
    near = nearest_multiple(math.lcm(chunks, cp * tp) if draft.get("parallel.tp_sequence") else chunks, length)
    if length % chunks:

        def fits(degree: int) -> bool:
            return ranks % degree == 0 and (degree == 1 or length % (2 * degree) == 0)

        what = f"{cp}: data.seq_len = {length} does not split into 2 x {cp} equal chunks, two for each rank"
        allowed = f"a degree of which twice divides {length}, such as {nearest_where(fits, cp, ranks)}"
        draft.refuse("parallel.cp", what, allowed, f"or set data.seq_len = {near}")
    elif not _splits_stream(draft, tp):
        what = f"{tp}: the {length // cp} tokens of a sequence that a rank has do not split into {tp} equal parts"
        allowed = f"a divisor of {length // cp}, such as {_nearest_tensor_degree(draft)}"
        draft.refuse("parallel.tp", what, allowed, f"or set parallel.tp_sequence = false, or set data.seq_len = {near}")


@of_what_is_described
def a_pipeline_takes_samples_of_one_shape(draft: Draft) -> None:
    degree, tokens = draft.get("parallel.pp"), draft.get("data.group_tokens")
    if degree > 1 and tokens:
        what = (
            f"{degree}: all micro-batches of a pipeline have one shape, and data.group_tokens = {tokens} gives groups "
            "of different ones"
        )
        remedy = "split over dp_shard, dp_replicate, tp or cp, or take data.pack in place of data.group_tokens"
        draft.refuse("parallel.pp", what, "1", remedy)


def samples_are_generated_where_a_rank_has_whole_sequences(draft: Draft) -> None:
    """A pass for samples has one sequence of another length on all ranks, which these axes cut into parts or stages."""
    every = draft.get("train.sample_every")
    cuts = [axis for axis in ("tp", "pp", "cp") if draft.get(f"parallel.{axis}") not in (1, "auto")]
    if every != "off" and cuts:
        cut = " and ".join(f"parallel.{axis} = {draft.get(f'parallel.{axis}')}" for axis in cuts)
        what = f'"{every}", and {cut} cuts the model or its sequences into parts'
        remedy = "split over dp_shard and dp_replicate, or generate from the checkpoints"
        draft.refuse("train.sample_every", what, '"off"', remedy)


def experts_split_over_the_ranks_that_share_the_states(draft: Draft) -> None:
    ep, shard, cp = (draft.get(f"parallel.{axis}") for axis in ("ep", "dp_shard", "cp"))
    if shard != "auto" and shard * cp % ep:
        what = f"{ep} does not divide parallel.dp_shard {shard} x parallel.cp {cp} = {shard * cp}"
        draft.refuse("parallel.ep", what, f"a divisor of it, such as {_nearest_expert_degree(draft)}")


@of_what_is_described
def experts_split_evenly(draft: Draft) -> None:
    ep, experts = draft.get("parallel.ep"), draft.get("model.experts")
    if ep == 1 or draft.get("model.kind") != "transformer":
        return
    if experts == 0:
        draft.refuse("parallel.ep", f"{ep}, and the model has no experts (model.experts = 0)", "1")
    elif experts % ep:
        near = _nearest_expert_degree(draft)
        draft.refuse("parallel.ep", f"{ep} does not divide model.experts = {experts}", f"a divisor, such as {near}")


@of_what_is_described
def experts_drop_tokens_of_whole_sequences(draft: Draft) -> None:
    """If ranks hold parts of a sequence, the last token that an expert takes is not known."""
    factor, cp = draft.get("model.capacity_factor"), draft.get("parallel.cp")
    if draft.get("model.experts") and factor and cp > 1:
        what = f"{factor} drops tokens by their place in a sequence, and parallel.cp = {cp} splits sequences"
        draft.refuse("model.capacity_factor", what, "0, or parallel.cp = 1")


@of_what_is_described
def an_adapter_is_split_like_data_alone(draft: Draft) -> None:
    """Its layers hold whole matrices beside whole ones; shards of them, and parts of a sequence, change nothing."""
    if draft.get("model.adapter") == "none":
        return
    for axis, what in _NOT_WITH_ADAPTERS.items():
        if (degree := draft.get(f"parallel.{axis}")) > 1:
            remedy = "split over parallel.dp_replicate, parallel.dp_shard or parallel.cp"
            draft.refuse(f"parallel.{axis}", f'{degree}: model.adapter = "lora" {what}', "1", remedy)
    if draft.get("train.engine") == "deepspeed":
        what = '"deepspeed": its files of a checkpoint would hold the frozen weights of model.adapter = "lora" too'
        draft.refuse("train.engine", what, '"torch"')


_NOT_WITH_ADAPTERS = {
    "tp": "does not cut its matrices with those of their layers",
    "pp": "is not cut into stages",
    "ep": "has not been tried with experts that ranks share",
}
"""Axis -> why an adapter is not split along it."""


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
    what = f"{group}: {'the states are not shared (parallel.dp_shard = 1)' if ranks == 1 else what}"
    allowed = 'true, false, "auto"' + (f", or a divisor of {ranks} such as {near}" if near > 1 else "")
    draft.refuse("parallel.reshard_after_forward", what, allowed)


def only_plain_copies_compress_their_gradients(draft: Draft) -> None:
    """DDP has communication hooks, FSDP2 has none."""
    method = draft.get("parallel.compress")
    others = [axis for axis in ("dp_shard", "cp", "tp", "pp") if draft.get(f"parallel.{axis}") not in (1, "auto")]
    if method == "none":
        return
    if others:
        what = (
            f'"{method}" is for runs of copies alone (dp_replicate), and parallel.{others[0]} is '
            f"{draft.get(f'parallel.{others[0]}')}"
        )
        remedy = "choose with precision.reduce what the gradients of shards are added up in"
        draft.refuse("parallel.compress", what, '"none"', remedy)
    elif method == "bf16" and draft.get("run.device") == "cpu":
        draft.refuse("parallel.compress", '"bf16": gloo does not add bf16 up', '"fp16", "powersgd", "none"')


def only_shared_states_are_kept_in_cpu_memory(draft: Draft) -> None:
    shared = (draft.get("parallel.dp_shard"), draft.get("parallel.cp")) != (1, 1)
    if draft.get("parallel.cpu_offload") and not shared:
        what = "true, and the states are not shared (parallel.dp_shard = 1)"
        draft.refuse("parallel.cpu_offload", what, "false, or parallel.dp_shard above 1")


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


def _splits_stream(draft: Draft, tp: int) -> bool:
    """Whether a rank's residual stream splits by sequence over the tensor axis, if it has to."""
    if not draft.get("parallel.tp_sequence") or draft.get("model.kind") != "transformer":
        return True
    return bool(draft.get("data.seq_len") // draft.get("parallel.cp") % tp == 0)


def _nearest_tensor_degree(draft: Draft) -> int:
    sizes, ranks = _tensor_sizes(draft).values(), draft.circumstances.ranks

    def fits(degree: int) -> bool:
        whole = all(size % degree == 0 for size in (*sizes, ranks))
        return whole and _splits_key_values(draft, degree) and _splits_stream(draft, degree)

    return nearest_where(fits, draft.get("parallel.tp"), ranks)


def _nearest_expert_degree(draft: Draft) -> int:
    """The nearest degree that also divides the experts, if the model is that of the run file."""
    shard = draft.get("parallel.dp_shard")
    shared = draft.circumstances.ranks if shard == "auto" else shard * draft.get("parallel.cp")
    experts = 0 if draft.circumstances.own_model else draft.get("model.experts")
    return nearest_divisor(math.gcd(shared, experts), draft.get("parallel.ep"))


# --- the stages and schedules of a pipeline

ZERO_BUBBLE = ("zero_bubble", "zbv")


def stages_follow_the_schedule(draft: Draft) -> None:
    schedule, stages, ranks = (draft.get(f"parallel.{name}") for name in ("pp_schedule", "pp_stages_per_rank", "pp"))
    least, most = stages_of_schedule(schedule)
    if stages == "auto":
        fitting = 1 if ranks == 1 else least
        reason = "no pipeline" if ranks == 1 else f'pp_schedule = "{schedule}"'
        draft.derive("parallel.pp_stages_per_rank", fitting, reason)
    elif ranks > 1 and not least <= stages <= (most or stages):
        other = "1f1b" if stages == 1 else "interleaved"
        wanted = f"{'' if most else 'at least '}{count_of(least, 'stage')}"
        what = f'{stages}: parallel.pp_schedule = "{schedule}" wants {wanted} on each rank'
        allowed = str(least) if most else f"{least} or more"
        draft.refuse("parallel.pp_stages_per_rank", what, allowed, f'or set parallel.pp_schedule = "{other}"')


@of_what_is_described
def every_rank_has_a_block(draft: Draft) -> None:
    """A rank without any weight would have nothing to train."""
    ranks, per_rank, kind = draft.get("parallel.pp"), draft.get("parallel.pp_stages_per_rank"), draft.get("model.kind")
    counted = {"convnet": "model.channels", "mlp": "model.hidden", **dict.fromkeys(BLOCK_MODELS, "model.layers")}
    key, split, stages = counted.get(kind), draft.get("parallel.pp_split"), ranks * per_rank
    if ranks == 1 or key is None:
        return
    blocks = draft.get(key) if kind in BLOCK_MODELS else len(draft.get(key))
    if _deals_out(draft, split, blocks) if split else blocks >= stages:
        return
    # Of very many stages no split is proposed.
    even = [ceil_div(blocks - stage, stages) for stage in range(min(stages, 16))]
    proposals = [f"such as {even}"] * _deals_out(draft, even, blocks)
    proposals += ["[] for a balance by cost"] * (blocks >= stages)
    if split and proposals:
        what = (
            f"{split} deals {count_of(sum(split), 'block')} out to {count_of(len(split), 'stage')}; {key} has "
            f"{blocks} for {count_of(stages, 'stage')} on {ranks} ranks, of which each needs a block"
        )
        draft.refuse("parallel.pp_split", what, ", or ".join(proposals))
        return
    near = nearest_where(lambda degree: draft.circumstances.ranks % degree == 0, ranks, max(1, blocks // per_rank))
    what = f"{ranks} ranks of {count_of(per_rank, 'stage')} need {stages} blocks, and {key} has {blocks}"
    draft.refuse("parallel.pp", what, f"such as {near}")


def _deals_out(draft: Draft, split: Sequence[int], blocks: int) -> bool:
    """Whether a split has a number per stage, distributes all blocks, and leaves no rank without weights: the first
    stage also has an embedding, if there is one, and the last the output layer."""
    ranks, per_rank = draft.get("parallel.pp"), draft.get("parallel.pp_stages_per_rank")
    if len(split) != ranks * per_rank or sum(split) != blocks:
        return False
    weights = [*split[:-1], split[-1] + 1]
    weights[0] += draft.get("model.kind") in BLOCK_MODELS
    held = (stages_of_rank(rank, ranks, per_rank, draft.get("parallel.pp_schedule")) for rank in range(ranks))
    return weights[0] > 0 and all(any(weights[stage] for stage in own if stage < len(weights)) for own in held)


@of_what_is_described
def tied_weights_stay_together(draft: Draft) -> None:
    ranks, hf = draft.get("parallel.pp"), draft.get("model.hf")
    if ranks == 1 or draft.get("model.kind") != "transformer" or not draft.get("model.tied"):
        return
    apart = f"parallel.pp = {ranks} puts the embedding into the first stage and the output layer into the last"
    if hf:
        what = f"{ranks}: the output layer of {hf} is its embedding, which would be in two stages"
        draft.refuse("parallel.pp", what, "1", "split over parallel.dp_shard or parallel.tp")
    else:
        draft.refuse("model.tied", f"true, and {apart}", "false, or parallel.pp = 1")


def a_pipeline_keeps_gathered_weights(draft: Draft) -> None:
    """torch silently computes wrong gradients if weights are freed between the passes of these schedules."""
    schedule, wish = draft.get("parallel.pp_schedule"), draft.get("parallel.reshard_after_forward")
    gathers = any(draft.get(f"parallel.{axis}") != 1 for axis in ("dp_replicate", "dp_shard", "cp"))
    if draft.get("parallel.pp") > 1 and schedule in ZERO_BUBBLE and gathers and wish not in ("auto", False):
        what = (
            f'{render_value(wish)} would give wrong gradients with parallel.pp_schedule = "{schedule}", whose weight '
            "passes come later"
        )
        draft.refuse("parallel.reshard_after_forward", what, 'false, "auto"', 'or set parallel.pp_schedule = "1f1b"')


def zero_bubbles_are_not_compiled(draft: Draft) -> None:
    """torch: "compiled with non-empty donated buffers which requires ... retain_graph=False"."""
    schedule, mode = draft.get("parallel.pp_schedule"), draft.get("train.compile")
    if draft.get("parallel.pp") > 1 and schedule in ZERO_BUBBLE and mode != "off":
        what = f'"{mode}": a compiled backward pass runs as a whole, and parallel.pp_schedule = "{schedule}" splits it'
        draft.refuse("train.compile", what, '"off"', 'or set parallel.pp_schedule = "1f1b"')


# --- the split of a global batch over ranks and micro-batches


def every_replica_gets_a_sample(draft: Draft) -> None:
    replicas, batch = replicas_of(draft), batch_of(draft).smallest
    if batch < replicas:
        what = f"{count_of(batch, 'sample')} cannot be shared by {replicas} data-parallel ranks"
        draft.refuse("train.global_batch", what, f"at least {replicas}", "raise train.global_batch or use fewer ranks")


def a_micro_batch_is_a_part_of_a_rank_share(draft: Draft) -> None:
    """Open, it is the planner's choice if accelerator and model are known, else the whole share; of a pipeline it makes
    about two rounds of micro-batches if there are enough samples, and a number of them that the schedule takes."""
    replicas, batch, share = replicas_of(draft), batch_of(draft).largest, share_of(draft)
    micro, pp, facts = draft.get("train.micro_batch"), draft.get("parallel.pp"), draft.circumstances
    before = facts.before.get("train.micro_batch", 0)
    if (micro == "auto" or draft.is_derived("train.micro_batch")) and _keeps_micro_batch(draft, before):
        draft.derive("train.micro_batch", before, BEFORE)
    elif micro == "auto" and pp > 1:
        size = nearest_where(_takes(draft), max(1, share // (2 * pp)), share)
        draft.derive("train.micro_batch", size, f"{share} samples of a rank's share for a pipeline of {pp}")
    elif micro == "auto":
        values, sized = draft.values, None
        # ZeRO 1 must not sum gradients of several micro-batches in bf16 (`zero_1_does_not_accumulate_in_bf16`).
        whole = values.train.engine == "deepspeed" and adds_gradients_in_bf16(values)
        if facts.machine is not None and not (facts.own_model or draft.problems or whole):
            from shardway.resolve.planned import fastest_micro_batch  # a laptop does not load the planner

            sized = fastest_micro_batch(values, share, facts.machine, facts.shape)
        told = f"{batch} samples / {replicas} data-parallel ranks"
        draft.derive("train.micro_batch", sized.value if sized else share, sized.reason if sized else told)
    elif micro > share:
        what = f"{micro} is more than a rank's share of {share} (train.global_batch {batch} / {replicas} ranks)"
        draft.refuse("train.micro_batch", what, f"1 to {share}")


def _keeps_micro_batch(draft: Draft, before: int) -> bool:
    """Whether earlier attempts chose this micro-batch in the same layout, and it still is a part of a rank's share."""
    names, known = [f"parallel.{axis}" for axis in AXES], draft.circumstances.before
    is_same = all(draft.get(name) == known.get(name) for name in names)
    return 0 < before <= share_of(draft) and is_same and (draft.get("parallel.pp") == 1 or _takes(draft)(before))


@of_what_is_described
def what_counts_samples_gets_whole_micro_batches(draft: Draft) -> None:
    """All micro-batches of a pipeline have one shape, and all passes as many of them; padding would count for routers
    and batch norms."""
    ramp, micro, ranks = batch_of(draft), draft.get("train.micro_batch"), replicas_of(draft)
    whole, counting, parts = micro * ranks, _counting(draft), f"micro-batches of {micro}"
    if not ramp.is_constant:  # a smaller step is run in passes of the largest one's size
        wanted = draft.get("parallel.pp_micro_batches")
        per_pass = accumulation_of(draft) if wanted == "auto" else wanted
        whole, parts = whole * per_pass, f"passes of {count_of(per_pass, 'micro-batch')} of {micro}"
    batch = next((size for size in ramp.sizes if size % whole), None)
    if draft.get("parallel.pp") == 1 or not counting or batch is None:
        return
    what = (
        f"{count_of(batch, 'sample')} do not fill {parts} on {count_of(ranks, 'data-parallel rank')}, "
        f"and a pipeline fills them up with samples that its {counting} would count"
    )
    near = nearest_where(_takes(draft), micro, share_of(draft))
    remedy = f"or set train.micro_batch = {near}" if ramp.is_constant and batch % (near * ranks) == 0 else ""
    if not ramp.is_constant:
        remedy = "or set parallel.pp_micro_batches, so that a pass takes no more than the smallest step has"
    draft.refuse("train.global_batch", what, f"a multiple of {whole}, such as {nearest_multiple(whole, batch)}", remedy)


def micro_batches_fill_the_pipeline(draft: Draft) -> None:
    """Runs after the micro-batch is settled; derives the number of micro-batches of one pass."""
    schedule, ranks, wanted = (draft.get(f"parallel.{name}") for name in ("pp_schedule", "pp", "pp_micro_batches"))
    micro, share, number = draft.get("train.micro_batch"), share_of(draft), accumulation_of(draft)
    if ranks == 1:
        if wanted == "auto":
            draft.derive("parallel.pp_micro_batches", 1, "no pipeline")
        return
    if micro > share:
        return  # refused already
    misfit = explain_misfit(schedule, number if wanted == "auto" else wanted, ranks)
    if wanted != "auto" and (number % wanted or misfit):  # a pass is an equal part of a step

        def fits(parts: int) -> bool:
            return number % parts == 0 and not explain_misfit(schedule, parts, ranks)

        near, parts = nearest_where(fits, wanted, number), count_of(number, "micro-batch")
        draft.refuse(
            "parallel.pp_micro_batches",
            f"{wanted} does not divide the {parts} of a step"
            if number % wanted
            else f"{wanted} to a pass, and {misfit}",
            f"a divisor of {number}, such as {near}" if fits(near) else '"auto"',
        )
    elif wanted == "auto" and misfit:
        near = nearest_where(_takes(draft), micro, share)
        draft.refuse(
            "train.micro_batch",
            f"{micro} cuts a rank's share of {share} into {count_of(number, 'micro-batch')}, and {misfit}",
            f"such as {near}" if _takes(draft)(near) else f"none with a share of {share}",
            f'set train.global_batch = {ranks * micro * replicas_of(draft)}, or set parallel.pp_schedule = "gpipe"',
        )
    elif wanted == "auto":
        draft.derive("parallel.pp_micro_batches", number, "all micro-batches of a step")


def explain_misfit(schedule: str, micro_batches: int, ranks: int) -> str:
    """Why a schedule cannot run this many micro-batches on this many ranks; "" if it can."""
    rounds = count_rounds(micro_batches, ranks)
    subject = f'parallel.pp_schedule = "{schedule}" on {ranks} ranks'
    if schedule == "1f1b" and micro_batches < ranks:
        return f"{subject} needs at least {ranks}"
    if schedule in IN_ROUNDS and micro_batches % rounds:
        return f"{subject} takes {micro_batches} in {rounds} rounds of equal length"
    return ""


def _takes(draft: Draft) -> Callable[[int], bool]:
    """A function: whether a pipeline takes a micro-batch of this many samples."""
    schedule, ranks, wanted = (draft.get(f"parallel.{name}") for name in ("pp_schedule", "pp", "pp_micro_batches"))
    share, counting = share_of(draft), bool(_counting(draft))

    def takes(size: int) -> bool:
        number = ceil_div(share, size)
        per_pass = number if wanted == "auto" else wanted
        whole = share % size == 0 or not counting
        return whole and number % per_pass == 0 and not explain_misfit(schedule, per_pass, ranks)

    return takes


def _counting(draft: Draft) -> str:
    """The part of the model that counts the samples that it sees; "" if there is none."""
    if draft.get("model.kind") == "convnet":
        return "batch norms"
    balances = draft.get("model.experts") and draft.get("model.balance") != "none" and not draft.get("model.hf")
    return "routers" if balances else ""


RULES: tuple[Rule, ...] = list_rules(globals())


# --- a layout that is left to the planner

LAYOUT = "parallel.layout"
GIVEN = 'set parallel.layout = "given" and the degrees'


def bind_layout_rule(rules: Sequence[Rule]) -> Rule:
    """The rule, for the list of rules that a layout has to pass after it."""

    def an_open_layout_is_the_fastest_that_fits(draft: Draft) -> None:
        # If a run is refused for another reason, that is reported first: its layout could not be priced.
        if draft.get(LAYOUT) == "given" or draft.problems:
            return
        from shardway.resolve.planned import OpenLayout, settle_layout, shape_of_run

        facts, reason = draft.circumstances, "a script brings its own model, whose layers the planner does not know"
        shape: Architecture | None = None
        try:
            shape = None if facts.own_model else shape_of_run(draft.values, facts.shape)
        except UserError as error:
            reason = render_reason(str(error)).partition(": ")[2]
        if shape is None:  # on any machine
            draft.refuse(LAYOUT, f'"auto": {reason}', '"given"', GIVEN)
        elif facts.machine is not None:
            settle_layout(OpenLayout(draft=draft, rules=rules, shape=shape, machine=facts.machine))
        elif facts.accelerators and draft.get("run.device") != "cpu":
            what = f'"auto": memory and rates of the {facts.accelerators} accelerators of this machine are not known'
            draft.refuse(LAYOUT, what, '"given"', f"name a site that says what they are (site.name), or {GIVEN}")
        else:  # the layout of the same file on a machine without accelerators
            axis = "dp_replicate" if draft.is_open("parallel.dp_replicate") else "dp_shard"
            others = [draft.get(f"parallel.{name}") for name in AXES if name != axis]
            if draft.is_open(f"parallel.{axis}") and "auto" not in others and facts.ranks % math.prod(others) == 0:
                reason = (
                    f"no accelerator is known, so ranks only {'copy' if axis == 'dp_replicate' else 'share states'}"
                )
                draft.derive(f"parallel.{axis}", facts.ranks // math.prod(others), reason)

    return an_open_layout_is_the_fastest_that_fits
