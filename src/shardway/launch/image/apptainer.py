"""Apptainer (or Singularity, its older name): a SIF file, pulled from a registry, or built from a definition file.

Invariant: what is built follows from the definition file alone, which stays in the image; neither a proxy nor a secret
is in it. This module must not start anything.

Sources: Apptainer User Guide, "apptainer pull", "apptainer build", "Definition Files" (Bootstrap, From, %post), "Build
Environment" (APPTAINER_TMPDIR, APPTAINER_CACHEDIR). Variables of a proxy, and those of the base image, reach %post by
themselves (tried on 1.4.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from textwrap import indent

from shardway.errors import Problem
from shardway.launch.image.base import PART, Tool, arch_words, describe_source, write_file
from shardway.launch.image.order import Ground, ImageRequest
from shardway.launch.image.recipe import render_recipe
from shardway.launch.image.uri import ImageFile, Reference, render_docker
from shardway.launch.script import ScriptLine, quote, wrap_command


def _steps(order: ImageRequest, ground: Ground) -> Iterator[ScriptLine]:
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


def _problems(order: ImageRequest) -> Iterator[Problem]:
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
    steps=_steps,
    problems=_problems,
    cache_variable=lambda order: f"{_prefix(order)}_CACHEDIR",
    folders=("cache", "tmp"),
)
