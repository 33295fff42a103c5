"""How attempts begin, end and follow each other, by the shell that does it, with fake commands of Slurm and PBS."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from job_cases import OWN, Cluster, Ran, chained, make_job, wait_until

from shardway.launch import job_script
from shardway.launch.job import Again, Job
from shardway.launch.job_script import render_job_script
from shardway.launch.schedulers.local import ThisMachine
from shardway.launch.script import read_block, read_blocks
from shardway.rundir.attempts import (
    Attempt,
    AttemptStart,
    Ending,
    Result,
    Submission,
    parse_result,
    parse_started,
    parse_submission,
)
from shardway.rundir.directory import RunDir
from shardway.rundir.events import EventWriter
from speed import picked_pairs


@dataclass
class Chain:
    """A chain of attempts among fakes; jobs start when a test says so, with the ids that sbatch gave them."""

    cluster: Cluster
    job: Job

    def attempt(self, number: int) -> Attempt:
        """The folder of an attempt."""
        return replace(self.job, attempt=number).folder

    def run(self, number: int = 1, program: str = "", job_id: str = "") -> Ran:
        """Run an attempt to its end with ranks that do this."""
        self.cluster.write("program", program)
        return self.cluster.run(replace(self.job, attempt=number), job_id or str(100 + number))

    def says(self, number: int, state: str, failure: str = "", step: int = 0) -> str:
        """What a rank of Shardway's own does to say how an attempt ended."""
        result = Result(Ending(state), step=step, failure=failure, by="rank 0")
        text = json.dumps({"format": 1, **result.__dict__}, indent=1)
        (self.cluster.path / f"said{number}").write_text(text)
        return f'cp "$FAKES/said{number}" "$SHARDWAY_ATTEMPT_DIR/result.json"'

    def began(self, number: int) -> None:
        """An attempt was begun by a job, and nothing more is known of it; the next one is queued."""
        scheduler, job = self.job.scheduler, replace(self.job, attempt=number)
        for link, id_, after in ((job, 100 + number, 99 + number), (job.successor(), 101 + number, 100 + number)):
            self.cluster.prepare(link)
            link.folder.write_submission(Submission(scheduler, link.token, str(id_), "", str(after), submitted=1.0))
        self.cluster.write("submitted", "x\n" * (number + 1))
        job.folder.write_started(AttemptStart(str(100 + number), nodes="localhost localhost2", started=time.time()))

    def ended(self, number: int, state: str, failure: str = "", step: int = 0) -> None:
        """An attempt has ended so, and a rank of Shardway's own said it; the next one is queued."""
        self.began(number)
        self.attempt(number).write_result(Result(Ending(state), step=step, failure=failure, by="rank 0"))

    def call(self, number: int, calls: str) -> str:
        """What these calls of functions of an attempt's script say, without its job."""
        job, name = replace(self.job, attempt=number), self.job.scheduler
        blocks = [block.text for block in (read_blocks("lib") | read_blocks(name)).values()]
        around = {
            "run": str(job.run),
            "here": str(job.folder.path),
            "attempt": f"{number:04}",
            "after": f"{number - 1:04}",
            "job": str(100 + number),
            "counts_steps": "yes" if job.program.meets_by_itself else "no",
            **self.cluster.variables(str(100 + number)),
        }
        words = ["bash", "-c", "\n".join([*blocks, calls])]
        return subprocess.run(words, env=around, check=True, capture_output=True, text=True).stdout

    def goes_on(self, number: int) -> tuple[bool, str]:
        """Whether an attempt finds work to do after those before it, and what it says."""
        said = self.call(number, "check_chain; echo goes on")
        goes_on = said.endswith("goes on\n")
        result = self.attempt(number).read_result()
        assert (result is None) == goes_on
        assert result is None or result.state is Ending.NOT_NEEDED
        return goes_on, said

    @property
    def cancelled(self) -> list[str]:
        """Jobs that were taken out of the queue."""
        return [words[1] for name in ("scancel", "qdel") for words in self.cluster.list_calls(name)]

    @property
    def submitted(self) -> int:
        """Jobs that were submitted from jobs."""
        return sum(len(self.cluster.list_calls(name)) for name in ("sbatch", "qsub"))


def begin_chain(path: Path, scheduler: str = "slurm", most: int = 5, own: bool = True) -> Chain:
    cluster = Cluster.make(path / "cluster")
    run = cluster.path / "run"
    job = make_job(scheduler, run=run, attempt=1)
    job = replace(job, around=replace(job.around, workdir=run, venv=""), warn_s=0.0)
    job = chained(replace(job, program=replace(OWN, meets_by_itself=own)), most=most)
    cluster.prepare(job)
    cluster.write("submitted", "x\n")  # the first attempt, as job 101
    return Chain(cluster, job)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """A chain of five attempts at most under Slurm, of a program that says how it ended."""
    return begin_chain(tmp_path)


# --- one attempt


def test_an_attempt_that_finishes_needs_no_successor(chain: Chain) -> None:
    ran = chain.run(1, chain.says(1, "finished", step=9))
    assert (ran.code, ran.state) == (0, "finished")
    assert ran.result is not None
    assert ran.result.by == "rank 0"
    assert chain.cancelled == ["102"]  # what sbatch called the successor
    assert (second := chain.attempt(2).read_result()) is not None
    assert (second.state, second.job) == (Ending.NOT_NEEDED, "102")
    started = chain.attempt(1).read_started()
    assert started is not None
    assert (started.job, started.nodes) == ("101", "localhost localhost2")
    assert started.deadline - started.started == 2 * 3600


