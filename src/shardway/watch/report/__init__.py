"""The report of a run, and runs compared: what is gathered of it, and its views.

`content` gathers; `axis`, `curves`, `hardware` and `predicted` compute; `lanes` and `colour_map` draw; `page`,
`proposal` and `compare` are what a user sees.

Invariant: one reading of a run gives every view, so that the page and `--json` have the same values.
"""

from shardway.watch.report.page import render_report

__all__ = ["render_report"]
