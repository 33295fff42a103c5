"""A small model of a run: what `train/session.py`, `checkpoint/manager.py` and `checkpoint/writer.py` do to files.

A state is a number that follows from its step. A checkpoint is two files of it and a manifest that says what they hold.
The lease, its watch and the policy of restarts are the real ones.

Invariant: the order of writes is that of the real code; what stands between two of them may be anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from storage import LeaseFiles, Mount, Store
from world import Host, Killed, Process, World

from shardway.errors import Fenced, JobError, ShardwayError, UserError
from shardway.ranks.failure import RepeatedFailure, decide
from shardway.rundir.lease import Lease, LeaseOptions, LeaseTimes

SHARDS = ("a", "b")
KEEP = 2
CHECKPOINTS = "checkpoints"
RESTART_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What is run and how; `make_lease` and `fences` are for showing what each part is there for."""

    steps: int = 32
    save_every: int = 4
    step_s: float = 1.0
    terms: LeaseTimes = field(default_factory=LeaseTimes)
    make_lease: Callable[..., Lease] = Lease
    fences: bool = True


def state_of(step: int) -> int:
    """The state after a step: a run that is fed the right data has no other."""
    return step * 2654435761 % 2**32


@dataclass
class Commit:
    """A checkpoint that came to be."""

    step: int
    epoch: int
    pid: int
    time: float


