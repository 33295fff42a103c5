"""Event files: appended line by line, read whatever a kill has left at their end."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardway.errors import JobError
from shardway.rundir.events import EventFollower, EventWriter, drop_undone, parse_event, read_events


def write(path: Path, *steps: int) -> None:
    with EventWriter(path) as writer:
        for step in steps:
            writer.write("step", step=step)


def steps_of(events: Any) -> list[int]:
    return [event["step"] for event in events]


# --- writing and reading


def test_an_event_is_one_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "events" / "a.jsonl"
    before = time.time()
    with EventWriter(path) as writer:
        writer.write("step", step=1, loss=1 / 3, name="é\n")
    line = path.read_text()
    assert line.count("\n") == 1
    assert line.endswith("}\n")
    event = json.loads(line)
    assert before <= event.pop("time") <= time.time()
    assert event == {"event": "step", "step": 1, "loss": 1 / 3, "name": "é\n"}
    assert line.startswith('{"event": "step", "step": 1, "loss": 0.3333333333333333, ')


def test_a_fact_may_be_called_event(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "a") as writer:
        writer.write("fault", kind="UserError", self="x")
    [event] = read_events(tmp_path / "a")
    assert (event["event"], event["kind"], event["self"]) == ("fault", "UserError", "x")


def test_a_second_writer_appends(tmp_path: Path) -> None:
    write(tmp_path / "a", 1, 2)
    write(tmp_path / "a", 3)
    assert steps_of(read_events(tmp_path / "a")) == [1, 2, 3]


def test_events_of_some_names_alone(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "a") as writer:
        for name in ("saved", "step", "saved too", "validation", "saved"):
            writer.write(name, step=1)
    names = [event["event"] for event in read_events(tmp_path / "a", ("validation", "saved"))]
    assert names == ["saved", "validation", "saved"]


def test_no_file_has_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "a")) == []


def test_closing_twice(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "a")
    writer.close()
    writer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.write("step")


def test_a_write_that_was_cut_short_is_told_and_completed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a full disk or a quota does: the kernel takes a part."""
    path = tmp_path / "a"
    real_write = os.write
    with EventWriter(path) as writer:
        writer.write("step", step=1)
        monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:5]))
        with pytest.raises(OSError, match=r"only 5 of \d+ bytes of an event could be written"):
            writer.write("step", step=2)
        assert writer.waiting == 1
        monkeypatch.undo()
        writer.write("fault", step=2)
        assert writer.waiting == 0
    assert [event["event"] for event in read_events(path)] == ["step", "step", "fault"]


def test_what_waits_is_written_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with EventWriter(tmp_path / "a") as writer:
        monkeypatch.setattr(os, "write", refuse)
        for step in (1, 2, 3):
            with pytest.raises(OSError, match="No space"):
                writer.write("step", step=step)
        assert (writer.waiting, list(read_events(tmp_path / "a"))) == (3, [])
        monkeypatch.undo()
        writer.flush()
    assert steps_of(read_events(tmp_path / "a")) == [1, 2, 3]


def test_an_open_file_that_did_not_come_back_with_its_server_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, broken = os.write, set[int]()

    def write_where_well(descriptor: int, data: bytes) -> int:
        if descriptor in broken:
            raise OSError(errno.EBADFD, os.strerror(errno.EBADFD))
        return real_write(descriptor, data)

    with EventWriter(tmp_path / "a") as writer:
        writer.write("step", step=1)
        monkeypatch.setattr(os, "write", write_where_well)
        broken.add(writer._descriptor)
        with pytest.raises(OSError, match="bad state"):
            writer.write("step", step=2)
        writer.write("step", step=3)
    assert steps_of(read_events(tmp_path / "a")) == [1, 2, 3]


