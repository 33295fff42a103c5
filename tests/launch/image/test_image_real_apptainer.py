"""A real Apptainer runs what is printed, as an ordinary user and without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from image_cases import PROXY, make_order

from shardway.launch.image.make import plan_image
from shardway.launch.image.request import BuildFolder, Ground, ImageRequest, parse_recipe

SYSTEM = Path("/var/cache/shardway-cluster/system")
"""What `tests/cluster/install.sh apptainer` lays over /usr and /etc of the pretended cluster."""
USER = "20009"
INSIDE = ("cat", "id", "printf", "rm", "mkdir")

_ENTER = f"""
set -e
mkdir -p /run/over && mount -t tmpfs over /run/over
grep -v ^ann: /etc/passwd >/run/over/passwd; echo ann:x:{USER}:{USER}::$HOME:/bin/bash >>/run/over/passwd
echo ann:2000900000:65536 | tee /run/over/subuid >/run/over/subgid
mount -t overlay over -o lowerdir=/run/over:{SYSTEM}/etc:/etc /etc
mount -t overlay over -o lowerdir={SYSTEM}/usr:/usr /usr
exec setpriv --reuid {USER} --regid {USER} --clear-groups "$@"
"""
_NOTE = """#!/bin/sh
printf '<%s>' "$(id -u)" "${http_proxy-}" "$@" >>"/${0##*/}.txt"
"""


def why_not() -> str:
    if os.geteuid() != 0 or not (SYSTEM / "usr/bin/apptainer").exists():
        return "Apptainer is not there: as root, run tests/cluster/install.sh apptainer"
    missing = [name for name in ("unshare", "setpriv", "mksquashfs") if shutil.which(name) is None]
    return f"there is no {', '.join(missing)}" if missing else ""


pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder that everyone may enter, as those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="image-test-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def home(room: Path) -> Path:
    """The user's folder."""
    path = room / "home"
    path.mkdir()
    shutil.chown(path, int(USER), int(USER))
    return path


def as_user(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command where Apptainer is laid over the system, which nobody else sees."""
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", _ENTER, "enter", *words],
        env={"HOME": str(home), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def make_base(folder: Path) -> None:
    """A system of a shell and a few programs; those that install only note how they were called."""
    for name in ("usr/bin", "etc", "tmp", "var/tmp", "proc", "sys", "dev", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "bin").symlink_to("usr/bin")
    for name in ("sh", *INSIDE):
        program = shutil.which(name) or ""
        shutil.copy(program, folder / "usr/bin" / name)
        needed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout.split()
        for library in filter(lambda word: word.startswith("/"), needed):
            (folder / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, folder / library[1:])
    for name in ("apt-get", "python3"):
        (folder / "usr/bin" / name).write_text(_NOTE)
        (folder / "usr/bin" / name).chmod(0o755)


def ground(home: Path, base: Path) -> Ground:
    target = PurePosixPath(home / "my images/it's.sif")
    place = BuildFolder(target.parent)
    return Ground(
        target, place, (BuildFolder(PurePosixPath(home / "scr atch")),), base=PurePosixPath(base), base_bytes=1
    )


def run_script(order: ImageRequest, where: Ground, home: Path) -> subprocess.CompletedProcess[str]:
    script = home / "make.sh"
    script.write_text(plan_image(order, where).script)
    return as_user(home, "bash", str(script))


@pytest.mark.parametrize("kind", ["folder", "squashfs"])
def test_an_image_is_built_on_one_that_is_there(home: Path, room: Path, kind: str) -> None:
    base = room / "the base"
    make_base(base)
    if kind == "squashfs":
        packed = room / "base.sqsh"
        subprocess.run(
            ["mksquashfs", str(base), str(packed), "-quiet", "-no-progress"], check=True, capture_output=True
        )
        base = packed
    recipe = parse_recipe(["libaio-dev"], ["torch >= 2, <3", "$HOME\\; --no-deps"], "numpy>=1 # it's\n")
    where = ground(home, base)
    done = run_script(make_order("apptainer", str(base), recipe=recipe, way=PROXY), where, home)
    assert done.returncode == 0, done.stdout
    assert [path.name for path in (home / "my images").iterdir()] == ["it's.sif"]
    assert list((home / "scr atch").iterdir()) == []

    unpacked = as_user(home, "apptainer", "build", "--sandbox", str(home / "unpacked"), str(where.target))
    assert unpacked.returncode == 0, unpacked.stderr
    as_root = f"<0><{PROXY.proxy}>"  # the proxy reaches the script, and is not written into it
    assert f"{as_root}<-o><APT::Sandbox::User=root><install>" in (home / "unpacked/apt-get.txt").read_text()
    pip = "<-m><pip><install><--no-cache-dir>"
    requirements = f"{as_root}{pip}<--requirement></tmp/shardway-requirements.txt>"
    assert (home / "unpacked/python3.txt").read_text() == (
        f"{requirements}{as_root}{pip}<torch >= 2, <3>{as_root}{pip}<$HOME;><--no-deps>"
    )
    definition = (home / "unpacked/.singularity.d").rglob("Singularity*")
    assert all(str(PROXY.proxy) not in path.read_text() for path in definition)


def test_nothing_is_left_where_the_registry_cannot_be_reached(home: Path, room: Path) -> None:
    done = run_script(make_order("apptainer", "docker://registry.invalid/a:1"), ground(home, room), home)
    assert done.returncode == 255
    assert "registry.invalid" in done.stdout
    assert list((home / "my images").iterdir()) == []
    assert list((home / "scr atch").iterdir()) == []
