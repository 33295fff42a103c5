"""Whatever a trainer of this format may have written, watching it never raises."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.watch.live import LiveView
from shardway.watch.progress import summarise
from shardway.watch.report import render_report
from shardway.watch.words import PlainLines

numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(10**12), 10**12) | st.none()
words = st.text(max_size=12) | st.none()
counts = st.integers(0, 10**6) | st.none()
steps = st.integers(0, 10**6)
times = (
    st.dictionaries(words.filter(bool) | st.sampled_from(("start", "step", "repeat")), numbers, max_size=4) | numbers
)


def _events(name: str, /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Event]:
    """An event of which every field may be missing."""
    return st.fixed_dictionaries({"event": st.just(name)}, optional=fields)


any_event = st.one_of(
    _events(
        "started",
        step=steps,
        total_steps=counts,
        world=counts,
        device=words,
        host=words,
        torch=words,
        parameters=counts,
        tokens_per_step=steps,
        samples_per_step=steps,
        bytes_per_token=numbers,
        checkpoint=words,
        spent=times,
        pid=counts,
        before=st.fixed_dictionaries({}, optional={"spent": times, "time": numbers, "pid": counts, "host": words}),
        machine=st.dictionaries(st.text(max_size=5), words | counts, max_size=3) | st.none(),
    ),
    _events("step", step=steps, loss=numbers, grad_norm=numbers, lr=numbers, tokens_per_s=numbers, seconds=numbers),
    _events("validation", step=steps, loss=numbers, bits_per_byte=numbers, accuracy=numbers, seconds=numbers),
    _events("saved", step=steps, name=words, bytes=counts, seconds=numbers, spent=times),
    _events("fault", step=steps, kind=words, message=words, exit_code=counts, spent=times, unfinished_s=numbers),
    _events("rolled_back", step=steps, start=counts, end=counts, samples=counts, first=counts, last=words, spent=times),
    _events("stopped", step=steps, reason=words, spent=times),
    _events("finished", step=steps, reason=words),
    _events("failed", step=steps, reason=words),
    _events("something new", step=steps),
)


@contextmanager
def _run_with(events: list[Event]) -> Iterator[RunDir]:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "run")
        run.create()
        with run.event_writer(0) as writer:
            for event in events:
                writer.write(event["event"], **{key: value for key, value in event.items() if key != "event"})
        yield run


@given(st.lists(any_event, max_size=12))
def test_summary(events: list[Event]) -> None:
    with _run_with(events) as run:
        plain = summarise(run).as_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    starts = [event for event in events if event["event"] == "started"]
    lost = bool(events) and events[0]["event"] != "started"
    assert plain["attempts"] == len(starts) + lost
    assert plain["state"] in ("new", "finished", "stopped", "failed")


@settings(max_examples=25, deadline=None)
@given(st.lists(any_event, max_size=12))
def test_report(events: list[Event]) -> None:
    with _run_with(events) as run:
        html = render_report(run)
    assert all(html.count(f"<h2>{title}</h2>") <= 1 for title in ("Over time", "Attempts", "Resolved run", "Machine"))
    assert html.count("</main>") == 1


@given(st.lists(any_event, max_size=12), st.integers(20, 120))
def test_live_view_and_plain_lines(events: list[Event], width: int) -> None:
    view, plain = LiveView("run", "runs/run", clock=lambda: 0.0), PlainLines(clock=lambda: 0.0)
    lines = []
    for event in events:
        view.update(event)
        lines += plain.lines(event)
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(view.render())
    assert all(len(line) > 0 and line.isprintable() for line in lines)
    assert len(captured.get().splitlines()) >= 10
