"""When each queue would start a job: what the scheduler answers, and what it leaves out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardway.errors import SiteError, UserError
from shardway.launch.hosts.base import Done
from shardway.launch.hosts.local import LocalHost
from shardway.launch.submission.prepare import SubmitRequest
from shardway.launch.submission.start_times import choose_soonest, list_starts, with_queue
from shardway.resolve.request import ResolveRequest

PROFILE = """format = 1
name = "tiny"
title = "Tiny"
scheduler = "{scheduler}"
[node]
cores = 4
[defaults]
venv = "none"
"""
QUEUES = "".join(
    f'[[queues]]\nname = "{name}"\nmax_walltime = "{most}"\n'
    for name, most in (("short", "1h"), ("long", "4h"), ("gone", "4h"))
)
PARTITIONS = """\
PartitionName=short AllowAccounts=ALL MaxNodes=UNLIMITED MaxTime=01:00:00 MinNodes=0 State=UP TotalNodes=9

PartitionName=long AllowAccounts=ALL MaxNodes=2 MaxTime=04:00:00 MinNodes=0 State=UP TotalNodes=9

PartitionName=closed AllowAccounts=ALL MaxNodes=UNLIMITED MaxTime=01:00:00 MinNodes=0 State=DRAIN TotalNodes=9

PartitionName=theirs AllowAccounts=staff,root MaxNodes=UNLIMITED MaxTime=01:00:00 MinNodes=0 State=UP TotalNodes=9
"""


class AnsweringHost(LocalHost):
    """Slurm's answers: a start for each partition, or what it refuses a job with."""

    def __init__(self, **starts: float | str) -> None:
        self.starts = starts
        self.asked: list[str] = []

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        if words[:2] == ("scontrol", "show"):
            return Done(tuple(words), 0, PARTITIONS, "")
        if "--test-only" in words:
            [name] = [line.partition("=")[2] for line in stdin.splitlines() if line.startswith("#SBATCH --partition=")]
            self.asked.append(name)
            answer = self.starts[name]
            if isinstance(answer, str):
                return Done(tuple(words), 1, "", answer)
            said = f"sbatch: Job 12 to start at {answer:.0f} using 4 processors on nodes n1 in partition {name}\n"
            return Done(tuple(words), 0, "", said)
        return super().run(words, timeout_s=timeout_s, stdin=stdin)


def ask(folder: Path, *keys: str, scheduler: str = "slurm", queues: str = QUEUES) -> SubmitRequest:
    (folder / "tiny.toml").write_text(PROFILE.format(scheduler=scheduler) + queues)
    run = ResolveRequest(None, keys, folder / "run")
    return SubmitRequest(run, str(folder / "tiny.toml"), ("true",), here=folder)


def test_the_soonest_is_first_and_nothing_is_written(tmp_path: Path) -> None:
    now = time.time()
    host = AnsweringHost(short=now + 7200, long=now + 600)
    rows = list_starts(ask(tmp_path, "site.walltime=30m"), host)
    assert [row.queue for row in rows] == ["long", "short", "gone"]
    assert rows[0].words.startswith("in 10m (")
    assert rows[0].limits == "4h"
    assert rows[2].list_reasons() == ["Slurm knows no gone"]
    assert choose_soonest(rows).key == "site.queue=long"
    assert host.asked == ["short", "long"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.toml"]


def test_limits_of_the_profile_and_of_the_scheduler_refuse_a_queue(tmp_path: Path) -> None:
    host = AnsweringHost(short=1.0, long=1.0)
    rows = {row.queue: row for row in list_starts(ask(tmp_path, "site.walltime=2h", "site.nodes=3"), host)}
    assert [row.start for row in rows.values()] == [None] * 3
    assert 'site.walltime: 2h is longer than the queue "short" of tiny allows' in rows["short"].list_reasons()[0]
    assert rows["long"].list_reasons() == ["site.nodes: 3 nodes are more than it has for a job; allowed: at most 2"]
    with pytest.raises(UserError, match="no queue takes the job"):
        choose_soonest([*rows.values()])


def test_without_queues_in_the_profile_those_of_the_scheduler_are_asked(tmp_path: Path) -> None:
    host = AnsweringHost(
        short=1.0, long="allocation failure: Invalid account or account/partition combination specified"
    )
    request = ask(tmp_path, "site.walltime=30m", "site.account=mine", queues="")
    rows = {row.queue: row for row in list_starts(request, host)}
    assert rows["short"].words == "now"
    assert "account" in rows["long"].list_reasons()[0]
    assert rows["closed"].list_reasons() == ["its state is DRAIN"]
    assert rows["theirs"].list_reasons() == ['site.account: "mine" may not use it; allowed: staff, root']
    assert host.asked == ["short", "long"]


def test_pbs_cannot_know_and_says_so(tmp_path: Path) -> None:
    rows = list_starts(ask(tmp_path, "site.walltime=2h", scheduler="pbs"), LocalHost())
    assert [(row.queue, row.words) for row in rows] == [
        ("long", "cannot be known"),
        ("gone", "cannot be known"),
        ("short", "refused"),
    ]
    with pytest.raises(SiteError, match="qstat -T"):
        choose_soonest(rows)


def test_this_machine_starts_at_once_and_takes_no_queue(tmp_path: Path) -> None:
    request = ask(tmp_path, scheduler="local", queues="")
    [row] = list_starts(request, LocalHost())
    assert (row.words, row.key) == ("now", "")
    assert with_queue(request, row.queue) is request


def test_what_is_wrong_in_every_queue_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"site\.options"):
        list_starts(ask(tmp_path, "site.walltime=30m", 'site.options={time = "1h"}'), AnsweringHost())
