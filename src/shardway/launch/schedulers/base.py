"""The class of a scheduler: the contract first, then what all schedulers share.

A scheduler is one class (`Scheduler`) that is found by its entry point: Slurm, PBS and this machine beside this module,
others in packages of their own. No other module of Shardway names one.

Invariants:
- Methods of a scheduler are pure: lines of a script, words to run, or the parsing of their output.
- A record holds what one answer stated, nothing remembered; what the scheduler did not state is empty or None.
- A missing answer is never taken for "no job".
- Options: each given option appears, in the order given, except those that are false.
- Explanations: the first rule whose pattern matches gives the sentence, filled with the requested values. A message
  without a rule is passed on as it is, never guessed at.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.resources import files
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from shardway.errors import SiteError
from shardway.inherited import Family, read_tables
from shardway.launch.script import ScriptLine
from shardway.plugins import is_registered, list_names, make_installed, make_own, make_plugin
from shardway.rank_variables import Environ, RankSeat
from shardway.units import render_bytes, render_seconds

if TYPE_CHECKING:  # each rank that a scheduler has started imports this module
    from shardway.launch.hosts.base import Done
    from shardway.launch.job import Job
    from shardway.launch.site_survey import ProbedFacts

OWN_FILES = files(__package__)
"""Where the rules of our own schedulers are."""

# --- one job's record, in words common to all schedulers


class SchedulerSilent(SiteError):
    """The scheduler gave no answer that can be used; nothing is known of any job, least of all that there is none."""


class JobPhase(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
    """The scheduler answered, and does not know the job."""


class SchedulerEnding(StrEnum):
    """How a job ended as far as a scheduler can tell; it does not know what the program meant by its exit code."""

    COMPLETED = "completed"
    """Exit code 0."""
    FAILED = "failed"
    """Another exit code, or a signal of unknown origin."""
    TIMEOUT = "timeout"
    """The wall-time was over."""
    CANCELLED = "cancelled"
    """A user deleted it, running or queued; queued if it has no `started`."""
    PREEMPTED = "preempted"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILURE = "node_failure"
    NEVER_STARTED = "never_started"
    """It ended without having run and was not deleted: a dependency that cannot be met, a launch that failed."""
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class JobRecord:
    """One job as a scheduler describes it now.

    `state`, `reason` and `exit_text` ("0:9", "-29") are the scheduler's own words. `ending` is None unless `phase` is
    ENDED. `exit_code` is that of the job script, 0 to 255, None where a signal ended it or nothing is known; `signal`
    the number of that signal, 0 for none. Times are Unix seconds (local time where a scheduler names no zone), None
    for unknown. `note` names a known defect of the answer, such as lost output.
    """

    job: str
    phase: JobPhase
    state: str = ""
    reason: str = ""
    ending: SchedulerEnding | None = None
    exit_code: int | None = None
    signal: int = 0
    started: float | None = None
    ended: float | None = None
    nodes: str = ""
    restarts: int = 0
    name: str = ""
    note: str = ""
    exit_text: str = ""


@dataclass(frozen=True)
class RequestedResources:
    """What a job asked of a scheduler, for sentences about it; empty or None is what it did not ask for.

    `queue` is a PBS queue or a Slurm partition, `account` a PBS project or a Slurm account. `walltime_s` is in
    seconds, `memory` in bytes of one node; `accelerators` and `cores` are those of one node. `host` is where the
    scheduler was asked, as ssh knows it; empty for this machine. `run` is how other verbs name the run.
    """

    name: str = ""
    queue: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    walltime_s: float | None = None
    nodes: int | None = None
    cores: int | None = None
    accelerators: int | None = None
    memory: int | None = None
    script: str = ""
    host: str = ""
    run: str = ""


@dataclass(frozen=True)
class Explanation:
    """Why a scheduler refuses a job, lets it wait, or how it ended: a sentence, and what to do about it.

    `hopeless`: waiting, or asking the same again later, will not help. `code` is a short stable name, such as
    "walltime_over_limit".
    """

    code: str
    sentence: str
    remedy: str
    hopeless: bool = False


NOTHING_ASKED = RequestedResources()


# --- the class

Words = tuple[str, ...]


class Ask(Protocol):
    """Runs a command of a survey: its output; empty where it fails, which is noted unless `quiet`."""

    def __call__(self, words: Sequence[str], *, quiet: bool = False) -> str: ...


@dataclass(frozen=True)
class EachNode:
    """How one command runs on every node of a job at once: words, quoted already, that the command follows, and shell
    that the command's own shell evaluates on each node to the node's number from 0 on."""

    words: Words
    index: str


@dataclass(frozen=True)
class EachRank:
    """How the scheduler's own launcher starts one process a rank: words, quoted already, that the command follows, and
    shell that exports RANK, WORLD_SIZE and LOCAL_RANK in the process of a rank."""

    words: Words
    place: str


@dataclass(frozen=True)
class QueueState:
    """A queue as its scheduler describes it now. `closed`: why it takes no job, "" where it takes some. `accounts`:
    those that may use it, () for every one. `nodes`: how many there are, None where that is not stated."""

    name: str
    closed: str = ""
    accounts: Words = ()
    max_walltime_s: float | None = None
    max_nodes: int | None = None
    min_nodes: int | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class OptionProblem:
    """What is wrong with an option, after its name: what it is, what is allowed, what to do."""

    what: str
    allowed: str = ""
    remedy: str = ""


class Scheduler(ABC):
    """One scheduler: everything that Shardway knows of it. A class of another package that derives from this one and
    has an entry point in the group `shardway.schedulers` can be named in a site profile (docs/extending.md).

    It is made without arguments, keeps nothing, and starts nothing: methods return lines of a script or words of
    commands, and read what these commands print. The module is imported in every rank that no other launcher
    has placed, so it must import quickly and without torch.

    What has no default here is abstract. The defaults are those of a scheduler that hands its jobs the environment,
    ends them at their wall-time and remembers how they ended.
    """

    name: ClassVar[str]
    """As it is registered, and as profiles and records name it."""
    title: ClassVar[str]
    """As people write it: "Slurm"."""

    # --- what kind of scheduler it is

    this_machine: ClassVar[bool] = False
    """Its jobs are processes of one machine, which has no queue, no limits and no account."""
    hands_on_environment: ClassVar[bool] = True
    """The environment of a job reaches the processes that it starts on other nodes."""
    keeps_time: ClassVar[bool] = True
    """It ends jobs at their wall-time; where it does not, the job script does."""
    warns: ClassVar[bool] = False
    """It can be asked for a signal before the wall-time ends (a directive does that where `job.warn_s` is set)."""
    signals_every_process: ClassVar[bool] = False
    """Not the script alone gets the signals, when a job is deleted or signalled."""
    forgets: ClassVar[bool] = False
    """It does not report that a job was cancelled, but `cancel` has seen its end."""
    agent_by_default: ClassVar[bool] = True
    """Our own agent starts a training where neither run nor site names a launcher."""

    # --- the job script

    by_hand: ClassVar[str]
    """How a person submits a script: "sbatch THIS_FILE"."""
    shell: ClassVar[str | Traversable]
    """The scheduler's shell functions: a file NAME.sh of `launch/shell`, or a file beside the class. `begin` sets `job`
    (its id), `nodes` (an array of names), `started` and `deadline` (Unix seconds). `ask_ending JOB` prints how a job
    ended (completed, stopped, preempted, node_failure, deadline, out_of_memory, unknown). `submit_after SCRIPT` submits
    a script to start when this job has ended, and prints its id. `cancel_job JOB` removes one."""
    own_jobs: ClassVar[str] = ""
    """Shell that prints the ids of the person's jobs that wait or run, one a line; "" where none was tried."""
    reaches_nodes: ClassVar[bool] = False
    """Its shell functions have `on_node NODE COMMAND...`, which runs a command on a node of `$job`, in place of the
    script and beside the ranks; in a terminal where `terminal` is set. The array `options` is for its launcher."""
    launcher: ClassVar[str] = ""
    """The launcher that belongs to this scheduler, as `shardway.launchers` names it: `srun`."""
    launcher_variables: ClassVar[Words] = ()
    """Patterns of what its launchers tell a rank, for containers that take patterns."""
    rank_variables: ClassVar[Words] = ()
    """Variables that its own launcher gives a rank, by name, for containers that take names."""
    place_variables: ClassVar[Words] = ()
    """Those of them by which a program of a person may find its rank."""
    node_variables: ClassVar[Words] = ()
    """Names of what a process of `each_node` needs to know its node."""

    @abstractmethod
    def directives(self, job: Job) -> tuple[ScriptLine, ...]:
        """The lines at the head of a script that the scheduler reads."""

    @abstractmethod
    def each_node(self, job: Job) -> EachNode:
        """How one command runs on every node of the job."""

    def beside(self, job: Job) -> EachNode:
        """How one command runs on every node of the job while its ranks do, which it takes nothing from."""
        return self.each_node(job)

    def each_rank(self, job: Job) -> EachRank | None:
        """How one command runs for every rank of the job; None for a scheduler without a launcher of its own."""
        return None

    def open_shell(self, job: Job, script: str, *, terminal: bool) -> Words | None:
        """The words that run a script on the first node of a new allocation, joined to this terminal, or to what they
        read and print; None where there is no way. They end with the script's exit code."""
        return None

    def shell_lines(self, job: Job) -> tuple[ScriptLine, ...]:
        """Lines at the head of that script, for a scheduler that starts it elsewhere than on the node."""
        return ()

    shell_needs_terminal: ClassVar[bool] = False
    """It opens a shell at a terminal alone."""

    def mpirun_lines(self, job: Job) -> tuple[ScriptLine, ...]:
        """Lines that tell Open MPI's mpirun (`mpirun_options`) what it does not find out by itself."""
        return ()

    # --- commands, and what they print

    @abstractmethod
    def submit(self, script: str, log: str, after: str) -> Words:
        """The words that submit a script, to start when the job `after` has ended ("": at once)."""

    start_command: ClassVar[Words] = ()
    """A command that reads a job script and answers when it would start, submitting nothing."""
    why_no_start: ClassVar[str] = "its scheduler has no answer that Shardway reads before a job is queued"
    """Where there is none: why, after the name of a queue."""
    queues_command: ClassVar[Words] = ()
    """A command that describes the queues as they are now, whose limits an answer of `start_command` may leave out."""

    def parse_queues(self, text: str) -> tuple[QueueState, ...]:
        """The queues in its answer."""
        return ()

    def read_start(self, done: Done) -> float | None:
        """The start in the answer of `start_command`, Unix seconds; None where there is none."""
        return None

    @abstractmethod
    def read_job_id(self, text: str) -> str:
        """The id in the output of a submission, empty if there is none. It begins with a digit."""

    @abstractmethod
    def cancel(self, jobs: Sequence[str]) -> tuple[Words, ...]:
        """The commands that delete jobs, waiting or running."""

    def warn(self, jobs: Sequence[str]) -> tuple[Words, ...]:
        """The commands that send SIGUSR1 to every process of running jobs; ranks obey it as they obey the stop file."""
        return ()

    gone: ClassVar[str] = r"(?!)"
    """Regular expression of what `cancel` prints for a job that has ended or is about to, not for an unknown server."""

    @abstractmethod
    def query(self, jobs: Sequence[str]) -> tuple[Words, ...]:
        """The commands that ask about jobs, and whose outputs `parse_records` reads."""

    @abstractmethod
    def parse_records(self, jobs: Sequence[str], answers: Sequence[Done]) -> dict[str, JobRecord]:
        """A record of each of these jobs of which the answers tell anything; UNKNOWN for one that the scheduler does
        not know. Raises SchedulerSilent if nothing is known of any job."""

    @abstractmethod
    def find(self, name: str) -> tuple[Words, ...]:
        """The commands that list the jobs of a name (`job.scheduler_name`), and whose outputs `parse_found` reads."""

    @abstractmethod
    def parse_found(self, answers: Sequence[Done]) -> tuple[str, ...]:
        """Ids of the jobs of a name, oldest first. Raises SchedulerSilent where that is not known."""

    # --- many jobs as one array

    array_index: ClassVar[str] = ""
    """Shell: the number of a task in its array, from 0; "" for a scheduler whose jobs are submitted one by one."""

    def array_directives(self, job: Job, tasks: int, at_once: int, logs: str) -> tuple[ScriptLine, ...]:
        """The head of the script of an array of so many `tasks` that ask for what `job` asks for, of which at most
        `at_once` run at one time (0: no limit). `logs`: the folder for what a task prints before its job does, "" for
        none."""
        return ()

    def array_lines(self, at_once: int, folder: str) -> tuple[ScriptLine, ...]:
        """What a task does before its job begins; `folder` is the array's own."""
        return ()

    def submit_array(self, script: str, logs: str, jobs: Sequence[str], after: str) -> Words:
        """The words that submit the script of an array of `jobs`, which are scripts too, as `submit` does one."""
        return self.submit(script, logs, after)

    def read_task_ids(self, text: str, tasks: int) -> tuple[str, ...]:
        """The ids of all tasks in the output of a submission, in their order; () if there are none."""
        array = self.read_job_id(text)
        return tuple(self.name_task(array, index) for index in range(tasks)) if array else ()

    def name_task(self, array: str, index: int) -> str:
        """The id of one task of the array with this id."""
        return array

    # --- sentences about refusals, waiting and ends

    rules: ClassVar[Traversable | None] = None
    """A TOML file with rules for this scheduler's words: [[refusal]], [[pending]] and [[ending]]. Without a rule, its
    own words are passed on. A rule has `code`; `when`, a regular expression that is searched for; `sentence` and
    `remedy`, in which its named groups, the keys of `name_values` and `said` (the scheduler's words in one line) may
    stand in braces; perhaps `remedy_by_ssh` for a scheduler on another host, and `hopeless`."""

    def explain_refusal(self, done: Done, asked: RequestedResources = NOTHING_ASKED) -> Explanation:
        """Why a submission failed: by the rule for "exit CODE" and the output below it, or in the scheduler's own
        words.

        If it is not `hopeless`, a later try may succeed, or the job may have been taken: a new try first looks for it
        by its name.
        """
        program = done.words[0] if done.words else "the scheduler"
        if done.timed_out:
            sentence = f"{program} did not answer in time; it may have taken the job all the same."
            remedy = "wait: the submission is tried again, after a look whether the job got through"
            return Explanation("scheduler_timeout", sentence, remedy)
        said = " ".join((done.err or done.out).split()) or "nothing"
        found = _explain(self.list_rules("refusal"), f"exit {done.code}\n{done.err}\n{done.out}", asked, said)
        sentence = f"{program} refused the job with exit code {done.code} and said: {said}"
        remedy = "read the job script with --dry-run, and ask the site's support with these words"
        return found or Explanation("refused", sentence, remedy, hopeless=True)

    def explain_pending(self, record: JobRecord, asked: RequestedResources = NOTHING_ASKED) -> Explanation | None:
        """Why a job waits: by the rule for "STATE REASON", or in the scheduler's own words; `hopeless` where it will
        never start as it is. None for one that does not wait."""
        if record.phase is not JobPhase.QUEUED:
            return None
        said = record.reason or record.state
        found = _explain(self.list_rules("pending"), f"{record.state} {record.reason}", asked, said)
        sentence = f"The scheduler lets the job wait and says: {said}"
        return found or Explanation("pending", sentence, "wait, or ask the site's support with these words")

    def explain_ending(self, record: JobRecord, asked: RequestedResources = NOTHING_ASKED) -> Explanation | None:
        """How a job ended: by the rules of the scheduler, then by those that hold for all; None for one that has not.

        The text that is searched has "STATE EXIT_TEXT", "ending ...", "exit N", "signal N" and the reason in a line
        each.
        """
        if record.phase is not JobPhase.ENDED or record.ending is None:
            return None
        facts = [f"{record.state} {record.exit_text}", f"ending {record.ending}"]
        facts += [f"exit {record.exit_code}"] if record.exit_code is not None else []
        facts += [f"signal {record.signal}"] if record.signal else []
        said = " ".join(part for part in (record.state, record.exit_text, record.reason) if part)
        rules = (*self.list_rules("ending"), *_rules_for_all())
        found = _explain(rules, "\n".join([*facts, record.reason]), asked, said)
        sentence = f"The scheduler says of the job's end: {said}"
        return found or Explanation("ended", sentence, "read the end of the job's output: shardway logs")

    def list_rules(self, part: str) -> Sequence[Mapping[str, Any]]:
        """The rules of one part: "refusal", "pending" or "ending"."""
        return read_tables(self.rules).get(part, ()) if self.rules is not None else ()

    # --- what a site profile and a run may ask of it

    own_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of a site profile that mean something to this scheduler and not to every one: "queues.qos",
    "request.constraint", or "KEY=VALUE" where one value does ("container=pyxis")."""
    accelerator_requests: ClassVar[Words] = ("none",)
    """The words that `request.accelerators` of a profile may have (`job.terms.accelerators`), the usual one first."""
    memory_options: ClassVar[Words] = ()
    """Options that set the memory of a job in another way than `site.memory`, of which the scheduler takes one."""
    named_by_keys: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Options that a key of the run file replaces; "" for those that the job script sets itself."""

    def check_option(self, name: str, value: Any) -> OptionProblem | None:
        """What is wrong with an option of `site.options`, by its name without dashes."""
        key = self.named_by_keys.get(name)
        if key == "":
            return OptionProblem("is set by the job script itself", remedy="leave it out")
        return OptionProblem(f"is what {key} says", remedy=f"use {key}") if key else None

    def read_cpus_per_task(self, options: Mapping[str, str]) -> int:
        """CPUs of a task that options ask for, which its steps must have as well; 0 for none."""
        return 0

    def leaves_one_thread(self, options: Mapping[str, str], launcher_options: str) -> bool:
        """Whether options leave one hardware thread of each core, so that the scheduler's CPUs are cores."""
        return False

    # --- variables of a shell, of a job and of a rank

    inherited: ClassVar[tuple[Family, ...]] = ()
    """Variables that belong to one job, step or rank of it and so never reach another one; options for its commands."""
    job_variable: ClassVar[str] = ""
    """The variable that has the id of the job around a process."""
    restart_variable: ClassVar[str] = ""
    """The variable that counts how often the job was started again."""
    also_sets: ClassVar[frozenset[str]] = frozenset()
    """Variables of other launchers that its own launcher sets too, and less completely than its own."""
    numbers_ranks: ClassVar[bool] = False
    """Its own launcher numbers ranks and world in variables, so that RANK and WORLD_SIZE of a person must agree."""

    def is_rank(self, environ: Environ) -> bool:
        """Whether its own launcher has started this process as one of the ranks."""
        return False

    def read_seat(self, environ: Environ) -> RankSeat | None:
        """The place of this process among the ranks that its own launcher has started; None where it has not. Raises
        SiteError for variables that contradict each other."""
        return None

    def find_hosts(self, environ: Environ, launcher: str, remedy: str) -> tuple[str, list[str]] | None:
        """The variable that names the hosts of the job (of the step, for its own `launcher`), and these hosts in order;
        None where there is none. Raises SiteError with this remedy where they cannot be read."""
        return None

    def is_in_terminal(self, environ: Environ) -> bool:
        """Whether this is the process of its launcher that a person's terminal is joined to."""
        return False

    def count_cores(self, environ: Environ, local_world: int) -> int | None:
        """Hardware threads that it gave to this rank, one of `local_world` of its node; None where it does not say."""
        return None

    def count_accelerators(self, environ: Environ) -> int | None:
        """Accelerators of this node that it gave to the job; None where it does not say."""
        return None

    # --- `shardway doctor`

    client_command: ClassVar[Words] = ()
    """A command that shows whether the scheduler's programs are installed here."""
    server_command: ClassVar[Words] = ()
    """A command that its server answers."""
    remedies: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """What a person does in the words of this scheduler: "leave_out" a node ({host}), ask for "all_memory" of a node,
    give a rank its "cores", lift the limit on locked memory ("memlock")."""
    interactive: ClassVar[str] = ""
    """The command by which a person gets a shell on a node."""
    submit_programs: ClassVar[Words] = ()
    """Programs that submit jobs, so that no job of ours can start them."""

    def list_accounts(self, user: str) -> Words:
        """The command that lists what a user may charge, one account a line; () where there is none."""
        return ()

    # --- `shardway sites probe`

    survey_command: ClassVar[Words] = ()
    """A command that prints something where this scheduler is at work; its first word is looked for on the machine."""
    generic_site: ClassVar[str] = ""
    """The shipped profile that a surveyed site extends."""

    def survey(self, ask: Ask) -> ProbedFacts:
        """What the scheduler's commands say of nodes and queues."""
        from shardway.launch.site_survey import ProbedFacts

        return ProbedFacts()

    def survey_container(self, ask: Ask) -> tuple[str, str]:
        """The container runtime that is a part of this scheduler, and the command that shows it; ("", "") for none."""
        return "", ""

    def read_site_name(self, ask: Ask) -> str:
        """The name that the site has at its scheduler; "" where it has none."""
        return ""


