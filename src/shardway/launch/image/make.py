"""Makes an image on this machine or a login node: chooses the runtime, surveys the machine, writes and runs a script.

Invariants:
- The script alone makes the image: run by hand, it does the same as under `shardway image`. It leaves the image
  complete under its name, or nothing. It writes to `$part`, which becomes the image when it is complete, and below
  `$work`, which is removed.
- Apptainer (a SIF file): the image follows from the definition file alone, which stays in it and contains neither a
  proxy nor a secret. Enroot (squashfs): containers, layers and temporary files are below `$work`, so nothing is left in
  the user's own enroot folders.
- Survey: it only reads, in few exchanges. Options of the user take precedence over the profile.
- Output is never lost: an explanation is printed before it.
- After an error, a timeout or an interrupt no half-made file is left; if that cannot be verified (the host is gone), it
  is reported.

Sources: Apptainer User Guide, "apptainer pull", "apptainer build", "Definition Files" (Bootstrap, From, %post), "Build
Environment" (APPTAINER_TMPDIR, APPTAINER_CACHEDIR). Variables of a proxy, and those of the base image, reach %post by
themselves (tried on 1.4.5); enroot's documentation, "enroot import" (--arch, --output), "enroot create" (--name),
"enroot start" (--root, --rw, --env, --mount), "enroot export" (--output), "Configuration" (ENROOT_*_PATH). POSIX, df
(-P, -k); GNU coreutils, df (-T), stat (-c).
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import PurePosixPath
from textwrap import indent
from typing import get_args

from pydantic import ValidationError

from shardway.errors import Problem, SiteError, UserError, check_no_problems
from shardway.launch.hosts.base import Done, Host, HostUnreachable, Target
from shardway.launch.image.request import (
    DEBIAN_NAMES,
    Architecture,
    BuildFolder,
    Ground,
    ImageFile,
    ImageRequest,
    Recipe,
    Reference,
    Source,
    describe_credentials,
    render_docker,
    render_enroot,
    render_recipe,
)
from shardway.launch.script import (
    ScriptLine,
    ScriptSection,
    quote,
    quote_all,
    render_script,
    script_lines,
    wrap_command,
)
from shardway.plugins import make_own
from shardway.sites.schema import Internet, SiteProfile

# --- the runtime that makes it

SUFFIXES = {"enroot": (".sqsh", ".sqfs", ".squashfs"), "apptainer": (".sif",)}
"""Runtimes that make images, with the endings of their files; the first is the usual one."""

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
    runtime, container = options.runtime, (profile.container if profile else None) or ""
    if runtime and runtime not in SUFFIXES:
        raise UserError(
            f"--runtime {runtime}: images are made by others.\n  Allowed: {', '.join(SUFFIXES)}.\n"
            f"  To do: {_INSTEAD.get(runtime, 'choose one of these')}."
        )
    if not runtime and profile and container not in ("", "none"):
        if container not in _MAKERS:
            raise UserError(
                f"{profile.name} starts containers with {container}, for which Shardway makes no images.\n"
                f"  To do: {_INSTEAD[container]}."
            )
        runtime = _MAKERS[container]
    names = {**{name: name for name in DEBIAN_NAMES}, **{short: name for name, short in DEBIAN_NAMES.items()}}
    architecture: Architecture | None = profile.node.architecture if profile else None
    if options.architecture:
        found = [name for name in get_args(Architecture) if name == names.get(options.architecture.lower())]
        if not found:
            raise UserError(
                f"--arch {options.architecture}: no such architecture.\n  Allowed: {', '.join(names)}.\n"
                "  To do: choose one."
            )
        architecture = found[0]
    user, at, host = target.host.rpartition("@") if target else ("", "", "")
    doors = [*profile.access.transfer, *profile.access.login] if profile else []
    usual = profile is not None and _MAKERS.get(container) == runtime == container
    return ImageRequest(
        source=source,
        runtime=runtime,
        recipe=recipe,
        target=options.target,
        scratch=options.scratch,
        architecture=architecture,
        command=(profile.containers.command or "") if profile and usual else "",
        way=_choose_way(options.proxy, profile.internet if profile else Internet()),
        site=profile.name if profile else "",
        door=f"{user}{at}{doors[0] if doors else host}",
    )


def _choose_way(proxy: str, rules: Internet) -> Internet:
    """The way out: the given proxy, else the profile's if its login nodes use it."""
    if not proxy:
        return rules if rules.login == "proxy" and rules.proxy else Internet(login=rules.login)
    try:
        return Internet.model_validate({"login": "proxy", "proxy": proxy, "no_proxy": rules.no_proxy})
    except ValidationError as error:
        reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise UserError(f"--proxy: {reason}.\n  To do: ask the site which proxy asks for no password.") from None


