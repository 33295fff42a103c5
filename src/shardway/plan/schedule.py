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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

from shardway.drawing import (
    Frame,
    colour_of,
    nice_ticks,
    rect,
    render_drawing,
    render_figure,
    render_section,
    render_table,
    render_text,
    text,
)
from shardway.errors import Bug
from shardway.layout import count_rounds, stages_of_rank
from shardway.plan.case import Case, Schedule, ceilings_of, list_stages
from shardway.plan.planner import Estimate
from shardway.plan.text import duration, percent
from shardway.plan.time import BACKWARD_SHARE, BUBBLE, StepPricer

# --- the order of passes on each rank

Kind = Literal["forward", "backward", "weight"]
"""A pass; "weight" is the part of a backward pass for the gradients of weights, if it is run separately."""

SPLIT: tuple[Schedule, ...] = ("zero_bubble", "zbv")  # schedules that split the backward pass


@dataclass(frozen=True)
class Action:
    """A pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int


def split_rounds(passes: int, ranks: int) -> tuple[int, ...]:
    """Micro-batches of each round, as equal as possible."""
    rounds = count_rounds(passes, ranks)
    base, more = divmod(passes, rounds)
    return tuple(base + (each < more) for each in range(rounds))


def _order_in_rounds(case: Case, rank: int) -> Iterator[Action]:
    """Forward passes alone at first, then a backward pass after each, then the remaining backward passes.

    Gradients of weights are delayed by as many micro-batches as there are earlier stages, which get theirs sooner.
    """
    passes, ranks, split = case.micro_batches, case.degrees.pp, case.schedule in SPLIT
    held = stages_of_rank(rank, ranks, case.stages_per_rank, case.schedule)
    # A round passes one stage of a rank completely before the next stage.
    rounds = split_rounds(passes, ranks) if len(held) > 1 else (passes,)
    spans = [range(start, end) for start, end in pairwise(accumulate(rounds, initial=0))]
    there = [(stage, number) for span in spans for stage in held for number in span]
    back = [(stage, number) for span in spans for stage in held[::-1] for number in span]
    # Forward passes before the first pair of a forward and a backward pass
    lead = ranks - 1 - rank
    if case.schedule == "gpipe":
        lead = passes
    elif case.stages_per_rank > 1:
        lead = (case.stages_per_rank - 1) * max(split_rounds(passes, ranks)) + (1 if split else 2) * lead
    lead, later = min(len(there), lead), rank if split else 0
    for place in range(len(there) + lead):
        if place < len(there):
            yield Action("forward", *there[place])
        if place >= lead:
            yield Action("backward", *back[place - lead])
        if split and place >= lead + later:
            yield Action("weight", *back[place - lead - later])
    if split:
        yield from (Action("weight", *each) for each in back[max(0, len(back) - later) :])


_Walk = tuple[tuple[Kind, int], ...]
"""Kinds of passes, each through the first arm of the V (0) or the second (1)."""

_FORWARD: _Walk = (("forward", 0), ("forward", 1))
_BACKWARD: _Walk = (("backward", 0), ("backward", 1))
_WEIGHT: _Walk = (("weight", 0), ("weight", 1))
_STEADY: _Walk = (_FORWARD[0], _BACKWARD[0], _WEIGHT[0], _FORWARD[1], _BACKWARD[1], _WEIGHT[1])


def _order_there_and_back(case: Case, rank: int) -> Iterator[Action]:
    ranks, passes = case.degrees.pp, case.micro_batches
    held, after, done = stages_of_rank(rank, ranks, 2, "zbv"), ranks - rank, Counter[tuple[Kind, int]]()
    walk = _FORWARD[:1] * (2 * after - 1) + _FORWARD[::-1] * rank + _STEADY[3:] * after + _STEADY * (passes - ranks)
    # Earlier ranks wait for gradients of inputs; those of weights fill the idle time. These are more passes than there
    # are micro-batches.
    for kind, way in walk + _BACKWARD * passes + _WEIGHT * passes:
        number = done[kind, way]
        done[kind, way] += 1
        if number < passes:
            yield Action(kind, held[way], number)


# --- the times of passes


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in one stage: forward, backward for its input, backward for its weights."""

    forward: float
    backward: float
    weight: float


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
    def seconds(self) -> float:  # from the first forward pass to the end of the last backward pass
        return max(box.end for box in self.boxes)

    def of_rank(self, rank: int) -> tuple[Box, ...]:
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
    order = _order_there_and_back if case.schedule == "zbv" else _order_in_rounds
    orders = [tuple(order(case, rank)) for rank in range(case.degrees.pp)]
    last = case.stages - 1

    def needs(action: Action) -> Iterator[Action]:
        stage, number = action.stage, action.micro_batch
        if action.kind == "forward" and stage > 0:
            yield Action("forward", stage - 1, number)
        if action.kind == "weight":
            yield Action("backward", stage, number)
        if action.kind == "backward":
            yield Action("forward", stage, number)
            if stage < last:
                yield Action("backward", stage + 1, number)

    ends: dict[Action, float] = {}
    free, places = [0.0] * len(orders), [0] * len(orders)
    boxes: list[Box] = []
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = len(boxes)
        for rank, passes in enumerate(orders):
            for action in passes[places[rank] :]:
                needed = [ends.get(each) for each in needs(action)]
                known = [end for end in needed if end is not None]
                if len(known) < len(needed):
                    break
                start = max(max(known, default=0.0), free[rank])
                takes: float = getattr(seconds[rank], action.kind)
                if action.kind == "backward" and case.schedule not in SPLIT:
                    takes = seconds[rank].backward + seconds[rank].weight
                free[rank] = ends[action] = start + takes
                boxes.append(Box(rank, action, start, free[rank]))
                places[rank] += 1
        if len(boxes) == before:
            raise Bug(f"the schedule {case.schedule} of {case.micro_batches} micro-batches waits for itself")
    return Simulated(len(orders), case.stages_per_rank, tuple(boxes))


