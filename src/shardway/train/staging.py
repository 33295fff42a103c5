"""The data of a run, copied to the disk of each node before its first step, or window by window while it trains.

Invariants:
- Every rank takes part in every exchange, whatever its own node finds: nodes may differ in their disks.
- Ranks exchange every few seconds while one of them copies, so that no collective runs into its timeout, and show their
  agent that they live as long as some copy goes on.
- An error of one rank ends the copies of all, and is raised on all.
- Where several nodes stage, one rank of each copies, together with those of the other nodes, and the other ranks of a
  node find what it has copied. Ranks are of one node if their folder is the same one of the same machine.
- Window by window: a rank claims the files of its next steps before any of its processes asks for them, so that none is
  removed while it is read. The order of samples is that of the run file, wherever they are read.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from shardway.data import stage
from shardway.data.formats.base import DamagedData, FileParts
from shardway.data.loader import Batch
from shardway.data.open import Data, order_of
from shardway.data.order import Skips
from shardway.data.sources.base import DataSource, find_blocks, stage_source
from shardway.data.stage import (
    CopyGivenUp,
    CopyProgress,
    PartialSet,
    StagedSet,
    StageFolder,
    hold_all,
    list_parts,
)
from shardway.data.stage_peers import PartServer, PeerNode, StagePeers, assign_parts
from shardway.data.waiting import MOST
from shardway.data.window_order import WindowOrder
from shardway.errors import Bug, JobError, SiteError
from shardway.hardware.limits import count_own_cores
from shardway.hardware.mounts import find_mount, read_mounts
from shardway.places import expand_place, list_unset
from shardway.ranks.evidence import render_ranks
from shardway.ranks.network import list_addresses
from shardway.train.session import Session
from shardway.units import format_bytes, render_seconds

EXCHANGE_S = 5.0
"""How often ranks exchange how far copies are; more often where a collective may take less."""
LOOK_S = 0.5
"""How often a rank looks whether there is room for the next file of a later window."""
MOST_LATER = 4096
"""The most files whose order of use is stated ahead; those that come later are removed first, whatever their order."""
LONG_S = 10.0
"""A step that waits so long for files that are being staged is reported."""


@dataclass(frozen=True)
class _Staged:
    """What a rank has after staging: its sources, what to hold, and why it reads the data where they lie ("": it does
    not)."""

    sources: list[DataSource]
    held: list[StagedSet]
    why: str = ""
    partial: PartialSet | None = None


def stage_for_node(session: Session, data: Data) -> Data:
    """The data as they lie on this node's own disk, if data.stage asks for it and they fit there; copied by the ranks
    of the node, each byte by one of them. With data.shuffle = "windows", data that do not fit are staged while the run
    trains, by `session.windows`.

    A folder that the user has named must do: SiteError on every rank where it does not. Data that do not fit into the
    site's are read where they lie, and damaged ones if guard.damaged_data is "skip"; a run that is asked to stop copies
    no further.
    """
    wanted, ranks = session.resolved.values.data.stage, session.ranks
    sources = [each for each in (data.train, data.validation) if isinstance(each, DataSource)]
    by_user = not session.resolved.is_derived("data.stage")
    plan = plan_windows(session, data) if wanted != "off" else None
    place = ranks.together(lambda: find_place(wanted, sources, by_user=by_user, plan=plan))
    together = _meet(session, place, [parts for source in sources for parts in list_parts(source)], plan)
    progress, began = CopyProgress(), time.monotonic()

    def copy(peers: StagePeers | None) -> _Staged:
        if place.folder is None:
            return _Staged(sources, [], place.why)
        tell = logging.getLogger("shardway").warning if ranks.is_first else lambda line: None
        try:
            if place.by_windows and plan is not None:
                leaves = session.resolved.values.guard.damaged_data == "skip"
                return _hold_partly(plan, sources, place.folder, tell, progress, peers, leave_damaged=leaves)
            return _Staged(*hold_all(sources, place.folder, tell, progress, peers))
        except CopyGivenUp:
            return _Staged(sources, [], "the run was asked to stop")
        except DamagedData as error:
            if session.resolved.values.guard.damaged_data == "stop":
                raise
            return _Staged(sources, [], str(error).partition("\n")[0])
        except SiteError as error:
            if by_user:
                raise
            return _Staged(sources, [], str(error).partition("\n")[0])
        finally:
            if peers is not None:
                peers.coming = lambda key: False

    def copy_on(mine: bool, before: _Staged | None = None) -> _Staged | None:
        """All ranks together: copy on those of which this is one; the others keep what they have."""
        with ThreadPoolExecutor(1) as pool:
            try:
                copying = pool.submit(lambda: copy(together.peers) if mine else before)
                _wait_together(session, copying, progress)
            except BaseException:
                progress.give_up()
                raise
            if not copying.done() or copying.exception() is not None or session.signals.received is not None:
                progress.give_up()
            return ranks.together(copying.result)

    staged = copy_on(together.copies)
    if together.is_joint:
        staged = copy_on(not together.copies, staged)
    progress.give_up()
    if staged is None:  # it is of one of the two rounds
        raise Bug("a rank took part in no round of copies")
    for each in staged.held:
        session.at_end.callback(each.close)
    if plan is not None and any(ranks.gather(staged.partial is not None)):
        session.windows = StagedWindows(session, plan, staged.partial, together)
        session.at_end.callback(session.windows.close)
    else:
        together.close()
    _report(session, staged, progress, time.monotonic() - began)
    _report_troubles(session, together)
    there = {id(each): moved for each, moved in zip(sources, staged.sources, strict=True)}
    return Data(there.get(id(data.train), data.train), there.get(id(data.validation), data.validation))


@dataclass
class _Together:
    """How this rank copies together with other nodes: whether any node does; whether this rank copies for its node;
    with which peers; and what sends them its parts."""

    is_joint: bool = False
    copies: bool = True
    peers: StagePeers | None = None
    server: PartServer | None = None

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self.peers is not None:
            self.peers.close()


def _meet(session: Session, place: StagePlace, held: Sequence[FileParts], plan: WindowPlan | None) -> _Together:
    """Agree with the other nodes on which reads what, and start to send; on all ranks together."""
    ranks = session.ranks
    own = _identify(place.folder) if place.folder is not None else None
    seen = ranks.gather((own, place.by_windows))
    leaders = {each: rank for rank, (each, _) in reversed(list(enumerate(seen))) if each is not None}
    if len(leaders) < 2:
        return _Together()
    order = sorted(leaders.values())
    secret = ranks.ask_first(lambda: secrets.token_bytes(32))
    together = _Together(is_joint=True, copies=own is None or leaders[own] == ranks.rank)
    port, addresses, digest, there = 0, tuple[str, ...](), "", None
    if own is not None and together.copies and place.folder is not None:
        folder = StageFolder(place.folder)
        files = {key: file.size for parts in held for key, file in zip(parts.list_keys(), parts.files, strict=True)}
        digest = xxhash.xxh3_128_hexdigest("\n".join(files).encode())
        has = folder.list_there(*held)
        if not place.by_windows and any(has.values()):
            there = np.packbits(np.array(list(has.values()), np.bool_))
        missing = _list_awaited(place, held, plan, has)
        together.peers = peers = StagePeers(order.index(ranks.rank), [], {}, secret)
        peers.coming = missing.__contains__
        try:
            together.server = PartServer(
                peers.own, secret, lambda key, part: peers.find_part(key, part, folder.find_part)
            )
            session.at_end.callback(together.close)
            port, addresses = together.server.port, list_addresses(ranks.placement, os.environ)
        except OSError:  # this node only fetches
            pass
    told = ranks.gather((socket.gethostname(), addresses, port, digest, there))
    if together.peers is not None:
        agree = [rank for rank in order if told[rank][3] == told[order[0]][3]]
        if ranks.rank not in agree:  # the data have other keys here, so this node copies alone
            together.peers = None
            return together
        nodes = [told[rank] for rank in order]
        reached = [place for place, rank in enumerate(order) if rank in agree and told[rank][2]]
        # Nodes that hold all of the data from the first step on serve those that do not.
        owning = [place for place in reached if not seen[order[place]][1]] or reached
        had = _list_holders(owning, [each[4] for each in nodes], len(files))
        own_parts = assign_parts(files, len(owning), had) if owning else {}
        together.peers.owners = {key: tuple(owning[each] for each in owners) for key, owners in own_parts.items()}
        together.peers.set_nodes([PeerNode(name, where, at) for name, where, at, _, _ in nodes])
    ranks.barrier()  # so that no node asks another one before it knows the owners
    return together


def _list_holders(
    owning: Sequence[int], there: Sequence[npt.NDArray[np.uint8] | None], files: int
) -> dict[int, npt.NDArray[np.bool_]]:
    """Of each owner that has some files from earlier on, which."""
    found = {}
    for place, node in enumerate(owning):
        packed = there[node]
        if packed is not None:
            found[place] = np.unpackbits(packed, count=files).astype(np.bool_)
    return found


def _list_awaited(
    place: StagePlace, held: Sequence[FileParts], plan: WindowPlan | None, has: dict[str, bool]
) -> frozenset[str]:
    """Keys of the files that come to this node before the first step."""
    whole = plan.whole if place.by_windows and plan is not None else held
    return frozenset(key for parts in whole for key in parts.list_keys() if not has[key])


def _identify(folder: Path) -> tuple[str, int, int, str]:
    """What is the same for ranks that stage to the same folder of the same machine, and for no others."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    there = next(above for above in (folder, *folder.parents) if above.exists())
    known = there.stat()
    return boot or socket.gethostname(), known.st_dev, known.st_ino, str(folder.relative_to(there))


