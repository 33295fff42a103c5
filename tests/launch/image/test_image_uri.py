from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_cases import DIGEST

from golden_files import Golden
from shardway.errors import UserError
from shardway.launch.image.request import ImageFile, Reference, parse_uri, render_docker, render_enroot

NGC = Reference("nvidia/pytorch", "nvcr.io", "25.04-py3")
FORMS = {
    "docker://nvcr.io#nvidia/pytorch:25.04-py3": NGC,
    "docker://nvcr.io/nvidia/pytorch:25.04-py3": NGC,
    "nvcr.io/nvidia/pytorch:25.04-py3": NGC,
    "nvcr.io#nvidia/pytorch:25.04-py3": NGC,
    "docker://$oauthtoken@nvcr.io#nvidia/pytorch:25.04-py3": replace(NGC, user="$oauthtoken"),
    "$oauthtoken@nvcr.io/nvidia/pytorch:25.04-py3": replace(NGC, user="$oauthtoken"),
    f"nvcr.io/nvidia/pytorch@{DIGEST}": replace(NGC, tag="", digest=DIGEST),
    f"nvcr.io/nvidia/pytorch:25.04-py3@{DIGEST}": replace(NGC, tag="", digest=DIGEST),
    "ubuntu": Reference("ubuntu", tag="latest"),
    "docker://ubuntu:24.04": Reference("ubuntu", tag="24.04"),
    "docker.io/library/ubuntu:24.04": Reference("ubuntu", tag="24.04"),
    "docker://registry-1.docker.io#library/ubuntu:24.04": Reference("ubuntu", tag="24.04"),
    "rocm/pytorch:6.2": Reference("rocm/pytorch", tag="6.2"),
    "alice@rocm/pytorch:6.2": Reference("rocm/pytorch", tag="6.2", user="alice"),
    f"alice@ghcr.io#a/b@{DIGEST}": Reference("a/b", "ghcr.io", digest=DIGEST, user="alice"),
    "localhost:5000/a/b:1": Reference("a/b", "localhost:5000", "1"),
    "localhost/a": Reference("a", "localhost", "latest"),
    "docker://harbour#a/b:1": Reference("a/b", "harbour:443", "1"),
    "docker://GHCR.io/a/b:1": Reference("a/b", "ghcr.io", "1"),
    "oras://ghcr.io/a/b:1": Reference("a/b", "ghcr.io", "1", transport="oras"),
    "dockerd://mine:2": Reference("mine", tag="2", transport="dockerd"),
    "podman://localhost/mine": Reference("localhost/mine", tag="latest", transport="podman"),
    "/images/a b.sqsh": ImageFile("/images/a b.sqsh"),
    "torch.sif": ImageFile("torch.sif"),
    "./base": ImageFile("./base"),
    "$SCRATCH/base": ImageFile("$SCRATCH/base"),
}


@pytest.mark.parametrize("text", FORMS)
def test_every_form_means_one_image(text: str) -> None:
    assert parse_uri(text) == FORMS[text]


def test_each_runtime_gets_its_own_form() -> None:
    assert render_enroot(NGC) == "docker://nvcr.io#nvidia/pytorch:25.04-py3"
    assert render_docker(NGC) == "nvcr.io/nvidia/pytorch:25.04-py3"
    assert render_enroot(replace(NGC, user="$oauthtoken")) == "docker://$oauthtoken@nvcr.io#nvidia/pytorch:25.04-py3"
    assert render_docker(replace(NGC, tag="", digest=DIGEST)) == f"nvcr.io/nvidia/pytorch@{DIGEST}"


def test_an_owner_with_a_dot_is_no_registry() -> None:
    """Of Docker Hub, in either form."""
    owner = parse_uri("docker://docker.io#my.team/torch:2")
    assert owner == Reference("my.team/torch", tag="2")
    assert render_docker(owner) == "docker.io/my.team/torch:2"
    assert render_enroot(owner) == "docker://registry-1.docker.io#my.team/torch:2"


_repositories = st.lists(
    st.sampled_from(["a", "torch", "my.team", "a__b", "x-1", "0", "library", "localhost", "sha256"]),
    min_size=1,
    max_size=3,
)
_registries = st.sampled_from(["", "nvcr.example.org", "localhost", "a-b.c:5000", "host:443", "10.1.2.3:80"])
_tags = st.text(st.sampled_from("aZ0_.-"), min_size=1, max_size=6).map(lambda tag: f"v{tag}")
_users = st.text(st.sampled_from("aZ0_.+-$"), max_size=6)


@st.composite
def references(draw: st.DrawFn) -> Reference:
    registry, repository = draw(_registries), "/".join(draw(_repositories))
    digest = draw(st.sampled_from(["", DIGEST]))
    tag = "" if digest else draw(_tags)
    # "library/" is what Docker Hub leaves out.
    while not registry and repository.startswith("library/"):
        repository = repository.removeprefix("library/")
    return Reference(repository, registry, tag, digest, draw(_users), draw(st.sampled_from(["docker", "oras"])))


@settings(max_examples=40)
@given(reference=references())
def test_what_is_rendered_is_read_as_the_same_image(reference: Reference) -> None:
    assert parse_uri(render_enroot(reference)) == reference
    docker = f"{reference.transport}://{render_docker(reference)}"
    assert parse_uri(docker) == replace(reference, user="")


@settings(max_examples=40)
@given(text=st.text(st.sampled_from("aA0/:@#.-_$~ \n\té"), max_size=24))
def test_any_text_is_an_image_or_a_refusal(text: str) -> None:
    try:
        source = parse_uri(text)
    except UserError as error:
        assert "To do: " in str(error)
    else:
        if isinstance(source, Reference):
            assert parse_uri(render_enroot(source)) == source


REFUSED = {
    "empty": "",
    "capital": "docker://nvcr.io#NVIDIA/pytorch",
    "scheme": "https://nvcr.io/nvidia/pytorch",
    "blank": "docker://ubuntu 24.04",
    "tag": "ubuntu:",
    "digest": "ubuntu@sha256:12",
    "registry": "docker://-x.y#a/b",
    "password": "docker://alice:s3cr3t@ghcr.io#a/b",
    "user-of-ngc": "docker://alice@nvcr.io#nvidia/pytorch",
    "user-lost-to-the-shell": "docker://@nvcr.io#nvidia/pytorch:25.04-py3",
}


def test_what_is_no_image_is_explained(golden: Golden) -> None:
    said = []
    for name, text in REFUSED.items():
        with pytest.raises(UserError) as error:
            parse_uri(text)
        said.append(f"--- {name}\n{error.value}\n")
    assert "s3cr3t" not in "".join(said)
    golden("".join(said), "images/refused-uris.txt")


@pytest.mark.parametrize(
    ("text", "stem"),
    [
        ("nvcr.io/nvidia/pytorch:25.04-py3", "pytorch-25.04-py3"),
        (f"ghcr.io/a/b@{DIGEST}", "b-0123456789ab"),
        ("/images/torch.2.sqsh", "torch.2"),
        ("./base/", "base"),
    ],
)
def test_a_file_is_named_after_its_image(text: str, stem: str) -> None:
    assert parse_uri(text).stem == stem
