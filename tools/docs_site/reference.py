"""The reference of the site: pages made from the code that they describe.

Verbs come from typer, keys of run files and of site profiles from their schemas, events from the calls that write
them, doors from `plugins.GROUPS`, exit codes from the error tree.

Invariants:
- No page repeats by hand what the code has. `EVENTS` alone adds a sentence to each event, and an event without a
  sentence, or a sentence without an event, ends the build.
- The address of a page follows from a name of the code, and that of a key is its own: keys/train.html#train.steps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from typer.main import get_command

from shardway import errors, plugins
from shardway.cli import main as command_line
from shardway.runfile.load import explain_key, list_peers
from shardway.runfile.schema import sections
from shardway.sites.schema import SiteProfile
from shardway.watch import words

SOURCE = Path(errors.__file__).parent
Pages = dict[str, str]
"""Address in the site's source -> Markdown."""


def render_reference() -> Pages:
    """All pages of the reference."""
    return {
        **render_verbs(),
        **render_run_file_keys(),
        "reference/site-profile.md": render_site_keys(),
        "reference/events.md": render_events(),
        "reference/exit-codes.md": render_exit_codes(),
        "reference/doors.md": render_doors(),
    }


def cell(text: object) -> str:
    """A text as a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: object) -> str:
    """A text as a code span, whatever it holds."""
    text = " ".join(str(text).split()).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    flat = " ".join(text.split())
    return re.split(r"(?<=[.;:!?]) (?=[A-Z`])", flat)[0]


# --- verbs


def render_verbs() -> Pages:
    """A page for each verb, with its own verbs if it has some, and the list of all."""
    group: Any = get_command(command_line.app)
    pages, rows = {}, []
    for name in group.list_commands(None):
        verb = group.get_command(None, name)
        pages[f"reference/verbs/{name}.md"] = f"# shardway {name}: options\n\n" + "".join(_verb([name], verb, 2))
        rows.append([f"[`shardway {name}`]({name}.md)", cell(first_sentence(verb.help or ""))])
    general = "".join(_options(group))
    pages["reference/verbs/index.md"] = (
        "# Verbs\n\nEvery verb, as `shardway VERB --help` has it. Words after the verb are explained on its page.\n\n"
        + table(["verb", "what it does"], rows)
        + f"\n## Options of shardway itself\n\n{general}"
    )
    return pages


def _verb(path: list[str], verb: Any, level: int) -> Iterator[str]:
    """A verb, and below it its own verbs."""
    own = getattr(verb, "commands", None)
    if own is not None:
        yield f"{_prose(verb.help)}\n\n" if verb.help else ""
        for name in verb.list_commands(None):
            yield f"{'#' * level} shardway {' '.join([*path, name])}\n\n"
            yield from _verb([*path, name], verb.get_command(None, name), level + 1)
        return
    given = " ".join(str(each.metavar or each.name.upper()) for each in verb.params if not each.opts[0].startswith("-"))
    yield f"```text\nshardway {' '.join(path)} {given} [OPTIONS]\n```\n\n{_prose(verb.help or '')}\n\n"
    yield from _options(verb)


def _prose(text: str) -> str:
    return re.sub(r"(?m)^[ \t]+", "", text.replace("\b", "").replace("<", "&lt;")).strip()


def _options(verb: Any) -> Iterator[str]:
    rows = []
    for each in verb.params:
        if getattr(each, "hidden", False):
            continue
        names = [*each.opts, *each.secondary_opts] if each.opts[0].startswith("-") else [each.metavar or each.name]
        value = "" if getattr(each, "is_flag", False) or not each.opts[0].startswith("-") else each.metavar or "VALUE"
        shown = " ".join(code(name) for name in names) + (f" {code(value)}" if value else "")
        default = "" if each.default in (None, "", False, (), []) or callable(each.default) else code(each.default)
        again = " May be given several times." if getattr(each, "multiple", False) else ""
        needed = " Required." if each.required else ""
        rows.append([shown, cell(each.help or "") + again + needed, default or "-"])
    if rows:
        yield table(["word or option", "what it does", "default"], rows) + "\n"


# --- keys


def render_run_file_keys() -> Pages:
    """A page for each section of a run file, and the list of the sections."""
    peers: dict[str, list[str]] = {}
    for row in list_peers():
        for key in row.keys:
            peers.setdefault(key, []).append(f"{row.peer} {code(row.name)}")
    pages, rows = {}, []
    for name, section in sections().items():
        docs = explain_key(name)
        parts = [f"# Keys of [{name}]\n\n{_prose(section.__doc__ or '')}\n\n"]
        for doc in docs:
            parts.append(f"## `{doc.key}` {{ #{doc.key} }}\n\n{_prose(doc.doc)}\n\n")
            parts.append(f"- allowed: {_escaped(doc.allowed)}\n- default: {code(doc.default)}\n")
            if others := peers.get(doc.key):
                parts.append(f"- elsewhere: {', '.join(sorted(set(others)))}\n")
            parts.append("\n")
        pages[f"reference/keys/{name}.md"] = "".join(parts)
        listed = " ".join(f"[`{doc.key.partition('.')[2]}`]({name}.md#{doc.key})" for doc in docs)
        rows.append([f"[[{name}]]({name}.md)", cell(section.__doc__ or ""), listed])
    pages["reference/keys/index.md"] = (
        "# Keys of a run file\n\nEvery key, as `shardway config explain KEY` prints it. `shardway config schema` "
        "prints the same as a JSON Schema, for editors.\n\n" + table(["section", "what it is for", "keys"], rows)
    )
    return pages


def _escaped(text: str) -> str:
    return re.sub(r"([*_<\[\]])", r"\\\1", text)


def render_site_keys() -> str:
    """The keys of a site profile, a table for each of its tables."""
    top, parts, later = [], [], []
    for name, field in SiteProfile.model_fields.items():
        inner = _find_model(field.annotation)
        if inner is None or name == "sources":
            top.append([f"`{name}`", cell(field.description or ""), _kind(field.annotation)])
        else:
            later.append((name, field, inner))
    parts.append(table(["key", "what it is", "type"], top))
    for name, field, inner in later:
        rows = [
            [f"`{key}`", cell(each.description or ""), _kind(each.annotation)]
            for key, each in inner.model_fields.items()
        ]
        title = f"[[{name}]]" if "tuple" in str(field.annotation) else f"[{name}]"
        about = first_sentence(inner.__doc__ or "")
        parts.append(f"\n## `{title}`\n\n{cell(about)}\n\n" + table(["key", "what it is", "type"], rows))
    return (
        "# Keys of a site profile\n\nEvery fact that a profile can state ([sites](../sites.md)); one that is left out "
        "is unknown. Each may have a source and a date in `[sources]`.\n\n" + "".join(parts)
    )


def _find_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _find_model(each))), None)


def _kind(annotation: Any) -> str:
    """An annotation in words."""
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    if annotation in names:
        return names[annotation]
    text = str(annotation)
    if text.startswith("typing.Literal"):
        return " or ".join(code(f'"{each}"') for each in get_args(annotation))
    inner = [_kind(each) for each in get_args(annotation) if each is not type(None) and each is not ...]
    if "Mapping" in text.split("[")[0]:
        return "table"
    if text.startswith(("tuple", "list")):
        return f"list of {inner[0]}"
    if isinstance(annotation, type):
        return {"date": "date"}.get(annotation.__name__, "table")
    return " or ".join(dict.fromkeys(inner[:1] if text.startswith("typing.Annotated") else inner)) or "value"


# --- events

EVENTS = {
    "background_off": "Saves are no longer written in the background, and the run waits for each.",
    "batch_changed": "The global batch changed at a resume.",
    "batch_ramp": "The global batch grows with the position in the data, as `train.global_batch` asks.",
    "blend": "The parts of a blend and their weights.",
    "blend_epochs": "A part of a blend begins another epoch.",
    "checkpoint_quarantined": "A damaged checkpoint was set aside under another name.",
    "corruption": "The same passes gave different results: a device computes wrongly.",
    "damage_counted": "How many samples were left out because their data are damaged.",
    "data_damaged": "A place in the data that does not match its checksum, or cannot be decoded.",
    "data_order_noted": "What is known of the order of samples that a script chose itself.",
    "data_skipped": "Samples that this start leaves out, as `data.skip` asks.",
    "data_slow": "The ranks wait for their data.",
    "data_split_by_rank": "A script's own sampler splits the samples by rank.",
    "deadline": "The run stops in time before the end of its job.",
    "fault": "A rank ended by an error.",
    "finished": "The run reached its end.",
    "gradients_by_hand": "A script computes gradients itself, and what that means here.",
    "loader": "How many loader processes read the data, and why.",
    "local_checkpoints_ignored": "What the nodes saved on their own disks is not used for this start.",
    "logged": "What a script passed to `run.log`.",
    "loss_depends_on_cut": "The loss of a script depends on how a batch is cut.",
    "not_staged": "The data were not copied to the node's disk, and why.",
    "passes_replayed": "Passes are replayed as CUDA graphs, or why not.",
    "profile_failed": "A trace was asked for and could not be written.",
    "profiled": "A trace was written.",
    "recorded_late": "Events that could not be written for a while are written again.",
    "replica_differs": "Copies of the weights differ between ranks.",
    "restarted": "The agent started the ranks again after a failure.",
    "rolled_back": "The run went back to an earlier checkpoint; later steps are undone.",
    "sampled": "The model in training continued the prompts of `train.sample_prompts`.",
    "samples_failed": "The prompts could not be continued.",
    "samples_left_out": "Samples of a step that were left out because their data are damaged.",
    "save_failed": "A checkpoint could not be written; it is tried again.",
    "save_skipped": "No checkpoint, since the one before is still written.",
    "saved": "A checkpoint is complete.",
    "script_noted": "What a script holds and no checkpoint does, or what its ranks do not have alike.",
    "skip_too_late": "Samples of `data.skip` that were trained on before they were named.",
    "spike": "A number is far above the last ones.",
    "staged": "The data were copied to the node's own disk.",
    "started": "A start: the step it goes on from and of how many, versions, host and device.",
    "step": "An optimizer step with its numbers.",
    "step_discarded": "A step had no data in time and does not count.",
    "step_skipped": "A step whose numbers were not finite did not update the weights.",
    "stopped": "The run stopped before its end, and can be resumed.",
    "tracker_failed": "A tracker did not take what it was sent.",
    "transient": "Passes whose numbers were not finite were finite when repeated.",
    "tuned": "A setting that was measured at the start.",
    "validation": "A validation: its loss and metrics.",
    "validation_failed": "A validation ended by an error; the run goes on.",
    "validation_skipped": "A validation that would not end in time was left out.",
    "validation_stopped": "A validation was broken off by a stop, and is repeated.",
}
"""Name of an event -> when it is written. Its line in `shardway logs` is that of `watch.words`."""


@dataclass(frozen=True)
class EventDoc:
    """An event: where it is written, and with which fields."""

    name: str
    fields: tuple[str, ...]
    module: str


WRITERS = ("write", "keep", "event", "own_event", "_event", "_write", "_record", "record_event")


def list_events() -> list[EventDoc]:
    """Every event that a call in the package writes by its name, with the names of its fields."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).with_suffix("").as_posix()
        if module.partition("/")[0] not in ("train", "ranks", "rundir", "checkpoint", "telemetry", "data"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called not in WRITERS or not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z_]+", name):
                continue
            if called in ("write", "keep", "_write") and not (node.keywords or name in EVENTS):
                continue  # a file or a stream
            fields, modules = found.setdefault(name, (set(), set()))
            fields |= {each.arg for each in node.keywords if each.arg}
            modules.add(module)
    for name in (*words._KINDS, "started", "step", "validation", "stopped", "finished"):
        found.setdefault(name, (set(), set()))
    return [
        EventDoc(name, tuple(sorted(fields)), ", ".join(sorted(at))) for name, (fields, at) in sorted(found.items())
    ]


