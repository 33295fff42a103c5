"""What the sections of a run file are made of: documented keys, bounds, strictness.

Invariant: a key without a sentence cannot be made. This module must not hold keys.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


def key(default: Any, doc: str, **bounds: Any) -> Any:
    """A documented key with its default."""
    return Field(default, description=doc, **bounds)


class Section(BaseModel):
    """Base of the sections: strict keys, strict types, frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
