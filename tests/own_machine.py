"""What a test sees of the machine it runs on: usual programs, a home of its own, and no variables of a person or job.

A laptop with enroot in /usr/local/bin, a login node with Slurm, a shell inside a job: the tests are the same on each.
Where a real component is tested (a cluster, a GPU) the machine is left as it is.

Invariant: what is not named here is not there. This module must not import torch.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

PROGRAMS = (  # noqa: SIM905
    "[ arch awk b2sum base32 base64 basename bash cat chgrp chmod chown chroot cksum cmp comm cp csplit cut date "
    "dd df diff diff3 dir dirname du echo egrep env expand expr factor false fgrep find flock fmt fold free "
    "getconf grep groups gunzip gzip head hostid hostname id install join kill link ln logger logname ls md5sum "
    "mkdir mkfifo mknod mktemp mv nice nl nohup nproc numfmt od paste pathchk pgrep pkill pr printenv printf ps "
    "pwd readlink realpath renice rm rmdir sed seq setsid sh sha1sum sha256sum sha512sum shred shuf sleep sort "
    "split stat stdbuf stty sum sync tac tail tar taskset tee test timeout touch tr true truncate tsort tty uname "
    "unexpand uniq unlink users wc which who whoami xargs xz yes zcat "
    "cc c++ gcc g++ clang clang++ ld ldd as ar nm make cmake ninja pkg-config "
    "git ssh ssh-keygen ssh-agent ssh-add scp dash zsh fish csh tcsh ksh script gawk mawk "
    "ip mount umount losetup mkfs.ext4 mksquashfs unsquashfs newuidmap newgidmap nsenter setpriv unshare "
    "glusterfs glusterfsd strace gdb openssl fsfreeze"
).split()
"""Of a usual Linux with a compiler, as far as they are there. No scheduler, launcher, container, driver of a device."""

VARIABLES = {
    *("LANG", "LC_ALL", "TMPDIR", "TERM", "USER", "LOGNAME", "SHELL", "TZ", "CI"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"),
}
PREFIXES = ("OPENBLAS_", "SHARDWAY_CHAOS", "SHARDWAY_TEST_", "PYTEST_", "COV_", "CPU_")
"""Of this process's variables, those that a test may see."""

MEMORY, MEMORY_BYTES = "/dev/shm", 4 * 2**30
"""Where tests write their files if it is a file system in memory with so much free: there is no
wait for a disk in thousands of saves."""

KEEPS_MACHINE = ("SHARDWAY_CLUSTER", "SHARDWAY_GPU")
"""A session with one of these set tests what the machine really has."""


def settle_in() -> Path | None:
    """Give this process, and all that it starts, a PATH, a HOME and variables of its own; the folder with them."""
    if any(name in os.environ for name in KEEPS_MACHINE):
        return None
    memory = MEMORY if _can_write_to_memory() else None
    folder = Path(tempfile.mkdtemp(prefix="shardway-tests-", dir=memory))
    programs = folder / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        if path := shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin"):
            (programs / name).symlink_to(path)
    (programs / "python3").symlink_to(os.path.realpath(sys.executable))
    for name in set(os.environ) - VARIABLES:
        if not name.startswith(PREFIXES):
            del os.environ[name]
    os.environ["PATH"] = str(programs)
    if memory:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory)  # where pytest makes the folders of tests
    new_home(folder)
    return folder


def _can_write_to_memory() -> bool:
    try:
        room = os.statvfs(MEMORY)
    except OSError:
        return False
    kinds = (line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines())
    is_memory, is_noexec = [MEMORY, "tmpfs"] in kinds, bool(room.f_flag & os.ST_NOEXEC)
    return is_memory and not is_noexec and os.access(MEMORY, os.W_OK) and room.f_bavail * room.f_frsize >= MEMORY_BYTES


def new_home(folder: Path) -> None:
    """The home of one test, empty."""
    os.environ["HOME"] = tempfile.mkdtemp(prefix="home-", dir=folder)
