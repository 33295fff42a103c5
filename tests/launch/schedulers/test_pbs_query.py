from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.launch.hosts.base import Done
from shardway.launch.schedulers.base import JobPhase, JobRecord, SchedulerEnding, SchedulerSilent
from shardway.launch.schedulers.pbs import Pbs
from transcripts import TRANSCRIPTS, find, read_json

JSON_FILES = sorted(path.stem for path in (TRANSCRIPTS / "pbs").glob("*.json"))


def answer_of(name: str) -> Done:
    return Done(("qstat",), 0, read_json(f"pbs/{name}.json"), "")


def first_job(name: str) -> str:
    return next(iter(json.loads(read_json(f"pbs/{name}.json"))["Jobs"]))


def record_of(name: str, job: str = "") -> JobRecord:
    job = job or first_job(name)
    return Pbs().parse_records([job], [answer_of(name)])[job]


E = SchedulerEnding


@pytest.mark.parametrize(
    ("name", "ending", "code", "signal"),
    [
        ("state-F-exit0", E.COMPLETED, 0, 0),
        ("state-F-exit1", E.FAILED, 1, 0),
        ("state-F-exit137", E.FAILED, 137, 0),
        ("state-F-exit200", E.FAILED, 200, 0),
        ("state-F-segv", E.FAILED, 139, 0),
        ("state-F-kill9-script", E.FAILED, 137, 0),
        ("state-F-kill9-exec", E.FAILED, None, 9),
        ("state-F-limit-cput", E.FAILED, None, 9),
        ("state-F-bad-shell", E.FAILED, 254, 0),
        ("state-F-no-such-program", E.FAILED, 254, 0),
        ("state-F-limit-mem", E.OUT_OF_MEMORY, None, 0),
        ("state-F-limit-mem-script", E.OUT_OF_MEMORY, None, 0),
        ("state-F-walltime-exec", E.TIMEOUT, None, 0),
        ("state-F-walltime-script", E.TIMEOUT, None, 0),
        ("state-F-qdel-running", E.CANCELLED, None, 15),
        ("state-F-qdel-queued", E.CANCELLED, None, 0),
        ("qsig.sigexec-after-qdel", E.CANCELLED, 0, 0),
        ("qsig.sigscript", E.FAILED, None, 10),
        ("qsub-depend.ran", E.COMPLETED, 0, 0),
        ("qsub-depend.never", E.NEVER_STARTED, None, 0),
        ("qsub-depend.ghost", E.NEVER_STARTED, None, 0),
        ("prologue-fails", E.NEVER_STARTED, None, 0),
        ("prologue-fails-2.after-release", E.COMPLETED, 0, 0),
        ("node-crash-json.not-rerunnable", E.NODE_FAILURE, None, 0),
        ("node-crash-json.second-node-lost-finished", E.UNCLEAR, 0, 0),
        ("server-down.job-after", E.COMPLETED, 0, 0),
        ("state-F-program", E.COMPLETED, 0, 0),
    ],
)
def test_an_ending(name: str, ending: SchedulerEnding, code: int | None, signal: int) -> None:
    record = record_of(name)
    assert (record.phase, record.ending) == (JobPhase.ENDED, ending)
    assert (record.exit_code, record.signal) == (code, signal)
    assert (record.started is None) == (record.nodes == "")
    assert record.ended is not None


@pytest.mark.parametrize(
    ("name", "phase", "reason"),
    [
        ("state-R", JobPhase.RUNNING, "Job run at Sat Nov 21 at 06:11 on (p2:ncpus=1)"),
        ("state-R-program", JobPhase.RUNNING, "Job run at Thu Nov 26 at 07:29 on (p1:ncpus=1)"),
        ("state-S", JobPhase.RUNNING, "Job run at Thu Nov 26 at 07:29 on (p1:ncpus=1)"),
        ("state-E", JobPhase.RUNNING, "Job run at Sat Nov 21 at 06:13 on (p1:ncpus=1)"),
        ("state-H-user-hold", JobPhase.QUEUED, "Hold_Types = u"),
        ("qsub-depend.held", JobPhase.QUEUED, "Hold_Types = s, depend = afterany:26.pbshead@pbshead"),
        ("qhold-qrls.system-hold", JobPhase.QUEUED, "Job held by root on Sat Nov 21 06:16:26 2026"),
        ("state-Q-insufficient.two-nodes", JobPhase.QUEUED, "Not Running: Not enough free nodes available"),
        (
            "node-crash-json.second-node-lost",
            JobPhase.RUNNING,
            "Job run at Sat Nov 21 at 06:36 on (p1:ncpus=1)+(p3:ncpus=1)",
        ),
        ("json-attributes.comment-newline", JobPhase.QUEUED, "two lines and tab"),
    ],
)
def test_a_job_that_has_not_ended(name: str, phase: JobPhase, reason: str) -> None:
    record = record_of(name)
    assert (record.phase, record.reason, record.ending) == (phase, reason, None)
    assert (record.exit_code, record.ended) == (None, None)


