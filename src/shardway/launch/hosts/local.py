"""This machine as a host: commands are processes, files are files.

Commands get the variables of this process except those that mean something for another job (`inherited`).

Invariant: a command that ran out of time has ended with all its processes, except one that the kernel does not release
(a hung mount), which is left behind without waiting. No shell is used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from shardway.errors import UserError
from shardway.inherited import list_options, strip
from shardway.launch.hosts.base import MISSING, Done, Host, fill_in, list_variables
from shardway.places import find_home, is_there_as_written
from shardway.refusals import ANOTHER_FOLDER, find_remedy
from shardway.rundir.file_io import write_whole

_GRACE_S = 2.0


class LocalHost(Host):
    """This machine."""

    name = ""

    def run(self, words: Sequence[str], *, timeout_s: float = 30.0, stdin: str = "") -> Done:
        try:
            process = _start(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        except FileNotFoundError:
            return Done(tuple(words), MISSING, "", f"{words[0]}: no such program\n")
        except (OSError, ValueError) as error:  # ValueError: for a word that no program can be given
            reason = error.strerror if isinstance(error, OSError) else error
            return Done(tuple(words), 126, "", f"{words[0]}: {reason}\n")
        late = False
        try:
            out, err = process.communicate(stdin.encode("utf-8", "surrogateescape"), timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            _end_group(process)
            try:
                out, err = process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired as error:  # a child that left its session may keep the pipes open
                out, err = error.output or b"", error.stderr or b""
        except BaseException:
            _end_group(process)
            raise
        finally:
            _let_go(process)
        # A process that was left behind counts as killed.
        code = -signal.SIGKILL if process.returncode is None else process.returncode
        code = code if code >= 0 else 128 - code
        return Done(tuple(words), code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), late)

    def run_many(self, commands: Sequence[Sequence[str]], *, timeout_s: float = 60.0) -> list[Done]:
        """Those that the time does not reach are marked as timed out."""
        end = time.monotonic() + timeout_s
        done = []
        for words in commands:
            left = end - time.monotonic()
            done.append(self.run(words, timeout_s=left) if left > 0 else Done(tuple(words), -1, "", "", timed_out=True))
        return done

    def follow(self, words: Sequence[str]) -> Iterator[str]:
        """None where the program is missing."""
        try:
            process = _start(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError:
            return
        try:
            for line in process.stdout or ():
                yield line.decode("utf-8", "replace").removesuffix("\n")
        finally:
            _end_group(process)
            _let_go(process)

    def attach(self, words: Sequence[str], *, terminal: bool) -> list[str]:
        """The same words: a process of this machine inherits them."""
        return list(words)

    def read_options(self) -> dict[str, str]:
        return list_options(os.environ)

    def read_files(self, paths: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
        found = {}
        for path in paths:
            with contextlib.suppress(OSError):
                found[path] = Path(path).read_bytes().decode("utf-8", "replace")
        return found

    def write_files(self, files: Mapping[PurePosixPath, str], *, executable: Sequence[PurePosixPath] = ()) -> None:
        for path, text in files.items():
            here = Path(path)
            try:
                here.parent.mkdir(parents=True, exist_ok=True)
                write_whole(here, text)
                if path in executable:
                    mode = here.stat().st_mode
                    here.chmod(mode | (mode & 0o444) >> 2)  # execute permission where there is read permission
            except OSError as error:
                raise UserError(refuse_to_write(path, error.strerror or str(error))) from None

    def copy_tree(self, source: Path, target: PurePosixPath) -> None:
        there = Path(target)
        if there.exists() or there.is_symlink():
            raise UserError(refuse_to_write(target, "it exists already"))
        temporary = there.with_name(f".{there.name}.{uuid.uuid4().hex}.tmp")
        try:
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, temporary, symlinks=True)
            temporary.rename(there)
        except shutil.Error as errors:  # one entry a file: source, target, reason
            reason = str(errors.args[0][0][2]).partition("] ")[2].partition(":")[0] or str(errors)
            raise UserError(refuse_to_write(target, reason)) from None
        except OSError as error:
            raise UserError(refuse_to_write(target, error.strerror or str(error))) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def expand_many(self, paths: Sequence[str]) -> list[PurePosixPath]:
        expanded = []
        for path in paths:
            if is_there_as_written(path):
                expanded.append(PurePosixPath(os.path.normpath(os.path.join(os.getcwd(), path))))
                continue
            values = {name: os.environ.get(name, "") for name in list_variables(path)}
            if "HOME" in values:
                values["HOME"] = values["HOME"] or str(find_home() or "/")  # as bash has it
            expanded.append(fill_in(path, values, os.getcwd(), self.name))
        return expanded


def refuse_to_write(path: PurePosixPath, reason: str, host: str = "") -> str:
    """The message of a file or folder that cannot be written."""
    where = f" on {host}" if host else ""
    return f"{path}{where} cannot be written: {reason}.\n  To do: {find_remedy(reason, ANOTHER_FOLDER)}."


def _start(words: Sequence[str], stdin: int, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(words), stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, env=strip(os.environ)
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its session that is still there: SIGTERM, then SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes of a process that has ended or was killed, and take note of its end where that comes soon."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # a full pipe whose reader is gone
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
