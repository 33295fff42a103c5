"""`shardway sites list | show | probe`: which machines are known, what of one and from where, and what this one is.

Invariant: only `probe --write` writes, and never over a file. This module must not know how a machine is asked.
"""

from __future__ import annotations

import datetime
import json
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.options import JsonOption
from shardway.errors import UserError, legible

if TYPE_CHECKING:
    from shardway.launch.site_survey import ProbedFacts
    from shardway.sites.load import ProfileFile
    from shardway.sites.problems import SiteFact
    from shardway.sites.schema import SiteProfile

app = typer.Typer(help="List machines, show what is known of one, find out what this one is.", no_args_is_help=True)

_VALUE_WIDTH = 56
_SOURCE_WIDTH = 110

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A site, or the path of a profile.")]
WriteOption = Annotated[
    str | None, typer.Option("--write", metavar="NAME", help="Keep the profile as a site of your own with this name.")
]


@app.command("list")
def list_known(as_json: JsonOption = False) -> None:
    """List the sites that a run can name: those shipped with Shardway and your own."""
    from shardway.sites.load import describe_own_folder, list_profiles

    rows = [_describe(file) for file in list_profiles()]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    columns = ("name", "scheduler", "node", "origin", "title")
    head = {column: column.upper() for column in columns}
    widths = {column: max(len(row[column]) for row in [head, *rows]) for column in columns}
    for row in [head, *rows]:
        typer.echo(legible("  ".join(row[column].ljust(widths[column]) for column in columns).rstrip()))
    typer.echo(legible(f"\nYour own profiles: {describe_own_folder()}"))


@app.command("show")
def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show every fact of a site with its source and date; a ? marks unverified ones."""
    from shardway.sites.load import find_profile, load_profile
    from shardway.sites.problems import describe_facts

    file = find_profile(name)
    profile = load_profile(file)
    facts = describe_facts(profile)
    if as_json:
        typer.echo(json.dumps({**_head(file, profile), "facts": [_fact_json(fact) for fact in facts]}, indent=1))
        return
    typer.echo(legible(f"{profile.title}\n{_describe_origin(file, profile)}"))
    typer.echo(legible("\n".join(["", *_render_facts(facts)])))
    unsure = sum(fact.is_unsure for fact in facts)
    typer.echo(f"\n{len(facts)} facts, {unsure} of them not verified (?). What is not listed is not known.")


@app.command("probe")
def probe(write: WriteOption = None, as_json: JsonOption = False) -> None:
    """Ask this machine (scheduler, containers, GPUs, network) what it is, and print a profile of it, or keep one."""
    from shardway.hardware.probe import probe_machine
    from shardway.launch.hosts.local import LocalHost
    from shardway.launch.site_survey import name_site, render_profile, survey
    from shardway.sites.load import find_place, keep_profile, parse_profile

    if write is not None:
        find_place(write)
    host, machine, today = LocalHost(), probe_machine(), datetime.date.today()
    found = survey(host, machine)
    site = name_site(host)
    name = write or _free_name(site)
    text = render_profile(name, f"{site or name} (as probed)", found, machine.hostname, today)
    parse_profile("that was probed", text)
    if write is not None:
        typer.echo(f"wrote {keep_profile(write, text)}: `shardway sites show {write}`", err=as_json)
    if as_json:
        typer.echo(json.dumps(_findings_json(found, machine.hostname, today), indent=1))
    elif write is None:
        typer.echo(text, nl=False)


# --- list


def _describe(file: ProfileFile) -> dict[str, str]:
    """A profile as a row; if it cannot be used, the reason."""
    from shardway.sites.load import load_profile

    origin = f"{file.origin}, in place of the shipped one" if file.shadows else file.origin
    try:
        profile = load_profile(file)
    except UserError as error:
        reason = f"cannot be used: {_first_line(error)}; `shardway sites show {file.name}` shows why"
        return {"name": file.name, "scheduler": "-", "node": "-", "origin": origin, "title": reason}
    return {
        "name": file.name,
        "scheduler": profile.scheduler,
        "node": _describe_node(profile),
        "origin": origin,
        "title": profile.title,
    }


def _first_line(error: UserError) -> str:
    """The number of problems and the file, or the only problem."""
    return str(error).splitlines()[0].rstrip(".:")


def _describe_node(profile: SiteProfile) -> str:
    count, part = profile.node.accelerators_per_node, profile.node.accelerator
    if count == 0:
        return "no accelerators"
    return f"{count or '?'} x {part or '?'}" if count or part else "not said"


# --- show


def _head(file: ProfileFile, profile: SiteProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "title": profile.title,
        "origin": file.origin,
        "path": str(file.path) if file.path else None,
        "shadows": file.shadows,
        "extends": profile.extends,
    }


def _describe_origin(file: ProfileFile, profile: SiteProfile) -> str:
    origin = "shipped with Shardway" if file.path is None else f"your profile {file.path}"
    place = ", in place of the shipped one of this name" if file.shadows else ""
    return f"{origin}{place}" + (f", which extends {profile.extends}" if profile.extends else "")


def _fact_json(fact: SiteFact) -> dict[str, Any]:
    return {
        "path": fact.path,
        "value": fact.value,
        "source": fact.source.source if fact.source else None,
        "date": fact.source.date.isoformat() if fact.source else None,
        "unsure": fact.is_unsure,
    }


def _render_facts(facts: tuple[SiteFact, ...]) -> list[str]:
    """One block per source, so that no source is repeated; facts in the profile's order."""
    width = max((len(fact.path) for fact in facts), default=0)
    lines: list[str] = []
    before: object = ()
    for fact in facts:
        if fact.source != before and lines:
            lines += [*_render_source(before), ""]
        before = fact.source
        lines += _render_fact(fact, width)
    return [*lines, *_render_source(before)] if facts else ["no facts"]


def _render_fact(fact: SiteFact, width: int) -> list[str]:
    words = textwrap.wrap(fact.text, _VALUE_WIDTH, break_on_hyphens=False) or ['""']
    first = f"{'?' if fact.is_unsure else ' '} {fact.path:<{width}}  {words[0]}"
    return [first, *(f"{'':<{width + 4}}{word}" for word in words[1:])]


def _render_source(source: Any) -> list[str]:
    text = f"{source.date.isoformat()}, {source.source}" if source else "no source"
    return textwrap.wrap(
        text,
        _SOURCE_WIDTH,
        initial_indent="    <- ",
        subsequent_indent="       ",
        break_long_words=False,
        break_on_hyphens=False,
    )


# --- probe


def _free_name(site: str) -> str:
    """A name for a printed profile: the site's own, unless a profile has it."""
    from shardway.sites.load import list_sites

    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in site).strip("-.") or "my-site"
    return f"my-{name}" if name in list_sites() else name


def _findings_json(found: ProbedFacts, where: str, day: datetime.date) -> dict[str, Any]:
    facts = [
        {"path": ".".join(fact.path), "value": fact.value, "source": f"`{fact.command}` on {where}", "date": str(day)}
        for fact in found.facts
    ]
    return {"facts": facts, "notes": list(found.notes)}
