"""The schedule of a pipeline: the order of passes, their times, and a picture of when each rank works.

Invariants:
- Each forward and each backward pass of a stage and micro-batch occurs once, and the orders of all ranks together never
  deadlock.
- A rank does one thing at a time, and a pass starts only when its inputs are there. Messages take no time here: the
  plan counts them separately.
- The picture shows what `simulate_pipeline` found for the passes that the plan prices; what is left out is noted.

Sources: GPipe, 1F1B and interleaved: Narayanan et al., arXiv:2104.04473, section 2.2; zero bubble and V: Qi et al.,
arXiv:2401.10241, sections 2 and 6. Rounds of an interleaved schedule are those of PyTorch: as many micro-batches as
there are ranks, or a few more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

from shardway.errors import Bug
from shardway.layout import count_rounds, stages_of_rank
from shardway.plan.case import Case, Schedule
from shardway.plan.estimate import Estimate
from shardway.plan.page.blocks import (
    Frame,
    TableBlock,
    nice_ticks,
    rect,
    render_drawing,
    render_figure,
    render_section,
    render_table,
    render_text,
    text,
)
from shardway.plan.page.summary import pick_ranks
from shardway.plan.stages import list_stages
from shardway.plan.text import duration, percent
from shardway.plan.time.ceilings import ceilings_of
from shardway.plan.time.step import BACKWARD_SHARE, BUBBLE, Passer

# --- the order of passes on each rank

Kind = Literal["forward", "backward", "weight"]
"""A pass; "weight" is the part of a backward pass for the gradients of weights, if it is run separately."""

SPLIT: tuple[Schedule, ...] = ("zero_bubble", "zbv")
"""Schedules that split the backward pass."""


@dataclass(frozen=True)
class Action:
    """A pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int


def list_orders(case: Case) -> tuple[tuple[Action, ...], ...]:
    """The passes of each pipeline rank, first to last."""
    order = _order_there_and_back if case.schedule == "zbv" else _order_in_rounds
    return tuple(tuple(order(case, rank)) for rank in range(case.degrees.pp))


def count_held(case: Case) -> int:
    """Stages of a rank."""
    return len(stages_of_rank(0, case.degrees.pp, case.stages_per_rank, case.schedule))


def split_rounds(passes: int, ranks: int) -> tuple[int, ...]:
    """Micro-batches of each round, as equal as possible."""
    rounds = count_rounds(passes, ranks)
    base, more = divmod(passes, rounds)
    return tuple(base + (each < more) for each in range(rounds))


def _order_in_rounds(case: Case, rank: int) -> Iterator[Action]:
    """Forward passes alone at first, then a backward pass after each, then the remaining backward passes.

    Gradients of weights are delayed by as many micro-batches as there are earlier stages, which get theirs sooner.
    """
    held = stages_of_rank(rank, case.degrees.pp, case.stages_per_rank, case.schedule)
    there, back = _in_rounds(case, held), _in_rounds(case, held[::-1])
    lead, later = min(len(there), _lead(case, rank)), rank if case.schedule in SPLIT else 0
    for place in range(len(there) + lead):
        if place < len(there):
            yield Action("forward", *there[place])
        if place >= lead:
            yield Action("backward", *back[place - lead])
        if case.schedule in SPLIT and place >= lead + later:
            yield Action("weight", *back[place - lead - later])
    if case.schedule in SPLIT:
        yield from (Action("weight", *each) for each in back[max(0, len(back) - later) :])


