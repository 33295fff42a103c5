"""Which process started the ranks of this node, where no variable names their launch: hydra gives its processes none.

Invariant: all ranks of one launch on one node find the same process. This module must not import torch.

Sources: names of the processes that MPICH's, Intel's and Open MPI's `mpiexec` leave above a rank, as seen there.
"""

from __future__ import annotations

_NAMES = ("hydra_pmi_proxy", "mpiexec", "mpirun", "orterun", "prterun", "orted", "prted", "mpispawn", "pmi_proxy")


def find_launching_process() -> str:
    """Name and id of the nearest process above this one that starts ranks; "" for none."""
    import psutil  # here, since nearly every launch names itself

    try:
        above = [(process.name(), process.pid) for process in psutil.Process().parents()]
    except (psutil.Error, OSError):
        return ""
    return next((f"{name} {pid}" for name, pid in above if name.startswith(_NAMES)), "")
