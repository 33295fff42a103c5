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

import base64
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
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import IO

from shardway.errors import SiteError, UserError
from shardway.inherited import list_option_patterns, list_patterns
from shardway.launch.hosts.base import Done, Host, HostUnreachable, fill_in, list_variables
from shardway.launch.hosts.local import refuse_to_write
from shardway.launch.script import quote, quote_all, quote_shell, read_block
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

    def wait_s(self, now: float) -> float:
        """Seconds until the next connection may be tried: the gap is doubled for each failure in a row; a clock that
        was set back does not lengthen it."""
        gap_s = min(GAP_S * 2.0 ** min(self.failures, 30), LONGEST_GAP_S)
        return min(max(self.last + gap_s - now, 0.0), gap_s)

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


# --- the shared connection

REFUSALS = tomllib.loads((files(__package__) / "ssh.toml").read_text(encoding="utf-8"))["refusal"]


def parse_refusal(said: str) -> tuple[str, str]:
    """The first known reason in what ssh printed, and its remedy; no remedy where a person could have answered."""
    found = ((rule["sentence"], rule.get("remedy", "")) for rule in REFUSALS if re.search(rule["when"], said))
    return next(found, ("ssh failed", "try the same with `ssh -v` to see why."))


def _render_output(said: str) -> str:
    """What ssh printed, its last lines, indented; empty where it was silent."""
    lines = [line.rstrip() for line in said.replace("\r", "").splitlines() if line.strip(" @\t")]
    return "".join(f"\n    ssh: {line}" for line in lines[-6:])


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
        self._name = hashlib.sha256("\0".join([*surroundings.program, host]).encode()).hexdigest()[:12]
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
        around, budget_path = self._around, self._private_folder() / f"{self._name}.json"
        wait = read_budget(budget_path).wait_s(around.clock())
        if wait > LONGEST_WAIT_S:
            raise HostUnreachable(
                f"{self.host}: the last connections failed, and the next is tried in {wait:.0f} s at the earliest: "
                "sites shut out machines that come too often.\n  To do: wait, or mend what was wrong with the last one."
            )
        if wait > 0:
            around.sleep(wait)
        terminal = around.terminal()
        batch = f"BatchMode={'no' if terminal else 'yes'}"
        master = ("-o", "ControlMaster=auto", "-o", f"ControlPersist={PERSIST}", "-o", batch)
        words = [*around.program, *_QUIET, *self._path_option(), *master, "--", self.host, "true"]
        with tempfile.TemporaryFile() as messages:  # a file, since ssh leaves a child behind that keeps a pipe open
            late = ""
            try:
                limit = PERSON_S if terminal else CONNECT_S + 10.0
                nothing = subprocess.DEVNULL
                code = subprocess.run(words, stdin=nothing, stdout=nothing, stderr=messages, timeout=limit).returncode
            except FileNotFoundError:
                raise _no_ssh(words) from None
            except subprocess.TimeoutExpired:
                code, late = 255, "\nConnection timed out"
            messages.seek(0)
            said = _text(messages.read()) + late
        connected = code != 255 and self.is_open()
        write_budget(budget_path, read_budget(budget_path).after(around.clock(), connected))
        if not connected:
            raise self._refused(said, terminal)

    def close(self) -> None:
        """End the shared connection, where one stands."""
        self._ask([*self._path_option(), "-O", "exit"])

    def lost(self, what: str, said: str) -> HostUnreachable:
        """The error of a call whose answer did not come back."""
        return HostUnreachable(
            f"{self.host}: {what}.{_render_output(said)}\n"
            "  What it did there is not known. To do: try again; if it stays so, look with "
            f"`{quote_all([*self._around.program, self.host])}`."
        )

    def _refused(self, said: str, terminal: bool) -> HostUnreachable:
        sentence, remedy = parse_refusal(said)
        if not remedy and terminal:
            remedy = "check your user name, key and password with the site."
        elif not remedy:
            command = [*self._around.program, "-MNf", *self._path_option(), "-o", "ControlPersist=12h", self.host]
            remedy = (
                f"there is no terminal to ask on. Open the connection once in one:\n      {quote_all(command)}\n"
                "    and then run this again; every later call rides it."
            )
        return HostUnreachable(f"{self.host}: {sentence}.{_render_output(said)}\n  To do: {remedy}")

    def _path_option(self) -> tuple[str, ...]:
        """The ControlPath that the user's configuration gives to this host, else a socket in the private folder."""
        if self._socket is None:
            answer = self._ask(["-G"])
            if answer.returncode != 0:
                raise self._refused(answer.stderr, terminal=True)
            pairs = (line.partition(" ")[::2] for line in answer.stdout.splitlines())
            users = [value for key, value in pairs if key == "controlpath" and value != "none"]
            self._socket = Path(users[0]) if users else self._private_folder() / self._name
        return ("-o", f"ControlPath={str(self._socket).replace('%', '%%')}")

    def _private_folder(self) -> Path:
        """A folder for sockets, short enough for their paths (sun_path holds 104 bytes, ssh adds 17 for a while): in
        the user's runtime folder (pam_systemd(8)), else in /tmp, since $TMPDIR may be too long."""
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        fits = runtime and len(runtime) < 40 and os.access(runtime, os.W_OK)
        usual = Path(runtime) / "shardway" if fits else Path("/tmp") / f"shardway-{os.getuid()}"
        folder = self._around.folder or usual
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        state = folder.lstat()
        if state.st_uid != os.getuid() or state.st_mode & 0o077 or folder.is_symlink():
            raise SiteError(
                f"{folder} keeps connections, and is not yours or open to others (mode {state.st_mode & 0o777:o}).\n"
                f"  To do: remove it, or close it with `chmod 700 {quote(str(folder))}`."
            )
        return folder

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


