"""Makes an image on this machine or a login node: surveys the machine, runs the script, explains a failure.

Invariants:
- Survey: it only reads, in few exchanges.
- Options of the user take precedence over the profile.
- Output is never lost: an explanation is printed before it.
- After an error, a timeout or an interrupt no half-made file is left; if that cannot be verified (the host is gone), it
  is reported.

Sources: POSIX, df (-P, -k); GNU coreutils, df (-T), stat (-c); messages of Apptainer 1.4.5 as it printed them without a
network, a registry or user namespaces, of curl, apt and pip; of enroot from its source.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import get_args

from pydantic import ValidationError

from shardway.errors import SiteError, UserError, check_no_problems
from shardway.launch.hosts.base import Done, Host, HostUnreachable, Target
from shardway.launch.image.plan import TOOLS, Making, default_name, ended_mark
from shardway.launch.image.request import (
    DEBIAN_NAMES,
    Architecture,
    BuildFolder,
    Ground,
    ImageFile,
    ImageRequest,
    NetworkAccess,
    Recipe,
    Reference,
    Source,
    describe_credentials,
)
from shardway.sites.schema import Internet, SiteProfile

# --- survey of the machine

RUNTIMES = (("enroot", ""), ("apptainer", ""), ("apptainer", "singularity"))
"""Runtimes that are tried if none is named, with their command if it has another name."""

_DF = re.compile(r"\s(?P<kind>\S+)\s+\d+\s+\d+\s+(?P<free>\d+)\s+\d+%\s")
_KIB = 1024


def find_runtime(request: ImageRequest, host: Host) -> ImageRequest:
    """The request with the first runtime that the machine has. Raises UserError if it has none."""
    found = host.run_many([_has_command(command or name) for name, command in RUNTIMES])
    for (name, command), done in zip(RUNTIMES, found, strict=True):
        if done.ok:
            return replace(request, runtime=name, command=command)
    raise UserError(
        f"{host.name or 'this machine'} has neither enroot nor apptainer, so it cannot make an image.\n"
        "  To do: run this where one of them is (often compute nodes alone have it), or see with\n"
        "  --dry-run --runtime enroot (or apptainer) what would run."
    )


def survey_host(request: ImageRequest, host: Host) -> Ground:
    """Survey the machine. Raises UserError for a path that cannot be expanded, HostUnreachable."""
    tool = TOOLS[request.runtime]
    target = host.expand(request.target or default_name(request))
    base = host.expand(request.source.path) if isinstance(request.source, ImageFile) else None
    asked = [
        ["uname", "-m"],
        ["id", "-u"],
        _has_command(request.command or request.runtime),
        ["printenv", tool.cache_variable(request)],
        ["printenv", "TMPDIR"],
        ["test", "-e", str(target)],
        ["stat", "-L", "-c", "%s", str(base or "/")],
    ]
    machine, user, command, cache, tmpdir, exists, size = host.run_many(asked)
    usual = (_text(tmpdir) if _text(tmpdir).startswith("/") else "/tmp", str(target.parent))
    wanted = [host.expand(request.scratch)] if request.scratch else [PurePosixPath(path) for path in usual]
    places = _measure(host, [target.parent, *wanted])
    return Ground(
        target=target,
        target_place=places[0],
        scratch_places=tuple(places[1:]),
        host=host.name,
        architecture=_text(machine).replace("arm64", "aarch64"),
        is_root=_text(user) == "0",
        has_command=command.ok,
        target_exists=exists.ok,
        own_cache=bool(_text(cache)),
        base=base,
        base_bytes=int(_text(size)) if base and _text(size).isdecimal() else None,
    )


def parse_df(text: str) -> tuple[int | None, str]:
    """Free bytes and file system type in the output of `df -P -k -T PATH`; None and "" if it has neither."""
    last = (text.strip().splitlines() or [""])[-1]
    match = _DF.search(last)
    return (int(match["free"]) * _KIB, match["kind"]) if match else (None, "")


def _measure(host: Host, folders: Sequence[PurePosixPath]) -> list[BuildFolder]:
    """The free space of each folder, or of its first existing parent."""
    asked = [(folder, above) for folder in folders for above in (folder, *folder.parents)]
    answers = host.run_many([["df", "-P", "-k", "-T", "--", str(above)] for _, above in asked])
    found: dict[PurePosixPath, BuildFolder] = {}
    for (folder, _), done in zip(asked, answers, strict=True):
        if done.ok and folder not in found:
            found[folder] = BuildFolder(folder, *parse_df(done.out))
    return [found.get(folder, BuildFolder(folder)) for folder in folders]


def _has_command(command: str) -> list[str]:
    return ["sh", "-c", 'command -v "$1"', "sh", command]


def _text(done: Done) -> str:
    return done.out.strip() if done.ok else ""


# --- what a site's profile states about images

_MAKERS = {"enroot": "enroot", "pyxis": "enroot", "apptainer": "apptainer"}
"""Container runtime of a site -> the runtime that makes its images."""

_INSTEAD = {
    "podman": "make it with `podman build`, and carry it with `podman save` and `podman load`, or pull it on the nodes",
    "charliecloud": "make a .sqsh file where enroot is, with --runtime enroot: ch-run starts it as it is",
}


@dataclass(frozen=True)
class ImageOptions:
    """Options as the user wrote them; empty if not given."""

    runtime: str = ""
    architecture: str = ""
    proxy: str = ""
    target: str = ""
    scratch: str = ""


def make_request(
    source: Source,
    recipe: Recipe,
    options: ImageOptions,
    target: Target | None = None,
    profile: SiteProfile | None = None,
) -> ImageRequest:
    """The request; `runtime` is empty if neither the user nor the profile names one.

    Raises UserError for an unknown runtime or architecture, a proxy with a password, and a site whose runtime has no
    images of this kind.
    """
    rules = profile.internet if profile else Internet()
    runtime = _choose_runtime(options.runtime, profile)
    usual = profile is not None and _MAKERS.get(profile.container or "") == runtime == profile.container
    return ImageRequest(
        source=source,
        runtime=runtime,
        recipe=recipe,
        target=options.target,
        scratch=options.scratch,
        architecture=_parse_architecture(options.architecture) or (profile.node.architecture if profile else None),
        command=(profile.containers.command or "") if profile and usual else "",
        way=_choose_way(options.proxy, rules),
        site=profile.name if profile else "",
        door=_find_door(target, profile),
    )


def _choose_runtime(named: str, profile: SiteProfile | None) -> str:
    if named and named not in TOOLS:
        raise UserError(
            f"--runtime {named}: images are made by others.\n  Allowed: {', '.join(TOOLS)}.\n"
            f"  To do: {_INSTEAD.get(named, 'choose one of these')}."
        )
    container = (profile.container if profile else None) or ""
    if named or container in ("", "none"):
        return named
    if container not in _MAKERS and profile:
        raise UserError(
            f"{profile.name} starts containers with {container}, for which Shardway makes no images.\n"
            f"  To do: {_INSTEAD[container]}."
        )
    return _MAKERS[container]


def _parse_architecture(text: str) -> Architecture | None:
    names = {**{name: name for name in DEBIAN_NAMES}, **{short: name for name, short in DEBIAN_NAMES.items()}}
    for name in get_args(Architecture):
        if names.get(text.lower()) == name:
            return name
    if text:
        raise UserError(f"--arch {text}: no such architecture.\n  Allowed: {', '.join(names)}.\n  To do: choose one.")
    return None


def _choose_way(proxy: str, rules: Internet) -> NetworkAccess:
    """The network access: the given proxy, else the profile's if its login nodes use it."""
    if proxy:
        try:
            Internet.model_validate({"proxy": proxy})
        except ValidationError as error:
            reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            raise UserError(f"--proxy: {reason}.\n  To do: ask the site which proxy asks for no password.") from None
        return NetworkAccess("proxy", proxy, rules.no_proxy or "")
    if rules.login == "proxy" and rules.proxy:
        return NetworkAccess("proxy", rules.proxy, rules.no_proxy or "")
    return NetworkAccess(rules.login)


