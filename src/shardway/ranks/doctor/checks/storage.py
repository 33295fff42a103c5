"""Checks of file systems: that they answer, take a checkpoint, and have room for it.

Invariant: a folder is used only after a program of its own has seen it in time, since a hung mount holds whoever
touches it; what a check writes it removes. What is written is a file of a name nobody else uses, in the run's folder.

Sources: statvfs(3), fsync(2), rename(2).
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

from shardway.hardware.command import run_commands
from shardway.hardware.mounts import find_mount
from shardway.places import expand_home
from shardway.ranks.doctor.finding import CheckResult, bad, good, poor, unknown
from shardway.ranks.doctor.surroundings import MachineView
from shardway.units import render_seconds

GIB = 2**30
_ANSWERS_WITHIN_S = 8.0
_SLOW_WRITE_S = 1.0
_FEW_INODES = 10_000
_SPEED_BYTES = 256 * 2**20
_SLOW_BYTES_PER_S = 50e6
CACHES = ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MIOPEN_USER_DB_PATH", "XDG_CACHE_HOME")


def find_existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    path = expand_home(folder).absolute()
    return next((each for each in (path, *path.parents) if os.path.lexists(each)), Path("/"))


def check_mounts(around: MachineView) -> CheckResult:
    """Whether every file system of the profile and the run answers."""
    places = list_places(around)
    if not places:
        return unknown("neither the profile nor the run names a folder")
    answers = run_commands([("ls", "-d", place) for place in places], _ANSWERS_WITHIN_S)
    hung = [place for place, answer in zip(places, answers, strict=True) if answer.hung]
    gone = [place for place, answer in zip(places, answers, strict=True) if not answer.hung and not answer.ok]
    if hung:
        remedy = f"the file system hangs on this node: leave it out (Slurm: --exclude={around.host})"
        return bad(f"{', '.join(hung)} did not answer within {render_seconds(_ANSWERS_WITHIN_S)}", remedy)
    if gone:
        remedy = "in a container: mount them; otherwise correct [storage] of the profile, or ask the site"
        return poor(f"not there: {', '.join(gone)}", remedy)
    return good(", ".join(places))


def list_places(around: MachineView) -> list[str]:
    """Folders of the profile's storage whose variables are set, and that of the run."""
    storage = around.site.storage
    texts = [text for text in (storage.home, storage.project, storage.scratch) if text]
    named = [str(expand_home(_expand(text, around))) for text in texts]
    if around.wanted.folder is not None:
        named.append(str(find_existing(around.wanted.folder)))
    return list(dict.fromkeys(place for place in named if place.startswith("/") and "$" not in place))


def _expand(text: str, around: MachineView) -> str:
    for name in sorted(around.environ, key=len, reverse=True):
        text = text.replace(f"${{{name}}}", around.environ[name]).replace(f"${name}", around.environ[name])
    return text


def check_write(around: MachineView) -> CheckResult:
    """Whether a file can be written, made durable, renamed and removed where the run writes."""
    if around.wanted.folder is None:
        return unknown("no run file or --dir says where the run writes")
    folder = find_existing(around.wanted.folder)
    start = time.monotonic()
    try:
        _write_and_remove(folder, b"shardway doctor\n")
    except OSError as error:
        return bad(f"{folder}: {error.strerror}", "choose a folder that you may write to with --dir or run.root")
    seconds = time.monotonic() - start
    if seconds > _SLOW_WRITE_S:
        return poor(
            f"{folder}: a small file took {seconds:.1f} s", "the file system is busy: save less often", write_s=seconds
        )
    return good(f"{folder}: written, made durable, renamed and removed in {1000 * seconds:.0f} ms", write_s=seconds)


def _write_and_remove(folder: Path, content: bytes) -> None:
    path = folder / f".doctor-{uuid.uuid4().hex}"
    renamed = path.with_suffix(".renamed")
    try:
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(path, renamed)
    finally:
        for each in (path, renamed):
            with contextlib.suppress(OSError):
                each.unlink()


