"""From the words of `shardway submit` to everything that a submission consists of, as one value.

Invariant: preparing writes nothing, here or on the site; what it gives is what would be written and submitted, and all
that is wrong with it has been told. This module must not submit.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardway.errors import Problem, UserError, check_no_problems
from shardway.launch.hosts.base import Host
from shardway.launch.job import SECRETS, Chain, Job, Program
from shardway.launch.job_script import render_job_script
from shardway.launch.snapshot import SnapshotPlan, plan_snapshot
from shardway.launch.submission.checks import numbers, places, words
from shardway.launch.submission.wish import Wish, build_job, shape_of, with_site_defaults
from shardway.resolve.build import resolve
from shardway.resolve.request import Request, machine_of_known, resolve_request
from shardway.resolve.resolved import Circumstances
from shardway.rundir.attempts import Attempt
from shardway.rundir.directory import RunDir
from shardway.runfile.load import DEFAULT, Loaded, load_run
from shardway.runfile.write import render_run, render_value
from shardway.sites.find import find_profile
from shardway.sites.load import flatten_profile, load_site
from shardway.sites.schema import SiteProfile

_NAMES = r"s/^\(export \)\{0,1\}\([A-Za-z_][A-Za-z0-9_]*\)=.*/\2/p"

OPEN_CHAIN = 100
"""Most attempts of a chain whose length nobody said; each link submits the next, so that none waits in vain."""


@dataclass(frozen=True)
class Order:
    """What the verb was told: a run file or a command, where, and how often.

    `site` is that of --on, `command` what stands after `--`. `max_attempts` 0: as many as the work needs.
    """

    request: Request
    site: str = ""
    command: tuple[str, ...] = ()
    until_done: bool = False
    max_attempts: int = 0
    here: Path = field(default_factory=Path.cwd)


@dataclass(frozen=True)
class Prepared:
    """A submission before it happens. `files` are those of the attempt's folder beside its script."""

    wish: Wish
    job: Job
    files: dict[Path, str]
    snapshot: SnapshotPlan | None
    warnings: tuple[str, ...]

    @property
    def script(self) -> str:
        """The job script."""
        return render_job_script(self.job)


@dataclass(frozen=True)
class Secrets:
    """Names, never values, of what a secrets file sets; `is_open`: people other than its owner can read it."""

    names: tuple[str, ...] = ()
    is_open: bool = False

    @property
    def warnings(self) -> tuple[str, ...]:
        """What its owner should know."""
        return (f"others can read {SECRETS}; close it: `chmod 600 {SECRETS}`",) if self.is_open else ()


def prepare(order: Order, host: Host, attempt: int | None = None) -> Prepared:
    """Everything of the next attempt (or of `attempt`). Raises UserError with every problem that can be known here."""
    loaded, profile = _load(order)
    run = Path(host.expand(str(_run_path(order, loaded))))
    number = attempt or _next_attempt(host, run)
    folder = RunDir(run).attempt(number)
    snapshot, notes = _plan_snapshot(order, host)
    secrets = read_secrets(host)
    wish = Wish(
        loaded=loaded,
        profile=profile,
        run=run,
        workdir=snapshot.start_folder(folder.code) if snapshot else _folder_without_code(order, host, run),
        program=read_program(order.command) if order.command else _train_program(folder.run_file, run),
        chain=_chain(order, profile, number),
        project=snapshot.root if snapshot and snapshot.links else None,
        token=os.urandom(3).hex(),
        secret_names=secrets.names,
        here=sys.prefix if not host.name and sys.prefix != sys.base_prefix else "",
    )
    problems = [*_list_problems(wish), *places.list_local_problems(wish, order.command, order.here)]
    check_no_problems(f"the job for {profile.name}", problems)
    if not order.command:
        _check_run(order, wish)
    files = {folder.order_path: render_order(replace(order, site=_site_word(loaded, order.here)))}
    if not order.command:
        loaded, copies = _carry_site(loaded, folder)
        files |= copies
        files[folder.run_file] = render_run(loaded.values, loaded.origins, _is_set(loaded))
    return Prepared(
        wish, build_job(wish, number), files, snapshot, (*notes, *secrets.warnings, *numbers.list_warnings(wish))
    )


def render_order(order: Order) -> str:
    """An order as the text of `order.json`, from which `shardway resume` makes the next one."""
    request = order.request
    table = {
        "format": 1,
        "run_file": str(request.run_file.absolute()) if request.run_file else "",
        "overrides": list(request.overrides),
        "site": order.site,
        "command": list(order.command),
        "until_done": order.until_done,
        "max_attempts": order.max_attempts,
        "here": str(order.here),
    }
    return json.dumps(table, indent=1) + "\n"


