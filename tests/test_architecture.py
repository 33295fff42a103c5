"""The rules of the house, read from the source: who imports whom, who alone may do what, how large things grow."""

from __future__ import annotations

import ast
import io
import logging
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

from test_safety import REMOVERS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shardway"


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    calls: tuple[tuple[ast.Call, str], ...]
    """Each call with the dotted name that is called: "dist.new_group"."""

    def is_in(self, *rooms: str) -> bool:
        """Whether it is one of these files or in one of these folders ("ranks/", "parallel/mesh.py")."""
        return any(self.name.startswith(room) for room in rooms)

    def at(self, node: ast.AST) -> str:
        """Where something stands."""
        return f"{self.name}:{getattr(node, 'lineno', 0)}"


def _read(path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = tuple(ast.walk(tree))
    calls = tuple((node, ast.unparse(node.func)) for node in nodes if isinstance(node, ast.Call))
    return Module(path.relative_to(SOURCE).as_posix(), text, tree, nodes, calls)


@cache
def modules() -> tuple[Module, ...]:
    """Every source file. Read when a test asks, not by whoever imports this module: it takes seconds."""
    return tuple(_read(path) for path in sorted(SOURCE.rglob("*.py")))


def outside(*rooms: str) -> list[Module]:
    """Every module that is not in these rooms."""
    return [module for module in modules() if not module.is_in(*rooms)]


def find(among: Sequence[Module], breaks: Callable[[ast.AST], bool]) -> list[str]:
    """Where something stands that breaks a rule."""
    return [module.at(node) for module in among for node in module.nodes if breaks(node)]


def find_calls(among: Sequence[Module], callee: str) -> list[str]:
    """Where something is called whose dotted name matches."""
    return [module.at(node) for module in among for node, name in module.calls if re.fullmatch(callee, name)]


def strings(module: Module) -> Iterator[ast.Constant]:
    """Text constants that are no docstrings."""
    docs = {
        id(node.value) for node in module.nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


# --- who imports whom


def test_the_import_order_holds(capsys: pytest.CaptureFixture[str]) -> None:
    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    disabled = {each: each.disabled for each in known}
    broken = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    for each, before in disabled.items():
        each.disabled = before  # it sets up logging as if this process were its own
    assert not broken, capsys.readouterr().out


def test_every_room_has_its_place_in_the_import_order() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    placed = {name.strip() for layer in layers for name in re.split(r"[|:]", layer)}
    rooms = {f"shardway.{module.name.split('/')[0].removesuffix('.py')}" for module in modules()}
    assert placed == rooms - {"shardway.__init__", "shardway.__main__"}


# --- who alone may do what

LAUNCHER_VARIABLE = re.compile(
    r"(SLURM|PBS|OMPI|PMI|PMIX|PALS|TORCHELASTIC)_[A-Z_]+|MPI_LOCAL\w+|MASTER_(ADDR|PORT)"
    r"|(LOCAL_|GROUP_)?RANK|(LOCAL_|GROUP_)?WORLD_SIZE"
)


def test_only_places_asks_for_a_home() -> None:
    """An account may have none, which Python's own functions end in an error for, or in a folder called `~`."""
    assert not find_calls(outside("places.py"), r".*\.expanduser|(.*\.)?Path\.home")


def test_only_ranks_reads_what_launchers_say() -> None:
    found = [
        module.at(node)
        for module in outside("ranks/", "launch/", "inherited.py")  # job scripts set and name them, and drop them
        for node in strings(module)
        if LAUNCHER_VARIABLE.fullmatch(str(node.value))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("callee", "room"),
    [
        (r"(.*\.)?new_group", "parallel/mesh.py"),
        (r"(.*\.)?new_subgroups\w*", "parallel/mesh.py"),
        (r"(.*\.)?split_group", "parallel/mesh.py"),
        (r"(.*\.)?init_device_mesh", "parallel/mesh.py"),
        (r"(.*\.)?DeviceMesh(\..*)?", "parallel/mesh.py"),
        (r"(.*\.)?init_process_group", "ranks/start.py"),
        (r"(.*\.)?destroy_process_group", "ranks/start.py"),
        (r"torch\.save|(dcp|checkpoint)\.(async_)?save|save_file|save_model|save_pretrained", "checkpoint/"),
        (r"(.*\.)?(FileSystemWriter|write_tensors)", "checkpoint/"),
        (r".*engine\.(save|load)_checkpoint", "checkpoint/"),
        (r"(.*\.)?deepspeed\.initialize", "train/engines/deepspeed.py"),
        (r"(.*\.)?(EventWriter|WriterLock)", "rundir/"),
        (r"fcntl\.\w+", "rundir/|data/stage.py|prefetch/hub.py"),  # one writer of a run, of data on a disk, of a blob
        # the watcher, and what calls a function, are programs of their own in a job
        (
            r"print|(typer|click)\.(echo|secho)|sys\.std(out|err)\.write",
            "cli/|launch/serving/watcher.py|launch/calls/program.py",
        ),
    ],
)
def test_only_one_room_calls(callee: str, room: str) -> None:
    assert find_calls(outside(*room.split("|")), callee) == []


def test_only_the_command_line_ends_the_process() -> None:
    # A loader's worker is a process of its own, whose parent is gone when it ends itself; and a rank of a script that
    # owns its loop may not wait for peers that are gone, and a verb ends last of all. A thread of the sampler may hang
    # in a driver.
    others = outside("cli/", "data/workers.py", "ranks/stop.py", "ranks/outputs.py", "telemetry/sampler.py")
    programs = ("launch/serving/watcher.py", "launch/calls/program.py")  # of their own in a job
    others = [module for module in others if module.name not in programs]
    assert find_calls(others, r"(sys|os)\._?exit|exit|quit|SystemExit|(typer|click)\.Exit") == []
    assert find(others, lambda node: isinstance(node, ast.Raise) and "SystemExit" in ast.unparse(node)) == []


FILES = re.compile(
    r"status\.json|resolved\.toml|writer\.lock|report\.html|\.jsonl|manifest\.json|^step-|\.partial\b|attempt_\d|std\w*\.log"
)
FOLDERS = {"events", "checkpoints", "attempts", "telemetry", "traces", "logs", "stop", "run.toml"}


def names_in_a_run_directory(module: Module) -> list[str]:
    """File names anywhere in a text; names that are words as well where they are joined to a path."""
    joined = [node.right for node in module.nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
    parts = [node for node in joined if isinstance(node, ast.Constant) and node.value in FOLDERS]
    files = [node for node in strings(module) if FILES.search(str(node.value))]
    return [f"{module.at(node)} {node.value!r}" for node in [*parts, *files]]


def test_only_rundir_knows_names_in_a_run_directory() -> None:
    """But for the manifest, which stands inside a checkpoint, and lines of JSON, which are a format of data too."""
    others = outside("rundir/", "checkpoint/file_format.py")
    found = [name for module in others for name in names_in_a_run_directory(module)]
    assert [
        name
        for name in found
        if not (name.startswith(("data/", "infer/", "cli/data.py", "cli/generate.py")) and ".jsonl" in name)
    ] == []


def test_no_module_reads_the_environment_at_import() -> None:
    """A value that is frozen at import is a setting that no run file shows."""
    top = [
        (module, statement)
        for module in modules()
        for statement in module.tree.body
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
    ]
    found = [
        module.at(node)
        for module, statement in top
        for node in ast.walk(statement)
        if re.fullmatch(r"os\.(environ|getenv).*", ast.unparse(node) if isinstance(node, ast.expr) else "")
    ]
    assert found == []


# --- how it is written


def functions() -> list[tuple[Module, ast.FunctionDef]]:
    return [(module, node) for module in modules() for node in module.nodes if isinstance(node, ast.FunctionDef)]


def test_every_module_says_what_it_is_for() -> None:
    """And what holds in it always, unless it only hands on the names of others."""
    docs = {module.name: ast.get_docstring(module.tree) or "" for module in modules()}
    assert [name for name, doc in docs.items() if not doc] == []
    lasting = [
        module.name for module in modules() if "Invariant" not in docs[module.name] and len(module.tree.body) > 3
    ]
    assert lasting == []


def test_every_class_has_a_name_of_its_own() -> None:
    """A search for a name finds one class."""
    where: dict[str, list[str]] = {}
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(module.at(node))
    assert {name: places for name, places in where.items() if len(places) > 1} == {}


def test_functions_describe_and_report() -> None:
    """Software neither tells nor says."""
    found = [f"{module.at(node)} {node.name}" for module, node in functions()]
    assert [
        name for name in found if re.search(r" _?(tell|say|take_up)(_|$)|[ _](told|said|wish(es)?|blame)(_|$)", name)
    ] == []


FORBIDDEN = re.compile(
    r"(?<!\buser )(?<!\busers )(?<!\bperson )(?<!\bpeople )\b(who|whom)\b|\b(whoever|whosoever|nobody|somebody"
    r"|told|tells|telling|lets? itself|wish(es|ed)?|blam(e|es|ed|ing)|crews?|lookouts?)\b",
    re.IGNORECASE,
)
"""Software is "it": it reports and does not tell, it requests and does not wish, it causes and is not blamed."""

ABOUT_PERSONS = {
    "refusals.py": ("who may do what there", "who may write it"),  # accounts in the permissions of a file
    "rundir/events.py": ("who may read it",),
    "rundir/lease.py": ("who",),  # a key of a stored file
    "ranks/doctor/checks.py": ("see who: nvidia-smi",),  # the users of a GPU
}
"""Where such a word is right: the file, and the piece of text around it."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each comment, docstring and string of a Python file (without what f-strings put in), or each
    line of any other file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def list_forbidden_words(root: Path) -> list[str]:
    """File, line and surroundings of each forbidden word: `python tests/test_architecture.py` prints them."""
    found = []
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml", ".sh")):
        if not FORBIDDEN.search(re.sub(r"\\[nt]", "  ", path.read_text(encoding="utf-8"))):
            continue  # whatever stands in it; to take it apart takes long
        name = path.relative_to(root).as_posix()
        for line, text in texts(path):
            allowed = re.sub(r"\{\w+\}|\?P<\w+>", "", text)  # names of values
            for piece in ABOUT_PERSONS.get(name, ()):
                allowed = allowed.replace(piece, "")
            for match in FORBIDDEN.finditer(allowed):
                around = " ".join(allowed[max(0, match.start() - 50) : match.end() + 40].split())
                found.append(f"{name}:{line} {match[0]}: {around}")
    return found


def test_software_is_it() -> None:
    assert list_forbidden_words(SOURCE) == []


def test_such_a_word_is_found_wherever_it_stands(tmp_path: Path) -> None:
    texts = ("# nobody", '"""It tells."""', 'x = "a\\nwho"', 'x = f"{y}\\twho"', "whose, blame = who, 1")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(f"{text}\n")
    (tmp_path / "5.sh").write_text("say() { echo told; }\n")
    found = [line.partition(":")[0] for line in list_forbidden_words(tmp_path)]
    assert found == ["0.py", "1.py", "2.py", "3.py", "5.sh"]


def test_words_about_persons_are_still_there() -> None:
    missing = [
        f"{name}: {piece}"
        for name, pieces in ABOUT_PERSONS.items()
        for piece in pieces
        if not any(piece in text for _, text in texts(SOURCE / name))
    ]
    assert missing == []


def test_nothing_is_asserted() -> None:
    """`python -O` drops it, and a user's mistake would end in a traceback."""
    assert find(modules(), lambda node: isinstance(node, ast.Assert)) == []


def test_no_module_keeps_state() -> None:
    """Nothing at the top of a module that its functions change."""
    assert find(modules(), lambda node: isinstance(node, ast.Global)) == []


def test_public_functions_and_classes_are_documented() -> None:
    found = [
        f"{module.at(node)} {node.name}"
        for module in modules()
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not (module.name.startswith("resolve/rules/") and isinstance(node, ast.FunctionDef))  # named as sentences
    ]
    assert found == []


def test_the_scan_sees_what_it_should() -> None:
    """The rules above hold of something: the one room does what no other may."""
    by_name = {module.name: module for module in modules()}
    assert find_calls([by_name["ranks/start.py"]], "dist.init_process_group")
    assert find_calls([by_name["parallel/mesh.py"]], "init_device_mesh")
    assert find_calls([by_name["checkpoint/writer.py"]], "dcp.save")
    assert find_calls([by_name["cli/main.py"]], "os._exit")
    assert find_calls([by_name["cli/config.py"]], "typer.echo")
    assert len(names_in_a_run_directory(by_name["rundir/directory.py"])) >= 10
    assert any(LAUNCHER_VARIABLE.fullmatch(str(node.value)) for node in strings(by_name["ranks/launcher.py"]))


def test_no_page_holds_the_marks_of_a_merge() -> None:
    marks = re.compile(r"^(<{7}|>{7})( |$)", re.MULTILINE)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.toml")]
    assert [page.name for page in pages if marks.search(page.read_text(encoding="utf-8"))] == []


if __name__ == "__main__":
    print("\n".join(list_forbidden_words(SOURCE)))


def test_who_removes_files_is_known() -> None:
    callee = r"(shutil\.)?rmtree|remove_folder|os\.(remove|unlink|rmdir|removedirs)|.*\.(unlink|rmdir)"
    assert {module.name for module in modules() if find_calls([module], callee)} == set(REMOVERS)
