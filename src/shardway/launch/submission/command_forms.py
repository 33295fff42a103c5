"""The table by which the first words of a command are read: who starts what, and what a job does about it.

    wrapper     runs the command that follows it (env, uv run, conda run, nsys profile): it runs as it was typed
    shell       runs text or a file: it runs as it was typed, and its text is known, so that checks can look at it
    launcher    starts ranks (torchrun, mpirun, accelerate launch): refused, with the line to type in its place
    scheduler   submits a job of its own (sbatch, qsub): refused
    own         Shardway itself: refused, with the line to type in its place

A word that no row names is a program of its own, and runs as it was typed; Python is read by `command` itself.

Invariant: a row is data; what is done with it is in `command`. This module must not look at files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType


class Role(StrEnum):
    """What the first word of a command is."""

    WRAPPER = "wrapper"
    SHELL = "shell"
    LAUNCHER = "launcher"
    SCHEDULER = "scheduler"
    OWN = "own"


@dataclass(frozen=True)
class CommandForm:
    """A row: the words that a command begins with ("uv run"), and how to find what follows its options.

    `flags` are options without a value, `values` those with one; of what is in neither, the row's `takes_values` says
    which it is. `counts`: options that say a number of ranks or nodes -> the key of [site] that says it. `runs` is
    what follows the options: "command", or "script" of Python (a launcher's), which `-m` makes a module.
    """

    names: tuple[str, ...]
    role: Role
    flags: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    takes_values: bool = False
    counts: Mapping[str, str] = field(default_factory=dict)
    runs: str = "command"
    launcher: str = ""
    """What site.launcher has to be in place of a launcher, where it matters to the program."""
    silent: frozenset[str] = frozenset()
    """Options of a launcher that the job script says itself; of others that are left out the person is told."""
    hint: str = ""


def word_set(text: str) -> frozenset[str]:
    """Words of a text."""
    return frozenset(text.split())


RANKS, NODES, TOTAL = "site.ranks_per_node", "site.nodes", "ranks in all"
"""What options of launchers count: a key of [site], or all ranks of the job."""

_OF_TORCHRUN = CommandForm(
    names=("torchrun",),
    role=Role.LAUNCHER,
    flags=word_set("--standalone --no-python --run-path -m --module --use-env"),
    takes_values=True,
    counts=MappingProxyType({"--nproc-per-node": RANKS, "--nnodes": NODES}),
    runs="script",
    silent=word_set(
        "--standalone --no-python -m --module --use-env --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf "
        "--node-rank --master-addr --master-port --local-addr --monitor-interval --start-method --max-restarts"
    ),
)
_OF_ACCELERATE = CommandForm(
    names=("accelerate launch", "accelerate-launch"),
    role=Role.LAUNCHER,
    flags=word_set(
        "--cpu --multi-gpu --tpu --ipex --use-deepspeed --use-fsdp --use-megatron-lm --use-xpu --quiet -q --debug -m "
        "--module --no-python --same-network --downcast-bf16 --enable-cpu-affinity --use-parallelism-config"
    ),
    takes_values=True,
    counts=MappingProxyType({"--num-machines": NODES, "--num-processes": TOTAL}),
    runs="script",
    silent=word_set(
        "-m --module --no-python --multi-gpu --machine-rank --main-process-ip --main-process-port --quiet -q"
    ),
    hint="`Accelerator()` finds its rank by itself; what else the launcher or its config file said stands in its "
    "arguments, such as Accelerator(mixed_precision=...)",
)
_OF_DEEPSPEED = CommandForm(
    names=("deepspeed", "deepspeed.pt"),
    role=Role.LAUNCHER,
    flags=word_set("--module --no-python --no-local-rank --no-ssh --save-pid --force-multi --bind-cores-to-rank"),
    takes_values=True,
    counts=MappingProxyType({"--num-gpus": RANKS, "--num-accelerators": RANKS, "--num-nodes": NODES}),
    runs="script",
    silent=word_set(
        "--module --no-python --no-local-rank --no-ssh --master-addr --master-port --hostfile -H --force-multi"
    ),
    hint="a script that asks for --local_rank finds it in the variable LOCAL_RANK",
)
_OF_MPI = CommandForm(
    names=("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "horovodrun"),
    role=Role.LAUNCHER,
    flags=word_set(
        "--oversubscribe -oversubscribe --allow-run-as-root --tag-output -tag-output --report-bindings -l -v --verbose "
        "-q"
    ),
    takes_values=True,
    counts=MappingProxyType(
        {
            **dict.fromkeys(("-n", "-np", "--np", "-c", "--n"), TOTAL),
            **dict.fromkeys(("-ppn", "--ppn", "-npernode", "--npernode", "-N"), RANKS),
        }
    ),
    launcher="mpirun",
    silent=word_set("-H -host --host -f -hostfile --hostfile -machinefile --machinefile"),
)
_OF_SRUN = CommandForm(
    names=("srun",),
    role=Role.LAUNCHER,
    flags=word_set("-l --label -u --unbuffered --exclusive --overlap --exact --pty -v --verbose -Q --quiet -s"),
    takes_values=True,
    counts=MappingProxyType(
        {
            **dict.fromkeys(("-n", "--ntasks"), TOTAL),
            **dict.fromkeys(("-N", "--nodes"), NODES),
            "--ntasks-per-node": RANKS,
        }
    ),
    launcher="srun",
    silent=word_set("-l --label -u --unbuffered"),
)

FORMS: tuple[CommandForm, ...] = (
    CommandForm(("env",), Role.WRAPPER, values=word_set("-u --unset -C --chdir")),
    CommandForm(
        ("uv run",),
        Role.WRAPPER,
        values=word_set(
            "--with --with-editable --with-requirements --extra --group --only-group --no-group -p --python --project "
            "--directory --env-file --package --index --default-index --index-url --cache-dir --config-file -w"
        ),
    ),
    CommandForm(
        ("conda run", "mamba run", "micromamba run"),
        Role.WRAPPER,
        values=word_set("-n --name -p --prefix --cwd -e --env -r --root-prefix"),
    ),
    CommandForm(("poetry run", "pipenv run", "pdm run", "rye run", "hatch run", "pipx run"), Role.WRAPPER),
    CommandForm(("pixi run",), Role.WRAPPER, values=word_set("-e --environment --manifest-path")),
    CommandForm(
        ("nsys profile", "ncu", "nice", "ionice", "time", "nohup", "numactl", "taskset", "stdbuf", "setsid", "timeout"),
        Role.WRAPPER,
        values=word_set("-o --output -t --trace -n -s --sample -c -e -f --force-overwrite -w --wait -k -N -m -i"),
    ),
    CommandForm(("bash", "sh", "zsh", "dash", "ksh"), Role.SHELL, values=word_set("-o +o -O")),
    _OF_TORCHRUN,
    replace(_OF_TORCHRUN, names=("ft_launcher",)),
    _OF_ACCELERATE,
    _OF_DEEPSPEED,
    _OF_MPI,
    _OF_SRUN,
    replace(_OF_MPI, names=("aprun", "jsrun"), launcher=""),
    CommandForm(("sbatch", "salloc", "qsub"), Role.SCHEDULER),
    CommandForm(("shardway",), Role.OWN),
)
"""The table: the first words of a command, and what they are."""

MODULES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), "torchrun"),
        "accelerate.commands.launch": "accelerate launch",
        "deepspeed.launcher.runner": "deepspeed",
        "nvidia_resiliency_ext.fault_tolerance.launcher": "ft_launcher",
        "mpi4py.run": "",
        "shardway": "shardway",
    }
)
"""Modules of `python -m` that are a row of the table; "" for none."""

BY_NAME = {name: form for form in FORMS for name in form.names}


def find_form(words: Sequence[str]) -> tuple[CommandForm | None, int]:
    """The row of the table that a command begins with, and how many words that are."""
    first = os.path.basename(words[0]) if words else ""
    for name, used in ((" ".join((first, *words[1:2])), 2), (first, 1)):
        if name in BY_NAME:
            return BY_NAME[name], used
    return None, 0
