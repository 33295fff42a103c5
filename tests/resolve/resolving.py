"""Short ways to resolve: overrides and circumstances in, the resolved run or its refusal out."""

from __future__ import annotations

from typing import Any

import pytest

from shardway.errors import UserError
from shardway.resolve import Circumstances, Resolved, resolve
from shardway.runfile.load import load_run


def resolve_words(*overrides: str, **circumstances: Any) -> Resolved:
    """The resolved run of a command line; `ranks` without `ranks_per_node` are all on one node."""
    circumstances.setdefault("ranks_per_node", circumstances.get("ranks", 1))
    return resolve(load_run(None, overrides), Circumstances(**circumstances))


def resolve_or_refuse(*overrides: str, **circumstances: Any) -> Resolved | str:
    """The resolved run, or the text of its refusal."""
    try:
        return resolve_words(*overrides, **circumstances)
    except UserError as error:
        return str(error)


def refusal_of(*overrides: str, **circumstances: Any) -> str:
    """The text of the UserError that refuses it."""
    with pytest.raises(UserError) as told:
        resolve_words(*overrides, **circumstances)
    return str(told.value)


def value_of(resolved: Resolved, dotted: str) -> Any:
    """The value of a key."""
    section, name = dotted.split(".")
    return getattr(getattr(resolved.values, section), name)
