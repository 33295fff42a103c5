"""Whether anything has seeded Python's generator of random numbers, or drawn from it, since Shardway was imported.

Invariant: this module draws nothing, and `import shardway` imports it, so that it has seen the generator before
whatever a script does later.
"""

from __future__ import annotations

import os
import random

_seen = [0]


def is_untouched() -> bool:
    """Whether Python's generator is as it was when Shardway was imported, or this process forked."""
    return hash(random.getstate()) == _seen[0]


def _look() -> None:
    _seen[0] = hash(random.getstate())


_look()
if hasattr(os, "register_at_fork"):  # a child has its generator seeded anew, by `random` itself
    os.register_at_fork(after_in_child=_look)
