"""Trackers that need a library, with modules in its place that have its signatures; the metrics file; and sending a run
after the fact."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from event_files import read_scalars
from runs import lone_rank, train_tiny
from shardway.errors import UserError
from shardway.rundir.directory import RunDir
from shardway.watch.trackers.base import check_trackers
from shardway.watch.trackers.openmetrics import OpenMetricsFile, render_metrics
from shardway.watch.trackers.send import send_run
from shardway.watch.trackers.services import MLflow, Trackio, WeightsAndBiases


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


class PretendedWandb:
    """W&B 0.31, as far as it is used: a row below the last one is dropped."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.step, self.id, self.made = 0, "abc", list[dict[str, Any]]()

    def init(
        self, *, project: str, entity: Any, group: Any, name: str, id: Any, resume: str, dir: str, config: Any,
        settings: Any,
    ) -> PretendedWandb:  # fmt: skip
        self.made.append({"id": id, "resume": resume, "project": project})
        self.step = max(self.rows, default=-1) + 1
        return self

    def log(self, data: dict[str, float], step: int) -> None:
        assert step >= max(self.rows, default=0)
        self.rows.setdefault(step, {}).update(data)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


def test_wandb_goes_on_in_the_same_run_and_takes_no_step_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service = PretendedWandb()
    pretend(monkeypatch, "wandb", init=service.init, Settings=lambda **given: given)
    id = None
    for first, last, state in ((1, 4, "stopped"), (3, 6, "finished")):
        tracker = WeightsAndBiases(WeightsAndBiases.read_settings({}))
        id = tracker.start("a", tmp_path, {}, id)
        tracker.rewind(first - 1)
        for step in range(first, last + 1):
            tracker.log(step, {"loss": float(step)}, 0.0)
        tracker.log(last, {"validation/loss": 0.5}, 0.0)
        tracker.finish(state)
    assert [each["id"] for each in service.made] == [None, "abc"]
    assert sorted(service.rows) == [1, 2, 3, 4, 5, 6]
    assert service.rows[4] == {"loss": 4.0, "validation/loss": 0.5}
    assert service.exit_code == 0


def test_mlflow_keeps_each_value_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[Any] = []

    class Client:
        """MLflow 3.17, as far as it is used."""

        def __init__(self, tracking_uri: str) -> None:
            assert tracking_uri.startswith("sqlite:///")

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str, artifact_location: Any) -> str:
            return "1"

        def create_run(self, experiment_id: str, run_name: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def get_run(self, run_id: str) -> Any:
            return SimpleNamespace(data=SimpleNamespace(metrics={each.key: 0 for each in kept}))

        def update_run(self, run_id: str, status: str) -> None:
            assert run_id == "r1"

        def get_metric_history(self, run_id: str, key: str) -> list[Any]:
            return [each for each in kept if each.key == key]

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            kept.extend(metrics)

        def set_terminated(self, run_id: str, status: str) -> None:
            kept_states.append(status)

    kept_states: list[str] = []
    metric = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)  # noqa: E731
    pretend(monkeypatch, "mlflow")
    pretend(monkeypatch, "mlflow.tracking", MlflowClient=Client)
    pretend(monkeypatch, "mlflow.entities", Metric=metric, Param=lambda key, value: (key, value))
    pretend(monkeypatch, "mlflow.exceptions", MlflowException=RuntimeError)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    id = None
    for first, last, state in ((1, 4, "stopped"), (3, 6, "fault")):
        tracker = MLflow(MLflow.read_settings({}))
        id = tracker.start("a", tmp_path, {"train": {"steps": 6}}, id)
        for step in range(first, last + 1):
            tracker.log(step, {"loss": float(step), "top@5": 1.0}, 7.0)
        tracker.finish(state)
    assert [each.step for each in kept if each.key == "loss"] == [1, 2, 3, 4, 5, 6]
    assert {each.key for each in kept} == {"loss", "top_5"}
    assert kept_states == ["KILLED", "FAILED"]


