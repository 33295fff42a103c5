"""What the runs of a lesson prove: each function gives the evidence for one thing, empty where there is none.

Invariants:
- Runs are found by what they did, never by their name: learners name runs as they like.
- A comparison takes only what two runs have in common; without enough of it there is no evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardway.learn.evidence import JobScript, LessonEvidence, LessonRun
from shardway.rundir.attempts import FAILURES, Ending
from shardway.watch.facts import measured, text, whole

LEAST_STEPS = 20
"""A run of a lesson has at least so many steps: fewer show neither learning nor a pace."""

SAME_LOSS = 1e-3
"""Largest relative difference of a step's losses in two layouts: sums in another order, in single precision."""

NEAR_LOSS = 0.1
"""Largest relative difference of final losses in two number formats of products."""

Find = Callable[[LessonEvidence], str]

# --- comparing runs

_TRAINING = ("train.global_batch", "train.seed", "data.kind", "data.path", "data.seq_len")


def has_same_training(one: LessonRun, other: LessonRun) -> bool:
    """Whether two runs train the same model on the same batches with the same optimizer, in any layout."""
    same_sections = all(one.values.get(name) == other.values.get(name) for name in ("model", "optim"))
    return same_sections and all(one.get(key) == other.get(key) for key in _TRAINING)


def find_largest_difference(one: LessonRun, other: LessonRun) -> float:
    """The largest relative difference of the losses of a step that both have done; infinite where none is common."""
    losses, others = one.losses, other.losses
    common = losses.keys() & others.keys()
    if len(common) < LEAST_STEPS // 2:
        return float("inf")
    return max(abs(losses[step] - others[step]) / abs(others[step]) for step in common)


def has_axes(run: LessonRun, **degrees: int) -> bool:
    """Whether the degrees above 1 of a run are these."""
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
    return {
        axis: run.get(f"parallel.{axis}") for axis in axes if run.get(f"parallel.{axis}") not in (None, 1)
    } == degrees


def list_whole(evidence: LessonEvidence) -> list[LessonRun]:
    """Finished runs of the example with enough steps."""
    return [run for run in evidence.gpts if len(run.steps) >= LEAST_STEPS]


def _names(*runs: LessonRun) -> str:
    return ", ".join(run.name for run in runs)


def _first(found: Iterator[str]) -> str:
    return next(found, "")


def _pairs(runs: Sequence[LessonRun]) -> Iterator[tuple[LessonRun, LessonRun]]:
    return ((one, other) for one in runs for other in runs if one is not other)


# --- 1: one device


def prove_alone(evidence: LessonEvidence) -> str:
    """A finished run of the example on one rank."""
    return _first(run.name for run in list_whole(evidence) if run.world == 1)


def prove_learning(evidence: LessonEvidence) -> str:
    """A run whose loss fell by a fifth."""
    for run in list_whole(evidence):
        losses = [loss for _, loss in sorted(run.losses.items())]
        last = sum(losses[-5:]) / 5
        if last < 0.8 * losses[0]:
            return f"{run.name}: loss {losses[0]:.2f} to {last:.2f}"
    return ""


def prove_own_loop(ranks: int, **degrees: int) -> Find:
    """A finished run of a script on so many ranks, in this layout."""

    def find(evidence: LessonEvidence) -> str:
        return _first(run.name for run in evidence.own_loops if run.world == ranks and has_axes(run, **degrees))

    return find


def prove_changed_settings(evidence: LessonEvidence) -> str:
    """Two runs on the same data whose optimizer or model differs."""
    for one, other in _pairs(list_whole(evidence)):
        same_data = all(one.get(key) == other.get(key) for key in ("data.path", "train.seed"))
        for section in ("optim", "model"):
            before, after = one.values.get(section) or {}, other.values.get(section) or {}
            changed = [name for name in after if before.get(name) != after[name]]
            if same_data and changed:
                return f"{_names(one, other)}: {section}.{changed[0]} {before.get(changed[0])} and {after[changed[0]]}"
    return ""


# --- 2: number formats


def _formats(run: LessonRun) -> dict[str, Any]:
    return dict(run.values.get("precision") or {})