def _report_troubles(session: Session, together: _Together) -> None:
    """Show once which nodes did not send what they were asked for."""
    own = tuple(together.peers.troubles.values()) if together.peers is not None else ()
    told = [line for each in session.ranks.gather(own) for line in each] if together.is_joint else []
    if told:
        session.note_once(
            "staged",
            f"some nodes did not send parts of the data to others, which read them where they lie: {told[0]}"
            + (f" (and {len(told) - 1} more)" if len(told) > 1 else ""),
        )


def _wait_together(session: Session, copying: Future[Any], progress: CopyProgress) -> None:
    """Until all ranks have their data, one of them has an error, or one is asked to stop."""
    ranks, run = session.ranks, session.resolved.values.run
    exchange_s, beat_s = min(EXCHANGE_S, run.collective_timeout / 4), run.start_timeout / 4
    before: object = None
    beaten = time.monotonic()
    while True:
        wait([copying], timeout=exchange_s)
        has_failed = copying.done() and copying.exception() is not None
        stops = has_failed or session.signals.received is not None
        seen = ranks.gather((copying.done(), stops, progress.copied_bytes + progress.awaited_bytes))
        if all(done for done, _, _ in seen) or any(stops for _, stops, _ in seen):
            return
        if seen != before and time.monotonic() - beaten > beat_s:  # a copy that stands still is found as a hang
            session.progress.enter(session.progress.activity, 0)
            beaten = time.monotonic()
        before = seen


