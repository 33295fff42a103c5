"""`shardway top`: the view through its keys, the runs that it follows, and a real terminal."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot

from screen_terminal import ScreenTerminal
from shardway.errors import JobError
from shardway.rundir.attempts import AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.telemetry.store import DeviceInfo, NodeInfo, TelemetryFollower, TelemetryWriter
from shardway.watch.advice.findings import Advice
from shardway.watch.top import Board, TopApp, describe_heat, render_cores, render_heat
from shardway.watch.top_hardware import HardwareTail
from shardway.watch.top_runs import WatchedRun

NOW = time.time()


def make_run(path: Path, *, state: str = "stopped", steps: int = 40, at: float = NOW) -> RunDir:
    run = RunDir(path)
    run.create()
    rows = [{"event": "started", "step": 0, "total_steps": 100, "world": 2, "device": "cuda", "time": at - 60}]
    rows += [{"event": "step", "step": n, "loss": 5 / n, "tokens_per_s": 5e4, "time": at} for n in range(1, steps + 1)]
    rows += [{"event": state, "step": steps, "reason": "as asked", "time": at}]
    (run.path / "events/rank-00000.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run.write_status(state=state, step=steps, total_steps=100, reason="as asked")
    return run


def open_writer(run: RunDir, host: str, gpus: int) -> TelemetryWriter:
    devices = tuple(DeviceInfo(i, "H100", f"GPU-{i}", 1000, 700.0, "nvidia") for i in range(gpus))
    info = NodeInfo(host, 0, "17", 1, NOW, 1.0, 8, tuple(range(8)), None, None, devices, {})
    names = [f"gpu/{i}/{name}" for i in range(gpus) for name in ("use_percent", "memory_bytes")]
    return TelemetryWriter(run.telemetry_folder, info, ["cpu/use_percent", *names])


def write_samples(writer: TelemetryWriter, uses: Sequence[float], first: float, count: int = 20) -> None:
    for second in range(count):
        writer.append(first + second, [12.0, *(value for use in uses for value in (use, 500.0))])
    writer.flush()


# --- hardware


def test_hardware_is_followed_as_its_files_grow(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    run.create()
    tail = HardwareTail(run.telemetry_folder)
    assert tail.refresh() is None
    writer = open_writer(run, "n1", 2)
    write_samples(writer, [80, 0], NOW)
    use = tail.refresh()
    assert use is not None
    assert (use.used, len(use.gpus), use.gpus[0].now["memory"]) == (1, 2, pytest.approx(50, abs=0.1))
    write_samples(writer, [20, 60], NOW + 20)
    use = tail.refresh()
    assert use is not None
    assert [gpu.now["use"] for gpu in use.gpus] == pytest.approx([20, 60], abs=0.1)
    assert [gpu.use_mean for gpu in use.gpus] == pytest.approx([50, 30], abs=0.1)
    assert use.used == 2
    writer.path.unlink()
    assert tail.refresh() is None


def test_a_torn_block_is_read_when_the_rest_has_come(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    run.create()
    writer = open_writer(run, "n1", 1)
    write_samples(writer, [80], NOW)
    write_samples(writer, [40], NOW + 20)
    whole = writer.path.read_bytes()
    writer.path.write_bytes(whole[:-9])
    follower = TelemetryFollower(writer.path)
    assert [len(times) for _, times, _ in follower.new_samples()] == [20]
    with open(writer.path, "ab") as file:
        file.write(whole[-9:])
    ((_, times, columns),) = follower.new_samples()
    assert (times[0], float(columns["gpu/0/use_percent"][0])) == (pytest.approx(NOW + 20, abs=0.01), pytest.approx(40))
    assert follower.new_samples() == []


def test_many_nodes_stand_beside_each_other(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    run.create()
    for node in range(1, 13):
        write_samples(open_writer(run, f"n{node}.cluster", 2), [50.0 + node, 0], NOW)
    use = HardwareTail(run.telemetry_folder).refresh()
    assert use is not None
    rows = [row.plain for row in render_heat(use, "use", 40, 6)]
    assert len(rows) == 6
    assert rows[0].split() == ["n1", "51", "0", "n7", "57", "0"]
    assert len(render_heat(use, "use", 40, 20)) == 12
    assert "-" in render_heat(use, "tensor", 40, 20)[0].plain


# --- one run


def test_the_first_look_at_a_long_run_equals_a_whole_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=30_000)
    seen = list(run.follow_events().catch_up(most_steps=100))
    assert len(seen) < 2000
    assert [event["step"] for event in seen if event["event"] == "step"][-20:] == list(range(29_981, 30_001))
    follower = run.follow_events()
    assert len(list(follower.catch_up(most_steps=100))) == len(seen)
    with open(run.path / "events/rank-00000.jsonl", "a") as file:
        print(json.dumps({"event": "step", "step": 30_001}), file=file)
    assert [event["step"] for event in follower.new_events()] == [30_001]


def test_a_foreign_command_has_a_state_by_its_records(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    run.create(empty=True)
    attempt = run.attempt(1)
    attempt.make()
    attempt.write_submission(Submission("slurm", "t", job="17", asked={"nodes": 2, "accelerators": 4}))
    watched = WatchedRun(run.path)
    watched.refresh()
    assert (watched.state, watched.gpus_asked, watched.is_active) == ("submitted", 8, True)
    attempt.write_started(AttemptStart("17", started=NOW))
    watched.refresh()
    assert watched.state == "running"
    attempt.write_result(Result(Ending.CRASHED, "exit code 1", exit_code=1, ended=NOW))
    attempt.job_log.write_text("a line\x1b[2J\n")
    watched.refresh()
    assert (watched.state, watched.reason, watched.is_active) == ("crashed", "exit code 1", False)
    assert watched.list_log() == ["a line\\x1b[2J"]


def test_a_run_that_cannot_be_read_says_so_and_keeps_its_last_state(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    watched = WatchedRun(run.path)
    watched.refresh()
    events = run.path / "events/rank-00000.jsonl"
    events.unlink()
    events.mkdir()
    watched.refresh()
    assert "cannot be read: Is a directory" in watched.error
    assert (watched.state, watched.summary and watched.summary.step) == ("stopped", 40)


# --- the view, through its keys


class Actions:
    """Notes what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def stop(self, run: Path) -> str:
        self.asked.append(("stop", run.name))
        return f"{run.name} was asked"

    def report(self, run: Path) -> str:
        self.asked.append(("report", run.name))
        raise JobError("the disk is full")

    def advise(self, run: Path) -> Sequence[Advice]:
        return [Advice("idle", f"{run.name} has an idle GPU.", "use it", "look again")]


