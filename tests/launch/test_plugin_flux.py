"""A scheduler in a package of its own, `examples/plugins/shardway-flux`, installed as a person would install it.

What the fake `flux` answers is in tests/data/transcripts/flux, in the forms that Flux's manual pages document.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_cases import make_job

from shardway.launch.hosts.base import Done
from shardway.launch.schedulers.base import JobPhase, RequestedResources, Scheduler, SchedulerEnding, SchedulerSilent
from transcripts import find

PACKAGE = Path(__file__).parents[2] / "examples/plugins/shardway-flux"
SOURCE = Path(__file__).parents[2] / "src"
SITE = """
format = 1
name = "fluxia"
title = "A machine with Flux"
scheduler = "flux"
node = { cores = 64, accelerator = "mi250x-gcd", accelerators_per_node = 8 }
queues = [{ name = "pbatch", max_walltime = "24h" }]
"""
FAKE = r"""#!/bin/bash
printf '%s\n' "$*" >> "$FAKES/calls"
[ "$1" != --parent ] || shift
case "$1 $2" in
  "batch "*) cat "$FAKES/batch" ;;
  "jobs --json") cat "$FAKES/answer" ;;
  "getattr jobid") echo ƒM7Zq9AKHno ;;
  "job id") echo 149394041430081536 ;;
  "job timeleft") echo 600 ;;
  "hostlist --local") echo n4 n5 ;;
  run*) while [[ $2 = --* ]]; do shift; done; FLUX_TASK_RANK=0 "${@:2}" ;;
