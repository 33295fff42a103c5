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
from shardway.launch.submission.prepare import SubmitRequest, parse_order
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.runfile.load import COMMAND_LINE


@contextlib.contextmanager
def read_last_order(host: Host, known: Known) -> Iterator[SubmitRequest]:
    """The last order of a run; its run file is there for as long as the context lasts. For a run that was trained by
    hand, what it was started with.

    Raises UserError where nothing says how the run was started, or its record is damaged.
    """
    run = Path(known.run)
    attempts = [entry.attempt for entry in read_ledger(host, run).entries]
    texts = host.read_files([PurePosixPath(path) for attempt in attempts for path in _records(attempt)])
    last = next((a for a in reversed(attempts) if PurePosixPath(a.order_path) in texts), None)
    if last is None:
        if host.name or not RunDir(run).resolved_path.exists():
            raise UserError(
                f"{run} was never submitted, so nothing says how.\n"
                "  To do: `shardway submit` it, or `shardway train` where it was trained by hand."
            )
        yield order_by_hand(RunDir(run))
        return
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


def order_by_hand(run: RunDir) -> SubmitRequest:
    """What a run was started with that no job has trained yet. Raises UserError where its script is not here."""
    resolved = run.read_resolved()
    if "model" in resolved:
        return SubmitRequest(
            ResolveRequest(run.request_path, tuple(_list_overrides(run.resolved_path.read_text("utf-8"))), run.path)
        )
    command = next((event.get("command") for event in reversed([*run.all_events(0, ("started",))])), None)
    words = [str(word) for word in command] if isinstance(command, list) and command else [""]
    if not words[0].endswith(".py") or not Path(words[0]).is_file():
        raise UserError(
            f"{run.path} was trained by hand by a script ({words[0] or 'which is not recorded'}), which is not here.\n"
            f"  To do: run this where the script is, or `shardway submit --dir {run.path} -- python SCRIPT ...`."
        )
    return SubmitRequest(ResolveRequest(None, (), run.path), command=("python", *words))


def _list_overrides(resolved: str) -> Iterator[str]:
    """The keys of a resolved run that were set on the command line, as words of one."""
    section = ""
    for line in resolved.splitlines():
        entry, _, origin = line.rpartition(" # ")
        if line.startswith("["):
            section = line.strip("[] ")
        elif origin == COMMAND_LINE:
            name, _, value = entry.partition("=")
            yield f"{section}.{name.strip()}={value.strip()}"


def _copy(text: str, path: Path) -> Path:
    """A file of another machine, here."""
    path.write_text(text, encoding="utf-8")
    return path


def _records(attempt: Attempt) -> tuple[Path, Path]:
    return attempt.order_path, attempt.run_file