def test_ranks_that_only_end_well_have_finished(chain: Chain) -> None:
    """And the end of the wall-time is Slurm's."""
    chain.cluster.write("end", "2031-02-03T04:05:06\n")
    ran = chain.run(1, "exit 0")
    assert ran.result is not None
    assert (ran.code, ran.state, ran.result.by, ran.result.exit_code) == (0, "finished", "job script", 0)
    started = chain.attempt(1).read_started()
    assert started is not None
    assert started.deadline == time.mktime((2031, 2, 3, 4, 5, 6, 0, 0, -1))


def test_a_job_without_nodes_has_not_finished(tmp_path: Path) -> None:
    """Ranks on no node fail nowhere; PBS_NODEFILE may be out of sight in a site's container."""
    chain = begin_chain(tmp_path, "pbs")
    chain.cluster.write("nodes", "")
    ran = chain.run(1, "exit 0")
    assert ran.result is not None
    assert (ran.code, ran.state, chain.cluster.list_ranks()) == (1, "crashed", [])
    assert ran.result.reason == "the nodes of this job are not known: pbs named none"
    assert chain.cancelled == []


@pytest.mark.parametrize("last", ["\n", ""])
def test_a_node_of_pbs_that_is_named_several_times_is_one(last: str, tmp_path: Path) -> None:
    chain = begin_chain(tmp_path, "pbs")
    chain.cluster.write("nodes", f"n10\nn1\nn10\nn1{last}")
    chain.run(1, "exit 0")
    assert (started := chain.attempt(1).read_started()) is not None
    assert started.nodes == "n10 n1"


def test_what_a_rank_wrote_stays(chain: Chain) -> None:
    ran = chain.run(1, chain.says(1, "crashed", failure="NaN", step=3) + "; exit 9")
    assert ran.result is not None
    assert (ran.code, ran.result.failure, ran.result.step, ran.result.by) == (9, "NaN", 3, "rank 0")


def test_no_folder_to_run_in_is_a_crash(chain: Chain) -> None:
    text = chain.attempt(1).job_script.read_text()
    chain.attempt(1).job_script.write_text(text.replace(f"cd {chain.job.run} ", "cd /gone "))
    ran = chain.run(1)
    assert (ran.code, ran.state, chain.cluster.list_ranks()) == (1, "crashed", [])
    assert "there is no folder to run in" in ran.said


# --- one attempt after another


def walk(chain: Chain, programs: list[str], most: int = 9) -> tuple[list[str], str]:
    """Run attempt after attempt with these programs; their states, and what the last job said."""
    states, said = [], ""
    for number, program in enumerate(programs, 1):
        if not chain.attempt(number).job_script.exists():
            break
        said = chain.run(number, program).said
        result = chain.attempt(number).read_result()
        states.append(str(result.state) if result else "")
    return states, said


def test_the_same_failure_twice_stops_the_chain(chain: Chain) -> None:
    crash = [chain.says(number, "crashed", "IndexError", 4) + "; exit 1" for number in (1, 2)]
    states, said = walk(chain, [*crash, "exit 0"])
    assert states == ["crashed", "crashed", "not_needed"]
    assert "attempts 0001 and 0002 ended alike (crashed at step 4)" in said
    assert len(chain.cluster.list_ranks()) == 4  # two nodes, two attempts
    assert not chain.attempt(4).path.exists()


@pytest.mark.parametrize(
    ("steps", "word"),
    [
        ("FAILED\nFAILED\nOUT_OF_MEMORY\n", "out_of_memory"),
        ("FAILED\nFAILED\nFAILED\n", "crashed"),
        ("", "crashed"),
    ],
)
def test_a_chain_that_stops_says_that_memory_was_short_where_slurm_knows(chain: Chain, steps: str, word: str) -> None:
    """The kernel killed a rank, the others lost contact, and the state of the job tells of neither."""
    for number in (1, 2):
        chain.ended(number, "crashed", "LostContact", 6)
    chain.cluster.write("jobs", "101 FAILED\n102 FAILED\n")
    chain.cluster.write("steps", steps)
    goes_on, said = chain.goes_on(3)
    assert f"attempts 0001 and 0002 ended alike ({word} at step 6)" in said
    assert not goes_on


@pytest.mark.parametrize(("step", "saved", "goes_on"), [(6, True, False), (7, False, False), (7, True, True)])
def test_memory_that_is_short_twice_is_one_end_whoever_told_of_it(
    chain: Chain, step: int, saved: bool, goes_on: bool
) -> None:
    """Once another rank was quick enough to say that it lost contact, once the script of the job was; at another step
    the same is expected to come, unless there is a new checkpoint."""
    chain.ended(1, "crashed", "LostContact", 6)
    chain.ended(2, "crashed", "exit code 1", step)
    if saved:
        (chain.job.run / "checkpoints" / "step-000000005").mkdir(parents=True)
    chain.cluster.write("jobs", "101 FAILED\n102 FAILED\n")
    chain.cluster.write("steps", "FAILED\nOUT_OF_MEMORY\n")
    assert chain.goes_on(3)[0] is goes_on


