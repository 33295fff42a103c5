"""What a checkpoint holds of a script's own objects: each state dict as one structure and its tensors.

Invariant: what was saved can be read whatever the object of today looks like; what ranks hold alike is rank 0's, and
what they hold as shards is saved and read as shards. This module must not touch the disk.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardway.checkpoint.shards.table import TensorTable
from shardway.checkpoint.state import Tensors, WithoutFiles, make_room, structure_name
from shardway.checkpoint.structure import Unstorable, put_state_together, take_state_apart
from shardway.errors import UserError

KEPT = "kept"
"""What the names of tensors of kept objects begin with."""


class KeptObjects(WithoutFiles):
    """The objects that a script keeps, by name; `leads`: whether this is the rank whose copies count.

    What a checkpoint holds of an object that is not here (yet) waits in `waiting`.
    """

    def __init__(self, device: torch.device, *, leads: bool) -> None:
        self.objects: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}
        self.missing: list[str] = []
        """Objects that the checkpoint that was loaded last holds nothing of."""
        self._device, self._leads = device, leads
        self._saved: dict[str, str] = {}

    def add(self, name: str, thing: Any) -> None:
        """Keep an object from now on; it takes what waits for it. Raises UserError where its state cannot be stored."""
        check_storable(name, thing)
        self.objects[name] = thing
        if name in self.waiting:
            _load(name, thing, self.waiting.pop(name))

    def collect(self) -> Tensors:
        """The states as they are now; of ranks that do not lead, their shards alone."""
        kept: Tensors = {}
        texts: dict[str, str] = {}
        # What was not taken yet (the script makes it later in the run) is saved as it was.
        for name, state in [*((name, each.state_dict()) for name, each in self.objects.items()), *self.waiting.items()]:
            try:
                parts = _take_apart(name, state)
            except UserError as error:  # it could be stored when it was given: a save must not fail for it
                if self._leads:
                    logging.getLogger("shardway").warning(f"{name} is not in this checkpoint: {error}")
                continue
            own = {key: tensor for key, tensor in parts.tensors.items() if self._leads or isinstance(tensor, DTensor)}
            kept |= {name: own} if own else {}
            texts[structure_name(f"{KEPT}.{name}")] = parts.text
        return {**({KEPT: kept} if kept else {}), **(texts if self._leads else {})}

    def template(self, table: TensorTable) -> Tensors:
        """Room for all that was saved: shards where today's object has shards of that shape, else whole tensors."""
        begin = structure_name(f"{KEPT}.")
        texts = {name: json.loads(text) for name, text in table.values.items() if name.startswith(begin)}
        self._saved = {name.removeprefix(begin): text for name, text in texts.items()}
        template = {name: found for name in self._saved if (found := self._find_room(name, table))}
        return {KEPT: template} if template else {}

    def install(self, tensors: Tensors) -> None:
        """Let each object load its state. Raises UserError where one does not take it."""
        kept = tensors.get(KEPT, {})
        self.missing = [name for name in self.objects if name not in self._saved]
        for name, text in self._saved.items():
            state = put_state_together(text, partial(self._find, kept.get(name, {})))
            if name in self.objects:
                _load(name, self.objects[name], state)
            else:
                self.waiting[name] = state
        self._saved = {}

    def _find_room(self, name: str, table: TensorTable) -> dict[str, torch.Tensor]:
        today = _take_apart(name, self.objects[name].state_dict()).tensors if name in self.objects else {}
        return make_room(table, f"{KEPT}.{name}.", today)

    def _find(self, loaded: Mapping[str, torch.Tensor], key: str, device: str) -> torch.Tensor:
        """A tensor that was read; a whole one on a device of the kind that it was on, where this rank has one."""
        tensor = loaded[key]
        if isinstance(tensor, DTensor) or device == "cpu" or self._device.type != device:
            return tensor
        return tensor.to(self._device)


def check_storable(name: str, thing: Any) -> None:
    """Raise UserError where a checkpoint cannot hold the state of an object."""
    if isinstance(thing, type):
        raise UserError(
            f"run.keep({name!r}, ...) was given the class {thing.__name__}.\n  To do: give it an object of it."
        )
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(thing, method, None)):
            raise UserError(
                f"run.keep({name!r}, ...) was given a {type(thing).__name__}, which has no {method}(), so it cannot be "
                "saved and resumed.\n"
                "  To do: give it state_dict() and load_state_dict(state), or keep what inside it has both."
            )
    _take_apart(name, thing.state_dict())


def _take_apart(name: str, state: Any) -> Any:
    try:
        return take_state_apart(state)
    except Unstorable as error:
        where = f"{name}.state_dict()" + (f" at {error.path}" if error.path else "")
        raise UserError(
            f"{where} is a {error.kind}, which a checkpoint cannot hold.\n"
            "  It may consist of dicts, lists and tuples of tensors, numbers, strings and None. To do: let "
            "state_dict() return these, and load_state_dict() make the rest of them."
        ) from None


def _load(name: str, thing: Any, state: Any) -> None:
    try:
        thing.load_state_dict(state)
    except Exception as error:
        raise UserError(
            f"{name} ({type(thing).__name__}) does not take the state that the checkpoint holds of it: "
            f"{type(error).__name__}: {error}\n"
            "  Nothing was changed in the run directory. To do: make it as it was when the run was saved, or keep it "
            "under another name, where it begins anew."
        ) from error
