from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from image_cases import GB, PYTORCH, Fakes

from shardway.cli.main import app, run_guarded

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    found = Fakes(tmp_path / "fakes")
    found.have_room(900 * GB)
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ENROOT_CACHE_PATH", raising=False)
    return found


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """`image("import", URI)`, run in a folder of its own: exit code, what it printed, what it said."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(*words: str) -> tuple[int, str, str]:
        code = run_guarded(lambda: app(["image", *words], standalone_mode=False, prog_name="shardway"))
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return run


def test_import_says_what_a_run_file_needs(image: Verb, fakes: Fakes, tmp_path: Path) -> None:
    code, out, _ = image("import", PYTORCH)
    path = tmp_path / "here/pytorch-25.04-py3.sqsh"
    assert code == 0
    assert path.read_text() == "fetched\n"
    assert f'for a run  site.image = "{path}"\n' in out
    assert list((tmp_path / "here").iterdir()) == [path]


def test_build_for_a_site(image: Verb, fakes: Fakes, tmp_path: Path) -> None:
    words = ("--apt", "libaio-dev", "--pip", "deepspeed==0.16.4", "--on", "dgx-slurm", "--to", "mine.sqsh", "--json")
    code, out, err = image("build", PYTORCH, *words)
    assert code == 0, err
    path = tmp_path / "here/mine.sqsh"
    assert json.loads(out) == {"image": str(path), "bytes": 6, "runtime": "enroot", "host": ""}
    assert [call[0] for call in fakes.installed] == ["apt-get", "apt-get", "python3"]


def test_what_is_printed_is_what_runs(image: Verb, fakes: Fakes, tmp_path: Path) -> None:
    """By hand it makes the same image; without a runtime it is printed all the same."""
    code, out, err = image("import", PYTORCH, "--runtime", "enroot", "--dry-run")
    assert (code, err, fakes.calls) == (0, "", [])
    done = subprocess.run(["bash"], input=out, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.fullmatch(r"shardway-image-[0-9a-f]{8} ended with 0\n", done.stdout)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["pytorch-25.04-py3.sqsh"]
    code, printed, err = image("import", PYTORCH, "--runtime", "enroot", "--dry-run")
    assert "exists, and is left as it is" in err
    without_token = [re.sub(r"[0-9a-f]{8}\b", "", text) for text in (out, printed)]
    assert without_token[0] == without_token[1]


@pytest.mark.parametrize(("free_gb", "warnings"), [(41, 0), (39, 1), (12, 2)])
def test_a_disk_with_little_room_is_named(
    image: Verb, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, free_gb: int, warnings: int
) -> None:
    """40 GB are wanted while an image is made, and a third of that for the image."""
    monkeypatch.setenv("TMPDIR", "/tmp")
    fakes.have_room(free_gb * GB)
    code, out, err = image("import", PYTORCH, "--runtime", "enroot", "--dry-run")
    assert (code, out[:11]) == (0, "#!/bin/bash")
    assert err.count("space may be short: ") == warnings
    assert (f"/tmp on this machine has {free_gb}.0 GB; a large image takes 40.0 GB" in err) == (warnings > 0)
    assert (f" on this machine has {free_gb}.0 GB for the image." in err) == (warnings > 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("build", "ubuntu:24.04"), "nothing is added to the image"),
        (("build", "ubuntu:24.04", "--requirements", "no.txt"), "--requirements no.txt: No such file or directory"),
        (("build", "ubuntu:24.04", "--apt", "a b"), '"a b" is no name of a package'),
        (("import", "Ubuntu", "--runtime", "enroot"), "which has no capital letters"),
        (("import", "ubuntu:24.04", "--runtime", "docker"), "Allowed: enroot, apptainer"),
        (("import", "ubuntu:24.04", "--timeout", "soon"), "--timeout: "),
        (("import", "ubuntu:24.04", "--on", "nowhere"), "nowhere"),
    ],
)
def test_mistakes_are_explained(image: Verb, fakes: Fakes, words: tuple[str, ...], said: str) -> None:
    code, out, err = image(*words)
    assert (code, out) == (2, "")
    assert said in err


def test_without_internet_it_is_printed_how_to_bring_it_over(image: Verb, fakes: Fakes) -> None:
    (fakes.folder / "bin/apptainer").rename(fakes.folder / "bin/singularity")
    _, _, err = image("import", PYTORCH, "--on", "marenostrum5-acc", "--to", "/gpfs/projects/x/t.sif")
    assert "shardway image import docker://nvcr.io/nvidia/pytorch:25.04-py3 --runtime apptainer --arch x86_64" in err
    assert "rsync -P t.sif USER@HOST:/gpfs/projects/x/\n" in err
    assert err.count("to do: ") == 1


def test_a_machine_without_a_runtime_says_so(image: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "bash", "uname", "id", "printenv", "test", "stat", "df"):
        (tools / name).symlink_to(f"/usr/bin/{name}" if os.path.exists(f"/usr/bin/{name}") else f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tools))
    code, out, err = image("import", PYTORCH, "--dry-run")
    assert (code, out) == (2, "")
    assert "this machine has neither enroot nor apptainer" in err
    code, out, err = image("import", PYTORCH, "--dry-run", "--on", "jupiter")
    assert code == 0
    assert "apptainer pull --arch arm64" in out
    assert "there is no apptainer on this machine" in err
