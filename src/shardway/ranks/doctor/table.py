"""All checks, by name: the one table from which the doctor, the preflight and the documentation read.

Invariant: the order is that of the report, and a name never changes its meaning. This module must not run a check.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardway.ranks.doctor import cluster, node
from shardway.ranks.doctor.finding import CheckScope, DoctorCheck

CHECKS: Mapping[str, DoctorCheck] = MappingProxyType(
    {
        "rank.placement": DoctorCheck(
            "do the launcher's variables place this rank", CheckScope.RANK, cluster.check_placement, True
        ),
        "versions": DoctorCheck(
            "versions of Python, torch, Shardway", CheckScope.MACHINE, cluster.check_versions, True
        ),
        "python.files": DoctorCheck(
            "is Python on a parallel file system", CheckScope.MACHINE, cluster.check_python, True
        ),
        "container": DoctorCheck("which container this is", CheckScope.NODE, cluster.check_container, True),
        "gpu.query": DoctorCheck("does nvidia-smi answer", CheckScope.NODE, node.check_query, True),
        "gpu.count": DoctorCheck("are all GPUs there", CheckScope.NODE, node.check_count, True),
        "gpu.visible": DoctorCheck("which GPUs a rank may use", CheckScope.RANK, node.check_visible, True),
        "gpu.ecc": DoctorCheck("errors of GPU memory", CheckScope.NODE, node.check_ecc, True),
        "gpu.throttle": DoctorCheck("is a GPU slowed down", CheckScope.NODE, node.check_throttle, True),
        "gpu.busy": DoctorCheck("does another program use a GPU", CheckScope.NODE, node.check_busy, True),
        "gpu.mode": DoctorCheck("compute mode and MIG", CheckScope.NODE, node.check_mode, True),
        "cpu.affinity": DoctorCheck("cores that a rank may use", CheckScope.RANK, node.check_affinity, True),
        "cpu.threads": DoctorCheck("OMP_NUM_THREADS", CheckScope.RANK, node.check_threads, True),
        "mem.limit": DoctorCheck("memory of the job on this node", CheckScope.NODE, node.check_memory, True),
        "mem.shm": DoctorCheck("size of /dev/shm", CheckScope.NODE, node.check_shm, True),
        "limit.memlock": DoctorCheck("may memory be locked", CheckScope.RANK, node.check_memlock, True),
        "limit.files": DoctorCheck("open files", CheckScope.RANK, node.check_files, True),
        "limit.tasks": DoctorCheck("processes and threads", CheckScope.RANK, node.check_tasks, True),
        "limit.core": DoctorCheck("core dumps on a shared file system", CheckScope.RANK, node.check_core, True),
        "tmp": DoctorCheck("folder for temporary files", CheckScope.NODE, node.check_tmp, True),
        "net.interface": DoctorCheck("interfaces of NCCL and gloo", CheckScope.NODE, cluster.check_interfaces, True),
        "net.master": DoctorCheck("the address at which ranks meet", CheckScope.NODE, cluster.check_master, True),
        "net.hostname": DoctorCheck(
            "the address of the node's own name", CheckScope.NODE, cluster.check_hostname, True
        ),
        "net.infiniband": DoctorCheck("InfiniBand ports", CheckScope.NODE, cluster.check_infiniband, True),
        "fs.mounts": DoctorCheck("do file systems answer", CheckScope.MACHINE, cluster.check_mounts, True),
        "fs.write": DoctorCheck("can the run write", CheckScope.MACHINE, cluster.check_write, True),
        "fs.space": DoctorCheck("room for checkpoints", CheckScope.MACHINE, cluster.check_space, True),
        "fs.caches": DoctorCheck("caches in a small home folder", CheckScope.MACHINE, cluster.check_caches),
        "fs.speed": DoctorCheck(
            "speed of the run's folder", CheckScope.NODE, cluster.check_speed, deep=True, limit_s=60.0
        ),
        "offline": DoctorCheck("do libraries know of no internet", CheckScope.NODE, cluster.check_offline, True),
        "proxy": DoctorCheck("the proxy that leads outside", CheckScope.NODE, cluster.check_proxy, True),
        "scheduler": DoctorCheck("does the scheduler answer", CheckScope.LOGIN, cluster.check_scheduler, limit_s=20.0),
        "account": DoctorCheck("is the account yours", CheckScope.LOGIN, cluster.check_account),
    }
)
"""Name -> what one process looks at. What is seen over all ranks only is in `WORLD_CHECKS`."""

WORLD_CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "world.port": "is the port free on rank 0",
        "world.meeting": "do all ranks come together",
        "world.nodes": "are the nodes of the job all there and alike",
        "world.versions": "are versions equal on all nodes",
        "world.master": "is MASTER_ADDR the same address on all nodes",
        "world.clock": "do the clocks of the nodes agree",
        "world.visible": "does each node see the files of the first",
        "torch.start": "do torch and its process group start",
        "torch.import": "how long torch takes to import",
        "torch.allreduce": "a timed sum over all ranks",
        "torch.peers": "do GPUs of a node reach each other (--deep)",
        "torch.matmul": "speed of each GPU in a matrix product (--deep)",
    }
)
"""Name -> question, of what ranks find out together."""


def list_names() -> tuple[str, ...]:
    """Every name that a finding can have, in the order of the report."""
    return (*CHECKS, *WORLD_CHECKS)
