"""The layout of a run directory: its names, its versions, what reading and setting aside do to it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardway.errors import JobError, UserError
from shardway.rundir import directory
from shardway.rundir.directory import FORMAT, WAITS, RunDir


def made(path: Path) -> RunDir:
    run = RunDir(path)
    run.create()
    return run


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- being there


def test_looking_writes_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    assert not run.exists()
    assert run.find_writer() is None
    assert run.read_status() == {}
    assert run.read_resolved() == {}
    assert run.events() == []
    assert run.ranks_with_events() == []
    assert run.checkpoint_steps() == []
    assert run.partial_checkpoints() == []
    assert run.rank_output(0) == []
    assert not run.stop_requested()
    assert run.set_aside() is None
    run.clear_stop()
    run.check_format()
    assert list(tmp_path.iterdir()) == []


def test_what_is_made(tmp_path: Path) -> None:
    run = made(tmp_path / "deep" / "a")
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "events"]
    assert run.exists()
    run.create()


@pytest.mark.parametrize("mark", ["status.json", "resolved.toml", "events"])
def test_any_trace_of_a_run_is_a_run(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).mkdir()
    assert RunDir(tmp_path).exists()


def test_another_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert not RunDir(tmp_path).exists()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as told:
        RunDir(tmp_path / "file" / "a").create()
    assert str(told.value) == (
        f"the run directory {tmp_path}/file/a cannot be made: Not a directory.\n"
        "  To do: move away the file that stands in place of a folder there, or choose a folder that you may write to "
        "with --dir or run.root."
    )


def test_a_folder_on_a_file_system_that_is_away_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking whether it is a link fails there as well."""

    def away(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))

    monkeypatch.setattr(Path, "mkdir", away)
    monkeypatch.setattr(os, "lstat", away)
    monkeypatch.setattr(Path, "lstat", away)
    with pytest.raises(UserError, match=r"cannot be made: Transport endpoint is not connected\."):
        RunDir(tmp_path / "run").create()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.check_no_strangers()
    for name in ("thesis.tex", "b", "c", "d"):
        (tmp_path / name).touch()
    with pytest.raises(UserError) as told:
        run.check_no_strangers()
    assert str(told.value) == (
        f"{tmp_path} is no run directory and holds other files (b, c, d, ...).\n"
        "  Nothing in it was changed. To do: name a new or an empty folder with --dir."
    )
    run.create()
    run.check_no_strangers()  # a run may have other files beside its own


def test_what_a_start_leaves_before_it_is_a_run_is_no_strangers(tmp_path: Path) -> None:
    for name in ("logs", "checkpoints", "writer.lock", "stop"):
        (tmp_path / name).touch()
    RunDir(tmp_path).check_no_strangers()
    RunDir(tmp_path / "gone").check_no_strangers()


# --- names


