"""`shardway submit --then 'VERB ...'` and `--after RUN`, and [pipeline] of a run file: what runs before a run and when
it is finished, from words to requests.

Invariants:
- A verb that follows takes a run as its first argument; its own parser reads its options before anything is submitted.
- What goes before and what follows is prepared and checked before the first is submitted; each follows the one before.
- A step that is finished is not done again.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_group

from shardway.cli.options import complete_run, report
from shardway.errors import ShardwayError, UserError

if TYPE_CHECKING:
    from shardway.launch.hosts.base import Host
    from shardway.launch.submission.prepare import Prepared, SubmitRequest
    from shardway.launch.submission.submit import SentSubmission, Submitter

ThenOption = Annotated[
    list[str] | None,
    typer.Option("--then", metavar="'VERB ...'", help="When it is finished: evaluate, generate, ... (may repeat)."),
]
AfterOption = Annotated[
    str, typer.Option("--after", metavar="RUN", help="Start when that run is finished.", autocompletion=complete_run)
]

MOST_WALLTIME_S = 3600.0
"""The wall-time of what follows, unless the run has less or its words say otherwise."""


@dataclass(frozen=True)
class PlannedFollower:
    """A submission that follows a run, or goes before it, and what it was prepared to."""

    request: SubmitRequest
    prepared: Prepared


@dataclass(frozen=True)
class ThenWords:
    """`verb` and the words behind the run; `keys` are those of the job (`site.*`, `run.name`). Without a verb, `words`
    are a command."""

    verb: tuple[str, ...]
    words: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the folder of the step is called after that of the run."""
        if self.verb:
            return "-".join(self.verb)
        if self.words[0] == "shardway":
            return "-".join(_find_leaf(self.words[1:]))
        named = next((word for word in self.words if word.endswith((".py", ".sh"))), self.words[0])
        return Path(named).stem

    def fill(self, run: Path, here: Path) -> tuple[str, ...]:
        """The command, with `{run}` and `{here}` filled in."""
        words = ("shardway", *self.verb, str(run), *self.words) if self.verb else self.words
        return tuple(word.replace("{run}", str(run)).replace("{here}", str(here)) for word in words)


