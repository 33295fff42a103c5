"""What pydantic found wrong with a profile, as problems that a person can act on.

Invariant: one problem per finding, in the order of the findings; each says the value and what is allowed. This
module must not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardway.errors import Problem
from shardway.hardware.catalogue import load_accelerators, load_links
from shardway.sites.find import find_nearest
from shardway.sites.schema import CPU, SiteProfile


def _list_tables() -> dict[str, type[BaseModel]]:
    """Key of a profile -> the schema of the table, or of each table of the list, that stands there."""
    tables: dict[str, type[BaseModel]] = {"": SiteProfile}
    for key, field in SiteProfile.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                tables[key] = kind
    return tables


_TABLES = _list_tables()

_ALLOWED = {
    "literal_error": "{expected}",
    "string_type": "a text in quotes",
    "string_too_short": "a text that is not empty",
    "string_pattern_mismatch": "an absolute path, or one that starts with ~ or $",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "model_type": "a table",
    "mapping_type": "a table",
    "tuple_type": "a list of tables",
    "date_type": "a date such as 2026-11-01",
}
"""Type of a finding of pydantic -> what is allowed, with the finding's context filled in."""


def list_problems(error: ValidationError) -> list[Problem]:
    """Every finding of a failed validation of `SiteProfile`."""
    return [_describe(finding) for finding in error.errors(include_url=False)]


def _describe(finding: ErrorDetails) -> Problem:
    where = _render_path(finding["loc"])
    match finding["type"]:
        case "extra_forbidden":
            return _unknown_key(where, finding["loc"])
        case "missing":
            return Problem(where=where, what="is missing", remedy=_describe_missing(finding["loc"]))
        case "value_error":
            return _wrong_value(where, finding)
    value = _render_value(finding["input"])
    return Problem(where=where, what=f"{value} is not allowed", allowed=_describe_allowed(finding))


def _unknown_key(where: str, location: Sequence[int | str]) -> Problem:
    allowed = list(_table_of(location).model_fields)
    nearest = find_nearest(str(location[-1]), allowed)
    remedy = f'write "{nearest}"' if nearest else "remove it"
    return Problem(where=where, what="is not a key of a site profile", allowed=", ".join(allowed), remedy=remedy)


def _wrong_value(where: str, finding: ErrorDetails) -> Problem:
    """A finding of our own validators; those of catalogue keys offer the nearest one."""
    what = str(finding["ctx"]["error"])
    catalogue = {"accelerator": (CPU, *load_accelerators()), "link": tuple(load_links())}
    keys = catalogue.get(str(finding["loc"][-1])) if finding["loc"] else None
    if keys is None:
        text, _, allowed = what.partition("; allowed: ")
        return Problem(where=where or "profile", what=text, allowed=allowed)
    nearest = find_nearest(finding["input"], keys)
    return Problem(
        where=where,
        what=what,
        allowed=", ".join(keys),
        remedy=f'write "{nearest}"' if nearest else "choose one of these, or leave it out where yours is not there",
    )


def _describe_allowed(finding: ErrorDetails) -> str:
    """What may stand in the place of a wrong value; pydantic's own sentence for a finding we do not know."""
    known = _ALLOWED.get(finding["type"])
    return known.format(**_quoted(finding.get("ctx", {}))) if known else finding["msg"]


def _quoted(context: dict[str, Any]) -> dict[str, Any]:
    """pydantic's "'local', 'slurm' or 'pbs'" in our form; everything else as it is."""
    expected = str(context.get("expected", "")).replace(" or ", ", ").replace("'", '"')
    return {**context, "expected": expected}


def _render_value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _render_path(location: Sequence[int | str]) -> str:
    """A key path; the place in a list counts from 1: ("queues", 0, "name") -> "queues[1].name"."""
    path = ""
    for part in location:
        if part == "[key]":  # the finding is about the name of a key, which stands before it
            continue
        name = f'"{part}"' if "." in str(part) else str(part)
        path += f"[{part + 1}]" if isinstance(part, int) else f".{name}" if path else name
    return path


def _table_of(location: Sequence[int | str]) -> type[BaseModel]:
    return _TABLES.get(str(location[0]), SiteProfile) if len(location) > 1 else SiteProfile


def _describe_missing(location: Sequence[int | str]) -> str:
    key = str(location[-1])
    return f"add {key}: {_table_of(location).model_fields[key].description}"