def _report(session: Session, staged: _Staged, progress: CopyProgress, seconds: float) -> None:
    """Show and write down what was copied, and which ranks read the data where they lie."""
    told = session.ranks.gather((progress.copied_bytes, progress.fetched_bytes, staged.why))
    if copied := sum(size for size, _, _ in told):
        text = _describe_copies(copied, sum(size for _, size, _ in told), seconds)
        session.note_once("staged", text)
    if apart := {rank: why for rank, (_, _, why) in enumerate(told) if why}:
        named = "the data are read" if len(apart) == len(told) else f"{render_ranks(list(apart))} read the data"
        session.note_once("not_staged", f"{named} where they lie: {next(iter(apart.values()))}")


def _describe_copies(copied: int, fetched: int, seconds: float) -> str:
    took = render_seconds(max(0.1, round(seconds, 1)))
    read = f": {format_bytes(copied - fetched)} from where they lie, {format_bytes(fetched)} from other nodes"
    return f"{format_bytes(copied)} of data copied to disks of nodes in {took}{read if fetched else ''}"


@dataclass(frozen=True)
class StagePlace:
    """Where a rank stages the data: a folder, or None and why not ("": there is nothing to stage)."""

    folder: Path | None
    why: str = ""
    by_windows: bool = False
    """Whether that is done window by window, since they do not fit."""


