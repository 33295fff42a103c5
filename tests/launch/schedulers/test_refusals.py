from __future__ import annotations

import pytest

from shardway.launch.hosts.base import Done
from shardway.launch.schedulers.base import RequestedResources, Scheduler
from shardway.launch.schedulers.pbs import Pbs
from shardway.launch.schedulers.slurm import Slurm
from transcripts import Recorded, find, list_transcripts, read_transcript

ASKED = RequestedResources(
    name="my-run.0001.k3f9",
    queue="booster",
    account="hai_x",
    qos="long",
    constraint="h100",
    reservation="workshop",
    walltime_s=5400.0,
    nodes=3,
    cores=48,
    accelerators=4,
    memory=2**39,
    script="job.sh",
)
SLURM, PBS = Slurm(), Pbs()
EXPLAIN = {"sbatch": SLURM.explain_refusal, "qsub": PBS.explain_refusal}


def list_refused(program: str, *patterns: str) -> list[Recorded]:
    """Every submission of these transcripts that was refused; `sbatch --wait` passes on a job's own exit code."""
    entries = [entry for pattern in patterns for name in list_transcripts(pattern) for entry in read_transcript(name)]
    refused = [entry for entry in entries if program in entry.command and entry.done.code]
    return [entry for entry in refused if "block=true" not in entry.command and "--wait" not in entry.command]


SBATCH = list_refused("sbatch", "slurm/sbatch-refused-*", "slurm/controller-down", "slurm/no-client-config")
QSUB = list_refused("qsub", "pbs/qsub-*", "pbs/server-down", "pbs/no-client-config")


@pytest.mark.parametrize(("program", "refused", "at_least"), [("sbatch", SBATCH, 40), ("qsub", QSUB, 60)])
def test_every_recorded_refusal_has_a_sentence_of_its_own(program: str, refused: list[Recorded], at_least: int) -> None:
    found = {entry.command: EXPLAIN[program](entry.done, ASKED) for entry in refused}
    assert [command for command, explanation in found.items() if explanation.code == "refused"] == []
    assert len(refused) >= at_least
    for explanation in found.values():
        assert explanation.sentence.endswith(".")
        assert explanation.remedy
        assert not set("{}") & set(explanation.sentence + explanation.remedy)


@pytest.mark.parametrize(
    ("case", "command", "code", "words"),
    [
        ("slurm/sbatch-refused-account-qos", "sbatch -A nosuch", "account_unknown", ('"hai_x"', "sacctmgr")),
        ("slurm/sbatch-refused-account-qos", "sbatch --qos=nosuch", "qos_unknown", ('"long"',)),
        ("slurm/sbatch-refused-account-qos", "sbatch --qos=gpulimit", "accelerators_over_limit", ("QOSMaxGRES", "4")),
        ("slurm/sbatch-refused-invalid-partition", "sbatch -p nosuch", "queue_unknown", ('"booster"', "sinfo")),
        ("slurm/sbatch-refused-invalid-partition", "sbatch -p draining", "queue_closed", ('"booster"',)),
        ("slurm/sbatch-refused-resources", "sbatch --mem=500G", "memory_over_node", ("512GiB", "site.memory")),
        ("slurm/sbatch-refused-resources", "sbatch --gres=gpu:9", "node_configuration", ("4 accelerators", "48 cores")),
        ("slurm/sbatch-refused-resources", "sbatch -C h100", "feature_unknown", ('"h100"',)),
        ("slurm/sbatch-refused-resources", "sbatch --reservation", "reservation_unknown", ('"workshop"',)),
        ("slurm/sbatch-refused-syntax", "sbatch s_badopt.sh", "option_unknown", ('"--walltime"', "site.options")),
        ("slurm/sbatch-refused-syntax", "sbatch --time=abc", "time_format", ("1h30m",)),
        ("slurm/sbatch-refused-syntax", "sbatch --begin", "option_value", ("--begin",)),
        ("slurm/no-client-config", "SLURM_CONF=/nonexistent sbatch", "not_configured", ("login node",)),
        ("pbs/qsub-refused-unknown-queue", "qsub -q nosuch", "queue_unknown", ('"booster"', "qstat -Q")),
        ("pbs/qsub-refused-unknown-queue", "qsub -q short@nosuchhost", "server_unknown", ("@",)),
        ("pbs/qsub-refused-queue-limit", "qsub -q short -l walltime", "limits", ('"booster"', "1h30m", "qstat -Qf")),
        ("pbs/qsub-refused-unknown-resource", "qsub -l gpus=2", "resource_unknown", ('"gpus"', "ngpus")),
        ("pbs/qsub-refused-unknown-resource", "qsub baddir.sh", "resource_unknown", ('"wallclock"', "site.walltime")),
        ("pbs/qsub-refused-unknown-resource", "qsub -l select=1:nosuch", "resource_unknown", ('"nosuch"',)),
        (
            "pbs/qsub-refused-queue-disabled",
            "qsub -q fromroute",
            "queue_not_allowed",
            ("routing", "route_destinations"),
        ),
        ("pbs/qsub-refused-root", "qsub", "root", ("root",)),
        ("pbs/qsub-refused-bad-syntax", "qsub -l select=1:ncpus=1 -l mem", "select_mixed", ("mem", "select")),
        ("pbs/no-client-config", "qsub job.sh", "not_configured", ("login node",)),
    ],
)
def test_a_refusal_names_what_was_asked(case: str, command: str, code: str, words: tuple[str, ...]) -> None:
    explanation = EXPLAIN["sbatch" if case.startswith("slurm") else "qsub"](find(case, command).done, ASKED)
    assert explanation.code == code
    assert explanation.hopeless
    assert [word for word in words if word not in explanation.sentence + explanation.remedy] == []


