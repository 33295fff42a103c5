"""What a node and the processes of a job do, from /proc, /sys and control groups.

Files that are read with every sample stay open and are read anew from their start (`os.pread`), which costs a fortieth
of opening them through a library. New processes are looked for once a second at most, and only where the kernel has
started any since.

The job's processes are those below its root process, those in a session that one of them has made, and those with a
variable in their environment that marks the job: ranks on other nodes have a daemon of the scheduler as their parent.
What processes read, wrote and computed is not lost when they end: the kernel adds it to the parent that waits for them,
and what no process of the job has waited for is added here, as it was last seen.

Invariants:
- A file that cannot be read costs its series, with the reason in `missing`, and never the sample.
- A rate is over the time of a clock that is never set, and is never negative.

Sources: proc_pid_stat(5), proc_pid_io(5), proc_stat(5), proc_meminfo(5), proc_loadavg(5); Linux,
Documentation/admin-guide/cgroup-v2.rst (memory.current, memory.stat, memory.events), cgroup-v1/memory.rst; Linux,
Documentation/ABI/stable/sysfs-class-infiniband (port_rcv_data counts words of 4 bytes); Lustre Operations Manual,
"Monitoring Client Activity" (llite.*.stats).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NAN = float("nan")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


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
        """All of a file that the kernel writes line by line, of which it may return less than is there."""
        content = os.pread(self._descriptor, 65536, 0)
        while more := os.pread(self._descriptor, 65536, len(content)):
            content += more
        return content

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


# --- the processes of the job


class _Process:
    """One process, by files that stay open: its number may become another's, and these files then fail."""

    __slots__ = ("_io", "_stat", "cpu", "io", "parent", "pid", "rss", "threads")

    def __init__(self, root: str, pid: int) -> None:
        self.pid = pid
        self._stat = KeptFile(f"{root}/proc/{pid}/stat")
        self._io: KeptFile | None = None
        with suppress(OSError):  # another user's
            self._io = KeptFile(f"{root}/proc/{pid}/io")
        self.cpu = self.rss = self.threads = self.parent = 0
        self.io: tuple[int, int, int, int] | None = None

    def read(self) -> None:
        """Raises OSError where it is gone."""
        fields = self._stat.read().rpartition(b")")[2].split()
        # from field 3 on: 4 parent, 14-17 times of it and of children that ended, 20 threads, 24 pages
        if fields[0] in (b"X", b"x"):
            raise ProcessLookupError
        self.parent = int(fields[1])
        self.cpu = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
        self.threads, self.rss = int(fields[17]), int(fields[21])
        if self._io is not None:
            try:
                words = self._io.read().split()
                self.io = int(words[1]), int(words[3]), int(words[9]), int(words[11])
            except (OSError, ValueError, IndexError):
                self._io.close()
                self._io = None

    def close(self) -> None:
        self._stat.close()
        if self._io is not None:
            self._io.close()


