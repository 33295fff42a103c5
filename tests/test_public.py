"""The public names, and that they cost nothing until they are used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import shardway


def test_the_public_names() -> None:
    assert shardway.__all__ == [
        "Bug",
        "JobError",
        "LengthGroupedBatches",
        "LossSum",
        "Run",
        "ShardwayError",
        "SiteError",
        "UserError",
        "__version__",
        "causal_lm_loss",
        "class_cross_entropy",
        "start",
        "token_cross_entropy",
    ]
    for name in shardway.__all__:
        assert getattr(shardway, name) is not None


def test_the_version_is_that_of_the_package() -> None:
    assert shardway.__version__ == version("shardway")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError) as told:
        shardway.nothing  # noqa: B018
    assert str(told.value) == "module 'shardway' has no attribute 'nothing'"


def test_the_import_is_light() -> None:
    code = "import sys, shardway; print(sorted({'torch', 'numpy', 'pydantic', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
