"""How a process that trains imports what it needs: without looking for garbage meanwhile.

Invariant: afterwards garbage is looked for as Python has it. This module must not import torch itself.
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
