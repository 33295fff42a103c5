"""From a request and its machine to the script that makes the image: for Apptainer a SIF file, for Enroot squashfs.

Invariants:
- The script alone makes the image: run by hand, it does the same as under `shardway image`. It leaves the image
  complete under its name, or nothing. It writes to `$part`, which becomes the image when it is complete, and below
  `$work`, which is removed. No machine is read or changed here.
- Apptainer: the image follows from the definition file alone, which stays in it and contains neither a proxy nor a
  secret.
- Enroot: containers, layers and temporary files are below `$work`, so nothing is left in the user's own enroot folders.

Sources: Apptainer User Guide, "apptainer pull", "apptainer build", "Definition Files" (Bootstrap, From, %post), "Build
Environment" (APPTAINER_TMPDIR, APPTAINER_CACHEDIR). Variables of a proxy, and those of the base image, reach %post by
themselves (tried on 1.4.5); enroot's documentation, "enroot import" (--arch, --output), "enroot create" (--name),
"enroot start" (--root, --rw, --env, --mount), "enroot export" (--output), "Configuration" (ENROOT_*_PATH).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from textwrap import indent

from shardway.errors import Problem, check_no_problems
from shardway.launch.image.request import (
    DEBIAN_NAMES,
    BuildFolder,
    Ground,
    ImageFile,
    ImageRequest,
    Reference,
    Source,
    describe_credentials,
    render_docker,
    render_enroot,
    render_recipe,
)
from shardway.launch.script import ScriptLine, ScriptSection, quote, quote_all, render_script, wrap_command
from shardway.plugins import make_own

# --- what a runtime contributes to the script

PART = '"$part"'
"""The image while it is made: another name in its folder."""


@dataclass(frozen=True)
class Tool:
    """`steps`: the lines that make `$part`. `problems`: why it cannot. `cache_variable`: name of the variable by which
    people keep its cache somewhere. `suffixes`: names of its images; the first is the usual one."""

    name: str
    suffixes: tuple[str, ...]
    steps: Callable[[ImageRequest, Ground], Iterator[ScriptLine]]
    problems: Callable[[ImageRequest], Iterator[Problem]]
    cache_variable: Callable[[ImageRequest], str]
    folders: tuple[str, ...]


def arch_words(request: ImageRequest, ground: Ground) -> tuple[str, ...]:
    """The option for an image of another architecture than this machine's; older runtimes do not have it."""
    wanted = request.architecture
    return () if wanted is None or wanted == ground.architecture else ("--arch", DEBIAN_NAMES[wanted])


def describe_source(source: Source) -> str:
    """A source as a person may write it again."""
    if isinstance(source, ImageFile):
        return source.path
    return render_enroot(source) if source.user else f"{source.transport}://{render_docker(source)}"


def path_of(source: Source) -> str:
    """The path of an image that is a file or folder; empty for one with a name."""
    return source.path if isinstance(source, ImageFile) else ""


def write_file(path: str, text: str) -> str:
    """Shell that writes a text to a path, which is quoted already. No line of the text is the end mark."""
    return f"cat >{path} <<'END_OF_FILE'\n{text.rstrip()}\nEND_OF_FILE"


# --- Apptainer or Singularity: a SIF file


def _list_apptainer_steps(request: ImageRequest, ground: Ground) -> Iterator[ScriptLine]:
    command, prefix = quote(request.command or "apptainer"), _prefix(request)
    yield ScriptLine(f'export {prefix}_TMPDIR="$work/tmp"', "all that is unpacked is removed at the end")
    if not ground.own_cache:
        yield ScriptLine(f'export {prefix}_CACHEDIR="$work/cache"')
    arch = arch_words(request, ground) if request.source.is_remote else ()
    if not request.adds:
        verb, spec = _import_words(request, ground)
        yield ScriptLine(
            wrap_command((f"{command} {verb}", *arch, PART, quote(spec))), "fetch the image and make one file of it"
        )
        return
    yield ScriptLine(write_file('"$work/image.def"', render_definition(request, ground)), "what is built")
    root = () if ground.is_root else ("--fakeroot",)
    yield ScriptLine(wrap_command((f"{command} build", *root, *arch, PART, '"$work/image.def"')), "build it")


def render_definition(request: ImageRequest, ground: Ground) -> str:
    """The definition file: the base, and what is added to it."""
    bootstrap, origin = _bootstrap(request, ground)
    return f"Bootstrap: {bootstrap}\nFrom: {origin}\n\n%post\n{indent(render_recipe(request.recipe), '    ')}"


