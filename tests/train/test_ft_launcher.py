"""Ranks under NVIDIA's ft_launcher: killed and stopped for real, started again by it, and nothing of it in the losses.

Runs where nvidia-resiliency-ext is installed (the extra `nvidia`); docs/faults.md says how.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from commands import Command, Start, training_commands
from runs import TINY, read_column, read_named
from shardway.launch.starters.ft_launcher import MODULE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("nvidia_resiliency_ext") is None, reason="nvidia-resiliency-ext is not installed"),
]

OPTIONS = ("--local-addr=127.0.0.1", "--ft-workload-check-interval=1", "--ft-enable-nic-monitor=false")
LAUNCHER = ("-m", MODULE, "--standalone", "--nproc-per-node=2", "--max-restarts=3", *OPTIONS)
LONG = (*TINY, "checkpoint.every=20 steps", "train.steps=160", "model.dropout=0.1")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("name", *words)` in a folder of that name."""
    with training_commands(tmp_path) as go:
        yield go


def ranks_of(launcher: psutil.Process) -> dict[int, psutil.Process]:
    """The ranks of this moment; its monitors are forks of the launcher, and bear no rank."""
    environs = {child: child.environ() for child in launcher.children()}
    return {
        int(environ["RANK"]): child for child, environ in environs.items() if "FT_RANK_MONITOR_IPC_SOCKET" in environ
    }


def kill(rank: psutil.Process) -> None:
    rank.send_signal(signal.SIGKILL)


def stop(rank: psutil.Process) -> None:
    rank.send_signal(signal.SIGSTOP)


def disturb(command: Command, fault: Callable[[psutil.Process], None], rank: int) -> None:
    """Do it to a rank once there is a checkpoint."""
    command.wait_for_step(30)
    command.wait_until(lambda: bool(command.run.checkpoint_steps()))
    fault(ranks_of(psutil.Process(command.process.pid))[rank])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by our own agent."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with training_commands(folder) as go:
        go("run", "--nproc", "2", *LONG).finish()
    return folder / "run"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "said"), [(kill, "failed (exitcode: -9)"), (stop, "Did not get subsequent heartbeat")]
)
def test_the_run_comes_out_the_same_to_the_bit(
    fault: Callable[[psutil.Process], None], said: str, rank: int, start: Start, undisturbed: Path
) -> None:
    command = start("run", *LONG, "run.hang_timeout=4s", launcher=LAUNCHER)
    disturb(command, fault, rank)
    command.note_processes()
    code, printed = command.end()
    assert code == 0, printed
    assert said in printed
    started = read_named(command.folder, "started")
    assert [event["launcher"] for event in started] == ["ft_launcher"] * 2
    assert 20 <= started[1]["step"] < 160
    for column in ("step", "loss", "grad_norm", "lr"):
        assert read_column(command.folder, column) == read_column(undisturbed, column)
    assert command.left_alive() == []
