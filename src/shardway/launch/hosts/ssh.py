"""A host behind the user's own ssh: several commands in one exchange, over one shared connection.

Invariants:
- Only `open` makes a new connection. Two new ones are never closer than `GAP_S`; each failure in a row lengthens the
  gap.
- A call that finds the connection gone fails; it never opens one by accident.
- Every refusal has a remedy, and ssh's own message is kept.
- The output of a command is returned byte for byte, whatever login shells print around it: each output ends with a
  random mark that also carries the exit code.
- The exit code of a command is the one in its own mark. If no mark comes back, the connection failed; this is reported
  as such, never as a code of the command.

Options are those of ssh_config(5) and ssh(1) of OpenSSH 7.3 and later.

bash reads the script from its standard input, so none of it is on a command line, which `ps` shows and a login shell
(csh, fish, zsh) splits. Shells read no more bytes of a piped script than they need (POSIX.1, sh, INPUT FILES), so a
payload may follow the script.

Required on the host: bash and the usual tar, gzip, sed and mv; no Python.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import math
import os
import re
import secrets
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from shardway.errors import SiteError, UserError
from shardway.inherited import list_option_patterns, list_patterns
from shardway.launch.hosts.base import Done, HostUnreachable, fill_in, list_variables
from shardway.launch.hosts.local import refuse_to_write
from shardway.launch.script import quote, quote_all, quote_shell, read_block
from shardway.rundir.file_io import write_json

# --- One shared ssh connection per host: how often a new one may be opened, and what ssh's refusals mean

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


# --- A host behind the user's own ssh: several commands in one exchange, files and folders over one shared
# connection

# --- several commands in one script

BOOTSTRAP = "exec bash --norc -s"
"""What the login shell runs: words that every shell reads alike."""

_KILLED = (124, 137)
"""Exit codes of coreutils' `timeout`: command ended, or killed."""

_PROLOGUE = """\
mark={mark}
{functions}
# Commands of a scheduler stand in PATH only after a login. A profile may print, read or run what it likes: only the
# variables that it leaves are taken.
eval "$(bash --login -c 'echo; echo '$mark'; export -p' </dev/null 2>/dev/null | sed "1,/$mark/d")" 2>/dev/null
left_out=$(for name in $(compgen -e); do
  case $name in {options}) printf '%s=%s\\n' "$name" "${{!name//$'\\n'/ }}" ;; esac
done)
drop_variables {patterns}
limit=; command -v timeout >/dev/null 2>&1 && limit="timeout -k 5 {limit_s}"
ends() {{ set -- "$1" $? $SECONDS; printf %s:%s:%s:%s: $mark "$@"; printf %s:%s:%s:%s: $mark "$@" >&2; SECONDS=0; }}
ends 0
"""


@dataclass(frozen=True)
class Command:
    """A command as text of a script, and its original words."""

    words: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class ScriptCommandResult:
    """How one command of a script ended; `whole` is False if its end is missing."""

    code: int
    out: bytes
    err: bytes
    whole: bool = True
    timed_out: bool = False


@dataclass(frozen=True)
class Exchange:
    """A script with its mark; `limit_s` is the time of each of its commands."""

    commands: tuple[Command, ...]
    limit_s: float
    mark: str = field(default_factory=lambda: f"shardway-{secrets.token_hex(16)}")

    def render(self) -> bytes:
        """The script; after it, only its commands read the input."""
        limit = math.ceil(self.limit_s)
        lines = [f"{command.text}\nends {number}" for number, command in enumerate(self.commands, 1)]
        drop = read_block("lib", "drop_variables").text
        words = " ".join(quote_shell(pattern) for ranks in (True, False) for pattern in list_patterns(of_ranks=ranks))
        prologue = _PROLOGUE.format(
            mark=self.mark, limit_s=limit, options="|".join(list_option_patterns()), functions=drop, patterns=words
        )
        return "\n".join([prologue + "{", *lines, "exit 0", "}", ""]).encode("utf-8", "surrogateescape")

    def parse(self, out: bytes, err: bytes) -> list[ScriptCommandResult] | None:
        """How each command ended, as far as the outputs reach; None if the script did not start."""
        outs, errs = parse_marked(self.mark, out), parse_marked(self.mark, err)
        if not outs.ends:
            return None
        found = []
        for number in range(1, len(outs.ends)):
            end = outs.ends[number]
            late = end.code in _KILLED and end.seconds >= math.ceil(self.limit_s)
            found.append(ScriptCommandResult(end.code, outs.text(number), errs.text(number), timed_out=late))
        if len(found) < len(self.commands):
            number = len(found) + 1
            found.append(ScriptCommandResult(-1, outs.text(number), errs.text(number), whole=False))
        return found


