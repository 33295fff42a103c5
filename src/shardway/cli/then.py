"""`shardway submit --then 'VERB ...'` and `--after RUN`: what runs when a run is finished, from words to requests.

Invariants:
- A verb takes a run as its first argument; its own parser reads its options before anything is submitted.
- What follows is prepared and checked before the run is submitted; each follows the one before it.
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
class ThenWords:
    """`verb` and the words behind the run; `keys` are those of the job (`site.*`, `run.name`)."""

    verb: tuple[str, ...]
    words: tuple[str, ...]
    keys: tuple[str, ...]


def read_then(text: str) -> ThenWords:
    """The words of one `--then`. Raises UserError for a verb that takes no run, and for options that are wrong."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--then {text!r}: a quote in it is not closed ({error}).") from None
    words = words[1:] if words[:1] == ["shardway"] else words
    is_key = [word.startswith(("site.", "run.name=")) and "=" in word for word in words]
    keys = tuple(word for word, own in zip(words, is_key, strict=True) if own)
    words = [word for word, own in zip(words, is_key, strict=True) if not own]
    verb = next((name for name in _list_verbs() if words[: len(name)] == list(name)), None)
    if verb is None:
        allowed = ", ".join(sorted(" ".join(name) for name in _list_verbs()))
        raise UserError(
            f"--then {text!r}: it does not begin with a verb that takes a finished run.\n"
            f"  Allowed: {allowed}, with its options and without RUN.\n"
            "  To do: for any other command: shardway submit --after RUN -- COMMAND."
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


def _check_options(text: str, verb: Sequence[str], rest: Sequence[str]) -> None:
    from shardway.cli.main import CLICK_ERROR, app

    command: Any = get_group(app)
    for name in verb:
        command = command.get_command(None, name)
    try:
        context = command.make_context(" ".join(("shardway", *verb)), ["RUN", *rest])
    except CLICK_ERROR as error:
        raise UserError(
            f"--then {text!r}: {error.format_message()}\n"
            f"  Nothing was submitted. To do: see `shardway {' '.join(verb)} --help`; RUN is put in by itself."
        ) from None
    for each in command.params:
        given = context.params.get(each.name) if each.param_type_name == "argument" and each.nargs == -1 else None
        strange = next((word for word in given or () if "=" not in word), None)
        if strange is not None:
            raise UserError(
                f"--then {text!r}: {strange} is no option of `shardway {' '.join(verb)}` and no KEY=VALUE.\n"
                "  Nothing was submitted. To do: leave it out; RUN is put in by itself."
            )


# --- requests


def plan_then(leader: SubmitRequest, host: Host, texts: Sequence[str]) -> list[SubmitRequest]:
    """The submissions that follow a run, in order; each is checked on the host. Those that wait already are left out.

    Raises UserError for what is wrong with one of them, before anything is submitted.
    """
    from shardway.launch.runs.followers import find_followed
    from shardway.launch.submission.prepare import prepare

    found: list[SubmitRequest] = []
    if not texts:
        return found
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
            found.append(request)
        before = directory
    return found


def _plan_one(leader: SubmitRequest, first: Prepared, before: Path, then: ThenWords) -> SubmitRequest:
    """One node, one rank, an hour at most; the other keys of the site are the run's."""
    run, walltime_s = first.job.run, first.job.terms.walltime_s
    keys = {"site.nodes": "1", "site.ranks_per_node": "1"}
    if walltime_s:
        keys["site.walltime"] = f'"{min(walltime_s, MOST_WALLTIME_S):g}s"'
    keys |= {name: value for name, _, value in (key.partition("=") for key in then.keys)}
    name = keys.pop("run.name", "").strip("'\"") or f"{run.name}-{'-'.join(then.verb)}"
    old = [word for word in leader.run_request.overrides if word.partition("=")[0].strip() not in keys]
    overrides = (*old, *(f"{key}={value}" for key, value in keys.items()))
    return replace(
        leader,
        run_request=replace(leader.run_request, overrides=overrides, directory=run.parent / name),
        command=("shardway", *then.verb, str(run), *then.words),
        until_done=False,
        max_attempts=0,
        follows=before,
    )


def submit_then(
    requests: Sequence[SubmitRequest], host: Host, submitter: Submitter, leader: SentSubmission
) -> list[SentSubmission]:
    """Submit what follows. Raises a ShardwayError that names the run that is submitted already."""
    from shardway.launch.submission.submit import submit_run

    try:
        return [submit_run(request, host, submitter) for request in requests]
    except ShardwayError as error:
        name = leader.reference
        done = f"{name} was submitted as job {leader.job}; what follows it was not."
        raise type(error)(
            f"{error}\n  {done} To do: add it with `shardway submit --after {leader.reference}`."
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


def describe_then(requests: Sequence[SubmitRequest]) -> Iterator[str]:
    """A line for each run that would follow."""
    from shardway.launch.script import quote_all

    for request in requests:
        shape = ", ".join(word for word in request.run_request.overrides if word.startswith("site."))
        yield f"then {request.run_request.directory}: {quote_all(request.command)} ({shape})"


def describe_place(sent: SentSubmission) -> str:
    """Where a run that follows another one stands once it is submitted."""
    job = sent.prepared.job
    if sent.waits_for:
        return f"{job.run} waits for {sent.waits_for}, whose job submits it when it is finished"
    return f"{job.run} is job {sent.job}"
