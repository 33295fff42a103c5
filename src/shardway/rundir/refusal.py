"""What the file system of a run directory refuses, in words for whoever started the run.

Invariant: an OSError becomes a JobError, of which the user hears what to do; nothing else is changed. This module must
not write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from shardway.errors import JobError
from shardway.refusals import find_remedy


@contextlib.contextmanager
def refusals(run: Path) -> Iterator[None]:
    """What is refused while something is written into a run directory, as a JobError with what to do."""
    try:
        yield
    except OSError as error:
        raise refused(run, error) from error


def refused(run: Path, error: OSError) -> JobError:
    """That error of the file system."""
    target = error.filename2 or error.filename
    where = f" ({target})" if target else ""
    return JobError(
        f"the run directory {run} does not take more writing: {error.strerror}{where}.\n"
        f"  What was saved before is unchanged. To do: {find_remedy(error)}; then run the same command again: it goes "
        "on from the last checkpoint."
    )
