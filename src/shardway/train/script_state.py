"""The state of a script beside tensors: its data, settings of parameter groups, schedulers, what is frozen.

Invariants:
- A state that cannot be saved or restored exactly is not used.
- After a resume, what the script has changed holds as if the run had not stopped. If today's script begins with another
  value than the saved one did (another argument), the user has changed it: today's value holds, and this is reported.

Each rank saves the state that belongs to the last batch that counts, however far ahead was read. Ranks that read the
same data (of one pipeline, or of one tensor group) save one. With the same number of ranks the dataset resumes from its
state. Otherwise, or if none was saved, the dataset is run through from its beginning, which is reported once.

Each value is kept twice: as it was when the loop began, and as it is now. Values are JSON (`checkpoint.structure`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardway.checkpoint.file_format import TensorTable
from shardway.checkpoint.state import CheckpointState, Tensors, make_room, structure_name
from shardway.checkpoint.structure import Parts, Unstorable, inline, put_state_together, read_inline, take_state_apart
from shardway.data.loader import Batch
from shardway.data.samplers import BatchOrder, SamplerOrder, SamplerStand, SamplerStands, StreamSnapshot
from shardway.errors import UserError, list_some
from shardway.parallel.mesh import DIMS, Mesh
from shardway.train.held import HeldModel, HeldOptimizer, Holdings
from shardway.train.session import Session

# --- What a checkpoint holds of a script's data beside the position: states of iterable datasets, and of samplers
# with generators or a state

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


# --- What a script changes between two steps besides tensors, saved and restored: settings of parameter groups
# (learning rate, weight decay, ...), groups that were added, its schedulers, what is frozen, which modules evaluate

VALUE = "script"
"""The name of the value in a checkpoint."""

Settings = dict[str, Any]
"""Name of a setting -> its value as JSON."""

Changes = dict[str, list[Any]]
"""Name of an argument -> its value when the run was saved, and today."""

_NOT_SETTINGS = frozenset(("params", "param_names"))
_DERIVED = frozenset(("base_lrs", "initial_lr", "min_lrs"))
"""Settings that schedulers derive from the learning rate: they are reported only as the learning rate."""


@dataclass
class Begin:
    """How the script began: settings of groups by optimizer, states of schedulers, what was frozen by model."""

    groups: dict[str, list[Settings]] = field(default_factory=dict)
    schedulers: dict[str, Any] = field(default_factory=dict)
    frozen: dict[str, list[str]] = field(default_factory=dict)
    evaluating: dict[str, list[str]] = field(default_factory=dict)


class ScriptState(CheckpointState):
    """The state of a script, as the first rank of each pipeline stage has it. `writes_lr`: the run file's schedule sets
    the learning rate, so that none is put back."""

    def __init__(self, holdings: Holdings, mesh: Mesh, *, writes_lr: bool) -> None:
        self._holdings, self._writes_lr = holdings, writes_lr
        self._stage, self._stages = mesh.coordinate("pp"), mesh.degree("pp")
        self._leads = all(mesh.coordinate(dim) == 0 for dim in (*DIMS, "cp") if dim != "pp")
        self._begin = Begin()
        self._saved: dict[str, Any] = {}
        self.changes: Changes = {}

    def begin(self) -> None:
        """Take the script's settings, before anything is restored. Raises UserError if they cannot be stored."""
        held = self._holdings
        self._begin = Begin(
            {each.name: [_read_group(group) for group in each.optimizer.param_groups] for each in held.optimizers},
            {name: read_scheduler(name, scheduler) for name, scheduler in held.schedulers.items()},
            {each.name: _list_frozen(each) for each in held.models},
            {each.name: _list_evaluating(each) for each in held.models},
        )

    def collect(self) -> Tensors:
        """One value, of the rank that leads."""
        if not self._leads:
            return {}
        held, begin = self._holdings, self._begin
        names = {id(each): name for model in held.models for name, each in model.parameters()}
        optimizers = {
            each.name: {
                "begin": begin.groups.get(each.name, []),
                "now": [_read_group(group) for group in each.optimizer.param_groups],
                "parameters": _name_added(each, len(begin.groups.get(each.name, [])), names),
            }
            for each in held.optimizers
        }
        unknown = {name: self._saved["schedulers"][name] for name in self.unknown}
        schedulers = unknown | {
            name: {"begin": begin.schedulers.get(name), "now": read_scheduler(name, scheduler)}
            for name, scheduler in held.schedulers.items()
        }
        models = {
            each.name: {
                "frozen": [begin.frozen.get(each.name, []), _list_frozen(each)],
                "evaluating": [begin.evaluating.get(each.name, []), _list_evaluating(each)],
            }
            for each in held.models
        }
        content = {"optimizers": optimizers, "schedulers": schedulers, "models": models}
        return {_value_of(self._stage): json.dumps(content)}

    def prepare(self, table: TensorTable) -> None:
        """Make groups that the run has added, and freeze what it has frozen. Raises UserError if a group cannot be made
        again."""
        self._saved = self._read(table)
        self.changes = {}
        for model in self._holdings.models:
            if (saved := self._saved.get("models", {}).get(model.name)) is not None:
                self._put_back_flags(model, saved)
        parameters = {name: each for model in self._holdings.models for name, each in model.parameters()}
        for held in self._holdings.optimizers:
            if (saved := self._saved.get("optimizers", {}).get(held.name)) is not None:
                _add_groups(held, saved, parameters)

    def install(self, tensors: Tensors) -> None:
        """Put back settings and schedulers."""
        for held in self._holdings.optimizers:
            if (saved := self._saved.get("optimizers", {}).get(held.name)) is not None:
                self._put_back_groups(held, saved)
        for name, scheduler in self._holdings.schedulers.items():
            if (saved := self._saved.get("schedulers", {}).get(name)) is not None:
                self._put_back_scheduler(name, scheduler, saved)

    @property
    def unknown(self) -> list[str]:
        """Schedulers in the last loaded checkpoint that today's script has not made."""
        return [name for name in self._saved.get("schedulers", {}) if name not in self._holdings.schedulers]

    def list_notes(
        self, checkpoint: str, waiting: Iterable[str], missing: Iterable[str], finished: str
    ) -> Iterator[str]:
        """How the script differs from its checkpoint; `finished`: why it has ended the run, if it has."""
        for name, (before, today) in self.changes.items():
            yield f"{name} was {before} when {checkpoint} was saved and is {today} now: it goes on with {today}."
        for name in (*self.unknown, *waiting):
            yield f"{checkpoint} holds the state of {name}, which the script has not made: it waits to be made."
        for name in missing:
            yield f"{checkpoint} holds no state of {name}: it begins as the script has made it."
        if finished:
            yield f"this run is finished ({finished}): nothing is left to do."

    def take_waiting(self, name: str, scheduler: Any) -> None:
        """A scheduler that was made after the run was resumed takes what was saved of it."""
        saved = self._saved.get("schedulers", {}).get(name)
        if saved is not None:
            scheduler.load_state_dict(read_inline(saved["now"]))

    # --- parts

    def _read(self, table: TensorTable) -> dict[str, Any]:
        """The saved state of this rank's stage; of all stages if their number differs today."""
        names = itertools.takewhile(lambda name: name in table.values, map(_value_of, itertools.count()))
        stages = [json.loads(json.loads(table.values[name])) for name in names]
        if len(stages) == self._stages:
            return dict(stages[self._stage])
        if not stages:
            return {}
        models = {
            name: {
                kind: [[each for stage in stages for each in stage["models"][name][kind][at]] for at in (0, 1)]
                for kind in ("frozen", "evaluating")
            }
            for name in stages[0]["models"]
        }
        return {**stages[0], "models": models}

    def _put_back_flags(self, model: HeldModel, saved: Mapping[str, Any]) -> None:
        parameters, modules = dict(model.parameters()), dict(_modules(model))
        before, now = (set(names) & parameters.keys() for names in saved["frozen"])
        if set(self._begin.frozen.get(model.name, ())) == before:
            for name in before ^ now:
                parameters[name].requires_grad_(name not in now)
        before, now = (set(names) & modules.keys() for names in saved["evaluating"])
        if set(self._begin.evaluating.get(model.name, ())) == before:
            for name in before ^ now:
                modules[name].training = name not in now

    def _put_back_groups(self, held: HeldOptimizer, saved: Mapping[str, Any]) -> None:
        begun = self._begin.groups.get(held.name, [])
        if len(saved["begin"]) != len(begun):
            self.changes[f"{held.name}.param_groups"] = [len(saved["begin"]), len(begun)]
            return
        many = len(begun) > 1
        for number, group in enumerate(held.optimizer.param_groups[: len(saved["now"])]):
            place = f"{held.name}.param_groups[{number}]" if many else held.name
            now = saved["now"][number]
            if number >= len(begun):
                _set(group, now, {})
                continue
            merged = self._merge_settings(place, saved["begin"][number], now, begun[number])
            if self._writes_lr:
                merged.pop("lr", None)
            _set(group, merged, begun[number])

    def _merge_settings(self, place: str, before: Settings, now: Settings, today: Settings) -> Settings:
        merged = {**today, **now}
        for name in before.keys() & today.keys() & now.keys():
            merged[name] = _merge(f"{place}.{name}", before[name], now[name], today[name], self.changes)
        for name in today.keys() - before.keys():
            if today[name] != now.get(name, today[name]):
                merged[name] = today[name]
        if "lr" in merged and before.get("lr") != today.get("lr") and "initial_lr" in before.keys() & today.keys():
            merged["lr"] = _scaled(before["initial_lr"], now["lr"], today["initial_lr"], merged["lr"])
        return merged

    def _put_back_scheduler(self, name: str, scheduler: Any, saved: Mapping[str, Any]) -> None:
        before, now, today = saved["begin"], saved["now"], self._begin.schedulers.get(name)
        merged = now if before is None or today is None else _merge(name, before, now, today, self.changes)
        try:
            scheduler.load_state_dict(read_inline(merged))
        except Exception as error:
            raise UserError(
                f"the scheduler {name} does not take the state that the checkpoint holds of it: "
                f"{type(error).__name__}: {error}\n"
                "  Nothing was changed in the run directory. To do: make it as it was when the run was saved."
            ) from error


