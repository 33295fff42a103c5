"""Launcher variables for libraries that look them up themselves.

Invariant: what such a library reads is this rank's placement, whatever launched it, and these variables are as they
were when the context ends. This module must not import torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from shardway.ranks.launcher import Placement


@contextlib.contextmanager
def variables_for_libraries(placement: Placement, others: Mapping[str, str]) -> Iterator[None]:
    """Set torchrun's variables to this placement, and `others`, for as long as the context lasts."""
    variables = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world),
        "LOCAL_RANK": str(placement.local_rank),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        **others,
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
