"""What a measurement of the collectives found, beside what the links should reach: as a table, in words, as facts.

Invariants:
- Without torch. A rate that no source states is "n/a", never guessed.
- Every sentence of the verdict follows from numbers that the facts (`facts`) hold too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardway.bench.bandwidth import (
    BUS_FACTORS,
    LEAST_PAIRS,
    SLOW,
    CostFit,
    PairTime,
    algorithm_bandwidth,
    bus_bandwidth,
    find_slow,
    find_slow_ranks,
    fit_cost,
    format_rate,
    left_out_error,
    usual_seconds,
)
from shardway.errors import list_some
from shardway.hardware.catalogue import find_accelerator, load_links
from shardway.sites.schema import SiteProfile
from shardway.units import render_bytes, render_plural
from shardway.watch.words import align_cells

# --- what was measured


@dataclass(frozen=True)
class CallTimes:
    """Calls of one collective with one size: seconds of the slowest rank, median, 10th and 99th percentile over `count`
    calls. `scope` is "all" ranks, those "within" a node or "between" nodes; `ranks` are in each group of it."""

    scope: str
    collective: str
    size: int
    ranks: int
    count: int
    median_s: float
    p10_s: float
    p99_s: float

    @property
    def algorithm(self) -> float:
        """Algorithm bandwidth, bytes per second."""
        return algorithm_bandwidth(self.size, self.median_s)

    @property
    def bus(self) -> float:
        """Bus bandwidth, bytes per second."""
        return bus_bandwidth(self.collective, self.size, self.median_s, self.ranks)


@dataclass(frozen=True)
class WrongData:
    """A rank that got a wrong result, and what is wrong with it."""

    scope: str
    collective: str
    size: int
    rank: int
    what: str


@dataclass(frozen=True)
class RankLink:
    """A rank's device by its driver's name, and the active network ports of its node, as their driver rates them: bytes
    per second, one direction, of one port, and of all for each rank of the node; 0 for none."""

    device: str
    port: float
    ports_a_rank: float


@dataclass
class CommReport:
    """All that was measured. `nodes` and `hosts` are by rank; `alone` are pairs that were measured again by themselves,
    for each kind with a usual pair; `seconds` is how long it took."""

    backend: str
    device: str
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    links: tuple[RankLink, ...]
    times: list[CallTimes] = field(default_factory=list)
    left_out: list[tuple[str, str, int]] = field(default_factory=list)
    wrong: list[WrongData] = field(default_factory=list)
    pairs: list[PairTime] = field(default_factory=list)
    pairs_left_out: int = 0
    alone: list[PairTime] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def node_count(self) -> int:
        return len(set(self.nodes))

    @property
    def ranks_per_node(self) -> int:
        return max(self.nodes.count(node) for node in set(self.nodes))

    def list_fits(self) -> list[CollectiveFit]:
        """The cost of each collective of each scope, by the 10th percentiles: by what a call takes where nothing else
        disturbs it."""
        rows: dict[tuple[str, str], list[CallTimes]] = {}
        for each in self.times:
            rows.setdefault((each.scope, each.collective), []).append(each)
        fits = []
        for found in rows.values():
            points = [(float(each.size), each.p10_s) for each in found]
            fits.append(CollectiveFit(tuple(found), fit_cost(points), left_out_error(points)))
        return fits

    def find_slow_pairs(self) -> list[tuple[PairTime, float]]:
        """The pairs that are slow among all and by themselves too, with how many times the usual time they take."""
        slow = []
        for pair in self.alone:
            usual = next(each for each in self.alone if each.kind == pair.kind)  # it was measured first
            times = pair.seconds / usual.seconds
            if pair is not usual and times > SLOW:
                slow.append((pair, times))
        return sorted(slow, key=lambda each: -each[1])


@dataclass(frozen=True)
class CollectiveFit:
    """One collective of a scope: its times by size, their fit, and the median relative error of sizes that were left
    out of it (None where there are too few sizes)."""

    times: tuple[CallTimes, ...]
    cost: CostFit | None
    error: float | None

    @property
    def scope(self) -> str:
        return self.times[0].scope

    @property
    def collective(self) -> str:
        return self.times[0].collective

    @property
    def bus(self) -> float | None:
        """Bus bandwidth that the fit tends to, bytes per second; None where time does not grow with size."""
        if self.cost is None or self.cost.beta_s_per_byte <= 0:
            return None
        return BUS_FACTORS[self.collective](self.times[0].ranks) / self.cost.beta_s_per_byte

    @property
    def best(self) -> CallTimes:
        """The size with the highest bus bandwidth."""
        return max(self.times, key=lambda each: each.bus)


# --- what it should be


@dataclass(frozen=True)
class LinkLimit:
    """The bus bandwidth that a link allows, bytes per second in one direction, and which link it is."""

    rate: float
    name: str


@dataclass(frozen=True)
class KnownLinks:
    """What is known of the links of a launch; `whole` and `peer` are of an accelerator to all others of its node and to
    one of them, `network` of a rank's share of its node's adapters, `adapter` of one of these."""

    ranks_per_node: int
    nodes: int
    inside: str = ""
    whole: float | None = None
    peer: float | None = None
    outside: str = ""
    network: float | None = None
    adapter: float | None = None

    def limit(self, scope: str, collective: str, ranks: int) -> LinkLimit | None:
        """What a collective over `ranks` ranks of a scope should reach; None if it is not known."""
        if scope == "within" or (scope == "all" and self.nodes == 1):
            return _name_limit(self._inside(collective, ranks), self.inside)
        if scope == "between" or self.ranks_per_node == 1:
            return _name_limit(self.network, self.outside)
        if collective == "send_recv":  # of the ring one rank of a node sends to another node
            return _name_limit(self.adapter, self.outside)
        if self.network is None:
            return None
        if collective == "all_to_all":  # only what is for ranks of other nodes uses the network
            return _name_limit(self.network * (ranks - 1) / (ranks - self.ranks_per_node), self.outside)
        together, inside = self.network * self.ranks_per_node, self._inside(collective, self.ranks_per_node)
        if inside is not None and inside < together:
            return _name_limit(inside, self.inside)
        return _name_limit(together, self.outside)

    def limit_of(self, fit: CollectiveFit) -> LinkLimit | None:
        """What the collective of a fit should reach."""
        return self.limit(fit.scope, fit.collective, fit.times[0].ranks)

    def pair_limit(self, kind: str) -> LinkLimit | None:
        """What an exchange of two ranks should reach."""
        return self.limit(kind, "send_recv", 2)

    def _inside(self, collective: str, ranks: int) -> float | None:
        if collective == "send_recv":
            return self.peer or self.whole
        rates = [rate for rate in (self.whole, self.peer and self.peer * (ranks - 1)) if rate]
        return min(rates, default=None)


def _name_limit(rate: float | None, name: str) -> LinkLimit | None:
    return LinkLimit(rate, name) if rate else None


def find_known_links(report: CommReport, site: SiteProfile | None = None) -> KnownLinks:
    """The links by a site's profile and the catalogue; where no site is named, the network by the ports of the nodes.
    Nothing is known of what gloo uses: the memory of the host, and whatever carries TCP."""
    known = KnownLinks(report.ranks_per_node, report.node_count)
    if report.backend != "nccl":
        return known
    devices, links = {each.device for each in report.links}, load_links()
    part = find_accelerator(devices.pop()) if len(devices) == 1 else None
    inside = links.get(
        (site.node.link if site is not None else None) or (part.link if part is not None else None) or ""
    )
    if inside is not None:
        whole, peer = inside.bandwidth_bytes_per_s, inside.peer_bandwidth_bytes_per_s
        known = replace(known, inside=inside.name, whole=whole, peer=peer)
    if site is None:
        port, share = (
            min(rates) for rates in zip(*((each.port, each.ports_a_rank) for each in report.links), strict=True)
        )
        return replace(known, outside="active ports of the nodes", network=share or None, adapter=port or None)
    outside = links.get(site.network.link or "")
    if outside is None or outside.bandwidth_bytes_per_s is None:
        return known
    rate, adapters = outside.bandwidth_bytes_per_s, site.network.adapters_per_node
    share = rate * adapters / report.ranks_per_node if adapters else 0.0
    return replace(known, outside=outside.name, network=share or None, adapter=rate)


# --- how it is shown

_SCOPES = {"all": "all ranks", "within": "within nodes", "between": "between nodes"}
_SHOWN_PAIRS = 4
_LOW = 0.6
"""Below this part of what a link is rated at, the verdict says that it is little."""


def render_report(report: CommReport, known: KnownLinks) -> str:
    """The table, the fits and the verdict, without a newline at the end."""
    ranks, hosts = render_plural(len(report.nodes), "rank"), render_plural(report.node_count, "node")
    head = f"{ranks} on {hosts}, {report.backend}, {report.device}; {report.seconds:.1f} s"
    fits = report.list_fits()
    verdict = ["Verdict", *list_verdict(report, known, fits)]
    blocks = [[head], _list_times(report), _list_fit_lines(report, known, fits), verdict]
    return "\n\n".join(map("\n".join, blocks))


def _list_times(report: CommReport) -> list[str]:
    titles = ["collective", "bytes", "calls", "median us", "p99 us", "algbw GB/s", "busbw GB/s", "data"]
    wrong = {(each.scope, each.collective, each.size) for each in report.wrong}
    rows = [
        [
            _name(report, each.scope, each.collective),
            render_bytes(each.size),
            str(each.count),
            f"{each.median_s * 1e6:.1f}",
            f"{each.p99_s * 1e6:.1f}",
            format_rate(each.algorithm),
            format_rate(each.bus),
            "WRONG" if (each.scope, each.collective, each.size) in wrong else "right",
        ]
        for each in report.times
    ]
    return align_cells([titles, *rows], to_the_right=True)


def _name(report: CommReport, scope: str, collective: str) -> str:
    """A collective, and over which ranks if there are several groups of them."""
    alone = len({each.scope for each in report.times}) == 1
    return collective if alone else f"{collective}, {_SCOPES[scope]}"


def _list_fit_lines(report: CommReport, known: KnownLinks, fits: Sequence[CollectiveFit]) -> list[str]:
    """Latency and bandwidth of time = latency + bytes / bandwidth, beside what the link is rated at."""
    titles = ["collective", "latency us", "busbw GB/s", "left-out error", "should be GB/s", "reached"]
    rows = []
    for fit in fits:
        limit = known.limit_of(fit)
        cells = (
            fit.cost and f"{fit.cost.alpha_s * 1e6:.1f}",
            fit.bus and format_rate(fit.bus),
            None if fit.error is None else f"{fit.error:.0%}",
            limit and format_rate(limit.rate),
            limit and f"{fit.best.bus / limit.rate:.0%}",
        )
        rows.append([_name(report, fit.scope, fit.collective), *(cell or "n/a" for cell in cells)])
    return align_cells([titles, *rows], to_the_right=True)


def list_verdict(report: CommReport, known: KnownLinks, fits: Sequence[CollectiveFit] | None = None) -> list[str]:
    """Sentences: whether the data were right, what was reached, which pair is slow, what was left out. `fits` are the
    report's, where they are there already."""
    rates, pairs = _judge_rates(report, known, fits or report.list_fits()), _judge_pairs(report, known)
    return [*_judge_data(report), *rates, *pairs, *_list_left_out(report)]


