"""Names of images, in enroot's form, in docker's form, and as files, as one value.

    nvcr.io#nvidia/pytorch:25.04-py3    enroot: docker://[USER@][REGISTRY#]IMAGE[:TAG]
    nvcr.io/nvidia/pytorch:25.04-py3    docker: docker://[REGISTRY/]IMAGE[:TAG][@DIGEST]

Invariant: what `parse_uri` accepts means one image, and is the same value again after it was rendered in enroot's form.
This module must not know what a runtime does with an image.

Sources: enroot's documentation, "enroot import"; the grammar of references of the distribution project (docker), by
which the first part of a name is a registry where it holds a "." or a ":" or is "localhost".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from shardway.errors import UserError

Transport = Literal["docker", "oras", "dockerd", "podman"]

_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_NGC = "nvcr.io"
NGC_USER = "$oauthtoken"
"""The one user name of NVIDIA's registry, these very characters; the password is the API key."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_REGISTRY = re.compile(rf"{_LABEL}(?:\.{_LABEL})*(?::\d{{1,5}})?")
_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_USER = re.compile(r"[A-Za-z0-9_.!~*'()%;&=+$,-]+")
_FILE = re.compile(r"(/|\./|\.\./|~/|\$[\w{}]+/).*|.*\.(sqsh|sqfs|squashfs|sif)")
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f]")

_ALLOWED = (
    "docker://[USER@][REGISTRY#]IMAGE[:TAG], [docker://][REGISTRY/]IMAGE[:TAG][@sha256:DIGEST], oras://..., "
    "dockerd://IMAGE:TAG, podman://IMAGE:TAG, or a .sqsh or .sif file or a folder"
)
_EXAMPLE = "docker://nvcr.io#nvidia/pytorch:25.04-py3"


@dataclass(frozen=True)
class Reference:
    """An image with a name: of a registry (docker, oras), or of an engine on the machine (dockerd, podman).

    `registry` is empty for Docker Hub, where `repository` is the short name ("ubuntu", not "library/ubuntu"). A digest
    alone names the image where there is one: then `tag` is empty, and never both.
    """

    repository: str
    registry: str = ""
    tag: str = ""
    digest: str = ""
    user: str = ""
    transport: Transport = "docker"

    @property
    def is_remote(self) -> bool:
        """Whether it comes over the network."""
        return self.transport in ("docker", "oras")

    @property
    def version(self) -> str:
        """What follows the name, with its ":" or "@"."""
        return f"@{self.digest}" if self.digest else f":{self.tag}"

    @property
    def stem(self) -> str:
        """A name for a file: "pytorch-25.04-py3", "pytorch-0123456789ab"."""
        version = self.digest.partition(":")[2][:12] or self.tag
        return f"{self.repository.rpartition('/')[2]}-{version}"


@dataclass(frozen=True)
class ImageFile:
    """An image that is there already: a .sqsh or .sif file, or a folder. `path` as it was written."""

    path: str

    @property
    def is_remote(self) -> bool:
        """Whether it comes over the network."""
        return False

    @property
    def kind(self) -> Literal["squashfs", "sif", "folder"]:
        """By its name, as the runtimes tell them apart too."""
        if self.path.endswith(".sif"):
            return "sif"
        return "squashfs" if self.path.endswith((".sqsh", ".sqfs", ".squashfs")) else "folder"

    @property
    def stem(self) -> str:
        """A name for a file that is made of it."""
        name = self.path.rstrip("/").rpartition("/")[2]
        return re.sub(r"\.(sqsh|sqfs|squashfs|sif)$", "", name)


Source = Reference | ImageFile


def parse_uri(text: str) -> Source:
    """The image that a person named. Raises UserError for what is none, and for a secret in it."""
    text = text.strip()
    if not text or (_UNPRINTABLE.search(text) and "://" in text):
        raise _refused(text, "it is empty" if not text else "an image has no blanks in its name")
    match = _SCHEME.fullmatch(text)
    if match is None:
        return ImageFile(text) if _FILE.fullmatch(text) else _parse_docker(text, text, "docker")
    scheme, body = match[1].lower(), match[2]
    if scheme in ("docker", "oras"):
        return _parse_docker(text, body, "docker" if scheme == "docker" else "oras")
    if scheme in ("dockerd", "podman"):
        return _parse_engine(text, body, "dockerd" if scheme == "dockerd" else "podman")
    raise _refused(text, f'"{scheme}://" is not known')


def render_enroot(reference: Reference) -> str:
    """As `enroot import` takes it: docker://[USER@][REGISTRY#]IMAGE:TAG, dockerd://IMAGE:TAG, podman://IMAGE:TAG."""
    user = f"{reference.user}@" if reference.user else ""
    registry = f"{reference.registry}#" if reference.registry else ""
    if not registry and reference.is_remote and (user or _names_registry(reference.repository)):
        registry = f"{_HUB[-1]}#"  # lest the name be taken for a registry, or for a digest after the "@"
    return f"{reference.transport}://{user}{registry}{reference.repository}{reference.version}"


