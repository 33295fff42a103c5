"""Names of hosts as views show them, and their order.

Invariant: two hosts of one list never get the same name, unless a view has no room for the difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardway.watch.words import one_line

_NUMBERS = re.compile(r"(\d+)", re.ASCII)


def shorten_hosts(hosts: Iterable[str], most: int = 0) -> dict[str, str]:
    """Host -> its name without the domain, if all names differ without it. `most`: of a longer name the end is shown,
    after "~": that is where nodes differ."""
    whole = list(hosts)
    short = [one_line(host.partition(".")[0] or host) for host in whole]
    if len(set(short)) < len(set(whole)):
        short = [one_line(host) for host in whole]
    return {
        host: name if not most or len(name) <= most else f"~{name[1 - most :]}"
        for host, name in zip(whole, short, strict=True)
    }


def order_of_host(name: str) -> list[tuple[bool, int, str]]:
    """The key of an order in which n2 is before n10."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in _NUMBERS.split(name) if part]
