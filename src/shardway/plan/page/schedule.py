"""The schedule of a pipeline as a picture: what each rank does when, and when it waits.

Invariant: what is drawn is what `simulate_pipeline` found for the passes that the plan prices; what is left out is
told. This module must not decide an order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardway.plan.case import Case
from shardway.plan.estimate import Estimate
from shardway.plan.page.blocks import TableBlock, render_figure, render_section, render_table, render_text
from shardway.plan.page.memory import pick_ranks
from shardway.plan.page.orders import SPLIT, Kind, count_held
from shardway.plan.page.pipeline import Box, Simulated, StageSeconds, simulate_pipeline
from shardway.plan.page.svg import Frame, nice_ticks, rect, render_drawing, text
from shardway.plan.render.words import duration, percent
from shardway.plan.stages import list_stages
from shardway.plan.time.ceilings import ceilings_of
from shardway.plan.time.passes import Passer
from shardway.plan.time.step import BACKWARD_SHARE, BUBBLE

MOST_PASSES = 32
"""Micro-batches that are drawn."""
MOST_STAGE_PASSES = 64
"""Forward passes of a rank that are drawn, where a rank has several stages."""
ROLES: dict[Kind, str] = {"forward": "blue", "backward": "teal", "weight": "plum"}

_WIDTH, _LEFT, _TOP, _LANE = 1000.0, 64.0, 6.0, 24.0
_NUMBERED = 13.0
"""Width of a box that has room for a number."""


def render_schedule(shown: Estimate) -> str:
    """The picture with how long each rank waits in it; "" without a pipeline."""
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
    """What the plan prices for one micro-batch in each stage of every pipeline rank."""
    case, machine = shown.case, shown.machine
    priced = Passer(case, machine, ceilings_of(machine)).stages(list_stages(case))
    held = count_held(case)
    return tuple(_part(sum(items.values()) / held) for items in priced)


def _part(seconds: float) -> StageSeconds:
    """A pass through a stage; half of the way back is for the stage's input, half for its weights."""
    back = BACKWARD_SHARE * seconds
    return StageSeconds(seconds - back, back / 2, back / 2)


def _shorten(case: Case) -> Case:
    """The same schedule for as many micro-batches as can be seen, in whole rounds where the step has whole rounds."""
    ranks, passes = case.degrees.pp, case.micro_batches
    most = max(ranks, min(MOST_PASSES, MOST_STAGE_PASSES // count_held(case)))
    shown = min(passes, most // ranks * ranks if passes % ranks == 0 else most)
    return replace(case, global_batch=shown * case.micro_batch * case.degrees.data)


# --- words


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


# --- the picture


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
    """Boxes with numbers where these can be read, else one outline for each colour."""
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
