"""What each lesson asks for, and whether a learner's folder has it.

Invariants:
- A lesson is a list of requirements; each has the sentence for what is missing and the command that makes it.
- Undone work is refused: a requirement holds only if `proofs` finds evidence, in runs that `evidence` counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardway.learn import proofs
from shardway.learn.evidence import gather
from shardway.learn.lessons import Lesson
from shardway.learn.proofs import LEAST_STEPS, NEAR_LOSS, Find
from shardway.rundir.names import find_run_id


@dataclass(frozen=True)
class Requirement:
    """One thing that a lesson asks for: `find` gives the evidence, empty where there is none."""

    what: str
    find: Find
    missing: str
    remedy: str


@dataclass(frozen=True)
class Finding:
    """A requirement and its evidence; empty evidence means that it is missing, and `remedy` is how to do it."""

    what: str
    evidence: str = ""
    missing: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class LessonCheck:
    """The check of one lesson. `rejected`: why a run does not count, by its name; `run_ids`: those that count."""

    number: int
    name: str
    folder: Path
    findings: tuple[Finding, ...]
    rejected: dict[str, str] = field(default_factory=dict)
    run_ids: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        return all(each.evidence for each in self.findings)

    @property
    def is_begun(self) -> bool:
        return any(each.evidence for each in self.findings) or bool(self.rejected)

    def as_json(self) -> dict[str, Any]:
        state = "done" if self.is_done else "begun" if self.is_begun else "not begun"
        return {**asdict(self), "folder": str(self.folder), "state": state}


def check_lesson(lesson: Lesson, folder: Path) -> LessonCheck:
    """What is done of a lesson, in the learner's folder."""
    found = gather(folder / lesson.name)
    findings = []
    for each in REQUIREMENTS[lesson.number]:
        shown = each.find(found)
        findings.append(Finding(each.what, shown) if shown else Finding(each.what, "", each.missing, each.remedy))
    ids = tuple(find_run_id(run.directory.path) for run in found.runs)
    return LessonCheck(lesson.number, lesson.name, found.folder, tuple(findings), dict(found.rejected), ids)


# --- the table

_WITH_ONE = Requirement(
    "the example on one rank",
    proofs.prove_alone,
    f"no finished run of gpt.toml on one rank, of {LEAST_STEPS} steps or more",
    "shardway train gpt.toml --dir runs/one",
)

