"""What a script changes between two steps besides tensors, saved and restored: settings of parameter groups (learning
rate, weight decay, ...), groups that were added, its schedulers, what is frozen, which modules evaluate.

Invariant: after a resume, what the script has changed holds as if the run had not stopped. If today's script begins
with another value than the saved one did (another argument), the user has changed it: today's value holds, and this is
reported. This module must not touch the disk.

Each value is kept twice: as it was when the loop began, and as it is now. Values are JSON (`checkpoint.structure`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardway.checkpoint.file_format import TensorTable
from shardway.checkpoint.state import CheckpointState, Tensors
from shardway.checkpoint.structure import Unstorable, inline, read_inline
from shardway.errors import UserError, list_some
from shardway.parallel.mesh import DIMS, Mesh
from shardway.train.held import HeldModel, HeldOptimizer, Holdings

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
