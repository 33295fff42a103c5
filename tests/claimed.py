"""A run directory whose holder is made to be on another host.

Invariant: only the words of the claim change; whoever holds it goes on as it was.
"""

from __future__ import annotations

import json

from shardway.rundir.directory import RunDir


def claim_from(run: RunDir, host: str) -> None:
    """Say in the newest claim that this host holds the run."""
    newest = sorted((run.path / "lease").glob("epoch-*.json"))[-1]
    claim = json.loads(newest.read_text(encoding="utf-8"))
    claim["who"] = {**claim["who"], "host": host}
    newest.write_text(json.dumps(claim), encoding="utf-8")
