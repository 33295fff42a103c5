"""`shardway submit --serve`: from a server's name and a model to the program of a job, its files, and its problems.

Invariants:
- What the model lacks is named before the queue, as for a run.
- An option of the server that this submission sets itself is refused behind `--`, and never overrides it silently.
- The files hold no key: the job makes it.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

from shardway.errors import Problem, UserError
from shardway.launch.hosts.base import Host
from shardway.launch.job import Program
from shardway.launch.serving.servers import InferenceServer, ServedModel
from shardway.launch.submission.job_request import JobRequest
from shardway.plugins import is_registered, list_names, make_plugin
from shardway.prefetch.cache import find_hub_name
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.rundir.names import find_steps, step_name
from shardway.runfile.load import DEFAULT, LoadedRunFile
from shardway.sites.schema import SiteProfile

START_S = 3600.0
"""A server that is not ready by then is ended: the largest models take some 30 minutes to load and compile."""
GRACE_S = 20.0

FLAG = "--serve"


@dataclass(frozen=True)
class ServeOptions:
    """What the verb was given. `port` 0: a free one; `tp` 0: as many as divide the model; `name` "": that of the
    model; `expose`: the server listens on all interfaces of its node."""

    server: str
    model: str
    port: int = 0
    tp: int = 0
    name: str = ""
    expose: bool = False


@dataclass
class Serving:
    """A planned server. `path`: the model on the host, a folder or a hub's name; `export`: the command that writes that
    folder, empty for none; `config`: the model's, empty where it is not known; `repos`: folders that containers
    mount."""

    options: ServeOptions
    server: InferenceServer | None = None
    path: str = ""
    export: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    repos: tuple[Path, ...] = ()
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tp: int = 1

    def add(self, what: str, allowed: str = "", remedy: str = "", where: str = FLAG) -> None:
        """One more problem."""
        self.problems.append(Problem(where, what, "command line", allowed, remedy))


def program_of(attempt: Attempt) -> Program:
    """The program of a job that serves; its words are below the run directory, in which it starts."""
    folder = PurePosixPath(attempt.path.relative_to(attempt.run_path))
    words = (str(folder / attempt.serve_program.name), str(folder / attempt.serve_request.name))
    return Program(words, serves=True)


# --- the server and its model


def find_served(options: ServeOptions, loaded: LoadedRunFile, profile: SiteProfile, host: Host, python: str) -> Serving:
    """The server by its name, and the model: a run or one of its checkpoints, a folder, or a name of the hub. `python`:
    the interpreter that exports a checkpoint."""
    found = Serving(options)
    if is_registered("inference_servers", options.server):
        found.server = make_plugin("inference_servers", options.server)
    else:
        known = ", ".join(list_names("inference_servers"))
        found.add(f'"{options.server}" is no inference server', known, "another package can add one: docs/extending.md")
    if not options.model:
        found.add("no model is named", "a name of the hub, a folder, a run directory or one checkpoint of it")
        return found
    in_image = bool(loaded.values.site.image) and loaded.values.site.container != "none"
    name = find_hub_name(options.model)
    place = None
    if name is None:
        try:
            place = host.expand(options.model)
        except UserError as error:
            found.add(str(error).splitlines()[0].removesuffix("."))
            return found
        if _find_checkpoint(found, Path(place), host, python, in_image=in_image):
            return found
    from shardway.launch.submission.hub_files import find_hub_files

    found.path = str(place or options.model)
    if place is not None and not host.run(("test", "-d", str(place))).ok:
        where = f" on {host.name}" if host.name else ""
        found.add(f"there is no folder {place}{where}", remedy="correct the path")
        return found
    hub = find_hub_files(loaded.with_value("model.hf", found.path, FLAG), profile, host, in_image=in_image)
    found.problems += [replace(problem, where=FLAG, origin="command line") for problem in hub.problems]
    found.warnings += hub.warnings
    if hub.folder is not None:
        found.path, found.repos = str(hub.folder), hub.repos or (hub.folder,)
    elif place is not None:
        found.repos = (Path(place),)
    if hub.folder is not None or place is not None:
        found.config = _read_config(host, PurePosixPath(found.path))
    return found


def _find_checkpoint(found: Serving, place: Path, host: Host, python: str, *, in_image: bool) -> bool:
    """Whether the place is a run or a checkpoint; the job exports it into the run's `exports` unless that is done."""
    steps = find_steps([place.name])
    run = place.parents[1] if steps and len(place.parents) > 1 else place
    listed, recorded = host.run_many(
        [("ls", str(RunDir(run).checkpoints)), ("cat", str(RunDir(run).resolved_path))], timeout_s=30.0
    )
    if not (recorded.ok or (listed.ok and find_steps(listed.out.splitlines()))):
        return False
    there = find_steps(listed.out.splitlines()) if listed.ok else []
    if not there or (steps and steps[0] not in there):
        had = ", ".join(map(str, there[-5:])) or "none"
        what = f"{run} has no complete checkpoint" + (f" of step {steps[0]}" if steps else "")
        found.add(what, f"steps {had}" if there else "", "train it further, or name another run")
        return True
    step = steps[0] if steps else there[-1]
    folder = RunDir(run).exports / step_name(step)
    found.path, found.repos = str(folder), (folder.parent,)
    found.config = _read_config(host, PurePosixPath(folder))
    if found.config:
        return True
    export = (python, "-m", "shardway", "checkpoint", "export", str(run), "{folder}", "--step", str(step))
    merge = ("--merge",) if re.search(r'^adapter = "lora"', recorded.out, re.MULTILINE) else ()
    # A server turns text into tokens itself, with files beside the weights; those of model.hf are exported in any case.
    own = not re.search(r'^hf = "[^"]', recorded.out, re.MULTILINE)
    found.export = (*export, *merge, *(("--tokenizer",) if own else ()))
    if in_image:
        words = shlex.join(("shardway", "checkpoint", "export", str(run), str(folder), "--step", str(step)))
        remedy = f"`{words}`, then submit this again"
        found.add(f"{run} is a run, and the job would have to export it in a container", remedy=remedy)
    return True


