"""The public names, and that they cost nothing until they are used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import shardway


def test_the_public_names() -> None:
    assert shardway.__all__ == [
        "Bug",
        "Executor",
        "FunctionJob",
        "JobError",
        "LengthGroupedBatches",
        "LiveRun",
        "LossSum",
        "Run",
        "ShardwayError",
        "SiteError",
        "UserError",
        "__version__",
        "causal_lm_loss",
        "class_cross_entropy",
        "notebook_launch",
        "open_job",
        "start",
        "submit",
        "token_cross_entropy",
    ]
    for name in shardway.__all__:
        assert getattr(shardway, name) is not None


def test_the_version_is_that_of_the_package() -> None:
    assert shardway.__version__ == version("shardway")


def test_what_states_the_version_agrees() -> None:
    root = Path(__file__).parents[1]
    cited = dict(line.split(": ", 1) for line in (root / "CITATION.cff").read_text().splitlines() if ": " in line)
    heading = next(line for line in (root / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert heading == f"## {shardway.__version__} ({cited['date-released']})"
    assert cited["version"] == shardway.__version__
    assert f"This is version {shardway.__version__.rpartition('.')[0]} " in (root / "README.md").read_text()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError) as told:
        shardway.nothing  # noqa: B018
    assert str(told.value) == "module 'shardway' has no attribute 'nothing'"


def test_the_import_is_light() -> None:
    code = "import sys, shardway; print(sorted({'torch', 'numpy', 'pydantic', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