def test_the_step_of_an_end_is_that_of_the_last_event(tmp_path: Path) -> None:
    """The status is up to a second behind, so that two attempts that fail at one step would seem to differ."""
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    (run / "status.json").write_text('{\n "step": 3\n}\n')
    script = f"run={run}\n{read_block('lib', 'field').text}\n{read_block('lib', 'step_now').text}\nstep_now"

    def told() -> str:
        return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.strip()

    assert told() == "3"
    with EventWriter(run / "events" / "rank-00000.jsonl") as writer:
        writer.write("started", step=2)
        for step in (3, 4, 5):
            writer.write("step", step=step, loss=1.5)
        writer.write("spike", why='it says {"event": "x", "step": 9, "time"')
    assert (told(), RunDir(run).read_step()) == ("5", 5)
    (run / "checkpoints" / "step-0000000008").mkdir(parents=True)
    assert told() == "8"


@pytest.mark.parametrize(
    ("first", "second", "goes_on"),
    [
        (("crashed", "NaN", 4), ("crashed", "NaN", 5), True),
        (("crashed", "NaN", 4), ("crashed", "KeyError", 4), True),
        (("crashed", "NaN", 4), ("out_of_memory", "NaN", 4), True),
        (("out_of_memory", "OOM", 4), ("out_of_memory", "OOM", 4), False),
        (("deadline", "", 4), ("deadline", "", 8), True),
        (("deadline", "", 4), ("deadline", "", 4), False),
        (("preempted", "", 4), ("preempted", "", 4), True),
        (("node_failure", "", 4), ("node_failure", "", 4), True),
        (("finished", "", 4), None, False),
        (("stopped", "", 4), None, False),
    ],
)
def test_when_a_chain_goes_on(
    chain: Chain, first: tuple[str, str, int], second: tuple[str, str, int] | None, goes_on: bool
) -> None:
    """Each attempt has said how it ended."""
    ends = [end for end in (first, second) if end is not None]
    for number, end in enumerate(ends, 1):
        chain.ended(number, *end)
    assert chain.goes_on(len(ends) + 1)[0] is goes_on


def test_a_script_without_steps_may_reach_its_deadline_again(tmp_path: Path) -> None:
    """Nobody can say whether it moved; only --max-attempts bounds it."""
    chain = begin_chain(tmp_path, own=False)
    for number in (1, 2):
        chain.ended(number, "deadline")
    assert chain.run(3, chain.says(3, "deadline")).state == "deadline"
    assert chain.run(4, "exit 0").state == "finished"


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_successor_that_is_refused_leaves_nothing(scheduler: str, tmp_path: Path) -> None:
    chain = begin_chain(tmp_path, scheduler)
    chain.cluster.write("refuse", "Job violates accounting/QOS policy\n")
    ran = chain.run(1, "exit 3")
    assert (ran.code, ran.state, chain.attempt(2).path.exists()) == (3, "crashed", False)
    assert "Job violates accounting/QOS policy" in ran.said
    assert "`shardway resume` queues it" in ran.said


@pytest.mark.parametrize(("scheduler", "job_id"), [("slurm", "102"), ("pbs", "102.server")])
def test_a_crash_is_told_with_its_exit_code_and_the_successor_is_submitted(
    scheduler: str, job_id: str, tmp_path: Path
) -> None:
    chain = begin_chain(tmp_path, scheduler)
    ran = chain.run(1, "exit 7", job_id="55")
    assert ran.result is not None
    assert (ran.code, ran.state, ran.result.exit_code, ran.result.failure) == (7, "crashed", 7, "exit code 7")
    assert chain.cancelled == []  # the next attempt is for this case
    assert chain.submitted == 1
    (words,) = [*chain.cluster.list_calls("sbatch"), *chain.cluster.list_calls("qsub")]
    assert words[-1] == str(chain.attempt(2).job_script)
    assert "afterany:55" in " ".join(words)
    submission = chain.attempt(2).read_submission()
    assert submission is not None
    assert (submission.job, submission.after, submission.token) == (job_id, "55", chain.job.token)
    assert submission.scheduler == scheduler
    texts = {path.name: path.read_text() for path in chain.attempt(1).path.glob("*.json")}
    assert parse_started(texts["started.json"]) is not None
    assert parse_result(texts["result.json"]) is not None
    assert parse_submission(chain.attempt(2).submission_path.read_text()) is not None


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_successors_script_is_the_one_that_python_renders(scheduler: str, tmp_path: Path) -> None:
    """It differs in the four places that name the attempt, whatever stands in the arguments."""
    cluster = Cluster.make(tmp_path)
    words = (
        "a\nattempt=0001\nafter=0000\n#SBATCH x.0001.a1b2c3\n",
        f"{tmp_path}/run/attempts/0001/log/job.out",
        ".0001.a1b2c3",
    )
    job = make_job(scheduler, run=tmp_path / "run")
    job = chained(
        replace(job, program=replace(OWN, words=words), around=replace(job.around, workdir=tmp_path, venv=""))
    )
    cluster.prepare(job)
    cluster.write("program", "exit 3")
    cluster.run(job)
    made = job.successor().folder.job_script.read_text()
    assert made == render_job_script(job.successor())
    assert job.successor().folder.job_library.read_text() == job.folder.job_library.read_text()
    old = render_job_script(job).splitlines()
    changed = [(line, new) for line, new in zip(old, made.splitlines(), strict=True) if line != new]
    assert len(changed) == 4