def check_space(around: MachineView) -> CheckResult:
    """Whether the run's checkpoints fit: bytes and inodes. Quotas that statvfs does not show are not seen."""
    if around.wanted.folder is None:
        return unknown("no run file or --dir says where the run writes")
    folder = find_existing(around.wanted.folder)
    try:
        facts = os.statvfs(folder)
    except OSError as error:
        return bad(f"{folder}: {error.strerror}", "choose another folder with --dir or run.root")
    inodes = facts.f_favail if facts.f_files else None
    return judge_space(around, str(folder), facts.f_bavail * facts.f_frsize, inodes)


def judge_space(around: MachineView, folder: str, free: int, inodes: int | None) -> CheckResult:
    """A checkpoint more than are kept is on disk while it is written."""
    said = f"{folder} has {free / GIB:.1f} GiB free"
    remedy = "move old runs elsewhere, choose another folder with --dir, or keep fewer checkpoints (checkpoint.keep)"
    if inodes is not None and inodes < _FEW_INODES:
        return bad(f"{said}, but only {inodes} more files may be made", remedy)
    size, keep = around.wanted.checkpoint_bytes, around.wanted.keep
    if not size:
        return poor(said, remedy) if free < GIB else good(said)
    said += f"; a checkpoint is about {_format_size(size)}, and {keep} are kept"
    if free < 2 * size:
        return bad(said, remedy)
    return poor(said, remedy) if free < (keep + 1) * size else good(said)


def _format_size(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def check_speed(around: MachineView) -> CheckResult:
    """How fast the run's folder takes 256 MiB."""
    if around.wanted.folder is None:
        return unknown("no run file or --dir says where the run writes")
    folder = find_existing(around.wanted.folder)
    start = time.monotonic()
    try:
        _write_and_remove(folder, os.urandom(2**20) * (_SPEED_BYTES // 2**20))
    except OSError as error:
        return bad(f"{folder}: {error.strerror}", "choose another folder with --dir or run.root")
    rate = _SPEED_BYTES / max(time.monotonic() - start, 1e-6)
    said = f"{folder} took {_SPEED_BYTES // 2**20} MiB at {rate / 1e6:.0f} MB/s"
    if rate < _SLOW_BYTES_PER_S:
        return poor(said, "write to the site's scratch file system (--dir), and save less often", write_rate=rate)
    return good(said, write_rate=rate)


def check_caches(around: MachineView) -> CheckResult:
    """Whether caches of libraries go to a home folder that is small."""
    home, storage = around.environ.get("HOME", ""), around.site.storage
    if around.site.scheduler == "local" or not home or not (storage.project or storage.scratch):
        return unknown("nothing says that the home folder is small")
    places = {name: around.environ.get(name, "") for name in CACHES}
    default = places["XDG_CACHE_HOME"] or f"{home}/.cache"
    places["HF_HOME"] = places["HF_HOME"] or f"{default}/huggingface"
    inside = [name for name, place in places.items() if place and Path(place).is_relative_to(home)]
    roomy = storage.scratch or storage.project
    if inside:
        remedy = f"export HF_HOME={roomy}/huggingface XDG_CACHE_HOME={roomy}/.cache, and the like for the others"
        return poor(f"below the home folder {home}: {', '.join(inside)}", remedy)
    return good("no cache below the home folder")


def check_python(around: MachineView) -> CheckResult:
    """Whether Python's thousands of small files are read from a parallel file system."""
    import sys

    mount = find_mount(sys.prefix, around.mounts)
    if mount is not None and mount.shared:
        remedy = "use a container image (one file), or unpack the environment on each node's own disk ($TMPDIR)"
        return poor(f"{sys.prefix} is on {mount.kind}: imports take long, and longer on many nodes", remedy)
    return good(f"{sys.prefix}" + (f" on {mount.kind}" if mount else ""))
