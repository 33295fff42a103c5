"""How a training process imports what it needs: without garbage collection meanwhile.

Invariant: afterwards the garbage collector is as before. torch itself is not imported here.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While entered, objects are made and no garbage is looked for; what is there at the end is never looked through.

    torch and what belongs to it are a million objects and no garbage, which Python would go through again and again: a
    seventh of the time of these imports, and then time of steps, one rank's at another moment than the others'.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
