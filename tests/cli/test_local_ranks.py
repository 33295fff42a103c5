"""What the process that started local ranks makes of how they ended. The ranks themselves are played here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Shardway
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.cli.options import print_line
from shardway.cli.rank import read_packed
from shardway.errors import Bug, Fenced, JobError, LateStop, ShardwayError, SiteError, UserError
from shardway.ranks import failure, supervisor
from shardway.ranks.evidence import HangEvidence
from shardway.ranks.failure import LaunchOutcome, RankFailure, has_come_to_its_end
from shardway.ranks.hang import Hang, HangTimeout, Sighting
from shardway.ranks.heartbeat import Activity, HeartbeatEntry
from shardway.ranks.local import LocalLaunch, RankAssignment, WarmStandby
from shardway.ranks.supervisor import NodeGroup, build_launch, pack_request, train_local
from shardway.resolve.request import ResolveRequest, resolve_request
from shardway.rundir.attempts import Ending
from shardway.rundir.directory import RunDir

LOST = "rank 0 lost contact with another rank in step 5"


@dataclass
class Play:
    """What the ranks do instead of training: the faults that they record, their failures, what else."""

    faults: dict[int, tuple[str, str]] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)
    also: Callable[[RunDir, Callable[[], None]], Any] = lambda run, on_stop: None
    launch: LocalLaunch | None = None
    starts: int = 0
    begins: bool = True
    """Whether the run goes on before that happens."""

    def __call__(self, launch: LocalLaunch, on_stop: Callable[[], None], *further: object) -> list[RankFailure]:
        self.launch = replace(launch, heartbeats=None)
        self.starts += 1
        run = RunDir(launch.log_folder.parent)
        run.create()
        launch.log_folder.mkdir(exist_ok=True)
        if self.begins:
            with run.event_writer(0) as events:
                events.write("started", step=0)
        for rank, (kind, message) in self.faults.items():
            if self.begins:
                with run.event_writer(rank) as events:
                    events.write("fault", kind=kind, message=message)
            else:
                run.write_setup_fault(rank, {"kind": kind, "message": message})
        self.also(run, on_stop)
        return self.failures


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "a")
    run.create()
    return run


def train(run: RunDir, play: Play, monkeypatch: pytest.MonkeyPatch, **request: Any) -> dict[str, Any]:
    monkeypatch.setattr(supervisor, "run_local", play)
    words = ("run.max_restarts=0", *request.pop("overrides", ()))
    resolution = resolve_request(ResolveRequest(directory=run.path, overrides=words, **request), 2, 2)
    return train_local(resolution, build_launch(resolution, 2), NodeGroup(2, WarmStandby(None), print_line))


def failing(run: RunDir, play: Play, monkeypatch: pytest.MonkeyPatch) -> ShardwayError:
    with pytest.raises(ShardwayError) as told:
        train(run, play, monkeypatch)
    return told.value


def exited(*ranks: int, code: int = 4, printed: tuple[Path, ...] = ()) -> list[RankFailure]:
    return [RankFailure(rank, 1000 + rank, code, printed) for rank in ranks]


def test_ranks_that_end_well(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(run: RunDir, on_stop: Callable[[], None]) -> None:
        run.write_status(state="finished", reason="all steps are done", step=5)

    assert train(run, Play(also=finish), monkeypatch) == {
        "directory": str(run.path),
        "state": "finished",
        "reason": "all steps are done",
        "step": 5,
        "restarts": 0,
    }


def test_what_is_started(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    train(run, play, monkeypatch, overrides=("run.threads=3",))
    assert play.launch == LocalLaunch(
        ranks=2,
        module="shardway.cli.rank",
        arguments=[pack_request(ResolveRequest(directory=run.path, overrides=("run.max_restarts=0", "run.threads=3")))],
        log_folder=run.path / "logs",
        threads=3,
        stop_path=run.stop_path,
        stop_timeout_s=900.0,
        telemetry_s=1.0,
    )


def test_a_fresh_start_keeps_its_own_output(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old run is moved before the ranks start to print."""
    run.write_status(state="finished", step=9)
    play = Play()
    train(run, play, monkeypatch, fresh=True)
    assert RunDir(run.path.with_name("a.old-1")).read_status()["step"] == 9
    assert (run.path / "logs").is_dir()
    assert play.launch is not None
    assert play.launch.arguments == [
        pack_request(ResolveRequest(directory=run.path, overrides=("run.max_restarts=0",)))
    ]


