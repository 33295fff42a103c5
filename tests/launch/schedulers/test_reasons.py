from __future__ import annotations

import json

import pytest

from shardway.launch.hosts.base import Done
from shardway.launch.schedulers.base import Explanation, JobPhase, JobRecord, RequestedResources, SchedulerEnding
from shardway.launch.schedulers.pbs import Pbs
from shardway.launch.schedulers.slurm import Slurm
from transcripts import TRANSCRIPTS, list_transcripts, read_json, read_transcript

SLURM, PBS = Slurm(), Pbs()
ASKED = RequestedResources(queue="booster", account="hai_x", qos="long", walltime_s=5400.0, nodes=3, accelerators=4)


def pending(reason: str, state: str = "PENDING") -> Explanation:
    explanation = SLURM.explain_pending(JobRecord("1", JobPhase.QUEUED, state, reason), ASKED)
    assert explanation is not None
    return explanation


def list_recorded_reasons() -> set[str]:
    """Every reason of a pending job in a recorded table of squeue."""
    found = set()
    for name in list_transcripts("slurm*/*"):
        for entry in read_transcript(name):
            heading, *lines = entry.done.out.splitlines() or [""]
            titles = heading.split("|")
            if entry.command.startswith("squeue") and {"STATE", "REASON"} <= set(titles):
                rows = [dict(zip(titles, line.split("|"), strict=False)) for line in lines]
                found |= {row["REASON"] for row in rows if row["STATE"] == "PENDING"}
    return found


DOCUMENTED = (TRANSCRIPTS / "reasons-of-slurm.txt").read_text(encoding="utf-8").splitlines()[1:]


def test_every_reason_of_slurm_is_explained() -> None:
    names = {*DOCUMENTED, *list_recorded_reasons()}
    assert len(names) > 150
    for reason in names:
        explanation = pending("" if reason == "None" else reason)
        assert explanation.code != "pending", reason
        assert not set("{}") & set(explanation.sentence + explanation.remedy)
        assert explanation.sentence.endswith(".")


def test_the_recorded_reasons_are_found() -> None:
    assert len(list_recorded_reasons()) >= 18


@pytest.mark.parametrize(
    ("reason", "code", "hopeless"),
    [
        ("QOSMaxWallDurationPerJobLimit", "walltime_over_limit", True),
        ("AssocMaxWallDurationPerJobLimit", "walltime_over_limit", True),
        ("PartitionTimeLimit", "walltime_over_limit", True),
        ("PartitionNodeLimit", "nodes_over_limit", True),
        ("PartitionConfig", "partition_configuration", True),
        ("DependencyNeverSatisfied", "dependency_never_satisfied", True),
        ("AccountNotAllowed", "account_not_allowed", True),
        (
            "Job's account not permitted to use this partition (private allows rich not test)",
            "account_not_allowed",
            True,
        ),
        ("QOSMaxCpuPerJobLimit", "job_over_limit", True),
        ("QOSMaxGRESPerJob", "job_over_limit", True),
        ("QOSMinGRES", "job_under_limit", True),
        ("AssocGrpCPUMinutesLimit", "budget", False),
        ("QOSMaxGRESPerUser", "accelerators_limit", False),
        ("QOSMaxJobsPerUserLimit", "jobs_running_limit", False),
        ("Dependency", "dependency", False),
        ("Resources", "resources", False),
        ("Priority", "priority", False),
        ("ReqNodeNotAvail, UnavailableNodes:n3", "nodes_down", False),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "nodes_down",
            False,
        ),
        ("JobHeldUser", "held_by_user", False),
        ("job requeued in held state", "held_after_requeue", False),
        ("launch failed requeued held", "held_after_failure", True),
    ],
)
def test_a_reason_says_whether_waiting_helps(reason: str, code: str, hopeless: bool) -> None:
    assert (pending(reason).code, pending(reason).hopeless) == (code, hopeless)


def test_a_reason_names_what_was_asked() -> None:
    assert "1h30m" in pending("QOSMaxWallDurationPerJobLimit").sentence
    assert '"booster"' in pending("PartitionTimeLimit").sentence
    assert "UnavailableNodes:n3" in pending("ReqNodeNotAvail, UnavailableNodes:n3").sentence


