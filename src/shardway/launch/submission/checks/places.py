"""Files and folders of a wish: those that a job needs are there, and where every node sees them.

Invariant: a place that cannot be judged from here (a variable, another host) is not held against anybody. This module
must not change anything.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from shardway.errors import Problem
from shardway.launch.hosts.base import Host
from shardway.launch.submission.wish import Wish, build_job, runtime_of

_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that each node has for itself, on every Linux machine that does not say otherwise."""

_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def list_local_problems(wish: Wish, command: tuple[str, ...], here: Path) -> Iterator[Problem]:
    """What is wrong with what is read here, before anything is sent: the script of a command."""
    script = next((word for word in command if word.endswith(".py")), "")
    if not wish.program.python or not script or wish.program.words[0] == "-m":
        return
    path = here / script
    if not path.is_file():
        yield Problem("the command", f"there is no file {script} in {here}", "command line", remedy="correct its path")
        return
    try:
        ast.parse(path.read_bytes(), script)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = f"{script}{where} is no Python: {error.msg if isinstance(error, SyntaxError) else error}"
        yield Problem("the command", what, "command line", remedy="mend it: the job would end as soon as it starts")


def list_host_problems(wish: Wish, host: Host) -> list[Problem]:
    """What is wrong on the host that submits, in one exchange: the environment, the image, data, where the run writes.

    Raises HostUnreachable.
    """
    job, values = build_job(wish, 1), wish.loaded.values
    found: list[Problem] = []
    wanted: dict[str, tuple[str, str]] = {}
    if job.around.venv and not job.around.venv.startswith("conda:"):
        wanted["venv"] = (f"{job.around.venv}/bin/activate", "make the environment there, or name another")
    if wish.section.image.startswith(("/", "~", "$")):
        wanted["image"] = (wish.section.image, "correct the path; `shardway image` makes one")
    if runtime_of(wish) == "none" and wish.program.meets_by_itself and values.data.path.startswith("/"):
        wanted["data.path"] = (values.data.path, "correct the path, or copy the data there")
    for key, (path, remedy) in wanted.items():
        if not host.run(("test", "-e", str(host.expand(path)))).ok:
            dotted = key if "." in key else f"site.{key}"
            origin = wish.loaded.origins[dotted]
            found.append(Problem(dotted, f"there is no {path} on {host.name or 'this machine'}", origin, remedy=remedy))
    return [*found, *_list_unshared(wish, host)]


def _list_unshared(wish: Wish, host: Host) -> Iterator[Problem]:
    """The run directory lies where all nodes see it, since it is how they and their jobs know of each other."""
    if wish.profile.scheduler == "local":
        return
    local = [*_OF_ONE_NODE, *([wish.profile.node.local_disk] if wish.profile.node.local_disk else [])]
    places = [("run.root", str(wish.run))]
    if wish.program.meets_by_itself and wish.loaded.values.data.path.startswith("/"):
        places.append(("data.path", wish.loaded.values.data.path))
    for key, path in places:
        above = next((folder for folder in local if path == folder or path.startswith(f"{folder}/")), "")
        if above or _is_in_memory(host, path):
            what = f"{path} is on a node's own disk ({above or 'in memory'}), which other nodes do not see"
            remedy = f"choose a folder on a shared file system{_storage(wish)}"
            yield Problem(key, what, wish.loaded.origins[key], remedy=remedy)


def _is_in_memory(host: Host, path: str) -> bool:
    while path not in ("/", "."):
        done = host.run(("stat", "-f", "-c", "%T", path))
        if done.ok:
            return done.out.strip() in _MEMORY
        path = os.path.dirname(path)
    return False


def _storage(wish: Wish) -> str:
    storage = wish.profile.storage
    named = [place for place in (storage.scratch, storage.project, storage.home) if place]
    return f": {', '.join(named)}" if named else ""
