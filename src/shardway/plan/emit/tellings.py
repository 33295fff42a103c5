"""Sentences about what several libraries have no word for.

Invariant: a sentence names the wish, what the file does instead, and what follows for the prediction where it differs.
This module must not write a setting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardway.plan.case import Case

_OPTIMIZERS = {
    "adamw": "AdamW",
    "adamw8bit": "AdamW with states of 8 bits",
    "adafactor": "Adafactor",
    "sgd": "SGD",
    "muon": "Muon",
}


def describe_engine(case: Case, library: str, priced_as: Collection[str]) -> Iterator[str]:
    """Where the prediction is that of another library."""
    if case.engine.name not in priced_as:
        others = " or ".join(f'"{name}"' for name in priced_as)
        yield f'The prediction is that of the engine "{case.engine.name}"; for {library} ask for that of {others}.'


def describe_order(case: Case, library: str) -> Iterator[str]:
    """Where a library puts pipeline ranks furthest apart, and the plan puts copies there."""
    if case.degrees.pp > 1 and case.degrees.dp_replicate > 1:
        yield (
            f"{library} places pipeline ranks furthest apart and copies of the model within; the plan has it the other "
            "way round, so other messages leave the node."
        )


def describe_optimizer(case: Case, library: str, known: Collection[str]) -> Iterator[str]:
    """Where a library lacks the optimizer."""
    if case.optimizer not in known:
        wanted = _OPTIMIZERS[case.optimizer]
        yield f"{library} has no {wanted}: the file says AdamW, whose states take other memory than the prediction."


def describe_zero(case: Case, library: str) -> Iterator[str]:
    """Where a library has the third stage of ZeRO alone."""
    if case.zero in (1, 2):
        yield (
            f"{library} shards weights, gradients and optimizer states alike, and the plan shares them as "
            f"ZeRO-{case.zero}. Weights stay gathered from the forward to the backward pass, which comes nearest."
        )


def describe_kernel(case: Case, library: str) -> Iterator[str]:
    """Where the kernel of attention is the library's own choice."""
    yield f"{library} chooses the kernel of attention by itself; the prediction is for {case.attention}."


def describe_own_model(case: Case) -> Iterator[str]:
    """Where the model is the script's, and with it the kernel of attention, dropout and the loss."""
    yield from describe_kernel(case, "Your model")
    if case.dropout:
        yield "Dropout is the model's; the plan has it."
    if case.fused_loss:
        yield "The loss of the plan is computed without a full copy of the logits: your script has to do the same."


def describe_dropout(case: Case, library: str) -> Iterator[str]:
    """Where models of a library have none."""
    if case.dropout:
        yield f"The plan has dropout, and the models of {library} have none."


def describe_tf32(case: Case, said: str) -> Iterator[str]:
    """Where tf32 is a setting of PyTorch alone; `said` is what the files have instead."""
    if case.precision == "tf32":
        yield f'{said}: set torch.set_float32_matmul_precision("high") for tf32.'


def describe_offload(case: Case, library: str) -> Iterator[str]:
    """Where offload takes weights and gradients along; a plan does so where it shares them (ZeRO 3)."""
    if case.offload and case.zero < 3:
        yield (
            f"{library} keeps weights and gradients in CPU memory too, the plan optimizer states alone: slower steps, "
            "and less memory than predicted."
        )


def describe_script(case: Case, what: str) -> Iterator[str]:
    """What a file leaves to the person always."""
    yield f"Set in your own script or on the command line: {what}."


def describe_copies(case: Case, library: str) -> Iterator[str]:
    """Where sharding has to reach over all data ranks."""
    if case.degrees.dp_replicate > 1 and case.zero:
        shared = case.degrees.data
        yield (
            f"{library} shares states over all {shared} data ranks, not over {case.degrees.dp_shard} of them with "
            f"{case.degrees.dp_replicate} copies: less memory and more traffic between nodes than predicted."
        )
