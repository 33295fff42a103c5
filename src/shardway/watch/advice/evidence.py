"""Everything that is known of a run when advice is made: its hardware's samples, its events, its account, its attempts.

Invariants:
- Gathering never raises for what a run directory may hold; a fact that is not there is None or empty, never a guess.
- Only the newest start of the samplers counts (the one before it where the newest is too short), so that attempts on
  other nodes are not mixed.
- `steady` samples leave out start-up, the first steps, saves, validations and the end. A foreign command has no events:
  for it the time before the first and after the last lasting use of an accelerator is left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardway.errors import ShardwayError
from shardway.hardware.catalogue import Accelerator, find_accelerator
from shardway.plain_arrays import find_arrays
from shardway.rundir.attempts import Attempt, Result, Submission
from shardway.rundir.directory import RunDir
from shardway.rundir.events import Event
from shardway.telemetry.store import DeviceInfo, HostTelemetry, NodeInfo, read_telemetry
from shardway.watch.advice.events import Break, FoldedEvents, StepEvidence, fold
from shardway.watch.facts import number
from shardway.watch.progress import RunProgress, TimeAccount

if TYPE_CHECKING:
    from shardway.plan.planner import Estimate

FEWEST_SAMPLES = 60
"""With fewer samples of a start there are no verdicts on its hardware."""
SAME_START_S = 300.0  # samplers of one start begin within so many seconds of each other
MARGIN_S = 2.0  # around saves and validations: clocks of two hosts, and the time of a sample
LOG_BYTES = 1 << 17  # of each end of a log that is searched


# --- series


def mean(values: Any) -> float | None:
    """The mean of the values that are there."""
    return _reduce("mean", values)


def spread(values: Any) -> float | None:
    """The standard deviation of the values that are there."""
    return _reduce("std", values)


def share(flags: Any) -> float:
    """The share of True; 0 of nothing."""
    return float(flags.mean()) if len(flags) else 0.0


def quantile(values: Any, q: float) -> float | None:
    """A quantile of the values that are there: 0 the least, 1 the largest."""
    np = find_arrays()

    known = _known(values)
    return None if known is None else float(np.quantile(known, q))


def find_rise(counter: Any) -> float | None:
    """How much a counter rose over its samples; steps back (a driver that was loaded again) count as zero. None without
    a value."""
    np = find_arrays()

    known = _known(counter)
    return None if known is None else float(np.diff(known).clip(0).sum())


def _known(values: Any) -> Any:
    np = find_arrays()

    if values is None or not len(values):
        return None
    known = values[np.isfinite(values)]
    return known.astype(np.float64) if len(known) else None


def _reduce(name: str, values: Any) -> float | None:
    known = _known(values)
    return None if known is None else float(getattr(known, name)())


# --- one accelerator, one host


@dataclass(frozen=True)
class GpuEvidence:
    """One accelerator in the time that is judged. `warm`: samples after start-up and before the end; `steady`: of
    those, the ones outside of saves, validations and first steps."""

    host: str
    device: DeviceInfo
    part: Accelerator | None
    every: Mapping[str, Any]
    warm: Any
    steady: Any

    @property
    def place(self) -> str:
        return f"GPU {self.device.index} of {self.host}"

    @property
    def power_limit_w(self) -> float | None:
        return self.device.power_limit_w or (self.part.power_w if self.part else None)

    @property
    def memory_bytes(self) -> float | None:
        return self.device.memory_bytes or (self.part.memory_bytes if self.part else None)

    def all(self, name: str) -> Any:
        """Every sample of a series; None where it was not sampled."""
        return self.every.get(name)

    def over(self, name: str, mask: Any) -> Any:
        found = self.every.get(name)
        return None if found is None else found[mask]

    def mean(self, name: str) -> float | None:
        """The mean of the steady samples."""
        return mean(self.over(name, self.steady))

    @cached_property
    def use(self) -> float | None:
        return self.mean("use_percent")

    @cached_property
    def power_share(self) -> float | None:
        """Mean power over the power limit, 0 to 1."""
        power, limit = self.mean("power_w"), self.power_limit_w
        return power / limit if power is not None and limit else None

    @cached_property
    def is_idle(self) -> bool | None:
        """Whether it did nothing after start-up; None where its use was not sampled."""
        use = self.over("use_percent", self.warm)
        average, top = mean(use), quantile(use, 0.99)
        return None if average is None or top is None else average < IDLE_PERCENT and top < IDLE_TOP_PERCENT

    @cached_property
    def memory_max(self) -> float | None:
        return quantile(self.all("memory_bytes"), 1.0)


IDLE_PERCENT = 1.0
"""Mean use below which an accelerator counts as unused, if it also never rises above IDLE_TOP_PERCENT for long."""
IDLE_TOP_PERCENT = 5.0


@dataclass(frozen=True)
class HostEvidence:
    """One host in the time that is judged; `times` and all series are cut to it."""

    info: NodeInfo
    times: Any
    series: Mapping[str, Any]
    warm: Any
    steady: Any
    gpus: tuple[GpuEvidence, ...]

    @property
    def host(self) -> str:
        return self.info.host

    def get(self, name: str) -> Any:
        """The steady samples of a series; None where it was not sampled."""
        found = self.series.get(name)
        return None if found is None else found[self.steady]

    def mean(self, name: str) -> float | None:
        return mean(self.get(name))

    def total(self, start: str, end: str) -> float | None:
        """The mean of the sum of all series whose names begin and end so; None where there is none."""
        found = [mean(self.get(name)) for name in self.series if _between(name, start, end)]
        known = [each for each in found if each is not None]
        return sum(known) if known else None

    @cached_property
    def core_use(self) -> list[float]:
        """Mean use of each allowed core, the busiest first."""
        names = (name for name in self.series if _between(name, "core/", "/use_percent"))
        found = (mean(self.get(name)) for name in names)
        return sorted((each for each in found if each is not None), reverse=True)


def _between(name: str, start: str, end: str) -> bool:
    return name.startswith(start) and name.endswith(end)


# --- one attempt


@dataclass(frozen=True)
class AttemptEvidence:
    """A submission: what it asked for, when it began, how it ended."""

    number: int
    submission: Submission | None
    started: float | None
    result: Result | None

    @property
    def is_queued(self) -> bool:
        """Whether a scheduler with a queue had it: a job of this machine begins at once, whatever it asks for."""
        return self.submission is None or self.submission.scheduler != "local"

    @property
    def asked_s(self) -> float | None:
        return number(self.submission.asked, "walltime_s") if self.submission else None

    @property
    def used_s(self) -> float | None:
        if self.result is None or not self.started or self.result.ended <= self.started:
            return None
        return self.result.ended - self.started


@dataclass(frozen=True)
class Evidence:
    """What is known of a run; `now`: the end of what is known, Unix seconds."""

    hosts: tuple[HostEvidence, ...]
    progress: RunProgress | None
    account: TimeAccount | None
    steps: StepEvidence | None
    attempts: tuple[AttemptEvidence, ...]
    values: Mapping[str, Any]
    log: str
    now: float
    state: str
    run: RunDir | None = None
    plans: dict[tuple[tuple[str, Any], ...], Any] = field(default_factory=dict)

    @property
    def has_events(self) -> bool:
        """Whether it is a run of ours, with steps; False for a foreign command."""
        return self.progress is not None and bool(self.progress.attempts)

    @cached_property
    def gpus(self) -> list[GpuEvidence]:
        return [gpu for host in self.hosts for gpu in host.gpus]

    @cached_property
    def used(self) -> list[GpuEvidence]:
        """The accelerators that did something."""
        return [gpu for gpu in self.gpus if gpu.is_idle is False]

    @property
    def measured_s(self) -> float:
        return max((float(host.times[-1] - host.times[0]) for host in self.hosts), default=0.0)

    @property
    def step_ms(self) -> float | None:
        period = self.steps.period_s if self.steps else None
        return None if period is None else 1000 * period

    @property
    def running_s(self) -> float | None:
        """Seconds of rank 0 after start-up and loading, between attempts and unknown ones left out."""
        account = self.account
        if account is None:
            return None
        rest = account.start_s + account.load_s + account.idle_s + account.unaccounted_s + account.end_s
        return max(0.0, account.wall_s - rest)

    @cached_property
    def data_share(self) -> float | None:
        """The share of usual steps' time in which rank 0 waits for data; None where that is unknown."""
        account, between = self.account, self.steps.between_share if self.steps else None
        if account is None or between is None:
            return None
        waits = account.data_s + account.script_s
        return between * account.data_s / waits if waits > 0 else 0.0

    def numerics(self, key: str) -> Any:
        """A value that the last start resolved for its device, such as precision.compute; else that of the file."""
        start = self.progress.start if self.progress else None
        for name, value, _ in start.numerics if start else ():
            if name == key:
                return value
        section, _, name = key.partition(".")
        return self.value(section, name)

    def value(self, section: str, name: str) -> Any:
        """A resolved value of the run file; None where it is not there."""
        found = self.values.get(section)
        return found.get(name) if isinstance(found, Mapping) else None

    def plan(self, **changed: Any) -> Estimate | None:
        """The planner's estimate of this run on its accelerators, with fields of the model's section or `micro_batch`
        or `precision` changed; None where the run or its parts are unknown to it."""
        key = tuple(sorted(changed.items()))
        if key not in self.plans:
            self.plans[key] = _estimate(self, changed)
        return self.plans[key]


