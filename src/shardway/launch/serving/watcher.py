"""The program of a job that serves: finds a port, starts the server, awaits its health, watches it, ends it.

It is copied into the attempt's folder and runs there with the job's own Python, which need not have Shardway: the image
of an inference server has none. So it imports the standard library alone, and runs on Python 3.8.

    python3 serve.py serve.json

Where its files are stands in `serve.json`: a record that it keeps current for `shardway status`, the key where the
server checks one, what the server prints, and the result of the attempt.

Invariants:
- The record appears whole or not at all, and holds no secret; the key is in files of mode 0600 alone.
- The server and all its processes are gone when this program ends, whatever ended it.
- A server counts as ready only while the socket of its port belongs to this user: on a shared node another user may
  have taken the port meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import FrameType
from typing import IO, Any

LOOK_S = 0.1
HEALTH_S = 5.0
"""How often the health is asked for once it is ready, in seconds; while it starts, each LOOK_S."""
LOST = 3
"""Unanswered questions in a row after which the health counts as lost."""
GRACE_S = 20.0
"""How long the server may take to end in order."""
PORTS = 3
"""Ports that are tried where another program holds them."""
LINES = 20
IN_USE = re.compile(r"address already in use|EADDRINUSE|Errno 98", re.IGNORECASE)
_PREFIX = re.compile(r"^\s*(\([^)]*\)\s*)?((ERROR|CRITICAL|WARNING|INFO)\b[\d: .-]*)?(\[[^\]]*\]\s*)*")
_EXCEPTION = re.compile(r"(\w+\.)*\w*(Error|Exception)\b: ?\S|.*out of memory", re.IGNORECASE)
_COMPLAINT = re.compile(r"(error|fatal)\b[^(]", re.IGNORECASE)
_VAGUE = re.compile(r"see (the )?(root cause|stack trace|above)|core initialization failed", re.IGNORECASE)


# --- ports


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True


def find_port(host: str, wanted: int, taken: Sequence[int] = ()) -> int:
    """The wanted port if it is free, else one that the kernel names."""
    if wanted and wanted not in taken and is_free(host, wanted):
        return wanted
    while True:
        with socket.socket() as trial:
            trial.bind((host, 0))
            port = trial.getsockname()[1]
        if port not in taken:
            return int(port)


def is_ours(port: int) -> bool:
    """Whether the socket that listens on a port belongs to this user; True where the kernel shows none."""
    owners: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        owners |= {row[7] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    return not owners or str(os.getuid()) in owners


# --- files


def write_private(path: str, text: str) -> None:
    """A file that no other user can read, at no moment."""
    if os.path.exists(path):
        os.unlink(path)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def write_whole(path: str, record: dict[str, Any]) -> None:
    """JSON, complete or not at all."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)


