"""Finds out, once, whether a script's loss is a mean over samples, and undoes what its calls changed.

Invariant: after the probe the run is as before, to the bit: there are no gradients, and random numbers, buffers, modes
and Python objects of the script are restored. Each object is the same object. Every rank makes the same passes.

Restored are counters, lists and dicts that a function reaches (in its closure, among the global names that it uses, in
attributes of its object or module), and random generators of its own. Objects of libraries are left alone.

The same rows are run at once and in parts. A mean over samples comes out the same. A mean over targets that count, of
which samples have different numbers, does not, nor does a loss that compares samples with each other. A loss that draws
random numbers cannot be classified.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shardway.data.batch_tree import LengthGroups, count_rows, cut_rows
from shardway.errors import LostContact
from shardway.train.passes import Loss, Passes, evaluating
from shardway.train.session import Session
from shardway.train.step import MutableParts

# --- the probe

MOST_ROWS, MOST_WINDOWS = 16, 4
"""How many rows are compared, and in how many groups of the size of a micro-batch."""
EXACT, NARROW, LEAST = 1e-4, 1e-2, 1e-6
"""The most that the two may differ by rounding: relatively in fp32 and in narrower formats, and absolutely."""


@dataclass(frozen=True)
class Compared:
    """The mean loss of some rows, at once and in parts."""

    rows: int
    whole: float
    parts: float

    def is_apart(self, relative: float) -> bool:
        """Whether the two differ by more than rounding."""
        return not math.isclose(self.whole, self.parts, rel_tol=relative, abs_tol=LEAST)

    def describe(self) -> str:
        """What the difference means, and what to do."""
        return (
            f"the loss of {self.rows} samples is {self.whole:.6g} at once and {self.parts:.6g} as the mean of their "
            "parts: it is no mean over samples, so the result depends on train.micro_batch and on the number of ranks."
            "\n  To do: return shardway.LossSum(total, count) from the loss function, the sum over all targets and how "
            "many they are: shardway.token_cross_entropy does (targets of -100 do not count), and "
            "shardway.causal_lm_loss in place of model(**batch).loss of Hugging Face. A loss that compares samples "
            "with each other needs all of them on one rank, and train.micro_batch as large as the batch."
        )


def probe_loss(session: Session, passes: Passes, model: nn.Module, batch: Any, loss_fn: Loss, rows: int | None) -> None:
    """Report a loss that depends on how its batch is cut; called on all ranks together, after a step on the batch."""
    train, parallel = session.resolved.values.train, passes.parallel
    # The same on every rank: no passes that a compiler, an engine or experts would remember.
    plain = train.engine == "torch" and train.compile == "off" and parallel.pipeline is None
    if not plain or passes.routers or passes.precision.float8 is not None or loss_fn in passes.sum_losses:
        return
    try:
        # A pass takes one group of documents, whatever the loss is.
        own = 0 if isinstance(batch, LengthGroups) else count_rows(batch, rows)
        cut_rows(batch, own, 0, 1)
    except Exception:  # this rank's share cannot be cut
        own = 0
    count = min(session.ranks.gather(own))
    if count < 2:
        return
    # Windows of at least two rows, else of no more than a micro-batch.
    size = min(count, max(2, min(passes.batch_split.micro_batch, MOST_ROWS)))
    number = max(1, min(MOST_WINDOWS, count // size, MOST_ROWS // size))
    windows = [(start, start + size) for start in range(0, number * size, size)]
    before, script = MutableParts(parallel).remember(None), PythonState(loss_fn, parallel.module)
    try:
        with evaluating(model):
            found = _measure(passes, model, batch, loss_fn, rows, windows)
    except LostContact:
        raise
    except Exception:  # a failed probe must not end a run
        found = None
    finally:
        before.put_back()
        script.put_back()
    apart = [each for each in session.ranks.gather(found) if each is not None]
    if apart:
        session.note_once("loss_depends_on_cut", apart[0].describe())


def _measure(
    passes: Passes,
    model: nn.Module,
    batch: Any,
    loss_fn: Loss,
    rows: int | None,
    windows: Sequence[tuple[int, int]],
) -> Compared | None:
    """The first window whose mean loss differs at once and in parts; None if there is none."""
    precision, fast = passes.precision, passes.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    narrow = fast or (precision.autocast_dtype, precision.model_dtype) != (None, None)
    # Products of fewer bits than fp32 has come from kernels that depend on the rows.
    limit = NARROW if narrow or precision.weights_dtype is not torch.float32 else EXACT
    first = None
    for start, end in windows:
        size = end - start
        # Parts of odd and even sizes, so that samples of two kinds that take turns are not alike in them.
        one = 2 if size > 5 else 1
        two = one + (size - one) // 2 if size > 5 else size
        cuts = [(start + a, start + b) for a, b in ((0, one), (one, two), (two, size)) if b > a]
        with warnings.catch_warnings(action="ignore"):  # of a part that is smaller than any of the run
            (total, count), again, *found = passes.measure(model, batch, loss_fn, [(start, end)] * 2 + cuts, rows)
        if loss_fn in passes.sum_losses:
            return None
        is_random = Compared(size, total, again[0]).is_apart(limit)  # it draws noise, as a diffusion model does
        if first is None and count and math.isfinite(total) and not is_random:
            counted = sum(each for _, each in found)
            mean = sum(each for each, _ in found) / counted if counted else math.nan
            compared = Compared(size, total / count, mean)
            first = compared if compared.is_apart(limit) else None
    return first


# --- Python objects that a script's functions change

_DEPTH = 8
_MOST, _SMALL = 1_000_000, 200
"""Limits: elements of a container that is copied, and of one whose elements are visited. A longer one holds data."""


class PythonState:
    """The current state of some functions and modules of a script."""

    def __init__(self, *holders: Any) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        modules = {"__main__", *(_module_of(holder) for holder in holders)}
        self._own = {module for module in modules if module.split(".")[0] not in ("torch", "shardway", "builtins")}
        for holder in holders:
            self._look_at(holder, _DEPTH)

    def put_back(self) -> None:
        """Restore everything."""
        for undo in self._undo:
            undo()

    def _look_at(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth < 0 or isinstance(value, torch.Tensor | type | types.ModuleType):
            return
        self._seen.add(id(value))
        for part in self._take(value):
            self._look_at(part, depth - 1)

    def _take(self, value: Any) -> Iterator[Any]:
        """Remember the content of a value; yields the values that it leads to."""
        if isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, types.FunctionType):
            yield from self._take_function(value)
        elif isinstance(value, list | dict | set | deque):
            if len(value) <= _MOST:
                kept: Any = list(value.items()) if isinstance(value, dict) else list(value)
                self._undo.append(functools.partial(_refill, value, kept))
                yield from (value.values() if isinstance(value, dict) else kept) if len(value) <= _SMALL else ()
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
    """Restore the content of a container; nothing is done if it has not changed."""
    if isinstance(value, dict):
        now = list(value.items())
        same = all(key is old and held is was for (key, held), (old, was) in zip(now, kept, strict=False))
        if len(now) != len(kept) or not same:
            value.clear()
            for key, held in kept:  # a Counter would count what `update` is given
                value[key] = held
        return
    now = list(value)
    if len(now) != len(kept) or any(a is not b for a, b in zip(now, kept, strict=True)):
        value.clear()
        if isinstance(value, set):
            value.update(kept)
        else:
            value.extend(kept)


def _names_of(code: types.CodeType) -> Iterator[str]:
    """The global names that a function uses, and the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _module_of(value: Any) -> str:
    """The module in which a function, or the class of an object, was defined."""
    if isinstance(value, functools.partial):
        return _module_of(value.func)
    named = value if isinstance(value, types.FunctionType | types.MethodType) else type(value)
    return str(getattr(named, "__module__", ""))
