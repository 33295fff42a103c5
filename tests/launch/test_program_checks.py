from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from shardway.errors import UserError
from shardway.launch.hosts.local import LocalHost
from shardway.launch.snapshot import SnapshotPlan
from shardway.launch.submission.command import Code
from shardway.launch.submission.host_checks import parse_conda_environments
from shardway.launch.submission.prepare import SubmitRequest, prepare
from shardway.resolve.request import ResolveRequest

CONDA = """# conda environments:
#
base                   /opt/conda
train                * /opt/conda/envs/train
                       /home/alice/envs/own
"""
Refuse = Callable[..., str]


class Elsewhere(LocalHost):
    """Another host, whose files lie here."""

    name = "alice@login"


def make_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """What is said of `refuse("python", "x.py", keys=("site.venv=none",))`, "" for nothing."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setenv("PATH", f"{tmp_path}/tools:/usr/bin:/bin")
    (tmp_path / "code/package").mkdir(parents=True)
    (tmp_path / "code/package/__init__.py").touch()
    make_program(tmp_path / "code/program", "")

    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)

    def ask(*command: str, keys: tuple[str, ...] = (), host: LocalHost | None = None) -> str:
        order = SubmitRequest(ResolveRequest(None, keys, tmp_path / "run"), command=command, here=tmp_path / "code")
        try:
            prepare(order, host or LocalHost(), look=True)
        except UserError as error:
            return str(error).replace(str(tmp_path), "")
        return ""

    return ask


def test_what_is_wrong_with_the_command_is_told_first(refuse: Refuse, tmp_path: Path) -> None:
    secrets = tmp_path / "home/.config/shardway/secrets.env"
    secrets.parent.mkdir(parents=True)
    secrets.write_text("no variable\n")
    said = refuse("torchrun", "program")
    assert said.index("the command (command line)") < said.index("secrets.env, line 1")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with the modules of this Python but torch."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    make_program(tmp_path / "venv/bin/python3", f'"{sys.executable}" "${{@/#torch/no_torch}}" | sed s/no_torch/torch/')
    make_program(tmp_path / "venv/bin/of-the-venv", "")
    return tmp_path / "venv"


@pytest.mark.parametrize("command", [("python", "-m", "package.main"), ("./program",), ("bash", "x"), ("env",)])
def test_a_program_that_is_there(command: tuple[str, ...], refuse: Refuse) -> None:
    assert refuse(*command) == ""


def test_modules_are_found_in_the_environment(refuse: Refuse, venv: Path) -> None:
    told = refuse("python", "-m", "no_module.main", keys=(f"site.venv={venv}",))
    assert told.splitlines()[1::2] == [
        "  site.venv (command line): /venv has no torch",
        "  the command (command line): there is no module no_module in the code or in /venv",
    ]
    assert "to do: `/venv/bin/pip install torch`" in told
    mpirun = (f"site.venv={venv}", "site.launcher=mpirun")  # which needs no torch
    assert refuse("python", "-m", "json.tool", keys=mpirun) == ""
    assert refuse("of-the-venv", keys=mpirun) == ""
    assert "no program of-the-venv on the PATH" in refuse("of-the-venv")


def test_ft_launcher_is_looked_for(refuse: Refuse, venv: Path) -> None:
    make_program(venv / "bin/python3", "echo nvidia_resiliency_ext")
    told = refuse("python", "x.py", keys=(f"site.venv={venv}", "site.launcher=ft_launcher"))
    assert "  site.venv (command line): /venv has no nvidia_resiliency_ext\n" in told
    assert "to do: `/venv/bin/pip install nvidia-resiliency-ext`" in told
    assert "nvidia" not in refuse("python", "x.py", keys=(f"site.venv={venv}", "site.launcher=mpirun"))


@pytest.mark.parametrize(
    "unknown",
    [
        ("site.modules=['Python']",),
        ("site.environment={PYTHONPATH='/x', PATH='/y'}",),
        ("site.container=podman", "site.image=docker.io/library/torch:2"),
    ],
)
def test_what_the_job_may_bring_is_not_missed(unknown: tuple[str, ...], refuse: Refuse, venv: Path) -> None:
    keys = (f"site.venv={venv}", f"site.mounts=['{venv}']", *unknown)
    assert refuse("python", "-m", "no_module", keys=keys) == ""
    assert refuse("no-program", keys=keys) == ""


@pytest.mark.parametrize("answer", ["exit 1", "kill -9 $$"])
def test_an_environment_that_does_not_answer_is_not_blamed(answer: str, refuse: Refuse, venv: Path) -> None:
    make_program(venv / "bin/python3", f"echo torch; {answer}")
    assert refuse("python", "-m", "no_module", keys=(f"site.venv={venv}",)) == ""


def test_a_conda_environment_is_looked_for(refuse: Refuse, tmp_path: Path) -> None:
    assert refuse("./program", keys=("site.venv=conda:nope",)) == ""  # no conda: nobody knows
    make_program(tmp_path / "tools/conda", f"cat <<'END'\n{CONDA}END")
    assert "there is no conda environment nope on this machine" in refuse("./program", keys=("site.venv=conda:nope",))
    assert refuse("./program", keys=("site.venv=conda:train",)) == ""
    assert "no conda environment /gone" in refuse("./program", keys=("site.venv=conda:/gone",))
    assert refuse("./program", keys=(f"site.venv=conda:{tmp_path}",)) == ""


def test_the_names_of_conda_environments() -> None:
    assert parse_conda_environments(CONDA) >= {"base", "train", "own"}


def test_relative_data_are_looked_for_where_the_job_runs(refuse: Refuse, tmp_path: Path) -> None:
    keys = ("data.path=text.txt",)
    assert "data.path (command line): there is no file text.txt in /code" in refuse(keys=keys)
    (tmp_path / "code/text.txt").write_text("x")
    assert refuse(keys=keys) == ""
    told = refuse(keys=(*keys, "site.venv=none"), host=Elsewhere())  # no repository, so no code goes there
    assert "data.path (command line): there is no /run/text.txt on alice@login" in told


def test_what_a_snapshot_holds(tmp_path: Path) -> None:
    for name in ("project/sub/a.py", "project/secret.env", "b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    plan = SnapshotPlan(tmp_path / "project", "sub", None, {}, (), {"secret.env": "a secret"}, ())
    code = Code(tmp_path / "project/sub", plan)
    reasons = {path: code.why_missing(path) for path in ("a.py", "./a.py", "c.py", "../secret.env", "../../b.py")}
    assert [path for path, why in reasons.items() if not why] == ["a.py", "./a.py"]
    assert "there is no file c.py" in reasons["c.py"]
    assert "not in the snapshot that the job runs in (a secret)" in reasons["../secret.env"]
    assert f"leads out of {tmp_path}/project" in reasons["../../b.py"]
    assert code.find_remedy("c.py") == "correct its path"  # it is nowhere; the next one is here, and not for the job
    assert code.find_remedy("../../b.py").startswith("submit it from the folder that holds it")
    assert replace(code, snapshot=None).why_missing("../../b.py") == ""
    assert os.fspath(code.here) not in replace(code, is_there=False).why_missing("c.py")


# --- what the words of a command name


def git_init(folder: Path) -> None:
    subprocess.run(["git", "init", "-q", str(folder)], check=True)


@pytest.mark.parametrize(
    "words",
    [
        ("../d/x.txt",),
        ("--data=../d/x.txt",),
        ("--out", "../not-there-yet"),
        ("..",),
        ("package/../../d/x.txt",),
    ],
    ids=" ".join,
)
def test_a_path_that_leads_out_of_the_code_is_told(words: tuple[str, ...], refuse: Refuse, tmp_path: Path) -> None:
    """Without a repository the copy is that of the folder alone."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x.txt").touch()
    told = refuse("python", "-m", "package.main", *words)
    assert "leads out of /code, and the job runs in a copy of that folder" in told
    assert "to do: name it by its whole path: " in told


