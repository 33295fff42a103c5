"""The section of a report that says where the time of a run went.

Invariant: the parts of the bar are as wide as their rows say. This module must not add anything up: `watch.account`
does.
"""

from __future__ import annotations

from html import escape

from shardway.units import render_clock
from shardway.watch.account import TimeAccount
from shardway.watch.page import render_table
from shardway.watch.words import ACCOUNT_WORDS, render_plural, render_share, render_time

TITLE = "Where the time went"

_NOTES = {
    "productive_s": "each step counted once",
    "start_s": "from the beginning of the process, or of its job, to the look for a checkpoint",
    "data_s": "from the end of a step to the next batch, the record of the step in it",
    "script_s": "between a batch and its step, and after it",
    "idle_s": "from the last sign of life of one attempt to the beginning of the next: queue, restart",
    "unaccounted_s": "after the last record of an attempt that was killed, or of the one that runs",
}

_COLOURS = {
    "productive_s": "good",
    "lost_s": "fault",
    "start_s": "rate",
    "load_s": "resume",
    "data_s": "validation",
    "save_s": "train",
    "validation_s": "speed",
    "script_s": "norm",
    "end_s": "warn",
    "idle_s": "soft",
    "unaccounted_s": "line",
}
"""Row -> colour of the page."""


def render_spent(account: TimeAccount | None) -> str:
    """The share of productive time, a bar, and a table of what took any time."""
    if account is None:
        return f'<h2>{TITLE}</h2><p class="soft">It was not recorded.</p>'
    shown = {name: seconds for name, seconds in account.rows.items() if seconds > 0}
    rows = [
        [ACCOUNT_WORDS[name], _render_seconds(seconds), render_share(seconds, account.wall_s), _note(name, account)]
        for name, seconds in shown.items()
    ]
    share = render_share(account.productive_s, account.wall_s)
    return (
        f"<h2>{TITLE}</h2><p>{share} of {render_time(account.wall_s)} went into steps that hold: goodput, or effective "
        "training time ratio (ETTR, arXiv 2410.21680). Rank 0's time, over all attempts.</p>"
        f"{_bar(shown, account.wall_s)}{render_table(['rank 0', 'time', 'share', ''], rows)}"
    )


def _bar(rows: dict[str, float], wall_s: float) -> str:
    parts = "".join(
        f'<i style="width:{100 * seconds / wall_s:.3f}%;background:var(--{_COLOURS[name]})" '
        f'title="{escape(ACCOUNT_WORDS[name])} {render_share(seconds, wall_s)}"></i>'
        for name, seconds in rows.items()
    )
    return f'<div class="shares">{parts}</div>'


def _note(name: str, account: TimeAccount) -> str:
    if name != "lost_s":
        return _NOTES.get(name, "")
    again = f", {_render_seconds(account.repeated_s)} to do them again" if account.repeated_s else ""
    return f"{render_plural(account.undone_steps, 'step')} undone{again}"


def _render_seconds(seconds: float) -> str:
    """3:25, or 4.2 s where a clock would show little."""
    return render_clock(seconds) if seconds >= 100 else f"{seconds:.1f} s"