def render_events() -> str:
    """The table of events. Raises ValueError where `EVENTS` lacks one, or has one that is not written any more."""
    docs = list_events()
    if wrong := {doc.name for doc in docs} ^ EVENTS.keys():
        raise ValueError(f"events without a sentence in EVENTS, or the other way round: {', '.join(sorted(wrong))}")
    rows = [
        [f"`{doc.name}`", cell(EVENTS[doc.name]), " ".join(f"`{each}`" for each in doc.fields) or "-"] for doc in docs
    ]
    return (
        "# Events\n\nThe lines of `events/rank-NNNNN.jsonl` in a run directory, one JSON object each, append only. "
        "Each has `event` and `time` (Unix seconds) beside these fields. Fields that a call adds as a whole, such as "
        "the numbers of a step, are not listed. `shardway logs RUN` prints events as "
        "sentences, `--json` as they are.\n\n" + table(["event", "when", "fields by name"], rows)
    )


# --- exit codes and doors

EXIT_CODES = (
    (0, "Done", "The verb did what it was asked for; a run finished, or stopped as requested.", "Nothing."),
    (
        1,
        "A comparison found a difference",
        "`shardway checkpoint diff` and its kind compare, and found a difference.",
        "Read the lines above: each names what differs.",
    ),
    (2, "UserError", "", "Change what the message names (run file, path, option), and run the same command again."),
    (
        3,
        "SiteError",
        "",
        "`shardway doctor` shows what this machine lacks; correct the site profile, or ask the site.",
    ),
    (
        4,
        "JobError",
        "",
        "Run the same command again: a run resumes from its last complete checkpoint. `shardway status RUN` has the "
        "reason.",
    ),
    (70, "Bug", "", "Report it with the lines above; nothing that was saved is damaged by it."),
    (
        130,
        "Ended at once by a second signal",
        "The first Ctrl-C or signal asks for a graceful stop; the second one ends the process at once.",
        "Run the same command again: it resumes from the last complete checkpoint.",
    ),
)
"""Code, name, meaning (empty: the docstring of the error class), what to do."""


