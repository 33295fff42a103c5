"""What keys, values, events and states were called before, so that files of then are read.

Invariant: a table by its earlier names reads as the same table by those of today; a name of today stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EARLIER_KEYS: Mapping[str, str] = {
    "site.starter": "site.launcher",
    "run.restarts": "run.max_restarts",
    "model.balance_step": "model.bias_update_rate",
    "recompute.save": "recompute.save_ops",
}
"""Keys of run files until 2026-11 -> their names."""

_VALUES = {("guard.on_spike", "tell"): "warn"}

EARLIER_EVENTS: Mapping[str, str] = {
    "step_voided": "step_discarded",
    "set_aside": "checkpoint_quarantined",
    "tier_dropped": "local_checkpoints_ignored",
}
"""Events until 2026-11 -> their names."""

EARLIER_STATES: Mapping[str, str] = {"lost": "unknown"}
"""How attempts ended, in words until 2026-11 -> their names."""


def rename_entry(dotted: str, value: Any) -> tuple[str, Any]:
    """A key of a run file ("run.restarts") and its value, by their names of today."""
    dotted = EARLIER_KEYS.get(dotted, dotted)
    return dotted, _VALUES.get((dotted, value), value) if isinstance(value, str) else value


def rename_sections(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A run file's tables by the names of today; what is no table stays."""
    renamed = dict(tables)
    for section, table in tables.items():
        if isinstance(table, dict):
            entries = (rename_entry(f"{section}.{name}", value) for name, value in table.items())
            renamed[section] = {dotted.partition(".")[2]: value for dotted, value in entries}
    return renamed


def rename_profile(table: Mapping[str, Any]) -> dict[str, Any]:
    """A site profile, its sources included, by the names of today; of a key by both names the newer one holds."""
    renamed = {"launcher" if key == "starter" else key: value for key, value in table.items()}
    renamed |= {"launcher": table["launcher"]} if "launcher" in table else {}
    if isinstance(renamed.get("sources"), dict):
        renamed["sources"] = rename_profile(renamed["sources"])
    return renamed
