"""What runtimes, apt and pip print when they fail, as a sentence and a remedy.

Invariant: what was printed is never lost: an explanation only comes before it. This module must not run anything.

Sources: messages of Apptainer 1.4.5 as it printed them without a network, a registry or user namespaces, of curl, apt
and pip; of enroot as its source has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardway.launch.image.order import ImageRequest
from shardway.launch.image.uri import Reference, describe_credentials


@dataclass(frozen=True)
class ImageFailure:
    """Why an image could not be made, and what to do."""

    sentence: str
    remedy: str


_STATUS = r"(error|status)( code)?:? "
_WAY = "check the network; where the way out is a proxy, name it by --proxy http://HOST:PORT"

_KNOWN: tuple[tuple[str, ImageFailure], ...] = (
    (
        r"No space left on device|[Qq]uota exceeded|Write failed because",
        ImageFailure("the disk is full", "name a folder with more room by --scratch, or another place by --to"),
    ),
    (
        r"If error was from fakeroot|fakeroot: (command )?not found|not listed in /etc/sub[ug]id.*fakeroot",
        ImageFailure(
            "no user IDs are set aside for you (/etc/subuid), and the image cannot run the command fakeroot instead",
            "ask the site for an entry in /etc/subuid, or build where you have one and copy the file",
        ),
    ),
    (
        r"user namespace|unshare.*(not permitted|failed)|newuidmap|Requesting capability set|max_user_namespaces",
        ImageFailure(
            "this machine does not let you make containers",
            "try a compute node in an interactive job, or make it elsewhere and copy the file",
        ),
    ),
    (
        r"[Ee]xec format error",
        ImageFailure(
            "programs of the image are for another architecture", "name the machine's with --arch, or build elsewhere"
        ),
    ),
    (
        rf"{_STATUS}40[13]\b|[Uu]nauthorized|authentication required|access to the resource is denied|Forbidden",
        ImageFailure("the registry does not let you have it", ""),
    ),
    (
        rf"{_STATUS}404\b|manifest unknown|not found: manifest|name unknown|MANIFEST_UNKNOWN",
        ImageFailure("the registry has no image of that name and version", "look the tag up on the registry's page"),
    ),
    (
        r"toomanyrequests|429 Too Many|rate limit",
        ImageFailure("the registry has had too many requests from here", "wait some hours, or log in there"),
    ),
    (
        r"no such host|Could not resolve|Temporary failure (resolving|in name resolution)|Name or service not known",
        ImageFailure("a name of a host is not known here: there may be no way out", _WAY),
    ),
    (
        r"[Tt]imed? ?out|Connection refused|Network is unreachable|No route to host|Could not connect",
        ImageFailure("a host outside does not answer: there may be no way out", _WAY),
    ),
    (
        r"Unable to locate package|has no installation candidate|Version .* for .* was not found",
        ImageFailure("apt knows no such package", "check the name for the image's release"),
    ),
    (
        r"No matching distribution found|Could not find a version|ResolutionImpossible|conflicting dependencies",
        ImageFailure(
            "pip finds no set of versions that fits", "check the lines; images of NVIDIA pin versions of their own"
        ),
    ),
    (
        r"apt-get: (command )?not found|No module named pip|python3: (command )?not found",
        ImageFailure(
            "the image lacks the program that installs", "choose a base image with it: of Debian or Ubuntu, with pip"
        ),
    ),
)


def parse_failure(lines: Sequence[str], order: ImageRequest) -> ImageFailure:
    """The first known reason, looked for from the last line up; the exit code speaks for itself where none is known."""
    for line in reversed(lines):
        for pattern, failure in _KNOWN:
            if re.search(pattern, line):
                return failure if failure.remedy else ImageFailure(failure.sentence, _credentials(order))
    return ImageFailure("a command failed", "see its last lines above; --dry-run prints all that ran")


def _credentials(order: ImageRequest) -> str:
    registry = order.source.registry if isinstance(order.source, Reference) else ""
    return describe_credentials(registry, order.runtime).removesuffix(".")
