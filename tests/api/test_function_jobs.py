from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import shardway
from shardway.api import jobs as jobs_room
from shardway.api.jobs import FunctionJob, JobWatcher, _OpenJob, explain_end, open_job
from shardway.errors import JobError, UserError
from shardway.launch.calls.packing import RemoteTraceback, pack_call
from shardway.launch.hosts.local import LocalHost
from shardway.launch.runs.job_status import read_ledger, read_standing
from shardway.launch.schedulers.base import JobPhase, JobRecord
from shardway.launch.schedulers.local import ThisMachine
from shardway.rundir.attempts import Ending, Result, Submission
from shardway.rundir.directory import RunDir

QUIET = {"run.telemetry": "off"}
WAIT_S = 60.0


pytestmark = pytest.mark.usefixtures("functions_by_value")


@contextlib.contextmanager
def folder_of(path: Path) -> Iterator[None]:
    """In a folder."""
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


class NeedsTwo(Exception):
    """It is pickled, and cannot be made again of its message alone."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def act(kind: str, value: Any = None) -> Any:
    """What a function may do."""
    import os
    import signal

    print(f"act {kind}")
    if kind == "raise":
        raise ValueError("broken on purpose")
    if kind == "odd":
        raise NeedsTwo(1, 2)
    if kind == "generator":
        return (each for each in range(3))
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": value, "folder": os.getcwd(), "job": os.environ["SHARDWAY_ATTEMPT_DIR"]}


KINDS = ("value", "raise", "odd", "generator", "killed")


@dataclass(frozen=True)
class SentArray:
    """Calls of each kind that one array made."""

    folder: Path
    jobs: dict[str, FunctionJob]


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentArray]:
    """All kinds of calls, two at a time."""
    folder = tmp_path_factory.mktemp("array")
    with folder_of(folder), shardway.Executor(keys=QUIET) as executor:
        sent = executor.map_array(act, KINDS, range(len(KINDS)), max_parallel=2)
        concurrent.futures.wait(sent, WAIT_S)
        yield SentArray(folder, dict(zip(KINDS, sent, strict=True)))


def test_a_value_comes_back_from_the_copy_of_the_code(array: SentArray) -> None:
    job = array.jobs["value"]
    assert job.result(WAIT_S) == {
        "value": 0,
        "folder": str(job.run / "work"),
        "job": str(job.run / "attempts" / "0001"),
    }
    assert job.results() == [job.result()]
    assert (job.state, job.exception(), job.done(), job.cancelled()) == ("finished", None, True, False)
    assert "act value\n" in job.logs()
    assert job.cancel() is False  # nothing is left to end


def test_a_map_is_one_folder_with_a_run_each(array: SentArray) -> None:
    runs = [job.run for job in array.jobs.values()]
    assert [run.name for run in runs] == ["000", "001", "002", "003", "004"]
    assert len({run.parent for run in runs}) == 1
    assert runs[0].parent.parent == array.folder / "runs"
    assert len({job.job_id for job in array.jobs.values()}) == 5


def test_an_exception_comes_back_with_its_traceback(array: SentArray) -> None:
    with pytest.raises(ValueError, match=r"^broken on purpose$") as raised:
        array.jobs["raise"].result(WAIT_S)
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert "in act\n" in str(raised.value.__cause__)
    assert array.jobs["raise"].state == "crashed"
    assert "ValueError: broken on purpose" in array.jobs["raise"].logs()


def test_a_value_is_back_before_the_scheduler_has_ended_its_job(
    array: SentArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, word in (("raise", "crashed"), ("value", "finished")):
        job = open_job(array.jobs[kind].run)
        concurrent.futures.wait([job], WAIT_S)
        (status,) = job._read_statuses()
        still = replace(status, record=JobRecord(job.job_id, JobPhase.RUNNING), result=None)
        monkeypatch.setattr(job, "_read_statuses", lambda still=still: [still])
        assert (still.word, job.state) == ("running", word)
        monkeypatch.undo()
        assert job.state == word


def test_an_exception_that_cannot_be_made_again_is_its_text(array: SentArray) -> None:
    with pytest.raises(JobError, match=r"^act raised: NeedsTwo: 1 and 2$") as raised:
        array.jobs["odd"].result(WAIT_S)
    assert "in act\n" in str(raised.value.__cause__)


def test_a_value_that_cannot_be_pickled_is_a_sentence(array: SentArray) -> None:
    with pytest.raises(JobError, match=r"^act returned a generator, which cannot be pickled: .*\n.*To do: return what"):
        array.jobs["generator"].result(WAIT_S)


def test_a_job_that_was_killed_is_explained_as_status_does(array: SentArray) -> None:
    job = array.jobs["killed"]
    error = job.exception(WAIT_S)
    assert isinstance(error, JobError)
    assert "A process of the job was killed (signal 9)" in str(error)
    assert f"shardway logs {job.run}" in str(error)
    assert job.state == "crashed"


def test_a_job_is_opened_again_elsewhere(array: SentArray) -> None:
    first = array.jobs["value"]
    again = open_job(first.run)
    assert (again.function, again.job_id, again.ranks, again.until_done) == ("act", first.job_id, 1, False)
    carried = pickle.loads(pickle.dumps(first))
    for job in (again, carried):
        assert job.result(WAIT_S) == first.result()
        assert job._watcher is not None
        job._watcher.join()
    with pytest.raises(ValueError, match="broken on purpose"):
        open_job(array.jobs["raise"].run).result(WAIT_S)


def test_a_run_that_calls_no_function_is_no_job(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.write_status(state="finished")
    with pytest.raises(UserError, match="is a run that calls no function"):
        open_job(run.path)


def test_a_pickle_of_another_person_is_not_read(array: SentArray, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(UserError, match="belongs to another person, and a value is a pickle"):
        open_job(array.jobs["value"].run)


def fail_once(path: str) -> int:
    """Raise in the first attempt."""
    import os

    count = len(os.listdir(path))
    open(os.path.join(path, str(count)), "w").close()
    if count == 0:
        raise RuntimeError("the first time")
    return count


def sleep_long(path: str) -> None:
    """Say that it runs, and sleep."""
    import time

    open(path, "w").close()
    time.sleep(600)


def test_a_call_is_repeated_until_it_returns(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with folder_of(tmp_path), shardway.Executor(until_done=True, keys=QUIET, name="twice") as executor:
        job = executor.submit(fail_once, str(marks))
        assert job.result(WAIT_S) == 1
        assert job.state == "finished"
    assert job.run.name.startswith("twice-")
    assert [str(each.word) for each in read_standing(LocalHost(), read_ledger(LocalHost(), job.run))[:2]] == [
        "crashed",
        "finished",
    ]


def test_a_job_that_is_cancelled_raises_what_status_says(tmp_path: Path) -> None:
    with folder_of(tmp_path), shardway.Executor(keys=QUIET) as executor:
        job = executor.submit(sleep_long, str(tmp_path / "runs-now"))
        with pytest.raises(TimeoutError):
            job.result(0.0)
        while not (tmp_path / "runs-now").exists():
            assert not job.done(), job.logs()
            job.wait(0.05)
        assert job.state == "running"
        assert job.cancel()
        error = job.exception(WAIT_S)
    assert isinstance(error, JobError)
    assert str(error).startswith(f"sleep_long returned nothing: job {job.job_id} is stopped:")
    assert job.state == "stopped"


class Elsewhere(LocalHost):
    """A login node that is this machine."""

    name = "me@login"


def test_a_job_of_another_host_brings_its_value_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_room, "find_host", lambda name: Elsewhere() if name else LocalHost())
    monkeypatch.setattr(jobs_room, "LOOK_FAR_S", 0.1)
    keys = {**QUIET, "site.venv": json.dumps(sys.prefix)}
    with folder_of(tmp_path):
        executor = shardway.Executor(site="me@login:laptop", root=tmp_path / "there", keys=keys)
        sent = executor.submit(act, "value", value=[1, 2])
        assert sent.result(WAIT_S)["value"] == [1, 2]
        assert sent.reference == f"me@login:{sent.run}"
        assert "act value\n" in sent.logs()
        assert sent.state == "finished"
        executor.shutdown()


def test_futures_go_with_those_of_python(array: SentArray) -> None:
    done = list(concurrent.futures.as_completed(array.jobs.values(), timeout=WAIT_S))
    assert {job.function for job in done} == {"act"}

    async def wait() -> Any:
        return await asyncio.gather(
            *(asyncio.wrap_future(array.jobs[kind]) for kind in ("value", "raise")), return_exceptions=True
        )

    value, error = asyncio.run(wait())
    assert value["value"] == 0
    assert isinstance(error, ValueError)


# --- what is refused before anything is submitted


def train(lr: float, *, epochs: int = 1, name: str = "") -> None:
    """A function with an argument that is an option of a job, too."""


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "both": (
        lambda: shardway.submit(train, 1e-3, name="x"),
        r"^name= is an argument of train and an option of shardway.submit.\n.*shardway.Executor\(OPTIONS\)",
    ),
    "misspelt": (
        lambda: shardway.submit(train, 1e-3, walltim="2h"),
        r"unexpected keyword argument 'walltim'.\n.*\n  Did you mean: walltim -> walltime\?",
    ),
    "missing": (lambda: shardway.submit(train), r"does not take these arguments: missing .*'lr'"),
    "called": (lambda: shardway.submit(3), r"^3 is no function"),  # type: ignore[arg-type]
    "lock": (
        lambda: shardway.submit(train, __import__("threading").Lock()),
        r"^argument 1 \(lock\) cannot be pickled, so it cannot go to a job",
    ),
    "gpus": (lambda: shardway.submit(train, 1, gpus=2, ranks_per_node=1), "each accelerator has one rank"),
    "no-gpus": (lambda: shardway.submit(train, 1, gpus=2, site="laptop"), "2 accelerators on nodes of laptop"),
    "option": (lambda: shardway.Executor(node=2), r"^node: no option of a job.\n.*\n  Did you mean nodes\?"),
    "twice": (lambda: shardway.Executor(nodes=2, keys={"site.nodes": 3}), "site.nodes is set twice"),
    "slash": (lambda: shardway.submit(asyncio.sleep, 1, name="a/b"), r"^name='a/b': it is not the name of a folder"),
    "dots": (lambda: shardway.Executor(name=".."), r"^name='..': it is not the name of a folder"),
    "root": (lambda: shardway.Executor(keys=["run.root=x"]), "keys sets run.root, which is the option root here"),
    "chain": (lambda: shardway.Executor(max_attempts=3), "it goes with until_done=True"),
    "parallel": (lambda: shardway.Executor().map(train, [1], max_parallel=0), "no job could run"),
    "nothing": (lambda: shardway.Executor().map_array(train), "no arguments to call it with"),
    "nodes": (lambda: shardway.submit(train, 1, nodes=2), "2 nodes, and laptop is one machine"),
    "coroutine": (lambda: shardway.submit(asyncio.sleep, 1), "sleep is a coroutine function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_and_nothing_is_left(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardway.hardware.probe._list_nvidia_devices", tuple)
    call, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        call()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_taken_after_the_end() -> None:
    executor = shardway.Executor()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(train, 1)
    assert list(shardway.Executor().map(train, [])) == []


# --- settled by records, without a job


@dataclass
class MadeJob:
    """A job of three ranks whose files a test writes."""

    run: RunDir
    job: FunctionJob
    watcher: JobWatcher
    entry: _OpenJob

    def look(self) -> bool:
        """Look once; whether it is settled."""
        self.watcher._look([self.entry])
        return self.job.done()

    def leave(self, rank: int, **record: Any) -> None:
        """The record of a rank."""
        path = self.run.attempt(1).returned_path(rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"format": 1, "rank": rank, **record}))


@pytest.fixture
def made(tmp_path: Path) -> MadeJob:
    """Three ranks, submitted as a job of this machine that has ended."""
    run = RunDir(tmp_path / "run")
    run.attempt(1).make()
    run.attempt(1).write_submission(Submission("local", "0", "1.1"))
    job = FunctionJob("", run.path, job_id="1.1", attempt=1, function="act", ranks=3, until_done=False)
    return MadeJob(run, job, JobWatcher(LocalHost(), here=True), _OpenJob(job, 0.0, 1.0))


def packed(value: Any) -> str:
    """A value as a rank leaves it."""
    import base64

    return base64.b64encode(cloudpickle.dumps(value)).decode()


def test_a_value_of_each_rank_is_awaited(made: MadeJob) -> None:
    made.entry.next_s = float("inf")
    for rank in (2, 0):
        made.leave(rank, returned=packed(rank))
        assert not made.look()
    made.leave(1, returned=packed(1))
    assert made.look()
    assert made.job.results() == [0, 1, 2]


def test_one_rank_that_raises_settles_it(made: MadeJob) -> None:
    made.entry.next_s = float("inf")
    made.leave(2, raised={"type": "E", "message": "m", "traceback": "at 3", "pickle": packed(ValueError("m"))})
    assert made.look()
    error = made.job.exception()
    assert isinstance(error, ValueError)
    assert error.__notes__ == ["raised by act, rank 2 of 3"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"refused": "act was pickled by Python 3.9"}, "act was pickled by Python 3.9"),
        ({"returned": "nonsense"}, r"what act, rank 0 of 3 returned cannot be read here: .*To do: import what"),
        (
            {"raised": {"type": "ModuleNotFoundError", "message": "No module named 'x'", "step": "read"}},
            r"act, rank 0 of 3 could not be read in the job: ModuleNotFoundError: No module named 'x'",
        ),
    ],
)
def test_a_record_that_is_no_value_is_an_error(made: MadeJob, record: dict[str, Any], words: str) -> None:
    made.leave(0, **record)
    assert made.look()
    with pytest.raises(JobError, match=f"(?s){words}"):
        made.job.result()


def test_a_training_that_has_ended_within_a_function_settles_nothing(made: MadeJob) -> None:
    """Its rank 0 records that the run is finished; the function goes on, and returns later."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        made.run.attempt(1).write_submission(Submission("local", "0", f"{process.pid}.{start}"))
        made.run.attempt(1).write_result(Result(Ending.FINISHED, "all 20 steps are done", 20, by="rank 0"))
        for _ in range(3):
            made.entry.next_s = 0.0
            assert not made.look()
    finally:
        process.kill()
        process.wait()
    made.entry.next_s = 0.0
    assert not made.look()  # a file system may lag behind the scheduler
    made.entry.next_s = 0.0
    assert made.look()
    with pytest.raises(JobError, match=r"act returned nothing: job .* is finished: all 20 steps are done"):
        made.job.result()