def prove_format(name: str) -> Find:
    """A run that computes in this format."""
    return lambda evidence: _first(run.name for run in list_whole(evidence) if run.get("precision.compute") == name)


def prove_near_formats(evidence: LessonEvidence) -> str:
    """The same training in fp32 and in bf16, with last losses within `NEAR_LOSS`."""
    for one, other in _pairs(list_whole(evidence)):
        formats = (one.get("precision.compute"), other.get("precision.compute"))
        if formats == ("fp32", "bf16") and has_same_training(one, other):
            step = min(max(one.losses), max(other.losses))
            losses = one.losses[step], other.losses[step]
            if abs(losses[1] - losses[0]) < NEAR_LOSS * losses[0]:
                return f"{_names(one, other)}: {losses[0]:.3f} and {losses[1]:.3f} at step {step}"
    return ""


def prove_third_format(evidence: LessonEvidence) -> str:
    """A run in another format than fp32, or bf16 with weights in fp32."""
    known = [{"compute": "fp32", "weights": "fp32"}, {"compute": "bf16", "weights": "fp32"}]
    for run in list_whole(evidence):
        formats = _formats(run)
        if {name: formats.get(name) for name in ("compute", "weights")} not in known:
            return f"{run.name}: compute {formats.get('compute')}, weights {formats.get('weights')}"
    return ""


# --- 3: data


def prove_two_formats(evidence: LessonEvidence) -> str:
    """A run on text and a run on prepared tokens with the same bits."""
    for one, other in _pairs(list_whole(evidence)):
        if (one.get("data.kind"), other.get("data.kind")) == ("text", "tokens"):
            common = one.losses.keys() & other.losses.keys()
            if len(common) >= LEAST_STEPS and all(one.losses[step] == other.losses[step] for step in common):
                return f"{_names(one, other)}: the same loss in each of {len(common)} steps"
    return ""


def find_position_gap(run: LessonRun) -> str:
    """Where a run's steps do not take the samples one after another; empty where they do."""
    expected = 0
    for step, event in sorted(run.steps.items()):
        if whole(event, "position") != expected:
            return f"step {step} began at sample {event.get('position')}, and {expected} was next"
        expected += whole(event, "samples") or 0
    return ""


def prove_exact_position(evidence: LessonEvidence) -> str:
    """A run that was stopped, went on, and took each sample once."""
    for run in list_whole(evidence):
        for start, ending in run.list_resumed():
            if ending is not None and ending["event"] == "stopped" and not find_position_gap(run):
                step = start["step"]
                return f"{run.name}: stopped, and went on at step {step}, sample {run.steps[step + 1]['position']}"
    return ""


def prove_own_data(evidence: LessonEvidence) -> str:
    """A run on data that the lesson did not bring."""
    known = ("text.txt", "tokens", "python:stdlib")
    for run in list_whole(evidence):
        path = str(run.get("data.path") or "")
        if path and path.rstrip("/").rpartition("/")[2] not in known:
            return f"{run.name}: data.path {path}"
    return ""


# --- 4 to 6: layouts


def prove_same_losses(**degrees: int) -> Find:
    """A run on one rank and a run in this layout, with the same loss in every step."""

    def find(evidence: LessonEvidence) -> str:
        for one, other in _pairs(list_whole(evidence)):
            if one.world == 1 and has_axes(other, **degrees) and has_same_training(one, other):
                difference = find_largest_difference(one, other)
                if difference < SAME_LOSS:
                    return f"{_names(one, other)}: losses differ by at most {difference:.0e}"
        return ""

    return find


def prove_weak_scaling(evidence: LessonEvidence) -> str:
    """A run on two copies whose ranks have as many samples as one rank alone."""
    for one, other in _pairs(list_whole(evidence)):
        batches = one.get("train.global_batch"), other.get("train.global_batch")
        if one.world == 1 and has_axes(other, dp_replicate=2) and batches[1] == 2 * (batches[0] or 0):
            return f"{_names(one, other)}: {batches[0]} samples a rank in both"
    return ""


