"""Tasks of lm-evaluation-harness, where it is installed, on a model that Shardway has opened.

Invariants: the harness gets the opened model and its tokenizer as they are, so a run needs no export; what it computes
is its own. Nothing is fetched here; tasks fetch their data themselves, and local ones (`--task-path`) need no network.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardway.errors import JobError, UserError, list_some
from shardway.infer.model import OpenedModel


@dataclass(frozen=True)
class TaskScores:
    """Numbers of tasks by "task/metric", and standard errors of those that have one; `version`: of the harness."""

    results: dict[str, float]
    errors: dict[str, float]
    version: str
    seconds: float


def import_harness() -> ModuleType:
    """The package, with what runs a model of transformers. Raises UserError where it is not installed."""
    try:
        importlib.import_module("lm_eval.models.huggingface")
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise UserError(
            f"--task needs lm-evaluation-harness, which is not installed here ({error}).\n"
            '  To do: pip install "lm_eval[hf]", in this environment; or leave out --task: perplexity (--data) '
            "and multiple choice (--choices) need nothing more."
        ) from error


def find_tasks(names: Sequence[str], folder: Path | None) -> tuple[Any, list[str]]:
    """The harness's manager of tasks, with those of `folder`, and the tasks that these names mean. Raises UserError for
    an unknown one, and where the harness is not installed."""
    harness = import_harness()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=None if folder is None else str(folder))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        own = "" if folder is None else f" or in {folder}"
        raise UserError(
            f"--task: {list_some(unknown, 5)}: no such task in lm_eval {_find_version(harness)}{own}.\n"
            "  To do: `lm_eval ls tasks` lists them; --task-path names a folder of tasks of your own."
        )
    return manager, list(manager.match_tasks(list(names)))


def run_tasks(
    opened: OpenedModel, names: Sequence[str], *, folder: Path | None = None, limit: int | None = None, rows: int = 8
) -> TaskScores:
    """The scores of a model on tasks of the harness; `folder` holds tasks of one's own as YAML, `limit` is how many
    documents of each task are taken, `rows` how many stand in a pass. Raises UserError for an unknown task, JobError
    for what the harness raises."""
    started, harness = time.monotonic(), import_harness()
    if opened.tokenizer is None:
        raise UserError(
            f"{opened.name} has no tokenizer, and tasks are text.\n"
            '  To do: name one: --tokenizer FOLDER, a tokenizer.json, or "bytes".'
        )
    manager, known = find_tasks(names, folder)
    try:
        adapter = importlib.import_module("lm_eval.models.huggingface").HFLM(
            pretrained=opened.model,
            tokenizer=opened.tokenizer.as_library(),
            backend="causal",
            batch_size=rows,
            max_length=opened.positions,
        )
        found = harness.simple_evaluate(
            model=adapter, tasks=known, task_manager=manager, limit=limit, log_samples=False, bootstrap_iters=100
        )
    except UserError:
        raise
    except Exception as error:  # the harness and its tasks raise what they like
        raise JobError(
            f"lm_eval ended with {type(error).__name__}: {' '.join(str(error).split())}\n"
            "  To do: a task whose data are not in the cache of Hugging Face needs the network; else see whether "
            "`lm_eval` runs this task with another model."
        ) from error
    return TaskScores(*_read_results(found["results"]), _find_version(harness), time.monotonic() - started)


def _read_results(found: dict[str, dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Numbers by "task/metric" and their errors, of {"task": {"acc,none": 0.5, "acc_stderr,none": 0.1}}."""
    results, errors = dict[str, float](), dict[str, float]()
    for task, numbers in found.items():
        for key, value in numbers.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, bool) or not isinstance(value, int | float) or not kind:
                continue
            name = f"{task}/{metric.removesuffix('_stderr')}" + (f",{kind}" if kind != "none" else "")
            (errors if metric.endswith("_stderr") else results)[name] = float(value)
    return results, errors


def _find_version(harness: ModuleType) -> str:
    return str(getattr(harness, "__version__", "")) or importlib.import_module("importlib.metadata").version("lm_eval")
