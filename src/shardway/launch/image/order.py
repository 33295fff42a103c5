"""What image is wanted, and what the machine that makes it is like.

Invariant: both are values; nothing in them was guessed: what is not known is empty or None. This module must not ask a
machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from shardway.launch.image.recipe import Recipe
from shardway.launch.image.uri import Source

Architecture = Literal["x86_64", "aarch64"]

DEBIAN_NAMES: dict[str, str] = {"x86_64": "amd64", "aarch64": "arm64"}
"""The same architectures as registries name them."""


@dataclass(frozen=True)
class NetworkAccess:
    """How the machine that makes the image reaches others: itself, through a proxy, or not at all (None: unknown)."""

    internet: Literal["none", "proxy", "direct"] | None = None
    proxy: str = ""
    no_proxy: str = ""


@dataclass(frozen=True)
class ImageRequest:
    """`recipe`: what is added to it; empty for an image that is only fetched. `target`, `scratch`: as a person wrote
    them, empty where nothing was said. `command`: the runtime's, where the site has another name for it."""

    source: Source
    runtime: str
    recipe: Recipe = field(default_factory=Recipe)
    target: str = ""
    scratch: str = ""
    architecture: Architecture | None = None
    command: str = ""
    way: NetworkAccess = NetworkAccess()
    site: str = ""
    door: str = ""
    """Where files are copied to the site, as rsync takes it: "data.example.org"; empty where that is not known."""
    token: str = "token"

    @property
    def adds(self) -> bool:
        """Whether something is installed, for which programs of the image run."""
        return not self.recipe.is_empty


@dataclass(frozen=True)
class BuildFolder:
    """A folder (or the first one above it that is there), the room in its file system, and of what kind that is."""

    path: PurePosixPath
    free_bytes: int | None = None
    kind: str = ""


@dataclass(frozen=True)
class Ground:
    """The machine that makes the image.

    `architecture` as `uname -m` says it; `base`: an image file that it starts from, and its size; `own_cache`: whether
    the person keeps the runtime's cache somewhere already.
    """

    target: PurePosixPath
    target_place: BuildFolder
    scratch_places: tuple[BuildFolder, ...]
    host: str = ""
    architecture: str = ""
    is_root: bool = False
    has_command: bool = True
    target_exists: bool = False
    own_cache: bool = False
    base: PurePosixPath | None = None
    base_bytes: int | None = None
