"""The schedulers by name: functions that submit, query and cancel; explanations of a scheduler's messages.

Invariants:
- The functions are pure: words to run, or the parsing of their output.
- Explanations: the first rule of a table whose pattern matches gives the sentence, filled with the requested values. A
  message without a rule is passed on as it is, never guessed at.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from types import MappingProxyType

from shardway.launch.hosts.base import Done
from shardway.launch.schedulers import local, pbs, slurm
from shardway.launch.schedulers.base import Explanation, JobPhase, JobRecord, RequestedResources, SchedulerSilent
from shardway.launch.script import read_block
from shardway.units import render_bytes, render_seconds

# --- explanations, from `reasons.toml` and `refusals.toml`

_UNNAMED, _NO_AMOUNT = "(none was named)", "no stated"
_TRY_AGAIN = "wait: the submission is tried again, after a look whether the job got through"
_ASK_ABOUT_WAIT = "wait, or ask the site's support with these words"
_READ_LOG = "read the end of the job's output: shardway logs"
_ASK_SITE = "read the job script with --dry-run, and ask the site's support with these words"
_NOTHING = RequestedResources()


@dataclass(frozen=True)
class Rule:
    """What stands for one kind of a scheduler's words.

    `when` is a regular expression that is searched for; its named groups, the keys of `name_values` and `said` (the
    scheduler's words in one line) may stand in braces in `sentence` and `remedy`. `remedy_by_ssh` takes the place of
    `remedy` where the scheduler was asked on another host.
    """

    code: str
    when: re.Pattern[str]
    sentence: str
    remedy: str
    hopeless: bool = False
    remedy_by_ssh: str = ""


@cache
def load_rules(table: str, part: str) -> tuple[Rule, ...]:
    """The rules of one part of a table below this folder: `load_rules("slurm/reasons", "pending")`."""
    text = files(__package__).joinpath(f"{table}.toml").read_text(encoding="utf-8")
    return tuple(_parse_rule(entry) for entry in tomllib.loads(text)[part])


def _parse_rule(entry: Mapping[str, str | bool]) -> Rule:
    return Rule(
        code=str(entry["code"]),
        when=re.compile(str(entry["when"]), re.MULTILINE),
        sentence=str(entry["sentence"]),
        remedy=str(entry["remedy"]),
        hopeless=bool(entry.get("hopeless", False)),
        remedy_by_ssh=str(entry.get("remedy_by_ssh", "")),
    )


def explain(rules: Sequence[Rule], text: str, asked: RequestedResources, said: str = "") -> Explanation | None:
    """The sentence for a text, or None where no rule is for it. `said` is the text without what was put around it."""
    for rule in rules:
        if match := rule.when.search(text):
            found = {name: value.strip() for name, value in match.groupdict(default="").items()}
            values = {**name_values(asked), "said": _one_line(said or text), **found}
            advice = (asked.host and rule.remedy_by_ssh) or rule.remedy
            sentence, remedy = (_fill(text, values) for text in (rule.sentence, advice))
            return Explanation(rule.code, sentence, remedy, rule.hopeless)
    return None


def _fill(text: str, values: Mapping[str, str]) -> str:
    """A text with its values; brackets around one that was not named go with it."""
    filled = text.format_map(values)
    for nothing in (_UNNAMED, _NO_AMOUNT, f"{_NO_AMOUNT} a node"):
        filled = filled.replace(f" ({nothing})", "")
    return filled


def name_values(asked: RequestedResources) -> dict[str, str]:
    """What was asked for as words of a sentence; "(none was named)", or "no stated" memory, for what was not."""
    texts = {
        "name": asked.name,
        "queue": asked.queue,
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "reservation": asked.reservation,
        "script": asked.script,
    }
    numbers = {"nodes": asked.nodes, "cores": asked.cores, "accelerators": asked.accelerators}
    return {
        **{name: f'"{text}"' if text else _UNNAMED for name, text in texts.items()},
        **{name: _UNNAMED if number is None else str(number) for name, number in numbers.items()},
        "walltime": _UNNAMED if asked.walltime_s is None else render_seconds(asked.walltime_s),
        "memory": _NO_AMOUNT if asked.memory is None else render_bytes(asked.memory),
        "host": asked.host or "this machine",
        "run": asked.run or "RUN",
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())


def explain_result(state: str, exit_code: int | None, asked: RequestedResources, said: str = "") -> Explanation | None:
    """How an attempt ended that at most its job script has recorded, by the rules for all schedulers on the lines
    "ended STATE" and "exit N"; `said` is the known reason."""
    facts = [f"ended {state}", *([f"exit {exit_code}"] if exit_code is not None else [])]
    return explain(load_rules("endings", "ending"), "\n".join(facts), asked, said)


@dataclass(frozen=True)
class Explainer:
    """Sentences for what one scheduler says; `scheduler` is the folder of its tables: "slurm", "pbs"."""

    scheduler: str

    def explain_refusal(self, done: Done, asked: RequestedResources = _NOTHING) -> Explanation:
        """Why a submission failed: by the rule for "exit CODE" and the output below it, or in the scheduler's own
        words.

        If it is not `hopeless`, a later try may succeed, or the job may have been taken: a new try first looks for it
        by its name.
        """
        program = done.words[0] if done.words else "the scheduler"
        if done.timed_out:
            sentence = f"{program} did not answer in time; it may have taken the job all the same."
            return Explanation("scheduler_timeout", sentence, _TRY_AGAIN)
        said = _one_line(done.err or done.out) or "nothing"
        rules = load_rules(f"{self.scheduler}/refusals", "refusal")
        found = explain(rules, f"exit {done.code}\n{done.err}\n{done.out}", asked, said)
        sentence = f"{program} refused the job with exit code {done.code} and said: {said}"
        return found or Explanation("refused", sentence, _ASK_SITE, hopeless=True)

    def explain_pending(self, record: JobRecord, asked: RequestedResources = _NOTHING) -> Explanation | None:
        """Why a job waits: by the rule for "STATE REASON", or in the scheduler's own words; `hopeless` where it will
        never start as it is. None for one that does not wait."""
        if record.phase is not JobPhase.QUEUED:
            return None
        said = record.reason or record.state
        rules = load_rules(f"{self.scheduler}/reasons", "pending")
        found = explain(rules, f"{record.state} {record.reason}", asked, said)
        return found or Explanation("pending", f"The scheduler lets the job wait and says: {said}", _ASK_ABOUT_WAIT)

    def explain_ending(self, record: JobRecord, asked: RequestedResources = _NOTHING) -> Explanation | None:
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
        rules = [*load_rules(f"{self.scheduler}/reasons", "ending"), *load_rules("endings", "ending")]
        found = explain(rules, "\n".join([*facts, record.reason]), asked, said)
        return found or Explanation("ended", f"The scheduler says of the job's end: {said}", _READ_LOG)


# --- the functions of each scheduler

Words = tuple[str, ...]

_SLURM, _PBS = Explainer("slurm"), Explainer("pbs")

_TAKEN_BY_SBATCH = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?\s*$", re.MULTILINE)
"""With or without --parsable, sbatch(1): "12", "12;cluster", "Submitted batch job 12"."""

_TAKEN_BY_QSUB = re.compile(r"^(\d+(?:\[\])?(?:\.[\w.-]+)?)\s*$", re.MULTILINE)
"""qsub(1B): "12.server", "12[].server"."""


@dataclass(frozen=True)
class SchedulerClient:
    """The functions of one scheduler.

    `submit(script, log, after)`: the words that submit a script, to start when the job `after` has ended ("": at once).
    `warn(jobs)`: sends SIGUSR1 to every process of running jobs; ranks obey it as they obey the stop file. `find(name)`
    lists jobs of that name, `query(jobs)` asks about jobs; `read_found` and `read_records` parse the outputs of their
    commands. `read_job_id`: the id in the output of a submission, empty if there is none. `forgets`: the scheduler does
    not report that a job was cancelled, but `cancel` has seen its end.
    """

    submit: Callable[[str, str, str], Words]
    cancel: Callable[[Sequence[str]], tuple[Words, ...]]
    warn: Callable[[Sequence[str]], tuple[Words, ...]]
    query: Callable[[Sequence[str]], tuple[Words, ...]]
    read_records: Callable[[Sequence[str], Sequence[Done]], dict[str, JobRecord]]
    find: Callable[[str], tuple[Words, ...]]
    read_found: Callable[[Sequence[Done]], tuple[str, ...]]
    read_job_id: Callable[[str], str]
    explain_refusal: Callable[[Done, RequestedResources], Explanation]
    explain_pending: Callable[[JobRecord, RequestedResources], Explanation | None]
    explain_ending: Callable[[JobRecord, RequestedResources], Explanation | None]
    forgets: bool = False


def _sbatch(script: str, log: str, after: str) -> Words:
    return ("sbatch", "--parsable", *([f"--dependency=afterany:{after}"] if after else []), script)


def _qsub(script: str, log: str, after: str) -> Words:
    shell = f'{read_block("pbs", "submit_as_program").text}\nsubmit_as_program "$@"'
    return ("bash", "-c", shell, "qsub", script, *(["-W", f"depend=afterany:{after}"] if after else []))


def _parse_job_id(pattern: re.Pattern[str], text: str) -> str:
    """The last id in a standard output: a site's wrapper or hook may print lines of its own around it."""
    found = pattern.findall(text)
    return found[-1] if found else ""


CLIENTS: Mapping[str, SchedulerClient] = MappingProxyType(
    {
        "slurm": SchedulerClient(
            submit=_sbatch,
            cancel=lambda jobs: (("scancel", *jobs),),
            warn=lambda jobs: (("scancel", "--full", "--signal=USR1", *jobs),),
            query=slurm.query_commands,
            read_records=slurm.parse_records,
            find=slurm.find_commands,
            read_found=slurm.parse_found,
            read_job_id=partial(_parse_job_id, _TAKEN_BY_SBATCH),
            explain_refusal=_SLURM.explain_refusal,
            explain_pending=_SLURM.explain_pending,
            explain_ending=_SLURM.explain_ending,
        ),
        "pbs": SchedulerClient(
            submit=_qsub,
            cancel=lambda jobs: tuple(("qdel", job) for job in jobs),
            warn=lambda jobs: tuple(("qsig", "-s", "SIGUSR1", job) for job in jobs),
            query=pbs.query_commands,
            read_records=pbs.parse_records,
            find=pbs.find_commands,
            read_found=pbs.parse_found,
            read_job_id=partial(_parse_job_id, _TAKEN_BY_QSUB),
            explain_refusal=_PBS.explain_refusal,
            explain_pending=_PBS.explain_pending,
            explain_ending=_PBS.explain_ending,
        ),
        "local": SchedulerClient(
            submit=local.submit_command,
            cancel=local.cancel_commands,
            warn=local.warn_commands,
            query=local.query_commands,
            read_records=local.parse_records,
            find=local.find_commands,
            read_found=local.parse_found,
            read_job_id=local.parse_job_id,
            explain_refusal=local.explain_refusal,
            explain_pending=local.explain_pending,
            explain_ending=local.explain_ending,
            forgets=True,
        ),
    }
)


_JOB_ID = re.compile(r"\d[\w.+\[\]-]*")


def is_job_id(job: str) -> bool:
    """Whether a text may be the id of a job: a record that is damaged must not become an option of `scancel`."""
    return _JOB_ID.fullmatch(job) is not None


def find_client(scheduler: str) -> SchedulerClient:
    """The functions of a scheduler. Raises SchedulerSilent for a name that is none's, as in a damaged record."""
    if scheduler not in CLIENTS:
        raise SchedulerSilent(f'"{scheduler}" is no scheduler that Shardway knows; allowed: {", ".join(CLIENTS)}.')
    return CLIENTS[scheduler]
