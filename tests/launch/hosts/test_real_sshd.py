from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from loopback_sshd import SHELLS, Sshd, find_sshd, kept_port, run_sshd

from shardway.launch.hosts.base import MISSING, HostUnreachable
from shardway.launch.hosts.ssh import ConnectionContext, SshHost

pytestmark = [
    pytest.mark.skipif(find_sshd() is None or shutil.which("ssh") is None, reason="openssh-server is not installed"),
]

ODD = ["", "a b", "'\"", "$(id)`id`$HOME", "\\", "a\n\nb\n", "\t*~!x", "é ☃"]


@pytest.fixture(scope="module")
def sshd() -> Iterator[Sshd]:
    """One server for all; in a folder with a short name, since sockets stand in it."""
    with tempfile.TemporaryDirectory(prefix="sw") as folder, run_sshd(Path(folder)) as server:
        yield server


@pytest.fixture
def around(sshd: Sshd, tmp_path: Path) -> Iterator[ConnectionContext]:
    """No terminal, and sockets of this test alone."""
    with tempfile.TemporaryDirectory(prefix="sw") as folder:
        yield ConnectionContext(sshd.program, Path(folder) / "p", lambda: False, sleep=lambda _: None)


def make_host(name: str, around: ConnectionContext) -> SshHost:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return SshHost(name, around)


@pytest.mark.parametrize("shell", SHELLS)
def test_any_login_shell_serves(sshd: Sshd, around: ConnectionContext, tmp_path: Path, shell: str) -> None:
    before = sshd.count_connections()
    host = make_host(shell, around)
    try:
        odd, *done = host.run_many(
            [["printf", "%s\\0", *ODD], ["sh", "-c", "echo o; echo e >&2; exit 255"], ["none-such"], ["cat"]]
        )
        assert odd.out.split("\0")[:-1] == ODD
        assert [(one.code, one.out, one.err == "e\n") for one in done] == [
            (255, "o\n", True),
            (MISSING, "", False),
            (0, "", False),
        ]
        path = PurePosixPath(tmp_path / "a b" / "it's")
        host.write_files({path: "\n".join(ODD)}, executable=[path])
        assert host.read_files([path]) == {path: "\n".join(ODD)}
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "x").write_text("x" * 300_000)
        host.copy_tree(tmp_path / "tree", PurePosixPath(tmp_path / "copy"))
        assert (tmp_path / "copy" / "x").read_text() == "x" * 300_000
        assert list(host.follow(["printf", "1\n2"])) == ["1", "2"]
    finally:
        host.connection.close()
    assert sshd.count_connections() - before == 1


def test_the_user_s_open_connection_is_ridden(sshd: Sshd, around: ConnectionContext) -> None:
    """As after `ssh -MNf` with a ControlPath in ~/.ssh/config, in which %C is a hash that ssh makes."""
    assert around.folder is not None
    around.folder.mkdir(mode=0o700)
    config = sshd.folder / "config-with-path"
    config.write_text(f"ControlPath {around.folder}/mine-%C\n{(sshd.folder / 'config').read_text()}")
    around = ConnectionContext(("ssh", "-F", str(config)), around.folder, lambda: False)
    before = sshd.count_connections() + 1
    subprocess.run([*around.program, "-MNf", "bash"], check=True, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while sshd.count_connections() < before:  # the server notes it beside its answer
        assert time.monotonic() < until
        time.sleep(0.01)
    host = SshHost("bash", around)
    try:
        assert host.run(["echo", "x"]).out == "x\n"
        assert sshd.count_connections() == before
    finally:
        host.connection.close()


def test_a_connection_that_is_gone_is_never_replaced_by_accident(sshd: Sshd, around: ConnectionContext) -> None:
    host = SshHost("bash", around)
    host.run(["true"])
    command = host.connection.command(["echo", "reached"])
    host.connection.close()
    before = sshd.count_connections()
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (255, "")
    assert sshd.count_connections() == before
    try:
        assert host.run(["echo", "again"]).out == "again\n"
    finally:
        host.connection.close()


def test_a_key_that_is_not_taken_needs_a_person(sshd: Sshd, around: ConnectionContext) -> None:
    stranger = (*sshd.program, "-o", "User=nobody-of-that-name")
    with pytest.raises(HostUnreachable, match="there is no terminal to ask on") as told:
        SshHost("bash", ConnectionContext(stranger, around.folder, lambda: False)).run(["true"])
    assert " -MNf -o ControlPath=" in str(told.value)


def test_a_changed_host_key_is_told(sshd: Sshd, around: ConnectionContext, tmp_path: Path) -> None:
    known = tmp_path / "known"
    key = (sshd.folder / "user.pub").read_text().split()[:2]
    port = next(
        line.split()[1] for line in (sshd.folder / "config").read_text().splitlines() if line.strip().startswith("Port")
    )
    known.write_text(f"[127.0.0.1]:{port} {' '.join(key)}\n")
    program = (*sshd.program, "-o", f"UserKnownHostsFile={known}")
    with pytest.raises(HostUnreachable, match="host key is not the one that was known"):
        SshHost("bash", ConnectionContext(program, around.folder, lambda: False)).run(["true"])


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("Port={port}", "refuses connections"),
        ("HostName=no-such-host.invalid", "no such host is known"),
        ("NoSuchOption=1", "cannot read its configuration"),
    ],
)
def test_what_ssh_really_says_is_understood(sshd: Sshd, around: ConnectionContext, option: str, reason: str) -> None:
    with kept_port() as port, pytest.raises(HostUnreachable, match=reason):
        program = (*sshd.program, "-o", option.format(port=port))
        SshHost("bash", ConnectionContext(program, around.folder, lambda: False)).run(["true"])


def test_a_server_that_dies_in_the_middle_is_no_end_of_the_log(sshd: Sshd, around: ConnectionContext) -> None:
    host = SshHost("bash", around)
    lines = host.follow(["sh", "-c", "echo first; sleep 30"])
    assert next(lines) == "first"
    host.connection.close()
    with pytest.raises(HostUnreachable, match="broke while it was followed"):
        next(lines)
