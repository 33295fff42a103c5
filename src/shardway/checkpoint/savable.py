"""Whether a checkpoint can hold a state: asked before there is work that could be lost.

Invariant: what the writer of a checkpoint would raise for a value of the state is a UserError here, which names all
such values. This module must not touch the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardway.checkpoint.shards.tensor_subclasses import is_known
from shardway.checkpoint.shards.values import survives_json
from shardway.checkpoint.state import Tensors
from shardway.errors import Problem, ShardwayError, UserError, check_no_problems
from shardway.ranks.start import is_lost_contact

_ALLOWED = "tensors; numbers, strings, None, and lists and dicts of them"


def check_savable(tensors: Mapping[str, Any], what: str) -> None:
    """Raise UserError where a checkpoint cannot hold some value of a nested dict, such as a model's `state_dict`."""
    flat, _ = flatten_state_dict(dict(tensors))
    problems = [Problem(name, why, allowed=_ALLOWED) for name, value in flat.items() if (why := _find_hindrance(value))]
    check_no_problems(f"{what}, which a checkpoint has to hold", problems)


def check_collects(collect: Callable[[], Tensors]) -> None:
    """The same of the whole state of a run, by what collects it. Raises UserError where that raises anything, too."""
    try:
        tensors = collect()
    except ShardwayError:
        raise
    except Exception as error:
        if is_lost_contact(error):
            raise
        raise UserError(
            f"the state of this run cannot be collected for a checkpoint: {type(error).__name__}: {error}\n"
            "  So the run ends now, before there is work that could not be saved. To do: look for what model and "
            "optimizer have in common: every parameter of the optimizer has to be one of the model's."
        ) from error
    check_savable(tensors, "the state of this run")


def _find_hindrance(value: Any) -> str:
    """Why a checkpoint cannot hold a value; "" where it can."""
    if not isinstance(value, torch.Tensor):
        return "" if survives_json(value) else f"a {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    if value.is_quantized:
        return "a quantized tensor"
    held = value.to_local() if isinstance(value, DTensor) else value
    if held.is_meta:
        return "a tensor on the meta device, which has no values"
    return "" if is_known(held) or not is_traceable_wrapper_subclass(held) else f"a {type(held).__name__}"
