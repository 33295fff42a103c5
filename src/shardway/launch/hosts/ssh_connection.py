"""One shared ssh connection per host: how often a new one may be opened, and what ssh's refusals mean.

Invariants:
- Only `open` makes a new connection. Two new ones are never closer than `GAP_S`; each failure in a row lengthens the
  gap.
- A call that finds the connection gone fails; it never opens one by accident.
- Every refusal has a remedy, and ssh's own message is kept.

Options are those of ssh_config(5) and ssh(1) of OpenSSH 7.3 and later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardway.errors import SiteError
from shardway.launch.hosts.base import HostUnreachable
from shardway.launch.script import quote, quote_all
from shardway.rundir.file_io import write_json

# --- how often a host may be connected to

GAP_S = 5.0
"""Seconds between two new connections while all is well."""
LONGEST_GAP_S = 300.0


@dataclass(frozen=True)
class Budget:
    """What is known of the connections to one host: failures in a row, and when the last was tried (Unix seconds)."""

    failures: int = 0
    last: float = 0.0

    @property
    def gap_s(self) -> float:
        """Seconds that have to lie between the last connection and the next: doubled for each failure in a row."""
        return min(GAP_S * 2.0 ** min(self.failures, 30), LONGEST_GAP_S)

    def wait_s(self, now: float) -> float:
        """Seconds until the next connection may be tried; a clock that was set back does not lengthen them."""
        return min(max(self.last + self.gap_s - now, 0.0), self.gap_s)

    def after(self, now: float, ok: bool) -> Budget:
        """What is known after one more connection was tried."""
        return Budget(0 if ok else self.failures + 1, now)


def read_budget(path: Path) -> Budget:
    """What earlier calls, perhaps of other processes, left; a fresh one where there is nothing to read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        table = json.loads(path.read_text(encoding="utf-8"))
        last = float(table["last"])
        return Budget(max(int(table["failures"]), 0), last) if math.isfinite(last) else Budget()
    return Budget()


def write_budget(path: Path, budget: Budget) -> None:
    """Keep it for the next call; a full disk is no reason not to connect."""
    with contextlib.suppress(OSError):
        write_json(path, asdict(budget), durable=False)


# --- refusals of ssh as a sentence and a remedy

_MOST_LINES = 6


@dataclass(frozen=True)
class Refusal:
    """Why a connection failed; `needs_person` if a user at a terminal could have answered."""

    sentence: str
    remedy: str
    needs_person: bool = False


_KNOWN: tuple[tuple[str, Refusal], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        Refusal(
            "its host key is not the one that was known",
            "ask the site whether it changed its keys; only then remove the old one with `ssh-keygen -R NAME`.",
        ),
    ),
    (
        r"Host key verification failed|host key is known for",
        Refusal("its host key is not known yet", "", needs_person=True),
    ),
    (
        r"[Bb]ad configuration option|terminating, \d+ bad configuration|Bad owner or permissions|percent_expand",
        Refusal("ssh cannot read its configuration", "mend the named line of ~/.ssh/config."),
    ),
    (
        r"Could not resolve hostname",
        Refusal("no such host is known", "check the name, and that you are in the site's network or VPN."),
    ),
    (
        r"Connection refused",
        Refusal("it refuses connections on that port", "give the site's port to the host in ~/.ssh/config."),
    ),
    (
        r"timed? ?out|No route to host|Network is unreachable|Host is down",
        Refusal(
            "it does not answer",
            "check the network and the VPN; a site that was asked too often may shut your address out for a while.",
        ),
    ),
    (
        r"certificate .*(expired|not yet valid)|Certificate invalid",
        Refusal("your ssh certificate is no longer valid", "get a new one as the site describes, then try again."),
    ),
    (
        r"Too many authentication failures",
        Refusal(
            "too many keys were offered", "name the one key with IdentityFile and IdentitiesOnly yes in ~/.ssh/config."
        ),
    ),
    (
        r"Permission denied|no supported authentication|password.*expired",
        Refusal("it does not let you in without being asked", "", needs_person=True),
    ),
    (
        r"kex_exchange_identification|Connection (closed|reset)|banner exchange|Exceeded MaxStartups",
        Refusal(
            "it closed the connection at once",
            "wait some minutes: many sites do so with addresses that come too often; then ask the site's support.",
        ),
    ),
)


