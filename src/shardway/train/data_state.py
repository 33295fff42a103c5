"""What a checkpoint holds of a script's data beside the position: states of iterable datasets, and of samplers with
generators or a state.

Each rank saves the state that belongs to the last batch that counts, however far ahead was read. Ranks that read the
same data (of one pipeline, or of one tensor group) save one. With the same number of ranks the dataset resumes from its
state. Otherwise, or if none was saved, the dataset is run through from its beginning, which is reported once.

Invariant: a state that cannot be saved or restored exactly is not used. This module must not read data.
"""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardway.checkpoint.file_format import TensorTable
from shardway.checkpoint.state import CheckpointState, Tensors, make_room, structure_name
from shardway.checkpoint.structure import Parts, Unstorable, put_state_together, take_state_apart
from shardway.data.loader import Batch
from shardway.data.samplers import BatchOrder, SamplerOrder, SamplerStand, SamplerStands
from shardway.data.stateful import StreamSnapshot
from shardway.train.session import Session

STREAM, ORDER = "stream", "order"
"""Prefixes of names in a checkpoint; the first is followed by a rank's place among those that read."""


class StreamState(CheckpointState):
    """The state of a stream on this rank. `find_position` gives the position of the run when it is saved."""

    def __init__(self, session: Session, name: str, find_position: Callable[[], int]) -> None:
        mesh = session.mesh
        self._session, self._name = session, name
        self._rank, self._ranks = mesh.data_rank, mesh.data_ranks
        self._leads = all(mesh.coordinate(axis) == 0 for axis in ("pp", "cp", "tp"))
        self._seen: deque[tuple[int, StreamSnapshot]] = deque(maxlen=2)  # the last may belong to a void step
        self._facts: Mapping[str, Any] = {}
        self._unused = ""
        self._find_position = find_position
        self.begin: StreamSnapshot | None = None
        """Where the next reading starts."""

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; their states are remembered, and it is reported once if there are none."""
        first = True
        for batch in batches:
            if batch.snapshot is not None:
                self._seen.append((batch.next_position, batch.snapshot))
            if first:
                self._report_what_is_run_through(batch)
            first = False
            yield batch

    def _report_what_is_run_through(self, batch: Batch) -> None:
        alone = "one loader process reads it, whatever data.workers says"
        workers = self._session.resolved.values.data.workers > 1
        if self._unused:
            self._report(self._unused)
        if batch.snapshot is None:
            self._report(
                "after a resume it is run through from its beginning to where the run was. The order is the same if it "
                "gives the same samples each time; the random numbers of torch, numpy and Python that it draws are the "
                f"same{f'; {alone}' if workers else ''}. It goes on without that where it has state_dict() and "
                "load_state_dict(), and draws from generators of its own alone, which its state holds."
            )
        elif workers:
            self._report(f"{alone}.")

    def collect(self) -> Tensors:
        """The state after the last batch that counts, as one structure and its tensors."""
        snapshot = self._find()
        if snapshot is None or not self._leads:
            return {}
        try:
            parts: Parts = take_state_apart(pickle.loads(snapshot.state))
        except Unstorable as error:
            where = f" at {error.path}" if error.path else ""
            self._report(
                f"its state{where} is a {error.kind}, which a checkpoint cannot hold, so after a resume it is run "
                "through from its beginning."
            )
            return {}
        part = f"{STREAM}-{self._rank}"
        facts = {
            "ranks": self._ranks,
            "given": snapshot.given,
            "epoch": snapshot.epoch,
            "in_epoch": snapshot.in_epoch,
            "of_iterator": snapshot.of_iterator,
            "state": parts.text,
        }
        own = {part: dict(parts.tensors)} if parts.tensors else {}
        return {**own, structure_name(part): json.dumps(facts)}

    def template(self, table: TensorTable) -> Tensors:
        """Targets for this rank's state, if as many ranks have saved theirs."""
        self.begin, self._unused = None, ""
        self._facts = self._read(table)
        if not self._facts:
            return {}
        part = f"{STREAM}-{self._rank}"
        room = make_room(table, f"{part}.")
        return {part: room} if room else {}

    def install(self, tensors: Tensors) -> None:
        """The next reading starts from the loaded state."""
        if not self._facts:
            return
        loaded = tensors.get(f"{STREAM}-{self._rank}", {})
        state = put_state_together(self._facts["state"], lambda name, device: loaded[name])
        known = {name: self._facts[name] for name in ("given", "epoch", "in_epoch", "of_iterator")}
        self.begin = StreamSnapshot(**known, state=pickle.dumps(state))

    def _find(self) -> StreamSnapshot | None:
        """The newest state of a batch that counts; else that at the beginning of this attempt."""
        position = self._find_position()
        counted = [snapshot for end, snapshot in self._seen if end <= position]
        return counted[-1] if counted else self.begin

    def _read(self, table: TensorTable) -> Mapping[str, Any]:
        first = structure_name(f"{STREAM}-0")
        if first not in table.values:
            return {}
        saved = json.loads(json.loads(table.values[first]))["ranks"]
        if saved != self._ranks:
            self._unused = (
                f"{saved} rank(s) have saved where they stood in it and {self._ranks} read it now, so it is run "
                "through from its beginning to where the run was."
            )
            return {}
        name = structure_name(f"{STREAM}-{self._rank}")
        return dict(json.loads(json.loads(table.values[name]))) if name in table.values else {}

    def _report(self, what: str) -> None:
        self._session.note_once("data_order_noted", f"{self._name}: {what}")


