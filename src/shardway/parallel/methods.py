"""A sharded model's own methods beside `forward`: they compute with whole weights, as on one rank.

Invariant: a method that works on the shards is left as it is (one that clips weights in place, for one); only one that
torch refuses for mixing shards with plain tensors is run with gathered weights, from then on. Like a forward pass it
is called on all ranks. This module must not know models.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

MIXED = "got mixed torch.Tensor and DTensor"
"""What torch says where a weight is used that is not gathered."""

_LIBRARIES = ("torch.", "transformers.", "shardway.")
_NOT_OFFERED = frozenset((*dir(nn.Module), "plan", "init_weights"))


def offer_methods(model: nn.Module) -> None:
    """Let the public methods that a sharded model's class defines work as on one rank."""
    if not isinstance(model, FSDPModule):
        return
    for name in dict.fromkeys(_own_methods(type(model))):
        model.__dict__[name] = _gathering(model, name, getattr(model, name))
    if callable(save := getattr(model, "save_pretrained", None)):
        model.__dict__["save_pretrained"] = _saving_whole(model, save)


def _own_methods(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        if each is not FSDPModule and not f"{each.__module__}.".startswith(_LIBRARIES):
            for name, value in vars(each).items():
                if inspect.isfunction(value) and not name.startswith("_") and name not in _NOT_OFFERED:
                    yield name


_TRIED = "_shardway_tried"
"""Attribute of a model while one of its methods is tried on shards."""


def _gathering(model: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gathers once it has been refused for shards.

    A method within another one is a part of that: gathered alone, it would leave whole weights behind it, and the rest
    would compute with them unseen by FSDP.
    """
    gathered: Callable[..., Any] | None = None

    @functools.wraps(method)
    def call(*inputs: Any, **named: Any) -> Any:
        nonlocal gathered
        within = model._get_fsdp_state()._state_ctx.iter_forward_root is not None  # a forward pass
        if within or _TRIED in model.__dict__:
            return method(*inputs, **named)
        if gathered is None:
            generators = torch.get_rng_state()
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # whole weights that a pass has left would hide that the method needs them
            model.__dict__[_TRIED] = True
            try:
                return method(*inputs, **named)
            except RuntimeError as error:
                if MIXED not in str(error):
                    raise
            finally:
                del model.__dict__[_TRIED]
            torch.set_rng_state(generators)
            del model.__dict__[name]
            register_fsdp_forward_method(model, name)
            gathered, model.__dict__[name] = model.__dict__[name], call
        return gathered(*inputs, **named)

    return call


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of a weight that a model uses several times -> its first."""
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: earliest for name, earliest in names if name != earliest}


def _saving_whole(model: nn.Module, save: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` of the Hugging Face library, which takes no shards: rank 0 writes what all have gathered."""

    @functools.wraps(save)
    def call(*inputs: Any, state_dict: dict[str, Any] | None = None, **named: Any) -> Any:
        if state_dict is None:
            state_dict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            for name, first in _tied_names(model).items():
                if first in state_dict:  # on rank 0
                    state_dict[name] = state_dict[first]
        result = save(*inputs, state_dict=state_dict, **named) if dist.get_rank() == 0 else None
        dist.barrier()
        return result

    return call