def test_names_are_those_that_outside_checks_rely_on(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    run.write_request("# mine\n", "format = 1\n")
    run.write_status(state="running", step=3, reason="")
    run.write_report("<html>")
    run.request_stop()
    with run.event_writer(0) as events:
        events.write("step", step=1)
    lock = run.writer_lock()
    lock.acquire()
    lock.release()
    assert sorted(tree(run.path)) == [
        "events/rank-00000.jsonl",
        "lease/beat-000001",
        "lease/epoch-000001.json",
        "report.html",
        "resolved.toml",
        "run.toml",
        "status.json",
        "stop",
        "writer.lock",
    ]
    assert json.loads((run.path / "status.json").read_text()) == {
        "format": 1,
        "state": "running",
        "step": 3,
        "reason": "",
    }
    assert (run.path / "run.toml").read_text() == "# mine\n"
    assert run.report_path.read_text() == "<html>"
    assert run.read_resolved() == {"format": 1}


def test_checkpoints_are_named_by_step_and_listed_in_order(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    for step in (1000, 20, 3):
        run.checkpoint_path(step).mkdir()
    run.partial_checkpoint_path(7).mkdir()
    for other in ("step-5", "step-0000000005", "step-000000005.old", "notes"):
        (run.checkpoints / other).mkdir()
    assert run.checkpoint_path(1000).name == "step-000001000"
    assert run.checkpoint_steps() == [3, 20, 1000]
    assert [path.name for path in run.partial_checkpoints()] == [".step-000000007.partial"]


def test_ranks_with_events(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    for rank in (12, 0, 3):
        run.event_writer(rank).close()
    (run.path / "events" / "rank-copy.jsonl").touch()
    (run.path / "events" / "rank-00000.jsonl.gz").touch()
    assert run.ranks_with_events() == [0, 3, 12]


def test_events_leave_out_what_a_resume_undid(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    with run.event_writer(1) as events:
        for name, step in (("started", 0), ("step", 1), ("step", 2), ("started", 1), ("step", 2)):
            events.write(name, step=step)
    assert [(event["event"], event["step"]) for event in run.events(1)] == [
        ("started", 0),
        ("step", 1),
        ("started", 1),
        ("step", 2),
    ]
    assert len(list(run.all_events(1))) == 5
    assert run.events(0) == []


def test_the_output_of_the_newest_start(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    for number, start in enumerate(("old", "new")):
        folder = run.log_folder / start / "attempt_0" / "1"
        folder.mkdir(parents=True)
        for name in ("stdout.log", "stderr.log"):
            (folder / name).write_text(start)
            os.utime(folder / name, (number, number))
    assert [str(path.relative_to(run.log_folder)) for path in run.rank_output(1)] == [
        "new/attempt_0/1/stdout.log",
        "new/attempt_0/1/stderr.log",
    ]
    assert run.rank_output(0) == []
    (run.log_folder / "new" / WAITS).touch()
    assert {path.parents[2].name for path in run.rank_output(1)} == {"old"}, "the new ones are spares"


def test_the_output_of_a_rank_of_another_node(tmp_path: Path) -> None:
    """It is the second of the node whose first rank is 4."""
    run = made(tmp_path / "a")
    folder = run.log_folder / "from-4" / "start" / "attempt_1" / "1"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("said")
    assert run.rank_output(5) == [folder / "stdout.log"]
    assert run.rank_output(1) == run.rank_output(4) == []


# --- stopping


def test_a_stop_is_asked_for_by_touching_a_file(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    (run.path / "stop").touch()
    assert run.stop_requested()
    run.clear_stop()
    assert not run.stop_requested()
    run.request_stop("the time is\n  up")
    assert run.stop_requested()
    assert run.stop_reason() == "the time is up"


def test_a_stop_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path)
    run.write_status(state="running")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directory, "write_whole", refuse)
    run.request_stop("why")
    assert (run.stop_requested(), run.stop_reason()) == (True, "")
    run.clear_stop()
    assert run.read_status()["state"] == "running"
    run.status_path.unlink()
    with pytest.raises(UserError, match="stop cannot be written: No space left on device"):
        run.request_stop("why")


@pytest.mark.parametrize("content", [b"", b"\xff"])
def test_a_stop_without_a_reason(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "stop").write_bytes(content)
    assert RunDir(tmp_path).stop_requested()
    assert RunDir(tmp_path).stop_reason() == ""


# --- versions and damage


@pytest.mark.parametrize("found", [FORMAT + 1, 99, "2", None])
def test_a_directory_of_a_newer_format_is_left_alone(tmp_path: Path, found: object) -> None:
    run = made(tmp_path / "a")
    (run.path / "status.json").write_text(json.dumps({"format": found}))
    before = tree(run.path)
    with pytest.raises(UserError) as told:
        run.check_format()
    assert str(told.value) == (
        f"{tmp_path}/a has run directory format {found}; this Shardway reads formats up to 1.\n"
        "  Nothing in it was changed. To do: update Shardway, or choose another directory with --dir."
    )
    assert tree(run.path) == before


@pytest.mark.parametrize("status", ["{}", '{"format": 1}'])
def test_a_directory_of_this_format(tmp_path: Path, status: str) -> None:
    (tmp_path / "status.json").write_text(status)
    RunDir(tmp_path).check_format()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 10**5, b"[]", b"null", b"3"], ids=lambda content: content[:5]
)
def test_a_status_that_cannot_be_read_is_no_status(tmp_path: Path, content: bytes) -> None:
    """It only repeats what the events say."""
    (tmp_path / "status.json").write_bytes(content)
    run = RunDir(tmp_path)
    assert run.read_status() == {}
    run.check_format()
    assert run.exists()


@pytest.mark.parametrize("content", [b"[", b"\xff", b"a = " + b"9" * 5000])
def test_a_resolved_run_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "resolved.toml").write_bytes(content)
    with pytest.raises(JobError) as told:
        RunDir(tmp_path).read_resolved()
    assert str(told.value).startswith(f"{tmp_path}/resolved.toml is damaged: ")
    assert str(told.value).endswith(
        "\n  To do: move that one file away (it is written again from the run file), or start over with --fresh, which "
        "sets the run directory aside."
    )


def test_a_resolved_run_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "resolved.toml").mkdir()
    with pytest.raises(JobError, match=r"resolved.toml is damaged: .*Is a directory"):
        RunDir(tmp_path).read_resolved()


