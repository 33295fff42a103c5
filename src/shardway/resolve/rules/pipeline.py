"""Rules of the pipeline axis: stages, schedules, micro-batches.

Invariant: a rule derives an open key or refuses; it never changes what the user set. No files are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardway.layout import IN_ROUNDS, count_rounds, stages_of_rank
from shardway.resolve.applies import BLOCK_MODELS
from shardway.resolve.draft import Draft
from shardway.resolve.rules.numbers import (
    accumulation_of,
    ceil_div,
    count_of,
    nearest_multiple,
    nearest_where,
    replicas_of,
    share_of,
)
from shardway.runfile.write import render_value

ZERO_BUBBLE = ("zero_bubble", "zbv")
SHOWN_STAGES = 16
"""More stages than this are not proposed."""


@dataclass(frozen=True)
class StageCount:
    """The number of stages per rank that a schedule takes; `most` None: as many as there are blocks."""

    least: int
    most: int | None


def stages_of_schedule(schedule: str) -> StageCount:
    """The stages that a schedule takes on each rank."""
    counts = {"gpipe": StageCount(1, 1), "1f1b": StageCount(1, 1), "zbv": StageCount(2, 2)}
    return counts.get(schedule, StageCount(2, None))


def stages_follow_the_schedule(draft: Draft) -> None:
    schedule, stages, ranks = (draft.get(f"parallel.{name}") for name in ("pp_schedule", "pp_stages_per_rank", "pp"))
    least, most = stages_of_schedule(schedule).least, stages_of_schedule(schedule).most
    if stages == "auto":
        fitting = 1 if ranks == 1 else least
        reason = "no pipeline" if ranks == 1 else f'pp_schedule = "{schedule}"'
        draft.derive("parallel.pp_stages_per_rank", fitting, reason)
    elif ranks > 1 and not least <= stages <= (most or stages):
        other = "1f1b" if stages == 1 else "interleaved"
        wanted = f"{'' if most else 'at least '}{count_of(least, 'stage')}"
        draft.refuse(
            "parallel.pp_stages_per_rank",
            f'{stages}: parallel.pp_schedule = "{schedule}" wants {wanted} on each rank',
            str(least) if most else f"{least} or more",
            f'or set parallel.pp_schedule = "{other}"',
        )


def every_rank_has_a_block(draft: Draft) -> None:
    """A rank without any weight would have nothing to train."""
    ranks, per_rank = draft.get("parallel.pp"), draft.get("parallel.pp_stages_per_rank")
    split, known, stages = draft.get("parallel.pp_split"), _blocks_of(draft), ranks * per_rank
    if ranks == 1 or known is None:
        return
    if _deals_out(draft, split, known.number) if split else known.number >= stages:
        return
    even = [ceil_div(known.number - stage, stages) for stage in range(min(stages, SHOWN_STAGES))]
    proposals = [f"such as {even}"] * _deals_out(draft, even, known.number)
    proposals += ["[] for a balance by cost"] * (known.number >= stages)
    if split and proposals:
        draft.refuse(
            "parallel.pp_split",
            f"{split} deals {count_of(sum(split), 'block')} out to {count_of(len(split), 'stage')}; {known.key} has "
            f"{known.number} for {count_of(stages, 'stage')} on {ranks} ranks, of which each needs a block",
            ", or ".join(proposals),
        )
        return
    near = nearest_where(
        lambda degree: draft.circumstances.ranks % degree == 0, ranks, max(1, known.number // per_rank)
    )
    draft.refuse(
        "parallel.pp",
        f"{ranks} ranks of {count_of(per_rank, 'stage')} need {stages} blocks, and {known.key} has {known.number}",
        f"such as {near}",
    )


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
        draft.refuse(
            "parallel.reshard_after_forward",
            f'{render_value(wish)} would give wrong gradients with parallel.pp_schedule = "{schedule}", whose weight '
            "passes come later",
            'false, "auto"',
            'or set parallel.pp_schedule = "1f1b"',
        )


def zero_bubbles_are_not_compiled(draft: Draft) -> None:
    """torch: "compiled with non-empty donated buffers which requires ... retain_graph=False"."""
    schedule, mode = draft.get("parallel.pp_schedule"), draft.get("train.compile")
    if draft.get("parallel.pp") > 1 and schedule in ZERO_BUBBLE and mode != "off":
        draft.refuse(
            "train.compile",
            f'"{mode}": a compiled backward pass runs as a whole, and parallel.pp_schedule = "{schedule}" splits it',
            '"off"',
            'or set parallel.pp_schedule = "1f1b"',
        )


def what_counts_samples_gets_whole_micro_batches(draft: Draft) -> None:
    """All micro-batches of a pipeline have one shape; padding would count for routers and batch norms."""
    batch, micro, ranks = draft.get("train.global_batch"), draft.get("train.micro_batch"), replicas_of(draft)
    whole, counting = micro * ranks, _counting(draft)
    if draft.get("parallel.pp") == 1 or not counting or batch % whole == 0:
        return
    near = nearest_where(_takes(draft), micro, share_of(draft))
    draft.refuse(
        "train.global_batch",
        f"{count_of(batch, 'sample')} do not fill micro-batches of {micro} on {count_of(ranks, 'data-parallel rank')}, "
        f"and a pipeline fills them up with samples that its {counting} would count",
        f"a multiple of {whole}, such as {nearest_multiple(whole, batch)}",
        f"or set train.micro_batch = {near}" if batch % (near * ranks) == 0 else "",
    )


def micro_batches_fill_the_pipeline(draft: Draft) -> None:
    """Runs after the micro-batch is settled; derives the number of micro-batches of one pass."""
    ranks, wanted, number = draft.get("parallel.pp"), draft.get("parallel.pp_micro_batches"), accumulation_of(draft)
    if ranks == 1:
        if wanted == "auto":
            draft.derive("parallel.pp_micro_batches", 1, "no pipeline")
    elif draft.get("train.micro_batch") > share_of(draft):
        return  # refused already
    elif wanted != "auto":
        _refuse_number(draft, number, wanted)
    elif explain_misfit(draft.get("parallel.pp_schedule"), number, ranks):
        _refuse_size(draft, number)
    else:
        draft.derive("parallel.pp_micro_batches", number, "all micro-batches of a step")


def resolve_pipeline_micro_batch(draft: Draft) -> int:
    """The default micro-batch of a pipeline, in samples: about two rounds of micro-batches if there are enough samples,
    and a number of them that the schedule takes."""
    share = share_of(draft)
    return nearest_where(_takes(draft), max(1, share // (2 * draft.get("parallel.pp"))), share)


def explain_misfit(schedule: str, micro_batches: int, ranks: int) -> str:
    """Why a schedule cannot run this many micro-batches on this many ranks; "" if it can."""
    rounds = count_rounds(micro_batches, ranks)
    subject = f'parallel.pp_schedule = "{schedule}" on {ranks} ranks'
    if schedule == "1f1b" and micro_batches < ranks:
        return f"{subject} needs at least {ranks}"
    if schedule in IN_ROUNDS and micro_batches % rounds:
        return f"{subject} takes {micro_batches} in {rounds} rounds of equal length"
    return ""


def _refuse_size(draft: Draft, number: int) -> None:
    """Refuse the size if the schedule does not take the micro-batches of a step."""
    schedule, ranks, micro = (draft.get(key) for key in ("parallel.pp_schedule", "parallel.pp", "train.micro_batch"))
    misfit, share = explain_misfit(schedule, number, ranks), share_of(draft)
    near = nearest_where(_takes(draft), micro, share)
    draft.refuse(
        "train.micro_batch",
        f"{micro} cuts a rank's share of {share} into {count_of(number, 'micro-batch')}, and {misfit}",
        f"such as {near}" if _takes(draft)(near) else f"none with a share of {share}",
        f'set train.global_batch = {ranks * micro * replicas_of(draft)}, or set parallel.pp_schedule = "gpipe"',
    )


def _refuse_number(draft: Draft, number: int, wanted: int) -> None:
    """Refuse a pass that is no equal part of a step, or a number that the schedule does not take."""
    schedule, ranks = draft.get("parallel.pp_schedule"), draft.get("parallel.pp")
    misfit = explain_misfit(schedule, wanted, ranks)
    if number % wanted == 0 and not misfit:
        return

    def fits(parts: int) -> bool:
        return number % parts == 0 and not explain_misfit(schedule, parts, ranks)

    near, parts = nearest_where(fits, wanted, number), count_of(number, "micro-batch")
    draft.refuse(
        "parallel.pp_micro_batches",
        f"{wanted} does not divide the {parts} of a step" if number % wanted else f"{wanted} to a pass, and {misfit}",
        f"a divisor of {number}, such as {near}" if fits(near) else '"auto"',
    )


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


@dataclass(frozen=True)
class _Blocks:
    """The blocks of a model: the key for their number, and the number."""

    key: str
    number: int


def _blocks_of(draft: Draft) -> _Blocks | None:
    kind = draft.get("model.kind")
    if kind in BLOCK_MODELS:
        return _Blocks("model.layers", draft.get("model.layers"))
    key = {"convnet": "model.channels", "mlp": "model.hidden"}.get(kind)
    return _Blocks(key, len(draft.get(key))) if key else None


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