# --- stops


def test_a_stop_while_queued_runs_nothing(chain: Chain) -> None:
    (chain.job.run / "stop").write_text("stopped by a person\n")
    ran = chain.run(1)
    assert (ran.code, ran.state, chain.cluster.list_ranks(), chain.submitted) == (0, "stopped", [], 0)
    assert "a stop was asked for" in ran.said


def test_what_a_person_has_resumed_meanwhile_is_let_be(chain: Chain) -> None:
    """A job takes a moment to end after its ranks; what follows it is its own chain, not the next one."""
    resumed = chain.attempt(3)
    resumed.path.mkdir(parents=True)
    resumed.write_submission(Submission("slurm", "run.0003.x", "103", submitted=1.0))
    ran = chain.run(1, 'echo stopped > "$SHARDWAY_STOP_FILE"; ' + chain.says(1, "stopped", step=2))
    assert (ran.state, chain.cancelled) == ("stopped", ["102"])
    assert resumed.read_result() is None


def test_a_stop_by_a_person_cancels_later_attempts(chain: Chain) -> None:
    ran = chain.run(1, 'echo stopped > "$SHARDWAY_STOP_FILE"; ' + chain.says(1, "stopped", step=2))
    assert (ran.code, ran.state, chain.cancelled) == (0, "stopped", ["102"])
    second = chain.attempt(2).read_result()
    assert second is not None
    assert second.state == Ending.NOT_NEEDED


def test_a_signal_that_only_its_stop_file_tells_of_is_no_persons_wish(chain: Chain) -> None:
    """Ranks were killed before they could say so themselves: the chain goes on, or the scheduler knows better."""
    ran = chain.run(1, 'echo "signal asked for a stop" > "$SHARDWAY_STOP_FILE"; exit 137')
    assert ran.state == "stopped"
    result = chain.attempt(1).read_result()
    assert result is not None
    assert (result.failure, result.exit_code) == ("signal", 137)
    assert chain.cancelled == []


def test_a_script_that_is_stopped_frees_the_stop_file(tmp_path: Path) -> None:
    """Nobody else takes it away, and it would stop the next attempt."""
    chain = begin_chain(tmp_path, own=False)
    ran = chain.run(1, 'echo stopped > "$SHARDWAY_STOP_FILE"; exit 0')
    assert (ran.state, (chain.job.run / "stop").exists()) == ("stopped", False)


def send(chain: Chain, number: int, program: str, what: signal.Signals) -> Ran:
    """Run an attempt and signal its script as soon as the ranks run."""
    chain.cluster.write("program", f'touch "$FAKES/running{number}"; {program}')
    job = replace(chain.job, attempt=number)
    process = chain.cluster.start(job, str(100 + number))
    wait_until(lambda: (chain.cluster.path / f"running{number}").exists())
    os.kill(process.pid, what)
    out, _ = process.communicate(timeout=180)
    return Ran(process.returncode, out, job.folder.read_result())


WAIT_FOR_STOP = 'while [ ! -e "$SHARDWAY_STOP_FILE" ]; do sleep 0.02; done; '


def test_after_sigterm_the_scheduler_says_what_it_meant(chain: Chain) -> None:
    obey = '[ "$SLURM_PROCID" = 0 ] || { rm "$SHARDWAY_STOP_FILE"; exit 1; }; '  # one rank after the other here
    ran = send(chain, 1, obey + WAIT_FOR_STOP + "exit 1", signal.SIGTERM)
    assert ran.state == "stopped"
    assert ran.result is not None
    assert ran.result.failure == "signal"
    assert (ran.code, chain.cancelled) == (0, [])  # the successor finds out
    chain.cluster.write("jobs", "101 PREEMPTED\n")
    before = len(chain.cluster.list_ranks())
    second = chain.run(2, "exit 0")
    assert len(chain.cluster.list_ranks()) > before, second.said
    assert second.state == "finished"


@pytest.mark.parametrize(("told", "goes_on"), [("PREEMPTED", True), ("NODE_FAIL", True), ("CANCELLED", False)])
def test_where_a_chain_goes_on_after_a_signal(chain: Chain, told: str, goes_on: bool) -> None:
    chain.ended(1, "stopped", "signal")
    chain.cluster.write("jobs", f"101 {told}\n")
    assert chain.goes_on(2)[0] is goes_on


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_scheduler_that_signals_every_process_ends_no_rank(tmp_path: Path, name: str) -> None:
    """PBS's qdel and qsig reach the script, what starts the ranks, and the ranks; these have yet to save."""
    chain = begin_chain(tmp_path, "pbs")
    saved = chain.says(1, "stopped", failure="signal", step=7)
    slowly = WAIT_FOR_STOP + "sleep 0.3; "
    chain.cluster.write("program", f'trap : TERM INT USR1 HUP; touch "$FAKES/running"; {slowly}{saved}; exit 0')
    process = chain.cluster.start(chain.job, "101")
    wait_until(lambda: (chain.cluster.path / "running").exists())
    os.killpg(process.pid, getattr(signal, name))
    process.wait(180)
    result = chain.attempt(1).read_result()
    out, _ = process.communicate(timeout=180)
    assert result is not None, out
    assert (result.state, result.step, result.by) == ("stopped", 7, "rank 0")
    assert process.returncode == 0