esac
"""
JOB = "149394041430081536"
"""ƒM7Zq9AKHno as a number."""

VERB = "import shardway.launch.submission.host_checks as h, shardway.cli.main as m; h._OF_ONE_NODE = (); m.main()"
"""The command line, for a run directory where tests write."""


def answer(name: str) -> Done:
    return find("flux/jobs", f"flux jobs --json {name}").done


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the package is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    copy = shutil.copytree(PACKAGE, folder / "source")  # setuptools leaves a folder beside what it builds
    words = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", *words, "--target", folder / "packages", copy], check=True)
    return folder / "packages"


@dataclass(frozen=True)
class Machine:
    """A machine with a fake flux, a profile, and the package."""

    folder: Path
    project: Path
    variables: Mapping[str, str]

    def answers(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def run(self, *words: str, code: int = 0) -> str:
        """What a verb prints."""
        done = subprocess.run(
            [sys.executable, "-c", VERB, *words], env=self.variables, cwd=self.project, capture_output=True, text=True
        )
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def machine(disk_path: Path, packages: Path) -> Machine:
    for name, text in {"bin/flux": FAKE, "bin/python3": '#!/bin/bash\necho "$@" > "$FAKES/rank"\n'}.items():
        path = disk_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for name in ("home", "project"):
        (disk_path / name).mkdir()
    (disk_path / "project/site.toml").write_text(SITE)
    (disk_path / "project/train.py").write_text("import torch.distributed\n")
    variables = {
        "HOME": f"{disk_path}/home",
        "FAKES": str(disk_path),
        "PATH": f"{disk_path}/bin:/usr/bin:/bin",
        "PYTHONPATH": f"{packages}:{SOURCE}",
    }
    return Machine(disk_path, disk_path / "project", variables)


SUBMIT = ("submit", "--on", "./site.toml", "--walltime", "1h", "--nodes", "2", "site.venv=none")


def test_a_profile_may_name_it(machine: Machine) -> None:
    assert "flux" in machine.run("sites", "show", "./site.toml")
    (machine.project / "site.toml").write_text(SITE.replace('"flux"', '"fluxx"'))
    assert 'allowed: "local", "slurm", "pbs", "flux"' in machine.run("sites", "show", "./site.toml", code=2)


def test_a_job_is_submitted_looked_at_and_stopped(machine: Machine) -> None:
    machine.answers(batch=find("flux/jobs", "flux batch job.sh").done.out)
    shown = machine.run(*SUBMIT, "--dry-run", "--", "python3", "train.py")
    assert "#flux: --nodes=2 --nslots=2 --cores-per-slot=64 --gpus-per-slot=8\n" in shown
    machine.run(*SUBMIT, "--", "python3", "train.py")
    attempt = machine.project / "runs/train/attempts/0001"
    job = str(json.loads((attempt / "submission.json").read_text())["job"])
    assert job == JOB
    assert machine.calls() == [f"batch {attempt}/job.sh"]
    machine.answers(answer=answer("sched").out)
    assert "It waits for its turn and for free nodes." in machine.run("status", "train")
    machine.answers(answer=answer("run").out)
    assert "running" in machine.run("status", "train")
    machine.run("stop", "train", "--now", "--yes")
    assert machine.calls()[-1] == f"cancel {job}"


def test_a_refusal_has_a_sentence(machine: Machine) -> None:
    refused = find("flux/jobs", "flux batch job.sh --queue=nosuch").done
    flux = machine.folder / "bin/flux"
    flux.write_text(f"#!/bin/bash\necho {refused.err.strip()!r} >&2\nexit {refused.code}\n")
    assert 'Flux has no queue "pbatch" that takes jobs' in machine.run(*SUBMIT, "--", "python3", "train.py", code=2)
    assert not (machine.project / "runs").exists()


def test_its_job_script_runs(machine: Machine) -> None:
    machine.answers(batch=find("flux/jobs", "flux batch job.sh").done.out)
    machine.run(*SUBMIT, "--", "python3", "train.py")
    attempt = machine.project / "runs/train/attempts/0001"
    done = subprocess.run(["bash", attempt / "job.sh"], env=machine.variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    started, result = (json.loads((attempt / f"{name}.json").read_text()) for name in ("started", "result"))
    assert (started["job"], result["state"]) == (JOB, "finished")
    assert started["deadline"] - started["started"] == 600
    assert "--nnodes=2 --nproc-per-node=8" in (machine.folder / "rank").read_text()


# --- what it makes of answers


@pytest.fixture
def flux(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "shardway_flux", raising=False)
    import shardway_flux  # type: ignore[import-not-found]

    scheduler: Scheduler = shardway_flux.Flux()
    return scheduler


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("depend", {"phase": JobPhase.QUEUED, "state": "DEPEND", "started": None}),
        ("sched", {"phase": JobPhase.QUEUED, "reason": "insufficient resources"}),
        ("run", {"phase": JobPhase.RUNNING, "nodes": "n[4-5]", "started": 1790000060.5, "name": "NAME"}),
        ("completed", {"ending": SchedulerEnding.COMPLETED, "exit_code": 0, "ended": 1790000101.0}),
        ("failed", {"ending": SchedulerEnding.FAILED, "exit_code": 3, "signal": 0}),
        ("killed", {"ending": SchedulerEnding.FAILED, "exit_code": None, "signal": 9}),
        ("timeout", {"ending": SchedulerEnding.TIMEOUT, "exit_code": 143, "started": 1790000060.5}),
        ("canceled", {"ending": SchedulerEnding.CANCELLED, "exit_code": None, "started": None}),
        ("never-started", {"ending": SchedulerEnding.NEVER_STARTED}),
        ("unknown", {"phase": JobPhase.UNKNOWN}),
    ],
)
def test_answers_are_read(flux: Scheduler, name: str, facts: Mapping[str, Any]) -> None:
    (record,) = flux.parse_records(["1"], [answer(name)]).values()
    assert {key: getattr(record, key) for key in facts} == facts
    waits = flux.explain_pending(record)
    assert (waits is not None) is (record.phase is JobPhase.QUEUED)
    assert waits is None or waits.code in ("dependency", "resources")


def test_silence_is_no_answer(flux: Scheduler) -> None:
    with pytest.raises(SchedulerSilent, match="Unable to connect to Flux"):
        flux.parse_records(["1"], [answer("silent")])
    with pytest.raises(SchedulerSilent):
        flux.parse_found([answer("silent")])
    assert flux.parse_found([Done((), 0, "12\n7\n", "")]) == ("7", "12")


def test_ids_are_numbers(flux: Scheduler) -> None:
    """The examples of RFC 19."""
    ids = {"ƒ1": 0, "ƒ2": 1, "ƒxyzzy": 633528662, "f7YXq9G": 4294967295, "ƒuZZybuNNy": 6731191091817518}
    assert {text: flux.read_job_id(f"hello\n{text}\n") for text in ids} == {text: str(id) for text, id in ids.items()}
    assert flux.read_job_id("nothing") == ""


def test_a_rule_of_all_schedulers_follows_its_own(flux: Scheduler) -> None:
    (record,) = flux.parse_records(["1"], [answer("killed")]).values()
    explained = flux.explain_ending(record, RequestedResources())
    assert explained is not None
    assert explained.code != "ended"


def test_a_chain_and_another_shape(flux: Scheduler) -> None:
    job = make_job("slurm")
    assert flux.submit("/job.sh", "", "7") == ("flux", "batch", "--dependency=afterany:7", "/job.sh")
    assert flux.each_node(job).words[-1] == "--gpus-per-task=4"
    assert any("--exclusive" in line.text for line in flux.directives(job))


def test_it_is_a_short_package() -> None:
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")) < 150