def prove_divided_states(evidence: LessonEvidence) -> str:
    """A checkpoint of two shards, each about half of it."""
    for run in list_whole(evidence):
        if has_axes(run, dp_shard=2) and len(run.shard_bytes) == 2:
            part = max(run.shard_bytes) / sum(run.shard_bytes)
            if part < 0.6:
                return f"{run.name}: a rank's file has {part:.0%} of {sum(run.shard_bytes):,} bytes"
    return ""


def prove_other_world(evidence: LessonEvidence) -> str:
    """A run that two ranks saved and another number of ranks continued."""
    for run in evidence.gpts:
        for start, _ in run.list_resumed():
            before, now = whole(start, "checkpoint_world"), whole(start, "world")
            if before == 2 and now not in (None, before):
                return f"{run.name}: saved by {before} ranks, went on with {now} at step {start['step']}"
    return ""


def prove_two_axes(evidence: LessonEvidence) -> str:
    """A run with two degrees above 1 and the losses of one rank."""
    for one, other in _pairs(evidence.gpts):
        degrees = [
            axis for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp") if (other.get(f"parallel.{axis}") or 1) > 1
        ]
        if one.world == 1 and len(degrees) >= 2 and has_same_training(one, other):
            difference = find_largest_difference(one, other)
            if difference < SAME_LOSS:
                return f"{_names(one, other)}: {' x '.join(degrees)}, losses differ by at most {difference:.0e}"
    return ""


# --- 7 and 8: job scripts and jobs


def _is_of(script: JobScript, evidence: LessonEvidence) -> bool:
    """Whether a script is whole, and of a run in this folder."""
    runs = str((evidence.folder / "runs").resolve())
    has_all = all(line in script.text for line in ("\nmain() {\n", "  begin_attempt", "  finish", "\nmain\n"))
    return has_all and script.find_setting("run").startswith(f"{runs}/")


def _list_scripts(evidence: LessonEvidence) -> list[JobScript]:
    return [script for script in evidence.scripts if _is_of(script, evidence)]


def _read_site_keys(evidence: LessonEvidence) -> dict[str, Any]:
    """The keys of [site] that cluster.toml sets; empty where it cannot be read."""
    import tomllib

    try:
        content = tomllib.loads((evidence.folder / "cluster.toml").read_text(encoding="utf-8"))
        return dict(content.get("site") or {})
    except (OSError, ValueError, TypeError):
        return {}


def prove_in_container(evidence: LessonEvidence) -> str:
    """A job script that starts the image of cluster.toml."""
    site = _read_site_keys(evidence)
    for script in _list_scripts(evidence):
        image, mounts = str(site.get("image", "")), [str(each) for each in site.get("mounts") or ()]
        starts = script.find_setting("runtime") == site.get("container") and bool(image)
        if starts and image in script.text and any(mount in script.text for mount in mounts):
            return f"{script.path.name}: {site['container']} starts {image}"
    return ""


def prove_two_runtimes(evidence: LessonEvidence) -> str:
    """Job scripts for two container runtimes."""
    found = {script.find_setting("runtime"): script.path.name for script in _list_scripts(evidence)}
    found.pop("none", None)
    return " and ".join(f"{name} ({runtime})" for runtime, name in sorted(found.items())) if len(found) > 1 else ""


def prove_own_mount(evidence: LessonEvidence) -> str:
    """A mount of cluster.toml that it was not shipped with, in a script."""
    for mount in map(str, _read_site_keys(evidence).get("mounts") or ()):
        if mount.rstrip("/") != "/project/data":
            for script in _list_scripts(evidence):
                if mount in script.text:
                    return f"{script.path.name}: {mount}"
    return ""


def prove_script_of(scheduler: str) -> Find:
    """A job script for this scheduler."""
    return lambda evidence: _first(
        script.path.name for script in _list_scripts(evidence) if script.find_setting("scheduler") == scheduler
    )


def prove_job(evidence: LessonEvidence) -> str:
    """A run that a submitted job has finished."""
    for run in evidence.gpts:
        for attempt in run.attempts:
            submission, result = attempt.read_submission(), attempt.read_result()
            if submission and submission.job and attempt.read_started() and result and result.state == Ending.FINISHED:
                return f"{run.name}: job {submission.job} of the scheduler {submission.scheduler}, finished"
    return ""


