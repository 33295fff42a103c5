"""Environment variables that belong to one job, step or rank, and so never reach another one.

`shardway submit` may be typed in a shell of a login node, of `salloc`, of a step, of a job of another scheduler, of a
notebook, or of a rank; a site's modules and profiles add defaults for `sbatch`. Variables that a new job would take
for its own are removed at submission; those that may have been meant for the job are reported.

Invariant: the table here is the only list of them. One exception: shell/slurm.sh drops the devices of a job when it
submits the next one, since a user who submits may mean them. docs/environment.md shows the table; Python (`strip`) and
the shell of job scripts (`list_patterns`) follow it. This module imports no torch and does not read `os.environ`.

Sources: the sections on environment variables of sbatch(1), salloc(1), srun(1), squeue(1), sacct(1), scancel(1), Pyxis
0.24 (args.c), qsub(1B), bsub(1), flux-environment(7), torchrun's and accelerate's manuals; variables seen in ranks of
Open MPI 4 and 5, MPICH's hydra, Intel MPI, MVAPICH2, HPE's PALS, IBM's JSM, DeepSpeed's launcher.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType


@dataclass(frozen=True)
class Family:
    """Variables of one kind: shell patterns of their names, exceptions that pass (`kept`), and the reason.

    `settings`: those that a job may set for its own ranks. `reaches_ranks`: whether ranks that an agent starts see
    them; a submitted job never does.
    """

    subject: str
    names: tuple[str, ...]
    reason: str
    kept: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    reaches_ranks: bool = False

    def has(self, name: str) -> bool:
        """Whether a variable belongs to this family."""
        return _matches(name, self.names) and not _matches(name, self.kept)


FAMILIES = (
    Family(
        "a place among ranks",
        (
            *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "NODE_RANK"),
            *(
                "GROUP_RANK",
                "GROUP_WORLD_SIZE",
                "ROLE_RANK",
                "ROLE_NAME",
                "ROLE_WORLD_SIZE",
                "CROSS_RANK",
                "CROSS_SIZE",
            ),
            *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "PET_*", "FT_RANK_MONITOR_IPC_SOCKET"),
        ),
        "left by torchrun, DeepSpeed, Lightning, Ray or SageMaker, or exported by hand; the job finds its own",
    ),
    Family(
        "Shardway's own",
        (
            *("SHARDWAY_AGENT", "SHARDWAY_ATTEMPT_DIR", "SHARDWAY_STOP_FILE", "SHARDWAY_JOB", "SHARDWAY_NODES"),
            *("SHARDWAY_PROGRESS", "SHARDWAY_CPU_MASKS", "SHARDWAY_GATE", "SHARDWAY_RELEASED", "SHARDWAY_LENT_CACHE"),
        ),
        "of the job or rank that submits",
        reaches_ranks=True,
    ),
    Family(
        "a process of MPI",
        (
            *("OMPI_COMM_WORLD_*", "OMPI_UNIVERSE_SIZE", "OMPI_APP_CTX_NUM_PROCS", "OMPI_NUM_APP_CTX", "OMPI_ARGV"),
            *("OMPI_COMMAND", "OMPI_FILE_LOCATION", "OMPI_FIRST_RANKS", "OMPI_MCA_ess*", "OMPI_MCA_initial_wdir"),
            *("OMPI_MCA_orte_ess_*", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_local_daemon_uri", "OMPI_MCA_orte_jobid"),
            *("OMPI_MCA_orte_app_num", "OMPI_MCA_orte_num_*", "OMPI_MCA_orte_bound_*", "OMPI_MCA_orte_precondition*"),
            *("OMPI_MCA_orte_launch", "OMPI_MCA_orte_tmpdir_base", "OMPI_MCA_orte_*_session_dir"),
            *("OMPI_MCA_orte_node_regex", "OMPI_MCA_plm", "OMPI_MCA_pmix", "OMPI_MCA_mpi_oversubscribe"),
            "ORTE_DAEMON_UMASK_VALUE",
            *("OMPI_MCA_shmem_RUNTIME_QUERY_hint", "OMPI_MCA_num_procs", "OMPI_MCA_cpu_type", "OMPI_MCA_PREFIXES"),
            *("OMPI_WORLD_*", "OMPI_TOOL_NAME", "OMPI_LIBDIR_LOC", "OMPI_VERSION", "OPAL_USER_PARAMS_GIVEN"),
            *("PRTE_LAUNCHED", "PRTE_SHARED_FS"),
            *("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_ID", "PMI_PORT", "PMI_KVS*", "PMI_SPAWNED", "PMI_JOBID"),
            *(
                "PMI_HOSTNAME",
                "PMI_DEBUG",
                "MPI_APPNUM",
                "MPI_UNIVERSE_SIZE",
                "PMI_APPNUM",
                "PMI_CONTROL_PORT",
                "PMI_LOCAL_*",
                "PMI_UNIVERSE_SIZE",
                "PMI_SHARED_SECRET",
            ),
            *("PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER_*", "PMIX_ID", "PMIX_VERSION", "PMIX_HOSTNAME"),
            *(
                "PMIX_SYSTEM_TMPDIR",
                "PMIX_PARAM_FILE_PASSED",
                "PMIX_DSTORE_*",
                "PMIX_GDS_*",
                "PMIX_BFROP*",
                "PMIX_PTL_*",
                "PMIX_SECURITY_MODE",
            ),
            *("PALS_APID", "PALS_RANKID", "PALS_NODEID", "PALS_LOCAL_*", "PALS_SPOOL_DIR", "PALS_APINFO", "PALS_DIR"),
            *("HYDRA_BSTRAP_*", "HYDRA_LAUNCH_TYPE", "I_MPI_INFO_*", "I_MPI_HYDRA_UUID", "I_MPI_PIN_MAPPING"),
            *("HYDI_*", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_*", "MPISPAWN_*", "MPIRUN_RSH*"),
        ),
        "a library of MPI would look for the process manager that they name; its settings pass (OMPI_MCA_btl, ...)",
        settings=("OMPI_MCA_plm", "OMPI_MCA_pmix", "OMPI_MCA_orte_tmpdir_base"),
    ),
    Family(
        "a job or step of Slurm",
        ("SLURM_*", "SLURMD_*", "SRUN_*", "_SLURM_SPANK_OPTION_*"),
        "srun in the new job would take them for its own options; left by salloc, a step, or the job that submits",
        kept=(
            *("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_ROOT", "SLURM_HOME"),
            "SLURM_MPI_TYPE",
        ),
        settings=("SLURM_OVERLAP", "SLURM_NETWORK", "SLURM_UNBUFFEREDIO", "SRUN_CPUS_PER_TASK"),
        reaches_ranks=True,
    ),
    Family(
        "options for Slurm's commands",
        ("SBATCH_*", "SALLOC_*", "SQUEUE_*", "SACCT_*", "SCANCEL_*", "SINFO_*", "SCONTROL_*"),
        "they would override the script, and change what squeue and sacct print; submit reports those that concern the "
        "job, and site.account follows SBATCH_ACCOUNT if nothing else sets it",
        reaches_ranks=True,
    ),
    Family(
        "a container for whatever Slurm starts",
        ("PYXIS_CONTAINER_IMAGE", "PYXIS_CONTAINER_NAME"),
        "Pyxis would start the job script itself in it, where there is no srun; site.image says what the ranks run in",
        reaches_ranks=True,
    ),
    Family(
        "a job of PBS",
        ("PBS_*", "QSUB_*", "NCPUS"),
        "of the job that submits",
        kept=(
            *("PBS_CONF_FILE", "PBS_DEFAULT", "PBS_SERVER", "PBS_EXEC", "PBS_HOME", "PBS_AUTH_METHOD", "PBS_TMPDIR"),
            *("PBS_PRIMARY", "PBS_SECONDARY", "PBS_LEAF_NAME", "PBS_*_SERVICE_PORT", "PBS_ENCRYPT_METHOD"),
            "PBS_SUPPORTED_AUTH_METHODS",
        ),
        settings=("NCPUS",),
        reaches_ranks=True,
    ),
    Family(
        "a job of LSF, and jsrun",
        ("LSB_*", "LS_JOBPID", "LS_SUBCWD", "LSF_PM_*", "JSM_*"),
        "of the job that submits",
        reaches_ranks=True,
    ),
    Family(
        "a job of Flux",
        ("FLUX_JOB_*", "FLUX_TASK_*", "FLUX_KVS_NAMESPACE", "FLUX_ENCLOSING_ID", "FLUX_PMI_*"),
        "of the job that submits",
        reaches_ranks=True,
    ),
)

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "SBATCH_ACCOUNT": "site.account",
        "SBATCH_PARTITION": "site.queue",
        "SBATCH_TIMELIMIT": "site.walltime",
        "SBATCH_MEM_PER_NODE": "site.memory",
        "SBATCH_JOB_NAME": "run.name",
        **dict.fromkeys(
            ("SBATCH_GRES", "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK"), "site.ranks_per_node"
        ),
        **dict.fromkeys(
            (
                "SBATCH_OUTPUT",
                "SBATCH_ERROR",
                "SBATCH_REQUEUE",
                "SBATCH_NO_REQUEUE",
                "SBATCH_OPEN_MODE",
                "SBATCH_SIGNAL",
            ),
            "",
        ),
        **dict.fromkeys(("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_IGNORE_PBS", "SBATCH_DEBUG", "SBATCH_NO_KILL"), ""),
    }
)
"""Options of sbatch -> the key of a run file with the same meaning; "" for what the job script sets itself. All other
options go into site.options."""

ACCOUNT = "SBATCH_ACCOUNT"
"""Where sites leave the project account (`jutil env activate` sets it); sbatch reads no other variable."""

OPTIONS = ("SBATCH_*",)
"""Patterns of variables that may be meant for a job and do not reach it automatically."""

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def list_patterns(*, of_ranks: bool) -> tuple[str, ...]:
    """The table for `drop_variables` of a job script: "!PATTERN" for what passes, then PATTERN for the rest.

    `of_ranks`: the families that reach no ranks, which a job drops when it begins; otherwise those that stay in a job
    and do not reach the next one.
    """
    chosen = [family for family in FAMILIES if family.reaches_ranks is not of_ranks]
    kept = (f"!{name}" for family in chosen for name in family.kept)
    return (*kept, *(name for family in chosen for name in family.names))


def strip(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a job submitted from here may inherit."""
    return {name: value for name, value in environ.items() if find_family(name) is None}


