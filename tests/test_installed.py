"""The sentence about a package that an installation lacks, for each way in which Shardway was installed."""

from __future__ import annotations

import sys

import pytest

from shardway import installed
from shardway.errors import UserError
from shardway.installed import check_torch, describe_missing, find_missing, is_installed


def test_packages_are_found_without_an_import() -> None:
    assert is_installed("torch")
    assert not is_installed("no_such_package_at_all")


def test_torch_is_not_missing_here() -> None:
    check_torch("this test")
    assert find_missing(ModuleNotFoundError("No module named 'torch.gone'", name="torch.gone")) == ""


def test_another_module_that_is_missing_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "is_installed", lambda package: False)
    assert find_missing(ModuleNotFoundError("No module named 'mine'", name="mine")) == ""
    assert find_missing(ImportError("libtorch.so: cannot open shared object file", name="torch")) == ""
    assert find_missing(ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")) == "torch"


def test_what_lacks_torch_names_the_command_for_both_kinds_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "is_installed", lambda package: False)
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    monkeypatch.setattr(sys, "executable", "/home/me/venv/bin/python")
    with pytest.raises(UserError) as told:
        check_torch("`shardway train`")
    assert str(told.value) == (
        "`shardway train` needs PyTorch, which is not installed for /home/me/venv/bin/python.\n"
        '  To do: pip install "shardway[torch]" (with CUDA; without a GPU: add --extra-index-url '
        "https://download.pytorch.org/whl/cpu).\n"
        "  A login node needs none: `shardway submit` starts the run where PyTorch is (site.venv, site.image)."
    )


def test_an_application_of_pipx_is_installed_by_pipx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/.local/share/pipx/venvs/shardway")
    text = describe_missing("torch", "`shardway train`")
    assert 'To do: pipx install --force "shardway[torch]" (with CUDA; without a GPU: add --pip-args=' in text
    assert describe_missing("numpy", "`shardway trace`").endswith('To do: pipx install --force "shardway[numpy]"')
