"""What a script's own model and loss function keep in Python objects, so that calls of them can be undone.

Counters, lists and dicts that a function reaches: in its closure, among the global names that it uses, in attributes
of its object or module; also random generators of its own. Objects of libraries are left alone.

Invariant: after `put_back` each of them holds what it held, and is the same object. This module must not call what it
looks at.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_DEPTH = 8
_MOST, _SMALL = 1_000_000, 200
"""Elements of a container that is copied, and of one whose elements are looked at: a longer one holds data."""


class PythonState:
    """What some functions and modules of a script hold now."""

    def __init__(self, *holders: Any) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        modules = {"__main__", *(_module_of(holder) for holder in holders)}
        self._own = {module for module in modules if module.split(".")[0] not in ("torch", "shardway", "builtins")}
        for holder in holders:
            self._look_at(holder, _DEPTH)

    def put_back(self) -> None:
        """Everything as it was."""
        for undo in self._undo:
            undo()

    def _look_at(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth < 0 or isinstance(value, torch.Tensor | type | types.ModuleType):
            return
        self._seen.add(id(value))
        for part in self._take(value):
            self._look_at(part, depth - 1)

    def _take(self, value: Any) -> Iterator[Any]:
        """Remember what a value holds; what else it leads to."""
        if isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, types.FunctionType):
            yield from self._take_function(value)
        elif isinstance(value, list | dict | set | deque):
            yield from self._take_container(value)
        elif isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._undo.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, nn.Module):
            for module in value.modules():
                yield from self._take_attributes(module)
                yield from (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        elif _module_of(value) in self._own:
            yield from self._take_attributes(value)

    def _take_function(self, function: types.FunctionType) -> Iterator[Any]:
        if function.__module__ not in self._own:
            return
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                self._undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
                yield cell.cell_contents
        names = set(_names_of(function.__code__)) & function.__globals__.keys()
        for name in sorted(names):
            self._undo.append(functools.partial(function.__globals__.__setitem__, name, function.__globals__[name]))
            yield function.__globals__[name]
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        yield function.__dict__

    def _take_container(self, value: list[Any] | dict[Any, Any] | set[Any] | deque[Any]) -> Iterator[Any]:
        if len(value) > _MOST:
            return
        kept: Any = list(value.items()) if isinstance(value, dict) else list(value)
        self._undo.append(functools.partial(_refill, value, kept))
        yield from (value.values() if isinstance(value, dict) else kept) if len(value) <= _SMALL else ()

    def _take_attributes(self, value: Any) -> Iterator[Any]:
        """Not those that torch keeps: tensors and hooks of modules."""
        for kind in type(value).__mro__:
            if kind.__module__ in self._own:
                yield from (held for held in vars(kind).values() if isinstance(held, types.FunctionType))
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            return
        hidden = "_" if isinstance(value, nn.Module) else "__"
        plain = {name: held for name, held in attributes.items() if not name.startswith(hidden)}
        plain = {name: held for name, held in plain.items() if not isinstance(held, torch.Tensor)}
        self._undo.append(functools.partial(attributes.update, plain))
        yield from plain.values()


def _refill(value: Any, kept: list[Any]) -> None:
    """A container with what it held; nothing is done where it has not changed."""
    now = list(value.items()) if isinstance(value, dict) else list(value)
    if len(now) == len(kept) and all(a is b or _is_same_item(a, b) for a, b in zip(now, kept, strict=True)):
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(kept)
    elif isinstance(value, set):
        value.update(kept)
    else:
        for key, held in kept:  # a Counter would count what `update` is given
            value[key] = held


def _is_same_item(one: Any, other: Any) -> bool:
    """Whether two items of a dict have the same key and the very same value."""
    pair = isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2
    return pair and one[0] is other[0] and one[1] is other[1]


def _names_of(code: types.CodeType) -> Iterator[str]:
    """The global names that a function uses, and the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _module_of(value: Any) -> str:
    """Where a function, or the class of an object, was written."""
    if isinstance(value, functools.partial):
        return _module_of(value.func)
    named = value if isinstance(value, types.FunctionType | types.MethodType) else type(value)
    return str(getattr(named, "__module__", ""))
