"""What a rank tells the monitor of ft_launcher, and when; the monitor is one that remembers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardway.errors import SiteError
from shardway.ranks.ft_launcher_client import ANSWER_S, MonitorHeartbeat, open_monitor
from shardway.ranks.hang import HangTimeout
from shardway.ranks.heartbeat import Activity, Progress

BEAT = "beat"


@dataclass
class Heard:
    """A client as `RankMonitorClient` is one; `said` has "beat" and limits in seconds."""

    said: list[Any] = field(default_factory=list)
    gone: bool = False
    answer_s: float | None = None

    @property
    def hb_timeouts(self) -> Any:
        """What ft_launcher was told: while starting, and between two heartbeats."""
        return SimpleNamespace(initial=300.0, subsequent=9.0)

    @property
    def rank_monitor_socket(self) -> Any:
        """As much of a socket as is used."""
        return SimpleNamespace(settimeout=lambda seconds: setattr(self, "answer_s", seconds))

    def init_workload_monitoring(self) -> None:
        """Connect."""
        self._say("connected")

    def send_heartbeat(self) -> None:
        """A beat."""
        self._say(BEAT)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """New limits, the same for the first heartbeat and for others."""
        limits = state["current_timeouts"]["heartbeat"]
        assert limits["initial"] == limits["subsequent"]
        self._say(limits["subsequent"])

    def shutdown_workload_monitoring(self) -> None:
        """No more."""
        self.said.append("closed")

    def _say(self, what: Any) -> None:
        if self.gone:
            raise ConnectionError("[Errno 32] Broken pipe\nand more")
        self.said.append(what)

    def hear(self) -> list[Any]:
        """What was said since the last time."""
        said, self.said = self.said, []
        return said


@pytest.fixture
def heard() -> Heard:
    return Heard()


def watched(heard: Heard, fixed_s: float | None = None) -> MonitorHeartbeat:
    """A heartbeat whose start was said."""
    heartbeat = MonitorHeartbeat(heard)
    heartbeat.watch(HangTimeout(600.0, fixed_s))
    heard.hear()
    return heartbeat


def test_a_rank_beats_at_once_and_waits_as_long_as_the_launcher_was_told(heard: Heard) -> None:
    heartbeat = MonitorHeartbeat(heard)
    assert heard.hear() == [BEAT, 300.0]
    heartbeat.watch(HangTimeout(600.0, 5.0))
    assert heard.hear() == [BEAT, 601.0]


def test_steps_beat_once_a_second_and_what_is_rare_at_once(heard: Heard) -> None:
    heartbeat = watched(heard, 5.0)
    heartbeat.write(Activity.LOAD, 0, 10.0)
    assert heard.hear() == [BEAT]
    for number in range(20):
        heartbeat.write((Activity.DATA, Activity.STEP)[number % 2], number // 2, 10.0 + number / 10)
    assert heard.hear() == [BEAT, 6.0, BEAT]
    heartbeat.write(Activity.SAVE, 10, 12.1)
    heartbeat.write(Activity.DATA, 10, 12.2)
    heartbeat.write(Activity.STEP, 10, 12.3)
    heartbeat.write(Activity.END, 10, 12.4)
    assert heard.hear() == [BEAT, BEAT, BEAT, 601.0]


def test_limits_are_learnt_by_activity(heard: Heard) -> None:
    heartbeat, now = watched(heard), 10.0
    for step in range(20):
        for activity, seconds in ((Activity.DATA, 0.5), (Activity.STEP, 2.0), (Activity.SAVE, 10.0)):
            heartbeat.write(activity, step, now)
            now += seconds
    heard.hear()
    heartbeat.write(Activity.DATA, 20, now)
    assert heard.hear() == [BEAT, 1.0 + 3 * 0.5 + 5.0 + 60.0], "steps and data together"
    heartbeat.write(Activity.SAVE, 20, now + 1)
    assert heard.hear() == [BEAT, 1.0 + 3 * 10.0 + 5.0 + 60.0]


def test_the_first_steps_have_the_timeout_of_a_start(heard: Heard) -> None:
    heartbeat = watched(heard)
    for step, now in enumerate((10.0, 20.0, 30.0, 40.0, 50.0, 60.0)):
        heartbeat.write(Activity.STEP, step, now)
    limits = [said for said in heard.hear() if said != BEAT]
    assert limits == [1.0 + 3 * 10.0 + 5.0], "once three steps are known that were not the first"


def test_a_limit_that_hardly_falls_is_left(heard: Heard) -> None:
    heartbeat = watched(heard)
    heard.said.clear()
    for step in range(300):
        heartbeat.write(Activity.STEP, step, 10.0 + step * (2.0 if step < 100 else 1.9))
    assert [said for said in heard.hear() if said != BEAT] == [1.0 + 3 * 2.0 + 5.0]


def test_training_goes_on_without_its_monitor(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("shardway"), "warning", lambda text, *words: told.append(text % words))
    progress = Progress(watched(heard))
    heard.gone = True
    for step in range(3):
        progress.enter(Activity.SAVE, step)
    assert told == ["the monitor of ft_launcher does not answer, this rank is not watched: [Errno 32] Broken pipe"]
    assert progress.activity is Activity.SAVE
    assert heard.hear() == ["closed"], "a monitor that was only slow would end the rank"


def test_off_is_said_by_leaving(heard: Heard) -> None:
    heartbeat = MonitorHeartbeat(heard)
    heartbeat.watch(None)
    heartbeat.write(Activity.STEP, 0, 10.0)
    assert heard.hear() == [BEAT, 300.0, "closed"]


def install(monkeypatch: pytest.MonkeyPatch, heard: Heard) -> None:
    """A package that connects to it."""
    package = ModuleType("nvidia_resiliency_ext.fault_tolerance")
    package.RankMonitorClient = lambda: heard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", ModuleType("nvidia_resiliency_ext"))
    monkeypatch.setitem(sys.modules, package.__name__, package)


def test_a_rank_connects_to_its_monitor(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, heard)
    assert open_monitor() is not None
    assert (heard.hear(), heard.answer_s) == (["connected", BEAT, 300.0], ANSWER_S)


def test_a_monitor_that_is_gone_at_the_start_is_told(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, heard)
    heard.gone = True
    assert open_monitor() is None


def test_a_rank_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    with pytest.raises(SiteError, match="pip install nvidia-resiliency-ext"):
        open_monitor()
