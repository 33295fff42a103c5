"""What a container runtime contributes to the script that makes an image.

Invariant: the functions are pure; they write to `$part`, which becomes the image when it is whole, and below `$work`,
which is removed. This module must not know a runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardway.errors import Problem
from shardway.launch.image.order import DEBIAN_NAMES, Ground, ImageRequest
from shardway.launch.image.uri import ImageFile, Source, render_docker, render_enroot
from shardway.launch.script import ScriptLine

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