def test_an_unknown_reason_is_passed_on() -> None:
    assert "OnlyOnFullMoon" in pending("OnlyOnFullMoon").sentence
    assert pending("OnlyOnFullMoon").code == "pending"


def test_only_what_waits_waits_and_only_what_ended_ended() -> None:
    running = JobRecord("1", JobPhase.RUNNING, "RUNNING")
    ended = JobRecord("1", JobPhase.ENDED, "COMPLETED", ending=SchedulerEnding.COMPLETED)
    for explainer in (SLURM, PBS):
        assert explainer.explain_pending(running) is None
        assert explainer.explain_ending(running) is None
        assert explainer.explain_pending(ended) is None
        assert explainer.explain_ending(ended) is not None


# --- PBS


def pbs_records() -> dict[str, JobRecord]:
    """Every job in every recorded answer of qstat."""
    found = {}
    for path in sorted((TRANSCRIPTS / "pbs").glob("*.json")):
        text = read_json(f"pbs/{path.name}")
        for job in json.loads(text).get("Jobs", {}):
            found[f"{path.stem} {job}"] = PBS.parse_records([job], [Done((), 0, text, "")])[job]
    return found


def list_pbs_comments() -> set[str]:
    """Every comment of a job that waits in a recorded `qstat -s`."""
    lines = [
        line for name in list_transcripts("pbs/*") for e in read_transcript(name) for line in e.done.out.splitlines()
    ]
    return {line.strip() for line in lines if "Not Running:" in line or "Can Never Run:" in line}


SOURCED_COMMENTS = [
    "Not Running: User has reached server running job limit.",
    "Not Running: Group has reached queue long running limit.",
    "Not Running: Queue gpu job limit has been reached.",
    "Not Running: Job would conflict with reservation or top job",
    "Not Running: would exceed user alice's limit on resource ngpus in queue gpu",
    "Not Running: Node is in an ineligible state: down",
    "Not Running: Job is requesting an exclusive node and node is in use",
    "Not Running: Job would cross dedicated time boundary",
    "Not Running: Insufficient amount of server resource: ngpus (R: 8 A: 0 T: 64)",
    "Can Never Run: can't fit in the largest placement set, and can't span psets",
    "Can Never Run: No Select",
]


def test_every_pbs_job_that_waits_is_explained() -> None:
    waiting = {name: record for name, record in pbs_records().items() if record.phase is JobPhase.QUEUED}
    comments = {*list_pbs_comments(), *SOURCED_COMMENTS}
    waiting |= {comment: JobRecord("1", JobPhase.QUEUED, "Q", comment) for comment in comments}
    codes = {
        name: (PBS.explain_pending(record, ASKED) or Explanation("none", "", "")).code
        for name, record in waiting.items()
    }
    assert [name for name, code in codes.items() if code in ("pending", "none", "waiting")] == []
    assert len(list_pbs_comments()) >= 8


@pytest.mark.parametrize(
    ("comment", "code", "hopeless"),
    [
        ("Can Never Run: Insufficient amount of resource: ncpus (R: 64 A: 12 T: 12)", "too_large", True),
        ("Can Never Run: Insufficient amount of resource: host (p9 != p1,p2,p3)", "too_large", True),
        ("Can Never Run: Not enough total nodes available", "too_many_nodes", True),
        ("Can Never Run: can't fit in the largest placement set, and can't span psets", "placement", True),
        ("Can Never Run: No Select", "never", True),
        ("job held, too many failed attempts to run", "held_after_failures", True),
        ("Not Running: Insufficient amount of resource: ngpus (R: 8 A: 4 T: 12)", "resources", False),
        ("Not Running: Insufficient amount of resource: host ", "host_busy", False),
        ("Not Running: User has reached queue oneatatime running job limit.", "job_limit", False),
        ("Not Running: Queue not started.", "queue_stopped", False),
        ("Not Running: Job would conflict with reservation or top job", "reservation", False),
        ("Not Running: would exceed user alice's limit on resource ngpus in queue gpu", "resource_limit", False),
        ("", "just_submitted", False),
    ],
)
def test_a_comment_of_pbs_says_whether_waiting_helps(comment: str, code: str, hopeless: bool) -> None:
    explanation = PBS.explain_pending(JobRecord("1", JobPhase.QUEUED, "Q", comment), ASKED)
    assert explanation is not None
    assert (explanation.code, explanation.hopeless) == (code, hopeless)