def _read_words(text: str, option: str) -> tuple[list[str], tuple[str, ...], list[str]]:
    """The words of a verb, the keys of the job, and the words of a command (behind `--`)."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text!r}: a quote in it is not closed ({error}).") from None
    cut = words.index("--") if "--" in words else len(words)
    words, command = words[:cut], words[cut + 1 :]
    words = words[1:] if words[:1] == ["shardway"] else words
    is_key = [word.startswith(("site.", "run.name=")) and "=" in word for word in words]
    keys = tuple(word for word, own in zip(words, is_key, strict=True) if own)
    words = [word for word, own in zip(words, is_key, strict=True) if not own]
    if command and words:
        raise UserError(f"{option} {text!r}: {words[0]} stands before `--`, where only keys of the job may stand.")
    return words, keys, command


def read_before(text: str) -> ThenWords:
    """The words of one entry of `pipeline.before`. Raises UserError for what is no verb that a job may run, and for
    options that are wrong."""
    from shardway.launch.submission.command import PROGRAMS_OF_ONE, PROGRAMS_OF_RANKS

    words, keys, command = _read_words(text, "pipeline.before")
    if command:
        return ThenWords((), tuple(command), keys)
    programs = (*PROGRAMS_OF_ONE, *PROGRAMS_OF_RANKS)
    if not words or words[0] not in programs:
        raise UserError(
            f"pipeline.before {text!r}: it does not begin with a verb that a job may run.\n"
            f"  Allowed: {', '.join(sorted(programs))}, with all its words, or -- COMMAND."
        )
    verb = _find_leaf(words)
    _check_options(text, verb, words[len(verb) :], option="pipeline.before", run=())
    return ThenWords((), ("shardway", *words), keys)


def _find_leaf(words: Sequence[str]) -> tuple[str, ...]:
    """As many of the words as name a verb: `data prepare`."""
    from shardway.cli.main import app

    command: Any = get_group(app)
    found: list[str] = []
    for word in words:
        if not hasattr(command, "list_commands") or word not in command.list_commands(None):
            break
        command = command.get_command(None, word)
        found.append(word)
    return tuple(found)


def read_then(text: str) -> ThenWords:
    """The words of one `--then`. Raises UserError for a verb that takes no run, and for options that are wrong."""
    words, keys, command = _read_words(text, "--then")
    if command:
        return ThenWords((), tuple(command), keys)
    verb = next((name for name in _list_verbs() if words[: len(name)] == list(name)), None)
    if verb is None:
        allowed = ", ".join(sorted(" ".join(name) for name in _list_verbs()))
        raise UserError(
            f"--then {text!r}: it does not begin with a verb that takes a finished run.\n"
            f"  Allowed: {allowed}, with its options and without RUN.\n"
            f"  To do: for any other command: --then {'-- COMMAND'!r}, where {{run}} is the run directory."
        )
    rest = tuple(words[len(verb) :])
    _check_options(text, verb, rest)
    return ThenWords(verb, rest, keys)


def _list_verbs() -> Iterator[tuple[str, ...]]:
    """Verbs that may be the program of a job, and whose first argument is one run, or a model, which a run is."""
    from shardway.cli.main import app
    from shardway.launch.submission.command import PROGRAMS_OF_ONE, PROGRAMS_OF_RANKS

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if hasattr(command, "list_commands"):
            for name in command.list_commands(None):
                if path or name in (*PROGRAMS_OF_ONE, *PROGRAMS_OF_RANKS):
                    yield from walk(command.get_command(None, name), (*path, name))
            return
        first = next((each for each in command.params if each.param_type_name == "argument"), None)
        if first is not None and first.name in ("run", "model") and first.nargs == 1:
            yield path

    return walk(get_group(app), ())


def _check_options(
    text: str, verb: Sequence[str], rest: Sequence[str], option: str = "--then", run: Sequence[str] = ("RUN",)
) -> None:
    from shardway.cli.main import CLICK_ERROR, app

    command: Any = get_group(app)
    for name in verb:
        command = command.get_command(None, name)
    try:
        context = command.make_context(" ".join(("shardway", *verb)), [*run, *rest])
    except CLICK_ERROR as error:
        raise UserError(
            f"{option} {text!r}: {error.format_message()}\n"
            f"  Nothing was submitted. To do: see `shardway {' '.join(verb)} --help`"
            f"{'; RUN is put in by itself' if run else ''}."
        ) from None
    for each in command.params if run else ():
        given = context.params.get(each.name) if each.param_type_name == "argument" and each.nargs == -1 else None
        strange = next((word for word in given or () if "=" not in word), None)
        if strange is not None:
            raise UserError(
                f"--then {text!r}: {strange} is no option of `shardway {' '.join(verb)}` and no KEY=VALUE.\n"
                "  Nothing was submitted. To do: leave it out; RUN is put in by itself."
            )


# --- requests


def plan_then(leader: SubmitRequest, host: Host, texts: Sequence[str]) -> list[PlannedFollower]:
    """The submissions that follow a run, in order; each is checked on the host. Those that wait already are left out.

    Raises UserError for what is wrong with one of them, before anything is submitted.
    """
    found: list[PlannedFollower] = []
    if not texts:
        return found
    from shardway.launch.runs.followers import find_followed
    from shardway.launch.submission.prepare import prepare

    all_words = [read_then(text) for text in texts]
    twice = next((text for number, text in enumerate(texts) if all_words[number] in all_words[:number]), None)
    if twice is not None:
        raise UserError(f"--then {twice!r} is there twice.\n  To do: leave one out.")
    first = prepare(leader, host)
    before, places = first.job.run, {first.job.run}
    for text, words in zip(texts, all_words, strict=True):
        request = _plan_one(leader, first, before, words)
        directory = Path(request.run_request.directory or "")
        if directory in places:
            raise UserError(
                f"--then {text!r} would use {directory}, as another part of this command does.\n"
                f"  To do: name it, such as --then '{text} run.name=NAME'."
            )
        places.add(directory)
        prepared = prepare(request, host, look=True)
        followed = find_followed(prepared.ledger)
        if followed == before:
            report(f"{directory} waits for {followed} already, as it was submitted before; that stays")
        else:
            found.append(PlannedFollower(request, prepared))
        before = directory
    return found


def plan_before(leader: SubmitRequest, host: Host, texts: Sequence[str]) -> tuple[list[PlannedFollower], Path | None]:
    """The submissions that go before a run, in order, without those that are finished or have a job; and the run that
    it then follows, None for none. Raises UserError for what is wrong with one, before anything is submitted."""
    found: list[PlannedFollower] = []
    follows = leader.follows
    if not texts:
        return found, follows
    from shardway.launch.runs.followers import is_finished
    from shardway.launch.runs.job_status import read_standing
    from shardway.launch.submission.prepare import prepare

    all_words = [read_before(text) for text in texts]
    first, places = prepare(leader, host), set[Path]()
    for text, words in zip(texts, all_words, strict=True):
        request = replace(_plan_one(leader, first, first.job.run, words), follows=follows)
        directory = Path(request.run_request.directory or "")
        if directory in places:
            raise UserError(
                f"pipeline.before {text!r} would use {directory}, as another step does.\n"
                "  To do: name it, by run.name=NAME at its end (before `--`)."
            )
        places.add(directory)
        prepared = prepare(request, host, look=True)
        if not found and is_finished(prepared.ledger):
            report(f"{directory} is finished, from before")
            continue
        if prepared.ledger.entries and any(each.is_active for each in read_standing(host, prepared.ledger)):
            report(f"{directory} has a job already, which goes on")
        else:
            found.append(PlannedFollower(request, prepared))
        follows = directory
    return found, follows


def submit_before(steps: Sequence[PlannedFollower], host: Host, submitter: Submitter) -> list[SentSubmission]:
    """Submit what goes before a run, whose cost was counted with the run's."""
    from shardway.launch.submission.submit import submit_run

    return [submit_run(each.request, host, submitter, agreed=True) for each in steps]


