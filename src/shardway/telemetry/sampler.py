"""The process that samples a node: `python -m shardway.telemetry.sampler KEY=VALUE ...`, one a node.

It ends when the process that started it ends, when the root process of the job has ended, when the file `until` is
there, or when its standard input is closed (`pipe=yes`). Signals that schedulers send to every process of a job do not
end it, since ranks may save for minutes after them.

    into=FOLDER      where the file of this host is
    every_s=1.0      seconds between samples
    host= node= job= attempt=   what the samples are of
    top=PID          the root process of the job on this node; 0: it is on another node
    marker=NAME=VALUE           in the environment of every process of the job
    until=PATH       a file that is there when the job has ended
    after=SIZE:PATH  nothing is written before this file has another size (-1: it was not there)
    pipe=yes         standard input is a pipe from the process that started it
    ranks=FIRST:COUNT:FOLDER    heartbeats of the ranks of this node, the first of which is rank FIRST

Invariants:
- It imports the standard library and the accelerators' own library alone, runs at low priority, and writes nothing but
  its file, and one line on standard error where that is not possible.
- It never outlives the job by more than LOOK_S and one sample, nor fails it: its exit code is 0.
- What a sample costs is bounded: the processes of the job are read with every few samples, of what else is read the
  number of files does not grow with them.
- A driver that hangs costs the accelerators' values, and host values go on (`devices.DeviceThread`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from shardway.telemetry.activity import RankReader
from shardway.telemetry.devices import NAN, DeviceState, DeviceThread
from shardway.telemetry.host import HostReader
from shardway.telemetry.store import NodeInfo, TelemetryWriter

LOOK_S = 1.0
"""How often it looks whether it has to end."""
HANGS_S = 10.0
"""After so long a library of devices that does not answer is in `missing`."""
GIVE_UP_S = 600.0
"""After so long in which nothing could be written it ends."""
PROCESSES_EACH, PROCESSES_S = 5, 5.0
"""Processes are read with each so many-th sample, and at least so often (seconds), or with each sample."""
MOST_SHARE = 0.8
"""How much of an interval may pass until devices have answered."""


@dataclass(frozen=True)
class SamplerOptions:
    """What the words of the command line say; see the module."""

    into: str
    every_s: float = 1.0
    host: str = ""
    node: int = 0
    job: str = ""
    attempt: int = 0
    top: int = 0
    marker: str = ""
    until: str = ""
    after: str = ""
    pipe: bool = False
    ranks: tuple[str, int, int] = ("", 0, 0)  # the folder of their heartbeats, the first one, how many


def parse_options(words: Iterable[str]) -> SamplerOptions:
    """Raises ValueError for a word that is no KEY=VALUE, or a number that is none."""
    given = dict(word.split("=", 1) for word in words)
    first, count, folder = given.get("ranks", "0:0:").split(":", 2)
    return SamplerOptions(
        into=given["into"],
        every_s=max(0.02, float(given.get("every_s", 1.0))),
        host=given.get("host") or os.uname().nodename,
        node=int(given.get("node") or 0),
        job=given.get("job", ""),
        attempt=int(given.get("attempt") or 0),
        top=int(given.get("top") or 0),
        marker=given.get("marker", ""),
        until=given.get("until", ""),
        after=given.get("after", ""),
        pipe=given.get("pipe") == "yes",
        ranks=(folder, int(first), int(count)),
    )


class NodeSampler:
    """Takes samples of this node and hands them to the writer."""

    def __init__(self, options: SamplerOptions) -> None:
        self._options = options
        each = min(PROCESSES_EACH, int(PROCESSES_S / options.every_s))
        self.host = HostReader(options.top, options.marker, options.job, leave_out=(os.getpid(),), processes_each=each)
        self._ranks = RankReader(*options.ranks)
        self._devices = DeviceThread(os.environ)
        self._devices.start(time.monotonic(), wait_s=HANGS_S / 2)
        self._started, state = time.time(), self._devices.state
        self._described = self._describe(state)
        self._writer = TelemetryWriter(
            Path(options.into), self._info(state), self._series(state), may_write=_Begin(options.after)
        )
        self._failing_since: float | None = None
        self._said = False

    def sample(self, now: float) -> bool:
        """Take one sample, `now` by a clock that is never set. Returns False once writing is hopeless."""
        devices, state = self._devices, self._devices.state
        if state.series:
            devices.ask(now, self.host.processes.pids)
        unix_s, values = time.time(), self.host.read(now)
        values += self._ranks.read()
        if state.series:
            hangs = devices.hangs_s(now)
            found = devices.collect(0.0 if hangs else self._options.every_s * MOST_SHARE)
            values += found if found is not None else [NAN] * len(state.series)
        try:
            self._write(state, unix_s, values)
            if not self._writer.is_failing:
                self._failing_since = None
        except OSError as error:
            return self._note_failure(error, now)
        return True

    def close(self, now: float) -> None:
        """Write what waits, and a last sample: what would be lost of the host, and no devices, which may hang. What the
        file system refuses is lost."""
        state, unix_s, values = self._devices.state, time.time(), self.host.read_last(now)
        values += [NAN] * (len(self._ranks.series) + len(state.series))
        with contextlib.suppress(OSError):
            self._write(state, unix_s, values)
        with contextlib.suppress(OSError):
            self._writer.close()
        self._ranks.close()
        self._devices.end()

    def _write(self, state: DeviceState, unix_s: float, values: Sequence[float]) -> None:
        if (described := self._describe(state)) != self._described:
            self._described = described
            self._writer.describe(self._info(state), self._series(state))
        self._writer.append(unix_s, values)

    def _note_failure(self, error: OSError, now: float) -> bool:
        self._failing_since = now if self._failing_since is None else self._failing_since
        if not self._said:
            self._said = True
            what = f"{error.strerror or error} ({self._options.into})"
            _report(f"telemetry of {self._options.host} cannot be written: {what}")
        return now - self._failing_since < GIVE_UP_S

    def _missing(self, state: DeviceState) -> dict[str, str]:
        missing = {**state.missing, **self.host.missing}
        if self._devices.hangs_s(time.monotonic()) > HANGS_S:
            missing["gpu/*"] = "the accelerators' driver does not answer"
        return missing

    def _describe(self, state: DeviceState) -> tuple[int, int, bool]:
        """Changes with what is described."""
        return state.version, len(self.host.missing), self._devices.hangs_s(time.monotonic()) > HANGS_S

    def _series(self, state: DeviceState) -> tuple[str, ...]:
        return (*self.host.series, *self._ranks.series, *state.series)

    def _info(self, state: DeviceState) -> NodeInfo:
        options, host = self._options, self.host
        return NodeInfo(
            host=options.host,
            node=options.node,
            job=options.job,
            attempt=options.attempt,
            started=self._started,
            every_s=options.every_s,
            cores=host.cores,
            allowed_cores=host.allowed_cores,
            memory_bytes=host.memory_bytes,
            memory_limit_bytes=host.memory_limit_bytes,
            devices=state.devices,
            missing=MappingProxyType(self._missing(state)),
        )


def _report(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"shardway: {text}\n".encode(errors="replace"))


class _Begin:
    """Whether a file has changed its size since it was noted as SIZE:PATH; "" for a run that has begun already."""

    def __init__(self, noted: str) -> None:
        size, _, self._path = noted.partition(":")
        self._size = int(size or -1)
        self._has_begun = not self._path

    def __call__(self) -> bool:
        self._has_begun = self._has_begun or measure(self._path) != self._size
        return self._has_begun


def measure(path: str | Path) -> int:
    """The size of a file in bytes; -1 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


