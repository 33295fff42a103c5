"""Files and folders of a wish: those that a job needs are there, and where every node sees them.

Invariant: a place that cannot be judged from here (a variable, another host, one that does not answer) is not held
against anybody. This module must not change anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from shardway.errors import Problem
from shardway.launch.hosts.base import Done, Host
from shardway.launch.submission.checks import commands
from shardway.launch.submission.checks.code import Code
from shardway.launch.submission.checks.look import Look, always, take_looks, test_exists
from shardway.launch.submission.wish import Wish, build_job, runtime_of

_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that each node has for itself, on every Linux machine that does not say otherwise."""

_MEMORY = ("tmpfs", "ramfs", "devtmpfs")

_DATA = ("data.path", "data.validation")


def list_host_problems(wish: Wish, host: Host, code: Code) -> list[Problem]:
    """What is wrong on the host that submits, in one exchange (and one more where paths have variables): the program,
    the environment, the image, data, where the run writes. Raises HostUnreachable."""
    looks = [*_list_needed(wish, host, code), *_list_shared(wish), *commands.list_looks(wish, host, code)]
    return [*_list_missing_data(wish, code), *take_looks(host, looks)]


def _list_needed(wish: Wish, host: Host, code: Code) -> Iterator[Look]:
    """What has to be there before the job starts."""
    venv, image = build_job(wish, 1).around.venv, wish.section.image
    if venv and not venv.startswith("conda:"):
        yield _needed(wish, host, "site.venv", f"{venv}/bin/activate", "make the environment there, or name another")
    if image.startswith(("/", "~", "$")):
        yield _needed(wish, host, "site.image", image, "correct the path; `shardway image` makes one")
    for key, path in _list_data(wish):
        if path.startswith(("/", "~/")) and runtime_of(wish) == "none":
            yield _needed(wish, host, key, path, "correct the path, or copy the data there")
        elif not path.startswith(("/", "~/")) and not code.is_there:
            remedy = "name it by its whole path: the job runs in the run directory"
            yield _needed(wish, host, key, str(wish.workdir / path), remedy)


def _needed(wish: Wish, host: Host, key: str, path: str, remedy: str) -> Look:
    origin, what = wish.loaded.origins[key], f"there is no {path} on {host.name or 'this machine'}"
    return Look(key, origin, test_exists, always(Problem(key, what, origin, remedy=remedy)), path)


def _list_missing_data(wish: Wish, code: Code) -> Iterator[Problem]:
    """Data of a relative path, which the job looks for in the folder in which it runs."""
    for key, path in _list_data(wish):
        if not path.startswith(("/", "~/")) and (why := code.why_missing(path)):
            remedy = "correct the path, or name the data by their whole path"
            yield Problem(key, why, wish.loaded.origins[key], remedy=remedy)


def _list_data(wish: Wish) -> Iterator[tuple[str, str]]:
    """Keys and paths of files that a run file reads."""
    data = wish.loaded.values.data
    if wish.program.meets_by_itself and data.kind != "synthetic":
        for key, path in zip(_DATA, (data.path, data.validation), strict=True):
            if path and not path.startswith("python:"):
                yield key, path


def _list_shared(wish: Wish) -> Iterator[Look]:
    """What all nodes have to see: data, and the run directory, by which they and their jobs know of each other."""
    if wish.profile.scheduler == "local":
        return
    remedy = f"choose a folder on a shared file system{_storage(wish)}"
    yield _shared(wish, "run.root", str(wish.run), remedy)
    for key, path in _list_data(wish):
        if path.startswith("/"):
            yield _shared(wish, key, path, remedy)


def _shared(wish: Wish, key: str, path: str, remedy: str) -> Look:
    origin, disk = wish.loaded.origins[key], wish.profile.node.local_disk
    local = (*_OF_ONE_NODE, *([disk] if disk else []))
    above = next((folder for folder in local if path == folder or path.startswith(f"{folder}/")), "")

    def judge(done: Done) -> Iterator[Problem]:
        """The answer gives the kinds of file system of the folder and of those above, as far as they are there."""
        if above or next(iter(done.out.split()), "") in _MEMORY:
            what = f"{path} is on a node's own disk ({above or 'in memory'}), which other nodes do not see"
            yield Problem(key, what, origin, remedy=remedy)

    return Look(key, origin, lambda _: ("stat", "-f", "-c", "%T", *_list_ancestors(path)), judge)


def _list_ancestors(path: str) -> list[str]:
    """A folder and those above it but the top one, the nearest first."""
    return [str(folder) for folder in (PurePosixPath(path), *PurePosixPath(path).parents) if folder.name]


def _storage(wish: Wish) -> str:
    storage = wish.profile.storage
    named = [place for place in (storage.scratch, storage.project, storage.home) if place]
    return f": {', '.join(named)}" if named else ""
