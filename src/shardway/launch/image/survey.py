"""What has to be known of a machine before an image is made on it.

Invariant: it only asks, in few exchanges. This module must not judge what it finds.

Sources: POSIX, df (-P, -k); GNU coreutils, df (-T), stat (-c).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from shardway.errors import UserError
from shardway.launch.hosts.base import Done, Host
from shardway.launch.image.order import BuildFolder, Ground, ImageRequest
from shardway.launch.image.plan import TOOLS, default_name
from shardway.launch.image.uri import ImageFile

RUNTIMES = (("enroot", ""), ("apptainer", ""), ("apptainer", "singularity"))
"""Runtimes that are looked for where nobody names one, with their command where it has another name."""

_DF = re.compile(r"\s(?P<kind>\S+)\s+\d+\s+\d+\s+(?P<free>\d+)\s+\d+%\s")
_KIB = 1024


def find_runtime(order: ImageRequest, host: Host) -> ImageRequest:
    """The order with the first runtime that the machine has. Raises UserError where it has none."""
    found = host.run_many([_has_command(command or name) for name, command in RUNTIMES])
    for (name, command), done in zip(RUNTIMES, found, strict=True):
        if done.ok:
            return replace(order, runtime=name, command=command)
    raise UserError(
        f"{host.name or 'this machine'} has neither enroot nor apptainer, so it cannot make an image.\n"
        "  To do: run this where one of them is (often compute nodes alone have it), or see with\n"
        "  --dry-run --runtime enroot (or apptainer) what would run."
    )


def survey_host(order: ImageRequest, host: Host) -> Ground:
    """Look at the machine. Raises UserError for a path that cannot be filled in, HostUnreachable."""
    tool = TOOLS[order.runtime]
    target = host.expand(order.target or default_name(order))
    base = host.expand(order.source.path) if isinstance(order.source, ImageFile) else None
    asked = [
        ["uname", "-m"],
        ["id", "-u"],
        _has_command(order.command or order.runtime),
        ["printenv", tool.cache_variable(order)],
        ["printenv", "TMPDIR"],
        ["test", "-e", str(target)],
        ["stat", "-L", "-c", "%s", str(base or "/")],
    ]
    machine, user, command, cache, tmpdir, exists, size = host.run_many(asked)
    usual = (_text(tmpdir) if _text(tmpdir).startswith("/") else "/tmp", str(target.parent))
    wanted = [host.expand(order.scratch)] if order.scratch else [PurePosixPath(path) for path in usual]
    places = _measure(host, [target.parent, *wanted])
    return Ground(
        target=target,
        target_place=places[0],
        scratch_places=tuple(places[1:]),
        host=host.name,
        architecture=_text(machine).replace("arm64", "aarch64"),
        is_root=_text(user) == "0",
        has_command=command.ok,
        target_exists=exists.ok,
        own_cache=bool(_text(cache)),
        base=base,
        base_bytes=int(_text(size)) if base and _text(size).isdecimal() else None,
    )


def parse_df(text: str) -> tuple[int | None, str]:
    """Free bytes and kind of file system in what `df -P -k -T PATH` printed; None and "" where it says neither."""
    last = (text.strip().splitlines() or [""])[-1]
    match = _DF.search(last)
    return (int(match["free"]) * _KIB, match["kind"]) if match else (None, "")


def _measure(host: Host, folders: Sequence[PurePosixPath]) -> list[BuildFolder]:
    """The room of each folder, or of the first one above it that is there."""
    asked = [(folder, above) for folder in folders for above in (folder, *folder.parents)]
    answers = host.run_many([["df", "-P", "-k", "-T", "--", str(above)] for _, above in asked])
    found: dict[PurePosixPath, BuildFolder] = {}
    for (folder, _), done in zip(asked, answers, strict=True):
        if done.ok and folder not in found:
            found[folder] = BuildFolder(folder, *parse_df(done.out))
    return [found.get(folder, BuildFolder(folder)) for folder in folders]


def _has_command(command: str) -> list[str]:
    return ["sh", "-c", 'command -v "$1"', "sh", command]


def _text(done: Done) -> str:
    return done.out.strip() if done.ok else ""