def parse_refusal(said: str) -> Refusal:
    """The first known reason in what ssh printed; its own last line where none is known."""
    for pattern, refusal in _KNOWN:
        if re.search(pattern, said):
            return refusal
    return Refusal("ssh failed", "try the same with `ssh -v` to see why.")


def render_output(said: str) -> str:
    """What ssh printed, its last lines, indented; empty where it was silent."""
    lines = [line.rstrip() for line in said.replace("\r", "").splitlines() if line.strip(" @\t")]
    return "".join(f"\n    ssh: {line}" for line in lines[-_MOST_LINES:])


# --- the shared connection

CONNECT_S = 20
"""Seconds within which a host must answer."""
PERSON_S = 180.0
"""Seconds in which the user may type a password and a code."""
PERSIST = "10m"
"""How long a connection stays open after its last use."""
LONGEST_WAIT_S = 30.0
"""Longest wait before a new connection; if more is needed, the call fails with the time."""

_QUIET = (
    *("-T", "-a", "-x", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none", "-o", "PermitLocalCommand=no"),
    *("-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)


def has_terminal() -> bool:
    """Whether ssh can ask for a password at a terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class ConnectionContext:
    """What a connection takes from the world; tests give their own. `folder` None: the user's private one."""

    program: tuple[str, ...] = ("ssh",)
    folder: Path | None = None
    terminal: Callable[[], bool] = has_terminal
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class Connection:
    """The shared connection to one host: found where it is open, else opened."""

    def __init__(self, host: str, surroundings: ConnectionContext) -> None:
        self.host = host
        self._around = surroundings
        self._socket: Path | None = None

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs `words` there over the open connection. Raises HostUnreachable, SiteError."""
        if not self.is_open():
            self.open()
        # A client that finds no connection would open one; this proxy command leads nowhere and prevents it.
        ride = ("-o", "ControlMaster=no", "-o", "BatchMode=yes", "-o", "ProxyCommand=false")
        return [*self._around.program, *_QUIET, *self._path_option(), *ride, "--", self.host, *words]

    def is_open(self) -> bool:
        """Whether a connection stands, asked of the ssh that holds it; costs milliseconds and no traffic."""
        return self._ask([*self._path_option(), "-O", "check"]).returncode == 0

    def open(self) -> None:
        """Make the one connection, asking the person at the terminal where there is one.

        Raises HostUnreachable with the reason and the remedy, or where the budget says that it is too early.
        """
        self._wait_for_turn()
        terminal = self._around.terminal()
        master = ("-o", "ControlMaster=auto", "-o", f"ControlPersist={PERSIST}", "-o", f"BatchMode={_no_yes(terminal)}")
        words = [*self._around.program, *_QUIET, *self._path_option(), *master, "--", self.host, "true"]
        code, said = _run_waiting(words, PERSON_S if terminal else CONNECT_S + 10.0)
        connected = code != 255 and self.is_open()
        write_budget(self._budget_path, read_budget(self._budget_path).after(self._around.clock(), connected))
        if not connected:
            raise HostUnreachable(self._describe(parse_refusal(said), said, terminal))

    def close(self) -> None:
        """End the shared connection, where one stands."""
        self._ask([*self._path_option(), "-O", "exit"])

    def lost(self, what: str, said: str) -> HostUnreachable:
        """The error of a call whose answer did not come back."""
        return HostUnreachable(
            f"{self.host}: {what}.{render_output(said)}\n"
            "  What it did there is not known. To do: try again; if it stays so, look with "
            f"`{quote_all([*self._around.program, self.host])}`."
        )

    # --- names

    def _path_option(self) -> tuple[str, ...]:
        if self._socket is None:
            self._socket = self._users_socket() or self._private_folder() / self._short_name
        return ("-o", f"ControlPath={str(self._socket).replace('%', '%%')}")

    @property
    def _short_name(self) -> str:
        return hashlib.sha256("\0".join([*self._around.program, self.host]).encode()).hexdigest()[:12]

    @property
    def _budget_path(self) -> Path:
        return self._private_folder() / f"{self._short_name}.json"

    def _users_socket(self) -> Path | None:
        """The ControlPath that the user's configuration gives to this host."""
        answer = self._ask(["-G"])
        if answer.returncode != 0:
            raise HostUnreachable(self._describe(parse_refusal(answer.stderr), answer.stderr, terminal=True))
        for line in answer.stdout.splitlines():
            key, _, value = line.partition(" ")
            if key == "controlpath" and value != "none":
                return Path(value)
        return None

    def _private_folder(self) -> Path:
        """A folder for sockets, short enough for their paths (sun_path holds 104 bytes, ssh adds 17 for a while)."""
        folder = self._around.folder or _runtime_folder()
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        state = folder.lstat()
        if state.st_uid != os.getuid() or state.st_mode & 0o077 or folder.is_symlink():
            raise SiteError(
                f"{folder} keeps connections, and is not yours or open to others (mode {state.st_mode & 0o777:o}).\n"
                f"  To do: remove it, or close it with `chmod 700 {quote(str(folder))}`."
            )
        return folder

    # --- effects

    def _ask(self, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
        words = [*self._around.program, *options, "--", self.host]
        try:
            return subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=CONNECT_S
            )
        except FileNotFoundError:
            raise _no_ssh(self._around.program) from None
        except subprocess.TimeoutExpired:  # a connection whose holder hangs is none
            return subprocess.CompletedProcess(words, 255, "", "")

    def _wait_for_turn(self) -> None:
        wait = read_budget(self._budget_path).wait_s(self._around.clock())
        if wait > LONGEST_WAIT_S:
            raise HostUnreachable(
                f"{self.host}: the last connections failed, and the next is tried in {wait:.0f} s at the earliest: "
                "sites shut out machines that come too often.\n  To do: wait, or mend what was wrong with the last one."
            )
        if wait > 0:
            self._around.sleep(wait)

    def _describe(self, refusal: Refusal, said: str, terminal: bool) -> str:
        remedy = refusal.remedy
        if refusal.needs_person:
            command = [*self._around.program, "-MNf", *self._path_option(), "-o", "ControlPersist=12h", self.host]
            remedy = (
                "check your user name, key and password with the site"
                if terminal
                else f"there is no terminal to ask on. Open the connection once in one:\n      {quote_all(command)}\n"
                "    and then run this again; every later call rides it"
            ) + "."
        return f"{self.host}: {refusal.sentence}.{render_output(said)}\n  To do: {remedy}"


def _runtime_folder() -> Path:
    """The user's own runtime folder (pam_systemd(8)), else one in /tmp: $TMPDIR may be too long for a socket."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and len(runtime) < 40 and os.access(runtime, os.W_OK) else None
    return base / "shardway" if base else Path("/tmp") / f"shardway-{os.getuid()}"


def _run_waiting(words: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Code and messages of an ssh that leaves a child behind: read from a file, since that child keeps a pipe open."""
    with tempfile.TemporaryFile() as messages:
        try:
            code = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=messages, timeout=timeout_s
            ).returncode
            late = ""
        except FileNotFoundError:
            raise _no_ssh(words) from None
        except subprocess.TimeoutExpired:
            code, late = 255, "\nConnection timed out"
        messages.seek(0)
        return code, messages.read().decode("utf-8", "replace") + late


def _no_ssh(words: Sequence[str]) -> SiteError:
    return SiteError(
        f"there is no program {words[0]!r} on this machine's PATH.\n"
        "  To do: install the OpenSSH client, or run Shardway on the login node itself."
    )


def _no_yes(terminal: bool) -> str:
    return "no" if terminal else "yes"