def test_paths_in_what_a_shell_runs_are_looked_at(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for text in ("cat ../d", "A=../d/x ./program", "./program <../d/x"):
        assert "leads out of /code" in refuse("bash", "-c", text)
    for text in ("cd package && cat ../program", "cat a../b", "./program package/../program"):
        assert refuse("bash", "-c", text) == ""


@pytest.mark.parametrize(
    "words", [("https://x/../y",), ("a..b",), ("package/..",), ("--x=./package",), ("-1",), ("x" * 5000 + "/",), ("*",)]
)
def test_other_words_are_left_alone(words: tuple[str, ...], refuse: Refuse) -> None:
    assert refuse("python", "-m", "package.main", *words) == ""


def test_a_path_within_the_repository_means_what_it_meant(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the copy too, above the folder in which the job works."""
    monkeypatch.setenv("HOME", "/nowhere")  # and not below the repository, which then would be a home folder's
    git_init(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x.txt").touch()
    assert refuse("python", "-m", "package.main", "../d/x.txt") == ""
    assert "leads out of , and" in refuse("python", "-m", "package.main", "../../x.txt")


def test_a_file_that_the_job_will_not_have_is_told(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "code/.env").touch()
    (tmp_path / "code/data.bin").touch()
    told = refuse("python", "-m", "package.main", "--env", ".env")
    assert ".env is not in the snapshot that the job runs in (secret by its name)" in told
    assert "name it by its whole path: /code/.env" in told
    assert refuse("python", "-m", "package.main", "data.bin") == ""  # which is linked
    git_init(tmp_path)
    (tmp_path / ".gitignore").write_text("data.bin\n")
    told = refuse("python", "-m", "package.main", "data.bin", keys=("site.venv=none",), host=Elsewhere())
    assert "data.bin is not in the snapshot" in told
    assert "not carried to another host" in told


def test_scripts_behind_wrappers_and_of_shells_are_looked_for(refuse: Refuse, tmp_path: Path) -> None:
    assert "there is no file gone.py in /code" in refuse("env", "A=1", "python", "gone.py")
    assert "there is no file gone.py in /code" in refuse("nice", "-n", "5", "python", "-u", "gone.py")
    assert "there is no /gone/x.py on this machine" in refuse("nice", "python", "/gone/x.py")
    (tmp_path / "code/bad.py").write_text("if x\n")
    assert "bad.py, line 1 is no Python" in refuse("python", "-u", "bad.py")


def test_an_interpreter_is_looked_into(refuse: Refuse, venv: Path, tmp_path: Path) -> None:
    """Who starts its ranks has torch: itself, or the Python of the environment."""
    bare, keys = make_program(tmp_path / "bare/python", f'"{sys.executable}" "$@" | sed s/^$/torch/'), ("site.nodes=1",)
    told = refuse(str(bare), "-m", "package.main", keys=(f"site.venv={venv}", *keys))
    assert "  site.venv (command line): /venv has no torch" in told
    assert refuse(sys.executable, "-m", "package.main", keys=(f"site.venv={venv}",)) == ""
    told = refuse(sys.executable, "-m", "no_module.main", keys=("site.venv=none",))
    assert f"there is no module no_module in the code or for {sys.executable}" in told
    assert "there is no /gone/python on this machine" in refuse("/gone/python", "-m", "package.main")


# --- what is worth a sentence

Warn = Callable[..., str]


@pytest.fixture
def warn(refuse: Refuse, tmp_path: Path) -> Warn:
    """What is said beside the job of a command, whose folder holds these files."""

    def ask(*command: str, keys: tuple[str, ...] = (), files: Mapping[str, str] = MappingProxyType({})) -> str:
        for name, text in files.items():
            path = tmp_path / "code" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        keys = ("site.venv=none", "site.ranks_per_node=2", *keys)
        order = SubmitRequest(ResolveRequest(None, keys, tmp_path / "run"), command=command, here=tmp_path / "code")
        return "\n".join(prepare(order, LocalHost()).warnings).replace(str(tmp_path), "")

    return ask


ALONE = {
    "train.py": "import numpy\nfrom lib.net import Net\nfrom . import more\nclass Trainer: pass\n",
    "lib/__init__.py": "",
    "lib/net.py": "from transformers import AutoModel\n",
}


@pytest.mark.parametrize(
    "command", [("python", "train.py"), ("python", "-u", "train.py"), ("env", "A=1", "python", "train.py")]
)
def test_ranks_that_would_each_do_all_of_the_work_are_told(command: tuple[str, ...], warn: Warn) -> None:
    told = warn(*command, files=ALONE)
    assert "2 ranks will each run all of train.py: nothing in it and the 2 files that it imports looks for" in told
    assert "torch.distributed, accelerate, lightning, deepspeed, horovod, mpi4py" in told
    assert "site.ranks_per_node=1" in told
    assert "ranks will" not in warn(*command, keys=("site.ranks_per_node=1",))


def test_those_of_modules_and_of_shells_too(warn: Warn) -> None:
    files = {"train.py": "x = 1\n", "lib/main.py": "x = 1\n", "run.sh": "python train.py\n"}
    assert "each run all of lib/main.py" in warn("python", "-m", "lib.main", files=files)
    assert "each run all of train.py" in warn("bash", "run.sh")
    assert "each run all of train.py" in warn("bash", "-c", "python train.py")
    assert "ranks will" not in warn("bash", "-c", "RANK=0 python train.py")
    assert "ranks will" not in warn("./program")
    assert "ranks will" not in warn("python", "-m", "json.tool")


@pytest.mark.parametrize(
    "sign",
    [
        "import torch.distributed as dist",
        "from torch import nn, distributed",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "import os; rank = int(os.environ['RANK'])",
        "world = int(os.getenv('WORLD_SIZE', 1))",
        "from accelerate import Accelerator",
        "import lightning as L",
        "from pytorch_lightning.callbacks import Timer",
        "import deepspeed",
        "import horovod.torch as hvd",
        "from mpi4py import MPI",
        "from transformers import (AutoModel,\n    Seq2SeqTrainer)",
        "import transformers; t = transformers.Trainer(m)",
        "from trl import SFTTrainer",
        "import shardway",
    ],
)
def test_a_program_that_knows_of_ranks_is_not_told(sign: str, warn: Warn) -> None:
    assert "ranks will" not in warn("python", "train.py", files={"train.py": f"{sign}\n"})
    files = {"train.py": "from lib import net\n", "lib/__init__.py": "", "lib/net.py": f"{sign}\n"}
    assert "ranks will" not in warn("python", "train.py", files=files)


def test_what_lies_in_the_person_s_own_folder_is_told(warn: Warn, tmp_path: Path) -> None:
    (tmp_path / "code/.env").touch()
    for number in range(5):
        (tmp_path / f"code/{number}.pt").touch()
    told = warn("python", f"{tmp_path}/code/train.py", files={"train.py": "import torch.distributed\n"})
    assert (
        "linked, not copied: 0.pt, 1.pt, 2.pt and 3 more; what the command writes there, it writes into /code" in told
    )
    assert "not in the copy that the job runs in, being secret by name: .env" in told
    assert "the job runs that file as it is by then, and not the copy of this moment: to run the copy, name it" in told
