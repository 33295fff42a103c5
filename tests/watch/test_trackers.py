"""What trackers are handed, and that none of them slows or ends a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from installed_packages import Install, installing
from shardway.rundir.directory import RunDir
from shardway.watch.trackers import base
from shardway.watch.trackers.base import TrackerThread, values_of

CODE = """
from shardway.watch.trackers.base import Tracker

class Noted(Tracker):
    settings = {"fails": "", "waits": 0.0}
    calls = []
    gate = None

    def start(self, name, directory, configuration, id):
        return self._note("start", name, id) or f"{self.given['waits']}-id"

    def rewind(self, step):
        self._note("rewind", step)

    def log(self, step, values, time):
        self._note("log", step, values, time)

    def finish(self, state):
        self._note("finish", state)

    def _note(self, *call):
        if self.given["waits"] and call[0] == "log":
            type(self).gate.wait()
        if call[0] == self.given["fails"]:
            raise ConnectionError("no way there")
        type(self).calls.append(call)
"""
STEP = {"event": "step", "step": 1, "loss": 2.0, "time": 7.0}


@pytest.fixture
def tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrackerThread]]:
    """Starts a thread with the tracker above; `made.calls` are those of its class."""
    packages = installing(tmp_path, monkeypatch)
    install: Install = next(packages)
    names = {"noted": "noted_module:Noted", "second": "noted_module:Noted"}
    install("shardway-noted", {"shardway.trackers": names}, noted_module=CODE)
    run = RunDir(tmp_path / "run")
    run.create()

    def make(*names: str, **settings: Any) -> TrackerThread:
        return TrackerThread(run, list(names or ("noted",)), {"noted": settings}, {"a": {"b": 1}})

    yield make
    packages.close()


def calls() -> list[tuple[Any, ...]]:
    import noted_module

    return noted_module.Noted.calls


def test_a_tracker_is_handed_what_is_recorded(tracker: Callable[..., TrackerThread], tmp_path: Path) -> None:
    thread = tracker()
    events = [
        {"event": "started", "step": 0, "world": 2},
        {**STEP, "ids": [3], "skipped": 0, "losses": {"a": 1.0}},
        {"event": "saved", "step": 1, "seconds": 0.1},
        {"event": "logged", "step": 1, "values": {"accuracy": 0.5}, "time": 8.0},
        {"event": "validation", "step": 1, "loss": 3.0, "best": True, "time": 9.0},
        {"event": "rolled_back", "step": 0},
        {"event": "finished", "step": 1, "reason": "all"},
        {"event": "finished", "step": 1, "reason": "all"},
    ]
    for event in events:
        thread.take(event)
    thread.close()
    assert calls() == [
        ("start", "run", None),
        ("rewind", 0),
        ("log", 1, {"loss": 2.0, "losses/a": 1.0}, 7.0),
        ("log", 1, {"accuracy": 0.5}, 8.0),
        ("log", 1, {"validation/loss": 3.0}, 9.0),
        ("rewind", 0),
        ("finish", "finished"),
    ]
    assert list(thread.take_failures()) == []
    assert json.loads((tmp_path / "run/trackers.json").read_text())["ids"] == {"noted": "0.0-id"}


def test_the_next_attempt_goes_on_under_the_same_id(tracker: Callable[..., TrackerThread]) -> None:
    for _ in range(2):
        thread = tracker()
        thread.take({"event": "started", "step": 0})
        thread.close()
    assert calls() == [("start", "run", None), ("rewind", 0), ("start", "run", "0.0-id"), ("rewind", 0)]


@pytest.mark.parametrize("fails", ["start", "rewind", "log"])
def test_one_that_raises_is_switched_off_once(tracker: Callable[..., TrackerThread], fails: str) -> None:
    thread = tracker("noted", "second", fails=fails)
    for step in range(3):
        thread.take({"event": "started", "step": 0} if not step else {**STEP, "step": step})
    thread._waiting.put(None)
    if thread._thread is not None:
        thread._thread.join()
    reason = "is switched off for this attempt: ConnectionError: no way there"
    assert list(thread.take_failures()) == [{"tracker": "noted", "reason": reason}]
    assert [call[1] for call in calls() if call[0] == "log"] == [1, 2]  # the other goes on


def test_one_that_fails_at_the_end_is_a_warning(
    tracker: Callable[..., TrackerThread], capsys: pytest.CaptureFixture[str]
) -> None:
    thread = tracker(fails="finish")
    thread.take({"event": "finished", "step": 1})
    thread.close()
    assert calls() == [("start", "run", None)]
    assert "the tracker noted is switched off" in capsys.readouterr().err


def test_a_slow_one_never_holds_the_run(tracker: Callable[..., TrackerThread], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MOST_WAITING", 5)
    monkeypatch.setattr(base, "END_S", 0.05)
    thread = tracker(waits=1.0)
    import noted_module

    noted_module.Noted.gate = gate = threading.Event()
    started = time.perf_counter()
    for step in range(1000):
        thread.take({**STEP, "step": step})
    assert time.perf_counter() - started < 1.0
    worker = thread._thread
    [failure] = thread.take_failures()
    assert failure == {"tracker": "noted", "reason": "is too slow: some values are left out"}
    thread.close()
    assert time.perf_counter() - started < 2.0
    gate.set()
    assert worker is not None
    worker.join(10)


@pytest.mark.parametrize(
    ("event", "values"),
    [
        ({"event": "saved", "step": 3, "bytes": 7}, {}),
        ({"event": "step", "step": 3, "loss": float("nan")}, {"loss"}),
        ({"event": "step", "step": 3, "loss": 1, "lr": 1e-3, "skipped": 2, "ids": [1], "position": 8}, {"loss", "lr"}),
    ],
)
def test_which_numbers_are_tracked(event: dict[str, Any], values: set[str]) -> None:
    assert set(values_of(event)) == set(values)


def test_a_damaged_file_of_ids_begins_anew(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for text in ("", "[]", '{"ids": 3}', "{"):
        (tmp_path / "trackers.json").write_text(text)
        assert run.read_tracked() == {}
    run.write_tracked({"a": "b"})
    assert run.read_tracked() == {"a": "b"}