def test_trackio_resumes_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    run = SimpleNamespace(
        name="a", log=lambda metrics, step: rows.append({**metrics, "step": step}), finish=lambda: None
    )
    storage = SimpleNamespace(SQLiteStorage=SimpleNamespace(get_logs=lambda project, name: rows))
    pretend(monkeypatch, "trackio", init=lambda **given: run, sqlite_storage=storage)
    id = None
    for first in (1, 2):
        tracker = Trackio(Trackio.read_settings({}))
        id = tracker.start("a", tmp_path, {}, id)
        for step in (first, first + 1):
            tracker.log(step, {"loss": float(step)}, 0.0)
        tracker.finish("finished")
    assert rows == [{"loss": float(step), "step": step} for step in (1, 2, 3)]


# --- before a run starts


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_library_is_an_error_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardway.watch.trackers.base.find_spec", lambda module: None)
    with pytest.raises(UserError, match=f"pip install {name}"):
        check_trackers([name], {}, {"WANDB_MODE": "offline"})


def test_a_run_with_a_missing_library_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardway.watch.trackers.base.find_spec", lambda module: None)
    with pytest.raises(UserError, match="pip install trackio"):
        train_tiny(tmp_path / "run", lone_rank(), 'track.to=["trackio"]', "train.steps=4")
    assert not (tmp_path / "run").exists()


