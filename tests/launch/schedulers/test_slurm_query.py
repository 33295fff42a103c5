from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.launch.hosts.base import Done
from shardway.launch.schedulers.base import JobPhase, JobRecord, SchedulerEnding, SchedulerSilent
from shardway.launch.schedulers.slurm import Slurm
from transcripts import find, read_transcript

SQUEUE = ("%i", "%A", "%T", "%S", "%e", "%N", "%r", "%j")
SQUEUE_TITLES = {"%i": "JOBID", "%T": "STATE", "%r": "REASON", "%j": "NAME", "%N": "NODELIST(REASON)"}
SACCT = ("JobID", "JobIDRaw", "State", "ExitCode", "Submit", "Start", "End", "NodeList", "Reason", "JobName")
NOTHING = Done((), 0, "", "")
DOWN = find("slurm/controller-down", "squeue -j").done
NO_DATABASE = find("slurm/slurmdbd-down", "sacct").done


def as_asked(recorded: Done, *wanted: tuple[str, str]) -> Done:
    """A recorded table with a heading, as the columns that the query asks for; what was not recorded is empty."""
    heading, *rows = [line.split("|") for line in recorded.out.splitlines()]
    tables = [dict(zip(heading, row, strict=False)) for row in rows]
    lines = ["|".join(table.get(title, "") for _, title in wanted) for table in tables]
    return replace(recorded, out="".join(f"{line}\n" for line in lines))


def squeue_of(case: str, nth: int = 0, start: str = "squeue") -> Done:
    recorded = [entry for entry in read_transcript(case) if entry.command.startswith(start) and "%i|" in entry.command]
    return as_asked(recorded[nth].done, *((field, SQUEUE_TITLES.get(field, "")) for field in SQUEUE))


def sacct_of(case: str, nth: int = 0) -> Done:
    recorded = [
        entry for entry in read_transcript(case) if "JobIDRaw" in entry.command and "SubmitLine" in entry.command
    ]
    return as_asked(recorded[nth].done, *((field, field) for field in SACCT))


def record_of(case: str, job: str, nth: int = 0) -> JobRecord:
    return Slurm().parse_records([job], [squeue_of(case, nth), sacct_of(case, nth)])[job]


@pytest.mark.parametrize(
    ("case", "job", "ending", "code", "signal"),
    [
        ("slurm/state-COMPLETED", "51", SchedulerEnding.COMPLETED, 0, 0),
        ("slurm/state-FAILED-1", "52", SchedulerEnding.FAILED, 1, 0),
        ("slurm/state-FAILED-127", "60", SchedulerEnding.FAILED, 127, 0),
        ("slurm/state-FAILED-200", "53", SchedulerEnding.FAILED, 72, 0),
        ("slurm-24/state-FAILED-200", "33", SchedulerEnding.FAILED, 72, 0),
        ("slurm-26/state-FAILED-200", "3033", SchedulerEnding.FAILED, 200, 0),
        ("slurm/state-FAILED-kill9", "54", SchedulerEnding.FAILED, None, 9),
        ("slurm/state-FAILED-segv", "55", SchedulerEnding.FAILED, None, 11),
        ("slurm/state-FAILED-workdir", "59", SchedulerEnding.NEVER_STARTED, None, 0),
        ("slurm/state-CANCELLED-running", "68", SchedulerEnding.CANCELLED, None, 15),
        ("slurm/state-CANCELLED-pending", "69", SchedulerEnding.CANCELLED, None, 0),
        ("slurm-26/state-CANCELLED-pending", "3049", SchedulerEnding.CANCELLED, None, 0),
        ("slurm/state-OUT_OF_MEMORY", "56", SchedulerEnding.OUT_OF_MEMORY, None, 0),
        ("slurm/state-OUT_OF_MEMORY-step", "57", SchedulerEnding.OUT_OF_MEMORY, 0, 0),
        ("slurm/state-TIMEOUT", "63", SchedulerEnding.TIMEOUT, None, 9),
    ],
)
def test_an_ending(case: str, job: str, ending: SchedulerEnding, code: int | None, signal: int) -> None:
    jobs = {line.split("|")[0] for line in sacct_of(case).out.splitlines()}
    job = job if job in jobs else min(jobs, key=len)
    record = record_of(case, job)
    assert (record.phase, record.ending) == (JobPhase.ENDED, ending)
    assert (record.exit_code, record.signal) == (code, signal)
    assert record.ended is not None
    assert (record.started is None) == ("CANCELLED-pending" in case)