def _judge_data(report: CommReport) -> Iterator[str]:
    for each in report.wrong:
        host = report.hosts[each.rank]
        yield f"{each.collective} of {render_bytes(each.size)} gave rank {each.rank} ({host}) wrong data: {each.what}"
    if not report.wrong:
        names = len({each.collective for each in report.times})
        yield f"the data of {render_plural(names, 'collective')} were right on every rank at every size"


def _judge_rates(report: CommReport, known: KnownLinks, fits: Sequence[CollectiveFit]) -> Iterator[str]:
    unknown = []
    for scope in dict.fromkeys(each.scope for each in report.times):
        rated = [(fit, limit) for fit in fits if fit.scope == scope and (limit := known.limit_of(fit)) is not None]
        if not rated:
            unknown.append(_SCOPES[scope])
            continue
        found = [(fit.best.bus / limit.rate, fit.collective, fit.best.bus, limit) for fit, limit in rated]
        shares = sorted(found, key=lambda each: each[:2])
        (least, worst, *_), (most, best, *_) = shares[0], shares[-1]
        span = f"{least:.0%} ({worst}) to {most:.0%} ({best})" if len(shares) > 1 else f"{least:.0%} ({worst})"
        links = ", ".join(dict.fromkeys(limit.name for _, limit in rated))
        yield f"{_SCOPES[scope]}: {span} of what the links should reach ({links})"
        for share, name, bus, limit in shares:
            if share < _LOW:
                yield (
                    f"this is little: {_SCOPES[scope]}, {name} reaches {format_rate(bus)} GB/s of "
                    f"{format_rate(limit.rate)} ({limit.name})"
                )
    if unknown:
        why = (
            "gloo sends over the host's memory and TCP, which no catalogue rates"
            if report.backend == "gloo"
            else "the catalogue does not have these links; --site names a profile that does"
        )
        yield f"{', '.join(unknown)}: what should be reached is n/a ({why})"


