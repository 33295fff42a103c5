"""One run in a world where things go wrong, drawn from a seed; and what must hold after each of them.

Invariant: after `QUIET_S` nothing goes wrong any more, so that the run has to come to its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from storage import Folder, Store, Trouble
from training import CHECKPOINTS, SHARDS, Command, Commit, Plan, Record, state_of
from world import Broken, Host, Process, Workers, World

from shardway.rundir.lease import newest_epoch

QUIET_S = 80.0
"""When the last fault strikes, in seconds."""

LONGEST_S = 60.0
"""The longest that a fault lasts."""

END_S = QUIET_S + LONGEST_S + 300.0
"""By then every run has ended: after the last trouble there is time for watches, for starts, and for a whole run."""

HOSTS = 3
LATE_LINES_S = 0.5
"""Within this much of its own running time after the epoch of its sureness, a line may be on its way to disk."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong: when, of what kind, to which host, for how long, and a number that the kind knows."""

    time: float
    kind: str
    host: int
    seconds: float
    number: float = 0.0

    def render(self) -> str:
        """A line of a schedule."""
        return f"{self.time:7.2f} s  {self.kind} of n{self.host} for {self.seconds:.1f} s ({self.number:.2f})"


POINTS = ("checked", "cleared", "written", "confirmed")
KINDS = ("start", "kill", "kill", "pause", "pause", "crash", "hang", "fail", "slow", *POINTS)
"""A point is a place between two writes of a save, or of an event, at which its host stops when it comes by next."""


@dataclass(frozen=True)
class Setting:
    """What a seed draws before anything begins."""

    rates: tuple[float, ...]
    skews_s: tuple[float, ...]
    stale_s: float
    faults: tuple[Fault, ...]


def draw(seed: int) -> Setting:
    """The hosts' clocks, the file system, and what will go wrong."""
    dice = random.Random(f"setting {seed}")
    faults = [
        Fault(
            dice.uniform(0.0, QUIET_S),
            dice.choice(KINDS),
            dice.randrange(HOSTS),
            dice.uniform(0.1, 5.0) if dice.random() < 0.4 else dice.uniform(5.0, LONGEST_S),
            dice.random(),
        )
        for _ in range(dice.randrange(2, 16))
    ]
    return Setting(
        tuple(dice.uniform(0.98, 1.02) for _ in range(HOSTS)),
        tuple(dice.uniform(-3600.0, 3600.0) for _ in range(HOSTS)),
        dice.choice((0.0, 0.0, 3.0, 60.0)),
        tuple(sorted(faults, key=lambda fault: fault.time)),
    )