class JobProcesses:
    """The processes of the job, and the sums of what they used: CPU in ticks, I/O in bytes (calls read, calls write,
    storage read, storage write). Sums never fall. `refused`: whether the I/O of none may be read."""

    LOOK_EVERY_S, LIST_EVERY_S = 1.0, 60.0
    MOST_PROBED = 200
    """Where more numbers were given since the last time, all processes are listed."""

    def __init__(self, top: int, marker: bytes = b"", root: str = "", leave_out: Collection[int] = ()) -> None:
        self._root, self._top, self._marker, self._leave_out = root, top, marker, frozenset(leave_out)
        self._known: dict[int, _Process] = {}
        self._others: set[int] = set()
        self._sessions: set[int] = set()
        self._looked_at, self._whole_at, self._newest = -1e9, -1e9, 0
        self._not_yet: Collection[int] = ()
        self._last = KeptFile(f"{root}/proc/loadavg")
        self._gone_cpu, self._gone_io = 0, [0, 0, 0, 0]
        self.cpu, self.io, self.rss, self.threads = 0, [0, 0, 0, 0], 0, 0
        self.refused = False

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self._known)

    def read(self, now: float) -> None:
        """Read every process, and look for new ones where the kernel has started some."""
        if now - self._looked_at >= self.LOOK_EVERY_S:
            self._looked_at = now
            newest = int(self._last.read().split()[-1])  # the number that was given last
            if now - self._whole_at >= self.LIST_EVERY_S or not 0 <= newest - self._newest <= self.MOST_PROBED:
                self._look_at_all(now)
            elif newest != self._newest or self._not_yet:
                self._look_at_new(newest)
            self._newest = newest
        gone, jumps = list[_Process](), dict[int, tuple[int, Sequence[int]]]()
        for pid, process in self._known.items():
            before = process.cpu, process.io
            try:
                process.read()
            except (OSError, ValueError, IndexError):
                gone.append(process)
                continue
            jumps[pid] = process.cpu - before[0], _minus(process.io, before[1])
        for process in gone:
            self._bury(process, jumps)
        cpu, rss, threads, io, any_io = self._gone_cpu, 0, 0, list(self._gone_io), False
        for process in self._known.values():
            cpu += process.cpu
            rss += process.rss
            threads += process.threads
            if process.io is not None:
                any_io = True
                for at, value in enumerate(process.io):
                    io[at] += value
        self.cpu, self.rss, self.threads = max(self.cpu, cpu), rss * _PAGE, threads
        self.io = list(map(max, self.io, io))
        self.refused = bool(self._known) and not any_io

    def _bury(self, process: _Process, jumps: dict[int, tuple[int, Sequence[int]]]) -> None:
        """Keep what a process that ended had used, unless its parent has it: the parent waited for it if its own sums
        grew by as much."""
        del self._known[process.pid]
        process.close()
        used = process.io or (0, 0, 0, 0)
        if (jump := jumps.get(process.parent)) is not None and process.parent in self._known:
            cpu, io = jump
            if cpu >= process.cpu and all(map(int.__ge__, io, used)):
                jumps[process.parent] = cpu - process.cpu, _minus(io, used)
                return
        self._gone_cpu += process.cpu
        self._gone_io = [total + more for total, more in zip(self._gone_io, used, strict=True)]

    def _look_at_new(self, newest: int) -> None:
        """Find the processes of the numbers that were given since the last time. One that is not there is looked at
        once more: a process has its number before it can be seen."""
        absent = []
        for pid in (*self._not_yet, *range(self._newest + 1, newest + 1)):
            if pid not in self._known and pid not in self._leave_out and self._is_own(pid) is None:
                absent.append(pid)
        self._not_yet = [pid for pid in absent if pid > self._newest]

    def _look_at_all(self, now: float) -> None:
        """Find new processes where many were started. Numbers that were no process of the job are looked at again once
        a minute: they may have been given anew."""
        pids = {int(name) for name in os.listdir(f"{self._root}/proc") if name.isdigit()}
        if now - self._whole_at >= self.LIST_EVERY_S:
            self._others.clear()
            self._whole_at = now
        self._others &= pids
        self._not_yet = ()
        new = sorted(pids - self._others - self._known.keys() - self._leave_out)
        found = True
        while found and new:  # a child may have a smaller number than its parent
            found, rest = False, []
            for pid in new:
                is_own = self._is_own(pid)
                if is_own:
                    found = True
                elif is_own is not None:
                    rest.append(pid)
            new = rest
        self._others.update(new)

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


