"""Which image is requested: its name, the packages that are added, and the machine that makes it.

Invariants:
- Values only, without guesses: what is unknown is empty or None.
- A name that `parse_uri` accepts means one image; rendered in enroot's form and parsed again, it gives the same value.
- A recipe: every word of the user is one word of the script's shell, whatever it contains. No secret of a URL gets into
  the script, which stays in the image.

    nvcr.io#nvidia/pytorch:25.04-py3    enroot: docker://[USER@][REGISTRY#]IMAGE[:TAG]
    nvcr.io/nvidia/pytorch:25.04-py3    docker: docker://[REGISTRY/]IMAGE[:TAG][@DIGEST]

Sources: enroot's documentation, "enroot import"; the grammar of references of the distribution project (docker), by
which the first part of a name is a registry if it contains a "." or a ":" or is "localhost"; apt-get(8); pip's
documentation, "pip install" and "Requirements File Format"; POSIX sh, as images have it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from shardway.errors import Problem, UserError, check_no_problems
from shardway.launch.script import ScriptSection, quote, quote_all, render_script, script_lines, wrap_command
from shardway.sites.schema import Internet

# --- names of images, in enroot's and docker's form

_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
_NGC = "nvcr.io"
NGC_USER = "$oauthtoken"
"""The only user name of NVIDIA's registry, literally; the password is the API key."""

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


@dataclass(frozen=True)
class Reference:
    """An image with a name. `transport`: it is in a registry (docker, oras), or in an engine on the machine (dockerd,
    podman).

    `registry` is empty for Docker Hub, where `repository` is the short name ("ubuntu", not "library/ubuntu"). An image
    has a tag or a digest, never both: with a digest, `tag` is empty.
    """

    repository: str
    registry: str = ""
    tag: str = ""
    digest: str = ""
    user: str = ""
    transport: str = "docker"

    @property
    def is_remote(self) -> bool:
        """It is fetched over the network."""
        return self.transport in ("docker", "oras")

    @property
    def version(self) -> str:
        """The tag or digest, with its ":" or "@"."""
        return f"@{self.digest}" if self.digest else f":{self.tag}"

    @property
    def stem(self) -> str:
        """A name for a file: "pytorch-25.04-py3", "pytorch-0123456789ab"."""
        version = self.digest.partition(":")[2][:12] or self.tag
        return f"{self.repository.rpartition('/')[2]}-{version}"


@dataclass(frozen=True)
class ImageFile:
    """An existing image: a .sqsh or .sif file, or a folder. `path` as the user wrote it."""

    path: str

    @property
    def is_remote(self) -> bool:
        return False

    @property
    def kind(self) -> str:
        """squashfs, sif or folder, by its suffix, as the runtimes do too."""
        suffix = self.path.rpartition(".")[2]
        return "sif" if suffix == "sif" else "squashfs" if suffix in ("sqsh", "sqfs", "squashfs") else "folder"

    @property
    def stem(self) -> str:
        """A name for a file that is made from it."""
        name = self.path.rstrip("/").rpartition("/")[2]
        return re.sub(r"\.(sqsh|sqfs|squashfs|sif)$", "", name)


Source = Reference | ImageFile


def parse_uri(text: str) -> Source:
    """The image that the user named. Raises UserError for an invalid name, and for one with a secret."""
    text = text.strip()
    try:
        return _parse_uri(text)
    except ValueError as error:
        remedy = "write it as in docker://nvcr.io#nvidia/pytorch:25.04-py3, in single quotes"
        raise UserError(f'the image "{text}": {error}.\n  Allowed: {_ALLOWED}.\n  To do: {remedy}.') from None


