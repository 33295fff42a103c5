"""The run directory that is damaged: a real one, with every file that a run of a job leaves.

Invariant: every file of it was written by Shardway's own writers. This module must not damage anything.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from runs import TINY, lone_rank, train_tiny
from shardway.launch.submission.prepare import SubmitRequest, render_order
from shardway.resolve.request import ResolveRequest
from shardway.rundir.attempts import Attempt, AttemptStart, Ending, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.runfile.load import DEFAULT, load_run, render_run

STEPS = 8
WORDS = (
    *TINY,
    "model.layers=1",
    "model.dim=8",
    "model.ffn_dim=16",
    "checkpoint.every=2 steps",
    "optim.schedule=constant",
    f"train.steps={STEPS}",
)


def train_small(folder: Path) -> Path:
    """Two attempts, of 4 and of 8 steps, with checkpoints, output of a rank, a report and a stop file."""
    run, threads = RunDir(folder), torch.get_num_threads()
    for number, steps in ((1, 4), (2, STEPS)):
        attempt = run.attempt(number)
        _submit(attempt)
        train_tiny(folder, lone_rank(), *WORDS, f"train.steps={steps}", attempt=attempt)
        attempt.write_result(Result(Ending.FINISHED, "all steps are done", steps, 0, by="rank 0", ended=time.time()))
    torch.set_num_threads(threads)
    _leave_output(run)
    return folder


def _submit(attempt: Attempt) -> None:
    """What `shardway submit` and its job leave beside the run."""
    attempt.make()
    now, job = time.time(), f"99999999{attempt.number}.1"
    asked = {"name": "small", "walltime_s": 3600.0, "nodes": 1, "cores": 2, "script": str(attempt.job_script)}
    attempt.write_submission(Submission("local", f"a1b2c{attempt.number}", job, submitted=now - 9, asked=asked))
    attempt.write_started(AttemptStart(job, "node1", "node1", now - 8, now + 3600))
    order = SubmitRequest(ResolveRequest(attempt.run_file, (), attempt.run_path), site="laptop", here=Path("/nowhere"))
    attempt.order_path.write_text(render_order(order), encoding="utf-8")
    loaded = load_run(None, WORDS)
    text = render_run(loaded.values, loaded.origins, lambda dotted: loaded.origins[dotted] != DEFAULT)
    attempt.run_file.write_text(text, encoding="utf-8")
    attempt.job_log.write_text("shardway: attempt 1: starting\n0: step 1\n", encoding="utf-8")


def _leave_output(run: RunDir) -> None:
    """What a rank printed, and the wish to stop."""
    folder = run.log_folder / "start/attempt_0/0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("said\n", encoding="utf-8")
    run.request_stop("stopped by `shardway stop`")