def render_docker(reference: Reference) -> str:
    """As docker and Apptainer take it, REGISTRY/IMAGE:TAG without a scheme; they keep users elsewhere."""
    registry = f"{reference.registry}/" if reference.registry else ""
    if not registry and reference.is_remote and _names_registry(reference.repository):
        registry = f"{_HUB[0]}/"
    return f"{registry}{reference.repository}{reference.version}"


def _parse_docker(text: str, body: str, transport: Transport) -> Reference:
    """Both forms: a "#" is only in enroot's."""
    user, body = _split_user(text, body)
    if "#" in body:
        registry, _, name = body.partition("#")
        # Without a dot or a port docker would take it for a part of the name.
        registry = registry if not registry or _names_registry(f"{registry}/") else f"{registry}:443"
    elif _names_registry(body):
        registry, _, name = body.partition("/")
    else:
        registry, name = "", body
    registry = registry.lower()
    if registry and not _REGISTRY.fullmatch(registry):
        raise _refused(text, f'"{registry}" is no name of a registry')
    registry = "" if registry in _HUB else registry
    repository, tag, digest = _split_version(text, name)
    if not registry:
        repository = repository.removeprefix("library/")
    _check_user(text, registry, user)
    return Reference(repository, registry, tag, digest, user or "", transport)


def _parse_engine(text: str, body: str, transport: Transport) -> Reference:
    """An engine looks its own images up by the name that it is given, registry and all."""
    registry, slash, name = body.rpartition("/") if "/" in body else ("", "", body)
    repository, tag, digest = _split_version(text, name)
    if registry and not all(_REGISTRY.fullmatch(part) or _REPOSITORY.fullmatch(part) for part in registry.split("/")):
        raise _refused(text, f'"{registry}" is no name of a registry or of an owner')
    return Reference(f"{registry}{slash}{repository}", "", tag, digest, "", transport)


def _names_registry(name: str) -> bool:
    """Docker's rule for the part before the first slash."""
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def _split_user(text: str, body: str) -> tuple[str | None, str]:
    """The user before the "@" of enroot's form (None: no "@"), which a digest has too."""
    before, at, rest = body.partition("@")
    if not at or rest.startswith(("sha256:", "sha512:")) or "/" in before or "#" in before:
        return None, body
    if ":" in before:
        raise UserError(
            f"the image {before.partition(':')[0]}:...@{rest}: a password or token stands in it, where `ps` and the "
            f"history of a shell show it.\n  To do: {describe_credentials(rest.split('#')[0].split('/')[0])}"
        )
    if before and not _USER.fullmatch(before):
        raise _refused(text, f'"{before}" is no name of a user')
    return before, rest


def _split_version(text: str, name: str) -> tuple[str, str, str]:
    """Repository, tag and digest; the tag is "latest" where nothing is said, and empty beside a digest."""
    name, at, digest = name.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise _refused(text, f'"{digest}" is no digest, which is sha256: and 64 hexadecimal digits')
    repository, colon, tag = name.partition(":")
    if not _REPOSITORY.fullmatch(repository):
        hint = ", which has no capital letters" if repository != repository.lower() else ""
        raise _refused(text, f'"{repository}" is no name of an image{hint}')
    if colon and not _TAG.fullmatch(tag):
        raise _refused(text, f'"{tag}" is no tag')
    return repository, "" if digest else tag or "latest", digest


def _check_user(text: str, registry: str, user: str | None) -> None:
    if user is None or (user and (registry != _NGC or user == NGC_USER)):
        return
    if user == "":
        raise UserError(
            f'the image "{text}": no user stands before the "@". A shell replaces $oauthtoken by nothing.\n'
            f"  To do: put the image into single quotes: '{text.replace('@', f'{NGC_USER}@', 1)}'"
        )
    raise UserError(
        f'the image "{text}": {_NGC} knows no user "{user}".\n'
        f"  Allowed: {NGC_USER}, these very characters, with an API key as its password; or no user (public images).\n"
        f"  To do: name the image without a user, or {describe_credentials(_NGC)}"
    )


def describe_credentials(registry: str, runtime: str = "") -> str:
    """Where a person keeps the password of a registry, for one runtime or for either; never on a command line."""
    host = registry or "docker.io"
    user = NGC_USER if host == _NGC else "USER"
    machine = "auth.docker.io" if host == "docker.io" else host
    more = " (and the same for authn.nvidia.com)" if host == _NGC else ""
    ways = {
        "enroot": f'for enroot write the line "machine {machine} login {user} password SECRET"{more} into '
        f"~/.config/enroot/.credentials, readable for you alone, and name the image as '{user}@{host}#IMAGE:TAG'",
        "apptainer": f"for Apptainer run `apptainer registry login --username '{user}' docker://{host}`",
    }
    return ways.get(runtime, "; ".join(ways.values())) + "."


def _refused(text: str, what: str) -> UserError:
    return UserError(
        f'the image "{text}": {what}.\n  Allowed: {_ALLOWED}.\n  To do: write it as in {_EXAMPLE}, in single quotes.'
    )
