"""Programs in the place of ssh: one that runs on this machine what it was asked to run there, and ones that fail.

Invariant: a fake takes the options that Shardway gives and no others that a real ssh would refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardway.launch.hosts.ssh import ConnectionContext

_RUNS_HERE = """\
#!/bin/sh
# The state of the shared connection is the file "open" beside this program; each call leaves a line in "calls".
here={here}
printf '%s\\n' "$*" >>$here/calls
case " $* " in
  *" -G "*) echo "controlpath {controlpath}"; exit 0 ;;
  *" -O check "*) test -e $here/open; exit ;;
  *" -O exit "*) rm -f $here/open; exit ;;
esac
riding=; case " $* " in *" ControlMaster=no "*) riding=1 ;; esac
while [ "$1" != -- ]; do shift; done; shift 2
if [ -z "$riding" ]; then {connect}; touch $here/open; exit 0; fi
test -e $here/open || {{ echo 'Connection closed by UNKNOWN port 65535' >&2; exit 255; }}
{serve}
"""


@dataclass
class Clock:
    """Time that passes only when somebody sleeps."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.slept.append(seconds)
        self.now += seconds


@dataclass(frozen=True)
class FakeSsh:
    """A fake, and what it was called with."""

    folder: Path
    surroundings: ConnectionContext
    clock: Clock

    def calls(self, having: str = "") -> list[str]:
        """The arguments of each call that has a text in it."""
        return [line for line in (self.folder / "calls").read_text().splitlines() if having in line]

    def hang_up(self) -> None:
        """The shared connection goes."""
        (self.folder / "open").unlink()


def make_fake(
    folder: Path,
    *,
    serve: str = 'exec sh -c "$*"',
    connect: str = "true",
    controlpath: str = "none",
    terminal: Callable[[], bool] = lambda: False,
) -> FakeSsh:
    """A fake ssh in a folder: `connect` runs when a connection is made, `serve` when a command is to run there."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "ssh"
    program.write_text(_RUNS_HERE.format(here=folder, serve=serve, connect=connect, controlpath=controlpath))
    program.chmod(0o755)
    clock = Clock()
    private = folder / "private"
    around = ConnectionContext((str(program),), private, terminal, lambda: clock.now, clock.sleep)
    return FakeSsh(folder, around, clock)


def says(message: str, code: int = 255) -> str:
    """Shell that prints a message as ssh does and ends."""
    lines = "; ".join(f"echo '{line}' >&2" for line in message.splitlines())
    return f"{{ {lines}; exit {code}; }}"