def read_last_lines(path: str, key: str = "") -> list[str]:
    """The last lines that the server printed, the key masked."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - (1 << 16)))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    text = text.replace(key, "***") if key else text
    return [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()][-200:]


def find_reason(lines: Sequence[str]) -> str:
    """The line that explains an end: the last one that names an error and does not refer to another, else the last."""
    plain = [_PREFIX.sub("", line).strip() for line in lines]
    for form in (_EXCEPTION, _COMPLAINT):
        if found := [line for line in plain if form.match(line) and not _VAGUE.search(line)]:
            return found[-1][:300]
    return next((line for line in reversed(plain) if line), "")[:300]


# --- the server


class Watcher:
    """One server, from its start to its end."""

    def __init__(self, spec: dict[str, Any], stop_file: str) -> None:
        self.spec, self.stop_file = spec, stop_file
        self.log: str = spec["log"]
        self.key = secrets.token_urlsafe(32) if spec["key_variable"] or spec["key_config"] else ""
        self.began = time.time()
        self.asked = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.record: dict[str, Any] = {
            "format": 1,
            "state": "starting",
            "server": spec["server"],
            "model": spec["request_name"],
            "path": spec["path"],
            "tp": spec["tp"],
            "node": socket.gethostname(),
            "address": spec["host"],
            "port": 0,
            "health": spec["health"],
            "healthy": False,
            "key_file": spec["api_key"] if self.key else "",
            "ready_s": None,
            "reason": "",
            "lines": [],
            "updated": self.began,
        }

    def note(self, **facts: Any) -> None:
        """Keep the record current. A full disk does not end a server that answers."""
        self.record.update(facts, updated=time.time())
        try:
            write_whole(self.spec["serving"], self.record)
        except OSError as error:
            report(f"{self.spec['serving']} cannot be written: {error}")

    def run(self) -> int:
        """The exit code of the job's program."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, self._hear)
        if self.key:
            write_private(self.spec["api_key"], self.key + "\n")
        self.note()
        if not self._export():
            return self._end_early()
        taken: list[int] = []
        while True:
            port = find_port(self.spec["host"], self.spec["port"], taken)
            if self.spec["port"] and port != self.spec["port"]:
                report(f"port {self.spec['port']} is in use on this node, so it is port {port}")
            self._start(port)
            code = self._watch()
            self._stop()
            lines = read_last_lines(self.log, self.key)
            ready = self.record["ready_s"] is not None
            if self.asked or ready or code is None:
                break
            if len(taken) + 1 < PORTS and any(map(IN_USE.search, lines)):
                taken.append(port)
                report(f"port {port} was taken by another program meanwhile: another one is tried")
                continue
            break
        if self.asked:
            report(f"the server has ended: {self.asked}")
            self.note(state="ended", healthy=False, reason=self.asked)
            return 0
        when = "after it had been ready" if ready else "before it was ready"
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        if code is None:
            how, when = self.record["reason"], ""
        why = find_reason(lines)
        reason = " ".join(filter(None, ("{} {}".format(self.spec["server"], how), when))) + (": " + why if why else "")
        return self._fail(reason, lines)

    def _fail(self, reason: str, lines: Sequence[str] = ()) -> int:
        report(reason)
        self.note(state="ended", healthy=False, reason=reason, lines=list(lines)[-LINES:])
        self._write_result(reason)
        return 1

    def _end_early(self) -> int:
        if self.asked:
            self.note(state="ended", reason=self.asked)
            return 0
        return 1

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or f"signal {number} came"

    def _look_for_stop(self) -> str:
        if not self.asked and os.path.exists(self.stop_file):
            try:
                with open(self.stop_file, encoding="utf-8", errors="replace") as file:
                    self.asked = "asked to stop: " + " ".join(file.read().split())[:200]
            except OSError:
                self.asked = "asked to stop"
        return self.asked

    def _export(self) -> bool:
        """Write the checkpoint of a run as the folder that servers read, unless it is there already."""
        words = self.spec["export"]
        if not words or os.path.exists(os.path.join(self.spec["path"], "config.json")):
            return True
        report("exporting the checkpoint to {}".format(self.spec["path"]))
        temporary = f"{self.spec['path']}.{os.getpid()}"
        os.makedirs(os.path.dirname(temporary), exist_ok=True)
        log = self.spec["export_log"]
        with open(log, "wb") as out:
            words = [temporary if word == "{folder}" else word for word in words]
            self.process = self._spawn(words, out, dict(os.environ))
        while (code := self.process.poll()) is None and not self._look_for_stop():
            time.sleep(LOOK_S)
        self._stop()
        if code == 0 and not self.asked:
            try:
                os.rename(temporary, self.spec["path"])
            except OSError as error:
                if not os.path.exists(os.path.join(self.spec["path"], "config.json")):  # another job was quicker
                    self._fail("the exported model cannot be put at {}: {}".format(self.spec["path"], error))
                    return False
            return True
        shutil.rmtree(temporary, ignore_errors=True)
        if not self.asked:
            lines = read_last_lines(log)
            self._fail(f"the checkpoint could not be exported: {find_reason(lines)}", lines)
        return False

    def _start(self, port: int) -> None:
        key_file = self.spec["server_key"]
        if self.spec["key_config"]:
            write_private(key_file, self.spec["key_config"].replace("{key}", self.key))
        values = {"{port}": str(port), "{host}": self.spec["host"], "{key_file}": key_file}
        words = [values.get(word, word) for word in self.spec["words"]]
        words[0] = sys.executable if words[0] == "python3" and sys.executable else words[0]
        environment = dict(self.spec["environment"], **os.environ)
        for name in self.spec["drops"]:
            environment.pop(name, None)
        if self.spec["key_variable"]:
            environment[self.spec["key_variable"]] = self.key
        self.note(state="starting", port=port)
        report(f"starting {self.spec['server']} on port {port} of {self.spec['host']}")
        with open(self.log, "wb") as out:
            self.process = self._spawn(words, out, environment)

    def _spawn(self, words: list[str], out: IO[bytes], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        def prepare() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: it does not outlive this program

        try:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as error:
            out.write((f"{words[0]}: {error}\n").encode())
            return subprocess.Popen(["false"], start_new_session=True)

    def _watch(self) -> int | None:
        """Until it ends by itself (its exit code), or is to be ended (None)."""
        silent, asked_at = 0, 0.0
        start = time.monotonic()
        while True:
            if self._look_for_stop():
                return None
            code = self.process.poll() if self.process is not None else None
            if code is not None:
                return code
            ready = self.record["ready_s"] is not None
            if time.monotonic() - asked_at >= (HEALTH_S if ready else LOOK_S):
                healthy = self._is_healthy()
                asked_at = time.monotonic()
                silent = 0 if healthy else silent + 1
                if healthy and not ready:
                    self.note(state="ready", healthy=True, ready_s=round(time.time() - self.began, 1))
                    report("ready after %.0f s" % (time.time() - self.began))
                elif healthy and not self.record["healthy"]:
                    self.note(healthy=True, reason="")
                    report("it answers again")
                elif ready and self.record["healthy"] and silent >= LOST:
                    why = f"its health was lost: {silent} questions in a row had no answer"
                    self.note(healthy=False, reason=why, lines=read_last_lines(self.log, self.key)[-LINES:])
                    report(why)
                elif not ready and time.monotonic() - start > self.spec["start_s"]:
                    self.record["reason"] = "was not ready within {:g} s".format(self.spec["start_s"])
                    return None
            time.sleep(LOOK_S)

    def _is_healthy(self) -> bool:
        address = "127.0.0.1" if self.spec["host"] == "0.0.0.0" else self.spec["host"]
        url = f"http://{address}:{self.record['port']}{self.spec['health']}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=max(HEALTH_S, 1.0)) as answer:
                return answer.status == 200 and is_ours(self.record["port"])
        except (OSError, ValueError, urllib.error.URLError):
            return False

    def _stop(self) -> None:
        """In order, and after a grace by force; whatever of its group is left goes too."""
        process = self.process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            until = time.monotonic() + self.spec["grace_s"]
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            if process.poll() is None:
                report("it did not end within {:g} s of SIGTERM, and is killed".format(self.spec["grace_s"]))
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _write_result(self, reason: str) -> None:
        """How the attempt ended, in the words of the server; the job script leaves a result that is there."""
        path = self.spec["result"]
        record = {
            "format": 1,
            "state": "out_of_memory" if re.search("out of memory", reason, re.IGNORECASE) else "crashed",
            "reason": reason,
            "step": 0,
            "exit_code": 1,
            "failure": reason[:120],
            "job": os.environ.get("SHARDWAY_JOB", ""),
            "host": self.record["node"],
            "by": "serve.py",
            "ended": time.time(),
        }
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(json.dumps(record, indent=1) + "\n")
            os.link(temporary, path)
        except OSError:  # the job script then writes what it knows
            pass
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)


def report(line: str) -> None:
    """A line of the job's log."""
    sys.stdout.write(f"shardway serve: {line}\n")
    sys.stdout.flush()


def main(path: str) -> int:
    """Serve as the file `path` says, until the stop file of the job appears; returns the exit code."""
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    os.makedirs(os.path.dirname(spec["log"]), exist_ok=True)
    return Watcher(spec, spec["stop"]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