def screen_text(app: TopApp) -> str:
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        await pilot.pause(0.02)
    raise AssertionError(screen_text(pilot.app))  # type: ignore[arg-type]


def drive(
    folder: Path, script: Callable[[TopApp, Pilot[None], Actions], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> None:
    """Run the view over the runs in a folder, and a script of keys."""

    async def run() -> None:
        actions = Actions()
        app = TopApp(Board(lambda: sorted(folder.iterdir())), actions, every_s=0.1)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.looks > 0)
            await script(app, pilot, actions)

    asyncio.run(run())


@pytest.mark.slow
def test_runs_are_selected_and_acted_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "a", state="running")
    write_samples(open_writer(run, "n1", 2), [80, 0], NOW)
    make_run(tmp_path / "b")
    monkeypatch.setattr(
        RunDir, "find_writer", lambda each, **_: "process 1 on host n1" if each.path.name == "a" else None
    )

    async def script(app: TopApp, pilot: Pilot[None], actions: Actions) -> None:
        await until(pilot, lambda: "a has an idle GPU. To do: use it" in screen_text(app))
        shown = screen_text(app)
        assert "2 runs, 1 active  1/2 GPUs used" in shown
        assert re.search(r"^a +running +40/100 .* 1/2 40%", shown, re.MULTILINE)
        assert re.search(r"^n1 +80   0", shown, re.MULTILINE)
        await pilot.press("m")
        await until(pilot, lambda: "memory in % of its size: 50 to 50" in screen_text(app))
        await pilot.press("x")
        await until(pilot, lambda: "Ask a to stop?" in screen_text(app))
        await pilot.press("n")
        await until(pilot, lambda: "nothing was stopped" in screen_text(app))
        assert actions.asked == []
        await pilot.press("x", "y")
        await until(pilot, lambda: "a was asked" in screen_text(app))
        await pilot.press("down", "r")
        await until(pilot, lambda: "the disk is full" in screen_text(app))
        assert actions.asked == [("stop", "a"), ("report", "b")]
        await pilot.press("x")
        await until(pilot, lambda: "b has ended: stopped" in screen_text(app))
        await pilot.press("l")
        await until(pilot, lambda: "stopped at step 40: as asked" in screen_text(app))
        await pilot.press("escape", "e")
        await until(pilot, lambda: "ended hidden" in screen_text(app) and "\nb   stopped" not in screen_text(app))
        await pilot.press("s")
        await until(pilot, lambda: "by name" in screen_text(app))

    drive(tmp_path, script)


