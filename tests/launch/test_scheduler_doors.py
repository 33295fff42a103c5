"""A scheduler is one class behind a door: what names one, and what the classes and the doors must keep."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardway
from shardway.launch.containers import Container
from shardway.launch.launchers import Launcher
from shardway.launch.schedulers.base import Scheduler, find_scheduler, list_owners
from shardway.plugins import GROUPS, load_plugin, make_own

ROOT = Path(shardway.__file__).parent
NAMES = re.compile(
    r"slurm|pbs|(?<![a-z])[sq]batch|qsub|squeue|scontrol|scancel|qdel|qstat|sinfo|sacct|salloc", re.IGNORECASE
)
EXCEPTIONS = {
    "plugins.py": "the door itself",
    "sites/schema.py": "descriptions of keys, for people",
    "runfile/schema.py": "descriptions of keys, for people",
    "sites/problems.py": "names of site profiles",
    "watch/advice/rules.py": "what a person may write in a job script",
    "learn/checks.py": "what a lesson asks a learner to write",
    "launch/snapshot.py": "endings of files that people keep beside their code",
}


def list_named(path: Path) -> Iterator[str]:
    """Names and texts of a module, without docstrings and comments, that name a scheduler."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = ""
        match node:
            case ast.Constant(value=str(value)) if id(node) not in documents:
                text = value
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.arg(arg=name):
                text = name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                text = name
        if NAMES.search(text):
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {text}"


def test_no_other_module_names_a_scheduler() -> None:
    modules = [path for path in ROOT.rglob("*.py") if "launch/schedulers" not in path.as_posix()]
    named = {path: list(list_named(path)) for path in modules}
    allowed = {ROOT / name for name in EXCEPTIONS}
    assert [line for path, lines in named.items() if path not in allowed for line in lines] == []
    assert [str(path) for path in allowed if not named[path]] == []


def test_it_is_found_where_it_stands() -> None:
    assert list(list_named(ROOT / "launch/schedulers/slurm.py"))


@pytest.mark.parametrize(
    ("group", "base"), [("schedulers", Scheduler), ("launchers", Launcher), ("containers", Container)]
)
def test_every_name_of_ours_is_a_class_of_its_contract(group: str, base: type) -> None:
    for name in GROUPS[group].own:
        assert issubclass(load_plugin(group, name), base)


def test_schedulers_are_called_as_they_are_registered() -> None:
    assert [scheduler.name for scheduler in make_own("schedulers")] == list(GROUPS["schedulers"].own)
    assert [scheduler.this_machine for scheduler in make_own("schedulers")] == [True, False, False]


def test_own_keys_name_values_that_are_registered() -> None:
    for scheduler in make_own("schedulers"):
        for key, _, value in (entry.partition("=") for entry in scheduler.own_keys):
            assert not value or value in GROUPS[f"{key}s"].own
    assert [owner.name for owner in list_owners("container=pyxis")] == ["slurm"]
    assert list_owners("container=enroot") == []


def test_rules_are_read_for_each_part() -> None:
    for name in ("slurm", "pbs"):
        for part in ("refusal", "pending", "ending"):
            assert find_scheduler(name).list_rules(part)
    assert find_scheduler("local").list_rules("pending") == ()


def test_no_look_at_installed_packages_where_a_launcher_of_ours_has_started_a_rank() -> None:
    ranks = [
        {"SHARDWAY_AGENT": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"},
        dict.fromkeys(("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
        | dict.fromkeys(("SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE"), "1"),
    ]
    code = (
        "import shardway.plugins, sys\n"
        "def scanned(**words): raise SystemExit('installed packages were looked at')\n"
        "shardway.plugins.entry_points = scanned; sys.modules['torch'] = None\n"
        "from shardway.ranks.launcher import find_placement\n"
        f"print([find_placement(environ).launcher for environ in {ranks}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("['shardway', 'the environment', 'srun']\n", "")


def test_a_rank_of_an_agent_imports_no_scheduler() -> None:
    rank = {"SHARDWAY_AGENT": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    rank |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
    code = (
        "import sys; from shardway.ranks.launcher import find_placement\n"
        f"find_placement({rank}); print([name for name in sys.modules if 'schedulers' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