# --- schedulers by name, and ids of jobs

_GROUP = "schedulers"
_JOB_ID = re.compile(r"\d[\w.+\[\]-]*")


def find_scheduler(name: str) -> Scheduler:
    """The scheduler of this name. Raises SchedulerSilent for a name that is none's, as in a damaged record."""
    if not is_registered(_GROUP, name):
        allowed = ", ".join(list_names(_GROUP))
        raise SchedulerSilent(f'"{name}" is no scheduler that Shardway knows; allowed: {allowed}.')
    scheduler: Scheduler = make_plugin(_GROUP, name)
    return scheduler


def list_owners(key: str) -> list[Scheduler]:
    """The schedulers that a key of a site profile means something to (`own_keys`)."""
    return [scheduler for scheduler in (*make_own(_GROUP), *make_installed(_GROUP)) if key in scheduler.own_keys]


def is_job_id(job: str) -> bool:
    """Whether a text may be the id of a job: a record that is damaged must not become an option of a command."""
    return _JOB_ID.fullmatch(job) is not None


def parse_job_id(pattern: re.Pattern[str], text: str) -> str:
    """The last id in a standard output: a site's wrapper or hook may print lines of its own around it."""
    found = pattern.findall(text)
    return found[-1] if found else ""


# --- explanations: the rules of each scheduler, and those of `endings.toml` for all

