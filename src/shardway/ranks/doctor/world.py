"""All ranks together: they report to rank 0 over plain TCP, and rank 0 judges what it gathered.

torch's store is not used: it reports how many ranks are missing, not which; and torch may be what is broken.

Invariants:
- A message is whole or an OSError; none is larger than `MAX_BYTES`.
- Rank 0 asks and the others answer, each wait has a limit, and a lost rank does not affect the others.
- The meeting point is that of the launch: the master's address, and the port at which training will meet. Under
  torchrun the agent listens there already, so every rank derives another port from it.
- Verdicts are functions of what was gathered (`judge_*`). A rank or a node is compared with the median of its peers or
  with the peers themselves, not with a number for another kind of machine.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from shardway.errors import SiteError, list_some
from shardway.ranks.doctor.checks import VERSIONS
from shardway.ranks.doctor.surroundings import CheckResult, MachineView, Report, bad, good, poor, unknown
from shardway.ranks.launcher import FIRST_PORT, PORTS, Placement, list_ports
from shardway.units import render_plural, render_seconds

# --- JSON messages over TCP, one object a line

MAX_BYTES = 4 * 2**20


class Wire:
    """One end of a connection; each wait has a limit. Raises OSError at its end, at a limit, or for foreign data."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        self._socket.settimeout(10.0)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            more = self._socket.recv(2**16)
            if not more:
                raise ConnectionResetError("the other end closed the connection")
            self._buffer += more
            if len(self._buffer) > MAX_BYTES:
                raise ConnectionError("the other end sends what no doctor sends")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ConnectionError("the other end is no doctor")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


# --- the check itself

_CONNECT_S = 3.0
_HELLO_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_SILENCE_S = 600.0
"""Longer than anything that rank 0 does between two questions; the end of its connection is noticed sooner."""