def _value_of(stage: int) -> str:
    return VALUE if stage == 0 else f"{VALUE}-{stage}"


def read_scheduler(name: str, scheduler: Any) -> Any:
    """The state of a scheduler as JSON. Raises UserError where it cannot be stored."""
    try:
        return _plain(inline(scheduler.state_dict()))
    except Unstorable as error:
        where = f" at {error.path}" if error.path else ""
        raise UserError(
            f"the state_dict() of the scheduler {name}{where} is a {error.kind}, which a checkpoint cannot hold.\n"
            "  To do: let its state_dict() return numbers, strings, lists and dicts alone."
        ) from None


def _merge(place: str, before: Any, now: Any, today: Any, changes: Changes) -> Any:
    """The value that holds: the saved final value, if today's script begins as the saved one did.

    All are values as JSON; each element of dicts and lists is merged for itself.
    """
    if before == today:
        return now
    kinds = {before[0], now[0], today[0]}
    if len(kinds) == 1 and before[0] in ("dict", "ordered"):
        olds, news, todays = ({json.dumps(key): each for key, each in node[1]} for node in (before, now, today))
        merged = {**todays, **news}
        for key in olds.keys() & news.keys() & todays.keys():
            merged[key] = _merge(f"{place}.{json.loads(key)[-1]}", olds[key], news[key], todays[key], changes)
        return [now[0], [[json.loads(key), each] for key, each in merged.items()]]
    if len(kinds) == 1 and before[0] in ("list", "tuple") and len(before[1]) == len(now[1]) == len(today[1]):
        triples = zip(before[1], now[1], today[1], strict=True)
        return [now[0], [_merge(f"{place}[{at}]", *each, changes) for at, each in enumerate(triples)]]
    name = place.rpartition(".")[2]
    if not name.startswith("_") and name.partition("[")[0] not in _DERIVED:
        changes[place] = [_shown(before), _shown(today)]
    return today


