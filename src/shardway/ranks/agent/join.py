"""How a rank lets its agent see what it does: from its first moment, before torch is imported.

Invariant: without an agent nothing happens. This module must not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from shardway.ranks.agent.heartbeat import VARIABLE, open_page
from shardway.ranks.agent.recorder import answer_with_record
from shardway.ranks.agent.stacks import answer_with_stacks
from shardway.ranks.progress import Activity


def join_agent(environ: Mapping[str, str]) -> None:
    """Show that this rank starts, and answer when the agent asks where its threads are and what they sent last.

    From the main thread.
    """
    local_rank = environ.get("LOCAL_RANK", "")
    page = open_page(environ, int(local_rank)) if local_rank.isdecimal() else None
    if page is not None:
        answer_with_stacks(Path(environ[VARIABLE]), int(local_rank))
        answer_with_record(Path(environ[VARIABLE]), int(local_rank))
        page.write(Activity.START, 0, time.monotonic())
