"""Environment variables that belong to one job, step or rank, and so never reach another one.

`shardway submit` may be typed in a shell of a login node, of `salloc`, of a step, of a job of another scheduler, of a
notebook, or of a rank; a site's modules and profiles add defaults for the command that submits. Variables that a new
job would take for its own are removed at submission; those that may have been meant for the job are reported.

Invariant: the table here and those of the schedulers (`Scheduler.inherited`) are the only list of them. One exception:
the shell of a job drops the devices of a job when it submits the next one, since a user who submits may mean them.
docs/environment.md shows the table; Python (`strip`) and the shell of job scripts (`list_patterns`) follow it. This
module imports no torch and does not read `os.environ`.

Sources: bsub(1), flux-environment(7), torchrun's and accelerate's manuals; variables seen in ranks of Open MPI 4 and 5,
MPICH's hydra, Intel MPI, MVAPICH2, HPE's PALS, IBM's JSM, DeepSpeed's launcher.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache

from shardway.plugins import make_installed, make_own


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
    options: str = ""
    """How the names begin of variables that hold options for the command that submits; "" for none."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Such a variable -> the key of a run file with the same meaning; "" for what the job script sets itself. All other
    options go into site.options."""

    def has(self, name: str) -> bool:
        """Whether a variable belongs to this family."""
        return _matches(name, self.names) and not _matches(name, self.kept)


_GENERAL = (
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
)
"""Those that are no scheduler's."""

_OTHERS = (
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
"""Those of schedulers of which only the launchers are known."""

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@cache
def list_families() -> tuple[Family, ...]:
    """The whole table, with the families of all schedulers that are registered."""
    own, installed = (
        tuple(family for scheduler in make("schedulers") for family in scheduler.inherited)
        for make in (make_own, make_installed)
    )
    return (*_GENERAL, *own, *_OTHERS, *installed)


def list_patterns(*, of_ranks: bool) -> tuple[str, ...]:
    """The table for `drop_variables` of a job script: "!PATTERN" for what passes, then PATTERN for the rest.

    `of_ranks`: the families that reach no ranks, which a job drops when it begins; otherwise those that stay in a job
    and do not reach the next one.
    """
    chosen = [family for family in list_families() if family.reaches_ranks is not of_ranks]
    kept = (f"!{name}" for family in chosen for name in family.kept)
    return (*kept, *(name for family in chosen for name in family.names))


def strip(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a job submitted from here may inherit."""
    return {name: value for name, value in environ.items() if find_family(name) is None}


def list_unfit_for_ranks(environ: Mapping[str, str]) -> list[str]:
    """The variables that ranks started by an agent must not inherit."""
    unfit = [family for family in _GENERAL if not family.reaches_ranks]
    return [name for name in environ if any(family.has(name) for family in unfit)]


def list_option_patterns() -> tuple[str, ...]:
    """Patterns of variables that may be meant for a job and do not reach it automatically."""
    return tuple(f"{family.options}*" for family in list_families() if family.options)


def list_options(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold options for the command that submits."""
    patterns = list_option_patterns()
    return {name: value for name, value in environ.items() if _matches(name, patterns)}


def find_account(families: Iterable[Family], options: Mapping[str, str]) -> tuple[str, str]:
    """The variable of a scheduler's families that names the account, and its value; ("", "") for none. Sites leave the
    project account there (`jutil env activate` sets it)."""
    names = (name for family in families for name, key in family.keys.items() if key == _ACCOUNT)
    return next(((name, options[name]) for name in names if options.get(name)), ("", ""))


@cache
def find_family(name: str) -> Family | None:
    """The family of a variable; None for one that passes everywhere."""
    return next((family for family in list_families() if family.has(name)), None)


def name_key(name: str) -> str:
    """The key of a run file with the same meaning as a variable with an option; "" if there is none."""
    family = find_family(name)
    if family is None or not family.options or not name.startswith(family.options):
        return ""
    option = name.removeprefix(family.options).lower().replace("_", "-")  # SBATCH_MEM_BIND -> mem-bind
    return family.keys.get(name, f"site.options.{option}")


def describe_options(options: Mapping[str, str], asked: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each option of `list_options`: that it is used (an account), or what applies instead.

    `asked`: what the job requests from the scheduler, by key. An option with the same value gets no sentence.
    """
    for name, value in options.items():
        key = name_key(name)
        said = asked.get(key, "")
        if not value or (said and said == _as_asked(key, value) and key != _ACCOUNT):
            continue
        if key == _ACCOUNT and said == value:
            yield f"the account is {value}, as {name} of this shell says; site.account says it for every shell"
            continue
        holds = (
            f"the job has {said} ({key})" if said else f"to ask for it, set {key}" if key else "the job script says it"
        )
        yield f"{name}={value} of this shell is left out: {holds}"


_ACCOUNT = "site.account"


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


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    whole, starts, others = _split(patterns)
    return name in whole or name.startswith(starts) or any(fnmatchcase(name, pattern) for pattern in others)


@cache
def _split(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...], tuple[str, ...]]:
    """Plain names, beginnings ("SLURM_*"), and what only fnmatch can tell: a job has hundreds of variables."""
    special = [pattern for pattern in patterns if not frozenset("*?[").isdisjoint(pattern)]
    starts = [pattern for pattern in special if pattern.endswith("*") and frozenset("*?[").isdisjoint(pattern[:-1])]
    whole = frozenset(patterns).difference(special)
    return whole, tuple(each[:-1] for each in starts), tuple(each for each in special if each not in starts)
