"""The id of a run: a random name that its run directory and all its checkpoints have in common.

Invariant: it is written once, by whoever holds the run directory, and stays with the directory wherever that is copied
or moved. A file that is not what was written (a checksum stands behind the id) is as good as none, since a wrong id
would make all checkpoints strangers. This module must not judge checkpoints.
"""

from __future__ import annotations

import re
import uuid
import zlib
from pathlib import Path

from shardway.errors import JobError
from shardway.refusals import find_remedy
from shardway.rundir.atomic import write_whole

NAME = "run-id"
_ID = re.compile(r"[0-9a-f]{32}")


def find_run_id(run: Path) -> str:
    """The id of the run in a directory; empty where it has none yet."""
    try:
        text = (run / NAME).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    name = text.partition(" ")[0]
    return name if _ID.fullmatch(name) and text == _seal(name) else ""


def ensure_run_id(run: Path, known: str = "") -> str:
    """The id of a run, given to it where it has none; `known` is what its checkpoints say, where they do.

    Called while the run directory is held. Raises JobError where the file system refuses.
    """
    found = find_run_id(run)
    if found:
        return found
    chosen = known if _ID.fullmatch(known) else uuid.uuid4().hex
    try:
        write_whole(run / NAME, f"{_seal(chosen)}\n")
    except OSError as error:
        raise JobError(
            f"the id of the run cannot be written into {run}: {error.strerror}.\n"
            f"  Nothing was changed. To do: {find_remedy(error)}; then run the same command again."
        ) from error
    return chosen


def _seal(name: str) -> str:
    """The id and a checksum of it."""
    return f"{name} {zlib.crc32(name.encode()):08x}"
