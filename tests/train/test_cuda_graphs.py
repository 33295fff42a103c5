"""Which passes are replayed as CUDA graphs, and when that is found out. What a replay computes: `tests/gpu`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from shardway.resolve.rules.formats import find_replay_obstacle
from shardway.runfile.schema import RunFile
from shardway.train import cuda_graphs
from shardway.train.cuda_graphs import TIMED, WARM_UP, GraphedPasses
from shardway.train.loss import class_cross_entropy, token_cross_entropy
from shardway.train.passes import SUMS, Micro


@pytest.mark.parametrize(
    ("section", "keys", "reason"),
    [
        ("train", {}, ""),
        ("train", {"cuda_graphs": False}, "train.cuda_graphs is off"),
        ("train", {"engine": "deepspeed"}, "another engine"),
        ("train", {"deterministic": True}, "train.deterministic"),
        ("parallel", {"dp_replicate": 2}, "several ranks"),
        ("parallel", {"cpu_offload": True}, "host's memory"),
        ("model", {"kind": "convnet"}, "have not been tried"),
        ("model", {"hf": "some/model"}, "have not been tried"),
        ("model", {"dropout": 0.1}, "dropout"),
        ("model", {"experts": 4}, "experts"),
        ("precision", {"compute": "float8"}, "float8"),
        ("precision", {"compute": "fp16"}, "fp16"),
        ("precision", {"compute": "bf16"}, ""),
        ("recompute", {"mode": "full"}, "computed again"),
    ],
)
def test_what_a_host_decides_in_each_pass_is_not_replayed(section: str, keys: Mapping[str, Any], reason: str) -> None:
    found = find_replay_obstacle(RunFile.model_validate({section: dict(keys)}))
    assert reason in found if reason else found == ""


class Event:
    """A CUDA event of a device on which each pass takes `TAKEN_MS`."""

    taken_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return self.taken_ms


@pytest.fixture(name="passes")
def _passes(monkeypatch: pytest.MonkeyPatch) -> GraphedPasses:
    """Passes whose host needs 10 ms; the device's time is that of `Event`."""
    clock = itertools.count()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(cuda_graphs.time, "perf_counter", lambda: 0.01 * next(clock))
    return GraphedPasses(torch.nn.Linear(2, 2), (token_cross_entropy,), lambda text: None)


def micro(rows: int = 2, weight: float = 1.0) -> Micro:
    return Micro((torch.zeros(rows, 3), torch.zeros(rows, 3)), rows, weight, 0, pair=True)


def steps_until_capture(passes: GraphedPasses, steps: int, loss: Callable[..., Any] = token_cross_entropy) -> list[int]:
    """The steps in which passes were to be captured."""
    found = []
    for step in range(steps):
        passes._capture = lambda *_, step=step: bool(found.append(step))  # type: ignore[method-assign,func-returns-value]
        if passes.run([micro()], loss, 1.0, lambda one, sums: None) is None:
            with passes.timing():
                pass
    return found


def test_passes_are_captured_where_the_host_is_slower(passes: GraphedPasses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "taken_ms", 12.0)
    assert steps_until_capture(passes, 8)[:1] == [WARM_UP + TIMED]


def test_passes_of_a_busy_device_are_left_alone(passes: GraphedPasses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "taken_ms", 100.0)
    assert steps_until_capture(passes, 12) == []
    assert passes._is_off


def test_a_loss_of_a_script_is_not_captured(passes: GraphedPasses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "taken_ms", 12.0)
    assert steps_until_capture(passes, 12, class_cross_entropy) == []


def test_what_cannot_be_captured_is_said_and_run_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    passes = GraphedPasses(torch.nn.Linear(2, 2), (token_cross_entropy,), said.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "first")
    streams: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might ...")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    assert not passes._capture([micro()], 1.0, lambda one, sums: None)
    assert said == ["passes are not captured as CUDA graphs: operation not permitted when stream is capturing"]
    assert streams == ["first"]
    assert passes.run([micro()], token_cross_entropy, 1.0, lambda one, sums: None) is None


def test_other_micro_batches_than_those_of_the_graphs_do_not_fit() -> None:
    first: Any = object()
    known = cuda_graphs._Captured(first, None, micro(), 0.5, torch.zeros(SUMS), (), ())
    assert known.fits([micro()], 0.5)
    assert not known.fits([micro()], 0.25)
    assert not known.fits([micro(3)], 0.5)
    assert not known.fits([micro(), micro()], 0.5), "the second would replace the gradients of the first"
    assert not known.fits([micro(weight=0.0)], 0.5)
