"""The wheel: what it holds, and an installation of it without torch and numpy, as on a login node.

The wheel is built from this checkout and installed by pip into an environment that is otherwise empty. What it requires
is copied there from the environment of the tests, file by file as pip has put it here, so that nothing is fetched;
pip's own check, and `make dist` with downloads, look whether that is all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "kept" / "2026-11" / "runs"
MOST_BYTES = 60_000_000
STANDS_BESIDE = ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md")


@dataclass(frozen=True)
class Built:
    """A wheel and a source distribution."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both, from a copy of this checkout as a fresh clone would have it."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*STANDS_BESIDE, "pyproject.toml", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    tree.joinpath("tests").mkdir()
    shutil.copy(__file__, tree / "tests")  # which setuptools would take into a source distribution
    code = "from setuptools import build_meta as b; print(b.build_sdist('out')); print(b.build_wheel('out'))"
    subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, check=True)
    (wheel,), (sdist,) = (tree / "out").glob("*.whl"), (tree / "out").glob("*.tar.gz")
    return Built(wheel, sdist)


def list_package() -> set[str]:
    """The files of the package in this checkout."""
    found = (path for path in (ROOT / "src" / "shardway").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT / "src")) for path in found if "__pycache__" not in path.parts}


def test_the_wheel_has_the_whole_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        about = {name for name in names if ".dist-info/" in name}
        (metadata,) = (wheel.read(name).decode() for name in about if name.endswith("/METADATA"))
    assert names - about == list_package()
    assert {name.partition("/")[2] for name in about} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    }
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert not [line for line in required if "extra ==" not in line and line.split()[1].startswith(("torch", "numpy"))]
    assert [line for line in required if line.startswith("Requires-Dist: torch") and 'extra == "torch"' in line]