def _find_door(target: Target | None, profile: SiteProfile | None) -> str:
    """Where files are copied to the site, in rsync's form."""
    user, at, host = target.host.rpartition("@") if target else ("", "", "")
    doors: Sequence[str] = (profile.access.transfer or profile.access.login) if profile else ()
    return f"{user}{at}{doors[0]}" if doors else f"{user}{at}{host}"


# --- failures as a sentence and a remedy


@dataclass(frozen=True)
class ImageFailure:
    """Why an image could not be made, and what to do."""

    sentence: str
    remedy: str


_STATUS = r"(error|status)( code)?:? "
_WAY = "check the network; where the way out is a proxy, name it by --proxy http://HOST:PORT"

_KNOWN: tuple[tuple[str, ImageFailure], ...] = (
    (
        r"No space left on device|[Qq]uota exceeded|Write failed because",
        ImageFailure("the disk is full", "name a folder with more room by --scratch, or another place by --to"),
    ),
    (
        r"If error was from fakeroot|fakeroot: (command )?not found|not listed in /etc/sub[ug]id.*fakeroot",
        ImageFailure(
            "no user IDs are set aside for you (/etc/subuid), and the image cannot run the command fakeroot instead",
            "ask the site for an entry in /etc/subuid, or build where you have one and copy the file",
        ),
    ),
    (
        r"user namespace|unshare.*(not permitted|failed)|newuidmap|Requesting capability set|max_user_namespaces",
        ImageFailure(
            "this machine does not let you make containers",
            "try a compute node in an interactive job, or make it elsewhere and copy the file",
        ),
    ),
    (
        r"[Ee]xec format error",
        ImageFailure(
            "programs of the image are for another architecture", "name the machine's with --arch, or build elsewhere"
        ),
    ),
    (
        rf"{_STATUS}40[13]\b|[Uu]nauthorized|authentication required|access to the resource is denied|Forbidden",
        ImageFailure("the registry does not let you have it", ""),
    ),
    (
        rf"{_STATUS}404\b|manifest unknown|not found: manifest|name unknown|MANIFEST_UNKNOWN",
        ImageFailure("the registry has no image of that name and version", "look the tag up on the registry's page"),
    ),
    (
        r"toomanyrequests|429 Too Many|rate limit",
        ImageFailure("the registry has had too many requests from here", "wait some hours, or log in there"),
    ),
    (
        r"no such host|Could not resolve|Temporary failure (resolving|in name resolution)|Name or service not known",
        ImageFailure("a name of a host is not known here: there may be no way out", _WAY),
    ),
    (
        r"[Tt]imed? ?out|Connection refused|Network is unreachable|No route to host|Could not connect",
        ImageFailure("a host outside does not answer: there may be no way out", _WAY),
    ),
    (
        r"Unable to locate package|has no installation candidate|Version .* for .* was not found",
        ImageFailure("apt knows no such package", "check the name for the image's release"),
    ),
    (
        r"No matching distribution found|Could not find a version|ResolutionImpossible|conflicting dependencies",
        ImageFailure(
            "pip finds no set of versions that fits", "check the lines; images of NVIDIA pin versions of their own"
        ),
    ),
    (
        r"apt-get: (command )?not found|No module named pip|python3: (command )?not found",
        ImageFailure(
            "the image lacks the program that installs", "choose a base image with it: of Debian or Ubuntu, with pip"
        ),
    ),
)


