"""What a site's profile says about making an image for it: the runtime, the architecture, the way out.

Invariant: what a person said wins over the profile. This module must not ask a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from pydantic import ValidationError

from shardway.errors import UserError
from shardway.launch.hosts.target import Target
from shardway.launch.image.order import DEBIAN_NAMES, Architecture, ImageRequest, NetworkAccess
from shardway.launch.image.plan import TOOLS
from shardway.launch.image.recipe import Recipe
from shardway.launch.image.uri import Source
from shardway.sites.schema import Internet, SiteProfile

_MAKERS = {"enroot": "enroot", "pyxis": "enroot", "apptainer": "apptainer"}
"""Container runtime of a site -> who makes its images."""

_INSTEAD = {
    "podman": "make it with `podman build`, and carry it with `podman save` and `podman load`, or pull it on the nodes",
    "charliecloud": "make a .sqsh file where enroot is, with --runtime enroot: ch-run starts it as it is",
}


@dataclass(frozen=True)
class ImageOptions:
    """Options as a person wrote them; empty where nothing was said."""

    runtime: str = ""
    architecture: str = ""
    proxy: str = ""
    target: str = ""
    scratch: str = ""


def make_order(
    source: Source, recipe: Recipe, said: ImageOptions, target: Target | None = None, profile: SiteProfile | None = None
) -> ImageRequest:
    """The order; `runtime` is empty where neither the person nor the profile names one.

    Raises UserError for a runtime or an architecture that is not known, a proxy with a password, and a site whose
    runtime has no images of this kind.
    """
    rules = profile.internet if profile else Internet()
    runtime = _choose_runtime(said.runtime, profile)
    usual = profile is not None and _MAKERS.get(profile.container or "") == runtime == profile.container
    return ImageRequest(
        source=source,
        runtime=runtime,
        recipe=recipe,
        target=said.target,
        scratch=said.scratch,
        architecture=_parse_architecture(said.architecture) or (profile.node.architecture if profile else None),
        command=(profile.containers.command or "") if profile and usual else "",
        way=_choose_way(said.proxy, rules),
        site=profile.name if profile else "",
        door=_find_door(target, profile),
    )


def _choose_runtime(said: str, profile: SiteProfile | None) -> str:
    if said and said not in TOOLS:
        raise UserError(
            f"--runtime {said}: images are made by others.\n  Allowed: {', '.join(TOOLS)}.\n"
            f"  To do: {_INSTEAD.get(said, 'choose one of these')}."
        )
    container = (profile.container if profile else None) or ""
    if said or container in ("", "none"):
        return said
    if container not in _MAKERS and profile:
        raise UserError(
            f"{profile.name} starts containers with {container}, for which Shardway makes no images.\n"
            f"  To do: {_INSTEAD[container]}."
        )
    return _MAKERS[container]


def _parse_architecture(text: str) -> Architecture | None:
    names = {**{name: name for name in DEBIAN_NAMES}, **{short: name for name, short in DEBIAN_NAMES.items()}}
    for name in get_args(Architecture):
        if names.get(text.lower()) == name:
            return name
    if text:
        raise UserError(f"--arch {text}: no such architecture.\n  Allowed: {', '.join(names)}.\n  To do: choose one.")
    return None


def _choose_way(proxy: str, rules: Internet) -> NetworkAccess:
    """The profile's proxy counts where login nodes use it; what is said always."""
    if proxy:
        try:
            Internet.model_validate({"proxy": proxy})
        except ValidationError as error:
            reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            raise UserError(f"--proxy: {reason}.\n  To do: ask the site which proxy asks for no password.") from None
        return NetworkAccess("proxy", proxy, rules.no_proxy or "")
    if rules.login == "proxy" and rules.proxy:
        return NetworkAccess("proxy", rules.proxy, rules.no_proxy or "")
    return NetworkAccess(rules.login)


def _find_door(target: Target | None, profile: SiteProfile | None) -> str:
    """Where files are copied in, as rsync takes it."""
    user, at, host = target.host.rpartition("@") if target else ("", "", "")
    doors: Sequence[str] = (profile.access.transfer or profile.access.login) if profile else ()
    return f"{user}{at}{doors[0]}" if doors else f"{user}{at}{host}"