REQUIREMENTS: dict[int, tuple[Requirement, ...]] = {
    1: (
        _WITH_ONE,
        Requirement(
            "it learned",
            proofs.prove_learning,
            "no run whose loss fell by a fifth from its first step to its last five",
            "let it do all its steps: shardway train gpt.toml --dir runs/one",
        ),
        Requirement(
            "a script of its own loop",
            proofs.prove_own_loop(1),
            "no finished run of with_shardway.py",
            "python with_shardway.py --epochs 1",
        ),
        Requirement(
            "exercise: one setting changed",
            proofs.prove_changed_settings,
            "no two finished runs on the same data whose model or optimizer differs",
            "train again with a key of [model] or [optim] of your choice, such as optim.lr, into another --dir",
        ),
    ),
    2: (
        Requirement(
            "a run in fp32",
            proofs.prove_format("fp32"),
            "no finished run that computes in fp32",
            "shardway train gpt.toml --dir runs/fp32 precision.compute=fp32",
        ),
        Requirement(
            "a run in bf16",
            proofs.prove_format("bf16"),
            "no finished run that computes in bf16",
            "shardway train gpt.toml --dir runs/bf16 precision.compute=bf16",
        ),
        Requirement(
            "both learned alike",
            proofs.prove_near_formats,
            f"no two runs of the same training in fp32 and bf16 whose last losses are within {NEAR_LOSS:.0%}",
            "train both again with the same keys, except precision.compute",
        ),
        Requirement(
            "exercise: a third format",
            proofs.prove_third_format,
            "no finished run in another format than fp32 or bf16 with fp32 weights",
            "choose one: `shardway config explain precision` lists them (fp16 has a loss scale); then train with it",
        ),
    ),
    3: (
        Requirement(
            "text and prepared tokens give the same training",
            proofs.prove_two_formats,
            "no two finished runs, on text and on prepared tokens, with the same loss in every step",
            "prepare the text and train on both, with the commands of the lesson",
        ),
        Requirement(
            "stopped and resumed at the exact sample",
            proofs.prove_exact_position,
            "no run that was stopped in between, went on from its checkpoint, and finished with no sample twice",
            "start a run in the background, `touch RUN/stop`, and give the same command again",
        ),
        Requirement(
            "exercise: data of your own",
            proofs.prove_own_data,
            "no finished run on data other than those of the lesson",
            "train on a text, a folder or a format of your choice: data.path=..., after `shardway data info` of it",
        ),
    ),
    4: (
        _WITH_ONE,
        Requirement(
            "two copies, the same losses",
            proofs.prove_same_losses(dp_replicate=2),
            "no run on two copies (dp_replicate = 2) with the losses of a run on one rank",
            "shardway train gpt.toml --nproc 2 --dir runs/two",
        ),
        Requirement(
            "a script of its own loop on two ranks",
            proofs.prove_own_loop(2, dp_replicate=2),
            "no finished run of with_shardway.py on two ranks",
            "torchrun --nproc-per-node 2 with_shardway.py",
        ),
        Requirement(
            "exercise: weak scaling",
            proofs.prove_weak_scaling,
            "no run on two copies with twice the global batch of one on one rank",
            "the work of a rank has to stay the same: which key doubles? train it into another --dir",
        ),
    ),
    5: (
        Requirement(
            "one model on two ranks, the same losses",
            proofs.prove_same_losses(dp_shard=2),
            "no run with parallel.dp_shard = 2 that has the losses of a run on one rank",
            "shardway train gpt.toml --dir runs/one, and shardway train gpt.toml --nproc 2 --dir runs/shard "
            "parallel.dp_shard=2",
        ),
        Requirement(
            "each rank keeps half of the states",
            proofs.prove_divided_states,
            "no checkpoint of two shards in which a rank's file is about half of all",
            "shardway train gpt.toml --nproc 2 --dir runs/shard parallel.dp_shard=2",
        ),
        Requirement(
            "the FSDP2 script on two shards",
            proofs.prove_own_loop(2, dp_shard=2),
            "no finished run of with_shardway.py with parallel.dp_shard=2",
            "torchrun --nproc-per-node 2 with_shardway.py --epochs 1 --dim 64 --layers 2 parallel.dp_shard=2",
        ),
        Requirement(
            "exercise: another number of ranks",
            proofs.prove_other_world,
            "no run that was saved by two ranks and went on with another number of ranks",
            "train a second sharded run of 20 steps, then give its command more steps and another number of ranks",
        ),
    ),
    6: (
        Requirement(
            "split matrices, the same losses",
            proofs.prove_same_losses(tp=2),
            "no run with parallel.tp = 2 that has the losses of a run on one rank",
            "shardway train gpt.toml --nproc 2 --dir runs/tensor model.tied=false parallel.tp=2",
        ),
        Requirement(
            "split layers, the same losses",
            proofs.prove_same_losses(pp=2),
            "no run with parallel.pp = 2 that has the losses of a run on one rank",
            "shardway train gpt.toml --nproc 2 --dir runs/pipeline model.tied=false parallel.pp=2",
        ),
        Requirement(
            "exercise: two axes at once",
            proofs.prove_two_axes,
            "no run with two degrees above 1 that has the losses of a run on one rank",
            "choose two axes whose degrees multiply to --nproc 4; 20 steps are enough (train.steps=20)",
        ),
    ),
    7: (
        Requirement(
            "a job script for the container of cluster.toml",
            proofs.prove_in_container,
            "no job script of this folder that starts the image of cluster.toml with a mount of it",
            "shardway submit cluster.toml --on generic-slurm site.account=course --dry-run > apptainer.sh",
        ),
        Requirement(
            "the same run in another runtime",
            proofs.prove_two_runtimes,
            "no job scripts of this folder for two container runtimes",
            "shardway submit cluster.toml --on generic-pbs site.account=course site.container=enroot "
            "site.image=/project/images/pytorch-25.04-py3.sqsh --dry-run > enroot.sh",
        ),
        Requirement(
            "exercise: a folder that the container sees",
            proofs.prove_own_mount,
            "no job script with a mount that you added to site.mounts of cluster.toml",
            "add a folder to `mounts` in cluster.toml, and write the script again",
        ),
    ),
    8: (
        Requirement(
            "a job script for Slurm",
            proofs.prove_script_of("slurm"),
            "no job script of this folder for Slurm",
            "shardway submit gpt.toml --on generic-slurm site.account=course --dry-run > slurm.sh",
        ),
        Requirement(
            "a job script for PBS",
            proofs.prove_script_of("pbs"),
            "no job script of this folder for PBS",
            "shardway submit gpt.toml --on generic-pbs site.account=course --dry-run > pbs.sh",
        ),
        Requirement(
            "a job that ran to its end",
            proofs.prove_job,
            "no run that a submitted job has finished",
            "shardway submit gpt.toml --dir runs/job, then shardway status runs/job --watch",
        ),
        Requirement(
            "exercise: a job stopped and resumed",
            proofs.prove_resumed_job,
            "no run whose job was stopped by you and that a later job finished from its checkpoint",
            "submit a longer run (train.steps), `shardway stop` it after a checkpoint, then `shardway resume` it",
        ),
    ),
    9: (
        Requirement(
            "a run that nothing disturbed",
            proofs.prove_undisturbed,
            f"no finished run of one start, of {LEAST_STEPS} steps or more",
            "shardway train gpt.toml --dir runs/calm",
        ),
        Requirement(
            "killed, and the same bits",
            proofs.prove_killed,
            "no run that was killed, went on from a checkpoint, and has the losses of an undisturbed one bit for bit",
            "kill a run with kill_rank.py, as the lesson does, and give its command again",
        ),
        Requirement(
            "a chain that survived a job",
            proofs.prove_chain,
            "no run whose job failed and whose next job finished it",
            "submit with --until-done and kill rank 0, as the lesson does",
        ),
        Requirement(
            "exercise: a damaged checkpoint",
            proofs.prove_quarantined,
            "no run that has set a damaged checkpoint aside and finished",
            "overwrite some bytes of the newest rank-00000.bin of a run, give the run more steps, and start it again",
        ),
    ),
    10: (
        _WITH_ONE,
        Requirement(
            "a trace of some steps",
            proofs.prove_trace,
            "no run with a trace of the profiler",
            "shardway profile gpt.toml --steps 3 --dir runs/profile",
        ),
        Requirement(
            "an evaluation that the run keeps",
            proofs.prove_evaluated,
            "no evaluation of a run's checkpoint",
            "shardway evaluate runs/one --limit 50",
        ),
        Requirement(
            "answers of the model",
            proofs.prove_answers,
            "no answers.txt with the answers of a run's model",
            "shardway generate runs/one --file prompts.txt --out answers.txt --max-tokens 40",
        ),
        Requirement(
            "exercise: a second trace, with one thing changed",
            proofs.prove_two_traces,
            "no traces of two runs that differ in a key",
            "profile again into another --dir with a key of your choice, then `shardway trace`",
        ),
    ),
}
"""What each lesson asks for, by its number."""