class OrderState(CheckpointState):
    """The state of a sampler, the same on all ranks: before the epochs that it was run through for, and now."""

    def __init__(
        self, session: Session, order: SamplerOrder | BatchOrder, samples: int, find_position: Callable[[], int]
    ) -> None:
        """`samples`: the samples of an epoch."""
        self._session, self._order, self._samples, self._find_position = session, order, samples, find_position
        self._text = ""

    def collect(self) -> Tensors:
        """Rank 0's state, as one structure and its tensors; nothing if a position is enough."""
        stands = self._order.stands(self._find_position() // self._samples)
        if not self._session.ranks.is_first or (not stands.first.generators and stands.first.own is None):
            return {}
        try:
            parts: Parts = take_state_apart(
                {
                    "epoch": stands.epoch,
                    "first": _spread(stands.first),
                    "befores": {epoch: _spread(stand) for epoch, stand in stands.befores.items()},
                    "now": _spread(stands.now),
                    "read": stands.read,
                }
            )
        except Unstorable as error:
            self._session.note_once(
                "data_order_noted",
                f"the state of the sampler of run.loader holds a {error.kind}, which a checkpoint cannot hold, so "
                "after a resume it begins as the script makes it and is run through from its first epoch on.",
            )
            return {}
        own = {ORDER: dict(parts.tensors)} if parts.tensors else {}
        return {**own, structure_name(ORDER): parts.text}

    def template(self, table: TensorTable) -> Tensors:
        """Targets for what was saved."""
        name = structure_name(ORDER)
        self._text = json.loads(table.values[name]) if name in table.values else ""
        room = make_room(table, f"{ORDER}.")
        return {ORDER: room} if room and self._text else {}

    def install(self, tensors: Tensors) -> None:
        """Continue the sampler from its state."""
        if not self._text:
            return
        loaded = tensors.get(ORDER, {})
        saved = put_state_together(self._text, lambda name, device: loaded[name])
        befores = {epoch: _gather(stand) for epoch, stand in saved["befores"].items()}
        first, now = _gather(saved["first"]), _gather(saved["now"])
        self._order.go_on(SamplerStands(first, saved["epoch"], befores, now, saved["read"]))


def _spread(stand: SamplerStand) -> dict[str, Any]:
    own = pickle.loads(stand.own) if stand.own is not None else None
    return {"generators": stand.generators, "own": own, "has_own": stand.own is not None}


def _gather(saved: Mapping[str, Any]) -> SamplerStand:
    return SamplerStand(saved["generators"], pickle.dumps(saved["own"]) if saved["has_own"] else None)


def find_data_state(session: Session, loader: Any, find_position: Callable[[], int]) -> StreamState | OrderState | None:
    """What a checkpoint holds of a loader's data beside the position; None if the position is enough."""
    if loader.is_stream:
        return StreamState(session, loader.fingerprint, find_position)
    if loader.order is not None:
        return OrderState(session, loader.order, loader.size, find_position)
    return None
