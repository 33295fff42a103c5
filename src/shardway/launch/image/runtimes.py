"""Container runtimes that make images: Apptainer (a SIF file) and Enroot (a squashfs file).

Invariants:
- The functions are pure; their scripts write to `$part`, which becomes the image when it is complete, and below
  `$work`, which is removed.
- Apptainer: the image follows from the definition file alone, which stays in it and contains neither a proxy nor a
  secret.
- Enroot: containers, layers and temporary files are below `$work`, so nothing is left in the user's own enroot folders.

Sources: Apptainer User Guide, "apptainer pull", "apptainer build", "Definition Files" (Bootstrap, From, %post), "Build
Environment" (APPTAINER_TMPDIR, APPTAINER_CACHEDIR). Variables of a proxy, and those of the base image, reach %post by
themselves (tried on 1.4.5); enroot's documentation, "enroot import" (--arch, --output), "enroot create" (--name),
"enroot start" (--root, --rw, --env, --mount), "enroot export" (--output), "Configuration" (ENROOT_*_PATH).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from textwrap import indent

from shardway.errors import Problem
from shardway.launch.image.request import (
    DEBIAN_NAMES,
    Ground,
    ImageFile,
    ImageRequest,
    Reference,
    Source,
    render_docker,
    render_enroot,
    render_recipe,
)
from shardway.launch.script import ScriptLine, quote, wrap_command

# --- what a runtime contributes to the script

PART = '"$part"'
"""The image while it is made: another name in its folder."""
WORK = "$work"


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


def arch_words(order: ImageRequest, ground: Ground) -> tuple[str, ...]:
    """The option for an image of another architecture than this machine's; older runtimes do not have it."""
    wanted = order.architecture
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


def _list_apptainer_steps(order: ImageRequest, ground: Ground) -> Iterator[ScriptLine]:
    command, prefix = quote(order.command or "apptainer"), _prefix(order)
    yield ScriptLine(f'export {prefix}_TMPDIR="$work/tmp"', "all that is unpacked is removed at the end")
    if not ground.own_cache:
        yield ScriptLine(f'export {prefix}_CACHEDIR="$work/cache"')
    arch = arch_words(order, ground) if order.source.is_remote else ()
    if not order.adds:
        verb, spec = _import_words(order, ground)
        yield ScriptLine(
            wrap_command((f"{command} {verb}", *arch, PART, quote(spec))), "fetch the image and make one file of it"
        )
        return
    yield ScriptLine(write_file('"$work/image.def"', render_definition(order, ground)), "what is built")
    root = () if ground.is_root else ("--fakeroot",)
    yield ScriptLine(wrap_command((f"{command} build", *root, *arch, PART, '"$work/image.def"')), "build it")


def render_definition(order: ImageRequest, ground: Ground) -> str:
    """The definition file: the base, and what is added to it."""
    bootstrap, origin = _bootstrap(order, ground)
    return f"Bootstrap: {bootstrap}\nFrom: {origin}\n\n%post\n{indent(render_recipe(order.recipe), '    ')}"


def _bootstrap(order: ImageRequest, ground: Ground) -> tuple[str, str]:
    if isinstance(order.source, ImageFile):
        return "localimage", str(ground.base)
    agent = "docker-daemon" if order.source.transport == "dockerd" else order.source.transport
    return agent, render_docker(order.source)


def _import_words(order: ImageRequest, ground: Ground) -> tuple[str, str]:
    """`pull` is for registries; the rest is built."""
    bootstrap, origin = _bootstrap(order, ground)
    if bootstrap == "localimage":
        return "build", origin
    return ("pull", f"{bootstrap}://{origin}") if order.source.is_remote else ("build", f"{bootstrap}:{origin}")


def _prefix(order: ImageRequest) -> str:
    """Each of the two reads variables of its own name first."""
    return "SINGULARITY" if PurePosixPath(order.command).name.startswith("singularity") else "APPTAINER"