def _scaled(before: Any, now: Any, today: Any, otherwise: Any) -> Any:
    """A learning rate under a scheduler whose base was changed: at the same place in its schedule."""
    base, current, new = (float(read_inline(each)) for each in (before, now, today))
    return inline(new * (current / base)) if base else otherwise


def _shown(encoded: Any) -> Any:
    value = read_inline(encoded)
    return value if isinstance(value, bool | int | float | str | type(None)) else repr(value)


def _plain(encoded: Any) -> Any:
    """A value as it is after a round trip through JSON."""
    return json.loads(json.dumps(encoded))


def _read_group(group: Mapping[str, Any]) -> Settings:
    """The settings of a group. What cannot be stored (a function) is left to the script."""
    settings: Settings = {}
    for name, value in group.items():
        if name not in _NOT_SETTINGS:
            with contextlib.suppress(Unstorable):
                settings[name] = _plain(inline(value))
    return settings


def _set(group: dict[str, Any], settings: Settings, today: Settings) -> None:
    """Put settings into a group; what has its value already stays the object that it is."""
    current = _read_group(group)
    for name, encoded in settings.items():
        if current.get(name) == encoded:
            continue
        value, held = read_inline(encoded), group.get(name)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
            held.detach().copy_(value)
        else:
            group[name] = value


def _name_added(held: HeldOptimizer, first: int, names: Mapping[int, str]) -> list[list[str | None]]:
    """The names of the parameters of each group that was added since the script began."""
    return [[names.get(id(each)) for each in group["params"]] for group in held.optimizer.param_groups[first:]]


def _add_groups(held: HeldOptimizer, saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    """Make the groups again that the run has added to an optimizer. Raises UserError."""
    optimizer, begun = held.optimizer, len(saved["begin"])
    missing = range(len(optimizer.param_groups), len(saved["now"]))
    if len(optimizer.param_groups) < begun:
        return  # reported as a change of the script's groups
    taken = {id(each) for each in held.parameters()}
    for number in missing:
        names = saved["parameters"][number - begun]
        lost = [name or "one of no model" for name in names if name not in parameters]
        double = [name for name in names if name in parameters and id(parameters[name]) in taken]
        if lost or double:
            why = f"has no {list_some(lost, 6)}" if lost else f"has {list_some(double, 6)} in another group"
            raise UserError(
                f"the run has added a parameter group to {held.name} (group {number}), and the script of today {why}.\n"
                "  Nothing was changed. To do: make models and groups as they were when the run was saved."
            )
        optimizer.add_param_group({"params": [parameters[name] for name in names]})


def _modules(model: HeldModel) -> Iterator[tuple[str, nn.Module]]:
    return model.parallel.module.named_modules()


def _list_frozen(model: HeldModel) -> list[str]:
    return [name for name, each in model.parameters() if not each.requires_grad]


def _list_evaluating(model: HeldModel) -> list[str]:
    return [name for name, module in _modules(model) if not module.training]