def _estimate(evidence: Evidence, changed: Mapping[str, Any]) -> Any:
    from dataclasses import replace

    from pydantic import ValidationError

    from shardway.plan.case import machine_of_part
    from shardway.plan.huggingface import read_shape
    from shardway.plan.planner import estimate
    from shardway.resolve.planned import case_of, shape_of_run
    from shardway.runfile.schema import RunFile

    parts = {gpu.part.key for gpu in evidence.used if gpu.part is not None}
    if len(parts) != 1 or not evidence.values:
        return None
    model = {name: value for name, value in changed.items() if name not in ("micro_batch", "precision")}
    try:
        values = RunFile.model_validate(dict(evidence.values))
        precision = {
            name: value for name in ("compute", "tf32") if (value := evidence.numerics(f"precision.{name}")) is not None
        }
        precision |= {"compute": changed["precision"]} if "precision" in changed else {}
        values = values.model_copy(
            update={
                "model": values.model.model_copy(update=model),
                "precision": values.precision.model_copy(update=precision),
            }
        )
        machine = replace(machine_of_part(parts.pop()), per_node=max(1, max(len(host.gpus) for host in evidence.hosts)))
        shape = shape_of_run(values, read_shape(values.model.hf) if values.model.hf else None)
        return estimate(case_of(values, shape, changed.get("micro_batch"), machine), machine)
    except (ShardwayError, ValidationError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
        return None


# --- gathering


def gather(
    run: RunDir,
    hosts: Sequence[HostTelemetry] | None = None,
    events: Iterable[Event] | FoldedEvents | None = None,
) -> Evidence:
    """All that is known of a run. `hosts` and `events`: its telemetry, and the events of rank 0, where they were read
    already. Else events are read as in a first look: all but most of the steps, which is many times faster."""
    folded = (
        events
        if isinstance(events, FoldedEvents)
        else fold(run.follow_events().catch_up() if events is None else events)
    )
    progress = folded.progress
    status = run.read_status()
    account = progress.book.account(status, None) if progress.attempts else None
    attempts: list[AttemptEvidence] = []
    values: Mapping[str, Any] = {}
    with contextlib.suppress(ShardwayError, OSError, ValueError):
        attempts = [_read_attempt(attempt) for attempt in run.attempts()]
    with contextlib.suppress(ShardwayError, OSError):
        values = run.read_resolved()
    telemetry = read_telemetry(run.telemetry_folder) if hosts is None else hosts
    steps = folded.list_steps()
    found = view_hosts(telemetry, steps, folded.breaks)
    ends = [float(host.times[-1]) for host in found]
    state = status.get("state")
    return Evidence(
        hosts=found,
        progress=progress if progress.attempts else None,
        account=account,
        steps=steps,
        attempts=tuple(attempts),
        values=values,
        log=_read_log(run),
        now=max(ends, default=time.time()),
        state=state if isinstance(state, str) else "",
        run=run,
    )


def _read_attempt(attempt: Attempt) -> AttemptEvidence:
    started = attempt.read_started()
    began = started.started if started is not None else None
    return AttemptEvidence(attempt.number, attempt.read_submission(), began, attempt.read_result())


def _read_log(run: RunDir) -> str:
    """The beginning and the end of what the newest job printed, and of what its first ranks did."""
    paths: list[Path] = []
    with contextlib.suppress(ShardwayError, OSError):
        paths = [attempt.job_log for attempt in run.attempts()[-1:]]
        paths += run.rank_output(0)
    return "\n".join(map(_read_ends, paths))


def _read_ends(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            found = file.read(LOG_BYTES)
            if size > 2 * LOG_BYTES:
                file.seek(size - LOG_BYTES)
            return (found + file.read(LOG_BYTES)).decode("utf-8", "replace")
    except OSError:
        return ""


# --- the time that is judged


def view_hosts(
    telemetry: Iterable[HostTelemetry], steps: StepEvidence | None = None, breaks: Sequence[Break] = ()
) -> tuple[HostEvidence, ...]:
    """The hosts of the newest start, with what counts of their time."""
    sampled = [host for host in telemetry if len(host.times) and host.infos]
    cut = _cut_to_start(sampled) if sampled else []  # it needs NumPy
    if not cut:
        return ()
    begin, end = _find_work(cut, steps)
    return tuple(_view_host(info, times, series, (begin, end), breaks) for info, times, series in cut)


Cut = tuple[NodeInfo, Any, Mapping[str, Any]]


class _SeriesPart(Mapping[str, Any]):
    """Some samples of series, by a mask or a slice, and of those the ones whose names begin so. Nothing is copied until
    a series is looked at."""

    def __init__(self, series: Mapping[str, Any], inside: Any, start: str = "") -> None:
        self._series, self._inside, self._start = series, inside, start
        self._names = dict.fromkeys(name.removeprefix(start) for name in series if name.startswith(start))

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._series[f"{self._start}{name}"][self._inside]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def list_starts(telemetry: Iterable[HostTelemetry]) -> list[list[float]]:
    """The starts of a run's samplers, the newest first: when those of each began on their hosts (Unix seconds)."""
    groups: list[list[float]] = []
    for start in sorted({info.started for host in telemetry for info in host.infos}, reverse=True):
        if groups and groups[-1][0] - start <= SAME_START_S:
            groups[-1].append(start)
        else:
            groups.append([start])
    return groups


def _cut_to_start(telemetry: Sequence[HostTelemetry]) -> list[Cut]:
    np = find_arrays()

    found: list[Cut] = []
    until = np.inf
    for group in list_starts(telemetry)[:2]:
        begin, chosen = min(group), list[Cut]()
        for host in telemetry:
            info = next((each for each in reversed(host.infos) if each.started in group), None)
            inside = (host.times >= begin - 1) & (host.times < until)
            if info is not None and inside.any():
                chosen.append((info, host.times[inside], _SeriesPart(host.series, inside)))
        if max((len(times) for _, times, _ in chosen), default=0) >= FEWEST_SAMPLES:
            return chosen
        found, until = found or chosen, begin - 1
    return found


def _find_work(cut: Sequence[Cut], steps: StepEvidence | None) -> Break:
    """When the work began and ended: by the steps, or by the accelerators' use."""
    first = min(float(times[0]) for _, times, _ in cut)
    last = max(float(times[-1]) for _, times, _ in cut)
    if steps is not None and steps.last > first:
        return steps.warm, min(steps.last, last)
    found = [each for each in (_find_use(times, series) for _, times, series in cut) if each is not None]
    if not found:
        return first + min(_QUIET_START_S, 0.2 * (last - first)), last
    return min(begin for begin, _ in found), max(end for _, end in found)


_QUIET_START_S = 120.0  # of a job whose accelerators never work, left out as its start


def _find_use(times: Any, series: Mapping[str, Any]) -> Break | None:
    """The first and the last time at which some accelerator's use, smoothed over half a minute, is lasting."""
    np = find_arrays()

    uses = [series[name] for name in series if _between(name, "gpu/", "/use_percent")]
    if not uses or len(times) < 3:
        return None
    top = np.nan_to_num(np.nanmax(np.where(np.isfinite(uses), uses, -1.0), axis=0)).clip(0)
    window = max(1, min(30, len(top) // 10))
    smooth = np.convolve(top, np.ones(window) / window, mode="same")
    usual = float(np.quantile(smooth, 0.75))
    if usual < IDLE_TOP_PERCENT:
        usual = float(smooth.max())
    if usual < IDLE_TOP_PERCENT:
        return None
    busy = np.flatnonzero(smooth >= 0.5 * usual)
    pad = min(window, len(top) // 20)
    return float(times[min(busy[0] + pad, len(top) - 1)]), float(times[max(0, busy[-1] - pad)])


def _view_host(
    info: NodeInfo, times: Any, series: Mapping[str, Any], work: Break, breaks: Sequence[Break]
) -> HostEvidence:
    warm = (times >= work[0]) & (times <= work[1])
    if warm.sum() < 5:
        warm = times >= times[0]
    steady = warm.copy()
    for begin, end in breaks:
        first, last = times.searchsorted([begin - MARGIN_S, end + MARGIN_S])
        steady[first:last] = False
    if steady.sum() < max(5, 0.02 * warm.sum()):
        steady = warm
    gpus = []
    for device in info.devices:
        own = _SeriesPart(series, slice(None), f"gpu/{device.index}/")
        gpus.append(GpuEvidence(info.host, device, find_accelerator(device.name), own, warm, steady))
    return HostEvidence(info, times, series, warm, steady, tuple(gpus))
