"""The packages of examples/plugins: each is installed with pip into a folder, and used from the command line."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import warm
from example_plugins import EXAMPLES, install_examples
from shardway.runfile.schema import OptimSection

PACKAGES = ("shardway-lion", "shardway-sqlite-text", "shardway-sqlite-tracker")
TINY = (
    *("model.dim=16", "model.layers=1", "model.heads=2", "data.seq_len=16", "train.steps=8", "train.global_batch=8"),
    *("train.validate_every=4", "checkpoint.every=4", "checkpoint.background=false", "optim.warmup=2"),
    *("run.threads=1", "run.display=off"),
)
LION = ("optim.name=lion", "optim.lr=1e-3", "optim.settings={betas = [0.9, 0.98]}")
SYNTHETIC = ("data.kind=synthetic", "data.samples=96")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three packages."""
    folder = tmp_path_factory.mktemp("plugins")
    return install_examples(PACKAGES, folder)


class Shell:
    """Runs `shardway` in a folder, with the packages on the path."""

    def __init__(self, site: Path, folder: Path) -> None:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(site)]))
        self.environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.folder = folder

    def __call__(self, *words: str, code: int = 0) -> str:
        """What it prints."""
        with warm.starts():
            done = subprocess.run(
                [sys.executable, "-m", "shardway", *words],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr


@pytest.fixture
def shell(site: Path, tmp_path: Path) -> Shell:
    return Shell(site, tmp_path)


def losses(run: Path) -> list[float]:
    lines = (run / "events/rank-00000.jsonl").read_text().splitlines()
    steps = {event["step"]: event["loss"] for event in map(json.loads, lines) if event["event"] == "step"}
    return [steps[step] for step in sorted(steps)]


def go_on_from_half(run: Path, copy: Path) -> None:
    """A copy of a finished run that has its first checkpoint alone."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints/step-000000008")


@pytest.mark.parametrize("package", sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir()))
def test_an_example_is_small_and_says_how_it_is_used(package: str) -> None:
    folder = EXAMPLES / package
    assert sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py")) < 150
    assert tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"] == package
    assert "pip install ." in (folder / "README.md").read_text()


def test_they_are_listed(shell: Shell) -> None:
    rows = [row for row in json.loads(shell("plugins", "list", "--json")) if row["package"] in PACKAGES]
    assert [(row["group"], row["name"], row["package"], row["version"], row["state"]) for row in rows] == [
        ("data_sources", "sqlite_text", "shardway-sqlite-text", "1.0.0", "ok"),
        ("optimizers", "lion", "shardway-lion", "1.0.0", "ok"),
        ("trackers", "sqlite", "shardway-sqlite-tracker", "1.0.0", "ok"),
    ]
    assert '"muon", "lion"' in shell("config", "explain", "optim.name")
    assert '"synthetic", "sqlite_text"' in shell("config", "explain", "data.kind")
    assert '"trackio", "sqlite"' in shell("config", "explain", "track.to")
    table = shell("plugins", "list", "trackers", "--others", "--check").splitlines()
    assert [line.split() for line in table] == [
        ["GROUP", "NAME", "PACKAGE", "VERSION", "STATE"],
        ["trackers", "sqlite", "shardway-sqlite-tracker", "1.0.0", "ok"],
    ]


def test_the_plan_counts_what_lion_keeps(shell: Shell) -> None:
    """One momentum in fp32: as much as the weights, and half of AdamW's."""

    def plan(optimizer: str) -> dict[str, float]:
        words = ("llama3-8b", "--on", "leonardo-booster", "--tokens", "1e9", "--layout", "tp=4,dp_shard=16")
        facts = json.loads(shell("plan", *words, "--nodes", "16", "--optimizer", optimizer, "--json"))
        items: dict[str, float] = facts["plan"]["stages"][0]["items"]
        return items

    adamw, lion = plan("adamw"), plan("lion")
    assert lion["optimizer"] == lion["weights"] == adamw["optimizer"] / 2
    assert {**lion, "optimizer": 0} == {**adamw, "optimizer": 0}


def test_lion_is_the_published_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 2 of arXiv:2302.06675, in fp64."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "shardway-lion/src"))
    kind = importlib.import_module("shardway_lion").LionKind()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    section = OptimSection(weight_decay=0.1, settings={"betas": [0.8, 0.9]})
    optimizer, weight, momentum = kind.build(section, model, 0.01), model.weight.detach().clone(), torch.zeros(2, 3)
    for _ in range(3):
        gradient = torch.randn(2, 3, dtype=torch.float64)
        model.weight.grad, model.bias.grad = gradient.clone(), torch.zeros(2, dtype=torch.float64)
        optimizer.step()
        weight = weight - 0.01 * ((0.8 * momentum + 0.2 * gradient).sign() + 0.1 * weight)
        momentum = 0.9 * momentum + 0.1 * gradient
        torch.testing.assert_close(model.weight.detach(), weight)
    for name in [name for name in sys.modules if name.startswith("shardway_lion")]:
        del sys.modules[name]


def test_lion_is_the_same_on_one_rank_and_on_two(shell: Shell, tmp_path: Path) -> None:
    shell("train", "--dir", "one", *TINY, *SYNTHETIC, *LION)
    shell("train", "--dir", "two", "--nproc", "2", *TINY, *SYNTHETIC, *LION, "parallel.dp_shard=2")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0]
    go_on_from_half(tmp_path / "two", tmp_path / "again")
    shell("train", "--dir", "again", "--nproc", "2", *TINY, *SYNTHETIC, *LION, "parallel.dp_shard=2")
    assert shell("checkpoint", "diff", "two", "again").startswith("equal: every bit of ")


def test_rows_of_sqlite_train_and_reach_a_tracker(shell: Shell, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "corpus.db") as corpus:
        corpus.execute("create table documents (id integer primary key, body text)")
        rows = [(f"row {row}: to be, or not to be" * (row % 3),) for row in range(200)]
        corpus.executemany("insert into documents (body) values (?)", rows)
    data = ("data.kind=sqlite_text", "data.path=corpus.db", 'data.settings={column = "body"}', "data.workers=1")
    words = ("train", *TINY, *data, 'track.to=["sqlite"]', 'track.settings={sqlite = {file = "runs.db"}}')
    shell(*words, "--dir", "first")
    go_on_from_half(tmp_path / "first", tmp_path / "again")
    shell(*words, "--dir", "again")
    assert losses(tmp_path / "again") == losses(tmp_path / "first")
    with sqlite3.connect(tmp_path / "runs.db") as runs:
        assert runs.execute("select count(*), state from runs").fetchall() == [(1, "finished")]  # one id, resumed
        tracked = runs.execute("select step, value from numbers where name = 'loss' order by step").fetchall()
        validated = runs.execute("select step from numbers where name = 'validation/loss'").fetchall()
    assert tracked == list(enumerate(losses(tmp_path / "first"), 1))
    assert validated == [(4,), (8,)]


def test_what_is_wrong_with_its_data_is_one_message(shell: Shell, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "holes.db") as corpus:
        corpus.execute("create table documents (id integer primary key, text text)")
        corpus.executemany("insert into documents values (?, 'x')", [(1,), (3,)])
    words = ("train", *TINY, "data.kind=sqlite_text", "data.path=holes.db")
    assert '"holes.db" has 2 rows, the last with the number 3' in shell(*words, code=2)
    assert '"holes.db" cannot be read: no such table: a' in shell(*words, 'data.settings={table = "a"}', code=2)
