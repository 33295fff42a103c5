"""Ranks and cores of a report: which rank keeps the others waiting, and why nothing is known where that is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import BEGIN, make_host, make_info

from shardway.rundir.directory import RunDir
from shardway.telemetry.activity import RankReader
from shardway.telemetry.store import HostTelemetry, TelemetryWriter
from shardway.watch.hosts import order_of_host, shorten_hosts
from shardway.watch.progress import fold_events
from shardway.watch.report.axis import make_axis
from shardway.watch.report.content import describe, gather
from shardway.watch.report.event_log import EventLog
from shardway.watch.report.hardware import FOLDED_ROWS, make_panels, total_cores
from shardway.watch.report.page import render_content
from shardway.watch.report.ranks import find_rank_times


def _events(world: int = 4, launcher: str = "shardway") -> list[dict[str, Any]]:
    start = {"event": "started", "time": BEGIN, "step": 0, "world": world, "launcher": launcher, "total_steps": 100}
    steps = [{"event": "step", "step": n, "seconds": 0.9, "loss": 1.0, "time": BEGIN + n} for n in range(1, 101)]
    return [start, *steps]


def _ranks(shares: dict[int, float], count: int = 200) -> HostTelemetry:
    """Ranks that wait for data in that share of the looks, and step in the rest."""
    looks = np.arange(count) / count
    return make_host({f"rank/{rank}/activity": np.where(looks < share, 2, 3) for rank, share in shares.items()})


def test_the_rank_that_keeps_the_others_waiting_is_named(tmp_path: Path) -> None:
    events = _events()
    run, hosts = RunDir(tmp_path), [_ranks({0: 0.02, 1: 0.02, 2: 0.42, 3: 0.02})]
    times = find_rank_times(run, hosts, EventLog(events), fold_events(events))
    assert (times.late.rank, times.late.data_share, times.late.looks) == (2, 0.42, 200)  # type: ignore[union-attr]
    assert times.usual_outside == pytest.approx(0.02)
    assert [round(rank.step_s, 3) for rank in times.ranks if rank.step_s] == [0.9, 0.9, 0.533, 0.9]
    even = find_rank_times(run, [_ranks({0: 0.3, 1: 0.31, 2: 0.33})], EventLog(events), fold_events(events))
    assert even.late is None


@pytest.mark.parametrize(
    ("world", "launcher", "reason"),
    [(1, "shardway", ""), (4, "torchrun", "started by torchrun"), (4, "shardway", "fewer than 30 samples")],
)
def test_without_times_of_ranks_the_reason_is_given(tmp_path: Path, world: int, launcher: str, reason: str) -> None:
    events = _events(world, launcher)
    few = [_ranks({0: 0.1, 1: 0.1}, count=20)]
    times = find_rank_times(RunDir(tmp_path), few, EventLog(events), fold_events(events))
    assert times.ranks == []
    assert reason in times.missing
    assert bool(times.missing) is bool(reason)


def test_the_reader_reads_what_a_rank_shows_its_agent(tmp_path: Path) -> None:
    from shardway.ranks import heartbeat
    from shardway.telemetry import activity
    from shardway.watch.report import ranks

    assert heartbeat.LAYOUT is activity.LAYOUT
    known = heartbeat.Activity
    assert (ranks.WAITING, ranks.SCRIPT) == ((known.DATA,), (known.SCRIPT,))
    assert ranks.STEPPING == (known.STEP, known.REPEAT)
    assert ranks._OUTSIDE_OF_TRAINING == (known.START, known.LOAD, known.END)
    reader = RankReader(str(tmp_path), 4, 2)
    assert reader.series == ("rank/4/activity", "rank/5/activity")
    assert all(np.isnan(reader.read())), "no rank has begun"
    writer = heartbeat.HeartbeatWriter(tmp_path / "rank-1")
    assert np.isnan(reader.read()[1]), "nothing is written yet"
    writer.write(known.DATA, 3, 1.0)
    assert reader.read()[1] == known.DATA
    writer.write(known.STEP, 3, 2.0)
    assert reader.read()[1] == known.STEP
    reader.close()


def test_a_busy_core_stays_visible_where_cores_are_folded() -> None:
    cores = {f"core/{core}/use_percent": np.full(100, 100.0 if core == 77 else 1.0) for core in range(256)}
    host = make_host({**cores, "cpu/use_percent": np.full(100, 1.4)}, cores=256, allowed_cores=tuple(range(256)))
    [panel] = [each for each in make_panels([host], make_axis([(BEGIN, BEGIN + 99)]))[0] if each.name == "cores"]
    assert len(panel.rows) == FOLDED_ROWS
    assert panel.rows[19] == "core 76-79"
    assert "largest of up to 4 neighbours" in panel.note
    assert panel.means[19].min() == 100.0
    assert np.delete(panel.means, 19, axis=0).max() == 1.0
    assert panel.mean == pytest.approx(1 + 99 / 256, abs=1e-4), "the mean is of every core"
    assert total_cores([host]).busy == 1  # type: ignore[union-attr]


def test_a_crowded_node_and_a_late_rank_are_in_the_verdict(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    import json

    lines = [*_events(2), {"event": "restarted", "step": 50, "reason": "rank 1 was ended", "time": BEGIN + 50}]
    (run.path / "events/rank-00000.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    names = ("cpu/use_percent", "cpu/load", "core/0/use_percent", "core/1/use_percent")
    writer = TelemetryWriter(run.telemetry_folder, make_info(gpus=0, cores=2, allowed_cores=(0, 1)),
                             [*names, "rank/0/activity", "rank/1/activity"])  # fmt: skip
    for second in range(100):
        writer.append(BEGIN + second, [51.0, 7.0, 100.0, 2.0, 3, 2 if second % 2 else 3])
    writer.close()
    content = gather(run)
    words = " ".join(sentence for _, sentence in describe(content))
    assert "2 cores, which were 51 % busy (1 of them more than half of the time): 3.5 tasks wanted to run" in words
    assert "Rank 1 (n1) spent 50 % of its time outside of steps, the median rank 25 %" in words
    assert "The ranks restarted once: rank 1 was ended." in words
    page = render_content(content)
    assert "<td>restart</td>" in page
    assert 'id="lane-waiting"' in page
    assert 'id="lane-load"' in page
    assert content.as_json()["ranks"][1]["data_share"] == 0.5


def test_names_of_hosts_are_shortened_while_they_differ() -> None:
    assert shorten_hosts(["n1.cluster", "n2.cluster"]) == {"n1.cluster": "n1", "n2.cluster": "n2"}
    assert shorten_hosts(["n1.a", "n1.b"]) == {"n1.a": "n1.a", "n1.b": "n1.b"}
    assert shorten_hosts(["a-long-name-0017"], 8) == {"a-long-name-0017": "~me-0017"}
    assert sorted(["n10", "n2", "n1"], key=order_of_host) == ["n1", "n2", "n10"]