# --- the picture and its notes

MOST_RANKS = 16  # most bars that are drawn

MOST_PASSES = 32  # most micro-batches that are drawn
MOST_STAGE_PASSES = 64  # most forward passes of a rank that are drawn, if a rank has several stages
_CONCEPTS: dict[Kind, str] = {"forward": "forward", "backward": "backward", "weight": "backward, for weights"}

_WIDTH, _LEFT, _TOP, _LANE = 1000.0, 64.0, 6.0, 24.0
_NUMBERED = 13.0  # least width of a box with a number


def render_schedule(shown: Estimate) -> str:
    """The picture with the idle time of each rank; "" without a pipeline."""
    case, ranks, held = shown.case, shown.case.degrees.pp, shown.case.stages_per_rank
    if ranks == 1:
        return ""
    # The same schedule with as many micro-batches as can be drawn, in whole rounds if the step has them.
    most = max(ranks, min(MOST_PASSES, MOST_STAGE_PASSES // held))
    most = most // ranks * ranks if case.micro_batches % ranks == 0 else most
    passes = min(case.micro_batches, most)
    drawn = replace(case, global_batch=passes * case.micro_batch * case.degrees.data)
    simulated = simulate_pipeline(drawn, stage_seconds(shown))
    picked, total = pick_ranks(ranks), simulated.seconds
    idle = [simulated.idle_seconds(rank) for rank in range(ranks)]
    rows = [
        (
            f"rank {rank}",
            duration(total - idle[rank]),
            duration(idle[rank]),
            percent(idle[rank] / total),
            f"{simulated.in_flight(rank):.3g}",
        )
        for rank in picked
    ]
    columns = ("pipeline rank", "works", "waits", "waits, share", "micro-batches kept at most")
    part = "" if passes == case.micro_batches else ", of fewer micro-batches,"
    bubble, waiting = shown.time.items.get(BUBBLE, 0.0), sum(idle) / (ranks * total)
    summary = (
        f"Schedule {case.schedule}: {ranks} ranks with {held} {'stage' if held == 1 else 'stages'} each, "
        f"{case.micro_batches:,} micro-batches a step. On the slowest rank the plan counts a bubble of "
        f"{duration(bubble)}, {percent(bubble / shown.time.seconds)} of the step. In the picture{part} ranks wait "
        f"{percent(waiting)} of the time on average, which for the others is for the slowest one too."
    )
    kinds = {box.action.kind for box in simulated.boxes}
    back = "backward, for inputs" if "weight" in kinds else "backward"
    names: dict[Kind, str] = {"forward": "forward", "backward": back, "weight": "backward, for weights"}
    key = {names[kind]: colour_of(_CONCEPTS[kind]) for kind in names if kind in kinds}
    left_out = [f"the first {passes} of {case.micro_batches:,} micro-batches"] if passes < case.micro_batches else []
    left_out += [f"{len(picked)} of {ranks} ranks"] if len(picked) < ranks else []
    note = f"Drawn are {' and '.join(left_out)}. " if left_out else ""
    note += "Later stages of a rank are fainter. " if held > 1 else ""
    note += (
        "Each stage takes what the plan prices for it, a backward pass two thirds of that; messages between stages "
        "take no time here."
    )
    return render_section(
        "Pipeline",
        render_text(summary),
        render_figure(_draw(simulated, picked, drawn), {**key, "waiting": "lane"}, note),
        render_table(f"The picture in numbers: {duration(total)}", columns, rows),
    )


def stage_seconds(shown: Estimate) -> tuple[StageSeconds, ...]:
    """The plan's seconds of one micro-batch in each stage of every pipeline rank; half of a backward pass is for the
    stage's input, half for its weights."""
    case, machine = shown.case, shown.machine
    found = []
    for items in StepPricer(case, machine, ceilings_of(machine)).stages(list_stages(case)):
        seconds = sum(items.values()) / case.stages_per_rank
        back = BACKWARD_SHARE * seconds
        found.append(StageSeconds(seconds - back, back / 2, back / 2))
    return tuple(found)


def pick_ranks(ranks: int, always: int = 0, most: int = MOST_RANKS) -> list[int]:
    """At most `most` ranks from the first to the last, evenly spaced, including rank `always`."""
    if ranks <= most:
        return list(range(ranks))
    chosen = [round(number * (ranks - 1) / (most - 1)) for number in range(most)]
    nearest = min(range(1, most - 1), key=lambda place: abs(chosen[place] - always))
    if always not in chosen:
        chosen[nearest] = always
    return chosen


# --- the drawing


def _draw(simulated: Simulated, ranks: list[int], case: Case) -> str:
    width = _WIDTH - _LEFT - 8
    scale = width / simulated.seconds
    parts: list[str] = []
    for row, rank in enumerate(ranks):
        lane = Frame(_LEFT, _TOP + row * (_LANE + 3), width, _LANE)
        parts += [text((_LEFT - 8, lane.y + 16), f"rank {rank}", "", "end"), rect(lane, "lane")]
        parts += _boxes(simulated, rank, lane, v_shaped=case.schedule == "zbv")
    bottom = _TOP + len(ranks) * (_LANE + 3)
    unit, name = (1e-3, "ms") if simulated.seconds < 1 else (1.0, "s")
    for tick in nice_ticks(simulated.seconds / unit, 8):
        anchor = "start" if tick == 0 else "middle"
        parts.append(text((_LEFT + tick * unit * scale, bottom + 14), f"{tick:,g} {name}", "soft", anchor))
    label = f"Schedule {case.schedule} of {case.micro_batches} micro-batches on {simulated.ranks} ranks over time"
    return render_drawing((_WIDTH, bottom + 22), label, parts, least=900)


def _boxes(simulated: Simulated, rank: int, lane: Frame, *, v_shaped: bool) -> Iterator[str]:
    """The passes of a rank: numbered boxes if they are wide enough, else one outline per colour."""
    boxes, scale, held = simulated.of_rank(rank), lane.width / simulated.seconds, simulated.held

    def shade(box: Box) -> str:
        """1 for the first stage of a rank, fainter for each later one."""
        stage = box.action.stage
        chunk = int(stage >= simulated.ranks) if v_shaped else stage // simulated.ranks
        return f"{1 - chunk * (0.3 if held == 2 else 0.6 / max(1, held - 1)):.2f}"

    widths = [(box.end - box.start) * scale for box in boxes]
    if min(widths) >= _NUMBERED:
        for box, width in zip(boxes, widths, strict=True):
            action, frame = box.action, Frame(lane.x + box.start * scale, lane.y + 1, width, lane.height - 2)
            took = duration(box.end - box.start)
            tip = f"{action.kind}, stage {action.stage}, micro-batch {action.micro_batch}: {took}"
            outline = rect(frame, f"{colour_of(_CONCEPTS[action.kind])} box", tip)
            yield f'<g fill-opacity="{shade(box)}">{outline}</g>'
            yield text((frame.x + frame.width / 2, frame.y + 15), str(action.micro_batch), "on", "middle")
        return
    outlines: dict[tuple[Kind, str], list[str]] = {}
    for box, width in zip(boxes, widths, strict=True):
        x = lane.x + box.start * scale
        path = f"M{x:.1f} {lane.y + 1:.0f}h{width:.2f}v{lane.height - 2:.0f}h-{width:.2f}z"
        outlines.setdefault((box.action.kind, shade(box)), []).append(path)
    edge = " box" if min(widths) >= 3 else ""
    for (kind, faint), paths in outlines.items():
        yield f'<path d="{"".join(paths)}" class="{colour_of(_CONCEPTS[kind])}{edge}" fill-opacity="{faint}"/>'
