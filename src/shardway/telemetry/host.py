"""What a node and the processes of a job do, from /proc, /sys and control groups.

Files stay open and are read anew from their start (`os.pread`), which costs a fortieth of opening them through a
library. Most of what a sample costs is one read of two files a process, each cold after a second of other work, so
processes are read with every few samples only: their counters lose nothing by it. New ones are looked for at the same
time, once a second at most, and only where the kernel has started any since.

The job's processes are those below its root process, those in a session that one of them has made, and those with a
variable in their environment that marks the job: ranks on other nodes have a daemon of the scheduler as their parent.
What processes read, wrote and computed is not lost when they end: the kernel adds it to the parent that waits for them,
and what no process of the job has waited for is added here, as it was last seen.

Invariants:
- A file that cannot be read costs its series, with the reason in `missing`, and never the sample.
- A rate is over the time of a clock that is never set, and is never negative.
- What was not read for a sample is NaN in it, never a value of before.
- How many files a sample reads depends on the number of processes only where processes are read.

Sources: proc_pid_stat(5), proc_pid_io(5), proc_pid_task(5), proc_stat(5), proc_meminfo(5), proc_loadavg(5); Linux,
kernel/sched/loadavg.c (the load is computed every 5 s), fs/seq_file.c (a read of lines ends early only where the next
one does not fit into the page), Documentation/admin-guide/cgroup-v2.rst (memory.current, memory.stat, memory.events),
cgroup-v1/memory.rst, Documentation/ABI/stable/sysfs-class-infiniband (port_rcv_data counts words of 4 bytes); Lustre
Operations Manual, "Monitoring Client Activity" (llite.*.stats).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import add, le
from pathlib import Path

NAN = float("nan")
LEAST_S = 0.5
"""No rate of the processes is over a shorter time at the end of a job: CPU time has steps of 10 ms."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LONGEST_LINE = 1024


class KeptFile:
    """A file of the kernel that stays open. `read` and `read_records` raise OSError where it is gone."""

    __slots__ = ("_descriptor", "_size")

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = 4096

    def read(self) -> bytes:
        content = os.pread(self._descriptor, self._size, 0)
        while len(content) == self._size:  # there may be more
            self._size *= 4
            content = os.pread(self._descriptor, self._size, 0)
        return content

    def read_records(self) -> bytes:
        """All of a file that the kernel writes line by line, of which it may return less than is there: what is left
        of a page, in which the next line had no place."""
        content = more = os.pread(self._descriptor, 65536, 0)
        while len(more) > _PAGE - _LONGEST_LINE:
            more = os.pread(self._descriptor, 65536, len(content))
            content += more
        return content

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


# --- the processes of the job

_NO_IO: tuple[int, ...] = (0, 0, 0, 0)