def test_ranks_that_outlive_what_started_them_have_the_last_word(tmp_path: Path) -> None:
    """PBS gives up a task that it signals, and pbs_tmrsh ends while the ranks save."""
    chain = begin_chain(tmp_path, "pbs")
    saved = chain.says(1, "stopped", failure="signal", step=7)
    ran = send(chain, 1, f"{WAIT_FOR_STOP}(sleep 0.5; {saved}) > /dev/null 2>&1 & exit 0", signal.SIGTERM)
    assert ran.result is not None
    assert (ran.state, ran.result.step, ran.result.by) == ("stopped", 7, "rank 0")


STAYS = 'exec > /dev/null 2>&1; echo $BASHPID > "$FAKES/stays"; exec sleep 60'
"""What is still there when all that waited for it has ended."""


def end_what_stays(chain: Chain) -> None:
    os.kill(int((chain.cluster.path / "stays").read_text()), signal.SIGKILL)


FIRST_LONG = '[ "$SLURM_PROCID" != 0 ] || sleep 1.5'
"""One rank comes after the other here."""


def without_ranks_after(seconds: float, chain: Chain, program: str) -> Ran:
    chain.job = replace(chain.job, again=Again(start_s=seconds / 2))
    chain.cluster.prepare(chain.job)
    return chain.run(1, program)


def test_a_job_whose_ranks_never_begin_ends_and_says_so(chain: Chain) -> None:
    ran = without_ranks_after(1.0, chain, STAYS)
    assert ran.result is not None
    assert (ran.state, ran.result.failure, ran.result.exit_code) == ("crashed", "no rank began", None)
    assert ran.result.reason.startswith("no rank has begun within 1 s: ")
    assert ran.code != 0
    end_what_stays(chain)


def test_ranks_that_have_begun_take_the_time_that_they_need(chain: Chain) -> None:
    chain.attempt(1).path.mkdir(parents=True, exist_ok=True)
    began = Attempt(chain.attempt(1).path)
    ran = without_ranks_after(1.0, chain, f'touch "{began.path}/began"; {FIRST_LONG}; exit 0')
    assert ran.state == "finished"
    (began.path / "began").unlink()
    began.note_began()
    assert (began.path / "began").exists(), "the same name in Python"


def test_nobody_waits_for_ranks_that_cannot_say_that_they_are_there(tmp_path: Path) -> None:
    chain = begin_chain(tmp_path, own=False)
    assert without_ranks_after(1.0, chain, f"{FIRST_LONG}; exit 0").state == "finished"
    assert "in_time" not in render_job_script(replace(chain.job, again=Again(start_s=math.inf)))


@pytest.mark.parametrize(("state", "waits"), [("crashed", False), ("stopped", False), ("finished", True)])
def test_mpirun_that_stays_when_its_ranks_have_left_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, waits: bool
) -> None:
    """A node that is gone never tells it so. What a script still does when the work is done is its own affair."""
    monkeypatch.setattr(job_script, "_SAVING_S", 0)
    chain = begin_chain(tmp_path)
    chain.job = replace(chain.job, launcher="mpirun")
    chain.cluster.prepare(chain.job)
    first = '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exit 0; exec > /dev/null 2>&1; '
    stays = "sleep 1" if waits else STAYS
    ran = chain.run(1, f'{first}{chain.says(1, state)}; touch "$FAKES/left"; {stays}')
    assert ran.state == state
    assert ran.code == (0 if waits or state == "stopped" else 137)
    if not waits:
        end_what_stays(chain)


