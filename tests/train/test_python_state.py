"""What functions and modules of a script keep in Python objects is put back."""

from __future__ import annotations

import functools
import random
from collections import Counter, deque
from typing import Any

import numpy as np
import torch
from torch import nn

from shardway.train.loss_probe import PythonState

CALLS: list[int] = []
COUNT = 0


def by_globals() -> tuple[Any, Any]:
    def call() -> None:
        global COUNT
        COUNT += 1
        CALLS.append(COUNT)

    return call, lambda: (COUNT, list(CALLS))


def by_closure() -> tuple[Any, Any]:
    count, seen, named = 0, deque([1]), Counter("a")

    def call() -> None:
        nonlocal count
        count += 1
        seen.append(count)
        named["b"] += 1

    return call, lambda: (count, list(seen), dict(named))


class Meter:
    """A loss that counts."""

    def __init__(self) -> None:
        self.count, self.history, self.rng = 0, {"deep": [set()]}, np.random.default_rng(1)
        self.torch, self.python = torch.Generator().manual_seed(2), random.Random(3)

    def __call__(self) -> None:
        self.count += 1
        self.history["deep"][0].add((self.count, self.rng.random(), self.python.random()))
        torch.rand(1, generator=self.torch)

    def read(self) -> Any:
        states = self.rng.bit_generator.state, self.torch.get_state().tolist(), self.python.getstate()
        return self.count, sorted(self.history["deep"][0]), states


def by_object() -> tuple[Any, Any]:
    meter = Meter()
    return meter, meter.read


def by_method() -> tuple[Any, Any]:
    meter = Meter()
    return functools.partial(meter.__call__), meter.read


def by_attribute() -> tuple[Any, Any]:
    def call() -> None:
        call.count += 1  # type: ignore[attr-defined]

    call.count = 0  # type: ignore[attr-defined]
    return call, lambda: call.count  # type: ignore[attr-defined]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.calls, self.shapes = 0, []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self) -> None:
        self.calls += 1
        self.shapes.append(self.calls)


def by_module() -> tuple[Any, Any]:
    model = nn.Sequential(Counting())
    return model[0], lambda: (model[0].calls, list(model[0].shapes))


def by_hook() -> tuple[Any, Any]:
    model, seen = nn.Linear(1, 1), []
    model.register_forward_pre_hook(lambda *arguments: seen.append(len(seen)))
    Holder.model = model
    return Holder(), lambda: list(seen)


class Holder(nn.Module):
    model: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.model

    def forward(self) -> torch.Tensor:
        return self.inner(torch.zeros(1))


def by_class() -> tuple[Any, Any]:
    own = torch.Generator().manual_seed(1)

    class Noisy(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.rand(1, generator=own)

    return Noisy(), lambda: own.get_state().tolist()


def test_everything_is_put_back() -> None:
    for make in (by_globals, by_closure, by_object, by_method, by_attribute, by_module, by_hook, by_class):
        call, read = make()
        call()
        before = read()
        state = PythonState(call)
        call()
        call()
        assert read() != before, make
        state.put_back()
        assert read() == before, make
        call()
        assert read() != before, make
