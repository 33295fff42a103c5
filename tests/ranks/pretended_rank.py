"""One rank on a pretended host: python pretended_rank.py PID SECONDS SECONDS

It enters the namespaces of the process PID, starts as a rank by its variables, adds a number with the others, and says
in JSON what came of it: by which interfaces it is connected, or the error, and what the doctor says of the network. It
waits so long for the first rank to be there, and for the others from then on.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardway.ranks.launcher import Placement


def enter(pid: int) -> None:
    """Move this process, which must have one thread, into the network, mounts and host name of another."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)


def list_used() -> list[str]:
    """Interfaces over which this process is connected to another host."""
    import psutil

    names = {}
    for name, addresses in psutil.net_if_addrs().items():
        names.update({each.address.partition("%")[0]: name for each in addresses})
    mine = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]
    ends = [(each.laddr.ip.removeprefix("::ffff:"), each.raddr.ip.removeprefix("::ffff:")) for each in mine]
    # Rank 0 is connected to its own store as well.
    return sorted({names.get(here, "?") for here, there in ends if there not in names and not there.startswith("127.")})


def ask_doctor(placement: Placement) -> list[str]:
    """What the doctor has against the network of this host."""
    from shardway.ranks.doctor.checks import check_hostname, check_interfaces, check_master
    from shardway.ranks.doctor.surroundings import MachineView
    from shardway.sites.load import load_site

    around = MachineView(os.environ, load_site(os.environ["SITE"]), placement, host=socket.gethostname())
    found = [check(around) for check in (check_interfaces, check_master, check_hostname)]
    return [f"{each.verdict}: {each.found}" for each in found if each.verdict != "ok"]


def main(meet_s: float, talk_s: float) -> dict[str, object]:
    """What this rank has to say."""
    import torch

    from shardway.errors import SiteError
    from shardway.ranks.launcher import find_placement
    from shardway.ranks.network import VARIABLE
    from shardway.ranks.start import StartOptions, start_ranks

    placement = find_placement(os.environ)
    said: dict[str, object] = {"host": socket.gethostname(), "doctor": ask_doctor(placement)}
    try:
        ranks = start_ranks(placement, StartOptions(start_timeout_s=meet_s, collective_timeout_s=talk_s))
        said["sum"] = ranks.sum(torch.tensor([placement.rank + 1.0])).item()
    except SiteError as error:
        return {**said, "error": str(error)}
    said |= {"used": list_used(), "named": os.environ.get(VARIABLE, "")}
    ranks.barrier()
    ranks.end()
    return said


if __name__ == "__main__":
    enter(int(sys.argv[1]))
    print(json.dumps(main(*map(float, sys.argv[2:]))), flush=True)