def list_exit_codes() -> list[tuple[int, str, str, str]]:
    """The exit codes with their meaning. Raises ValueError where one is not that of its error class."""
    rows = []
    for number, name, meaning, remedy in EXIT_CODES:
        cls = errors.ERRORS_BY_NAME.get(name)
        if cls is not None and cls.exit_code != number:
            raise ValueError(f"the exit code of {name} is {cls.exit_code}, not {number}")
        rows.append((number, name, meaning or first_sentence(cls.__doc__ or ""), remedy))
    return rows


def render_exit_codes() -> str:
    """The table of exit codes."""
    rows = [
        [f"[{number}](../errors/exit-{number}.md)", cell(name), cell(meaning), cell(remedy)]
        for number, name, meaning, remedy in list_exit_codes()
    ]
    return (
        "# Exit codes\n\nWhat `shardway` returns to a shell, and a job to its scheduler. A command of your own that "
        "`submit -- COMMAND` runs keeps its own code.\n\n" + table(["code", "name", "meaning", "to do"], rows)
    )


def render_doors() -> str:
    """The groups of entry points with what Shardway itself has in each."""
    parts = [
        "# Doors\n\nWhat another package can add, by an entry point of the group `shardway.GROUP` "
        "([extending](../extending.md)). `shardway plugins list` prints the same with what is installed.\n"
    ]
    for name, group in plugins.GROUPS.items():
        contract = f"It derives from `{group.contract}`." if group.contract else "An entry names a package of files."
        parts.append(f"\n## `shardway.{name}`\n\nA {group.noun}; named in: {cell(group.key)}. {contract}\n\n")
        rows = [[f"`{each}`", cell(_docstring(at)) or "-"] for each, at in group.own.items()]
        parts.append(table(["name", "what it is"], rows) if rows else "Shardway itself has none.\n")
    return "".join(parts)


def _docstring(place: str) -> str:
    """The first sentence of the docstring of "module:name", read without importing it."""
    module, _, name = place.partition(":")
    path = SOURCE.parent / Path(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not file.is_file():
        return ""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return first_sentence(ast.get_docstring(node) or "")
    return ""
