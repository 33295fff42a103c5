"""From a request and its machine to the script that makes the image.

Invariant: the script alone makes the image: run by hand, it does the same as under `shardway image`. It leaves the
image complete under its name, or nothing. No machine is read or changed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from shardway.errors import Problem, check_no_problems
from shardway.launch.image.request import BuildFolder, Ground, ImageFile, ImageRequest, Reference, describe_credentials
from shardway.launch.image.runtimes import APPTAINER, ENROOT, Tool, describe_source, path_of
from shardway.launch.script import ScriptLine, ScriptSection, quote, quote_all, render_script, wrap_command

TOOLS: dict[str, Tool] = {tool.name: tool for tool in (ENROOT, APPTAINER)}

_ROOM = 40 * 10**9
"""Bytes that layers, unpacked files and the result of a large image of a framework take together."""
_TIMES_A_FILE = 6
_UNFIT = re.compile(r"[\x00-\x1f\x7f#]")
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class Making:
    """What will run. `hindrances`: why it cannot run on that machine now; `warnings`: what may go wrong."""

    script: str
    target: PurePosixPath
    part: PurePosixPath
    work: PurePosixPath
    token: str
    hindrances: tuple[Problem, ...]
    warnings: tuple[str, ...]


def default_name(order: ImageRequest) -> str:
    """A name for the image where the person gave none: "pytorch-25.04-py3.sqsh"; one with additions has them in its
    name."""
    more = "-more" if order.adds else ""
    return f"{order.source.stem}{more}{TOOLS[order.runtime].suffixes[0]}"


def check_order(order: ImageRequest) -> None:
    """Raise UserError with all that no machine could make."""
    tool = TOOLS[order.runtime]
    problems = list(tool.problems(order))
    if order.target and not order.target.endswith(tool.suffixes):
        remedy = "give it such a name, or choose the other with --runtime"
        what = f'"{order.target}" is no name of an image of {tool.name}'
        problems.append(Problem("--to", what, allowed=f"a file ending in {' or '.join(tool.suffixes)}", remedy=remedy))
    for option, path in (("--to", order.target), ("--scratch", order.scratch), ("the image", path_of(order.source))):
        if _UNFIT.search(path) or (option == "--scratch" and ":" in path):
            what = f"{path!r} holds a character that the runtimes take for something else"
            problems.append(Problem(option, what, remedy="choose a path without control characters, # and :"))
    check_no_problems(f"the image {describe_source(order.source)}", problems)


def plan_image(order: ImageRequest, ground: Ground) -> Making:
    """The script that makes the image on that machine. Raises UserError as `check_order` does."""
    check_order(order)
    target, scratch = ground.target, choose_scratch(order, ground)
    work = scratch.path / f"shardway-image-{order.token}"
    part = target.with_name(f".{target.name}.{order.token}.tmp")
    return Making(
        script=render_script(_parts(order, ground, work, part)),
        target=target,
        part=part,
        work=work,
        token=order.token,
        hindrances=tuple(_list_hindrances(order, ground)),
        warnings=tuple(_list_warnings(order, ground, scratch)),
    )


def ended_mark(token: str) -> str:
    """What the script prints at its end, before its exit code."""
    return f"shardway-image-{token} ended with "


def choose_scratch(order: ImageRequest, ground: Ground) -> BuildFolder:
    """The folder for layers and unpacked files: the first with room that is not in memory, else the roomiest."""
    places = [place for place in ground.scratch_places if place.kind not in _MEMORY] or list(ground.scratch_places)
    need = _room_needed(order, ground)
    fit = [place for place in places if place.free_bytes is None or place.free_bytes >= need]
    return (fit or sorted(places, key=lambda place: place.free_bytes or 0, reverse=True))[0]


# --- the script


def _parts(order: ImageRequest, ground: Ground, work: PurePosixPath, part: PurePosixPath) -> tuple[ScriptSection, ...]:
    tool, target = TOOLS[order.runtime], quote(str(ground.target))
    folders = " ".join(f'"$work/{name}"' for name in tool.folders)
    head = (
        ScriptLine("#!/bin/bash"),
        ScriptLine(
            "set -euo pipefail", f"Makes {_plain(str(ground.target))} from {_plain(describe_source(order.source))}."
        ),
        ScriptLine("exec 2>&1"),
        ScriptLine(f"work={quote(str(work))}", "for everything but the image, and the image until it is whole"),
        ScriptLine(f"part={quote(str(part))}"),
        ScriptLine(_CLEAN.format(mark=ended_mark(order.token)), "at the end both are removed, however it ends"),
        ScriptLine("trap clean EXIT"),
        ScriptLine("trap 'exit 143' HUP INT TERM"),
        ScriptLine(wrap_command(("mkdir -p --", quote(str(ground.target.parent)), '"$work"')), "places"),
        ScriptLine('chmod 700 -- "$work"'),
        ScriptLine(f"mkdir -p -- {folders}"),
        *_proxy_lines(order),
    )
    exists = quote(f"{ground.target} exists")
    name = (
        ScriptLine(
            f'mv -n -- "$part" {target}', "the image gets its name when it is whole; a file of that name stays as it is"
        ),
        ScriptLine(f'[ ! -e "$part" ] || {{ echo {exists}; exit 17; }}'),
    )
    return ScriptSection("", head), ScriptSection("", tuple(tool.steps(order, ground))), ScriptSection("", name)


_CLEAN = """\
clean() {{
  code=$?
  trap '' HUP INT TERM
  chmod -R u+rwX -- "$work" || true
  rm -rf -- "$work" "$part" || echo "cannot be removed: $work $part"
  echo "{mark}$code"
}}"""


def _plain(text: str) -> str:
    """A text inside a comment."""
    return re.sub(r"[\x00-\x1f\x7f]", "?", text)


def _proxy_lines(order: ImageRequest) -> Iterator[ScriptLine]:
    way = order.way
    if way.proxy:
        words = [
            f"http_proxy={way.proxy}",
            f"https_proxy={way.proxy}",
            *([f"no_proxy={way.no_proxy}"] if way.no_proxy else []),
        ]
        yield ScriptLine(f"export {quote_all(words)}", "the way out")


# --- hindrances and warnings


def _list_hindrances(order: ImageRequest, ground: Ground) -> Iterator[Problem]:
    where = ground.host or "this machine"
    command = order.command or order.runtime
    if not ground.has_command:
        remedy = (
            "load its module or work where it is installed: often compute nodes alone have it (`salloc`, `qsub -I`)"
        )
        yield Problem("the runtime", f"there is no {command} on {where}", remedy=remedy)
    if ground.target_exists:
        what = f"{ground.target} exists, and is left as it is"
        yield Problem("--to", what, remedy="choose another name, or move the file away")
    if ground.base is not None and ground.base_bytes is None:
        yield Problem("the image", f"there is no {ground.base} on {where}", remedy="correct the path")
    wanted = order.architecture
    if order.adds and wanted and ground.architecture and wanted != ground.architecture:
        what = f"its programs are for {wanted}, and {where} is {ground.architecture}"
        remedy = f"build on a machine with {wanted}: a node of the site"
        yield Problem("the architecture", what, remedy=remedy)
    if order.way.internet == "none" and (order.source.is_remote or order.adds):
        what = f"the login nodes of {order.site} reach nothing outside"
        yield Problem("the internet", what, f"profile of {order.site}", remedy=_describe_elsewhere(order, ground))


def _describe_elsewhere(order: ImageRequest, ground: Ground) -> str:
    """How to make it on another machine, and to bring it over."""
    name = ground.target.name
    words = [
        "shardway",
        "image",
        "build" if order.adds else "import",
        describe_source(order.source),
        "--runtime",
        order.runtime,
    ]
    words += ["--arch", order.architecture] if order.architecture else []
    words += [word for package in order.recipe.apt for word in ("--apt", package)]
    words += [word for line in order.recipe.pip for word in ("--pip", line)]
    words += ["--requirements", "FILE"] if order.recipe.requirements else []
    words += ["--to", name]
    copy = ("rsync", "-P", name, f"{order.door or 'USER@HOST'}:{ground.target.parent}/")
    return (
        f"on a machine that has {order.runtime} and reaches the internet, run\n"
        f"          {quote_all(words)}\n        and copy what it made:\n          {quote_all(copy)}"
    )


def _list_warnings(order: ImageRequest, ground: Ground, scratch: BuildFolder) -> Iterator[str]:
    need, where = _room_needed(order, ground), ground.host or "this machine"
    if scratch.free_bytes is not None and scratch.free_bytes < need:
        yield (
            f"space may be short: {scratch.path} on {where} has {_format_gb(scratch.free_bytes)}; a large image takes "
            f"{_format_gb(need)} while it is made.\n"
            "  To do: name a folder with more room by --scratch."
        )
    place = ground.target_place
    if place.free_bytes is not None and place.free_bytes < need // 3:
        yield (
            f"space may be short: {place.path} on {where} has {_format_gb(place.free_bytes)} for the image.\n"
            "  To do: name a file on a larger file system by --to; homes have small quotas."
        )
    if scratch.kind in _MEMORY:
        yield f"{scratch.path} on {where} lies in memory.\n  To do: name a folder on a disk by --scratch."
    if isinstance(order.source, Reference) and order.source.user and order.runtime == "apptainer":
        yield (
            f"Apptainer has no option for the user {order.source.user}; it takes the one that it knows.\n"
            f"  To do: {describe_credentials(order.source.registry, order.runtime)}"
        )
    if isinstance(order.source, Reference) and order.source.tag == "latest":
        yield "the tag latest means another image tomorrow.\n  To do: name the version that you want."


def _format_gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _room_needed(order: ImageRequest, ground: Ground) -> int:
    """Bytes: a multiple of a file's size, a fixed amount for a folder or a name."""
    is_file = isinstance(order.source, ImageFile) and order.source.kind != "folder"
    return _TIMES_A_FILE * ground.base_bytes if is_file and ground.base_bytes is not None else _ROOM
