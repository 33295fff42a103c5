from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from job_cases import CODE, OWN, RUN, chained, list_combinations, make_job

from golden_files import Golden, golden_names
from shardway.hardware.probe import LocalMachine
from shardway.launch.hosts.local import LocalHost
from shardway.launch.job import ContainerMount, ContainerUse, Job, JobEnvironment, Meeting
from shardway.launch.job_script import (
    render_enter_script,
    render_job_script,
    render_library,
    render_shell_script,
)
from shardway.launch.script import read_blocks
from shardway.launch.submission import prepare
from shardway.launch.submission.prepare import SubmitRequest
from shardway.plugins import GROUPS, make_own
from shardway.resolve.request import parse_words
from shardway.sites import load as site_loading
from shardway.sites.load import list_sites
from shardway.sites.schema import ContainerRules, StartRules
from shell_lint import complaints

FOLDER = "job_scripts"
MOST_LINES = 100
COMBINATIONS = {f"{s}-{launcher}-{runtime}": (s, launcher, runtime) for s, launcher, runtime in list_combinations()}


def plain(script: str) -> str:
    """A script without Shardway's version; a person reads it as a page."""
    assert len(script.splitlines()) < MOST_LINES
    return re.sub(r"Written by Shardway \S+", "Written by Shardway VERSION", script)


def special_jobs() -> dict[str, Job]:
    """What the combinations do not show, each in one job."""
    slurm, pbs, local = (make_job(name) for name in ("slurm", "pbs", "local"))
    around = JobEnvironment(
        CODE,
        venv="conda:my torch",
        modules=("GCC/13.3.0", "PyTorch/2.5 beta"),
        purge_modules=True,
        expanded={"HF_HOME": "$SCRATCH/hf", "TMP": "~/tmp"},
        literal={"GREETING": "it's $HOME", "LINES": "a\nb"},
    )
    mounts = (ContainerMount("/data", "/data", read_only=True), ContainerMount("/a b", "/c d"))
    by_pbs = ContainerUse(
        "enroot", "/images/t.sqsh", mounts, ContainerRules(by_scheduler=True, data_path="/raid/$PBS_JOBID")
    )
    options: dict[str, bool | int | str | tuple[str, ...]] = {"mail-type": "END,FAIL", "H": True, "x": False}
    no_mpi = StartRules(srun_options=("--mpi=none",))
    return {
        "special-elastic": make_job("slurm", "agent", elastic=True, preflight=OWN),
        "special-until-done": chained(replace(slurm, program=OWN, warn_s=0.0)),
        "special-second-link": chained(replace(slurm, program=OWN, warn_s=0.0)).successor(),
        "special-ahead": chained(replace(pbs, program=OWN, warn_s=0.0), most=3, ahead=True),
        "special-follows": replace(slurm, program=OWN, follows=Path("/scratch/runs/my")),
        "special-follows-pbs": replace(pbs, program=OWN, follows=Path("/scratch/runs/my")),
        "special-surroundings": replace(slurm, around=around),
        "special-surroundings-pbs": replace(pbs, around=around, preflight=OWN),
        "special-mounts": make_job("slurm", "srun", "podman", container=replace(by_pbs, runtime="podman")),
        "special-by-pbs": make_job("pbs", "mpirun", "enroot", program=OWN, container=by_pbs),
        "special-own-program": replace(slurm, program=replace(slurm.program, words=("./a.out", "-x"), python=False)),
        "special-working-folder": replace(slurm, around=replace(around, workdir=RUN / "work/a b", code=CODE)),
        "special-meeting": replace(slurm, meeting=Meeting("i", resolve=True), start=no_mpi),
        "special-odd-run-slurm": replace(slurm, run=Path("/scratch/it's 100%/$HOME/run")),
        "special-odd-run-pbs": replace(pbs, run=Path("/scratch/it's 100%/$HOME/run")),
        "special-odd-run-local": replace(local, run=Path("/scratch/it's 100%/$HOME/run")),
        "special-telemetry-slurm": make_job("slurm", "torchrun", "apptainer", telemetry_s=1.0, python="/v/python"),
        "special-telemetry-pbs": make_job("pbs", "mpirun", telemetry_s=0.5),
        "special-telemetry-local": replace(local, telemetry_s=1.0),
        "special-large": replace(slurm, shape=replace(slurm.shape, nodes=64)),
        "special-options": replace(
            slurm,
            terms=replace(slurm.terms, qos="debug", constraint="gpu|cpu", options=options),
        ),
    }  # fmt: skip


SPECIAL = special_jobs()


@pytest.mark.parametrize("name", COMBINATIONS)
def test_script_of_a_combination(name: str, golden: Golden) -> None:
    golden(plain(render_job_script(make_job(*COMBINATIONS[name]))), f"{FOLDER}/{name}.sh")


@pytest.mark.parametrize("name", SPECIAL)
def test_script_of_a_special_job(name: str, golden: Golden) -> None:
    golden(plain(render_job_script(SPECIAL[name])), f"{FOLDER}/{name}.sh")


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "local"])
def test_functions_of_a_scheduler(scheduler: str, golden: Golden) -> None:
    """One file is for all jobs: those that all have, and at its end those of the scheduler."""
    common, heading, own = render_library(scheduler).partition(f"\n# --- {scheduler}\n\n")
    assert heading
    golden(common, f"{FOLDER}/lib.sh")
    assert own == (files("shardway.launch") / "shell" / f"{scheduler}.sh").read_text(encoding="utf-8")


# --- the shipped sites