def test_a_clock_outlives_the_signals_of_its_job_and_ends_with_it(tmp_path: Path) -> None:
    """Else what a signal has left hanging would hang for ever."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
    ignored = sum(1 << (getattr(signal, name) - 1) for name in names)
    script = f"""
    {read_block("lib", "in_time").text}
    clocks=()
    trap : TERM INT HUP USR1 USR2
    ring() {{ echo rung > "$1"; }}
    in_time 0.5 ring "{tmp_path}/first"
    in_time 300 ring "{tmp_path}/second"
    is_deaf() {{ (((16#$(sed -n 's/^SigIgn:.//p' "/proc/$1/status") & {ignored}) == {ignored})); }}
    for clock in "${{clocks[@]}}"; do
      until is_deaf "$clock"; do sleep 0.02; done
    done
    for name in TERM INT HUP USR1 USR2; do kill -$name 0; done
    for ((look = 0; look < 200; look++)); do [ ! -e "{tmp_path}/first" ] || exit 0; sleep 0.05; done
    exit 1
    """
    done = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    assert done.wait(30) == 0
    wait_until(lambda: not any(is_of(done.pid, int(each.name)) for each in Path("/proc").glob("[0-9]*")))


def is_of(session: int, process: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(process) == session
    return False


def test_a_reason_that_ends_with_a_quote_is_told(chain: Chain) -> None:
    """As of `data.path: "x" has no file that matches "*.py"`, of which nothing was told."""
    reason = 'no file "a\\b" that matches "*.py"'
    text = json.dumps({"format": 1, **Result(Ending("crashed"), reason=reason).__dict__}, indent=1)
    (chain.cluster.path / "said1").write_text(text)
    ran = chain.run(1, 'cp "$FAKES/said1" "$SHARDWAY_ATTEMPT_DIR/result.json"; exit 2')
    assert f"attempt 0001: crashed: {reason}\n" in ran.said


@pytest.mark.parametrize("said", ["/usr/bin/python3: No module named shardway", "No module named 'shardway.cli'"])
def test_a_python_without_shardway_is_named(chain: Chain, said: str) -> None:
    ran = chain.run(1, f'echo "{said}" > "$SHARDWAY_ATTEMPT_DIR/log/job.out"; exit 1')
    assert ran.result is not None
    assert ran.result.failure == "exit code 1"
    assert ran.result.reason == (
        "the program ended with exit code 1: its Python has no shardway (site.image, site.venv)"
    )


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        ((("2026-11-29_21:06:05", "7"),), 7),
        ((("2026-11-29_21:06:09", "-15"), ("2026-11-29_21:06:05", "3")), 3),  # of two nodes, the first that failed
        ((("2026-11-29_21:06:05", "-9"),), 137),
        ((), 1),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    chain: Chain, blocks: tuple[tuple[str, str], ...], code: int
) -> None:
    """torchrun ends with 1 whatever its ranks ended with, and prints this."""
    said = "0: Root Cause (first observed failure):\n0:   exitcode  : 5 (pid: 1)\n"  # printed by a rank
    for at, number in blocks:
        said += "Failures:\n[1]:\n  exitcode  : 1 (pid: 6)\nRoot Cause (first observed failure):\n[0]:\n"
        said += f"  time      : {at}\n"
        said += f"  host      : n1\n  rank      : 0 (local_rank: 0)\n  exitcode  : {number} (pid: 6382) (SIG)\n"
    (chain.cluster.path / "said").write_text(said)
    ran = chain.run(1, 'cp "$FAKES/said" "$SHARDWAY_ATTEMPT_DIR/log/job.out"; exit 1')
    assert ran.result is not None
    assert (ran.code, ran.result.exit_code, ran.result.failure) == (code, code, f"exit code {code}")
    assert ran.result.reason.startswith(f"the program ended with exit code {code}")


def test_the_warning_before_the_wall_time_is_a_deadline(tmp_path: Path) -> None:
    chain = begin_chain(tmp_path, own=False)
    ran = send(chain, 1, WAIT_FOR_STOP + "exit 0", signal.SIGUSR2)
    assert (ran.code, ran.state) == (0, "deadline")
    assert not (chain.job.run / "stop").exists()
    assert chain.run(2, "exit 0").state == "finished"


@pytest.mark.parametrize(
    ("told", "scheduler", "expected"), [("TIMEOUT", "slurm", "deadline"), ("271", "pbs", "stopped")]
)
def test_an_attempt_that_was_killed_is_settled_by_its_successor(
    told: str, scheduler: str, expected: str, tmp_path: Path
) -> None:
    chain = begin_chain(tmp_path, scheduler)
    chain.cluster.write("program", 'touch "$FAKES/running"; sleep 300')
    process = chain.cluster.start(chain.job, "101")
    wait_until(lambda: (chain.cluster.path / "running").exists())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=180)
    chain.cluster.write("jobs", f"101 {told}\n")
    chain.run(2, "exit 0")
    first = chain.attempt(1).read_result()
    assert first is not None
    assert (first.state, first.job, first.by) == (expected, "101", "job script")


@pytest.mark.parametrize(
    ("scheduler", "ends"),
    [
        (
            "slurm",
            {
                "OUT_OF_MEMORY": "out_of_memory",
                "TIMEOUT": "deadline",
                "NODE_FAIL": "node_failure",
                "PREEMPTED": "preempted",
                "COMPLETED": "unknown",
            },
        ),
        ("pbs", {"271": "stopped", "-20": "node_failure", "-29": "deadline", "-27": "out_of_memory", "137": "unknown"}),
    ],
    ids=["slurm", "pbs"],
)
def test_how_attempts_ended_that_could_not_say_so_is_what_their_scheduler_says(
    scheduler: str, ends: dict[str, str], tmp_path: Path
) -> None:
    chain = begin_chain(tmp_path, scheduler)
    for number in range(1, len(ends) + 1):
        chain.began(number)
    chain.cluster.write("jobs", "".join(f"{100 + number} {told}\n" for number, told in enumerate(ends, 1)))
    chain.call(len(ends) + 1, "".join(f"settle {number:04}\n" for number in range(1, len(ends) + 1)))
    results = [chain.attempt(number).read_result() for number in range(1, len(ends) + 1)]
    found = [(str(each.state), each.job, each.by) for each in results if each is not None]
    assert found == [(state, str(100 + number), "job script") for number, state in enumerate(ends.values(), 1)]


def test_an_exit_code_is_not_lost_to_a_signal_that_is_answered_meanwhile() -> None:
    """The process ends while the script is still busy with the signal that has ended its wait.

    Some time after it: bash 5.2 itself loses the code of a process that ends in the microseconds of the signal.
    """
    script = f"""
    {read_block("lib", "wait_for").text}
    trap 'while kill -0 "$process" 2>/dev/null; do sleep 0.01; done' TERM
    (sleep 0.2; kill -TERM $$; sleep 0.3; exit 7) & process=$!
    wait_for "$process"
    exit "$status"
    """
    assert subprocess.run(["bash", "-c", script], check=False, timeout=60).returncode == 7


# --- two jobs of one attempt


def test_a_second_job_of_an_attempt_does_nothing(chain: Chain) -> None:
    chain.run(1, "exit 3", job_id="101")
    before = chain.attempt(1).result_path.read_text()
    ran = chain.run(1, "exit 0", job_id="102")
    assert ran.code == 0
    assert "attempt 0001 belongs to job 101" in ran.said
    assert chain.attempt(1).result_path.read_text() == before
    assert len(chain.cluster.list_ranks()) == 2


def test_a_requeued_job_goes_on(chain: Chain) -> None:
    """Its id is the same; the successor that it queued the first time is there."""
    chain.cluster.write("program", 'touch "$FAKES/running"; sleep 300')
    process = chain.cluster.start(chain.job, "101")
    wait_until(lambda: (chain.cluster.path / "running").exists())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=180)
    ran = chain.run(1, "exit 0", job_id="101")
    assert (ran.code, ran.state, chain.submitted) == (0, "finished", 1)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "local"])
def test_no_name_is_a_command_of_the_script(scheduler: str) -> None:
    odd = "x\nexit 7 #'\"\nexit 7"
    job = replace(make_job(scheduler), run=Path("/scratch") / odd, site=odd)
    script = render_job_script(replace(job, around=replace(job.around, workdir=job.run, venv=f"/{odd}")))
    assert not [line for line in script.split("\n") if line.startswith("exit 7")]
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=True).stderr == ""


ODD = ("it's 100% $HOME %j", 'new\nline\ttab "q" \\', "co:lon,^array^", "-caf\udce9 ;&|*?[]~#`id`")
"""Names of folders: of blanks, quotes, variables, patterns of log files, and of bytes that are no UTF-8."""


@pytest.mark.parametrize("case", picked_pairs(ODD, ["slurm", "pbs"]))
def test_a_run_may_have_any_name(case: tuple[str, str], tmp_path: Path) -> None:
    name, scheduler = case
    chain, run = begin_chain(tmp_path, scheduler, own=False), tmp_path / name / "run"
    job = replace(chain.job, run=run, around=replace(chain.job.around, workdir=run))
    chain = Chain(chain.cluster, job)
    chain.cluster.prepare(job)
    ran = chain.run(1, 'pwd > "$SHARDWAY_ATTEMPT_DIR/where"')
    assert (ran.code, ran.state) == (0, "finished")
    where = os.fsdecode((chain.attempt(1).path / "where").read_bytes())
    assert where == f"{run}\n"
    assert (second := chain.attempt(2).read_result()) is not None
    assert second.state is Ending.NOT_NEEDED


# --- what is written


def write_by_shell(folder: Path, state: str, reason: str, failure: str) -> Result | None:
    blocks = [block.text for block in read_blocks("lib").values()]
    script = "\n".join([*blocks, 'write_result 0001 "$1" "$2" 1 "$3" "$4"'])
    (folder / "attempts/0001").mkdir(parents=True, exist_ok=True)
    (folder / "attempts/0001/result.json").unlink(missing_ok=True)
    words = ["bash", "-c", script, "x", state, reason, failure, "7"]
    subprocess.run(words, env={"run": str(folder), "PATH": os.environ["PATH"]}, check=True)
    return parse_result((folder / "attempts/0001/result.json").read_text())


TEXT = st.text(st.characters(blacklist_characters="\x00", blacklist_categories=("Cs",)), max_size=30)


@settings(max_examples=5)
@example(reason='say "it\'s"\nC:\\new\ttab\x07 é', failure="'; $(x) `y`, }")
@given(reason=TEXT, failure=TEXT)
def test_a_result_of_the_shell_is_whole(tmp_path_factory: pytest.TempPathFactory, reason: str, failure: str) -> None:
    result = write_by_shell(tmp_path_factory.mktemp("run"), "crashed", reason, failure)
    assert result is not None

    def plain(text: str) -> str:
        return "".join(" " if c in "\n\t\r" else c for c in text if c >= " " or c in "\n\t\r")

    assert (result.state, result.reason, result.failure) == (Ending.CRASHED, plain(reason), plain(failure))
    assert (result.exit_code, result.job, result.by) == (1, "7", "job script")


FULL = "trap '' XFSZ; ulimit -f 0"
"""No file can grow, as on a full file system; the kernel says so to the write."""


@pytest.mark.parametrize(("status", "code", "state"), [(0, 0, "finished"), (7, 7, "crashed")])
def test_on_a_full_file_system_a_job_ends_as_its_program_did(
    tmp_path: Path, status: int, code: int, state: str
) -> None:
    """A result that is empty would count as one, and nobody could write another."""
    attempt = RunDir(tmp_path).attempt(1)
    attempt.make()
    blocks = [block.text for block in read_blocks("lib").values()]
    script = "\n".join([*blocks, FULL, "finish"])
    around = {"run": str(tmp_path), "here": str(attempt.path), "attempt": "0001", "status": str(status), "job": "7"}
    done = subprocess.run(
        ["bash", "-c", script],
        env={**around, "counts_steps": "no", "runtime": "none", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    said = f"shardway: attempt 0001 is {state}: the program ended with exit code {status}; this could not be written to"
    assert f"{said} {attempt.path}\n" in done.stdout
    assert [path.name for path in attempt.path.iterdir()] == ["log"]


def read_field(file: Path, key: str) -> str:
    script = f'{read_block("lib", "field").text}\nfield "$1" "$2"'
    done = subprocess.run(["bash", "-c", script, "x", str(file), key], capture_output=True, text=True, check=True)
    return done.stdout.removesuffix("\n")


def test_shell_reads_what_python_writes(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "attempts/0001")
    attempt.make()
    attempt.write_result(Result(Ending.CRASHED, reason="a, b", step=12, failure="KeyError: 'x'", exit_code=1, job="7"))
    found = {key: read_field(attempt.result_path, key) for key in ("state", "step", "failure", "reason", "job")}
    assert found == {"state": "crashed", "step": "12", "failure": "KeyError: 'x'", "reason": "a, b", "job": "7"}


# --- this machine as the scheduler, for real


@dataclass
class Local:
    """Jobs of this machine, with the commands that the client would give it."""

    chain: Chain

    def submit(self) -> str:
        """Start the first attempt's script as `submit` does; its job id."""
        words = ThisMachine().submit(str(self.chain.attempt(1).job_script), str(self.chain.attempt(1).job_log), "")
        env = self.chain.cluster.variables("")
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=60)
        return ThisMachine().read_job_id(done.stdout)

    def settle(self, number: int) -> Result:
        """How an attempt ended, waited for."""
        wait_until(lambda: self.chain.attempt(number).read_result() is not None)
        result = self.chain.attempt(number).read_result()
        assert result is not None
        return result


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    """Real processes; none is left behind."""
    chain = begin_chain(tmp_path, "local")
    yield Local(chain)
    wait_until(lambda: not list_processes(str(tmp_path)))


def list_processes(mark: str) -> list[str]:
    """Command lines of processes that name this folder in their words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if mark in words:
            found.append(words)
    return found


def test_a_chain_of_this_machine(local: Local) -> None:
    """The first attempt reaches its deadline, the second finishes, the third is not needed."""
    first, second = (local.chain.says(1, "deadline", step=1), local.chain.says(2, "finished", step=2))
    local.chain.cluster.write("program", f"case $SHARDWAY_ATTEMPT_DIR in *1) {first} ;; *) {second} ;; esac")
    job = local.submit()
    assert [local.settle(number).state for number in (1, 2, 3)] == ["deadline", "finished", "not_needed"]
    started = local.chain.attempt(1).read_started()
    assert started is not None
    assert started.job == job


ENDED_BETWEEN = """
members() {{ printf '%s\\n' "$gone" "$alive"; }}
sleep 60 & alive=$!
true & gone=$!
wait $gone
{call} 7.7 || echo failed
wait $alive
echo $?
"""


@pytest.mark.parametrize(("call", "signal_number"), [("cancel_job", 15), ("kill_job", 9), ("warn_jobs", 10)])
def test_a_process_that_has_just_ended_is_no_failure(call: str, signal_number: int) -> None:
    """A job that was cancelled would not be said to be out of the queue, and would be waited for."""
    blocks = read_blocks("local") | read_blocks("local_jobs")
    script = "\n".join([*(blocks[name].text for name in ("signal_job", call)), ENDED_BETWEEN.format(call=call)])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=50)
    assert done.stdout == f"{128 + signal_number}\n"


SLEEPS_UNTIL_RANKS_RUN = """#!/bin/bash
if [ "$1" = 1 ]; then # the second of the wall-time
  until [ -e "$FAKES/running" ]; do /bin/sleep 0.05; done
fi
exec /bin/sleep "$@"
"""


def test_the_wall_time_of_this_machine_ends(tmp_path: Path) -> None:
    """It ends when the ranks run: a job that is ended before it has begun says nothing."""
    chain = begin_chain(tmp_path, "local", most=1)
    chain.job = replace(chain.job, terms=replace(chain.job.terms, walltime_s=1.0))
    chain.attempt(1).job_script.write_text(render_job_script(chain.job))
    local = Local(chain)
    chain.cluster.write("bin/sleep", SLEEPS_UNTIL_RANKS_RUN)
    (chain.cluster.path / "bin/sleep").chmod(0o755)
    chain.cluster.write("program", 'touch "$FAKES/running"; ' + WAIT_FOR_STOP + "exit 5")
    local.submit()
    result = local.settle(1)
    assert (result.state, result.failure) == ("deadline", "")
    wait_until(lambda: not list_processes(str(tmp_path)))


@pytest.mark.parametrize(
    ("says", "most", "told"),
    [
        (("stopped",), 5, "to go on: shardway resume "),
        (("crashed", "IndexError"), 5, "attempt 0002 is queued to go on"),
        (("crashed", "IndexError"), 1, "to go on: shardway resume "),
        (("deadline",), 1, "to go on: shardway resume "),
        (("finished",), 5, ""),
    ],
)
def test_a_job_ends_with_what_goes_on(says: tuple[str, ...], most: int, told: str, tmp_path: Path) -> None:
    chain = begin_chain(tmp_path, most=most)
    stops = 'echo stopped > "$SHARDWAY_STOP_FILE"; ' if says == ("stopped",) else ""
    ran = chain.run(1, f"{stops}{chain.says(1, *says, step=2)}; exit {int(says[0] == 'crashed')}")
    assert ran.state == says[0]
    last = ran.said.strip().splitlines()[-1]
    assert told in last if told else "go on" not in last
    assert "resume" not in told or last.endswith(f"resume {chain.job.run}")
    assert ("attempt 0001 is the last that was asked for" in ran.said) == (chain.submitted == 0) == (most == 1)
