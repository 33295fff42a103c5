"""How jobs and runs look in a notebook, and how they are watched: a widget, a cell that is redrawn, or lines of text.

Invariants:
- Nothing here decides what is shown of a run: that is `shardway status`, as facts.
- Watching ends with what is watched, and Ctrl-C (the stop button of a notebook) ends only the watching.
- What a run holds never becomes markup: every text is escaped.
"""

from __future__ import annotations

import html
import sys
import time
from typing import TYPE_CHECKING, Any

from shardway.api.frames import render_table
from shardway.units import render_clock, render_count

if TYPE_CHECKING:
    from shardway.api.jobs import FunctionJob
    from shardway.api.run import Run

ENDED = ("finished", "stopped", "failed", "deadline", "preempted", "out_of_memory", "node_failure", "crashed")
"""States in which nothing changes any more."""


# --- as rows


def describe_job(job: FunctionJob) -> list[tuple[str, str]]:
    """Label and text of what is known of a job, its newest output last."""
    rows = [("function", job.function), ("state", job.state), ("job", job.job_id or "none yet"), ("run", job.reference)]
    if job.done() and (error := job.exception()) is not None:
        rows.append(("error", f"{type(error).__name__}: {error}"))
    elif job.done():
        rows.append(("result", _shorten(repr(job.result()))))
    return rows


def describe_run(run: Run) -> list[tuple[str, str]]:
    """Label and text of where a run stands."""
    facts = run.status
    step, total = facts.get("step") or 0, facts.get("total_steps")
    rows = [("run", str(run.path)), ("state", str(facts["state"]))]
    if facts.get("reason"):
        rows.append(("reason", _shorten(str(facts["reason"]))))
    if total:
        rows.append(("step", f"{step} of {total}"))
    for name in ("loss", "lr"):
        if facts.get(name) is not None:
            rows.append((name, f"{facts[name]:.4g}"))
    rate = facts.get(f"{facts.get('unit')}_per_s")
    if rate:
        rows.append(("speed", f"{render_count(rate)} {facts['unit']} a second"))
    if facts.get("seconds_left"):
        rows.append(("left", render_clock(facts["seconds_left"])))
    return rows


def _shorten(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


# --- as HTML


def render_job(job: FunctionJob) -> str:
    """A table of the job, and what it printed last."""
    lines = job.logs().splitlines()[-10:]
    printed = f"<pre>{html.escape(chr(10).join(lines))}</pre>" if lines else ""
    return render_table(("", ""), describe_job(job)) + printed


def render_run(run: Run) -> str:
    """A table of the run, with its losses as a small figure."""
    losses = [event["loss"] for event in run.directory.events(0) if event["event"] == "step" and event.get("loss")]
    return render_table(("", ""), describe_run(run)) + render_curve(losses)


def render_curve(values: list[float], width: int = 320, height: int = 80) -> str:
    """Values over their places as an SVG line, with the largest and the smallest one; "" for fewer than two."""
    if len(values) < 2:
        return ""
    stride = max(1, len(values) // (2 * width))
    shown = [*values[:-1:stride], values[-1]]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    points = " ".join(
        f"{place * width / (len(shown) - 1):.1f},{(high - value) / span * height:.1f}"
        for place, value in enumerate(shown)
    )
    line = f'<polyline fill="none" stroke="currentColor" stroke-width="1.5" points="{points}"/>'
    view = f'width="{width}" height="{height}" viewBox="0 -2 {width} {height + 4}"'
    words = f"loss {values[0]:.4g} to {values[-1]:.4g}"
    return f'<svg {view} role="img" aria-label="{words}">{line}</svg><div>{words}, lowest {low:.4g}</div>'


# --- watching


def watch(shown: FunctionJob | Run, interval_s: float = 2.0) -> None:
    """Show it again every `interval_s` seconds until it has ended."""
    view = _choose_view()
    try:
        while True:
            ended = _has_ended(shown)
            view(shown)
            if ended:
                return
            if isinstance(getattr(shown, "function", None), str):
                shown.wait(interval_s)  # type: ignore[union-attr]
            else:
                time.sleep(interval_s)
    except KeyboardInterrupt:
        _show("no longer watched; it goes on.")


def _show(line: str) -> None:
    stream = sys.stdout  # looked up each time: a notebook may set another
    stream.write(f"{line}\n")
    stream.flush()


def _has_ended(shown: FunctionJob | Run) -> bool:
    if hasattr(shown, "done"):
        return bool(shown.done())
    return shown.state in ENDED


def _choose_view() -> Any:
    """What shows it: a widget where ipywidgets is installed, a display that is updated where IPython runs a notebook,
    else a line for each change."""
    shell = _find_notebook()
    if shell is None:
        return _Lines()
    from IPython.display import HTML, display

    try:
        import ipywidgets
    except ImportError:
        return _Updates(display, HTML)
    return _Widget(ipywidgets.HTML(), display)


def _find_notebook() -> Any:
    """The shell of a notebook, which can show HTML; None in a script and in a terminal."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get() if get is not None else None
    return shell if shell is not None and getattr(shell, "kernel", None) is not None else None


class _Lines:
    """A line for each change, on stdout."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, shown: Any) -> None:
        rows = describe_job(shown) if hasattr(shown, "function") else describe_run(shown)
        line = "  ".join(f"{label} {' '.join(text.split())}" for label, text in rows)
        if line != self._last:
            _show(line)
        self._last = line


class _Updates:
    """One output of a cell that is replaced."""

    def __init__(self, display: Any, markup: Any) -> None:
        self._display, self._markup, self._handle = display, markup, None

    def __call__(self, shown: Any) -> None:
        content = self._markup(shown._repr_html_())
        if self._handle is None:
            self._handle = self._display(content, display_id=True)
        else:
            self._handle.update(content)


class _Widget:
    """A widget whose value is replaced."""

    def __init__(self, widget: Any, display: Any) -> None:
        self._widget, self._display, self._is_shown = widget, display, False

    def __call__(self, shown: Any) -> None:
        self._widget.value = shown._repr_html_()
        if not self._is_shown:
            self._display(self._widget)
            self._is_shown = True