_UNNAMED, _NO_AMOUNT = "(none was named)", "no stated"


def _rules_for_all() -> Sequence[Mapping[str, Any]]:
    return tuple(read_tables(OWN_FILES / "endings.toml")["ending"])


def _explain(
    rules: Sequence[Mapping[str, Any]], text: str, asked: RequestedResources, said: str = ""
) -> Explanation | None:
    """The sentence for a text, or None where no rule is for it. `said` is the text without what was put around it."""
    for rule in rules:
        if match := re.search(rule["when"], text, re.MULTILINE):
            found = {name: value.strip() for name, value in match.groupdict(default="").items()}
            values = {**name_values(asked), "said": " ".join((said or text).split()), **found}
            remedy = (asked.host and rule.get("remedy_by_ssh")) or rule["remedy"]
            sentence, remedy = (template.format_map(values) for template in (rule["sentence"], remedy))
            for nothing in (_UNNAMED, _NO_AMOUNT, f"{_NO_AMOUNT} a node"):  # brackets around it go with it
                sentence, remedy = (filled.replace(f" ({nothing})", "") for filled in (sentence, remedy))
            return Explanation(rule["code"], sentence, remedy, rule.get("hopeless", False))
    return None


def name_values(asked: RequestedResources) -> dict[str, str]:
    """What was asked for as words of a sentence; "(none was named)", or "no stated" memory, for what was not."""
    shown = {name: f'"{value}"' if isinstance(value, str) else str(value) for name, value in vars(asked).items()}
    return {
        **{name: _UNNAMED if vars(asked)[name] in ("", None) else text for name, text in shown.items()},
        "walltime": _UNNAMED if asked.walltime_s is None else render_seconds(asked.walltime_s),
        "memory": _NO_AMOUNT if asked.memory is None else render_bytes(asked.memory),
        "host": asked.host or "this machine",
        "run": asked.run or "RUN",
    }