def _bootstrap(request: ImageRequest, ground: Ground) -> tuple[str, str]:
    if isinstance(request.source, ImageFile):
        return "localimage", str(ground.base)
    agent = "docker-daemon" if request.source.transport == "dockerd" else request.source.transport
    return agent, render_docker(request.source)


def _import_words(request: ImageRequest, ground: Ground) -> tuple[str, str]:
    """`pull` is for registries; the rest is built."""
    bootstrap, origin = _bootstrap(request, ground)
    if bootstrap == "localimage":
        return "build", origin
    return ("pull", f"{bootstrap}://{origin}") if request.source.is_remote else ("build", f"{bootstrap}:{origin}")


def _prefix(request: ImageRequest) -> str:
    """Each of the two reads variables of its own name first."""
    return "SINGULARITY" if PurePosixPath(request.command).name.startswith("singularity") else "APPTAINER"


def _list_apptainer_problems(request: ImageRequest) -> Iterator[Problem]:
    source, shown = request.source, describe_source(request.source)
    if isinstance(source, Reference) and source.transport == "podman":
        what = f"{shown}: Apptainer does not read podman's images"
        remedy = "push it to a registry, or build it from its base image with `shardway image build`"
        yield Problem("the image", what, remedy=remedy)
    if isinstance(source, ImageFile) and source.kind == "sif" and not request.adds:
        yield Problem("the image", f"{shown} is an image for Apptainer already", remedy="set site.image to its path")


APPTAINER = Tool(
    name="apptainer",
    suffixes=(".sif",),
    steps=_list_apptainer_steps,
    problems=_list_apptainer_problems,
    cache_variable=lambda request: f"{_prefix(request)}_CACHEDIR",
    folders=("cache", "tmp"),
)


# --- Enroot: a squashfs file

_NO_DEVICES = ("--env NVIDIA_VISIBLE_DEVICES=void", "--env MELLANOX_VISIBLE_DEVICES=void")
"""Images of NVIDIA ask for the driver, which a machine without GPUs does not have."""


def _list_enroot_steps(request: ImageRequest, ground: Ground) -> Iterator[ScriptLine]:
    command = quote(request.command or "enroot")
    yield ScriptLine(
        'export ENROOT_DATA_PATH="$work/data" ENROOT_TEMP_PATH="$work/tmp" ENROOT_RUNTIME_PATH="$work/run"',
        "all that enroot writes is removed at the end",
    )
    if not ground.own_cache:
        yield ScriptLine('export ENROOT_CACHE_PATH="$work/cache"')
    if isinstance(request.source, Reference):
        output = '"$work/base.sqsh"' if request.adds else PART
        words = (f"{command} import", *arch_words(request, ground), f"--output {output} --")
        yield ScriptLine(
            wrap_command((*words, quote(render_enroot(request.source)))), "fetch the image and make one file of it"
        )
    if request.adds:
        yield from _build(command, request, ground)


def _build(command: str, request: ImageRequest, ground: Ground) -> Iterator[ScriptLine]:
    fetched = isinstance(request.source, Reference)
    base = '"$work/base.sqsh"' if fetched else quote(str(ground.base))
    yield ScriptLine(f"{command} create --name image -- {base}", "unpack it as a container")
    if fetched:
        yield ScriptLine('rm "$work/base.sqsh"', "the room is needed")
    yield ScriptLine(
        write_file('"$work/recipe/recipe.sh"', render_recipe(request.recipe)), "what is added, run inside it"
    )
    proxy = tuple(f"--env {name}" for name in _proxy_names(request))
    mount = '--mount "$work/recipe:/mnt:x-create=dir,rbind,ro"'
    words = (f"{command} start --root --rw", *_NO_DEVICES, *proxy, mount, "image sh /mnt/recipe.sh")
    yield ScriptLine(wrap_command(words))
    yield ScriptLine(f"{command} export --output {PART} -- image", "make one file of it")


def _proxy_names(request: ImageRequest) -> tuple[str, ...]:
    """enroot hands on the variables that are named."""
    names = ("http_proxy", "https_proxy") if request.way.proxy else ()
    return (*names, "no_proxy") if names and request.way.no_proxy else names