def prepare_for_site(site: str, monkeypatch: pytest.MonkeyPatch, *further: str) -> str:
    """The script that `shardway submit --on SITE` makes, on a machine without accelerators."""
    monkeypatch.setattr(os, "urandom", lambda count: bytes.fromhex("a1b2c3"))
    monkeypatch.setattr(sys, "prefix", "/home/alice/venv")
    monkeypatch.setenv("HOME", "/home/alice")
    container = site_loading.load_site(site, lambda: MACHINE).container
    monkeypatch.setattr(prepare, "load_site", lambda name: site_loading.load_site(name, lambda: MACHINE))
    words = [
        "site.nodes=2" if site != "laptop" else "site.nodes=1",
        "site.account=proj1",
        *(["site.walltime=2h"] if site.startswith(("generic", "dgx")) else []),
        *(["site.image=/images/torch.sqsh"] if container not in (None, "none") else []),
        *further,
    ]
    request = replace(parse_words(words), directory=RUN)
    return prepare.prepare(SubmitRequest(request, site=site, here=Path("/home/alice/code")), LocalHost()).script


MACHINE = LocalMachine("laptop", None, 8, 8, 16 * 2**30, (), "3.11", "Linux")


@pytest.mark.parametrize("site", list_sites())
def test_script_of_a_shipped_site(site: str, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    golden(plain(prepare_for_site(site, monkeypatch)), f"{FOLDER}/site-{site}.sh")


@pytest.mark.parametrize(("ranks", "listed"), [(4, True), (2, False), (1, False)])
def test_the_order_of_accelerators_is_for_whole_nodes(
    ranks: int, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that a job is given, numbers 0 and 1, a list that begins with 3 shows none."""
    script = prepare_for_site("perlmutter", monkeypatch, f"site.ranks_per_node={ranks}")
    assert f"#SBATCH --gpus-per-node={ranks}\n" in script
    assert ('CUDA_VISIBLE_DEVICES="3,2,1,0"' in script) is listed
    assert "FI_MR_CACHE_MONITOR" in script


def test_every_kept_script_is_of_a_case() -> None:
    names = {*COMBINATIONS, *SPECIAL, *(f"site-{site}" for site in list_sites())}
    assert golden_names(FOLDER) == {f"{name}.sh" for name in {*names, "lib"}}


# --- what bash and shellcheck say of them


def all_scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    jobs = {name: make_job(*case) for name, case in COMBINATIONS.items()}
    scripts = {name: render_job_script(job) for name, job in {**jobs, **SPECIAL}.items()}
    scripts |= {f"enter-{name}": render_enter_script(job) for name, job in jobs.items()}
    scripts |= {f"shell-{name}": render_shell_script(job, Path("/s")) for name, job in jobs.items()}
    scripts |= {f"chain-{name}": render_job_script(chained(job)) for name, job in jobs.items() if name.endswith("none")}
    return scripts | {f"site-{site}": prepare_for_site(site, monkeypatch) for site in list_sites()}


def write_scripts(folder: Path, scripts: dict[str, str]) -> list[str]:
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / f"{name}.sh").write_text(script, encoding="utf-8")
    return sorted(str(path) for path in folder.glob("*.sh"))


def all_libraries() -> dict[str, str]:
    return {f"lib-{scheduler}": render_library(scheduler) for scheduler in GROUPS["schedulers"].own}


def test_bash_reads_every_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_scripts(tmp_path, {**all_scripts(monkeypatch), **all_libraries()})
    check = 'for script in "$@"; do bash -n "$script" || echo "$script"; done'
    done = subprocess.run(["bash", "-c", check, "check", *paths], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    """Of the functions, and of a script for each scheduler; it does not follow a script into its functions."""
    jobs = {name: make_job(name) for name in ("slurm", "pbs", "local")}
    jobs["enroot"] = make_job("pbs", "mpirun", "enroot", program=OWN)
    jobs["working-folder"] = SPECIAL["special-working-folder"]
    scripts = {name: render_job_script(chained(job)) for name, job in jobs.items()}
    scripts |= {f"enter-{name}": render_enter_script(job) for name, job in jobs.items()}
    scripts |= {f"shell-{name}": render_shell_script(job, Path("/s")) for name, job in jobs.items()}
    paths = write_scripts(tmp_path, scripts)
    known = ("SC1091", "SC2034", "SC2154")  # its functions read and set what it does not
    names = ("SC2089", "SC2090")  # `declare -p` takes names of variables, and no values
    assert complaints(paths, *known, *names) == ""
    assert complaints(write_scripts(tmp_path / "libraries", all_libraries())) == ""


def test_every_function_is_called_and_says_what_it_does() -> None:
    """A function that no script and no other function calls is dead."""
    scripts = [render_job_script(chained(make_job(s, launcher))) for s, launcher, _ in COMBINATIONS.values()]
    scripts += [render_job_script(job) for job in SPECIAL.values()]
    scripts += [render_enter_script(make_job("slurm")), render_shell_script(make_job("slurm"), Path("/s"))]
    blocks = [read_blocks(name) for name in ("lib", *(scheduler.shell for scheduler in make_own("schedulers")))]
    purposes = {name: block.purpose for each in blocks for name, block in each.items()}
    texts = [block.text.partition("() ")[2] for each in blocks for block in each.values()]
    words = {word for text in (*scripts, *texts) for word in re.findall(r"\w+", re.sub(r"(?m)^ *#.*", "", text))}
    assert set(purposes) <= words
    assert [name for name, purpose in purposes.items() if ":" not in purpose and name not in ("cancel_job",)] == []
    defined = {name for text in all_libraries().values() for name in re.findall(r"^(\w+)\(\)", text, re.MULTILINE)}
    assert defined == set(purposes)


@pytest.mark.parametrize("name", SPECIAL)
def test_the_same_job_gives_the_same_script(name: str) -> None:
    assert render_job_script(SPECIAL[name]) == render_job_script(special_jobs()[name])