@pytest.mark.parametrize(
    ("done", "code"),
    [
        (find("slurm/controller-down", "sbatch").done, "scheduler_down"),
        (
            Done(("sbatch",), 1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv"),
            "scheduler_timeout",
        ),
        (Done(("sbatch",), 0, "", "", timed_out=True), "scheduler_timeout"),
        (find("slurm/sbatch-refused-account-qos", "sbatch --qos=onejob", 2).done, "max_jobs_queued"),
        (find("pbs/server-down", "qsub").done, "scheduler_down"),
        (Done(("qsub",), 0, "", "", timed_out=True), "scheduler_timeout"),
        (find("pbs/qsub-refused-max-queued", "SLEEP=30 qsub", 3).done, "max_jobs_queued"),
        (find("pbs/qsub-refused-project-limit", "qsub -q short -P").done, "max_jobs_queued"),
    ],
)
def test_some_refusals_are_worth_another_try(done: Done, code: str) -> None:
    program = "sbatch" if "sbatch" in done.words else "qsub"
    explanation = EXPLAIN[program](done, ASKED)
    assert (explanation.code, explanation.hopeless) == (code, False)


@pytest.mark.parametrize("program", ["sbatch", "qsub"])
def test_an_unknown_refusal_is_passed_on_in_the_schedulers_words(program: str) -> None:
    explanation = EXPLAIN[program](
        Done((program,), 9, "", "site hook: come\n back on Monday {x}\n"), RequestedResources()
    )
    assert (explanation.code, explanation.hopeless) == ("refused", True)
    assert f"{program} refused the job with exit code 9" in explanation.sentence
    assert "site hook: come back on Monday {x}" in explanation.sentence


@pytest.mark.parametrize("program", ["sbatch", "qsub"])
def test_a_missing_program_is_told(program: str) -> None:
    assert EXPLAIN[program](Done((program,), 127, "", ""), RequestedResources()).code == "not_installed"


@pytest.mark.parametrize("host", ["", "alice@box"])
@pytest.mark.parametrize(
    ("program", "done"),
    [
        ("sbatch", Done(("sbatch",), 127, "", "")),
        ("sbatch", find("slurm/no-client-config", "SLURM_CONF=/nonexistent sbatch").done),
        ("qsub", Done(("qsub",), 127, "", "")),
        ("qsub", find("pbs/no-client-config", "qsub job.sh").done),
    ],
)
def test_the_host_that_cannot_submit_is_named(program: str, done: Done, host: str) -> None:
    """Who came through ssh is not told to come through ssh."""
    explanation = EXPLAIN[program](done, RequestedResources(host=host))
    assert f" on {host or 'this machine'}." in explanation.sentence
    assert ("through ssh" in explanation.remedy) == (not host)
    assert "login node" in explanation.remedy


def test_what_was_not_asked_is_said_to_be_so() -> None:
    done = find("slurm/sbatch-refused-account-qos", "sbatch -A nosuch").done
    assert "account (none was named)" in SLURM.explain_refusal(done, RequestedResources()).sentence


@pytest.mark.parametrize("scheduler", [SLURM, PBS])
def test_no_rule_is_written_twice(scheduler: Scheduler) -> None:
    patterns = [rule["when"] for rule in scheduler.list_rules("refusal")]
    assert len(patterns) == len(set(patterns))


# --- the id of a job that was taken


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("2\n", "2"),
        ("17;cluster\n", "17"),
        ("Submitted batch job 22\n", "22"),
        ("Welcome to the machine, 3 jobs run\n1234\n", "1234"),
        ("", ""),
        ("no number 12 here\n", ""),
    ],
)
def test_the_id_that_sbatch_prints(text: str, job: str) -> None:
    assert SLURM.read_job_id(text) == job


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("0.pbshead\n", "0.pbshead"),
        ("11[].pbshead\n", "11[].pbshead"),
        ("Your project has 100 hours left\n194.pbs-server.example\n", "194.pbs-server.example"),
        ("", ""),
    ],
)
def test_the_id_that_qsub_prints(text: str, job: str) -> None:
    assert PBS.read_job_id(text) == job


def test_every_recorded_submission_that_was_taken_has_an_id() -> None:
    for name in list_transcripts("slurm/sbatch-refused-*"):
        for entry in read_transcript(name):
            if entry.command.startswith("sbatch") and entry.done.code == 0:
                assert SLURM.read_job_id(entry.done.out).isdigit(), entry.command
    for name in list_transcripts("pbs/qsub-*"):
        for entry in read_transcript(name):
            if entry.command.startswith("qsub") and entry.done.code == 0 and "-z" not in entry.done.words:
                assert PBS.read_job_id(entry.done.out).endswith(".pbshead"), entry.command
