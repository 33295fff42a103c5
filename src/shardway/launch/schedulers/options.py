"""A scheduler's options from a table, as words of its command line.

Invariant: every option that was given appears, in the order given; false alone leaves one out. This module must not
know any option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def render_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Words such as `--qos=debug`, `--exclusive`, `-W group_list=x`; a name of one letter takes its value apart.

    True is the bare option, false leaves it out, a list gives it several times. Dashes before a name may be left out.
    """
    for name, value in options.items():
        bare = name.lstrip("-")
        for entry in value if isinstance(value, list | tuple) else [value]:
            if entry is False:
                continue
            dashed = f"-{bare}" if len(bare) == 1 else f"--{bare}"
            if entry is True:
                yield dashed
            else:
                yield f"{dashed} {entry}" if len(bare) == 1 else f"{dashed}={entry}"
