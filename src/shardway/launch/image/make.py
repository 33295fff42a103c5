"""Run the script that makes an image, on this machine or a login node.

Invariant: whatever happens - an error, the end of the time, an interrupt - no half-made file is left, and where that
cannot be known (the host is gone) it is said. This module must not know runtimes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from shardway.errors import SiteError, check_no_problems
from shardway.launch.hosts.base import Host, HostUnreachable
from shardway.launch.image.failures import parse_failure
from shardway.launch.image.order import ImageRequest
from shardway.launch.image.plan import Making, ended_mark

_KEPT_LINES = 400
_SHOWN_LINES = 15
_GRACE_S = 60
_CLEAN_S = 600.0
_TIMED_OUT = 143
"""Exit code of the script when it was ended by a signal, which is how its time ends."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Made:
    """An image that is whole: where, and its size (0: not known)."""

    path: PurePosixPath
    bytes: int = 0


def make_image(host: Host, order: ImageRequest, making: Making, limit_s: float, tell: Tell) -> Made:
    """Make it, and hand each line that is printed to `tell`.

    Raises UserError where it cannot be made there, SiteError where a command failed or its time (seconds) was over,
    HostUnreachable.
    """
    check_no_problems(f"the image {making.target}", making.hindrances)
    script, lines = making.work / "make.sh", deque[str](maxlen=_KEPT_LINES)
    code = None
    try:
        host.write_files({script: making.script})
        words = ["timeout", "-k", str(_GRACE_S), str(math.ceil(limit_s)), "bash", str(script)]
        output = host.follow(words)
        try:
            code = _follow(output, making.token, lines, tell)
        finally:
            if isinstance(output, Generator):
                output.close()  # now, since what it runs has to end before it is cleaned up
    finally:
        if code is None:
            _clean(host, making)
    if code != 0:
        raise SiteError(_describe_failure(order, making, code, list(lines), limit_s))
    size = host.run(["stat", "-c", "%s", str(making.target)]).out.strip()
    return Made(making.target, int(size) if size.isdecimal() else 0)


def _follow(output: Iterable[str], token: str, lines: deque[str], tell: Tell) -> int | None:
    """The exit code that the script printed last; None where it did not come to that."""
    mark = ended_mark(token)
    for line in output:
        if line.startswith(mark) and line.removeprefix(mark).strip().isdecimal():
            return int(line.removeprefix(mark))
        shown = line.rstrip("\r").rpartition("\r")[2]  # the last state of a line that was drawn over
        lines.append(shown)
        tell(shown)
    return None


def _clean(host: Host, making: Making) -> None:
    """What the script removes, had it come to its end."""
    work, part = str(making.work), str(making.part)
    try:
        host.run_many([["chmod", "-R", "u+rwX", "--", work], ["rm", "-rf", "--", work, part]], timeout_s=_CLEAN_S)
    except HostUnreachable as error:
        raise HostUnreachable(f"{error}\n  Half-made files may be left there: {work} and {part}.") from None


def _describe_failure(order: ImageRequest, making: Making, code: int | None, lines: list[str], limit_s: float) -> str:
    printed = [line for line in lines if line.strip()][-_SHOWN_LINES:]
    shown = "".join(f"\n    {line}" for line in printed) or "\n    It printed nothing."
    if code == _TIMED_OUT:
        what, remedy = f"it was ended after {limit_s:.0f} s", "allow more with --timeout, or run what --dry-run prints"
    elif code is None and not printed:
        what, remedy = (
            "its script did not start",
            "check that bash and timeout are there, and run what --dry-run prints",
        )
    else:
        failure = parse_failure(lines, order)
        what, remedy = failure.sentence, failure.remedy
    ended = f" (exit code {code})" if code not in (None, _TIMED_OUT) else ""
    return f"{making.target} was not made{ended}: {what}. Nothing half-made is left.{shown}\n  To do: {remedy}."
