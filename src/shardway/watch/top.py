"""`shardway top`: several runs in one terminal, with the hardware of the selected one as a heat map.

Invariants:
- Files are read in a thread of its own, so that the keys answer while a file system does not; one look at a time.
- Everything shown was read before: drawing reads no file. What cannot be read is shown in the place of the run.
- Nothing of a run is changed except by the two actions of `TopActions`, and a stop is confirmed first.
- Every value is a number or a word; colours only repeat it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import DataTable, Footer, RichLog, Static

from shardway.errors import ShardwayError, legible
from shardway.units import render_clock, render_count
from shardway.watch.advice.findings import Advice
from shardway.watch.hosts import shorten_hosts
from shardway.watch.live import LiveRow, Sparkline
from shardway.watch.top_hardware import CORES, METRICS, GpuNow, HardwareUse
from shardway.watch.top_runs import WatchedRun, render_age
from shardway.watch.words import Severity, one_line, render_loss, render_share

FIND_S = 5.0  # between two looks for runs that came or went
ENDED_S = 10.0  # between two looks at a run that has ended
SAID_S = 15.0  # how long the answer of an action stays
ADVICE_S = 60.0  # between two judgements of the selected run
_STALE_S = 60.0  # samples older than this are named with their age


class TopActions(Protocol):
    """What the view can ask for; each returns a sentence for the person, and raises ShardwayError."""

    def stop(self, run: Path) -> str:
        """Ask a run to stop after its current step."""

    def report(self, run: Path) -> str:
        """Write the report of a run, and open it where that is possible."""

    def advise(self, run: Path) -> Sequence[Advice]:
        """What is advised for a run, most important first."""


class Board:
    """The runs that are shown: those that `find` names now, each followed. Not for several threads at once."""

    def __init__(self, find: Callable[[], Sequence[Path]], clock: Callable[[], float] = time.monotonic) -> None:
        self._find, self._clock = find, clock
        self._runs: dict[Path, WatchedRun] = {}
        self._looked: dict[Path, float] = {}
        self._found = -math.inf
        self.error = ""
        self.gone: list[str] = []

    @property
    def runs(self) -> list[WatchedRun]:
        return list(self._runs.values())

    def refresh(self) -> None:
        """Look for runs, and read what is new of each."""
        now = self._clock()
        if now - self._found >= FIND_S:
            self._found = now
            self._look_for_runs()
        for path, run in self._runs.items():
            if run.is_active or now - self._looked.get(path, -math.inf) >= ENDED_S:
                self._looked[path] = now
                run.refresh()

    def _look_for_runs(self) -> None:
        self.error = ""
        try:
            paths = list(dict.fromkeys(self._find()))
        except ShardwayError as error:
            self.error = str(error).splitlines()[0]
            return
        except OSError as error:
            self.error = f"runs cannot be listed: {error.strerror}"
            return
        self.gone = [path.name for path in self._runs if path not in paths] or self.gone
        self._runs = {path: self._runs.get(path) or WatchedRun(path) for path in paths}


# --- what a run looks like

_STATE_STYLES = {
    **dict.fromkeys(("running",), "cyan"),
    **dict.fromkeys(("finished",), "green"),
    **dict.fromkeys(("failed", "crashed", "out_of_memory", "node_failure"), "red"),
    **dict.fromkeys(("stopped", "deadline", "preempted", "unknown"), "yellow"),
}
_COLUMNS = ("run", "state", "step", "loss", "speed", "wait", "gpus", "left", "!")
_WIDEST_NAME = 20

SORTS: Mapping[str, Callable[[WatchedRun], tuple[object, ...]]] = {
    "activity": lambda run: (not run.is_active, -((run.began or 0.0) if run.is_active else run.updated)),
    "name": lambda run: (run.run.path.name,),
    "use": lambda run: (run.hardware is None, run.hardware.use_mean if run.hardware and run.hardware.gpus else 101.0),
    "loss": lambda run: (run.summary is None or run.summary.loss is None, (run.summary and run.summary.loss) or 0.0),
    "alerts": lambda run: (-run.problems,),
}
"""Name of an order -> its key; the worst use and the lowest loss are first."""


def list_cells(run: WatchedRun) -> list[Text]:
    """The cells of a run's row; "" where something is not known."""
    summary, use = run.summary, run.hardware
    name = one_line(run.run.path.name)
    name = name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}~"
    state = "unreadable" if run.error and summary is None else run.state
    rate = summary.rate if summary is not None else None
    step = "" if summary is None or not (summary.step or summary.total_steps) else _render_steps(summary.step)
    total = f"/{_render_steps(summary.total_steps)}" if step and summary and summary.total_steps else ""
    gpus = ""
    if use is not None and use.gpus:
        total_gpus = max(run.gpus_asked or 0, len(use.gpus))
        gpus = f"{use.used}/{total_gpus} {_percent(use.use_mean)}"
    elif run.gpus_asked:
        gpus = f"?/{run.gpus_asked}"
    wait = run.data_wait
    left = summary.seconds_left if summary else None
    problems = run.problems + bool(run.error)
    cells = [
        Text(name),
        Text(state, _STATE_STYLES.get(state, "")),
        Text(step + total),
        Text(render_loss(summary.loss) if summary and summary.loss is not None else ""),
        Text(f"{render_count(rate)}/s" if rate else ""),
        Text("" if wait is None else render_share(wait, 1.0), "yellow" if wait and wait >= 0.2 else ""),
        Text(gpus, "red" if use is not None and use.gpus and use.used < len(use.gpus) else ""),
        Text(render_clock(left) if left else ""),
        Text(str(problems) if problems else "", "yellow"),
    ]
    return [cell.append(" ") for cell in cells]


