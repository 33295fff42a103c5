"""Draws the live view of a run as an SVG, from the events that the run has written: the picture in the README.

    shardway train examples/default.toml --nproc 2
    python tools/live_view.py runs/default docs/live-view.svg --step 640

Invariant: the picture shows what `shardway train` showed on a terminal at that step; no figure in it is made up. It
loads nothing from another host.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from shardway.rundir.directory import RunDir
from shardway.watch.live import LiveView


def main() -> None:
    """Read the words of the command line and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--step", type=int, help="the last step to show; left out: the whole run")
    parser.add_argument("--width", type=int, default=96, help="columns of the terminal")
    words = parser.parse_args()
    words.picture.write_text(render_svg(words.run, words.step, words.width), encoding="utf-8")


def render_svg(run: Path, last_step: int | None, width: int) -> str:
    """The view after `last_step`, as an SVG."""
    now = 0.0
    view = LiveView(run.name, str(run), clock=lambda: now)
    for event in RunDir(run).events(0):
        if last_step is not None and event["event"] == "step" and event["step"] > last_step:
            break
        now = event["time"]
        view.update(event)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(view.render())
    svg = console.export_svg(title="shardway train", theme=MONOKAI, unique_id="live-view")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no font of another host


if __name__ == "__main__":
    main()
