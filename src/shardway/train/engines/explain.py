"""What torch says in a step, in words that name the remedy.

Invariant: only messages of torch that a user can mend are translated; the first error is kept as the cause. This module
must not catch anything else.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn

import shardway
from shardway.errors import UserError
from shardway.parallel.methods import MIXED

_MEANT: Mapping[str, str] = MappingProxyType(
    {
        "Expected more than 1 value per channel when training": (
            "a batch norm was given a micro-batch of one row, of which it can take no variance.\n"
            "  To do: set train.micro_batch (and the batch size) so that each rank has two rows or more, or use a norm "
            "that looks at each row alone (nn.GroupNorm, nn.LayerNorm)."
        ),
        "does not require grad and does not have a grad_fn": (
            "no parameter that is trained took part in the loss: all that it was computed from is frozen or detached.\n"
            "  To do: let some parameters of the model have requires_grad = True, and compute the loss from its "
            "outputs without detach() or torch.no_grad()."
        ),
        MIXED: (
            "a weight was used that is not gathered: with shards (parallel.dp_shard) only a call of the model, or of "
            "one of its own methods, has whole weights.\n"
            "  To do: reach it through a method of the model's own class, or set parallel.dp_shard = 1."
        ),
    }
)
"""A part of torch's message -> what is told."""


@contextlib.contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Around a step: raise UserError where torch says what a user can mend."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        for part, meant in _MEANT.items():
            if part in str(error):
                raise UserError(f"in a step of {type(model).__name__}, {meant}") from error
        raise


@contextlib.contextmanager
def script_explained() -> Iterator[None]:
    """Around a script: the same for what it computes itself with a model in shards."""
    try:
        yield
    except RuntimeError as error:
        if MIXED not in str(error):
            raise
        raise UserError(f"in {_find_line(error)}, {_MEANT[MIXED]}") from error


def _find_line(error: BaseException) -> str:
    """The line of the script that an error came from: the innermost one that is no library's."""
    libraries = (os.path.dirname(os.path.dirname(torch.__file__)), os.path.dirname(shardway.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}" if own else "the script"
