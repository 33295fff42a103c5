"""Faults in what is computed: numbers that are not finite, a flipped bit in a copy of the weights, a user's error.

Invariant: `inject/sitecustomize.py` strikes in the step itself, until there is the mark that it or a fault leaves.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from commands import Command, injected
from faults.strike import EVERY, FIRST, LAST, RANKS, Aftermath, Fault, Struck, any_rank, wait_for_mark

HARM = "SHARDWAY_TEST_HARM"
"""RANK:KIND:POSITION:FILE for `inject/sitecustomize.py`: from the step on that begins at this position in the samples
that rank is harmed, as long as FILE is not there."""

BATCH = 8
"""Samples of a step."""

MARK = "harmed"


def harmed(kind: str, first: int, last: int) -> Callable[[Path, random.Random], Mapping[str, str]]:
    """A rank is harmed in one of these steps; never in one of the last four before a save, so that all of a row of
    skipped steps comes before it."""

    def environ(folder: Path, dice: random.Random) -> Mapping[str, str]:
        step = dice.choice([each for each in range(first, last) if each % EVERY < EVERY - 4])
        return injected(**{HARM: f"{any_rank(dice)}:{kind}:{step * BATCH}:{folder / MARK}"})

    return environ


def ends_until_mended(code: int, *words: str) -> Callable[[Command, random.Random], Struck]:
    """The run ends by itself with these words; then what harmed it is gone, and it is given again."""

    def act(command: Command, dice: random.Random) -> Struck:
        found, said = command.end()
        assert found == code, said
        for each in words:
            assert each in said, said
        struck = Struck(time.time(), "a rank")
        (command.home / MARK).touch()
        return struck

    return act


def no_trace(after: Aftermath) -> None:
    """The passes were repeated, and the fault was told."""
    assert after.restarts == 0
    assert len(after.events("transient")) == 1
    assert not after.events("step_skipped")


def ends_after_three(after: Aftermath) -> None:
    """Three steps in a row changed no weights, twice, and then the run ended."""
    assert [event["in_a_row"] for event in after.events("step_skipped")] == [1, 2, 3, 1, 2, 3]
    assert after.restarts == 1


def found_by_guard(after: Aftermath) -> None:
    """The copies of a weight were found to differ before they were saved, and the run went on from before."""
    (found,) = after.events("replica_differs")
    assert found["step"] % EVERY == 0
    (restarted,) = after.events("restarted")
    assert restarted["step"] == found["equal_at"] == found["step"] - EVERY


def tried_twice(after: Aftermath) -> None:
    """An error that comes again is not tried for ever; rank and step are on record and on the screen."""
    assert after.restarts == 1
    faults = [event for rank in (0, 1) for event in after.run.all_events(rank) if event["event"] == "fault"]
    first, second = (fault for fault in faults if fault["message"].startswith("ValueError: these labels"))
    assert first["rank"] == second["rank"]
    assert first["step"] == second["step"]
    named = f"rank {first['rank']}: " if RANKS > 1 else "shardway: "
    assert f"{named}{first['message']}" in after.said[0]
    assert first["message"].endswith(f" (after step {first['step']})")


FAULTS = (
    Fault(
        "loss not finite, once",
        wait_for_mark(MARK),
        (),
        harmed("nan", FIRST, LAST),
        expects=no_trace,
        is_further=True,
    ),
    Fault(
        "losses not finite, until mended",
        ends_until_mended(4, "guard.max_skips = 3", "samples"),
        (),
        harmed("nans", FIRST, LAST),
        restarts_itself=False,
        is_further=True,
        expects=ends_after_three,
    ),
    Fault(
        "a bit of one copy of the weights flips",
        wait_for_mark(MARK),
        ("guard.compare_every=20 steps",),
        harmed("flip", FIRST, LAST),
        is_further=True,
        expects=found_by_guard,
        base=("parallel.dp_replicate=2", "parallel.dp_shard=1"),
        least_ranks=2,
    ),
    Fault(
        "a user's code raises, until mended",
        ends_until_mended(70, "ValueError: these labels are of another data set", "the same failure came twice"),
        (),
        harmed("raise", FIRST, LAST),
        restarts_itself=False,
        is_further=True,
        expects=tried_twice,
    ),
)
