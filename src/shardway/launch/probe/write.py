"""Findings as the text of a site profile.

Invariant: what is written loads to exactly the findings, each with its command and date as the source; notes are
comments. This module must not choose what is stated.
"""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardway.launch.probe.findings import ProbedFact, ProbedFacts
from shardway.runfile.write import render_value
from shardway.sites.schema import FORMAT, SiteProfile
from shardway.units import render_bytes, render_seconds

_PARENTS = {"slurm": "generic-slurm", "pbs": "generic-pbs", "local": "laptop"}
_WIDTH = 118


def render_profile(name: str, title: str, found: ProbedFacts, where: str, day: datetime.date) -> str:
    """The text of a profile called `name`; `where` is the machine that was asked."""
    parent = _PARENTS[str(found.get("scheduler"))]
    head = [
        *_comment(
            f"Written by `shardway sites probe` on {where}, {day.isoformat()}. What no command says is left out: add "
            "what you know, each fact with its source. `shardway sites show` prints facts with their sources.",
            "# ",
        ),
        *(line for note in found.notes for line in _comment(note, "# - ")),
        "",
        f"format = {FORMAT}",
        f"name = {render_value(name)}",
        f"title = {render_value(title)}",
        f"extends = {render_value(parent)}",
    ]
    plain = [fact for fact in found.facts if len(fact.path) == 1]
    lines = [*head, "", *(_line(fact) for fact in plain)]
    for table in _tables(found):
        lines += _queues(found) if table == "queues" else _table(table, found)
    return "\n".join([*lines, "", "[sources]", *_sources(found, where, day)]) + "\n"


def _tables(found: ProbedFacts) -> list[str]:
    """Tables that have something in them, in the order of the schema."""
    used = {fact.path[0] for fact in found.facts if len(fact.path) > 1}
    return [key for key in SiteProfile.model_fields if key in used]


def _table(name: str, found: ProbedFacts) -> list[str]:
    return ["", f"[{name}]", *(_line(fact) for fact in found.facts if fact.path[0] == name)]


def _queues(found: ProbedFacts) -> list[str]:
    lines = []
    for facts in _by_queue(found).values():
        lines += ["", "[[queues]]", *(_line(fact) for fact in facts)]
    return lines


def _by_queue(found: ProbedFacts) -> Mapping[str, list[ProbedFact]]:
    queues: dict[str, list[ProbedFact]] = {}
    for fact in found.facts:
        if fact.path[0] == "queues":
            queues.setdefault(fact.path[1], []).append(fact)
    return queues


def _line(fact: ProbedFact) -> str:
    return f"{fact.path[-1]} = {render_value(_with_unit(fact.path, fact.value))}"


def _with_unit(path: Sequence[str], value: Any) -> Any:
    if tuple(path) == ("node", "memory"):
        return render_bytes(value)
    return render_seconds(value) if path[-1].endswith("_walltime") else value


def _sources(found: ProbedFacts, where: str, day: datetime.date) -> Iterator[str]:
    """One source for a table that one command told all of, else one a fact."""
    groups: dict[str, list[ProbedFact]] = {}
    for fact in found.facts:
        groups.setdefault(fact.path[0], []).append(fact)
    for key, facts in groups.items():
        commands = {fact.command for fact in facts}
        entries = {key: facts[0]} if len(commands) == 1 else {".".join(fact.path): fact for fact in facts}
        for path, fact in entries.items():
            source = render_value(f"`{fact.command}` on {where}")
            yield f"{render_value(path)} = {{ source = {source}, date = {day.isoformat()} }}"


def _comment(text: str, indent: str) -> list[str]:
    """A text as comment lines; a control character in it would end the comment."""
    clean = "".join(character if character.isprintable() else " " for character in text)
    rest = f"#{' ' * (len(indent) - 1)}"
    return textwrap.wrap(clean, _WIDTH, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False)
