"""Starts this process as one of the ranks, and ends it.

Invariant: after `start_ranks` every rank of the launch is in the default process group, or every rank has an error
that states which ranks waited where; after `Ranks.end` no group is left. Only this module makes the default process
group. It makes no subgroups (`parallel.mesh`) and does not determine a rank's place (`ranks.launcher`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from shardway.errors import ERRORS_BY_NAME, Bug, JobError, LostContact, ShardwayError, SiteError
from shardway.hardware.heap import keep_freed_memory
from shardway.hardware.limits import explain_limit, raise_file_limit, read_task_limit
from shardway.ranks.launcher import Placement, render_endpoint
from shardway.ranks.network import (
    VARIABLE,
    NoMeeting,
    PortTaken,
    agree_on_port,
    check_named,
    describe_holder,
    look_up,
    name_interface,
)
from shardway.units import render_seconds

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Both on CUDA: decisions between ranks go over gloo, so that they never wait for the device."""


@dataclass(frozen=True)
class StartOptions:
    """How the ranks start: device type, CPU threads a rank, and the two nested waits in seconds. `group_alone`: a
    process without a launcher gets a process group too."""

    device: str = "cpu"
    threads: int = 1
    start_timeout_s: float = 600.0
    collective_timeout_s: float = 300.0
    group_alone: bool = False