def explain_result(state: str, exit_code: int | None, asked: RequestedResources, said: str = "") -> Explanation | None:
    """How an attempt ended that at most its job script has recorded, by the rules for all schedulers on the lines
    "ended STATE" and "exit N"; `said` is the known reason."""
    facts = [f"ended {state}", *([f"exit {exit_code}"] if exit_code is not None else [])]
    return _explain(_rules_for_all(), "\n".join(facts), asked, said)


# --- shared by the answers of every scheduler


def describe_silence(done: Done) -> str:
    """Why an answer cannot be used, in one line: "squeue did not answer in time"."""
    words = done.words[3:] if done.words[:2] == ("sh", "-c") else done.words
    program = next((word for word in words if "=" not in word and word != "env"), "the scheduler")
    if done.timed_out:
        return f"{program} did not answer in time"
    if done.code == 127:  # MISSING of hosts.base, which ranks that import this module do not need
        return f"{program} was not found"
    said = [line.strip() for line in (done.err or done.out).splitlines() if line.strip()][:2]
    return f"{program} failed with exit code {done.code}: {'; '.join(said) or 'it said nothing'}"


def read_lines(done: Done) -> list[str]:
    """The lines of an answer. Raises SchedulerSilent where there is none."""
    if not done.ok:
        raise SchedulerSilent(describe_silence(done))
    return done.out.splitlines()