class Record:
    """What has happened to the run, seen from outside; every entry is made at the moment itself."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.claimed: dict[int, float] = {}
        self.holders: dict[int, Process] = {}
        self.fenced: dict[int, float] = {}
        self.lines: list[tuple[int, float]] = []
        self.finished = False
        self.commands = 0


@dataclass
class Attempt:
    """One process that trains, from taking the lease to its end."""

    world: World
    store: Store
    process: Process
    plan: Plan
    record: Record
    step: int = 0

    def run(self) -> None:
        """Train to the end, or until something ends it. Raises ShardwayError and OSError."""
        self.mount = Mount(self.store, self.process)
        self.lease = self.plan.make_lease(LeaseFiles(self.mount), "run", self._means())
        self.lease.take(lambda line: self._note(line))
        self._note(f"holds epoch {self.lease.epoch}")
        self.process.spawn(self._beat)
        self._fence()
        self.step = self._load()
        while self.step < self.plan.steps:
            self.world.wait(self.plan.step_s * self.world.dice.uniform(0.8, 1.2))
            self.step += 1
            self._write_line()
            last = self.step == self.plan.steps
            if last or self.step % self.plan.save_every == 0:
                self._save(last)
        self.lease.check()
        self._note("finished")
        self.record.finished = True
        self.lease.release()

    def _means(self) -> LeaseOptions:
        process = self.process
        token = f"{process.host.name}-{process.pid}"
        return LeaseOptions(
            process.identity, "", process.is_gone, lambda: token, process.mutex, process, self.plan.terms
        )

    def _note(self, what: str) -> None:
        self.world.note(f"{self.process.host.name} {self.process.pid}", what)

    def _beat(self) -> None:
        """What the thread of `rundir.lease` does."""
        while True:
            self.process.sleep(self.plan.terms.beat_s)
            with contextlib.suppress(OSError):
                try:
                    self.lease.beat()
                except Fenced:
                    self._note("is fenced")
                    return

    # --- rundir

    def _fence(self) -> None:
        """`RunDir.fence_saves`, and `remove_leftovers`."""
        mount, epoch = self.mount, self.lease.epoch
        mark = f".step-fence.{epoch}.partial"
        mount.make_folder(CHECKPOINTS, mark)
        mount.remove_tree(CHECKPOINTS, mark)
        partial = [name for name in mount.list(CHECKPOINTS) if name.startswith(".") and name != mark]
        if self.plan.fences:
            for name in partial:
                with contextlib.suppress(FileNotFoundError):
                    mount.rename(CHECKPOINTS, name, f"{name}.fenced-{epoch}.partial")
        self.record.fenced[epoch] = self.world.now
        with contextlib.suppress(OSError):
            for name in [name for name in mount.list(CHECKPOINTS) if ".fenced-" in name]:
                mount.remove_tree(CHECKPOINTS, name)

    def _write_line(self) -> None:
        """`Recorder`: an event goes to disk where the lease is sure, else it waits."""
        try:
            self.lease.check()
        except OSError:
            return
        self.world.pass_point("checked", self.process)
        self.record.lines.append((self.lease.epoch, self.world.now))

    # --- checkpoint

    def _load(self) -> int:
        """The newest checkpoint that is whole."""
        names = [name for name in self.mount.list(CHECKPOINTS) if name.startswith("step-")]
        for name in sorted(names, reverse=True):
            manifest = self.mount.read(CHECKPOINTS, "manifest", name).split()
            shards = [self.mount.read(CHECKPOINTS, shard, name) for shard in SHARDS]
            if manifest[1:] == shards:
                return int(manifest[0])
        return 0

    def _save(self, last: bool) -> None:
        try:
            self._write_checkpoint()
        except OSError as error:
            self._note(f"could not save step {self.step}: {error}")
            if last:
                raise JobError(f"the checkpoint of step {self.step} could not be saved") from error

    def _write_checkpoint(self) -> None:
        mount, epoch, final = self.mount, self.lease.epoch, f"step-{self.step:04d}"
        partial = f".{final}.epoch-{epoch}.partial"
        if mount.exists(CHECKPOINTS, final):
            return
        mount.remove_tree(CHECKPOINTS, partial)
        self.world.pass_point("cleared", self.process)
        mount.make_folder(CHECKPOINTS, partial)
        shards = [f"{state_of(self.step)}:{shard}:{epoch}" for shard in SHARDS]
        for shard, text in zip(SHARDS, shards, strict=True):
            mount.write(CHECKPOINTS, partial, shard, text)
            self.world.wait(self.world.dice.uniform(0.05, 0.5))
            mount.sync(CHECKPOINTS, partial, shard)
        seals = [mount.read(CHECKPOINTS, shard, partial) for shard in SHARDS]
        mount.write(CHECKPOINTS, partial, "manifest", " ".join([str(self.step), *seals]))
        mount.sync(CHECKPOINTS, partial, "manifest")
        self.world.pass_point("written", self.process)
        self.lease.confirm()
        self.world.pass_point("confirmed", self.process)
        mount.rename(CHECKPOINTS, partial, final)
        self.lease.confirm()
        self._prune()

    def _prune(self) -> None:
        """`retire`: the newest stay."""
        steps = sorted(name for name in self.mount.list(CHECKPOINTS) if name.startswith("step-"))
        for name in steps[:-KEEP]:
            doomed = f".{name}.epoch-{self.lease.epoch}.partial"
            with contextlib.suppress(OSError):
                self.mount.rename(CHECKPOINTS, name, doomed)
                self.mount.remove_tree(CHECKPOINTS, doomed)


@dataclass
class Command:
    """`shardway train` on a host: starts a process, and again after a failure where the policy says so."""

    world: World
    store: Store
    host: Host
    plan: Plan
    record: Record
    failures: list[RepeatedFailure] = field(default_factory=list)

    def start(self) -> None:
        """Start a process, in whatever container."""
        if self.host.down_until > self.world.now or self.record.finished:
            return
        self.record.commands += 1
        namespace = "pids" if self.world.dice.random() < 0.8 else f"pids-{self.record.commands}"
        process = self.world.start_process(self.host, namespace)
        attempt = Attempt(self.world, self.store, process, self.plan, self.record)
        process.spawn(lambda: self._run(process, attempt))

    def _run(self, process: Process, attempt: Attempt) -> None:
        error: Exception | None = None
        try:
            attempt.run()
        except (ShardwayError, OSError) as caught:
            error = caught
            attempt._note(f"ends: {type(caught).__name__}: {str(caught).splitlines()[0]}")
        except Killed:
            attempt._note("is killed")
            raise
        finally:
            process.end()
            self._judge(error)

    def _judge(self, error: Exception | None) -> None:
        """What the agent does when its process has ended."""
        signature = type(error).__name__ if error is not None else "killed"
        saved = max((commit.step for commit in self.record.commits), default=0)
        hopeless = isinstance(error, UserError | Fenced)
        self.failures.append(RepeatedFailure(signature, saved, hopeless))
        if decide(self.failures).restart:
            self.world.at(self.world.now + RESTART_S, self.start)
