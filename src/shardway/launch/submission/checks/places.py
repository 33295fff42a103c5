"""Files and folders of a wish: those that a job needs are there, and where every node sees them.

Invariant: a place that cannot be judged from here (a variable, another host, one that does not answer) is not held
against anybody. This module must not change anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath

from shardway.errors import Problem
from shardway.launch.hosts.base import Done, Host
from shardway.launch.submission.checks import commands
from shardway.launch.submission.checks.code import Code
from shardway.launch.submission.checks.look import HostCheck, always, take_looks, test_exists
from shardway.launch.submission.job_request import JobRequest, build_job, parse_mount, runtime_of
from shardway.places import list_variables

_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that each node has for itself, on every Linux machine that does not say otherwise."""

_MEMORY = ("tmpfs", "ramfs", "devtmpfs")

_DATA = ("data.path", "data.validation")


def list_host_problems(wish: JobRequest, host: Host, code: Code) -> list[Problem]:
    """What is wrong on the host that submits, in one exchange (and one more where paths have variables): the program,
    the environment, the image, data, where the run writes. Raises HostUnreachable."""
    looks = [*_list_needed(wish, host, code), *_list_shared(wish), *commands.list_looks(wish, host, code)]
    looks += [*_list_in_container(wish, host)] if runtime_of(wish) != "none" else []
    return [*_list_missing_data(wish, code), *take_looks(host, looks)]


def _list_needed(wish: JobRequest, host: Host, code: Code) -> Iterator[HostCheck]:
    """What has to be there before the job starts."""
    venv, image = build_job(wish, 1).around.venv, wish.section.image
    if venv and not venv.startswith("conda:") and runtime_of(wish) == "none":
        yield _needed(wish, host, "site.venv", f"{venv}/bin/activate", "make the environment there, or name another")
    if image.startswith(("/", "~", "$")):
        yield _needed(wish, host, "site.image", image, "correct the path; `shardway image` makes one")
    for key, path in _list_data(wish):
        if path.startswith(("/", "~/")) and runtime_of(wish) == "none":
            yield _needed(wish, host, key, path, "correct the path, or copy the data there")
        elif not path.startswith(("/", "~/")) and not list_variables(path) and not code.is_there:
            remedy = "name it by its whole path: the job runs in the run directory"
            yield _needed(wish, host, key, str(wish.workdir / path), remedy)


def _list_in_container(wish: JobRequest, host: Host) -> Iterator[HostCheck]:
    """What has to be there for the container to start, and what the container has to show."""
    image, runtime, origins = wish.section.image, runtime_of(wish), wish.loaded.origins
    if image.startswith(("/", "~", "$")):
        unread = Problem("site.image", f"{image} is there, and you may not read it", origins["site.image"])
        yield HostCheck("site.image", unread.origin, lambda at: ("bash", "-c", _READABLE, at), always(unread), image)
        if runtime in ("pyxis", "enroot"):
            what = f"{image} is no squashfs image, which {runtime} starts"
            remedy = "`shardway image import` makes one"
            other = Problem("site.image", what, origins["site.image"], remedy=remedy)
            yield HostCheck("site.image", other.origin, lambda at: ("bash", "-c", _SQUASHFS, at), always(other), image)
    for mount in filter(None, map(parse_mount, wish.section.mounts)):
        own = _local_folder(wish, mount.source) or mount.source.startswith(_OF_EACH_NODE)
        if mount.source.startswith(("/", "~")) and not own:
            yield _needed(wish, host, "site.mounts", mount.source, "correct the path; a mount has to be there")
    # Apptainer shows what its site has set, which nobody sees from here
    yield from _list_hidden(wish) if runtime != "apptainer" else ()


_OF_EACH_NODE = ("/usr/", "/lib", "/etc/", "/var/", "/dev/", "/proc/", "/sys/", "/opt/", "/run/")
"""Where a node has files of its own, which a login node need not have: drivers, daemons, devices."""

_READABLE = '[ ! -e "$0" ] || [ -r "$0" ]'
_SQUASHFS = '[ ! -f "$0" ] || [ ! -r "$0" ] || [ "$(head -c 4 "$0" | tr -d "\\0")" = hsqs ]'
"""Its magic number (squashfs of Linux since 4.0); what is missing is told already."""


