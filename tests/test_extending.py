"""docs/extending.md: its code is that of the example packages, and its tables are what groups and contracts say."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from example_plugins import EXAMPLES
from page_tables import check_block, check_table
from shardway.plugins import GROUPS, PREFIX

PAGE = "extending.md"
SHOWN = {
    "lion, the kind": "shardway-lion/src/shardway_lion/__init__.py",
    "lion, the update": "shardway-lion/src/shardway_lion/lion.py",
    "sqlite text, the kind": "shardway-sqlite-text/src/shardway_sqlite_text/__init__.py",
    "sqlite tracker": "shardway-sqlite-tracker/src/shardway_sqlite_tracker/__init__.py",
}
CONTRACTS = {
    "contract of an optimizer": GROUPS["optimizers"].contract,
    "contract of a data source": GROUPS["data_sources"].contract,
    "an opened source": "shardway.data.sources.base:DataSource",
    "contract of a tracker": GROUPS["trackers"].contract,
    "contract of a model": GROUPS["models"].contract,
    "contract of an inference backend": GROUPS["inference_backends"].contract,
    "contract of an inference server": GROUPS["inference_servers"].contract,
    "an opened engine": "shardway.bench.inference.backends:OpenedEngine",
}


def test_the_groups(request: pytest.FixtureRequest) -> None:
    head = ("group", "adds", "named by", "contract", "Shardway's own")
    rows = [
        (
            f"`{PREFIX}{name}`",
            group.noun,
            f"`{group.key}`" if " " not in group.key else group.key,
            f"`{group.contract.replace(':', '.')}`" if group.contract else "a TOML file",
            ", ".join(f"`{own}`" for own in group.own),
        )
        for name, group in GROUPS.items()
    ]
    check_table(request, PAGE, "groups of plugins", [head, *rows])


@pytest.mark.parametrize("name", SHOWN)
def test_the_code_of_the_examples(request: pytest.FixtureRequest, name: str) -> None:
    code = (EXAMPLES / SHOWN[name]).read_text()
    check_block(request, PAGE, name, "python", _without_docstring(code))


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_contracts(request: pytest.FixtureRequest, name: str) -> None:
    check_table(request, PAGE, name, [("member", "meaning"), *_list_members(CONTRACTS[name])])


def _without_docstring(code: str) -> list[str]:
    """The lines of a module after its docstring."""
    end = ast.parse(code).body[0].end_lineno
    return "\n".join(code.splitlines()[end:]).strip().splitlines()


def _list_members(target: str) -> list[tuple[str, str]]:
    """Public members of a class in their order: how they are written, and what their docstring says."""
    module, _, name = target.partition(":")
    source = Path(inspect.getfile(importlib.import_module(module))).read_text()
    [found] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    rows = [(f"`{name}`", _join(ast.get_docstring(found) or ""))]
    for node, after in zip(found.body, [*found.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = f" = {ast.unparse(node.value)}" if node.value else ""
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            rows.append((f"`{node.target.id}{default}`", _join(str(said))))
        elif isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__len__"):
            names = ", ".join(each.arg for each in node.args.args if each.arg not in ("self", "cls"))
            is_property = any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
            rows.append(
                (f"`{node.name}`" if is_property else f"`{node.name}({names})`", _join(ast.get_docstring(node) or ""))
            )
    return rows


def _join(text: str) -> str:
    """A docstring in one line of a table."""
    return " ".join(text.split()).replace("|", "\\|")