def _parse_uri(text: str) -> Source:
    if not text:
        raise ValueError("it is empty")
    if "://" in text and _UNPRINTABLE.search(text):
        raise ValueError("an image has no blanks in its name")
    match = _SCHEME.fullmatch(text)
    if match is None and _FILE.fullmatch(text):
        return ImageFile(text)
    scheme, body = (match[1].lower(), match[2]) if match else ("docker", text)
    if scheme in ("dockerd", "podman"):  # an engine looks its image up by the given name, registry included
        registry, slash, name = body.rpartition("/")
        repository, tag, digest = _split_version(name)
        if registry and not all(
            _REGISTRY.fullmatch(part) or _REPOSITORY.fullmatch(part) for part in registry.split("/")
        ):
            raise ValueError(f'"{registry}" is no name of a registry or of an owner')
        return Reference(f"{registry}{slash}{repository}", "", tag, digest, "", scheme)
    if scheme not in ("docker", "oras"):
        raise ValueError(f'"{scheme}://" is not known')

    user, body = _split_user(body)
    registry, name = "", body
    if "#" in body:  # enroot's form
        registry, _, name = body.partition("#")
        # Without a dot or a port docker would take it for a part of the name.
        registry = registry if not registry or _names_registry(f"{registry}/") else f"{registry}:443"
    elif _names_registry(body):
        registry, _, name = body.partition("/")
    registry = registry.lower()
    if registry and not _REGISTRY.fullmatch(registry):
        raise ValueError(f'"{registry}" is no name of a registry')
    registry = "" if registry in _HUB else registry
    repository, tag, digest = _split_version(name)
    if not registry:
        repository = repository.removeprefix("library/")
    if user == "":
        raise UserError(
            f'the image "{text}": no user stands before the "@". A shell replaces $oauthtoken by nothing.\n'
            f"  To do: put the image into single quotes: '{text.replace('@', f'{NGC_USER}@', 1)}'"
        )
    if user and user != NGC_USER and registry == _NGC:
        raise UserError(
            f'the image "{text}": {_NGC} knows no user "{user}".\n'
            f"  Allowed: {NGC_USER}, these very characters, with an API key as its password; or no user (public "
            "images).\n"
            f"  To do: name the image without a user, or {describe_credentials(_NGC)}"
        )
    return Reference(repository, registry, tag, digest, user or "", scheme)


def _names_registry(name: str) -> bool:
    """Whether the part before the first slash is a registry, by docker's rule."""
    first, slash, _ = name.partition("/")
    return bool(slash) and ("." in first or ":" in first or first == "localhost")


def _split_user(body: str) -> tuple[str | None, str]:
    """The user before the "@" of enroot's form (None: no "@"); a digest has an "@" too."""
    before, at, rest = body.partition("@")
    if not at or rest.startswith(("sha256:", "sha512:")) or "/" in before or "#" in before:
        return None, body
    if ":" in before:
        raise UserError(
            f"the image {before.partition(':')[0]}:...@{rest}: a password or token stands in it, where `ps` and the "
            f"history of a shell show it.\n  To do: {describe_credentials(rest.split('#')[0].split('/')[0])}"
        )
    if before and not _USER.fullmatch(before):
        raise ValueError(f'"{before}" is no name of a user')
    return before, rest


def _split_version(name: str) -> tuple[str, str, str]:
    """Repository, tag and digest; the tag is "latest" if there is neither, and empty with a digest."""
    name, at, digest = name.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise ValueError(f'"{digest}" is no digest, which is sha256: and 64 hexadecimal digits')
    repository, colon, tag = name.partition(":")
    if not _REPOSITORY.fullmatch(repository):
        hint = ", which has no capital letters" if repository != repository.lower() else ""
        raise ValueError(f'"{repository}" is no name of an image{hint}')
    if colon and not _TAG.fullmatch(tag):
        raise ValueError(f'"{tag}" is no tag')
    return repository, "" if digest else tag or "latest", digest


def render_enroot(reference: Reference) -> str:
    """As `enroot import` takes it: docker://[USER@][REGISTRY#]IMAGE:TAG, dockerd://IMAGE:TAG, podman://IMAGE:TAG."""
    user = f"{reference.user}@" if reference.user else ""
    registry = f"{reference.registry}#" if reference.registry else ""
    if not registry and reference.is_remote and (user or _names_registry(reference.repository)):
        registry = f"{_HUB[-1]}#"  # else the name would be taken for a registry, or for a digest after the "@"
    return f"{reference.transport}://{user}{registry}{reference.repository}{reference.version}"


