"""What a run was submitted with the last time, as an order that can be submitted again.

Invariant: the run file of the order is the one that the last attempt recorded, so that a file that was edited since is
not taken by accident. This module must not submit.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from shardway.errors import UserError
from shardway.launch.hosts.base import Host
from shardway.launch.runs.ledger import read_ledger
from shardway.launch.runs.registry import Known
from shardway.launch.submission.prepare import Order, parse_order
from shardway.rundir.attempts import Attempt


@contextlib.contextmanager
def read_last_order(host: Host, known: Known) -> Iterator[Order]:
    """The last order of a run; its run file is there for as long as the context lasts.

    Raises UserError where the run was never submitted, or its record is damaged.
    """
    run = Path(known.run)
    attempts = [entry.attempt for entry in read_ledger(host, run).entries]
    texts = host.read_files([PurePosixPath(path) for attempt in attempts for path in _records(attempt)])
    last = next((a for a in reversed(attempts) if PurePosixPath(a.order_path) in texts), None)
    if last is None:
        raise UserError(
            f"{run} was never submitted, so nothing says how.\n"
            "  To do: `shardway submit` it, or `shardway train` where it was trained by hand."
        )
    with tempfile.TemporaryDirectory() as scratch:
        kept = texts.get(PurePosixPath(last.run_file))
        run_file = None
        if kept is not None:
            run_file = _copy(kept, Path(scratch) / last.run_file.name) if host.name else last.run_file
        order = parse_order(texts[PurePosixPath(last.order_path)], run, run_file)
        if order is None:
            raise UserError(
                f"{last.order_path} is damaged.\n  To do: submit the run with `shardway submit --dir {run}`."
            )
        yield order


def _copy(text: str, path: Path) -> Path:
    """A file of another machine, here."""
    path.write_text(text, encoding="utf-8")
    return path


def _records(attempt: Attempt) -> tuple[Path, Path]:
    return attempt.order_path, attempt.run_file
