"""What ssh says when it does not get through, as a sentence and a remedy.

Invariant: every refusal has a remedy, and what ssh itself said is never lost. This module must not run anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MOST_LINES = 6


@dataclass(frozen=True)
class Refusal:
    """Why a connection failed; `needs_person` where somebody at a terminal could have answered."""

    sentence: str
    remedy: str
    needs_person: bool = False


_KNOWN: tuple[tuple[str, Refusal], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        Refusal(
            "its host key is not the one that was known",
            "ask the site whether it changed its keys; only then remove the old one with `ssh-keygen -R NAME`.",
        ),
    ),
    (
        r"Host key verification failed|host key is known for",
        Refusal("its host key is not known yet", "", needs_person=True),
    ),
    (
        r"[Bb]ad configuration option|terminating, \d+ bad configuration|Bad owner or permissions|percent_expand",
        Refusal("ssh cannot read its configuration", "mend the named line of ~/.ssh/config."),
    ),
    (
        r"Could not resolve hostname",
        Refusal("no such host is known", "check the name, and that you are in the site's network or VPN."),
    ),
    (
        r"Connection refused",
        Refusal("it refuses connections on that port", "give the site's port to the host in ~/.ssh/config."),
    ),
    (
        r"timed? ?out|No route to host|Network is unreachable|Host is down",
        Refusal(
            "it does not answer",
            "check the network and the VPN; a site that was asked too often may shut your address out for a while.",
        ),
    ),
    (
        r"certificate .*(expired|not yet valid)|Certificate invalid",
        Refusal("your ssh certificate is no longer valid", "get a new one as the site describes, then try again."),
    ),
    (
        r"Too many authentication failures",
        Refusal(
            "too many keys were offered", "name the one key with IdentityFile and IdentitiesOnly yes in ~/.ssh/config."
        ),
    ),
    (
        r"Permission denied|no supported authentication|password.*expired",
        Refusal("it does not let you in without being asked", "", needs_person=True),
    ),
    (
        r"kex_exchange_identification|Connection (closed|reset)|banner exchange|Exceeded MaxStartups",
        Refusal(
            "it closed the connection at once",
            "wait some minutes: many sites do so with addresses that come too often; then ask the site's support.",
        ),
    ),
)


def parse_refusal(said: str) -> Refusal:
    """The first known reason in what ssh printed; its own last line where none is known."""
    for pattern, refusal in _KNOWN:
        if re.search(pattern, said):
            return refusal
    return Refusal("ssh failed", "try the same with `ssh -v` to see why.")


def render_said(said: str) -> str:
    """What ssh printed, its last lines, indented; empty where it was silent."""
    lines = [line.rstrip() for line in said.replace("\r", "").splitlines() if line.strip(" @\t")]
    return "".join(f"\n    ssh: {line}" for line in lines[-_MOST_LINES:])