def _list_enroot_problems(request: ImageRequest) -> Iterator[Problem]:
    source, shown = request.source, describe_source(request.source)
    if isinstance(source, Reference) and source.transport == "oras":
        what = f"{shown}: enroot does not read oras://"
        yield Problem("the image", what, remedy="name an image with docker://, or use --runtime apptainer")
    if isinstance(source, ImageFile) and source.kind != "squashfs":
        what = f"{shown}: enroot reads squashfs files only"
        remedy = (
            "name the image that it was made of, or make a .sqsh file of its folder with `mksquashfs FOLDER FILE.sqsh`"
        )
        yield Problem("the image", what, remedy=remedy)
    elif isinstance(source, ImageFile) and not request.adds:
        yield Problem("the image", f"{shown} is an image for enroot already", remedy="set site.image to its path")


ENROOT = Tool(
    name="enroot",
    suffixes=(".sqsh", ".sqfs", ".squashfs"),
    steps=_list_enroot_steps,
    problems=_list_enroot_problems,
    cache_variable=lambda request: "ENROOT_CACHE_PATH",
    folders=("cache", "data", "tmp", "run", "recipe"),
)


# --- the plan of an image

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


def default_name(request: ImageRequest) -> str:
    """A name for the image where the person gave none: "pytorch-25.04-py3.sqsh"; one with additions has them in its
    name."""
    more = "-more" if request.adds else ""
    return f"{request.source.stem}{more}{TOOLS[request.runtime].suffixes[0]}"


def check_request(request: ImageRequest) -> None:
    """Raise UserError with all that no machine could make."""
    tool = TOOLS[request.runtime]
    problems = list(tool.problems(request))
    if request.target and not request.target.endswith(tool.suffixes):
        remedy = "give it such a name, or choose the other with --runtime"
        what = f'"{request.target}" is no name of an image of {tool.name}'
        problems.append(Problem("--to", what, allowed=f"a file ending in {' or '.join(tool.suffixes)}", remedy=remedy))
    for option, path in (
        ("--to", request.target),
        ("--scratch", request.scratch),
        ("the image", path_of(request.source)),
    ):
        if _UNFIT.search(path) or (option == "--scratch" and ":" in path):
            what = f"{path!r} holds a character that the runtimes take for something else"
            problems.append(Problem(option, what, remedy="choose a path without control characters, # and :"))
    check_no_problems(f"the image {describe_source(request.source)}", problems)


def plan_image(request: ImageRequest, ground: Ground) -> Making:
    """The script that makes the image on that machine. Raises UserError as `check_request` does."""
    check_request(request)
    target, scratch = ground.target, choose_scratch(request, ground)
    work = scratch.path / f"shardway-image-{request.token}"
    part = target.with_name(f".{target.name}.{request.token}.tmp")
    return Making(
        script=render_script(_parts(request, ground, work, part)),
        target=target,
        part=part,
        work=work,
        token=request.token,
        hindrances=tuple(_list_hindrances(request, ground)),
        warnings=tuple(_list_warnings(request, ground, scratch)),
    )


def ended_mark(token: str) -> str:
    """What the script prints at its end, before its exit code."""
    return f"shardway-image-{token} ended with "


def choose_scratch(request: ImageRequest, ground: Ground) -> BuildFolder:
    """The folder for layers and unpacked files: the first with room that is not in memory, else the roomiest."""
    places = [place for place in ground.scratch_places if place.kind not in _MEMORY] or list(ground.scratch_places)
    need = _room_needed(request, ground)
    fit = [place for place in places if place.free_bytes is None or place.free_bytes >= need]
    return (fit or sorted(places, key=lambda place: place.free_bytes or 0, reverse=True))[0]


# --- the script


def _parts(
    request: ImageRequest, ground: Ground, work: PurePosixPath, part: PurePosixPath
) -> tuple[ScriptSection, ...]:
    tool, target = TOOLS[request.runtime], quote(str(ground.target))
    folders = " ".join(f'"$work/{name}"' for name in tool.folders)
    head = (
        ScriptLine("#!/bin/bash"),
        ScriptLine(
            "set -euo pipefail", f"Makes {_plain(str(ground.target))} from {_plain(describe_source(request.source))}."
        ),
        ScriptLine("exec 2>&1"),
        ScriptLine(f"work={quote(str(work))}", "for everything but the image, and the image until it is whole"),
        ScriptLine(f"part={quote(str(part))}"),
        ScriptLine(_CLEAN.format(mark=ended_mark(request.token)), "at the end both are removed, however it ends"),
        ScriptLine("trap clean EXIT"),
        ScriptLine("trap 'exit 143' HUP INT TERM"),
        ScriptLine(wrap_command(("mkdir -p --", quote(str(ground.target.parent)), '"$work"')), "places"),
        ScriptLine('chmod 700 -- "$work"'),
        ScriptLine(f"mkdir -p -- {folders}"),
        *_proxy_lines(request),
    )
    exists = quote(f"{ground.target} exists")
    name = (
        ScriptLine(
            f'mv -n -- "$part" {target}', "the image gets its name when it is whole; a file of that name stays as it is"
        ),
        ScriptLine(f'[ ! -e "$part" ] || {{ echo {exists}; exit 17; }}'),
    )
    return ScriptSection("", head), ScriptSection("", tuple(tool.steps(request, ground))), ScriptSection("", name)


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