def test_the_state_counts_before_an_exit_status_of_an_earlier_run() -> None:
    record = record_of("node-crash-json.rerunnable")
    assert (record.phase, record.ending, record.restarts, record.started) == (JobPhase.QUEUED, None, 1, None)
    assert record_of("prologue-fails-2").phase is JobPhase.QUEUED
    assert record_of("requeue-qrerun.after").restarts == 1


def test_lost_output_is_told_though_the_job_completed() -> None:
    record = record_of("state-F-bad-output-path")
    assert record.ending is SchedulerEnding.COMPLETED
    assert "deliver" in record.note
    assert record_of("state-F-exit0").note == ""


def test_times_and_names() -> None:
    record = record_of("state-R")
    started = datetime.datetime.fromtimestamp(record.started or 0)
    assert (started.hour, started.minute, started.second) == (6, 11, 15)
    assert (record.name, record.nodes, record.restarts) == ("long", "p2/1", 0)
    assert record_of("json-attributes.name-zero").name == "007"


# --- arrays


@pytest.mark.parametrize(
    ("name", "ending", "code"),
    [
        ("qsub-array.finished-all", E.FAILED, 7),  # the parent's Exit_status is 0
        ("array-exit-status.all-exit-3-with-subjobs", E.FAILED, 3),  # the parent's is 1
        ("array-exit-status.all-deleted", E.CANCELLED, None),
    ],
)
def test_an_array_ended_as_its_first_task_that_did_not_complete(
    name: str, ending: SchedulerEnding, code: int | None
) -> None:
    record = record_of(name)
    assert (record.phase, record.ending, record.exit_code) == (JobPhase.ENDED, ending, code)
    assert record.job.endswith("[].pbshead")


def test_an_array_runs_while_a_task_runs() -> None:
    assert record_of("qsub-array.running-all").phase is JobPhase.RUNNING
    assert record_of("array-exit-status.one-deleted").phase is JobPhase.RUNNING
    assert record_of("qsub-array.finished-subjob-exit7").exit_code == 7


# --- answers that are none, or say that there is no such job


def test_one_job_is_asked_for_in_a_call_and_an_array_with_its_tasks() -> None:
    asked = tuple(words[3:] for words in Pbs().query(["1.pbshead", "2[].pbshead"]))
    assert asked == (
        ("qstat", "-f", "-F", "json", "1.pbshead"),
        ("qstat", "-t", "-f", "-F", "json", "2[].pbshead"),
    )


@pytest.mark.parametrize("command", ["qstat -f -F json 99999", "qstat -f -F json foo"])
def test_an_unknown_job_is_an_answer(command: str) -> None:
    done = find("pbs/qstat-json-corner", command).done
    assert Pbs().parse_records(["99999"], [done])["99999"] == JobRecord("99999", JobPhase.UNKNOWN)


def test_a_job_that_a_routing_queue_dropped_is_unknown() -> None:
    done = find("pbs/qsub-routed-over-limit", "qstat -x -f").done
    assert done.code == 153
    assert Pbs().parse_records(["79.pbshead"], [done])["79.pbshead"].phase is JobPhase.UNKNOWN


@pytest.mark.parametrize(
    "done",
    [
        find("pbs/server-down", "qstat -f -F json").done,
        find("pbs/no-client-config", "qstat").done,
        Done(("qstat",), 0, "", "", timed_out=True),
        replace(answer_of("state-F-exit0"), timed_out=True),
        Done(("qstat",), 127, "", "qstat: command not found"),
        Done(("qstat",), 0, "", ""),
        Done(("qstat",), 159, "", "qstat: Unauthorized Request \n"),
    ],
)
def test_no_answer_is_not_taken_for_no_job(done: Done) -> None:
    with pytest.raises(SchedulerSilent, match="qstat"):
        Pbs().parse_records(["194.pbshead"], [done])
    running = answer_of("state-R")
    assert list(Pbs().parse_records(["194.pbshead", "92.pbshead"], [done, running])) == ["92.pbshead"]


def test_the_json_of_a_server_that_is_down_is_valid_and_empty() -> None:
    done = find("pbs/server-down", "qstat -f -F json").done
    assert "Jobs" not in json.loads(done.out)
    assert done.code == 255


def test_a_job_that_may_not_be_seen_is_unknown_with_a_note() -> None:
    record = Pbs().parse_records(["5.pbshead"], [answer_of("qstat-empty")])["5.pbshead"]
    assert record.phase is JobPhase.UNKNOWN
    assert "another user" in record.note


