"""Which passes are replayed as CUDA graphs, and when that is found out. What a replay computes: `tests/gpu`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
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


class Clock:
    """Milliseconds that passes take on a device: of the host, one by one, and replayed."""

    host_ms, one_by_one_ms, replayed_ms = 10.0, 12.0, 2.0


class Event:
    """A CUDA event of a device that takes what `Clock` says."""

    is_replay = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self._taken_ms = Clock.replayed_ms if Event.is_replay else Clock.one_by_one_ms

    def record(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return self._taken_ms


class Graph:
    """Counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


GIB = 2**30


@pytest.fixture(name="said")
def _said() -> list[str]:
    return []


@pytest.fixture(name="passes")
def _passes(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> GraphedPasses:
    clock = itertools.count()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=8 * GIB))
    monkeypatch.setattr(cuda_graphs.time, "perf_counter", lambda: Clock.host_ms / 1e3 * next(clock))
    return GraphedPasses(torch.nn.Linear(2, 2), (token_cross_entropy,), said.append)


def micro(rows: int = 2, weight: float = 1.0) -> Micro:
    return Micro((torch.zeros(rows, 3), torch.zeros(rows, 3)), rows, weight, 0, pair=True)


def run_steps(
    passes: GraphedPasses,
    steps: int,
    micros: Sequence[Micro] = (micro(),),
    loss: Callable[..., Any] = token_cross_entropy,
) -> list[int]:
    """The steps whose passes were replayed, after `steps` of them."""
    graphs: list[Any] = [Graph(), Graph()]
    addresses = passes._list_addresses()

    def capture(*_: Any) -> bool:
        further = graphs[1] if len(micros) > 1 else None
        passes._captured = cuda_graphs._Captured(graphs[0], further, micros[0], 1.0, torch.zeros(SUMS), (), addresses)
        return True

    passes._capture = capture  # type: ignore[method-assign]
    replayed = []
    for step in range(steps):
        Event.is_replay = passes._captured is not None or len(passes._host) == TIMED
        found = passes.run(micros, loss, 1.0, lambda one, sums: None)
        Event.is_replay = False
        if found is None:
            with passes.timing():
                pass
        else:
            replayed.append(step)
    assert sum(graph.replays for graph in graphs) == len(replayed) * len(micros)
    return replayed


@pytest.mark.parametrize("number", [1, 3])
def test_passes_are_replayed_where_the_host_is_slower(number: int, passes: GraphedPasses, said: list[str]) -> None:
    assert run_steps(passes, 14, [micro()] * number) == list(range(WARM_UP + TIMED, 14))
    assert said == ["passes are replayed as CUDA graphs: 2.0 ms a step, one by one 12.0 ms"]


def test_passes_of_a_busy_device_are_left_alone(
    passes: GraphedPasses, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "one_by_one_ms", 100.0)
    assert run_steps(passes, 12) == []
    assert said == []


def test_replays_that_are_no_shorter_end(
    passes: GraphedPasses, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the host waited for a device that had enough to do."""
    monkeypatch.setattr(Clock, "replayed_ms", 11.9)
    assert run_steps(passes, 14) == list(range(WARM_UP + TIMED, WARM_UP + 2 * TIMED))
    assert (said, passes._captured) == ([], None)


def test_a_device_without_memory_for_both_is_left_alone(passes: GraphedPasses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * GIB)
    assert run_steps(passes, 12) == []


def test_uneven_micro_batches_are_run_one_by_one(passes: GraphedPasses) -> None:
    assert run_steps(passes, 12, [micro(3), micro(3), micro(4)]) == []
    assert passes._captured is None


def test_weights_that_have_moved_are_captured_again(passes: GraphedPasses) -> None:
    run_steps(passes, 10)
    passes.model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    before = passes._captured
    assert run_steps(passes, 2) == [0, 1]
    assert passes._captured is not before


def test_a_loss_of_a_script_is_not_captured(passes: GraphedPasses) -> None:
    assert run_steps(passes, 12, loss=class_cross_entropy) == []


def test_what_cannot_be_captured_is_said_and_run_as_before(
    passes: GraphedPasses, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might ...")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    assert not passes._capture([micro()], 1.0, lambda one, sums: None)
    assert said == ["passes are not captured as CUDA graphs: operation not permitted when stream is capturing"]
    assert streams == [stream]
    assert passes.run([micro()], token_cross_entropy, 1.0, lambda one, sums: None) is None


def test_other_micro_batches_than_those_of_the_graphs_do_not_fit() -> None:
    first: Any = object()
    known = cuda_graphs._Captured(first, None, micro(), 0.5, torch.zeros(SUMS), (), ())
    assert known.fits([micro()], 0.5)
    assert not known.fits([micro()], 0.25)
    assert not known.fits([micro(3)], 0.5)
    assert not known.fits([micro(), micro()], 0.5), "the second would replace the gradients of the first"
    assert not known.fits([micro(weight=0.0)], 0.5)


def test_a_batch_that_has_grown_is_captured_again(passes: GraphedPasses) -> None:
    """Once several steps in a row have shown it; one that is alone is run one by one."""
    run_steps(passes, 10)
    assert run_steps(passes, 1, [micro(3)]) == []
    assert passes.run([micro()], token_cross_entropy, 1.0, lambda one, sums: None) is not None
    assert run_steps(passes, 6, [micro(3)]) == list(range(cuda_graphs.MISFITS - 1, 6))