def list_unfit_for_ranks(environ: Mapping[str, str]) -> list[str]:
    """The variables that ranks started by an agent must not inherit."""
    return [name for name in environ if (family := find_family(name)) is not None and not family.reaches_ranks]


def list_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold options for sbatch."""
    return {name: value for name, value in environ.items() if _matches(name, OPTIONS)}


def find_family(name: str) -> Family | None:
    """The family of a variable; None for one that passes everywhere."""
    return next((family for family in FAMILIES if family.has(name)), None)


def name_key(name: str) -> str:
    """The key of a run file with the same meaning as a variable with an option for sbatch; "" if there is none."""
    return KEYS.get(name, f"site.options.{_option_of(name)}") if _matches(name, OPTIONS) else ""


def describe_options(options: Mapping[str, str], asked: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each option of `list_options`: that it is used (an account), or what applies instead.

    `asked`: what the job requests from Slurm, by key. An option with the same value gets no sentence.
    """
    for name, value in options.items():
        key = name_key(name)
        said = asked.get(key, "")
        if not value or (said and said == _as_asked(key, value) and name != ACCOUNT):
            continue
        if name == ACCOUNT and said == value:
            yield f"the account is {value}, as {name} of this shell says; site.account says it for every shell"
            continue
        holds = (
            f"the job has {said} ({key})" if said else f"to ask for it, set {key}" if key else "the job script says it"
        )
        yield f"{name}={value} of this shell is left out: {holds}"


def _as_asked(key: str, value: str) -> str:
    """An option's value in the form of the job's request: a time in seconds (sbatch(1), --time)."""
    match = _TIME.fullmatch(value) if key == "site.walltime" else None
    if match is None:
        return value
    parts = [int(match[name]) if match[name] else None for name in ("first", "second", "third")]
    first, second, third = parts
    if match["days"]:
        seconds = 86400 * int(match["days"]) + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)
    elif third is not None:
        seconds = 3600 * (first or 0) + 60 * (second or 0) + third
    else:
        seconds = 60 * (first or 0) + (second or 0)
    return f"{seconds} s"


def _option_of(name: str) -> str:
    """SBATCH_MEM_BIND -> mem-bind."""
    return name.removeprefix("SBATCH_").lower().replace("_", "-")


def _matches(name: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in names)