Answer = dict[str, Any]
Answerer = Callable[[Answer], Answer]  # carries out a request of rank 0, and returns the answer to it


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks of one launch report; `launch` separates its ranks from those of others. `further` ports are
    tried where the first is taken, as for training (`ranks.network`)."""

    address: str
    port: int
    launch: str
    further: tuple[int, ...] = ()

    def list_all(self) -> list[MeetingPoint]:
        return [replace(self, port=port, further=()) for port in (self.port, *self.further)]

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def find_point(placement: Placement, job: str) -> MeetingPoint:
    """The meeting point of a launch, the same on each of its ranks."""
    launch = f"{job} {placement.world} {placement.master_addr}:{placement.master_port}"
    if not placement.has_agent:
        further = list_ports(placement.launch)[1:] if placement.launch else ()
        return MeetingPoint(placement.master_addr, placement.master_port, launch, further)
    port = FIRST_PORT + zlib.crc32(f"doctor {placement.master_port}".encode()) % PORTS
    return MeetingPoint(placement.master_addr, port, launch)


class CheckPortTaken(Exception):
    """Rank 0 cannot listen at the meeting point; the message is the system's."""


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's clock is ahead of rank 0's, in seconds, and its uncertainty (half the round trip)."""

    ahead_s: float
    error_s: float


class ConnectivityCheck:
    """Rank 0's side; `reports` has the first message of each rank, `took_s` is how long they were waited for."""

    def __init__(self, point: MeetingPoint, world: int) -> None:
        self.point, self.world = point, world
        self.reports: dict[int, Answer] = {}
        self.took_s = 0.0
        self._wires: dict[int, Wire] = {}

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self.world) if rank not in self.reports]

    @property
    def here(self) -> list[int]:
        return sorted(self._wires)

    def gather(self, wait_s: float) -> None:
        """Wait for every rank, at most `wait_s` seconds. Raises CheckPortTaken."""
        start = time.monotonic()
        listener = _listen(self.point)
        self.point = replace(self.point, port=listener.getsockname()[1], further=())
        with listener:
            while self.missing and (left := start + wait_s - time.monotonic()) > 0:
                listener.settimeout(left)
                with contextlib.suppress(OSError):
                    self._greet(Wire(listener.accept()[0]))
        self.took_s = time.monotonic() - start

    def _greet(self, wire: Wire) -> None:
        """Accept a rank of this launch; a stranger gets no answer."""
        try:
            hello = wire.receive(_HELLO_S)
            rank = hello.get("rank")
            if hello.get("launch") != self.point.launch or not isinstance(rank, int) or not 0 < rank < self.world:
                raise ConnectionError("not of this launch")
            wire.send({"welcome": True})
        except OSError:
            wire.close()
            return
        self._wires[rank] = wire
        self.reports[rank] = hello

    def compare_clocks(self, ranks: Iterable[int]) -> dict[int, ClockOffset]:
        """Clocks of ranks against ours, from the quickest of a few exchanges (as NTP does, RFC 5905 section 8)."""
        clocks = {}
        for rank in ranks:
            rounds = []
            for _ in range(5):
                before, start = time.time(), time.monotonic()
                ahead = self.ask({rank: {"ask": "clock"}}, 5.0).get(rank, {}).get("time")
                trip = time.monotonic() - start
                if isinstance(ahead, int | float):
                    rounds.append(ClockOffset(float(ahead) - (before + trip / 2), trip / 2))
            if rounds:
                clocks[rank] = min(rounds, key=lambda clock: clock.error_s)
        return clocks

    def ask(
        self, questions: Mapping[int, Answer], limit_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[int, Answer]:
        """Ask ranks, do own work `meanwhile`, and collect their answers; a rank without an answer is dropped."""
        deadline = time.monotonic() + limit_s
        asked, answers = [], {}
        for rank, question in questions.items():
            with contextlib.suppress(OSError, KeyError):
                self._wires[rank].send(question)
                asked.append(rank)
        meanwhile()
        for rank in asked:
            try:
                answers[rank] = self._wires[rank].receive(max(0.2, deadline - time.monotonic()))
            except OSError:
                self._wires.pop(rank).close()
        return answers

    def end(self) -> None:
        for wire in self._wires.values():
            with contextlib.suppress(OSError):
                wire.send({"ask": "end"})
            wire.close()
        self._wires.clear()


def _listen(point: MeetingPoint) -> socket.socket:
    """Listen at the first free port, at every address of this host: the master's name may resolve to another one here
    than elsewhere. Raises CheckPortTaken."""
    trouble = ""
    for each in point.list_all():
        listener = socket.socket(socket.AF_INET6 if ":" in point.address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", each.port))
            listener.listen(4096)
            return listener
        except OSError as error:
            listener.close()
            trouble = trouble or error.strerror or str(error)
    raise CheckPortTaken(trouble)


@dataclass(frozen=True)
class Attendance:
    """The result for a rank other than 0: `met`, or how its attempts ended, commonest first."""

    met: bool
    tries: Mapping[str, int] = field(default_factory=dict)


def attend(point: MeetingPoint, hello: Answer, answer: Answerer, wait_s: float) -> Attendance:
    """Report to rank 0 and carry out its requests until it releases this rank."""
    start, tries, pause = time.monotonic(), Counter[str](), _FIRST_PAUSE_S
    points = itertools.cycle(point.list_all())
    while (left := start + wait_s - time.monotonic()) > 0:
        try:
            wire = _connect(next(points), hello, left)
        except OSError as error:
            tries[explain_error(error)] += 1
            time.sleep(max(0.0, min(pause, start + wait_s - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            continue
        try:  # rank 0 may wait for other ranks for as long as this one would
            while (question := wire.receive(wait_s + _SILENCE_S)).get("ask") != "end":
                wire.send({"time": time.time()} if question.get("ask") == "clock" else answer(question))
        except OSError as error:
            return Attendance(True, {f"then rank 0 was lost: {explain_error(error)}": 1})
        finally:
            wire.close()
        return Attendance(True)
    return Attendance(False, dict(tries.most_common()))


def _connect(point: MeetingPoint, hello: Answer, limit_s: float) -> Wire:
    wire = Wire(socket.create_connection((point.address, point.port), timeout=min(limit_s, _CONNECT_S)))
    try:
        wire.send({"launch": point.launch, **hello})
        wire.receive(min(limit_s, 2 * _HELLO_S))  # rank 0 may first have to wait for a stranger
    except OSError as error:
        wire.close()
        raise ConnectionError("something answered that is not rank 0 of this launch") from error
    return wire


def explain_error(error: OSError) -> str:
    """The meaning of a connection error."""
    if isinstance(error, socket.gaierror):
        return "the name is not known here"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer: a firewall, or an address that leads elsewhere"
    words = {
        errno.ECONNREFUSED: "connection refused: nothing listens there",
        errno.EHOSTUNREACH: "no route to that host",
        errno.ENETUNREACH: "no network leads there",
    }
    return words.get(error.errno or 0) or error.strerror or str(error)


# --- verdicts: attendance, nodes, clocks, files

_SKEW_S = 1.0
_SHOWN = 8


def judge_meeting(
    around: MachineView, reports: Sequence[Report], missing: Sequence[int], point: MeetingPoint, wait_s: float
) -> CheckResult:
    """Rank 0's view: which ranks reported in time, and which nodes no rank reported from."""
    if not missing:
        hosts = len({report.host for report in reports})
        return good(f"all {around.world} ranks on {render_plural(hosts, 'node')} met at {point}")
    came = list_some([f"{report.rank} ({report.host})" for report in reports], _SHOWN)
    absent = list_absent_hosts(around, reports)
    from_where = f"; no rank came from {list_some(absent, _SHOWN)}" if absent else ""
    said = f"rank{'s' * (len(missing) > 1)} {list_ranks(missing)} of {around.world} did not come to {point} within "
    remedy = (
        "look at the output of these ranks: they were not started, or say there why they could not reach this address; "
        f"from their node: getent hosts {point.address}; nc -zv {point.address} {point.port}"
    )
    if absent:
        remedy += f"; leave a node out with --exclude={absent[0]}"
    return bad(f"{said}{render_seconds(wait_s)}; came: {came}{from_where}", remedy)


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks in short form: [1, 2, 3, 7] -> "1-3, 7"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return list_some([f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts], _SHOWN)


def list_absent_hosts(around: MachineView, reports: Sequence[Report]) -> list[str]:
    """Nodes of the job, as the scheduler names them, that no rank reported from. Short names are compared, ignoring
    case, since schedulers differ in domains."""
    came, hosts = {report.host.partition(".")[0].lower() for report in reports}, list[str]()
    with contextlib.suppress(SiteError):
        for scheduler in around.schedulers:
            if found := scheduler.find_hosts(around.environ, scheduler.launcher, ""):
                hosts = list(dict.fromkeys(found[1]))
                break
    return [host for host in hosts if host.partition(".")[0].lower() not in came]


def judge_attendance(around: MachineView, attended: Attendance, point: MeetingPoint, wait_s: float) -> CheckResult:
    """The view of a rank that tried to report."""
    tries = "; ".join(f"{count} x {words}" for words, count in attended.tries.items())
    if attended.met and tries:
        return bad(f"met rank 0 at {point}, {tries}", "look at the output of rank 0")
    if attended.met:
        return good(f"met rank 0 at {point}")
    said = f"rank {around.rank} on {around.host} could not reach rank 0 at {point} within {render_seconds(wait_s)}"
    remedy = (
        "if others reach it, this node's network or firewall is wrong: leave the node out; if none does, rank 0 was "
        f"not started, or MASTER_ADDR is no address of its node: getent hosts {point.address} on both"
    )
    return bad(f"{said}: {tries or 'no try was possible'}", remedy)


def judge_port(point: MeetingPoint, trouble: str) -> CheckResult:
    """Rank 0 listens where training will, so a taken port is known in advance."""
    if not trouble:
        return good(f"rank 0 listens at port {point.port}")
    remedy = "export MASTER_PORT with another port for all ranks, or ask for whole nodes (--exclusive)"
    return bad(f"rank 0 cannot listen at port {point.port}: {trouble}", remedy)


def judge_nodes(reports: Sequence[Report]) -> CheckResult:
    """Whether nodes have as many GPUs as each other."""
    counts = {report.host: fact for report in reports if (fact := report.fact("gpus")) is not None}
    if len(counts) < 2:
        return unknown("one node has no peers")
    usual = median(float(count) for count in counts.values())
    if odd := [f"{host} has {float(count):g}" for host, count in counts.items() if float(count) != usual]:
        remedy = "ask for one kind of node (--constraint, or another queue), or leave these out"
        return bad(f"GPUs of a node: {usual:g}, but {list_some(odd, _SHOWN)}", remedy)
    return good(f"{len(counts)} nodes with {usual:g} GPUs each")


def judge_versions(reports: Sequence[Report]) -> CheckResult:
    """Whether Python, torch, Shardway, the driver and the processor are the same everywhere."""
    known = [report for report in reports if report.fact("python") is not None]
    if len(known) < 2:
        return unknown("one node has no peers")
    differ = []
    for name in VERSIONS:
        found = _by_value((str(report.fact(name) or "none"), report.host) for report in known)
        if len(found) > 1:
            differ.append(f"{name}: {_render_places(found)}")
    if not differ:
        return good(f"equal on {len(known)} nodes")
    remedy = "start all ranks in the same environment: one venv or image on a shared file system"
    only_driver = all(line.startswith("driver") for line in differ)
    return (poor if only_driver else bad)("; ".join(differ), remedy)


def judge_master(reports: Sequence[Report]) -> CheckResult:
    """Whether MASTER_ADDR resolves to one address."""
    addresses = [(report.fact("master_address"), report.host) for report in reports]
    found = _by_value((str(address), host) for address, host in addresses if address is not None)
    if not found:
        return unknown("no node looked it up")
    if len(found) == 1:
        return good(f"{next(iter(found))} on every node")
    remedy = "export MASTER_ADDR with the IPv4 address of rank 0's fast interface instead of a name"
    return poor(_render_places(found), remedy)


def _by_value(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for value, host in pairs:
        found.setdefault(value, []).append(host)
    return found


def _render_places(found: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{value} on {list_some(hosts, 3)}" for value, hosts in sorted(found.items()))


def judge_clocks(clocks: Mapping[str, ClockOffset]) -> CheckResult:
    """Whether clocks agree, as far as the network allows to measure."""
    if not clocks:
        return unknown("one node has one clock")
    off = {host: clock for host, clock in clocks.items() if abs(clock.ahead_s) - clock.error_s > _SKEW_S}
    if off:
        way = {host: "ahead" if each.ahead_s > 0 else "behind" for host, each in off.items()}
        said = list_some([f"{host} {abs(each.ahead_s):.2f} s {way[host]}" for host, each in off.items()], _SHOWN)
        return poor(f"against rank 0: {said}", "tell the site's support: time synchronisation (chrony) fails there")
    largest = max(clocks.values(), key=lambda clock: abs(clock.ahead_s))
    return good(f"within {1000 * (abs(largest.ahead_s) + largest.error_s):.2g} ms on {len(clocks) + 1} nodes")


def judge_visible(folder: str, seen: Mapping[str, float | None], limit_s: float) -> CheckResult:
    """Whether each other node saw a new file of the first node, and after how long."""
    if not seen:
        return unknown("one node sees its own files")
    blind = [host for host, after in seen.items() if after is None]
    if blind:
        remedy = (
            "choose a run directory on a file system that all nodes share (--dir, run.root), and mount it in containers"
        )
        said = f"a file that the first node wrote in {folder} is not there within {limit_s:g} s on"
        return bad(f"{said} {list_some(blind, _SHOWN)}", remedy)
    slowest = max(after for after in seen.values() if after is not None)
    return good(f"{folder}: {render_plural(len(seen), 'other node')} saw a new file after {slowest:.2f} s at most")


# --- verdicts: torch probes

Probes = Mapping[int, Mapping[str, Any]]  # rank -> the result of its probe; without an answer it has an "error"
_SLOW_IMPORT_S = 20.0
_RANKS_SHOWN = 4
_REMEDIES = {
    "python": "look at the environment of the ranks: `python -c 'import shardway'` on that node",
    "import torch": "look at the environment: `python -c 'import torch'` on that node, its modules and its image",
    "CUDA": "check that this torch is a CUDA build for this driver: python -m torch.utils.collect_env",
    "matrix product": "the GPU hangs: leave the node out and tell the site's support",
    "process group": "choose the interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says what it tries",
    "sum over all ranks": (
        "run again with NCCL_DEBUG=INFO and look for the last transport it names; try NCCL_IB_DISABLE=1, then "
        "NCCL_P2P_DISABLE=1, to learn which one fails"
    ),
}


def judge_start(probes: Probes, hosts: Mapping[int, str]) -> CheckResult:
    """Whether every rank finished; else the first stage that a rank did not pass, which is the cause."""
    failed = {rank: found for rank, found in probes.items() if "error" in found}
    if not failed:
        first = next(iter(probes.values()))
        return good(f"torch {first.get('torch', 'n/a')}" + (f", CUDA {first['cuda']}" if first.get("cuda") else ""))
    stages = {rank: str(found.get("stage", "python")) for rank, found in failed.items()}
    order = list(_REMEDIES)
    rank = min(stages, key=lambda each: order.index(stages[each]) if stages[each] in order else len(order))
    stage = stages[rank]
    others = f" ({len(failed) - 1} other ranks failed too)" if len(failed) > 1 else ""
    said = f"rank {rank} on {hosts.get(rank, 'n/a')}, {stage}: {failed[rank]['error']}{others}"
    return bad(said, _REMEDIES.get(stage, _REMEDIES["process group"]))


def judge_import(probes: Probes, hosts: Mapping[int, str]) -> CheckResult:
    """How long the slowest rank took to import torch."""
    seconds = {rank: float(found["import_s"]) for rank, found in probes.items() if "import_s" in found}
    if not seconds:
        return unknown("no rank could import torch")
    rank = max(seconds, key=lambda each: seconds[each])
    usual = median(seconds.values())
    said = f"{seconds[rank]:.1f} s on rank {rank} ({hosts.get(rank, 'n/a')}), {usual:.1f} s the median"
    if seconds[rank] > _SLOW_IMPORT_S:
        return poor(said, "use a container image (one file), or unpack the environment on each node's own disk")
    return good(said)


def judge_sum(probes: Probes, device: str) -> CheckResult:
    """Time of the sum, and its bus bandwidth as NCCL's tests define it."""
    seconds = [float(found["sum_s"]) for found in probes.values() if "sum_s" in found]
    if len(seconds) < len(probes) or not seconds:
        return unknown(f"{len(seconds)} of {len(probes)} ranks got to it") if seconds else unknown("no rank got to it")
    size = next(int(found["sum_bytes"]) for found in probes.values())
    bus = size / max(*seconds, 1e-9) * 2 * (len(seconds) - 1) / len(seconds)
    library = "NCCL" if device == "cuda" else "gloo"
    return good(
        f"{size / 2**20:g} MiB over {len(seconds)} ranks by {library} in {1000 * max(seconds):.2f} ms: "
        f"{bus / 1e9:.2f} GB/s a rank",
        sum_s=max(seconds),
    )


SLOW_OF_SITE = 0.9
"""A GPU below this part of what was measured on the site is slow."""


def judge_matmul(probes: Probes, hosts: Mapping[int, str], of_site: float | None = None) -> CheckResult:
    """TFLOP/s of each GPU, beside its peers and beside what the site's profile has as measured."""
    rates = {rank: float(found["tflops"]) for rank, found in probes.items() if "tflops" in found}
    number_format = next((str(found["format"]) for found in probes.values() if "format" in found), "bf16")
    return _judge_rates(rates, hosts, f"TFLOP/s in {number_format}", of_site)


def judge_copy(probes: Probes, hosts: Mapping[int, str], of_site: float | None = None) -> CheckResult:
    """GB/s that each GPU reads and writes in a copy, beside its peers and what the site's profile has as measured."""
    rates = {rank: float(found["copy_gbs"]) for rank, found in probes.items() if "copy_gbs" in found}
    return _judge_rates(rates, hosts, "GB/s read and written", of_site)


def _judge_rates(rates: Mapping[int, float], hosts: Mapping[int, str], unit: str, of_site: float | None) -> CheckResult:
    """A GPU below 80 % of the median or 90 % of the site's rate is slow, one below 60 % of the median defective."""
    if not rates:
        return unknown("no GPU was measured")
    usual = median(rates.values())
    least = max(0.8 * usual, SLOW_OF_SITE * (of_site or 0.0))
    slow = [f"rank {rank} ({hosts.get(rank, 'n/a')}) {rate:.0f}" for rank, rate in rates.items() if rate < least]
    said = f"{usual:.0f} {unit}, the median of {len(rates)}"
    if of_site:
        said += f"; {of_site:.0f} were measured on this site"
    if slow:
        remedy = "one slow GPU slows all ranks: leave its node out and tell the site's support"
        judge = bad if min(rates.values()) < 0.6 * usual else poor
        return judge(f"{said}; {list_some(slow, _RANKS_SHOWN)}", remedy)
    return good(said)


def judge_peers(probes: Probes, hosts: Mapping[int, str]) -> CheckResult:
    """Whether each GPU reaches the others of its node without the host."""
    known = {rank: found for rank, found in probes.items() if found.get("others")}
    if not known:
        return unknown("no node here has several GPUs that one rank sees")
    apart = [f"rank {rank} ({hosts.get(rank, 'n/a')})" for rank, found in known.items() if found.get("apart")]
    if apart:
        remedy = "start without --gpus-per-task and --gpu-bind; in a container, give it all devices of the node"
        return poor(f"GPUs do not reach each other directly: {list_some(apart, _RANKS_SHOWN)}", remedy)
    return good("all GPUs of a node reach each other directly")
