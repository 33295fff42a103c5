"""A page for each error: what was printed, why, and what to do.

Sources: the golden files of the tests (whole messages as they are printed), the tables by which jobs that wait or have
ended, images, ssh and full disks are explained, the rules between keys, the advice of a run, and the exit codes.

Invariants:
- No message is written here: each is a golden file or a sentence of a table, as a user reads it.
- The address of a page is its family and the code or name of the error, and stays while that does:
  errors/slurm-walltime_over_limit.html, errors/message-unknown-key.html.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reference import SOURCE, cell, code, list_exit_codes, table

from shardway import refusals
from shardway.resolve.rules import RULES
from shardway.watch.advice.rules import ADVICE_RULES

ROOT = SOURCE.parents[1]
GOLDEN = ROOT / "tests" / "golden"
MESSAGES = ("errors", "submit", "prefetch", "plan")
"""Folders of golden files that hold whole messages with their command."""


@dataclass(frozen=True)
class ErrorPage:
    """One page: its address below errors/, its title, what stands on it, and the family that lists it."""

    name: str
    title: str
    family: str
    summary: str
    body: str


FAMILIES = {
    "waits": "A job waits, and why",
    "ends": "A job has ended, and how",
    "advice": "A run is slow or in danger",
    "messages": "Messages of the command line",
    "rules": "Keys that do not fit each other",
    "places": "Files, disks, images and connections",
    "codes": "Exit codes",
}


def list_error_pages() -> list[ErrorPage]:
    """Every page. Raises ValueError where two have one address."""
    pages = [*_of_schedulers(), *_of_advice(), *_of_messages(), *_of_rules(), *_of_places(), *_of_exit_codes()]
    names = [page.name for page in pages]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two pages of errors have one address: {', '.join(sorted(twice))}")
    return pages


def render_error_pages() -> dict[str, str]:
    """The pages of errors, and their index."""
    pages = list_error_pages()
    files = {f"errors/{page.name}.md": f"# {page.title}\n\n{page.body.rstrip()}\n\n{_FOOT}" for page in pages}
    parts = [
        "# Errors\n\nEvery error has a page: what is printed, the cause, what to do. Search for words of the message "
        f"(the search works offline too), or choose below. There are {len(pages)} pages.\n"
    ]
    for family, title in FAMILIES.items():
        rows = [
            [f"[{cell(page.title)}]({page.name}.md)", cell(page.summary)] for page in pages if page.family == family
        ]
        parts.append(f"\n## {title}\n\n{table(['error', 'in short'], rows)}")
    return {**files, "errors/index.md": "".join(parts)}


_FOOT = "All errors: [list](index.md). What an exit code means: [exit codes](../reference/exit-codes.md).\n"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _named(template: str) -> str:
    """A sentence of a table with the names of its values in place of them."""
    return re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), template)


# --- jobs


def _of_schedulers() -> Iterator[ErrorPage]:
    folder = SOURCE / "launch" / "schedulers"
    for name, shown in (("slurm", "Slurm"), ("pbs", "PBS"), ("endings", "")):
        rules = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
        seen: set[str] = set()
        for kind in ("pending", "ending"):
            for rule in rules.get(kind, ()):
                prefix = "job" if not shown else name if kind == "pending" else f"{name}-end"
                if rule["code"] != "completed" and f"{prefix}-{rule['code']}" not in seen:  # several patterns, one code
                    seen.add(f"{prefix}-{rule['code']}")
                    yield _of_job(prefix, shown, kind, rule)


def _of_job(prefix: str, shown: str, kind: str, rule: Mapping[str, Any]) -> ErrorPage:
    title = f"{shown or 'Job'}: {rule['code'].replace('_', ' ')}"
    sentence, remedy = _named(rule["sentence"]), _named(rule["remedy"])
    seen = "shardway status" if kind == "pending" else "shardway status RUN"
    parts = [f"```text\n{textwrap.fill(sentence, 100)}\n```\n"]
    parts.append(
        f"`{seen}` prints this sentence" + (" for a job that waits." if kind == "pending" else " of an attempt.")
    )
    if rule.get("hopeless"):
        parts.append("**This job never starts as it is**: waiting does not help.")
    parts.append(f"## What to do\n\n{_sentence(remedy)}")
    if rule.get("remedy_by_ssh"):
        parts.append(f"From another machine over ssh: {_named(rule['remedy_by_ssh'])}.")
    source = f"{shown or 'The scheduler or the job script'} reports" + (" a reason" if kind == "pending" else " an end")
    parts.append(f"## What it is recognised by\n\n{source} that matches this pattern:\n\n```text\n{rule['when']}\n```")
    parts.append(f"The code in `shardway status --json` is `{rule['code']}`.")
    family = "waits" if kind == "pending" else "ends"
    return ErrorPage(f"{prefix}-{rule['code']}", title, family, sentence, "\n\n".join(parts))


def _sentence(text: str) -> str:
    """Text as a sentence of Markdown; keys become code spans, and what is in angle brackets or stars stays."""
    pieces = text.split("`")
    for at in range(0, len(pieces), 2):
        piece = re.sub(r"([*\[\]])", r"\\\1", pieces[at].replace("<", "&lt;"))
        pieces[at] = re.sub(r"(?<![\w./-])[a-z]+\.[a-z_0-9]+\b", _code_of_key, piece)
    text = "`".join(pieces)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ")")) else ".")


def _code_of_key(match: re.Match[str]) -> str:
    return f"`{match[0]}`" if match[0] in _all_keys() else match[0]


# --- advice


def _of_advice() -> Iterator[ErrorPage]:
    for rule in ADVICE_RULES:
        hidden = (
            f"\n\nIt hides its consequences: {', '.join(f'`{each}`' for each in rule.hides)}." if rule.hides else ""
        )
        body = (
            "`shardway status RUN`, the live view and `shardway report RUN` give this advice, with the evidence of the "
            f"run beside it ([advice](../advice.md)).\n\n## When\n\n{_sentence(rule.when)}\n\n## Why\n\n"
            f"{_sentence(rule.why)}\n\n## What to do\n\n{_sentence(rule.do)}{hidden}"
        )
        yield ErrorPage(f"advice-{rule.name}", f"Advice: {rule.name}", "advice", rule.why, body)


# --- messages


@cache
def _messages() -> dict[Path, str]:
    """The golden files of whole messages."""
    paths = [path for folder in MESSAGES for path in sorted((GOLDEN / folder).glob("*.txt"))]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return {path: text for path, text in texts.items() if "shardway: " in text}


def _of_messages() -> Iterator[ErrorPage]:
    for path, text in _messages().items():
        folder = path.parent.name
        yield _of_message(f"message-{path.stem}" if folder == "errors" else f"message-{folder}-{path.stem}", text, path)


def _of_message(name: str, text: str, path: Path) -> ErrorPage:
    said = next(line for line in text.splitlines() if line.startswith("shardway: ")).removeprefix("shardway: ")
    lines = [line.strip() for line in text.splitlines()]
    if re.match(r"\d+ problems? in", said):
        said = next((line for line in lines[lines.index(f"shardway: {said}") + 1 :] if line), said)
    found = re.search(r"exit code (\d+)", text)
    title = said if len(said) <= 90 else f"{said[:87].rsplit(' ', 1)[0]} ..."
    parts = [f"```text\n{text.rstrip()}\n```\n"]
    known = {number for number, *_ in list_exit_codes()}
    if found and int(found[1]) in known:
        parts.append(f"The exit code is [{found[1]}](exit-{found[1]}.md).")
    rules = [rule for rule in RULES if _makes(rule, text)]
    if rules:
        listed = ", ".join(f"[{_words_of(rule)}](rule-{_slug(_name_of(rule))}.md)" for rule in rules)
        parts.append(f"## The rule behind it\n\n{listed}.")
    keys = sorted({key for key in re.findall(r"\b[a-z]+\.[a-z_0-9]+\b", text) if key in _all_keys()})
    if keys:
        listed = " ".join(f"`{key}`" for key in keys[:12])
        parts.append(f"## Keys\n\n{listed}")
    remedies = re.findall(r"(?i)to do: (.*)", text)
    if remedies:
        parts.append("## What to do\n\n" + "\n".join(f"- {_sentence(each)}" for each in dict.fromkeys(remedies)))
    parts.append(f"The message is kept in `tests/golden/{path.relative_to(GOLDEN)}`, and a test compares it.")
    return ErrorPage(name, _title(title), "messages", f"exit code {found[1]}" if found else "-", "\n\n".join(parts))


def _title(text: str) -> str:
    """A line of a message as a heading: brackets, stars and underscores are no markup."""
    return re.sub(r"([*_\[\]`{}])", r"\\\1", text.replace("<", "&lt;")).rstrip(".:")


@cache
def _all_keys() -> frozenset[str]:
    from shardway.runfile.schema import all_keys

    return frozenset(all_keys())


# --- rules between keys


def _name_of(rule: Any) -> str:
    return str(inspect.unwrap(rule).__name__)


def _words_of(rule: Any) -> str:
    return _name_of(rule).replace("_", " ")


@cache
def _parts_of(rule: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The constant parts of a rule's messages, long enough to recognise one by, and the keys that it names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(rule))))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    doc = ast.get_docstring(tree.body[0]) if isinstance(tree.body[0], ast.FunctionDef) else None
    texts = [text for text in texts if text.strip() and " ".join(text.split()) != " ".join((doc or "").split())]
    keys = [text for text in texts if text in _all_keys()]
    return tuple(text.strip() for text in texts if len(text.strip()) > 24), tuple(dict.fromkeys(keys))


@cache
def _flat(text: str) -> str:
    return " ".join(text.split())


def _makes(rule: Any, text: str) -> bool:
    return any(_flat(part) in _flat(text) for part in _parts_of(rule)[0])


def _of_rules() -> Iterator[ErrorPage]:
    done = set()
    for rule in RULES:
        name, words = _name_of(rule), _words_of(rule)
        if name in done or name.startswith("<"):
            continue
        done.add(name)
        doc = " ".join((inspect.unwrap(rule).__doc__ or "").split())
        texts, keys = _parts_of(rule)
        parts = [f"The rule: *{words}*." + (f" {_sentence(doc)}" if doc else "")]
        shown = next((text for text in _messages().values() if _makes(rule, text)), "")
        if shown:
            parts.append(f"## As it is printed\n\n```text\n{shown.rstrip()}\n```")
        elif texts:
            parts.append("## Words of its message\n\n" + "\n".join(f"- {cell(code(text))}" for text in texts[:6]))
        if keys:
            parts.append("## Keys\n\n" + " ".join(f"`{key}`" for key in keys))
        parts.append(
            "## What to do\n\nThe message names the key, its value, where that came from, and what is allowed; all "
            "problems of a run are listed at once. `shardway config explain KEY` prints what a key takes, and "
            "`shardway config show` every value with its origin."
        )
        summary = doc or f"keys: {', '.join(keys[:4])}"
        yield ErrorPage(f"rule-{_slug(name)}", words[:1].upper() + words[1:], "rules", summary, "\n\n".join(parts))


# --- places: refusals of file systems, images, ssh


def _of_places() -> Iterator[ErrorPage]:
    import errno
    import os

    for number, remedy in refusals._REMEDIES.items():
        name = errno.errorcode[number]
        body = (
            f"```text\n{os.strerror(number)}\n```\n\nA file system refused an operation with the reason `{name}`. The "
            "message names the file and the operation; checkpoints that were complete before are unchanged.\n\n"
            f"## What to do\n\n{_sentence(remedy)} Then run the same command again."
        )
        yield ErrorPage(f"file-{name.lower()}", f"{os.strerror(number)} ({name})", "places", remedy, body)
    for file, kind, prefix, shown in (
        ("image/failures.toml", "failure", "image", "An image could not be made"),
        ("hosts/ssh.toml", "refusal", "ssh", "ssh made no connection"),
    ):
        for rule in tomllib.loads((SOURCE / "launch" / file).read_text(encoding="utf-8"))[kind]:
            sentence = rule["sentence"]
            remedy = rule.get("remedy") or (
                "Log in to the registry; the message names where its password is kept."
                if prefix == "image"
                else "Connect once by hand (`ssh HOST`), and answer what it asks."
            )
            body = (
                f"{shown}: {_sentence(sentence)}\n\n## What to do\n\n{_sentence(remedy)}\n\n## What it is recognised by"
                f"\n\nOutput that matches this pattern:\n\n```text\n{rule['when']}\n```"
            )
            yield ErrorPage(f"{prefix}-{_slug(sentence)}", f"{shown}: {sentence}", "places", remedy, body)


def _of_exit_codes() -> Iterator[ErrorPage]:
    for number, name, meaning, remedy in list_exit_codes():
        body = f"{_sentence(meaning)}\n\n## What to do\n\n{_sentence(remedy)}"
        yield ErrorPage(f"exit-{number}", f"Exit code {number}: {name}", "codes", meaning, body)