# --- who is to blame


@pytest.mark.parametrize("kind", [UserError, SiteError, JobError])
def test_an_error_that_all_ranks_agree_on_is_told_as_on_one_rank(
    kind: type[ShardwayError], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failing(run, Play({0: (kind.__name__, "what"), 1: (kind.__name__, "what")}, exited(0, 1)), monkeypatch)
    assert (type(error), str(error)) == (kind, "what")


def test_the_rank_with_an_error_of_its_own_is_to_blame(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {0: ("LostContact", LOST), 1: ("JobError", "its file is gone")}
    error = failing(run, Play(faults, exited(0, 1)), monkeypatch)
    assert (type(error), str(error)) == (JobError, "rank 1: its file is gone")


def test_where_all_lost_contact_the_first_of_them_speaks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {0: ("LostContact", LOST), 1: ("LostContact", "rank 1 lost contact")}
    assert str(failing(run, Play(faults, exited(0, 1)), monkeypatch)) == f"rank 0: {LOST}"


def test_a_rank_that_was_killed_is_to_blame(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play({0: ("LostContact", LOST)}, [*exited(0), RankFailure(1, 4711, -9)])
    tail = "If that signal was not sent on purpose, the machine may have run out of memory (dmesg says so)."
    head = "rank 1 (process 4711) was ended by SIGKILL; the other ranks were ended with it.\n  To do: run the same "
    error = failing(run, play, monkeypatch)
    assert type(error) is JobError
    assert str(error) == f"{head}command again: it goes on from the start, since nothing was saved yet. {tail}"
    run.checkpoint_path(40).mkdir()
    error = failing(run, play, monkeypatch)
    assert str(error) == f"{head}command again: it goes on from the checkpoint of step 40. {tail}"


def test_a_fault_of_an_earlier_start_explains_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with run.event_writer(1) as events:
        events.write("fault", kind="UserError", message="long ago")
    assert str(failing(run, Play(failures=exited(1, code=17)), monkeypatch)) == "rank 1 ended with exit code 17."


def test_what_a_rank_printed_is_named_where_nothing_else_explains(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run.path / "stderr.log"
    printed.write_text("Segmentation fault")
    where = f"\n  What it printed is in {printed}"
    unexplained = failing(run, Play(failures=exited(1, code=17, printed=(printed,))), monkeypatch)
    assert str(unexplained) == f"rank 1 ended with exit code 17.{where}"
    defect = failing(run, Play({1: ("Bug", "KeyError: 3")}, exited(1, code=70, printed=(printed,))), monkeypatch)
    assert (type(defect), str(defect)) == (Bug, f"KeyError: 3{where}")


def test_a_rank_that_could_not_write_events_speaks_by_what_it_printed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run.path / "stderr.log"
    printed.write_text("a warning\nshardway: no checkpoint is whole:\n  step 20: a file is missing\n")
    error = failing(run, Play(failures=exited(1, code=4, printed=(printed,))), monkeypatch)
    assert (type(error), str(error)) == (JobError, "no checkpoint is whole:\n  step 20: a file is missing")
    unknown = failing(run, Play(failures=exited(1, code=17, printed=(printed,))), monkeypatch)
    assert str(unknown).startswith("rank 1 ended with exit code 17.")


def test_an_error_of_an_unknown_kind_is_a_job_error(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(failing(run, Play({1: ("NewError", "what")}, exited(1)), monkeypatch)) is JobError


# --- whether they start again

AGAIN = ("run.max_restarts=auto",)
KILLED = RankFailure(1, 4711, -9)


def saving(*steps: int) -> Callable[[RunDir, Callable[[], None]], None]:
    """At each start the next of these steps is saved, if it is new."""
    left = iter(steps)

    def save(run: RunDir, on_stop: Callable[[], None]) -> None:
        run.checkpoint_path(next(left)).mkdir(exist_ok=True)

    return save


def test_ranks_that_fail_start_again_while_checkpoints_get_newer(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(failures=[KILLED], also=saving(10, 20, 30, 30))
    with pytest.raises(JobError) as told:
        train(run, play, monkeypatch, overrides=AGAIN)
    assert play.starts == 4
    assert str(told.value).endswith(
        "\n  The ranks were started 4 times; it is not started again: the same failure came twice with step 30 as "
        "the last that was saved."
    )
    restarts = [event for event in run.all_events(0) if event["event"] == "restarted"]
    assert [(event["step"], event["failures"]) for event in restarts] == [(10, 1), (20, 2), (30, 3)]
    assert restarts[0]["reason"].startswith("rank 1 (process 4711) was ended by SIGKILL")


def test_ranks_that_fail_while_their_file_system_is_away_start_again_once_it_answers(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ended them is read once it can be."""
    looks = iter([False, False, False, True, *[True] * 20])
    monkeypatch.setattr(supervisor, "answers", lambda path: next(looks))
    monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 0.0)
    play = well_the_second_time()
    assert train(run, play, monkeypatch, overrides=AGAIN)["restarts"] == 1
    assert f"the file system of {run.path} is away; waiting 10m for it" in capsys.readouterr().err
    assert next(looks), "it was asked more often than it took"


def well_the_second_time() -> Play:
    """A rank is killed, and the next start comes to the end."""
    play = Play(failures=[KILLED])

    def finish(run: RunDir, on_stop: Callable[[], None]) -> None:
        if play.starts == 2:
            play.failures = []
            run.write_status(state="finished", reason="all steps are done", step=5)

    play.also = finish
    return play


def test_ranks_that_end_well_the_second_time(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play = well_the_second_time()
    ended = train(run, play, monkeypatch, overrides=AGAIN)
    assert (ended["state"], ended["restarts"]) == ("finished", 1)


@pytest.mark.parametrize("kind", ["UserError", "SiteError"])
def test_what_a_person_has_to_change_is_not_tried_again(
    kind: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play({0: (kind, "what")}, exited(0, 1))
    with pytest.raises(ShardwayError, match=r"^what$"):
        train(run, play, monkeypatch, overrides=AGAIN)
    assert play.starts == 1


@pytest.mark.parametrize(("code", "kind"), [(2, UserError), (3, SiteError), (4, JobError), (17, JobError)])
def test_an_exit_code_says_whose_mistake_it_was(
    code: int, kind: type[ShardwayError], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(failing(run, Play(failures=exited(1, code=code)), monkeypatch)) is kind


def test_nothing_starts_again_after_a_stop_was_asked_for(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(failures=[KILLED], also=lambda run, on_stop: on_stop())
    with pytest.raises(JobError):
        train(run, play, monkeypatch, overrides=AGAIN)
    assert play.starts == 1


def test_a_job_hears_how_it_ended_once_the_ranks_do_not_start_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure after which they do is no end of the attempt; memory that ran out is told as such."""
    folder = run.path / "attempts/0001"
    folder.mkdir(parents=True)
    monkeypatch.setenv("SHARDWAY_ATTEMPT_DIR", str(folder))
    told: list[object] = []

    def look(run: RunDir, on_stop: Callable[[], None]) -> None:
        told.append(run.attempt(1).read_result())
        with run.event_writer(1) as events:
            events.write("fault", kind="JobError", message="no memory is left", out_of_memory=True)

    with pytest.raises(JobError):
        train(run, Play(failures=exited(1), also=look), monkeypatch, overrides=AGAIN)
    assert told == [None, None]
    result = run.attempt(1).read_result()
    assert result is not None
    assert (result.state, result.by) == (Ending.OUT_OF_MEMORY, "rank 1")


def test_a_job_hears_of_a_good_end_from_the_agent(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of rank 0; those of a start after which ranks started again do not count."""
    folder = run.path / "attempts/0001"
    folder.mkdir(parents=True)
    monkeypatch.setenv("SHARDWAY_ATTEMPT_DIR", str(folder))
    play = Play(failures=[KILLED])

    def act(run: RunDir, on_stop: Callable[[], None]) -> None:
        with run.event_writer(0) as events:
            if play.starts == 1:
                events.write("fault", kind="JobError", message="the loss is not finite")
                return
            play.failures = []
            run.write_status(state="stopped", reason="time is up", step=5)
            events.write("stopped", step=5, reason="time is up", ending="deadline")

    play.also = act
    train(run, play, monkeypatch, overrides=AGAIN)
    result = run.attempt(1).read_result()
    assert result is not None
    assert (result.state, result.reason, result.step, result.exit_code, result.failure, result.by) == (
        *(Ending.DEADLINE, "time is up", 5, 0, "", "rank 0"),
    )


@pytest.mark.parametrize("name", ["stopped", "finished"])
def test_who_fails_after_the_end_of_the_run_starts_nothing_again(
    name: str, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library that crashed while a rank left had its run, which somebody had stopped, train on for ever."""
    play = Play(failures=[RankFailure(1, 4711, -6)], begins=False)

    def act(run: RunDir, on_stop: Callable[[], None]) -> None:
        with run.event_writer(0) as events:
            events.write("started", step=0)
            run.write_status(state=name, reason="the stop file asked for a stop", step=5)
            events.write(name, step=5, reason="the stop file asked for a stop", ending=name)

    play.also = act
    outcome = train(run, play, monkeypatch, overrides=AGAIN)
    assert (play.starts, outcome["state"], outcome["step"], outcome["restarts"]) == (1, name, 5, 0)
    said = "rank 1 (process 4711) was ended by SIGABRT after the run had come to its end; nothing of it is lost\n"
    assert capsys.readouterr().err == said


def test_the_end_of_an_earlier_start_excuses_nobody(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with run.event_writer(0) as events:
        events.write("stopped", step=5, reason="the stop file asked for a stop", ending="stopped")
    assert "was ended by SIGKILL" in str(failing(run, Play(failures=[KILLED]), monkeypatch))


LATE = LaunchOutcome(lost=("node 1 (10.0.0.2)",))
STOP = {"step": 5, "reason": "the stop file asked for a stop", "ending": "stopped"}
SIGNAL = {"step": 5, "reason": "a signal asked rank 1 for a stop", "ending": "stopped", "failure": "signal"}
SECOND = {"step": 5, "reason": "a second signal ended the run at once", "ending": "stopped"}


@pytest.mark.parametrize(
    ("ended", "events", "is_over"),
    [
        (LaunchOutcome((KILLED,)), [("started", {}), ("stopped", STOP)], True),
        (LaunchOutcome((KILLED,)), [("started", {}), ("stopped", SIGNAL)], True),
        (LaunchOutcome((KILLED,)), [("started", {}), ("stopped", SECOND)], False),
        (LaunchOutcome((KILLED,)), [("started", {})], False),
        (LaunchOutcome((KILLED,)), [("started", {}), ("started", {}), ("stopped", STOP)], False),
        (LATE, [("started", {}), ("stopped", STOP)], True),
        (LATE, [("started", {}), ("finished", {"step": 5})], True),
        (LATE, [("started", {}), ("stopped", SIGNAL)], False),
    ],
    ids=[
        *("stopped", "stopped by a signal", "without a save", "in its middle", "another run has taken over"),
        *("stopped, and a node lost", "finished, and a node lost", "its orphans asked for a stop"),
    ],
)
def test_which_starts_had_come_to_their_end(
    ended: LaunchOutcome, events: list[tuple[str, dict[str, Any]]], is_over: bool, run: RunDir
) -> None:
    with run.event_writer(0) as writer:
        writer.write("stopped", **STOP)  # of an earlier start
        for name, facts in events:
            writer.write(name, **facts)
    assert has_come_to_its_end(run, 1, ended) is is_over


def test_a_rank_that_does_not_leave_after_a_stop_changes_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def linger(run: RunDir, on_stop: Callable[[], None]) -> None:
        run.write_status(state="stopped", reason="enough", step=5)
        with run.event_writer(0) as events:
            events.write("started", step=0)
            events.write("stopped", **STOP)
        raise LateStop("the stop took longer than run.stop_timeout")

    assert train(run, Play(also=linger, begins=False), monkeypatch, overrides=AGAIN)["state"] == "stopped"
    assert (
        "a rank did not leave in time, so all were ended after the run had come to its end" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "state", "failure", "reason"),
    [
        ("enough", Ending.STOPPED, "", "enough"),
        ("deadline: USR2", Ending.DEADLINE, "", "USR2"),
        ("signal came: SIGHUP", Ending.STOPPED, "signal", "a signal came: SIGHUP"),
        (None, Ending.STOPPED, "signal", "a signal asked for a stop"),
    ],
)
def test_a_stop_before_ranks_could_hear_it_has_the_words_of_who_asked(
    words: str | None, state: Ending, failure: str, reason: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run.path / "attempts/0001"
    folder.mkdir(parents=True)
    monkeypatch.setenv("SHARDWAY_ATTEMPT_DIR", str(folder))
    if words is not None:
        run.request_stop(words)
    resolution = resolve_request(ResolveRequest(directory=run.path), 2, 2)
    train_local(resolution, build_launch(resolution, 2), CalledOff(2, WarmStandby(None), print_line))
    result = run.attempt(1).read_result()
    assert result is not None
    assert (result.state, result.failure, result.reason) == (state, failure, reason)
    assert not run.stop_requested()


@dataclass(frozen=True)
class CalledOff(NodeGroup):
    """A node group of which a stop was asked for before all nodes were there."""

    def start(self, run: RunDir, launch: LocalLaunch, hang_timeout: HangTimeout | None) -> LaunchOutcome:
        return LaunchOutcome(called_off=True)


@dataclass(frozen=True)
class Few(NodeGroup):
    """A node group of which too little is left."""

    def why_not_again(self) -> str:
        return "1 of 2 nodes are left"


def test_nothing_starts_again_where_too_few_nodes_are_left(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(failures=[KILLED])
    monkeypatch.setattr(supervisor, "run_local", play)
    resolution = resolve_request(ResolveRequest(directory=run.path), 2, 2)
    with pytest.raises(JobError, match=r"was ended by SIGKILL") as told:
        train_local(resolution, build_launch(resolution, 2), Few(2, WarmStandby(None), print_line))
    assert play.starts == 1
    assert str(told.value).endswith("\n  The ranks were started once; it is not started again: 1 of 2 nodes are left.")


@dataclass(frozen=True)
class Scattered(NodeGroup):
    """A node group that can start once."""

    starts: list[int] = field(default_factory=list)

    def start(self, run: RunDir, launch: LocalLaunch, hang_timeout: HangTimeout | None) -> LaunchOutcome:
        self.starts.append(1)
        if len(self.starts) > 1:
            raise SiteError("1 of 2 nodes is there")
        with run.event_writer(0) as events:
            events.write("started", step=5)
        run.write_status(state="running", step=5, reason="")
        return LaunchOutcome((KILLED,))


def test_evidence_that_comes_while_the_watch_ends_counts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ranks of another node hang: these ranks are asked, and may have ended before all of them answered."""
    evidence = HangEvidence(silent=(1,))

    @contextmanager
    def watched(*words: object) -> Iterator[SimpleNamespace]:
        watch = SimpleNamespace(folder=None, slowest=None, found=None, seen=None)
        yield watch
        watch.seen = evidence

    monkeypatch.setattr(supervisor, "watched", watched)
    monkeypatch.setattr(supervisor, "run_local", lambda *words: [])
    launch = build_launch(resolve_request(ResolveRequest(directory=run.path), 2, 2), 2)
    outcome = supervisor.run_on_node(run, launch, None, WarmStandby(None), print_line)
    assert outcome == LaunchOutcome(evidence=evidence)


@pytest.mark.parametrize(
    ("world", "ranks", "names"),
    [(2, (1,), "rank 1"), (2, (0, 1), "all ranks"), (4, (1,), "rank 3"), (4, (0, 1), "rank 2 and rank 3")],
)
def test_a_hang_on_any_node_names_its_ranks_by_global_numbers(
    world: int, ranks: tuple[int, ...], names: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = Hang(ranks, 9.0, 8.0, Sighting(HeartbeatEntry(9, 1, Activity.STEP, 5, 0.0)), all_alike=len(ranks) == 2)

    @contextmanager
    def watched(count: int, timeout: object, on_wake: Callable[[Hang], None], *words: object) -> Iterator[Any]:
        on_wake(hang)
        yield SimpleNamespace(folder=None, slowest=None, found=hang, seen=HangEvidence(silent=ranks))

    monkeypatch.setattr(supervisor, "watched", watched)
    monkeypatch.setattr(supervisor, "run_local", lambda *words: [])
    launch = build_launch(resolve_request(ResolveRequest(directory=run.path), 2, 2), 2)
    first, lines = world - 2, list[str]()
    if first:
        launch = replace(launch, assignment=RankAssignment(first, world, 1, 2, "a", 1))
    outcome = supervisor.run_on_node(run, launch, None, WarmStandby(None), lines.append)
    words = f"{names} did nothing for 9.0 s in a step after step 5 (more than 8.0 s means a hang)"
    assert lines == [f"{words}, and was resumed"]
    assert outcome.describe() == words
    assert outcome.evidence == HangEvidence(silent=tuple(rank + first for rank in ranks))


def test_what_keeps_ranks_from_starting_again_is_in_the_status(run: RunDir) -> None:
    resolution = resolve_request(ResolveRequest(directory=run.path), 2, 2)
    with pytest.raises(SiteError, match=r"1 of 2 nodes is there"):
        train_local(resolution, build_launch(resolution, 2), Scattered(2, WarmStandby(None), print_line))
    assert run.read_status()["state"] == "failed"
    assert run.read_status()["reason"].startswith("1 of 2 nodes is there")


def test_nothing_starts_again_where_nothing_can_be_written(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "why_refused", lambda folder: "Read-only file system")
    play = Play(failures=[KILLED])
    with pytest.raises(JobError, match=r"again: nothing can be written into .* now \(Read-only file system\)\.$"):
        train(run, play, monkeypatch, overrides=AGAIN)
    assert play.starts == 1


# --- what status.json says then


@pytest.mark.parametrize("state", ["running", "failed"])
def test_the_status_tells_the_cause(state: str, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_status(state=state, reason=LOST, step=5, total_steps=9)
    failing(run, Play(failures=[RankFailure(1, 4711, -9)]), monkeypatch)
    status = run.read_status()
    assert status.pop("reason").startswith("rank 1 (process 4711) was ended by SIGKILL")
    assert status == {"format": 1, "state": "failed", "step": 5, "total_steps": 9}


def test_a_run_that_had_ended_keeps_its_status(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_status(state="finished", reason="all steps are done", step=9)
    failing(run, Play({0: ("UserError", "a key is wrong")}, exited(0, code=2)), monkeypatch)
    assert run.read_status()["state"] == "finished"


REFUSED = {0: ("UserError", "the model cannot be split"), 1: ("UserError", "the model cannot be split")}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("state", ["finished", "stopped", "failed", "running"])
def test_a_run_that_is_refused_by_its_ranks_is_as_it_was(
    state: str, fresh: bool, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the ranks printed goes as well: it is in the error."""
    run.write_status(state=state, reason="it said so", step=9)
    with run.event_writer(0) as events:
        events.write("started", step=0)

    def leave(run: RunDir, on_stop: object) -> None:
        (run.log_folder / "new/attempt_0/0").mkdir(parents=True)
        (run.checkpoints.rmdir(), (run.path / "events").rmdir()) if fresh else None

    before = {path: path.is_file() and path.read_bytes() for path in run.path.rglob("*")}
    play = Play(REFUSED, exited(0, 1, code=2), leave, begins=False)
    with pytest.raises(UserError, match=r"^the model cannot be split$"):
        train(run, play, monkeypatch, fresh=fresh)
    assert {path: path.is_file() and path.read_bytes() for path in run.path.rglob("*")} == before
    assert [path.name for path in run.path.parent.iterdir()] == ["a"]


def test_a_run_behind_a_link_that_is_refused_is_as_it_was(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_status(state="stopped", reason="it said so", step=9)
    run.path.rename(tmp_path / "there")
    run.path.symlink_to(tmp_path / "there")

    def leave(run: RunDir, on_stop: object) -> None:
        (run.checkpoints.rmdir(), (run.path / "events").rmdir())

    with pytest.raises(UserError, match=r"^the model cannot be split$"):
        train(run, Play(REFUSED, exited(0, 1, code=2), leave, begins=False), monkeypatch, fresh=True)
    assert (run.path.is_symlink(), run.read_status()["step"]) == (True, 9)
    assert not (tmp_path / "there.old-1").exists()


def test_ranks_that_fail_before_the_run_goes_on_write_no_restart_into_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_status(state="finished", reason="it said so", step=9)
    play = Play({1: ("JobError", "the disk is away")}, exited(1), begins=False)
    with pytest.raises(JobError, match=r"rank 1: the disk is away|^the disk is away"):
        train(run, play, monkeypatch, overrides=AGAIN)
    assert play.starts == 2
    assert "the ranks start again: the disk is away" in capsys.readouterr().err
    assert (run.read_status()["state"], list(run.all_events(0))) == ("finished", [])
    assert run.read_setup_fault(1) is None


def test_a_first_start_that_its_ranks_refuse_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def withdraw(run: RunDir, on_stop: object) -> None:
        (run.checkpoints.rmdir(), (run.path / "events").rmdir())

    with pytest.raises(UserError):
        train(RunDir(tmp_path / "runs/new"), Play(REFUSED, exited(0, code=2), withdraw, begins=False), monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_is_asked_for_through_the_run_directory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run, Play(also=lambda run, on_stop: on_stop()), monkeypatch)
    assert run.stop_requested()
    assert capsys.readouterr().err == "stopping after this step and saving; once more to end at once\n"


def test_a_second_signal_leaves_no_request_for_the_next_start(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(run: RunDir, on_stop: Callable[[], None]) -> None:
        on_stop()
        raise KeyboardInterrupt

    run.write_status(state="running", reason="", step=5)
    with pytest.raises(KeyboardInterrupt):
        train(run, Play(also=interrupt), monkeypatch)
    assert not run.stop_requested()
    assert run.read_status() == {
        "format": 1,
        "state": "stopped",
        "reason": "a second signal ended the run at once",
        "step": 5,
    }


def test_a_run_that_was_stopped_says_how_to_go_on(shardway: Shardway, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(run: RunDir, on_stop: Callable[[], None]) -> None:
        run.write_status(state="stopped", reason="SIGINT", step=3)

    monkeypatch.setattr(supervisor, "run_local", Play(also=stop, begins=False))
    ended = shardway("train", "--nproc", "2", "--dir", "a")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == ("run directory  a\nreport         a/report.html\nto go on, run the same command again\n")
    attempt = RunDir(Path("a")).attempt(1)
    attempt.make()
    monkeypatch.setenv("SHARDWAY_ATTEMPT_DIR", str(attempt.path))
    assert "to go on" not in shardway("train", "--nproc", "2", "--dir", "a").out, "its job script says how"


# --- the request on its way to the ranks

PATHS = st.none() | st.sampled_from(["a.toml", "a b/c", "/é"]).map(Path)


@settings(max_examples=25)
@given(st.builds(ResolveRequest, PATHS, st.lists(st.text(max_size=9), max_size=3).map(tuple), PATHS, st.booleans()))
def test_a_request_arrives_as_it_was_sent(request_: ResolveRequest) -> None:
    assert read_packed(pack_request(request_)) == request_


def test_what_the_agent_ended_afterwards_is_not_to_blame(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play({0: ("JobError", "its file is gone")}, [*exited(0), RankFailure(1, 4711, -15)])
    assert str(failing(run, play, monkeypatch)) == "its file is gone"


def test_the_first_to_be_killed_is_to_blame(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play({}, [RankFailure(1, 4711, -9), RankFailure(0, 4710, -15)])
    assert str(failing(run, play, monkeypatch)).startswith("rank 1 (process 4711) was ended by SIGKILL;")


def test_ranks_that_were_overtaken_leave_the_record_to_the_other_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run.writer_lock()

    def overtake(run: RunDir, on_stop: Callable[[], None]) -> None:
        other.acquire()
        run.write_status(state="running", step=7, reason="")

    with pytest.raises(Fenced, match=r"another run trains into .*: process \d+ on host "):
        train(run, Play(failures=[RankFailure(0, 4711, 4)], also=overtake, begins=False), monkeypatch)
    assert run.read_status()["state"] == "running"
    assert list(run.all_events()) == []
    other.release()


def test_a_rank_that_could_say_nothing_on_a_full_disk(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "why_refused", lambda folder: "No space left on device")
    error = failing(run, Play(failures=exited(1, code=4)), monkeypatch)
    assert type(error) is JobError
    assert str(error) == (
        f"rank 1 ended with exit code 4. It could not say why: nothing can be written into {run.path} (No space left "
        "on device).\n  To do: make room there (`df -h`; `df -i` where there is space); then run the same command "
        "again: it goes on from the start, since nothing was saved yet."
    )