@pytest.mark.parametrize("taken", [0, 1, 9, 1000])
def test_what_a_refused_write_has_done_all_the_same_is_not_done_twice(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of a server is lost, its effect is not."""
    real_write = os.write

    def write_and_fail(descriptor: int, data: bytes) -> int:
        real_write(descriptor, data[:taken])
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    with EventWriter(tmp_path / "a") as writer:
        writer.write("step", step=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write_and_fail)
            with pytest.raises(OSError, match="not connected"):
                writer.write("step", step=2)
        writer.write("step", step=3)
    lines = (tmp_path / "a").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_close_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_close = os.close

    def close_and_fail(descriptor: int) -> None:
        real_close(descriptor)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    writer = EventWriter(tmp_path / "a")
    writer.write("step", step=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_and_fail)
        writer.close()
    assert steps_of(read_events(tmp_path / "a")) == [1]


@given(st.integers(0, 200))
def test_a_file_cut_anywhere_is_read_up_to_there_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a"
    write(path, 1, 2, 3)
    content = path.read_bytes()
    kept = content[: min(cut, len(content))]
    path.write_bytes(kept)
    whole = list(range(1, kept.count(b"\n") + 1))
    assert steps_of(read_events(path)) == whole
    write(path, 9)
    assert path.read_bytes().startswith(kept)
    # Cut before its newline alone, a line is whole again once the next writer has closed it off.
    closed = [len(whole) + 1] if kept.endswith(b"}") else []
    assert steps_of(read_events(path)) == [*whole, *closed, 9]


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"null", b"3", b'"event"', b"[]", b"{}", b'{"event": 3}', b'{"step": 1}', b"\xff\xfe", b"[" * 10**5],
)
def test_a_foreign_line_is_skipped(line: bytes, tmp_path: Path) -> None:
    assert parse_event(line) is None
    (tmp_path / "a").write_bytes(line + b"\n")
    write(tmp_path / "a", 1)
    assert steps_of(read_events(tmp_path / "a")) == [1]


# --- what a resume undoes


def events_of(*pairs: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"event": name, "step": step} for name, step in pairs]


def kept_of(*pairs: tuple[str, int]) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in drop_undone(iter(events_of(*pairs)))]


def test_steps_after_the_checkpoint_are_undone_by_a_resume() -> None:
    first = [("started", 0), ("step", 1), ("saved", 1), ("step", 2), ("validation", 2), ("fault", 2)]
    again = [("started", 1), ("step", 2), ("finished", 2)]
    assert kept_of(*first, *again) == [("started", 0), ("step", 1), ("saved", 1), ("fault", 2), *again]


def test_steps_after_the_checkpoint_are_undone_by_a_way_back_to_it() -> None:
    first = [("started", 0), ("step", 1), ("saved", 1), ("step", 2), ("saved", 2), ("step", 3)]
    again = [("rolled_back", 1), ("step", 2), ("started", 0), ("step", 1)]
    assert kept_of(*first, *again[:2]) == [*first[:3], *again[:2]]
    assert kept_of(*first, *again) == [("started", 0), ("rolled_back", 1), *again[2:]]


def test_a_start_from_scratch_undoes_all_steps() -> None:
    assert kept_of(("started", 0), ("step", 1), ("started", 0), ("step", 1)) == [
        ("started", 0),
        ("started", 0),
        ("step", 1),
    ]


def test_events_without_a_step_hold() -> None:
    events = [{"event": "started", "step": 0}, {"event": "note"}, {"event": "started", "step": "x"}, {"event": "note"}]
    assert drop_undone(iter(events)) == events


@given(st.lists(st.tuples(st.sampled_from(["step", "started"]), st.integers(0, 6)), max_size=30))
def test_each_step_is_there_once_whatever_was_resumed(pairs: list[tuple[str, int]]) -> None:
    """Runs that count on from where they started; the last word on a step is the one that holds."""
    written, step = [], 0
    for number, (name, at) in enumerate(pairs):
        step = min(at, step) if name == "started" else step + 1
        written.append({"event": name, "step": step, "number": number})
    kept = [event for event in drop_undone(iter(written)) if event["event"] == "step"]
    assert steps_of(kept) == list(range(1, step + 1))
    last = {event["step"]: event["number"] for event in written if event["event"] == "step"}
    assert all(event["number"] == last[event["step"]] for event in kept)


# --- following


def test_a_follower_sees_each_event_once(tmp_path: Path) -> None:
    follower = EventFollower(tmp_path / "a")
    assert follower.new_events() == []
    write(tmp_path / "a", 1, 2)
    assert steps_of(follower.new_events()) == [1, 2]
    assert follower.new_events() == []
    write(tmp_path / "a", 3)
    assert steps_of(follower.new_events()) == [3]


def test_a_follower_from_the_end_sees_what_comes(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    follower = EventFollower(tmp_path / "a", from_end=True)
    write(tmp_path / "a", 2)
    assert steps_of(follower.new_events()) == [2]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_a_follower_waits_for_the_rest_of_a_line(tmp_path_factory: pytest.TempPathFactory, pieces: list[int]) -> None:
    folder = tmp_path_factory.mktemp("follow")
    write(folder / "source", 1, 2, 3)
    content, seen, at = (folder / "source").read_bytes(), [], 0
    follower = EventFollower(folder / "a")
    for size in [*pieces, len(content)]:
        with open(folder / "a", "ab") as file:
            file.write(content[at : at + size])
        at += size
        seen += steps_of(follower.new_events())
    assert seen == [1, 2, 3]


def test_a_follower_starts_over_where_the_file_was_cut(tmp_path: Path) -> None:
    write(tmp_path / "a", 1, 2, 3)
    follower = EventFollower(tmp_path / "a")
    follower.new_events()
    (tmp_path / "a").write_bytes(b"")
    assert follower.new_events() == []
    write(tmp_path / "a", 7)
    assert steps_of(follower.new_events()) == [7]


@pytest.mark.parametrize("new", [(7,), (7, 8), (7, 8, 9)])
def test_a_follower_starts_over_in_a_file_that_took_its_place(tmp_path: Path, new: tuple[int, ...]) -> None:
    """What --fresh does: shorter than the old file, as long, or longer by the time somebody looks."""
    write(tmp_path / "a", 1, 2)
    follower = EventFollower(tmp_path / "a", from_end=True)
    (tmp_path / "a").rename(tmp_path / "old")
    write(tmp_path / "a", *new)
    assert steps_of(follower.new_events()) == list(new)


def test_a_follower_of_a_file_that_is_gone_for_a_while(tmp_path: Path) -> None:
    write(tmp_path / "a", 1, 2)
    follower = EventFollower(tmp_path / "a")
    follower.new_events()
    (tmp_path / "a").rename(tmp_path / "old")
    assert follower.new_events() == []
    write(tmp_path / "a", 5, 6, 7)
    assert steps_of(follower.new_events()) == [5, 6, 7]


def test_following_ends_with_what_is_left(tmp_path: Path) -> None:
    looks = iter([False, True])

    def ended() -> bool:
        done = next(looks)
        write(tmp_path / "a", 2 if done else 1)
        return done

    assert steps_of(EventFollower(tmp_path / "a").follow(ended, pause_s=0.0)) == [1, 2]


@given(st.integers(1, 400))
def test_the_last_events_are_whole(most_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        with EventWriter(path) as writer:
            for number in range(9):
                writer.write("step", step=number)
        found = list(read_events(path, most_bytes=most_bytes))
        sizes = [len(line) for line in path.read_bytes().splitlines(keepends=True)]
    fitting = max(count for count in range(10) if sum(sizes[9 - count :]) <= most_bytes)
    assert [event["step"] for event in found] == list(range(9))[9 - fitting :]


def test_no_file_has_no_last_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none", most_bytes=100)) == []


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    folder, loop = tmp_path / "rank-00000.jsonl", tmp_path / "rank-00001.jsonl"
    folder.mkdir()
    loop.symlink_to(loop.name)
    for path, why in ((folder, "Is a directory"), (loop, "Too many levels of symbolic links")):
        for read in (
            lambda p: list(read_events(p)),
            lambda p: list(read_events(p, most_bytes=9)),
            lambda p: EventFollower(p).new_events(),
        ):
            with pytest.raises(JobError) as told:
                read(path)
            assert str(told.value).startswith(f"the events in {path} cannot be read: {why}.\n  To do: ")


def test_a_device_takes_no_events(tmp_path: Path) -> None:
    """It would take each, and the run would look as if nothing had been done."""
    path = tmp_path / "rank-00000.jsonl"
    path.symlink_to("/dev/null")
    with pytest.raises(JobError, match=r"(?s)rank-00000\.jsonl, which is no plain file.*To do: move away"):
        EventWriter(path)
