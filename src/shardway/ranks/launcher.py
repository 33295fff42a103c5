"""This process's place among the ranks, read from the variables of any launcher, and where the ranks meet.

Invariants:
- Every rank of one launch gets the same world, address and port, and a rank of its own, or a SiteError. Partial or
  contradictory variables never end as rank 0 of 1.
- Address and port come only from variables and files that all ranks of the launch share, so that each rank computes the
  same ones without communication. All ranks of one launch on one node find the same launching process.
- `variables_for_libraries`: libraries read this rank's placement, whatever launched it; the variables are restored when
  the context ends.

Sources: names of the processes that MPICH's, Intel's and Open MPI's `mpiexec` leave above a rank, as seen there;
srun(1) "Output environment variables", pbsdsh(1B), mpirun(1) of Open MPI, flux-environment(7), torchrun's "Environment
variables", and the variables that MPICH's hydra, Intel MPI, MVAPICH2, HPE's PALS, IBM's JSM and DeepSpeed's launcher
hand to their processes.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardway.ranks.variables import (
    AGENT_VARIABLE,
    Environ,
    first_set,
    first_value,
    parse_hostlist,
    parse_tasks_per_node,
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

    MASTER_ADDR, else 127.0.0.1 where all ranks are on one node, else the first host of the Slurm step or job, else
    the first of PBS_NODEFILE. Raises SiteError where none of these exists or it is not an address, and for a loopback
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
    # With another launcher the Slurm step is that of its daemons, which may leave out the node it was called on.
    steps = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if launcher == "srun" else ("SLURM_JOB_NODELIST",)
    nodelist = first_set(environ, *steps)
    if nodelist in environ:
        return _first_of_several(environ, launcher, nodelist, _read_slurm_hosts(environ, launcher, nodelist))
    if "PBS_NODEFILE" in environ:
        hosts = read_nodefile(environ, launcher, _HAND_OVER)
        return _first_of_several(environ, launcher, "PBS_NODEFILE", hosts)
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


def read_nodefile(environ: Environ, launcher: str, remedy: str) -> list[str]:
    """The lines of PBS_NODEFILE: a host for each task, in the order of the tasks."""
    path = environ.get("PBS_NODEFILE", "")
    try:
        slots = Path(path).read_text(encoding="utf-8").split() if path else []
    except OSError:
        slots = []
    if slots:
        return slots
    allowed = "a file that this host can read, with one host name a line"
    raise variables_error(environ, launcher, ("PBS_NODEFILE",), allowed, remedy)


def _read_slurm_hosts(environ: Environ, launcher: str, name: str) -> list[str]:
    try:
        return parse_hostlist(environ[name])
    except ValueError:
        allowed = 'a host list such as "n[01-03,7],login1"'
        raise variables_error(environ, launcher, (name,), allowed, _HAND_OVER) from None


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


@dataclass(frozen=True)
class _Names:
    """The variables in which one launcher gives a rank its place; None for numbers it does not give."""

    rank: str
    world: str
    local_rank: str
    local_world: str
    node: str | None = None
    nodes: str | None = None


@dataclass(frozen=True)
class _Seat:
    """A place without the meeting point."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int | None = None
    nodes: int | None = None


