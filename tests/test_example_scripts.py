"""The scripts of examples/: how little changes, and that they train, resume and take any layout as they stand."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from commands import pacing
from example_scripts import EXAMPLES, PAIRS, command_environment, compare_pair, run_script, torchrun
from page_tables import check_block, check_table
from pool import RankPool
from runs import lone_rank, pool_ranks, read_column, read_named, worst_difference
from shardway.rundir.directory import RunDir
from speed import picked, thinned

pytestmark = pytest.mark.usefixtures("warm_starts")

SHORT = {
    "mnist": ("--epochs", "1"),
    "wikitext2": ("--epochs", "1", "--dim", "32"),
    "fsdp2": ("--epochs", "1", "--dim", "64", "--layers", "2"),
}
STEPS = ("train.steps=8",)
LAYOUTS = {
    "mnist": ("dp_replicate=2", "dp_shard=2"),
    "wikitext2": ("dp_replicate=2", "dp_shard=2"),
    "fsdp2": (
        "dp_replicate=2",
        "dp_shard=2",
        "tp=2",
        "cp=2",
        "pp=2",
        "dp_shard=2 tp=2",
        "dp_shard=2 pp=2",
        "cp=2 tp=2",
    ),
}
"""Degrees beside which all others are 1."""
MICRO = "train.micro_batch=4"
"""The same micro-batches on any number of ranks: masks of dropout follow them."""
FIRST = [(name, LAYOUTS[name][-1 if name != "fsdp2" else 1]) for name in PAIRS]


def degrees(layout: str) -> tuple[str, ...]:
    return tuple(f"parallel.{word}" for word in layout.split())


def size_of(layout: str) -> int:
    product = 1
    for word in layout.split():
        product *= int(word.partition("=")[2])
    return product


def run_on_ranks(rank: int, name: str, directory: Path, words: tuple[str, ...], alone: bool, last: int | None) -> None:
    """A script on the ranks of the pool, or on its rank 0 alone."""
    if not alone:
        run_script(name, directory, pool_ranks(), *SHORT[name], *words, last=last)
    elif rank == 0:
        run_script(name, directory, lone_rank(), *SHORT[name], *words, last=last)
    dist.barrier()


def losses(
    pool: RankPool, name: str, directory: Path, *words: str, layout: str = "", last: int | None = None
) -> list[float]:
    """The losses of a run of a script, which goes on where it was."""
    arguments = {"name": name, "directory": directory, "alone": not layout, "last": last}
    pool.run(run_on_ranks, size_of(layout) if layout else 1, {**arguments, "words": (*words, *degrees(layout))}, 120.0)
    return read_column(directory)


Curve = Callable[[str, str], list[float]]


@pytest.fixture(name="curve", scope="module")
def _curve(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """The losses of a script in a layout; of none, on one rank."""

    @functools.cache
    def through(name: str, layout: str) -> list[float]:
        return losses(rank_pool, name, tmp_path_factory.mktemp("curve") / "run", *STEPS, MICRO, layout=layout)

    return through


@thinned(("name", "layout"), [(name, layout) for name in PAIRS for layout in LAYOUTS[name]], every=5)
def test_a_layout_gives_the_curve_of_one_rank(curve: Curve, name: str, layout: str) -> None:
    there = curve(name, layout)
    assert len(there) == 8
    assert worst_difference(there, curve(name, "")) < 1e-4


@pytest.mark.parametrize("name", PAIRS)
def test_a_script_changes_in_at_most_eight_lines(name: str) -> None:
    assert 0 < len(compare_pair(name).new) <= 8


def test_the_page_of_the_own_loop_shows_what_changes(request: pytest.FixtureRequest) -> None:
    changes = {name: compare_pair(name) for name in PAIRS}
    head = ("example", "lines of code before", "new or changed", "gone")
    rows = [(f"`examples/{name}`", each.lines, len(each.new), len(each.gone)) for name, each in changes.items()]
    check_table(request, "own-loop.md", "lines that change", [head, *rows])
    for name, each in changes.items():
        lines = [*(f"- {line}" for line in each.gone), *(f"+ {line}" for line in each.new)]
        check_block(request, "own-loop-scripts.md", f"diff of {name}", "diff", lines)


def test_the_page_of_the_own_loop_names_the_layouts(request: pytest.FixtureRequest) -> None:
    head = ("example", "layout", "ranks")
    rows = [(f"`examples/{name}`", layout, size_of(layout)) for name in PAIRS for layout in LAYOUTS[name]]
    check_table(request, "own-loop-scripts.md", "layouts of the examples", [head, *rows])


@pytest.mark.parametrize("case", picked(FIRST, *FIRST[::2]), ids=PAIRS)
def test_a_script_that_died_goes_on_with_the_same_bits(
    rank_pool: RankPool, tmp_path: Path, curve: Curve, case: tuple[str, str]
) -> None:
    name, layout = case
    words = (*STEPS, MICRO, "checkpoint.every=3 steps")
    losses(rank_pool, name, tmp_path / "died", *words, layout=layout, last=5)
    again = losses(rank_pool, name, tmp_path / "died", *words, layout=layout)
    assert [event["step"] for event in read_named(tmp_path / "died", "started")] == [0, 3]
    assert again == curve(name, layout)


def test_a_script_goes_on_in_another_layout(rank_pool: RankPool, tmp_path: Path, curve: Curve) -> None:
    words = (*STEPS, MICRO, "checkpoint.every=3 steps")
    for layout, last in (("tp=2", 5), ("pp=2", 7), ("dp_shard=2", None)):
        found = losses(rank_pool, "fsdp2", tmp_path / "moved", *words, layout=layout, last=last)
    assert [event["step"] for event in read_named(tmp_path / "moved", "started")] == [0, 3, 6]
    assert worst_difference(found, curve("fsdp2", "")) < 1e-4


@pytest.mark.parametrize(("name", "layout"), FIRST[:2], ids=list(PAIRS)[:2])
def test_a_script_validates_alike_in_a_layout(rank_pool: RankPool, tmp_path: Path, name: str, layout: str) -> None:
    """All that is held out, though the default of a described run is a part of it."""
    words = ("train.steps=4", MICRO, "train.validate_every=2 steps")
    losses(rank_pool, name, tmp_path / "alone", *words)
    losses(rank_pool, name, tmp_path / "there", *words, layout=layout)
    alone, there = (read_named(tmp_path / place, "validation") for place in ("alone", "there"))
    assert [event["step"] for event in there] == [2, 4]
    assert [event["loss"] for event in there] == pytest.approx([event["loss"] for event in alone], rel=1e-4)
    assert all("accuracy" in event for event in there) == (name == "mnist")


def test_a_run_file_sets_the_layout_of_a_script(rank_pool: RankPool, tmp_path: Path, curve: Curve) -> None:
    """What a word sets wins over it."""
    file = tmp_path / "two.toml"
    file.write_text("format = 1\n[train]\nsteps = 5\nmicro_batch = 4\n[parallel]\ntp = 2\n", encoding="utf-8")
    arguments = {"name": "fsdp2", "directory": tmp_path / "run", "alone": False, "last": None}
    rank_pool.run(run_on_ranks, 2, {**arguments, "words": (str(file), "train.steps=4")})
    assert len(read_column(tmp_path / "run")) == 4
    assert worst_difference(read_column(tmp_path / "run"), curve("fsdp2", "")[:4]) < 1e-4


@pytest.mark.parametrize(
    ("name", "words", "label", "limit"),
    [
        ("mnist", ("--epochs", "2"), "loss", 1.5),
        ("wikitext2", ("--epochs", "2"), "perplexity", 10.0),
        ("fsdp2", ("--epochs", "2", "--dim", "64"), "loss", 5.0),
    ],
)
def test_a_single_device_script_learns(
    tmp_path: Path, name: str, words: tuple[str, ...], label: str, limit: float
) -> None:
    """Below what a guess gives: ln 10 = 2.3, 50 words, ln 256 = 5.5."""
    command = [sys.executable, str(EXAMPLES / name / "single.py"), *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=command_environment(), capture_output=True, text=True, timeout=900, check=True
    )
    last = done.stdout.splitlines()[-1]
    assert last.startswith("epoch 2: ")
    assert float(last.split(f"{label} ")[1].split(",")[0]) < limit


def start_script(
    name: str, folder: Path, *words: str, world: int = 1, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    script = EXAMPLES / name / "with_shardway.py"
    command = (sys.executable, *(torchrun(world, script, *words) if world > 1 else (str(script), *words)))
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**command_environment(), **(environ or {})},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "fsdp2" else [pytest.mark.exhaustive]) for name in PAIRS]
)
def test_a_user_starts_a_script_with_torchrun(tmp_path: Path, curve: Curve, name: str) -> None:
    finish(start_script(name, tmp_path, *SHORT[name], *STEPS, MICRO, "run.threads=1", "parallel.dp_shard=2", world=2))
    assert RunDir(tmp_path / "runs" / name).read_status()["state"] == "finished"
    assert worst_difference(read_column(tmp_path / "runs" / name), curve(name, "")) < 1e-4


@pytest.mark.exhaustive  # one that is killed and started again is a part of `make test`
@pytest.mark.parametrize("name", PAIRS)
def test_a_user_starts_a_script_alone(tmp_path: Path, curve: Curve, name: str) -> None:
    finish(start_script(name, tmp_path, *SHORT[name], *STEPS, MICRO, "run.threads=1"))
    assert RunDir(tmp_path / "runs" / name).read_status()["state"] == "finished"
    assert worst_difference(read_column(tmp_path / "runs" / name), curve(name, "")) < 1e-4


def test_a_killed_script_goes_on_when_it_is_started_again(rank_pool: RankPool, tmp_path: Path) -> None:
    words = (*SHORT["fsdp2"], "train.steps=16", "checkpoint.every=5 steps", "run.threads=1")
    # Seconds from the first checkpoint to the end, in which it is killed.
    process = start_script("fsdp2", tmp_path, *words, environ=pacing(0.4))
    run = RunDir(tmp_path / "runs/fsdp2")
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None and not run.checkpoint_steps():
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    killed_after = len(read_column(run.path))
    finish(start_script("fsdp2", tmp_path, *words))
    through = losses(rank_pool, "fsdp2", tmp_path / "through", *words[len(SHORT["fsdp2"]) :])
    assert 5 <= killed_after < len(through)
    assert read_column(run.path) == through


def test_the_real_digits_are_learnt(tmp_path: Path) -> None:
    root = os.environ.get("SHARDWAY_TEST_DATA")
    if root is None:
        pytest.skip("SHARDWAY_TEST_DATA does not name a folder of real data")
    finish(start_script("mnist", tmp_path, "--data", f"{root}/mnist", "--epochs", "1", "train.steps=300"))
    assert read_named(tmp_path / "runs/mnist", "validation")[-1]["accuracy"] > 0.93