def test_a_run_that_is_gone_is_an_error(made: MadeJob) -> None:
    import shutil

    shutil.rmtree(made.run.path)
    assert made.look()
    with pytest.raises(JobError, match="is gone, and what act returned with it"):
        made.job.result()
    assert made.job.state == "unknown"


def test_a_host_that_does_not_answer_settles_nothing(made: MadeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardway.launch.schedulers.base import SchedulerSilent

    made.run.attempt(1).write_result(Result(Ending.FINISHED, "", by="rank 0"))

    def silent(*words: Any) -> Any:
        raise SchedulerSilent("squeue did not answer")

    monkeypatch.setattr(ThisMachine, "parse_records", silent)
    for _ in range(3):
        made.entry.next_s = 0.0
        assert not made.look()


def test_why_there_is_no_value(made: MadeJob) -> None:
    made.run.attempt(1).write_result(Result(Ending.DEADLINE, "killed when the wall-time was over", job="1.1"))
    (status,) = read_standing(LocalHost(), read_ledger(LocalHost(), made.run.path))
    assert str(explain_end(made.job, status)) == (
        "act returned nothing: job 1.1 is deadline: killed when the wall-time was over.\n"
        f"  To do: `shardway logs {made.run.path}` has what it printed."
    )
    assert JobPhase.ENDED  # what a scheduler would add is in the tests of job_status


def test_a_module_by_its_name_is_found_beside_the_submitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_helper.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_helper

    call = pack_call(own_helper.double, [4], {})
    assert str(tmp_path) in call.paths
    assert not any("site-packages" in path for path in call.paths)
    monkeypatch.chdir(tmp_path)
    assert shardway.submit(own_helper.double, 4, keys=QUIET, name="helped").result(WAIT_S) == 8
    del sys.modules["own_helper"]
