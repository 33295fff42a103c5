"""What all units of a counted model keep of one sample, as a sum that tests compare."""

from __future__ import annotations

from shardway.plan.shapes import Measured


def saved_bytes_per_sample(model: Measured, value_bytes: int | None = None) -> float:
    """Bytes kept for the backward pass, with activations of `value_bytes` bytes; None: as they were counted."""
    scale = (value_bytes or model.value_bytes) / model.value_bytes
    return sum(u.count * (u.fixed_bytes + (u.saved_bytes - u.fixed_bytes) * scale) for u in model.units)
