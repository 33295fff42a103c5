"""The shape of a Hugging Face model from its config.json, without torch and without the library.

Invariant: a family that is not known, or a key that is missing or cannot be, is told and never guessed. This module
must not read weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from shardway.errors import Problem, UserError, render_problems
from shardway.hfconfig import CONFIG, locate_model, read_config
from shardway.plan.shapes.hf_decoders import DECODERS
from shardway.plan.shapes.hf_keys import Keys
from shardway.plan.shapes.hf_others import OTHERS
from shardway.plan.shapes.measured import Shape

FAMILIES: Mapping[str, Callable[[Keys], Shape]] = MappingProxyType(dict(sorted({**DECODERS, **OTHERS}.items())))
"""`model_type` of a config -> what reads it."""


def read_shape(hf: str) -> Shape:
    """That of a folder or of a hub name, which is taken from the cache where it is there.

    Raises UserError where there is no config, the family is not known, or keys are missing or cannot be.
    """
    folder = locate_model(hf, weights=False)
    return shape_of_config(read_config(folder), hf, str(folder / CONFIG))


def shape_of_config(config: Mapping[str, Any], name: str, origin: str = CONFIG) -> Shape:
    """The shape of a model called `name`, whose config was read from `origin`. Raises UserError."""
    family = config.get("model_type")
    read = FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        raise _unknown(family, origin)
    return read(Keys(config, name, origin))


def _unknown(family: object, origin: str) -> UserError:
    problem = Problem(
        "model_type",
        "is missing" if family is None else f'"{family}" is a family whose layers are not known',
        allowed=", ".join(FAMILIES),
        remedy="let the model itself be counted: `shardway plan run.toml --trace`",
    )
    return UserError(render_problems(origin, [problem]))