def test_a_key_comes_from_the_environment_or_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardway.watch.trackers.base.find_spec", lambda module: module)
    monkeypatch.setenv("HOME", str(tmp_path))
    home: dict[str, str] = {}
    with pytest.raises(UserError, match="WANDB_API_KEY"):
        check_trackers(["wandb"], {}, home)
    check_trackers(["wandb"], {}, {**home, "WANDB_MODE": "offline"})
    check_trackers(["wandb"], {}, {**home, "WANDB_API_KEY": "x"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    check_trackers(["wandb"], {}, home)
    with pytest.raises(UserError, match="holds a password"):
        check_trackers(["mlflow"], {"mlflow": {"uri": "https://me:secret@host"}}, {})


# --- the metrics file


def test_the_metrics_file_has_the_form_of_the_collector(tmp_path: Path) -> None:
    tracker = OpenMetricsFile(OpenMetricsFile.read_settings({"folder": str(tmp_path), "every": 0.0}))
    assert tracker.start("my run", tmp_path, {}, None) == str(tmp_path / "shardway_my_run.prom")
    tracker.rewind(0)
    tracker.log(3, {"loss": 1.5, "validation/loss": float("nan")}, 0.0)
    tracker.finish("finished")
    assert [path.name for path in tmp_path.iterdir()] == ["shardway_my_run.prom"]
    lines = (tmp_path / "shardway_my_run.prom").read_text().splitlines()
    assert 'shardway_loss{run="my run",name="loss"} 1.5' in lines
    assert 'shardway_validation_loss{run="my run",name="validation/loss"} NaN' in lines
    assert 'shardway_running{run="my run"} 0' in lines
    assert lines[-1] == "# EOF"


def test_names_that_become_alike_stay_apart() -> None:
    text = render_metrics('a"b', 1, {"top/5": 1.0, "top 5": 2.0, "step": 9.0}, running=True)
    assert text.count("# TYPE shardway_top_5 gauge") == 1
    assert 'shardway_top_5{run="a\\"b",name="top 5"} 2.0' in text
    assert 'shardway_step_{run="a\\"b",name="step"} 9.0' in text


def test_hosts_and_devices_are_labels_of_one_metric() -> None:
    values = {
        "hardware/n1.cluster/gpu/0/use_percent": 90.0,
        "hardware/n1.cluster/gpu/1/use_percent": 80.0,
        "hardware/n2.cluster/gpu/0/use_percent": 70.0,
        "hardware/n1.cluster/ib/mlx5_0:1/rx_bytes_per_s": 1e9,
        "hardware/n1.cluster/cpu/use_percent": 5.0,
        "hardware/odd": 1.0,
    }
    assert render_metrics("r", 7, values, running=True).splitlines()[6:] == [
        "# HELP shardway_hardware_cpu_use_percent The newest value of a run.",
        "# TYPE shardway_hardware_cpu_use_percent gauge",
        'shardway_hardware_cpu_use_percent{run="r",host="n1.cluster"} 5.0',
        "# HELP shardway_hardware_gpu_use_percent The newest value of a run.",
        "# TYPE shardway_hardware_gpu_use_percent gauge",
        'shardway_hardware_gpu_use_percent{run="r",host="n1.cluster",gpu="0"} 90.0',
        'shardway_hardware_gpu_use_percent{run="r",host="n1.cluster",gpu="1"} 80.0',
        'shardway_hardware_gpu_use_percent{run="r",host="n2.cluster",gpu="0"} 70.0',
        "# HELP shardway_hardware_ib_rx_bytes_per_s The newest value of a run.",
        "# TYPE shardway_hardware_ib_rx_bytes_per_s gauge",
        'shardway_hardware_ib_rx_bytes_per_s{run="r",host="n1.cluster",ib="mlx5_0:1"} 1000000000.0',
        "# HELP shardway_hardware_odd The newest value of a run.",
        "# TYPE shardway_hardware_odd gauge",
        'shardway_hardware_odd{run="r",name="hardware/odd"} 1.0',
        "# EOF",
    ]


_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"shardway_[a-zA-Z0-9_]*\{{{_LABEL}(?:,{_LABEL})*\}} \S+")
"""A sample, as the text format of OpenMetrics has it (metricset, normalchar and escaped-char of its ABNF)."""


@given(st.text(), st.dictionaries(st.text(), st.floats(), max_size=8), st.text(alphabet='"\\\n/a'))
def test_whatever_a_script_logs_the_file_can_be_parsed(run: str, values: dict[str, float], odd: str) -> None:
    more = {f"hardware/{odd}/gpu/{odd}/{odd}": 1.0, f"hardware/n1/{odd}/use": 2.0}
    text = render_metrics(run, 3, {**values, **more}, running=False)
    *lines, end = text.removesuffix("\n").split("\n")
    assert (text[-1], end) == ("\n", "# EOF")
    seen, family = set[str](), ""
    for line in lines:
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in seen
            seen.add(family)
        elif line.startswith("#"):
            assert line == f"# TYPE {family} gauge"
        else:
            assert _SAMPLE.fullmatch(line)
            assert line.startswith(f"{family}{{")
            assert line.rpartition("} ")[0] not in seen  # one value for a set of labels
            seen.add(line.rpartition("} ")[0])


# --- after the fact


def test_a_run_is_sent_once_and_then_only_what_is_new(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    with run.event_writer(0) as events:
        events.write("started", step=0)
        for step in (1, 2, 3):
            events.write("step", step=step, loss=1.0 / step)
        events.write("started", step=2)  # step 3 is undone
        events.write("step", step=3, loss=0.25)

    def send() -> list[tuple[int, str]]:
        return [(each.events, each.id) for each in send_run(run, ["tensorboard"], {}, {})]

    assert send() == [(3, str(run.path / "tensorboard"))]
    assert [each[0] for each in send()] == [0]
    with run.event_writer(0) as events:
        events.write("step", step=4, loss=0.5)
        events.write("finished", step=4, reason="all")
    assert [each[0] for each in send()] == [1]
    rows = [row for path in sorted((run.path / "tensorboard").iterdir()) for row in read_scalars(path)]
    losses = {step: values["loss"] for step, values in rows if "loss" in values}
    assert losses == {1: 1.0, 2: 0.5, 3: 0.25, 4: 0.5}
    kept = json.loads((run.path / "trackers.json").read_text())
    assert kept["sent"]["tensorboard"]["events"] == 8
    assert kept["ids"] == {"tensorboard": str(run.path / "tensorboard")}
