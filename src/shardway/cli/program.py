"""A verb that takes a program after `--`, as `shardway submit -- python train.py --lr 3e-4`.

Invariant: what stands after the first `--` is handed on word by word, and nothing of it is taken for an option. This
module must not know what the program is for.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from shardway.errors import UserError

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
