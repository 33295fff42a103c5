"""From what a person asked for to the resolved run of this machine."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardway.errors import UserError
from shardway.hardware import probe
from shardway.plan.shapes import Architecture
from shardway.resolve import Circumstances
from shardway.resolve.request import ResolveRequest, resolve_request


def test_the_machine_is_this_one() -> None:
    machine = probe.probe_machine()
    circumstances = resolve_request(ResolveRequest(), ranks=4, ranks_per_node=2).resolved.circumstances
    assert (circumstances.ranks, circumstances.ranks_per_node, circumstances.site) == (4, 2, "laptop")
    assert circumstances.usable_cores == machine.usable_cores
    assert circumstances.accelerators == len(machine.accelerators)


@pytest.mark.parametrize(
    ("request_", "directory"),
    [
        (ResolveRequest(), "runs/default"),
        (ResolveRequest(overrides=("run.name=a", "run.root=/b")), "/b/a"),
        (ResolveRequest(overrides=("run.name=a",), directory=Path("c/d")), "c/d"),
    ],
)
def test_the_run_directory(request_: ResolveRequest, directory: str) -> None:
    assert resolve_request(request_).directory.path == Path(directory)


def test_a_home_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for request in (
        ResolveRequest(overrides=("run.name=a", "run.root=~/runs")),
        ResolveRequest(directory=Path("~/runs/a")),
    ):
        assert resolve_request(request).directory.path == tmp_path / "runs/a"


@pytest.mark.parametrize(
    "request_", [ResolveRequest(overrides=("run.root=~nobody-x/a",)), ResolveRequest(directory=Path("~nobody-x"))]
)
def test_a_home_that_nobody_knows_makes_no_folder_called_so(request_: ResolveRequest) -> None:
    with pytest.raises(UserError, match="begins with ~, and this machine knows no such home folder"):
        _ = resolve_request(request_).directory


def test_a_directory_that_is_no_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"the run directory 'runs/caf\\udce9' is not UTF-8 text"):
        resolve_request(ResolveRequest(directory=Path(os.fsdecode(b"runs/caf\xe9"))))


def test_the_resolved_run_leads_back_to_its_directory() -> None:
    resolved = resolve_request(ResolveRequest(directory=Path("c/d"))).resolved
    assert (resolved.values.run.root, resolved.values.run.name) == ("c", "d")
    assert (resolved.origins["run.root"], resolved.origins["run.name"]) == ("--dir", "--dir")


def test_a_directory_without_a_name_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    assert resolve_request(ResolveRequest(directory=Path("."))).directory.path == tmp_path / "a/b"
    assert resolve_request(ResolveRequest(directory=Path(".."))).directory.path == tmp_path / "a"
    with pytest.raises(UserError) as told:
        resolve_request(ResolveRequest(directory=Path("/")))
    assert str(told.value) == "the run directory / is the root of the file system; name a folder in it."


def test_the_directory_is_called_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mnist-small.toml"
    path.write_text("format = 1\n")
    assert resolve_request(ResolveRequest(path)).directory.path == Path("runs/mnist-small")


def test_a_value_in_place_of_a_default_is_resolved_anew() -> None:
    resolution = resolve_request(ResolveRequest(), ranks=2, ranks_per_node=2)
    changed = resolution.with_default("train.global_batch", 10, "the script")
    assert changed.resolved.values.train.micro_batch == 5
    assert changed.resolved.origins["train.global_batch"] == "the script"
    assert resolution.resolved.values.train.micro_batch == 8


# --- the accelerators that a run is planned for


def circumstances_of(*words: str, found: tuple[str, ...] = ()) -> Circumstances:
    """Those of a request on a machine that shows devices of these names."""
    here = probe.probe_machine()
    shown = replace(here, accelerators=tuple(probe.Device(name, 80 * 2**30) for name in found))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "probe_machine", lambda: shown)
        return resolve_request(ResolveRequest(overrides=words)).resolved.circumstances


H100 = "NVIDIA H100 80GB HBM3"


def test_those_of_the_site() -> None:
    machine = circumstances_of("site.name=leonardo-booster", found=(H100,) * 2).machine
    assert machine is not None
    assert (machine.name, machine.accelerator.key, machine.per_node) == ("leonardo-booster", "a100-sxm-64gb", 4)


@pytest.mark.parametrize("site", ["laptop", "generic-slurm"])
def test_those_of_this_machine_where_the_site_names_none(site: str) -> None:
    machine = circumstances_of(f"site.name={site}", found=(H100,) * 4).machine
    assert machine is not None
    assert (machine.name, machine.accelerator.key, machine.per_node) == (site, "h100-sxm5-80gb", 4)


def test_what_the_devices_of_this_machine_can_do() -> None:
    """Each kind once; by its name alone where the driver does not say the compute capability."""
    (h100,) = circumstances_of(found=(H100,) * 4).devices
    assert (h100.kind, h100.name, h100.native_bf16, h100.has_tf32) == ("cuda", H100, True, True)
    (unknown,) = circumstances_of(found=("a device that nobody knows",)).devices
    assert (unknown.kind, unknown.native_bf16) == ("unknown", None)
    assert circumstances_of("run.device=cpu", found=(H100,)).devices == ()


def write_config(folder: Path, **keys: Any) -> Path:
    """A folder with the config.json of a small Llama."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    others = {"model_type": "llama", "intermediate_size": 128, "max_position_embeddings": 256}
    folder.joinpath("config.json").write_text(json.dumps({**sizes, **others, **keys}), encoding="utf-8")
    return folder


def test_the_layers_of_a_hugging_face_model_are_read_where_something_is_planned(tmp_path: Path) -> None:
    words = (f"model.hf={write_config(tmp_path)}", "data.kind=synthetic")
    shape = circumstances_of(*words, "parallel.layout=auto").shape
    assert isinstance(shape, Architecture)
    assert (shape.depth, shape.vocab) == (2, 512)
    assert circumstances_of(*words, found=(H100,)).shape == shape
    assert circumstances_of(*words).shape is None


def test_layers_that_the_planner_does_not_know_are_told_where_a_layout_is_open(tmp_path: Path) -> None:
    words = (f"model.hf={write_config(tmp_path, model_type='unheard-of')}", "data.kind=synthetic")
    assert circumstances_of(*words, found=(H100,)).shape is None
    with pytest.raises(UserError, match="has no layers that the planner knows how to split"):
        circumstances_of(*words, "parallel.layout=auto")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), ()),
        (("site.name=generic-slurm",), ()),
        (("run.device=cpu",), (H100,)),
        (("run.device=cpu", "site.name=dgx-slurm"), ()),
        ((), ("a device that nobody knows",)),
        ((), (H100, "NVIDIA A100-SXM4-80GB")),
    ],
)
def test_none_where_none_is_wanted_or_known(words: tuple[str, ...], found: tuple[str, ...]) -> None:
    assert circumstances_of(*words, found=found).machine is None


def test_an_unknown_site_is_refused() -> None:
    with pytest.raises(UserError, match=r'^site\.name \(command line\): there is no site "moon"\n  allowed: '):
        resolve_request(ResolveRequest(overrides=("site.name=moon",)))