def _judge_pairs(report: CommReport, known: KnownLinks) -> Iterator[str]:
    slow = report.find_slow_pairs()
    bad_ranks = find_slow_ranks(report.pairs, find_slow(report.pairs)) if slow else []
    bad_ranks = [rank for rank in bad_ranks if any(rank in (pair.first, pair.second) for pair, _ in slow)]
    for rank in bad_ranks:
        yield f"slow: rank {rank} ({report.hosts[rank]}) with every rank that it was paired with"
    named = [(pair, times) for pair, times in slow if not {pair.first, pair.second} & set(bad_ranks)]
    for pair, times in named[:_SHOWN_PAIRS]:
        rate = format_rate(pair.bandwidth)
        yield (
            f"slow pair: {_render_pair(report, pair)} at {rate} GB/s each way, {times:.1f} times the time of a usual "
            f"pair{_render_limit(known, pair)}"
        )
    if len(named) > _SHOWN_PAIRS:
        yield f"and {render_plural(len(named) - _SHOWN_PAIRS, 'slow pair')} more"
    for kind in dict.fromkeys(pair.kind for pair in report.pairs):
        alike = [pair for pair in report.pairs if pair.kind == kind]
        usual = usual_seconds(alike, kind)
        place = _SCOPES[kind] if report.node_count > 1 else "between ranks"
        size, few = alike[0].size, " (too few to say that one is slow)" if len(alike) < LEAST_PAIRS else ""
        none = "" if slow or few else f"; none is slow (over {SLOW:g} times that, also when measured alone)"
        yield (
            f"{place}, {render_plural(len(alike), 'pair')} exchanged {render_bytes(size)} in {usual * 1e6:.0f} us "
            f"({format_rate(size / usual)} GB/s each way) at the median{few}{none}"
        )


