"""`shardway sites list | show | probe`: which machines are known, what of one and from where, and what this one is.

Invariant: only `probe --write` writes, and never over a file. This module must not know how a machine is asked.
"""

from __future__ import annotations

import datetime
import textwrap
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardway.cli.options import JsonOption, complete_site, print_json, print_table
from shardway.errors import UserError, legible

if TYPE_CHECKING:
    from shardway.sites.problems import SiteFact

app = typer.Typer(help="List machines, show what is known of one, find out what this one is.", no_args_is_help=True)


@app.command("list")
def list_known(as_json: JsonOption = False) -> None:
    """List the sites that a run can name: those shipped with Shardway and your own."""
    from shardway.sites.load import describe_own_folder, list_profiles, load_profile

    rows = []
    for file in list_profiles():
        row = {"name": file.name, "scheduler": "-", "node": "-"}
        row["origin"] = f"{file.origin}, in place of the shipped one" if file.shadows else file.origin
        try:
            profile = load_profile(file)
        except UserError as error:
            first = str(error).splitlines()[0].rstrip(".:")  # the number of problems and the file, or the only problem
            row["title"] = f"cannot be used: {first}; `shardway sites show {file.name}` shows why"
        else:
            count, part = profile.node.accelerators_per_node, profile.node.accelerator
            known = f"{count or '?'} x {part or '?'}" if count or part else "not said"
            node = "no accelerators" if count == 0 else known
            row |= {"scheduler": profile.scheduler, "node": node, "title": profile.title}
        rows.append(row)
    if as_json:
        print_json(rows)
        return
    print_table(("name", "scheduler", "node", "origin", "title"), rows)
    typer.echo(legible(f"\nYour own profiles: {describe_own_folder()}"))


@app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A site, or the path of a profile.", autocompletion=complete_site)
    ],
    as_json: JsonOption = False,
) -> None:
    """Show every fact of a site with its source and date; a ? marks unverified ones."""
    from shardway.sites.load import find_profile, load_profile
    from shardway.sites.problems import describe_facts

    file = find_profile(name)
    profile = load_profile(file)
    facts = describe_facts(profile)
    if as_json:
        head: dict[str, Any] = {"name": profile.name, "title": profile.title, "origin": file.origin}
        head |= {"path": str(file.path) if file.path else None, "shadows": file.shadows, "extends": profile.extends}
        print_json({**head, "facts": [fact.as_json() for fact in facts]})
        return
    origin = "shipped with Shardway" if file.path is None else f"your profile {file.path}"
    place = ", in place of the shipped one of this name" if file.shadows else ""
    parent = f", which extends {profile.extends}" if profile.extends else ""
    typer.echo(legible(f"{profile.title}\n{origin}{place}{parent}"))
    typer.echo(legible("\n".join(["", *_render_facts(facts)])))
    unsure = sum(fact.is_unsure for fact in facts)
    typer.echo(f"\n{len(facts)} facts, {unsure} of them not verified (?). What is not listed is not known.")


def _render_facts(facts: tuple[SiteFact, ...]) -> list[str]:
    """One block per source, so that no source is repeated; facts in the profile's order."""
    width, lines = max((len(fact.path) for fact in facts), default=0), []
    for source, block in groupby(facts, key=lambda fact: fact.source):
        for fact in block:
            words = textwrap.wrap(fact.text, 56, break_on_hyphens=False) or ['""']
            lines.append(f"{'?' if fact.is_unsure else ' '} {fact.path:<{width}}  {words[0]}")
            lines += [f"{'':<{width + 4}}{word}" for word in words[1:]]
        text = f"{source.date.isoformat()}, {source.source}" if source else "no source"
        whole: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(text, 110, initial_indent="    <- ", subsequent_indent="       ", **whole)
        lines.append("")
    return lines[:-1] or ["no facts"]


@app.command("probe")
def probe(
    write: Annotated[
        str | None,
        typer.Option("--write", metavar="NAME", help="Keep the profile as a site of your own with this name."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
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
        source = {"date": str(today)}
        facts = [
            {"path": ".".join(fact.path), "value": fact.value, "source": f"`{fact.command}` on {machine.hostname}"}
            for fact in found.facts
        ]
        print_json({"facts": [fact | source for fact in facts], "notes": list(found.notes)})
    elif write is None:
        typer.echo(text, nl=False)


def _free_name(site: str) -> str:
    """A name for a printed profile: the site's own, unless a profile has it."""
    from shardway.sites.load import list_sites

    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in site).strip("-.") or "my-site"
    return f"my-{name}" if name in list_sites() else name
