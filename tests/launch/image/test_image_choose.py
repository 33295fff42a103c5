from __future__ import annotations

import pytest

from golden_files import Golden
from shardway.errors import UserError
from shardway.hardware.probe import LocalMachine
from shardway.launch.hosts import parse_target
from shardway.launch.image.make import ImageOptions, make_request
from shardway.launch.image.request import ImageRequest, Recipe, Reference
from shardway.sites.load import list_sites, load_site, parse_profile
from shardway.sites.schema import Internet

IMAGE = Reference("nvidia/pytorch", "nvcr.io", "25.04-py3")
MACHINE = LocalMachine("laptop", None, 8, 8, 16 * 2**30, (), "3.11", "Linux")


def order_for(on: str, said: ImageOptions | None = None) -> ImageRequest:
    target = parse_target(on)
    profile = load_site(target.site, lambda: MACHINE)
    return make_request(IMAGE, Recipe(), said or ImageOptions(), target, profile)


def order_with(profile: str, said: ImageOptions | None = None) -> ImageRequest:
    text = f'format = 1\nname = "x"\ntitle = "X"\nscheduler = "slurm"\n{profile}'
    return make_request(IMAGE, Recipe(), said or ImageOptions(), parse_target("a@login:x"), parse_profile("x", text))


def test_what_each_shipped_site_chooses(golden: Golden) -> None:
    lines = []
    for site in list_sites():
        order = order_for(f"me@login:{site}")
        way = f"{order.way.login or '?'} {order.way.proxy or ''}".strip()
        chosen = f"{order.runtime or '?':11}{order.command or '-':13}{order.architecture or '?':9}"
        lines.append(f"{site:20}{chosen}{way:10}{order.door}")
    golden("\n".join(lines) + "\n", "images/sites.txt")


def test_what_is_said_wins_over_the_profile() -> None:
    said = ImageOptions("enroot", "amd64", "http://p.example.org:3128", "/x.sqsh", "/raid")
    order = order_for("jupiter", said)
    assert (order.runtime, order.command, order.architecture) == ("enroot", "", "x86_64")
    assert order.way == Internet(login="proxy", proxy="http://p.example.org:3128")
    assert (order.target, order.scratch) == ("/x.sqsh", "/raid")


def test_a_proxy_counts_where_login_nodes_use_it() -> None:
    proxy = '[internet]\n{} = "proxy"\nproxy = "http://p:3128"\nno_proxy = ".x.org"\n'
    assert order_with(proxy.format("login")).way == Internet(login="proxy", proxy="http://p:3128", no_proxy=".x.org")
    assert order_with(proxy.format("nodes")).way == Internet()


def test_without_a_site_nothing_is_known() -> None:
    order = make_request(IMAGE, Recipe(), ImageOptions())
    assert (order.runtime, order.architecture, order.way, order.door) == ("", None, Internet(), "")


@pytest.mark.parametrize(
    ("on", "door"),
    [
        ("me@login.x.org:perlmutter", "me@login.x.org"),
        ("me@login.x.org:leonardo-booster", "me@data.leonardo.cineca.it"),
        ("leonardo-booster", "data.leonardo.cineca.it"),
    ],
)
def test_files_come_in_by_the_transfer_node(on: str, door: str) -> None:
    assert order_for(on).door == door


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (ImageOptions(runtime="docker"), "Allowed: enroot, apptainer"),
        (ImageOptions(runtime="podman"), "podman save"),
        (ImageOptions(architecture="sparc"), "Allowed: x86_64, aarch64, amd64, arm64"),
        (ImageOptions(proxy="http://me:secret@p:3128"), "without a user name or password"),
        (ImageOptions(proxy="p:3128"), "http://HOST:PORT"),
    ],
)
def test_what_cannot_be_is_explained(said: ImageOptions, what: str) -> None:
    with pytest.raises(UserError, match="To do: ") as error:
        make_request(IMAGE, Recipe(), said)
    assert what in str(error.value)


@pytest.mark.parametrize("container", ["podman", "charliecloud"])
def test_a_site_whose_images_are_made_otherwise(container: str) -> None:
    with pytest.raises(UserError, match=f"with {container}, for which Shardway makes no images"):
        order_with(f'container = "{container}"\n')
    assert order_with(f'container = "{container}"\n', ImageOptions(runtime="enroot")).runtime == "enroot"