def test_an_exit_code_that_slurm_folds_is_told() -> None:
    assert "200" in record_of("slurm/state-FAILED-200", "53").note
    assert record_of("slurm-26/state-FAILED-200", "3033").note == ""
    assert record_of("slurm/state-COMPLETED", "51").note == ""


def test_a_lost_node_ends_the_job_that_may_not_run_again_and_not_the_one_that_may() -> None:
    assert record_of("slurm/state-NODE_FAIL", "77", 1).ending is SchedulerEnding.NODE_FAILURE
    assert record_of("slurm/state-NODE_FAIL", "76", 0).phase is JobPhase.RUNNING  # squeue: COMPLETING


def test_a_preempted_job_waits_for_its_next_run() -> None:
    for version in ("slurm", "slurm-24", "slurm-26"):
        case = f"{version}/state-PREEMPTED"
        rows = squeue_of(case, -1)
        job = rows.out.split("|")[0]
        record = Slurm().parse_records([job], [rows, sacct_of(case)])[job]
        assert (record.phase, record.reason, record.restarts) == (JobPhase.QUEUED, "BeginTime", 1)
        assert record.ending is None


def test_the_last_run_of_a_requeued_job_counts() -> None:
    case = "slurm/state-requeued"
    first, second = (Slurm().parse_records(["73"], [squeue_of(case, nth), sacct_of(case)])["73"] for nth in (0, -1))
    assert (first.phase, first.state, first.restarts) == (JobPhase.RUNNING, "COMPLETING", 1)
    assert (second.phase, second.ending, second.restarts) == (JobPhase.ENDED, SchedulerEnding.COMPLETED, 1)


def test_squeue_is_right_about_a_job_that_just_started() -> None:
    record = record_of("slurm/state-RUNNING", "68")  # sacct says PENDING of an "allocation"
    assert (record.phase, record.state, record.nodes) == (JobPhase.RUNNING, "RUNNING", "n1")
    assert record_of("slurm/state-SUSPENDED", "124").phase is JobPhase.RUNNING


def test_a_held_job_is_queued_with_the_reason_in_slurms_words() -> None:
    for nth in (0, 1):
        records = Slurm().parse_records(["124"], [squeue_of("slurm/state-held-requeuehold", nth), NOTHING])
        assert records["124"].phase is JobPhase.QUEUED
        assert records["124"].reason == "job requeued in held state"


# --- what the query's own commands printed


def answers(nth: int) -> list[Done]:
    recorded = [entry.done for entry in read_transcript("slurm/queries")]
    return recorded[2 * nth : 2 * nth + 2]


def test_many_jobs_are_read_from_one_pair_of_answers() -> None:
    jobs = ("19", "20", "21", "22", "23", "24", "25", "99999")
    assert [done.words for done in answers(0)] == list(Slurm().query(jobs))
    records = Slurm().parse_records(jobs, answers(0))
    assert [records[job].phase for job in jobs] == [
        *[JobPhase.ENDED] * 4,
        *(JobPhase.RUNNING, JobPhase.QUEUED, JobPhase.RUNNING, JobPhase.UNKNOWN),
    ]
    assert records["19"].started == 1795350995.0
    assert records["19"].ended == 1795350996.0
    assert records["23"].name == "my-run.0002.abcd"
    assert records["22"].exit_code == 1  # the first of its tasks that failed


def test_tasks_of_an_array_are_jobs_too() -> None:
    records = Slurm().parse_records(("22_0", "22_3", "25_0", "25_2", "30"), answers(0))
    assert records["22_0"].ending is SchedulerEnding.COMPLETED
    assert records["22_3"].exit_code == 3
    assert records["25_0"].phase is JobPhase.RUNNING
    assert (records["25_2"].phase, records["25_2"].reason) == (JobPhase.QUEUED, "JobArrayTaskLimit")
    assert records["30"].exit_code == 2  # its raw id


def test_tasks_that_were_never_started_are_cancelled_in_one_line() -> None:
    squeue, sacct = answers(5)
    records = Slurm().parse_records(("25_0", "25_3", "25_4", "24"), [replace(squeue, out=""), sacct])
    assert [records[job].ending for job in ("25_0", "25_3", "24")] == [SchedulerEnding.CANCELLED] * 3
    assert records["25_3"].started is None
    assert records["25_4"].phase is JobPhase.UNKNOWN


def test_an_unknown_id_is_an_answer() -> None:
    assert answers(1)[0].code == 1
    assert Slurm().parse_records(["99999"], answers(1))["99999"] == JobRecord("99999", JobPhase.UNKNOWN)