def _no_ssh(words: Sequence[str]) -> SiteError:
    return SiteError(
        f"there is no program {words[0]!r} on this machine's PATH.\n"
        "  To do: install the OpenSSH client, or run Shardway on the login node itself."
    )


# --- several commands in one script

BOOTSTRAP = "exec bash --norc -s"
"""What the login shell runs: words that every shell reads alike."""

_KILLED = (124, 137)
"""Exit codes of coreutils' `timeout`: command ended, or killed."""

_LOGIN = """\
# Commands of a scheduler stand in PATH only after a login. A profile may print, read or run what it likes: only the
# variables that it leaves are taken.
eval "$(bash --login -c 'echo; echo '$mark'; export -p' </dev/null 2>/dev/null | sed "1,/$mark/d")" 2>/dev/null
"""

_PROLOGUE = """\
mark={mark}
{functions}
{login}left_out=$(for name in $(compgen -e); do
  case $name in {options}) printf '%s=%s\\n' "$name" "${{!name//$'\\n'/ }}" ;; esac
done)
drop_variables {patterns}
limit=; command -v timeout >/dev/null 2>&1 && limit="timeout -k 5 {limit_s}"
ends() {{ set -- "$1" $? $SECONDS; printf %s:%s:%s:%s: $mark "$@"; printf %s:%s:%s:%s: $mark "$@" >&2; SECONDS=0; }}
ends 0
"""


class Exchange:
    """A script of commands, each of which has `limit_s`. Its outputs have a mark before the first command and after
    each, with the number of the command, its exit code and the seconds that it took."""

    def __init__(self, commands: Sequence[str], limit_s: float) -> None:
        mark = f"shardway-{secrets.token_hex(16)}"
        self.marks = re.compile(mark.encode() + rb":\d+:(\d+):(\d+):")
        options, limit = "|".join(list_option_patterns()), math.ceil(limit_s)
        drop, patterns = _read_drop()
        prologue = _PROLOGUE.format(
            mark=mark, limit_s=limit, options=options, functions=drop, patterns=patterns, login=_LOGIN
        )
        lines = [f"{command}\nends {number}" for number, command in enumerate(commands, 1)]
        # After the script, only its commands read the input.
        self.script = "\n".join([prologue + "{", *lines, "exit 0", "}", ""]).encode("utf-8", "surrogateescape")

    def list_texts(self, output: bytes) -> list[str]:
        """The texts around the marks: what precedes the first, then the output of each command."""
        return [_text(piece) for piece in self.marks.split(output)[::3]]

    def describe(self, err: bytes) -> str:
        """What ssh, a profile or a login shell printed outside the commands."""
        return _text(self.marks.sub(b"", err))


def _read_drop() -> tuple[str, str]:
    """The shell function that drops variables of other jobs, and its words."""
    patterns = (quote_shell(pattern) for ranks in (True, False) for pattern in list_patterns(of_ranks=ranks))
    return read_block("lib", "drop_variables").text, " ".join(patterns)


# --- the host

_ANSWER_S = 15.0
"""Seconds that the network and a slow profile may take besides the command itself."""
_WRITE_S = 120.0
_COPY_S = 1800.0
_EXISTS = 17


