"""This process's place among the ranks, read from the variables of any launcher, and where the ranks meet.

Invariants:
- Every rank of one launch gets the same world, address and port, and a rank of its own, or a SiteError. Partial or
  contradictory variables never end as rank 0 of 1.
- Address and port come only from variables and files that all ranks of the launch share, so that each rank computes the
  same ones without communication. All ranks of one launch on one node find the same launching process.
- `variables_for_libraries`: libraries read this rank's placement, whatever launched it; the variables are restored when
  the context ends.

The variables of schedulers and of their own launchers are read by their classes (`Scheduler.read_seat`).

Sources: names of the processes that MPICH's, Intel's and Open MPI's `mpiexec` leave above a rank, as seen there;
mpirun(1) of Open MPI, flux-environment(7), torchrun's "Environment variables", and the variables that MPICH's hydra,
Intel MPI, MVAPICH2, HPE's PALS, IBM's JSM and DeepSpeed's launcher hand to their processes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardway.plugins import make_installed, make_own
from shardway.rank_variables import (
    AGENT_VARIABLE,
    Environ,
    RankSeat,
    SeatVariables,
    check_seat,
    first_set,
    first_value,
    read_int,
    read_optional_int,
    variables_error,
)

# --- nodes of a run with an agent on each


@dataclass(frozen=True)
class NodeSpec:
    """Addresses of the nodes, the index of this one, the port of the rendezvous, and ranks on each."""

    addresses: tuple[str, ...]
    node: int
    port: int
    ranks: int

    def name(self, node: int) -> str:
        """A node's display name: "node 1 (10.0.0.2)"."""
        return f"node {node} ({self.addresses[node]})"


# --- address and port of the rendezvous

LOOPBACK = "127.0.0.1"
FIRST_PORT = 15000
PORTS = 15000
_TRIED = 4
_LEFT_OVER = "unset MASTER_ADDR, or export it with rank 0's host in the job script"
_HAND_OVER = "export MASTER_ADDR with rank 0's host and hand it to every rank"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_SHORT_IPV4 = re.compile(r"[0-9][0-9a-fx.]*", re.IGNORECASE)
_ONE_HOST = "one host name or address, without a port (which MASTER_PORT says), a scheme or further hosts"
_LOOPBACK_NAMES = re.compile(r"localhost[46]?(\..*)?|.*\.localhost|ip6-(localhost|loopback)")


def find_address(environ: Environ, launcher: str, *, one_node: bool, may_be_own: bool = False) -> str:
    """The host of rank 0, under a name that every rank can use.

    MASTER_ADDR, else 127.0.0.1 where all ranks are on one node, else the first host of the scheduler's step or job.
    Raises SiteError where none of these exists or it is not an address, and for a loopback
    address with several nodes unless it `may_be_own`: the ranks of one node may meet there under another address than
    the other nodes use.
    """
    if environ.get("MASTER_ADDR"):
        address = _read_address(environ, launcher)
        if not one_node and not may_be_own and is_loopback(address):
            allowed = "a host name or address that all nodes reach: with this one each node would meet itself"
            raise variables_error(environ, launcher, ("MASTER_ADDR",), allowed, _LEFT_OVER)
        return address
    if one_node:
        return LOOPBACK
    for scheduler in _list_schedulers():
        if found := scheduler.find_hosts(environ, launcher, _HAND_OVER):
            return _first_of_several(environ, launcher, *found)
    allowed = "a host name or address, since the ranks are on several nodes"
    raise variables_error(environ, launcher, ("MASTER_ADDR",), allowed, _HAND_OVER)


def _first_of_several(environ: Environ, launcher: str, name: str, hosts: list[str]) -> str:
    """The first host of a job that has several; a job with one host is not the job of these ranks."""
    if len(set(hosts)) > 1:
        return hosts[0]
    allowed = f"several hosts, since the ranks are on several nodes ({name} may be left over from another job)"
    raise variables_error(environ, launcher, (name,), allowed, _HAND_OVER)


def _read_address(environ: Environ, launcher: str) -> str:
    if address := parse_host(environ["MASTER_ADDR"]):
        return address
    raise variables_error(environ, launcher, ("MASTER_ADDR",), _ONE_HOST, _HAND_OVER)


def parse_host(text: str) -> str:
    """One host name or address, an IPv6 address without its brackets; "" where the text is anything else."""
    text = text.strip()
    address = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return address if _NAME.fullmatch(address) or _parse_ip(address) is not None else ""