def keep_known(records: Mapping[str, JobRecord | None], answers: Sequence[Done]) -> dict[str, JobRecord]:
    """The records of jobs of which an answer stated something. Raises SchedulerSilent where none did."""
    known = {job: record for job, record in records.items() if record is not None}
    if records and not known:
        raise SchedulerSilent(describe_silence(answers[0]))
    return known


def merge_tasks(job: str, tasks: Sequence[JobRecord]) -> JobRecord:
    """One record for an array: it runs while a task runs, it waits while none has run, and it ended as its first task
    that did not complete."""
    phases = {task.phase for task in tasks}
    started = min((task.started for task in tasks if task.started is not None), default=None)
    if phases == {JobPhase.ENDED}:
        first = next((task for task in tasks if task.ending is not SchedulerEnding.COMPLETED), tasks[0])
        ended = max((task.ended for task in tasks if task.ended is not None), default=None)
        return replace(first, job=job, started=started, ended=ended)
    phase = JobPhase.RUNNING if phases & {JobPhase.RUNNING, JobPhase.ENDED} else JobPhase.QUEUED
    first = next((task for task in tasks if task.phase is phase), tasks[0])
    return replace(first, job=job, phase=phase, ending=None, exit_code=None, signal=0, started=started, ended=None)


# --- options as words of a command line


def render_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Words such as `--qos=debug`, `--exclusive`, `-W group_list=x`; a name of one letter takes its value apart.

    True is the bare option, false leaves it out, a list gives it several times. Dashes before a name may be left out.
    """
    for name, value in options.items():
        bare = name.lstrip("-")
        dashed, between = (f"-{bare}", " ") if len(bare) == 1 else (f"--{bare}", "=")
        for entry in value if isinstance(value, list | tuple) else [value]:
            if entry is not False:
                yield dashed if entry is True else f"{dashed}{between}{entry}"