def _in_rounds(case: Case, held: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of stage and micro-batch: a round passes one stage of a rank completely before the next stage."""
    rounds = split_rounds(case.micro_batches, case.degrees.pp) if len(held) > 1 else (case.micro_batches,)
    edges = pairwise(accumulate(rounds, initial=0))
    return [(stage, number) for start, end in edges for stage in held for number in range(start, end)]


def _lead(case: Case, rank: int) -> int:
    """Forward passes before the first pair of a forward and a backward pass."""
    after, per_rank = case.degrees.pp - 1 - rank, case.stages_per_rank
    if case.schedule == "gpipe":
        return case.micro_batches
    if per_rank == 1:
        return after
    whole = (per_rank - 1) * max(split_rounds(case.micro_batches, case.degrees.pp))
    return whole + (1 if case.schedule in SPLIT else 2) * after


# --- the order of a V schedule

_Walk = tuple[tuple[Kind, int], ...]

_FORWARD: _Walk = (("forward", 0), ("forward", 1))
_BACKWARD: _Walk = (("backward", 0), ("backward", 1))
_WEIGHT: _Walk = (("weight", 0), ("weight", 1))
"""A kind of pass, through the first arm of the V (0) or the second (1)."""
_STEADY: _Walk = (_FORWARD[0], _BACKWARD[0], _WEIGHT[0], _FORWARD[1], _BACKWARD[1], _WEIGHT[1])


def _order_there_and_back(case: Case, rank: int) -> Iterator[Action]:
    held = stages_of_rank(rank, case.degrees.pp, 2, "zbv")
    done: Counter[tuple[Kind, int]] = Counter()
    for kind, way in _walk_v(case.degrees.pp, rank, case.micro_batches):
        number = done[kind, way]
        done[kind, way] += 1
        if number < case.micro_batches:
            yield Action(kind, held[way], number)


def _walk_v(ranks: int, rank: int, passes: int) -> Iterator[tuple[Kind, int]]:
    """Kinds of passes with their arm of the V; it yields more than there are micro-batches."""
    after = ranks - rank
    yield from _FORWARD[:1] * (2 * after - 1)
    yield from _FORWARD[::-1] * rank
    yield from _STEADY[3:] * after
    yield from _STEADY * (passes - ranks)
    # Earlier ranks wait for gradients of inputs; those of weights fill the idle time.
    yield from _BACKWARD * passes
    yield from _WEIGHT * passes


# --- the times of passes


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in one stage: forward, backward for its input, backward for its weights."""

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Box:
    """A pass with its start and end, in seconds from the start."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """All passes, per rank in order; `held` stages a rank."""

    ranks: int
    held: int
    boxes: tuple[Box, ...]

    @cached_property
    def seconds(self) -> float:
        """From the first forward pass to the end of the last backward pass."""
        return max(box.end for box in self.boxes)

    def of_rank(self, rank: int) -> tuple[Box, ...]:
        """The passes of one rank."""
        return tuple(box for box in self.boxes if box.rank == rank)

    def idle_seconds(self, rank: int) -> float:
        """Seconds for which a rank waits, including those before its first and after its last pass."""
        return self.seconds - sum(box.end - box.start for box in self.of_rank(rank))

    def in_flight(self, rank: int) -> float:
        """The most micro-batches whose activations a rank holds at once, in units of all of its stages."""
        own = self.of_rank(rank)
        frees: Kind = "weight" if any(box.action.kind == "weight" for box in own) else "backward"
        held = accumulate((box.action.kind == "forward") - (box.action.kind == frees) for box in own)
        return max(held) / self.held


def simulate_pipeline(case: Case, seconds: Sequence[StageSeconds]) -> Simulated:
    """Run the schedule of a case; `seconds` has one entry per pipeline rank, for each of its stages."""
    orders, parts = list_orders(case), case.schedule in SPLIT
    last = case.degrees.pp * count_held(case) - 1
    ends: dict[Action, float] = {}
    free = [0.0] * len(orders)
    places = [0] * len(orders)
    boxes: list[Box] = []
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = len(boxes)
        for rank, order in enumerate(orders):
            for action in order[places[rank] :]:
                ready = _ready(action, last, ends)
                if ready is None:
                    break
                start = max(ready, free[rank])
                free[rank] = ends[action] = start + _takes(action, seconds[rank], parts)
                boxes.append(Box(rank, action, start, free[rank]))
                places[rank] += 1
        if len(boxes) == before:
            raise Bug(f"the schedule {case.schedule} of {case.micro_batches} micro-batches waits for itself")
    return Simulated(len(orders), last // len(orders) + 1, tuple(boxes))


def _ready(action: Action, last: int, ends: dict[Action, float]) -> float | None:
    """When all inputs of a pass are there; None if one is not computed yet."""
    needed = [ends.get(each) for each in _needs(action, last)]
    known = [end for end in needed if end is not None]
    return max(known, default=0.0) if len(known) == len(needed) else None


def _needs(action: Action, last: int) -> Iterable[Action]:
    """Passes that must precede one."""
    stage, number = action.stage, action.micro_batch
    if action.kind == "forward":
        return [Action("forward", stage - 1, number)] if stage > 0 else []
    if action.kind == "weight":
        return [Action("backward", stage, number)]
    after = [Action("backward", stage + 1, number)] if stage < last else []
    return [Action("forward", stage, number), *after]


def _takes(action: Action, seconds: StageSeconds, parts: bool) -> float:
    """Seconds of a pass; a backward pass that is not split has both of its parts."""
    if action.kind == "forward":
        return seconds.forward
    if action.kind == "weight":
        return seconds.weight
    return seconds.backward if parts else seconds.backward + seconds.weight


# --- the picture and its notes

MOST_PASSES = 32
"""Most micro-batches that are drawn."""
MOST_STAGE_PASSES = 64
"""Most forward passes of a rank that are drawn, if a rank has several stages."""
ROLES: dict[Kind, str] = {"forward": "blue", "backward": "teal", "weight": "plum"}

_WIDTH, _LEFT, _TOP, _LANE = 1000.0, 64.0, 6.0, 24.0
_NUMBERED = 13.0
"""Least width of a box with a number."""


def render_schedule(shown: Estimate) -> str:
    """The picture with the idle time of each rank; "" without a pipeline."""
    case = shown.case
    if case.degrees.pp == 1:
        return ""
    drawn = _shorten(case)
    simulated = simulate_pipeline(drawn, stage_seconds(shown))
    ranks = pick_ranks(simulated.ranks)
    return render_section(
        "Pipeline",
        render_text(_describe(shown, drawn, simulated)),
        render_figure(_draw(simulated, ranks, drawn), _key(simulated), _told(case, drawn, ranks)),
        render_table(_table_of_ranks(simulated, ranks)),
    )


def stage_seconds(shown: Estimate) -> tuple[StageSeconds, ...]:
    """The plan's seconds of one micro-batch in each stage of every pipeline rank."""
    case, machine = shown.case, shown.machine
    priced = Passer(case, machine, ceilings_of(machine)).stages(list_stages(case))
    held = count_held(case)
    return tuple(_part(sum(items.values()) / held) for items in priced)


def _part(seconds: float) -> StageSeconds:
    """A pass through a stage; half of the backward pass is for the stage's input, half for its weights."""
    back = BACKWARD_SHARE * seconds
    return StageSeconds(seconds - back, back / 2, back / 2)


def _shorten(case: Case) -> Case:
    """The same schedule with as many micro-batches as can be drawn, in whole rounds if the step has them."""
    ranks, passes = case.degrees.pp, case.micro_batches
    most = max(ranks, min(MOST_PASSES, MOST_STAGE_PASSES // count_held(case)))
    shown = min(passes, most // ranks * ranks if passes % ranks == 0 else most)
    return replace(case, global_batch=shown * case.micro_batch * case.degrees.data)


# --- captions


def _describe(shown: Estimate, drawn: Case, simulated: Simulated) -> str:
    case, bubble = shown.case, shown.time.items.get(BUBBLE, 0.0)
    held = count_held(case)
    waiting = sum(simulated.idle_seconds(rank) for rank in range(simulated.ranks))
    share = waiting / (simulated.ranks * simulated.seconds)
    part = "" if drawn.micro_batches == case.micro_batches else ", of fewer micro-batches,"
    return (
        f"Schedule {case.schedule}: {case.degrees.pp} ranks with {held} {'stage' if held == 1 else 'stages'} each, "
        f"{case.micro_batches:,} micro-batches a step. On the slowest rank the plan counts a bubble of "
        f"{duration(bubble)}, {percent(bubble / shown.time.seconds)} of the step. In the picture{part} ranks wait "
        f"{percent(share)} of the time on average, which for the others is for the slowest one too."
    )


def _told(case: Case, drawn: Case, ranks: list[int]) -> str:
    left_out = []
    if drawn.micro_batches < case.micro_batches:
        left_out.append(f"the first {drawn.micro_batches} of {case.micro_batches:,} micro-batches")
    if len(ranks) < case.degrees.pp:
        left_out.append(f"{len(ranks)} of {case.degrees.pp} ranks")
    cut = f"Drawn are {' and '.join(left_out)}. " if left_out else ""
    fainter = "Later stages of a rank are fainter. " if count_held(case) > 1 else ""
    return (
        f"{cut}{fainter}Each stage takes what the plan prices for it, a backward pass two thirds of that; messages "
        "between stages take no time here."
    )


def _key(simulated: Simulated) -> dict[str, str]:
    kinds = {box.action.kind for box in simulated.boxes}
    back = "backward" if "weight" not in kinds else "backward, for inputs"
    names: dict[Kind, str] = {"forward": "forward", "backward": back, "weight": "backward, for weights"}
    return {**{names[kind]: role for kind, role in ROLES.items() if kind in kinds}, "waiting": "lane"}


# --- the drawing


@dataclass(frozen=True)
class _Canvas:
    """How seconds become pixels, and how many stages a rank has."""

    scale: float
    ranks: int
    held: int
    v_shaped: bool

    def shade(self, box: Box) -> float:
        """1 for the first stage of a rank, fainter for each later one."""
        last = box.action.stage >= self.ranks
        chunk = int(last) if self.v_shaped else box.action.stage // self.ranks
        return 1 - chunk * (0.3 if self.held == 2 else 0.6 / max(1, self.held - 1))


def _draw(simulated: Simulated, ranks: list[int], case: Case) -> str:
    canvas = _Canvas(
        (_WIDTH - _LEFT - 8) / simulated.seconds, simulated.ranks, simulated.held, case.schedule == SPLIT[1]
    )
    parts: list[str] = []
    for row, rank in enumerate(ranks):
        lane = Frame(_LEFT, _TOP + row * (_LANE + 3), _WIDTH - _LEFT - 8, _LANE)
        parts.append(text((_LEFT - 8, lane.y + 16), f"rank {rank}", "", "end"))
        parts.append(rect(lane, "lane"))
        parts += _boxes(simulated.of_rank(rank), lane, canvas)
    bottom = _TOP + len(ranks) * (_LANE + 3)
    parts += _axis(simulated.seconds, canvas.scale, bottom)
    label = f"Schedule {case.schedule} of {case.micro_batches} micro-batches on {simulated.ranks} ranks over time"
    return render_drawing((_WIDTH, bottom + 22), label, parts, least=900)


def _boxes(boxes: tuple[Box, ...], lane: Frame, canvas: _Canvas) -> Iterator[str]:
    """Numbered boxes if they are wide enough, else one outline per colour."""
    widths = [(box.end - box.start) * canvas.scale for box in boxes]
    if min(widths) >= _NUMBERED:
        for box in boxes:
            yield from _numbered(box, lane, canvas)
        return
    outlines: dict[tuple[Kind, float], list[str]] = {}
    for box, width in zip(boxes, widths, strict=True):
        x = lane.x + box.start * canvas.scale
        path = f"M{x:.1f} {lane.y + 1:.0f}h{width:.2f}v{lane.height - 2:.0f}h-{width:.2f}z"
        outlines.setdefault((box.action.kind, canvas.shade(box)), []).append(path)
    edge = " box" if min(widths) >= 3 else ""
    for (kind, shade), paths in outlines.items():
        yield f'<path d="{"".join(paths)}" class="{ROLES[kind]}{edge}" fill-opacity="{shade:.2f}"/>'


def _numbered(box: Box, lane: Frame, canvas: _Canvas) -> Iterator[str]:
    frame = Frame(lane.x + box.start * canvas.scale, lane.y + 1, (box.end - box.start) * canvas.scale, lane.height - 2)
    action = box.action
    told = f"{action.kind}, stage {action.stage}, micro-batch {action.micro_batch}: {duration(box.end - box.start)}"
    yield f'<g fill-opacity="{canvas.shade(box):.2f}">{rect(frame, f"{ROLES[action.kind]} box", told)}</g>'
    yield text((frame.x + frame.width / 2, frame.y + 15), str(action.micro_batch), "on", "middle")


def _axis(seconds: float, scale: float, bottom: float) -> Iterator[str]:
    unit, name = (1e-3, "ms") if seconds < 1 else (1.0, "s")
    for tick in nice_ticks(seconds / unit, 8):
        anchor = "start" if tick == 0 else "middle"
        yield text((_LEFT + tick * unit * scale, bottom + 14), f"{tick:,g} {name}", "soft", anchor)


def _table_of_ranks(simulated: Simulated, ranks: list[int]) -> TableBlock:
    total = simulated.seconds
    rows = tuple(
        (
            f"rank {rank}",
            duration(total - simulated.idle_seconds(rank)),
            duration(simulated.idle_seconds(rank)),
            percent(simulated.idle_seconds(rank) / total),
            f"{simulated.in_flight(rank):.3g}",
        )
        for rank in ranks
    )
    columns = ("pipeline rank", "works", "waits", "waits, share", "micro-batches kept at most")
    return TableBlock(f"The picture in numbers: {duration(total)}", columns, rows)
