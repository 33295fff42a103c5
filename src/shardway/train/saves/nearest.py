"""Going on from what lies on the disks of the nodes, where that is newer than what the run directory has.

Invariant: only what is on the line of the run, and was not undone by going back before a spike, is loaded; a checkpoint
that two starts in a row have begun from is left out, with all others there. This module must not remove anything but
what was never complete.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardway.checkpoint.find import PassedOver
from shardway.checkpoint.load import LoadedCheckpoint, load_from
from shardway.checkpoint.local_checkpoints import Survey, list_held, survey
from shardway.checkpoint.manifest import Manifest
from shardway.checkpoint.shard_store import open_local_stock
from shardway.checkpoint.state import CheckpointState
from shardway.rundir.left_out import SkippedRange
from shardway.rundir.lineage import LOCAL, Lineage, read_line
from shardway.train.saves.back import why_undone
from shardway.train.saves.tiers import LocalTier, line_of
from shardway.train.session import Session


@dataclass(frozen=True)
class Nearest:
    """What was loaded (None: nothing), what was passed over, and the step for which all of it was left out."""

    loaded: LoadedCheckpoint | None = None
    passed_over: tuple[PassedOver, ...] = ()
    dropped: int | None = None


@dataclass(frozen=True)
class _Known:
    """What rank 0 reads of the run: where it comes from, what undid steps of it, its newest checkpoint, its id."""

    line: Lineage
    left_out: tuple[SkippedRange, ...]
    saved_step: int
    run: str

    def why_not(self, manifest: Manifest) -> str:
        """Why the run must not go on from this checkpoint; empty where it may."""
        off = self.line.why_off(line_of(manifest.numbers), manifest.step)
        return off or why_undone(manifest.numbers, manifest.step, self.left_out)


def load_nearest(session: Session, tier: LocalTier, state: CheckpointState) -> Nearest:
    """Restore the newest checkpoint on the disks of the nodes that holds, on all ranks together.

    Raises JobError where it does not fit the state.
    """
    known = _ask(session)
    tier.remove_partials()
    found = _survey(session, tier, known)
    if found.nearby and known.line.failed_twice(found.nearby[0].step):
        return Nearest(passed_over=found.passed_over, dropped=found.nearby[0].step)
    passed_over = list(found.passed_over)
    for nearby in found.nearby:
        tier.begin(nearby.step, LOCAL)
        with open_local_stock(tier.place, session.ranks, nearby, tier.nodes, tier.apart) as stock:
            loaded = load_from(stock, session.ranks, state)
        if isinstance(loaded, LoadedCheckpoint):
            return Nearest(replace(loaded, tier=LOCAL), tuple(passed_over))
        passed_over.append(loaded)
    return Nearest(None, tuple(passed_over))


def _ask(session: Session) -> _Known:
    def read() -> _Known:
        directory = session.directory
        newest = max(directory.checkpoint_steps(), default=0)
        return _Known(read_line(directory.path), directory.left_out.read(), newest, session.run_id)

    return session.ranks.ask_first(read)


def _survey(session: Session, tier: LocalTier, known: _Known) -> Survey:
    held = session.ranks.together(
        lambda: list_held(tier.files, known.run, known.saved_step, known.why_not) if tier.leads else []
    )
    return survey(session.ranks.gather(held), session.ranks.rank)
