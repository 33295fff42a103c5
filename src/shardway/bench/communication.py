"""Measures the collectives between the ranks of a launch: over all, within nodes and between nodes, and pair by pair.

Invariants:
- Every decision (how many calls, what is left out, when it is over) follows from numbers that all ranks have
  exchanged, so no rank waits for another that has gone on.
- The time of a call is that of the slowest rank. Ranks are aligned before each call, and data are checked at each size.
- A wrong result is a part of the report, not an error: all that is wrong is found before anything is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from shardway.bench.bandwidth import PairTime, find_slow, list_rounds, list_sizes, percentile, round_size, usual_seconds
from shardway.bench.collectives import CALLS, CollectiveBuffers, GroupPlace, exchange
from shardway.bench.comm_report import CallTimes, CommReport, RankLink, WrongData
from shardway.bench.kernels import CallTimer, DeviceTimer, HostTimer
from shardway.errors import LostContact, Problem, UserError, check_no_problems
from shardway.hardware.limits import read_memory_left
from shardway.hardware.probe import list_ports
from shardway.parallel.mesh import split_ranks
from shardway.ranks.start import Ranks
from shardway.units import render_bytes, render_plural

# --- where the ranks are


@dataclass(frozen=True)
class RankPlaces:
    """The node of each rank, numbered in the order of their first ranks, and the host's name of each."""

    nodes: tuple[int, ...]
    hosts: tuple[str, ...]

    @property
    def members(self) -> list[list[int]]:
        """The ranks of each node."""
        return [[rank for rank, node in enumerate(self.nodes) if node == each] for each in range(max(self.nodes) + 1)]

    def list_parts(self) -> Mapping[str, list[list[int]]]:
        """By scope, the groups of ranks that are measured at the same time: of a scope the largest ones alone, so that
        all have as many ranks. Where nodes have one rank, or there is one node, all ranks are all there is."""
        scopes = {"all": [list(range(len(self.nodes)))]}
        members = self.members
        most = max(map(len, members))
        if len(members) > 1 and most > 1:
            scopes["within"] = members
            scopes["between"] = [[part[k] for part in members if k < len(part)] for k in range(most)]
        return {
            scope: [part for part in parts if len(part) == max(map(len, parts)) and len(part) > 1]
            for scope, parts in scopes.items()
        }

    def list_pair_rounds(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """Rounds of pairs that exchange at the same time, with their kind: every pair of a node's ranks; and for each
        pair of nodes the ranks with the same number there."""
        members = self.members
        most = max(map(len, members))
        rounds = []
        for met in list_rounds(most):
            pairs = [(part[a], part[b]) for part in members for a, b in met if b < len(part)]
            rounds.append(("within", pairs))
        for met in list_rounds(len(members)):
            pairs = [
                (min(pair), max(pair))
                for a, b in met
                for pair in zip(members[a], members[b], strict=False)  # as many as the smaller node has
            ]
            rounds.append(("between", pairs))
        return [each for each in rounds if each[1]]


def find_places(ranks: Ranks, host: str) -> RankPlaces:
    """The nodes as the launcher numbers them; as the hosts' names show them where it does not. Called on all ranks
    together."""
    found = ranks.gather((ranks.placement.node, host))
    keys: list[object] = [node for node, _ in found]
    if None in keys:
        keys = [name for _, name in found]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return RankPlaces(tuple(numbers[key] for key in keys), tuple(name for _, name in found))


# --- the time that may be used

_PAIRS_SHARE, _ROUND_S = 0.2, 0.5
"""What is kept for pairs: a part of the whole time, and no more than so many seconds for a round of them."""

_TURNS = 12
_LEAST_CALLS, _MOST_CALLS, _TRIALS = 3, 400, 2
"""Calls of one size in one turn."""


@dataclass
class TimeBox:
    """The seconds that all of it may take. `used` is what rank 0 had used when the ranks last spoke."""

    ranks: Ranks
    seconds: float
    now: Callable[[], float] = time.monotonic
    used: float = 0.0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.now()

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.used)

    def agree(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks for each value, on every rank, and the time that rank 0 has used."""
        used = self.now() - self.started if self.ranks.is_first else 0.0
        shared = torch.tensor([*values, used], dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.ranks.group)
        *largest, self.used = shared.tolist()
        return largest

    def count_calls(self, seconds: float, share_s: float) -> int:
        """How many calls of so many seconds a share of the time holds: a few at least, as far as all of it allows."""
        count = int(share_s / max(seconds, 1e-9))
        least = min(_LEAST_CALLS, max(1, int(self.left / max(seconds, 1e-9))))
        return max(least, min(count, _MOST_CALLS))


# --- what is measured


@dataclass(frozen=True)
class CommRequest:
    """What is measured: collectives, bytes (None: as the device suggests), about how many seconds it may take."""

    collectives: tuple[str, ...] = tuple(CALLS)
    sizes: tuple[int, ...] | None = None
    seconds: float = 20.0


CPU_SIZES = list_sizes(2**10, 2**24)
DEVICE_SIZES = list_sizes(2**10, 2**30)
_PAIR_BYTES = {"cpu": 2**20, "cuda": 2**26}
"""So large a message shows the bandwidth of a link; of smaller sizes the largest is taken."""


@dataclass(frozen=True)
class CommBench:
    """The measurement as seen from one rank; `call` is what calls a collective, and may be another one in tests."""

    ranks: Ranks
    places: RankPlaces
    request: CommRequest
    box: TimeBox
    clock: CallTimer
    calls: Mapping[str, Callable[[CollectiveBuffers], None]] = field(default_factory=lambda: CALLS)

    @property
    def sizes(self) -> tuple[int, ...]:
        on_cpu = self.ranks.device.type == "cpu"
        return tuple(sorted(set(self.request.sizes or (CPU_SIZES if on_cpu else DEVICE_SIZES))))

    def run(self) -> CommReport:
        """Measure everything; the report is complete on rank 0. Called on all ranks together. Raises UserError where
        memory does not hold the largest size, LostContact where a rank is lost."""
        self.check_memory()
        link = _find_link(self.ranks)
        report = CommReport(
            backend=dist.get_backend() if self.ranks.device.type == "cpu" else "nccl",
            device=link.device,
            hosts=self.places.hosts,
            nodes=self.places.nodes,
            links=tuple(self.ranks.gather(link)),
        )
        parts = {
            scope: (_join(self.ranks.rank, scope, each), len(each[0]))
            for scope, each in self.places.list_parts().items()
            if each
        }
        cells = [(scope, name) for scope in parts for name in self.request.collectives]
        pairs_s = min(_PAIRS_SHARE * self.box.seconds, _ROUND_S * len(self.places.list_pair_rounds()))
        for index, (scope, name) in enumerate(cells):
            place, members = parts[scope]
            with self._contact(f"{name} was measured"):
                share = (self.box.left - pairs_s) / (len(cells) - index)
                self._measure_sizes(report, scope, name, place, members, share)
        with self._contact("pairs of ranks were measured"):
            self._measure_pairs(report)
        report.seconds = self.box.used
        return report

    def check_memory(self) -> None:
        """Raise the same UserError on every rank where the largest size needs more memory than one of them has left:
        what is sent, what is received, and what the library copies."""

        def check() -> None:
            device, here = self.ranks.device, self.ranks.placement.local_world
            left = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_memory_left() // here
            largest = self.sizes[-1]
            if 3 * largest > left:
                shown = render_bytes(max(1, left // 3 // 2**20) * 2**20)
                what = (
                    f"{render_bytes(largest)} needs about {render_bytes(3 * largest)} a rank, and rank "
                    f"{self.ranks.rank} ({self.places.hosts[self.ranks.rank]}) has about "
                    f"{render_bytes(left // 2**20 * 2**20)} left"
                )
                origin = "command line" if self.request.sizes else "default"
                check_no_problems("the command line", [Problem("--sizes", what, origin, f"up to {shown}")])

        self.ranks.together(check)

    # --- the sizes of one collective

    def _measure_sizes(
        self, report: CommReport, scope: str, name: str, place: GroupPlace | None, members: int, share_s: float
    ) -> None:
        """Each size from the smallest on, in a few turns, so that what disturbs the machine for a while disturbs all
        sizes alike; the larger ones are left out once they take longer than is left."""
        began, overhead_s, last, usual = self.box.used, 0.0, 1, 0.0
        found: dict[int, list[float]] = {}
        sizes = tuple(dict.fromkeys(round_size(name, size, members) for size in self.sizes))
        for turn in range(_TURNS):
            for index, size in enumerate(sizes):
                left = share_s - (self.box.used - began)
                expected = overhead_s + (_TRIALS + _LEAST_CALLS + 2) * usual * size / last
                if self.box.used > self.box.seconds or ((turn or index) and expected > left):
                    break
                share = max(0.0, left) / (len(sizes) * (_TURNS - turn) - index)
                times, overhead_s = self._measure(report, scope, name, size, place, share, first=not turn)
                last, usual = size, median(times)
                found.setdefault(size, []).extend(times)
            left_out, sizes = sizes[len(found) :], sizes[: len(found)]
            report.left_out += [(scope, name, size) for size in left_out]
        for size, times in found.items():
            shown = (len(times), median(times), percentile(times, 0.1), percentile(times, 0.99))
            report.times.append(CallTimes(scope, name, size, members, *shown))

    def _measure(
        self,
        report: CommReport,
        scope: str,
        name: str,
        size: int,
        place: GroupPlace | None,
        share_s: float,
        *,
        first: bool,
    ) -> tuple[list[float], float]:
        """Seconds of each call by the slowest rank, and of all that is not timed; the data are checked the `first`
        time. A rank that is in no group only agrees."""
        before = self.box.used
        buffers = None if place is None else CollectiveBuffers(name, size, place, self.ranks.device)
        trial, whole_s = self._time(buffers, _TRIALS, warm=True)
        slowest, whole = self.box.agree([max(trial, default=0.0), whole_s / _TRIALS])
        count = self.box.count_calls(max(slowest, whole), share_s)
        times, whole_s = self._time(buffers, count)
        wrong = None
        if buffers is not None and first:
            buffers.fill(1)
            self.calls[name](buffers)
            wrong = buffers.check(1)
        *agreed, whole, is_wrong = self.box.agree([*(times or [0.0] * count), whole_s, float(wrong is not None)])
        if is_wrong:
            found = self.ranks.gather(None if wrong is None else str(wrong))
            each = [(rank, text) for rank, text in enumerate(found) if text is not None]
            report.wrong += [WrongData(scope, name, size, rank, text) for rank, text in each]
        return agreed, max(0.0, self.box.used - before - whole)

    def _time(self, buffers: CollectiveBuffers | None, count: int, *, warm: bool = False) -> tuple[list[float], float]:
        """Seconds of each call, and of the loop around them, in which the ranks align themselves too."""
        if buffers is None:
            return [], 0.0
        marker = torch.zeros(1, device=self.ranks.device)
        call, group = self.calls[buffers.collective], buffers.place.group
        if warm:
            buffers.fill(0)
            call(buffers)
        began = time.perf_counter()
        times = self.clock.seconds(lambda: call(buffers), lambda: _align(marker, group), count)
        return times, time.perf_counter() - began

    # --- pairs

    def _measure_pairs(self, report: CommReport) -> None:
        """Every pair in rounds of pairs that exchange at once. What is slow there may only have been disturbed by the
        others: it is measured again by itself, with the most usual pair, and is slow if it is still."""
        wanted = _PAIR_BYTES.get(self.ranks.device.type, 2**20)
        size = max((each for each in self.sizes if each <= wanted), default=self.sizes[0])
        size = round_size("send_recv", size, 2)
        rounds = self.places.list_pair_rounds()
        for index, (kind, pairs) in enumerate(rounds):
            if index and self.box.used > self.box.seconds:
                report.pairs_left_out = sum(len(each) for _, each in rounds[index:])
                break
            share = self.box.left * 0.7 / (len(rounds) - index)
            report.pairs += self._measure_round(kind, pairs, size, share)
        suspects = find_slow(report.pairs)[:_MOST_SUSPECTS]
        for kind in dict.fromkeys(pair.kind for pair in suspects):
            usual = usual_seconds(report.pairs, kind)
            alike = [pair for pair in report.pairs if pair.kind == kind]
            typical = min(alike, key=lambda pair: abs(pair.seconds - usual))
            report.alone += self._measure_alone(kind, [typical, *(each for each in suspects if each.kind == kind)])

    def _measure_alone(self, kind: str, pairs: Sequence[PairTime]) -> list[PairTime]:
        found = []
        for index, pair in enumerate(pairs):
            share = self.box.left / (len(pairs) - index)
            found += self._measure_round(kind, [(pair.first, pair.second)], pair.size, share)
        return found

    def _measure_round(self, kind: str, pairs: Sequence[tuple[int, int]], size: int, share_s: float) -> list[PairTime]:
        rank, device = self.ranks.rank, self.ranks.device
        peer = next((a + b - rank for a, b in pairs if rank in (a, b)), None)
        sent, received = (torch.zeros(size // 4, device=device) for _ in range(2))

        def swap() -> None:
            if peer is not None:
                exchange(sent, peer, received, peer)

        def seconds(count: int) -> list[float]:
            return [] if peer is None else self.clock.seconds(swap, lambda: None, count)

        self.box.agree([])  # all pairs of the round begin together
        trial = seconds(_TRIALS + 1)[1:]
        [slowest] = self.box.agree([max(trial, default=0.0)])
        times = seconds(min(_MOST_EXCHANGES, self.box.count_calls(slowest, share_s)))
        found = self.ranks.gather(percentile(times, 0.1) if times else 0.0)
        return [PairTime(a, b, kind, size, max(found[a], found[b])) for a, b in pairs]

    @contextmanager
    def _contact(self, when: str) -> Iterator[None]:
        try:
            with self.ranks.contact(f"while {when}"):
                yield
        except LostContact as error:
            raise LostContact(
                f"{str(error).splitlines()[0]}\n"
                f"  Before that {when}. To do: look for the rank whose own message is an error, or that was ended (its "
                "log, `dmesg` on its node), and run the same command again; `shardway doctor` checks each node."
            ) from error


_MOST_EXCHANGES = 50
_MOST_SUSPECTS = 8


def _align(marker: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(marker, group=group)


def _join(rank: int, scope: str, parts: Sequence[Sequence[int]]) -> GroupPlace | None:
    """This rank's place in the groups of a scope; None where it is in none. Called on all ranks together."""
    group = None if scope == "all" else split_ranks(parts)
    own = next((part for part in parts if rank in part), None)
    return None if own is None else GroupPlace(list(own).index(rank), own, group)


def _find_link(ranks: Ranks) -> RankLink:
    """What this rank's device is, and the rate of its node's fastest ports that are active."""
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    rates = [port.rate_gbit_s * 1e9 / 8 for port in list_ports() if port.active]
    fastest = [rate for rate in rates if rate == max(rates)]
    return RankLink(device, max(fastest, default=0.0), sum(fastest) / ranks.placement.local_world)


def measure_communication(ranks: Ranks, host: str, request: CommRequest) -> CommReport:
    """Measure what `request` names between all ranks of the launch. Called on all of them together. Raises as
    `CommBench.run`, and UserError for a single rank."""
    if ranks.world < 2:
        raise UserError(describe_lone_rank(ranks.world))
    places = find_places(ranks, host)
    clock = DeviceTimer() if ranks.device.type == "cuda" else HostTimer()
    return CommBench(ranks, places, request, TimeBox(ranks, request.seconds), clock).run()


def describe_lone_rank(count: int) -> str:
    """Why so few ranks cannot be measured."""
    return (
        f"{render_plural(count, 'rank')} cannot be measured: this is about what goes between ranks.\n"
        "  allowed: 2 ranks or more\n"
        "  to do: --nproc 2 on this machine, or start it on several ranks (srun, torchrun, `shardway submit --`)"
    )