def test_a_word_that_is_no_id_is_not_asked_for_and_hides_no_other() -> None:
    assert Slurm().query(["foo"]) == ()
    assert Slurm().parse_records(["foo"], [])["foo"].phase is JobPhase.UNKNOWN
    assert "19" in Slurm().query(["foo", "19"])[0]


@pytest.mark.parametrize(("nth", "jobs"), [(2, ("1", "19")), (3, ()), (4, ())])
def test_a_job_is_found_by_its_name_and_one_that_was_refused_is_none(nth: int, jobs: tuple[str, ...]) -> None:
    assert Slurm().parse_found(answers(nth)) == jobs


def test_what_is_asked_for_a_name_is_what_was_recorded() -> None:
    assert [done.words for done in answers(2)] == list(Slurm().find("my-run.0001.k3f9"))


# --- silence


@pytest.mark.parametrize(
    "squeue",
    [
        DOWN,
        find("slurm/no-client-config", "SLURM_CONF=/nonexistent squeue").done,
        Done(("squeue",), 0, "", "", timed_out=True),
        Done(("env", "squeue"), 127, "", "env: 'squeue': No such file or directory"),
    ],
)
def test_no_answer_is_not_taken_for_no_job(squeue: Done) -> None:
    for sacct in (NOTHING, NO_DATABASE, sacct_of("slurm/state-RUNNING")):
        with pytest.raises(SchedulerSilent, match="squeue"):
            Slurm().parse_records(["68"], [squeue, sacct])
        with pytest.raises(SchedulerSilent, match="squeue"):
            Slurm().parse_found([squeue, NOTHING])


def test_without_squeue_an_end_is_believed_only_where_it_is_final() -> None:
    assert (
        Slurm().parse_records(["51"], [DOWN, sacct_of("slurm/state-COMPLETED")])["51"].ending
        is SchedulerEnding.COMPLETED
    )
    with pytest.raises(SchedulerSilent):
        Slurm().parse_records(["76"], [DOWN, sacct_of("slurm/state-NODE_FAIL")])  # Slurm queues it again


def test_without_the_database_squeue_tells_what_it_remembers_and_nobody_the_rest() -> None:
    squeue = answers(0)[0]
    records = Slurm().parse_records(["19", "20", "23", "99999"], [squeue, NO_DATABASE])
    assert records["19"].ending is SchedulerEnding.COMPLETED
    assert (records["20"].ending, records["20"].exit_code) == (SchedulerEnding.FAILED, None)
    assert "99999" not in records
    with pytest.raises(SchedulerSilent, match="sacct"):
        Slurm().parse_found([answers(4)[0], NO_DATABASE])


def test_a_site_without_accounting_has_answered() -> None:
    disabled = Done(("sacct",), 1, "", "Slurm accounting storage is disabled\n")
    assert Slurm().parse_records(["99999"], [answers(1)[0], disabled])["99999"].phase is JobPhase.UNKNOWN


def test_an_end_that_sacct_does_not_know_yet_is_waited_for() -> None:
    squeue, sacct = answers(0)
    lagging = replace(sacct, out="19|19|RUNNING|0:0|1795350994|1795350995|Unknown|n1|None|allocation\n")
    assert Slurm().parse_records(["19"], [squeue, lagging])["19"].phase is JobPhase.RUNNING
    assert Slurm().parse_records(["19"], [squeue, sacct])["19"].phase is JobPhase.ENDED


@settings(max_examples=20)
@given(st.text(max_size=300), st.text(max_size=300), st.integers(0, 2), st.booleans())
def test_any_text_is_read_without_an_error(out: str, booked: str, code: int, late: bool) -> None:
    done = [Done(("squeue",), code, out, out, late), Done(("sacct",), 0, booked, "")]
    try:
        assert set(Slurm().parse_records(["1", "2_3"], done)) <= {"1", "2_3"}
    except SchedulerSilent:
        assert late or code


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["19", "CANCELLED by 0", "[1-3%1]", "25_[", "]", ".batch", "-", "%"]), max_size=20))
def test_damaged_lines_are_left_out(parts: list[str]) -> None:
    line = "|".join([*parts, *[""] * 10])
    records = Slurm().parse_records(["19"], [NOTHING, Done((), 0, line + "\n" + answers(0)[1].out, "")])
    assert records["19"].phase in (JobPhase.ENDED, JobPhase.RUNNING)
