from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from image_cases import PROXY, Fakes, make_order

from shardway.errors import SiteError, UserError
from shardway.launch.hosts import LocalHost
from shardway.launch.image.make import find_runtime, make_image, parse_df, plan_image, survey_host
from shardway.launch.image.request import ImageRequest, parse_recipe

ADDED = parse_recipe(["libaio-dev"], ["it''s $HOME; --no-deps", "deepspeed==0.16.4"])


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    found = Fakes(tmp_path / "fakes")
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    for name in ("ENROOT_CACHE_PATH", "APPTAINER_CACHEDIR", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    return found


def make(order: ImageRequest, tmp_path: Path, limit_s: float = 120.0) -> tuple[PurePosixPath, int]:
    """Make it in a folder with an odd name that does not exist yet; its path and size."""
    suffix = {"enroot": "sqsh", "apptainer": "sif"}[order.runtime]
    order = replace(
        order, target=order.target or str(tmp_path / f"it's out/x!.{suffix}"), scratch=str(tmp_path / "scr atch")
    )
    host = LocalHost()
    making = plan_image(order, survey_host(order, host))
    return making.target, make_image(host, order, making, limit_s, print)


def left_over(tmp_path: Path) -> list[str]:
    """What lies where it was made."""
    folders = [folder for folder in (tmp_path / "it's out", tmp_path / "scr atch") if folder.exists()]
    return [path.name for folder in folders for path in folder.iterdir()]


@pytest.mark.parametrize(("runtime", "name"), [("enroot", "x!.sqsh"), ("apptainer", "x!.sif")])
def test_an_image_is_fetched(fakes: Fakes, tmp_path: Path, runtime: str, name: str) -> None:
    made = make(make_order(runtime), tmp_path)
    assert made == (PurePosixPath(tmp_path / "it's out" / name), len("fetched\n"))
    assert left_over(tmp_path) == [name]
    part = str(tmp_path / f"it's out/.{name}.a1b2c3d4.tmp")
    words = {
        "enroot": ["import", "--output", part, "--", "docker://nvcr.io#nvidia/pytorch:25.04-py3"],
        "apptainer": ["pull", part, "docker://nvcr.io/nvidia/pytorch:25.04-py3"],
    }
    assert fakes.calls == [[runtime, *words[runtime]]]


@pytest.mark.parametrize("runtime", ["enroot", "apptainer"])
def test_an_image_is_built(fakes: Fakes, tmp_path: Path, runtime: str) -> None:
    """Its script runs inside, and every word of it arrives."""
    order = make_order(runtime, recipe=ADDED, way=PROXY)
    path, _ = make(order, tmp_path)
    assert Path(path).read_text() == "built\n"
    assert left_over(tmp_path) == [path.name]
    pip = ["python3", "-m", "pip", "install", "--no-cache-dir"]
    assert fakes.installed[1:] == [
        ["apt-get", "-o", "APT::Sandbox::User=root", "install", "--yes", "--no-install-recommends", "--", "libaio-dev"],
        [*pip, "its", "$HOME;", "--no-deps"],
        [*pip, "deepspeed==0.16.4"],
    ]
    steps = {"enroot": ["import", "create", "start", "export"], "apptainer": ["build"]}
    assert [call[1] for call in fakes.calls] == steps[runtime]
    assert (fakes.folder / "variables").read_text().startswith(str(PROXY.proxy))


FAILURES = [
    ("enroot", "enroot import"),
    ("enroot", "enroot create"),
    ("enroot", "enroot start"),
    ("enroot", "enroot export"),
    ("apptainer", "apptainer build"),
]


@pytest.mark.parametrize(("runtime", "call"), FAILURES)
def test_nothing_is_left_of_an_image_that_failed(fakes: Fakes, tmp_path: Path, runtime: str, call: str) -> None:
    fakes.fail(call, "[ERROR] no space: No space left on device")
    with pytest.raises(SiteError, match=r"was not made \(exit code 9\): the disk is full") as error:
        make(make_order(runtime, recipe=ADDED), tmp_path)
    assert "    [ERROR] no space: No space left on device\n  To do: " in str(error.value)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("why", ["time", "interrupt"])
def test_nothing_is_left_of_an_image_that_was_stopped(fakes: Fakes, tmp_path: Path, why: str) -> None:
    (fakes.folder / "wait").touch()
    if why == "time":
        for limit_s in (1.0, 5.0, 25.0):  # a busy machine may not come to the wait in the first of them
            with pytest.raises(SiteError) as error:
                make(make_order("enroot"), tmp_path, limit_s)
            if (fakes.folder / "waiting").exists():
                break
        assert f"it was ended after {limit_s:g} s" in str(error.value)
    else:
        (fakes.folder / "wait").unlink()
        fakes.fail("enroot import", "a line")
        order = replace(
            make_order("enroot"), target=str(tmp_path / "it's out/x.sqsh"), scratch=str(tmp_path / "scr atch")
        )

        def interrupt(line: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make_image(LocalHost(), order, plan_image(order, survey_host(order, LocalHost())), 120.0, interrupt)
    assert left_over(tmp_path) == []


def test_a_file_of_that_name_stays_as_it_is(fakes: Fakes, tmp_path: Path) -> None:
    """Also one that came while the image was made."""
    target = tmp_path / "there.sqsh"
    target.write_text("mine")
    with pytest.raises(UserError, match="exists, and is left as it is"):
        make(make_order("enroot", target=str(target)), tmp_path)
    target.unlink()
    order = make_order("enroot", target=str(target), scratch=str(tmp_path / "scr atch"))
    making = plan_image(order, survey_host(order, LocalHost()))
    target.write_text("mine")
    with pytest.raises(SiteError, match=r"exit code 17"):
        make_image(LocalHost(), order, making, 120.0, print)
    assert target.read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_a_runtime_that_is_missing_is_told(fakes: Fakes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no my-enroot on this machine"):
        make(make_order("enroot", command="my-enroot"), tmp_path)
    assert left_over(tmp_path) == []


# --- the look at the machine


def test_the_machine_is_looked_at(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENROOT_CACHE_PATH", "/cache")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "base.sqsh").write_bytes(b"x" * 1000)
    before = free_bytes(tmp_path)
    ground = survey_host(make_order("enroot", "./base.sqsh", adds=True, target="far/away/x.sqsh"), LocalHost())
    after = free_bytes(tmp_path)
    assert ground.target == PurePosixPath(tmp_path / "far/away/x.sqsh")
    assert (ground.base, ground.base_bytes) == (PurePosixPath(tmp_path / "base.sqsh"), 1000)
    assert [place.path for place in ground.scratch_places] == [PurePosixPath(tmp_path), ground.target.parent]
    assert ground.target_place.free_bytes is not None
    assert min(before, after) - 5e8 < ground.target_place.free_bytes < max(before, after) + 5e8
    assert ground.architecture == os.uname().machine
    assert (ground.own_cache, ground.has_command, ground.target_exists) == (True, True, False)
    assert ground.is_root == (os.geteuid() == 0)


def free_bytes(folder: Path) -> int:
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize


DF = "Filesystem     Type 1024-blocks     Used Available Capacity Mounted on\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (DF + "/dev/sda1      ext4   263112772 56182552 193490296      23% /\n", (193490296 * 1024, "ext4")),
        (DF + "10.1.1.1@o2ib:/my scratch lustre 10 5 5 50% /a b\n", (5 * 1024, "lustre")),
        (DF + "tmpfs          tmpfs           0        0         0       - /x\n", (None, "")),
        ("", (None, "")),
    ],
)
def test_what_df_says(text: str, found: tuple[int | None, str]) -> None:
    assert parse_df(text) == found


def test_a_runtime_is_found(fakes: Fakes) -> None:
    order = find_runtime(make_order(""), LocalHost())
    assert (order.runtime, order.command) == ("enroot", "")
    (fakes.folder / "bin/enroot").unlink()
    (fakes.folder / "bin/apptainer").rename(fakes.folder / "bin/singularity")
    order = find_runtime(make_order(""), LocalHost())
    assert (order.runtime, order.command) == ("apptainer", "singularity")
    (fakes.folder / "bin/singularity").unlink()
    with pytest.raises(UserError, match="neither enroot nor apptainer"):
        find_runtime(make_order(""), LocalHost())
