"""`shardway completion SHELL`: the script with which bash, zsh or fish completes verbs, options, keys and their values,
runs, sites; and the answers that it asks for.

Invariants:
- Completing imports neither torch nor pydantic: verbs, options and keys come from a table in the cache, which is made
  anew when this version, the installed packages or the own site profiles have changed.
- What cannot be read is not offered; nothing is printed on stderr, and nothing outside of the cache is written.
- A word is completed as the shell has it, "=" and all; the script cuts off what its shell takes for another word.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from shardway.places import find_own_folder
from shardway.version import __version__

FORMAT = 1
"""Of the table in the cache."""

# --- the scripts


class Shell(StrEnum):
    """The shells that are supported."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


SCRIPTS: Mapping[Shell, str] = {
    Shell.bash: """\
# Completion of shardway for bash 4 and later. Save it where bash-completion finds it:
#   shardway completion bash > ~/.local/share/bash-completion/completions/shardway
# or have the shell read it at its start: eval "$(shardway completion bash)"
_shardway() {
    local words=() rest=${COMP_LINE:0:COMP_POINT} part current head i
    for ((i = 0; i <= COMP_CWORD; i++)); do  # bash cuts words at "=" and ":" too
        if [[ $i -eq 0 || $rest == [[:space:]]* ]]; then
            rest=${rest#"${rest%%[![:space:]]*}"}
            words+=("")
        fi
        part=${COMP_WORDS[i]}
        part=${part:0:${#rest}}
        words[${#words[@]} - 1]+=$part
        rest=${rest#"$part"}
    done
    current=${words[${#words[@]} - 1]}
    head=""
    [[ $COMP_WORDBREAKS == *=* && $current == *=* ]] && head=${current%"${current##*=}"}
    [[ $COMP_WORDBREAKS == *:* && $current == *:* ]] && head=${current%"${current##*[=:]}"}
    COMPREPLY=()
    while IFS= read -r part; do
        COMPREPLY+=("${part#"$head"}")
    done < <("${words[0]}" completion --answer -- "${words[@]:1}" 2> /dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/] ]]; then
        compopt -o nospace
    fi
}
complete -F _shardway shardway
""",
    Shell.zsh: """\
#compdef shardway
# Completion of shardway for zsh. Save it in a folder of $fpath, as _shardway:
#   shardway completion zsh > ~/.zfunc/_shardway     (with fpath+=~/.zfunc before compinit in ~/.zshrc)
# or have the shell read it at its start, behind compinit: eval "$(shardway completion zsh)"
_shardway() {
    local -a found begun whole
    found=("${(@f)$(${words[1]} completion --answer -- "${(@)words[2,CURRENT]}" 2> /dev/null)}")
    begun=(${(M)found:#*[=/]})
    whole=(${found:#*[=/]})
    (( $#begun )) && compadd -S '' -- $begun
    (( $#whole )) && compadd -- $whole
}
if [[ $funcstack[1] == _shardway ]]; then
    _shardway
else
    compdef _shardway shardway
fi
""",
    Shell.fish: """\
# Completion of shardway for fish. Save it where fish finds it:
#   shardway completion fish > ~/.config/fish/completions/shardway.fish
function __shardway_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    $before[1] completion --answer -- $before[2..-1] "$current" 2> /dev/null
end
complete -c shardway -f -a '(__shardway_complete)'
""",
}
"""What `shardway completion` prints."""


def completion(
    shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.", show_default=False)],
) -> None:
    """Print the script with which a shell completes verbs, options, keys with their values, runs and sites."""
    typer.echo(SCRIPTS[shell], nl=False)


# --- the table


def load_table() -> dict[str, Any]:
    """Verbs with what they take, and keys with their values; from the cache, or made and kept there."""
    stamp, folder = _stamp(), find_own_folder("CACHE")
    path = folder / "completion.json" if folder else None
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            table = json.loads(path.read_text(encoding="utf-8"))
            if table.get("stamp") == stamp:
                return dict(table)
    table = {"stamp": stamp, **_make_table()}
    if path is not None:
        with contextlib.suppress(OSError):
            from shardway.rundir.file_io import write_whole

            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(table), durable=False)
    return table


