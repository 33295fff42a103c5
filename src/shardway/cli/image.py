"""`shardway image import | build`: a container image for a site, as one file.

Invariant: what --dry-run prints on stdout is the script that would run, byte for byte except for the token in its
names.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardway.cli.options import JsonOption, print_json, print_line, read_time, report
from shardway.errors import UserError

if TYPE_CHECKING:
    from shardway.launch.image.make import ImageOptions
    from shardway.launch.image.request import Recipe

app = typer.Typer(help="Fetch a container image for a site, or build one, as one file.", no_args_is_help=True)

_FORMS = "docker://nvcr.io#nvidia/pytorch:25.04-py3, nvcr.io/nvidia/pytorch:25.04-py3 or a file."

OnOption = Annotated[
    str, typer.Option("--on", metavar="[USER@HOST:]SITE", help="The site it is for, and the login node that makes it.")
]
ToOption = Annotated[str, typer.Option("--to", metavar="FILE", help="The image (default: its name, in this folder).")]
RuntimeOption = Annotated[str, typer.Option("--runtime", help="enroot or apptainer (default: the site's).")]
ArchOption = Annotated[str, typer.Option("--arch", help="x86_64 or aarch64 (default: the site's, or this machine's).")]
ProxyOption = Annotated[str, typer.Option("--proxy", metavar="URL", help="The way out: http://HOST:PORT.")]
ScratchOption = Annotated[
    str,
    typer.Option("--scratch", metavar="FOLDER", help="For layers and unpacked files (default: where there is room)."),
]
TimeoutOption = Annotated[str, typer.Option("--timeout", help="The longest that it may take.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the script that would run, and do nothing.")]


@app.command("import")
def import_image(
    uri: Annotated[str, typer.Argument(metavar="URI", help=_FORMS)],
    on: OnOption = "",
    to: ToOption = "",
    runtime: RuntimeOption = "",
    arch: ArchOption = "",
    proxy: ProxyOption = "",
    scratch: ScratchOption = "",
    timeout: TimeoutOption = "4h",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch an image from a registry, as the file that a run names by site.image."""
    from shardway.launch.image.make import ImageOptions
    from shardway.launch.image.request import Recipe

    options = ImageOptions(runtime, arch, proxy, to, scratch)
    _make(uri, Recipe(), options, on, timeout, dry_run=dry_run, as_json=as_json)


@app.command("build")
def build_image(
    base: Annotated[str, typer.Argument(metavar="BASE", help=f"The image to add to: {_FORMS}")],
    apt: Annotated[list[str] | None, typer.Option("--apt", metavar="PKG", help="A package of the system.")] = None,
    pip: Annotated[list[str] | None, typer.Option("--pip", metavar="LINE", help="What follows `pip install`.")] = None,
    requirements: Annotated[
        Path | None, typer.Option("--requirements", metavar="FILE", help="Packages of Python, a line each.")
    ] = None,
    on: OnOption = "",
    to: ToOption = "",
    runtime: RuntimeOption = "",
    arch: ArchOption = "",
    proxy: ProxyOption = "",
    scratch: ScratchOption = "",
    timeout: TimeoutOption = "4h",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Add packages to an image: of its system by apt-get, of Python by pip."""
    from shardway.launch.image.make import ImageOptions
    from shardway.launch.image.request import parse_recipe

    try:
        lines = requirements.read_text(encoding="utf-8") if requirements else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"--requirements {requirements}: {reason}.\n  To do: name a file as pip writes it (pip freeze)."
        ) from None
    recipe = parse_recipe(apt or [], pip or [], lines)
    if recipe.is_empty:
        raise UserError(
            "nothing is added to the image.\n"
            "  To do: name packages by --apt, --pip or --requirements, or fetch it as it is: `shardway image import`."
        )
    options = ImageOptions(runtime, arch, proxy, to, scratch)
    _make(base, recipe, options, on, timeout, dry_run=dry_run, as_json=as_json)


def _make(
    uri: str, recipe: Recipe, options: ImageOptions, on: str, timeout: str, *, dry_run: bool, as_json: bool
) -> None:
    from shardway.launch.hosts import find_host, parse_target
    from shardway.launch.image.make import (
        check_request,
        find_runtime,
        make_image,
        make_request,
        plan_image,
        survey_host,
    )
    from shardway.launch.image.request import parse_uri
    from shardway.sites.load import load_site

    limit_s = read_time("--timeout", timeout)
    source, target = parse_uri(uri), parse_target(on) if on else None
    profile = load_site(target.site) if target and target.site else None
    host = find_host(target.host if target else "")
    request = replace(make_request(source, recipe, options, target, profile), token=os.urandom(4).hex())
    request = request if request.runtime else find_runtime(request, host)
    check_request(request)
    making = plan_image(request, survey_host(request, host))
    hindrances = making.hindrances if dry_run else ()
    if dry_run:
        typer.echo(making.script, nl=False)
    for warning in (*making.warnings, *(hindrance.render().strip() for hindrance in hindrances)):
        report(warning)
    if dry_run:
        return
    try:
        size = make_image(host, request, making, limit_s, print_line)
    except KeyboardInterrupt:
        report("nothing half-made is left")
        raise
    if as_json:
        facts = {"image": str(making.target), "bytes": size, "runtime": request.runtime}
        print_json({**facts, "host": host.name})
        return
    typer.echo(f"image      {making.target} ({size / 1e9:.2f} GB){f' on {host.name}' if host.name else ''}")
    typer.echo(f"for a run  site.image = {json.dumps(str(making.target), ensure_ascii=False)}")
