"""The verbs that tools of others may call: which are open, what each takes, and what is checked before one runs.

Invariants:
- A tool's name, arguments and help are those of its verb, read from the command line's own definition; the table here
  has only which verbs are open, which of their options are not, and whether they change something.
- A verb runs as a process of its own, from a list of words: nothing is read by a shell. A value never becomes an
  option, and every path in the words lies in one of the given folders.
- What changes something runs in two calls: the first changes nothing and gives a token for exactly that request; the
  second has the token, which works once, for a while, and only if the first would still answer the same.
- Values of secrets are masked in all that is given back.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import secrets
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shardway.errors import Problem, UserError, check_no_problems, list_some
from shardway.launch.job import SECRETS
from shardway.places import expand_home, expand_place, list_unset

# --- the table


@dataclass(frozen=True)
class ToolRow:
    """A verb that is open. `closed`: its options that are not offered; `fixed`: words that it always gets. `changes`:
    it changes something, so it needs a confirmation; such a verb has a --dry-run, or the word "stop"."""

    verb: str
    closed: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    changes: bool = False

    @property
    def name(self) -> str:
        return self.verb.replace(" ", "_")


TABLE: tuple[ToolRow, ...] = (
    # --html and --out write files, --trace and --module run code of the run file
    ToolRow("plan", closed=("--html", "--emit", "--out", "--trace", "--module")),
    ToolRow("config show", closed=("--mesh", "--deepspeed")),
    ToolRow("config explain"),
    ToolRow("data info"),
    ToolRow("sites list"),
    ToolRow("sites show"),
    ToolRow("plugins list"),
    ToolRow("status", closed=("--all", "--watch")),  # all: also those outside the given folders
    ToolRow("logs", closed=("--follow",)),
    ToolRow("report", closed=("--page", "--dry-run"), fixed=("--dry-run",)),
    ToolRow("compare", closed=("--page",)),
    ToolRow("trace"),
    ToolRow("checkpoint inspect"),
    ToolRow("checkpoint verify"),
    ToolRow("doctor", closed=("--deep", "--preflight", "--strict", "--wait"), fixed=("--preflight",)),
    ToolRow(
        "submit", closed=("--dry-run", "--lib", "--wait", "--expose", "--yes", "--when", "--soonest"), changes=True
    ),
    ToolRow("resume", closed=("--dry-run", "--lib", "--yes"), changes=True),
    # --now kills: that is left to a person
    ToolRow("stop", closed=("--now", "--yes", "--wait"), changes=True),
)
"""What is open. Not here: verbs that compute in the calling process (train, bench, generate, rehearse ...), for which
`submit` with a site of this machine is the door, and those that write what is not a run."""

COMMAND = "command"
"""The argument for the words behind `--`."""
CONFIRM = "confirm"
"""The argument for the token of the second call."""

_READ_S, _CHANGE_S = 120.0, 600.0
"""How long a verb may take."""
_TOKEN_S = 600.0
_MOST_CHARACTERS = 100_000
"""Of an answer; of a longer one the middle is left out."""


# --- what a tool takes


@dataclass(frozen=True)
class ToolParameter:
    """One argument of a tool, which is one option or argument of its verb. `option`: "" for an argument of the verb;
    `negative`: the option of a switch that is off. `holds_run`: its words name runs."""

    name: str
    option: str
    negative: str
    kind: str
    is_list: bool
    help: str
    required: bool
    choices: tuple[str, ...] = ()
    holds_run: bool = False

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        one: dict[str, Any] = {"type": self.kind}
        if self.choices:
            one["enum"] = list(self.choices)
        whole = {"type": "array", "items": one} if self.is_list else one
        return {**whole, "description": self.help} if self.help else whole

    def list_problems(self, value: Any) -> Iterator[Problem]:
        """What is wrong with a value."""
        values = value if self.is_list and isinstance(value, list) else [value]
        types: Mapping[str, tuple[type, ...]] = {
            "string": (str,),
            "boolean": (bool,),
            "integer": (int,),
            "number": (int, float),
        }
        for each in values:
            fits = isinstance(each, types[self.kind]) and (self.kind == "boolean" or not isinstance(each, bool))
            if not fits or (self.is_list and not isinstance(value, list)):
                wanted = f"a list of {self.kind}s" if self.is_list else f"a {self.kind}"
                yield Problem(self.name, f"{json.dumps(value)} is of another type", allowed=wanted)
                return
            if self.choices and each not in self.choices:
                yield Problem(self.name, f'"{each}" is not known', allowed=", ".join(self.choices))
            if isinstance(each, str) and "\0" in each:
                yield Problem(self.name, "it holds a zero byte")
            if not self.option and self.name != COMMAND and isinstance(each, str) and each.startswith("-"):
                yield Problem(self.name, f'"{each}" begins with "-", as an option does', allowed="a word")

    def words(self, value: Any) -> list[str]:
        """The words of a command line for a value that is not missing."""
        if self.kind == "boolean":
            chosen = self.option if value else self.negative
            return [chosen] if chosen else []
        values = value if self.is_list else [value]
        return [f"{self.option}={each}" if self.option else str(each) for each in values]


@dataclass(frozen=True)
class VerbTool:
    """A tool: a row of the table with what its verb takes."""

    row: ToolRow
    help: str
    parameters: tuple[ToolParameter, ...]

    @property
    def description(self) -> str:
        if not self.row.changes:
            return self.help
        return (
            f"{self.help}\nThis changes something, in two calls: without {CONFIRM!r} nothing is done, and the answer "
            "has what would be done, its cost in GPU-hours and a token; show these to the person you work for. The "
            f"same call with that token as {CONFIRM!r} does it."
        )

    def schema(self) -> dict[str, Any]:
        """The arguments as JSON Schema."""
        properties = {each.name: each.schema() for each in self.parameters}
        if self.row.changes:
            properties[CONFIRM] = {"type": "string", "description": "The token of the first call."}
        required = [each.name for each in self.parameters if each.required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def words(self, arguments: Mapping[str, Any]) -> list[str]:
        """The words of the command line. Raises UserError with all that is wrong with the arguments."""
        known = {each.name: each for each in self.parameters}
        problems = [
            Problem(name, "there is no such argument", allowed=", ".join(known))
            for name in arguments
            if name not in known
        ]
        problems += [
            Problem(each.name, "is missing", allowed=each.help)
            for each in self.parameters
            if each.required and arguments.get(each.name) in (None, [], "")
        ]
        given = [(known[name], value) for name, value in arguments.items() if name in known and value is not None]
        problems += [problem for parameter, value in given for problem in parameter.list_problems(value)]
        check_no_problems(f"the call of {self.row.name}", problems)
        # arguments in the order of the verb, options before them
        order = {name: at for at, name in enumerate(known)}
        given.sort(key=lambda pair: (not pair[0].option, order[pair[0].name]))
        words = [word for parameter, value in given if parameter.name != COMMAND for word in parameter.words(value)]
        behind = arguments.get(COMMAND) or []
        return [*self.row.verb.split(), *self.row.fixed, "--json", *words, *(["--", *behind] if behind else [])]


@cache
def list_tools() -> tuple[VerbTool, ...]:
    """Every open verb as a tool, in the order of the table."""
    return tuple(_read_tool(row) for row in TABLE)


def _read_tool(row: ToolRow) -> VerbTool:
    from typer.main import get_group

    from shardway.cli.main import app

    command: Any = get_group(app)
    for name in row.verb.split():
        command = command.get_command(None, name)
    hints = get_type_hints(inspect.unwrap(command.callback))
    found = []
    for param in command.params:
        is_option = param.param_type_name == "option"
        if is_option and ({*param.opts} & {"--json", *row.closed}):
            continue
        kind, choices, is_list = _read_type(hints[param.name])
        option = next((each for each in param.opts if each.startswith("--")), "") if is_option else ""
        negative = param.secondary_opts[0] if param.secondary_opts else ""
        name = option.removeprefix("--").replace("-", "_") or param.name
        metavar = str(param.metavar or "")
        holds_run = (not is_option and name in ("run", "runs", "other")) or metavar == "RUN"
        help_text = " ".join(str(param.help or "").split())
        found.append(
            ToolParameter(name, option, negative, kind, is_list, help_text, bool(param.required), choices, holds_run)
        )
    if row.verb == "submit":
        text = "A program instead of a run file, as a list of words: python SCRIPT ..., python -m MODULE ...; no shell."
        found.append(ToolParameter(COMMAND, "", "", "string", True, text, False))
    return VerbTool(row, " ".join(str(command.help or "").split()), tuple(found))


_KINDS: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number"}


def _read_type(hint: Any) -> tuple[str, tuple[str, ...], bool]:
    """JSON type, allowed words, and whether it is a list, of a parameter's annotation."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) in (list, tuple):
        kind, choices, _ = _read_type(get_args(hint)[0])
        return kind, choices, True
    if get_origin(hint) is Literal:
        return "string", tuple(map(str, get_args(hint))), False
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return "string", tuple(each.value for each in hint), False
    return _KINDS.get(hint, "string"), (), False


