"""What a plan says that torchtitan has no word for, and what its job config leaves to a person.

Invariant: every field of a case that the files of torchtitan do not carry over as it stands has its sentence here. This
module must not write a setting.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardway.plan.case import Case
from shardway.plan.emit.flavors import find_flavor
from shardway.plan.emit.pipeline import schedule_of
from shardway.plan.emit.tellings import (
    describe_dropout,
    describe_engine,
    describe_kernel,
    describe_offload,
    describe_optimizer,
    describe_order,
    describe_script,
    describe_tf32,
    describe_zero,
)
from shardway.plan.emit.torchtitan_job import fp4_parts

_LIBRARY = "torchtitan"
_LOSS_BYTES = (
    "The loss is computed with a full copy of the logits in torchtitan.toml; torchtitan_job.py computes it in parts"
)


def describe_all(case: Case, copies: int, shards: int) -> Iterator[str]:
    """Everything, the model first; `copies` and `shards` are what the files have."""
    yield from _describe_model(case)
    yield from describe_engine(case, _LIBRARY, ("fsdp2", "torchtitan"))
    yield from _describe_sharing(case, copies, shards)
    yield from describe_order(case, _LIBRARY)
    yield from _describe_axes(case)
    yield from _describe_pipeline(case)
    yield from _describe_experts(case)
    yield from _describe_formats(case)
    yield from _describe_rest(case)
    yield from describe_script(
        case, "the data set, the number of steps, the learning rate, the folder of the tokenizer"
    )


def _describe_model(case: Case) -> Iterator[str]:
    flavor = find_flavor(case.model)
    if flavor is None:
        yield (
            f"torchtitan takes sizes from a flavor of its own, and has none of {case.model.name}: add one called "
            f'"{case.model.name}" to the registry of a model, and say that model under [model] name.'
        )
    if flavor is None or not flavor.function:
        yield "torchtitan 0.3 reads no TOML and has no config of these sizes: write one for its config_registry."


def _describe_sharing(case: Case, copies: int, shards: int) -> Iterator[str]:
    alone = shards * case.degrees.cp == 1
    if not alone:
        yield from describe_zero(case, _LIBRARY)
    if case.zero == 0 and not alone:
        yield "The plan shares no states, and torchtitan shards them over dp_shard x cp in this layout: less memory."
    if copies > 1 and alone and case.degrees.tp * case.degrees.pp > 1:
        yield "torchtitan 0.2 refuses copies of a model that is split by tp or pp; shard over some of the data ranks."


def _describe_axes(case: Case) -> Iterator[str]:
    degrees = case.degrees
    if degrees.tp > 1 and not case.sequence:
        yield "torchtitan 0.2 always splits norms and the residual stream with tp: less memory than predicted."
    whole = degrees.tp * (2 * degrees.cp if degrees.cp > 1 else 1)
    if case.seq_len % whole:
        yield f"torchtitan refuses sequences that are no multiple of {whole} here, and the plan has {case.seq_len}."
    if case.async_tensor and not case.compiled:
        yield "torchtitan overlaps the collectives of tp only where it compiles, and the plan does not: it is off."


def _describe_pipeline(case: Case) -> Iterator[str]:
    if case.degrees.pp == 1:
        return
    schedule, per_rank = schedule_of(case), case.stages_per_rank
    if schedule == "zero_bubble" and per_rank == 1:
        yield "torchtitan has zero bubble for two stages a rank or more, and the plan has one: the files say 1F1B."
    if schedule == "gpipe" and per_rank > 1:
        yield f"GPipe has one stage a rank in torchtitan, and the plan has {per_rank}: the files say Interleaved1F1B."
    if schedule == "zbv" and per_rank != 2:
        yield f"ZBV has two stages a rank, and the plan has {per_rank}: torchtitan refuses that."


def _describe_experts(case: Case) -> Iterator[str]:
    degrees = case.degrees
    if degrees.ep > 1 and degrees.etp not in (1, degrees.tp):
        yield f"torchtitan splits an expert over 1 or over {degrees.tp} ranks (tp), and the plan says {degrees.etp}."
    if degrees.etp > 1:
        yield "torchtitan 0.3 keeps each expert whole on a rank, and the plan splits it."
    if any(layer.experts for layer in case.model.layers) and degrees.ep == 1 and degrees.tp != degrees.etp:
        yield "Without ep, torchtitan splits each expert over the tensor axis, and the plan does not."


def _describe_formats(case: Case) -> Iterator[str]:
    if case.precision == "fp16":
        yield "torchtitan computes in bf16 or fp32; the files say bf16 where the plan says fp16."
    yield from describe_tf32(case, "The files say fp32")
    if case.precision == "fp4":
        yield from _describe_fp4(case)
    if case.low_bits and not case.compiled:
        yield f"torchtitan wants the model compiled for {case.precision} to be fast, and the plan does not compile."
    yield from describe_optimizer(case, _LIBRARY, ("adamw",))


def _describe_fp4(case: Case) -> Iterator[str]:
    yield "torchtitan.toml says bf16 where the plan says fp4: torchtitan 0.2 has none."
    odd = fp4_parts(case)[1]
    if odd:
        yield f"torchtitan has fp4 for widths of whole 128s: {' and '.join(odd)} are computed in bf16."
    if any(run.layer.experts for run in case.model.runs):
        yield "torchtitan has fp4 for linear layers alone: experts are computed in bf16."


def _describe_rest(case: Case) -> Iterator[str]:
    if case.recompute == "selective":
        yield "torchtitan cannot recompute the scores of attention alone; with a fused kernel none are kept anyway."
    if case.recompute == "products":
        yield "torchtitan recomputes every second product as well: less memory and slower steps than predicted."
    yield from describe_kernel(case, _LIBRARY)
    yield from describe_dropout(case, _LIBRARY)
    yield from describe_offload(case, _LIBRARY)
    if case.fused_loss:
        yield f"{_LOSS_BYTES}, as the plan says."
    else:
        yield f"{_LOSS_BYTES}, which takes less memory than predicted."
