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
from shardway.launch.job_script import render_job_script
from shardway.launch.submission import prepare
from shardway.launch.submission.prepare import SubmitRequest
from shardway.resolve.request import parse_words
from shardway.sites import load as site_loading
from shardway.sites.load import list_sites
from shardway.sites.schema import ContainerRules, StartRules
from shell_lint import complaints

FOLDER = "job_scripts"
FUNCTIONS = "# --- how an attempt begins and ends\n"
COMBINATIONS = {f"{s}-{launcher}-{runtime}": (s, launcher, runtime) for s, launcher, runtime in list_combinations()}


def head(script: str) -> str:
    """A script up to its functions, without Shardway's version."""
    return re.sub(r"Written by Shardway \S+", "Written by Shardway VERSION", script.partition(FUNCTIONS)[0])


def functions(script: str) -> str:
    return script.partition(FUNCTIONS)[2]


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
        "special-large": replace(slurm, shape=replace(slurm.shape, nodes=64)),
        "special-options": replace(
            slurm,
            terms=replace(slurm.terms, qos="debug", constraint="gpu|cpu", options=options),
        ),
    }  # fmt: skip


SPECIAL = special_jobs()


@pytest.mark.parametrize("name", COMBINATIONS)
def test_script_of_a_combination(name: str, golden: Golden) -> None:
    golden(head(render_job_script(make_job(*COMBINATIONS[name]))), f"{FOLDER}/{name}.sh")


@pytest.mark.parametrize("name", SPECIAL)
def test_script_of_a_special_job(name: str, golden: Golden) -> None:
    golden(head(render_job_script(SPECIAL[name])), f"{FOLDER}/{name}.sh")


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "local"])
def test_functions_of_a_scheduler(scheduler: str, golden: Golden) -> None:
    """All that a script of it may hold."""
    golden(functions(render_job_script(chained(make_job(scheduler)))), f"{FOLDER}/functions-{scheduler}.sh")


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
    golden(head(prepare_for_site(site, monkeypatch)), f"{FOLDER}/site-{site}.sh")


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
    names |= {f"functions-{scheduler}" for scheduler in ("slurm", "pbs", "local")}
    assert golden_names(FOLDER) == {f"{name}.sh" for name in names}


# --- what bash and shellcheck say of them


def all_scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    jobs = {name: make_job(*case) for name, case in COMBINATIONS.items()}
    scripts = {name: render_job_script(job) for name, job in {**jobs, **SPECIAL}.items()}
    scripts |= {f"chain-{name}": render_job_script(chained(job)) for name, job in jobs.items() if name.endswith("none")}
    return scripts | {f"site-{site}": prepare_for_site(site, monkeypatch) for site in list_sites()}


def write_scripts(folder: Path, scripts: dict[str, str]) -> list[str]:
    for name, script in scripts.items():
        (folder / f"{name}.sh").write_text(script, encoding="utf-8")
    return sorted(str(path) for path in folder.glob("*.sh"))


def test_bash_reads_every_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_scripts(tmp_path, all_scripts(monkeypatch))
    check = 'for script in "$@"; do bash -n "$script" || echo "$script"; done'
    done = subprocess.run(["bash", "-c", check, "check", *paths], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    """Of a script for each scheduler that holds all functions; shorter ones only set what they do not use."""
    jobs = {name: make_job(name) for name in ("slurm", "pbs", "local")}
    jobs["enroot"] = make_job("pbs", "mpirun", "enroot", program=OWN)
    jobs["working-folder"] = SPECIAL["special-working-folder"]
    paths = write_scripts(tmp_path, {name: render_job_script(chained(job)) for name, job in jobs.items()})
    assert complaints(paths) == ""


def test_every_block_of_shell_is_in_a_script() -> None:
    """A function that no script holds is dead."""
    named = {
        match[1]
        for path in (files("shardway.launch") / "shell").iterdir()
        for match in re.finditer(r"^#: (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    texts = [render_job_script(chained(make_job(s, launcher))) for s, launcher, _ in COMBINATIONS.values()]
    texts += [render_job_script(SPECIAL[name]) for name in ("special-working-folder", "special-by-pbs")]
    assert named == {name for name in named if any(f"\n{name}() " in text for text in texts)}


@pytest.mark.parametrize("name", SPECIAL)
def test_the_same_job_gives_the_same_script(name: str) -> None:
    assert render_job_script(SPECIAL[name]) == render_job_script(special_jobs()[name])
