"""Damaged samples that a run leaves out (guard.damaged_data = "skip"): what it writes down, and when it ends all the
same.

Invariants:
- Each rank reports what it has read itself. Ranks that read the same rows (of a pipeline, or of a tensor or context
  group) find the same damage, and the first of them writes it down.
- A damaged place is shown once in an attempt, however many samples need it, and each sample counts once against
  guard.max_damaged, however often it comes.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence

from shardway.data.damage import DamageFound, LeftOut
from shardway.errors import UserError, list_some
from shardway.train.session import Session
from shardway.units import render_plural

SHOWN = 5
"""How many places a message lists."""


def report_damage(session: Session, left_out: Sequence[LeftOut], step: int, *, of: str = "train") -> None:
    """Write down the samples that this rank has left out of a batch: of step `step`, or of the validation after it
    (`of` "validation"). Raises UserError, after which ranks do not start again by themselves, if they are more than
    guard.max_damaged in this attempt."""
    found, recorder, ranks = session.damage, session.recorder, session.ranks
    new = found.add(of, left_out)
    if all(session.mesh.coordinate(axis) == 0 for axis in ("pp", "cp", "tp")):
        for each in new:
            reason = f"{each.reason}; sample {each.sample} and others that need it do not count"
            recorder.own_event("data_damaged", step=step, file=each.file, offset=each.offset, reason=reason)
            if not ranks.is_first:
                logging.getLogger("shardway").warning(f"rank {ranks.rank}: {reason}")
        for place in dict.fromkeys(each.reason for each in left_out):
            here = [each for each in left_out if each.reason == place]
            facts = {"file": here[0].file, "offset": here[0].offset, "reason": place}
            recorder.own_event("samples_left_out", step=step, of=of, ids=[each.sample for each in here], **facts)
    if ranks.is_first:
        whose = " of rank 0 so far" if ranks.world > 1 else ""
        recorder.keep(damaged=f"{_count(found)}{whose} left out")
    most = session.resolved.values.guard.max_damaged
    if found.samples > most:
        raise _refuse_more(session, found, most)


def report_all_damage(session: Session) -> None:
    """Write down how many samples all ranks have left out in this attempt; called on all of them together, at its
    end, if damaged samples are left out."""
    total = DamageFound()
    for found in session.ranks.gather(session.damage):
        total.join(found)
    if total.by_place:
        words = f"{_count(total)} left out"
        session.recorder.keep(damaged=words)
        reason = f"{words} in this attempt: {list_some(list(total.by_place), SHOWN)}"
        session.recorder.event("damage_counted", step=session.recorder.step_done, samples=total.samples, reason=reason)


def _count(found: DamageFound) -> str:
    return f"{render_plural(found.samples, 'sample')} at {render_plural(len(found.by_place), 'damaged place')}"


def _refuse_more(session: Session, found: DamageFound, most: int) -> UserError:
    values, origin = session.resolved.values, session.resolved.origins["guard.max_damaged"]
    path = shlex.quote(values.data.path) if values.data.path and not values.data.blend else "PATH"
    places = [f"  {place} ({render_plural(len(samples), 'sample')})" for place, samples in found.by_place.items()]
    more = [f"  and {len(places) - SHOWN} other places"] if len(places) > SHOWN else []
    return UserError(
        f"rank {session.ranks.rank} has met {found.samples} damaged samples, and leaves out at most "
        f"guard.max_damaged = {most} ({origin}); the run ends here.\n"
        + "\n".join([*places[:SHOWN], *more])
        + f"\n  To do: `shardway data verify {path}` lists all that is damaged. Copy these files again, or mend them "
        f"with `shardway data repair {path} --from COPY` if Shardway wrote them; or raise guard.max_damaged. Then run "
        "the same command again."
    )
