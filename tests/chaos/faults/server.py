"""Faults of a network file system whose server is gone for a while, or does not answer.

It is GlusterFS, over TCP on loopback: a server of a folder of the test's, and a client that mounts it through FUSE in a
namespace of its own. What a client says whose server is gone is what a run meets: ENOTCONN for whatever is asked, open
files included, until it has found the server again, which takes it some seconds more.

Invariant: server and client end with the process of the test, however that ends; nobody else sees the mount.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import Command, Room, pacing
from faults.pauses import went_on
from faults.strike import FIRST, Aftermath, Fault, Struck, any_rank, children
from ports import free_port

MOUNT, SERVED = "volume", "served"
LAST = 60
"""The step by which it strikes, so that the server is back before the run is at its end."""

AWAY_S, HANGS_S, PATIENCE_S = 4.0, 12.0, 30.0

_SERVER = """
volume files
  type storage/posix
  option directory {folder}
end-volume
volume locks
  type features/locks
  subvolumes files
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address 127.0.0.1
  option transport.socket.listen-port {port}
  option auth.addr.locks.allow 127.0.0.1
  subvolumes locks
end-volume
"""

_CLIENT = """
volume remote
  type protocol/client
  option transport-type tcp
  option remote-host 127.0.0.1
  option remote-port {port}
  option remote-subvolume locks
end-volume
volume behind
  type performance/write-behind
  subvolumes remote
end-volume
volume cached
  type performance/md-cache
  subvolumes behind
end-volume
"""


class Server:
    """The server of a folder: started, killed, stopped, started again."""

    def __init__(self, home: Path) -> None:
        self._command = ("glusterfsd", "-N", "-f", str(home / "server.vol"), "-l", str(home / "server.log"))
        self._process = _start(self._command)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def again(self) -> None:
        self._process = _start(self._command)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


@dataclass(frozen=True)
class Served(Room):
    """The room of commands that write into the mount."""

    server: Server | None = None


def server_of(command: Command) -> Server:
    """The one that serves what a command writes into."""
    assert isinstance(command.room, Served)
    assert command.room.server is not None
    return command.room.server


@contextlib.contextmanager
def served(home: Path) -> Iterator[Served]:
    """The mount, in the folder `MOUNT` of the test's."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    if missing := [name for name in ("glusterfsd", "glusterfs", "setpriv") if shutil.which(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    mount, port = home / MOUNT, free_port()
    for folder in (mount, home / SERVED):
        folder.mkdir()
    (home / "server.vol").write_text(_SERVER.format(folder=home / SERVED, port=port))
    (home / "client.vol").write_text(_CLIENT.format(port=port))
    with _namespace() as (enter, root):
        server = Server(home)
        log = ("-l", str(home / "client.log"))
        client = _start((*enter, "glusterfs", "-N", "-f", str(home / "client.vol"), *log, str(mount)))
        room = Served(enter, root, MOUNT, server)
        try:
            _await(lambda: _is_mounted(room.see(mount), os.stat(mount).st_dev))
            yield room
        finally:
            client.kill()
            client.wait()
            server.kill()


@contextlib.contextmanager
def _namespace() -> Iterator[tuple[tuple[str, ...], Path]]:
    """A mount namespace: what is put before a command to get there, and its root as it is seen from here."""
    command = ("unshare", "--mount", "--propagation", "private", "sh", "-c", "echo made; cat >/dev/null")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        if holder.stdout.readline() != "made\n":
            pytest.skip("this machine lets nobody make a mount namespace")
        try:
            yield ("nsenter", "--target", str(holder.pid), "--mount"), Path(f"/proc/{holder.pid}/root")
        finally:
            holder.stdin.close()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that ends with this one."""
    return subprocess.Popen(("setpriv", "--pdeathsig", "KILL", *command))


def _is_mounted(folder: Path, below: int) -> bool:
    """Whether it is on another device than `below`, and answers."""
    with contextlib.suppress(OSError):
        os.listdir(folder)
        return os.stat(folder).st_dev != below
    return False


def _await(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, "the file system is not there"
        time.sleep(0.05)


# --- what happens


def away(command: Command, dice: random.Random) -> Struck:
    """The server is killed, and started again."""
    _wait_for_some_step(command, dice)
    struck = Struck(time.time(), "the server")
    server_of(command).kill()
    time.sleep(AWAY_S)
    server_of(command).again()
    return struck


def away_and_kill(command: Command, dice: random.Random) -> Struck:
    """Meanwhile a rank is killed."""
    _wait_for_some_step(command, dice)
    who = any_rank(dice)
    rank = children(command)[who]
    server_of(command).kill()
    time.sleep(dice.uniform(0.0, AWAY_S / 2))
    struck = Struck(time.time(), f"the server and rank {who}")
    rank.kill()
    time.sleep(AWAY_S)
    server_of(command).again()
    return struck


def hangs(command: Command, dice: random.Random) -> Struck:
    """Who asks waits, until the server goes on."""
    _wait_for_some_step(command, dice)
    struck = Struck(time.time(), "the server")
    server_of(command).signal(signal.SIGSTOP)
    time.sleep(HANGS_S)
    server_of(command).signal(signal.SIGCONT)
    return struck


def _wait_for_some_step(command: Command, dice: random.Random) -> None:
    command.wait_for_step(dice.randrange(FIRST, LAST))
    time.sleep(dice.uniform(0.0, 0.1))


def started_again_once(after: Aftermath) -> None:
    """Once the server was back, and nobody took a checkpoint that could not be read for one that is damaged."""
    assert after.restarts == 1
    assert after.events("checkpoint_quarantined") == []
    assert any("is away; waiting" in said for said in after.said)


def paced(folder: Path, dice: random.Random) -> dict[str, str]:
    """Steps of a tenth of a second: more than the server is away for are left when it strikes."""
    return pacing(0.1)


FAULTS = (
    Fault("file server gone for 4 s", away, environ=paced, room=served, expects=went_on, is_further=True),
    Fault(
        "SIGKILL of a rank while the file server is gone",
        away_and_kill,
        environ=paced,
        room=served,
        expects=started_again_once,
        is_further=True,
    ),
    Fault("file server hangs for 12 s", hangs, environ=paced, room=served, expects=went_on, is_further=True),
)
