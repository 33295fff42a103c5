"""Enroot: a squashfs file, imported from a registry, or exported from a container in which a script has run.

Invariant: containers, layers and temporary files lie below `$work`, so that nothing is left in the person's own enroot
folders. This module must not start anything.

Sources: enroot's documentation, "enroot import" (--arch, --output), "enroot create" (--name), "enroot start" (--root,
--rw, --env, --mount), "enroot export" (--output), "Configuration" (ENROOT_*_PATH).
"""

from __future__ import annotations

from collections.abc import Iterator

from shardway.errors import Problem
from shardway.launch.image.base import PART, Tool, arch_words, describe_source, write_file
from shardway.launch.image.order import Ground, ImageRequest
from shardway.launch.image.recipe import render_recipe
from shardway.launch.image.uri import ImageFile, Reference, render_enroot
from shardway.launch.script import ScriptLine, quote, wrap_command

_NO_DEVICES = ("--env NVIDIA_VISIBLE_DEVICES=void", "--env MELLANOX_VISIBLE_DEVICES=void")
"""Images of NVIDIA ask for the driver, which a machine without GPUs does not have."""


def _steps(order: ImageRequest, ground: Ground) -> Iterator[ScriptLine]:
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


def _problems(order: ImageRequest) -> Iterator[Problem]:
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
    steps=_steps,
    problems=_problems,
    cache_variable=lambda order: "ENROOT_CACHE_PATH",
    folders=("cache", "data", "tmp", "run", "recipe"),
)