def render_docker(reference: Reference) -> str:
    """As docker and Apptainer take it, REGISTRY/IMAGE:TAG without a scheme; they keep the user name elsewhere."""
    registry = f"{reference.registry}/" if reference.registry else ""
    if not registry and reference.is_remote and _names_registry(reference.repository):
        registry = f"{_HUB[0]}/"
    return f"{registry}{reference.repository}{reference.version}"


def describe_credentials(registry: str, runtime: str = "") -> str:
    """Where the user stores the password of a registry, for one runtime or for either; never on a command line."""
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


# --- what is added to a base image, as a script

REQUIREMENTS = "/tmp/shardway-requirements.txt"
"""Path of the requirements while they are installed."""

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(=[A-Za-z0-9.+~:-]+|/[a-z0-9-]+)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SECRET = re.compile(r"https?://[^/\s]+@|://[^/\s@]*:[^/\s@]+@")
_OUTSIDE = re.compile(
    r"(^|\s)(-r|--requirement|-c|--constraint|-e|--editable)[\s=]+(?!/)(?!\S+://)\S|^\s*\.{1,2}(/|\s*$)"
)
_OF_DEFINITIONS = re.compile(r"\{\{|(^|\s)%\w*")
_OPERATOR = re.compile(r"[<>=!~;@(]")


@dataclass(frozen=True)
class Recipe:
    """Names for apt-get, lines as after `pip install`, and the lines of a requirements file."""

    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.apt or self.pip or any(_is_needed(line) for line in self.requirements))


def parse_recipe(apt: Sequence[str], pip: Sequence[str], requirements: str = "") -> Recipe:
    """The requested packages. Raises UserError with all problems that would make the installation fail."""
    lines = tuple(requirements.splitlines())
    allowed = "one name an option: libaio-dev, or with a version libaio-dev=0.3.113-4"
    remedy = "give --apt once for each package"
    wrong = [f'"{name}" is no name of a package' for name in apt if not _PACKAGE.fullmatch(name)]
    problems = [Problem("--apt", what, allowed=allowed, remedy=remedy) for what in wrong]
    for line in pip:
        problems += _list_wrong_line("--pip", line)
    for number, line in enumerate(lines, 1):
        problems += _list_wrong_line("--requirements", line, f"line {number}")
    check_no_problems("what to install", problems)
    return Recipe(tuple(apt), tuple(pip), lines)


def _list_wrong_line(option: str, line: str, origin: str = "") -> Iterator[Problem]:
    """Problems of a line that pip, the shell or the recipe file would not take as meant."""
    shown, allowed = _SECRET.sub("https://...@", line), ""
    if _CONTROL.search(line.replace("\t", " ")):
        what, remedy = f"{shown!r} holds a control character", "give one option for each line"
    elif found := _OF_DEFINITIONS.search(line):
        what = f'"{shown}" holds "{found[0].strip()}", which means something else in Apptainer\'s definition files'
        remedy = "write it without"
    elif _SECRET.search(line):
        what = f'"{shown}" holds a user or a password'
        remedy = "use an index that asks for no password, or install it into a venv of the run: this stays in the image"
    elif _is_needed(line) and _OUTSIDE.search(line):
        what = f'"{shown}" names a file of yours, and those are not in the image'
        remedy = "name the packages themselves, or put the code into the run's folder"
    elif option == "--requirements" and line.rstrip().endswith("\\"):
        what, remedy = f'"{shown}" goes on in the next line', "write it on one line"
    elif option == "--requirements":
        return
    else:
        try:
            if split_pip_line(line):
                return
            what, allowed, remedy = "it is empty", "what may follow `pip install`", "name a package"
        except ValueError:
            what, remedy = f'"{line}" has a quote that is not closed', "close it"
    yield Problem(option, what, origin, allowed, remedy)


