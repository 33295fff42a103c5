"""The account of a run adds up, whatever happened to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watch_events import BEGIN, started

from shardway.rundir.events import Event
from shardway.watch.progress import ROW_NAMES, Book, TimeAccount
from shardway.watch.words import ACCOUNT_WORDS, render_account, render_share

ROW_OF = {"validate": "validation_s"}


def make_account(events: Iterable[Event], status: Mapping[str, Any], now: float | None = None) -> TimeAccount | None:
    """The account from every event of rank 0 and the last status."""
    book = Book()
    for each in events:
        book.update(each)
    return book.account(status, now)


@dataclass
class Taken:
    """A step that was taken: by which attempt, how long it took, whether a record tells of it."""

    number: int
    seconds: float
    recorded: bool = False
    holds: bool = True


@dataclass
class World:
    """A run as it happens: it writes what rank 0 would, and keeps its own account, step by step."""

    now: float = BEGIN
    number: int = 0
    events: list[Event] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, float] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROW_NAMES, 0.0))
    taken: list[Taken] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    step: int = 0
    reached: int = 0
    last_sign: float = BEGIN
    last_record: float = BEGIN

    def pass_time(self, activity: str, seconds: float) -> None:
        """Rank 0 is busy."""
        self.now += seconds
        self.spent[activity] = self.spent.get(activity, 0.0) + seconds

    def record(self, **more: Any) -> dict[str, Any]:
        """What is written of the time; from now on it is known."""
        self.recorded, self.last_record = dict(self.spent), self.now
        for step in self.taken:
            step.recorded = True
        return {"spent": dict(self.spent), **more}

    def write(self, name: str, **facts: Any) -> None:
        """An event."""
        self.events.append({"event": name, **facts, "time": self.now})
        self.last_sign = self.now

    def say_status(self) -> None:
        """A status takes the place of the one before."""
        self.status = {"pid": self.number, "host": "n1", "step": self.step, **self.record(), "time": self.now}
        self.last_sign = self.now

    def start(self, plan: dict[str, Any]) -> None:
        """The next attempt begins, from a save or from step 0; its process may have begun before the last one ended."""
        gap = max(plan["gap"], -plan["start"]) if self.number else 0.0
        self.rows["idle_s"] += max(0.0, gap)
        self.rows["start_s"] += min(0.0, gap)
        self.now, self.spent = self.last_sign + gap, {}
        bases = [0, *(save for save in self.saves if save <= self.step)]
        base = bases[-1] if plan["newest"] else bases[plan["which"] % len(bases)]
        self.saves = [save for save in self.saves if save <= base]
        for step in self.taken:
            step.holds = step.holds and step.number <= base
        self.number += 1
        self.step = base
        self.pass_time("start", plan["start"])
        self.pass_time("load", plan["load"])
        before = {"before": self.status} if self.status else {}
        self.write("started", pid=self.number, host="n1", step=base, **before, **self.record())

    def take(self, seconds: tuple[float, float, float], tells: bool) -> None:
        """One step."""
        data, script, work = seconds
        self.pass_time("data", data)
        self.pass_time("script", script)
        self.pass_time("repeat" if self.step < self.reached else "step", work)
        self.step += 1
        self.reached = max(self.reached, self.step)
        self.taken.append(Taken(self.step, work))
        self.write("step", step=self.step)
        if tells:
            self.say_status()

    def do(self, what: str, seconds: float) -> None:
        """Validate or save."""
        self.pass_time(what, seconds)
        if what == "save":
            self.saves.append(self.step)
            self.write("saved", step=self.step, **self.record())
        else:
            self.write("validation", step=self.step)

    def end(self, how: str, seconds: float) -> None:
        """Killed, or failed in the middle of a step, or well."""
        if how == "fault":
            self.pass_time("step", seconds)
            self.rows["lost_s"] += seconds
            self.write("fault", kind="JobError", **self.record(unfinished_s=seconds))
        elif how == "stopped":
            self.pass_time("end", seconds)
            self.write("stopped", step=self.step, **self.record())
        for name, spent in self.recorded.items():
            if name not in ("step", "repeat"):
                self.rows[ROW_OF.get(name, f"{name}_s")] += spent
        self.rows["unaccounted_s"] += self.last_sign - self.last_record
        self.taken = [step for step in self.taken if step.recorded]  # the others are in what is unaccounted

    def true_rows(self) -> dict[str, float]:
        """Each row, counted step by step."""
        rows = dict(self.rows)
        rows["productive_s"] += sum(step.seconds for step in self.taken if step.holds)
        rows["lost_s"] += sum(step.seconds for step in self.taken if not step.holds)
        return rows


eighths = st.integers(0, 40).map(lambda count: count / 8)
acts = st.one_of(
    st.tuples(st.just("step"), st.tuples(eighths, eighths, eighths), st.booleans()),
    st.tuples(st.sampled_from(("save", "validate")), eighths),
)
attempts = st.fixed_dictionaries(
    {
        "gap": st.integers(-16, 400).map(lambda count: count / 8),
        "start": eighths,
        "load": eighths,
        "newest": st.booleans(),
        "which": st.integers(0, 9),
        "acts": st.lists(acts, max_size=8),
        "end": st.tuples(st.sampled_from(("killed", "fault", "stopped")), eighths),
    }
)


def live(plans: list[dict[str, Any]]) -> World:
    """A run of these attempts."""
    world = World()
    for plan in plans:
        world.start(plan)
        for act in plan["acts"]:
            if act[0] == "step":
                world.take(*act[1:])
            else:
                world.do(*act)
        world.end(*plan["end"])
    return world


@given(st.lists(attempts, min_size=1, max_size=5))
def test_every_row_is_what_happened_and_they_add_up_to_the_wall_time(plans: list[dict[str, Any]]) -> None:
    world = live(plans)
    account = make_account(world.events, world.status)
    assert account is not None
    assert account.rows == pytest.approx(world.true_rows(), abs=1e-3)  # dates of today hold some microseconds
    assert account.wall_s == pytest.approx(world.last_sign - BEGIN, abs=1e-3)


@given(st.lists(attempts, min_size=1, max_size=4), eighths)
def test_of_a_run_that_goes_on_the_time_since_its_last_record_is_not_accounted(
    plans: list[dict[str, Any]], later: float
) -> None:
    world = live(plans)
    account = make_account(world.events, world.status, world.last_sign + later)
    assert account is not None
    assert account.wall_s == pytest.approx(world.last_sign + later - BEGIN, abs=1e-3)
    assert account.unaccounted_s == pytest.approx(world.rows["unaccounted_s"] + later, abs=1e-3)


# --- by hand


def spent(**seconds: float) -> dict[str, Any]:
    return {"spent": seconds}


def two_attempts() -> list[Event]:
    """10 steps and a save, 4 more, a death; on from the save 100 s later, 5 steps."""
    return [
        started(at=3.0, pid=1, **spent(start=2.0, load=1.0)),
        {"event": "step", "step": 10, "time": BEGIN + 13.0},
        {"event": "saved", "step": 10, "time": BEGIN + 15.0, **spent(start=2.0, load=1.0, step=10.0, save=2.0)},
        {"event": "step", "step": 14, "time": BEGIN + 19.5},
        started(
            step=10,
            at=122.5,
            pid=2,
            before={
                "pid": 1,
                "host": "n1",
                "step": 14,
                "time": BEGIN + 19.0,
                **spent(start=2.0, load=1.0, step=14.0, save=2.0),
            },
            **spent(start=2.5, load=0.5),
        ),
        {
            "event": "finished",
            "step": 15,
            "time": BEGIN + 127.5,
            **spent(start=2.5, load=0.5, repeat=4.0, step=1.0),
        },
    ]


def test_an_account_by_hand() -> None:
    account = make_account(two_attempts(), {})
    assert account == TimeAccount(
        productive_s=15.0,
        lost_s=4.0,
        start_s=4.5,
        load_s=1.5,
        save_s=2.0,
        idle_s=100.0,
        unaccounted_s=0.5,
        repeated_s=4.0,
        undone_steps=4,
    )
    assert account.wall_s == 127.5
    assert account.productive_share == pytest.approx(15 / 127.5)
    assert render_account(account) == "12 % of 2:03, then between attempts (81 %); start-up 0:04"
    assert account.as_json() == {
        "wall_s": 127.5,
        "productive_share": account.productive_share,
        **account.rows,
        "repeated_s": 4.0,
        "undone_steps": 4,
    }


def test_a_way_back_within_an_attempt_is_an_attempt_of_its_own() -> None:
    """10 steps and a save, 4 more, back to the save in 0.5 s; 5 steps; the status says that one more took 1 s."""
    saved = {"event": "saved", "step": 10, "time": BEGIN + 13.0, **spent(start=2.0, step=10.0, save=1.0)}
    back = {"event": "rolled_back", "step": 10, "time": BEGIN + 17.5, **spent(start=2.0, step=14.0, save=1.0, load=0.5)}
    more = {"start": 2.0, "step": 15.0, "repeat": 4.0, "save": 1.0, "load": 1.5}
    events = [
        started(at=2.0, pid=1, **spent(start=2.0)),
        saved,
        {"event": "step", "step": 14, "time": BEGIN + 17.0},
        back,
        {"event": "step", "step": 15, "time": BEGIN + 23.5},
    ]
    status = {"pid": 1, "host": "n1", "step": 15, "time": BEGIN + 23.5, **spent(**more)}
    account = make_account(events, status)
    assert account == TimeAccount(
        productive_s=15.0, lost_s=4.0, start_s=2.0, load_s=1.5, save_s=1.0, repeated_s=4.0, undone_steps=4
    )
    assert account.wall_s == 23.5


def test_a_status_of_another_process_says_nothing_of_an_attempt() -> None:
    events = two_attempts()
    events[4]["before"] = {**events[4]["before"], "host": "n2"}
    account = make_account(events, {"pid": 3, "host": "n1", "time": BEGIN + 999.0, "step": 20, **spent(step=500.0)})
    assert account is not None
    assert (account.lost_s, account.unaccounted_s, account.productive_s) == (0.0, 4.5, 15.0)


def test_between_two_records_steps_take_equally_long() -> None:
    """Such as of a resume from a checkpoint that nobody recorded."""
    events = [started(pid=1, **spent()), {"event": "stopped", "step": 10, "time": BEGIN + 20, **spent(step=20.0)}]
    again = started(step=4, at=20.0, pid=2, **spent())
    account = make_account([*events, again], {})
    assert account is not None
    assert (account.productive_s, account.lost_s, account.undone_steps) == (8.0, 12.0, 6)


def test_what_a_rank_measured_goes_before_dates() -> None:
    """The clock was set back by an hour during the attempt, and the next host is a minute behind."""
    events = [
        started(pid=1, at=1.0, **spent(start=1.0)),
        {"event": "stopped", "step": 10, "time": BEGIN - 3600, **spent(start=1.0, step=10.0)},
        started(step=10, at=-60.0, pid=2, **spent(start=5.0)),
    ]
    account = make_account(events, {})
    assert account is not None
    assert all(seconds >= 0 for seconds in account.rows.values())


@pytest.mark.parametrize("times", [{}, {"spent": None}, {"spent": {"step": float("inf")}}])
def test_a_run_that_booked_nothing_has_no_account(times: dict[str, Any]) -> None:
    assert make_account([started(**times), {"event": "step", "step": 1, "time": BEGIN + 1}], {}) is None
    assert Book().account({}) is None


def test_an_attempt_without_times_is_not_accounted_for() -> None:
    old = [started(pid=1), {"event": "step", "step": 5, "time": BEGIN + 30.0}]
    new = [started(step=5, at=60.0, pid=2, **spent(start=10.0)), {"event": "step", "step": 6, "time": BEGIN + 61.0}]
    account = make_account([*old, *new], {})
    assert account is not None
    assert (account.unaccounted_s, account.idle_s, account.start_s) == (31.0, 20.0, 10.0)


def test_every_row_has_words() -> None:
    assert tuple(ACCOUNT_WORDS) == ROW_NAMES
    assert [render_share(part, 200.0) for part in (0.0, 1.0, 60.0, 199.0, 200.0)] == (
        ["0 %", "0.5 %", "30 %", "99.5 %", "100 %"]
    )
    assert render_share(1.0, 0.0) == "n/a"


@pytest.mark.parametrize(
    ("account", "says"),
    [
        (TimeAccount(productive_s=100.0), "100 % of 1:40"),
        (TimeAccount(productive_s=5.0, start_s=95.0), "100 % of 0:05; start-up 1:35"),
        (TimeAccount(productive_s=90.0, start_s=0.5, save_s=10.0), "90 % of 1:40, then saving (10 %)"),
        (
            TimeAccount(productive_s=60.0, start_s=30.0, data_s=40.0),
            '60 % of 1:40, then waiting for data (40 %: data.workers = "auto", or more); start-up 0:30',
        ),
        (TimeAccount(productive_s=97.0, data_s=3.0), "97 % of 1:40, then waiting for data (3.0 %)"),
        (TimeAccount(start_s=9.0), "nothing yet; start-up 0:09"),
        (TimeAccount(), "n/a of 0:00"),
    ],
)
def test_start_up_is_no_part_of_the_headline(account: TimeAccount, says: str) -> None:
    assert render_account(account) == says