def find_place(
    wanted: str, sources: Sequence[DataSource], *, by_user: bool, plan: WindowPlan | None = None
) -> StagePlace:
    """Where to stage to; window by window, by `plan`, if all does not fit. `wanted`: data.stage, a folder or "off".

    `by_user`: whether the user named the folder; if so, data that do not fit raise SiteError. Else only data of a file
    system that machines share are staged, and only if they fit.
    """
    held = [parts for source in sources for parts in list_parts(source)] if wanted != "off" else []
    if not held:
        return StagePlace(None)
    if unset := list_unset(wanted):
        why = f'data.stage: "{wanted}" names ${unset[0]}, which is not set on {socket.gethostname()}'
        if by_user:
            raise SiteError(f'{why}.\n  To do: name the folder itself, or set data.stage = "off".')
        return StagePlace(None, why)
    folder = StageFolder.below(expand_place(wanted))
    mounts = read_mounts()
    places = [find_mount(str(parts.root.resolve()), mounts) for parts in held]
    if not by_user and not all(place is not None and place.shared for place in places):
        return StagePlace(None, "they are not on a file system that nodes share")
    try:
        folder.check_room(*held)
    except SiteError as error:
        try:
            if plan is None:
                raise
            plan.check_room(folder)
        except SiteError:
            if by_user:
                raise
            return StagePlace(None, str(error).partition("\n")[0])
        return StagePlace(folder.path, by_windows=True)
    return StagePlace(folder.path)


# --- window by window, while the run trains


@dataclass(frozen=True)
class WindowPlan:
    """What is staged window by window: the files of `parts`, whose samples come in `order`; and `whole`, before the
    first step, the sets that only validation reads.

    `held`: numbers of files that are here all the time, since validation reads them. `ahead`: how many positions a rank
    may have asked for before it takes the first of them.
    """

    parts: FileParts
    order: WindowOrder
    held: tuple[int, ...]
    ahead: int
    whole: tuple[FileParts, ...]

    @property
    def window_bytes(self) -> int:
        """The most bytes that the files of a window may have."""
        sizes = sorted((self.parts.files[number].size for number in self.order.filled), reverse=True)
        return sum(sizes[: self.order.blocks_at_once])

    @property
    def at_once(self) -> int:
        """The most windows that are needed at the same time."""
        return min(self.order.windows, 1 + math.ceil(self.ahead / self.order.least_samples))

    def check_room(self, folder: StageFolder) -> None:
        """Raise SiteError if the windows that are needed at the same time do not fit."""
        room, always = folder.find_room(), sum(self.parts.files[number].size for number in self.held)
        always += sum(parts.size for parts in self.whole)
        needed = min(self.parts.size, self.at_once * self.window_bytes + always)
        if needed + stage.SPARE_BYTES > room:
            held = f" and {format_bytes(always)} to validate on" if always else ""
            raise SiteError(
                f"data.stage: {folder.path} on {socket.gethostname()} has room for {format_bytes(room)}, and "
                f"{self.at_once} windows of {format_bytes(self.window_bytes)}{held} must be there at once, with "
                f"{format_bytes(stage.SPARE_BYTES)} to spare.\n"
                '  To do: name a folder on a larger disk, set data.stage = "off", or give a new run a smaller '
                "data.window or smaller files."
            )

    def list_files(self, windows: Sequence[int]) -> list[int]:
        """The files of windows, one window after the other."""
        return list(dict.fromkeys(number for window in windows for number in self.order.blocks_of(window)))


