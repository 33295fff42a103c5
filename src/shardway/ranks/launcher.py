"""This process's place among the ranks, read from the variables of any launcher, and where the ranks meet.

Invariants:
- Every rank of one launch gets the same world, address and port, and a rank of its own, or a SiteError. Partial or
  contradictory variables never end as rank 0 of 1.
- Address and port come only from variables and files that all ranks of the launch share, so that each rank computes the
  same ones without communication. All ranks of one launch on one node find the same launching process.

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
from collections.abc import Iterable, Iterator, Mapping
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


@dataclass(frozen=True)
class NodeSpec:
    """Nodes of a run with an agent on each: addresses, the index of this one, port of the rendezvous, ranks on each."""

    addresses: tuple[str, ...]
    node: int
    port: int
    ranks: int

    def name(self, node: int) -> str:
        """A node's display name: "node 1 (10.0.0.2)"."""
        return f"node {node} ({self.addresses[node]})"


# --- addresses and ports

LOOPBACK = "127.0.0.1"
FIRST_PORT = 15000
PORTS = 15000
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_SHORT_IPV4 = re.compile(r"[0-9][0-9a-fx.]*", re.IGNORECASE)
_LOOPBACK_NAMES = re.compile(r"localhost[46]?(\..*)?|.*\.localhost|ip6-(localhost|loopback)")


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
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return parsed is not None and (parsed.is_loopback or parsed.is_unspecified)


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


def list_ports(launch: str) -> tuple[int, ...]:
    """The ports that follow from the launch's name, in the order in which they are tried. The first is 15000 +
    crc32(launch) % 15000. They lie below Linux' range of ephemeral ports (32768 and up); two jobs on one node get the
    same first port once in 15000 times."""
    names = (launch, *(f"{launch} {number}" for number in (1, 2, 3)))
    return tuple(FIRST_PORT + zlib.crc32(name.encode()) % PORTS for name in names)


# --- placement from the launcher's variables

FT_LAUNCHER = "ft_launcher"
"""NVIDIA's resiliency extension, which gives its ranks torchrun's variables and a socket of a monitor."""


@dataclass(frozen=True)
class Placement:
    """One rank's place in its launch. `node` and `nodes` are None where the launcher does not number nodes (Open MPI,
    hydra, over several nodes). `master_port` 0 means that any free port will do, since no other process has to find it.
    `launcher` is "none" for a process without a launcher: rank 0 of 1. `starts_again`: the launcher states that it
    restarts the ranks if one fails. `launch`: the launch's name, if the port follows from it and another port may be
    taken (`ranks.network`); "" if a port was given."""

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
        """Whether an agent of this node has started this rank, which is its child; the agent has chosen the port. The
        store at that port is kept by our own agent and by torchrun's; with ft_launcher rank 0 keeps it."""
        return self.launcher in ("shardway", "torchrun", FT_LAUNCHER)


def find_placement(environ: Environ) -> Placement:
    """This process's place, from the first launcher whose variables are there. Agents come first, since their ranks
    inherit the variables of the surrounding scheduler; MPI's launchers come before those of schedulers, by which they
    start their daemons. A batch script and the shell of an allocation are not ranks, whatever variables they have: they
    get launcher "none", rank 0 of 1. Raises SiteError where variables are missing, not numbers, contradictory, or give
    no way to meet."""
    placement = _read_launcher(environ)
    if placement is None:
        return Placement(0, 1, 0, 1, 0, 1, LOOPBACK, 0, "none")
    if placement.has_agent:
        return placement
    # RANK or WORLD_SIZE may differ from a launcher's numbers: exported earlier, or expanded in the job script, where a
    # variable of the launcher still says 0, rather than in each task.
    launched: Placement | None = placement
    if placement.launcher == "the environment":
        launched = _read_schedulers(environ, [each for each in make_own("schedulers") if each.numbers_ranks])
        if launched is not None and launched.world != placement.world:
            return placement  # another launcher within the task of that one
    if launched is None:
        return placement
    for name, value in (("RANK", launched.rank), ("WORLD_SIZE", launched.world)):
        if name in environ and environ[name] != str(value):
            allowed = f"{name} not set, or {value} as {launched.launcher} says"
            raise variables_error(environ, launched.launcher, (name,), allowed, f"unset {name} in the job script")
    return placement


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


