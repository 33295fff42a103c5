"""An event that is shown is shown in both views, with words whatever it lacks."""

from __future__ import annotations

import io

from rich.console import Console
from watch_events import BEGIN, event, started

from shardway.watch import words
from shardway.watch.live import LiveView
from shardway.watch.words import PlainLines, describe


def test_every_kind_of_news_is_one_line_in_both_views() -> None:
    assert len(words._KINDS) > 15
    for name in words._KINDS:
        bare = event(name, 3, 0.2)
        found = describe(bare)
        assert found is not None
        assert found.words
        assert "\n" not in found.words
        plain = PlainLines(clock=lambda: 0.0)
        plain.lines(started(total_steps=200))
        assert [line for line in plain.lines(bare) if found.words in line], name
        view = LiveView("demo", "runs/demo", clock=lambda: BEGIN)
        for each in (started(total_steps=200), bare):
            view.update(each)
        console = Console(width=200, file=io.StringIO())
        console.print(view.render())
        assert found.words.split("  ")[0][:60] in console.file.getvalue(), name


def test_a_save_that_was_left_out_names_the_one_under_way() -> None:
    found = describe(event("save_skipped", 40, 0.2, saving=20))
    assert found is not None
    assert found.words == "no save: that of step 20 is still written"


def test_what_the_disks_of_nodes_had_is_told() -> None:
    lines = {
        "saved step-000000040 on the nodes  1 KiB in 0.3 s": event(
            "saved", 40, 0.2, name="step-000000040", bytes=1024, seconds=0.3, tier="local"
        ),
        "step-000000040 on the disks of the nodes was not used and removed (no node has rank-00001.bin)": event(
            "checkpoint_quarantined",
            20,
            0.2,
            name="step-000000040",
            kept_as="",
            reason="no node has rank-00001.bin",
            tier="local",
        ),
        "what the nodes have saved is left out: it failed twice": event(
            "local_checkpoints_ignored", 20, 0.2, dropped=40, reason="it failed twice"
        ),
    }
    assert [found.words for each in lines.values() if (found := describe(each)) is not None] == list(lines)


def test_a_step_is_no_news() -> None:
    assert describe(event("step", 3, 0.2, loss=1.0)) is None
