"""What the agents of several nodes write for each other: notes, news of the coordinator, membership.

Invariants:
- Text that is no note or no news reads as None, never as something half understood.
- The silence of a node grows only while its observer runs: one that was asleep itself (a stopped process, a machine
  that swaps) reports no node as lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from shardway.ranks.agent.flight_records import Heard, read_record
from shardway.ranks.agent.hang import NOBODY, Behind, Hang, Sighting, Stopped
from shardway.ranks.agent.heartbeat import HeartbeatEntry
from shardway.ranks.agent.stacks import StackGroup
from shardway.ranks.agent.watch import UNSEEN, Seen
from shardway.ranks.failure import RankFailure
from shardway.ranks.progress import Activity

# --- What the agents of several nodes tell each other: a note of each, and the news of the one that leads


class AgentState(Enum):
    """Where an agent is: without ranks; with ranks; one of them hangs; one has failed; they are gone; it leaves."""

    READY = "ready"
    RUNNING = "running"
    HANGS = "hangs"
    FAILED = "failed"
    ENDED = "ended"
    LEFT = "left"


@dataclass(frozen=True)
class NodeOutcome:
    """How the ranks of one node ended: those that ended badly, a hang, what was seen of them when a rank of any node
    hung, whether a stop took too long or somebody wanted the end at once."""

    failures: tuple[RankFailure, ...] = ()
    hang: Hang | None = None
    seen: Seen = UNSEEN
    late: bool = False
    interrupted: bool = False

    @property
    def is_well(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.failures or self.hang or self.late or self.interrupted)


@dataclass(frozen=True)
class Note:
    """What an agent says of itself: `count` grows with every writing, `start` is the start of ranks it speaks of."""

    count: int = 0
    start: int = 0
    state: AgentState = AgentState.READY
    behind: Behind = NOBODY
    outcome: NodeOutcome | None = None


@dataclass(frozen=True)
class News:
    """What the agent that leads says: the newest start and the nodes that take part in it, in the order of their ranks.

    `port`: where it keeps the store in which the ranks of that start meet. `present`: nodes that are there at all.
    `hangs`: a rank of that start hangs, so that all nodes ask theirs. `over`: that start has failed somewhere.
    `code`: all is done, and this is the exit code.
    """

    count: int = 0
    start: int = 0
    members: tuple[int, ...] = ()
    port: int = 0
    present: tuple[int, ...] = ()
    hangs: bool = False
    over: bool = False
    behind: Behind = NOBODY
    code: int | None = None


def render(said: Note | News) -> str:
    """As one line of JSON."""
    return json.dumps(asdict(said), default=_plain, separators=(",", ":"))


def read_note(text: str) -> Note | None:
    """The note in a text; None for anything else."""
    try:
        facts = json.loads(text)
        outcome = facts["outcome"]
        return Note(
            int(facts["count"]),
            int(facts["start"]),
            AgentState(facts["state"]),
            _read_behind(facts["behind"]),
            _read_outcome(outcome) if outcome is not None else None,
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_news(text: str) -> News | None:
    """The news in a text; None for anything else."""
    try:
        facts = json.loads(text)
        code = facts["code"]
        return News(
            int(facts["count"]),
            int(facts["start"]),
            tuple(map(int, facts["members"])),
            int(facts["port"]),
            tuple(map(int, facts["present"])),
            bool(facts["hangs"]),
            bool(facts["over"]),
            _read_behind(facts["behind"]),
            None if code is None else int(code),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else str(value)


def _read_behind(facts: Mapping[str, Any]) -> Behind:
    place = facts["place"]
    return Behind(None if place is None else (int(place[0]), int(place[1])), bool(facts["stopped"]))


def _read_outcome(facts: Mapping[str, Any]) -> NodeOutcome:
    failures = tuple(
        RankFailure(
            int(each["rank"]),
            int(each["pid"]),
            int(each["exit_code"]),
            tuple(map(Path, each["printed"])),
            bool(each["by_agent"]),
            bool(each["for_memory"]),
        )
        for each in facts["failures"]
    )
    hang = _read_hang(facts["hang"]) if facts["hang"] is not None else None
    return NodeOutcome(failures, hang, _read_seen(facts["seen"]), bool(facts["late"]), bool(facts["interrupted"]))


def _read_hang(hang: Mapping[str, Any]) -> Hang:
    entry = hang["sighting"]["entry"]
    seen = HeartbeatEntry(
        int(entry["changes"]), int(entry["pid"]), Activity(entry["activity"]), int(entry["step"]), float(entry["since"])
    )
    return Hang(
        tuple(map(int, hang["ranks"])),
        float(hang["seconds"]),
        float(hang["limit_s"]),
        Sighting(seen, Stopped(hang["sighting"]["stopped"])),
        bool(hang["all_alike"]),
    )


def _read_seen(facts: Mapping[str, Any]) -> Seen:
    groups = (StackGroup(tuple(map(int, each["ranks"])), tuple(map(str, each["frames"]))) for each in facts["groups"])
    heard = facts["heard"]
    return Seen(tuple(groups), Heard(tuple(map(read_record, heard["records"])), tuple(map(int, heard["silent"]))))


# --- Who is there: nodes whose notes change

LOST_S = 10.0
"""A node whose note did not change for so long is lost."""

LONGEST_TICK_S = 1.0
"""The most that one look adds to a silence."""


@dataclass
class _Seen:
    count: int
    silent_s: float = 0.0


class Membership:
    """Looks at the counts of notes, by node; a node that was never seen is neither there nor lost."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._looked_at: float | None = None

    def look(self, counts: Mapping[int, int], now: float) -> None:
        """What the notes say at `now`, in monotonic seconds."""
        tick = min(now - self._looked_at, LONGEST_TICK_S) if self._looked_at is not None else 0.0
        self._looked_at = now
        for node, count in counts.items():
            known = self._seen.get(node)
            if known is None or known.count != count:
                self._seen[node] = _Seen(count)
            else:
                known.silent_s += tick

    @property
    def present(self) -> tuple[int, ...]:
        """Nodes that are there."""
        return tuple(sorted(node for node, seen in self._seen.items() if seen.silent_s <= LOST_S))

    def is_lost(self, node: int) -> bool:
        """Whether a node was there and has fallen silent."""
        return node in self._seen and self._seen[node].silent_s > LOST_S