def plan_windows(session: Session, data: Data) -> WindowPlan | None:
    """How the data of a run would be staged window by window; None if their order has no windows, or only one."""
    values, here = session.resolved.values, session.ranks.placement.local_world
    if values.data.shuffle != "windows" or not isinstance(data.train, DataSource):
        return None
    order, blocks = order_of(values, data.train), find_blocks(data.train)
    if not isinstance(order, WindowOrder) or blocks is None or order.windows < 2:
        return None
    held, whole = tuple[int, ...](), list[FileParts]()
    if isinstance(data.validation, DataSource):
        own = find_blocks(data.validation)
        whole = [parts for parts in list_parts(data.validation) if not is_same_set(parts, blocks.parts)]
        if own is not None and is_same_set(own.parts, blocks.parts):
            held = tuple(own.filled)
    workers = min(MOST, count_own_cores(here)) if values.data.workers == "auto" else values.data.workers
    ahead = (max(1, workers) * values.data.prefetch + 2) * values.train.batch.largest
    return WindowPlan(blocks.parts, order, held, ahead, tuple(whole))


def is_same_set(one: FileParts, other: FileParts) -> bool:
    """Whether both are the same files."""
    return one.root == other.root and one.files == other.files


def _hold_partly(
    plan: WindowPlan,
    sources: Sequence[DataSource],
    folder: Path,
    tell: Callable[[str], object],
    progress: CopyProgress,
    peers: StagePeers | None,
    *,
    leave_damaged: bool,
) -> _Staged:
    """As `hold_all`, with a partial set of the files that come window by window."""
    disk, ended = StageFolder(folder), contextlib.ExitStack()
    with ended:
        # These first: what an earlier run has left of the others may be removed for them.
        held = [
            ended.enter_context(contextlib.closing(disk.hold(each, tell, None, progress, peers))) for each in plan.whole
        ]
        partial = ended.enter_context(contextlib.closing(PartialSet(disk, plan.parts, leave_damaged=leave_damaged)))

        def find(parts: FileParts) -> StagedSet:
            others = zip(plan.whole, held, strict=True)
            return next((put for each, put in others if is_same_set(each, parts)), partial.as_staged())

        staged = _Staged([stage_source(source, find) for source in sources], held, partial=partial)
        ended.pop_all()
    return staged