_TORCHRUN = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
# OMPI_COMM_WORLD_NODE_RANK numbers the ranks of one node over all jobs there; it is not the node's number.
_MPIRUN = _Names(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)
_HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = _Names("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID")
_MVAPICH = _Names(
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
_JSRUN = _Names("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")


def find_placement(environ: Environ) -> Placement:
    """This process's place, from the first launcher whose variables are there.

    Agents come first, since their ranks inherit the variables of the surrounding scheduler; MPI's launchers come
    before srun, since they start their daemons with srun. A batch script, the shell of salloc and the job script
    of PBS are not ranks, whatever variables they have: they get launcher "none", rank 0 of 1.

    Raises SiteError where variables are missing, not numbers, contradictory, or give no way to meet.
    """
    for read in _READERS.values():
        placement = read(environ)
        if placement is not None:
            _check_agrees_with_environment(environ, placement)
            return placement
    return Placement(0, 1, 0, 1, 0, 1, LOOPBACK, 0, "none")


def is_in_terminal(environ: Environ) -> bool:
    """Whether this is the first task of `srun --pty` (srun(1)); its other tasks are shells that start nothing."""
    return "SLURM_PTY_PORT" in environ and environ.get("SLURM_PROCID", "0") == "0"


def was_started_before(environ: Environ) -> bool:
    """Whether this is a restart of a launch or job, whose first start has answered the same questions."""
    return any(environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


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
    # Slurm's plug-in for Cray systems sets PALS_RANKID as well; there srun's variables are complete.
    if _PALS.rank not in environ or _is_srun_task(environ):
        return None
    return _place(environ, "mpiexec (PALS)", _read_seat(environ, "mpiexec (PALS)", _PALS), environ.get("PALS_APID", ""))


def _read_hydra(environ: Environ) -> Placement | None:
    # `srun --mpi=pmi2` sets PMI_RANK as well, but not hydra's local rank.
    by_srun = _is_srun_task(environ) and _HYDRA.local_rank not in environ
    if _HYDRA.rank not in environ or by_srun:
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
    names = _Names("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    seat = _Seat(rank, world, local_rank, world // nodes, 0 if nodes == 1 else None, nodes)
    _check_seat(environ, "flux run", names, seat)
    return _place(environ, "flux run", seat, environ.get("FLUX_JOB_ID", ""))


def _read_srun(environ: Environ) -> Placement | None:
    if not _is_srun_task(environ):
        return None
    world = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    names = _Names("SLURM_PROCID", world, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")
    seat = _read_srun_seat(environ, names)
    _check_seat(environ, "srun", names, seat)
    step = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    return _place(environ, "srun", seat, step)


def _is_srun_task(environ: Environ) -> bool:
    """Whether srun started this process. A batch step has SLURM_PROCID=0 too, but no step id (22.05, 24.11) or
    -5 (26.05); batch, interactive and extern steps are 0xfffffffb, -a and -c as unsigned numbers (slurm.h)."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environ and step.isdecimal() and int(step) < 0xFFFFFFF0


def _read_srun_seat(environ: Environ, names: _Names) -> _Seat:
    rank, world, local_rank, node = (
        read_int(environ, "srun", name) for name in (names.rank, names.world, names.local_rank, "SLURM_NODEID")
    )
    try:
        tasks = parse_tasks_per_node(environ.get(names.local_world, ""))
    except ValueError:
        allowed = 'the tasks of each node, such as "2(x3),1"'
        raise variables_error(environ, "srun", (names.local_world,), allowed) from None
    if sum(tasks) != world or node >= len(tasks):
        shown = (names.world, "SLURM_NODEID", names.local_world)
        allowed = f"{sum(tasks)} tasks and a node less than {len(tasks)}, as {names.local_world} says"
        raise variables_error(environ, "srun", shown, allowed)
    return _Seat(rank, world, local_rank, tasks[node], node, len(tasks))


def _read_pbs(environ: Environ) -> Placement | None:
    """pbsdsh and pbs_tmrsh: one rank a line of PBS_NODEFILE. Torque numbers the lines (PBS_VNODENUM); OpenPBS
    numbers the hosts (PBS_NODENUM), and its PBS_TASKNUM only counts up, so that it can place one rank a host."""
    if environ.get("PBS_TASKNUM", "1") == "1":  # the job script itself
        return None
    name = first_set(environ, "PBS_VNODENUM", "PBS_NODENUM")
    index, slots = read_int(environ, "pbsdsh", name), read_nodefile(environ, "pbsdsh", _SHARE_NODEFILE)
    hosts = list(dict.fromkeys(slots))
    if name == "PBS_NODENUM" and len(hosts) < len(slots):
        raise variables_error(environ, "pbsdsh", (name, "PBS_NODEFILE"), _HOSTS_ONCE, _ONE_TASK_A_HOST)
    if index >= len(slots):
        allowed = f"{name} less than {len(slots)}, the lines of PBS_NODEFILE"
        raise variables_error(environ, "pbsdsh", (name, "PBS_NODEFILE"), allowed)
    host = slots[index]
    local_rank, local_world = slots[:index].count(host), slots.count(host)
    seat = _Seat(index, len(slots), local_rank, local_world, hosts.index(host), len(hosts))
    return _place(environ, "pbsdsh", seat)


_HOSTS_ONCE = "each host once in PBS_NODEFILE, since PBS does not number the tasks of one host"
_ONE_TASK_A_HOST = "ask for mpiprocs=1 and start torchrun on each host, or start the ranks with mpirun"
_SHARE_NODEFILE = "copy it to a shared folder in the job script, then: pbsdsh -- env PBS_NODEFILE=COPY ..."


_OWN_ADDRESSES = (LOOPBACK, "localhost", "::1", "[::1]")


def _read_environment(environ: Environ) -> Placement | None:
    """RANK and WORLD_SIZE, set by hand, by Ray or by DeepSpeed's launcher (LOCAL_SIZE, CROSS_RANK). The local numbers
    may be left out where all ranks are on one node, and RANK as well if these are set, as Lightning does."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    one_node = environ.get("WORLD_SIZE") == "1" or environ.get("MASTER_ADDR", "") in _OWN_ADDRESSES
    names = _Names(
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
    "srun": _read_srun,
    "pbsdsh": _read_pbs,
    "the environment": _read_environment,
    "others": _read_numbered_alone,
}


def _read_seat(environ: Environ, launcher: str, names: _Names) -> _Seat:
    """The seat from a launcher that gives each number in its own variable."""
    rank, world, local_rank, local_world = (
        read_int(environ, launcher, name) for name in (names.rank, names.world, names.local_rank, names.local_world)
    )
    node, nodes = (read_optional_int(environ, launcher, name) for name in (names.node, names.nodes))
    if local_world == world:
        node, nodes = 0, 1
    seat = _Seat(rank, world, local_rank, local_world, node, nodes)
    _check_seat(environ, launcher, names, seat)
    return seat


def _read_seat_of_one_node(environ: Environ, launcher: str, names: _Names) -> _Seat:
    """The seat where all ranks are on this node, and their local numbers may be left out."""
    rank, world = (read_int(environ, launcher, name) for name in (names.rank, names.world))
    local_rank = read_int(environ, launcher, names.local_rank) if names.local_rank in environ else rank
    seat = _Seat(rank, world, local_rank, world, 0, 1)
    _check_seat(environ, launcher, names, seat)
    return seat


def _check_seat(environ: Environ, launcher: str, names: _Names, seat: _Seat) -> None:
    """Raise where a number is out of range; the message names all variables of the comparison."""
    if seat.rank >= seat.world:
        allowed = f"{names.rank} less than {names.world}"
        raise variables_error(environ, launcher, (names.rank, names.world), allowed)
    if not seat.local_rank < seat.local_world <= seat.world:
        allowed = f"{names.local_rank} less than {names.local_world}, and that at most {names.world}"
        raise variables_error(environ, launcher, (names.local_rank, names.local_world, names.world), allowed)
    if seat.node is not None and seat.nodes is not None and seat.node >= seat.nodes:
        shown = (names.node or "", names.nodes or "")
        raise variables_error(environ, launcher, shown, f"{names.node} less than {names.nodes}")


def _check_agrees_with_environment(environ: Environ, placement: Placement) -> None:
    """Raise where RANK or WORLD_SIZE differ from a launcher's numbers: exported earlier, or expanded in the job script,
    where `$SLURM_PROCID` is still 0, rather than in each task."""
    launched = _read_srun(environ) if placement.launcher == "the environment" else placement
    if launched is None or launched.has_agent:
        return
    if placement.launcher == "the environment" and launched.world != placement.world:
        return  # another launcher within the task of srun
    for name, value in (("RANK", launched.rank), ("WORLD_SIZE", launched.world)):
        if name in environ and environ[name] != str(value):
            allowed = f"{name} not set, or {value} as {launched.launcher} says"
            raise variables_error(environ, launched.launcher, (name,), allowed, f"unset {name} in the job script")


def _may_meet_itself(launcher: str, seat: _Seat) -> bool:
    """Whether a loopback address may be intended on a node: with several torchrun agents on one machine, or operators
    that give the first node "localhost" and the others its name."""
    if launcher in ("shardway", "torchrun", FT_LAUNCHER):
        return True
    return launcher == "the environment" and seat.rank == seat.local_rank


def _place(environ: Environ, launcher: str, seat: _Seat, launch: str = "") -> Placement:
    """The seat with its meeting point; `launch` identifies the launch more finely than the scheduler's job id."""
    job = launch or first_value(environ, "PBS_JOBID", "SLURM_JOB_ID", "LSB_JOBID")
    if not job and seat.local_world == seat.world > 1 and not environ.get("MASTER_PORT"):
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
        launch=job if seat.world > 1 and not environ.get("MASTER_PORT") else "",
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
