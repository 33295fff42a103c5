"""Plans of torch.distributed.checkpoint for states whose values that are no tensors are JSON.

Invariant: torch plans who writes and who reads what; no pickle is made nor read. This module must not touch the disk.
"""

from __future__ import annotations

import io
import json
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from shardway.errors import Bug


class SavePlanner(DefaultSavePlanner):
    """torch's, with JSON in place of pickles."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """A tensor as it is, anything else as JSON."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        if not survives_json(object):
            raise Bug(f"{write_item.index.fqn} of the state is a {type(object).__name__}, which JSON does not keep")
        return io.BytesIO(json.dumps(object).encode())


class LoadPlanner(DefaultLoadPlanner):
    """torch's, with JSON in place of pickles; always for nested states."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value where it belongs in the state."""
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], json.loads(value.getvalue()))


def survives_json(value: Any) -> bool:
    """Whether a value comes back from JSON as it was; a tuple would be a list."""
    if isinstance(value, list):
        return all(map(survives_json, value))
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(survives_json, value.values()))
    return type(value) in (type(None), bool, int, float, str)
