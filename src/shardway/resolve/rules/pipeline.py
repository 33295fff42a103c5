"""Rules of the pipeline axis: stages, schedules, micro-batches.

Invariant: a rule derives what was left open or refuses; it never changes what the user set. This module must not
read files or look at the machine.
"""

from __future__ import annotations

import math

from shardway.resolve.draft import Draft
from shardway.resolve.rules.numbers import nearest_divisor

ONE_STAGE = ("gpipe", "1f1b")
ZERO_BUBBLE = ("zero_bubble", "zbv")


def stages_follow_the_schedule(draft: Draft) -> None:
    schedule, stages = draft.get("parallel.pp_schedule"), draft.get("parallel.pp_stages_per_rank")
    if stages == "auto":
        one = schedule in ONE_STAGE or draft.get("parallel.pp") == 1
        draft.derive(
            "parallel.pp_stages_per_rank",
            1 if one else 2,
            f'pp_schedule = "{schedule}"' if not one else "one stage a rank",
        )
        return
    if draft.get("parallel.pp") == 1:
        return
    allowed = {"gpipe": "1", "1f1b": "1", "zbv": "2"}.get(schedule, "2 or more")
    fits = {"gpipe": stages == 1, "1f1b": stages == 1, "zbv": stages == 2}.get(schedule, stages > 1)
    if not fits:
        draft.refuse(
            "parallel.pp_stages_per_rank",
            f'{stages} stages a rank do not go with pp_schedule = "{schedule}"',
            allowed,
            'choose another schedule, such as "interleaved"' if stages > 1 else 'choose "1f1b"',
        )


def every_stage_has_a_block(draft: Draft) -> None:
    ranks = draft.get("parallel.pp")
    if ranks == 1 or draft.get("model.kind") not in ("transformer", "vit"):
        return
    layers, stages = draft.get("model.layers"), ranks * draft.get("parallel.pp_stages_per_rank")
    split = draft.get("parallel.pp_split")
    if split and (len(split) != stages or sum(split) != layers):
        even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        draft.refuse(
            "parallel.pp_split",
            f"{split} gives {sum(split)} blocks to {len(split)} stages",
            f"{layers} blocks over {stages} stages",
            f"such as {even}, or [] for a balance by cost",
        )
    elif not split and layers < stages:
        draft.refuse(
            "parallel.pp",
            f"{ranks} ranks x {stages // ranks} stages need at least {stages} blocks, and model.layers = {layers}",
            f"at most {max(1, layers // (stages // ranks))}",
        )


def tied_weights_stay_together(draft: Draft) -> None:
    if draft.get("parallel.pp") == 1 or draft.get("model.kind") != "transformer":
        return
    if draft.get("model.tied"):
        draft.refuse(
            "model.tied",
            f"true, and parallel.pp = {draft.get('parallel.pp')} puts the embedding into the first stage and the "
            "output layer into the last",
            "false with a pipeline",
        )


def a_pipeline_keeps_gathered_weights(draft: Draft) -> None:
    """torch gives wrong gradients without an error where weights are freed between the passes of these schedules."""
    if draft.get("parallel.pp") == 1 or draft.get("parallel.pp_schedule") not in ZERO_BUBBLE:
        return
    if draft.get("parallel.reshard_after_forward") not in ("auto", False):
        draft.refuse(
            "parallel.reshard_after_forward",
            f'true gives wrong gradients with pp_schedule = "{draft.get("parallel.pp_schedule")}"',
            '"auto" or false',
        )


def zero_bubbles_are_not_compiled(draft: Draft) -> None:
    schedule = draft.get("parallel.pp_schedule")
    if draft.get("parallel.pp") > 1 and schedule in ZERO_BUBBLE and draft.get("train.compile") != "off":
        draft.refuse(
            "train.compile",
            f'"{draft.get("train.compile")}" does not go with pp_schedule = "{schedule}", which splits a backward pass',
            '"off"',
            "or choose another schedule",
        )


def a_pipeline_has_work_for_all_its_stages(draft: Draft, share: int) -> int:
    """The micro-batch, in samples, that a pipeline takes where none is set: two rounds of micro-batches if there are
    samples for them, and a number of them that the schedule can do."""
    ranks, schedule = draft.get("parallel.pp"), draft.get("parallel.pp_schedule")
    for micro in range(max(1, share // (2 * ranks)), 0, -1):
        if not explain_misfit(schedule, math.ceil(share / micro), ranks):
            return micro
    return 1


def micro_batches_fill_the_pipeline(draft: Draft) -> None:
    """Runs after the micro-batch is settled; derives how many of them one pass takes."""
    ranks, wanted = draft.get("parallel.pp"), draft.get("parallel.pp_micro_batches")
    micro, batch = draft.get("train.micro_batch"), draft.get("train.global_batch")
    replicas = draft.get("parallel.dp_replicate"), draft.get("parallel.dp_shard")
    if ranks == 1 or "auto" in (micro, *replicas):
        if wanted == "auto":
            draft.derive("parallel.pp_micro_batches", 1, "no pipeline")
        return
    number = math.ceil(math.ceil(batch / math.prod(replicas)) / micro)
    if wanted == "auto":
        draft.derive("parallel.pp_micro_batches", number, "all micro-batches of a step")
    elif number % wanted:
        near = nearest_divisor(number, wanted)
        draft.refuse(
            "parallel.pp_micro_batches",
            f"{wanted} does not divide the {number} micro-batches of a step",
            f"a divisor, such as {near}",
        )
        return
    per_pass = draft.get("parallel.pp_micro_batches")
    misfit = explain_misfit(draft.get("parallel.pp_schedule"), per_pass, ranks)
    share = math.ceil(batch / math.prod(replicas))
    if misfit:
        draft.refuse(
            "train.micro_batch",
            f"{micro} makes {per_pass} micro-batches of a rank's share of {share}; {misfit}",
            f"{ranks} micro-batches or a multiple of that",
            f"lower train.micro_batch, or raise train.global_batch (such as to {ranks * micro * math.prod(replicas)})",
        )


def explain_misfit(schedule: str, micro_batches: int, ranks: int) -> str:
    """Why a schedule cannot do so many micro-batches on so many ranks; "" where it can."""
    if schedule in ONE_STAGE or schedule == "zbv":
        return f'pp_schedule = "{schedule}" on {ranks} ranks needs at least {ranks}' if micro_batches < ranks else ""
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        return f'pp_schedule = "{schedule}" on {ranks} ranks needs a multiple of its {rounds} rounds'
    return ""