class _Watch:
    """Why the process has to end, looked at between samples. No signal ends it: the job may still save."""

    def __init__(self, options: SamplerOptions, sampler: NodeSampler) -> None:
        self._options, self._sampler, self._parent = options, sampler, os.getppid()
        self._input = select.poll()
        if options.pipe:
            self._input.register(0, select.POLLIN)
        for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)

    def sleep(self, until: float) -> bool:
        """Sleep until that time; returns whether to go on."""
        while True:
            left = max(0.0, until - time.monotonic())
            if self._input.poll(1000 * min(left, LOOK_S)) and self._is_input_closed():
                return False
            if self._is_over():
                return False
            if left <= LOOK_S:
                return True

    def _is_input_closed(self) -> bool:
        try:
            return not os.read(0, 64)
        except OSError:
            return True

    def _is_over(self) -> bool:
        options = self._options
        if os.getppid() != self._parent:
            return True
        if options.top and not self._is_alive(options.top):
            return True
        return bool(options.until) and os.path.exists(options.until)

    def _is_alive(self, top: int) -> bool:
        """By its number, which could be another's only until processes are read again."""
        if not self._sampler.host.processes.is_known(top):
            return False
        try:
            os.getpgid(top)
        except ProcessLookupError:
            return False
        except OSError:  # it is there, and something forbids to ask
            return True
        return True


def main(words: Iterable[str]) -> None:
    """Sample until the job has ended."""
    try:
        options = parse_options(words)
        with contextlib.suppress(OSError):
            os.nice(10)
            # A sample waits for a core rather than interrupt a step that runs on it (sched(7)).
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        sampler = NodeSampler(options)
    except (OSError, ValueError, KeyError) as error:
        _report(f"telemetry of this node is not sampled: {error}")
        return
    now = time.monotonic()
    goes_on, at = sampler.sample(now), now
    watch = _Watch(options, sampler)
    gc.freeze()  # what is there now is not looked through again
    try:
        while goes_on:
            at = max(at + options.every_s, time.monotonic())  # what was missed, as while a machine slept, is left out
            goes_on = watch.sleep(at) and sampler.sample(time.monotonic())
    finally:
        sampler.close(time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # a thread that hangs in a driver would keep the process
