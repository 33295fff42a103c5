"""Many runs as one array: what is written and asked, what a lost answer and a refusal leave, the local limit."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from job_cases import wait_until
from test_send import Desk, make_desk

from shardway.errors import SiteError, UserError
from shardway.launch.hosts.local import LocalHost
from shardway.launch.runs.find import read_known
from shardway.launch.submission.array import ArrayRequest, prepare_array, submit_array
from shardway.launch.submission.prepare import SubmitRequest
from shardway.launch.submission.submit import SentSubmission, Submitter
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.sweep import SweepDir


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return make_desk(tmp_path, monkeypatch)


def ask(desk: Desk, count: int = 3, at_once: int = 0, **changes: str) -> ArrayRequest:
    """So many runs of the desk's program; `changes`: a further key of the run with this number."""
    folder = desk.path / "runs/my"
    requests = []
    for index in range(count):
        words = ("site.venv=none", *filter(None, [changes.get(f"run{index}", "")]))
        order = replace(desk.order(), run_request=ResolveRequest(None, words, folder / f"{index:03d}"))
        requests.append(order)
    return ArrayRequest(requests, folder, "my", at_once)


def send(desk: Desk, asked: ArrayRequest) -> list[SentSubmission]:
    return submit_array(asked, desk.host, Submitter(desk.host, pause=lambda seconds: None))


def test_each_run_has_its_own_attempt_and_the_id_of_a_task(desk: Desk) -> None:
    sent = send(desk, ask(desk, at_once=2))
    assert [each.job for each in sent] == ["101_0", "101_1", "101_2"]
    assert desk.host.count("sbatch") == 1
    array = SweepDir(desk.path / "runs/my").array(1)
    assert "#SBATCH --array=0-2%2" in array.script.read_text()
    for index, each in enumerate(sent):
        folder = each.prepared.job.folder
        record = folder.read_submission()
        assert record is not None
        assert (record.job, record.task, record.array[:7]) == (f"101_{index}", index, "my.0001")
        assert (folder.code / "train.py").read_bytes() == b"two = 2\r\n"
        assert folder.snapshot_path.exists()
        assert f"run={desk.path}/runs/my/{index:03d}\n" in folder.job_script.read_text()
    assert len(read_known()) == 3


def test_exchanges_with_a_host_do_not_grow_with_the_runs(desk: Desk) -> None:
    send(desk, ask(desk, 2))
    few = len(desk.host.exchanges)
    desk.host.exchanges.clear()
    send(desk, replace(ask(desk, 5), folder=desk.path / "runs/other", requests=[*move(desk, ask(desk, 5))]))
    assert len(desk.host.exchanges) == few


def move(desk: Desk, asked: ArrayRequest) -> list[SubmitRequest]:
    """The same runs in another folder."""
    return [
        replace(each, run_request=replace(each.run_request, directory=desk.path / f"runs/other/{index:03d}"))
        for index, each in enumerate(asked.requests)
    ]


def test_an_array_whose_answer_was_lost_is_found_by_its_name(desk: Desk) -> None:
    desk.cluster.write("answers", "lost\n")
    sent = send(desk, ask(desk))
    assert [each.job for each in sent] == ["101_0", "101_1", "101_2"]
    assert all(each.found for each in sent)
    assert len(desk.queue) == 1


def test_an_interrupted_submission_is_never_doubled(desk: Desk) -> None:
    """Slurm took the array and fell silent: the same again finds each task, by the array's name."""
    desk.cluster.write("answers", "lost\n" + "down\n" * 6)
    desk.cluster.write("silent", "")
    with pytest.raises(SiteError, match="in 6 tries"):
        send(desk, ask(desk))
    (desk.cluster.path / "silent").unlink()
    sent = send(desk, ask(desk))
    assert [each.job for each in sent] == ["101_0", "101_1", "101_2"]
    assert len(desk.queue) == 1


def test_one_that_never_arrived_is_submitted_again(desk: Desk) -> None:
    desk.cluster.write("answers", "down\n" * 6)
    with pytest.raises(SiteError, match="3 attempts are prepared"):
        send(desk, ask(desk))
    assert [each.job for each in send(desk, ask(desk))] == ["101_0", "101_1", "101_2"]
    assert [each.number for each in RunDir(desk.path / "runs/my/000").attempts()] == [1]


def test_a_refused_array_leaves_nothing_behind(desk: Desk) -> None:
    desk.cluster.write("answers", "account\n")
    with pytest.raises(UserError, match="Nothing was submitted"):
        send(desk, ask(desk))
    assert not (desk.path / "runs/my").exists()
    assert read_known() == []


def test_problems_of_all_runs_are_reported_at_once(desk: Desk) -> None:
    with pytest.raises(UserError) as refused:
        prepare_array(ask(desk, run0="site.walltime=5h", run2="site.queue=gone").requests, desk.host)
    assert "2 of the 3 runs" in str(refused.value)
    assert "site.walltime" in str(refused.value)
    assert "gone" in str(refused.value)


def test_runs_that_ask_for_other_nodes_are_a_second_array_and_share_no_limit(desk: Desk) -> None:
    asked = ask(desk, 4, run3="site.nodes=2", run1="site.nodes=2")
    with pytest.raises(UserError, match="2 kinds of jobs"):
        send(desk, replace(asked, at_once=2))
    assert not (desk.path / "runs/my").exists()
    assert [each.job for each in send(desk, asked)] == ["101_0", "102_0", "101_1", "102_1"]


def test_one_run_alone_is_a_job(desk: Desk) -> None:
    (sent,) = send(desk, ask(desk, 1))
    assert sent.job == "101"
    assert not SweepDir(desk.path / "runs/my").arrays_folder.exists()


def test_this_machine_runs_no_more_than_so_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is taken out of the line does not begin."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    here = tmp_path / "project"
    here.mkdir()
    monkeypatch.chdir(here)
    gate = tmp_path / "go"
    line = f"touch {tmp_path}/began-$0; until [ -e {gate} ]; do sleep 0.05; done"
    requests = [
        SubmitRequest(
            ResolveRequest(None, ("site.ranks_per_node=1", "run.telemetry=off"), tmp_path / f"runs/{index:03d}"),
            site="laptop",
            command=("bash", "-c", line, str(index)),
            here=here,
        )
        for index in range(4)
    ]
    host = LocalHost()
    sent = submit_array(ArrayRequest(requests, tmp_path / "runs", "my", 2), host)
    try:
        wait_until(lambda: len(list(tmp_path.glob("began-*"))) == 2)
        scheduler = sent[0].prepared.request.scheduler
        jobs = [each.job for each in sent]
        records = scheduler.parse_records(jobs, host.run_many(scheduler.query(jobs)))
        phases = [records[job].phase.value for job in jobs]
        assert sorted(phases) == ["queued", "queued", "running", "running"]
        last = max(index for index, phase in enumerate(phases) if phase == "queued")
        name = sent[last].prepared.job.scheduler_name
        assert scheduler.parse_found(host.run_many(scheduler.find(name))) == (jobs[last],)
        host.run_many(scheduler.cancel([jobs[last]]))
        gate.touch()
        others = [each for index, each in enumerate(sent) if index != last]
        wait_until(lambda: all(read_state(each.prepared.job.folder) == "finished" for each in others))
        assert not (tmp_path / f"began-{last}").exists()
    finally:
        for each in sent:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(each.job.split(".")[0]), signal.SIGKILL)


def read_state(attempt: Attempt) -> str:
    result = attempt.read_result()
    return str(result.state) if result is not None else ""
