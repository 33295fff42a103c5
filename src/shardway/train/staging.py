"""The data of a run, copied to the disk of each node before its first step.

Invariants:
- Every rank takes part in every exchange, whatever its own node finds: nodes may differ in their disks.
- Ranks exchange every few seconds while one of them copies, so that no collective runs into its timeout, and show their
  agent that they live as long as some copy goes on.
- An error of one rank ends the copies of all, and is raised on all.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from shardway.data.open import Data
from shardway.data.sources.base import DataSource
from shardway.data.stage import CopyGivenUp, CopyProgress, StagedSet, StageFolder, hold_all, list_parts
from shardway.errors import SiteError
from shardway.hardware.mounts import find_mount, read_mounts
from shardway.places import expand_place, list_unset
from shardway.ranks.evidence import render_ranks
from shardway.train.session import Session
from shardway.units import format_bytes, render_seconds

EXCHANGE_S = 5.0
"""How often ranks exchange how far copies are; more often where a collective may take less."""


@dataclass(frozen=True)
class _Staged:
    """What a rank has after staging: its sources, what to hold, and why it reads the data where they lie ("": it does
    not)."""

    sources: list[DataSource]
    held: list[StagedSet]
    why: str = ""


def stage_for_node(session: Session, data: Data) -> Data:
    """The data as they lie on this node's own disk, if data.stage asks for it and they fit there; copied by the ranks
    of the node, each byte by one of them.

    A folder that the user has named must do: SiteError on every rank where it does not. Data that do not fit into the
    site's are read where they lie, and a run that is asked to stop copies no further.
    """
    wanted, ranks = session.resolved.values.data.stage, session.ranks
    sources = [data.train, *([data.validation] if data.validation is not None else [])]
    by_user = not session.resolved.is_derived("data.stage")
    folder, why = ranks.together(lambda: find_folder(wanted, sources, by_user=by_user))
    progress, began = CopyProgress(), time.monotonic()

    def copy() -> _Staged:
        if folder is None:
            return _Staged(sources, [], why)
        tell = logging.getLogger("shardway").warning if ranks.is_first else lambda line: None
        try:
            return _Staged(*hold_all(sources, folder, tell, progress))
        except CopyGivenUp:
            return _Staged(sources, [], "the run was asked to stop")
        except SiteError as error:
            if by_user:
                raise
            return _Staged(sources, [], str(error).partition("\n")[0])

    with ThreadPoolExecutor(1) as pool:
        try:
            copying = pool.submit(copy)
            _wait_together(session, copying, progress)
        finally:
            progress.give_up()
        staged = ranks.together(copying.result)
    for each in staged.held:
        session.at_end.callback(each.close)
    _report(session, staged, time.monotonic() - began)
    return Data(staged.sources[0], staged.sources[1] if data.validation is not None else None)


def _wait_together(session: Session, copying: Future[_Staged], progress: CopyProgress) -> None:
    """Until all ranks have their data, one of them has an error, or one is asked to stop."""
    ranks, run = session.ranks, session.resolved.values.run
    exchange_s, beat_s = min(EXCHANGE_S, run.collective_timeout / 4), run.start_timeout / 4
    before: object = None
    beaten = time.monotonic()
    while True:
        wait([copying], timeout=exchange_s)
        has_failed = copying.done() and copying.exception() is not None
        stops = has_failed or session.signals.received is not None
        seen = ranks.gather((copying.done(), stops, progress.copied_bytes + progress.awaited_bytes))
        if all(done for done, _, _ in seen) or any(stops for _, stops, _ in seen):
            return
        if seen != before and time.monotonic() - beaten > beat_s:  # a copy that stands still is found as a hang
            session.progress.enter(session.progress.activity, 0)
            beaten = time.monotonic()
        before = seen


def _report(session: Session, staged: _Staged, seconds: float) -> None:
    """Show and write down what was copied, and which ranks read the data where they lie."""
    told = session.ranks.gather((sum(each.copied_bytes for each in staged.held), staged.why))
    if copied := sum(size for size, _ in told):
        took = render_seconds(max(0.1, round(seconds, 1)))
        session.note_once("staged", f"{format_bytes(copied)} of data copied to disks of nodes in {took}")
    if apart := {rank: why for rank, (_, why) in enumerate(told) if why}:
        named = "the data are read" if len(apart) == len(told) else f"{render_ranks(list(apart))} read the data"
        session.note_once("not_staged", f"{named} where they lie: {next(iter(apart.values()))}")


def find_folder(wanted: str, sources: Sequence[DataSource], *, by_user: bool) -> tuple[Path | None, str]:
    """The folder to stage to, or None and why not ("": there is nothing to stage). `wanted`: data.stage, a folder or
    "off".

    `by_user`: whether the user named the folder; if so, data that do not fit raise SiteError. Else only data of a file
    system that machines share are staged, and only if they fit.
    """
    held = [parts for source in sources for parts in list_parts(source)] if wanted != "off" else []
    if not held:
        return None, ""
    if unset := list_unset(wanted):
        why = f'data.stage: "{wanted}" names ${unset[0]}, which is not set on {socket.gethostname()}'
        if by_user:
            raise SiteError(f'{why}.\n  To do: name the folder itself, or set data.stage = "off".')
        return None, why
    folder = StageFolder.below(expand_place(wanted))
    mounts = read_mounts()
    places = [find_mount(str(parts.root.resolve()), mounts) for parts in held]
    if not by_user and not all(place is not None and place.shared for place in places):
        return None, "they are not on a file system that nodes share"
    try:
        folder.check_room(*held)
    except SiteError as error:
        if by_user:
            raise
        return None, str(error).partition("\n")[0]
    return folder.path, ""
