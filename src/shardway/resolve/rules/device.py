"""The rule of what is left to the device: number formats and compilation.

Invariant: it derives what was left open, and nothing that another rule would refuse. This module must not read files or
look at the machine.
"""

from __future__ import annotations

from shardway.resolve.device_defaults import KEYS, choose
from shardway.resolve.draft import Draft


def what_is_left_to_the_device_is_what_it_does_fast(draft: Draft) -> None:
    for key in KEYS:
        if draft.get(key) == "auto":
            settled = choose(draft, key)
            draft.derive(key, settled.value, settled.reason)