def _list_apptainer_problems(order: ImageRequest) -> Iterator[Problem]:
    source, shown = order.source, describe_source(order.source)
    if isinstance(source, Reference) and source.transport == "podman":
        what = f"{shown}: Apptainer does not read podman's images"
        remedy = "push it to a registry, or build it from its base image with `shardway image build`"
        yield Problem("the image", what, remedy=remedy)
    if isinstance(source, ImageFile) and source.kind == "sif" and not order.adds:
        yield Problem("the image", f"{shown} is an image for Apptainer already", remedy="set site.image to its path")


APPTAINER = Tool(
    name="apptainer",
    suffixes=(".sif",),
    steps=_list_apptainer_steps,
    problems=_list_apptainer_problems,
    cache_variable=lambda order: f"{_prefix(order)}_CACHEDIR",
    folders=("cache", "tmp"),
)


# --- Enroot: a squashfs file

_NO_DEVICES = ("--env NVIDIA_VISIBLE_DEVICES=void", "--env MELLANOX_VISIBLE_DEVICES=void")
"""Images of NVIDIA ask for the driver, which a machine without GPUs does not have."""


def _list_enroot_steps(order: ImageRequest, ground: Ground) -> Iterator[ScriptLine]:
    command = quote(order.command or "enroot")
    yield ScriptLine(
        'export ENROOT_DATA_PATH="$work/data" ENROOT_TEMP_PATH="$work/tmp" ENROOT_RUNTIME_PATH="$work/run"',
        "all that enroot writes is removed at the end",
    )
    if not ground.own_cache:
        yield ScriptLine('export ENROOT_CACHE_PATH="$work/cache"')
    if isinstance(order.source, Reference):
        output = '"$work/base.sqsh"' if order.adds else PART
        words = (f"{command} import", *arch_words(order, ground), f"--output {output} --")
        yield ScriptLine(
            wrap_command((*words, quote(render_enroot(order.source)))), "fetch the image and make one file of it"
        )
    if order.adds:
        yield from _build(command, order, ground)


def _build(command: str, order: ImageRequest, ground: Ground) -> Iterator[ScriptLine]:
    fetched = isinstance(order.source, Reference)
    base = '"$work/base.sqsh"' if fetched else quote(str(ground.base))
    yield ScriptLine(f"{command} create --name image -- {base}", "unpack it as a container")
    if fetched:
        yield ScriptLine('rm "$work/base.sqsh"', "the room is needed")
    yield ScriptLine(
        write_file('"$work/recipe/recipe.sh"', render_recipe(order.recipe)), "what is added, run inside it"
    )
    proxy = tuple(f"--env {name}" for name in _proxy_names(order))
    mount = '--mount "$work/recipe:/mnt:x-create=dir,rbind,ro"'
    words = (f"{command} start --root --rw", *_NO_DEVICES, *proxy, mount, "image sh /mnt/recipe.sh")
    yield ScriptLine(wrap_command(words))
    yield ScriptLine(f"{command} export --output {PART} -- image", "make one file of it")


def _proxy_names(order: ImageRequest) -> tuple[str, ...]:
    """enroot hands on the variables that are named."""
    names = ("http_proxy", "https_proxy") if order.way.proxy else ()
    return (*names, "no_proxy") if names and order.way.no_proxy else names


def _list_enroot_problems(order: ImageRequest) -> Iterator[Problem]:
    source, shown = order.source, describe_source(order.source)
    if isinstance(source, Reference) and source.transport == "oras":
        what = f"{shown}: enroot does not read oras://"
        yield Problem("the image", what, remedy="name an image with docker://, or use --runtime apptainer")
    if isinstance(source, ImageFile) and source.kind != "squashfs":
        what = f"{shown}: enroot reads squashfs files only"
        remedy = (
            "name the image that it was made of, or make a .sqsh file of its folder with `mksquashfs FOLDER FILE.sqsh`"
        )
        yield Problem("the image", what, remedy=remedy)
    elif isinstance(source, ImageFile) and not order.adds:
        yield Problem("the image", f"{shown} is an image for enroot already", remedy="set site.image to its path")


ENROOT = Tool(
    name="enroot",
    suffixes=(".sqsh", ".sqfs", ".squashfs"),
    steps=_list_enroot_steps,
    problems=_list_enroot_problems,
    cache_variable=lambda order: "ENROOT_CACHE_PATH",
    folders=("cache", "data", "tmp", "run", "recipe"),
)
