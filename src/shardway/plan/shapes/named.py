"""Models by name, read from the TOML file beside this module.

Invariant: every model has a source, and its shape follows from the keys of its config.json as that of any other. This
module must not hold a size.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from shardway.errors import Problem, UserError, list_some, render_problems
from shardway.plan.shapes.hf import shape_of_config
from shardway.plan.shapes.measured import Shape

_MOST = 12


@dataclass(frozen=True)
class NamedModel:
    """A model that can be asked for by name: where its sizes come from, and the keys of its config.json."""

    name: str
    source: str
    config: Mapping[str, Any]


@cache
def load_named() -> Mapping[str, NamedModel]:
    """Every model by its name, in the order of the file."""
    text = files(__package__).joinpath("named.toml").read_text(encoding="utf-8")
    tables = {name: table for name, table in tomllib.loads(text).items() if isinstance(table, dict)}
    return MappingProxyType({name: _named(name, tables) for name in tables})


@cache
def find_named(name: str) -> Shape:
    """The shape of a named model. Raises UserError that lists names like it."""
    model = load_named().get(name.lower())
    if model is None:
        raise _unknown(name)
    return shape_of_config(model.config, model.name, f"named.toml, {model.name}")


def _named(name: str, tables: Mapping[str, dict[str, Any]]) -> NamedModel:
    return NamedModel(name, tables[name]["source"], MappingProxyType(_config(name, tables)))


def _config(name: str, tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The keys of an entry, over those of the one that it is like."""
    own = {key: value for key, value in tables[name].items() if key not in ("source", "like")}
    return {**(_config(tables[name]["like"], tables) if "like" in tables[name] else {}), **own}


def _unknown(name: str) -> UserError:
    names = list(load_named())
    near = difflib.get_close_matches(name.lower(), names, n=_MOST, cutoff=0.5)
    known = f"names like it: {', '.join(near)}" if near else list_some(names, _MOST)
    problem = Problem(
        "model",
        f'"{name}" is no model that is known by name',
        allowed=f"one of {len(names)}; {known}",
        remedy="correct the name, or name a Hugging Face folder, a hub name (org/name), or a run file",
    )
    return UserError(render_problems("the model", [problem]), [problem])