# --- what a call may reach


@dataclass(frozen=True)
class Reach:
    """What a server was started with: folders in which paths may lie, the first of which is the working folder; hosts
    that may be reached; GPU-hours that all its submissions together may cost."""

    roots: tuple[Path, ...]
    hosts: tuple[str, ...] = ()
    budget_gpu_hours: float = 0.0

    def name_runs(self, tool: VerbTool, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with runs of the working folder by their directories: their names may be those of others."""
        from shardway.launch.runs.find import is_run

        def name(word: Any) -> Any:
            inside = isinstance(word, str) and "/" not in word and word not in ("", ".", "..")
            return f"runs/{word}" if inside and is_run(self.roots[0] / "runs" / word) else word

        named = {each.name for each in tool.parameters if each.holds_run}
        return {
            key: value
            if key not in named
            else [name(each) for each in value]
            if isinstance(value, list)
            else name(value)
            for key, value in arguments.items()
        }

    def list_problems(self, tool: VerbTool, arguments: Mapping[str, Any]) -> Iterator[Problem]:
        """Each word that leads out of the folders, or to another host."""
        for parameter in tool.parameters:
            value = arguments.get(parameter.name)
            if value is None or parameter.kind != "string":
                continue
            words = value if parameter.is_list else [value]
            if parameter.name == COMMAND:
                yield from self._list_command_problems(words)
            for word in words:
                if parameter.option == "--then":
                    yield from self._list_word_problems(parameter.name, word.split())
                elif parameter.holds_run:
                    yield from self._list_run_problems(parameter.name, word)
                elif parameter.option == "--on" and (found := re.fullmatch(r"([^/:]+):(.*)", word, re.DOTALL)):
                    yield from self._list_host_problems(parameter.name, found[1])
                    yield from self._list_word_problems(parameter.name, [found[2]])
                else:
                    yield from self._list_word_problems(parameter.name, [word])

    def _list_word_problems(self, where: str, words: Sequence[str]) -> Iterator[Problem]:
        for word in words:
            for path in _list_paths(word):
                if unset := list_unset(path):
                    yield Problem(
                        where, f"${unset[0]} in {word} is not set here", allowed="a path in the given folders"
                    )
                elif not self.holds(path):
                    yield self._describe_outside(where, path)
                elif path.endswith(".toml"):
                    yield from self._list_file_problems(path)

    def _describe_outside(self, where: str, path: str) -> Problem:
        allowed = list_some([str(each) for each in self.roots], 8)
        return Problem(where, f"{path} is outside of the folders that are open", allowed=f"a path in {allowed}")

    def _list_file_problems(self, path: str) -> Iterator[Problem]:
        """Files that a run file or a profile reads in turn: its parent, and the site's profile."""
        file = self.roots[0] / expand_place(path)
        seen: set[Path] = set()
        while file not in seen:
            seen.add(file)
            try:
                table = tomllib.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return  # the verb reports it
            site = table.get("site")
            named = {"extends": table.get("extends"), "site.name": site.get("name") if isinstance(site, dict) else None}
            for key, value in named.items():
                if not isinstance(value, str) or not ("/" in value or value.endswith(".toml")):
                    continue
                if not self.holds(str(file.parent / expand_place(value))):
                    yield self._describe_outside(f"{key} of {file}", value)
                    return
            parent = table.get("extends")
            if not isinstance(parent, str):
                return
            file = file.parent / expand_place(parent)

    def holds(self, path: str) -> bool:
        """Whether a path, seen from the working folder and with its links followed, lies in one of the folders."""
        whole = Path(os.path.realpath(os.path.join(self.roots[0], expand_place(path))))
        return any(whole.is_relative_to(root) for root in self.roots)

    def _list_host_problems(self, where: str, host: str) -> Iterator[Problem]:
        if host and host not in self.hosts:
            allowed = ", ".join(self.hosts) or "none: the server was started without --host"
            yield Problem(where, f"{host} is a host that may not be reached", allowed=allowed)

    def _list_run_problems(self, where: str, word: str) -> Iterator[Problem]:
        """A run is one of the folders, or of a host that may be reached, wherever its name is found."""
        from shardway.launch.runs.find import find_known, is_folder_of_runs

        if is_folder_of_runs(word):
            yield from self._list_word_problems(where, [word])
            return
        try:
            known = find_known(word)
        except UserError as error:
            yield from error.problems or (Problem(where, " ".join(str(error).split())),)
            return
        if known.host:
            yield from self._list_host_problems(where, known.host)
        else:
            yield from self._list_word_problems(where, [known.run])

    def _list_command_problems(self, words: Sequence[str]) -> Iterator[Problem]:
        """A program is a Python script in the folders, or a module: nothing that reads a text as a program."""
        first, second = [*map(str, words[:2]), "", ""][:2]
        is_script = not second.startswith("-") and second.endswith(".py")
        is_module = second == "-m" and len(words) > 2 and words[2] not in ("timeit", "pdb", "code", "runpy")
        if first not in ("python", "python3") or not (is_script or is_module):
            yield Problem(
                COMMAND,
                f"{json.dumps(list(words[:2]))} is not open",
                allowed="python SCRIPT.py ..., python -m MODULE ...",
            )


def _list_paths(word: str) -> Iterator[str]:
    """The strings in a word that may be paths: the word, or what KEY=VALUE has as its value."""
    found = re.fullmatch(r"\s*[A-Za-z_][\w.]*\s*=(.*)", word, re.DOTALL)
    option = re.fullmatch(r"--?[\w-]+=(.*)", word, re.DOTALL)
    if option is not None:
        yield from _list_paths(option[1])
    elif found is None:
        yield word
    else:
        try:
            value: Any = tomllib.loads(f"value = {found[1]}")["value"]
        except tomllib.TOMLDecodeError:
            value = found[1].strip()
        yield from _list_strings(value)


def _list_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _list_strings(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _list_strings(each)


# --- secrets

_SECRET_NAME = re.compile(r"(?i)token|secret|passw|credential|api_?key|access_?key|private_?key|webhook")
_SECRET_LINE = re.compile(r"\s*(?:export\s+)?[A-Za-z_]\w*=(.*)")
_LEAST_SECRET = 6
"""Characters; a shorter value is a word that stands everywhere."""


def read_secret_values() -> list[str]:
    """Values of the secrets file and of variables that are named like secrets, the longest first."""
    found = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    try:
        lines = expand_home(SECRETS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found += [match[1].strip().strip("'\"") for line in lines if (match := _SECRET_LINE.fullmatch(line))]
    return sorted({value for value in found if len(value) >= _LEAST_SECRET}, key=lambda value: (-len(value), value))


def mask_secrets(text: str, values: Sequence[str]) -> str:
    """The text with each of these values as `***`, also in the form that it has in JSON."""
    for value in values:
        for form in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
            text = text.replace(form, "***")
    return text


# --- calls

RunVerb = Callable[[Sequence[str], Path, float], Awaitable[tuple[int, str, str]]]
"""Runs a verb's words in a folder, for at most so many seconds: exit code, stdout, stderr."""


class VerbRefused(UserError):
    """A verb that ended with exit code 2: what was asked for is wrong, and nothing was done."""


@dataclass(frozen=True)
class _Confirmation:
    """What a token stands for; `until` in seconds of the monotonic clock."""

    digest: str
    until: float


@dataclass
class ToolCalls:
    """Answers calls of tools. `spent_gpu_hours`: the cost of what was submitted by it."""

    reach: Reach
    run_verb: RunVerb
    spent_gpu_hours: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _confirmations: dict[str, _Confirmation] = field(default_factory=dict)

    @cached_property
    def tools(self) -> dict[str, VerbTool]:
        return {tool.row.name: tool for tool in list_tools()}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The answer of a tool: plain data, or text where the verb's answer is no JSON or too long.

        Raises UserError for what is refused, and for a verb that failed, with its message."""
        tool = self.tools.get(name)
        if tool is None:
            raise UserError(f'there is no tool "{name}".\n      allowed: {", ".join(self.tools)}')
        given = self.reach.name_runs(tool, arguments)
        token = given.pop(CONFIRM, None) if tool.row.changes else None
        words = tool.words(given)
        check_no_problems(f"the call of {name}", [*self.reach.list_problems(tool, given)])
        if not tool.row.changes:
            runs = [str(root / "runs") for root in self.reach.roots if (root / "runs").is_dir()]
            if name == "status" and not given.get("run"):  # else those outside of the folders, too
                if not runs:
                    return []
                words += runs
            return await self._run(words, _READ_S)
        if token is not None and not isinstance(token, str):
            raise UserError(f"{CONFIRM}: {json.dumps(token)} is no token.")
        # taken out before anything is awaited: of two calls with one token, one goes on
        confirmed = self._take(token) if token else None
        would = await self._foresee(name, words, str(given.get("run", "")))
        self._check_directories(name, would)
        cost = _cost_of(would)
        self._check_budget(name, cost)
        digest = _digest([words, [each.get("digest") for each in _list_submissions(would)]])
        if confirmed is None:
            return self._offer(would, cost, digest)
        if confirmed.digest != digest:
            raise UserError(
                f"{name}: what would be done is not what was confirmed: the arguments, a file or the run has changed.\n"
                f"  Nothing was done. To do: call it again without {CONFIRM}, and look at the answer."
            )
        self.spent_gpu_hours += cost or 0.0  # before it runs: what ends half way may have submitted a job
        try:
            return await self._run(words, _CHANGE_S)
        except VerbRefused:
            self.spent_gpu_hours -= cost or 0.0
            raise

    def _take(self, token: str) -> _Confirmation:
        confirmed = self._confirmations.pop(token, None)
        if confirmed is None or confirmed.until < self.clock():
            raise UserError(
                f"{CONFIRM}: the token is not valid: it was never given, was used, or is older than {_TOKEN_S:g} s.\n"
                f"  Nothing was done. To do: call it without {CONFIRM}, and use the token of that answer once."
            )
        return confirmed

    def _offer(self, would: Mapping[str, Any], cost: float | None, digest: str) -> dict[str, Any]:
        token = secrets.token_urlsafe(24)
        now = self.clock()
        self._confirmations = {key: each for key, each in self._confirmations.items() if each.until >= now}
        self._confirmations[token] = _Confirmation(digest, now + _TOKEN_S)
        return {
            "done": False,
            "would": {key: value for key, value in would.items() if key != "digest"},
            "gpu_hours": cost,
            "gpu_hours_left": self.reach.budget_gpu_hours - self.spent_gpu_hours,
            CONFIRM: token,
            "valid_s": _TOKEN_S,
        }

    async def _foresee(self, name: str, words: Sequence[str], run: str) -> dict[str, Any]:
        """What a call would do: the dry run of its verb; of `stop`, the state of the run."""
        if name == "stop":
            facts = await self._run(["status", "--json", run], _READ_S)
            jobs = [(each.get("job"), each.get("state")) for each in facts.get("jobs", [])]
            return {**facts, "digest": _digest([facts.get("path"), facts.get("state"), jobs]), "gpu_hours": 0.0}
        behind = words.index("--") if "--" in words else len(words)
        answer = await self._run([*words[:behind], "--dry-run", *words[behind:]], _READ_S)
        if not isinstance(answer, dict):
            raise UserError(f"{name}: the answer of its dry run is too long to be confirmed.")
        return answer

    def _check_directories(self, name: str, would: Mapping[str, Any]) -> None:
        """A run file may name another folder for its runs than the words do."""
        for each in _list_submissions(would):
            if not each.get("host") and each.get("run") and not self.reach.holds(str(each["run"])):
                allowed = list_some([str(root) for root in self.reach.roots], 8)
                problem = Problem("run.root", f"{each['run']} is outside of the folders that are open", allowed=allowed)
                check_no_problems(f"the call of {name}", [problem])

    def _check_budget(self, name: str, cost: float | None) -> None:
        left = self.reach.budget_gpu_hours - self.spent_gpu_hours
        if cost is None:
            raise UserError(
                f"{name}: the job has GPUs and no limit of time, so its cost is not known.\n"
                '  To do: set walltime, such as "2h".'
            )
        if cost > left:
            raise UserError(
                f"{name}: it may cost {cost:g} GPU-hours, and {left:g} of {self.reach.budget_gpu_hours:g} are left.\n"
                "      counted: all nodes, attempts and what follows, each for its whole wall-time\n"
                "  To do: fewer nodes, a shorter walltime, fewer max_attempts; or a person starts the server with "
                "another --budget."
            )

    async def _run(self, words: Sequence[str], limit_s: float) -> Any:
        code, out, error = await self.run_verb(words, self.reach.roots[0], limit_s)
        masked = read_secret_values()
        out, error = mask_secrets(out, masked), mask_secrets(error, masked)
        if code and not out.strip():  # a comparison that found a difference, or damage, answers with facts
            said = error.strip().removeprefix("shardway: ") or f"{words[0]} ended with exit code {code}"
            raise (VerbRefused if code == UserError.exit_code else UserError)(_shorten(said))
        if len(out) > _MOST_CHARACTERS:
            return _shorten(out)
        try:
            return json.loads(out)
        except ValueError:
            return out


def _cost_of(would: Mapping[str, Any]) -> float | None:
    """GPU-hours of a dry run with all that follows; None where one is not known."""
    costs = [each.get("gpu_hours") for each in _list_submissions(would)]
    return None if any(cost is None for cost in costs) else float(sum(cost for cost in costs if cost is not None))


def _list_submissions(would: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All that a dry run would submit: the run, what goes before it and what follows."""
    return [would, *would.get("before", []), *would.get("then", [])]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _shorten(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters are left out) ...\n{text[-half:]}"


def command_line(words: Sequence[str]) -> list[str]:
    """What starts a verb as a process of its own."""
    return [sys.executable, "-m", "shardway", *words]