def _render_steps(steps: int) -> str:
    return str(steps) if steps < 100_000 else render_count(steps)


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f}%"


_SHADES = ("#3b0f70", "#5b2a86", "#3b528b", "#21918c", "#3fbc73", "#addc30")
"""Background of a value, from 0 to 100 percent; the numbers say the same without colours."""


def render_cell(value: float, *, is_idle: bool) -> Text:
    """One accelerator in four columns: " 97 " on its colour; reversed where it was not used, "-" where unknown."""
    if math.isnan(value):
        return Text("  - ", "dim")
    if is_idle:
        return Text(f"{value:>3.0f} ", Style(bold=True, reverse=True, color="red"))
    shade = _SHADES[min(len(_SHADES) - 1, max(0, int(value / 100 * len(_SHADES))))]
    dark = shade in _SHADES[:4]
    return Text(f"{value:>3.0f} ", Style(color="#ffffff" if dark else "#000000", bgcolor=shade, dim=False))


_HOST = 9  # columns of a host's name


def render_cores(use: HardwareUse, width: int) -> list[Text]:
    """Nodes one below another, each allowed core as a cell, as many on a line as fit."""
    names = shorten_hosts((host for host, _ in use.cores), _HOST - 1)
    fit = max(1, (width - _HOST) // 4)
    across = fit - fit % 8 or fit  # lines of eights are easier to count
    rows = []
    for host, cores in use.cores:
        for first in range(0, len(cores), across):
            row = Text().append(f"{names[host] if not first else '':<{_HOST}}", "dim")
            for value in cores[first : first + across]:
                row.append(render_cell(value, is_idle=False))
            rows.append(row)
    return rows


def render_heat(use: HardwareUse, metric: str, width: int, height: int) -> list[Text]:
    """Nodes as lines, accelerators as cells; where there are more nodes than lines, several nodes stand on one."""
    nodes: dict[str, list[GpuNow]] = {}
    for gpu in use.gpus:
        nodes.setdefault(gpu.host, []).append(gpu)
    most = max(map(len, nodes.values()), default=0)
    block = _HOST + 4 * most + 1
    across = max(1, width // block) if len(nodes) > height else 1
    down = math.ceil(len(nodes) / across)
    names = shorten_hosts(nodes, _HOST - 1)
    rows = [Text() for _ in range(down)]
    for place, (host, gpus) in enumerate(nodes.items()):
        row = rows[place % down]
        row.append(f"{names[host]:<{_HOST}}", "dim")
        for gpu in gpus:
            row.append(render_cell(gpu.now[metric], is_idle=gpu.is_used is False))
        row.append(" " * (4 * (most - len(gpus)) + 1))
    return rows


def describe_heat(use: HardwareUse, metric: str, now: float) -> str:
    """The line above the map: what it shows, its range, how old it is."""
    found = [each for _, cores in use.cores for each in cores] if metric == CORES else [g.now[metric] for g in use.gpus]
    values = [value for value in found if not math.isnan(value)]
    words = {"memory": "memory in % of its size", "power": "power in % of its limit", CORES: "cores in %"}
    what = words.get(metric, f"{metric} in %")
    age = now - use.newest
    old = f", {render_age(age)} old" if age > _STALE_S else ""
    if not values:
        reason = next((why for name, why in use.missing.items() if METRICS.get(metric, "core/") in name), "")
        return f"{what}: not sampled{f' ({one_line(reason)})' if reason else ''}"
    mean = sum(values) / len(values)
    return f"{what}: {min(values):.0f} to {max(values):.0f}, mean {mean:.0f}{old}"


def list_alerts(run: WatchedRun) -> list[Text]:
    """What to look at, most urgent first: a read error, the reason of an end, advice, the newest faults."""
    lines = [Text(f"cannot be read now: {legible(run.error)}", "red")] if run.error else []
    if run.reason and run.state not in ("running", "finished"):
        lines.append(Text(f"{run.state}: {one_line(run.reason)}", _STATE_STYLES.get(run.state, "")))
    for advice in run.advice[:3]:
        lines.append(Text(f"{one_line(advice.evidence).rstrip('.')}. To do: {one_line(advice.do)}", "yellow"))
    styles = {Severity.ERROR: "red", Severity.WARNING: "yellow"}
    lines += [Text(one_line(words), styles.get(weight, "")) for weight, words in reversed(run.alerts)]
    return lines or [Text("no alert", "dim")]


class _RunDetail(Static):
    """The facts of the selected run with its loss as a spark line."""

    def show(self, run: WatchedRun | None) -> None:
        if run is None:
            self.update("")
            return
        summary, attempt = run.summary, run.attempt
        width = max(8, (self.size.width or 30) - 6)
        rows: list[RenderableType] = [Text(one_line(run.run.path.name), "bold", no_wrap=True, overflow="ellipsis")]
        words = [run.state]
        if summary is not None and summary.total_steps:
            done = f"{_render_steps(summary.step)}/{_render_steps(summary.total_steps)}"
            words.append(f"step {done} ({100 * summary.step / summary.total_steps:.0f}%)")
        rows.append(Text("  ".join(words), no_wrap=True))
        if summary is not None and summary.loss is not None:
            rows.append(
                Text(f"loss {render_loss(summary.smooth_loss)}  last {render_loss(summary.loss)}", no_wrap=True)
            )
            rows.append(LiveRow(Text("     "), Sparkline(run.losses, width), Text()))
        rate = summary.rate if summary is not None else None
        if summary is not None and rate:
            rows.append(Text(f"speed {render_count(rate)} {summary.unit}/s", no_wrap=True))
        if run.data_wait is not None:
            rows.append(Text(f"waits for data {render_share(run.data_wait, 1.0)}", no_wrap=True))
        if run.hardware is not None and not math.isnan(run.hardware.cpu_percent):
            nodes = f"{run.hardware.hosts} node{'s' if run.hardware.hosts != 1 else ''}"
            rows.append(Text(f"{nodes}, cores {run.hardware.cpu_percent:.0f} %", no_wrap=True))
        if attempt is not None and attempt.job:
            rows.append(
                Text(f"job {one_line(attempt.job)}, attempt {attempt.number}", no_wrap=True, overflow="ellipsis")
            )
        self.update(Group(*rows))


class _Heat(Static):
    """The heat map; `run` and `metric` are what it shows."""

    def show(self, run: WatchedRun | None, metric: str, now: float) -> None:
        use = run.hardware if run is not None else None
        if use is None:
            self.update(Text("no run is selected" if run is None else "no telemetry", "dim"))
            return
        metric = metric if use.gpus else CORES
        if metric == CORES:
            head = Text(describe_heat(use, metric, now), no_wrap=True, overflow="ellipsis")
            none = [] if use.gpus else [Text("no accelerator was sampled", "dim")]
            self.update(Group(*none, head, *render_cores(use, self.size.width or 40)))
            return
        around = self.parent
        height = around.size.height if isinstance(around, VerticalScroll) else self.size.height
        head = Text(describe_heat(use, metric, now), no_wrap=True, overflow="ellipsis")
        self.update(Group(head, *render_heat(use, metric, self.size.width or 40, max(1, height - 1))))


# --- screens over the view


class _LogScreen(ModalScreen[None]):
    """The last lines of a run's log, read again while it is open."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,l", "dismiss_log", "Back"),
        Binding("end,G", "end", "End", show=False),
    ]

    def __init__(self, run: WatchedRun) -> None:
        super().__init__()
        self._run = run
        self._lines: list[str] = []

    def compose(self) -> ComposeResult:
        with Vertical(id="log-box"):
            yield Static(Text(f"log of {one_line(self._run.run.path.name)}", "bold"), id="log-title")
            yield RichLog(id="log", wrap=True, markup=False, highlight=False)
            yield Footer()

    def on_mount(self) -> None:
        self._read()
        self.set_interval(2.0, self._read)

    @work(thread=True, exclusive=True, group="log")
    def _read(self) -> None:
        lines = self._run.list_log()
        if lines != self._lines:
            self.app.call_from_thread(self._show, lines)

    def _show(self, lines: list[str]) -> None:
        log = self.query_one("#log", RichLog)
        at_end = log.scroll_offset.y >= log.max_scroll_y
        self._lines = lines
        log.clear()
        for line in lines:
            log.write(Text(line), scroll_end=at_end)

    def action_dismiss_log(self) -> None:
        self.dismiss()

    def action_end(self) -> None:
        self.query_one("#log", RichLog).scroll_end(animate=False)


class _ConfirmScreen(ModalScreen[bool]):
    """A question with yes and no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(id="confirm-box"):
            yield Static(Text(self._question))
            yield Static(Text("y: yes    n: no", "bold"))

    def action_answer(self, agrees: bool) -> None:
        self.dismiss(agrees)


# --- the app


class TopApp(App[None]):
    """The view. `every_s`: seconds between two looks at runs that go on."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "shardway top"
    CSS = """
    Screen { layout: vertical; }
    #head { height: 1; text-style: bold; }
    #runs { height: auto; max-height: 40%; min-height: 3; }
    #middle { height: 1fr; min-height: 5; border-top: solid $primary; }
    #heat-box { width: 1fr; }
    #heat { height: auto; }
    #detail { width: 40%; min-width: 32; max-width: 72; padding: 0 0 0 1; }
    #alerts { height: 20%; min-height: 4; max-height: 10; border-top: solid $primary; }
    #message { height: auto; max-height: 2; display: none; }
    #confirm-box { width: 60; max-width: 90%; height: auto; border: round $warning; padding: 1 2; }
    #confirm-box { background: $surface; }
    _ConfirmScreen { align: center middle; }
    #log-box { width: 100%; height: 100%; background: $surface; }
    #log { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("l,enter", "log", "Log", priority=False),
        Binding("r", "report", "Report"),
        Binding("x", "stop", "Stop"),
        Binding("m", "metric", "Metric"),
        Binding("s", "sort", "Sort"),
        Binding("e", "ended", "Ended"),
        Binding("pageup", "scroll(-1)", "Nodes up", show=False),
        Binding("pagedown", "scroll(1)", "Nodes down", show=False),
    ]

    def __init__(self, board: Board, actions: TopActions, every_s: float = 2.0) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark" if "ansi-dark" in self.available_themes else "textual-ansi"
        self._board, self._actions, self._every_s = board, actions, every_s
        self._metric, self._sort = "use", "activity"
        self._shows_ended = True
        self._selected: Path | None = None
        self._advised: dict[Path, float] = {}
        self._began_look: float | None = None
        self._said: Timer | None = None
        self.looks = 0  # looks that were drawn

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield DataTable(id="runs", cursor_type="row", cell_padding=0)
        with Horizontal(id="middle"):
            with VerticalScroll(id="heat-box", can_focus=False):
                yield _Heat(id="heat")
            yield _RunDetail(id="detail")
        yield VerticalScroll(Static(id="alert-lines"), id="alerts", can_focus=False)
        yield Static(id="message")
        yield Footer()

    def on_mount(self) -> None:
        table = self._table
        for column in _COLUMNS:
            table.add_column(f"{column.upper()} ", key=column)
        table.focus()
        self._look()
        self.set_interval(self._every_s, self._look)

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one("#runs", DataTable)

    # --- looking

    def _look(self) -> None:
        """Begin a look unless one is under way: a file system may take long to answer."""
        if self._began_look is None:
            self._began_look = time.monotonic()
            self._read()
        elif time.monotonic() - self._began_look > 2 * self._every_s:
            self._draw_head()

    @work(thread=True)
    def _read(self) -> None:
        try:
            self._board.refresh()
            self._advise()
        finally:
            self._began_look = None
            if self.is_running:
                self.call_from_thread(self._draw)

    def _advise(self) -> None:
        """Judge the selected run anew, at times, if there is something new to judge."""
        run = self._find_selected()
        if run is None:
            return
        path, now = run.run.path, time.monotonic()
        last = self._advised.get(path)
        if last is not None and (not run.is_active or now - last < ADVICE_S):
            return
        self._advised[path] = now
        try:
            run.advice = tuple(self._actions.advise(path))
        except (ShardwayError, OSError) as error:
            run.error = run.error or str(error).splitlines()[0]

    def _find_selected(self) -> WatchedRun | None:
        return next((run for run in self._board.runs if run.run.path == self._selected), None)

    # --- drawing

    def _list_shown(self) -> list[WatchedRun]:
        runs = [run for run in self._board.runs if self._shows_ended or run.is_active]
        return sorted(runs, key=SORTS[self._sort])

    def _draw(self) -> None:
        if not self.is_running or not self.screen_stack:
            return
        shown = self._list_shown()
        paths = [run.run.path for run in shown]
        if self._selected not in paths:
            self._selected = paths[0] if paths else None
        self._draw_table(shown)
        self._draw_selected()
        self._draw_head()
        self.looks += 1

    def _draw_table(self, shown: Sequence[WatchedRun]) -> None:
        """Only cells that changed, unless the rows did."""
        table = self._table
        keys = [str(run.run.path) for run in shown]
        if [row.key.value for row in table.ordered_rows] != keys:
            table.clear()
            for run, key in zip(shown, keys, strict=True):
                table.add_row(*list_cells(run), key=key)
            if self._selected is not None:
                table.move_cursor(row=keys.index(str(self._selected)), animate=False)
            return
        for run, key in zip(shown, keys, strict=True):
            for column, cell in zip(_COLUMNS, list_cells(run), strict=True):
                if table.get_cell(key, column) != cell:
                    table.update_cell(key, column, cell, update_width=True)

    def _draw_selected(self) -> None:
        run = self._find_selected()
        self.query_one(_Heat).show(run, self._metric, time.time())
        self.query_one(_RunDetail).show(run)
        lines = list_alerts(run) if run is not None else []
        self.query_one("#alert-lines", Static).update(Group(*lines))

    def _draw_head(self) -> None:
        runs = self._board.runs
        active = sum(run.is_active for run in runs)
        uses = [run.hardware for run in runs if run.is_active and run.hardware is not None]
        sampled = sum(len(use.gpus) for use in uses)
        words = [f"{len(runs)} run{'s' if len(runs) != 1 else ''}, {active} active"]
        words += [f"{sum(use.used for use in uses)}/{sampled} GPUs used"] if sampled else []
        words += [f"by {self._sort}", f"shows {self._metric}"]
        words += [] if self._shows_ended else ["ended hidden"]
        words.append(time.strftime("%H:%M:%S"))
        late = self._began_look is not None and time.monotonic() - self._began_look > 2 * self._every_s
        words += ["the file system is slow to answer"] if late else []
        words += [self._board.error] if self._board.error else []
        text = Text("  ".join(words), no_wrap=True, overflow="ellipsis")
        self.query_one("#head", Static).update(text)

    def _show_message(self, words: str) -> None:
        """Show a sentence for a while."""
        line = self.query_one("#message", Static)
        line.update(Text(legible(words)))
        line.display = bool(words)
        if self._said is not None:
            self._said.stop()
        self._said = self.set_timer(SAID_S, lambda: self._show_message("")) if words else None

    # --- keys

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.cursor_row != self._table.cursor_row:
            return  # of rows that were there before
        key = event.row_key.value if event.row_key is not None else None
        chosen = next((run.run.path for run in self._board.runs if str(run.run.path) == key), None)
        if chosen is not None and chosen != self._selected:
            self._selected = chosen
            self._draw_selected()
            self._look()  # it is judged now

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self.action_log()

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._draw_selected)

    def action_log(self) -> None:
        if (run := self._find_selected()) is not None:
            self.push_screen(_LogScreen(run))

    def action_metric(self) -> None:
        names = [*METRICS, CORES]
        self._metric = names[(names.index(self._metric) + 1) % len(names)]
        self._draw_selected()
        self._draw_head()

    def action_sort(self) -> None:
        names = [*SORTS]
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._draw()

    def action_ended(self) -> None:
        self._shows_ended = not self._shows_ended
        self._draw()

    def action_scroll(self, pages: int) -> None:
        box = self.query_one("#heat-box", VerticalScroll)
        box.scroll_relative(y=pages * max(1, box.size.height - 1), animate=False)

    def action_report(self) -> None:
        if (run := self._find_selected()) is not None:
            self._show_message(f"writing the report of {run.run.path.name} ...")
            self._act(self._actions.report, run.run.path)

    def action_stop(self) -> None:
        run = self._find_selected()
        if run is None:
            return
        if not run.is_active:
            self._show_message(f"{run.run.path.name} has ended: {run.state}")
            return
        question = f"Ask {run.run.path.name} to stop? It finishes its step, saves and ends; what waits is taken out."

        def answered(agrees: bool | None) -> None:
            if agrees:
                self._show_message(f"asking {run.run.path.name} to stop ...")
                self._act(self._actions.stop, run.run.path)
            else:
                self._show_message("nothing was stopped")

        self.push_screen(_ConfirmScreen(question), answered)

    @work(thread=True)
    def _act(self, action: Callable[[Path], str], run: Path) -> None:
        try:
            words = action(run)
        except ShardwayError as error:
            words = str(error)
        except OSError as error:
            words = f"it failed: {error.strerror or error}"
        self.call_from_thread(self._show_message, words)