def parse_failure(lines: Sequence[str], request: ImageRequest) -> ImageFailure:
    """The first known reason, searched from the last line up; if none is known, the exit code."""
    for line in reversed(lines):
        for pattern, failure in _KNOWN:
            if re.search(pattern, line):
                return failure if failure.remedy else ImageFailure(failure.sentence, _credentials(request))
    return ImageFailure("a command failed", "see its last lines above; --dry-run prints all that ran")


def _credentials(request: ImageRequest) -> str:
    registry = request.source.registry if isinstance(request.source, Reference) else ""
    return describe_credentials(registry, request.runtime).removesuffix(".")


# --- run the script

_KEPT_LINES = 400
_SHOWN_LINES = 15
_GRACE_S = 60
_CLEAN_S = 600.0
_TIMED_OUT = 143
"""Exit code of the script after a signal, which also ends it at its time limit."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Made:
    """A complete image: its path, and its size (0: unknown)."""

    path: PurePosixPath
    bytes: int = 0


def make_image(host: Host, request: ImageRequest, making: Making, limit_s: float, tell: Tell) -> Made:
    """Make the image, and pass each line of output to `tell`.

    Raises UserError if it cannot be made there, SiteError if a command failed or the time limit (seconds) was reached,
    HostUnreachable.
    """
    check_no_problems(f"the image {making.target}", making.hindrances)
    script, lines = making.work / "make.sh", deque[str](maxlen=_KEPT_LINES)
    code = None
    try:
        host.write_files({script: making.script})
        words = ["timeout", "-k", str(_GRACE_S), str(math.ceil(limit_s)), "bash", str(script)]
        output = host.follow(words)
        try:
            code = _follow(output, making.token, lines, tell)
        finally:
            if isinstance(output, Generator):
                output.close()  # now: its commands must end before the cleanup
    finally:
        if code is None:
            _clean(host, making)
    if code != 0:
        raise SiteError(_describe_failure(request, making, code, list(lines), limit_s))
    size = host.run(["stat", "-c", "%s", str(making.target)]).out.strip()
    return Made(making.target, int(size) if size.isdecimal() else 0)


def _follow(output: Iterable[str], token: str, lines: deque[str], tell: Tell) -> int | None:
    """The exit code that the script printed last; None if it did not get that far."""
    mark = ended_mark(token)
    for line in output:
        if line.startswith(mark) and line.removeprefix(mark).strip().isdecimal():
            return int(line.removeprefix(mark))
        shown = line.rstrip("\r").rpartition("\r")[2]  # the last state of a line that was redrawn
        lines.append(shown)
        tell(shown)
    return None


def _clean(host: Host, making: Making) -> None:
    """Remove what the script removes at its end."""
    work, part = str(making.work), str(making.part)
    try:
        host.run_many([["chmod", "-R", "u+rwX", "--", work], ["rm", "-rf", "--", work, part]], timeout_s=_CLEAN_S)
    except HostUnreachable as error:
        raise HostUnreachable(f"{error}\n  Half-made files may be left there: {work} and {part}.") from None


def _describe_failure(request: ImageRequest, making: Making, code: int | None, lines: list[str], limit_s: float) -> str:
    printed = [line for line in lines if line.strip()][-_SHOWN_LINES:]
    shown = "".join(f"\n    {line}" for line in printed) or "\n    It printed nothing."
    if code == _TIMED_OUT:
        what, remedy = f"it was ended after {limit_s:.0f} s", "allow more with --timeout, or run what --dry-run prints"
    elif code is None and not printed:
        what, remedy = (
            "its script did not start",
            "check that bash and timeout are there, and run what --dry-run prints",
        )
    else:
        failure = parse_failure(lines, request)
        what, remedy = failure.sentence, failure.remedy
    ended = f" (exit code {code})" if code not in (None, _TIMED_OUT) else ""
    return f"{making.target} was not made{ended}: {what}. Nothing half-made is left.{shown}\n  To do: {remedy}."