def find_runtime(request: ImageRequest, host: Host) -> ImageRequest:
    """The request with the first runtime that the machine has. Raises UserError if it has none."""
    known = {"enroot": ("enroot", ""), "apptainer": ("apptainer", ""), "singularity": ("apptainer", "singularity")}
    found = host.run_many([_has_command(command) for command in known])
    for (runtime, command), done in zip(known.values(), found, strict=True):
        if done.ok:
            return replace(request, runtime=runtime, command=command)
    raise UserError(
        f"{host.name or 'this machine'} has neither enroot nor apptainer, so it cannot make an image.\n"
        "  To do: run this where one of them is (often compute nodes alone have it), or see what\n"
        "  would run with `shardway image`, --dry-run and --runtime enroot (or apptainer)."
    )


# --- survey of the machine

_DF = re.compile(r"\s(?P<kind>\S+)\s+\d+\s+\d+\s+(?P<free>\d+)\s+\d+%\s")


def survey_host(request: ImageRequest, host: Host) -> Ground:
    """Survey the machine. Raises UserError for a path that cannot be expanded, HostUnreachable."""
    target = host.expand(request.target or default_name(request))
    base = host.expand(request.source.path) if isinstance(request.source, ImageFile) else None
    asked = [
        ["uname", "-m"],
        ["id", "-u"],
        _has_command(request.command or request.runtime),
        ["printenv", "ENROOT_CACHE_PATH" if request.runtime == "enroot" else f"{_prefix(request)}_CACHEDIR"],
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
    match = _DF.search((text.strip().splitlines() or [""])[-1])
    return (int(match["free"]) * 1024, match["kind"]) if match else (None, "")


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


# --- what a runtime contributes to the script: the lines that make `$part`


def _list_apptainer_steps(request: ImageRequest, ground: Ground) -> tuple[ScriptLine, ...]:
    source, command, prefix = request.source, quote(request.command or "apptainer"), _prefix(request)
    arch = _arch_words(request, ground) if source.is_remote else ()
    if isinstance(source, ImageFile):
        bootstrap, origin = "localimage", str(ground.base)
        verb, spec = "build", origin
    else:
        bootstrap = "docker-daemon" if source.transport == "dockerd" else source.transport
        origin = render_docker(source)
        # `pull` is for registries; the rest is built
        verb, spec = ("pull", f"{bootstrap}://{origin}") if source.is_remote else ("build", f"{bootstrap}:{origin}")
    added = indent(render_recipe(request.recipe), "    ")
    definition = _write_file('"$work/image.def"', f"Bootstrap: {bootstrap}\nFrom: {origin}\n\n%post\n{added}")
    root = () if ground.is_root else ("--fakeroot",)
    build = wrap_command((f"{command} build", *root, *arch, _PART, '"$work/image.def"'))
    fetch = wrap_command((f"{command} {verb}", *arch, _PART, quote(spec)))
    return script_lines(
        (f'export {prefix}_TMPDIR="$work/tmp"', "all that is unpacked is removed at the end"),
        (not ground.own_cache and f'export {prefix}_CACHEDIR="$work/cache"', ""),
        (request.adds and definition, "what is built"),
        (request.adds and build, "build it"),
        (not request.adds and fetch, "fetch the image and make one file of it"),
    )


def _list_enroot_steps(request: ImageRequest, ground: Ground) -> tuple[ScriptLine, ...]:
    command, adds = quote(request.command or "enroot"), request.adds
    base, fetch = quote(str(ground.base)), ""
    if isinstance(request.source, Reference):
        base = '"$work/base.sqsh"'
        output = f"--output {base if adds else _PART} --"
        image = quote(render_enroot(request.source))
        fetch = wrap_command((f"{command} import", *_arch_words(request, ground), output, image))
    recipe = _write_file('"$work/recipe/recipe.sh"', render_recipe(request.recipe))
    start = (
        f"{command} start --root --rw",
        # Images of NVIDIA ask for the driver, which a machine without GPUs does not have.
        *("--env NVIDIA_VISIBLE_DEVICES=void", "--env MELLANOX_VISIBLE_DEVICES=void"),
        *(f"--env {name}" for name in _list_proxy_variables(request)),
        '--mount "$work/recipe:/mnt:x-create=dir,rbind,ro"',
        "image sh /mnt/recipe.sh",
    )
    return script_lines(
        (
            'export ENROOT_DATA_PATH="$work/data" ENROOT_TEMP_PATH="$work/tmp" ENROOT_RUNTIME_PATH="$work/run"',
            "all that enroot writes is removed at the end",
        ),
        (not ground.own_cache and 'export ENROOT_CACHE_PATH="$work/cache"', ""),
        (fetch, "fetch the image and make one file of it"),
        (adds and f"{command} create --name image -- {base}", "unpack it as a container"),
        (adds and fetch and f"rm {base}", "the room is needed"),
        (adds and recipe, "what is added, run inside it"),
        (adds and wrap_command(start), ""),
        (adds and f"{command} export --output {_PART} -- image", "make one file of it"),
    )


_STEPS = {"enroot": _list_enroot_steps, "apptainer": _list_apptainer_steps}
_FOLDERS = {"enroot": ("cache", "data", "tmp", "run", "recipe"), "apptainer": ("cache", "tmp")}

_PART = '"$part"'
"""The image while it is made: another name in its folder."""


def _prefix(request: ImageRequest) -> str:
    """Apptainer and Singularity each read variables of their own name first."""
    return "SINGULARITY" if PurePosixPath(request.command).name.startswith("singularity") else "APPTAINER"


def _arch_words(request: ImageRequest, ground: Ground) -> tuple[str, ...]:
    """The option for an image of another architecture than this machine's; older runtimes do not have it."""
    wanted = request.architecture
    return () if wanted is None or wanted == ground.architecture else ("--arch", DEBIAN_NAMES[wanted])


def _write_file(path: str, text: str) -> str:
    """Shell that writes a text to a path, which is quoted already. No line of the text is the end mark."""
    return f"cat >{path} <<'END_OF_FILE'\n{text.rstrip()}\nEND_OF_FILE"


def _list_proxy_variables(request: ImageRequest) -> dict[str, str]:
    proxy, no_proxy = request.way.proxy, request.way.no_proxy
    if not proxy:
        return {}
    return {"http_proxy": proxy, "https_proxy": proxy, **({"no_proxy": no_proxy} if no_proxy else {})}


# --- the plan of an image

_ROOM = 40 * 10**9
"""Bytes that layers, unpacked files and the result of a large image of a framework take together."""
_TIMES_A_FILE = 6
_UNFIT = re.compile(r"[\x00-\x1f\x7f#]")
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class Making:
    """What will run. `hindrances`: why it cannot run on that machine now; `warnings`: what may go wrong."""

    script: str
    target: PurePosixPath
    part: PurePosixPath
    work: PurePosixPath
    token: str
    hindrances: tuple[Problem, ...]
    warnings: tuple[str, ...]


def default_name(request: ImageRequest) -> str:
    """A name for the image where the person gave none: "pytorch-25.04-py3.sqsh"; one with additions has them in its
    name."""
    more = "-more" if request.adds else ""
    return f"{request.source.stem}{more}{SUFFIXES[request.runtime][0]}"


def describe_source(source: Source) -> str:
    """A source as a person may write it again."""
    if isinstance(source, ImageFile):
        return source.path
    return render_enroot(source) if source.user else f"{source.transport}://{render_docker(source)}"


def check_request(request: ImageRequest) -> None:
    """Raise UserError with all that no machine could make."""
    source, shown, runtime = request.source, describe_source(request.source), request.runtime
    kind = source.kind if isinstance(source, ImageFile) else source.transport
    own = {"enroot": "squashfs", "apptainer": "sif"}[runtime]
    what = remedy = ""
    if (runtime, kind) == ("apptainer", "podman"):
        what = "Apptainer does not read podman's images"
        remedy = "push it to a registry, or build it from its base image with `shardway image build`"
    elif (runtime, kind) == ("enroot", "oras"):
        what = "enroot does not read oras://"
        remedy = "name an image with docker://, or use --runtime apptainer"
    elif runtime == "enroot" and kind in ("sif", "folder"):
        what = "enroot reads squashfs files only"
        remedy = (
            "name the image that it was made of, or make a .sqsh file of its folder with `mksquashfs FOLDER FILE.sqsh`"
        )
    problems = [Problem("the image", f"{shown}: {what}", remedy=remedy)] if what else []
    if kind == own and not request.adds:
        name = {"enroot": "enroot", "apptainer": "Apptainer"}[runtime]
        what = f"{shown} is an image for {name} already"
        problems.append(Problem("the image", what, remedy="set site.image to its path"))
    suffixes = SUFFIXES[runtime]
    if request.target and not request.target.endswith(suffixes):
        remedy = "give it such a name, or choose the other with --runtime"
        what = f'"{request.target}" is no name of an image of {runtime}'
        problems.append(Problem("--to", what, allowed=f"a file ending in {' or '.join(suffixes)}", remedy=remedy))
    path = source.path if isinstance(source, ImageFile) else ""
    for option, text in (("--to", request.target), ("--scratch", request.scratch), ("the image", path)):
        if _UNFIT.search(text) or (option == "--scratch" and ":" in text):
            what = f"{text!r} holds a character that the runtimes take for something else"
            problems.append(Problem(option, what, remedy="choose a path without control characters, # and :"))
    check_no_problems(f"the image {shown}", problems)


def plan_image(request: ImageRequest, ground: Ground) -> Making:
    """The script that makes the image on that machine. Raises UserError as `check_request` does."""
    check_request(request)
    # Layers and unpacked files: the first folder with room that is not in memory, else the roomiest.
    places = [place for place in ground.scratch_places if place.kind not in _MEMORY] or list(ground.scratch_places)
    need = _room_needed(request, ground)
    fit = [place for place in places if place.free_bytes is None or place.free_bytes >= need]
    target, scratch = ground.target, fit[0] if fit else max(places, key=lambda place: place.free_bytes or 0)
    work = scratch.path / f"shardway-image-{request.token}"
    part = target.with_name(f".{target.name}.{request.token}.tmp")
    titles = [re.sub(r"[\x00-\x1f\x7f]", "?", text) for text in (str(target), describe_source(request.source))]
    folders = " ".join(f'"$work/{name}"' for name in _FOLDERS[request.runtime])
    proxies = [f"{name}={value}" for name, value in _list_proxy_variables(request).items()]
    head = script_lines(
        ("#!/bin/bash", ""),
        ("set -euo pipefail", f"Makes {titles[0]} from {titles[1]}."),
        ("exec 2>&1", ""),
        (f"work={quote(str(work))}", "for everything but the image, and the image until it is whole"),
        (f"part={quote(str(part))}", ""),
        (_CLEAN.format(mark=_ended_mark(request.token)), "at the end both are removed, however it ends"),
        ("trap clean EXIT", ""),
        ("trap 'exit 143' HUP INT TERM", ""),
        (wrap_command(("mkdir -p --", quote(str(target.parent)), '"$work"')), "places"),
        ('chmod 700 -- "$work"', ""),
        (f"mkdir -p -- {folders}", ""),
        (proxies and f"export {quote_all(proxies)}", "the way out"),
    )
    whole = "the image gets its name when it is whole; a file of that name stays as it is"
    name = script_lines(
        (f'mv -n -- "$part" {quote(str(target))}', whole),
        (f'[ ! -e "$part" ] || {{ echo {quote(f"{target} exists")}; exit 17; }}', ""),
    )
    steps = _STEPS[request.runtime](request, ground)
    return Making(
        script=render_script([ScriptSection("", lines) for lines in (head, steps, name)]),
        target=target,
        part=part,
        work=work,
        token=request.token,
        hindrances=tuple(_list_hindrances(request, ground)),
        warnings=tuple(_list_warnings(request, ground, scratch)),
    )


_CLEAN = """\
clean() {{
  code=$?
  trap '' HUP INT TERM
  chmod -R u+rwX -- "$work" || true
  rm -rf -- "$work" "$part" || echo "cannot be removed: $work $part"
  echo "{mark}$code"
}}"""


def _ended_mark(token: str) -> str:
    """What the script prints at its end, before its exit code."""
    return f"shardway-image-{token} ended with "


def _room_needed(request: ImageRequest, ground: Ground) -> int:
    """Bytes: a multiple of a file's size, a fixed amount for a folder or a name."""
    is_file = isinstance(request.source, ImageFile) and request.source.kind != "folder"
    return _TIMES_A_FILE * ground.base_bytes if is_file and ground.base_bytes is not None else _ROOM


def _list_hindrances(request: ImageRequest, ground: Ground) -> Iterator[Problem]:
    where, wanted = ground.host or "this machine", request.architecture
    command = request.command or request.runtime
    if not ground.has_command:
        shells = ", ".join(f"`{each.interactive}`" for each in make_own("schedulers") if each.interactive)
        remedy = f"load its module or work where it is installed: often compute nodes alone have it ({shells})"
        yield Problem("the runtime", f"there is no {command} on {where}", remedy=remedy)
    if ground.target_exists:
        what = f"{ground.target} exists, and is left as it is"
        yield Problem("--to", what, remedy="choose another name, or move the file away")
    if ground.base is not None and ground.base_bytes is None:
        yield Problem("the image", f"there is no {ground.base} on {where}", remedy="correct the path")
    if request.adds and wanted and ground.architecture and wanted != ground.architecture:
        what = f"its programs are for {wanted}, and {where} is {ground.architecture}"
        yield Problem("the architecture", what, remedy=f"build on a machine with {wanted}: a node of the site")
    if request.way.login == "none" and (request.source.is_remote or request.adds):
        what = f"the login nodes of {request.site} reach nothing outside"
        words = ["shardway", "image", "build" if request.adds else "import", describe_source(request.source)]
        words += ["--runtime", request.runtime]
        words += ["--arch", wanted] if wanted else []
        words += [word for package in request.recipe.apt for word in ("--apt", package)]
        words += [word for line in request.recipe.pip for word in ("--pip", line)]
        words += ["--requirements", "FILE"] if request.recipe.requirements else []
        words += ["--to", ground.target.name]
        copy = ("rsync", "-P", ground.target.name, f"{request.door or 'USER@HOST'}:{ground.target.parent}/")
        remedy = (
            f"on a machine that has {request.runtime} and reaches the internet, run\n"
            f"          {quote_all(words)}\n        and copy what it made:\n          {quote_all(copy)}"
        )
        yield Problem("the internet", what, f"profile of {request.site}", remedy=remedy)


def _list_warnings(request: ImageRequest, ground: Ground, scratch: BuildFolder) -> Iterator[str]:
    need, where, place = _room_needed(request, ground), ground.host or "this machine", ground.target_place
    if scratch.free_bytes is not None and scratch.free_bytes < need:
        yield (
            f"space may be short: {scratch.path} on {where} has {_format_gb(scratch.free_bytes)}; a large image takes "
            f"{_format_gb(need)} while it is made.\n"
            "  To do: name a folder with more room by --scratch."
        )
    if place.free_bytes is not None and place.free_bytes < need // 3:
        yield (
            f"space may be short: {place.path} on {where} has {_format_gb(place.free_bytes)} for the image.\n"
            "  To do: name a file on a larger file system by --to; homes have small quotas."
        )
    if scratch.kind in _MEMORY:
        yield f"{scratch.path} on {where} lies in memory.\n  To do: name a folder on a disk by --scratch."
    if not isinstance(request.source, Reference):
        return
    if request.source.user and request.runtime == "apptainer":
        yield (
            f"Apptainer has no option for the user {request.source.user}; it takes the one that it knows.\n"
            f"  To do: {describe_credentials(request.source.registry, request.runtime)}"
        )
    if request.source.tag == "latest":
        yield "the tag latest means another image tomorrow.\n  To do: name the version that you want."


def _format_gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


# --- run the script

_GRACE_S = 60
_CLEAN_S = 600.0
_TIMED_OUT = 143
"""Exit code of the script after a signal, which also ends it at its time limit."""


def make_image(host: Host, request: ImageRequest, making: Making, limit_s: float, tell: Callable[[str], None]) -> int:
    """Make the image, and pass each line of output to `tell`. Returns its size in bytes (0: unknown).

    Raises UserError if it cannot be made there, SiteError if a command failed or the time limit (seconds) was reached,
    HostUnreachable.
    """
    check_no_problems(f"the image {making.target}", making.hindrances)
    script, lines, mark = making.work / "make.sh", deque[str](maxlen=400), _ended_mark(making.token)
    work, part = str(making.work), str(making.part)
    code = None
    try:
        host.write_files({script: making.script})
        output = host.follow(["timeout", "-k", str(_GRACE_S), str(math.ceil(limit_s)), "bash", str(script)])
        try:
            for line in output:
                if line.startswith(mark) and line.removeprefix(mark).strip().isdecimal():
                    code = int(line.removeprefix(mark))
                    break
                lines.append(line.rstrip("\r").rpartition("\r")[2])  # the last state of a line that was redrawn
                tell(lines[-1])
        finally:
            if isinstance(output, Generator):
                output.close()  # now: its commands must end before the cleanup
    finally:
        if code is None:  # what the script removes at its end
            try:
                remove = [["chmod", "-R", "u+rwX", "--", work], ["rm", "-rf", "--", work, part]]
                host.run_many(remove, timeout_s=_CLEAN_S)
            except HostUnreachable as error:
                raise HostUnreachable(f"{error}\n  Half-made files may be left there: {work} and {part}.") from None
    if code != 0:
        raise SiteError(_describe_failure(request, making, code, list(lines), limit_s))
    size = host.run(["stat", "-c", "%s", str(making.target)]).out.strip()
    return int(size) if size.isdecimal() else 0


def _describe_failure(request: ImageRequest, making: Making, code: int | None, lines: list[str], limit_s: float) -> str:
    printed = [line for line in lines if line.strip()][-15:]
    shown = "".join(f"\n    {line}" for line in printed) or "\n    It printed nothing."
    if code == _TIMED_OUT:
        what, remedy = f"it was ended after {limit_s:.0f} s", "allow more with --timeout, or run what --dry-run prints"
    elif code is None and not printed:
        what = "its script did not start"
        remedy = "check that bash and timeout are there, and run what --dry-run prints"
    else:
        what, remedy = parse_failure(lines, request)
    ended = f" (exit code {code})" if code not in (None, _TIMED_OUT) else ""
    return f"{making.target} was not made{ended}: {what}. Nothing half-made is left.{shown}\n  To do: {remedy}."


FAILURES = tomllib.loads((files(__package__) / "failures.toml").read_text(encoding="utf-8"))["failure"]


def parse_failure(lines: Sequence[str], request: ImageRequest) -> tuple[str, str]:
    """Why it failed and what to do: the first known reason, searched from the last line up."""
    for line in reversed(lines):
        for rule in FAILURES:
            if re.search(rule["when"], line):
                registry = request.source.registry if isinstance(request.source, Reference) else ""
                credentials = describe_credentials(registry, request.runtime).removesuffix(".")
                return rule["sentence"], rule.get("remedy", credentials)
    return "a command failed", "see its last lines above; --dry-run prints all that ran"