# --- the launchers

_TORCHRUN = SeatVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
# OMPI_COMM_WORLD_NODE_RANK numbers the ranks of one node over all jobs there; it is not the node's number.
_MPIRUN = SeatVariables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_MVAPICH = SeatVariables(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
_JSRUN = SeatVariables(
    "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
)
_PALS = SeatVariables("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID")
_HYDRA = SeatVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_NUMBERED_ALONE = {"prun": "PMIX_RANK", "blaunch": "LSF_PM_TASKID", "aprun": "ALPS_APP_PE"}
"""Launchers that number their processes, but give their count in no variable."""


def _read_launcher(environ: Environ) -> Placement | None:
    """The placement by the first launcher that has started this process; None for a process without a launcher."""

    def place(launcher: str, names: SeatVariables, launch: str = "") -> Placement:
        return _place(environ, launcher, _read_seat(environ, launcher, names), launch)

    if AGENT_VARIABLE in environ:  # our agent gives its ranks torchrun's variables; ft_launcher may have started it
        return place("shardway", _TORCHRUN)
    if "TORCHELASTIC_RUN_ID" in environ:
        return place(FT_LAUNCHER if "FT_RANK_MONITOR_IPC_SOCKET" in environ else "torchrun", _TORCHRUN)
    if all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        return _read_environment(environ)  # set by hand in torchrun's way
    if _MPIRUN.rank in environ or _MPIRUN.world in environ:
        # One value for each mpirun, by Open MPI 5 and 4: two mpiruns in one job get two ports.
        return place("mpirun", _MPIRUN, first_value(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))
    if _MVAPICH.rank in environ:
        return place("mpirun (MVAPICH2)", _MVAPICH)
    if _JSRUN.rank in environ:
        return place("jsrun", _JSRUN)
    if "FLUX_TASK_RANK" in environ:
        return _read_flux(environ)
    if _PALS.rank in environ and not _is_by_scheduler(environ, _PALS.rank):
        return place("mpiexec (PALS)", _PALS, environ.get("PALS_APID", ""))
    if _HYDRA.rank in environ and (_HYDRA.local_rank in environ or not _is_by_scheduler(environ, _HYDRA.rank)):
        return _read_hydra(environ)
    placement = _read_schedulers(environ, make_own("schedulers")) or _read_environment(environ)
    placement = placement or _read_schedulers(environ, make_installed("schedulers"))
    for launcher, name in _NUMBERED_ALONE.items() if placement is None else ():
        if name in environ:  # each process would be rank 0 of 1
            allowed = f"{name} not set, or with it RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
            remedy = f"start the ranks with mpirun, or torchrun on each node; for a single rank, unset {name}"
            raise variables_error(environ, launcher, (name,), allowed, remedy)
    return placement


def _read_hydra(environ: Environ) -> Placement:
    if "MPI_APPNUM" in environ and _HYDRA.local_rank not in environ:  # mpiexec.gforker, for one machine only
        launcher = "mpiexec.gforker"
        return _place(environ, launcher, _read_seat(environ, launcher, _HYDRA, one_node=True))
    # Other launchers with hydra's protocol have their own names for the local numbers, or none.
    names = replace(
        _HYDRA,
        local_rank=first_set(environ, _HYDRA.local_rank, "PMI_LOCAL_RANK"),
        local_world=first_set(environ, _HYDRA.local_world, "PMI_LOCAL_SIZE"),
    )
    alone = environ.get(_HYDRA.world) == "1" and names.local_rank not in environ
    return _place(environ, "mpiexec (hydra)", _read_seat(environ, "mpiexec (hydra)", names, one_node=alone))


def _read_flux(environ: Environ) -> Placement:
    """Flux gives the number of nodes but not of tasks on this one, which follows only from equal shares."""
    names = SeatVariables("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    rank, world, local_rank, nodes = (
        read_int(environ, "flux run", name) for name in (names.rank, names.world, names.local_rank, names.local_world)
    )
    if not nodes or world % nodes:
        allowed = "as many tasks on each node (flux run -N NODES --tasks-per-node=TASKS)"
        raise variables_error(environ, "flux run", (names.world, names.local_world), allowed)
    seat = RankSeat(rank, world, local_rank, world // nodes, 0 if nodes == 1 else None, nodes)
    check_seat(environ, "flux run", names, seat)
    return _place(environ, "flux run", seat, environ.get("FLUX_JOB_ID", ""))


def _read_environment(environ: Environ) -> Placement | None:
    """RANK and WORLD_SIZE, set by hand, by Ray or by DeepSpeed's launcher (LOCAL_SIZE, CROSS_RANK). The local numbers
    may be left out where all ranks are on one node, and RANK as well if these are set, as Lightning does."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    own_addresses = (LOOPBACK, "localhost", "::1", "[::1]")
    one_node = environ.get("WORLD_SIZE") == "1" or environ.get("MASTER_ADDR", "") in own_addresses
    names = SeatVariables(
        first_set(environ, "RANK", "LOCAL_RANK") if one_node else "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        first_set(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        first_set(environ, "GROUP_RANK", "NODE_RANK", "CROSS_RANK"),
        first_set(environ, "GROUP_WORLD_SIZE", "NNODES", "CROSS_SIZE"),
    )
    one_node = one_node and names.local_world not in environ
    return _place(environ, "the environment", _read_seat(environ, "the environment", names, one_node=one_node))


def _is_by_scheduler(environ: Environ, name: str) -> bool:
    """Whether a launcher's variable was set by a scheduler's own launcher, whose other variables are complete."""
    return any(name in each.also_sets and each.is_rank(environ) for each in make_own("schedulers"))


def _read_schedulers(environ: Environ, schedulers: Iterable[Any]) -> Placement | None:
    seats = (scheduler.read_seat(environ) for scheduler in schedulers)
    seat: RankSeat | None = next((seat for seat in seats if seat is not None), None)
    return None if seat is None else _place(environ, seat.launcher, seat, seat.launch)


def _read_seat(environ: Environ, launcher: str, names: SeatVariables, *, one_node: bool = False) -> RankSeat:
    """The seat from a launcher that gives each number in its own variable; with all ranks on `one_node` the local
    numbers may be left out."""
    rank, world = (read_int(environ, launcher, name) for name in (names.rank, names.world))
    if one_node:
        local_rank = read_int(environ, launcher, names.local_rank) if names.local_rank in environ else rank
        seat = RankSeat(rank, world, local_rank, world, 0, 1)
    else:
        local_rank, local_world = (read_int(environ, launcher, name) for name in (names.local_rank, names.local_world))
        node, nodes = (read_optional_int(environ, launcher, name) for name in (names.node, names.nodes))
        node, nodes = (0, 1) if local_world == world else (node, nodes)
        seat = RankSeat(rank, world, local_rank, local_world, node, nodes)
    check_seat(environ, launcher, names, seat)
    return seat


# --- where the ranks of a launch meet


def _place(environ: Environ, launcher: str, seat: RankSeat, launch: str = "") -> Placement:
    """The seat with its meeting point; `launch` identifies the launch more finely than the scheduler's job id."""
    one_node, job, port = seat.local_world == seat.world, "", 0
    if not environ.get("MASTER_PORT"):
        job = launch or find_job(environ) or environ.get("LSB_JOBID", "")
        if not job and one_node and seat.world > 1:
            job = find_launching_process()
    address = _find_address(environ, launcher, seat)
    if environ.get("MASTER_PORT"):
        port = read_int(environ, launcher, "MASTER_PORT")
        if not 0 < port < 65536:
            raise variables_error(environ, launcher, ("MASTER_PORT",), "a port from 1 to 65535")
    elif seat.world > 1 and not job:
        allowed = "a free port of rank 0's host, since no job id is there to derive one from"
        remedy = "export MASTER_PORT with one value for all ranks"
        raise variables_error(environ, launcher, ("MASTER_PORT",), allowed, remedy)
    elif seat.world > 1:
        port = list_ports(job)[0]
    return Placement(
        rank=seat.rank,
        world=seat.world,
        local_rank=seat.local_rank,
        local_world=seat.local_world,
        node=seat.node,
        nodes=seat.nodes,
        master_addr=address,
        master_port=port,
        launcher=launcher,
        starts_again=launcher in ("torchrun", FT_LAUNCHER) and has_restarts_left(environ),
        launch=job if seat.world > 1 else "",
    )


def _find_address(environ: Environ, launcher: str, seat: RankSeat) -> str:
    """The host of rank 0, under a name that every rank can use: MASTER_ADDR, else 127.0.0.1 where all ranks are on one
    node, else the first host of the scheduler's step or job."""
    one_node = seat.local_world == seat.world
    hand_over = "export MASTER_ADDR with rank 0's host and hand it to every rank"
    if environ.get("MASTER_ADDR"):
        address = parse_host(environ["MASTER_ADDR"])
        if not address:
            allowed = "one host name or address, without a port (which MASTER_PORT says), a scheme or further hosts"
            raise variables_error(environ, launcher, ("MASTER_ADDR",), allowed, hand_over)
        # The ranks of one node may meet at a loopback address: with several torchrun agents on one machine, or
        # operators that give the first node "localhost" and the others its name.
        by_hand = launcher == "the environment" and seat.rank == seat.local_rank
        may_be_own = one_node or by_hand or launcher in ("shardway", "torchrun", FT_LAUNCHER)
        if not may_be_own and is_loopback(address):
            allowed = "a host name or address that all nodes reach: with this one each node would meet itself"
            remedy = "unset MASTER_ADDR, or export it with rank 0's host in the job script"
            raise variables_error(environ, launcher, ("MASTER_ADDR",), allowed, remedy)
        return address
    if one_node:
        return LOOPBACK
    for group in (make_own, make_installed):  # those of other packages only if the first ones do not answer
        for scheduler in group("schedulers"):
            if found := scheduler.find_hosts(environ, launcher, hand_over):
                name, hosts = found
                if len(set(hosts)) > 1:  # a job with one host is not the job of these ranks
                    return str(hosts[0])
                allowed = (
                    f"several hosts, since the ranks are on several nodes ({name} may be left over from another job)"
                )
                raise variables_error(environ, launcher, (name,), allowed, hand_over)
    allowed = "a host name or address, since the ranks are on several nodes"
    raise variables_error(environ, launcher, ("MASTER_ADDR",), allowed, hand_over)


_LAUNCHING = ("hydra_pmi_proxy", "mpiexec", "mpirun", "orterun", "prterun", "orted", "prted", "mpispawn", "pmi_proxy")


def find_launching_process() -> str:
    """Name and id of the nearest ancestor process that launches ranks, for hydra, which sets no variable with an id; ""
    for none."""
    import psutil  # here, since nearly every launch names itself

    try:
        above = [(process.name(), process.pid) for process in psutil.Process().parents()]
    except (psutil.Error, OSError):
        return ""
    return next((f"{name} {pid}" for name, pid in above if name.startswith(_LAUNCHING)), "")


@contextlib.contextmanager
def variables_for_libraries(placement: Placement, others: Mapping[str, str]) -> Iterator[None]:
    """Set torchrun's variables to this placement, and `others`, so that libraries read it whatever launched this rank;
    they are restored at the end."""
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
