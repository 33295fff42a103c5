from __future__ import annotations

import io
import math
import time
import timeit
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from watch_events import BEGIN, event, started, step

from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.watch.advice import live as advice_live
from shardway.watch.advice.findings import Advice
from shardway.watch.advice.live import LiveAdvisor
from shardway.watch.live import LiveView
from shardway.watch.top_hardware import GpuNow, HardwareUse


def _view(events: list[Event], now: float) -> LiveView:
    view = LiveView("demo", "runs/demo", clock=lambda: BEGIN + now)
    for each in events:
        view.update(each)
    return view


def _text(renderable: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def _running() -> list[Event]:
    return [
        started(total_steps=200),
        *(step(number, 1 + number * 0.1) for number in range(1, 101)),
        event("validation", 50, 6.0, loss=2.3, bits_per_byte=3.318, seconds=0.8),
        event("validation", 100, 11.0, loss=2.2, bits_per_byte=3.174, seconds=0.8),
        event("saved", 100, 11.5, name="step-000000100", bytes=14_889_779, seconds=0.31),
    ]


def test_running() -> None:
    assert (
        _text(_view(_running(), now=70.0).render())
        == """\
╭─ demo ───────────────────────────────────────────────────────────────────────────────────────────╮
│ 1.26M parameters, 2 ranks on cpu  ·  runs/demo                                                   │
│                                                                                                  │
│ ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸                                          100/200   50% │
│                                                                                                  │
│ loss        0.1097   last 0.0990   █▄▃▃▂▂▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁                      │
│ validation  loss 2.2000  3.174 bits/byte  at step 100  ★ best                                    │
│ speed       51.2k tokens/s  0.08 s/step                                                          │
│ time        0:10 left  1:10 elapsed                                                              │
│ last save   step 100, 0:58 ago  14.2 MiB                                                         │
│                                                                                                  │
│    0:00  started, 200 steps                                                                      │
│    0:12  saved step-000000100  14.2 MiB in 0.3 s                                                 │
│                                                                                                  │
│                                                                                                  │
╰──────────────────────────────────────────────────────────────────────────────────────── running ─╯
"""
    )


def test_failed_after_a_resume_on_a_narrow_terminal() -> None:
    events = [
        *_running(),
        started(step=50, at=60.0, total_steps=200),
        step(51, 61.0),
        event("validation", 51, 61.5, loss=9.0),
        event("fault", 51, 62.0, kind="JobError", message="rank 1 died\nwith signal 9"),
        event("failed", 51, 62.0, reason="rank 1 died"),
    ]
    assert (
        _text(_view(events, now=1000.0).render(), width=60)
        == """\
╭─ demo ───────────────────────────────────────────────────╮
│ 1.26M parameters, 2 ranks on cpu  ·  runs/demo           │
│                                                          │
│ ━━━━━━━━━━╸                                 51/200   26% │
│                                                          │
│ loss        0.1923   last 0.1923   █▅▃▃▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁ │
│ validation  loss 9.0000  at step 51  best loss 2.3000  … │
│ speed       51.2k tokens/s  0.08 s/step                  │
│ time        0:02 elapsed                                 │
│ last save   none yet                                     │
│                                                          │
│    0:12  saved step-000000100  14.2 MiB in 0.3 s         │
│    0:00  resumed from step 50 (step-000000050)           │
│    0:02  fault JobError: rank 1 died with signal 9       │
│    0:02  failed at step 51: rank 1 died                  │
╰───────────────────────────────────────────────── failed ─╯
"""
    )


def test_before_anything_happened() -> None:
    assert (
        _text(_view([], now=0.0).render(), width=60)
        == """\
╭─ demo ───────────────────────────────────────────────────╮
│ waiting for the ranks to start  ·  runs/demo             │
│                                                          │
│                                                0/?    0% │
│                                                          │
│ loss        n/a      last n/a                            │
│ validation  none yet                                     │
│ speed       none yet                                     │
│ time        n/a left  n/a elapsed                        │
│ last save   none yet                                     │
│                                                          │
│                                                          │
│                                                          │
│                                                          │
│                                                          │
╰─────────────────────────────────────────────── starting ─╯
"""
    )


def test_note_and_markup_are_shown_as_they_are() -> None:
    view = _view([started(device="[red]cpu[/]")], now=3.0)
    view.note("stopping\nafter [bold]this[/bold] step")
    text = _text(view.render())
    assert "2 ranks on [red]cpu[/]" in text
    assert "0:03  stopping after [bold]this[/bold] step" in text


def test_data_that_are_left_out_are_told() -> None:
    view = _view(
        [*_running(), event("data_skipped", 100, 12.0, samples=11, reason="data.skip left out 11 samples")], 13
    )
    assert "data.skip left out 11 samples" in _text(view.render())


def test_only_the_last_messages_stay() -> None:
    view = _view([started()], now=0.0)
    for number in range(6):
        view.note(f"note {number}")
    text = _text(view.render())
    assert [number for number in range(6) if f"note {number}" in text] == [2, 3, 4, 5]


def test_broken_losses_are_shown_but_not_drawn() -> None:
    text = _text(_view([started(), step(1, 1.0), step(2, 2.0, loss=math.nan)], now=2.0).render())
    assert "last nan" in text
    assert "▁" in text


def test_height_stays_the_same_from_start_to_end() -> None:
    events = _running()
    heights = {_text(_view(events[:count], now=20.0).render()).count("\n") for count in range(len(events) + 1)}
    assert len(heights) == 1


def test_a_render_costs_less_than_half_a_table_of_twenty_rows() -> None:
    """A few milliseconds of this process's own time, the best of ten rounds of each: other work that shares a core
    makes both slower."""
    view = _view(_running(), now=70.0)
    table = Table("name", "value", "what it is")
    for number in range(20):
        table.add_row(f"row {number}", f"{number / 7:.3f}", "a few words")
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor")

    def best_s(render: Callable[[], RenderableType]) -> float:
        return min(timeit.repeat(lambda: console.print(render()), timer=time.process_time, number=10, repeat=10)) / 10

    assert best_s(view.render) < best_s(lambda: table) / 2


def test_hardware_has_a_line_once_it_is_sampled() -> None:
    view = _view(_running(), now=70.0)
    before = _text(view.render())
    view.show_hardware(None)
    assert _text(view.render()) == before
    gpus = tuple(GpuNow("n1", index, None, {}, use_mean=use, use_max=use) for index, use in enumerate((80.0, 0.0)))
    view.show_hardware(HardwareUse(gpus, BEGIN, cpu_percent=12.0, hosts=1))
    assert "│ hardware    1/2 GPUs 40 %, cores 12 %  1 not used: shardway status runs/demo" in _text(view.render())


def test_the_first_advice_has_what_was_found_what_to_change_and_how_to_check() -> None:
    view = _view(_running(), now=70.0)
    before = _text(view.render())
    view.show_advice([])
    assert _text(view.render()) == before
    found = "40 % of the time between steps is spent waiting for data " + "(data.workers = 0) " * 9
    first = Advice("data-wait", found, 'data.workers = "auto"', "shardway status: waiting for data below 1 %")
    view.show_advice([first, first])
    lines = _text(view.render()).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("│ advice      40 % of the time"))
    assert lines[at + 1].rstrip(" │").endswith("…"), "the rest of a long one is cut off"
    assert lines[at + 2].rstrip(" │") == '│             to do: data.workers = "auto"'
    assert (
        lines[at + 3]
        .rstrip(" │")
        .startswith("│             check: shardway status: waiting for data below 1 % (1 more")
    )
    assert {len(line) for line in lines} == {100}
    view.show_advice([])
    assert _text(view.render()) == before


def test_a_live_run_is_judged_at_times_from_the_events_that_the_view_got(tmp_path: Path) -> None:
    """Once a minute, and more rarely where a look takes long; no event is read for it."""
    run, now = RunDir(tmp_path / "run"), [0.0]
    run.create()
    view = _view([started(total_steps=200)], now=70.0)
    advisor = LiveAdvisor(run, view.folded, clock=lambda: now[0])
    for number in range(1, 101):  # half of each second passes in waiting for data
        view.update(step(number, float(number), seconds=0.5))
    spent = {"start": 0.0, "data": 50.0, "step": 50.0}
    view.update(event("saved", 100, 100.0, name="step-000000100", bytes=1, seconds=0.0, spent=spent))
    assert advisor.refresh() is None
    now[0] = advice_live.EVERY_S
    found = advisor.refresh()
    assert found is not None
    assert [each.rule for each in found] == ["data-wait"]
    assert "50 % of the time between steps" in found[0].evidence
    now[0] += advice_live.EVERY_S - 1
    assert advisor.refresh() is None