@dataclass(frozen=True)
class CommandEnd:
    """One mark in an output: exit code, and seconds that the command took."""

    code: int
    seconds: int


@dataclass(frozen=True)
class Marked:
    """An output split at its marks: `texts[0]` precedes the first, `texts[i]` belongs to command i."""

    texts: tuple[bytes, ...]
    ends: tuple[CommandEnd, ...]

    def text(self, number: int) -> bytes:
        """The output of a command, empty where there is none."""
        return self.texts[number] if number < len(self.texts) else b""


def parse_marked(mark: str, output: bytes) -> Marked:
    """Split an output at the marks that `ends` of a script printed."""
    pieces = re.split(re.escape(mark.encode()) + rb":\d+:(\d+):(\d+):", output)
    ends = tuple(CommandEnd(int(code), int(s)) for code, s in zip(pieces[1::3], pieces[2::3], strict=True))
    return Marked(tuple(pieces[::3]), ends)


def run_command(words: Sequence[str], stdin: str = "") -> Command:
    """A command of a script, within the time limit; `stdin` is its input (empty for none)."""
    source = f"printf %s {quote(stdin)} | " if stdin else ""
    empty = "" if stdin else " </dev/null"
    return Command(tuple(words), f"{source}$limit {quote_all(words)}{empty}")


def options_command() -> Command:
    """The options for the scheduler's commands in the host's environment: NAME=VALUE, one per line."""
    return Command(("left_out",), 'printf %s "$left_out"')


def follow_command(words: Sequence[str]) -> Command:
    """A command that ends when the input of the script does, so that a lost connection leaves nothing running."""
    watch = "{ cat <&3; kill -- -$child; } >/dev/null 2>&1 & watch=$!"
    # Job control gives the command a process group of its own, which ends as one.
    start = f"exec 3<&0; set -m; {{ exec {quote_all(words)} </dev/null 2>/dev/null 3<&-; }} & child=$!"
    # The watch ends first: it must never kill a process that got the same number since.
    end = "{ wait $child; code=$?; kill -- -$watch; } 2>/dev/null; (exit $code)"
    return Command(tuple(words), f"{start}\n{watch}\n{end}")


def write_command(path: str, text: str, executable: bool, token: str) -> Command:
    """Write a file under a temporary name in its folder, and rename it when it is complete."""
    folder, _, name = path.rpartition("/")
    temporary = quote(f"{folder}/.{name}.{token}.tmp")
    mode = f" && chmod +x {temporary}" if executable else ""
    return Command(
        ("write", path),
        f"mkdir -p -- {quote(folder or '/')} && printf %s {quote(text)} >{temporary}{mode} && "
        f"mv -f -- {temporary} {quote(path)} || {{ rm -f -- {temporary}; false; }}",
    )


def unpack_command(target: str, token: str) -> Command:
    """Unpack the payload after the script (tar, gzip) beside a folder that does not exist yet, and rename it.

    Code 17 (EEXIST) if the folder exists.
    """
    folder, _, name = target.rpartition("/")
    there, temporary = quote(target), quote(f"{folder}/.{name}.{token}.tmp")
    unpack = f"gzip -dc | tar -x -o -f - -C {temporary}"
    return Command(
        ("unpack", target),
        f"if [ -e {there} ] || [ -L {there} ]; then (exit 17); else mkdir -p -- {temporary} && "
        f"(set -o pipefail; {unpack}) && mv -- {temporary} {there} || {{ rm -rf -- {temporary}; false; }}; fi",
    )


