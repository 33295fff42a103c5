"""Where a machine stands among those of a run that has an agent on each.

Invariant: a value. This module must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeSpec:
    """Addresses of the nodes, which of them this is, by which port they meet, and ranks on each."""

    addresses: tuple[str, ...]
    node: int
    port: int
    ranks: int

    def name(self, node: int) -> str:
        """A node as people call it: "node 1 (10.0.0.2)"."""
        return f"node {node} ({self.addresses[node]})"
