"""Whether several ranks would each do all of the work of a program that knows nothing of ranks.

The program's own source is read: its script and the modules beside it that it imports, and what a shell starts.

Invariant: it only warns, and says what was looked for and where; a program whose source is not here is believed. This
module must not import what it reads.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shardway.launch.submission.checks.code import Code
from shardway.launch.submission.command import CommandRead
from shardway.launch.submission.job_request import JobRequest, shape_of

_LIBRARIES = frozenset(
    (
        *("accelerate", "bagua", "colossalai", "composer", "deepspeed", "fairscale", "fairseq", "fairseq2", "fastai"),
        *("horovod", "ignite", "lightning", "lightning_fabric", "megatron", "mpi4py", "nemo", "pytorch_lightning"),
        *("ray", "shardway", "torchtitan", "torchtune"),
    )
)
"""Libraries that find ranks by themselves."""
_SIGN = re.compile(
    r"torch\.distributed|torch\s+import\s+distributed|init_process_group|DistributedDataParallel|fully_shard"
    r"|\b(?:LOCAL_)?RANK\b|\bWORLD_SIZE\b|SLURM_PROCID|SLURM_LOCALID|OMPI_COMM_WORLD|\bPMI_RANK\b"
    r"|transformers\.\w*Trainer\b|jax\.distributed|tf\.distribute|tensorflow\.distribute"
)
_TRAINERS = ("transformers.", "trl.")
"""Modules whose trainers find ranks by themselves, and whose other parts do not."""
_LOOKED_FOR = (
    "torch.distributed, accelerate, lightning, deepspeed, horovod, mpi4py and their like, transformers.Trainer, RANK, "
    "WORLD_SIZE"
)
_MOST_FILES = 200
_MOST_BYTES = 1 << 20


def list_copies(wish: JobRequest, code: Code) -> Iterator[str]:
    """A sentence where several ranks will each run the same program and its source shows no sign of ranks."""
    shape, read = shape_of(wish), wish.read
    if read is None or shape.ranks < 2 or not code.is_there:
        return
    scripts = _list_scripts(read, code.here)
    if not scripts or any(_SIGN.search(text) for _, text in read.texts):
        return
    files = _read_with_imports(scripts, code)
    if not files or any(map(_shows_ranks, files.values())):
        return
    name = scripts[0]
    more = f" and the {len(files) - 1} files that it imports" if len(files) > 1 else ""
    yield (
        f"{shape.ranks} ranks will each run all of {name}: nothing in it{more} looks for other ranks "
        f"({_LOOKED_FOR}), so they would train {shape.ranks} copies and write the same files; "
        'where that is not meant: "site.nodes=1 site.ranks_per_node=1"'
    )


def _list_scripts(read: CommandRead, here: Path) -> list[Path]:
    """The script of a command, or those that a shell starts, as far as they are here."""
    module = read.module.replace(".", "/")
    named = [read.script] if read.script else []
    named += [f"{module}.py", f"{module}/__main__.py"] if module else []
    named += [word for _, text in read.texts for word in re.findall(r"[\w./-]+\.py\b", text)]
    return [Path(name) for name in named if (here / name).is_file()]


def _read_with_imports(scripts: list[Path], code: Code) -> dict[Path, str]:
    """The text of scripts and of the modules that they import from the folders around them."""
    files: dict[Path, str] = {}
    waiting = [code.here / script for script in scripts]
    while waiting and len(files) < _MOST_FILES:
        path = waiting.pop()
        if path in files:
            continue
        try:
            text = path.read_bytes()[:_MOST_BYTES].decode("utf-8", "replace")
        except OSError:
            continue
        files[path] = text
        places = (path.parent, *(code.here / script.parent for script in scripts), code.here)
        for name in _list_imports(text):
            waiting += _find_module(name, places)
    return files


def _list_imports(text: str) -> list[str]:
    """Dotted names that a source imports; what it imports from a module may be a module too."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
    return list(dict.fromkeys(filter(None, names)))


def _find_module(name: str, places: tuple[Path, ...]) -> list[Path]:
    parts = name.split(".")
    for place in dict.fromkeys(places):
        found = [
            path
            for count in range(1, len(parts) + 1)
            for stem in (place.joinpath(*parts[:count]),)
            for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")
            if path.is_file()
        ]
        if found:
            return found
    return []


def _shows_ranks(text: str) -> bool:
    names = _list_imports(text)
    return (
        bool(_SIGN.search(text))
        or any(name.split(".")[0] in _LIBRARIES or name.startswith("torch.distributed") for name in names)
        or any(name.startswith(_TRAINERS) and name.endswith("Trainer") for name in names)
    )
