from __future__ import annotations

import html
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardway
from shardway.api import display, frames
from shardway.api.frames import Columns, choose_form, make_table
from shardway.errors import UserError
from shardway.launch.runs.find import Known, remember
from shardway.rundir.directory import RunDir
from shardway.telemetry.store import HostTelemetry

KEPT = Path(__file__).parents[1] / "kept" / "2026-11" / "runs"


def copied(tmp_path: Path, name: str) -> shardway.Run:
    """A run that an earlier version has kept, in a folder of its own."""
    shutil.copytree(KEPT / name, tmp_path / name, symlinks=True)
    return shardway.Run(tmp_path / name, frames="columns")


def events_of(run: shardway.Run, name: str) -> list[dict[str, Any]]:
    """Its events of rank 0 of one kind, as they stand in the file."""
    lines = (run.path / "events" / "rank-00000.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def test_a_row_for_each_step_that_counts(tmp_path: Path) -> None:
    run = copied(tmp_path, "finished")
    steps, written = run.steps, events_of(run, "step")
    assert list(steps)[:8] == ["step", "loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "seconds", "time"]
    assert steps["step"] == sorted({event["step"] for event in written})
    assert steps["loss"][-1] == written[-1]["loss"]
    assert steps.rows == len(steps["step"])
    assert steps.row(0)["step"] == 1


def test_steps_that_were_undone_are_left_out(tmp_path: Path) -> None:
    run = copied(tmp_path, "spiked")
    assert len(events_of(run, "step")) > run.steps.rows
    assert run.steps["step"] == sorted(set(run.steps["step"]))
    assert run.events["event"].count("step") == len(events_of(run, "step"))


def test_every_part_of_a_run(tmp_path: Path) -> None:
    run = copied(tmp_path, "pbs")
    assert run.validations["loss"] == [event["loss"] for event in events_of(run, "validation")]
    assert run.config["optim"]["lr"] == 0.003
    assert run.attempts["attempt"][0] == 1
    assert run.attempts["job"][0]
    assert run.state == run.status["state"] == "finished"
    assert run.report["summary"]["step"] == 10
    assert run.plan is None
    assert run.events.row(0)["facts"]["world"] == events_of(run, "started")[0]["world"]
    assert (run.telemetry, run.evaluations.rows) == ({"time": [], "host": []}, 0)
    assert run.logs() == ""
    assert run.name == "pbs"


def test_checkpoints_that_are_there(tmp_path: Path) -> None:
    run = copied(tmp_path, "stopped")
    saved = events_of(run, "saved")[-1]
    (row,) = [run.checkpoints.row(place) for place in range(run.checkpoints.rows)]
    assert (row["step"], row["bytes"], row["seconds"]) == (saved["step"], saved["bytes"], saved["seconds"])
    assert Path(row["path"]).is_dir()


def test_evaluations_and_what_a_script_logged(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    directory.create()
    directory.write_evaluation(7, "loss", {"time": 5.0, "data": "d", "results": {"loss": 2.5}, "errors": {"loss": 0.1}})
    with directory.event_writer(0) as writer:
        writer.write("started", step=0)
        writer.write("logged", step=3, values={"entropy": 1.5})
    run = shardway.Run(directory.path, frames="columns")
    row = run.evaluations.row(0)
    assert (row["step"], row["kind"], row["loss"], row["loss_error"]) == (7, "loss", 2.5, 0.1)
    assert run.logged.row(0)["entropy"] == 1.5


def test_telemetry_of_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [
        HostTelemetry("n1", (), np.array([1.0, 2.0]), {"cpu": np.array([5.0, 6.0], np.float32)}),
        HostTelemetry("n2", (), np.array([1.5]), {"gpu/0/use_percent": np.array([90.0], np.float32)}),
    ]
    monkeypatch.setattr("shardway.telemetry.store.read_telemetry", lambda folder: hosts)
    run = copied(tmp_path, "failed")
    assert run.telemetry == {
        "time": [1.0, 2.0, 1.5],
        "host": ["n1", "n1", "n2"],
        "cpu": [5.0, 6.0, None],
        "gpu/0/use_percent": [None, None, 90.0],
    }


def test_a_run_that_has_recorded_nothing_is_empty(tmp_path: Path) -> None:
    RunDir(tmp_path / "run").attempt(1).make()
    run = shardway.Run(tmp_path / "run", frames="columns")
    assert run.steps == {name: [] for name in run.steps}
    assert (run.config, run.plan, run.checkpoints.rows, run.state) == ({}, None, 0, "prepared")
    assert "prepared" in run._repr_html_()


def test_a_run_elsewhere_and_one_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    remember(Known("/there/runs/far", "me@login"))
    with pytest.raises(UserError, match=r"is on another host, me@login, .*\n  To do: copy it \(`rsync -a me@login:"):
        shardway.Run("far")
    with pytest.raises(UserError, match="there is no run nothing"):
        shardway.Run("nothing")


# --- the form of a table


ROWS = [{"step": 1, "loss": 2.0}, {"step": 2, "extra": "x"}]


class Frame:
    """What a library makes of columns."""

    def __init__(self, columns: dict[str, list[Any]], **options: Any) -> None:
        self.columns, self.options = columns, options


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Libraries that are stand-ins, and no others."""
    monkeypatch.setattr(frames, "find_spec", lambda name: object() if name in names else None)
    for name in names:
        module = types.ModuleType(name)
        module.DataFrame = Frame  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("names", "chosen"), [(("pandas", "polars"), "pandas"), (("polars",), "polars")])
def test_the_library_that_is_installed_makes_the_frame(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], chosen: str
) -> None:
    install(monkeypatch, *names)
    assert choose_form() == chosen
    made = make_table(ROWS, choose_form(), ("step",))
    assert made.columns == {"step": [1, 2], "loss": [2.0, None], "extra": [None, "x"]}
    assert made.options == ({"strict": False} if chosen == "polars" else {})


def test_without_a_library_columns_are_a_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setitem(sys.modules, "pandas", None)
    table = make_table(ROWS, choose_form())
    assert isinstance(table, Columns)
    assert table["loss"] == [2.0, None]
    with pytest.raises(UserError, match=r'To do: pip install "shardway\[frames\]"'):
        table.to_pandas()
    with pytest.raises(
        UserError, match=r'frames="numpy": no form of a table\.\n      allowed: pandas, polars, columns'
    ):
        choose_form("numpy")


# --- how it is shown


def test_what_a_run_holds_never_becomes_markup(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run<b>")
    directory.create()
    directory.write_status(state="failed", reason="<script>alert(1)</script>")
    shown = shardway.Run(directory.path)._repr_html_()
    assert "<script>" not in shown
    assert html.escape("<script>alert(1)</script>") in shown
    assert "run&lt;b&gt;" in shown


def test_a_long_table_shows_its_ends() -> None:
    shown = Columns({"step": list(range(1000))})._repr_html_()
    assert shown.count("<tr>") == 22
    assert "<td>999</td>" in shown
    assert "1000 rows" in shown


def test_a_curve_has_its_highest_value_on_top() -> None:
    assert display.render_curve([1.0]) == ""
    curve = display.render_curve([4.0, 2.0, 3.0], width=100, height=10)
    assert 'points="0.0,0.0 50.0,10.0 100.0,5.0"' in curve
    assert display.render_curve([float(n) for n in range(100_000)], width=100).count(",") <= 2 * 100 + 2  # two a pixel


def test_watching_without_a_notebook_is_a_line_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied(tmp_path, "finished")
    run.watch()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"run {run.path}  state finished")
    assert "  loss " in line


class Handle:
    """An output of a cell that can be replaced."""

    def __init__(self, shown: list[str]) -> None:
        self._shown = shown

    def update(self, content: Any) -> None:
        """Replace it."""
        self._shown.append(content.data)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """IPython as in a notebook; what its cell has shown."""
    import IPython
    import IPython.display

    shown: list[Any] = []

    def show(content: Any, display_id: bool = False) -> Handle:
        shown.append(getattr(content, "data", content))
        return Handle(shown)

    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setattr(IPython.display, "display", show)
    return shown


def begin_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shardway.Run:
    """A run that ends while it is watched."""
    directory = RunDir(tmp_path / "run")
    directory.create()
    states = iter(["running", "finished"])
    monkeypatch.setattr(RunDir, "find_writer", lambda self, by_hand=False: "process 1")

    def next_state(pause_s: float = 0.0) -> None:
        directory.write_status(state=next(states), reason="")

    next_state()
    monkeypatch.setattr(display, "time", types.SimpleNamespace(sleep=next_state))
    return shardway.Run(directory.path)


def test_a_notebook_updates_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notebook: list[Any]) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    begin_and_end(tmp_path, monkeypatch).watch()
    assert ["running" in shown for shown in notebook] == [True, False]
    assert "finished" in notebook[-1]


def test_a_notebook_with_widgets_shows_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notebook: list[Any]
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", types.SimpleNamespace(HTML=lambda: types.SimpleNamespace(value="")))
    begin_and_end(tmp_path, monkeypatch).watch()
    (widget,) = notebook
    assert "finished" in widget.value


def test_an_interrupt_ends_only_the_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin_and_end(tmp_path, monkeypatch)

    def interrupt(pause_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(display, "time", types.SimpleNamespace(sleep=interrupt))
    run.watch()
    assert capsys.readouterr().out.endswith("no longer watched; it goes on.\n")