def test_numbers_of_a_comment_are_in_the_sentence() -> None:
    record = JobRecord(
        "1", JobPhase.QUEUED, "Q", "Not Running: Insufficient amount of resource: ngpus (R: 8 A: 4 T: 12)"
    )
    explanation = PBS.explain_pending(record)
    assert explanation is not None
    assert explanation.sentence == "The job waits for 8 of ngpus; 4 are free and the machine has 12 in all."


PBS_ENDINGS = {
    "state-F-exit0": "completed",
    "state-F-exit1": "failed",
    "state-F-exit137": "killed",
    "state-F-kill9-exec": "killed",
    "state-F-segv": "segmentation_fault",
    "state-F-limit-mem": "out_of_memory",
    "state-F-walltime-script": "timeout",
    "state-F-qdel-running": "cancelled",
    "state-F-qdel-queued": "deleted_while_queued",
    "state-F-no-such-program": "no_such_program",
    "node-crash-json.not-rerunnable": "node_failure",
    "node-crash-json.second-node-lost-finished": "unclear",
    "prologue-fails": "prologue_failed",
    "qsub-depend.ghost": "dependency_never_satisfied",
    "qsig.sigscript": "user_signal",
}


def test_every_ending_of_pbs_is_explained() -> None:
    ended = {name: record for name, record in pbs_records().items() if record.phase is JobPhase.ENDED}
    found = {name: PBS.explain_ending(record, ASKED) for name, record in ended.items()}
    assert [name for name, explanation in found.items() if explanation is None or explanation.code == "ended"] == []
    by_case = {name.split()[0]: explanation.code for name, explanation in found.items() if explanation}
    assert {name: by_case[name] for name in PBS_ENDINGS} == PBS_ENDINGS


# --- endings of Slurm


@pytest.mark.parametrize(
    ("state", "exit_text", "code", "words"),
    [
        ("COMPLETED", "0:0", "completed", "exit code 0"),
        ("FAILED", "1:0", "failed", "exit code 1."),
        ("FAILED", "9:0", "killed", "137"),
        ("FAILED", "137:0", "killed", "signal 9"),
        ("FAILED", "0:9", "killed", "signal 9"),
        ("FAILED", "139:0", "segmentation_fault", "native"),
        ("FAILED", "11:0", "segmentation_fault", "139"),
        ("FAILED", "143:0", "terminated", "signal 15"),
        ("FAILED", "127:0", "command_not_found", "127"),
        ("FAILED", "72:0", "failed_folded", "72"),
        ("FAILED", "200:0", "failed", "200"),
        ("FAILED", "0:53", "launch_failed", "folder"),
        ("OUT_OF_MEMORY", "0:125", "out_of_memory", "memory"),
        ("TIMEOUT", "0:0", "timeout", "1h30m"),
        ("DEADLINE", "0:0", "walltime_deadline", "deadline"),
        ("NODE_FAIL", "0:0", "node_failure", "node"),
        ("NODE_FAIL", "1:0", "node_failure", "node"),
        ("BOOT_FAIL", "0:0", "node_did_not_boot", "switched on"),
        ("PREEMPTED", "0:0", "preempted", "took the nodes"),
        ("CANCELLED by 1001", "0:15", "cancelled", "1001"),
    ],
)
def test_an_ending_of_slurm_is_explained(state: str, exit_text: str, code: str, words: str) -> None:
    line = f"7|7|{state}|{exit_text}|1|2|3|n1|None|wrap\n"
    record = SLURM.parse_records(["7"], [Done((), 0, "", ""), Done((), 0, line, "")])["7"]
    explanation = SLURM.explain_ending(record, ASKED)
    assert explanation is not None
    assert explanation.code == code
    assert words in explanation.sentence


def test_a_step_that_ran_out_of_memory_is_told_of_a_job_that_completed() -> None:
    lines = "7|7|COMPLETED|0:0|1|2|3|n1|None|wrap\n7.0|7.0|OUT_OF_MEMORY|0:125|1|2|3|n1||python\n"
    record = SLURM.parse_records(["7"], [Done((), 0, "", ""), Done((), 0, lines, "")])["7"]
    explanation = SLURM.explain_ending(record)
    assert explanation is not None
    assert explanation.code == "step_out_of_memory"