def test_jobs_are_found_by_name() -> None:
    ((*_, command, option, name),) = Pbs().find("my-run.0001.k3f9")
    assert (command, option, name) == ("qselect", "-N", "my-run.0001.k3f9")
    assert Pbs().parse_found([find("pbs/qselect", "qselect -N long").done]) == ("134.pbshead",)
    assert Pbs().parse_found([find("pbs/qselect", "qselect -N nosuch").done]) == ()
    assert Pbs().parse_found([Done((), 0, "12[].s\n9.s\n", "")]) == ("9.s", "12[].s")
    with pytest.raises(SchedulerSilent, match="15010"):
        Pbs().parse_found([find("pbs/server-down", "qselect").done])


def ask_fake(words: tuple[str, ...], folder: Path, text: str) -> tuple[Done, list[str]]:
    """Run words among a fake qstat and qselect of this text; also what they were called with."""
    for name in ("qstat", "qselect"):
        (folder / name).write_text(f'#!/bin/bash\necho "$*" >> {folder}/calls\n{text}\n')
        (folder / name).chmod(0o755)
    done = subprocess.run(words, env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    return Done(words, done.returncode, done.stdout, done.stderr), (folder / "calls").read_text().splitlines()


NO_HISTORY = 'if [ "$1" = -x ]; then echo "{"; echo "PBS is not configured to maintain job history" >&2; exit 36; fi\n'


def test_a_server_without_history_is_asked_for_what_it_knows(tmp_path: Path) -> None:
    (tmp_path / "answer").write_text(read_json("pbs/state-R.json"))
    job = first_job("state-R")
    (query,), (search,) = Pbs().query([job]), Pbs().find("a.0001.b")
    done, calls = ask_fake(query, tmp_path, f"{NO_HISTORY}cat {tmp_path}/answer")
    assert Pbs().parse_records([job], [done])[job].phase is JobPhase.RUNNING
    assert calls == [f"-x -f -F json {job}", f"-f -F json {job}"]
    done, _ = ask_fake(search, tmp_path, f"{NO_HISTORY}echo 7.pbshead")
    assert Pbs().parse_found([done]) == ("7.pbshead",)


@pytest.mark.parametrize("code", [0, 35, 153, 255])
def test_any_other_answer_is_the_answer(code: int, tmp_path: Path) -> None:
    """A server that was away for a moment would else seem to have no finished job of that name."""
    (search,) = Pbs().find("a.0001.b")
    done, calls = ask_fake(search, tmp_path, f"printf '7.pbshead\\n'; echo said >&2; exit {code}")
    assert (done.code, done.out, done.err, len(calls)) == (code, "7.pbshead\n", "said\n", 1)


def test_a_silence_names_the_command_that_was_asked() -> None:
    (words,) = Pbs().query(["1.s"])
    with pytest.raises(SchedulerSilent, match=r"^qstat did not answer in time"):
        Pbs().parse_records(["1.s"], [Done(words, 0, "", "", timed_out=True)])


# --- JSON that is none


def as_no_json(text: str) -> str:
    """The same answer with a value in it that no JSON reader takes, as older PBS prints it."""
    return text.replace('"Variable_List":\t{', '"Variable_List":\t{\n\t\t\t\t"job_state":\t"say "F"",', 1)


@pytest.mark.parametrize("name", JSON_FILES)
def test_every_recorded_answer_is_read_alike_from_json_and_from_its_lines(name: str) -> None:
    text = read_json(f"pbs/{name}.json")
    jobs = json.loads(text).get("Jobs", {})
    for job in jobs:
        broken = as_no_json(text)
        with pytest.raises(ValueError):
            json.loads(broken)
        whole, picked = (Pbs().parse_records([job], [Done(("qstat",), 0, out, "")])[job] for out in (text, broken))
        assert whole == picked
        assert whole.phase is not JobPhase.UNKNOWN


def test_an_answer_that_is_cut_off_keeps_what_it_said() -> None:
    text = read_json("pbs/state-F-limit-mem.json")
    cut = text[: text.index('"Submit_arguments"')]
    record = Pbs().parse_records(["1"], [Done(("qstat",), 0, cut, "")])["1"]
    assert record.ending is SchedulerEnding.OUT_OF_MEMORY


@settings(max_examples=20)
@given(st.text(max_size=200), st.text(max_size=60), st.integers(-1, 255))
def test_any_text_is_read_without_an_error(out: str, err: str, code: int) -> None:
    with contextlib.suppress(SchedulerSilent):
        assert set(Pbs().parse_records(["1.s"], [Done(("qstat",), code, out, err)])) == {"1.s"}


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("F") | st.just([1])
KEYS = (
    "job_state",
    "Exit_status",
    "substate",
    "run_count",
    "stime",
    "comment",
    "array",
    "Stageout_status",
    "exec_host",
)


@settings(max_examples=20)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_attributes_of_any_type_are_read_without_an_error(table: dict[str, object]) -> None:
    out = json.dumps({"pbs_version": "23", "Jobs": {"1.s": table}})
    record = Pbs().parse_records(["1.s"], [Done(("qstat",), 0, out, "")])["1.s"]
    assert (record.ending is not None) == (record.phase is JobPhase.ENDED)