@dataclass(frozen=True)
class Ranks:
    """The ranks of this launch as seen from one of them; `group` carries their exchange (None: the default group)."""

    placement: Placement
    device: torch.device
    grouped: bool
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def world(self) -> int:
        return self.placement.world

    @property
    def is_first(self) -> bool:  # rank 0 writes what is written once
        return self.placement.rank == 0

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if not self.grouped:
            return [value]
        values: list[Any] = [None] * self.world
        with self.contact("while gathering values"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if self.grouped:
            with self.contact("while adding values"):
                dist.all_reduce(values, group=self.group)
        return values

    def barrier(self) -> None:
        self.gather(None)

    def first_then_all(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and, if that succeeded, on the others; its error is raised on every rank."""
        outcome = self.together(lambda: work() if self.is_first else None)
        return cast(T, outcome) if self.is_first else work()

    def ask_first(self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0, on every rank; its error is raised on every rank."""
        result, failure, own = _attempt(work) if self.is_first else (None, None, None)
        note, answer = self.gather((own, result))[0]
        _raise_alike(failure, note)
        return cast(T, answer)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on any, raise that error on all, so that none waits forever."""
        result, failure, own = _attempt(work)
        notes = self.gather(own)
        _raise_alike(failure, next((note for note in notes if note is not None), None))
        return cast(T, result)

    @contextlib.contextmanager
    def contact(self, when: str) -> Iterator[None]:
        """Turn the loss of another rank into a LostContact that states when it happened."""
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or not is_lost_contact(error):
                raise
            # The message of gloo or NCCL without its source location and advice.
            why = re.sub(r"^\[[^\]]*\.cc:\d+\]\s*", "", _first_line(error)).split(". This is typically")[0].rstrip(".")
            raise LostContact(
                f"rank {self.rank} lost contact with another rank {when}: {why}\n"
                "  A rank of this job has died or hangs. To do: look for the rank whose own message is an error "
                "(its log or its events), then run the same command again: it goes on from the last checkpoint."
            ) from error

    def end(self) -> None:
        """Leave the process group; only after a success, since it would wait for a dead peer."""
        if self.grouped and dist.is_initialized():
            dist.destroy_process_group()


def start_ranks(placement: Placement, options: StartOptions) -> Ranks:
    """Join the launch that `placement` describes. Raises SiteError where the device or the other ranks are missing."""
    if not faulthandler.is_enabled() and sys.stderr is not None:  # so that a native crash shows Python's stack
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stderr that is not a file, as in a notebook
            faulthandler.enable(sys.stderr)
    raise_file_limit()
    _set_threads(_fit_threads(placement, options.threads))
    device = _choose_device(placement, options.device)
    if device.type == "cpu":
        keep_freed_memory()
    if placement.launcher != "none":
        placement = _join(placement, options, device)
    elif options.group_alone:
        dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)
    else:
        return Ranks(placement, device, grouped=False)
    return Ranks(placement, device, grouped=True)


_set_here = set[int]()
"""Numbers of threads that ranks of this process have started with, where torch had another before."""


def _set_threads(threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
        _set_here.add(threads)


def find_script_threads() -> int | None:
    """The number of threads that a script has chosen by `torch.set_num_threads`; None if torch has one that it may have
    begun with: all cores, one for each physical core, or what OMP_NUM_THREADS or MKL_NUM_THREADS state."""
    import psutil  # imported here: `shardway train` does not ask

    found = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    logical, physical = psutil.cpu_count() or cores, psutil.cpu_count(logical=False) or cores
    begins = {cores, min(cores, physical), max(1, cores * physical // logical)}
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text = os.environ.get(variable, "").partition(",")[0].strip()
        begins |= {min(int(text), each) for each in (*begins, int(text))} if text.isdecimal() else set()
    return None if found in begins or found in _set_here else found


def _fit_threads(placement: Placement, threads: int) -> int:
    """How many of the computing threads can start; with too few, OpenMP would end the process in the first step. Raises
    SiteError where a rank's other threads cannot start."""
    # Threads besides the computing ones: of the stop watchdog, of saves; as many again for collectives.
    limit, own = read_task_limit(), 4 if placement.launcher == "none" else 8
    if limit is None:
        return threads
    if limit.left < own:
        raise SiteError(
            f"a rank needs at least {own} more threads, and {limit}.\n"
            f"  To do: {limit.remedy}, start fewer ranks on this node, or end other programs of yours there."
        )
    fit = min(threads, max(1, limit.left // placement.local_world - own + 1))
    if fit < threads:
        logging.getLogger("shardway").warning(
            f"{limit}: too few for run.threads = {threads}, so rank {placement.rank} computes with {fit}. "
            f"To do: {limit.remedy}, or set run.threads = {fit}."
        )
    return fit


def _choose_device(placement: Placement, kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    # A scheduler that gives each task its devices (srun --gpus-per-task) shows it only these, numbered from 0 on. One
    # that binds tasks to the devices near their cores (--gpu-bind=closest) shows different tasks different ones.
    index = placement.local_rank % visible if visible else 0
    if not visible or not torch.cuda.is_available():
        raise SiteError(
            f"rank {placement.rank} is number {placement.local_rank + 1} on its node, where torch {torch.__version__} "
            f"sees {visible} CUDA devices.\n"
            '  To do: start at most as many ranks a node as it has devices, or set run.device = "cpu"; '
            "if the node has devices, check the driver and that this torch is a CUDA build."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


_DEVICE = "shardway/device-"  # key in the store: the device of a rank


def _check_own_device(placement: Placement, device: torch.device, store: dist.Store) -> None:
    """Raise SiteError where ranks of a node share a device because they see fewer devices than there are ranks; checked
    before NCCL connects."""
    if device.type != "cuda":
        return
    store.set(f"{_DEVICE}{placement.rank}", str(torch.cuda.get_device_properties(device).uuid))
    first = placement.rank - placement.local_rank
    if torch.cuda.device_count() >= placement.local_world or first < 0:
        return
    ranks = range(first, min(first + placement.local_world, placement.world))
    names = {rank: store.get(f"{_DEVICE}{rank}").decode() for rank in ranks}
    sharing = [rank for rank, name in names.items() if name == names.get(placement.rank)]
    if len(sharing) > 1 and names[placement.rank].strip("0-"):
        raise SiteError(
            f"ranks {', '.join(map(str, sharing))} have one device between them (GPU-{names[placement.rank]}).\n"
            "  To do: start at most as many ranks a node as it has devices, and let each see all of them or one of "
            "its own (CUDA_VISIBLE_DEVICES, srun --gpus-per-task=1)."
        )


def _join(placement: Placement, options: StartOptions, device: torch.device) -> Placement:
    began, has_met = time.monotonic(), False
    where = render_endpoint(placement.master_addr, placement.master_port)
    if placement.world > 1:
        check_named(os.environ, nccl=device.type == "cuda")
    name_interface(placement, os.environ)
    try:
        # An agent listens at the port, or no other process has to find it; else the ranks agree on one.
        listens = placement.has_agent or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not listens and placement.world > 1:
            placement = replace(placement, master_port=agree_on_port(placement, options.start_timeout_s))
            where = render_endpoint(placement.master_addr, placement.master_port)
        wait = timedelta(seconds=max(1.0, options.start_timeout_s - (time.monotonic() - began)))
        rendezvous = dist.rendezvous(f"tcp://{where}", rank=placement.rank, world_size=placement.world, timeout=wait)
        store, _, _ = next(rendezvous)
        store.set_timeout(wait)
        has_met = True
        _check_own_device(placement, device, store)
        dist.init_process_group(
            BACKENDS[device.type],
            store=store,
            rank=placement.rank,
            world_size=placement.world,
            timeout=timedelta(seconds=options.collective_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistError, RuntimeError, ValueError, NoMeeting) as error:
        tried = f"in {render_seconds(max(0.1, round(time.monotonic() - began, 1)))}"
        own = f"rank {placement.rank} of {placement.world}"
        if why := explain_limit(error):
            raise SiteError(f"{own} could not begin: {why}") from error
        if has_met and "NCCL" in str(error):
            raise SiteError(
                f"{own} met the others at {where}, and NCCL could not begin: {_first_line(error)}\n"
                "  To do: see what NCCL says with NCCL_DEBUG=WARN; `shardway doctor` measures devices and links."
            ) from error
        if has_met:
            name, host = os.environ.get(VARIABLE, ""), socket.gethostname()
            address = f"at {', '.join(look_up(host)) or 'no address: its own name is not known here'}"
            raise SiteError(
                f"{own} met the others at {where}, and {tried} could not connect to all of them: {_first_line(error)}\n"
                f"  They reach {host} {f'by the interface {name} ({VARIABLE})' if name else address}.\n"
                f"  To do: export {VARIABLE} with the interface that joins the nodes (ip -br addr), for all ranks; or "
                "look whether a rank has ended meanwhile."
            ) from error
        if isinstance(error, PortTaken) or "EADDRINUSE" in str(error):
            holder = str(error) if isinstance(error, PortTaken) else describe_holder(placement.master_port)
            raise SiteError(
                f"{own} cannot listen at {where} (MASTER_PORT): {holder}.\n"
                "  To do: unset MASTER_PORT, and ranks of srun, mpirun or mpiexec find a free port; or export another "
                "one for all ranks; or end that process, if it was left over."
            ) from error
        raise SiteError(
            f"{own} could not meet the others at {where} {tried}: {_first_line(error)}\n"
            f"  Here {placement.master_addr} is {', '.join(look_up(placement.master_addr)) or 'not known'}.\n"
            "  To do: check that every rank was started, that the address is reachable from every node and the port is "
            "free (MASTER_ADDR, MASTER_PORT); if ranks start slowly, raise run.start_timeout."
        ) from error
    return placement


def is_lost_contact(error: BaseException) -> bool:
    """Whether an error of a collective means that another rank is gone or silent."""
    text = str(error).lower()
    signs = r"connection closed by peer|connection reset|timed out|timeout caused pair closure|broken pipe"
    lost = isinstance(error, RuntimeError) and re.search(rf"{signs}|\bgloo\b|\bnccl", text) is not None
    return lost or isinstance(error, dist.DistError)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is that of an allocator without memory."""
    if error is None:
        return False
    named = isinstance(error, RuntimeError) and re.search("DefaultCPUAllocator|out of memory", str(error))
    allocator = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return allocator or bool(named) or is_out_of_memory(error.__cause__)


def _attempt(work: Callable[[], T]) -> tuple[T | None, ShardwayError | None, tuple[str, str] | None]:
    """The result, or else the failure and its note for the other ranks: they wait for an answer, whatever went wrong.
    Lost memory concerns only the rank that ran out, so its note is without text."""
    try:
        return work(), None, None
    except ShardwayError as error:
        failure = error
    except Exception as error:
        why = explain_limit(error)
        kind = JobError if why or is_out_of_memory(error) else Bug
        failure = kind(why or f"{type(error).__name__}: {error}")
        failure.__cause__ = error
    if is_out_of_memory(failure):
        return None, failure, (LostContact.__name__, "another rank ran out of memory")
    return None, failure, (type(failure).__name__, str(failure))


def _raise_alike(own: ShardwayError | None, note: tuple[str, str] | None) -> None:
    if own is not None:
        raise own
    if note is not None:
        name, text = note
        raise ERRORS_BY_NAME.get(name, JobError)(text)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
