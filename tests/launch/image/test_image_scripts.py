from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from image_cases import DIGEST, GB, GROUND, PROXY, PYTORCH, ground_for, make_order

from golden_files import Golden, golden_names
from shardway.errors import UserError
from shardway.launch.image.make import Making, default_name, plan_image
from shardway.launch.image.request import BuildFolder, Ground, ImageRequest
from shardway.sites.schema import Internet
from shell_lint import complaints

BASE = PurePosixPath("/project/images/it's base.sqsh")
ON_BASE = {"base": BASE, "base_bytes": 8 * GB}
USER = "docker://$oauthtoken@nvcr.io#org/team/private:1"


def plan(order: ImageRequest, **changes: object) -> Making:
    return plan_image(order, ground_for(order, **changes))


SCRIPTS = {
    "enroot-import": lambda: plan(make_order("enroot")),
    "enroot-import-private": lambda: plan(make_order("enroot", USER, architecture="aarch64", way=PROXY)),
    "enroot-import-digest": lambda: plan(make_order("enroot", f"pytorch/pytorch@{DIGEST}"), own_cache=True),
    "enroot-import-dockerd": lambda: plan(make_order("enroot", "dockerd://mine:1")),
    "enroot-import-podman": lambda: plan(make_order("enroot", "podman://localhost/mine:1")),
    "enroot-build": lambda: plan(make_order("enroot", adds=True, architecture="x86_64")),
    "enroot-build-proxy-on-file": lambda: plan(make_order("enroot", str(BASE), adds=True, way=PROXY), **ON_BASE),
    "apptainer-import": lambda: plan(make_order("apptainer")),
    "apptainer-import-arch": lambda: plan(make_order("apptainer", architecture="aarch64", way=PROXY)),
    "apptainer-import-oras": lambda: plan(make_order("apptainer", "oras://ghcr.io/a/b:1")),
    "apptainer-import-dockerd": lambda: plan(make_order("apptainer", "dockerd://mine:1")),
    "apptainer-import-file": lambda: plan(make_order("apptainer", str(BASE)), **ON_BASE),
    "apptainer-build": lambda: plan(make_order("apptainer", adds=True, way=PROXY)),
    "apptainer-build-on-file": lambda: plan(make_order("apptainer", str(BASE), adds=True), **ON_BASE),
    "apptainer-build-as-root": lambda: plan(make_order("apptainer", adds=True), is_root=True),
    "singularity-build": lambda: plan(make_order("apptainer", adds=True, command="/opt/bin/singularity")),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_of_a_runtime(name: str, golden: Golden) -> None:
    golden(SCRIPTS[name]().script, f"images/{name}.sh")


def test_every_kept_text_is_of_a_case() -> None:
    texts = {
        "refused-uris.txt",
        "refused-packages.txt",
        "refused-orders.txt",
        "hindrances.txt",
        "failures.txt",
        "sites.txt",
    }
    assert golden_names("images") == {f"{name}.sh" for name in SCRIPTS} | texts


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    for name, make in SCRIPTS.items():
        (tmp_path / f"{name}.sh").write_text(make().script, encoding="utf-8")
    assert complaints(sorted(tmp_path.glob("*.sh"))) == ""


# --- what is refused


REFUSED = {
    "oras for enroot": make_order("enroot", "oras://ghcr.io/a/b:1"),
    "sif for enroot": make_order("enroot", "torch.sif", adds=True),
    "an image already": make_order("enroot", "torch.sqsh"),
    "an image already, sif": make_order("apptainer", "torch.sif"),
    "podman for apptainer": make_order("apptainer", "podman://mine:1"),
    "name of the other": make_order("apptainer", target="torch.sqsh"),
    "odd paths": make_order("enroot", "/a#b.sqsh", adds=True, target="a\nb.sqsh", scratch="/c:d"),
}


def test_what_no_machine_could_make_is_explained(golden: Golden) -> None:
    said = []
    for name, order in REFUSED.items():
        with pytest.raises(UserError) as error:
            plan(order)
        said.append(f"--- {name}\n{error.value}\n")
    golden("".join(said), "images/refused-orders.txt")


def test_all_that_stands_in_the_way_is_told_at_once(golden: Golden) -> None:
    """And how it is made elsewhere, in words that can be pasted."""
    way = Internet(login="none")
    order = make_order(
        "apptainer", USER, adds=True, architecture="aarch64", way=way, site="far", door="me@data.far.org"
    )
    short = BuildFolder(PurePosixPath("/tmp"), 2 * GB, "ext4")
    making = plan(
        order,
        host="me@far",
        has_command=False,
        target_exists=True,
        target_place=short,
        scratch_places=(short,),
    )
    on_file = plan(make_order("enroot", "/x.sqsh", adds=True), base=PurePosixPath("/x.sqsh"))
    lines = [problem.render() for problem in (*making.hindrances, *on_file.hindrances)]
    latest = plan(make_order("enroot", "ubuntu"), scratch_places=(replace(short, kind="tmpfs"),))
    golden("\n".join([*lines, *making.warnings, *latest.warnings]) + "\n", "images/hindrances.txt")


def test_nothing_stands_in_the_way_of_a_usual_order() -> None:
    making = plan(make_order("enroot", adds=True, architecture="x86_64"))
    assert (making.hindrances, making.warnings) == ((), ())


def test_programs_of_another_architecture_are_fetched_but_not_run() -> None:
    assert plan(make_order("enroot", architecture="aarch64")).hindrances == ()
    assert [each.where for each in plan(make_order("enroot", adds=True, architecture="aarch64")).hindrances] == [
        "the architecture"
    ]


# --- where it is made

TMP, TARGET = PurePosixPath("/tmp"), PurePosixPath("/project/images")


@pytest.mark.parametrize(
    ("places", "chosen"),
    [
        ([BuildFolder(TMP, 200 * GB, "ext4"), BuildFolder(TARGET, 900 * GB, "lustre")], TMP),
        ([BuildFolder(TMP, 3 * GB, "ext4"), BuildFolder(TARGET, 900 * GB, "lustre")], TARGET),
        ([BuildFolder(TMP, 200 * GB, "tmpfs"), BuildFolder(TARGET, 900 * GB, "lustre")], TARGET),
        ([BuildFolder(TMP, 9 * GB, "ext4"), BuildFolder(TARGET, 3 * GB, "nfs")], TMP),
        ([BuildFolder(TMP), BuildFolder(TARGET, 900 * GB, "lustre")], TMP),
        ([BuildFolder(TMP, 200 * GB, "tmpfs")], TMP),
    ],
)
def test_it_is_made_where_there_is_room(places: list[BuildFolder], chosen: PurePosixPath) -> None:
    making = plan_image(make_order("enroot"), replace(GROUND, scratch_places=tuple(places)))
    assert making.work == chosen / "shardway-image-a1b2c3d4"
    assert making.part == TARGET / ".torch.sqsh.a1b2c3d4.tmp"


def test_a_small_file_needs_little_room() -> None:
    small = Ground(
        **{**vars(GROUND), "scratch_places": (BuildFolder(TMP, 3 * GB),), "base": BASE, "base_bytes": GB // 10}
    )
    assert plan_image(make_order("enroot", str(BASE), adds=True), small).warnings == ()


@pytest.mark.parametrize(
    ("order", "name"),
    [
        (make_order("enroot", PYTORCH), "pytorch-25.04-py3.sqsh"),
        (make_order("apptainer", PYTORCH), "pytorch-25.04-py3.sif"),
        (make_order("apptainer", "/images/torch.sqsh", adds=True), "torch-more.sif"),
    ],
)
def test_usual_name_of_an_image(order: ImageRequest, name: str) -> None:
    assert default_name(order) == name
