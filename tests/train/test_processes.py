"""`shardway train` as processes: stopped, killed, started again; nothing is lost and nothing is left alive."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from commands import PATIENCE_S, Command, Start, killing_in_save, stalling, training_commands
from pool import RankPool
from runs import TINY, lone_rank, pool_ranks, read_column, read_named, read_steps, train_tiny, worst_difference
from shardway.rundir.directory import RunDir

STEPS = 40
SAVED = ("checkpoint.every=5 steps", "checkpoint.background=true")
LONG = (
    *(*TINY, *SAVED, f"train.steps={STEPS}", "data.record_ids=true"),
    *("model.dropout=0.1", "train.micro_batch=4"),  # masks of dropout follow micro-batches
)
ENDLESS = (*TINY, "train.steps=1000000", "checkpoint.every=off")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("name", *words)` in a folder of that name."""
    with training_commands(tmp_path) as go:
        yield go


PAIR = ("--nproc", "2", "run.max_restarts=0")


def test_ctrl_c_stops_two_ranks_after_the_step_and_a_second_one_at_once(start: Start) -> None:
    """At once as well while one of them cannot stop, held in the middle of a step; nothing of it is in the way of the
    next, and a second writer leaves that one alone."""
    command = start("run", *PAIR, *ENDLESS)
    command.wait_for_step(5)
    command.ranks()[1].suspend()
    command.process.send_signal(signal.SIGINT)
    command.wait_until(command.run.stop_requested)
    command.process.send_signal(signal.SIGINT)
    code, said = command.end()
    assert code == 130
    assert said.rstrip().endswith("shardway: ended at once by a second signal")
    assert "death signal" not in said, "torch's agent speaks as well"
    assert command.left_alive() == []
    assert not command.run.stop_requested()
    status = command.run.read_status()
    assert (status["state"], status["reason"]) == ("stopped", "a second signal ended the run at once")

    again = start("run", *PAIR, *ENDLESS)
    again.wait_for_step(5)
    code, said = start("run", *PAIR, *ENDLESS).end()
    assert code == 2
    assert said.startswith(f"shardway: another run is training into {again.folder}: process ")
    assert again.process.poll() is None
    again.process.send_signal(signal.SIGINT)
    out, said = again.process.communicate(timeout=PATIENCE_S)
    assert again.process.returncode == 0, said
    assert "stopping after this step and saving; once more to end at once" in said
    outcome = json.loads(out)
    assert (outcome["state"], outcome["reason"]) == ("stopped", "a signal asked for a stop")
    assert read_column(again.folder, "step") == list(range(1, outcome["step"] + 1))
    assert again.run.checkpoint_steps() == [outcome["step"]]
    assert not again.run.stop_requested()
    assert again.left_alive() == []


def test_a_rank_that_is_killed_ends_the_job_with_its_name(start: Start) -> None:
    command = start("run", *PAIR, *ENDLESS)
    command.wait_for_step(5)
    victim = command.ranks()[1]
    victim.send_signal(signal.SIGKILL)
    code, said = command.end()
    assert code == 4
    assert said.strip().splitlines()[-2:] == [
        f"shardway: rank 1 (process {victim.pid}) was ended by SIGKILL; the other ranks were ended with it.",
        "  To do: run the same command again: it goes on from the start, since nothing was saved yet. If that "
        "signal was not sent on purpose, the machine may have run out of memory (dmesg says so).",
    ]
    assert command.left_alive() == []
    assert command.run.read_status()["state"] == "failed"
    assert command.run.find_writer() is None


def test_one_rank_that_is_asked_for_is_watched_as_many_are(start: Start) -> None:
    command = start("run", "--nproc", "1", *ENDLESS, "checkpoint.every=2 steps", "run.max_restarts=1")
    command.wait_for_step(5)
    command.ranks()[0].send_signal(signal.SIGKILL)
    command.wait_until(lambda: count(command, "started") == 2)
    command.process.send_signal(signal.SIGTERM)
    command.finish()
    assert count(command, "restarted") == 1


def count(command: Command, name: str) -> int:
    return sum(1 for _ in command.run.all_events(names=(name,)))


def test_a_rank_that_crashes_in_a_library_tells_where(start: Start) -> None:
    """And leaves the stacks of its threads in its log."""
    command = start("run", *PAIR, *ENDLESS)
    command.wait_for_step(5)
    victim = command.ranks()[1]
    victim.send_signal(signal.SIGSEGV)
    code, said = command.end()
    assert code == 4
    what, to_do, log = said.strip().splitlines()[-3:]
    assert what.startswith(f"shardway: rank 1 (process {victim.pid}) crashed in native code (SIGSEGV), called from ")
    assert re.search(r"called from \S+ \(\S+\.py:\d+\) < .*\); the other ranks were ended with it\.$", what)
    assert to_do.startswith("  To do: run the same command again: it goes on from the start")
    printed = Path(log.removeprefix("  What it printed is in ")).read_text(encoding="utf-8")
    assert "Fatal Python error: Segmentation fault" in printed
    assert "cli/rank.py" in printed