def split_pip_line(line: str) -> tuple[str, ...]:
    """The words of a line of `pip install`; a requirement with blanks ("torch >= 2.1") is one word.

    Raises ValueError for an unclosed quote.
    """
    words = shlex.split(line)
    if any(word.startswith("-") for word in words):
        return tuple(words)
    is_one = any(_OPERATOR.match(word) or word.endswith(";") for word in words[1:])
    return (line.strip(),) if is_one else tuple(words)


def render_recipe(recipe: Recipe) -> str:
    """The script for `sh` inside the image, run as its root. It ends at the first command that fails."""
    # without apt's user _apt, which a container of an ordinary user cannot switch to
    apt, pip = "apt-get -o APT::Sandbox::User=root", "python3 -m pip install --no-cache-dir"
    install = wrap_command((f"{apt} install --yes --no-install-recommends --", *map(quote, recipe.apt)))
    listed = wrap_command(("printf '%s\\n'", *map(quote, filter(_is_needed, recipe.requirements)), f">{REQUIREMENTS}"))
    of_python = recipe.pip or recipe.requirements
    lines = script_lines(
        ("set -eu", "nothing goes on after a command that failed"),
        (recipe.apt and "export DEBIAN_FRONTEND=noninteractive", "packages of the image's own system, no questions"),
        (recipe.apt and f"{apt} update", ""),
        (recipe.apt and install, ""),
        (recipe.apt and "rm -rf /var/lib/apt/lists/*", ""),
        (of_python and "export PIP_BREAK_SYSTEM_PACKAGES=1", "packages of Python, for the image's own Python"),
        (of_python and "export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1", ""),
        (recipe.requirements and listed, ""),
        (recipe.requirements and f"{pip} --requirement {REQUIREMENTS}", ""),
        (recipe.requirements and f"rm {REQUIREMENTS}", ""),
        *((f"{pip} {quote_all(split_pip_line(line))}", "") for line in recipe.pip),
    )
    return render_script((ScriptSection("", lines),))


def _is_needed(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


# --- the request, and the machine that makes the image

Architecture = Literal["x86_64", "aarch64"]

DEBIAN_NAMES: dict[str, str] = {"x86_64": "amd64", "aarch64": "arm64"}
"""The same architectures in the names that registries use."""


@dataclass(frozen=True)
class ImageRequest:
    """`recipe`: what is added; empty for an image that is only fetched. `target`, `scratch`: as the user wrote them,
    empty if not given. `command`: the runtime's command, if it has another name at the site. `way`: how the machine
    that makes the image reaches the internet (`login`, None for unknown), and its proxy. `door`: where files are copied
    to the site, in rsync's form ("data.example.org"); empty if unknown."""

    source: Source
    runtime: str
    recipe: Recipe = field(default_factory=Recipe)
    target: str = ""
    scratch: str = ""
    architecture: Architecture | None = None
    command: str = ""
    way: Internet = field(default_factory=Internet)
    site: str = ""
    door: str = ""
    token: str = "token"

    @property
    def adds(self) -> bool:
        """Something is installed, so that programs of the image must run."""
        return not self.recipe.is_empty


@dataclass(frozen=True)
class BuildFolder:
    """A folder (or its first existing parent), with the free space and type of its file system."""

    path: PurePosixPath
    free_bytes: int | None = None
    kind: str = ""


@dataclass(frozen=True)
class Ground:
    """The machine that makes the image.

    `architecture`: from `uname -m`. `base`: an image file that it starts from, with its size. `own_cache`: whether the
    user has already set the runtime's cache folder.
    """

    target: PurePosixPath
    target_place: BuildFolder
    scratch_places: tuple[BuildFolder, ...]
    host: str = ""
    architecture: str = ""
    is_root: bool = False
    has_command: bool = True
    target_exists: bool = False
    own_cache: bool = False
    base: PurePosixPath | None = None
    base_bytes: int | None = None
