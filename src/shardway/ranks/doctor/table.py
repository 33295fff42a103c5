"""All checks, by name: the one table from which the doctor, the preflight and the documentation read.

Invariant: the order is that of the report, and a name never changes its meaning. This module must not run a check.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardway.ranks.doctor.checks import gpu, host, network, software, storage
from shardway.ranks.doctor.finding import Check, Where

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "rank.placement": Check(
            "do the launcher's variables place this rank", Where.RANK, software.check_placement, True
        ),
        "versions": Check("versions of Python, torch, Shardway", Where.MACHINE, software.check_versions, True),
        "python.files": Check("is Python on a parallel file system", Where.MACHINE, storage.check_python, True),
        "container": Check("which container this is", Where.NODE, software.check_container, True),
        "gpu.query": Check("does nvidia-smi answer", Where.NODE, gpu.check_query, True),
        "gpu.count": Check("are all GPUs there", Where.NODE, gpu.check_count, True),
        "gpu.visible": Check("which GPUs a rank may use", Where.RANK, gpu.check_visible, True),
        "gpu.ecc": Check("errors of GPU memory", Where.NODE, gpu.check_ecc, True),
        "gpu.throttle": Check("is a GPU slowed down", Where.NODE, gpu.check_throttle, True),
        "gpu.busy": Check("does another program use a GPU", Where.NODE, gpu.check_busy, True),
        "gpu.mode": Check("compute mode and MIG", Where.NODE, gpu.check_mode, True),
        "cpu.affinity": Check("cores that a rank may use", Where.RANK, host.check_affinity, True),
        "cpu.threads": Check("OMP_NUM_THREADS", Where.RANK, host.check_threads, True),
        "mem.limit": Check("memory of the job on this node", Where.NODE, host.check_memory, True),
        "mem.shm": Check("size of /dev/shm", Where.NODE, host.check_shm, True),
        "limit.memlock": Check("may memory be locked", Where.RANK, host.check_memlock, True),
        "limit.files": Check("open files", Where.RANK, host.check_files, True),
        "limit.tasks": Check("processes and threads", Where.RANK, host.check_tasks, True),
        "limit.core": Check("core dumps on a shared file system", Where.RANK, host.check_core, True),
        "tmp": Check("folder for temporary files", Where.NODE, host.check_tmp, True),
        "net.interface": Check("interfaces of NCCL and gloo", Where.NODE, network.check_interfaces, True),
        "net.master": Check("the address at which ranks meet", Where.NODE, network.check_master, True),
        "net.hostname": Check("the address of the node's own name", Where.NODE, network.check_hostname, True),
        "net.infiniband": Check("InfiniBand ports", Where.NODE, network.check_infiniband, True),
        "fs.mounts": Check("do file systems answer", Where.MACHINE, storage.check_mounts, True),
        "fs.write": Check("can the run write", Where.MACHINE, storage.check_write, True),
        "fs.space": Check("room for checkpoints", Where.MACHINE, storage.check_space, True),
        "fs.caches": Check("caches in a small home folder", Where.MACHINE, storage.check_caches),
        "fs.speed": Check("speed of the run's folder", Where.NODE, storage.check_speed, deep=True, limit_s=60.0),
        "offline": Check("do libraries know of no internet", Where.NODE, software.check_offline, True),
        "proxy": Check("the proxy that leads outside", Where.NODE, software.check_proxy, True),
        "scheduler": Check("does the scheduler answer", Where.LOGIN, software.check_scheduler, limit_s=20.0),
        "account": Check("is the account yours", Where.LOGIN, software.check_account),
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
