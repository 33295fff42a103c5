"""The parts of a blend as a run file names them: `[[data.blend]]`.

Invariants:
- All problems of a list are reported at once.
- An entry keeps its weight as it was written, so that what is written is read as the same.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass
from typing import Any

from shardway.plugins import is_registered, list_names
from shardway.runfile.pairs import list_wrong_pairs

ALLOWED = (
    'tables such as {path = "web", weight = 0.7}, also with kind and name; a weight is a number above 0, or '
    "pairs [position, weight] such as [[0, 0.7], [100000, 0.2]], from position 0 on"
)


@dataclass(frozen=True)
class BlendEntry:
    """One part of the data: where it is, of which kind ("" = data.kind), its share, and what messages call it ("" = its
    path). `weight` is a number, or a list of pairs [position, weight] from which on it has that weight."""

    path: str
    weight: float | list[list[float]]
    kind: str = ""
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or self.path

    @property
    def steps(self) -> tuple[tuple[int, float], ...]:
        """Pairs (position, weight), the first from position 0 on."""
        if isinstance(self.weight, list):
            return tuple((int(start), weight) for start, weight in self.weight)
        return ((0, self.weight),)

    def as_table(self) -> dict[str, Any]:
        """As a run file has it."""
        return {name: value for name, value in asdict(self).items() if value != ""}


def read_blend(value: Any) -> list[BlendEntry]:
    """The parts of a blend; none for an empty list. Raises ValueError with all that is wrong."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list of tables; allowed: {ALLOWED}")
    tables = [each.as_table() if isinstance(each, BlendEntry) else each for each in value]
    wrong = [f"[{number}] {what}" for number, table in enumerate(tables) for what in _list_wrong(table)]
    if not wrong:
        wrong = _list_wrong_together([BlendEntry(**table) for table in tables])
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}; allowed: {ALLOWED}")
    return [BlendEntry(**table) for table in tables]


def _list_wrong(table: Any) -> list[str]:
    if not isinstance(table, dict):
        return [f"{table!r} is no table"]
    wrong, known = [], list(BlendEntry.__dataclass_fields__)
    for name in sorted(table.keys() - set(known)):
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
        wrong.append(f'has a key "{name}"{f" (did you mean {near[0]}?)" if near else ""}')
    for name in ("path", "kind", "name"):
        if name in table and not isinstance(table[name], str):
            wrong.append(f"{name} = {table[name]!r} is no string")
    if table.get("path", "") == "":
        wrong.append("names no path")
    kind = table.get("kind", "")
    if isinstance(kind, str) and kind and not is_registered("data_sources", kind):
        wrong.append(f'kind "{kind}" is none of {", ".join(list_names("data_sources"))}')
    return [*wrong, *(_list_wrong_weights(table["weight"]) if "weight" in table else ["has no weight"])]


def _list_wrong_weights(weight: Any) -> list[str]:
    if not isinstance(weight, list):
        if not _is_number(weight):
            return [f"weight {weight!r} is no number"]
        return [] if weight > 0 else [f"weight {weight!r} is not above 0"]
    wrong = list_wrong_pairs(weight, "weight", "weight (0 and above)", lambda share: _is_number(share) and share >= 0)
    if not wrong and not any(share for _, share in weight):
        return ["weight is 0 everywhere"]
    return wrong


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _list_wrong_together(parts: list[BlendEntry]) -> list[str]:
    """Problems of all parts together: names that two have, positions at which none has a weight."""
    names = [part.name for part in parts if part.name]
    wrong = [f'[{i}] name "{part.name}" is used twice' for i, part in enumerate(parts) if names.count(part.name) > 1]
    for start in sorted({start for part in parts for start, _ in part.steps}):
        if not any([weight for begin, weight in part.steps if begin <= start][-1] for part in parts):
            wrong.append(f"no part has a weight above 0 from position {start} on")
    return wrong


# --- for editors

_TEXT = {"type": "string", "minLength": 1}
_STEP = {
    "type": "array",
    "items": {"type": "number", "minimum": 0},
    "minItems": 2,
    "maxItems": 2,
}
_ENTRY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": _TEXT | {"description": "File or folder."},
        "kind": _TEXT | {"description": "Format of this part, if it is not data.kind."},
        "weight": {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "array", "items": _STEP, "minItems": 1},
            ],
            "description": "Share of the samples, or pairs [position, weight] from which on it has that weight.",
        },
        "name": _TEXT | {"description": "What messages call this part, if it is not its path."},
    },
    "required": ["path", "weight"],
    "additionalProperties": False,
}
BLEND_SCHEMA: dict[str, Any] = {"type": "array", "items": _ENTRY, "description": "the parts of a blend"}
"""The JSON Schema of a list of parts."""