def prove_resumed_job(evidence: LessonEvidence) -> str:
    """A run whose job was stopped, and that a later job finished."""
    for run in evidence.gpts:
        endings = run.endings
        stopped = endings.index(Ending.STOPPED) if Ending.STOPPED in endings else len(endings)
        if Ending.FINISHED in endings[stopped:] and run.list_resumed():
            return f"{run.name}: attempts ended {', '.join(endings)}"
    return ""


# --- 9: faults


def prove_undisturbed(evidence: LessonEvidence) -> str:
    """A finished run of one start."""
    return _first(run.name for run in list_whole(evidence) if len(run.starts) == 1 and not run.attempts)


def prove_killed(evidence: LessonEvidence) -> str:
    """A run that was killed and has the bits of one that was not."""
    for one, other in _pairs(list_whole(evidence)):
        killed = [start for start, ending in other.list_resumed() if ending is None]
        if len(one.starts) == 1 and killed and not other.attempts and has_same_training(one, other):
            common = one.losses.keys() & other.losses.keys()
            after = [step for step in common if step > killed[0]["step"]]
            if after and all(one.losses[step] == other.losses[step] for step in common):
                return f"{other.name}: killed, went on from step {killed[0]['step']}, and has the bits of {one.name}"
    return ""


def prove_chain(evidence: LessonEvidence) -> str:
    """A run whose job failed, and that the next job finished."""
    for run in evidence.gpts:
        endings = run.endings
        broken = [
            place for place, ending in enumerate(endings) if ending in {*FAILURES, Ending.PREEMPTED, Ending.DEADLINE}
        ]
        if broken and Ending.FINISHED in endings[broken[0] :] and run.list_resumed():
            return f"{run.name}: attempts ended {', '.join(endings)}"
    return ""


def prove_quarantined(evidence: LessonEvidence) -> str:
    """A finished run that has set a damaged checkpoint aside."""
    for run in evidence.gpts:
        for event in run.events:
            if event["event"] == "checkpoint_quarantined":
                return f"{run.name}: step {event.get('step')} set aside: {text(event, 'reason')[:80]}"
    return ""


# --- 10: watch, profile, use


def prove_evaluated(evidence: LessonEvidence) -> str:
    """An evaluation of a step that the run has done."""
    for run in list_whole(evidence):
        for found in run.directory.read_evaluations():
            if found.get("step") in run.steps and isinstance(found.get("results"), dict):
                return (
                    f"{run.name}: {found.get('kind')} of step {found['step']}: {measured(found['results'], 'loss'):.3f}"
                )
    return ""


def _list_profiled(evidence: LessonEvidence) -> list[LessonRun]:
    return [run for run in evidence.runs if any(path.stat().st_size > 1000 for path in run.list_traces())]


def prove_trace(evidence: LessonEvidence) -> str:
    """A run with a trace of the profiler."""
    return _first(f"{run.name}: {run.list_traces()[0].name}" for run in _list_profiled(evidence))


def prove_answers(evidence: LessonEvidence) -> str:
    """Answers of a model, beside the run that made it."""
    import json

    if not list_whole(evidence):
        return ""
    path = evidence.folder / "answers.txt"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [str(each["prompt"]) for each in lines]
        made = [str(run.directory.path) for run in evidence.gpts]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"{path.name}: {len(prompts)} prompts" if prompts and made and all(_has_text(each) for each in lines) else ""


def _has_text(answer: Any) -> bool:
    return any(isinstance(value, str) and value for name, value in answer.items() if name != "prompt")


def prove_two_traces(evidence: LessonEvidence) -> str:
    """Traces of two runs that differ in a key."""
    for one, other in _pairs(_list_profiled(evidence)):
        for section in ("train", "model", "precision", "parallel", "recompute", "data"):
            before, after = one.values.get(section) or {}, other.values.get(section) or {}
            changed = [name for name in after if before.get(name) != after[name] and name not in ("profile", "steps")]
            if changed:
                return f"{_names(one, other)}: {section}.{changed[0]} {before.get(changed[0])} and {after[changed[0]]}"
    return ""