class Story:
    """A run from its first start to its end, with everything that is checked on the way."""

    def __init__(self, seed: int, plan: Plan, workers: Workers) -> None:
        self.setting = draw(seed)
        self.plan = plan
        self.world = World(f"world {seed}", workers)
        self.store = Store(self.world, self.setting.stale_s)
        self.store.on_rename = self._on_rename
        self.store.on_create = self._on_create
        self.store.on_replace = self._on_replace
        self.record = Record()
        self._beats: dict[int, list[float]] = {}
        self._uneasy: dict[Host, float] = {}
        self._slow_until = 0.0
        self._stood: dict[Host, list[tuple[float, float]]] = {}
        clocks = zip(self.setting.rates, self.setting.skews_s, strict=True)
        self.world.hosts = [Host(f"n{number}", *clock) for number, clock in enumerate(clocks)]

    def run(self) -> Record:
        """Let it happen. Raises Broken where something came out that must not."""
        acts: dict[str, Callable[[Fault, Host], None]] = {
            "start": self._start,
            "kill": self._kill,
            "pause": self._pause,
            "crash": self._crash,
            "hang": self._hang,
            "fail": self._fail,
            "slow": self._slow,
            **dict.fromkeys(POINTS, self._set_trap),
        }
        for fault in self.setting.faults:
            host = self.world.hosts[fault.host]
            self.world.at(fault.time, lambda fault=fault, host=host: self._strike(acts[fault.kind], fault, host))
        for host in self.world.hosts:
            self.world.at(self.world.dice.uniform(0.0, 30.0), lambda host=host: self._attend(host))
        self.world.run(END_S)
        if not self.record.finished:
            raise Broken(f"the run has not ended after {END_S:.0f} s")
        return self.record

    def render(self, last: int = 60) -> str:
        """The schedule of this seed, and what happened last."""
        faults = "\n".join(fault.render() for fault in self.setting.faults)
        lines = "\n".join(f"{time:7.2f} s  {who}: {what}" for time, who, what in self.world.log[-last:])
        return f"listings up to {self.setting.stale_s:.0f} s old, clocks {self.setting.rates}\n{faults}\n--\n{lines}"

    # --- who starts it

    def _attend(self, host: Host) -> None:
        """A person, or the chain of jobs: starts the run where nothing of it is left on a host."""
        if self.record.finished:
            self.world.over = True
            return
        if not host.processes:
            self._command(host)
        self.world.at(self.world.now + self.world.dice.uniform(10.0, 25.0), lambda: self._attend(host))

    def _command(self, host: Host) -> None:
        Command(self.world, self.store, host, self.plan, self.record).start()

    # --- what goes wrong

    def _strike(self, act: Callable[[Fault, Host], None], fault: Fault, host: Host) -> None:
        self.world.note(host.name, f"{fault.kind} for {fault.seconds:.1f} s")
        self._uneasy[host] = self.world.now + fault.seconds
        act(fault, host)

    def _start(self, fault: Fault, host: Host) -> None:
        self._command(host)

    def _kill(self, fault: Fault, host: Host) -> None:
        holder = self._holder()
        processes = list(host.processes.values()) if fault.number < 0.5 or holder is None else [holder]
        for process in processes[:1]:
            process.kill()

    def _pause(self, fault: Fault, host: Host) -> None:
        """Everything on a host stands still: SIGSTOP, a lid, a virtual machine that is moved."""
        holder = self._holder()
        if holder is not None and fault.number < 0.7:
            host = holder.host
        self._stop(host, fault)

    def _set_trap(self, fault: Fault, host: Host) -> None:
        self.world.traps[fault.kind] = lambda process: self._stop(process.host, fault)

    def _stop(self, host: Host, fault: Fault) -> None:
        host.stop(self.world.now, fault.seconds, frozen=fault.number < 0.3)
        self.world.note(host.name, f"stands still until {host.paused_until:.2f} s")
        self._stood.setdefault(host, []).append((self.world.now, host.paused_until))

    def _crash(self, fault: Fault, host: Host) -> None:
        for process in list(host.processes.values()):
            process.kill()
        self.store.crash(host)
        host.boots += 1
        host.paused_until = 0.0
        host.down_until = self.world.now + fault.seconds

    def _hang(self, fault: Fault, host: Host) -> None:
        self.store.trouble[host.name] = Trouble(hangs=True, until=self.world.now + fault.seconds)

    def _fail(self, fault: Fault, host: Host) -> None:
        share = 1.0 if fault.number > 0.7 else fault.number
        self.store.trouble[host.name] = Trouble(fails=share, until=self.world.now + fault.seconds)

    def _slow(self, fault: Fault, host: Host) -> None:
        self.store.slow = 1.0 + 500.0 * fault.number**3
        self._slow_until = max(self._slow_until, self.world.now + fault.seconds)
        self.world.at(self.world.now + fault.seconds, self._quick)

    def _quick(self) -> None:
        self.store.slow = 1.0

    def _holder(self) -> Process | None:
        holders = [process for _, process in sorted(self.record.holders.items()) if process.lives]
        return holders[-1] if holders else None

    # --- what must hold

    def _on_create(self, process: Process, path: str, name: str) -> None:
        epoch = newest_epoch([name])
        if epoch is None:
            return
        before = self.record.holders.get(epoch - 1)
        if before is not None and before.lives and before is not process and self._is_at_ease(process.host):
            self._check_silent(epoch - 1)
        if epoch in self.record.holders and epoch == max(self.record.holders):
            raise Broken(f"epoch {epoch} was claimed twice")
        self.record.holders[epoch] = process
        self.record.claimed[epoch] = self.world.now

    def _check_silent(self, epoch: int) -> None:
        """Whoever is overtaken alive has not beaten for as long as a watch takes; or only just again."""
        now = self.world.now
        recent = [time for time in self._beats.get(epoch, []) if now - 12.0 < time < now - 2.0]
        if len(recent) > 1 and not self._given_up(epoch):
            raise Broken(f"epoch {epoch} was overtaken while it lived: it has just beaten {len(recent)} times")

    def _is_at_ease(self, host: Host) -> bool:
        """Whether nothing has kept a host from doing at once what it has decided."""
        stood = any(until > self.world.now - 20.0 for _, until in self._stood.get(host, []))
        uneasy = max(self._uneasy.get(host, 0.0), self._slow_until)
        return not stood and uneasy < self.world.now - 20.0

    def _given_up(self, epoch: int) -> bool:
        entry = self.store.folder("lease").entries.get(f"beat-{epoch:06d}")
        return entry is not None and "released" in entry.text

    def _on_replace(self, process: Process, path: str, name: str) -> None:
        if name.startswith("beat-"):
            self._beats.setdefault(int(name[5:]), []).append(self.world.now)

    def _on_rename(self, process: Process, source: str, target: str) -> None:
        if target.startswith("step-"):
            epoch = int(source.split("epoch-")[1].split(".")[0])
            self._check_commit(Commit(int(target[5:]), epoch, process.pid, self.world.now))
        self._check_lines()

    def _check_commit(self, commit: Commit) -> None:
        record = self.record
        self.world.note(f"{commit.pid}", f"has saved step {commit.step} in epoch {commit.epoch}")
        if any(other.epoch == commit.epoch and other.pid != commit.pid for other in record.commits):
            raise Broken(f"epoch {commit.epoch} has two committers")
        later = [epoch for epoch in record.fenced if epoch > commit.epoch]
        if later:
            raise Broken(f"epoch {commit.epoch} committed after epoch {max(later)} had begun to load")
        if record.commits and commit.step <= max(other.step for other in record.commits):
            raise Broken(f"step {commit.step} was committed after a newer one")
        record.commits.append(commit)
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        """Every checkpoint is whole and what one save meant, and the newest that was committed is there."""
        entries = self.store.folder(CHECKPOINTS).entries
        found = {int(name[5:]): folder for name, folder in entries.items() if name.startswith("step-")}
        by_step = {commit.step: commit for commit in self.record.commits}
        for step, folder in found.items():
            shards = [f"{state_of(step)}:{shard}:{by_step[step].epoch}" for shard in SHARDS]
            if not isinstance(folder, Folder) or _texts(folder) != [" ".join([str(step), *shards]), *shards]:
                raise Broken(f"the checkpoint of step {step} is not what was saved")
        if max(found) != max(by_step):
            raise Broken(f"the newest checkpoint is of step {max(found)}, {max(by_step)} was committed")

    def _check_lines(self) -> None:
        """A holder that was overtaken writes events only while it may be sure, by its own running time."""
        for epoch, time in self.record.lines[-3:]:
            later = self.record.claimed.get(epoch + 1)
            if later is None or time <= later:
                continue
            ran = time - later - self._stood_for(self.record.holders[epoch].host, later, time)
            if ran > self.plan.terms.sure_s + LATE_LINES_S:
                raise Broken(f"epoch {epoch} wrote an event {ran:.1f} s after it was overtaken")

    def _stood_for(self, host: Host, begin: float, end: float) -> float:
        spans = self._stood.get(host, [])
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in spans)


def _texts(folder: Folder) -> list[str]:
    return [folder.entries[name].text if name in folder.entries else "" for name in ("manifest", *SHARDS)]


def tell(seed: int, plan: Plan, workers: Workers) -> Record:
    """Run the story of a seed. Raises AssertionError with its schedule where something broke."""
    story = Story(seed, plan, workers)
    try:
        return story.run()
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n{story.render()}") from error
