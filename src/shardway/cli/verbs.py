"""The verbs by name, imported when they are used; verbs that take a program after `--`.

Invariants:
- The words after the first `--` are passed on one by one; none is taken for an option.
- `shardway submit` imports nothing of `shardway plan`; a list of all verbs imports all.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from shardway.errors import UserError
from shardway.places import folder_is_gone

# --- verbs with a program after `--`

_KEY = "shardway.program"


class CommandWithProgram(TyperCommand):
    """Puts the words after `--` aside before the options are read."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split at the first `--`."""
        if "--" in args:
            cut = args.index("--")
            ctx.meta[_KEY] = tuple(args[cut + 1 :])
            args = args[:cut]
        return super().parse_args(ctx, args)


def read_program_words(ctx: Any) -> tuple[str, ...]:
    """The words after `--`; empty where there is no `--`. Raises UserError where nothing follows it."""
    words = ctx.meta.get(_KEY)
    if words == ():
        raise UserError(
            "no command stands after `--`.\n"
            "  To do: name one, such as `-- python train.py` (is a variable in it empty?), or leave out `--`."
        )
    return tuple(words or ())


# --- the verbs by name

_ROOM = "shardway.cli"

VERBS = (
    "plan",
    "train",
    "init",
    "config",
    "checkpoint",
    "sites",
    "image",
    "submit",
    "stop",
    "resume",
    "status",
    "logs",
    "report",
    "doctor",
    "rehearse",
)
"""Each has a module of its name, with a function of that name, or an `app` of verbs of its own; as they are listed."""

COMPUTING = ("train", "checkpoint", "rehearse")
"""These load torch, whose libraries end the process without a word of reason where the current folder was removed."""

_CLASSES = {"submit": CommandWithProgram}


class Verbs(TyperGroup):
    """The group of all verbs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, in the order in which a newcomer reads them."""
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that is asked for. Raises UserError where it cannot work from here."""
        if args[0] in COMPUTING and folder_is_gone():
            raise UserError("the current folder is not there.")
        return super().resolve_command(ctx, args)


class _Commands(MutableMapping[str, Any]):
    """Commands by name, each made at its first use."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name not in VERBS:
                raise KeyError(name)
            self._made[name] = _make(name)
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*VERBS, *self._made)))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _make(name: str) -> Any:
    """The command, made as typer would have made it as one of many."""
    module = importlib.import_module(f"{_ROOM}.{name}")
    holder = typer.Typer(rich_markup_mode=None)
    if hasattr(module, "app"):
        holder.add_typer(module.app, name=name)
    else:
        holder.command(name, cls=_CLASSES.get(name))(getattr(module, name))
    return get_group(holder).commands[name]