def _read_config(host: Host, folder: PurePosixPath) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(host.read_files([path]).get(path, ""))
    except (ValueError, RecursionError):
        return {}
    inner = config.get("text_config") if isinstance(config, dict) else None
    return inner if isinstance(inner, dict) else config if isinstance(config, dict) else {}


# --- the degree of tensor parallelism


def choose_degree(available: int, config: dict[str, Any]) -> tuple[int, str]:
    """The largest degree up to `available` that splits the attention heads evenly, and the key and value heads evenly
    or copies them evenly, as vLLM and SGLang require; and why it is less, "" where it is not."""
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        return available, ""
    kv = config.get("num_key_value_heads")
    kv = kv if isinstance(kv, int) and kv > 0 else heads
    degree = next(d for d in range(available, 0, -1) if heads % d == 0 and (kv % d == 0 or d % kv == 0))
    if degree == available:
        return degree, ""
    return degree, f"{heads} heads and {kv} of keys and values do not split over {available} accelerators"


# --- the files of the job


def plan_server(found: Serving, request: JobRequest, attempt: Attempt, words: tuple[str, ...]) -> dict[Path, str]:
    """The files of the attempt's folder, for a job with this shape; `words`: options of the server behind `--`."""
    options, server = found.options, found.server
    if request.section.nodes > 1:
        found.add(f"{request.section.nodes} nodes, and a server runs on one", "1", "leave site.nodes out", "site.nodes")
    if request.loaded.origins["site.launcher"] != DEFAULT and request.section.launcher != "auto":
        found.add("a server is one process, which Shardway starts itself", remedy="leave it out", where="site.launcher")
    if options.port and not 1024 <= options.port <= 65535:
        found.add(f"{options.port} is no port for a user's program", "1024 to 65535", where="--port")
    if server is None:
        return {}
    for word in words:
        name = word.partition("=")[0]
        if name in server.own_options:
            instead = server.own_options[name]
            remedy = f"name it before `--`: {instead}" if instead.startswith("--") else "leave it out"
            found.add(f"{name} is set by Shardway for {options.server}", remedy=remedy, where="behind `--`")
    if options.expose and not server.checks_keys:
        what = f"{options.server} checks no key, so every user of the cluster could use it"
        found.add(what, remedy="leave --expose out, and use the tunnel that is printed", where="--expose")
    if options.name and server.request_name(ServedModel("path", "name")) != "name":
        found.add(f"{options.server} calls a model by its path", remedy="leave it out", where="--model-name")
    available = max(1, request.shape.accelerators_per_node)
    found.tp, why = choose_degree(available, found.config)
    if not server.splits:
        found.tp, why = 1, f"{options.server} knows no tensor parallelism" if available > 1 else ""
    if options.tp:
        _check_degree(found, options.tp, available, server)
        found.tp = options.tp
    elif why:
        found.warnings.append(f"tensor parallel {found.tp} of {available} accelerators: {why}")
    name = options.name or (options.model if find_hub_name(options.model) else PurePosixPath(options.model).name)
    on_cpu = request.shape.accelerators_per_node == 0
    model = ServedModel(found.path, name, found.tp, on_cpu, words)
    spec = {
        "format": 1,
        "server": options.server,
        "path": found.path,
        "request_name": server.request_name(model),
        "tp": found.tp,
        "words": server.words(model),
        "environment": server.environment(model),
        "drops": ["MASTER_ADDR", "MASTER_PORT"],
        "key_variable": server.key_variable,
        "key_config": server.key_config,
        "host": "0.0.0.0" if options.expose else "127.0.0.1",
        "port": options.port,
        "health": server.health,
        "export": found.export,
        "start_s": START_S,
        "grace_s": GRACE_S,
        "serving": str(attempt.serving_path),
        "api_key": str(attempt.api_key),
        "server_key": str(attempt.server_key),
        "log": str(attempt.server_log),
        "export_log": str(attempt.export_log),
        "result": str(attempt.result_path),
        "stop": str(RunDir(attempt.run_path).stop_path),
    }
    watcher = (files("shardway.launch.serving") / "watcher.py").read_text(encoding="utf-8")
    return {attempt.serve_program: watcher, attempt.serve_request: json.dumps(spec, indent=1) + "\n"}


def _check_degree(found: Serving, degree: int, available: int, server: InferenceServer) -> None:
    if degree > 1 and not server.splits:
        found.add(f"{found.options.server} knows no tensor parallelism", "1", where="--tp")
    elif degree > available and available > 1:
        found.add(f"{degree} ranks on a node with {available} accelerators", f"at most {available}", where="--tp")
    elif choose_degree(degree, found.config)[0] != degree:
        why = choose_degree(degree, found.config)[1].replace("accelerators", "ranks")
        fitting = [d for d in range(1, max(available, degree) + 1) if not choose_degree(d, found.config)[1]]
        found.add(f"{degree}: {why}", ", ".join(map(str, fitting)), where="--tp")