def test_the_source_has_what_the_wheel_is_built_of_and_nothing_else(built: Built) -> None:
    with tarfile.open(built.sdist) as source:
        names = {member.name.partition("/")[2] for member in source.getmembers() if member.isfile()}
    written = {name for name in names if name.startswith("src/shardway.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - written == {*STANDS_BESIDE, "pyproject.toml", "MANIFEST.in", *(f"src/{n}" for n in list_package())}


# --- an installation without torch


def list_required(names: Iterable[str]) -> dict[str, Distribution]:
    """These distributions of this environment and all that they require, by name."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in found:
            found[name] = distribution(name)
            wanted = map(Requirement, found[name].requires or ())
            waiting += [each.name for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})]
    return found


def read_requirements(wheel: Path) -> list[str]:
    """What a wheel requires without extras."""
    with zipfile.ZipFile(wheel) as content:
        (name,) = (each for each in content.namelist() if each.endswith("/METADATA"))
        lines = content.read(name).decode().splitlines()
    wanted = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist:")]
    return [each.name for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})]


@dataclass(frozen=True)
class LoginNode:
    """An environment with the wheel alone, and a folder with what tests need beside it."""

    python: Path
    packages: Path
    beside: Path

    def run(self, *words: str, where: Path, **more: str) -> subprocess.CompletedProcess[str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        command = [str(self.python), *words]
        return subprocess.run(
            command, cwd=where, env={**own, **more}, capture_output=True, text=True, timeout=300, check=False
        )


@pytest.fixture(scope="module")
def login(built: Built, tmp_path_factory: pytest.TempPathFactory) -> LoginNode:
    """The wheel, installed."""
    folder = tmp_path_factory.mktemp("login")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for each in list_required(read_requirements(built.wheel)).values():
        for file in each.files or ():
            if ".." not in file.parts and (path := Path(str(file.locate()))).is_file():
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, packages / file)
    python = folder / "bin" / "python3"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", built.wheel], check=True)
    subprocess.run([*pip, "check"], check=True, capture_output=True)
    beside = tmp_path_factory.mktemp("beside")
    for each in list_required(["pytest", "hypothesis", "packaging"]).values():
        for name in {file.parts[0] for file in each.files or () if ".." not in file.parts} - {"__pycache__"}:
            beside.joinpath(name).symlink_to(Path(str(each.locate_file(name))))
    return LoginNode(python, packages, beside)


def test_it_is_small_and_has_neither_torch_nor_numpy(login: LoginNode) -> None:
    names = {path.name for path in login.packages.iterdir()}
    assert {"shardway", "pydantic", "typer"} <= names
    assert not {"torch", "numpy", "transformers"} & names
    found = [path.stat().st_blocks * 512 for path in login.packages.rglob("*")]
    assert 20_000_000 < sum(found) < MOST_BYTES


VERBS = """
import contextlib, io, json, sys
from shardway.cli.main import app, run_guarded
ended = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["shardway", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_guarded(lambda: app(words, standalone_mode=False))
    ended.append([code, out.getvalue(), err.getvalue()])
found = sorted(name for name in ("torch", "numpy") if name in sys.modules)
print(json.dumps([ended, found]))
"""


def run_verbs(login: LoginNode, where: Path, *commands: str) -> Iterator[tuple[str, int, str, str]]:
    """Each command line in one process: its words, exit code and output."""
    listed = [command.split() for command in commands]
    done = login.run("-c", VERBS, json.dumps(listed), where=where, HOME=str(where))
    assert done.returncode == 0, done.stderr
    ended, found = json.loads(done.stdout)
    assert found == []
    for command, (code, out, err) in zip(commands, ended, strict=True):
        yield command, code, out, err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with finished runs in it."""
    for name in ("finished", "stopped"):
        shutil.copytree(KEPT / name, tmp_path / "runs" / name)
    return tmp_path


def test_the_verbs_of_a_login_node_work(login: LoginNode, folder: Path) -> None:
    answered = {
        command: out
        for command, code, out, err in run_verbs(
            login,
            folder,
            "init my.toml",
            "config show my.toml",
            "plan my.toml --gpu a100-sxm4-80gb --gpus 8",
            "plan llama3-8b --on leonardo-booster --nodes 16",
            "submit my.toml --on leonardo-booster --nodes 2 site.account=ABC --dry-run",
            "submit my.toml --on leonardo-booster site.account=ABC data.stage=/tmp --dry-run",
            "status",
            "logs runs/finished",
            "report runs/finished",
            "report runs/stopped --json",
            "compare runs/finished runs/stopped",
            "track runs/finished --to tensorboard",
            "checkpoint verify runs/finished",
            "sites show leonardo-booster",
            "plugins list",
            "stop runs/finished",
        )
        if code == 0 or pytest.fail(f"{command}: {code} {err}")
    }
    assert "runs/finished" in answered["status"]
    assert "#SBATCH --nodes=2" in answered["submit my.toml --on leonardo-booster --nodes 2 site.account=ABC --dry-run"]
    assert folder.joinpath("runs/finished/report.html").stat().st_size > 10_000
    assert "all 6 steps are done" in folder.joinpath("runs/finished/report.html").read_text()
    assert json.loads(answered["report runs/stopped --json"])["figures"]


def test_what_needs_torch_or_numpy_says_so_and_changes_nothing(login: LoginNode, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    for command, code, out, err in run_verbs(
        login,
        folder,
        "train",
        "train --nproc 2",
        "plan examples.toml --gpu a100-sxm4-80gb --trace",
        "generate runs/finished --prompt x",
        "chat runs/finished",
        "evaluate runs/finished",
        "checkpoint diff runs/finished runs/stopped",
        "profile",
        "rehearse",
        "bench device",
        "bench comm",
        "trace runs/finished",
        "data info runs",
    ):
        if command.startswith("plan"):  # the file is not there, which is reported first
            assert code == 2
            continue
        package, extra = ("numpy", "numpy") if command.startswith(("trace", "data")) else ("PyTorch", "torch")
        verb = " ".join(command.split()[: 2 if "diff" in command else 1])
        head = f"shardway: `shardway {verb}` needs {package}, which is not installed for {login.python}.\n"
        assert (code, out) == (2, ""), command
        assert err.startswith(f'{head}  To do: pip install "shardway[{extra}]"'), err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("line", ["import shardway; shardway.start()", "from shardway import LossSum"])
def test_a_script_ends_with_the_sentence(line: str, login: LoginNode, tmp_path: Path) -> None:
    done = login.run("-c", line, where=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("shardway: this script needs PyTorch, which is not installed for ")
    assert "Traceback" not in done.stderr


TESTED = ("plan", "report_verb", "status_table", "status_jobs", "logs_verb", "plugins_verb", "submit_command")
CHOSEN = "not (own_file or unknown_family or convolutions or largest_size or needs_no_data)"
"""Without what counts modules with torch or reads data with numpy."""


def test_its_tests_pass(login: LoginNode, tmp_path: Path) -> None:
    """Golden tests of the verbs, by the installed package."""
    files = [f"tests/cli/test_{name}.py" for name in TESTED]
    lines = f"assert {str(login.packages)!r} in shardway.__file__; sys.exit(pytest.main(sys.argv[1:]))"
    words = ("-c", f"import shardway, pytest, sys; {lines}", "-m", "not slow", "-k", CHOSEN, *files)
    done = login.run(*words, where=ROOT, PYTHONPATH=str(login.beside))
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