def _minus(after: Sequence[int] | None, before: Sequence[int] | None) -> Sequence[int]:
    if after is None:
        return (0, 0, 0, 0)
    return after if before is None else [late - early for late, early in zip(after, before, strict=True)]


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

    def parse() -> dict[str, tuple[int, int]]:
        found = {}
        for line in file.read_records().splitlines()[2:]:
            name, _, numbers = line.partition(b":")
            words = numbers.split()
            found[name.strip().decode(errors="replace")] = int(words[0]), int(words[8])
        return found

    names = [name for name in parse() if not _NOT_CARRIERS.match(name)][:_MOST_INTERFACES]
    if not names:
        return None

    def read() -> list[float]:
        found = parse()
        return [value for name in names for value in found[name]]

    series = [f"net/{name}/{way}_bytes_per_s" for name in names for way in ("rx", "tx")]
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
    """Everything of a node that is no accelerator. `top` is the root process of the job (0: it is
    elsewhere), `job` its id, `marker` a NAME=VALUE in the environment of its processes. `root` stands for "/" in
    tests."""

    def __init__(
        self, top: int, marker: str = "", job: str = "", root: str = "", leave_out: Collection[int] = ()
    ) -> None:
        self.missing: dict[str, str] = {}
        self.processes = JobProcesses(top, f"\0{marker}\0".encode() if marker else b"", root, leave_out)
        self._top = top
        self._group = JobGroup(top or os.getpid(), job, root)
        self.allowed_cores = tuple(sorted(_affinity(top)))
        self.cores = os.cpu_count() or len(self.allowed_cores)
        self._stat = KeptFile(f"{root}/proc/stat")
        self._memory, self._load = KeptFile(f"{root}/proc/meminfo"), KeptFile(f"{root}/proc/loadavg")
        self.memory_bytes = _read_memory(self._memory.read())[0]
        self.memory_limit_bytes = self._group.limit_bytes
        network = None
        try:
            network = open_network(root)
        except (OSError, ValueError, IndexError) as error:
            self.missing["net/*"] = _explain(error, "/proc/net/dev")
        parts = (network, open_infiniband(self.missing, root), open_lustre(self.missing, root))
        self._counters = [part for part in parts if part is not None]
        self._busy: dict[int, tuple[int, int]] = {}
        self._job_at: tuple[float, int, list[int]] | None = None
        self.series = (
            *("cpu/use_percent", "cpu/job_cores", "cpu/threads", "cpu/load"),
            *("memory/used_bytes", "memory/job_bytes", "memory/oom_kills"),
            *("io/read_bytes_per_s", "io/write_bytes_per_s", "io/rchar_bytes_per_s", "io/wchar_bytes_per_s"),
            *(f"core/{core}/use_percent" for core in self.allowed_cores),
            *(name for part in self._counters for name in part.series),
        )
        if self._group.oom_kills() != self._group.oom_kills():
            self.missing["memory/oom_kills"] = "there is no control group of memory that counts them"

    def read(self, now: float) -> list[float]:
        """A value for each series. Never raises OSError."""
        cores = self._read_cores()
        known = [value for value in cores if value == value]
        values = [sum(known) / len(known) if known else NAN, *self._read_job(now)]
        values += cores
        for part in self._counters:
            values += part.rates(now)
        return values

    def _read_cores(self) -> list[float]:
        """Use of each allowed core since the last sample; NaN for one that is switched off."""
        busy: dict[int, tuple[int, int]] = {}
        with suppress(OSError, ValueError, IndexError):
            for line in self._stat.read().split(b"\n", self.cores + 2):
                if line[:3] != b"cpu":
                    break
                if line[3:4] == b" ":
                    continue
                words = line.split(None, 9)  # user nice system idle iowait irq softirq steal, guests in user
                numbers = list(map(int, words[1:9]))
                total = sum(numbers)
                busy[int(words[0][3:])] = total - numbers[3] - numbers[4], total
        before, self._busy = self._busy, busy
        return [_share(before.get(core), busy.get(core)) for core in self.allowed_cores]

    def _read_job(self, now: float) -> list[float]:
        processes, load, used = self.processes, NAN, NAN
        with suppress(OSError, ValueError, IndexError):
            processes.read(now)
        with suppress(OSError, ValueError, IndexError):
            load = float(self._load.read().split(None, 1)[0])
        with suppress(OSError, ValueError):
            total, available = _read_memory(self._memory.read())
            used = total - available if total is not None and available is not None else NAN
        job_bytes = self._group.used_bytes() if self._group.is_jobs_own else float(processes.rss)
        before, self._job_at = self._job_at, (now, processes.cpu, processes.io)
        cores, rates = NAN, [NAN] * 4
        if before is not None and now > before[0]:
            passed = now - before[0]
            cores = (processes.cpu - before[1]) / _TICKS / passed
            if not processes.refused:
                rates = [(late - early) / passed for late, early in zip(processes.io, before[2], strict=True)]
        if processes.refused:
            self.missing["io/*"] = "the job's processes do not let others read their /proc/PID/io"
        called_read, called_write, read, written = rates
        of_memory = [used, job_bytes, self._group.oom_kills()]
        return [cores, processes.threads, load, *of_memory, read, written, called_read, called_write]


def _share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float:
    if before is None or after is None or after[1] <= before[1]:
        return NAN
    return min(100.0, max(0.0, 100.0 * (after[0] - before[0]) / (after[1] - before[1])))


_TOTAL = re.compile(rb"^MemTotal:\s+(\d+)", re.MULTILINE)
_AVAILABLE = re.compile(rb"^MemAvailable:\s+(\d+)", re.MULTILINE)


def _read_memory(content: bytes) -> tuple[int | None, int | None]:
    """Bytes of the machine, and those that programs can still get."""
    total, available = _TOTAL.search(content), _AVAILABLE.search(content)
    return (int(total[1]) * 1024 if total else None), (int(available[1]) * 1024 if available else None)


def _affinity(pid: int) -> Mapping[int, None] | set[int]:
    for process in (pid, 0):
        with suppress(OSError):
            return os.sched_getaffinity(process)
    return set(range(os.cpu_count() or 1))