# --- starting over


def test_setting_aside_keeps_every_byte(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    run.write_status(state="finished")
    with run.event_writer(0) as events:
        events.write("step", step=1)
    run.checkpoint_path(1).mkdir()
    (run.checkpoint_path(1) / "shard").write_bytes(b"\x00\xff")
    before = tree(run.path)
    assert run.set_aside() == tmp_path / "a.old-1"
    assert tree(tmp_path / "a.old-1") == before
    assert not run.path.exists()


def test_setting_aside_again_overwrites_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    for number in (1, 2, 3):
        run.create()
        run.write_status(number=number)
        assert run.set_aside() == tmp_path / f"a.old-{number}"
    kept = [RunDir(tmp_path / f"a.old-{number}").read_status()["number"] for number in (1, 2, 3)]
    assert kept == [1, 2, 3]


def test_what_a_link_leads_to_is_set_aside(tmp_path: Path) -> None:
    """A run on a large disk stays there."""
    (tmp_path / "large").mkdir()
    (tmp_path / "a").symlink_to("large/here")
    with pytest.raises(UserError, match=r"/a is a link to large/here, where there is no folder\.\n  To do: make that"):
        RunDir(tmp_path / "a").create()
    (tmp_path / "large/here").mkdir()
    run = made(tmp_path / "a")
    run.write_status(number=1)
    assert run.set_aside() == tmp_path / "large/here.old-1"
    assert (run.path.is_symlink(), tree(run.path)) == (True, {})
    assert RunDir(tmp_path / "large/here.old-1").read_status()["number"] == 1


def test_a_request_to_stop_is_not_set_aside(tmp_path: Path) -> None:
    """It was meant for the run that has ended."""
    run = made(tmp_path / "a")
    run.request_stop()
    assert run.set_aside() == tmp_path / "a.old-1"
    assert tree(tmp_path / "a.old-1") == {}


def test_the_working_folder_cannot_be_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(UserError) as told:
        RunDir(Path(".")).set_aside()
    assert str(told.value) == (
        "the run directory . has no name of its own, so the run in it cannot be moved aside.\n"
        "  To do: name it by its path with --dir."
    )
    assert (tmp_path / "a" / "events").is_dir()


# --- what is no file


def test_a_resolved_run_with_what_is_no_section(tmp_path: Path) -> None:
    (tmp_path / "resolved.toml").write_text("format = 1\nmodel = true\n")
    with pytest.raises(JobError, match=r"resolved.toml is damaged: model is no section\.\n  To do: "):
        RunDir(tmp_path).read_resolved()


def test_a_folder_called_stop_asks_for_a_stop(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.stop_path.mkdir()
    assert run.stop_requested()
    assert run.stop_reason() == ""
    run.request_stop("why")
    run.clear_stop()
    assert not run.stop_requested()


def test_a_folder_called_stop_that_holds_something_is_left(tmp_path: Path) -> None:
    run = made(tmp_path)
    (run.stop_path / "mine").mkdir(parents=True)
    run.clear_stop()
    assert run.stop_requested()


def test_a_stop_that_cannot_be_asked_for_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone/stop cannot be written: No such file or directory\."):
        RunDir(tmp_path / "gone").request_stop()


@pytest.mark.parametrize("empty", [True, False])
def test_a_new_directory_is_for_its_owner_and_group(tmp_path: Path, empty: bool) -> None:
    before = os.umask(0)
    try:
        RunDir(tmp_path / "runs/mine").create(empty=empty)
    finally:
        os.umask(before)
    assert (tmp_path / "runs/mine").stat().st_mode & 0o777 == 0o750
    (tmp_path / "shared").mkdir(0o755)
    RunDir(tmp_path / "shared").create()
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755


def test_a_resolved_run_is_read_by_the_names_of_today(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.resolved_path.write_text(
        '[run]\nrestarts = 2\nname = "a"\n[site]\nstarter = "srun"\n[guard]\non_spike = "tell"\n'
    )
    assert run.read_resolved() == {
        "run": {"max_restarts": 2, "name": "a"},
        "site": {"launcher": "srun"},
        "guard": {"on_spike": "warn"},
    }
