"""How a script's own model is computed where the run leaves it open: in its own formats if they are not all fp32,
compiled if its plan names its blocks.

Invariant: what a user sets holds for every model. Nothing is decided here about a model that a run file describes. This
module must not change a model.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardway.models.contract import find_plan
from shardway.parallel.blocks import drops
from shardway.parallel.precision import Precision, autocast_model, left_to_model, read_precision
from shardway.ranks.start import is_out_of_memory
from shardway.resolve.draft import DERIVED, Resolved, Settled, value_of
from shardway.resolve.request import Resolution
from shardway.resolve.rules.formats import COMPILE, COMPUTE, DROPS, KEYS
from shardway.train.session import Session


@dataclass(frozen=True)
class ModelNumerics:
    """Number formats and `train.compile` of one model."""

    precision: Precision
    compile: str


def resolve_for_model(session: Session, model: nn.Module, *, is_first: bool) -> ModelNumerics:
    """How a model is computed. The needs of a script's first model are settled for the run; a further one that needs
    something else has it for itself, which is reported."""
    if session.settled and not session.own_model:
        return ModelNumerics(session.precision, session.resolved.values.train.compile)
    settled = fit_to_model(session.resolved, model)
    if is_first:
        session.resolution = pin(session.resolution, settled)
        session.precision = _read_own(session.resolved)
        return ModelNumerics(session.precision, session.resolved.values.train.compile)
    for key, each in settled.items() if session.ranks.is_first else ():
        say = logging.getLogger("shardway").warning  # no event: nothing is written before the run goes on
        say(f"{type(model).__name__} alone has {key} = {each.value}: {each.reason}.")
    own = session.resolved.with_values(settled)
    return ModelNumerics(_read_own(own), own.values.train.compile)


def _read_own(resolved: Resolved) -> Precision:
    """The formats of a script's model: default bf16 ends with its forward pass, since a loss written for fp32 may not
    be computable under autocast."""
    values, precision = resolved.values, read_precision(resolved.values.precision)
    plain = values.train.engine == "torch" and values.parallel.pp == 1 and values.precision.weights == "fp32"
    wants_bf16 = resolved.is_derived(COMPUTE) and values.precision.compute == "bf16"
    return left_to_model(precision) if plain and wants_bf16 else precision


def keep_formats(session: Session, model: nn.Module, precision: Precision) -> None:
    """Let a model that has formats of its own for products keep them until the run ends."""
    if precision.model_dtype is not None:
        session.at_end.callback(autocast_model(model, session.ranks.device, precision.model_dtype))


@contextlib.contextmanager
def format_named(resolved: Resolved, precision: Precision) -> Iterator[None]:
    """Add to an error of a step that its format is a default, which may be the cause."""
    try:
        yield
    except RuntimeError as error:
        if precision.model_dtype is not None and not is_out_of_memory(error):
            error.add_note(
                f"precision.compute is {resolved.values.precision.compute} here by default "
                f"({resolved.origins[COMPUTE].removeprefix(DERIVED)}). If the model cannot be computed so: "
                "set precision.compute=fp32."
            )
        raise


def fit_to_model(resolved: Resolved, model: nn.Module) -> dict[str, Settled]:
    """Keys that are left to the device and that the model sets otherwise, with the reason."""
    settled, values, kind = {}, resolved.values, type(model).__name__
    narrows = values.precision.compute not in ("fp32", "auto") and values.precision.weights == "fp32"
    if resolved.is_derived(COMPUTE) and narrows and (own := find_own_format(model)):
        settled[COMPUTE] = Settled("fp32", f"{kind} has {own} and is computed in its own formats")
    if resolved.is_derived(COMPILE) and values.train.compile == "blocks" and values.recompute.mode != "budget":
        plan = find_plan(model)
        if plan is None or not plan.blocks:
            settled[COMPILE] = Settled("off", f"{kind} has no plan() that names its blocks")
        elif drops(model):
            settled[COMPILE] = Settled("off", DROPS)
    return settled


def find_own_format(model: nn.Module) -> str:
    """The part of a model that is made for another format than fp32; "" if none."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            return f"parameters in {str(parameter.dtype).removeprefix('torch.')} ({name})"
    return next((f"complex buffers ({name})" for name, buffer in model.named_buffers() if buffer.is_complex()), "")


def pin(resolution: Resolution, settled: Mapping[str, Settled]) -> Resolution:
    """The resolution with these values fixed for later resolving: the model is made for them."""
    resolved = resolution.resolved.with_values(settled)
    known = {
        key: Settled(value_of(resolved.values, key), resolved.origins[key].removeprefix(DERIVED))
        for key in KEYS
        if resolved.is_derived(key)
    }
    circumstances = replace(resolved.circumstances, settled=known)
    return replace(resolution, resolved=replace(resolved, circumstances=circumstances))