class _Process:
    """One process, by files that stay open: its number may become another's, and these files then fail."""

    __slots__ = (
        "_before",
        "_folder",
        "_io",
        "_others",
        "_stat",
        "_waited",
        "cpu",
        "io",
        "is_ready",
        "parent",
        "pid",
        "rss",
        "threads",
    )

    def __init__(self, root: str, pid: int) -> None:
        self.pid, self._folder = pid, f"{root}/proc/{pid}"
        self._stat = KeptFile(f"{self._folder}/stat")
        self._io: KeptFile | None = None
        with suppress(OSError):  # another user's
            self._io = KeptFile(f"{self._folder}/io")
        self.cpu = self.rss = self.threads = self.parent = self._waited = 0
        self.is_ready = False  # whether its first thread runs or waits for a core
        self._others: list[str] = []  # names of its other threads
        self.io: tuple[int, ...] | None = None
        self._before: tuple[int, tuple[int, ...]] = 0, _NO_IO

    def read(self) -> None:
        """Raises OSError where it is gone."""
        self._before = self._waited, self.io or _NO_IO
        fields = self._stat.read().rpartition(b")")[2].split(None, 22)
        # from field 3 on: 3 state, 4 parent, 14-17 times of it and of children it waited for, 20 threads, 24 pages
        if fields[0] in (b"X", b"x"):
            raise ProcessLookupError
        self.parent, self.is_ready = int(fields[1]), fields[0] == b"R"
        self._waited = int(fields[13]) + int(fields[14])
        self.cpu = int(fields[11]) + int(fields[12]) + self._waited
        self.threads, self.rss = int(fields[17]), int(fields[21])
        if self._io is not None:
            try:
                words = self._io.read().split()
                self.io = int(words[1]), int(words[3]), int(words[9]), int(words[11])
            except (OSError, ValueError, IndexError):
                self._io.close()
                self._io = None

    def has_taken_over(self, cpu: int, io: tuple[int, ...]) -> bool:
        """Whether its sums grew by as much with the last read, as they do when it waits for a child that has ended.
        What it has taken over does not count for another child."""
        waited, before = self._before[0] + cpu, tuple(map(add, self._before[1], io))
        if waited > self._waited or (self.io is not None and not all(map(le, before, self.io))):
            return False
        self._before = waited, before
        return True

    def read_states(self, picked: range) -> list[bytes]:
        """The state of the threads with these places among its threads but the first; of none that has ended."""
        states = list[bytes]()
        try:
            if len(self._others) != self.threads - 1:
                self._others = [name for name in os.listdir(f"{self._folder}/task") if name != str(self.pid)]
            for at in picked:
                thread = os.open(f"{self._folder}/task/{self._others[at]}/stat", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    states.append(os.read(thread, 512).rpartition(b")")[2].split(None, 1)[0])
                finally:
                    os.close(thread)
        except (OSError, IndexError):  # they have changed
            self._others = []
        return states

    def close(self) -> None:
        self._stat.close()
        if self._io is not None:
            self._io.close()


class JobProcesses:
    """The processes of the job, and the sums of what they used: CPU in ticks, I/O in bytes (calls read, calls write,
    storage read, storage write). Sums never fall. `ready`: how many of their threads run or wait for a core. `refused`:
    whether the I/O of none may be read."""

    LOOK_EVERY_S, LIST_EVERY_S = 1.0, 60.0
    FEW, MANY_EVERY_S = 32, 10.0
    """Where more numbers than FEW were given since the last look, the next one waits until so long after it: other
    programs of the machine start many, and each costs."""
    LATE = 8
    """So many of the numbers given last may belong to processes that cannot be seen yet."""
    MOST_THREADS = 8
    """So many threads, besides the first of each process, are looked at in a turn; where there are more, others each
    turn: their files are opened for it, which costs several times what a kept one does."""

    def __init__(self, top: int, marker: bytes = b"", root: str = "", leave_out: Collection[int] = ()) -> None:
        self._root, self._top, self._marker, self._leave_out = root, top, marker, frozenset(leave_out)
        self._known: dict[int, _Process] = {}
        self._others: set[int] = set()
        self._sessions: set[int] = set()
        self._looked_at, self._done_at, self._listed_at = -1e9, -1e9, -1e9
        self._listed, self._newest = 0, 0
        self._again = frozenset[int]()
        self._last = KeptFile(f"{root}/proc/loadavg")
        self._gone_cpu, self._gone_io, self._turn = 0, _NO_IO, 0
        self.cpu, self.io, self.rss, self.threads = 0, _NO_IO, 0, 0
        self.ready = NAN
        self.refused = False

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self._known)

    def is_known(self, pid: int) -> bool:
        """Whether it was a process of the job when processes were last read."""
        return pid in self._known

    def read(self, now: float) -> None:
        """Read every process, and look for new ones where the kernel has started some."""
        if now - self._looked_at >= self.LOOK_EVERY_S:
            self._looked_at = now
            self._look(now)
        gone = dict[int, _Process]()
        for pid, process in self._known.items():
            try:
                process.read()
            except (OSError, ValueError, IndexError):
                gone[pid] = process
        for pid in gone:
            del self._known[pid]
        for process in gone.values():
            self._bury(process, gone)
        cpu, rss, threads, io, any_io = self._gone_cpu, 0, 0, self._gone_io, False
        for process in self._known.values():
            cpu += process.cpu
            rss += process.rss
            threads += process.threads
            if process.io is not None:
                any_io, io = True, tuple(map(add, io, process.io))
        self.cpu, self.rss, self.threads = max(self.cpu, cpu), rss * _PAGE, threads
        self.io = tuple(map(max, self.io, io))
        self.refused = bool(self._known) and not any_io
        self.ready = self._count_ready()

    def _bury(self, process: _Process, gone: Mapping[int, _Process]) -> None:
        """Keep what a process that ended had used, unless the nearest of its parents that lives has it: the kernel adds
        it to the one that waits for it."""
        process.close()
        parent = process.parent
        while parent in gone:
            parent = gone[parent].parent
        heir, io = self._known.get(parent), process.io or _NO_IO
        if heir is None or not heir.has_taken_over(process.cpu, io):
            self._gone_cpu += process.cpu
            self._gone_io = tuple(map(add, self._gone_io, io))

    def _count_ready(self) -> float:
        """Threads that run or wait for a core now. NaN where the threads cannot be looked at."""
        first = sum(process.is_ready for process in self._known.values())
        several = [process for process in self._known.values() if process.threads > 1]
        if not several:
            return first
        step = -(-sum(process.threads - 1 for process in several) // self.MOST_THREADS)
        self._turn, at = self._turn + 1, self._turn % step  # of all further threads in a row, each of a step's
        states = list[bytes]()
        for process in several:
            picked = range(at, process.threads - 1, step)
            if picked:
                states += process.read_states(picked)
            at += step * len(picked) - process.threads + 1
        return first + states.count(b"R") * step if states else NAN

    def _look(self, now: float) -> None:
        """Find the new processes of the job among the numbers that the kernel has given since the last time, or where
        these are more than there were processes, among all processes: both cost the same for each. One that is not of
        the job is looked at twice: its environment is its parent's before it has its own program."""
        newest = int(self._last.read().split()[-1])  # the number that was given last
        given = newest - self._newest
        if not 0 <= given <= self.FEW and now - self._done_at < self.MANY_EVERY_S:
            return
        self._done_at, self._newest = now, newest
        if given < 0:  # they began anew
            self._others.clear()
        if now - self._listed_at >= self.LIST_EVERY_S or not 0 <= given <= self._listed:
            new = {int(name) for name in os.listdir(f"{self._root}/proc") if name.isdigit()}
            self._listed_at, self._listed = now, len(new)
            self._others &= new
            new -= self._others
        else:
            new = set(range(newest - given + 1, newest + 1)) | self._again
        rest = sorted(new - self._known.keys() - self._leave_out)
        found = True
        while found and rest:  # a child may have a smaller number than its parent
            before, rest = rest, []
            for pid in before:
                if self._is_own(pid) is False:
                    rest.append(pid)
            found = any(pid in self._known for pid in before)
        self._others.update(self._again.intersection(rest))
        late = range(newest - min(given, self.LATE) + 1, newest + 1)
        self._again = frozenset((*rest, *late)) - self._others - self._known.keys()

    def _is_own(self, pid: int) -> bool | None:
        """Whether it is a process of the job, which is kept then; None for one that is not there."""
        try:
            stat = os.open(f"{self._root}/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fields = os.read(stat, 512).rpartition(b")")[2].split(None, 4)
            parent, session = int(fields[1]), int(fields[3])
        except (OSError, ValueError, IndexError):
            return None
        finally:
            os.close(stat)
        if parent in self._leave_out:
            return False
        is_own = pid == self._top or parent in self._known or session in self._sessions
        if not is_own and self._marker and parent != 2:  # children of 2 are threads of the kernel
            with suppress(OSError):
                content = Path(f"{self._root}/proc/{pid}/environ").read_bytes()
                is_own = self._marker in b"\0" + content
        if not is_own or not self._is_process(pid):
            return False
        try:
            process = _Process(self._root, pid)
        except OSError:
            return None
        self._known[pid] = process  # read with the others
        if session == pid:  # a session that a process of the job has made
            self._sessions.add(pid)
        return True

    def _is_process(self, pid: int) -> bool:
        """Threads have numbers too, under which the kernel shows what their whole process does."""
        with suppress(OSError, ValueError, IndexError):
            content = Path(f"{self._root}/proc/{pid}/status").read_bytes()
            return int(content.partition(b"\nTgid:")[2].split(None, 1)[0]) == pid
        return False

    def close(self) -> None:
        for process in self._known.values():
            process.close()
        self._last.close()


# --- the control group of the job


class JobGroup:
    """The control group of the job, in version 1 or 2: one with the number of the `job` in its name, as schedulers make
    them (`job_12`, `12.server`), in which only the job is, or else the process's own. `limit_bytes` is the least limit
    from the process's own group up."""

    def __init__(self, pid: int, job: str = "", root: str = "") -> None:
        self.limit_bytes: int | None = None
        self.is_jobs_own = False
        self._usage: KeptFile | None = None
        self._stat: KeptFile | None = None
        self._events: KeptFile | None = None
        folders = list(_list_folders(pid, root))
        limits = []
        for folder in folders:
            for name in ("memory.max", "memory.limit_in_bytes"):
                with suppress(OSError, ValueError):
                    limits.append(int((folder / name).read_bytes()))
        self.limit_bytes = min((limit for limit in limits if limit < 1 << 60), default=None)
        number = re.match(r"\d+", job)
        named = re.compile(rf"(?<!\d){number[0]}(?!\d)") if number else None
        own = [folder for folder in folders if named is not None and named.search(folder.name)][-1:]  # the outermost
        self.is_jobs_own = bool(own)
        for folder in own or folders:
            for usage, events in (("memory.current", "memory.events"), ("memory.usage_in_bytes", "memory.oom_control")):
                if (folder / usage).exists() and self._usage is None:
                    with suppress(OSError):
                        self._usage = KeptFile(str(folder / usage))
                        self._stat = KeptFile(str(folder / "memory.stat"))
                        self._events = KeptFile(str(folder / events))

    def used_bytes(self) -> float:
        """The working set: what is used, less what the kernel drops first. NaN where it cannot be read."""
        if self._usage is None or self._stat is None:
            return NAN
        try:
            used, stat = int(self._usage.read()), self._stat.read()
        except (OSError, ValueError):
            return NAN
        found = re.search(rb"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
        total = re.search(rb"^total_inactive_file (\d+)", stat, re.MULTILINE) or found
        return max(0, used - int(total[1])) if total else used

    def oom_kills(self) -> float:
        if self._events is None:
            return NAN
        try:
            found = re.search(rb"^oom_kill (\d+)", self._events.read(), re.MULTILINE)
        except OSError:
            return NAN
        return int(found[1]) if found else NAN


def _list_folders(pid: int, root: str) -> Iterator[Path]:
    """Each folder of the memory controller, from the process's own group up to the root of its hierarchy."""
    mount = Path(root or "/") / "sys/fs/cgroup"
    try:
        lines = Path(f"{root}/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        group = Path(path.strip().lstrip("/"))
        for place in [mount / "memory"] if controllers else [mount, mount / "unified"]:
            for part in dict.fromkeys((group, *group.parents)):
                if (folder := place / part).is_dir():
                    yield folder


# --- the whole node

_NOT_CARRIERS = re.compile(
    r"lo$|veth|docker|br-|virbr|cni|flannel|cali|tap|tun|dummy|ifb|kube|vnet|sit\d|bonding_masters"
)
_MOST_INTERFACES = 16


class RateCounters:
    """Counters that become rates, one for each of `series`; NaN where they cannot be read."""

    def __init__(self, series: Sequence[str], read: Callable[[], Sequence[float]]) -> None:
        self.series, self._read = tuple(series), read
        self._before: tuple[float, Sequence[float]] | None = None

    def rates(self, now: float) -> list[float]:
        try:
            values: Sequence[float] = self._read()
        except (OSError, ValueError, IndexError, KeyError):
            self._before = None
            return [NAN] * len(self.series)
        before, self._before = self._before, (now, values)
        if before is None or now <= before[0]:
            return [NAN] * len(values)
        passed = now - before[0]
        return [
            (late - early) / passed if late >= early else NAN for late, early in zip(values, before[1], strict=True)
        ]


def open_network(root: str = "") -> RateCounters | None:
    """Bytes of each interface that leads to other machines."""
    file = KeptFile(f"{root}/proc/net/dev")
    found = (line.partition(b":")[0].strip() for line in file.read_records().splitlines()[2:])
    names = [name for name in found if not _NOT_CARRIERS.match(name.decode(errors="replace"))][:_MOST_INTERFACES]
    if not names:
        return None
    wanted = frozenset(names)

    def read() -> list[float]:
        counts = {}
        for line in file.read_records().split(b"\n"):
            name, _, numbers = line.partition(b":")
            if (name := name.strip()) in wanted:
                words = numbers.split(None, 9)
                counts[name] = int(words[0]), int(words[8])
        return [value for name in names for value in counts[name]]

    ways = ("rx_bytes_per_s", "tx_bytes_per_s")
    series = [f"net/{name.decode(errors='replace')}/{way}" for name in names for way in ways]
    return RateCounters(series, read)


def open_infiniband(missing: dict[str, str], root: str = "") -> RateCounters | None:
    """Bytes of each port, of all programs of the node."""
    files, series = list[KeptFile](), list[str]()
    for folder in sorted(Path(f"{root}/sys/class/infiniband").glob("*/ports/*/counters")):
        device, port = folder.parts[-4], folder.parts[-2]
        try:
            both = [KeptFile(str(folder / f"port_{way}_data")) for way in ("rcv", "xmit")]
            for file in both:
                int(file.read())
        except (OSError, ValueError) as error:
            missing[f"ib/{device}:{port}/*"] = _explain(error, f"{folder}/port_rcv_data")
            continue
        files += both
        series += [f"ib/{device}:{port}/{way}_bytes_per_s" for way in ("rx", "tx")]
    return RateCounters(series, lambda: [4 * int(file.read()) for file in files]) if files else None


_LUSTRE = re.compile(rb"^(read_bytes|write_bytes|open)\s+(\d+) samples \[\S+\](?: \d+ \d+ (\d+))?", re.MULTILINE)


def open_lustre(missing: dict[str, str], root: str = "") -> RateCounters | None:
    """Bytes and opens of this node on each mounted Lustre; newer versions keep them for administrators."""
    files, series = list[KeptFile](), list[str]()
    for place in ("proc/fs/lustre/llite", "sys/kernel/debug/lustre/llite"):
        try:
            folders = sorted(Path(f"{root}/{place}").iterdir())
        except OSError:
            continue
        for folder in folders:
            name = folder.name.rpartition("-")[0] or folder.name
            if any(each.startswith(f"lustre/{name}/") for each in series):
                continue
            try:
                files.append(KeptFile(str(folder / "stats")))
            except OSError as error:
                missing[f"lustre/{name}/*"] = _explain(error, str(folder / "stats"))
                continue
            missing.pop(f"lustre/{name}/*", None)
            units = ("read_bytes_per_s", "write_bytes_per_s", "opens_per_s")
            series += [f"lustre/{name}/{unit}" for unit in units]
    if not files and not any(name.startswith("lustre/") for name in missing):
        with suppress(OSError):
            mounts = Path(f"{root}/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
            if any(line.split(" ")[2:3] == ["lustre"] for line in mounts.splitlines()):
                missing["lustre/*"] = "the file system's counters (llite.*.stats) are kept for administrators here"
    if not files:
        return None

    def read() -> list[float]:
        values: list[float] = []
        for file in files:
            found = {name: (int(count), int(total or 0)) for name, count, total in _LUSTRE.findall(file.read_records())}
            values += [found.get(b"read_bytes", (0, 0))[1], found.get(b"write_bytes", (0, 0))[1]]
            values.append(found.get(b"open", (0, 0))[0])
        return values

    return RateCounters(series, read)


def _explain(error: Exception, path: str) -> str:
    words = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path} cannot be read: {words}"


class HostReader:
    """Everything of a node that is no accelerator. `top` is the root process of the job (0: it is elsewhere), `job` its
    id, `marker` a NAME=VALUE in the environment of its processes. `OF_PROCESSES` are read with each `processes_each`-th
    sample, and are NaN in the others. `root` stands for "/" in tests."""

    def __init__(
        self,
        top: int,
        marker: str = "",
        job: str = "",
        root: str = "",
        leave_out: Collection[int] = (),
        processes_each: int = 1,
    ) -> None:
        self.missing: dict[str, str] = {}
        self.processes = JobProcesses(top, f"\0{marker}\0".encode() if marker else b"", root, leave_out)
        self._group = JobGroup(top or os.getpid(), job, root)
        self.allowed_cores = tuple(sorted(_affinity(top)))
        self.cores = os.cpu_count() or len(self.allowed_cores)
        self._stat = KeptFile(f"{root}/proc/stat")
        self._memory, self._load = KeptFile(f"{root}/proc/meminfo"), KeptFile(f"{root}/proc/loadavg")
        self.memory_bytes = _parse_memory(self._memory.read())[0]
        self.memory_limit_bytes = self._group.limit_bytes
        network = None
        try:
            network = open_network(root)
        except (OSError, ValueError, IndexError) as error:
            self.missing["net/*"] = _explain(error, "/proc/net/dev")
        parts = (network, open_infiniband(self.missing, root), open_lustre(self.missing, root))
        self._counters = [part for part in parts if part is not None]
        self._lines = {f"cpu{core}".encode(): core for core in self.allowed_cores}
        self._busy: dict[int, tuple[int, int]] = {}
        self._job_at: tuple[float, int, tuple[int, ...]] | None = None
        self._processes_each, self._until_processes = max(1, processes_each), 0
        group = ("memory/job_bytes",) if self._group.is_jobs_own else ()
        of_processes = (*OF_PROCESSES, *(() if group else ("memory/job_bytes",)))
        self._not_read = (NAN,) * len(of_processes)
        self.series = (
            *("cpu/use_percent", "memory/oom_kills", *group),
            *(f"core/{core}/use_percent" for core in self.allowed_cores),
            *(name for part in self._counters for name in part.series),
            *of_processes,
        )
        if self._group.oom_kills() != self._group.oom_kills():
            self.missing["memory/oom_kills"] = "there is no control group of memory that counts them"

    def read(self, now: float) -> list[float]:
        """A value for each series. Never raises OSError."""
        cores = self._read_cores()
        known = [value for value in cores if value == value]
        values = [sum(known) / len(known) if known else NAN, *self._read_group(), *cores]
        for part in self._counters:
            values += part.rates(now)
        if self._until_processes:
            values += self._not_read
        else:
            self._until_processes = self._processes_each
            values += self._read_processes(now)
        self._until_processes -= 1
        return values

    def read_last(self, now: float) -> list[float]:
        """What would be lost at the end: kills, memory of the group, and what processes did since they were read, where
        this is long enough for a rate. The other series have NaN."""
        memory = self._read_group()
        is_due = self._job_at is None or now - self._job_at[0] >= LEAST_S
        processes = self._read_processes(now) if is_due else self._not_read
        between = len(self.series) - 1 - len(memory) - len(processes)
        return [NAN, *memory, *[NAN] * between, *processes]

    def _read_cores(self) -> list[float]:
        """Use of each allowed core since the last sample; NaN for one that is switched off."""
        busy: dict[int, tuple[int, int]] = {}
        with suppress(OSError, ValueError, IndexError):
            for line in self._stat.read().split(b"\n", self.cores + 2):
                name, _, rest = line.partition(b" ")
                if (core := self._lines.get(name)) is not None:
                    # user nice system idle iowait irq softirq steal, guests in user
                    numbers = list(map(int, rest.split(None, 8)[:8]))
                    total = sum(numbers)
                    busy[core] = total - numbers[3] - numbers[4], total
                elif name[:3] != b"cpu":
                    break
        before, self._busy = self._busy, busy
        return [_share(before.get(core), busy.get(core)) for core in self.allowed_cores]

    def _read_group(self) -> list[float]:
        """Kills, and the memory of the job where it has a group."""
        kills = self._group.oom_kills()
        return [kills, self._group.used_bytes()] if self._group.is_jobs_own else [kills]

    def _read_processes(self, now: float) -> list[float]:
        """A value for each of `OF_PROCESSES`, then what the processes hold of memory unless their group has it; NaN
        where no process of the job is seen."""
        processes, load, used = self.processes, NAN, NAN
        with suppress(OSError, ValueError, IndexError):
            processes.read(now)
        with suppress(OSError, ValueError):
            total, available = _parse_memory(self._memory.read())
            used = total - available if total is not None and available is not None else NAN
        with suppress(OSError, ValueError, IndexError):
            load = float(self._load.read().split(None, 1)[0])
        before, self._job_at = self._job_at, (now, processes.cpu, processes.io)
        if not processes.pids:
            return [load, used, *self._not_read[2:]]
        cores, rates = NAN, [NAN] * 4
        if before is not None and now > before[0]:
            passed = now - before[0]
            cores = (processes.cpu - before[1]) / _TICKS / passed
            if not processes.refused:
                rates = [(late - early) / passed for late, early in zip(processes.io, before[2], strict=True)]
        if processes.refused:
            self.missing["io/*"] = "the job's processes do not let others read their /proc/PID/io"
        values = [load, used, cores, processes.threads, processes.ready, *rates]
        return values if self._group.is_jobs_own else [*values, float(processes.rss)]


OF_PROCESSES = (
    *("cpu/load", "memory/used_bytes", "cpu/job_cores", "cpu/threads", "cpu/runnable_threads"),
    *("io/rchar_bytes_per_s", "io/wchar_bytes_per_s", "io/read_bytes_per_s", "io/write_bytes_per_s"),
)


def _share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float:
    if before is None or after is None or after[1] <= before[1]:
        return NAN
    return min(100.0, max(0.0, 100.0 * (after[0] - before[0]) / (after[1] - before[1])))


_TOTAL = re.compile(rb"^MemTotal:\s+(\d+)", re.MULTILINE)
_AVAILABLE = re.compile(rb"^MemAvailable:\s+(\d+)", re.MULTILINE)


def _parse_memory(content: bytes) -> tuple[int | None, int | None]:
    """Bytes of the machine, and those that programs can still get."""
    total, available = _TOTAL.search(content), _AVAILABLE.search(content)
    return (int(total[1]) * 1024 if total else None), (int(available[1]) * 1024 if available else None)


def _affinity(pid: int) -> Mapping[int, None] | set[int]:
    for process in (pid, 0):
        with suppress(OSError):
            return os.sched_getaffinity(process)
    return set(range(os.cpu_count() or 1))