# --- the host

_ANSWER_S = 15.0
"""Seconds that the network and a slow profile may take besides the command itself."""
_WRITE_S = 120.0
_COPY_S = 1800.0
_EXISTS = 17


class SshHost:
    """A machine in ssh's words: "alice@login.example.org", or a name of ~/.ssh/config."""

    def __init__(self, name: str, surroundings: ConnectionContext | None = None) -> None:
        self.name = name
        self.connection = Connection(name, surroundings or ConnectionContext())

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        """Run a command to its end, or for `timeout_s` seconds. Raises HostUnreachable."""
        return self._run([run_command(words, stdin)], timeout_s)[0]

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        """Run several commands in sequence in one exchange; those that do not start in time are marked as timed out."""
        return self._run([run_command(words) for words in commands], timeout_s) if commands else []

    def follow(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the lines of a command's standard output as they arrive. Raises HostUnreachable if it is cut off."""
        exchange = Exchange((follow_command(words),), 0.0)
        with tempfile.TemporaryFile() as messages:
            process = subprocess.Popen(
                self.connection.command([BOOTSTRAP]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
            )
            try:
                if (yield from _follow_lines(process, exchange)):
                    return
            finally:
                _hang_up(process)
            messages.seek(0)
            raise self.connection.lost(
                "the connection broke while it was followed", _describe(exchange, messages.read())
            )

    def read_files(self, paths: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
        """The text of each of these files that is readable, in one exchange."""
        done = self.run_many([["cat", "--", str(path)] for path in paths])
        return {path: ended.out for path, ended in zip(paths, done, strict=True) if ended.ok}

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        """Write complete files in one exchange. Raises UserError if the file system refuses one, HostUnreachable."""
        token = secrets.token_hex(8)
        commands = [write_command(str(path), text, path in executable, token) for path, text in files.items()]
        for path, ended in zip(files, self._exchange(commands, _WRITE_S), strict=False):
            if ended.code != 0:
                raise UserError(refuse_to_write(path, _reason(ended), self.name))

    def copy_tree(self, source: Path, target: PurePosixPath) -> None:
        """Copy a folder with its links as one stream. Raises UserError if the target exists or cannot be written."""
        command = unpack_command(str(target), secrets.token_hex(8))
        [ended] = self._exchange([command], _COPY_S, lambda file: _pack(source, file))
        if ended.code != 0:
            reason = "it exists already" if ended.code == _EXISTS else _reason(ended)
            raise UserError(refuse_to_write(target, reason, self.name))

    def expand(self, path: str) -> PurePosixPath:
        """An absolute path on the host; a relative one is below its home folder. Raises UserError, HostUnreachable."""
        return self.expand_many([path])[0]

    def expand_many(self, paths: Sequence[str]) -> list[PurePosixPath]:
        """Absolute paths on the host, in their order, in one exchange, or in none if all are plain."""
        names = list(dict.fromkeys(name for path in paths for name in _list_unknown(path)))
        done = self.run_many([["printenv", name] for name in names])
        values = {name: ended.out.removesuffix("\n") for name, ended in zip(names, done, strict=True) if ended.ok}
        return [fill_in(path, values, values.get("HOME", "/"), self.name) for path in paths]

    def read_options(self) -> dict[str, str]:
        """Variables on the host that hold options for a scheduler; no command gets them. Raises HostUnreachable."""
        [done] = self._run([options_command()], _ANSWER_S)
        return dict(line.split("=", 1) for line in done.out.splitlines() if "=" in line)

    # --- exchanges

    def _run(self, commands: Sequence[Command], timeout_s: float) -> list[Done]:
        ended = self._exchange(commands, timeout_s, keep_late=True)
        done = [
            Done(command.words, end.code, _text(end.out), _text(end.err), end.timed_out or not end.whole)
            for command, end in zip(commands, ended, strict=False)
        ]
        return done + [Done(command.words, -1, "", "", timed_out=True) for command in commands[len(done) :]]

    def _exchange(
        self,
        commands: Sequence[Command],
        timeout_s: float,
        payload: Callable[[IO[bytes]], None] | None = None,
        keep_late: bool = False,
    ) -> list[ScriptCommandResult]:
        """Send one script and split its answer; `keep_late`: return what arrived in time.

        Raises HostUnreachable if the script did not start, or if its end did not come back.
        """
        exchange = Exchange(tuple(commands), timeout_s)
        with tempfile.TemporaryFile() as script:
            script.write(exchange.render())
            if payload:
                payload(script)
            script.seek(0)
            code, out, err = _call(self.connection.command([BOOTSTRAP]), script, timeout_s + _ANSWER_S)
        ended = exchange.parse(out, err)
        said = _describe(exchange, err)
        if ended is None:
            raise self._not_begun(code, said, timeout_s)
        if not ended[-1].whole and not (keep_late and code is None):
            what = "the connection broke in the middle of an answer" if code is not None else "it took too long"
            raise self.connection.lost(what, said)
        return ended

    def _not_begun(self, code: int | None, said: str, timeout_s: float) -> HostUnreachable:
        if code is None:
            return self.connection.lost(f"no answer came within {timeout_s + _ANSWER_S:.0f} s", said)
        if code == 255:
            return self.connection.lost("the connection broke before it answered", said)
        return HostUnreachable(
            f"{self.name}: its login shell did not start bash (code {code}).\n"
            f"    {said.strip() or 'It said nothing.'}\n"
            "  To do: name a login node, where commands may be run; a machine for file transfers alone is none."
        )


def _list_unknown(path: str) -> list[str]:
    """The variables that are needed to make a path absolute; HOME for a relative one."""
    return [] if path.startswith("/") and "$" not in path else ["HOME", *list_variables(path)]


def _call(words: Sequence[str], stdin: IO[bytes], timeout_s: float) -> tuple[int | None, bytes, bytes]:
    """Exit code (None: time limit reached) and outputs of a process."""
    try:
        done = subprocess.run(words, stdin=stdin, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        return None, error.stdout or b"", error.stderr or b""
    return done.returncode, done.stdout, done.stderr


def _follow_lines(process: subprocess.Popen[bytes], exchange: Exchange) -> Generator[str, None, bool]:
    """The lines between the marks; returns whether the last mark came."""
    if process.stdin is None or process.stdout is None:
        return False
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(exchange.render())
        process.stdin.flush()
    mark = re.compile(re.escape(exchange.mark.encode()) + rb":\d+:\d+:\d+:")
    begun = False
    for line in process.stdout:
        *before, text = mark.split(line)
        if begun and before:
            if before[0]:
                yield _text(before[0])
            return True
        begun = begun or bool(before)
        if len(before) > 1:
            if before[1]:
                yield _text(before[1])
            return True
        if begun and text:
            yield _text(text).removesuffix("\n")
    return False


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """End an ssh; the end of its input ends what it runs on the host."""
    with process, contextlib.suppress(BrokenPipeError):
        process.terminate()
        if process.stdin:
            process.stdin.close()


def _pack(source: Path, file: IO[bytes]) -> None:
    """Pack a folder as gzipped tar in the form that GNU, BSD and busybox tar read, without owners."""

    def drop_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with (
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.GNU_FORMAT) as archive,
    ):
        archive.add(source, arcname=".", filter=drop_owner)


def _describe(exchange: Exchange, err: bytes) -> str:
    """What ssh, a profile or a login shell printed outside the commands."""
    return _text(re.sub(re.escape(exchange.mark.encode()) + rb":\d+:\d+:\d+:", b"", err))


def _reason(ended: ScriptCommandResult) -> str:
    """Why a command failed: the end of its first line of output ("... : No space left on device")."""
    lines = [line for line in _text(ended.err).splitlines() if line.strip()]
    reason = lines[0].rpartition(": ")[2].strip() if lines else f"code {ended.code}"
    # GNU tar counts the bytes when a disk is full, and does not name the reason.
    return f"no space left ({reason})" if reason.startswith("Wrote only") else reason


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")
