"""A terminal that goes, an output that nobody reads, and signals that schedulers and people send: a run is stopped and
saved at its last step, or goes on; nothing is lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from runs import TINY, read_steps
from shardway.rundir.directory import RunDir

pytestmark = pytest.mark.usefixtures("warm_starts")

DUMPS = "faulthandler.register(signal.SIGUSR1, file=open(os.devnull, 'w'))"
ENDLESS = (*TINY, "train.steps=1000000", "data.samples=4096")
SHORT = (*TINY, "train.steps=30")


def words(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "shardway", "train", "--dir", str(folder), *more]


IN_TERMINAL = """
import fcntl, signal, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""
WITHOUT_OUTPUTS = """
import os, sys
for number in range(3):
    os.close(number)
sys.stdin = sys.__stdin__ = sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = None
"""
"""What Python makes of `>&- 2>&- <&-`."""
SOON = "from shardway.ranks import outputs; outputs._LEAVE_S = 0.5"
"""For so long a run that leaves waits for who reads its outputs."""


def begun(code: str, words: Sequence[str]) -> list[str]:
    """The same command, in whose process this comes first; unlike one behind a program of the system it starts warm."""
    own = "import runpy, sys; sys.argv[0] = 'shardway'; runpy.run_module('shardway', run_name='__main__')"
    return [words[0], "-c", f"{code}\n{own}", *words[3:]]


def wait_for_step(run: RunDir, step: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while not any(event["step"] >= step for event in run.all_events() if event["event"] == "step"):
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)


@contextlib.contextmanager
def running(command: Sequence[str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A command that prints there, and does not outlive a test that fails meanwhile."""
    with subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def check_saved(folder: Path) -> None:
    """It was stopped as it was asked, and all its steps are saved."""
    run = RunDir(folder)
    assert run.read_status()["state"] == "stopped"
    assert run.checkpoint_steps()[-1] == read_steps(folder)[-1]["step"]


class Terminal:
    """A command in a terminal of its own, as its session's leader, until `close`; also where pytest is under nohup."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True
        )
        os.close(theirs)

    def close(self) -> None:
        """As a window that is closed, or a connection that breaks."""
        os.close(self._ours)


@pytest.mark.parametrize("ranks", [(), ("--nproc", "2")], ids=["one process", "an agent"])
def test_a_terminal_that_goes_stops_the_run(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    terminal = Terminal(begun(IN_TERMINAL, words(tmp_path / "run", *ranks, *ENDLESS)), tmp_path)
    wait_for_step(RunDir(tmp_path / "run"), 10, terminal.process)
    terminal.close()
    terminal.process.wait(120)
    check_saved(tmp_path / "run")


def test_under_nohup_it_goes_on(tmp_path: Path) -> None:
    command = ["setsid", "-c", "-w", "nohup", *words(tmp_path / "run", *ENDLESS)]
    terminal = Terminal(command, tmp_path)
    wait_for_step(RunDir(tmp_path / "run"), 10, terminal.process)
    step = read_steps(tmp_path / "run")[-1]["step"]
    terminal.close()
    wait_for_step(RunDir(tmp_path / "run"), step + 20, terminal.process)
    RunDir(tmp_path / "run").request_stop()
    terminal.process.wait(120)
    check_saved(tmp_path / "run")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("ranks", [(), ("--nproc", "2")], ids=["one process", "an agent"])
def test_a_signal_stops_the_run(tmp_path: Path, ranks: tuple[str, ...], name: str) -> None:
    """SIGUSR1, SIGHUP and SIGTERM do so in the tests around it."""
    with running(words(tmp_path / "run", *ranks, *ENDLESS), subprocess.PIPE) as process:
        wait_for_step(RunDir(tmp_path / "run"), 10, process)
        process.send_signal(signal.Signals[name])
        process.communicate(timeout=120)
        assert process.returncode == 0
    check_saved(tmp_path / "run")


@pytest.mark.parametrize("ranks", [(), ("--nproc", "2")], ids=["one process", "an agent"])
def test_outputs_that_nobody_reads_any_more_end_no_run(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    """A pipe whose reader has gone, as behind `| head`, and PBS's daemon of outputs after a qdel. It obeys a signal."""
    out, theirs = os.pipe()
    with running(words(tmp_path / "run", *ranks, *ENDLESS), theirs) as process:
        os.close(theirs)
        wait_for_step(RunDir(tmp_path / "run"), 5, process)
        os.close(out)
        wait_for_step(RunDir(tmp_path / "run"), read_steps(tmp_path / "run")[-1]["step"] + 20, process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(120) == 0
    check_saved(tmp_path / "run")


@pytest.mark.parametrize("ranks", [(), ("--nproc", "2")], ids=["one process", "an agent"])
def test_outputs_that_nobody_reads_now_keep_no_run(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    """A full pipe, as behind a pager that is not looked at: the run goes on, and obeys."""
    out, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    command = begun(SOON, words(tmp_path / "run", *ranks, *ENDLESS, "checkpoint.every=5"))
    with running(command, theirs) as process:
        wait_for_step(RunDir(tmp_path / "run"), 1, process)
        filled = select.poll()
        filled.register(theirs, select.POLLOUT)
        until = time.monotonic() + 120
        while filled.poll(0):
            assert time.monotonic() < until
            time.sleep(0.05)
        wait_for_step(RunDir(tmp_path / "run"), read_steps(tmp_path / "run")[-1]["step"] + 10, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    os.close(out)
    os.close(theirs)
    check_saved(tmp_path / "run")


def test_outputs_that_were_never_open_end_no_run(tmp_path: Path) -> None:
    """`>&- 2>&-`: there are no files of these numbers, and no streams in Python."""
    command = begun(WITHOUT_OUTPUTS, words(tmp_path / "run", *SHORT))
    done = subprocess.run(command, check=False, timeout=120)
    assert done.returncode == 0
    assert RunDir(tmp_path / "run").read_status()["state"] == "finished"


@pytest.mark.parametrize(
    ("handler", "said"),
    [("signal.signal(signal.SIGUSR1, lambda *_: print('own'))", ["own", "own"]), (DUMPS, [])],
    ids=["of Python", "of the fault handler"],
)
def test_a_handler_of_a_script_is_left_to_it(tmp_path: Path, handler: str, said: list[str]) -> None:
    """It asked for SIGUSR1 itself, also where Python does not know of it; a stop has other signals."""
    script = tmp_path / "own.py"
    script.write_text(SCRIPT.replace("HANDLER", handler))
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*said, "6", "known" if said else "unknown"]
    assert RunDir(tmp_path / "run").read_status()["state"] == "finished"


SCRIPT = """
import faulthandler, os, signal, sys, time
import torch
from torch.utils.data import TensorDataset
import shardway

from shardway.ranks import stop

stop.PATIENCE_S, stop.TICK_S = 0.1, 0.02  # after which a signal is taken that the main thread did not hear
HANDLER
with shardway.start("run.device=cpu", "run.threads=1", "checkpoint.every=off", directory=sys.argv[1]) as run:
    model = run.shard(torch.nn.Linear(2, 1))
    run.optimizer(torch.optim.SGD, model, lr=0.01)
    data = TensorDataset(torch.ones(24, 2), torch.ones(24, 1))
    taken = 0
    for batch in run.steps(run.loader(data, batch_size=4), 6):
        run.step(model, batch, torch.nn.functional.mse_loss)
        taken += 1
        if taken in (2, 4):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.4)
print(taken)
print("unknown" if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL else "known")
"""
