from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_cluster import wait_for
from submitting import Person, Submitted, disturbed

SIX = ("optim.lr=1e-3,3e-3", "train.seed=0..2", "--max-parallel", "2", "site.nodes=1", "train.steps=6 steps")
SPARED = "n3"
"""The node that no test of this module takes away."""


@dataclass(frozen=True)
class Begun:
    """What is submitted before the first test, so that it runs beside the others: a sweep of six runs, two at a time,
    whose first ones take their time; and a run that is prepared and evaluated."""

    folder: Path
    runs: list[Submitted]
    array: str
    command: tuple[str, ...]
    pipeline: Submitted


@pytest.fixture(scope="module")
def begun(busy_alice: Person) -> Begun:
    alice = busy_alice
    command = ("sweep", "tiny.toml", "run.name=six", *SIX, disturbed(PAUSE=f"5:{alice.write('six.slow', '')}"))
    command = (*command, f'site.options={{exclude = "{SPARED}"}}')
    sent = alice.facts(*command)
    jobs = [member["job"] for member in sent["members"]]
    array = jobs[0].split("_")[0]
    assert jobs == [f"{array}_{index}" for index in range(6)]
    alice.write("corpus.txt", "To be, or not to be, that is the question.\n" * 200)
    alice.write("pipeline.toml", PIPELINE)
    pipeline = alice.submit("pipeline.toml", f"data.path={alice.folder}/tokens")
    return Begun(
        Path(sent["sweep"]),
        [Submitted(alice.cluster, Path(member["run"])) for member in sent["members"]],
        array,
        command,
        pipeline,
    )


PIPELINE = f"""\
format = 1
[model]
dim = 16
layers = 1
heads = 2
vocab = 320
[data]
kind = "tokens"
seq_len = 16
[train]
steps = "5 steps"
global_batch = 4
validate_every = "off"
[run]
threads = 1
[site]
name = "generic-slurm"
nodes = 1
ranks_per_node = 1
walltime = "5m"
options = {{nodelist = "{SPARED}"}}
[pipeline]
before = ["data prepare {{here}}/corpus.txt {{here}}/tokens --tokenizer bytes"]
then = ["evaluate --data {{here}}/tokens --limit 2"]
"""


def list_tasks(alice: Person, array: str) -> list[tuple[int, int]]:
    """Start and end of each task of an array that has run, as Slurm has booked them (Unix seconds)."""
    words = ("sacct", "-X", "-n", "-P", "-j", array, "-o", "JobID,Start,End")
    found = [line.split("|") for line in alice.cluster.output("env", "SLURM_TIME_FORMAT=%s", *words).splitlines()]
    return [(int(start), int(end)) for _, start, end in found if start.isdecimal() and end.isdecimal()]


def test_a_sweep_is_one_array_and_goes_on_after_a_lost_node(busy_alice: Person, begun: Begun) -> None:
    """One array, two tasks at a time; the tasks whose node is lost end, the others run, and `resume` goes on with what
    is left and doubles nothing."""
    alice, cluster, runs = busy_alice, busy_alice.cluster, begun.runs
    runs[0].until_step(1)
    tasks = cluster.output("squeue", "--me", "-h", "-r", "-o", "%F %T %r").splitlines()
    mine = [words for words in map(str.split, tasks) if words[0] == begun.array]
    assert [state for _, state, _ in mine].count("RUNNING") == 2
    assert {reason for _, state, reason in mine if state == "PENDING"} == {"JobArrayTaskLimit"}
    started = runs[0].directory.attempt(1).read_started()
    assert started is not None
    cluster.crash(started.nodes)
    (alice.folder / "six.slow").unlink()
    assert "were submitted before" in alice.refused(*begun.command)

    def is_over() -> bool:
        return begun.array not in cluster.output("squeue", "--me", "-h", "-o", "%F").split()

    wait_for("the end of the array", is_over, timeout_s=300)
    cluster.boot(started.nodes)
    lost = [run for run in runs if run.states() != ["finished"]]
    assert 1 <= len(lost) <= 2
    assert runs[0] in lost
    facts = alice.facts("status", begun.folder)
    assert [each["name"] for each in facts["members"] if each["state"] != "finished"] == [run.path.name for run in lost]

    alice.told("resume", begun.folder)
    for run in lost:
        assert run.ended(2, timeout_s=300).state == "finished", run.printed(2)
    facts = alice.facts("status", begun.folder)
    assert {each["state"] for each in facts["members"]} == {"finished"}
    assert [len(run.states()) for run in runs] == [2 if run in lost else 1 for run in runs]
    assert all(max(run.losses()) == 6 for run in runs)
    times = list_tasks(alice, begun.array)
    assert len(times) == 6
    assert max(sum(start <= at < end for start, end in times) for at, _ in times) == 2
    assert re.search(r"^best +00\d \(lr ", alice.told("status", begun.folder), re.MULTILINE)


def test_one_file_prepares_trains_and_evaluates(busy_alice: Person, begun: Begun) -> None:
    """Three jobs in a row, each submitted by the one before it."""
    run = begun.pipeline
    names = ("pipeline-data-prepare", "pipeline", "pipeline-evaluate")
    steps = [Submitted(busy_alice.cluster, run.path.with_name(name)) for name in names]
    starts = []
    for step in steps:
        assert step.ended(1, timeout_s=300).state == "finished", step.printed()
        started = step.directory.attempt(1).read_started()
        assert started is not None
        starts.append(started.started)
    assert starts == sorted(starts)
    assert max(run.losses()) == 5
    assert "evaluated" in busy_alice.told("status", run.path)