def is_loopback(address: str) -> bool:
    """Whether an address, or a name by its usual meaning, is loopback: no other node reaches it."""
    name = address.lower().removesuffix(".")
    if _LOOPBACK_NAMES.fullmatch(name):
        return True
    parsed = _parse_ip(name)
    if parsed is None:
        return False
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return parsed.is_loopback or parsed.is_unspecified


def _parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, also in the short forms of IPv4 that resolvers take ("127.1", inet(3)); None for a name."""
    plain = text.partition("%")[0]
    if _SHORT_IPV4.fullmatch(plain):
        with contextlib.suppress(OSError):
            return ipaddress.IPv4Address(socket.inet_aton(plain))
    try:
        return ipaddress.ip_address(plain)
    except ValueError:
        return None


def render_endpoint(address: str, port: int) -> str:
    """ADDRESS:PORT as URLs have it: an IPv6 address in brackets (RFC 3986, 3.2.2)."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def find_port(environ: Environ, launcher: str, world: int, job: str) -> int:
    """The port at which rank 0 listens.

    MASTER_PORT, else 0 ("choose") for a single rank, else the first of `list_ports`. Raises SiteError where `job` is
    empty as well.
    """
    if environ.get("MASTER_PORT"):
        return _read_port(environ, launcher)
    if world == 1:
        return 0
    if job:
        return list_ports(job)[0]
    allowed = "a free port of rank 0's host, since no job id is there to derive one from"
    remedy = "export MASTER_PORT with one value for all ranks"
    raise variables_error(environ, launcher, ("MASTER_PORT",), allowed, remedy)


def list_ports(launch: str) -> tuple[int, ...]:
    """The ports that follow from the launch's name, in the order in which they are tried.

    The first is 15000 + crc32(launch) % 15000. They lie below Linux' range of ephemeral ports (32768 and up); two jobs
    on one node get the same first port once in 15000 times.
    """
    names = (launch, *(f"{launch} {number}" for number in range(1, _TRIED)))
    return tuple(FIRST_PORT + zlib.crc32(name.encode()) % PORTS for name in names)


def _read_port(environ: Environ, launcher: str) -> int:
    port = read_int(environ, launcher, "MASTER_PORT")
    if not 0 < port < 65536:
        raise variables_error(environ, launcher, ("MASTER_PORT",), "a port from 1 to 65535")
    return port


# --- the process that launched the ranks, for hydra, which sets no variable with an id

_NAMES = ("hydra_pmi_proxy", "mpiexec", "mpirun", "orterun", "prterun", "orted", "prted", "mpispawn", "pmi_proxy")


def find_launching_process() -> str:
    """Name and id of the nearest ancestor process that launches ranks; "" for none."""
    import psutil  # here, since nearly every launch names itself

    try:
        above = [(process.name(), process.pid) for process in psutil.Process().parents()]
    except (psutil.Error, OSError):
        return ""
    return next((f"{name} {pid}" for name, pid in above if name.startswith(_NAMES)), "")


# --- placement from the launcher's variables

FT_LAUNCHER = "ft_launcher"
"""NVIDIA's resiliency extension, which gives its ranks torchrun's variables and a socket of a monitor."""

_FT_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"


@dataclass(frozen=True)
class Placement:
    """One rank's place in its launch.

    `node` and `nodes` are None where the launcher does not number nodes (Open MPI, hydra, over several nodes).
    `master_port` 0 means that any free port will do, since no other process has to find it. `launcher` is "none" for a
    process without a launcher: rank 0 of 1. `starts_again`: the launcher states that it restarts the ranks if one
    fails. `launch`: the launch's name, if the port follows from it and another port may be taken (`ranks.network`); ""
    if a port was given.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int | None
    nodes: int | None
    master_addr: str
    master_port: int
    launcher: str
    starts_again: bool = False
    launch: str = field(default="", compare=False)

    @property
    def has_agent(self) -> bool:
        """Whether an agent of this node has started this rank, which is its child; the agent has chosen the port.

        The store at that port is kept by our own agent and by torchrun's; with ft_launcher rank 0 keeps it.
        """
        return self.launcher in ("shardway", "torchrun", FT_LAUNCHER)


_TORCHRUN = SeatVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
# OMPI_COMM_WORLD_NODE_RANK numbers the ranks of one node over all jobs there; it is not the node's number.
_MPIRUN = SeatVariables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_HYDRA = SeatVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = SeatVariables("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID")
_MVAPICH = SeatVariables(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
_JSRUN = SeatVariables(
    "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
)


def find_placement(environ: Environ) -> Placement:
    """This process's place, from the first launcher whose variables are there.

    Agents come first, since their ranks inherit the variables of the surrounding scheduler; MPI's launchers come
    before those of schedulers, by which they start their daemons. A batch script and the shell of an allocation are
    not ranks, whatever variables they have: they get launcher "none", rank 0 of 1.

    Raises SiteError where variables are missing, not numbers, contradictory, or give no way to meet.
    """
    for read in _READERS.values():
        placement = read(environ)
        if placement is not None:
            _check_agrees_with_environment(environ, placement)
            return placement
    return Placement(0, 1, 0, 1, 0, 1, LOOPBACK, 0, "none")


def is_in_terminal(environ: Environ) -> bool:
    """Whether a person's terminal is joined to this process, and not to the other ones of its launch."""
    return any(scheduler.is_in_terminal(environ) for scheduler in make_own("schedulers"))