def _list_hidden(wish: JobRequest) -> Iterator[HostCheck]:
    """Paths of the run file that the container does not see. What is not on the host may be in the image; a cache in
    the image ends with the container."""
    values, paths = wish.loaded.values, {"site.venv": build_job(wish, 1).around.venv}
    kept = {"data.cache": values.data.cache, "train.compile_cache": values.train.compile_cache}
    if wish.program.meets_by_itself:
        read = {"data.tokenizer": values.data.tokenizer, "model.hf": values.model.hf}
        paths |= {**dict(_list_data(wish)), **read, **kept}
    for key, path in paths.items():
        origin = wish.loaded.origins[key]
        if path.startswith("~/") and runtime_of(wish) in _ROOTED and key != "site.venv":  # which the job script expands
            what = f"{path} is another folder in the container, where the home is that of root"
            rooted = Problem(key, what, origin, remedy="name it by its whole path, and mount it (site.mounts)")
            yield HostCheck(key, origin, test_exists, partial(_anyhow, rooted), path)
        elif path.startswith(("/", "~/")) and commands.may_be_hidden(wish, path):
            what = f"{path} is not seen in the container: it is in none of its mounts"
            hidden = Problem(key, what, origin, remedy=f'add "{path}" to site.mounts')
            judge = _anyhow if key in kept else commands.where_it_is_there
            yield HostCheck(key, origin, test_exists, partial(judge, hidden), path)


_ROOTED = ("enroot", "podman")
"""Runtimes that start as the container's root."""


def _anyhow(problem: Problem, done: Done) -> Iterator[Problem]:
    yield problem


def _needed(wish: JobRequest, host: Host, key: str, path: str, remedy: str) -> HostCheck:
    origin, what = wish.loaded.origins[key], f"there is no {path} on {host.name or 'this machine'}"
    return HostCheck(key, origin, test_exists, always(Problem(key, what, origin, remedy=remedy)), path)


def _list_missing_data(wish: JobRequest, code: Code) -> Iterator[Problem]:
    """Data of a relative path, which the job looks for in the folder in which it runs."""
    for key, path in _list_data(wish):
        if not path.startswith(("/", "~/")) and not list_variables(path) and (why := code.why_missing(path)):
            remedy = "correct the path, or name the data by their whole path"
            yield Problem(key, why, wish.loaded.origins[key], remedy=remedy)


def _list_data(wish: JobRequest) -> Iterator[tuple[str, str]]:
    """Keys and paths of files that a run file reads."""
    data = wish.loaded.values.data
    if wish.program.meets_by_itself and data.kind != "synthetic":
        for key, path in zip(_DATA, (data.path, data.validation), strict=True):
            if path and not path.startswith("python:"):
                yield key, path


def _list_shared(wish: JobRequest) -> Iterator[HostCheck]:
    """What all nodes have to see: data, and the run directory, by which they and their jobs know of each other."""
    if wish.profile.scheduler == "local":
        return
    remedy = f"choose a folder on a shared file system{_storage(wish)}"
    yield _shared(wish, "run.root", str(wish.run), remedy)
    for key, path in _list_data(wish):
        if path.startswith("/"):
            yield _shared(wish, key, path, remedy)


def _shared(wish: JobRequest, key: str, path: str, remedy: str) -> HostCheck:
    origin, above = wish.loaded.origins[key], _local_folder(wish, path)

    def judge(done: Done) -> Iterator[Problem]:
        """The answer gives the kinds of file system of the folder and of those above, as far as they are there."""
        if above or next(iter(done.out.split()), "") in _MEMORY:
            what = f"{path} is on a node's own disk ({above or 'in memory'}), which other nodes do not see"
            yield Problem(key, what, origin, remedy=remedy)

    return HostCheck(key, origin, lambda _: ("stat", "-f", "-c", "%T", *_list_ancestors(path)), judge)


def _local_folder(wish: JobRequest, path: str) -> str:
    """The folder of a node's own that a path lies in; "" for none that is known."""
    disk = wish.profile.node.local_disk
    local = (*_OF_ONE_NODE, *([disk] if disk else []))
    return next((folder for folder in local if path == folder or path.startswith(f"{folder}/")), "")


def _list_ancestors(path: str) -> list[str]:
    """A folder and those above it but the top one, the nearest first."""
    return [str(folder) for folder in (PurePosixPath(path), *PurePosixPath(path).parents) if folder.name]


def _storage(wish: JobRequest) -> str:
    storage = wish.profile.storage
    named = [place for place in (storage.scratch, storage.project, storage.home) if place]
    return f": {', '.join(named)}" if named else ""