def _proxy_lines(request: ImageRequest) -> Iterator[ScriptLine]:
    way = request.way
    if way.proxy:
        words = [
            f"http_proxy={way.proxy}",
            f"https_proxy={way.proxy}",
            *([f"no_proxy={way.no_proxy}"] if way.no_proxy else []),
        ]
        yield ScriptLine(f"export {quote_all(words)}", "the way out")


# --- hindrances and warnings


def _list_hindrances(request: ImageRequest, ground: Ground) -> Iterator[Problem]:
    where = ground.host or "this machine"
    command = request.command or request.runtime
    if not ground.has_command:
        shells = ", ".join(f"`{each.interactive}`" for each in make_own("schedulers") if each.interactive)
        remedy = f"load its module or work where it is installed: often compute nodes alone have it ({shells})"
        yield Problem("the runtime", f"there is no {command} on {where}", remedy=remedy)
    if ground.target_exists:
        what = f"{ground.target} exists, and is left as it is"
        yield Problem("--to", what, remedy="choose another name, or move the file away")
    if ground.base is not None and ground.base_bytes is None:
        yield Problem("the image", f"there is no {ground.base} on {where}", remedy="correct the path")
    wanted = request.architecture
    if request.adds and wanted and ground.architecture and wanted != ground.architecture:
        what = f"its programs are for {wanted}, and {where} is {ground.architecture}"
        remedy = f"build on a machine with {wanted}: a node of the site"
        yield Problem("the architecture", what, remedy=remedy)
    if request.way.internet == "none" and (request.source.is_remote or request.adds):
        what = f"the login nodes of {request.site} reach nothing outside"
        yield Problem("the internet", what, f"profile of {request.site}", remedy=_describe_elsewhere(request, ground))


def _describe_elsewhere(request: ImageRequest, ground: Ground) -> str:
    """How to make it on another machine, and to bring it over."""
    name = ground.target.name
    words = [
        "shardway",
        "image",
        "build" if request.adds else "import",
        describe_source(request.source),
        "--runtime",
        request.runtime,
    ]
    words += ["--arch", request.architecture] if request.architecture else []
    words += [word for package in request.recipe.apt for word in ("--apt", package)]
    words += [word for line in request.recipe.pip for word in ("--pip", line)]
    words += ["--requirements", "FILE"] if request.recipe.requirements else []
    words += ["--to", name]
    copy = ("rsync", "-P", name, f"{request.door or 'USER@HOST'}:{ground.target.parent}/")
    return (
        f"on a machine that has {request.runtime} and reaches the internet, run\n"
        f"          {quote_all(words)}\n        and copy what it made:\n          {quote_all(copy)}"
    )


def _list_warnings(request: ImageRequest, ground: Ground, scratch: BuildFolder) -> Iterator[str]:
    need, where = _room_needed(request, ground), ground.host or "this machine"
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
    if isinstance(request.source, Reference) and request.source.user and request.runtime == "apptainer":
        yield (
            f"Apptainer has no option for the user {request.source.user}; it takes the one that it knows.\n"
            f"  To do: {describe_credentials(request.source.registry, request.runtime)}"
        )
    if isinstance(request.source, Reference) and request.source.tag == "latest":
        yield "the tag latest means another image tomorrow.\n  To do: name the version that you want."


def _format_gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _room_needed(request: ImageRequest, ground: Ground) -> int:
    """Bytes: a multiple of a file's size, a fixed amount for a folder or a name."""
    is_file = isinstance(request.source, ImageFile) and request.source.kind != "folder"
    return _TIMES_A_FILE * ground.base_bytes if is_file and ground.base_bytes is not None else _ROOM
