"""A real sshd on loopback for one test session, with its own keys, port and configuration, and a client that trusts it.

Invariant: nothing outside of the given folder is touched, but for sshd's own empty folder /run/sshd as root.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SHELLS = ("bash", "tcsh", "fish", "zsh")


@dataclass(frozen=True)
class Sshd:
    """A running server: `program` is an ssh that reaches it, under one host name for each login shell."""

    program: tuple[str, ...]
    process: subprocess.Popen[bytes]
    folder: Path

    def count_connections(self) -> int:
        """How many connections were accepted so far."""
        return (self.folder / "sshd.log").read_text(errors="replace").count("Accepted publickey")


def find_sshd() -> str | None:
    """The server's program, which has to be started by its absolute path."""
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A port that nobody listens on, and that nobody is given by chance; whoever asks for it by its number may have
    it (SO_REUSEADDR, as sshd sets it; socket(7))."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield int(keeper.getsockname()[1])


@contextlib.contextmanager
def run_sshd(folder: Path) -> Iterator[Sshd]:
    """A server in `folder` until the block ends."""
    shells = {name: path for name in SHELLS if (path := shutil.which(name))}
    with contextlib.ExitStack() as stack:
        yield from _serve(folder, shells, {name: stack.enter_context(kept_port()) for name in shells})


def _serve(folder: Path, shells: Mapping[str, str], ports: Mapping[str, int]) -> Iterator[Sshd]:
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "sshd_config").write_text(_server_config(folder, shells, ports))
    (folder / "config").write_text(_client_config(folder, ports))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    sshd = str(find_sshd())
    with subprocess.Popen([sshd, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "sshd.log")]) as process:
        try:
            for port in ports.values():
                _wait_for(port)
            yield Sshd(("ssh", "-F", str(folder / "config")), process, folder)
        finally:
            process.terminate()


def _server_config(folder: Path, shells: Mapping[str, str], ports: Mapping[str, int]) -> str:
    lines = [
        *(f"ListenAddress 127.0.0.1:{port}" for port in ports.values()),
        f"HostKey {folder}/host",
        f"PidFile {folder}/sshd.pid",
        f"AuthorizedKeysFile {folder}/user.pub",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin yes",
        f"SetEnv HOME={folder}",  # what a person's shell does when it starts is none of a test's
    ]
    for name, path in shells.items():
        lines += [f"Match LocalPort {ports[name]}", f'    ForceCommand exec {path} -c "$SSH_ORIGINAL_COMMAND"']
    return "\n".join(lines) + "\n"


def _client_config(folder: Path, ports: Mapping[str, int]) -> str:
    hosts = [f"Host {name}\n    Port {port}\n" for name, port in ports.items()]
    common = [
        "Host *",
        "    HostName 127.0.0.1",
        f"    User {getpass.getuser()}",
        f"    IdentityFile {folder}/user",
        "    IdentitiesOnly yes",
        "    IdentityAgent none",
        f"    UserKnownHostsFile {folder}/known_hosts",
        "    StrictHostKeyChecking accept-new",
        "    LogLevel ERROR",
    ]
    return "".join(hosts) + "\n".join(common) + "\n"


def _wait_for(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise TimeoutError(f"sshd does not listen on port {port}")
