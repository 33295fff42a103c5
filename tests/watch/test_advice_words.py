"""What advice names is real: keys of the run file, verbs of the command and their options; every rule is drawn."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from outside import modules_of
from shardway import watch
from shardway.cli.main import VERBS, app
from shardway.runfile.schema import RunFile
from shardway.watch.advice.advise import ADVICE_RULES

with modules_of("bench/watch"):
    import scenarios

FOLDER = Path(watch.__file__).parent
MODULES = [*sorted(FOLDER.glob("advice/*.py")), FOLDER / "trace/rules.py"]


def _list_texts(path: Path) -> Iterator[str]:
    """Every text of a module but docstrings; values in it are "?"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr):
            node.value = ast.Constant(0)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "?" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


TEXTS = {path.relative_to(FOLDER).as_posix(): list(dict.fromkeys(_list_texts(path))) for path in MODULES}
SECTIONS = {name: field.annotation for name, field in RunFile.model_fields.items() if name != "format"}
_KEY = re.compile(rf"(?<![\w.])({'|'.join(SECTIONS)})\.([a-z_0-9]+)(?![\w(])")
_VERB = re.compile(r"shardway ([a-z]+)((?: (?:[\w./-]+))*)")


def _find_unknown_keys(text: str) -> list[str]:
    """Names such as `train.micro_batch` that are no key of the run file."""
    return [match[0] for match in _KEY.finditer(text) if match[2] not in SECTIONS[match[1]].model_fields]  # type: ignore[union-attr]


def _find_unknown_commands(text: str) -> list[str]:
    """`shardway VERB ...` whose verb, verb of a verb, or option there is not."""
    return [match[0] for match in _VERB.finditer(text) if not _is_known(match[1], match[2].split())]


def _is_known(verb: str, words: list[str]) -> bool:
    if verb not in VERBS:
        return False
    group: Any = get_command(app)
    command = group.get_command(None, verb)
    if hasattr(command, "commands"):
        command = command.commands.get(words[0] if words else "")
    options = {name for each in command.params for name in each.opts} if command is not None else set[str]()
    return command is not None and {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("module", TEXTS)
def test_every_key_and_command_that_advice_names_exists(module: str) -> None:
    texts = TEXTS[module]
    assert [wrong for text in texts for wrong in (*_find_unknown_keys(text), *_find_unknown_commands(text))] == []


def test_names_that_do_not_exist_are_found() -> None:
    assert sum(bool(_KEY.search(text)) for text in TEXTS["advice/rules.py"]) > 30
    assert _find_unknown_keys("a larger train.micro_batches, data.pack; torch.data.x") == ["train.micro_batches"]
    assert _find_unknown_commands("shardway stop --now; shardway profiles my.toml; shardway stop --never") == [
        "shardway profiles my.toml",
        "shardway stop --never",
    ]
    assert _find_unknown_commands("(shardway data prepare), shardway data prepared") == ["shardway data prepared"]


def test_every_rule_has_a_scenario_that_it_is_right_for() -> None:
    drawn = {rule for scenario in scenarios.SCENARIOS for rule in scenario.right}
    assert drawn == {rule.name for rule in ADVICE_RULES}


def test_a_rule_gives_advice_under_its_own_name() -> None:
    """By this name other rules hide it."""
    tree = ast.parse((FOLDER / "advice/rules.py").read_text(encoding="utf-8"))
    checked = 0
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list):
        (call,) = function.decorator_list
        assert isinstance(call, ast.Call)
        given = [
            node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Advice"
        ]
        assert {ast.unparse(node.args[0]) for node in given} == {ast.unparse(call.args[0])}
        checked += 1
    assert checked == len(ADVICE_RULES)