def _stamp() -> list[Any]:
    """What the table follows from: this version's files, the installed packages, the own site profiles."""
    here = Path(__file__).parent
    own = find_own_folder("CONFIG")
    watched = [*here.glob("*.py"), here.parent / "runfile" / "schema.py", here.parent / "plugins.py"]
    folders = [Path(typer.__file__).parent.parent, *([own / "sites"] if own else [])]
    return [FORMAT, __version__, max(map(_changed, watched)), [_changed(folder) for folder in folders]]


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _make_table() -> dict[str, Any]:
    from typer.main import get_group

    from shardway.cli.main import app
    from shardway.plan.huggingface import load_named
    from shardway.runfile.schema import all_keys
    from shardway.sites.load import list_sites

    def describe(command: Any) -> dict[str, Any]:
        if hasattr(command, "list_commands"):
            return {"verbs": {name: describe(command.get_command(None, name)) for name in command.list_commands(None)}}
        kinds = _read_kinds(command.callback)
        options: dict[str, Any] = {"--help": None}
        arguments = []
        for param in command.params:
            kind = kinds.get(param.name) or "path"
            if param.param_type_name == "argument":
                arguments.append([kind, param.nargs])
            elif not getattr(param, "hidden", False):
                value = None if param.is_flag else kind
                options |= {name: value for name in (*param.opts, *param.secondary_opts) if name.startswith("--")}
        return {"options": options, "arguments": arguments}

    return {
        "verbs": describe(get_group(app))["verbs"],
        "keys": {key: _list_values(key) for key in all_keys()},
        "sites": [*list_sites()],
        "models": [*load_named()],
    }


def _read_kinds(callback: Any) -> dict[str, Any]:
    """By parameter: the name of the function of `options` that completes it, or the words that it may be; None for
    anything else."""

    def kind_of(hint: Any) -> Any:
        for each in getattr(hint, "__metadata__", ()):
            if complete := getattr(each, "autocompletion", None):
                return complete.__name__
        for each in (hint, *get_args(hint), *(inner for part in get_args(hint) for inner in get_args(part))):
            if isinstance(each, type) and issubclass(each, StrEnum):
                return [word.value for word in each]
        return None

    hints = get_type_hints(inspect.unwrap(callback), include_extras=True)
    return {name: kind_of(hint) for name, hint in hints.items()}


def _list_values(key: str) -> list[str | None]:
    """What a key may be, as it stands in TOML, strings without their quotes; its default, where it may be anything; at
    the end None for a text, which may be a path."""
    section, _, name = key.partition(".")
    rule = _load_section(section)["properties"].get(name, {})
    rules = [rule, *rule.get("anyOf", [])]
    values = [value for each in rules for value in each.get("enum", [])]
    values += [each["const"] for each in rules if "const" in each]
    is_text = not values and any(each.get("type") == "string" for each in rules)
    if any(each.get("type") == "boolean" for each in rules):
        values += [True, False]
    if not isinstance(rule.get("default"), list | dict):
        values.append(rule.get("default"))
    texts = dict.fromkeys(_render(value) for value in values if value not in (None, ""))
    return [*(text for text in texts if " " not in text), *([None] if is_text else [])]


@cache
def _load_section(name: str) -> dict[str, Any]:
    from shardway.runfile.schema import sections

    return sections()[name].model_json_schema()


def _render(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# --- answers


def answer(words: Sequence[str]) -> list[str]:
    """What the last of the words behind `shardway` may be."""
    *before, last = words or ("",)
    node: dict[str, Any] = {"verbs": load_table()["verbs"], "options": {"--version": None, "--help": None}}
    taken, pending = 0, None
    for word in before:
        if pending is not None:
            pending = None
        elif word == "--":
            return _complete("path", last)
        elif word.startswith("-"):
            name, has_value, _ = word.partition("=")
            pending = None if has_value else node.get("options", {}).get(name)
        elif "verbs" in node:
            if word not in node["verbs"]:
                return []
            node = node["verbs"][word]
        else:
            taken += 1
    if pending is not None:
        return _complete(pending, last)
    if last.startswith("-"):
        name, has_value, value = last.partition("=")
        options = node.get("options", {})
        if has_value:
            return [f"{name}={found}" for found in _complete(options.get(name) or "path", value)]
        return _begun(options, last)
    if "verbs" in node:
        return _begun(node["verbs"], last)
    for kind, count in node["arguments"]:
        if count == -1 or taken < count:
            return _complete(kind, last)
        taken -= count
    return []


def _complete(kind: Any, incomplete: str) -> list[str]:
    """Words of a kind that begin so: the name of a function of `options`, or a list."""
    from shardway.cli import options

    if isinstance(kind, list):
        return _begun(kind, incomplete)
    return list(getattr(options, kind, options.complete_path)(incomplete))


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def print_answer(words: Sequence[str]) -> None:
    """Print an answer, a line each; nothing where anything is wrong: this runs while a person types."""
    found: list[str] = []
    with (
        contextlib.suppress(Exception),
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stderr(nowhere),
    ):
        found = answer(words)
    for each in found:
        if each.isprintable():
            typer.echo(each)