class StagedWindows:
    """Stages the files of the next windows on this node while the run trains; on a node without a partial set it only
    takes part in exchanges."""

    def __init__(self, session: Session, plan: WindowPlan, partial: PartialSet | None, together: _Together) -> None:
        self._session, self._plan, self._partial, self._together = session, plan, partial, together
        self._copies = together.copies
        if together.is_joint:  # of each node the first rank that has a partial set
            own = _identify(partial.folder) if partial is not None else None
            self._copies = session.ranks.gather(own).index(own) == session.ranks.rank
        if partial is not None and together.peers is not None:
            together.peers.coming = partial.is_wanted
        self._skips, self._spanned = Skips(), (0, -1)
        self._progress, self._moved = CopyProgress(), threading.Event()
        self._now: list[int] = []
        self._complete = partial is None
        """Whether all that may be read now is known to be there."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = self._has_waited = False
        texts = session.ranks.gather(session.ranks.together(self._describe))
        session.note_once("staged", next(filter(None, texts)))

    def begin(self, position: int, skips: Skips) -> None:
        """Stage the files of the steps from a position on, and then the next ones while the run trains. On all ranks
        together; returns when they are there on all nodes, or the run is asked to stop."""
        self._skips, self._spanned = skips, (0, -1)
        gives_up = threading.Event()
        self._session.ranks.together(lambda: self.move(position))
        if self._partial is not None and self._copies and self._thread is None:
            self._thread = threading.Thread(target=self._copy, name="stage-windows", daemon=True)
            self._thread.start()
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self._wait_for_first, gives_up)
            try:
                _wait_together(self._session, first, self._progress)
            finally:
                gives_up.set()
            self._session.ranks.together(first.result)
        told = self._session.ranks.gather((self._progress.copied_bytes, self._progress.fetched_bytes))
        copied, fetched = (sum(each) for each in zip(*told, strict=True))
        if copied:
            text = _describe_copies(copied, fetched, time.monotonic() - began)
            self._session.note_once("staged", f"{text}; others follow")

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; the files of those that may be asked for next are claimed before each of them."""
        try:
            while True:
                asked = time.monotonic()
                if not self._complete and self._partial is not None:
                    self._complete = not self._partial.list_missing(self._now)
                was_missing = not self._complete
                batch = next(batches, None)
                if batch is None:
                    return
                waited = time.monotonic() - asked
                if was_missing and waited > LONG_S:
                    self._report(
                        f"data: a step has waited {render_seconds(round(waited))} for files that are staged while the "
                        "run trains. To do: stage to a larger disk, where copies run further ahead, or set "
                        'data.stage = "off".'
                    )
                yield batch
                self.move(batch.next_position)
        finally:
            if (close := getattr(batches, "close", None)) is not None:
                close()

    def move(self, position: int) -> None:
        """The run goes on from a position. Raises what has ended the copies."""
        if self._error is not None:
            raise self._error
        if self._partial is None:
            return
        kept, order = self._skips.count_kept(position), self._plan.order
        ends = order.windows_at(self._skips.find_kept(np.array([kept, kept + self._plan.ahead - 1])))
        if (spanned := (ends[0], ends[-1])) == self._spanned:
            return
        windows = ends
        if ends[-1] - ends[0] > 1:
            windows = order.windows_at(self._skips.find_kept(kept + np.arange(self._plan.ahead)))
        self._now = list(dict.fromkeys([*self._plan.list_files(windows), *self._plan.held]))
        resolved = self._session.resolved
        last = resolved.values.train.batch.find_start(resolved.derived.total_steps) - 1  # of what is kept
        end = order.windows_at(self._skips.find_kept(np.array([max(last, kept)])))[0]
        now, later = set(self._now), range(windows[-1] + 1, min(windows[-1] + order.windows, end) + 1)
        files = [each for each in self._plan.list_files(later) if each not in now]
        self._partial.want(self._now, files[:MOST_LATER])
        self._spanned, self._complete = spanned, False
        self._moved.set()

    def close(self) -> None:
        """End the copies; what is there may be removed by others from now on."""
        self._ended = True
        self._progress.give_up()
        self._moved.set()
        if self._thread is not None:
            self._thread.join()
        self._together.close()
        if self._partial is not None:
            self._partial.close()

    def _describe(self) -> str:
        """What is staged here, and how; "" on a node without a partial set."""
        partial, files, windows = self._partial, self._plan.parts.files, self._plan.order.windows
        if partial is None:
            return ""
        size = self._plan.parts.size
        there = size - sum(files[number].size for number in partial.list_missing(range(len(files))))
        room = max(0, StageFolder(partial.folder).find_room() + there - stage.SPARE_BYTES)
        return (
            f"data of {format_bytes(size)}, room for {format_bytes(room)} in {partial.folder}: staged in {windows} "
            f"windows of about {format_bytes(size // windows)}"
        )

    def _report(self, text: str) -> None:
        """Report once that this rank waits."""
        if self._has_waited:
            return
        self._has_waited = True
        if self._session.ranks.is_first:
            self._session.note_once("data_slow", text)
        else:
            logging.getLogger("shardway").warning(f"rank {self._session.ranks.rank}: {text}")

    def _copy(self) -> None:
        while not self._ended and self._partial is not None:
            try:
                if (peers := self._together.peers) is not None:
                    copied = self._partial.copy_together(peers, self._progress)
                else:
                    copied = self._partial.copy_next(self._progress)
            except CopyGivenUp:
                return
            except Exception as error:  # raised by the next `move`
                self._error = error
                return
            if not copied:
                self._moved.wait(LOOK_S)
                self._moved.clear()

    def _wait_for_first(self, gives_up: threading.Event) -> None:
        partial = self._partial
        while partial is not None and not gives_up.wait(LOOK_S / 25):
            if self._error is not None:
                raise self._error
            if failure := partial.find_failure(self._now):
                raise JobError(failure)
            if not partial.list_missing(self._now):
                return
