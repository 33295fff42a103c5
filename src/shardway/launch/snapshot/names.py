"""What a name says of a file: a secret, a cache, source code.

Invariant: only names decide; nothing is opened. This module must not touch a disk.
"""

from __future__ import annotations

import re

_CODE = frozenset((".py", ".pyi", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".js", ".ts"))
_SOURCE = _CODE | frozenset(
    (
        *(".toml", ".yaml", ".yml", ".json", ".cfg", ".ini", ".conf", ".txt", ".md", ".rst", ".sh", ".bash", ".ipynb"),
        *(".cxx", ".hip", ".jinja", ".j2", ".sbatch", ".slurm", ".pbs", ".def", ".patch", ".gin", ".proto", ".sql"),
    )
)
_SOURCE_NAMES = frozenset(("Makefile", "Dockerfile", "Containerfile", "LICENSE", "README"))
_CACHES = frozenset(("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".ipynb_checkpoints"))

_SECRET_NAME = re.compile(
    r"\.env(\..+)?|.+\.(pem|p12|pfx|kdbx)|id_\w+|\.netrc|\.pypirc|\.pgpass|\.git-credentials|credentials?(\..*)?"
    r"|\.?secrets?(\..*)?",
    re.IGNORECASE,
)
# As the last word of a name: "hf_token.txt" is one, "token-counts.txt" and "train_tokens.txt" are none.
_SECRET_WORD = re.compile(r"(^|[._\- ])(api[._-]?key|token|credentials?)(\.[a-z0-9]+)?$", re.IGNORECASE)
_EXAMPLE = re.compile(r"\.(example|sample|template|dist)$", re.IGNORECASE)
_PLAIN_TOKEN = frozenset((".bin", ".npy", ".npz", ".pt", ".safetensors", ".idx", ".md"))
"""Endings with which "token" means text for a model."""


def is_secret(name: str) -> bool:
    """Whether a file's name says that it holds a key, a password or a token.

    `tokenizer.json`, `tokens.bin` and code about tokens are none; `.env.example` is none.
    """
    ending = _ending(name)
    if ending in _CODE or _EXAMPLE.search(name):
        return False
    return bool(_SECRET_NAME.fullmatch(name) or (ending not in _PLAIN_TOKEN and _SECRET_WORD.search(name)))


def is_cache(name: str) -> bool:
    """Whether a file or folder is made again by whoever needs it; a snapshot does not even mention it."""
    return name in _CACHES or name.endswith((".pyc", ".pyo"))


def is_source(name: str) -> bool:
    """Whether a file's name says that people wrote it."""
    return _ending(name) in _SOURCE or name in _SOURCE_NAMES or name.startswith("Dockerfile.")


def _ending(name: str) -> str:
    stem, dot, ending = name.rpartition(".")
    return f".{ending}".lower() if dot and stem else ""