def _render_pair(report: CommReport, pair: PairTime) -> str:
    hosts = report.hosts[pair.first], report.hosts[pair.second]
    if pair.kind == "within":
        return f"ranks {pair.first} and {pair.second} ({hosts[0]})"
    return f"ranks {pair.first} ({hosts[0]}) and {pair.second} ({hosts[1]})"


def _render_limit(known: KnownLinks, pair: PairTime) -> str:
    limit = known.pair_limit(pair.kind)
    return "" if limit is None else f", {pair.bandwidth / limit.rate:.0%} of {format_rate(limit.rate)} ({limit.name})"


def _list_left_out(report: CommReport) -> Iterator[str]:
    missing: dict[tuple[str, str], list[int]] = {}
    for scope, collective, size in report.left_out:
        missing.setdefault((scope, collective), []).append(size)
    for (scope, collective), sizes in missing.items():
        shown = list_some([render_bytes(size) for size in sizes], 4)
        yield f"left out for lack of time (--seconds): {collective} over {_SCOPES[scope]} of {shown}"
    if report.pairs_left_out:
        yield f"left out for lack of time (--seconds): {render_plural(report.pairs_left_out, 'pair')}"


# --- as facts


def render_facts(report: CommReport, known: KnownLinks) -> Mapping[str, Any]:
    """Everything as JSON; times in seconds, rates in bytes per second, None for what is not known."""
    found, fits = report.list_fits(), []
    for fit in found:
        limit = known.limit_of(fit)
        fits.append(
            {
                "scope": fit.scope,
                "collective": fit.collective,
                "ranks": fit.times[0].ranks,
                "latency_s": fit.cost and fit.cost.alpha_s,
                "seconds_per_byte": fit.cost and fit.cost.beta_s_per_byte,
                "bus_bytes_per_s": fit.bus,
                "left_out_error": fit.error,
                "should_be_bytes_per_s": limit and limit.rate,
                "link": limit and limit.name,
                "reached": limit and fit.best.bus / limit.rate,
            }
        )
    return {
        "format": 1,
        "backend": report.backend,
        "device": report.device,
        "hosts": list(report.hosts),
        "nodes": list(report.nodes),
        "seconds": report.seconds,
        "times": [
            {**asdict(each), "algorithm_bytes_per_s": each.algorithm, "bus_bytes_per_s": each.bus}
            for each in report.times
        ],
        "fits": fits,
        "wrong": [asdict(each) for each in report.wrong],
        "pairs": [_list_pair(pair) for pair in report.pairs],
        "slow_pairs": [{**_list_pair(pair), "times_usual": times} for pair, times in report.find_slow_pairs()],
        "left_out": [{"scope": scope, "collective": name, "size": size} for scope, name, size in report.left_out],
        "pairs_left_out": report.pairs_left_out,
        "verdict": list_verdict(report, known, found),
    }


def _list_pair(pair: PairTime) -> Mapping[str, Any]:
    return {**asdict(pair), "bytes_per_s": pair.bandwidth}