def test_runs_come_and_go_and_one_fails_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardway.watch.top.FIND_S", 0.0)
    make_run(tmp_path / "a")
    broken = make_run(tmp_path / "broken").path / "events/rank-00000.jsonl"
    broken.unlink()
    broken.mkdir()

    async def script(app: TopApp, pilot: Pilot[None], _: Actions) -> None:
        await until(pilot, lambda: "2 runs" in screen_text(app) and "unreadable" in screen_text(app))
        make_run(tmp_path / "late")
        await until(pilot, lambda: "late" in screen_text(app) and "3 runs" in screen_text(app))
        (tmp_path / "late").rename(tmp_path.parent / "away")
        await until(pilot, lambda: "2 runs" in screen_text(app) and "late" not in screen_text(app))

    drive(tmp_path, script, size=(120, 40))


# --- a real terminal


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows", "colour"), [(80, 24, "xterm-256color"), (132, 40, "vt100")])
def test_in_a_terminal_keys_are_answered_and_the_end_is_clean(
    columns: int, rows: int, colour: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs/mine")
    write_samples(open_writer(run, "n1", 2), [80, 0], NOW)
    words = [sys.executable, "-m", "shardway", "top", "--every", "0.3"]
    plain = {"NO_COLOR": "1"} if colour == "vt100" else {}
    terminal = ScreenTerminal(words, tmp_path, columns, rows, TERM=colour, XDG_STATE_HOME=str(tmp_path), **plain)
    terminal.wait("1 run, 0 active")
    terminal.wait("use in %: 0 to 80, mean 40")
    terminal.press("m")
    terminal.wait("memory in % of its size")
    terminal.press("x")
    terminal.wait("mine has ended: stopped")
    terminal.press("l")
    terminal.wait("stopped at step 40: as asked")
    terminal.press("q")
    terminal.wait("Metric")
    terminal.press("q")
    assert terminal.close() == 0


def test_a_run_without_accelerators_shows_its_cores(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    info = NodeInfo("n1", 0, "17", 1, NOW, 1.0, 3, (0, 1, 2), None, None, (), {})
    writer = TelemetryWriter(
        run.telemetry_folder, info, ["cpu/use_percent", *(f"core/{n}/use_percent" for n in range(3))]
    )
    for second in range(20):
        writer.append(NOW + second, [37.0, 99.0, 10.0, 2.0])
    writer.flush()
    use = HardwareTail(run.telemetry_folder).refresh()
    assert use is not None
    assert [row.plain for row in render_cores(use, 17)] == ["n1        99  10 ", "           2 "]
    assert describe_heat(use, "cores", use.newest) == "cores in %: 2 to 99, mean 37"