def test_sigterm_stops_a_single_process_after_the_step(start: Start) -> None:
    command = start("run", *ENDLESS)
    command.wait_for_step(5)
    command.process.send_signal(signal.SIGTERM)
    out, said = command.process.communicate(timeout=PATIENCE_S)
    assert command.process.returncode == 0, said
    outcome = json.loads(out)
    assert (outcome["state"], outcome["reason"]) == ("stopped", "a signal asked for a stop")
    assert command.run.checkpoint_steps() == [outcome["step"]]


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["our agent", "torchrun"])
def test_ranks_stop_and_save_when_their_agent_is_killed(start: Start, launcher: Sequence[str]) -> None:
    command = start("run", *(() if launcher else PAIR), *ENDLESS, launcher=launcher)
    command.wait_for_step(5)
    command.process.send_signal(signal.SIGKILL)
    assert command.end()[0] == -signal.SIGKILL
    assert command.left_alive() == []
    status = command.run.read_status()
    assert (status["state"], status["reason"]) == ("stopped", "the agent that started the ranks is gone (killed?)")
    assert command.run.checkpoint_steps() == [status["step"]]


def kill_somewhere(start: Start, words: Sequence[str], dice: random.Random) -> None:
    """kill -9 one rank (or the only process) of "killed" at a random step, after the first save; the ranks that are
    left end by themselves. None comes to the end of the run before, however late the kill is."""
    command = start("killed", *words, environ=stalling(0, 30, Path("stands")))
    command.wait_for_step(dice.randrange(6, 22))
    command.wait_until(lambda: bool(command.run.checkpoint_steps()))
    victims = list(command.ranks().values()) or [psutil.Process(command.process.pid)]
    dice.choice(victims).send_signal(signal.SIGKILL)
    assert command.end()[0] != 0
    assert command.left_alive() == []


def kill_while_saving(start: Start, words: Sequence[str], folder: Path, dice: random.Random) -> None:
    """The same while a checkpoint is being written and the ranks train on."""
    base = RunDir(folder / "killed").checkpoint_steps()[-1]
    rank, mark = dice.randrange(2 if "--nproc" in words else 1), folder / "struck"
    command = start("killed", *words, environ=killing_in_save(rank, base + 1, mark))
    command.wait_for_step(base + 1)
    assert command.end()[0] != 0
    assert mark.exists()
    assert command.left_alive() == []
    assert RunDir(folder / "killed").partial_checkpoints() != []


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="one", marks=pytest.mark.exhaustive),
        pytest.param(PAIR, id="replicas", marks=pytest.mark.exhaustive),
        pytest.param((*PAIR, "parallel.dp_shard=2"), id="shards"),
    ],
)
def test_what_was_killed_goes_on_with_the_same_bits(
    start: Start, rank_pool: RankPool, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """And on other ranks with the same curve and the same samples."""
    dice, size, layout = random.Random(" ".join(words)), 2 if words else 1, words[2:]
    rank_pool.run(go_through, size, {"folder": tmp_path / "through", "words": layout})
    kill_somewhere(start, (*words, *LONG), dice)
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    kill_while_saving(start, (*words, *LONG), tmp_path, dice)
    start("killed", *words, *LONG).finish()
    starts = [event["step"] for event in read_named(tmp_path / "killed", "started")]
    assert len(starts) == 3
    assert 0 < starts[1] <= starts[2]
    for column in ("step", "loss", "grad_norm", "lr"):
        assert read_column(tmp_path / "killed", column) == read_column(tmp_path / "through", column)
    assert used(tmp_path / "killed") == used(tmp_path / "through")

    rank_pool.run(go_through, 3 - size, {"folder": tmp_path / "moved", "words": ()})
    assert [event["step"] for event in read_named(tmp_path / "moved", "started")] == [0, starts[1]]
    assert read_column(tmp_path / "moved", "step") == list(range(1, STEPS + 1))
    assert worst_difference(read_column(tmp_path / "moved"), read_column(tmp_path / "through")) < 1e-5
    samples = used(tmp_path / "moved")
    flat = [identity for step in sorted(samples) for ids in samples[step] for identity in ids]
    assert sorted(flat[: 95 * 3]) == sorted(list(range(95)) * 3)


def go_through(rank: int, folder: Path, words: tuple[str, ...]) -> None:
    """On the ranks of the pool, to the end."""
    train_tiny(folder, pool_ranks() if dist.get_world_size() > 1 else lone_rank(), *words, base=LONG)


def used(folder: Path) -> dict[int, list[Any]]:
    """Step -> the samples of each rank."""
    samples: dict[int, list[Any]] = {}
    for rank in RunDir(folder).ranks_with_events():
        for event in read_steps(folder, rank):
            samples.setdefault(event["step"], []).append(event["ids"])
    return samples


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile needs a C++ compiler on a CPU"
)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(PAIR, id="replicas"),
        pytest.param((*PAIR, "parallel.dp_shard=2"), id="shards"),
    ],
)
def test_compiled_blocks_give_the_same_curve(start: Start, tmp_path: Path, words: tuple[str, ...]) -> None:
    """And names in a checkpoint are those of the plain model: one rank without compiling goes on from it."""
    short = (*TINY, "train.steps=4", "optim.warmup=0 steps", "optim.schedule=constant", "checkpoint.every=4 steps")
    start("plain", *words, *short).finish()
    start("compiled", *words, *short, "train.compile=blocks").finish()
    assert worst_difference(read_column(tmp_path / "compiled"), read_column(tmp_path / "plain")) < 1e-5
    start("compiled", *short, "train.steps=5").finish()
    assert read_column(tmp_path / "compiled", "step") == [1, 2, 3, 4, 5]
