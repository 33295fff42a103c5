"""A host behind the user's own ssh: commands, files and folders over one shared connection.

Invariant: a command's exit code is the one that its own mark carries; where no mark came back the connection failed,
and that is told as such, never as a code of the command. This module must not make connections itself.

Needed there: bash and the usual tar, gzip, sed and mv; no Python.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import secrets
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from shardway.errors import UserError
from shardway.launch.hosts.base import Done, HostUnreachable
from shardway.launch.hosts.connection import Connection, ConnectionContext
from shardway.launch.hosts.exchange import (
    BOOTSTRAP,
    Command,
    Exchange,
    ScriptCommandResult,
    follow_command,
    options_command,
    run_command,
    unpack_command,
    write_command,
)
from shardway.launch.hosts.expansion import fill_in, list_variables
from shardway.launch.hosts.local import refuse_to_write

_ANSWER_S = 15.0
"""Seconds that the way there and back, and a slow profile, may take besides the command itself."""
_WRITE_S = 120.0
_COPY_S = 1800.0
_EXISTS = 17


class SshHost:
    """A machine as ssh knows it: "alice@login.example.org", or a name of ~/.ssh/config."""

    def __init__(self, name: str, surroundings: ConnectionContext | None = None) -> None:
        self.name = name
        self.connection = Connection(name, surroundings or ConnectionContext())

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        """Run a command to its end, or for `timeout_s` seconds. Raises HostUnreachable."""
        return self._run([run_command(words, stdin)], timeout_s)[0]

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        """Run several commands in a row in one exchange; those that the time does not reach are marked as timed out."""
        return self._run([run_command(words) for words in commands], timeout_s) if commands else []

    def follow(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the lines of a command's standard output as they come. Raises HostUnreachable when it is cut off."""
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
        """The text of each of these files that can be read, in one exchange."""
        done = self.run_many([["cat", "--", str(path)] for path in paths])
        return {path: ended.out for path, ended in zip(paths, done, strict=True) if ended.ok}

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        """Write whole files in one exchange. Raises UserError where the file system refuses one, HostUnreachable."""
        token = secrets.token_hex(8)
        commands = [write_command(str(path), text, path in executable, token) for path, text in files.items()]
        for path, ended in zip(files, self._exchange(commands, _WRITE_S), strict=False):
            if ended.code != 0:
                raise UserError(refuse_to_write(path, _reason(ended), self.name))

    def copy_tree(self, source: Path, target: PurePosixPath) -> None:
        """Copy a folder with its links as one stream. Raises UserError where the target exists or cannot be written."""
        command = unpack_command(str(target), secrets.token_hex(8))
        [ended] = self._exchange([command], _COPY_S, lambda file: _pack(source, file))
        if ended.code != 0:
            reason = "it exists already" if ended.code == _EXISTS else _reason(ended)
            raise UserError(refuse_to_write(target, reason, self.name))

    def expand(self, path: str) -> PurePosixPath:
        """An absolute path there; a relative one is below the home folder there. Raises UserError, HostUnreachable."""
        return self.expand_many([path])[0]

    def expand_many(self, paths: Sequence[str]) -> list[PurePosixPath]:
        """Absolute paths there, in their order and in one exchange, or none where all are plain."""
        names = list(dict.fromkeys(name for path in paths for name in _list_unknown(path)))
        done = self.run_many([["printenv", name] for name in names])
        values = {name: ended.out.removesuffix("\n") for name, ended in zip(names, done, strict=True) if ended.ok}
        return [fill_in(path, values, values.get("HOME", "/"), self.name) for path in paths]

    def read_options(self) -> dict[str, str]:
        """Variables there that hold options for sbatch, and that no command gets. Raises HostUnreachable."""
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
        """Send one script and take its answer apart; `keep_late`: what came back in time is worth something.

        Raises HostUnreachable where the script was not begun, or its end did not come back.
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
    """The variables without which a path is not absolute; a relative one is below HOME."""
    return [] if path.startswith("/") and "$" not in path else ["HOME", *list_variables(path)]


def _call(words: Sequence[str], stdin: IO[bytes], timeout_s: float) -> tuple[int | None, bytes, bytes]:
    """Exit code (None: its time was over) and outputs of a process."""
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
    """End an ssh; the end of its input ends what it runs there."""
    with process, contextlib.suppress(BrokenPipeError):
        process.terminate()
        if process.stdin:
            process.stdin.close()


def _pack(source: Path, file: IO[bytes]) -> None:
    """A folder as gzipped tar in the form that GNU, BSD and busybox tar read; owners are left out."""

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
    """What was said outside of the commands: by ssh, a profile or a login shell."""
    return _text(re.sub(re.escape(exchange.mark.encode()) + rb":\d+:\d+:\d+:", b"", err))


def _reason(ended: ScriptCommandResult) -> str:
    """Why a command failed: the end of the first line that it printed ("... : No space left on device")."""
    lines = [line for line in _text(ended.err).splitlines() if line.strip()]
    reason = lines[0].rpartition(": ")[2].strip() if lines else f"code {ended.code}"
    # GNU tar counts the bytes of a full disk and does not name it.
    return f"no space left ({reason})" if reason.startswith("Wrote only") else reason


def _text(output: bytes) -> str:
    return output.decode("utf-8", "replace")