def _plan_one(leader: SubmitRequest, first: Prepared, before: Path, then: ThenWords) -> SubmitRequest:
    """One node, one rank, an hour at most; the other keys of the site are the run's."""
    run, walltime_s = first.job.run, first.job.terms.walltime_s
    keys = {"site.nodes": "1", "site.ranks_per_node": "1"}
    if walltime_s:
        keys["site.walltime"] = f'"{min(walltime_s, MOST_WALLTIME_S):g}s"'
    keys |= {name: value for name, _, value in (key.partition("=") for key in then.keys)}
    name = keys.pop("run.name", "").strip("'\"") or f"{run.name}-{then.name}"
    old = [word for word in leader.run_request.overrides if word.partition("=")[0].strip() not in keys]
    overrides = (*old, *(f"{key}={value}" for key, value in keys.items()))
    return replace(
        leader,
        run_request=replace(leader.run_request, overrides=overrides, directory=run.parent / name),
        command=then.fill(run, leader.here),
        until_done=False,
        max_attempts=0,
        follows=before,
    )


def submit_then(
    followers: Sequence[PlannedFollower], host: Host, submitter: Submitter, leader: SentSubmission
) -> list[SentSubmission]:
    """Submit what follows, whose cost was counted with the run's. Raises a ShardwayError that names the run that is
    submitted already."""
    from shardway.launch.submission.submit import submit_run

    try:
        return [submit_run(each.request, host, submitter, agreed=True) for each in followers]
    except ShardwayError as error:
        name = leader.reference
        done = f"{name} was submitted as job {leader.job}; what follows it was not."
        raise type(error)(
            f"{error}\n  {done} To do: add it with `shardway submit --after {shlex.quote(leader.reference)}`."
        ) from None


def find_after(word: str, host: Host) -> Path:
    """The directory of the run that `--after` names. Raises UserError for one on another host."""
    from shardway.launch.hosts import find_host
    from shardway.launch.runs.find import find_known

    known = find_known(word)
    if find_host(known.host).name != host.name:
        places = [f"on {name}" if name else "on this machine" for name in (known.host, host.name)]
        raise UserError(
            f"--after {word}: that run is {places[0]}, and this one would be {places[1]}, where no job of it can "
            "submit.\n  To do: submit both to one host (--on HOST:SITE)."
        )
    return Path(known.run).absolute() if not host.name else Path(str(host.expand(known.run)))


def describe_then(followers: Sequence[PlannedFollower], label: str = "then") -> Iterator[str]:
    """A line for each run that would follow, or go before."""
    from shardway.launch.script import quote_all

    for request in (each.request for each in followers):
        shape = ", ".join(word for word in request.run_request.overrides if word.startswith("site."))
        yield f"{label} {request.run_request.directory}: {quote_all(request.command)} ({shape})"


def describe_place(sent: SentSubmission) -> str:
    """Where a run that follows another one stands once it is submitted."""
    job = sent.prepared.job
    if sent.waits_for:
        return f"{job.run} waits for {sent.waits_for}, whose job submits it when it is finished"
    return f"{job.run} is job {sent.job}"
