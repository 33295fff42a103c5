"""The words `user@host:SITE` of a command line as a value.

Invariant: a host that is accepted cannot be taken for an option of ssh, nor for more than one word. This module must
not connect to anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardway.errors import UserError

_HOST = re.compile(r"([A-Za-z0-9_.+@\\%-]+@)?([A-Za-z0-9_.-]+|[0-9A-Fa-f:.%a-z]*:[0-9A-Fa-f:.%a-z]*)")
_SHAPE = re.compile(r"(?P<host>[^\[\]:]+|(?:[^\[\]:]*@)?\[[^\[\]]+\]):(?P<site>.*)")


@dataclass(frozen=True)
class Target:
    """Where a job goes: `host` as ssh takes it, empty for this machine; `site` a profile, empty where none is named."""

    host: str
    site: str


def parse_target(text: str) -> Target:
    """What `--on` names: "SITE", "HOST:SITE", "USER@HOST:SITE" or "USER@HOST"; an IPv6 address stands in brackets.

    A word without ":" and "@" is a site, and so is a path ("./mine.toml", "/sites/mine.toml"). Raises UserError for
    a host that ssh would not take as one.
    """
    text = text.strip()
    if text.startswith((".", "/", "~")):
        return Target("", text)
    if "://" in text:
        raise UserError(
            f"--on {text}: a URL is no place for a job.\n"
            "  Allowed: SITE, HOST:SITE or USER@HOST:SITE.\n"
            "  To do: give the port, a jump host or a key to the host in ~/.ssh/config, and name the host here."
        )
    match = _SHAPE.fullmatch(text)
    if match:
        return Target(_check_host(match["host"].replace("[", "").replace("]", ""), text), match["site"])
    if "@" in text:
        return Target(_check_host(text, text), "")
    return Target("", text)


def _check_host(host: str, text: str) -> str:
    if host.startswith("-") or "@-" in host or not _HOST.fullmatch(host):
        raise UserError(
            f"--on {text}: {host!r} is no name of a host.\n"
            "  Allowed: letters, digits and . _ - in the name, with USER@ before it where you need one.\n"
            "  To do: check the name, or give the host a name of your own in ~/.ssh/config."
        )
    return host