def was_started_before(environ: Environ) -> bool:
    """Whether this is a restart of a launch or job, whose first start has answered the same questions."""
    counts = [scheduler.restart_variable for scheduler in make_own("schedulers")]
    return any(environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", *filter(None, counts)))


def find_job(environ: Environ) -> str:
    """The scheduler's id of the job around this process, or ""."""
    return first_value(environ, *(each.job_variable for each in make_own("schedulers") if each.job_variable))


def has_restarts_left(environ: Environ) -> bool:
    """Whether torchrun or ft_launcher has restarts left for this rank; False where the variables do not state it."""
    count, most = (environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return AGENT_VARIABLE not in environ and count.isdecimal() and most.isdecimal() and int(count) < int(most)


def _read_agent(environ: Environ) -> Placement | None:
    """Shardway's own agent, which gives its ranks torchrun's variables."""
    if AGENT_VARIABLE not in environ:
        return None
    return _place(environ, "shardway", _read_seat(environ, "shardway", _TORCHRUN))


def _read_ft_launcher(environ: Environ) -> Placement | None:
    """NVIDIA's ft_launcher; its ranks may have started an agent of Shardway, which comes first."""
    if _FT_VARIABLE not in environ or "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return _place(environ, FT_LAUNCHER, _read_seat(environ, FT_LAUNCHER, _TORCHRUN))


def _read_torchrun(environ: Environ) -> Placement | None:
    """torchrun itself, or its four variables set by hand in the same way."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return _place(environ, "torchrun", _read_seat(environ, "torchrun", _TORCHRUN))
    names = (_TORCHRUN.rank, _TORCHRUN.world, _TORCHRUN.local_rank, _TORCHRUN.local_world)
    return _read_environment(environ) if all(name in environ for name in names) else None


def _read_mpirun(environ: Environ) -> Placement | None:
    if _MPIRUN.rank not in environ and _MPIRUN.world not in environ:
        return None
    # One value for each mpirun, by Open MPI 5 and 4: two mpiruns in one job get two ports.
    launch = first_value(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return _place(environ, "mpirun", _read_seat(environ, "mpirun", _MPIRUN), launch)


def _read_pals(environ: Environ) -> Placement | None:
    if _PALS.rank not in environ or _is_by_scheduler(environ, _PALS.rank):
        return None
    return _place(environ, "mpiexec (PALS)", _read_seat(environ, "mpiexec (PALS)", _PALS), environ.get("PALS_APID", ""))


def _read_hydra(environ: Environ) -> Placement | None:
    by_scheduler = _is_by_scheduler(environ, _HYDRA.rank) and _HYDRA.local_rank not in environ
    if _HYDRA.rank not in environ or by_scheduler:
        return None
    if "MPI_APPNUM" in environ and _HYDRA.local_rank not in environ:  # mpiexec.gforker, for one machine only
        return _place(environ, "mpiexec.gforker", _read_seat_of_one_node(environ, "mpiexec.gforker", _HYDRA))
    # Other launchers with hydra's protocol have their own names for the local numbers, or none.
    names = replace(
        _HYDRA,
        local_rank=first_set(environ, _HYDRA.local_rank, "PMI_LOCAL_RANK"),
        local_world=first_set(environ, _HYDRA.local_world, "PMI_LOCAL_SIZE"),
    )
    alone = environ.get(_HYDRA.world) == "1" and names.local_rank not in environ
    read = _read_seat_of_one_node if alone else _read_seat
    return _place(environ, "mpiexec (hydra)", read(environ, "mpiexec (hydra)", names))


def _read_mvapich(environ: Environ) -> Placement | None:
    if _MVAPICH.rank not in environ:
        return None
    return _place(environ, "mpirun (MVAPICH2)", _read_seat(environ, "mpirun (MVAPICH2)", _MVAPICH))


def _read_jsrun(environ: Environ) -> Placement | None:
    if _JSRUN.rank not in environ:
        return None
    return _place(environ, "jsrun", _read_seat(environ, "jsrun", _JSRUN))


def _read_flux(environ: Environ) -> Placement | None:
    """Flux gives the number of nodes but not of tasks on this one, which follows only from equal shares."""
    if "FLUX_TASK_RANK" not in environ:
        return None
    rank, world, local_rank, nodes = (
        read_int(environ, "flux run", name)
        for name in ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    )
    if not nodes or world % nodes:
        allowed = "as many tasks on each node (flux run -N NODES --tasks-per-node=TASKS)"
        raise variables_error(environ, "flux run", ("FLUX_JOB_SIZE", "FLUX_JOB_NNODES"), allowed)
    names = SeatVariables("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    seat = RankSeat(rank, world, local_rank, world // nodes, 0 if nodes == 1 else None, nodes)
    check_seat(environ, "flux run", names, seat)
    return _place(environ, "flux run", seat, environ.get("FLUX_JOB_ID", ""))


def _is_by_scheduler(environ: Environ, name: str) -> bool:
    """Whether a launcher's variable was set by a scheduler's own launcher, whose other variables are complete."""
    return any(name in each.also_sets and each.is_rank(environ) for each in make_own("schedulers"))


def _read_own_schedulers(environ: Environ) -> Placement | None:
    """The launchers of schedulers that Shardway knows."""
    return _read_seats(environ, make_own("schedulers"))


def _read_other_schedulers(environ: Environ) -> Placement | None:
    """Those of other packages, which are looked up where nothing else has placed this process."""
    return _read_seats(environ, make_installed("schedulers"))


def _read_seats(environ: Environ, schedulers: Iterable[Any]) -> Placement | None:
    seats = (scheduler.read_seat(environ) for scheduler in schedulers)
    seat: RankSeat | None = next((seat for seat in seats if seat is not None), None)
    return None if seat is None else _place(environ, seat.launcher, seat, seat.launch)


def _list_schedulers() -> Iterator[Any]:
    """Every scheduler, those of other packages only if the first ones do not answer."""
    yield from make_own("schedulers")
    yield from make_installed("schedulers")


_OWN_ADDRESSES = (LOOPBACK, "localhost", "::1", "[::1]")


def _read_environment(environ: Environ) -> Placement | None:
    """RANK and WORLD_SIZE, set by hand, by Ray or by DeepSpeed's launcher (LOCAL_SIZE, CROSS_RANK). The local numbers
    may be left out where all ranks are on one node, and RANK as well if these are set, as Lightning does."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    one_node = environ.get("WORLD_SIZE") == "1" or environ.get("MASTER_ADDR", "") in _OWN_ADDRESSES
    names = SeatVariables(
        first_set(environ, "RANK", "LOCAL_RANK") if one_node else "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        first_set(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        first_set(environ, "GROUP_RANK", "NODE_RANK", "CROSS_RANK"),
        first_set(environ, "GROUP_WORLD_SIZE", "NNODES", "CROSS_SIZE"),
    )
    read = _read_seat_of_one_node if one_node and names.local_world not in environ else _read_seat
    return _place(environ, "the environment", read(environ, "the environment", names))


_NUMBERED_ALONE = {"prun": "PMIX_RANK", "blaunch": "LSF_PM_TASKID", "aprun": "ALPS_APP_PE"}
"""Launchers that number their processes, but give their count in no variable."""


def _read_numbered_alone(environ: Environ) -> Placement | None:
    """None where no launcher numbers this process; else SiteError, since each process would be rank 0 of 1."""
    for launcher, name in _NUMBERED_ALONE.items():
        if name in environ:
            allowed = f"{name} not set, or with it RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
            remedy = f"start the ranks with mpirun, or torchrun on each node; for a single rank, unset {name}"
            raise variables_error(environ, launcher, (name,), allowed, remedy)
    return None


_READERS: dict[str, Callable[[Environ], Placement | None]] = {
    "shardway": _read_agent,
    FT_LAUNCHER: _read_ft_launcher,
    "torchrun": _read_torchrun,
    "mpirun": _read_mpirun,
    "mpirun (MVAPICH2)": _read_mvapich,
    "jsrun": _read_jsrun,
    "flux run": _read_flux,
    "mpiexec (PALS)": _read_pals,
    "mpiexec (hydra)": _read_hydra,
    "own schedulers": _read_own_schedulers,
    "the environment": _read_environment,
    "other schedulers": _read_other_schedulers,
    "others": _read_numbered_alone,
}


def _read_seat(environ: Environ, launcher: str, names: SeatVariables) -> RankSeat:
    """The seat from a launcher that gives each number in its own variable."""
    rank, world, local_rank, local_world = (
        read_int(environ, launcher, name) for name in (names.rank, names.world, names.local_rank, names.local_world)
    )
    node, nodes = (read_optional_int(environ, launcher, name) for name in (names.node, names.nodes))
    if local_world == world:
        node, nodes = 0, 1
    seat = RankSeat(rank, world, local_rank, local_world, node, nodes)
    check_seat(environ, launcher, names, seat)
    return seat


def _read_seat_of_one_node(environ: Environ, launcher: str, names: SeatVariables) -> RankSeat:
    """The seat where all ranks are on this node, and their local numbers may be left out."""
    rank, world = (read_int(environ, launcher, name) for name in (names.rank, names.world))
    local_rank = read_int(environ, launcher, names.local_rank) if names.local_rank in environ else rank
    seat = RankSeat(rank, world, local_rank, world, 0, 1)
    check_seat(environ, launcher, names, seat)
    return seat


def _check_agrees_with_environment(environ: Environ, placement: Placement) -> None:
    """Raise where RANK or WORLD_SIZE differ from a launcher's numbers: exported earlier, or expanded in the job script,
    where a variable of the launcher still says 0, rather than in each task."""
    if placement.has_agent:
        return
    launched: Placement | None = placement
    if placement.launcher == "the environment":
        launched = _read_seats(environ, [each for each in make_own("schedulers") if each.numbers_ranks])
    if launched is None:
        return
    if placement.launcher == "the environment" and launched.world != placement.world:
        return  # another launcher within the task of that one
    for name, value in (("RANK", launched.rank), ("WORLD_SIZE", launched.world)):
        if name in environ and environ[name] != str(value):
            allowed = f"{name} not set, or {value} as {launched.launcher} says"
            raise variables_error(environ, launched.launcher, (name,), allowed, f"unset {name} in the job script")


def _may_meet_itself(launcher: str, seat: RankSeat) -> bool:
    """Whether a loopback address may be intended on a node: with several torchrun agents on one machine, or operators
    that give the first node "localhost" and the others its name."""
    if launcher in ("shardway", "torchrun", FT_LAUNCHER):
        return True
    return launcher == "the environment" and seat.rank == seat.local_rank


def _place(environ: Environ, launcher: str, seat: RankSeat, launch: str = "") -> Placement:
    """The seat with its meeting point; `launch` identifies the launch more finely than the scheduler's job id."""
    job = ""
    if not environ.get("MASTER_PORT"):
        job = launch or find_job(environ) or environ.get("LSB_JOBID", "")
        if not job and seat.local_world == seat.world > 1:
            job = find_launching_process()
    return Placement(
        rank=seat.rank,
        world=seat.world,
        local_rank=seat.local_rank,
        local_world=seat.local_world,
        node=seat.node,
        nodes=seat.nodes,
        master_addr=find_address(
            environ, launcher, one_node=seat.local_world == seat.world, may_be_own=_may_meet_itself(launcher, seat)
        ),
        master_port=find_port(environ, launcher, seat.world, job),
        launcher=launcher,
        starts_again=launcher in ("torchrun", FT_LAUNCHER) and has_restarts_left(environ),
        launch=job if seat.world > 1 else "",
    )


# --- launcher variables for libraries


@contextlib.contextmanager
def variables_for_libraries(placement: Placement, others: Mapping[str, str]) -> Iterator[None]:
    """Set torchrun's variables to this placement, and `others`, for as long as the context lasts."""
    variables = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world),
        "LOCAL_RANK": str(placement.local_rank),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        **others,
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