def parse_order(text: str, run: Path, run_file: Path | None) -> Order | None:
    """The order in such a text, for the same run directory; None where it is damaged. `run_file` holds all that the
    run file and the overrides said then."""
    try:
        table = json.loads(text)
        return Order(
            Request(run_file, () if run_file else tuple(table["overrides"]), run),
            site=str(table["site"]),
            command=tuple(map(str, table["command"])),
            until_done=bool(table["until_done"]),
            max_attempts=int(table["max_attempts"]),
            here=Path(table["here"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def read_secrets(host: Host) -> Secrets:
    """What the secrets file on the host sets, and whether others can read it. Its values never leave the host."""
    path = str(host.expand(SECRETS))
    named, mode = host.run_many([("sed", "-n", _NAMES, path), ("stat", "-c", "%a", path)])
    is_open = mode.ok and not mode.out.strip().endswith("00")
    return Secrets(tuple(dict.fromkeys(named.out.split())) if named.ok else (), is_open)


def read_program(command: tuple[str, ...]) -> Program:
    """What stands after `--` as a program: `python train.py --lr 3e-4`, `train.py ...`, `python -m x`, `./program`.

    Raises UserError for a launcher's own command, which the job script brings itself.
    """
    first, rest = os.path.basename(command[0]), command[1:]
    if first in ("torchrun", "srun", "mpirun", "mpiexec", "accelerate", "deepspeed"):
        raise UserError(
            f"the command begins with {first}, and the job script starts the ranks itself.\n"
            f"  To do: leave {first} and its options out; site.nodes, site.ranks_per_node and site.starter say them."
        )
    if first.startswith("python"):
        if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
            raise UserError(
                f"the command {' '.join(command)!r} names no script.\n"
                "  Allowed: python SCRIPT ARGUMENTS..., python -m MODULE ARGUMENTS..., or a program of its own."
            )
        return Program(rest)
    return Program(command) if first.endswith(".py") else Program(command, python=False)


def _load(order: Order) -> tuple[Loaded, SiteProfile]:
    loaded = load_run(order.request.run_file, order.request.overrides)
    if order.site:
        loaded = loaded.with_value("site.name", order.site, "--on")
    profile = load_site(loaded.values.site.name)
    return with_site_defaults(loaded, profile), profile


def _site_word(loaded: Loaded, here: Path) -> str:
    """The site as it is found again from any folder."""
    name = loaded.values.site.name
    is_shipped_or_own = find_profile(name).origin != "file"
    return name if is_shipped_or_own else str(here / Path(name).expanduser())


def _carry_site(loaded: Loaded, folder: Attempt) -> tuple[Loaded, dict[Path, str]]:
    """The run with a copy of its site's profile beside it where that is the person's own: in a container or on another
    host its file is not seen."""
    name = loaded.values.site.name
    if find_profile(name).origin == "shipped":
        return loaded, {}
    text = "".join(f"{key} = {render_value(value)}\n" for key, value in flatten_profile(name).items())
    return loaded.with_value("site.name", str(folder.site_file), f"copy of {name}"), {folder.site_file: text}


def _run_path(order: Order, loaded: Loaded) -> Path:
    """The run directory as the person named it: --dir, or root/name, the name by default that of the file or script."""
    if order.request.directory is not None:
        return order.request.directory
    run, name = loaded.values.run, loaded.values.run.name
    if name == "auto":
        named = [word for word in order.command if word.endswith(".py")] or list(order.command[:1])
        name = Path(named[0]).stem if named else (loaded.path.stem if loaded.path else "default")
    return Path(run.root) / name


def _next_attempt(host: Host, run: Path) -> int:
    done = host.run(("ls", "-1", str(RunDir(run).attempts_folder)))
    return max((int(name) for name in done.out.split() if name.isdecimal()), default=0) + 1


def _plan_snapshot(order: Order, host: Host) -> tuple[SnapshotPlan | None, tuple[str, ...]]:
    """The snapshot, and what to tell of it. A run file alone brings no code: where no snapshot can be made, it goes
    without one."""
    try:
        plan = plan_snapshot(order.here, links=not host.name)
    except UserError as error:
        if order.command:
            raise
        return None, (f"no snapshot of the code was made: {str(error).splitlines()[0]}",)
    if not order.command and plan.revision is None:
        return None, ()
    return plan, plan.notes


def _folder_without_code(order: Order, host: Host, run: Path) -> Path:
    return run if host.name else order.here


def _train_program(run_file: Path, run: Path) -> Program:
    return Program(("-m", "shardway", "train", str(run_file), "--dir", str(run)), meets_by_itself=True)


def _chain(order: Order, profile: SiteProfile, number: int) -> Chain:
    if not order.until_done:
        return Chain(max_attempts=number)
    ahead = profile.request.submit_from_nodes is False
    most = order.max_attempts or (min(profile.request.max_jobs or 5, 5) if ahead else OPEN_CHAIN)
    return Chain(until_done=True, max_attempts=number + most - 1, ahead=ahead)


def _list_problems(wish: Wish) -> Iterator[Problem]:
    for check in (*numbers.CHECKS, *words.CHECKS):
        yield from check(wish)


def _check_run(order: Order, wish: Wish) -> None:
    """The rules of the run file itself, for the ranks and the machine that the job will have."""
    values, profile, shape = wish.loaded.values, wish.profile, shape_of(wish)
    if values.parallel.layout == "auto" or values.model.hf:
        _check_planned(order, wish)
        return
    unknown = shape.ranks_per_node if values.run.device == "cuda" else 0
    accelerators = profile.node.accelerators_per_node
    circumstances = Circumstances(
        ranks=shape.ranks,
        ranks_per_node=shape.ranks_per_node,
        usable_cores=profile.node.cores or os.cpu_count() or 1,
        accelerators=unknown if accelerators is None else accelerators,
        site=profile.name,
        own_model=order.request.own_model,
    )
    resolve(wish.loaded, circumstances)  # the planner, which is slow to import, would only pick a micro-batch


def _check_planned(order: Order, wish: Wish) -> None:
    """The same where the layout is the planner's, or a checkpoint's config has to be read."""
    shape = shape_of(wish)
    machine = machine_of_known(wish.profile) if wish.loaded.values.run.device != "cpu" else None
    site = [f"site.name={order.site}"] if order.site else []
    request = replace(order.request, overrides=(*order.request.overrides, *site))
    resolve_request(request, shape.ranks, shape.ranks_per_node, planned=machine)


def _is_set(loaded: Loaded) -> Callable[[str], bool]:
    """Whether a key goes into the run file of an attempt: what nobody set is settled again where the ranks are."""
    return lambda dotted: loaded.origins[dotted] != DEFAULT
