"""How Megatron Core trains a plan, for the libraries that are built on it: Megatron-LM and NeMo's Megatron-Bridge.

Invariant: both are told and given the same; only the spelling of a setting is theirs. This module must not write a
file.

Source: Megatron Core 0.16 to 0.19 (megatron/training/arguments.py, core/transformer/transformer_config.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from shardway.plan.case import Case
from shardway.plan.emit.pipeline import is_even, schedule_of
from shardway.plan.emit.tellings import describe_engine, describe_optimizer, describe_order

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}


def uses_fsdp(case: Case) -> bool:
    """ZeRO beyond the first stage is Megatron-FSDP's; the first is the distributed optimizer's."""
    return case.zero >= 2 and case.degrees.shards > 1


def strategy(case: Case) -> str:
    """What Megatron-FSDP shares."""
    return "optim_grads_params" if case.zero == 3 else "optim_grads"


def degrees_of(case: Case) -> Mapping[str, int]:
    """As Megatron has them; dp is what is left of the ranks."""
    degrees = case.degrees
    return {"dp": degrees.data, "cp": degrees.cp, "tp": degrees.tp, "pp": degrees.pp}


def keeps_mapping(case: Case) -> bool:
    """Whether pipeline ranks lie within copies, as in the plan: Megatron can do that where nothing else shares data."""
    degrees = case.degrees
    return degrees.pp > 1 and degrees.dp_replicate > 1 and degrees.dp_shard == 1


def virtual_stages(case: Case) -> int | None:
    """Stages of a rank, where there are several."""
    return case.stages_per_rank if case.degrees.pp > 1 and case.stages_per_rank > 1 else None


def needs_layout(case: Case) -> bool:
    """Whether stages differ in their layers, so that each has to be written out."""
    return case.degrees.pp > 1 and not is_even(case)


def describe_megatron(case: Case, library: str, priced_as: Collection[str]) -> Iterator[str]:
    """What either library lacks; `priced_as` are the engines whose prediction is that of the library."""
    yield from describe_engine(case, library, priced_as)
    yield from _describe_sharing(case)
    yield from _describe_pipeline(case)
    yield from _describe_products(case)
    yield from describe_optimizer(case, library, OPTIMIZERS)
    yield from _describe_rest(case)
    yield from _describe_vocabulary(case)


def _describe_sharing(case: Case) -> Iterator[str]:
    if not keeps_mapping(case):
        yield from describe_order(case, "Megatron")
    if uses_fsdp(case) and case.optimizer == "muon":
        yield "Megatron-FSDP refuses Muon: share the optimizer states alone, as ZeRO-1 does."
    if case.zero == 3 and not case.reshard:
        yield "Megatron-FSDP frees weights after the forward pass always: less memory and more traffic than predicted."
    if uses_fsdp(case) and case.degrees.tp * case.degrees.cp > 1:
        yield (
            "Megatron-FSDP wants CUDA_DEVICE_MAX_CONNECTIONS above 1, and tp or cp want it at 1 before Blackwell: "
            "expect less overlap than predicted."
        )


def _describe_pipeline(case: Case) -> Iterator[str]:
    if case.degrees.pp == 1:
        return
    schedule = schedule_of(case)
    stand_in = "the interleaved 1F1B" if virtual_stages(case) else "1F1B"
    if schedule not in ("1f1b", "interleaved"):
        yield f"Megatron has no schedule {schedule}: it runs {stand_in}, with another bubble and other memory."
    if schedule == "interleaved" and case.micro_batches % case.degrees.pp:
        yield (
            f"Megatron interleaves groups of {case.degrees.pp} micro-batches, and the plan's {case.micro_batches} are "
            "no multiple of that: set the size of a group of micro-batches, or change the batch."
        )


def _describe_products(case: Case) -> Iterator[str]:
    if case.precision == "tf32":
        yield "Megatron has no option for tf32: the file says fp32, and NVIDIA_TF32_OVERRIDE=1 sets the rest."
    if case.precision == "fp8":
        yield "The plan does not say how fp8 is scaled; the file says by tensor, from the values at hand."
    if case.low_bits:
        yield f"{case.precision} needs Transformer Engine and a GPU that has it; weights are gathered in bf16."


def _describe_rest(case: Case) -> Iterator[str]:
    if case.recompute in ("products", "operators"):
        yield (
            f'Megatron recomputes named modules, the plan "{case.recompute}": nothing is recomputed, which takes more '
            "memory than predicted."
        )
    if case.attention == "flash1":
        yield "Transformer Engine has no first FlashAttention; a later one is faster than predicted."
    if case.compiled:
        yield "Megatron does not use torch.compile; the kernels of Transformer Engine are fused as they are."
    if case.async_tensor and not (case.sequence and case.degrees.tp > 1):
        yield "Megatron overlaps the collectives of tp only with sequence parallelism: it is off."
    if case.offload:
        yield "CPU offload uses the precision-aware optimizer of Transformer Engine."
    if case.offload and case.zero == 3:
        yield "Megatron offloads optimizer states alone, the plan weights and gradients as well: more memory."
    whole = 2 * case.degrees.cp if case.degrees.cp > 1 else 1
    if case.seq_len % whole:
        yield f"Megatron refuses sequences that are no multiple of 2 x cp = {whole}, and the plan has {case.seq_len}."


def _describe_vocabulary(case: Case) -> Iterator[str]:
    """Megatron rounds the vocabulary up to a multiple of 128 for each rank of the tensor axis."""
    unit = 128 * case.degrees.tp
    padded = -(-case.model.vocab // unit) * unit
    if padded != case.model.vocab:
        yield f"Megatron makes {padded:,} entries of the vocabulary of {case.model.vocab:,}, a multiple of 128 x tp."