class SshHost(Host):
    """A machine in ssh's words: "alice@login.example.org", or a name of ~/.ssh/config."""

    def __init__(self, name: str, surroundings: ConnectionContext | None = None) -> None:
        self.name = name
        self.connection = Connection(name, surroundings or ConnectionContext())

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        return self._run([words], timeout_s, stdin)[0]

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        """Those that do not start in time are marked as timed out."""
        return self._run(commands, timeout_s) if commands else []

    def follow(self, words: Sequence[str]) -> Iterator[str]:
        """Raises HostUnreachable if it is cut off."""
        # The command ends when the input of the script does, so that a lost connection leaves nothing running. Job
        # control gives it a process group of its own, which ends as one. The watch ends first: it must never kill a
        # process that got the same number since.
        exchange = Exchange(
            [
                f"exec 3<&0; set -m; {{ exec {quote_all(words)} </dev/null 2>/dev/null 3<&-; }} & child=$!\n"
                "{ cat <&3; kill -- -$child; } >/dev/null 2>&1 & watch=$!\n"
                "{ wait $child; code=$?; kill -- -$watch; } 2>/dev/null; (exit $code)"
            ],
            0.0,
        )
        command, pipe = self.connection.command([BOOTSTRAP]), subprocess.PIPE
        with tempfile.TemporaryFile() as messages:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=messages)
            try:
                with contextlib.suppress(BrokenPipeError):
                    if process.stdin:
                        process.stdin.write(exchange.script)
                        process.stdin.flush()
                begun = False
                for line in process.stdout or ():
                    *before, text = exchange.list_texts(line)
                    ended = before[0] if begun and before else before[1] if len(before) > 1 else None
                    if ended is not None:
                        if ended:
                            yield ended
                        return
                    begun = begun or bool(before)
                    if begun and text:
                        yield text.removesuffix("\n")
            finally:
                with process, contextlib.suppress(BrokenPipeError):
                    process.terminate()
                    if process.stdin:
                        process.stdin.close()  # the end of its input ends what ssh runs on the host
            messages.seek(0)
            said = exchange.describe(messages.read())
            raise self.connection.lost("the connection broke while it was followed", said)

    def attach(self, words: Sequence[str], *, terminal: bool) -> list[str]:
        """As base64, which every login shell reads alike; the input stays the person's. A code of 255 is ssh's own."""
        drop, patterns = _read_drop()
        mark = f"shardway-{secrets.token_hex(16)}"
        script = f"mark={mark}\n{_LOGIN}{drop}\ndrop_variables {patterns}\nexec {quote_all(words)}\n"
        packed = base64.b64encode(script.encode("utf-8", "surrogateescape")).decode()
        command = self.connection.command([f"exec bash --norc -c 'eval \"$(echo {packed} | base64 -d)\"'"])
        cut = command.index("--")
        return [*command[:cut], *(["-t"] if terminal else []), *command[cut:]]

    def read_files(self, paths: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
        done = self.run_many([["cat", "--", str(path)] for path in paths])
        return {path: ended.out for path, ended in zip(paths, done, strict=True) if ended.ok}

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        """In one exchange; each under a temporary name in its folder, which is renamed when the file is complete."""
        token, commands = secrets.token_hex(8), []
        for path, text in files.items():
            folder, _, name = str(path).rpartition("/")
            temporary = quote(f"{folder}/.{name}.{token}.tmp")
            mode = f" && chmod +x {temporary}" if path in executable else ""
            commands.append(
                f"mkdir -p -- {quote(folder or '/')} && printf %s {quote(text)} >{temporary}{mode} && "
                f"mv -f -- {temporary} {quote(str(path))} || {{ rm -f -- {temporary}; false; }}"
            )
        for path, ended in zip(files, self._exchange(commands, _WRITE_S), strict=False):
            if ended.code != 0:
                raise UserError(refuse_to_write(path, _reason(ended), self.name))

    def copy_tree(self, source: Path, target: PurePosixPath) -> None:
        """As one stream of tar and gzip after the script, unpacked beside the target and then renamed."""
        folder, _, name = str(target).rpartition("/")
        there, temporary = quote(str(target)), quote(f"{folder}/.{name}.{secrets.token_hex(8)}.tmp")
        unpack = f"gzip -dc | tar -x -o -f - -C {temporary}"
        command = (
            f"if [ -e {there} ] || [ -L {there} ]; then (exit {_EXISTS}); else mkdir -p -- {temporary} && "
            f"(set -o pipefail; {unpack}) && mv -- {temporary} {there} || {{ rm -rf -- {temporary}; false; }}; fi"
        )
        [ended] = self._exchange([command], _COPY_S, lambda file: _pack(source, file))
        if ended.code != 0:
            reason = "it exists already" if ended.code == _EXISTS else _reason(ended)
            raise UserError(refuse_to_write(target, reason, self.name))

    def expand_many(self, paths: Sequence[str]) -> list[PurePosixPath]:
        """In one exchange, or in none if all are plain; a relative path is below the home folder."""
        unknown = [path for path in paths if not path.startswith("/") or "$" in path]
        names = list(dict.fromkeys(name for path in unknown for name in ("HOME", *list_variables(path))))
        done = self.run_many([["printenv", name] for name in names])
        values = {name: ended.out.removesuffix("\n") for name, ended in zip(names, done, strict=True) if ended.ok}
        return [fill_in(path, values, values.get("HOME", "/"), self.name) for path in paths]

    def read_options(self) -> dict[str, str]:
        [done] = self._exchange(['printf %s "$left_out"'], _ANSWER_S, keep_late=True)
        return dict(line.split("=", 1) for line in done.out.splitlines() if "=" in line)

    # --- exchanges

    def _run(self, commands: Sequence[Sequence[str]], timeout_s: float, stdin: str = "") -> list[Done]:
        """How each command ended; `stdin` is its input (empty for none)."""
        source = f"printf %s {quote(stdin)} | " if stdin else ""
        empty = "" if stdin else " </dev/null"
        texts = [f"{source}$limit {quote_all(words)}{empty}" for words in commands]
        done = self._exchange(texts, timeout_s, keep_late=True)
        done += [Done((), -1, "", "", timed_out=True)] * (len(commands) - len(done))
        return [replace(ended, words=tuple(words)) for words, ended in zip(commands, done, strict=True)]

    def _exchange(
        self,
        commands: Sequence[str],
        timeout_s: float,
        payload: Callable[[IO[bytes]], None] | None = None,
        keep_late: bool = False,
    ) -> list[Done]:
        """Send one script and split its answer; `keep_late`: return what arrived in time, the last of it as timed out.

        Raises HostUnreachable if the script did not start, or if its end did not come back.
        """
        exchange = Exchange(commands, timeout_s)
        code: int | None = None  # stays so if the time limit is reached
        with tempfile.TemporaryFile() as script:
            script.write(exchange.script)
            if payload:
                payload(script)
            script.seek(0)
            words, limit_s = self.connection.command([BOOTSTRAP]), timeout_s + _ANSWER_S
            try:
                answer = subprocess.run(words, stdin=script, capture_output=True, timeout=limit_s)
                code, out, err = answer.returncode, answer.stdout, answer.stderr
            except subprocess.TimeoutExpired as error:
                out, err = error.stdout or b"", error.stderr or b""
        ends = [(int(ended), int(seconds)) for ended, seconds in exchange.marks.findall(out)]
        said = exchange.describe(err)
        if not ends and code is None:
            raise self.connection.lost(f"no answer came within {limit_s:.0f} s", said)
        if not ends and code == 255:
            raise self.connection.lost("the connection broke before it answered", said)
        if not ends:
            raise HostUnreachable(
                f"{self.name}: its login shell did not start bash (code {code}).\n"
                f"    {said.strip() or 'It said nothing.'}\n"
                "  To do: name a login node, where commands may be run; a machine for file transfers alone is none."
            )
        outs, errs = exchange.list_texts(out), [*exchange.list_texts(err), *[""] * len(commands)]
        done = []
        for number, (ended, seconds) in enumerate(ends[1:], 1):
            late = ended in _KILLED and seconds >= math.ceil(timeout_s)
            done.append(Done((), ended, outs[number], errs[number], late))
        if len(done) < len(commands):
            if code is not None or not keep_late:
                what = "the connection broke in the middle of an answer" if code is not None else "it took too long"
                raise self.connection.lost(what, said)
            number = len(done) + 1
            done.append(Done((), -1, outs[number], errs[number], timed_out=True))
        return done


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


def _reason(ended: Done) -> str:
    """Why a command failed: the end of its first line of output ("... : No space left on device")."""
    lines = [line for line in ended.err.splitlines() if line.strip()]
    reason = lines[0].rpartition(": ")[2].strip() if lines else f"code {ended.code}"
    # GNU tar counts the bytes when a disk is full, and does not name the reason.
    return f"no space left ({reason})" if reason.startswith("Wrote only") else reason


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")
