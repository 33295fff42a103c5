"""A small file system of a test's own, that nobody else sees.

Invariant: it is mounted in a mount namespace that a process of ours holds; when that ends, however the test does, the
kernel takes mount and loop device away. Nothing but this file system is ever filled, frozen or made read-only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import Room

MOUNT = "volume"
"""Folder of the test's that the file system is mounted on."""

_HOLD = """
{before}
mount {options} "{source}" "{mount}"
test "$(stat -c %d "{mount}")" != "$(stat -c %d "{mount}/..")"
chmod 777 "{mount}"
echo mounted
cat >/dev/null
fsfreeze --unfreeze "{mount}" 2>/dev/null || true
"""
"""Holds the namespace until nobody writes to it any more; a test that was killed leaves nothing frozen."""

_LIMIT = """
mount -o loop "{image}" "{mount}"
btrfs -q subvolume create "{mount}/limited"
btrfs quota enable "{mount}"
btrfs qgroup limit {megabytes}M "{mount}/limited"
umount "{mount}"
"""
"""Makes a part of a file system that may hold so much, whoever writes: a quota of a user does not bind root."""


@dataclass(frozen=True)
class Volume(Room):
    """The room of commands that write into the file system, which is `path` for them and `seen` from here."""

    path: Path = Path("/")

    @property
    def seen(self) -> Path:
        return self.see(self.path)

    def fill(self) -> None:
        """Leave no byte."""
        with open(self.seen / "filler", "wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass

    def use_up_names(self) -> None:
        """Leave no inode."""
        (self.seen / "fillers").mkdir()
        for number in range(100_000):
            try:
                (self.seen / "fillers" / str(number)).touch()
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return
        raise AssertionError("there is no end of inodes")

    def free(self) -> None:
        """Take away what filled it."""
        (self.seen / "filler").unlink(missing_ok=True)
        if (self.seen / "fillers").exists():
            for each in (self.seen / "fillers").iterdir():
                each.unlink()
            (self.seen / "fillers").rmdir()

    def forbid_writing(self) -> None:
        """Whoever opens a file from now on finds it read-only; files that are open stay as they are, as the kernel has
        it for one mount of several."""
        self._do("mount", "--bind", str(self.path), str(self.path))
        self._do("mount", "-o", "remount,bind,ro", str(self.path))

    def allow_writing(self) -> None:
        self._do("umount", "--lazy", str(self.path))

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Whoever writes waits until this is over."""
        assert os.stat(self.seen).st_dev != os.stat(self.path).st_dev, "not ours"
        self._do("fsfreeze", "--freeze", str(self.path))
        try:
            yield
        finally:
            self._do("fsfreeze", "--unfreeze", str(self.path))

    def freeze_now_and_then(self, seconds: float, still_s: float, moving_s: float) -> None:
        """So slow for so long: it stands still and moves by turns."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self.frozen():
                time.sleep(still_s)
            time.sleep(moving_s)

    def _do(self, *command: str) -> None:
        subprocess.run([*self.enter, *command], check=True, capture_output=True)


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Volume]:
    """A file system in memory; whoever may make user namespaces can have one."""
    with _hold(
        folder, "tmpfs", f"-t tmpfs -o {options}", () if os.geteuid() == 0 else ("--user", "--map-root-user")
    ) as it:
        yield it


@contextlib.contextmanager
def ext4(folder: Path, megabytes: int) -> Iterator[Volume]:
    """A file system in a file, which takes root."""
    image = _image(folder, megabytes, "mkfs.ext4", "-q", "-m", "0")
    with _hold(folder, image, "-o loop", ()) as it:
        yield it


@contextlib.contextmanager
def with_quota(folder: Path, megabytes: int) -> Iterator[Volume]:
    """A part of a larger file system (btrfs) that may hold so much; it takes root."""
    image = _image(folder, 200, "mkfs.btrfs", "-q")
    before = _LIMIT.format(image=image, mount=folder / MOUNT, megabytes=megabytes)
    with _hold(folder, image, "-o loop,subvol=limited", (), before) as it:
        yield it


def _image(folder: Path, megabytes: int, *make: str) -> str:
    """A file with a file system in it."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    _run_or_skip([*make, str(image)])
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system of a file")
    return str(image)


def _run_or_skip(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")


@contextlib.contextmanager
def _hold(folder: Path, source: str, options: str, namespaces: Sequence[str], before: str = "") -> Iterator[Volume]:
    mount = folder / MOUNT
    mount.mkdir()
    script = _HOLD.format(source=source, options=options, mount=mount, before=before)
    holder = ["unshare", *namespaces, "--mount", "--propagation", "private", "sh", "-euc", script]
    try:
        process = subprocess.Popen(
            holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != "mounted\n":
            pytest.skip(f"this machine lets nobody mount: {process.stderr.read().strip()}")
        user = ("--user", "--preserve-credentials") if namespaces else ()
        enter = ("nsenter", "--target", str(process.pid), *user, "--mount")
        try:
            yield Volume(enter, Path(f"/proc/{process.pid}/root"), MOUNT, mount)
        finally:
            process.stdin.close()
